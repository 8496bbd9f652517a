"""Rows that go on from one another: beams equal a search by hand, and copies of a particle draw tokens of their own."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax import Algorithm, Decision
from decodax.core.keys import Purpose, addresses
from decodax.core.state import State
from decodax.core.types import Out, Params
from decodax.core.window import Window, causal
from decodax.sampling.draw import draw
from tests.laws.cases import VOCABULARY, decode, model, start, texts

PROMPTS = [[1, 2, 3, 4], [9, 3], [5, 5, 5, 5, 5, 2, 7]]


@dataclasses.dataclass(frozen=True)
class Beams(Algorithm):
    """Each `size` rows side by side are the beams of one prompt; its state is their scores."""

    size: int

    def init(self, params: Params, s: State) -> Any:
        # at first all beams of a prompt are the same text: one of them counts
        return jnp.where(jnp.arange(s.batch) % self.size == 0, 0.0, -jnp.inf)

    def propose(self, params: Params, policy: Any, s: State) -> tuple[Window, Any]:
        return causal(s.newest[:, None], s.length - 1, s.running[:, None]), s.algo

    def decide(self, params: Params, dist: Any, s: State, window: Window, out: Out, algo: Any) -> Decision:
        log_p = dist.warm.log_probs()[:, 0]
        total = (algo[:, None] + log_p).reshape(-1, self.size * log_p.shape[-1])
        score, best = jax.lax.top_k(total, self.size)
        group = jnp.arange(total.shape[0])[:, None] * self.size
        rows, token = (group + best // log_p.shape[-1]).reshape(-1), (best % log_p.shape[-1]).reshape(-1, 1)
        return Decision(tokens=token, count=jnp.ones(s.batch, jnp.int32), source=jnp.zeros_like(token), rows=rows,
                        slots=jnp.where(token >= 0, window.positions, -1), algo=score.reshape(-1))


@dataclasses.dataclass(frozen=True)
class Copies(Algorithm):
    """Plain sampling whose rows all go on from the first one's text."""

    def init(self, params: Params, s: State) -> Any:
        return None

    def propose(self, params: Params, policy: Any, s: State) -> tuple[Window, Any]:
        return causal(s.newest[:, None], s.length - 1, s.running[:, None]), None

    def decide(self, params: Params, dist: Any, s: State, window: Window, out: Out, algo: Any) -> Decision:
        log_p = jnp.broadcast_to(dist.log_probs()[:1, 0], (s.batch, VOCABULARY))
        token = draw(log_p[:, None], addresses(s.key, s.length[:, None], Purpose.TOKEN))
        return Decision(tokens=token, count=jnp.ones(s.batch, jnp.int32), source=jnp.zeros_like(token), algo=None,
                        rows=jnp.zeros(s.batch, jnp.int32), slots=jnp.where(token >= 0, window.positions, -1))


MOST = VOCABULARY**2, max(map(len, PROMPTS)) + 6
"""The texts, and tokens of each, that `forward` takes: one shape for all, so that one program is compiled."""


@jax.jit
def forward(tokens: jax.Array) -> jax.Array:
    """Logits of `i32[N, T]`, of which each sees what is before it."""
    network, weights = model("llama")
    zero = jnp.zeros(len(tokens), jnp.int32)
    return network.apply(weights, causal(tokens, zero), network.init_cache(len(tokens), 0)).logits()


def scores(texts: list[list[int]], new: int) -> np.ndarray:
    """Log-probabilities of the last `new` tokens of texts of one length, by whole forwards: `f32[N]`."""
    tokens = np.zeros(MOST, np.int32)
    tokens[:len(texts), :len(texts[0])] = texts
    log_p = jax.nn.log_softmax(forward(tokens)[:, :-1])
    each = np.asarray(jnp.take_along_axis(log_p, tokens[:, 1:, None], -1))[:len(texts), :len(texts[0]) - 1, 0]
    return each[:, -new:].sum(1)


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_beams_wide_enough_are_the_best_of_all_texts(temperature: float) -> None:
    """Also of greedy rows, whose log-probabilities at temperature 1 count."""
    new, size = 2, VOCABULARY
    ids = [p for p in PROMPTS for _ in range(size)]
    s = decode(Beams(size), "llama", ids, dict(temperature=temperature), new=new)
    found = np.asarray(s.algo).reshape(len(PROMPTS), size)
    for i, prompt in enumerate(PROMPTS):
        every = [list(tail) for tail in itertools.product(range(VOCABULARY), repeat=new)]
        total = scores([[*prompt, *tail] for tail in every], new)
        order = np.argsort(-total)[:size]
        np.testing.assert_allclose(found[i], total[order], rtol=1e-4)
        assert texts(s)[i * size:(i + 1) * size] == [every[j] for j in order]


@pytest.mark.wide
def test_narrow_beams_are_those_of_a_search_by_hand() -> None:
    new, size = 5, 3
    ids = [p for p in PROMPTS for _ in range(size)]
    s = decode(Beams(size), "llama", ids, dict(temperature=1.0), new=new, top_logprobs=0)
    for i, prompt in enumerate(PROMPTS):
        beams: list[list[int]] = [[]]
        for step in range(new):
            longer = [[*beam, t] for beam in beams for t in range(VOCABULARY)]
            total = scores([[*prompt, *tail] for tail in longer], step + 1)
            beams = [longer[j] for j in np.argsort(-total)[:size]]
        assert texts(s)[i * size:(i + 1) * size] == beams
        for beam in range(size):            # log-probabilities move with the text that they are of
            row, begin = i * size + beam, len(prompt)
            noted = np.asarray(s.record.raw)[row, begin:begin + new].sum()
            np.testing.assert_allclose(noted, scores([[*prompt, *beams[beam]]], new)[0], rtol=1e-4)


def test_copies_of_a_row_draw_tokens_of_their_own() -> None:
    rows, new = 16, 6
    alg, policy, ids = Copies(), dict(temperature=1.0), [PROMPTS[0]] * rows
    s = decode(alg, "llama", ids, policy, new=new)
    done = np.array(texts(s))
    assert (done[:, :-1] == done[0, :-1]).all() and len(set(done[:, -1])) > 3
    # the last token of each is the draw of its own place behind the common text
    _, _, _, fresh = start(alg, "llama", ids, policy, new=new)
    text = jnp.asarray([[*PROMPTS[0], *done[0, :-1]]])
    last = jnp.broadcast_to(forward(text)[:, -1:], (rows, 1, VOCABULARY))
    place = jnp.full((rows, 1), text.shape[1], jnp.int32)
    assert draw(last, addresses(fresh.key, place, Purpose.TOKEN))[:, 0].tolist() == done[:, -1].tolist()
