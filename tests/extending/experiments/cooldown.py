"""A sampling transform with a state: a penalty on the latest tokens that fades with their age."""

import jax.numpy as jnp
from jax import Array

from decodax.common.struct import static, struct
from decodax.sampling import Transform


@struct
class Cooldown(Transform):
    """Subtracts `penalty * fade ** age` from the logit of each of the last `span` new tokens.

    Attributes:
        penalty, fade: `f32[B]`. span: static.
    """

    penalty: Array
    fade: Array
    span: int = static(8)

    by_token = True

    def init(self, ctx):
        return jnp.full(self.span, -1, jnp.int32)                # the newest token first

    def logits(self, state, ctx, logits):
        cost = self.penalty * self.fade ** jnp.arange(self.span)
        same = (state[:, None] == jnp.arange(logits.shape[0])).astype(jnp.float32)
        return logits - cost @ same

    def advance(self, state, token, log_prob):
        return jnp.roll(state, 1).at[0].set(token)
