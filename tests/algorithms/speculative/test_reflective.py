"""Reflective verification: drafts hold by what the target says of them twice, by hand."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.algorithms.speculative import Draft, Reflective, chain, drafts, trees
from decodax.core.window import causal
from tests.matrix import often
from tests.small_models import PROMPTS, net

pytestmark = pytest.mark.wide

V, K, PROBE, NEW = 24, 3, (7, 11), 12


@dataclasses.dataclass(frozen=True)
class Counting(Draft):
    """Drafts of a fixed rule; after an even token one less."""

    length: int = K

    def propose(self, params: Any, policy: Any, s: Any, state: Any, drawn: Any) -> tuple[Any, Any]:
        tokens = jnp.stack([(5 * s.newest + 3 * i) % V for i in range(1, K + 1)], 1)
        return chain(tokens, K - (s.newest % 2 == 0)), state


@functools.cache
def forward() -> Any:
    lm = net()
    return jax.jit(lambda x: lm.model.apply(lm.params, causal(x, jnp.zeros(1, jnp.int32)),
                                            lm.model.init_cache(1, 16)).logits()[0])


def logits(text: list[int]) -> np.ndarray:
    padded = jnp.asarray([[*text, *[0] * (48 - len(text))]], jnp.int32)
    return np.asarray(forward()(padded), np.float64)[:len(text)]


def by_hand(prompt: list[int], alpha: float) -> tuple[list[int], int]:
    """Greedy tokens and rounds."""
    text, rounds = list(prompt), 0
    while len(text) < len(prompt) + NEW:
        rounds += 1
        new = [(5 * text[-1] + 3 * i) % V for i in range(1, K + 1)][:K - (text[-1] % 2 == 0)]
        both = logits([*text, *new, *PROBE, *new])
        first, second = both[len(text) - 1:len(text) + len(new)], both[len(text) + len(new) + len(PROBE) - 1:]
        best = ((1 - alpha) * first + alpha * second).argmax(1).tolist()
        n = next((i for i, t in enumerate(new) if t != best[i]), len(new))
        for token in [*new[:n], best[n]]:
            text.append(token)
            if token == 4 or len(text) == len(prompt) + NEW:
                return text[len(prompt):], rounds
    return text[len(prompt):], rounds


@pytest.mark.parametrize("alpha", often([0.4], [0.4, 0.0, 1.0]))
def test_drafts_hold_by_both_readings(alpha: float) -> None:
    alg = Reflective(Counting(), probe=PROBE, alpha=alpha)
    out = dx.generate(net(), PROMPTS, algorithm=alg, max_new_tokens=NEW)
    for b, prompt in enumerate(PROMPTS):
        tokens, rounds = by_hand(list(prompt), alpha)
        assert out.row(b).tolist() == tokens and out.stats.rounds[b] == rounds
    if alpha == 0:          # plain speculation, also of rows that sample
        warm: dict[str, Any] = dict(max_new_tokens=NEW, temperature=1.0, repetition_penalty=1.3)
        assert np.array_equal(dx.generate(net(), PROMPTS, algorithm=alg, **warm).tokens,
                              dx.generate(net(), PROMPTS, **warm).tokens)


def test_by_name_and_with_what_it_takes() -> None:
    lm = net()
    small = dataclasses.replace(lm, params=jax.tree.map(lambda x: 0.97 * x, lm.params))
    alg = dx.algorithms.make("reflective-verification", lm, small, probe=PROBE, length=2)
    alone = dx.generate(lm, [PROMPTS[1]], algorithm=alg, max_new_tokens=NEW, request_ids=[1], temperature=1.0)
    both = dx.generate(lm, PROMPTS, algorithm=alg, max_new_tokens=NEW, temperature=1.0)
    assert alone.row(0).tolist() == both.row(1).tolist() and alg.traits.guarantee == "approximate"
    with pytest.raises(ValueError, match="probe: got none"):
        Reflective(Counting())
    with pytest.raises(ValueError, match="alpha: got 2"):
        Reflective(Counting(), probe=(1,), alpha=2)
    with pytest.raises(ValueError, match="takes a chain"):
        Reflective(drafts.DraftModel(small), shape=trees.DySpec(4), probe=(1,))
