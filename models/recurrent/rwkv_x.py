"""RWKV-X ("RWKV-X: A Linear Complexity Hybrid Language Model", Hou et al., 2025): RWKV-7 with some sparse attention.

After each `L / M` layers of RWKV-7 comes a block of attention, without rotations, and channel mixing. Keys and values
are stored in chunks of `C` tokens. A token attends to its own chunk, causally, and to the `top` complete chunks before
it whose mean keys have the largest product with its query, summed over heads. So the cost per token does not depend on
the length of the text, and in texts of at most `top` chunks attention is full.

When the store of a block holds more than `limit` tokens, it is reduced to `keep` by the newest token's queries: the
latest `recent` tokens stay, and of those before them each head keeps, in order, those that its query attends to most;
the kept tokens are divided into chunks anew. This happens once in `limit - keep` tokens, in a separate forward pass for
that token.

Files written by `scripts/convert.py rwkv` from a published `.pth` file are loaded; they keep the tensors' names.

Results are those of the authors' code (howard-hou/RWKV-X, 21452aa) where that reads a text token by token. In
prompts, its tokens beyond the first three chunks of a call attend to their own chunk alone, and stores are reduced by
the queries of the whole call; here one rule holds for prompts in chunks of any width. A round commits no token beyond
the chunk that is being filled.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.cache import KeyValues, PerLayer, Recurrent, Wrapper, empty_kv
from decodax.cache.dense import write_entries
from decodax.cache.entry import KVEntry
from decodax.common.arguments import check_counts
from decodax.common.struct import static, struct
from decodax.core.cache import Cache, Entries, PyTree
from decodax.core.capabilities import Draftable, PromptPhase, ReadPrompt, Refreshes
from decodax.core.types import Out, no_inputs
from decodax.core.window import Window, causal, take
from decodax.models.packed import multiply
from decodax.models.recurrent.rwkv7 import Rwkv7, Rwkv7Config, describe_rwkv7, layer_norm, read_rwkv7
from decodax.models.recurrent.rwkv7 import sources as rwkv7_sources
from decodax.models.transformer import Weights
from decodax.models.weight_source import WeightSource, kernel, plain
from decodax.pallas_kernels.window_attention import merge, window_attention, window_attention_lse


@dataclasses.dataclass(frozen=True)
class RwkvXConfig(Rwkv7Config):
    """The shape of an RWKV-X.

    Attributes:
        sparse: number of attention blocks `M`, a divisor of `L`; the last one comes after all layers.
        chunk: number of tokens `C` of a chunk.
        top: number of chunks beside its own to which a token attends.
        limit: number of stored tokens beyond which a store is reduced; None: never.
        keep: number of tokens to which it is reduced.
        recent: number of latest tokens among them, which are always kept.
    """

    sparse: int = 1
    chunk: int = 2048
    top: int = 3
    limit: int | None = 20000
    keep: int = 16000
    recent: int = 2000

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "sparse", "chunk", "top")
        if self.layers % self.sparse:
            raise ValueError(f"sparse: got {self.sparse}, takes a divisor of the number of layers, {self.layers}")
        if self.limit is not None and not 0 < self.recent < self.keep < self.limit:
            raise ValueError(f"limit, keep, recent: got {self.limit}, {self.keep} and {self.recent}, takes each below "
                             "the one before")


@struct
class Store(KeyValues, PromptPhase, Refreshes):
    """Keys and values in chunks, in the order of the tokens, without those that were dropped.

    Attributes:
        kv, given, widths: see `KeyValues`.
        sums: for each block `f32[B, H, S / C, d]`, the sum of the keys of each chunk.
        count: `i32[B]`, number of stored tokens.
        length: `i32[B]`, number of tokens that were processed.
        kind: static, the configuration.
        reading: static; True during prefill. The store is reduced only after it.
    """

    supports = frozenset({"trees"})

    kv: tuple[Array, ...]
    sums: tuple[Array, ...]
    count: Array
    length: Array
    given: PyTree
    widths: tuple[int, ...] = static()
    kind: RwkvXConfig = static()
    reading: bool = static(default=False)

    def prefill_cache(self) -> Store:
        return self.replace(reading=True)

    def finish_prefill(self, prompt: ReadPrompt) -> Store:
        return self.replace(reading=False)

    def max_commit(self) -> Array | None:
        # A chunk may be attended to by the token after its last one, and a store is reduced before that.
        room = self.kind.chunk - self.count % self.kind.chunk
        return room if self.limit is None else jnp.minimum(room, jnp.maximum(self.limit + 1 - self.count, 1))

    @property
    def limit(self) -> int | None:
        """Number of stored tokens beyond which the store is reduced; None if the configuration sets none, if the store
        has no room for more than that, or during prefill."""
        limit = None if self.reading else self.kind.limit
        return limit if limit is not None and self.capacity > limit else None

    def needs_refresh(self) -> Array | None:
        return None if self.limit is None else self.count > self.limit

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               **options: Any) -> tuple[Array, PyTree]:
        q = q.astype(jnp.float32) * scale
        out = (self._prompt if window.is_prefill else self._drafts)(layer, q, k, v, window)
        return out.astype(v.dtype), KVEntry(k, v)

    def _prompt(self, layer: int, q: Array, k: Array, v: Array, window: Window) -> Array:
        """Computes attention for a chain that will be committed as a whole and may itself fill chunks."""
        C, kv, d = self.kind.chunk, self.kv[layer], q.shape[-1]
        slot = self.count[:, None] + window.positions - self.length[:, None]
        chunks = -(-(kv.shape[2] + k.shape[1]) // C)
        sums = jnp.pad(self.sums[layer], ((0, 0), (0, 0), (0, chunks - self.sums[layer].shape[2]), (0, 0)))
        sums = added(sums, k, jnp.where(window.live, slot // C, chunks))
        own = slot // C
        chosen = self._best(q, sums, own) | (jnp.arange(chunks) == own[..., None])              # [B, W, chunks]
        held, near_shape = jnp.arange(kv.shape[2], dtype=jnp.int32), (*own.shape, own.shape[1])
        seen = jnp.take(chosen, held // C, axis=-1) & (held < self.count[:, None])[:, None]
        near = window.visible() & jnp.take_along_axis(chosen, jnp.broadcast_to(own[:, None], near_shape), -1)
        old = kv.swapaxes(1, 2)
        keys, values = (jnp.concatenate([x, new], 1) for x, new in ((old[..., :d], k), (old[..., d:], v)))
        at = jnp.concatenate([jnp.broadcast_to(held, (len(q), len(held))), slot], 1)
        return window_attention(q, keys, values, jnp.concatenate([seen, near], -1), slot, scale=1.0, key_positions=at)

    def _drafts(self, layer: int, q: Array, k: Array, v: Array, window: Window) -> Array:
        """Computes attention for nodes in the chunk that is being filled. Nodes beyond that chunk may get a wrong
        result, but are never committed."""
        C, kv, d = self.kind.chunk, self.kv[layer], q.shape[-1]
        near = window_attention_lse(q, k, v, window.visible(), window.positions, scale=1.0,
                                    key_positions=window.key_positions)
        own = jnp.broadcast_to((self.count // C)[:, None], q.shape[:2])
        top = min(self.kind.top, self.sums[layer].shape[2])
        found, chosen = lax.top_k(self._worth(q, self.sums[layer], own), top)
        # The chunk that is being filled, and the best ones.
        places = jnp.concatenate([own[..., None], jnp.where(found > -jnp.inf, chosen, -1)], -1).astype(jnp.int32)

        def one(node: tuple[Array, Array]) -> tuple[Array, Array]:
            q, places = node            # one query of each row
            within = jnp.arange(min(C, kv.shape[2]), dtype=jnp.int32)
            slot = (places[..., None] * C + within).reshape(len(q), -1)
            seen = (slot >= 0) & (slot < self.count[:, None])
            some = jax.vmap(lambda kv, at: kv[:, at])(kv, jnp.clip(slot, 0, kv.shape[2] - 1)).swapaxes(1, 2)
            # A query that sees no key attends to the first one, with weight 0.
            out, lse = window_attention_lse(q[:, None], some[..., :d], some[..., d:], _some(seen)[:, None],
                                            slot[:, :1], scale=1.0, key_positions=slot)
            return out[:, 0], jnp.where(seen.any(1)[:, None], lse[:, 0], -1e30)

        out, lse = lax.map(one, (q.swapaxes(0, 1), places.swapaxes(0, 1)))
        return merge(near, (out.swapaxes(0, 1), lse.swapaxes(0, 1)))[0]

    def _worth(self, q: Array, sums: Array, own: Array) -> Array:
        """Returns `f32[B, W, N]`, the product of each query with the mean key of each chunk before its own; `-inf` for
        others."""
        worth = jnp.einsum("bwhd,bhnd->bwn", q, sums / self.kind.chunk)
        return jnp.where(jnp.arange(sums.shape[2]) < own[..., None], worth, -jnp.inf)

    def _best(self, q: Array, sums: Array, own: Array) -> Array:
        """Returns `bool[B, W, N]`, True for the chunks to which a query attends beside its own."""
        worth = self._worth(q, sums, own)
        found, at = lax.top_k(worth, min(self.kind.top, sums.shape[2]))
        hit = (at[..., None] == jnp.arange(sums.shape[2])) & (found > -jnp.inf)[..., None]
        return hit.any(-2)

    def commit(self, entries: Entries, slots: Array) -> Store:
        if not self.kv:
            return self
        put = jnp.where(slots >= 0, slots - self.length[:, None] + self.count[:, None], -1)
        kv = write_entries(self.kv, entries, put)
        sums = tuple(added(held, entry.keys, jnp.where(put >= 0, put // self.kind.chunk, held.shape[2]))
                     for held, entry in zip(self.sums, entries, strict=True))
        length = jnp.maximum(self.length, slots.max(1) + 1)
        return self.replace(kv=kv, sums=sums, count=self.count + length - self.length, length=length)

    def cut(self, chosen: Entries, rows: Array) -> Store:
        """Returns the store in which the given rows (`bool[B]`) keep only the tokens at the slots in `chosen`, for each
        block a tuple with one `i32[B, 1, H, keep]`."""
        kv, sums = [], []
        for held, total, (at,) in zip(self.kv, self.sums, chosen, strict=True):
            kept, made = self._kept(held, at[:, 0])
            kept = jnp.where(rows[:, None, None, None], kept, held[:, :, :kept.shape[2]])
            kv.append(lax.dynamic_update_slice_in_dim(held, kept, 0, 2))
            sums.append(jnp.where(rows[:, None, None, None], made, total))
        return self.replace(kv=tuple(kv), sums=tuple(sums), count=jnp.where(rows, self.kind.keep, self.count))

    def _kept(self, kv: Array, at: Array) -> tuple[Array, Array]:
        """Returns keys and values at `i32[B, H, keep]`, and the sums of their chunks as in `sums`."""
        C, d, chunks = self.kind.chunk, kv.shape[-1] // 2, self.sums[0].shape[2]
        kept = jnp.take_along_axis(kv, at[..., None], 2)
        keys = jnp.pad(kept[..., :d].astype(jnp.float32), ((0, 0), (0, 0), (0, chunks * C - kept.shape[2]), (0, 0)))
        return kept, keys.reshape(*keys.shape[:2], chunks, C, d).sum(3)

    def tree_buffer(self, entries: Entries, room: int) -> Draftable:
        raise ValueError("draft: got an RWKV-X, takes a model with a buffer for trees that grow level by level")


@struct
class Cutting(Wrapper):
    """A store that is reduced while the newest token attends to it; its entries are the positions that are kept."""

    base: Store

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,   # type: ignore[override]
               **options: Any) -> tuple[Array, PyTree]:
        store = self.base
        kind, kv, d = store.kind, store.kv[layer], q.shape[-1]
        old = (store.count - kind.recent)[:, None, None]
        scores = jnp.einsum("bhd,bhsd->bhs", q[:, 0].astype(jnp.float32) * scale, kv[..., :d].astype(jnp.float32))
        scores = jnp.where(jnp.arange(kv.shape[2]) < old, scores, -jnp.inf)
        best = lax.top_k(scores, kind.keep - kind.recent)[1].astype(jnp.int32)      # a softmax has the same order
        late = jnp.broadcast_to(jnp.maximum(old, 0) + jnp.arange(kind.recent, dtype=jnp.int32), (
            *best.shape[:2], kind.recent))
        at = jnp.concatenate([best, late], -1)
        kept, sums = store._kept(kv, at)
        own = store.replace(kv=(kept,), sums=(sums,), count=jnp.full_like(store.count, kind.keep))
        out, _ = own.attend(0, q, k, v, window, scale=scale)
        return out, (at[:, None],)


@struct
class HybridStates(PerLayer):
    """The cache of an RWKV-X: stores of keys and values for its attention blocks, `base`, together with the recurrent
    states of its other layers, `linear`."""

    def walk(self, place: int, *args: Any) -> tuple[PyTree, PyTree]:
        """Runs a recurrence over the nodes of a window from the state at index `place` of the cache. Arguments after
        that, and results, are those of `Recurrent.walk`: outputs, and what is to be committed."""
        return self.linear.walk(self.where[place][1], *args)

    def refresh(self, text: ReadPrompt, rows: Array) -> HybridStates:
        newest = take(text.tokens, self.length[:, None])
        held = self.replace(base=Cutting(base=self.base))
        out = text.model.apply(text.params, causal(newest, self.length), held)
        return self.replace(base=self.base.cut(self.part(out.entries, False), rows))

    def tree_buffer(self, entries: Entries, room: int) -> Draftable:
        return self.base.tree_buffer(entries, room)


@dataclasses.dataclass(frozen=True)
class RwkvX(Rwkv7):
    """An RWKV-X. It is compared by value and static under jit.

    Attributes:
        config: its shape.
        dtype: dtype of activations, as a name. States are float32.
    """

    config: RwkvXConfig

    def init_cache(self, batch: int, capacity: int, *, params: Any = None, inputs: Any = None) -> Cache:
        no_inputs(self, inputs)
        c = self.config
        last = lambda: jnp.zeros((batch, c.width), self.dtype)
        state = lambda: jnp.zeros((batch, c.heads, c.head_dim, c.head_dim), jnp.float32)
        states, where = list[Array](), list[tuple[bool, int]]()
        for i in range(c.layers):
            where += [(True, len(states) + j) for j in range(3)]
            states += [last(), state(), last()]
            if (i + 1) % (c.layers // c.sparse) == 0:
                where += [(False, i // (c.layers // c.sparse)), (True, len(states))]
                states.append(last())
        shapes, length = [(c.heads, c.head_dim)] * c.sparse, jnp.zeros(batch, jnp.int32)
        chunks = -(-capacity // c.chunk)
        store = Store(kv=empty_kv(shapes, batch, capacity, self.dtype), count=length, length=length + 0, given=None,
                      sums=tuple(jnp.zeros((batch, c.heads, chunks, c.head_dim), jnp.float32) for _ in shapes),
                      widths=(c.head_dim,) * c.sparse, kind=c)
        return HybridStates(base=store, linear=Recurrent(states=tuple(states), length=length + 0, size=capacity),
                            where=tuple(where))

    def apply(self, params: Weights, window: Window, cache: Cache) -> Out:
        c, entries, layers = self.config, list[Any](), list[Array]()
        x, first = self.read(params, window), None
        for i in range(c.layers):
            x, first, own = self.block(params["layers"][str(i)], len(entries), x, first, window, cache)
            entries += own
            if (i + 1) % (c.layers // c.sparse) == 0:
                x, own = self.sparse_block(params["sparse"][str(i // (c.layers // c.sparse))], len(entries), x, window,
                                           cache)
                entries += own
            layers.append(x)
        return self.scored(params, x, entries, layers)

    def sparse_block(self, p: Weights, place: int, x: Array, window: Window, cache: Any) -> tuple[Array, list[Any]]:
        """Runs a block of sparse attention on the residual stream `x`, `f[B, W, D]`. Returns the stream after it, and
        its two entries, what a commit writes to the cache from index `place` on. `p` are the block's weights."""
        c, y = self.config, layer_norm(x, p["attn_norm"])
        shape = *y.shape[:2], c.heads, c.head_dim
        q, k, v = (multiply(y, p[name]["kernel"]).reshape(shape) for name in ("q", "k", "v"))
        out, own = cache.attend(place, q, k, v, window, scale=1 / math.sqrt(c.head_dim))
        x = x + multiply(out.reshape(x.shape).astype(x.dtype), p["o"]["kernel"])
        y, after = self.mix_channels(p["channels"], place + 1, layer_norm(x, p["channel_norm"]), window, cache)
        return x + y, [own, after]

    def sources(self) -> dict[str, WeightSource]:
        return sources(self.config)


