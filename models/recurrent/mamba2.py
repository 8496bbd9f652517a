"""Mamba-2 (Dao and Gu, 2024, "Transformers are SSMs"): a decoder of state-space layers, without attention.

A layer projects its input to a gate `z`, to `x` (`H` heads of `P` channels), to `B` and `C` (`G` groups of `N` states),
and to a time step `dt` for each head. A short causal convolution is applied to `x`, `B` and `C`. Then

    S <- exp(dt A) S + B (dt x)^T        y = C^T S + D x        out = W RMS(y silu(z))

with an `A < 0` for each head, and the root mean square over each of the `G` groups of channels. Heads share the `B` and
`C` of their group, as query heads share keys. The recurrence is linear, so a window, chain or tree, is computed by
matrix products from the state before it, and a prompt in chunks of them (the paper's state-space duality; see
`decodax.cache.recurrence`). A row's cache is one state per layer and the last few inputs of the convolution, whatever
the length of the text.

The layouts of Hugging Face (`Mamba2ForCausalLM`) and of state-spaces/mamba are loaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array

from decodax.cache import LinearRecurrent
from decodax.common.arguments import check_counts
from decodax.core.cache import Cache
from decodax.core.types import no_inputs
from decodax.core.window import Window
from decodax.models.packed import multiply
from decodax.models.recurrent.options import SsdShape
from decodax.models.recurrent.ssd import convolve, gated, steps
from decodax.models.recurrent.state_space import StateSpace, biased, first_steps, stacked
from decodax.models.transformer import Weights
from decodax.models.weight_source import WeightSource, plain

Change = Callable[[Array], Array]


def same(x: Array) -> Array:
    return x


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mamba2Config(SsdShape):
    """The shape and options of a Mamba-2: those of its blocks, and of the network.

    Attributes:
        vocab: vocabulary size `V`.
        width: model width `D`.
        layers: number of layers `L`.
        tied: True uses the embedding table as the output head.
        wide: True keeps the residual stream in float32, whatever the weights' dtype.
    """

    vocab: int
    width: int
    layers: int
    tied: bool = False
    wide: bool = True

    def __post_init__(self) -> None:
        check_counts(self, "vocab", "width", "layers")
        super().__post_init__()


@dataclasses.dataclass(frozen=True)
class Mamba2(StateSpace):
    """A Mamba-2. It is compared by value and static under jit.

    Attributes:
        config: shape and options.
        dtype: dtype of activations and of the convolution's inputs in the cache, as a name. States are float32.
    """

    config: Mamba2Config
    dtype: str = "float32"

    def init_cache(self, batch: int, capacity: int, *, params: Any = None, inputs: Any = None) -> Cache:
        no_inputs(self, inputs)
        c = self.config
        return LinearRecurrent(
            rings=tuple(jnp.zeros((batch, c.conv - 1, c.channels), self.dtype) for _ in range(c.layers)),
            states=tuple(jnp.zeros((batch, c.heads, c.state, c.head_dim), jnp.float32) for _ in range(c.layers)),
            length=jnp.zeros(batch, jnp.int32), size=capacity)

    def mixer(self, p: Weights, layer: int, x: Array, window: Window, cache: Any) -> tuple[Array, Any]:
        return mixed(self.config, p, layer, x, window, cache)

    def sources(self) -> dict[str, WeightSource]:
        return sources(self.config)

    def first(self, name: str, shape: tuple[int, ...]) -> Array | None:
        """Returns the initial `A`, from -1 to -`H`, and time steps from 0.001 to 0.1 that grow geometrically from head
        to head; None for other weights."""
        if name == "A_log":
            return jnp.log(jnp.arange(1, self.config.heads + 1, dtype=jnp.float32))
        return first_steps(self.config.heads) if name == "dt_bias" else None


def mixed(c: Mamba2Config, p: Weights, layer: int, x: Array, window: Window, cache: Any, conv: Change = same,
          out: Change = same) -> tuple[Array, Any]:
    """Runs a layer's mixer on its normed input `x`, `f[B, W, D]`. Returns its output `f[B, W, D]`, and the layer's
    entry, what a commit writes to the cache.

    Args:
        c: the configuration.
        p: the layer's weights.
        layer: the layer's index.
        x: the normed stream.
        window: the window.
        cache: the cache.
        conv: changes the outputs of the convolution, `[B, W, channels]`.
        out: changes the inputs of the last projection, `[B, W, inner]`.
    """
    z, into, dt = projected(c, p, x)
    past = cache.before(layer, into, window)                                            # [B, W, conv - 1, channels]
    u, B, C = convolved(c, p, jnp.concatenate([past, into[:, :, None]], 2), conv)
    dt, decay = steps(c, p, dt)
    heads = u.astype(jnp.float32).reshape(*u.shape[:2], c.heads, c.head_dim)
    y, entry = cache.recur(layer, C, B, heads * dt[..., None], decay, into, window, chunk=c.chunk)
    y = y + heads * p["D"].astype(jnp.float32)[:, None]
    y = out(gated(c, p["gated_norm"], y.reshape(u.shape), z).astype(x.dtype))
    return biased(multiply(y, p["out"]["kernel"]), p["out"]), entry


def convolved(c: Mamba2Config, p: Weights, taps: Array, change: Change = same) -> tuple[Array, Array, Array]:
    """Applies the convolution. Returns `x`, `[B, W, inner]`, and `B` and `C`, `[B, W, G, N]`.

    Args:
        c: the configuration.
        p: the layer's weights.
        taps: `[B, W, conv, channels]`, the inputs of each node's convolution, its own last.
        change: changes the convolution's outputs, see `mixed`.
    """
    return divided(c, change(convolve(taps, p["conv"]["taps"][:, 0], p["conv"]["bias"] if c.conv_bias else None)))


def divided(c: Mamba2Config, y: Array) -> tuple[Array, Array, Array]:
    """Splits the convolution's channels into `x`, `[B, W, inner]`, and `B` and `C`, `[B, W, G, N]`."""
    group = lambda a: a.reshape(*a.shape[:2], c.groups, c.state)
    middle = c.inner + c.groups * c.state
    return y[..., :c.inner], group(y[..., c.inner:middle]), group(y[..., middle:])


