"""Caches that use a draft model after the prompt, to find the tokens that the answer will attend to ("Draft-based
Approximate Inference for LLMs", Galim et al., 2025).

The weights of the draft model are arrays, while a cache configuration is static. So the configuration replaces the
target model by a model of both, whose weights are a pair (`Paired`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.cache.dense import Dense
from decodax.core.around import PairedReadout
from decodax.core.cache import Cache, CacheConfig, PyTree
from decodax.core.capabilities import ReadPrompt, check_draft_cache
from decodax.core.loaded import Loaded, network_of
from decodax.core.resized import Resized
from decodax.core.types import Model, Out
from decodax.core.window import Window, causal
from decodax.pallas_kernels.window_attention import BLOCK

CHUNK = 256
"""Number of prompt tokens that a draft model prefills at a time."""


@dataclasses.dataclass(frozen=True)
class Paired(PairedReadout):
    """The target model `base`, with a draft model for its cache. Its weights are the pair of the weights of both.

    Attributes:
        draft: the draft model.
    """

    draft: Model

    @property
    def max_positions(self) -> int | None:
        bounds = (self.base.max_positions, self.draft.max_positions)
        return min((m for m in bounds if m is not None), default=None)

    def apply(self, params: Any, window: Window, cache: Cache) -> Out:
        return self.base.apply(params[0], window, cache)


@dataclasses.dataclass(frozen=True, eq=False)
class DraftedConfig(CacheConfig):
    """Configuration of a cache that uses a draft model.

    Attributes:
        kind: configuration of the cache, which gets the draft model from `paired`.
        draft: the draft model from `decodax.load`, with the tokenizer of the target.
        name: name in error messages.
    """

    kind: CacheConfig
    draft: Any
    name: str

    @classmethod
    def checked(cls, kind: CacheConfig, draft: Any, name: str) -> DraftedConfig:
        """Returns the configuration with these fields, after a check of `draft`.

        Raises:
            ValueError: `draft` is not a model from `decodax.load`.
        """
        if not isinstance(draft, Loaded):
            raise ValueError(f"draft: got {'none' if draft is None else type(draft).__name__}, takes a smaller model "
                             "with the same tokenizer, as decodax.load gives it")
        check_draft_cache(network_of(draft)[0], BLOCK, drafts=False)
        return cls(kind, draft, name)

    def wrap_model(self, lm: Loaded) -> tuple[Model, PyTree]:
        network, weights = network_of(self.draft)
        if weights is None:
            raise ValueError(f"draft: got a bare {type(self.draft).__name__}, takes a model with its weights, as "
                             "decodax.load gives it")
        reads = self.draft.vocab_size if isinstance(self.draft, Loaded) else None
        model = Paired(lm.model.with_cache(self.kind.of_model(lm)), Resized(network, reads, lm.vocab_size))
        return model, (lm.params, weights)

    def __call__(self, layers: Sequence[tuple[Any, ...]], batch: int, capacity: int, dtype: jax.typing.DTypeLike,
                 inputs: PyTree = None) -> Cache:
        raise ValueError(f"cache: {self.name} asks a draft model, so it takes the model that answers: generate(..., "
                         "cache=kv(...))")


def check_dense(option: str, model: Any) -> int:
    """Returns the number of layers of a draft model, the value of `option`, which has to have a dense cache.

    Raises:
        ValueError: it has another cache.
    """
    cache = jax.eval_shape(lambda: network_of(model)[0].init_cache(1, 8))
    if not isinstance(cache, Dense):
        raise ValueError(f"{option}: got one with a {type(cache).__name__} cache, takes one with a dense cache")
    return len(cache.kv)


def paired(prompt: ReadPrompt, name: str) -> tuple[Model, PyTree, Model, PyTree]:
    """Returns the target model, its weights, the draft model, and its weights.

    Args:
        prompt: the prompt, with a `Paired` model.
        name: name of the cache, for the error.

    Raises:
        ValueError: the model of `prompt` has no draft model.
    """
    if not isinstance(prompt.model, Paired):
        raise ValueError(f"cache: {name} asks a draft model, and {type(prompt.model).__name__} has none; takes a kind "
                         "that was given to generate")
    (own, weights), model = prompt.params, prompt.model
    return model.base, own, model.draft, weights


def read(model: Model, weights: PyTree, tokens: Array, length: Array, more: int) -> Cache:
    """Prefills prompts with a draft model, and returns its cache.

    Args:
        model, weights: the draft model and its weights.
        tokens: `i32[B, N]`, the prompts.
        length: `i32[B]`, number of tokens of each prompt to prefill.
        more: number of later tokens to reserve slots for.
    """
    B, n = tokens.shape
    width = min(CHUNK, n)

    def visit(i: Array, cache: Cache) -> Cache:
        positions = jnp.broadcast_to(i * width + jnp.arange(width, dtype=jnp.int32), (B, width))
        live = positions < length[:, None]
        window = causal(jnp.take_along_axis(tokens, jnp.minimum(positions, n - 1), 1), positions[:, 0], live)
        out = model.apply(weights, window.replace(is_prefill=True), cache)
        # the slots must depend on the forward, or XLA on CPU copies the cache to protect its readers
        return cache.commit(out.entries, jnp.where(live & jnp.isfinite(out.hidden).all(-1), positions, -1))

    cache = model.init_cache(B, -(-(n + more) // BLOCK) * BLOCK, params=weights)      # a walk takes whole blocks
    return lax.fori_loop(0, (length.max() + width - 1) // width, visit, cache)


def decoded(model: Model, weights: PyTree, cache: Cache, newest: Array, count: int,
            eos: tuple[int, ...]) -> tuple[Any, Array, Array]:
    """Continues each row of a draft model's cache greedily, one token at a time.

    Args:
        model, weights, cache: the model that decodes, its weights and its cache.
        newest: `i32[B]`, the token to continue from; it is not in the cache yet.
        count: number of tokens to decode.
        eos: ids of the end tokens.

    Returns:
        The cache, the tokens `i32[B, count]`, and `bool[B, count]`: True for the tokens up to and including each row's
        first end token.
    """
    def step(carry: tuple[Any, Array, Array], _: None) -> tuple[tuple[Any, Array, Array], tuple[Array, Array]]:
        cache, token, live = carry
        window = causal(token[:, None], cache.length, live[:, None])
        out = model.apply(weights, window, cache)
        cache = cache.commit(out.entries, jnp.where(live[:, None], window.positions, -1))
        found = out.logits()[:, 0].argmax(-1).astype(jnp.int32)
        return (cache, found, live & ~jnp.isin(found, jnp.asarray(eos, jnp.int32))), (found, live)

    last, (tokens, live) = lax.scan(step, (cache, newest, jnp.ones(newest.shape, bool)), None, count)
    return last[0], tokens.T, live.T


def newest_of(prompt: ReadPrompt, length: Array) -> Array:
    """Returns `prompt.tokens[b, length[b]]` for each row `b` (`length` is `i32[B]`), `i32[B]`: the newest prompt token,
    which follows the `length` tokens in the cache."""
    last = jnp.minimum(length, prompt.tokens.shape[1] - 1)
    return jnp.take_along_axis(prompt.tokens, last[:, None], 1)[:, 0]