def _some(seen: Array) -> Array:
    """Returns a mask `bool[B, n]` in which rows without any True have their first entry set."""
    return seen | (~seen.any(1, keepdims=True) & (jnp.arange(seen.shape[1]) == 0))


def added(sums: Array, keys: Array, chunk: Array) -> Array:
    """Returns `sums` with the key of each token added to the sum of its chunk, for each head.

    Args:
        sums: `f32[B, H, N, d]`.
        keys: `f[B, W, H, d]`.
        chunk: `i32[B, W]`, the chunk of each token; `N` for none.
    """
    return jax.vmap(lambda s, k, at: s.at[:, at].add(k.swapaxes(0, 1).astype(s.dtype), mode="drop"))(sums, keys, chunk)


def sources(c: RwkvXConfig, present: Collection[str] = ()) -> dict[str, WeightSource]:
    """Returns the shape of every weight and the tensor that holds it in a file, by the weight's dotted path."""
    D = c.width
    normed = lambda path, tensor: {f"{path}.scale": plain(f"{tensor}.weight", D),
                                   f"{path}.bias": plain(f"{tensor}.bias", D)}
    found = {path: dataclasses.replace(source, tensors=tuple(f"rwkv.{tensor}" for tensor in source.tensors))
             for path, source in rwkv7_sources(c).items()}
    for i in range(c.sparse):
        path, block = f"sparse.{i}", f"moba.{i}"
        found |= {**normed(f"{path}.attn_norm", f"{block}.ln1"), **normed(f"{path}.channel_norm", f"{block}.ln2"),
                  **{f"{path}.{name}.kernel": kernel(f"{block}.att.{module}", D, D) for name, module in (
                      ("q", "receptance"), ("k", "key"), ("v", "value"), ("o", "output"))},
                  f"{path}.channels.mix": WeightSource((f"{block}.ffn.x_k",), False, None, (1, 1, D)),
                  f"{path}.channels.k.kernel": kernel(f"{block}.ffn.key", c.inner, D),
                  f"{path}.channels.v.kernel": kernel(f"{block}.ffn.value", D, c.inner)}
    return found


