"""An encoder, and a decoder that attends to the encoder's output: T5 (Raffel et al., 2020) and mT5, BART (Lewis et al.,
2020) and mBART, M2M-100 (Fan et al., 2021) and NLLB, Marian (Junczys-Dowmunt et al., 2018), Whisper (Radford et al.,
2023). They are settings of this network.

The input of the encoder is an input of each row (`EncoderText`, `EncoderAudio`). `init_cache` runs the encoder once and
computes the cross keys and values of every decoder layer. They are stored in the cache as its inputs (`EncoderMemory`):
they are never committed, and move with their rows. The cache itself, which only stores self-attention, may be of any
kind.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from decodax.cache import dense
from decodax.cache.key_values import KVLayer
from decodax.common.axes import MODEL
from decodax.common.struct import Struct, struct
from decodax.core.cache import Cache
from decodax.core.types import CacheKind, Out, RandomWeights
from decodax.core.window import Window
from decodax.models.encoder_decoder.config import (
    EncoderDecoderConfig,
    LearnedPositions,
    RelativePositions,
    Sinusoids,
    Stack,
)
from decodax.models.encoder_decoder.names import divided, sources
from decodax.models.encoder_decoder.positions import relative_bias, sinusoids
from decodax.models.inputs import EncoderAudio, EncoderText, ReadsAudio, ReadsText, named
from decodax.models.layers import ACTIVATIONS
from decodax.models.packed import embedded, head, multiply
from decodax.models.transformer import Weights
from decodax.models.weight_source import nested, shape_of
from decodax.pallas_kernels.window_attention import Bias, by_position, window_attention


@struct
class EncoderMemory(Struct):
    """The cross-attention keys and values of the encoder's output.

    Attributes:
        keys: for each decoder layer `f[B, H, T, d]`.
        values: for each decoder layer `f[B, H, T, d]`.
        seen: `bool[B, T]`, True for tokens of the text, False for padding.
        source: the text that the encoder read, for a draft model with an encoder of its own; None for audio, whose
            features would take more memory than they are worth.
    """

    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    seen: Array
    source: EncoderText | None = None


@dataclasses.dataclass(frozen=True)
class EncoderDecoder(ReadsText, ReadsAudio, RandomWeights):
    """An encoder-decoder. It is compared by value and static under jit.

    The inputs of each row are an `EncoderText`, or an `EncoderAudio` if the encoder reads audio. A row's tokens are
    those of the decoder. They begin with the token that the family begins with, such as the padding id of T5.

    Attributes:
        config: shape and options.
        dtype: dtype of activations and cache, as a name.
        cache: config of its cache for self-attention.
    """

    config: EncoderDecoderConfig
    dtype: str = "float32"
    cache: CacheKind = dense

    @property
    def max_positions(self) -> int | None:
        own = self.config.decoder.positions
        return own.count if isinstance(own, LearnedPositions) else None

    @property
    def trained_positions(self) -> int | None:
        own = self.config.decoder.positions
        return None if isinstance(own, RelativePositions) else own.count

    @property
    def frames(self) -> tuple[int, int] | None:
        c = self.config
        return None if c.features is None else (c.features, 2 * c.encoder.positions.count)   # type: ignore[union-attr]

    @property
    def encodes(self) -> bool:
        return self.config.features is None

    @property
    def source_vocab(self) -> int | None:
        return self.config.source_vocab

    def with_cache(self, kind: CacheKind) -> EncoderDecoder:
        return dataclasses.replace(self, cache=kind)

    @property
    def cache_kind(self) -> CacheKind:
        return self.cache

    def init_cache(self, batch: int, capacity: int, *, params: Any = None, inputs: Any = None) -> Cache:
        c, memory = self.config, None
        if inputs is not None:
            self._check(inputs)
        if params is not None:
            if inputs is None:
                raise ValueError(self._missing)
            memory = self.memory(params, inputs)
        relative = isinstance(c.decoder.positions, RelativePositions)
        layers = [KVLayer(c.decoder.heads, c.decoder.head_dim, bias=relative)] * c.decoder.layers
        return self.cache(layers, batch, capacity, jnp.dtype(self.dtype), memory)

    def memory(self, params: Weights, source: EncoderText | EncoderAudio) -> EncoderMemory:
        """Runs the encoder on the inputs of each row, and returns the keys and values that every decoder layer computes
        from its output for cross-attention."""
        c, p, stack = self.config, params["encoder"], self.config.encoder
        if isinstance(source, EncoderAudio):
            x = self._convolved(p, source.features)
            seen = jnp.ones(x.shape[:2], bool)
        else:
            table = params["embed"] if c.source_vocab is None else p["embed"]
            x = self._scaled(embedded(table, source.tokens, jnp.dtype(self.dtype)))
            seen = jnp.arange(x.shape[1], dtype=jnp.int32) < source.length[:, None]
        B, T = x.shape[:2]
        positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
        x = self._placed(stack, p, x, positions)
        bias, mask = self._bias(stack, p, both=True), jnp.broadcast_to(seen[:, None], (B, T, T))
        for i in range(stack.layers):
            layer = p["layers"][str(i)]
            q, k, v = self._projected(stack, layer["attn"], self._before(layer["attn"], x))
            out = window_attention(q, k, v, mask, positions, scale=self._scale(stack), bias=bias)
            x = self._after(layer["attn"], x, _linear(layer["attn"]["o"], out.reshape(B, T, -1)))
            x = self._after(layer["mlp"], x, self._mlp(layer["mlp"], self._before(layer["mlp"], x)))
        x = self._last(p, x)
        cross = [params["decoder"]["layers"][str(i)]["cross"] for i in range(c.decoder.layers)]
        # Heads first, as in a cache, so that a mesh divides them.
        one = lambda name: tuple(_heads(c.decoder, layer[name], x).swapaxes(1, 2) for layer in cross)
        return EncoderMemory(keys=one("k"), values=one("v"), seen=seen,
                             source=source if isinstance(source, EncoderText) else None)

    def apply(self, params: Weights, window: Window, cache: Cache) -> Out:
        c, p, stack, memory = self.config, params["decoder"], self.config.decoder, cache.inputs
        if not isinstance(memory, EncoderMemory):
            raise ValueError(self._missing)
        B, W = window.tokens.shape
        x, entries = self._scaled(embedded(params["embed"], window.tokens, jnp.dtype(self.dtype))), []
        if window.embeddings is not None and window.embedded is not None:
            x = jnp.where(window.embedded[..., None], window.embeddings.astype(x.dtype), x)
        x = self._placed(stack, p, x, window.positions)
        bias, scale = self._bias(stack, p, both=False), self._scale(stack)
        added: dict[str, Any] = {} if bias is None else {"bias": bias}
        seen = jnp.broadcast_to(memory.seen[:, None], (B, W, memory.seen.shape[1]))
        for i in range(stack.layers):
            layer = p["layers"][str(i)]
            q, k, v = self._projected(stack, layer["attn"], self._before(layer["attn"], x))
            out, entry = cache.attend(i, q, k, v, window, scale=scale, **added)
            x = self._after(layer["attn"], x, _linear(layer["attn"]["o"], out.reshape(B, W, -1)))
            q = _heads(stack, layer["cross"]["q"], self._before(layer["cross"], x))
            k, v = memory.keys[i].swapaxes(1, 2), memory.values[i].swapaxes(1, 2)
            out = window_attention(q, k, v, seen, window.positions, scale=scale)
            x = self._after(layer["cross"], x, _linear(layer["cross"]["o"], out.reshape(B, W, -1)))
            x = self._after(layer["mlp"], x, self._mlp(layer["mlp"], self._before(layer["mlp"], x)))
            entries.append(entry)

        def logits(hidden: Array) -> Array:
            hidden = hidden if c.head_scale == 1 else hidden * jnp.asarray(c.head_scale, hidden.dtype)
            found = multiply(hidden, head(params["embed"]) if c.tied else params["head"]["kernel"], jnp.float32)
            return found + params["logits_bias"].astype(jnp.float32) if c.logits_bias else found

        return Out(hidden=self._last(p, x), entries=tuple(entries), head=logits)

    def init_params(self, key: Array, dtype: jax.typing.DTypeLike = jnp.float32) -> Weights:
        """Returns random weights: kernels normal, with the inverse square root of their number of inputs as standard
        deviation; norms one, biases zero."""
        found, where = {}, sources(self.config)
        for (path, source), each in zip(where.items(), jax.random.split(key, len(where)), strict=True):
            shape = shape_of(source)
            spread = shape[0] ** -0.5 if source.transpose else 1.0
            found[path] = (jnp.zeros(shape) if path.endswith("bias") else jnp.ones(shape) if path.endswith("scale") else
                           jax.random.normal(each, shape) * spread).astype(dtype)
        return nested(found)

    def shardings(self, mesh: Mesh, axis: str = MODEL) -> Weights:
        """Returns a `NamedSharding` for each weight: heads, MLPs and vocabularies are sharded over `axis` where it
        divides them, the rest is replicated."""
        def one(path: str, rank: int) -> NamedSharding:
            found, spec = divided(self.config, path), [None] * rank
            if found is not None and axis in mesh.shape and found[1] % mesh.shape[axis] == 0:
                spec[found[0]] = axis       # type: ignore[call-overload]
            return NamedSharding(mesh, PartitionSpec(*spec))

        return nested({path: one(path, len(shape_of(source))) for path, source in sources(self.config).items()})

    @property
    def _missing(self) -> str:
        takes = "EncoderText, what its encoder reads" if self.config.features is None else (
            "EncoderAudio, what its encoder hears")
        return f"inputs: got none, an encoder-decoder takes an {takes}"

    def _check(self, inputs: Any) -> None:
        """Raises ValueError for inputs that the encoder does not take."""
        c, own = self.config, self.config.encoder.positions
        kind = EncoderText if c.features is None else EncoderAudio
        if not isinstance(inputs, kind):
            raise ValueError(f"inputs: got {named(inputs)}, an encoder-decoder takes an {kind.__name__}"
                             + ("" if c.features is None else " if its encoder reads audio"))
        if isinstance(inputs, EncoderAudio):
            assert isinstance(own, LearnedPositions)
            takes = (c.features, 2 * own.count)
            if inputs.features.shape[1:] != takes:
                raise ValueError(f"inputs: got features {inputs.features.shape[1:]}, takes {takes}")
        elif isinstance(own, LearnedPositions) and inputs.tokens.shape[1] > own.count:
            raise ValueError(f"inputs: got texts of {inputs.tokens.shape[1]} tokens, padding included, the encoder has "
                             f"{own.count} positions")

    def _convolved(self, p: Weights, features: Array) -> Array:
        """Returns `f[B, T / 2, D]` from features `f[B, F, T]`."""
        act, x = ACTIVATIONS["gelu"], features.swapaxes(1, 2).astype(jnp.dtype(self.dtype))
        for name, stride in (("conv1", 1), ("conv2", 2)):
            x = lax.conv_general_dilated(x, p[name]["kernel"], (stride,), [(1, 1)],
                                         dimension_numbers=("NWC", "WIO", "NWC"))
            x = act(x + p[name]["bias"])
        return x

    def _scaled(self, x: Array) -> Array:
        """Returns embeddings on their scale."""
        return x if self.config.embed_scale == 1 else x * jnp.asarray(self.config.embed_scale, x.dtype)

    def _placed(self, stack: Stack, p: Weights, x: Array, positions: Array) -> Array:
        """Returns embeddings with their positions `i32[B, W]`, normalised if the model does so."""
        own = stack.positions
        if isinstance(own, LearnedPositions):
            x = x + jnp.take(p["positions"], positions + own.offset, axis=0, mode="clip").astype(x.dtype)
        elif isinstance(own, Sinusoids):
            x = x + sinusoids(own, self.config.width, positions).astype(x.dtype)
        return self._norm(p["embed_norm"], x) if self.config.embed_norm else x

    def _bias(self, stack: Stack, p: Weights, *, both: bool) -> Bias | None:
        own = stack.positions
        if not isinstance(own, RelativePositions):
            return None
        return by_position(functools.partial(relative_bias, own, p["relative"], both=both))

    def _scale(self, stack: Stack) -> float:
        return stack.head_dim ** -0.5 if self.config.scale is None else self.config.scale

    def _before(self, p: Weights, x: Array) -> Array:
        """Returns the input of attention or MLP from the residual stream."""
        return self._norm(p["norm"], x) if self.config.pre_norm else x

    def _after(self, p: Weights, x: Array, out: Array) -> Array:
        """Returns the residual stream after attention or MLP."""
        return x + out if self.config.pre_norm else self._norm(p["norm"], x + out)

    def _last(self, p: Weights, x: Array) -> Array:
        """Returns the output of a stack."""
        return self._norm(p["norm"], x) if self.config.pre_norm else x

    def _projected(self, stack: Stack, p: Weights, x: Array) -> tuple[Array, Array, Array]:
        return _heads(stack, p["q"], x), _heads(stack, p["k"], x), _heads(stack, p["v"], x)

    def _mlp(self, p: Weights, x: Array) -> Array:
        act, up = ACTIVATIONS[self.config.activation], _linear(p["up"], x)
        return _linear(p["down"], act(_linear(p["gate"], x)) * up if self.config.gated else act(up))

    def _norm(self, p: Weights, x: Array) -> Array:
        y = x.astype(jnp.float32)
        if self.config.norm.kind == "layer":
            y = y - y.mean(-1, keepdims=True)
        y = y * lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + self.config.norm.eps)
        y = y * p["scale"].astype(jnp.float32)
        return (y + p["bias"].astype(jnp.float32) if self.config.norm.bias else y).astype(x.dtype)


def _linear(p: Weights, x: Array) -> Array:
    y = multiply(x, p["kernel"])
    return y + p["bias"].astype(y.dtype) if "bias" in p else y


def _heads(stack: Stack, p: Weights, x: Array) -> Array:
    return _linear(p, x).reshape(*x.shape[:2], stack.heads, stack.head_dim)
