"""Classifier-free guidance for language models (Sanchez et al. 2023): two contexts, one distribution.

The unconditional branch is a second cache beside the first, so guidance is a model that wraps a model: samplers,
verifiers and trees see one set of logits and stay exact. Logits are `u + scale * (c - u)` of the log-probabilities,
as in transformers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.cache import Cache, Window, WindowKV
from decodax.core import drivers
from decodax.core.state import State
from decodax.core.types import Algorithm, Model, Out, Params
from decodax.struct import Struct, struct


@struct
class GuidedCache(Struct):
    """The caches of both branches.

    Attributes:
        conditional, unconditional: caches of the wrapped model.
        first: `i32[B]` position of the last prompt token, where the unconditional branch begins.
        opening: `i32[B]` the token it has there: the negative prompt's last, or the prompt's.
        offset: `i32[B]` how much smaller its positions are. scale: `f32[B]`.
    """

    conditional: Any
    unconditional: Any
    first: Array
    opening: Array
    offset: Array
    scale: Array

    @property
    def capacity(self) -> int:
        return self.conditional.capacity

    def attend(self, *args: Any, **kwargs: Any) -> Array:
        raise NotImplementedError("a guided cache is read by Guided.apply, branch by branch")

    def commit(self, kv: WindowKV, slots: Array) -> GuidedCache:
        half = len(kv) // 2
        own = jnp.where(slots >= self.first[:, None], slots - self.offset[:, None], -1)
        return self.replace(conditional=self.conditional.commit(kv[:half], slots),
                            unconditional=self.unconditional.commit(kv[half:], own))

    def select(self, rows: Array) -> GuidedCache:
        branches = dict(conditional=self.conditional.select(rows), unconditional=self.unconditional.select(rows))
        rest = jax.tree.map(lambda x: x[rows], self.replace(conditional=None, unconditional=None))
        return rest.replace(**branches)


@dataclasses.dataclass(frozen=True)
class Guided:
    """`base` under guidance; its cache is a `GuidedCache`, made by `guide`."""

    base: Model

    def init_cache(self, batch: int, capacity: int) -> Cache:
        raise NotImplementedError("a guided cache is made from a prefilled one, by guide()")

    def apply(self, params: Any, window: Window, cache: Any) -> Out:
        here = window.positions >= cache.first[:, None]
        opens = window.positions == cache.first[:, None]
        other = window.replace(tokens=jnp.where(opens, cache.opening[:, None], window.tokens),
                               positions=jnp.maximum(window.positions - cache.offset[:, None], 0),
                               live=window.live & here, begun=None)
        with_prompt = self.base.apply(params, window, cache.conditional)
        without = self.base.apply(params, other, cache.unconditional)

        def head(hidden: Array) -> Array:
            c, u = (jax.nn.log_softmax(out.head(h)) for out, h in
                    zip((with_prompt, without), jnp.split(hidden, 2, axis=-1), strict=True))
            scale = cache.scale.reshape(-1, *[1] * (c.ndim - 1))
            return u + scale * (c - u)

        return Out(hidden=jnp.concatenate([with_prompt.hidden, without.hidden], -1),
                   kv=(*with_prompt.kv, *without.kv), head=head)


def guide(alg: Algorithm, model: Model, params: Params, policy: Any, s: State, scale: Any,
          negative: list[list[int]] | None) -> tuple[Model, State]:
    """Puts a prefilled state under guidance. An algorithm may have a rule of its own, `guide` (masked diffusion does).

    Args:
        scale: one number or `f32[B]`; 1 is no guidance.
        negative: ids of a negative prompt for each row; None begins the other branch with the last prompt token.

    Raises:
        ValueError: the algorithm keeps no cache.
    """
    if (own := alg.guide(model, params, policy, s, scale)) is not None:
        if negative is not None:
            raise ValueError("negative_prompts: a canvas is guided against masks in the prompt's place, without them")
        return own
    if not alg.caches:
        raise ValueError(f"guidance_scale: {type(alg).__name__} keeps no cache to guide")
    first = s.prompt_length - 1      # `+ 0` below: the state is donated, and no array may stand in it twice
    if negative is None:
        cache, opening, offset = model.init_cache(s.batch, s.cache.capacity), s.newest, first + 0
    else:
        lengths = np.array([len(row) for row in negative], np.int32)
        # the branch holds its own prompt and whatever the row may still make
        size = -(-int(lengths.max() + (np.asarray(s.max_length) - np.asarray(s.prompt_length)).max()) // 256) * 256
        tokens = np.zeros((s.batch, size), np.int32)
        for row, ids in zip(tokens, negative, strict=True):
            row[:len(ids)] = ids
        other = drivers.begin(alg, model, params, policy, tokens, lengths, size=size,
                              max_new=np.minimum(np.asarray(s.max_length) - np.asarray(s.prompt_length), 1))
        other = drivers.prefill(alg, model, params, other, width=min(256, size))
        cache, opening, offset = other.cache, other.newest, first - (jnp.asarray(lengths) - 1)
    scales = jnp.broadcast_to(jnp.asarray(scale, jnp.float32), (s.batch,))
    guided = GuidedCache(conditional=s.cache, unconditional=cache, first=first, opening=opening, offset=offset,
                         scale=scales)
    return Guided(model), s.replace(cache=guided)
