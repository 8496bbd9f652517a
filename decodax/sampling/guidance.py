"""Classifier-free guidance for language models (Sanchez et al. 2023): two contexts, one distribution.

The unconditional branch is a second cache beside the first, so guidance is a model that wraps a model: samplers,
verifiers and trees see one set of logits and stay exact. Logits are `u + scale * (c - u)` of the log-probabilities,
as in transformers.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.cache.wrapper import Combined
from decodax.common.struct import Struct, struct
from decodax.core import drivers
from decodax.core.around import AroundModel
from decodax.core.cache import Cache, Entries
from decodax.core.capabilities import needs_refresh
from decodax.core.memory import bucket
from decodax.core.state import State
from decodax.core.types import Algorithm, Model, Out, Params
from decodax.core.window import Window


class Unconditional(Struct, abc.ABC):
    """What the unconditional branch reads: derive a `@struct` of per-row arrays from this."""

    @abc.abstractmethod
    def window(self, window: Window) -> Window:
        """The window as that branch sees it."""

    def slots(self, slots: Array) -> Array:
        """`i32[B, W]`: where its cache keeps the entries that the other one keeps at `slots`."""
        return slots


@struct
class NegativePrompt(Unconditional):
    """Another prompt, or the last token of the prompt alone.

    Attributes:
        first: `i32[B]` position of the last prompt token, where the unconditional branch begins.
        opening: `i32[B]` the token it has there: the negative prompt's last, or the prompt's.
        offset: `i32[B]` how much smaller its positions are.
    """

    first: Array
    opening: Array
    offset: Array

    def window(self, window: Window) -> Window:
        here = window.positions >= self.first[:, None]
        opens = window.positions == self.first[:, None]
        return window.replace(tokens=jnp.where(opens, self.opening[:, None], window.tokens),
                              positions=jnp.maximum(window.positions - self.offset[:, None], 0),
                              live=window.live & here)

    def slots(self, slots: Array) -> Array:
        return jnp.where(slots >= self.first[:, None], slots - self.offset[:, None], -1)


@struct
class GuidedCache(Combined):
    """The caches of both branches.

    Attributes:
        conditional, unconditional: caches of the wrapped model.
        other: what the unconditional branch reads. scale: `f32[B]`.
    """

    members = ("conditional", "unconditional")

    conditional: Any
    unconditional: Any
    other: Unconditional
    scale: Array

    def commit(self, entries: Entries, slots: Array) -> GuidedCache:
        half = len(entries) // 2
        return self.replace(conditional=self.conditional.commit(entries[:half], slots),
                            unconditional=self.unconditional.commit(entries[half:], self.other.slots(slots)))

@dataclasses.dataclass(frozen=True)
class Guided(AroundModel):
    """`base` under guidance; its cache is a `GuidedCache`, made from a state by `guide`."""

    def init_cache(self, batch: int, capacity: int, *, params: Any = None, inputs: Any = None) -> Cache:
        raise NotImplementedError("a guided cache is made from a state, by guide()")

    def apply(self, params: Any, window: Window, cache: Any) -> Out:
        with_prompt = self.base.apply(params, window, cache.conditional)
        without = self.base.apply(params, cache.other.window(window.replace(hints=())), cache.unconditional)

        def head(hidden: Array) -> Array:
            c, u = (jax.nn.log_softmax(out.head(h)) for out, h in
                    zip((with_prompt, without), jnp.split(hidden, 2, axis=-1), strict=True))
            scale = cache.scale.reshape(-1, *[1] * (c.ndim - 1))
            return u + scale * (c - u)

        return Out(hidden=jnp.concatenate([with_prompt.hidden, without.hidden], -1),
                   entries=(*with_prompt.entries, *without.entries), head=head)


def guide(alg: Algorithm, model: Model, params: Params, policy: Any, s: State, scale: Any,
          negative: list[list[int]] | None) -> tuple[Model, State]:
    """Puts a prefilled state under guidance. An algorithm may have a rule of its own, `guide` (masked diffusion does).

    Args:
        scale: one number or `f32[B]`; 1 is no guidance.
        negative: ids of a negative prompt for each row; None begins the other branch with the last prompt token.

    Raises:
        ValueError: the algorithm keeps no cache, or one that reads its text again (`Refreshes`), or the
            model was given inputs.
    """
    if (own := alg.guide(model, params, policy, s, scale)) is not None:
        if negative is not None:
            raise ValueError("negative_prompts: a canvas is guided against masks in the prompt's place, without them")
        return own
    if s.cache.inputs is not None:
        raise ValueError("guidance_scale: got one with inputs; it is not settled what the other branch is given")
    if not alg.caches:
        raise ValueError(f"guidance_scale: {type(alg).__name__} keeps no cache to guide")
    if needs_refresh(s.cache) is not None:
        raise ValueError(f"guidance_scale: got one with {type(s.cache).__name__}, which reads its text again while "
                         "decoding; the other branch has another text. Takes another cache")
    first = s.prompt_length - 1      # `+ 0` below: the state is donated, and no array may stand in it twice
    if negative is None:
        cache = alg.through(model).init_cache(s.batch, s.cache.capacity)
        opening, offset = s.newest, first + 0
    else:
        lengths = np.array([len(row) for row in negative], np.int32)
        # the branch holds its own prompt and whatever the row may still make
        size = bucket(int(lengths.max() + (np.asarray(s.max_length) - np.asarray(s.prompt_length)).max()))
        tokens = np.zeros((s.batch, size), np.int32)
        for row, ids in zip(tokens, negative, strict=True):
            row[:len(ids)] = ids
        other = drivers.begin(alg, model, params, policy, tokens, lengths, size=size,
                              max_new=np.minimum(np.asarray(s.max_length) - np.asarray(s.prompt_length), 1))
        other = drivers.prefill(alg, model, params, other, width=min(256, size))
        cache, opening, offset = other.cache, other.newest, first - (jnp.asarray(lengths) - 1)
    scales = jnp.broadcast_to(jnp.asarray(scale, jnp.float32), (s.batch,))
    guided = GuidedCache(conditional=s.cache, unconditional=cache, scale=scales,
                         other=NegativePrompt(first=first, opening=opening, offset=offset))
    return Guided(model), s.replace(cache=guided)
