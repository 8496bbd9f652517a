"""ARC-Encoder: compresses a text to a few vectors that a decoder reads in place of token embeddings.

Source: "ARC-Encoder: learning compressed text representations for large language models", Pilchen et al., 2025. The
encoder is a Llama without a causal mask and without its last layers. In the last layer that runs, queries are pooled:
each run of about `pool` of the `n` states is averaged to one query, which attends to the keys and values of all `n`. So
`n` tokens give `ceil(n / pool)` vectors. A bridge of two matrices without an activation maps them, and a trained state
for the task (continue or reconstruct), to the embedding space of a decoder that is not changed.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from decodax.common.arguments import check_counts
from decodax.models.blocks.layer import DecoderLayer
from decodax.models.blocks.options import Layer
from decodax.models.config import DecoderConfig, NormConfig
from decodax.models.layers import weight
from decodax.models.packed import Packed
from decodax.models.rope import Rope
from decodax.models.transformer import Weights
from decodax.pallas_kernels.window_attention import window_attention

End = Literal["cont", "rec"]
"""The end state, a vector after those of a text: it asks the decoder to continue the text ("cont") or to reconstruct it
("rec")."""


@dataclasses.dataclass(frozen=True)
class ArcEncoder:
    """The network of an ARC-Encoder. It is compared by value and static under jit; its weights are passed in.

    Attributes:
        config: the layers that run, with the shape of a Llama.
        out: width of the vectors, which is that of the decoder's embeddings.
        pool: maximum number of tokens for each vector.
        hidden: number of hidden channels of the bridge; None: the bridge is one matrix.
        normed: True applies an RMS norm before the bridge.
        ends: names of the end states that are trained; `apply` can append one of them to the vectors.
    """

    config: DecoderConfig
    out: int
    pool: int = 8
    hidden: int | None = 2048
    normed: bool = False
    ends: tuple[End, ...] = ("cont", "rec")

    def __post_init__(self) -> None:
        check_counts(self, "out", "pool", "hidden")
        if not llama_shaped(self.config):
            raise ValueError("config: takes a Llama: layers with full rotary attention, pre-norm RMS, a gated MLP and "
                             "no biases")

    def init_params(self, key: Array, dtype: jax.typing.DTypeLike = jnp.float32) -> Weights:
        """Returns random weights: `embed`, `layers`, `bridge`, and one vector for each of `ends`.

        The layers are initialized as those of a `Transformer`, the bridge as in the authors' code, and the ends with
        ones.
        """
        layers, bridge = jax.random.split(key)
        weights = nnx.to_pure_dict(nnx.state(_Network(self.config, nnx.Rngs(params=layers))))
        return jax.tree.map(lambda x: x.astype(dtype), {**weights, **self._ends(bridge)})

    def of_decoder(self, params: Weights, key: Array) -> Weights:
        """Returns weights whose layers are those of a decoder of the same shape (`Transformer`), with a random bridge.
        """
        if any(isinstance(x, Packed) for x in jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Packed))):
            raise ValueError("params: got packed weights, takes arrays")
        layers = {str(i): params["layers"][str(i)] for i in range(len(self.config.layers))}
        return {"embed": params["embed"], "layers": layers, **self._ends(key)}

    def _ends(self, key: Array) -> Weights:
        widths = [self.config.width, *([] if self.hidden is None else [self.hidden]), self.out]
        draw = lambda i, a, b: jax.random.uniform(jax.random.fold_in(key, i), (a, b), minval=-1, maxval=1) / a ** 0.5
        maps = {str(i): draw(i, *widths[i:i + 2]) for i in range(len(widths) - 1)}
        if self.normed:
            maps["norm"] = jnp.ones(self.config.width)
        return {"bridge": maps, **{end: jnp.ones((1, self.config.width)) for end in self.ends}}

    def apply(self, params: Weights, tokens: Array, lengths: Array, end: End | None = None) -> tuple[Array, Array]:
        """Returns the vectors of texts.

        Args:
            params: the weights.
            tokens: `i32[B, T]`.
            lengths: `i32[B]`, number of tokens of each row, at least 1.
            end: the end state that is appended as a further vector; None: none.

        Returns:
            `f[B, M, out]`, and the number of vectors of each row, `i32[B]`. `M` is `ceil(T / pool)`, plus one with an
            end. Entries after a row's vectors are undefined.
        """
        c, (B, T), last = self.config, tokens.shape, str(len(self.config.layers) - 1)
        layers = _network(c, {"embed": params["embed"], "layers": params["layers"]}).layers
        rope = c.layers[0].rope
        assert rope is not None
        tables = lambda at: {rope: rope.table(at, None)}
        at = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
        live = at < lengths[:, None]
        seen = jnp.broadcast_to(live[:, None], (B, T, T))
        everyone = lambda layer, q, k, v, **options: (window_attention(q, k, v, seen, at, **options), ())
        x = params["embed"][tokens]
        for i in range(len(c.layers) - 1):
            x, _ = layers[str(i)](i, x, tables(at), everyone)

        # The last layer runs twice: for its keys and values at all tokens, and for its output at the means of runs.
        _, (keys, values) = layers[last].attention_half(0, x, tables(at), lambda layer, q, k, v, **options:
                                                        (jnp.zeros_like(q), (k, v)))
        shares, counts = runs(lengths, T, self.pool)
        M = shares.shape[1]
        means = jnp.einsum("bmt,btd->bmd", shares.astype(x.dtype), jnp.where(live[..., None], x, 0))
        where = jnp.broadcast_to(jnp.arange(M, dtype=jnp.int32), (B, M))
        x, _ = layers[last](0, means, tables(where), lambda layer, q, k, v, **options: (window_attention(
            q, keys, values, seen[:, :1].repeat(M, 1), where, key_positions=at, **options), ()))

        if end is not None and end in self.ends:
            x = jnp.pad(x, ((0, 0), (0, 1), (0, 0)))
            own = jnp.arange(M + 1)[None] == counts[:, None]
            x, counts = jnp.where(own[..., None], params[end].astype(x.dtype), x), counts + 1
        return self.bridge(params["bridge"], x), counts

    def bridge(self, weights: Weights, x: Array) -> Array:
        """Maps states `f[..., D]` to the decoder's embedding space, `f[..., out]`."""
        if self.normed:
            y = x.astype(jnp.float32)
            y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + 1e-5)
            x = y.astype(x.dtype) * weights["norm"]
        return x @ weights["0"] if self.hidden is None else x @ weights["0"] @ weights["1"]


