"""Transforms of logits: the base class, its context, and the temperature. Each works on one row at one position."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import jax.numpy as jnp
from jax import Array

from decodax.common.struct import Struct, struct
from decodax.pallas_kernels import vocabulary
from decodax.sampling.draw import first_argmax

PyTree = Any

Reads = Literal["nothing", "bag", "sequence"]
"""The earlier tokens that a transform depends on; see `Transform.needs`."""

Stage = Literal["logits", "probabilities", "last"]
"""Position in the chain of a transform that a user adds; see `Transform.stage`."""

TRUNCATIONS = "k", "p", "min_p"
"""Names of the truncations (top-k, top-p, min-p) that `decodax.pallas_kernels.vocabulary.draw` can apply after the
temperature, in this order; see `Transform.truncation`."""


@struct
class Context(Struct):
    """The text of one row, for a transform at one position. There is no batch axis.

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
    """Base class of the transforms in a sampling chain. Its array fields hold one value per row: they have shape `[B,
    ...]` in a `Policy` and no batch axis inside the methods below.

    `needs` declares on which part of the text the transform depends: "nothing", the "bag" of earlier tokens in any
    order, or their "sequence". Samplers that fill positions in any order accept the first two and refuse the third. A
    transform with a state (an automaton, Mirostat's mu) returns a pytree from `init`; most depend on the context alone
    and need no state. A state must not contain an array of vocabulary size.

    `stage` declares where `build(transforms=...)` puts the transform. It is a class variable, or a static field set by
    each instance, as in `Custom`:

    - "logits": before the temperature, after the penalties and bans of `build`. Penalties, biases and bans belong here,
      and everything that greedy decoding must obey.
    - "probabilities": after the temperature and the truncations of `build` (top-k to eta), before XTC, dynamic
      temperature and Mirostat. Truncations belong here.
    - "last": after all others.

    In a greedy row the temperature leaves only the largest logit. The row keeps that token whatever later transforms
    return.

    `by_token` declares that `advance` depends on the token alone, as an automaton's does. Such a state is also tracked
    along the tokens of a draft model, so that drafts obey the transform. Drafts ignore other transforms with a state.
    """

    needs: ClassVar[Reads] = "nothing"
    stage: ClassVar[Stage] = "logits"
    by_token: ClassVar[bool] = False

    def bound(self, tables: tuple[Any, ...]) -> Transform:
        """Returns this transform with arrays taken from `tables`, the policy's arrays that all rows share (such as an
        automaton). By default it needs none and returns itself."""
        return self

    def truncation(self) -> tuple[str, Array] | None:
        """Returns `(name, values)` if the transform equals one of `TRUNCATIONS`, so that a fused kernel can replace it;
        otherwise None.

        Fields and `values` have a batch axis here.
        """
        return None

    def init(self, ctx: Context) -> PyTree:
        """Returns the transform's state after the prompt of one row (`ctx`), without a batch axis; None: it has no
        state."""
        return None

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        """Applies the transform at one position of one row.

        Args:
            state: the transform's state before the token.
            ctx: the text so far.
            logits: `f32[V]`, the output of the transform before this one.

        Returns:
            The new logits, `f32[V]`; -inf forbids a token.
        """
        raise NotImplementedError

    def note(self, state: PyTree, ctx: Context, logits: Array) -> PyTree:
        """Returns the state with what `advance` will need of the input `logits` (`f32[V]`) of this transform. Called at
        each position before its token is drawn; by default nothing is stored."""
        return state

    def advance(self, state: PyTree, token: Array, log_prob: Array) -> PyTree:
        """Returns the transform's state after the drawn token `token` (`i32[]`), whose log-probability after all
        transforms is `log_prob` (`f32[]`)."""
        return state


SCORES = (1e-30, 1e30)
"""Range of temperatures for scores. Outside of it, a log-probability divided by the temperature overflows float32."""


@struct
class Temperature(Transform):
    """Divides logits by `temperature` (`f32[B]`). At 0 only the largest logit remains, the first of equal ones, which
    is greedy decoding.

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
    """Divides logits by `temperature` (`f32[B]`) like `Temperature`, but no row may have temperature 0 (greedy). It is
    faster, since it need not find the largest logit."""

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        return vocabulary.cooled(logits, self.temperature)


@struct
class ScoreTemperature(WarmTemperature):
    """Divides log-probabilities that are added up to scores of texts by the temperature. Unlike `Temperature` it does
    not subtract the largest one, so scores of different texts stay comparable."""

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        return logits / jnp.clip(self.temperature, *SCORES)
