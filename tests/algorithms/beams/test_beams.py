"""Beam search against transformers, against enumeration, and with drafts against itself without them."""

import dataclasses
import functools
import itertools
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from scipy.stats import chisquare

import decodax as dx
from decodax.algorithms.beams import UID, BeamSearch
from decodax.algorithms.speculative import drafts
from decodax.engine.names import by_name
from decodax.io.saving import save_model
from tests.algorithms.beams.small import EOS, NEW, PROMPTS, SMALL, lm, log_probs, small
from tests.matrix import often


@functools.cache
def theirs(directory: Path) -> Any:
    save_model(directory, lm().model, lm().params)
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def beams_of(found: Any, row: int) -> list[int]:
    return [int(b) for b in found.findings["beam_indices"][row] if b >= 0]


def equal_to_transformers(directory: Path, **options: Any) -> int:
    """Compares tokens, beams and scores of each prompt, and returns how many texts ended by themselves."""
    ours, ended = dx.generate(lm(), PROMPTS, **by_name(options)), 0
    each = options.get("num_return_sequences", 1)
    for i, prompt in enumerate(PROMPTS):
        ids, rows = torch.tensor([prompt]), range(i * each, (i + 1) * each)
        out = theirs(directory).generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=23, do_sample=False,
                                         return_dict_in_generate=True, output_scores=True, output_logits=True,
                                         **options)
        wanted = [(text[:(indices >= 0).sum()].tolist(), indices[indices >= 0].tolist())
                  for text, indices in zip(out.sequences[:, len(prompt):], out.beam_indices, strict=True)]
        assert [(ours.row(j).tolist(), beams_of(ours, j)) for j in rows] == wanted
        np.testing.assert_allclose(ours.findings["score"][rows], out.sequences_scores, rtol=1e-4)
        ended += sum(ours.status[j] == dx.Status.EOS for j in rows)
    return ended


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("beams")


@pytest.mark.wide
@pytest.mark.parametrize(("width", "early", "ends"), often(
    [(3, False, 2), (2, "never", 2)], itertools.product((2, 3, 5), (False, True, "never"), (1, 2))))
def test_beams_are_those_of_transformers(directory: Path, width: int, early: Any, ends: int) -> None:
    ended = 0
    for penalty in (-1.0, -0.3, 0.0, 0.7, 1.0, 2.0):        # which compiles nothing anew
        ended += equal_to_transformers(directory, num_beams=width, num_return_sequences=width - 1 or 1,
                                       length_penalty=penalty, early_stopping=early, max_new_tokens=NEW,
                                       eos_token_id=[4, 13][:ends])
    assert ended > 0 or ends == 1


POLICIES: dict[str, dict[str, Any]] = {
    "repetition": dict(repetition_penalty=1.4), "repetition below one": dict(repetition_penalty=0.7),
    "n-grams": dict(no_repeat_ngram_size=2), "bad words": dict(bad_words_ids=[[12], [3, 5]]),
    "least": dict(min_new_tokens=4), "forced end": dict(forced_eos_token_id=4),
    "sequence bias": dict(sequence_bias=[[[7], 1.5], [[3, 9], -2.0]]),
    "exponential decay": dict(exponential_decay_length_penalty=(3, 1.4)), "suppress": dict(suppress_tokens=[1, 2, 3]),
    "suppress at first": dict(begin_suppress_tokens=[9, 10]),
    "normalised": dict(renormalize_logits=True, bad_words_ids=[[12]]),
    "together": dict(no_repeat_ngram_size=3, repetition_penalty=1.2, renormalize_logits=True)}


@pytest.mark.wide
@pytest.mark.parametrize("name", often(["together"], POLICIES))
@pytest.mark.parametrize("early", often([False], [False, True, "never"]))
def test_policies_act_as_in_transformers(directory: Path, name: str, early: Any) -> None:
    for penalty in (0.0, 1.0, 1.6):
        equal_to_transformers(directory, num_beams=3, num_return_sequences=2, length_penalty=penalty,
                              early_stopping=early, max_new_tokens=NEW, eos_token_id=[4, 13], **POLICIES[name])