def read_rwkv_x(c: Mapping[str, Any]) -> RwkvXConfig:
    """Returns the RWKV-X that a `config.json` describes.

    Raises:
        ValueError: an entry is missing or out of its range.
    """
    rwkv = dataclasses.asdict(read_rwkv7(c))
    own = {name: c[key] for name, key in ENTRIES.items() if key in c}
    if "sparse" not in own:
        raise ValueError(f"config.json of an rwkv_x model lacks '{ENTRIES['sparse']}'")
    if own.get("limit") == 0:       # in the authors' code 0 means that a store is never reduced
        own["limit"] = None
    return RwkvXConfig(**{**rwkv, **own})


ENTRIES = {"sparse": "n_moba_layer", "chunk": "moba_chunk_size", "top": "moba_topk", "limit": "max_kv_cache_size",
           "keep": "min_kv_cache_size", "recent": "kv_cache_window_size"}
"""Keys of config.json, by the authors' names, for the fields that RWKV-7 does not have."""


def describe_rwkv_x(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Returns the `config.json` of a published file, from its tensors' shapes, with the authors' defaults for the
    stores.

    Raises:
        ValueError: it is not an RWKV-X.
    """
    blocks = {name.split(".")[1] for name in shapes if name.startswith("moba.")}
    if not blocks:
        raise ValueError("checkpoint: got tensors without attention blocks, takes those of an RWKV-X")
    rwkv = describe_rwkv7({name.removeprefix("rwkv."): shape for name, shape in shapes.items()})
    default = {field.name: field.default for field in dataclasses.fields(RwkvXConfig)}
    return {**rwkv, "model_type": "rwkv_x", **{key: default[name] for name, key in ENTRIES.items()},
            "n_moba_layer": len(blocks)}
