"""ARC-Encoder: a text as a few vectors that a decoder reads in place of token embeddings.

"ARC-Encoder: learning compressed text representations for large language models", Pilchen et al., 2025. The encoder is
a Llama without a causal mask and without its last layers. In the last layer that runs, queries are means: of `n` states
each run of about `pool` becomes one, which attends to the keys and values of all `n`. So `n` tokens give `ceil(n /
pool)` states. A bridge of two matrices without an activation takes them, and a trained state that says what is to
follow, into the embedding space of a decoder that stays as it is.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from decodax.models.config import DecoderConfig, Layer, NormConfig
from decodax.models.decoder import DecoderLayer, weight
from decodax.models.packed import Packed
from decodax.models.rope import Rope
from decodax.models.transformer import Weights
from decodax.pallas_kernels.window_attention import window_attention

End = Literal["cont", "rec"]
"""What a text's vectors are followed by: the state that asks for what comes behind the text, or for the text itself."""


@dataclasses.dataclass(frozen=True)
class ArcEncoder:
    """The encoder's network, compared by value and static under jit; its weights are handed in.

    Attributes:
        config: the layers that run, a Llama's.
        out: width of the vectors, that of the decoder's embeddings.
        pool: tokens a vector, at most.
        hidden: inner width of the bridge; None: one matrix.
        normed: whether an RMS norm stands in front of the bridge.
        ends: which ends are trained states of its own; without one, a text's vectors stand alone.
    """

    config: DecoderConfig
    out: int
    pool: int = 8
    hidden: int | None = 2048
    normed: bool = False
    ends: tuple[End, ...] = ("cont", "rec")

    def __post_init__(self) -> None:
        for name in ("out", "pool", "hidden"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: got {value}, takes 1 or more")
        if not llama_shaped(self.config):
            raise ValueError("config: got a network that is no Llama, takes layers with full rotary attention, RMS "
                             "norms in front, a gated MLP and no biases")

    def init_params(self, key: Array, dtype: jax.typing.DTypeLike = jnp.float32) -> Weights:
        """Fresh weights from a `key`: `embed`, `layers`, `bridge` and one of each of `ends`. The layers are drawn as
        those of a `Transformer`, the bridge as the authors' is, and the ends are ones."""
        layers, bridge = jax.random.split(key)
        weights = nnx.to_pure_dict(nnx.state(_Network(self.config, nnx.Rngs(params=layers))))
        return jax.tree.map(lambda x: x.astype(dtype), {**weights, **self._ends(bridge)})

    def of_decoder(self, params: Weights, key: Array) -> Weights:
        """Weights that begin as those of a decoder of the same shape (`Transformer`'s), with a fresh bridge."""
        if any(isinstance(x, Packed) for x in jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Packed))):
            raise ValueError("params: got packed weights, takes whole ones")
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
        """The vectors of texts.

        Args:
            tokens: `i32[B, T]`, of which the first `lengths` (`i32[B]`, 1 or more) of a row count.
            end: the state that follows them, counted as a vector; None: none does.

        Returns:
            `f[B, M, out]`, and how many of them are a row's, `i32[B]`; `M` is `ceil(T / pool)`, and one more with an
            end. What lies behind a row's vectors means nothing.
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

        # the last layer twice: for its keys and values at all tokens, and for its output at means of runs
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
        """States `f[..., D]` in the decoder's embedding space, `f[..., out]`."""
        if self.normed:
            y = x.astype(jnp.float32)
            y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + 1e-5)
            x = y.astype(x.dtype) * weights["norm"]
        return x @ weights["0"] if self.hidden is None else x @ weights["0"] @ weights["1"]


def runs(lengths: Array, width: int, pool: int) -> tuple[Array, Array]:
    """Runs of nearly equal length, the longer ones first, of at most `pool` tokens: `f32[B, M, T]`, each token's share
    of each run's mean, and the number of runs, `i32[B]`. `lengths` is `i32[B]`, of at most `width` tokens.

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
    """Whether a network is a Llama but for its head."""
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
