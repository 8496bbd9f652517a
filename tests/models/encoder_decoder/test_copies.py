"""Aggressive decoding by encoder-decoders: the source of the encoder is copied, and the output stays as it is."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.algorithms.speculative.drafts import InputGuided, NonAutoregressive
from decodax.models.encoder_decoder.network import EncoderMemory
from tests.algorithms.speculative.drafting import Alone, chains, first, observe, propose, rows
from tests.matrix import often
from tests.models.encoder_decoder.tiny import SOURCES, VOCABULARY, loaded, source
from tests.models.small import NEW, POLICY, tokens_of

FEW = tuple(range(3, 3 + NEW))
SOURCES_OF_FEW = [[5, 12, 3, 7, 8, 10, 4, 6, 11, 9, 2], [4, 6, 11, 9, 2], [7, 6, 3, 10, 4, 5, 8, 12, 2],
                  [3, 9, 8, 7, 12, 4, 5, 6, 10, 11, 3, 5, 9, 4, 2]]
"""Models with random weights do not copy. They write each of few tokens once here, so that some copies are right."""
FREE: dict[str, Any] = dict(forced_bos_token_id=-1, forced_eos_token_id=[], no_repeat_ngram_size=1, min_length=0,
                            bad_words_ids=None, suppress_tokens=[i for i in range(VOCABULARY) if i not in FEW])


def read(prompts: list[list[int]], sources: list[list[int]]) -> Any:
    """A state of decoder prompts after texts that an encoder has read."""
    return rows(*prompts).replace(cache=Alone(inputs=EncoderMemory(
        keys=(), values=(), seen=jnp.ones((len(sources), 1), bool), source=jax.tree.map(jnp.asarray, source(sources)))))


def test_drafts_are_the_tokens_of_the_source() -> None:
    """Sources of different lengths, one as long as its array, and prompts of the decoder that have begun to copy."""
    full = [*range(11, 26), 2]
    s = read([[2], [2, 21], [2, 33], [2, 9], [2]], [full, SOURCES[1], SOURCES[2], SOURCES[2], SOURCES[3]])
    assert s.cache.inputs.source.tokens.shape == (5, 16)
    draft = InputGuided(length=20)
    # row 2 begins elsewhere, at a token that the source has once; row 3 at one that it does not have
    assert chains(propose(draft, s)) == [full, SOURCES[1][1:], SOURCES[2][3:], [], SOURCES[3]]
    assert chains(propose(InputGuided(length=3, skip=1, leave=1), read([[2], [2, 21]], SOURCES[:2]))) == [
        SOURCES[0][1:4], [22][:0]]


def test_a_copy_resumes_inside_the_source_and_ends_with_it() -> None:
    text = [*range(11, 26), 2]
    s, draft = read([[2]], [text]), InputGuided(length=20)
    state = first(draft, s)
    for token, rest in ((11, text[1:]), (40, []), (14, text[4:]), (2, []), (12, text[2:])):
        state = observe(draft, s, state, [token])
        assert chains(propose(draft, s, state)) == [rest], token
    whole = observe(draft, s, first(draft, s), text, most=16)
    assert whole.at[0] == 16 and chains(propose(draft, s, whole)) == [[]]
    assert chains(propose(draft, s, observe(draft, s, whole, [13]))) == [text[3:]]


def generated(name: str, rows: list[list[int]] = SOURCES_OF_FEW, **options: Any) -> Any:
    return dx.generate(loaded(name), [[]] * len(rows), inputs=source(rows), **{
        "max_new_tokens": NEW, "eos_token_id": [], **FREE, **options})


@pytest.mark.wide
@pytest.mark.parametrize("name", often(["bart"], ["bart", "t5-1.0", "nllb"]))
def test_copies_of_the_source_leave_the_output_as_it_is(name: str) -> None:
    """Greedy and sampled rows, with sources of different lengths."""
    plain = generated(name, algorithm=dx.Autoregressive(), **POLICY)
    drafted = generated(name, algorithm="aggressive-decoding:length=5", **POLICY)
    assert drafted.tokens.tolist() == plain.tokens.tolist()
    assert (np.asarray(drafted.stats.drafted) > 0).all() and np.asarray(drafted.stats.accepted).sum() > 1


@pytest.mark.wide
def test_samples_and_refilled_rows_copy_their_own_source() -> None:
    """Also rows whose sources have arrays of another width."""
    policy: dict[str, Any] = dict(num_samples=2, temperature=1.0, seed=3)
    sources = [*SOURCES_OF_FEW, [*range(20, 40), *SOURCES_OF_FEW[0]]]
    plain = generated("bart", sources, algorithm=dx.Autoregressive(), **policy)
    for options in ({}, {"batch_size": 2}):
        found = generated("bart", sources, algorithm="aggressive-decoding:length=5", **policy, **options)
        assert found.tokens.tolist() == plain.tokens.tolist() and np.asarray(found.stats.accepted).sum() > 4


@pytest.mark.full
def test_beams_copy_their_source() -> None:
    """An end of text is allowed, and beams of one prompt continue one another."""
    options: dict[str, Any] = dict(eos_token_id=2, suppress_tokens=[i for i in FREE["suppress_tokens"] if i != 2])
    plain = generated("bart", algorithm=dx.algorithms.beam_search(3), **options)
    found = generated("bart", algorithm=dx.algorithms.beam_search(3, draft=InputGuided(length=4)), **options)
    assert found.tokens.tolist() == plain.tokens.tolist() and np.asarray(found.stats.drafted).sum() > 0


def test_an_encoder_with_other_token_ids_is_refused() -> None:
    separate = loaded("marian-separate")
    assert separate.model.source_vocab is not None
    with pytest.raises(ValueError, match=r"^draft: got InputGuided for a model whose encoder has an embedding"):
        tokens_of(separate, [[]], inputs=source([[5, 2]]), algorithm="aggressive-decoding")


def test_options_of_copies_and_of_a_drafter() -> None:
    make = dx.algorithms.aggressive_decoding
    assert make(skip=3, leave=2).draft == InputGuided(16, skip=3, leave=2)
    block = NonAutoregressive(loaded("bart"), mask=1)
    assert [make(length, drafter=block).drafter.length for length in (None, 4, 40)] == [25, 4, 25]
    assert make(drafter=dx.drafts.DraftModel(loaded("bart").model)).drafter.length == 16
    assert make(drafter=dataclasses.replace(block, drafts=7)).drafter.length == 7
    with pytest.raises(ValueError, match=r"^drafter: got .* which are for copies of the input"):
        make(drafter=block, skip=1)
