"""KVShare, second stage: reused keys and values are recomputed while decoding, a few tokens after each step ("KVShare:
An LLM Service System with Efficient and Effective Multi-Tenant KV Cache Reuse", Yang et al., 2025).

The context is a text that `decodax.caches.blended` joined with `score="kvshare"`, the first stage. The attention of
each decoded token to the reused tokens, in the layer where their values were compared, is added to the attention that
they have received before. The `tokens` tokens with the largest product of attention and change of value are recomputed,
from all tokens before them, before the next token is decoded. When none are left, the cache behaves like a dense one.

The cache changes after each token, so a round commits only one token until no token is left to recompute. Drafts are
allowed, but are of no use until then.

The authors have published no code. Here values are compared in the same layer as in CacheBlend (`check=1`), and
attention is averaged over heads. With `past=1.0` the attention of the newest token is added to that received before;
with `past=0.0` it counts alone. Tokens are recomputed in a separate forward pass, which the statistics count.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.cache.dense import Dense, write, write_entries
from decodax.cache.entry import KVEntry, own_entry
from decodax.cache.key_values import KeyValues, KVConfig, KVLayer, Score, empty_kv, key_widths
from decodax.cache.wrapper import Wrapper
from decodax.common.struct import static, struct
from decodax.core.cache import Cache, Entries, PyTree
from decodax.core.capabilities import LoadsPrefix, PromptPhase, ReadPrompt, Refreshes
from decodax.core.window import Window, each_node
from decodax.pallas_kernels.window_attention import Bias, slot_weights, window_attention, window_attention_lse


@struct
class CheckedEntry(KVEntry):
    """Keys and values of a window's own nodes in the layer whose attention is measured.

    Attributes:
        weights: `f32[B, W, S]`, the attention of each node to each token, averaged over heads.
    """

    weights: Array


@struct
class KVShareCache(KeyValues, PromptPhase, Refreshes):
    """All tokens in the order of positions. Tokens whose keys and values were reused from another text are recomputed
    little by little.

    Attributes:
        kv: for each layer `f[B, G, S, d + e]`, keys and values.
        attention: `f32[B, S]`, attention that each token has received from queries so far; see `PrefixReuse`.
        change: `f32[B, S]`, difference between the new value of each reused token and the reused one; see
            `PrefixReuse`. Tokens with a change above 0 are still to be recomputed.
        asked: `bool[B]`, True if a token was committed since the last recomputation.
        length: `i32[B]`, number of tokens of the verified text.
        given: inputs of each row beside its tokens; see `Cache.inputs`.
        widths: static; the key width `d` of each layer.
        kind: static; the configuration.
    """

    kv: tuple[Array, ...]
    attention: Array
    change: Array
    asked: Array
    length: Array
    given: PyTree
    widths: tuple[int, ...] = static()
    kind: KVShareConfig = static()

    supports = frozenset({"trees"})

    @property
    def left(self) -> Array:
        """`bool[B]`: True for rows with reused tokens that are still to be recomputed."""
        return (self.change > 0).any(1)

    def max_commit(self) -> Array | None:
        return jnp.where(self.left, 1, jnp.iinfo(jnp.int32).max) if self.kv else None

    def needs_refresh(self) -> Array | None:
        return self.asked & self.left if self.kv else None

    def prefill_cache(self) -> Cache:
        if not self.kv:
            return self
        # `+ 0`: the state is donated, and no array may be in it twice
        whole = Dense(kv=self.kv, length=self.length + 0, given=self.given, widths=self.widths)
        return PromptToRepair(base=whole, into=self.replace(kv=()))

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               sliding: int | None = None, softcap: float | None = None,
               bias: Bias | None = None, sinks: Array | None = None) -> tuple[Array, PyTree]:
        out, lse = window_attention_lse(q, k, v, window.visible(), window.positions, self.kv[layer], self.length,
                                        scale=scale, sliding=sliding, softcap=softcap, bias=bias,
                                        key_positions=window.key_positions, sinks=sinks)
        entry = own_entry(q, k, v)
        if layer != self.kind.check:
            return out, entry
        weights = lax.cond(self.left.any(), lambda: self._weights(layer, q, lse, window.positions, scale, sliding,
                                                                  softcap),
                           lambda: jnp.zeros((*q.shape[:2], self.capacity), jnp.float32))
        return out, CheckedEntry(entry.keys, entry.values, weights)

    def _weights(self, layer: int, q: Array, lse: Array, at: Array, scale: float, sliding: int | None,
                 softcap: float | None) -> Array:
        """Returns the attention of each node to each token, averaged over heads, `f32[B, W, S]`."""
        one = lambda q, lse, at: slot_weights(q[:, None], lse[:, None], at[:, None], self.kv[layer], self.length,
                                              scale=scale, sliding=sliding, softcap=softcap).sum(1) / q.shape[1]
        weights: Array = each_node(one, q, lse, at)
        return weights

    def commit(self, entries: Entries, slots: Array) -> KVShareCache:
        if not self.kv:
            return self
        kv = write_entries(self.kv, entries, slots)
        took = slots >= 0
        # rows that commit more than one token have none left to recompute
        given = jnp.where(took[..., None], entries[self.kind.check].weights, 0).sum(1)
        attention = jnp.where(took.any(1)[:, None], self.kind.past * self.attention + given, self.attention)
        return self.replace(kv=kv, attention=attention, asked=self.asked | took.any(1),
                            length=jnp.maximum(self.length, slots.max(1) + 1))

    def refresh(self, text: ReadPrompt, rows: Array) -> KVShareCache:
        worth = jnp.where(self.change > 0, self.attention * self.change, -1)
        found, at = lax.top_k(worth, min(self.kind.tokens, self.capacity))
        live = rows[:, None] & (found >= 0)
        at = jnp.where(live, at.astype(jnp.int32), -1)
        tokens = jnp.take_along_axis(text.tokens, jnp.clip(at, 0, text.tokens.shape[1] - 1), 1)
        earlier = (at[:, None] <= at[:, :, None]) & live[:, None]
        window = Window(tokens=tokens, positions=jnp.maximum(at, 0), mask=earlier, live=live)
        held = Replacing(kv=self.kv, at=at, length=self.length, given=self.given, widths=self.widths)
        out = text.model.apply(text.params, window, held)
        fine = live & jnp.isfinite(out.hidden).all(-1)
        put = held.replace(at=jnp.where(fine, at, -1))
        kv = tuple(put.over(layer, entry.keys, entry.values) for layer, entry in enumerate(out.entries))
        # tokens that are not finite are not tried again
        done = jax.vmap(lambda change, at: change.at[at].set(0, mode="drop"))(
            self.change, jnp.where(live, at, self.capacity))
        return self.replace(kv=kv, change=done, asked=self.asked & ~rows)


@struct
class Replacing(KeyValues):
    """A cache for recomputing tokens in the middle of a text. Each attends to all tokens before it; recomputed ones
    replace the stored ones.

    Attributes:
        kv: for each layer `f[B, G, S, d + e]`, the stored keys and values.
        at: `i32[B, W]`, positions of the window's nodes; -1: none.
        length: `i32[B]`, number of tokens of the text.
        given: inputs of each row beside its tokens; see `Cache.inputs`.
        widths: static; the key width `d` of each layer.
    """

    kv: tuple[Array, ...]
    at: Array
    length: Array
    given: PyTree
    widths: tuple[int, ...] = static()

    def over(self, layer: int, k: Array, v: Array) -> Array:
        """Returns the stored keys and values of a layer, `f[B, G, S, d + e]`, with `k` (`f[B, W, G, d]`) and `v` (`f[B,
        W, G, e]`) of the window's nodes written at the positions `at`. The stored array is not changed."""
        return write(self.kv[layer], jnp.concatenate([k, v], -1), self.at)

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               sliding: int | None = None, softcap: float | None = None,
               bias: Bias | None = None, sinks: Array | None = None) -> tuple[Array, PyTree]:
        n, d = self.at.shape[1], self.widths[layer]     # nodes after the window's are copies that leave no entries
        new = self.over(layer, k[:, :n], v[:, :n]).swapaxes(1, 2)
        slots = jnp.arange(self.capacity, dtype=jnp.int32)
        seen = (slots <= window.positions[..., None]) & (slots < self.length[:, None, None])
        out = window_attention(q, new[..., :d], new[..., d:], seen | (slots == 0), window.positions, scale=scale,
                               sliding=sliding, softcap=softcap, bias=bias, sinks=sinks,
                               key_positions=jnp.broadcast_to(slots, (len(q), len(slots))))
        return out, KVEntry(k, v)

    def commit(self, entries: Entries, slots: Array) -> Replacing:
        raise NotImplementedError("recomputed tokens are written by the cache that asked for them")


