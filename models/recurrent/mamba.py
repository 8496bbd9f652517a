"""Mamba, first version (Gu and Dao, 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces").

A layer projects its input to `x` and a gate `z`. A short causal convolution is applied to `x`, from which `B`, `C` and
the time step `dt` of each channel are computed. Then, for each channel and each of its `N` states,

    h <- exp(dt A) h + dt B x        y = C . h + D x        out = W (y silu(z))

with an `A < 0` for each channel and state. The decay differs from state to state, so unlike Mamba-2
(`decodax.models.recurrent.mamba2`) there is no form with matrix products: windows and prompts process their nodes one
after the other. A state has `N` numbers per channel, usually 16, and each node of a draft window has one.

The layout of Hugging Face (`MambaForCausalLM`) is loaded.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.cache import Recurrent
from decodax.common.arguments import check_counts
from decodax.core.cache import Cache
from decodax.core.types import no_inputs
from decodax.core.window import Window
from decodax.models.packed import multiply
from decodax.models.recurrent.options import SelectiveScan
from decodax.models.recurrent.selective_scan import empty, selective_step
from decodax.models.recurrent.state_space import StateSpace, biased, first_steps, stacked
from decodax.models.transformer import Weights
from decodax.models.weight_source import WeightSource, kernel, plain


@dataclasses.dataclass(frozen=True, kw_only=True)
class MambaConfig(SelectiveScan):
    """The shape and options of a Mamba: those of its blocks, and of the network.

    Attributes:
        vocab: vocabulary size `V`.
        width: model width `D`.
        layers: number of layers `L`.
        eps: added to the variance in the norms of layers; blocks have none.
        tied: True uses the embedding table as the output head.
        wide: True keeps the residual stream in float32, whatever the weights' dtype.
    """

    vocab: int
    width: int
    layers: int
    rank: int = 1
    eps: float = 1e-5
    tied: bool = True
    wide: bool = True

    def __post_init__(self) -> None:
        check_counts(self, "vocab", "width", "layers")
        super().__post_init__()


@dataclasses.dataclass(frozen=True)
class Mamba(StateSpace):
    """A Mamba. It is compared by value and static under jit.

    Attributes:
        config: shape and options.
        dtype: dtype of activations, as a name. States are float32.
    """

    config: MambaConfig
    dtype: str = "float32"

    def init_cache(self, batch: int, capacity: int, *, params: Any = None, inputs: Any = None) -> Cache:
        no_inputs(self, inputs)
        c = self.config
        states = tuple(empty(c.conv, c.inner, c.state, batch, self.dtype) for _ in range(c.layers))
        return Recurrent(states=states, length=jnp.zeros(batch, jnp.int32), size=capacity)

    def mixer(self, p: Weights, layer: int, x: Array, window: Window, cache: Any) -> tuple[Array, Any]:
        c = self.config
        wide = lambda a: a.astype(jnp.float32)
        A, D, taps = -jnp.exp(wide(p["A_log"])), wide(p["D"]), wide(p["conv"]["taps"])[:, 0]
        into, z = jnp.split(biased(multiply(x, p["in"]["kernel"]), p["in"]), 2, -1)

        bias = wide(p["conv"]["bias"]) if c.conv_bias else 0.0

        def projected(u: Array) -> tuple[Array, Array, Array]:
            low, B, C = jnp.split(multiply(u, p["x"]["kernel"]), [c.rank, c.rank + c.state], -1)
            return biased(multiply(low, p["dt"]["kernel"]), p["dt"]), B, C

        step = lambda own, node: selective_step(own, node, taps, bias, projected, A, D)
        y, entry = cache.walk(layer, step, into, window)
        y = (y * jax.nn.silu(wide(z))).astype(x.dtype)
        return biased(multiply(y, p["out"]["kernel"]), p["out"]), entry

    def sources(self) -> dict[str, WeightSource]:
        return sources(self.config)

    def first(self, name: str, shape: tuple[int, ...]) -> Array | None:
        """Returns the initial `A`, from -1 to -`N` in each channel, and time steps from 0.001 to 0.1 that grow
        geometrically; None for other weights."""
        if name == "A_log":
            return jnp.broadcast_to(jnp.log(jnp.arange(1, self.config.state + 1, dtype=jnp.float32)), shape)
        return first_steps(self.config.inner) if name == "dt.bias" else None


def sources(c: MambaConfig, present: Collection[str] = ()) -> dict[str, WeightSource]:
    """Returns the shape of every weight and the tensor that holds it in a file, by the weight's dotted path."""
    own = lambda mixer: {"x.kernel": kernel(f"{mixer}.x_proj", c.rank + 2 * c.state, c.inner),
                         "dt.kernel": kernel(f"{mixer}.dt_proj", c.inner, c.rank),
                         "dt.bias": plain(f"{mixer}.dt_proj.bias", c.inner),
                         "A_log": plain(f"{mixer}.A_log", c.inner, c.state), "D": plain(f"{mixer}.D", c.inner)}
    return stacked(c, 2 * c.inner, c.inner, own)


def read_mamba(c: Mapping[str, Any]) -> MambaConfig:
    """Returns the Mamba that a `config.json` describes.

    Raises:
        ValueError: an entry is missing, or an option is not supported.
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
