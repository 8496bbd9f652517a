"""Classifier-free guidance for language models (Sanchez et al., 2023): one distribution from two contexts.

The unconditional branch has a second cache beside the first. Guidance is a model that wraps a model, so samplers,
verifiers and draft trees get one set of logits and stay exact. With log-probabilities `c` under the condition and `u`
without it, the logits are `u + scale * (c - u)`, as in transformers.
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
from decodax.core import algorithm, drivers
from decodax.core.algorithm import Algorithm, GuidesItself
from decodax.core.around import Around, AroundModel
from decodax.core.cache import Cache, Entries
from decodax.core.memory import bucket, refreshing
from decodax.core.state import State
from decodax.core.types import Model, Out, Params
from decodax.core.window import Window


class Unconditional(Struct, abc.ABC):
    """Base class of the inputs of the unconditional branch in classifier-free guidance: a `@struct` of per-row arrays
    that maps the model's input in the conditional branch, a `Window`, to that in the unconditional one."""

    @abc.abstractmethod
    def window(self, window: Window) -> Window:
        """Returns the model's input in the unconditional branch, given that in the conditional one."""

    def slots(self, slots: Array) -> Array:
        """Returns the slots of the unconditional cache for entries that the conditional cache stores at `slots`,
        `i32[B, W]` both; -1 stores nothing. By default they are the same."""
        return slots


@struct
class NegativePrompt(Unconditional):
    """An unconditional branch with another prompt, or with only the last token of the prompt.

    Attributes:
        first: `i32[B]`, position of the last prompt token, where the unconditional branch joins the text.
        opening: `i32[B]`, the token at that position: the last token of the negative prompt, or of the prompt.
        offset: `i32[B]`, number by which positions in this branch are smaller.
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
    """The caches of both branches of guidance.

    Attributes:
        conditional: cache of the wrapped model with the prompt.
        unconditional: cache of the wrapped model without it.
        other: inputs of the unconditional branch.
        scale: `f32[B]`, the guidance scale.
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
    """The model `base` with classifier-free guidance. Its cache is a `GuidedCache`, which `guide` makes from a
    state."""

    def init_cache(self, batch: int, capacity: int, *, params: Any = None, inputs: Any = None) -> Cache:
        raise NotImplementedError("a guided cache is made from a state by guide()")

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


def check_guidance(alg: Algorithm, model: Model, capacity: int, inputs: Any) -> None:
    """Checks that a method can be guided with a model and its cache.

    Args:
        alg: the decoding method.
        model: the network.
        capacity: capacity of the cache.
        inputs: inputs of the rows beside their tokens, or None.

    Raises:
        ValueError: the method refuses guidance (`Traits.refuses`); there are inputs; or it has no rule of its own, and
            keeps no cache, or one that recomputes entries while decoding (`Refreshes`).
    """
    algorithm.refuse(alg, "guidance_scale")
    if inputs is not None:
        raise ValueError("guidance_scale: cannot be combined with inputs: the unconditional branch has none")
    while isinstance(alg, Around):
        alg = alg.inner
    if isinstance(alg, GuidesItself):
        return
    if not alg.traits.caches:
        raise ValueError(f"guidance_scale: {type(alg).__name__} keeps no cache to guide")
    if (cache := refreshing(alg, model, capacity)) is not None:
        raise ValueError(f"guidance_scale: cannot be combined with {cache}, which reads its text again while decoding, "
                         "since the unconditional branch has another text; takes another cache")


def guide(alg: Algorithm, model: Model, params: Params, policy: Any, s: State, scale: Any,
          negative: list[list[int]] | None) -> tuple[Model, State]:
    """Puts a prefilled state under classifier-free guidance. An algorithm with its own rule (`GuidesItself`), such as
    masked diffusion, uses that.

    Args:
        alg: the decoding method.
        model: the network.
        params: weights of the model and of the method.
        policy: the sampling policy.
        s: the prefilled state.
        scale: one number or `f32[B]`; 1 is no guidance.
        negative: ids of a negative prompt for each row. None: the unconditional branch begins with the last prompt
            token.

    Returns:
        The guided model and its state.

    Raises:
        ValueError: as in `check_guidance`.
    """
    check_guidance(alg, model, s.cache.capacity, s.cache.inputs)
    if (own := algorithm.guide(alg, model, params, policy, s, scale)) is not None:
        if negative is not None:
            raise ValueError("negative_prompts: takes None on a canvas, which is guided against a masked prompt")
        return own
    first = s.prompt_length - 1      # `+ 0` below: the state is donated, and no array may be in it twice
    if negative is None:
        cache = alg.wrap_model(model).init_cache(s.batch, s.cache.capacity)
        opening, offset = s.newest, first + 0
    else:
        lengths = np.array([len(row) for row in negative], np.int32)
        # The branch holds its own prompt and everything that the row may still generate.
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
