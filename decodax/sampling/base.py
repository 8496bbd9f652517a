"""Transforms of logits: the base class, the temperature, and chains of them for one row and one position."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import jax.numpy as jnp
from jax import Array

from decodax.common.struct import Struct, struct
from decodax.pallas_kernels import vocabulary
from decodax.sampling.draw import first_argmax

PyTree = Any

Reads = Literal["nothing", "bag", "sequence"]
"""What a transform reads of the earlier tokens: see `Transform.needs`."""

Stage = Literal["logits", "probabilities", "last"]
"""Position of a user's transform in the chain: see `Transform.stage`."""

TRUNCATIONS = "k", "p", "min_p"
"""Truncations that `decodax.pallas_kernels.vocabulary.draw` applies after the temperature, in this order: see
`Transform.truncation`."""


@struct
class Context(Struct):
    """What a transform sees of one row at one position. There is no batch axis.

    Attributes:
        tokens: `i32[N]`, the sequence by position, prompt first; -1 where no token is known. In left-to-right decoding
            the known tokens are those below `length`; on a diffusion canvas they lie on both sides of it.
        length: `i32[]`, the index of the token to be chosen.
        prompt_length: `i32[]`, the number of prompt tokens.
        key: the row's random key. A transform that draws random numbers uses `keys.at(ctx.key, ctx.length,
            Purpose.TRANSFORM)`.
    """

    tokens: Array
    length: Array
    prompt_length: Array
    key: Array


class Transform(Struct):
    """Base class of the links of a sampling chain. Its array fields hold one value per row: they have shape `[B, ...]`
    in a `Policy` and no batch axis inside the methods below.

    `needs` declares what the transform reads of the text: "nothing", the "bag" of earlier tokens in any order, or the
    "sequence". Samplers that fill positions in any order accept the first two and refuse the third. A transform with a
    state of its own (an automaton, Mirostat's mu) returns a pytree from `init`; most read the context and need none. A
    state must not contain an array of vocabulary size.

    `stage` declares where `build(transforms=...)` puts the transform. It is a class variable, or a static field set by
    each instance, as in `Custom`:

    - "logits": before the temperature, after the penalties and bans of `build`. Penalties, biases and bans belong here,
      and everything that greedy decoding must obey.
    - "probabilities": after the temperature and the truncations of `build` (top-k to eta), before XTC, dynamic
      temperature and Mirostat. Truncations belong here.
    - "last": after all others.

    After the temperature a greedy row has only its largest logit left. It keeps that token whatever later transforms
    return.

    `by_token` declares that `advance` depends on the token alone, as an automaton's does. Such a state is also tracked
    along the tokens of a draft model, so that drafts obey the transform. Drafts ignore other transforms with a state.
    """

    needs: ClassVar[Reads] = "nothing"
    stage: ClassVar[Stage] = "logits"
    by_token: ClassVar[bool] = False

    def bound(self, tables: tuple[Any, ...]) -> Transform:
        """Returns this transform with its share of the policy's `tables`, which all rows share."""
        return self

    def truncation(self) -> tuple[str, Array] | None:
        """Returns `(name, values)` if the transform does exactly one of `TRUNCATIONS` and nothing else, otherwise None.

        It is called on the policy's own transforms, with a batch axis.
        """
        return None

    def init(self, ctx: Context) -> PyTree:
        """Returns the state after the prompt in `ctx`."""
        return None

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        """Maps logits `f32[V]` to logits `f32[V]`; -inf removes a token."""
        raise NotImplementedError

    def note(self, state: PyTree, ctx: Context, logits: Array) -> PyTree:
        """Returns the state with anything that `advance` needs from `logits`, the input of this transform."""
        return state

    def advance(self, state: PyTree, token: Array, log_prob: Array) -> PyTree:
        """Returns the state after `token` (`i32[]`), whose log-probability under the whole chain was `log_prob`
        (`f32[]`)."""
        return state


SCORES = (1e-30, 1e30)
"""Range of temperatures for scores; outside of it, a log-probability divided by one overflows float32."""


@struct
class Temperature(Transform):
    """Divides logits by `temperature` (`f32[B]`). At 0 only the first largest logit remains, which is greedy decoding.

    For temperatures near 0 the largest logit is subtracted first, so that quotients do not overflow
    (`vocabulary.cooled`). Equal largest logits stay equally likely at every temperature above 0.

    >>> Temperature(jnp.float32(0.5)).logits(None, None, jnp.array([1.0, 2.0])).tolist()
    [2.0, 4.0]
    >>> Temperature(jnp.float32(0.0)).logits(None, None, jnp.array([1.0, 2.0])).tolist()
    [-inf, 2.0]
    """

    temperature: Array

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        greedy = self.temperature == 0
        # A NaN among the logits counts as the largest, so it stays visible.
        best = jnp.where(jnp.arange(logits.shape[-1]) == first_argmax(logits), logits, -jnp.inf)
        return jnp.where(greedy, best, vocabulary.cooled(logits, jnp.where(greedy, 1, self.temperature)))


@struct
class WarmTemperature(Temperature):
    """A temperature that is above 0 in all rows, so the search for the largest logit is left out."""

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        return vocabulary.cooled(logits, self.temperature)


@struct
class ScoreTemperature(WarmTemperature):
    """Divides log-probabilities that serve as scores of texts. Nothing is subtracted, so scores of texts stay
    comparable."""

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        return logits / jnp.clip(self.temperature, *SCORES)
