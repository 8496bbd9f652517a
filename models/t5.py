"""T5 (Raffel et al., 2020), versions 1.0 and 1.1, and mT5 (Xue et al., 2021): an encoder, and a decoder that attends to
the encoder's output.

The encoder's text is an input of each row (`EncoderText`). `init_cache` runs the encoder once and computes the cross
keys and values of every decoder layer. They are stored in the cache as its inputs (`EncoderMemory`): they are never
committed, and move with their rows. The cache itself, which only stores self-attention, may be of any kind.

Positions enter as a bias of the scores that depends only on the distance. It is computed from the positions of nodes,
not from their places in the window, so it is right for the nodes of draft trees.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.cache import dense
from decodax.cache.key_values import KVLayer
from decodax.common.struct import Struct, struct
from decodax.core.cache import Cache
from decodax.core.types import CacheKind, Model, Out
from decodax.core.window import Window
from decodax.models.config import Activation
from decodax.models.inputs import EncoderText, named
from decodax.models.layers import ACTIVATIONS
from decodax.models.packed import embedded, head, multiply
from decodax.models.reading import read_activation
from decodax.models.transformer import Weights
from decodax.models.weight_source import WeightSource
from decodax.pallas_kernels.window_attention import by_position, window_attention


@struct
class EncoderMemory(Struct):
    """The cross-attention keys and values of the encoder's output.

    Attributes:
        keys: for each decoder layer `f[B, T, H, d]`.
        values: for each decoder layer `f[B, T, H, d]`.
        seen: `bool[B, T]`, True for tokens of the text, False for padding.
    """

    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    seen: Array


@dataclasses.dataclass(frozen=True)
class T5Config:
    """The shape and options of a T5. Defaults are those of version 1.0.

    Attributes:
        vocab: vocabulary size `V`.
        width: model width `D`.
        heads: number of heads `H`.
        head_dim: number of channels `d` of a head.
        mlp: number of inner channels of the MLP.
        encoder: number of layers of the encoder.
        decoder: number of layers of the decoder.
        buckets: number of buckets of the relative position bias.
        farthest: distance from which on all distances share a bucket.
        eps: added to the variance in norms, which are RMS norms before attention and MLP.
        activation: activation function of the MLP.
        gated: True for a gated MLP.
        tied: True uses the embedding table as the output head.
        scaled: True multiplies hidden states by `D ** -0.5` before the head.
    """

    vocab: int
    width: int
    heads: int
    head_dim: int
    mlp: int
    encoder: int
    decoder: int
    buckets: int = 32
    farthest: int = 128
    eps: float = 1e-6
    activation: Activation = "relu"
    gated: bool = False
    tied: bool = True
    scaled: bool = True


@dataclasses.dataclass(frozen=True)
class T5(Model):
    """An encoder-decoder. It is compared by value and static under jit.

    The inputs of each row are an `EncoderText`. Its tokens are those of the decoder, which begin with the padding id.

    Attributes:
        config: shape and options.
        dtype: dtype of the cache, as a name.
        cache: config of its cache for self-attention.
    """

    config: T5Config
    dtype: str = "float32"
    cache: CacheKind = dense

    def with_cache(self, kind: CacheKind) -> T5:
        return dataclasses.replace(self, cache=kind)

    @property
    def cache_kind(self) -> CacheKind:
        return self.cache

    def init_cache(self, batch: int, capacity: int, *, params: Any = None, inputs: Any = None) -> Cache:
        c, memory = self.config, None
        if inputs is not None and not isinstance(inputs, EncoderText):
            raise ValueError(f"inputs: got {named(inputs)}, a T5 takes an EncoderText")
        if params is not None:
            if inputs is None:
                raise ValueError("inputs: got none, a T5 takes an EncoderText, what its encoder reads")
            memory = self.memory(params, inputs)
        layers = [KVLayer(c.heads, c.head_dim, bias=True)] * c.decoder
        return self.cache(layers, batch, capacity, jnp.dtype(self.dtype), memory)

    def memory(self, params: Weights, source: EncoderText) -> EncoderMemory:
        """Runs the encoder and returns the cross-attention keys and values."""
        c, p = self.config, params["encoder"]
        B, T = source.tokens.shape
        positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
        seen = positions < source.length[:, None]
        bias = by_position(functools.partial(relative_bias, c, p["bias"], both=True))
        x = embedded(params["embed"], source.tokens, p["norm"].dtype)
        for i in range(c.encoder):
            layer = p["layers"][str(i)]
            normed = _norm(c, layer["attn"], x)
            q, k, v = (self._heads(layer["attn"], name, normed) for name in "qkv")
            out = window_attention(q, k, v, jnp.broadcast_to(seen[:, None], (B, T, T)), positions, scale=1.0, bias=bias)
            x = x + multiply(out.reshape(B, T, -1), layer["attn"]["o"])
            x = x + _mlp(c, layer["mlp"], x)
        x = _norm(c, p, x)
        cross = [params["decoder"]["layers"][str(i)]["cross"] for i in range(c.decoder)]
        return EncoderMemory(keys=tuple(self._heads(layer, "k", x) for layer in cross),
                             values=tuple(self._heads(layer, "v", x) for layer in cross), seen=seen)

    def apply(self, params: Weights, window: Window, cache: Cache) -> Out:
        c, p, memory = self.config, params["decoder"], cache.inputs
        if not isinstance(memory, EncoderMemory):
            raise ValueError("inputs: got none, a T5 takes an EncoderText, what its encoder reads")
        B, W = window.tokens.shape
        bias = by_position(functools.partial(relative_bias, c, p["bias"], both=False))
        x, entries = embedded(params["embed"], window.tokens, p["norm"].dtype), []
        if window.embeddings is not None and window.embedded is not None:
            x = jnp.where(window.embedded[..., None], window.embeddings.astype(x.dtype), x)
        for i in range(c.decoder):
            layer = p["layers"][str(i)]
            normed = _norm(c, layer["attn"], x)
            q, k, v = (self._heads(layer["attn"], name, normed) for name in "qkv")
            out, entry = cache.attend(i, q, k, v, window, scale=1.0, bias=bias)
            x = x + multiply(out.reshape(B, W, -1), layer["attn"]["o"])
            q = self._heads(layer["cross"], "q", _norm(c, layer["cross"], x))
            seen = jnp.broadcast_to(memory.seen[:, None], (B, W, memory.seen.shape[1]))
            out = window_attention(q, memory.keys[i], memory.values[i], seen, window.positions, scale=1.0)
            x = x + multiply(out.reshape(B, W, -1), layer["cross"]["o"])
            x = x + _mlp(c, layer["mlp"], x)
            entries.append(entry)

        def logits(hidden: Array) -> Array:
            hidden = hidden * jnp.asarray(c.width ** -0.5, hidden.dtype) if c.scaled else hidden
            return multiply(hidden, head(params["embed"]) if c.tied else params["head"], jnp.float32)

        return Out(hidden=_norm(c, p, x), entries=tuple(entries), head=logits)

    def init_params(self, key: Array, dtype: jax.typing.DTypeLike = jnp.float32) -> Weights:
        """Returns random weights: kernels normal, with the inverse square root of their number of inputs as standard
        deviation; norms one."""
        found = {}
        for (path, source), each in zip(sources(self.config).items(),
                                        jax.random.split(key, len(sources(self.config))), strict=True):
            shape = source.full[::-1] if source.transpose else source.full
            spread = shape[0] ** -0.5 if source.transpose else 1.0
            found[path] = jnp.ones(shape, dtype) if len(shape) == 1 else (
                jax.random.normal(each, shape) * spread).astype(dtype)
        return nested(found)

    def _heads(self, p: Weights, name: str, x: Array) -> Array:
        return multiply(x, p[name]).reshape(*x.shape[:2], self.config.heads, self.config.head_dim)


def relative_bias(c: T5Config, weights: Array, queries: Array, keys: Array, *, both: bool) -> Array:
    """Returns the bias of the scores, `f32[B, H, W, K]`, from `weights` (`f[buckets, H]`) and positions; see
    `by_position`."""
    by_distance = weights.astype(jnp.float32)[_buckets(c.buckets, c.farthest, both)]
    distance = jnp.clip(keys - queries, -c.farthest, c.farthest) + c.farthest
    return by_distance[distance, jnp.arange(c.heads)[:, None, None]]


@functools.lru_cache(maxsize=16)
def _buckets(buckets: int, farthest: int, both: bool) -> np.ndarray:
    """Returns the bucket of each distance (key position minus query position) from `-farthest` to `farthest`.

    Near distances have a bucket each, the others share buckets by their logarithm. With `both`, later keys have
    separate buckets.
    """
    distance = np.arange(-farthest, farthest + 1)
    count = buckets // 2 if both else buckets
    exact = count // 2
    far = np.abs(distance) if both else np.maximum(-distance, 0)
    # In float32 as in transformers: some distances lie exactly between two buckets.
    logarithm = np.log(np.maximum(far, 1).astype(np.float32) / np.float32(exact)) / np.float32(
        math.log(farthest / exact)) * np.float32(count - exact)
    found = np.where(far < exact, far, np.minimum(exact + logarithm.astype(np.int32), count - 1))
    return (found + count * (both & (distance > 0))).astype(np.int32)


def _norm(c: T5Config, p: Weights, x: Array) -> Array:
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + c.eps)
    return (y * p["norm"].astype(jnp.float32)).astype(x.dtype)


def _mlp(c: T5Config, p: Weights, x: Array) -> Array:
    act, x = ACTIVATIONS[c.activation], _norm(c, p, x)
    up = multiply(x, p["up"])
    return multiply(act(multiply(x, p["gate"])) * up if c.gated else act(up), p["down"])


IGNORED = re.compile(r"^(encoder|decoder)\.embed_tokens\.weight$|EncDecAttention\.relative_attention_bias\.weight$")
"""Copies of the embedding, and an unused bias, in older files."""


def sources(c: T5Config) -> dict[str, WeightSource]:
    """Returns the shape of every weight and the tensor that holds it in a Hugging Face file, by the weight's dotted
    path."""
    inner = c.heads * c.head_dim
    kernel = lambda tensor, out, into: WeightSource((f"{tensor}.weight",), True, None, (out, into))
    plain = lambda tensor, *shape: WeightSource((f"{tensor}.weight",), False, None, shape)
    found = {"embed": plain("shared", c.vocab, c.width)}
    for side, count in (("encoder", c.encoder), ("decoder", c.decoder)):
        first = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias"
        found |= {f"{side}.bias": plain(first, c.buckets, c.heads),
                  f"{side}.norm": plain(f"{side}.final_layer_norm", c.width)}
        halves = [("attn", "SelfAttention"), ("cross", "EncDecAttention"), ("mlp", "DenseReluDense")]
        if side == "encoder":
            del halves[1]
        for i in range(count):
            for j, (half, module) in enumerate(halves):
                path, tensor = f"{side}.layers.{i}.{half}", f"{side}.block.{i}.layer.{j}"
                found[f"{path}.norm"] = plain(f"{tensor}.layer_norm", c.width)
                if half == "mlp":
                    ups = {"gate": "wi_0", "up": "wi_1"} if c.gated else {"up": "wi"}
                    found |= {f"{path}.{ours}": kernel(f"{tensor}.{module}.{theirs}", c.mlp, c.width)
                              for ours, theirs in ups.items()}
                    found[f"{path}.down"] = kernel(f"{tensor}.{module}.wo", c.width, c.mlp)
                else:
                    found |= {f"{path}.{name}": kernel(f"{tensor}.{module}.{name}", inner, c.width) for name in "qkv"}
                    found[f"{path}.o"] = kernel(f"{tensor}.{module}.o", c.width, inner)
    return found if c.tied else {**found, "head": kernel("lm_head", c.vocab, c.width)}


def nested(leaves: Mapping[str, Any]) -> Weights:
    """Returns a nested dict from dotted paths.

    >>> nested({"a.b": 1, "c": 2})
    {'a': {'b': 1}, 'c': 2}
    """
    tree: Weights = {}
    for path, leaf in leaves.items():
        *above, last = path.split(".")
        node = tree
        for name in above:
            node = node.setdefault(name, {})
        node[last] = leaf
    return tree


def read_t5(c: Mapping[str, Any], tied: bool) -> T5Config:
    """Returns the T5 that a `config.json` describes.

    Args:
        c: the content of the file.
        tied: True if the weights have no separate output head.

    Raises:
        ValueError: an entry is missing, or an option is not supported.
    """
    multilingual = c.get("model_type") == "mt5"
    kind = c.get("feed_forward_proj", "gated-gelu" if multilingual else "relu")
    gated, _, name = kind.rpartition("-")
    if gated not in ("", "gated"):
        raise ValueError(f"feed_forward_proj: got {kind!r}, takes an activation, or 'gated-' and one")
    # "gated-gelu" has always meant the tanh form
    activation = "gelu_tanh" if kind == "gated-gelu" else read_activation({"feed_forward_proj": name},
                                                                         "feed_forward_proj", name)
    try:
        return T5Config(
            vocab=c["vocab_size"], width=c["d_model"], heads=c["num_heads"], head_dim=c["d_kv"], mlp=c["d_ff"],
            encoder=c["num_layers"], decoder=c.get("num_decoder_layers", c["num_layers"]),
            buckets=c.get("relative_attention_num_buckets", 32),
            farthest=c.get("relative_attention_max_distance", 128), eps=c.get("layer_norm_epsilon", 1e-6),
            activation=activation, gated=bool(gated), tied=tied,
            # Newer files have an entry for this; in older ones an untied head identifies version 1.1.
            scaled=not multilingual and c.get("scale_decoder_outputs", c.get("tie_word_embeddings", True)))
    except KeyError as e:
        raise ValueError(f"config.json of a t5 model lacks {e}") from None