def projected(c: Mamba2Config, p: Weights, x: Array) -> tuple[Array, Array, Array]:
    """Applies a layer's first projection to its normed input `x`, `[B, W, D]`. Returns the gate `[B, W, inner]`, the
    inputs of the convolution `[B, W, channels]`, and the time steps before their bias and softplus, `[B, W, H]`."""
    y = biased(multiply(x, p["in"]["kernel"]), p["in"])
    return y[..., :c.inner], y[..., c.inner:c.inner + c.channels], y[..., c.inner + c.channels:]


def sources(c: Mamba2Config, present: Collection[str] = ()) -> dict[str, WeightSource]:
    """Returns the shape of every weight and the tensor that holds it, by the weight's dotted path, for a file with the
    tensors `present`."""
    table = "embedding" if "backbone.embedding.weight" in present else "embeddings"     # state-spaces/mamba's name
    own = lambda mixer: {"A_log": plain(f"{mixer}.A_log", c.heads), "D": plain(f"{mixer}.D", c.heads),
                         "dt_bias": plain(f"{mixer}.dt_bias", c.heads),
                         "gated_norm": plain(f"{mixer}.norm.weight", c.inner)}
    return stacked(c, c.inner + c.channels + c.heads, c.channels, own, table)


def is_mamba2(c: Mapping[str, Any]) -> bool:
    """True if a `config.json` is that of a Mamba-2: in Hugging Face's layout, by its `model_type`, or in that of the
    authors, by the entry `ssm_cfg`."""
    return c.get("model_type") == "mamba2" or ("model_type" not in c and isinstance(c.get("ssm_cfg"), Mapping))


def read_mamba2(c: Mapping[str, Any]) -> Mamba2Config:
    """Returns the Mamba-2 that a `config.json` describes.

    Raises:
        ValueError: an entry is missing, or an option is not supported.
    """
    try:
        return _of_transformers(c) if "model_type" in c else _of_state_spaces(c)
    except KeyError as e:
        raise ValueError(f"config.json of a mamba2 model lacks {e}") from None


