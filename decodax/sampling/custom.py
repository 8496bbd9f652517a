"""A transform that calls a plain function."""

from __future__ import annotations

from collections.abc import Callable

from jax import Array

from decodax.common.struct import static, struct
from decodax.sampling.base import Context, PyTree, Reads, Stage, Transform


@struct
class Custom(Transform):
    """A transform that applies a function `fn(ctx, logits) -> logits` to one row at one position.

    `fn` maps `f32[V]` to `f32[V]` and must be pure and traceable. Define it once, at module level: it is static, so a
    new function object triggers a new compilation.

    Attributes:
        fn: static; the function.
        needs: static; the part of `ctx.tokens` on which `fn` depends: "nothing", the "bag" of known tokens in any
            order, or their "sequence".
        stage: static; its position in the chain, see `Transform`.

    >>> import jax.numpy as jnp
    >>> Custom(lambda ctx, logits: logits.at[0].set(-jnp.inf), needs="nothing").logits(None, None, jnp.ones(2)).tolist()
    [-inf, 1.0]
    """

    fn: Callable[[Context, Array], Array] = static()
    needs: Reads = static(default="sequence")  # type: ignore[misc]
    stage: Stage = static(default="logits")  # type: ignore[misc]

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        return self.fn(ctx, logits)
