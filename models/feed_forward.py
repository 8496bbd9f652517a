"""The feed-forward half of a decoder's block: an MLP, gated or plain, or a mixture of experts."""

from __future__ import annotations

import statistics

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from decodax.models.blocks.zero_experts import unchanged
from decodax.models.config import DecoderConfig
from decodax.models.experts import mix
from decodax.models.layers import ACTIVATIONS, STD, Kernels, Linear, Norm
from decodax.models.routing import ClippedSwiGLU, Experts, route


class XIELU(nnx.Module):
    """The activation xIELU (Huang and Schlag, 2024): `a_p x^2 + b x` for `x > 0`, else `a_n (exp(min(x, eps)) - 1 - x)
    + b x`, where `a_p` is the softplus of a learned number, and `a_n` that of another one plus `b`."""

    def __init__(self) -> None:
        self.alpha_p = nnx.Param(jnp.full(1, jnp.log(jnp.expm1(0.8))), axes=(None,))
        self.alpha_n = nnx.Param(jnp.full(1, jnp.log(jnp.expm1(0.3))), axes=(None,))
        self.beta = nnx.Param(jnp.full((), 0.5), axes=())
        self.eps = nnx.Param(jnp.full((), -1e-6), axes=())

    def __call__(self, x: Array) -> Array:
        y = x.astype(jnp.float32)
        alpha_p, alpha_n, beta, eps = (part[...].astype(jnp.float32)
                                       for part in (self.alpha_p, self.alpha_n, self.beta, self.eps))
        above = jax.nn.softplus(alpha_p) * y * y
        below = (jnp.expm1(jnp.minimum(y, eps)) - y) * (beta + jax.nn.softplus(alpha_n))
        return (jnp.where(y > 0, above, below) + beta * y).astype(x.dtype)


class MLP(nnx.Module):
    """The feed-forward half of a block, gated (Shazeer, 2020) or plain.

    Args:
        c: the configuration.
        rngs: for random weights.
        width: the inner width; None: `c.mlp`.
        axis: name of the axis of the inner width.
        sparsity: the gate of a token is 0 below this quantile of a normal distribution with the mean and the standard
            deviation of its channels, which is subtracted from it above (Gemma 3n); 0: the gate as it is.
        glu: the gated activation; None: that of `c`.
    """

    def __init__(self, c: DecoderConfig, rngs: nnx.Rngs, width: int | None = None, axis: str = "mlp",
                 sparsity: float = 0.0, glu: ClippedSwiGLU | None = None):
        self.c, self.activation, self.sparsity, width = c, c.activation, sparsity, width or c.mlp
        self.glu = glu or c.glu
        into = lambda: Linear(rngs, (c.width, width), ("embed", axis), c.mlp_bias)
        self.gate = into() if c.gated else None
        self.up = into()
        self.act = XIELU() if c.activation == "xielu" else None
        self.down = Linear(rngs, (width, c.width), (axis, "embed"), c.mlp_bias, STD / (2 * len(c.layers)) ** 0.5)

    def __call__(self, x: Array) -> Array:
        act = ACTIVATIONS[self.activation] if self.act is None else self.act
        if self.gate is None:
            return self._scaled(self.down(act(self.up(x))), self.c.mlp_scale)
        gate = self._scaled(self.gate(x), self.c.gate_scale)
        if self.sparsity:
            at = statistics.NormalDist().inv_cdf(self.sparsity)
            gate = jax.nn.relu(gate - gate.mean(-1, keepdims=True) - at * gate.std(-1, keepdims=True))
        both = act(gate) * self.up(x) if self.glu is None else self.glu(gate, self.up(x))
        return self._scaled(self.down(both), self.c.mlp_scale)

    def _scaled(self, y: Array, factor: float) -> Array:
        return y if factor == 1.0 else y * factor


