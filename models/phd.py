"""The Parallel Hidden Decoding Transformer ("Efficient Pretraining Length Scaling", Wu et al., 2025).

Each token is processed `K` times. Its first copy is the token of a plain transformer, and all later tokens attend to
it. Copies 2 to `K`, the hidden decoding tokens, attend to the first copies of earlier tokens, and to the copies of
their own token up to themselves; the last copy predicts the next token. Since later tokens do not attend to them, their
keys and values are dropped, and the cache is that of the plain model. In `PHD-SWA` a hidden decoding token also attends
to the `W` hidden decoding tokens before those of its own token, whose keys and values are stored in a ring; in
`PHD-CSWA` only to those within its own chunk of `C` tokens.

Weights are those of a `Transformer`; one that was not trained this way gets worse.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from decodax.cache.entry import KVEntry
from decodax.cache.tree_buffer import AttentionView, TreeBuffer
from decodax.cache.wrapper import Wrapper
from decodax.common.arguments import check_counts
from decodax.common.struct import Struct, static, struct
from decodax.core.cache import Cache, Entries, Feature, PyTree
from decodax.core.capabilities import Draftable
from decodax.core.types import CacheKind, Out, RandomWeights, ShowsWeights
from decodax.core.window import Window
from decodax.models.config import DecoderConfig
from decodax.models.transformer import Transformer, Weights


@dataclasses.dataclass(frozen=True)
class Copies:
    """The number of copies of each token that the network processes, and the attention among hidden decoding tokens,
    which are all copies but the first.

    Attributes:
        count: number of copies `K` of each token.
        window: number `W` of earlier hidden decoding tokens to which one attends; None: only those of its own token.
        chunk: number of tokens `C` in a chunk, across whose borders hidden decoding tokens do not attend; None: no
            chunks.
    """

    count: int = 2
    window: int | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        check_counts(self, "count", "window", "chunk")
        if self.chunk is not None and self.window is None:
            raise ValueError(f"chunk: got {self.chunk} without a window, takes one with it")

    @property
    def local(self) -> bool:
        """True if hidden decoding tokens (copies of a token after the first) attend to those of earlier tokens."""
        return self.window is not None and self.count > 1

    @property
    def reach(self) -> int:
        """Number of earlier tokens that a hidden decoding token may attend to by the window: `window / (count - 1)`,
        rounded up; 0 without a window."""
        return 0 if self.window is None or self.count < 2 else (self.window + self.count - 2) // (self.count - 1)

    def near(self, at: Array, copy: Array, key_at: Array, key_copy: Array) -> Array:
        """Returns `bool[B, Q, K]`, True where both query and key are hidden decoding tokens (copies after the first),
        the key is at most `window` hidden decoding tokens before the query, and both are in the same chunk if there are
        chunks. All False without a window.

        Keys after the query, and keys of its own token, are not excluded here.

        Args:
            at: `i32[B, Q]`, positions of the queries' tokens.
            copy: `i32[Q]`, which copy of its token each query is, 0 for the first.
            key_at: `i32[B, K]`, positions of the keys' tokens.
            key_copy: `i32[K]`, which copy of its token each key is.
        """
        if self.window is None:
            return jnp.zeros((*at.shape, key_at.shape[1]), bool)
        place = lambda at, copy: at * (self.count - 1) + copy
        seen = place(at, copy)[:, :, None] - place(key_at, key_copy)[:, None] <= self.window
        if self.chunk is not None:
            seen &= at[:, :, None] // self.chunk == key_at[:, None] // self.chunk
        return seen & (copy > 0)[:, None] & (key_copy > 0)

    def mask(self, visible: Array, at: Array) -> Array:
        """Returns the attention mask among the copies of a window's nodes, `bool[B, K W, K W]`, with all first copies
        in front.

        Args:
            visible: `bool[B, W, W]`, the attention mask among the nodes.
            at: `i32[B, W]`, positions of the nodes.
        """
        W, K = at.shape[1], self.count
        copy = jnp.repeat(jnp.arange(K), W)
        visible, at = jnp.tile(visible, (1, K, K)), jnp.tile(at, (1, K))
        own = jnp.tile(jnp.eye(W, dtype=bool), (K, K))
        hidden = own & (copy <= copy[:, None]) | ~own & self.near(at, copy, at, copy)
        return visible & ((copy == 0) | hidden)


@dataclasses.dataclass(frozen=True)
class Phd(ShowsWeights, RandomWeights):
    """A transformer that processes each token several times.

    Attributes:
        inner: the network.
        copies: number of copies and their attention.
    """

    inner: Transformer
    copies: Copies

    @property
    def config(self) -> DecoderConfig:
        return self.inner.config

    @property
    def depth(self) -> int:
        return self.inner.depth

    @property
    def max_positions(self) -> int | None:
        return self.inner.max_positions

    @property
    def trained_positions(self) -> int | None:
        return self.inner.trained_positions

    def _with(self, inner: Transformer) -> Phd:
        return dataclasses.replace(self, inner=inner)

    def with_cache(self, kind: CacheKind) -> Phd:
        return self._with(self.inner.with_cache(kind))

    @property
    def cache_kind(self) -> CacheKind | None:
        return self.inner.cache_kind

    def init_cache(self, batch: int, capacity: int, *, params: Any = None, inputs: Any = None) -> Cache:
        base, c = self.inner.init_cache(batch, capacity, params=params, inputs=inputs), self.config
        if not self.copies.local:
            return base
        if c.value_dim is not None or any(layer.kv_heads or layer.head_dim for layer in c.layers):
            raise ValueError("copies: later tokens attend to their keys and values, which takes a network whose layers "
                             "have key/value heads of the same number and width, and values as wide as keys")
        wide = c.head_dim * (1 + c.values_of_key)
        shape = (batch, self.copies.reach, self.copies.count - 1, c.kv_heads, wide)
        return Local(base=base, hidden=tuple(jnp.zeros(shape, self.inner.dtype) for _ in c.own), copies=self.copies,
                     positions=jnp.full((batch, self.copies.reach), -1, jnp.int32))

    def apply(self, params: Weights, window: Window, cache: Cache) -> Out:
        """Runs the network on a window; see `Model.apply`.

        During prefill (`Window.is_prefill`) only first copies are processed, unless later tokens attend to the others;
        that requires a cache made by `init_cache`. A cache policy that selects entries gets first copies only.
        """
        K, W, local = self.copies.count, window.width, isinstance(cache, Local | LocalTreeBuffer)
        if K > 1 and not isinstance(cache, Cache | Draftable):      # a replacement of a cache does not support copies
            raise ValueError("cache: this kind reads a prompt in its own way; takes a model that reads each token once")
        if K == 1 or (window.is_prefill and not local):
            return self.inner.apply(params, window, cache)
        often = lambda x: jnp.tile(x, (1, K, *[1] * (x.ndim - 2)))
        nodes = Window(tokens=often(window.tokens), positions=often(window.positions), live=often(window.live),
                       mask=self.copies.mask(window.visible(), window.positions), cached=window.cached,
                       embeddings=None if window.embeddings is None else often(window.embeddings),
                       embedded=None if window.embedded is None else often(window.embedded))
        if isinstance(cache, TreeBuffer):
            cache = cache.seen_by(often(cache.sees))
        out = self.inner.apply(params, nodes, _ReadsCopies(cache, window, K if local else 0))      # type: ignore[arg-type]
        last = lambda x: x[:, -W:]
        return dataclasses.replace(out, hidden=last(out.hidden),
                                   layers=None if out.layers is None else tuple(map(last, out.layers)),
                                   streams=None if out.streams is None else last(out.streams))

    def forward(self, params: Weights, tokens: Array) -> Array:
        """Returns logits `f32[B, T, V]` of whole sequences `i32[B, T]` without a cache, for training and scoring."""
        (B, T), K = tokens.shape, self.copies.count
        at = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
        mask = self.copies.mask(jnp.tril(jnp.ones((1, T, T), bool)), at)
        hidden, head = self.inner.features(params, jnp.tile(tokens, (1, K)), jnp.tile(at, (1, K)), mask)
        return head(hidden[:, -T:])

    def init_params(self, key: Array, dtype: jax.typing.DTypeLike = jnp.float32) -> Weights:
        """Returns random weights, see `Transformer.init_params`."""
        return self.inner.init_params(key, dtype)

    def outputs(self, params: Weights, layer: int) -> Array:
        return self.inner.outputs(params, layer)

    def embeddings(self, params: Weights, tokens: Array) -> Array:
        return self.inner.embeddings(params, tokens)


def phd(config: DecoderConfig, copies: int = 2, window: int | None = None, chunk: int | None = None) -> Phd:
    """Returns a model that processes each token `copies` times; see `decodax.models.phd`.

    With a `window` it is PHD-SWA, with a `chunk` as well PHD-CSWA. The authors' largest models have `window=16,
    chunk=32` and 2 or 3 copies.

    Raises:
        ValueError: a number below 1, or a chunk without a window.

    >>> from decodax.models.config import llama
    >>> phd(llama(vocab=64, width=32, layers=2, heads=4, mlp=96), copies=3, window=16, chunk=32).copies.reach
    8
    """
    return Phd(Transformer(config), Copies(copies, window, chunk))


@dataclasses.dataclass(frozen=True)
class _ReadsCopies:
    """A stand-in for a cache while the network processes copies of the window's nodes; only first copies leave entries.

    `local` is the number of copies whose keys and values are stored.
    """

    cache: Any
    window: Window
    local: int

    @property
    def inputs(self) -> PyTree:
        return self.cache.inputs

    def attend(self, layer: int, q: Array, k: Array, v: Array, nodes: Window, **options: Any) -> tuple[Array, PyTree]:
        W = self.window.width
        first = lambda x: x[:, :W]
        out, entry = self.cache.attend(layer, q, k, v, nodes, **options)
        if self.window.is_prefill:
            # First copies attend as a prompt, which a cache may process in its own way.
            own, entry = self.cache.base.attend(layer, first(q), first(k), first(v), self.window, **options)
            out = jnp.concatenate([own, out[:, W:]], 1)
        entry = jax.tree.map(first, entry)
        if not self.local:
            return out, entry
        hidden = lambda x: x[:, W:].reshape(len(x), self.local - 1, W, *x.shape[2:]).swapaxes(1, 2)
        return out, CopiesEntry(entry, KVEntry(hidden(k), hidden(v)))


@struct
class CopiesEntry(Struct):
    """The entry of a window whose hidden decoding tokens are stored, too.

    Attributes:
        first: entry of the first copies.
        hidden: keys and values `f[B, W, K - 1, G, d]` of the other copies.
    """

    first: Any
    hidden: KVEntry


@struct
class Local(Wrapper):
    """A cache together with the keys and values of the latest hidden decoding tokens.

    Queries are copies of a window's nodes, with all first copies in front. An entry is that of the base cache, followed
    by keys and values `f[B, W, K - 1, G, d]`.

    Attributes:
        base: the cache of first copies.
        hidden: `f[B, R, K - 1, G, d + e]` for each layer; the token at position `p` is at index `p % R`.
        positions: `i32[B, R]`, position of each token; -1 where empty.
        copies: static; number of copies and their attention.
    """

    base: Any
    hidden: tuple[Array, ...]
    positions: Array
    copies: Copies = static()

    BOUND: ClassVar[frozenset[Feature]] = frozenset(("trees",))

    @property
    def supports(self) -> frozenset[Feature]:       # type: ignore[override]
        return self.base.supports & self.BOUND

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, **options: Any) -> tuple[Array, PyTree]:
        view = _behind(self.copies, q, window, self.positions, self.positions >= 0)
        width = k.shape[-1]
        ring = self.hidden[layer].reshape(len(q), -1, *self.hidden[layer].shape[3:]).astype(k.dtype)
        k, v = (jnp.concatenate([held, new], 1) for held, new in ((ring[..., :width], k), (ring[..., width:], v)))
        return self.base.attend(layer, q, k, v, view, **options)

    def commit(self, entries: Entries, slots: Array) -> Local:
        base = self.base.commit([entry.first for entry in entries], slots)
        R = self.positions.shape[1]
        newest = jnp.maximum(self.base.length, slots.max(1) + 1)[:, None]
        to = jnp.where((slots >= 0) & (slots >= newest - R), slots % R, R)
        put = jax.vmap(lambda row, new, at: row.at[at].set(new.astype(row.dtype), mode="drop"))
        hidden = tuple(put(held, entry.hidden.both, to)
                       for held, entry in zip(self.hidden, entries, strict=True))
        return self.replace(base=base, hidden=hidden, positions=put(self.positions, slots, to))

    def tree_buffer(self, entries: Entries, room: int) -> Draftable:
        return LocalTreeBuffer.empty(self, entries, room)


@struct
class LocalTreeBuffer(TreeBuffer):
    """A buffer for draft-tree nodes of earlier windows of a round, beside a `Local` cache. It also stores the keys and
    values of the nodes' hidden decoding tokens (copies 2 to `K`)."""

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Window, **options: Any) -> tuple[Array, Any]:
        assert self.sees is not None
        held = self.entries[layer]
        flat = lambda x: x.reshape(len(x), -1, *x.shape[3:])
        own = jnp.broadcast_to(window.visible(), (*q.shape[:2], q.shape[1]))
        view = AttentionView(positions=window.positions, seen=jnp.concatenate([self.sees, own], 2),
                             key_positions=jnp.concatenate([self.positions, window.positions], 1), cached=window.cached)
        view = _behind(self.base.copies, q, view, self.positions, self.sees)
        k = jnp.concatenate([flat(held.hidden.keys), held.first.keys, k], 1)
        v = jnp.concatenate([flat(held.hidden.values), held.first.values, v], 1)
        return self.base.attend(layer, q, k, v, view, **options)


def _behind(copies: Copies, q: Array, window: Any, at: Array, seen: Array) -> AttentionView:
    """Returns a view of `window` with additional keys in front, those of hidden decoding tokens.

    Args:
        copies: number of copies and their attention.
        q: the queries.
        window: the window.
        at: `i32[B, R]`, positions of the tokens of these keys.
        seen: `bool[B, R]` or `bool[B, K W, R]`, True for keys that may be attended to.
    """
    hidden = copies.count - 1
    copy = jnp.repeat(jnp.arange(copies.count), q.shape[1] // copies.count)
    often = lambda x: jnp.repeat(x, hidden, -1)
    near = copies.near(window.positions, copy, often(at), jnp.tile(jnp.arange(1, copies.count), at.shape[1]))
    near &= often(seen if seen.ndim == 3 else seen[:, None])
    rest = jnp.broadcast_to(window.visible(), (*q.shape[:2], window.visible().shape[2]))
    return AttentionView(positions=window.positions, seen=jnp.concatenate([near, rest], 2), cached=window.cached,
                         key_positions=jnp.concatenate([often(at), window.key_positions], 1))