def runs(lengths: Array, width: int, pool: int) -> tuple[Array, Array]:
    """Divides texts into runs of nearly equal length of at most `pool` tokens, the longer ones first.

    Args:
        lengths: `i32[B]`, at most `width`.
        width: number of tokens `T`.
        pool: maximum length of a run.

    Returns:
        The weight of each token in the mean of each run, `f32[B, M, T]`, and the number of runs, `i32[B]`.

    >>> shares, counts = runs(jnp.array([5, 2]), 5, 2)
    >>> counts.tolist(), (shares[0] > 0).astype(int).tolist()
    ([3, 1], [[1, 1, 0, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1]])
    """
    counts = -(-lengths // pool)
    small, longer = lengths // counts, lengths % counts
    t, m = jnp.arange(width)[None], jnp.arange(-(-width // pool))[None]
    head = (longer * (small + 1))[:, None]
    run = jnp.where(t < head, t // (small + 1)[:, None], longer[:, None] + (t - head) // small[:, None])
    run = jnp.where(t < lengths[:, None], run, -1)
    size = small[:, None] + (m < longer[:, None])
    return (run[:, None] == m[..., None]) / size[..., None].astype(jnp.float32), counts


def llama_shaped(c: DecoderConfig) -> bool:
    """True if a network has the structure of a Llama, apart from its head."""
    rope = c.layers[0].rope
    plain = rope is not None and rope == Rope(width=c.head_dim, theta=rope.theta, interleaved=rope.interleaved)
    same = DecoderConfig(vocab=c.vocab, width=c.width, heads=c.heads, kv_heads=c.kv_heads, head_dim=c.head_dim,
                         mlp=c.mlp, layers=(Layer(rope=rope),) * len(c.layers), context=c.context,
                         norm=NormConfig(eps=c.norm.eps), tied=c.tied)
    return plain and c == same


class _Network(nnx.Module):
    """The embedding table and the layers."""

    def __init__(self, c: DecoderConfig, rngs: nnx.Rngs):
        self.embed = weight(rngs, (c.vocab, c.width), ("vocab", "embed"))
        self.layers = nnx.Dict({str(i): DecoderLayer(c, layer, rngs) for i, layer in enumerate(c.layers)})


@functools.lru_cache(maxsize=16)
def _graph(config: DecoderConfig) -> Any:
    return nnx.split(nnx.eval_shape(lambda: _Network(config, nnx.Rngs(0))))[0]


def _network(config: DecoderConfig, weights: Weights) -> Any:
    return nnx.merge(_graph(config), nnx.State(weights))