@struct
class PromptToRepair(Wrapper, LoadsPrefix):
    """KVShare's cache during prefill.

    Attributes:
        base: the tokens that were prefilled or loaded.
        into: the `KVShareCache` to make, without its keys and values.
    """

    base: Dense
    into: KVShareCache

    def finish_prefill(self, prompt: ReadPrompt) -> Cache:     # type: ignore[override]
        return self.into.replace(kv=self.base.kv, length=self.base.length)

    def load_prefix(self, kv: Sequence[Array], length: Array,
                    reuse: tuple[Array, Array] | None = None) -> PromptToRepair:
        base, into = self.base.load_prefix(kv, length), self.into
        if reuse is not None:
            put = lambda old, new: lax.dynamic_update_slice_in_dim(old, new, 0, 1)
            into = into.replace(attention=put(into.attention, reuse[0]), change=put(into.change, reuse[1]))
        return self.replace(base=base, into=into)


@dataclasses.dataclass(frozen=True)
class KVShareConfig(KVConfig):
    """Keeps all tokens, and recomputes reused keys and values while decoding.

    For a `context` that `decodax.caches.blended` joined with `score="kvshare"`: the output comes closer to that of
    plain decoding.

    Attributes:
        tokens: number of tokens that are recomputed after each decoded token.
        check: layer where values were compared, as in `decodax.caches.blended`.
        past: factor of the attention received before, for each decoded token. 1: attention is summed over all decoded
            tokens; 0: only that of the newest one counts.
    """

    tokens: int = 3
    check: int = 1
    past: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.tokens, int) or self.tokens < 1 or self.check < 0:
            raise ValueError(f"tokens, check: got {self.tokens!r} and {self.check!r}, takes 1 and 0 or more")
        if not 0 <= self.past <= 1:
            raise ValueError(f"past: got {self.past!r}, takes 0 to 1")

    def refuses(self, layer: int, shape: KVLayer) -> frozenset[Score]:
        return frozenset(("biases",))

    def empty(self, shapes: tuple[KVLayer, ...], batch: int, size: int, dtype: Any, inputs: PyTree) -> Cache:
        if shapes and self.check >= len(shapes):
            raise ValueError(f"check: got {self.check}, takes one of {len(shapes)} layers")
        zeros = lambda of: jnp.zeros((batch, size), of)
        return KVShareCache(kv=empty_kv(shapes, batch, size, dtype), attention=zeros(jnp.float32),
                            change=zeros(jnp.float32), asked=jnp.zeros(batch, bool), given=inputs, kind=self,
                            length=jnp.zeros(batch, jnp.int32), widths=key_widths(shapes))
