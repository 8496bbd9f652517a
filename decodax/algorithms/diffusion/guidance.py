"""Classifier-free guidance of masked diffusion (LLaDA, Nie et al., 2025): with the prompt against a prompt of mask
tokens.

As in `decodax.sampling.guidance`, it is a model that wraps a model. Each forward pass scores the canvas twice, once
with the prompt and once with mask tokens in its place, and the logits are `u + scale * (c - u)`, with the conditional
logits `c` and the unconditional ones `u`. LLaDA's `cfg_scale` is the scale minus 1. Algorithms get one set of logits,
so every sampler, cache rule and verifier works as without guidance.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from decodax.common.struct import static, struct
from decodax.core import drivers
from decodax.core.algorithm import Algorithm
from decodax.core.state import State
from decodax.core.types import Model, Params
from decodax.core.window import Window
from decodax.sampling.guidance import Guided, GuidedCache, Unconditional


@struct
class MaskedPrompt(Unconditional):
    """The input of the unconditional branch of classifier-free guidance for diffusion models: the text with mask tokens
    in place of the prompt.

    Attributes:
        prompt_length: `i32[B]`, number of prompt tokens.
        mask: static; id of the mask token.
    """

    prompt_length: Array
    mask: int = static()

    def window(self, window: Window) -> Window:
        # several canvases of a row may stand side by side in the batch
        length = jnp.repeat(self.prompt_length, window.tokens.shape[0] // self.prompt_length.shape[0])
        hidden = window.positions < length[:, None]
        return window.replace(tokens=jnp.where(hidden, jnp.int32(self.mask), window.tokens))


def guide(alg: Algorithm, model: Model, params: Params, policy: Any, s: State, scale: Any, mask: int,
          prefills: bool) -> tuple[Model, State]:
    """Puts a state before its first round under guidance, and returns the guided model and the new state.

    Args:
        alg: the sampler.
        model: the network.
        params: weights.
        policy: the sampling policy.
        s: the state.
        scale: guidance scale, one number or `f32[B]`. 1: no guidance; 0: the prompt is ignored.
        mask: id of the mask token.
        prefills: True if the prompt's entries are in the cache already.
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
    cache = GuidedCache(conditional=s.cache, unconditional=unconditional,
                        other=MaskedPrompt(prompt_length=s.prompt_length + 0, mask=mask),
                        scale=jnp.broadcast_to(jnp.asarray(scale, jnp.float32), (s.batch,)))
    return Guided(model), s.replace(cache=cache)