class Mixture(nnx.Module):
    """The feed-forward half of a block as a mixture of experts, with their kernels stacked: `[E, in, out]`. `glu` is
    the gated activation of its shared expert, see `MLP`."""

    def __init__(self, c: DecoderConfig, e: Experts, rngs: nnx.Rngs, glu: ClippedSwiGLU | None = None):
        self.e, self.activation = e, c.activation
        self.router = Linear(rngs, (c.width, e.outputs), ("embed", None), e.bias)
        self.correction = nnx.Param(jnp.zeros(e.outputs), axes=(None,)) if e.correction else None
        self.hashed = nnx.Param(jax.random.randint(rngs.params(), (e.hashed, e.chosen), 0, e.count).astype(jnp.float32),
                                axes=("vocab", None)) if e.hashed else None
        wide, narrow, width = ("experts", None, "expert_mlp"), ("experts", "expert_mlp", None), e.latent or c.width
        into = lambda: Kernels(rngs, (e.count, width, e.width), wide, STD, e.bias)
        self.gate = into() if c.gated else None
        self.up = into()
        self.down = Kernels(rngs, (e.count, e.width, width), narrow, STD / (2 * len(c.layers)) ** 0.5, e.bias)
        self.latent_in = Linear(rngs, (c.width, width), ("embed", None), False) if e.latent else None
        self.latent_out = Linear(rngs, (width, c.width), (None, "embed"), False) if e.latent else None
        self.shared = MLP(c, rngs, e.shared, "shared_mlp", glu=glu) if e.shared else None
        self.shared_gate = Linear(rngs, (c.width, 1), ("embed", None), False) if e.shared_gate else None
        self.expert_scale = nnx.Param(jnp.ones(e.count), axes=(None,)) if e.expert_scale else None
        norm = lambda: Norm(c.norm, (c.width,), ("embed",)) if e.branch_norms else None
        self.router_in, self.experts_in, self.shared_in, self.experts_out, self.shared_out = (norm() for _ in range(5))

    def __call__(self, x: Array, tokens: Array | None = None) -> Array:
        """Returns `f[B, W, D]`. `tokens` are the token ids `i32[B, W]` of the nodes with the inputs `x`; a mixture
        whose experts are `hashed` takes them."""
        flat, normed = x.reshape(-1, x.shape[-1]), lambda norm, y: y if norm is None else norm(y)
        # In float32: the choice must not depend on rounding to the weights' dtype.
        logits = normed(self.router_in, flat).astype(jnp.float32) @ self.router.kernel[...].astype(jnp.float32)
        if self.router.bias is not None:
            logits = logits + self.router.bias[...].astype(jnp.float32)
        told = None
        if self.hashed is not None:
            if tokens is None:
                raise ValueError("experts: got no token ids, by which experts are chosen (hashed)")
            told = self.hashed[...][tokens.reshape(-1)].astype(jnp.int32)
        which, weights = route(logits * self.e.logit_scale, self.e,
                               None if self.correction is None else self.correction[...], told)
        if self.expert_scale is not None:
            weights = weights * self.expert_scale[...].astype(jnp.float32)[which]
        up, down = (part.kernel.get_value() for part in (self.up, self.down))
        gate = None if self.gate is None else self.gate.kernel.get_value()
        biases = (None if self.gate is None or self.gate.bias is None or self.up.bias is None or self.down.bias is None
                  else (self.gate.bias[...], self.up.bias[...], self.down.bias[...]))
        narrow = normed(self.experts_in, flat) if self.latent_in is None else self.latent_in(flat)
        out = mix(narrow, which, weights, gate, up, down, ACTIVATIONS[self.activation], biases,
                  self.e.where == "input", self.e.glu, self.e.zero > 0)
        if self.e.zero:
            out = out + unchanged(flat, which, weights, self.e.count)
        out = normed(self.experts_out, out if self.latent_out is None else self.latent_out(out))
        if self.shared is not None:
            beside = normed(self.shared_out, self.shared(normed(self.shared_in, flat)))
            if self.shared_gate is not None:
                beside = jax.nn.sigmoid(self.shared_gate(flat)) * beside
            out = out + beside
        return out.reshape(x.shape)
