"""Classifier-free guidance of masked diffusion (LLaDA, Nie et al. 2025): the prompt against a prompt of masks.

As in `decodax.policy.guidance` it is a model that wraps a model: each forward scores the canvas twice, once with the
prompt and once with the mask token in its place, and the logits are `u + scale * (c - u)`. LLaDA's `cfg_scale` is the
scale less 1. Algorithms see one set of logits, so every sampler, cache rule and verifier works as without it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.cache import Cache, Window, WindowKV
from decodax.core import drivers
from decodax.core.state import State
from decodax.core.types import Algorithm, Model, Out, Params
from decodax.struct import Struct, struct


@struct
class MaskedPromptCache(Struct):
    """The caches of both branches, which hold the same slots.

    Attributes:
        conditional, unconditional: caches of the wrapped model.
        prompt_length: `i32[B]`. scale: `f32[B]`.
    """

    conditional: Any
    unconditional: Any
    prompt_length: Array
    scale: Array

    @property
    def capacity(self) -> int:
        return self.conditional.capacity

    def attend(self, *args: Any, **kwargs: Any) -> Array:
        raise NotImplementedError("a guided cache is read by MaskedPrompt.apply, branch by branch")

    def commit(self, kv: WindowKV, slots: Array) -> MaskedPromptCache:
        half = len(kv) // 2
        return self.replace(conditional=self.conditional.commit(kv[:half], slots),
                            unconditional=self.unconditional.commit(kv[half:], slots))

    def select(self, rows: Array) -> MaskedPromptCache:
        branches = dict(conditional=self.conditional.select(rows), unconditional=self.unconditional.select(rows))
        return self.replace(prompt_length=self.prompt_length[rows], scale=self.scale[rows], **branches)


@dataclasses.dataclass(frozen=True)
class MaskedPrompt:
    """`base` under guidance; its cache is a `MaskedPromptCache`. `mask`: the id of the mask token."""

    base: Model
    mask: int

    def init_cache(self, batch: int, capacity: int) -> Cache:
        raise NotImplementedError("a guided cache is made from a state, by MaskedDiffusion.guide")

    def apply(self, params: Any, window: Window, cache: Any) -> Out:
        # several canvases of a row may stand side by side in the batch
        length = jnp.repeat(cache.prompt_length, window.tokens.shape[0] // cache.prompt_length.shape[0])
        hidden = window.positions < length[:, None]
        other = window.replace(tokens=jnp.where(hidden, jnp.int32(self.mask), window.tokens), begun=None)
        with_prompt = self.base.apply(params, window, cache.conditional)
        without = self.base.apply(params, other, cache.unconditional)

        def head(hidden: Array) -> Array:
            c, u = (jax.nn.log_softmax(out.head(h)) for out, h in
                    zip((with_prompt, without), jnp.split(hidden, 2, axis=-1), strict=True))
            scale = cache.scale.reshape(-1, *[1] * (c.ndim - 1))
            return u + scale * (c - u)

        return Out(hidden=jnp.concatenate([with_prompt.hidden, without.hidden], -1),
                   kv=(*with_prompt.kv, *without.kv), head=head)


def guide(alg: Algorithm, model: Model, params: Params, policy: Any, s: State, scale: Any, mask: int,
          prefills: bool) -> tuple[MaskedPrompt, State]:
    """Puts a state before its first round under guidance.

    Args:
        scale: one number or `f32[B]`; 1 is no guidance, 0 no prompt.
        prefills: whether the prompt's entries are in the cache already.
    """
    size = s.cache.capacity
    if prefills:
        place = jnp.arange(size, dtype=jnp.int32)
        tokens = jnp.where(place < s.prompt_length[:, None], jnp.int32(mask), s.tokens[:, :size])
        other = drivers.begin(alg, model, params, policy, tokens, s.prompt_length, size=size,
                              max_new=jnp.minimum(s.max_length - s.prompt_length, 1))
        unconditional = drivers.prefill(alg, model, params, other, width=min(256, size)).cache
    else:
        unconditional = model.init_cache(s.batch, size)
    # `+ 0`: the state is donated, and no array may stand in it twice
    cache = MaskedPromptCache(conditional=s.cache, unconditional=unconditional, prompt_length=s.prompt_length + 0,
                              scale=jnp.broadcast_to(jnp.asarray(scale, jnp.float32), (s.batch,)))
    return MaskedPrompt(model, mask), s.replace(cache=cache)