@pytest.mark.wide
def test_a_generation_config_asks_for_beams() -> None:
    config = dict(num_beams=3, length_penalty=0.5, early_stopping=True, num_return_sequences=2, eos_token_id=4,
                  bad_words_ids=[[12]], max_new_tokens=NEW)
    said = dataclasses.replace(lm(), generation_config=config)
    found, wanted = dx.generate(said, PROMPTS), dx.generate(lm(), PROMPTS, **by_name(config))
    assert found.tokens.tolist() == wanted.tokens.tolist() and len(found) == 6
    one = dx.generate(said, PROMPTS, algorithm="autoregressive", num_samples=1)
    assert one.tokens.tolist() == dx.generate(lm(), PROMPTS, bad_words_ids=[[12]], max_new_tokens=NEW).tokens.tolist()
    with pytest.raises(ValueError, match=r"algorithm: BeamSearch\(3\) works on 3 rows a prompt, and stream has one"):
        dx.stream(said, PROMPTS[0])


@pytest.mark.wide
@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_beams_wide_enough_find_the_best_of_all_texts(penalty: float) -> None:
    prompt, new = (1, 3, 4), 4
    score = {text: p.sum() / len(p) ** penalty for text, p in log_probs(prompt, new).items()}
    best = sorted(score, key=score.__getitem__, reverse=True)[:20]
    out = dx.generate(small(), [list(prompt)], max_new_tokens=new, num_samples=20,
                      algorithm=BeamSearch(160, length_penalty=penalty, early_stopping="never"))
    assert [tuple(out.row(i).tolist()) for i in range(20)] == best
    np.testing.assert_allclose(out.findings["score"], [score[text] for text in best], rtol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("kind", often(["variance"], ["greedy", "local", "variance", "max", "square"]))
def test_regularised_scores_are_those_of_their_definition(kind: Any) -> None:
    """Wide enough that nothing is pruned; the likeliest token at each step is on one of the texts."""
    prompt, new, strength = (1, 3, 4), 3, 0.7
    texts = log_probs(prompt, new)

    def regulariser(text: tuple[int, ...]) -> float:
        u = -texts[text]
        if kind == "greedy":
            least = [min(-p[t] for other, p in texts.items() if other[:t] == text[:t] and len(other) > t)
                     for t in range(len(text))]
            return float(((u - least) ** 2).sum())
        return float({"local": (np.diff(u) ** 2).sum(), "variance": u.var(), "max": u.max(),
                      "square": (u * u).sum()}[kind])

    score = {text: p.sum() - strength * regulariser(text) for text, p in texts.items()}
    best = sorted(score, key=score.__getitem__, reverse=True)[:30]
    out = dx.generate(small(), [list(prompt)], max_new_tokens=new, num_samples=30, algorithm=BeamSearch(
        130, length_penalty=0.0, early_stopping="never", uid=UID(kind), strength=strength))
    assert [tuple(out.row(i).tolist()) for i in range(30)] == best
    np.testing.assert_allclose(out.findings["score"], [score[text] for text in best], rtol=1e-4)
    np.testing.assert_allclose(out.findings["log_prob"], [texts[text].sum() for text in best], rtol=1e-4)


@pytest.mark.full
def test_beam_sampling_draws_without_replacement() -> None:
    """One step of two beams: the two first draws, of which the likelier one is returned. At 1e-5."""
    prompt, rows, temperature = [1, 3, 4], 6000, 1.7
    own = {text[0]: p[0] for text, p in log_probs(tuple(prompt), 1).items()}
    q = np.exp(np.array([own[t] for t in range(SMALL)]) / temperature)
    q /= q.sum()
    chance = np.zeros(SMALL)
    for a, b in itertools.permutations(range(SMALL), 2):
        chance[a if q[a] > q[b] else b] += q[a] * q[b] / (1 - q[a])
    out = dx.generate(small(), [prompt] * rows, max_new_tokens=1, algorithm=dx.algorithms.beam_search(2),
                      temperature=temperature, seed=5)
    counts = np.bincount(out.tokens[:, 0], minlength=SMALL)
    seen = chance > 0
    assert counts[~seen].sum() == 0 and chisquare(counts[seen], rows * chance[seen]).pvalue > 1e-5
    np.testing.assert_allclose(out.findings["score"], [own[t] / temperature for t in out.tokens[:, 0]], rtol=1e-4)


class Groups:
    """Diverse beam search by hand, of one prompt: groups of `k` beams, without ends."""

    def __init__(self, groups: int, k: int, penalty: float, counting: str):
        self.groups, self.k, self.penalty, self.counting = groups, k, penalty, counting

    def __call__(self, prompt: tuple[int, ...], new: int) -> list[list[tuple[tuple[int, ...], float]]]:
        texts = log_probs(prompt, new)
        step = {text[:t + 1]: p[t] for text, p in texts.items() for t in range(len(text))}
        live: list[list[tuple[tuple[int, ...], float]]] = [[((), 0.0)] for _ in range(self.groups)]
        for _ in range(new):
            taken = np.zeros(SMALL)
            for g in range(self.groups):
                longer = [((*text, t), score + step[(*text, t)] - (self.penalty * taken[t] if g else 0))
                          for text, score in live[g] for t in range(SMALL) if t != EOS]
                longer.sort(key=lambda x: -x[1])
                live[g] = longer[:self.k]
                for text, _ in longer[:2 * self.k] if self.counting == "candidates" else live[g]:
                    taken[text[-1]] += 1
        return live


@pytest.mark.full
@pytest.mark.parametrize("counting", ["chosen", "candidates"])
def test_groups_see_what_those_before_them_took(counting: Any) -> None:
    prompt, new = (1, 3, 4), 4
    wanted = sorted((x for g in Groups(3, 2, 0.8, counting)(prompt, new) for x in g), key=lambda x: -x[1])
    out = dx.generate(small(), [list(prompt)], max_new_tokens=new, eos_token_id=[], num_samples=6,
                      logit_bias={EOS: -1e9}, algorithm=BeamSearch(
                          6, groups=3, diversity_penalty=0.8, counting=counting, length_penalty=0.0))
    np.testing.assert_allclose(out.findings["score"], [score for _, score in wanted], rtol=1e-4)
    assert sorted(tuple(out.row(i).tolist()) for i in range(6)) == sorted(text for text, _ in wanted)


@pytest.mark.full
def test_patience_waits_for_more_texts() -> None:
    """First come, first served: the search ends with the step in which so many have ended."""
    rounds = []
    for patience in (0.5, 1.0, 3.0):
        out = dx.generate(small(), [[1, 3, 4]], max_new_tokens=12, num_samples=2, algorithm=BeamSearch(
            2, early_stopping=True, patience=patience))
        rounds.append(int(out.stats.forwards))
    assert rounds == sorted(rounds) and rounds[0] < rounds[2]


DRAFTS: dict[str, Any] = {
    "lookup": drafts.PromptLookup(4), "itself": lambda: drafts.DraftModel(lm()), "recycling": drafts.TokenRecycling()}


@pytest.mark.wide
@pytest.mark.parametrize("name", often(["itself"], DRAFTS))
@pytest.mark.parametrize("options", often([0], [0, 1, 2]))
def test_drafted_beams_are_the_plain_ones(name: str, options: int) -> None:
    draft = DRAFTS[name]() if callable(DRAFTS[name]) else DRAFTS[name]
    policy: dict[str, Any] = [{}, dict(repetition_penalty=1.4, no_repeat_ngram_size=3), dict(temperature=0.8)][options]
    given = dict(max_new_tokens=14, eos_token_id=[4, 13], logprobs=2, num_samples=2, **policy)
    plain = dx.generate(lm(), PROMPTS, algorithm=BeamSearch(2), **given)
    found = dx.generate(lm(), PROMPTS, algorithm=BeamSearch(2, draft=draft), **given)
    assert found.tokens.tolist() == plain.tokens.tolist() and found.status == plain.status
    assert [beams_of(found, i) for i in range(6)] == [beams_of(plain, i) for i in range(6)]
    for noted in ("score", "log_prob"):
        np.testing.assert_allclose(found.findings[noted], plain.findings[noted], atol=1e-5)
    assert found.logprobs is not None and plain.logprobs is not None
    np.testing.assert_allclose(found.logprobs.raw, plain.logprobs.raw, atol=1e-5)
    np.testing.assert_allclose(found.logprobs.processed, plain.logprobs.processed, atol=1e-5)
    if name == "itself" and options == 0:
        assert found.stats.forwards < 0.75 * plain.stats.forwards


@pytest.mark.full
def test_beams_of_a_prompt_know_nothing_of_the_others() -> None:
    given: dict[str, Any] = dict(algorithm=dx.algorithms.beam_search(3), num_samples=2, max_new_tokens=NEW,
                                 temperature=1.0, logprobs=0)
    whole = dx.generate(lm(), PROMPTS, **given)
    parts = dx.generate(lm(), PROMPTS, batch_size=2, **given)
    assert whole.tokens.tolist() == parts.tokens.tolist() and whole.status == parts.status
    np.testing.assert_allclose(whole.findings["score"], parts.findings["score"], atol=1e-5)
    one = dx.generate(lm(), PROMPTS[2], request_ids=[2], **given)
    assert [one.row(i).tolist() for i in range(2)] == [whole.row(4 + i).tolist() for i in range(2)]
    again = dx.generate(lm(), PROMPTS, **{**given, "seed": 1})
    assert again.tokens.tolist() != whole.tokens.tolist()
    # log-probabilities are those of the text that is returned
    scored = dx.score(lm(), [PROMPTS[i // 2] + whole.row(i).tolist() for i in range(6)])
    assert whole.logprobs is not None
    for i in range(6):
        own = scored.logprobs[i][-len(whole.row(i)):]
        np.testing.assert_allclose(whole.logprobs.raw[i][:len(own)], own, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("cache", often(["paged"], ["paged", "hydragen"]))
def test_beams_on_caches_that_share_pages_are_those_on_a_dense_cache(cache: str) -> None:
    given: dict[str, Any] = dict(algorithm=dx.algorithms.beam_search(3), num_samples=3, max_new_tokens=NEW)
    plain, found = dx.generate(lm(), PROMPTS, **given), dx.generate(lm(), PROMPTS, cache=cache, **given)
    assert found.tokens.tolist() == plain.tokens.tolist()
    np.testing.assert_allclose(found.findings["score"], plain.findings["score"], atol=1e-5)


@pytest.mark.wide
def test_texts_that_are_not_there_say_so() -> None:
    out = dx.generate(small(), [[1, 3]], max_new_tokens=1, algorithm=dx.algorithms.beam_search(8), num_samples=8)
    assert sorted(out.row(i).tolist() for i in range(SMALL)) == [[t] for t in range(SMALL)]
    assert out.status[SMALL:] == [dx.Status.DEAD_END] * 2 and out.lengths[SMALL:].tolist() == [0, 0]
    none = dx.generate(small(), [[1, 3]], max_new_tokens=4, algorithm=dx.algorithms.beam_search(2), num_samples=2,
                       bad_words_ids=[[t] for t in range(SMALL) if t != EOS], suppress_tokens=[EOS])
    assert none.status == [dx.Status.DEAD_END] * 2


@pytest.mark.wide
def test_broken_logits_end_the_search() -> None:
    head = small().params["head"].at[0, 0].set(jnp.nan)
    broken = dataclasses.replace(small(), params=dict(small().params, head=head))
    out = dx.generate(broken, [[1, 3], [4]], algorithm=dx.algorithms.beam_search(2), num_samples=2, max_new_tokens=4)
    assert out.status == [dx.Status.INVALID] * 4


@pytest.mark.full
def test_a_search_that_is_cut_short_gives_what_it_has() -> None:
    out = dx.generate(small(), [[1, 3], [4]], algorithm=dx.algorithms.beam_search(2), num_samples=2, max_new_tokens=40,
                      max_time=1e-9,
                      eos_token_id=[])
    assert out.status == [dx.Status.TIME] * 4


@pytest.mark.parametrize(("given", "message"), [
    (dict(num_beams=0), "num_beams: got 0"), (dict(num_beams=2.5), "num_beams: got 2.5"),
    (dict(num_beams=2, num_samples=3), "num_samples: got 3 for 2 beams"),
    (dict(num_beams=2, early_stopping="always"), "early_stopping: got 'always', takes True, False or 'never'"),
    (dict(num_beams=4, num_beam_groups=3), "num_beam_groups: got 3 for num_beams=4"),
    (dict(num_beams=2, patience=2.0), "patience: got 2.0 with early_stopping=False"),
    (dict(num_beam_groups=2), "num_beam_groups: got 2 with one beam"),
    (dict(num_beams=2, num_samples=1, num_return_sequences=1), "num_samples and num_return_sequences: got both"),
    (dict(num_beams=2, algorithm="prompt-lookup"), "num_beams: got 2 beside an algorithm"),
    (dict(num_beams=2, length_penalty="x"), "length_penalty: got 'x', takes a number")])
def test_bad_arguments_are_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dx.generate(small(), [[1, 3]], max_new_tokens=4, **by_name(given))


@pytest.mark.full
def test_the_guide_runs_unchanged() -> None:
    guide = Path(__file__).parents[3] / "docs" / "choose" / "beam_search.md"
    names: dict[str, Any] = {"__name__": "guide"}
    for block in re.findall(r"```python\n(.*?)```", guide.read_text(), re.DOTALL):
        exec(compile(block, str(guide), "exec", dont_inherit=True), names)
