"""Mamba (Gu and Dao, 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces"), the first version.

A layer projects its input to `x` and a gate `z`. A short causal convolution goes over `x`, of which `B`, `C` and the
time step `dt` of each channel are made; then, for each channel and each of its `N` states

    h <- exp(dt A) h + dt B x        y = C . h + D x        out = W (y silu(z))

with `A < 0` of each channel and state. The decay differs from state to state, so there is no form of matrix products
like Mamba-2's (`decodax.models.mamba2`): windows and prompts walk their nodes one after the other. A state is `N`
numbers a channel, 16 as a rule, and each node of a draft window has one.

Loaded is the layout of Hugging Face (`MambaForCausalLM`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.cache import Cache, Recurrent, Window, causal
from decodax.core.types import Model, Out
from decodax.models.mamba2 import biased, norm, shape_of
from decodax.models.names import WeightSource
from decodax.models.packed import embedded, head, multiply
from decodax.models.t5 import nested
from decodax.models.transformer import Weights


@dataclasses.dataclass(frozen=True)
class MambaConfig:
    """The shape and options of a Mamba.

    Attributes:
        vocab: vocabulary size `V`. width: model width `D`. layers: `L`. inner: channels.
        state: `N`. conv: width of the convolution. rank: of the time steps' projection.
        eps: of the norms. bias, conv_bias: whether the projections and the convolution have biases.
        tied: the output head is the embedding.
        wide: the residual stream is float32 whatever the weights are.
    """

    vocab: int
    width: int
    layers: int
    inner: int
    state: int = 16
    conv: int = 4
    rank: int = 1
    eps: float = 1e-5
    bias: bool = False
    conv_bias: bool = True
    tied: bool = True
    wide: bool = True

    def __post_init__(self) -> None:
        for name in ("vocab", "width", "layers", "inner", "state", "conv", "rank"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, takes 1 or more")


@dataclasses.dataclass(frozen=True)
class Mamba(Model):
    """A Mamba, compared by value and static under jit.

    Attributes:
        config: its shape and options. dtype: of activations, as a name. States are float32.
    """

    config: MambaConfig
    dtype: str = "float32"

    def init_cache(self, batch: int, capacity: int, *, params: Any = None, inputs: Any = None) -> Cache:
        self.no_inputs(inputs)
        c = self.config
        empty = lambda: {"ring": jnp.zeros((batch, c.conv - 1, c.inner), self.dtype),
                         "state": jnp.zeros((batch, c.inner, c.state), jnp.float32)}
        return Recurrent(states=tuple(empty() for _ in range(c.layers)), length=jnp.zeros(batch, jnp.int32),
                         size=capacity)

    def apply(self, params: Weights, window: Window, cache: Cache) -> Out:
        c, dtype = self.config, jnp.dtype(self.dtype)
        x = embedded(params["embed"], window.tokens, dtype)
        if window.embeddings is not None and window.embedded is not None:
            x = jnp.where(window.embedded[..., None], window.embeddings.astype(x.dtype), x)
        x, entries, layers = x.astype(jnp.float32 if c.wide else dtype), [], []
        for i in range(c.layers):
            p = params["layers"][str(i)]
            y, entry = self.mixer(p, i, norm(x, p["norm"], c.eps).astype(dtype), window, cache)
            x = x + y
            entries.append(entry)
            layers.append(x)
        last = lambda x: norm(x, params["norm"], c.eps).astype(dtype)

        def logits(hidden: Array) -> Array:
            return multiply(hidden, head(params["embed"]) if c.tied else params["lm_head"]["kernel"], jnp.float32)

        return Out(hidden=last(x), entries=tuple(entries), head=logits, layers=tuple(layers), norm=last)

    def mixer(self, p: Weights, layer: int, x: Array, window: Window, cache: Any) -> tuple[Array, Any]:
        """What a layer with weights `p` adds to the stream, `f[B, W, D]` from the normed one, and its entry."""
        c = self.config
        wide = lambda a: a.astype(jnp.float32)
        A, D, taps = -jnp.exp(wide(p["A_log"])), wide(p["D"]), wide(p["conv"]["taps"])[:, 0]
        into, z = jnp.split(biased(multiply(x, p["in"]["kernel"]), p["in"]), 2, -1)

        def step(own: dict[str, Array], node: Array) -> tuple[dict[str, Array], Array]:
            whole = jnp.concatenate([own["ring"], node[:, None]], 1)                        # [B, conv, inner]
            u = (wide(whole) * taps).sum(1) + (wide(p["conv"]["bias"]) if c.conv_bias else 0)
            u = jax.nn.silu(u).astype(x.dtype)
            low, B, C = jnp.split(multiply(u, p["x"]["kernel"]), [c.rank, c.rank + c.state], -1)
            dt = jax.nn.softplus(wide(biased(multiply(low, p["dt"]["kernel"]), p["dt"])))   # [B, inner]
            state = own["state"] * jnp.exp(dt[..., None] * A) + (dt * wide(u))[..., None] * wide(B)[:, None]
            y = (state * wide(C)[:, None]).sum(-1) + D * wide(u)
            return {"ring": whole[:, 1:], "state": state}, y

        y, entry = cache.walk(layer, step, into, window)
        y = (y * jax.nn.silu(wide(z))).astype(x.dtype)
        return biased(multiply(y, p["out"]["kernel"]), p["out"]), entry

    def forward(self, params: Weights, tokens: Array) -> Array:
        """Logits `f32[B, T, V]` of whole sequences `i32[B, T]`, for training and scoring."""
        B = tokens.shape[0]
        window = causal(tokens, jnp.zeros(B, jnp.int32)).replace(certain=True)
        return self.apply(params, window, self.init_cache(B, 0)).logits()

    def embeddings(self, params: Weights, tokens: Array) -> Array:
        return embedded(params["embed"], tokens, jnp.dtype(self.dtype))

    def init_params(self, key: Array, dtype: jax.typing.DTypeLike = jnp.float32) -> Weights:
        """Fresh weights: kernels normal with the inverse square root of their inputs as deviation, norms and `D` one,
        `A` from -1 to -`N` in each channel, and steps from 0.001 to 0.1 that grow by a constant factor."""
        c, found = self.config, {}
        where = sources(c)
        for (path, source), each in zip(where.items(), jax.random.split(key, len(where)), strict=True):
            shape, name = shape_of(path, source), path.split(".", 2)[-1]
            if name == "A_log":
                made = jnp.broadcast_to(jnp.log(jnp.arange(1, c.state + 1, dtype=jnp.float32)), shape)
            elif name == "dt.bias":
                dt = jnp.geomspace(1e-3, 0.1, c.inner)
                made = dt + jnp.log(-jnp.expm1(-dt))
            elif len(shape) == 1:
                made = (jnp.zeros if name.endswith("bias") else jnp.ones)(shape)
            else:
                made = jax.random.normal(each, shape) * (1.0 if path == "embed" else shape[0] ** -0.5)
            found[path] = made.astype(dtype)
        return nested(found)


def sources(c: MambaConfig, present: Collection[str] = ()) -> dict[str, WeightSource]:
    """Every weight by its dotted path: its shape, and its tensor in a file."""
    kernel = lambda tensor, out, into: WeightSource((f"{tensor}.weight",), True, None, (out, into))
    plain = lambda tensor, *shape: WeightSource((tensor,), False, None, shape)
    found = {"embed": plain("backbone.embeddings.weight", c.vocab, c.width)}
    for i in range(c.layers):
        path, layer = f"layers.{i}", f"backbone.layers.{i}"
        mixer = f"{layer}.mixer"
        found |= {f"{path}.norm": plain(f"{layer}.norm.weight", c.width),
                  f"{path}.in.kernel": kernel(f"{mixer}.in_proj", 2 * c.inner, c.width),
                  f"{path}.conv.taps": WeightSource((f"{mixer}.conv1d.weight",), True, None, (c.inner, 1, c.conv)),
                  f"{path}.x.kernel": kernel(f"{mixer}.x_proj", c.rank + 2 * c.state, c.inner),
                  f"{path}.dt.kernel": kernel(f"{mixer}.dt_proj", c.inner, c.rank),
                  f"{path}.dt.bias": plain(f"{mixer}.dt_proj.bias", c.inner),
                  f"{path}.A_log": plain(f"{mixer}.A_log", c.inner, c.state),
                  f"{path}.D": plain(f"{mixer}.D", c.inner),
                  f"{path}.out.kernel": kernel(f"{mixer}.out_proj", c.width, c.inner)}
        if c.bias:
            found |= {f"{path}.in.bias": plain(f"{mixer}.in_proj.bias", 2 * c.inner),
                      f"{path}.out.bias": plain(f"{mixer}.out_proj.bias", c.width)}
        if c.conv_bias:
            found[f"{path}.conv.bias"] = plain(f"{mixer}.conv1d.bias", c.inner)
    found["norm"] = plain("backbone.norm_f.weight", c.width)
    return found if c.tied else {**found, "lm_head.kernel": kernel("lm_head", c.vocab, c.width)}


def read_mamba(c: Mapping[str, Any]) -> MambaConfig:
    """The Mamba that a `config.json` describes.

    Raises:
        ValueError: an entry is missing, or an option has no counterpart here.
    """
    if c.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ValueError(f"hidden_act: got {c['hidden_act']!r}, supported is 'silu'")
    try:
        width, rank = c["hidden_size"], c.get("time_step_rank", "auto")
        rank = math.ceil(width / 16) if rank == "auto" else rank
        if not isinstance(rank, int) or isinstance(rank, bool):
            raise ValueError(f"time_step_rank: got {rank!r}, takes a whole number or 'auto'")
        return MambaConfig(
            vocab=c["vocab_size"], width=width, layers=c["num_hidden_layers"], inner=int(c.get("expand", 2) * width),
            state=c.get("state_size", 16), conv=c.get("conv_kernel", 4), rank=rank,
            eps=c.get("layer_norm_epsilon", 1e-5), bias=c.get("use_bias", False),
            conv_bias=c.get("use_conv_bias", True), tied=c.get("tie_word_embeddings", True),
            wide=c.get("residual_in_fp32", True))
    except KeyError as e:
        raise ValueError(f"config.json of a mamba model lacks {e}") from None