def entries_of(c: Mamba2Config) -> dict[str, Any]:
    """Returns the entries of a `config.json` in Hugging Face's layout for `c`, the inverse of `read_mamba2`."""
    if c.inner % c.width:
        raise ValueError(f"config: got {c.inner} channels for width {c.width}, the layout takes a multiple")
    found = {"architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "vocab_size": c.vocab,
             "hidden_size": c.width, "num_hidden_layers": c.layers, "num_heads": c.heads, "head_dim": c.head_dim,
             "expand": c.inner // c.width, "n_groups": c.groups, "state_size": c.state, "conv_kernel": c.conv,
             "chunk_size": c.chunk, "layer_norm_epsilon": c.eps, "use_bias": c.bias, "use_conv_bias": c.conv_bias,
             "tie_word_embeddings": c.tied, "residual_in_fp32": c.wide, "hidden_act": "silu"}
    limit = [x if x != float("inf") else {"__float__": "Infinity"} for x in c.steps]
    return found if c.steps == (0.0, float("inf")) else {**found, "time_step_limit": limit}


def _of_transformers(c: Mapping[str, Any]) -> Mamba2Config:
    if c.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ValueError(f"hidden_act: got {c['hidden_act']!r}, supported is 'silu'")
    width, heads, head_dim = c["hidden_size"], c.get("num_heads", 128), c.get("head_dim", 64)
    if int(c.get("expand", 2) * width) != heads * head_dim:
        raise ValueError(f"num_heads: got {heads} of head_dim = {head_dim}, takes expand * hidden_size = "
                         f"{int(c.get('expand', 2) * width)} channels in all")
    return Mamba2Config(
        vocab=c["vocab_size"], width=width, layers=c["num_hidden_layers"], heads=heads, head_dim=head_dim,
        groups=c.get("n_groups", 8), state=c.get("state_size", 128), conv=c.get("conv_kernel", 4),
        chunk=c.get("chunk_size", 256), eps=c.get("layer_norm_epsilon", 1e-5), bias=c.get("use_bias", False),
        conv_bias=c.get("use_conv_bias", True), steps=_limit(c, "time_step_limit"),
        tied=c.get("tie_word_embeddings", False), wide=c.get("residual_in_fp32", True))


def _of_state_spaces(c: Mapping[str, Any]) -> Mamba2Config:
    own = {"layer": "Mamba1", **c["ssm_cfg"]}
    fixed = {"layer": "Mamba2", "rmsnorm": True, "norm_before_gate": False, "D_has_hdim": False, "activation": "silu",
             "d_ssm": None}
    for name, taken in fixed.items():
        if own.get(name, taken) != taken:
            raise ValueError(f"ssm_cfg.{name}: got {own[name]!r}, supported is {taken!r}")
    for name, none in (("attn_layer_idx", []), ("d_intermediate", 0)):
        if c.get(name, none) != none:
            raise ValueError(f"{name}: got {c[name]!r}, supported is {none!r}")
    if not c.get("rms_norm", True):
        raise ValueError("rms_norm: got False, supported is True")
    width, many = c["d_model"], c.get("pad_vocab_size_multiple", 8)
    inner, head_dim = own.get("expand", 2) * width, own.get("headdim", 64)
    if inner % head_dim:
        raise ValueError(f"ssm_cfg.headdim: got {head_dim}, takes a divisor of {inner} channels")
    return Mamba2Config(
        vocab=-(-c["vocab_size"] // many) * many, width=width, layers=c["n_layer"], heads=inner // head_dim,
        head_dim=head_dim, groups=own.get("ngroups", 1), state=own.get("d_state", 128), conv=own.get("d_conv", 4),
        chunk=own.get("chunk_size", 256), bias=own.get("bias", False), conv_bias=own.get("conv_bias", True),
        steps=_limit(own, "dt_limit"), tied=c.get("tie_embeddings", True), wide=c.get("residual_in_fp32", True))


def _limit(c: Mapping[str, Any], key: str) -> tuple[float, float]:
    """Returns the bounds of time steps. JSON has no infinity, for which transformers writes `{"__float__":
    "Infinity"}`."""
    given = c.get(key, (0.0, float("inf")))
    try:
        low, high = (float(x["__float__"] if isinstance(x, Mapping) else x) for x in given)
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{key}: got {given!r}, takes two numbers") from None
    return low, high
