"""Prompts, policies and runs that tests of several model families share."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

import decodax as dx
from decodax.core.window import Window, causal
from decodax.models import Transformer, llama
from tests.small_models import random_lm

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8], [1, 5], [7, 7, 7, 7], [60]]
NEW = 10
POLICY: dict[str, Any] = dict(temperature=[0.0, 0.0, 1.0, 1.0], top_p=0.95, seed=[5, 6, 7, 8])
"""Two rows greedy, two sampled."""


@functools.cache
def attention(vocabulary: int = 64) -> Any:
    """A Llama with weights that give distributions with a shape."""
    return random_lm(Transformer(llama(vocab=vocabulary, width=16, layers=2, heads=4, kv_heads=2, mlp=24)))


def tokens_of(lm: Any, prompts: Any = PROMPTS, **options: Any) -> list[list[int]]:
    return dx.generate(lm, prompts, **{"max_new_tokens": NEW, "eos_token_id": [], **options}).tokens.tolist()


@functools.partial(jax.jit, static_argnums=0)
def score(model: Any, params: Any, window: Window, inputs: Any = None) -> Any:
    """Logits of a window without a cache."""
    cache = model.init_cache(window.tokens.shape[0], 0, params=params, inputs=inputs)
    return model.apply(params, window, cache).logits()


@functools.partial(jax.jit, static_argnums=0)
def scored(model: Any, params: Any, window: Window, cache: Any) -> Any:
    """Logits, and the window's entries."""
    out = model.apply(params, window, cache)
    return out.logits(), out.entries


def chain(text: list[int]) -> Window:
    return causal(jnp.array([text]), jnp.zeros(1, jnp.int32))


def shapes_in(jaxpr: Any) -> Iterator[tuple[int, ...]]:
    """The shape of every array that a program makes, in loops and branches too."""
    for eqn in jaxpr.eqns:
        for part in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(part, "jaxpr", part)
            if hasattr(inner, "eqns"):
                yield from shapes_in(inner)
        yield from (var.aval.shape for var in eqn.outvars)
