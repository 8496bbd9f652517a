"""Transforms give the values of the processors of the same names in Hugging Face transformers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from decodax.sampling import build
from tests.sampling.oracle import BATCH, apply, close, random_histories, random_logits

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers.generation.logits_process")

EOS = [3, 7]
PROMPT = 9

# keyword arguments of `build`, and the processor that they ask for, given the histories
CASES: list[tuple[str, dict[str, Any], Callable[[Any], Any]]] = [
    ("temperature", dict(temperature=0.7), lambda ids: hf.TemperatureLogitsWarper(0.7)),
    ("top_k", dict(top_k=7), lambda ids: hf.TopKLogitsWarper(7)),
    ("top_k beyond the sorted limit", dict(top_k=150), lambda ids: hf.TopKLogitsWarper(150)),
    ("top_k beyond the vocabulary", dict(top_k=1000), lambda ids: hf.TopKLogitsWarper(1000)),
    ("top_k keeping more", dict(top_k=2, min_tokens_to_keep=6),
     lambda ids: hf.TopKLogitsWarper(2, min_tokens_to_keep=6)),
    ("top_p", dict(top_p=0.8), lambda ids: hf.TopPLogitsWarper(0.8)),
    ("top_p 0", dict(top_p=0.0), lambda ids: hf.TopPLogitsWarper(0.0)),
    ("top_p keeping more", dict(top_p=0.2, min_tokens_to_keep=5),
     lambda ids: hf.TopPLogitsWarper(0.2, min_tokens_to_keep=5)),
    ("min_p", dict(min_p=0.05), lambda ids: hf.MinPLogitsWarper(0.05)),
    ("min_p keeping more", dict(min_p=0.9, min_tokens_to_keep=4),
     lambda ids: hf.MinPLogitsWarper(0.9, min_tokens_to_keep=4)),
    ("typical_p", dict(typical_p=0.6), lambda ids: hf.TypicalLogitsWarper(0.6)),
    ("typical_p low", dict(typical_p=0.05), lambda ids: hf.TypicalLogitsWarper(0.05)),
    ("typical_p keeping more", dict(typical_p=0.05, min_tokens_to_keep=9),
     lambda ids: hf.TypicalLogitsWarper(0.05, min_tokens_to_keep=9)),
    ("epsilon", dict(epsilon_cutoff=0.02), lambda ids: hf.EpsilonLogitsWarper(0.02)),
    ("epsilon above all", dict(epsilon_cutoff=0.99), lambda ids: hf.EpsilonLogitsWarper(0.99)),
    ("eta", dict(eta_cutoff=0.05), lambda ids: hf.EtaLogitsWarper(0.05)),
    ("eta keeping more", dict(eta_cutoff=0.9, min_tokens_to_keep=3),
     lambda ids: hf.EtaLogitsWarper(0.9, min_tokens_to_keep=3)),
    ("top_h", dict(top_h=0.4), lambda ids: hf.TopHLogitsWarper(0.4)),
    ("top_h low", dict(top_h=0.01), lambda ids: hf.TopHLogitsWarper(0.01)),
    ("repetition", dict(repetition_penalty=1.3), lambda ids: hf.RepetitionPenaltyLogitsProcessor(1.3)),
    ("repetition as reward", dict(repetition_penalty=0.6), lambda ids: hf.RepetitionPenaltyLogitsProcessor(0.6)),
    ("encoder repetition", dict(encoder_repetition_penalty=1.7),
     lambda ids: hf.EncoderRepetitionPenaltyLogitsProcessor(1.7, ids[:, :PROMPT])),
    *[(f"no repeated {n}-gram", dict(no_repeat_ngram_size=n), lambda ids, n=n: hf.NoRepeatNGramLogitsProcessor(n))
      for n in (1, 2, 3, 30)],
    *[(f"no repeated {n}-gram of the prompt", dict(encoder_no_repeat_ngram_size=n),
       lambda ids, n=n: hf.EncoderNoRepeatNGramLogitsProcessor(n, ids[:, :PROMPT])) for n in (1, 2, 12)],
    ("suppress", dict(suppress_tokens=[1, 5, 40]), lambda ids: hf.SuppressTokensLogitsProcessor([1, 5, 40])),
    ("min length", dict(min_length=40), lambda ids: hf.MinLengthLogitsProcessor(40, EOS)),
    ("min length reached", dict(min_length=24), lambda ids: hf.MinLengthLogitsProcessor(24, EOS)),
    ("min new tokens", dict(min_new_tokens=16), lambda ids: hf.MinNewTokensLengthLogitsProcessor(PROMPT, 16, EOS)),
    ("min new tokens reached", dict(min_new_tokens=15),
     lambda ids: hf.MinNewTokensLengthLogitsProcessor(PROMPT, 15, EOS)),
    ("forced EOS", dict(forced_eos_token_id=EOS, max_length=25), lambda ids: hf.ForcedEOSTokenLogitsProcessor(25, EOS)),
    ("forced EOS later", dict(forced_eos_token_id=EOS, max_length=26),
     lambda ids: hf.ForcedEOSTokenLogitsProcessor(26, EOS)),
    ("forced EOS by new tokens", dict(forced_eos_token_id=3, max_new_tokens=16),
     lambda ids: hf.ForcedEOSTokenLogitsProcessor(25, 3)),
    ("decay", dict(exponential_decay_length_penalty=(10, 1.2)),
     lambda ids: hf.ExponentialDecayLengthPenalty((10, 1.2), EOS, PROMPT)),
    ("decay not begun", dict(exponential_decay_length_penalty=(15, 1.2)),
     lambda ids: hf.ExponentialDecayLengthPenalty((15, 1.2), EOS, PROMPT)),
]


@pytest.mark.parametrize("case", range(len(CASES)), ids=[case[0] for case in CASES])
def test_values_equal_those_of_transformers(case: int) -> None:
    name, arguments, processor = CASES[case]
    vocab = (50, 140, 300)[case % 3]
    chain = build(BATCH, eos=EOS, **{"do_sample": True, **arguments}).transforms
    (ours,) = chain if name == "temperature" else [t for t in chain if type(t).__name__ != "Temperature"]
    for seed in range(3):
        logits, ids = random_logits(seed, vocab), random_histories(seed, vocab)
        theirs = processor(torch.tensor(ids))(torch.tensor(ids), torch.tensor(logits)).numpy()
        close(apply(ours, logits, ids, PROMPT), theirs)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["sequence_bias", "bad_words_ids"])
def test_sequence_rules_equal_those_of_transformers(name: str, seed: int) -> None:
    logits, ids = random_logits(seed, 60), random_histories(seed, 60)
    tail = ids[0, -4:].tolist()
    last = lambda n, token: [*ids[0, -n:].tolist(), token]
    sequences = [[5], [8, 9], last(1, 4), last(3, 4), [*tail[:-1], 50, 4], last(4, 11), last(2, 5),
                 [*[1] * 30, 6], EOS[:1]]
    if name == "bad_words_ids":
        theirs = hf.NoBadWordsLogitsProcessor(sequences, EOS)
        ours = build(BATCH, eos=EOS, bad_words_ids=sequences).transforms[0]
    else:
        pairs = [[s, float(i) - 3.5] for i, s in enumerate(sequences)]
        theirs = hf.SequenceBiasLogitsProcessor(pairs)
        ours = build(BATCH, sequence_bias=pairs).transforms[0]
    expected = theirs(torch.tensor(ids), torch.tensor(logits)).numpy()
    close(apply(ours, logits, ids, PROMPT), expected)
    assert (expected[0] != logits[0]).sum() >= 3


@pytest.mark.parametrize(("prompt", "length", "bos"), [(9, 9, None), (9, 10, None), (1, 1, None), (1, 1, 2), (1, 2, 2)])
def test_tokens_at_the_beginning_as_in_transformers(prompt: int, length: int, bos: int | None) -> None:
    logits, ids = random_logits(0, 50), random_histories(0, 50, length)
    begin = prompt if prompt > 1 or bos is None else prompt + 1
    expected = torch.tensor(logits)
    if bos is not None:
        expected = hf.ForcedBOSTokenLogitsProcessor(bos)(torch.tensor(ids), expected)
    expected = hf.SuppressTokensAtBeginLogitsProcessor([4, 9], begin)(torch.tensor(ids), expected).numpy()
    ours = logits
    for transform in build(BATCH, begin_suppress_tokens=[4, 9], forced_bos_token_id=bos).transforms[:-1]:
        ours = apply(transform, ours, ids, prompt)
    close(ours, expected)


@pytest.mark.wide
def test_a_whole_chain_equals_transformers_list_in_its_order() -> None:
    logits, ids = random_logits(5, 200), random_histories(5, 200)
    settings = dict(sequence_bias=[[[4], 2.0]], repetition_penalty=1.2, no_repeat_ngram_size=2, bad_words_ids=[[6]],
                    min_new_tokens=30, suppress_tokens=[9], temperature=0.8, top_h=0.9, top_k=40, top_p=0.9, min_p=0.01,
                    typical_p=0.95, epsilon_cutoff=0.001, eta_cutoff=0.001)
    processors = [
        hf.SequenceBiasLogitsProcessor([[[4], 2.0]]), hf.RepetitionPenaltyLogitsProcessor(1.2),
        hf.NoRepeatNGramLogitsProcessor(2), hf.NoBadWordsLogitsProcessor([[6]], EOS),
        hf.MinNewTokensLengthLogitsProcessor(PROMPT, 30, EOS), hf.SuppressTokensLogitsProcessor([9]),
        hf.TemperatureLogitsWarper(0.8), hf.TopHLogitsWarper(0.9), hf.TopKLogitsWarper(40), hf.TopPLogitsWarper(0.9),
        hf.MinPLogitsWarper(0.01), hf.TypicalLogitsWarper(0.95),
        hf.EpsilonLogitsWarper(0.001), hf.EtaLogitsWarper(0.001)]
    ours, expected = logits, torch.tensor(logits)
    for transform, processor in zip(build(BATCH, eos=EOS, **settings).transforms, processors, strict=True):
        ours, expected = apply(transform, ours, ids, PROMPT), processor(torch.tensor(ids), expected)
        close(ours, expected.numpy())
    assert 1 < np.isfinite(ours).sum(1).min() < 100


def test_repetition_ignores_leading_tokens_as_transformers_does() -> None:
    from decodax.sampling import Repetition
    from tests.sampling.oracle import rows
    logits, ids = random_logits(1, 50), random_histories(1, 50)
    ignore = np.array([0, 20, 23])
    expected = hf.RepetitionPenaltyLogitsProcessor(1.5, torch.tensor(ignore))(torch.tensor(ids), torch.tensor(logits))
    ours = Repetition(rows(1.5), rows(ignore, np.int32), rows(-1, np.int32))
    close(apply(ours, logits, ids), expected.numpy())


def test_tokens_beyond_the_vocabulary_are_ignored() -> None:
    logits = random_logits(2, 20)
    ids = [[25, 3, 25, 3, 25]] * BATCH
    for settings in (dict(repetition_penalty=2.0), dict(no_repeat_ngram_size=1), dict(presence_penalty=1.0)):
        changed = apply(build(BATCH, **settings).transforms[0], logits, ids) != logits
        assert changed.sum(1).tolist() == [1] * BATCH and changed[:, 3].all()
