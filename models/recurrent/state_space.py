"""Base classes of recurrent networks and of models with state-space layers: residual stream, norms, embedding and head.

A state-space layer adds the output of its mixer, applied to the normed residual stream, to the stream. Each model
defines its mixer.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.core.cache import Cache
from decodax.core.types import Out, RandomWeights, ShowsWeights
from decodax.core.window import Window, causal
from decodax.models.packed import embedded, head, multiply
from decodax.models.transformer import Weights
from decodax.models.weight_source import WeightSource, kernel, nested, plain, shape_of


@dataclasses.dataclass(frozen=True)
class RecurrentNetwork(ShowsWeights, RandomWeights):
    """Base class of networks with recurrent states: a frozen dataclass.

    Attributes:
        config: shape and options.
        dtype: dtype of activations, as a name.
    """

    config: Any
    dtype: str = "float32"

    @abc.abstractmethod
    def sources(self) -> dict[str, WeightSource]:
        """Returns the source of every weight by its dotted path."""

    @abc.abstractmethod
    def first(self, name: str, shape: tuple[int, ...]) -> Array | None:
        """Returns the initial value of a weight of a layer, `shape`, by its name in the layer; None for weights that
        `init_params` initializes as usual."""

    def forward(self, params: Weights, tokens: Array) -> Array:
        """Returns logits `f32[B, T, V]` of whole sequences `i32[B, T]`, for training and scoring."""
        B = tokens.shape[0]
        window = causal(tokens, jnp.zeros(B, jnp.int32)).replace(is_prefill=True)
        return self.apply(params, window, self.init_cache(B, 0)).logits()

    def embeddings(self, params: Weights, tokens: Array) -> Array:
        return embedded(params["embed"], tokens, jnp.dtype(self.dtype))

    def abstract_params(self, dtype: jax.typing.DTypeLike = jnp.float32) -> Weights:
        """Returns the weights' shapes, as `jax.ShapeDtypeStruct`s."""
        return nested({path: jax.ShapeDtypeStruct(shape_of(source), dtype)
                       for path, source in self.sources().items()})

    def init_params(self, key: Array, dtype: jax.typing.DTypeLike = jnp.float32) -> Weights:
        """Returns random weights.

        Kernels are normal, with the inverse square root of their number of inputs as standard deviation; norms and `D`
        are one, biases zero. Values of `first` take precedence.
        """
        found, where = {}, self.sources()
        for (path, source), each in zip(where.items(), jax.random.split(key, len(where)), strict=True):
            shape, name = shape_of(source), path.split(".", 2)[-1]
            made = self.first(name, shape)
            if made is None and len(shape) == 1:
                made = (jnp.zeros if name.endswith("bias") else jnp.ones)(shape)
            elif made is None:
                made = jax.random.normal(each, shape) * (1.0 if path == "embed" else shape[0] ** -0.5)
            found[path] = made.astype(dtype)
        return nested(found)


@dataclasses.dataclass(frozen=True)
class StateSpace(RecurrentNetwork):
    """Base class of models with state-space layers: a frozen dataclass.

    Attributes:
        config: shape and options, of which `layers`, `eps`, `tied` and `wide` are used here.
        dtype: dtype of activations, as a name.
    """

    @abc.abstractmethod
    def mixer(self, p: Weights, layer: int, x: Array, window: Window, cache: Any) -> tuple[Array, Any]:
        """Runs the mixer of a layer, which passes information between tokens: returns its output `f[B, W, D]` for the
        normed stream `x`, `f[B, W, D]`, and what is to be committed to the cache. `p` are the layer's weights."""

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


def first_steps(count: int) -> Array:
    """Returns biases of time steps from 0.001 to 0.1, before a softplus: `f32[count]`."""
    dt = jnp.geomspace(1e-3, 0.1, count)
    return dt + jnp.log(-jnp.expm1(-dt))


def biased(y: Array, p: Weights) -> Array:
    """Returns `y` plus the bias in the weights `p` of a projection, or `y` if they have none."""
    return y + p["bias"].astype(y.dtype) if "bias" in p else y


def norm(x: Array, scale: Array, eps: float) -> Array:
    """Returns the RMS norm over the last axis, `f32[..., D]`."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + eps) * scale.astype(jnp.float32)


def stacked(c: Any, into: int, channels: int, own: Callable[[str], dict[str, WeightSource]],
            table: str = "embeddings") -> dict[str, WeightSource]:
    """Returns the place in a checkpoint of every weight of a Mamba model, by the weight's dotted path.

    Args:
        c: the model's configuration.
        into: number of outputs of a layer's first projection.
        channels: number of channels of its convolution.
        own: returns the places of the weights between convolution and last projection, by their names in the layer; its
            argument is the prefix of the layer's mixer in the file.
        table: the embedding's name in the file.
    """
    found = {"embed": plain(f"backbone.{table}.weight", c.vocab, c.width)}
    for i in range(c.layers):
        path, layer = f"layers.{i}", f"backbone.layers.{i}"
        mixer = f"{layer}.mixer"
        found |= {f"{path}.norm": plain(f"{layer}.norm.weight", c.width),
                  f"{path}.in.kernel": kernel(f"{mixer}.in_proj", into, c.width),
                  f"{path}.conv.taps": WeightSource((f"{mixer}.conv1d.weight",), True, None, (channels, 1, c.conv)),
                  **{f"{path}.{name}": source for name, source in own(mixer).items()},
                  f"{path}.out.kernel": kernel(f"{mixer}.out_proj", c.width, c.inner)}
        if c.bias:
            found |= {f"{path}.in.bias": plain(f"{mixer}.in_proj.bias", into),
                      f"{path}.out.bias": plain(f"{mixer}.out_proj.bias", c.width)}
        if c.conv_bias:
            found[f"{path}.conv.bias"] = plain(f"{mixer}.conv1d.bias", channels)
    found["norm"] = plain("backbone.norm_f.weight", c.width)
    return found if c.tied else {**found, "lm_head.kernel": kernel("lm_head", c.vocab, c.width)}
