"""Kinds of caches that ask a draft model, when a prompt is in, what the answer will look for ("Draft-based Approximate
Inference for LLMs", Galim et al., 2025).

The draft model's weights are data, and a kind of cache is static. So such a kind makes the model that answers into one
of both, whose weights are a pair (`Paired`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.core.around import Readout
from decodax.core.cache import Cache, CacheConfig, PyTree, ReadPrompt
from decodax.core.loaded import Loaded, network_of
from decodax.core.resized import Resized
from decodax.core.types import Model, Out
from decodax.core.window import Window, causal
from decodax.pallas_kernels.window_attention import BLOCK

CHUNK = 256
"""Tokens of a prompt that a draft model reads at a time."""


@dataclasses.dataclass(frozen=True)
class Paired(Readout):
    """`base`, with a draft model that its cache asks. Weights are those of both, a pair."""

    draft: Model

    @property
    def max_positions(self) -> int | None:
        bounds = (self.base.max_positions, self.draft.max_positions)
        return min((m for m in bounds if m is not None), default=None)

    def init_cache(self, batch: int, capacity: int, *, params: Any = None, inputs: Any = None) -> Cache:
        return self.base.init_cache(batch, capacity, params=None if params is None else params[0], inputs=inputs)

    def apply(self, params: Any, window: Window, cache: Cache) -> Out:
        return self.base.apply(params[0], window, cache)

    def embeddings(self, params: Any, tokens: Array) -> Array:
        return self.base.embeddings(params[0], tokens)

    def outputs(self, params: Any, layer: int) -> Array:
        return self.base.outputs(params[0], layer)


@dataclasses.dataclass(frozen=True, eq=False)
class Drafted(CacheConfig):
    """A kind of cache that asks a draft model.

    Attributes:
        kind: the kind, which finds the draft model in what a prompt was read with (`paired`).
        draft: what `decodax.load` gave, with the tokenizer of the model that answers.
        name: what errors call it.
    """

    kind: CacheConfig
    draft: Any
    name: str

    def put_on(self, lm: Any) -> Any:
        network, weights = network_of(self.draft)
        if weights is None:
            raise ValueError(f"draft: got a bare {type(self.draft).__name__}, takes a model with its weights, as "
                             "decodax.load gives it")
        reads = self.draft.vocab_size if isinstance(self.draft, Loaded) else None
        model = Paired(lm.model.with_cache(self.kind.of_model(lm)), Resized(network, reads, lm.vocab_size))
        return dataclasses.replace(lm, model=model, params=(lm.params, weights))

    def __call__(self, layers: Sequence[tuple[Any, ...]], batch: int, capacity: int, dtype: jax.typing.DTypeLike,
                 inputs: PyTree = None) -> Cache:
        raise ValueError(f"cache: {self.name} asks a draft model, so it takes the model that answers: generate(..., "
                         "cache=kv(...))")


def paired(prompt: ReadPrompt, name: str) -> tuple[Model, PyTree, Model, PyTree]:
    """The model that answers with its weights, and the draft model with its.

    Raises:
        ValueError: the prompt was read with a model that has no draft model.
    """
    if not isinstance(prompt.model, Paired):
        raise ValueError(f"cache: {name} asks a draft model, and {type(prompt.model).__name__} has none; takes a kind "
                         "that was given to generate")
    (own, weights), model = prompt.params, prompt.model
    return model.base, own, model.draft, weights


def read(model: Model, weights: PyTree, tokens: Array, length: Array, more: int) -> Cache:
    """The cache of a draft model with the first `length` (`i32[B]`) of `tokens` (`i32[B, N]`), and room for so many
    more."""
    B, n = tokens.shape
    width = min(CHUNK, n)

    def visit(i: Array, cache: Cache) -> Cache:
        positions = jnp.broadcast_to(i * width + jnp.arange(width, dtype=jnp.int32), (B, width))
        live = positions < length[:, None]
        window = causal(jnp.take_along_axis(tokens, jnp.minimum(positions, n - 1), 1), positions[:, 0], live)
        out = model.apply(weights, window.replace(certain=True), cache)
        # the slots must depend on the forward, or XLA on CPU copies the cache to protect its readers
        return cache.commit(out.entries, jnp.where(live & jnp.isfinite(out.hidden).all(-1), positions, -1))

    cache = model.init_cache(B, -(-(n + more) // BLOCK) * BLOCK, params=weights)      # a walk takes whole blocks
    return lax.fori_loop(0, (length.max() + width - 1) // width, visit, cache)


def decoded(model: Model, weights: PyTree, cache: Cache, newest: Array, count: int,
            eos: tuple[int, ...]) -> tuple[Array, Array]:
    """The `count` tokens that a draft model takes for the likeliest behind the newest token `i32[B]`, each behind the
    one before: `i32[B, count]`, and which of them there are (`bool[B, count]`): none behind the end of a text."""

    def step(carry: tuple[Any, Array, Array], _: None) -> tuple[tuple[Any, Array, Array], tuple[Array, Array]]:
        cache, token, live = carry
        window = causal(token[:, None], cache.length, live[:, None])
        out = model.apply(weights, window, cache)
        cache = cache.commit(out.entries, jnp.where(live[:, None], window.positions, -1))
        found = out.logits()[:, 0].argmax(-1).astype(jnp.int32)
        return (cache, found, live & ~jnp.isin(found, jnp.asarray(eos, jnp.int32))), (found, live)

    _, (tokens, live) = lax.scan(step, (cache, newest, jnp.ones(newest.shape, bool)), None, count)
    return tokens.T, live.T
