"""STAND's table, shared among the samples of a prompt and kept from call to call."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax.algorithms.speculative import Speculative
from decodax.algorithms.speculative.drafts import Stand
from decodax.algorithms.speculative.drafts.text.stand import remember
from decodax.algorithms.speculative.trees import Fixed
from decodax.core.types import Params
from tests.algorithms.speculative.drafting import NONE, rows
from tests.laws.cases import VOCABULARY, decode, texts

DRAFT = Stand(6, order=2, k=1)
# the third row has another prompt; what the target said behind place i of row b is that b + 3 is next
TEXTS, PROMPTS = [[1, 2, 3, 4, 5], [1, 2, 3], [1, 3, 3, 4]], [3, 3, 2]


def said(share, params=NONE):
    """Each row's likeliest next token, or -1 where nothing is known."""
    s = rows(*TEXTS, size=8, prompt=PROMPTS)
    draft = dataclasses.replace(DRAFT, share=share)
    state = draft.init(params, s)
    tokens = jnp.broadcast_to(jnp.arange(3)[:, None, None] + 3, (3, 8, 1))
    state = state.replace(tokens=tokens, chances=jnp.ones((3, 8, 1)))
    logits = np.asarray(jax.jit(lambda s, state: draft.start(params, s, state, 0)[1].logits)(s, state))[:, 0]
    return [int(row.argmax()) if np.isfinite(row).sum() == 1 else -1 for row in logits]


@pytest.mark.wide
def test_rows_of_one_prompt_share_what_they_have_seen():
    assert said(share=False) == [-1, -1, -1]                # no token behind "3", "4" or "5" in a row's own text
    assert said(share=True) == [-1, 3, -1]                  # row 0 knows what follows "2 3"; row 2 shares with nobody


@pytest.mark.wide
def test_a_samples_own_text_counts_as_the_latest():
    draft = Stand(6, order=1, k=1, places=1, share=True)
    s = rows([1, 2, 1], [1, 2, 1], size=4, prompt=[1, 1])
    state = draft.init(NONE, s)
    state = state.replace(tokens=jnp.asarray([[[3]] * 4, [[4]] * 4]), chances=jnp.ones((2, 4, 1)))
    logits = jax.jit(lambda s, state: draft.start(NONE, s, state, 0)[1].logits)(s, state)[:, 0]
    assert np.argmax(logits, -1).tolist() == [3, 4]


IDS = [[3, 7, 2], [9, 4]] * 2
ALG = Speculative(Stand(VOCABULARY, order=2, k=4), shape=Fixed.of([[0], [1], [0, 0], [0, 0, 0]]))
SAMPLED = dict(temperature=0.7)


@pytest.mark.wide
def test_a_warm_table_drafts_from_the_first_round_on_and_changes_no_token():
    cold = decode(ALG, "toy", IDS, SAMPLED, new=20, eos=[])
    memory = remember(cold)
    assert memory.text.shape == (1024,) and memory.tokens.shape == (1024, 4)
    again = decode(ALG, "toy", IDS, SAMPLED, new=20, eos=[], draft=memory)
    assert texts(again) == texts(cold)
    assert np.asarray(again.stats.rounds).sum() < np.asarray(cold.stats.rounds).sum()
    more = remember(again, memory, most=30)                 # rows of 23 and 22 tokens; the latest are kept
    assert np.asarray(more.text)[-23:].tolist() == [*IDS[3], *texts(again)[3], -1] and (more.text[:-30] == -1).all()


@pytest.mark.full
def test_samples_that_share_are_those_of_plain_decoding():
    ids = [[3, 7, 2]] * 4
    options = dict(new=20, eos=[])
    alone = decode(ALG, "toy", ids, SAMPLED, **options)
    shared = decode(dataclasses.replace(ALG, draft=dataclasses.replace(ALG.draft, share=True)), "toy", ids, SAMPLED,
                    **options)
    assert texts(shared) == texts(alone)
    assert np.asarray(shared.stats.accepted).sum() > np.asarray(alone.stats.accepted).sum()


@pytest.mark.wide
def test_a_memory_of_another_shape_is_refused():
    memory = remember(decode(ALG, "toy", IDS, SAMPLED, new=20, eos=[]))
    with pytest.raises(ValueError, match="warm: got 4 tokens of each distribution, takes 10"):
        Stand(VOCABULARY, warm=memory)
    assert Stand(VOCABULARY, k=4, warm=memory) == Stand(VOCABULARY, k=4).bare()
    assert Params(None, Stand(VOCABULARY, k=4, warm=memory).weights).draft is memory
