"""Prompts that are cut to what a draft model attends to, before the model that answers reads any of them (SpecPC:
"Draft-based Approximate Inference for LLMs", Galim et al., 2025).

The draft model reads the prompt. A token is worth the largest attention that the prompt's latest queries pay to it,
later ones more than earlier ones, and those of tokens that are decoded ahead, in any head of its layers but the first.
The best tokens and their neighbours stay, and the latest ones. The model that answers reads these as if they were the
prompt: without gaps. Their positions here are the last ones before what follows, which is the same to a model whose
attention looks at distances alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.cache.dense import Dense, dense
from decodax.cache.key_values import KVLayer
from decodax.cache.wrapper import Wrapper
from decodax.caches.evict.drafted import CHUNK, paired, read
from decodax.caches.evict.selection import best
from decodax.caches.prefill.unread import Unread
from decodax.common.struct import static, struct
from decodax.core.cache import Cache, CacheConfig, Entries, Feature, PyTree, ReadPrompt
from decodax.core.window import Window, causal
from decodax.pallas_kernels.window_attention import BLOCK


@struct
class Shortened(Wrapper):
    """The tokens of a prompt that stayed, without gaps, and what follows.

    Attributes:
        gone: `i32[B]`, how many tokens of the prompt are not here: the token at position `p` behind it is in slot `p -
            gone`. size: static; the most tokens of a text.
    """

    base: Dense
    gone: Array
    size: int = static()
    shapes: tuple[KVLayer, ...] = static()
    kind: DraftAttention = static()

    @property
    def supports(self) -> frozenset[Feature]:       # type: ignore[override]
        return frozenset({"trees"})

    @property
    def capacity(self) -> int:
        return self.size

    @property
    def length(self) -> Array:
        return self.base.length + self.gone

    def room(self, running: Array) -> Array | None:
        return self.base.capacity - self.base.length if self.base.kv else None

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, **options: Any) -> tuple[Array, PyTree]:
        if options.get("sliding") is not None or options.get("bias") is not None or window.certain:
            raise ValueError(f"cache: {self.kind.name} moves tokens together, which takes a model without sliding "
                             "windows and without a bias of the scores, and that is the one that answers")
        return self.base.attend(layer, q, k, v, window, **options)

    def commit(self, entries: Entries, slots: Array) -> Shortened:
        return self.replace(base=self.base.commit(entries, jnp.where(slots >= 0, slots - self.gone[:, None], -1)))

    def for_prompt(self) -> Cache:      # type: ignore[override]
        if not self.base.kv:
            return self
        return Unread(length=jnp.zeros_like(self.gone), into=self)

    def read(self, prompt: ReadPrompt, length: Array) -> Shortened:
        """With what stays of the first `length` tokens (`i32[B]`) of a prompt; the newest token comes behind them."""
        kind, empty = self.kind, self.base
        own, params, draft, weights = paired(prompt, kind.name)
        paid = kind.attention(draft, weights, prompt.tokens, length + 1)
        stays = jax.vmap(kind.chosen)(paid, length + 1)
        width = min(kind.budget, prompt.tokens.shape[1])
        at = jnp.argsort(~stays, axis=-1, stable=True)[:, :width].astype(jnp.int32)
        number = stays.sum(1, dtype=jnp.int32) - 1
        tokens = jnp.take_along_axis(prompt.tokens, jnp.minimum(at, prompt.tokens.shape[1] - 1), 1)
        gone, chunk = length - number, min(CHUNK, tokens.shape[1])

        def visit(i: Array, base: Dense) -> Dense:
            begin = jnp.minimum(i * chunk, tokens.shape[1] - chunk)
            slots = begin + jnp.broadcast_to(jnp.arange(chunk, dtype=jnp.int32), (len(at), chunk))
            live = (slots >= i * chunk) & (slots < number[:, None])
            # tokens that the last chunk shares with the one before are in the window alone
            window = causal(lax.dynamic_slice_in_dim(tokens, begin, chunk, 1), begin + gone, slots < number[:, None])
            out = own.apply(params, window, base.replace(length=jnp.minimum(base.length, begin)))
            return base.commit(out.entries, jnp.where(live & jnp.isfinite(out.hidden).all(-1), slots, -1))

        return self.replace(base=lax.fori_loop(0, (number.max() + chunk - 1) // chunk, visit, empty), gone=gone)


@struct
class Asking(Wrapper):
    """A dense cache whose entries have the queries, too, scaled."""

    base: Dense

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, **options: Any) -> tuple[Array, PyTree]:
        out, entry = self.base.attend(layer, q, k, v, window, **options)
        return out, (*entry, q * options["scale"])

    def commit(self, entries: Entries, slots: Array) -> Asking:
        return self.replace(base=self.base.commit([entry[:2] for entry in entries], slots))


@dataclasses.dataclass(frozen=True)
class DraftAttention(CacheConfig):
    """A `Shortened` cache, of what a draft model attends to.

    Attributes:
        budget: tokens of a prompt that stay, its newest one among them. tokens: how many are decoded ahead, the first
            of which has no query of its own.
        window: latest tokens whose queries count, and which stay.
        kernel, pool: neighbours that are pooled, and how. neighbours: how many around each of the best tokens stay.
        reduce: over queries, heads and layers. first: layers of the draft model that do not count.
        weighted: whether later queries of the window count more, from 0 to 1.
        new: how many tokens there will be behind the prompt at most (`fit`); None: not known. name: what errors call
            it.
    """

    budget: int
    tokens: int = 1
    window: int = 64
    kernel: int = 64
    pool: Literal["mean", "max"] = "max"
    neighbours: int = 64
    reduce: Literal["mean", "max"] = "max"
    first: int = 8
    weighted: bool = True
    new: int | None = None
    name: str = "specpc"

    def __post_init__(self) -> None:
        for name in ("budget", "tokens", "window", "kernel", "neighbours"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, takes a number from 1")
        if self.budget < self.window:
            raise ValueError(f"budget: got {self.budget}, takes the {self.window} latest tokens or more")

    def fit(self, new: int) -> DraftAttention:
        return dataclasses.replace(self, new=new)

    def beyond(self, longest: int) -> int:
        return self.tokens - 1

    def attention(self, draft: Any, weights: PyTree, tokens: Array, length: Array) -> Array:
        """`f32[B, N]`: what the draft model pays to each of the first `length` (`i32[B]`) of `tokens` (`i32[B, N]`)."""
        B, n = tokens.shape
        w, before = self.window, jnp.maximum(length - self.window, 0)
        cache = read(draft, weights, tokens, before, w + self.tokens)
        if not isinstance(cache, Dense):
            raise ValueError(f"draft: got one with a {type(cache).__name__} cache, takes one with a dense cache")
        at = before[:, None] + jnp.arange(w, dtype=jnp.int32)
        window = causal(jnp.take_along_axis(tokens, jnp.minimum(at, n - 1), 1), before, at < length[:, None])
        share = jnp.linspace(0, 1, w) if self.weighted and w > 1 else jnp.ones(w)
        # the latest query of a shorter text counts in full, too
        share = share[jnp.clip(jnp.arange(w) + w - (length - before)[:, None], 0, w - 1)]
        paid, base, out = self._paid(draft, weights, Asking(base=cache), window, share, n)

        def ahead(carry: tuple[Array, Any, Array], _: None) -> tuple[tuple[Array, Any, Array], None]:
            paid, base, token = carry
            window = causal(token[:, None], base.length, jnp.ones((B, 1), bool))
            new, base, out = self._paid(draft, weights, base, window, jnp.ones((B, 1)), n)
            both = jnp.maximum(paid, new) if self.reduce == "max" else paid + new
            return (both, base, out.logits()[:, 0].argmax(-1).astype(jnp.int32)), None

        if self.tokens > 1:
            newest = jnp.minimum(length - before, w)[:, None] - 1
            token = out.logits(newest)[:, 0].argmax(-1).astype(jnp.int32)
            (paid, _, _), _ = lax.scan(ahead, (paid, base, token), None, self.tokens - 1)
        return jnp.where(jnp.arange(n) < length[:, None], paid, 0)

    def _paid(self, draft: Any, weights: PyTree, base: Asking, window: Window, share: Array,
              n: int) -> tuple[Array, Asking, Any]:
        """What the queries of a window pay to the first `n` tokens, as much as each one's `share` (`f32[B, w]`); and
        the cache with the window."""
        out = draft.apply(weights, window, base)
        if self.first >= len(out.entries):
            raise ValueError(f"first: got {self.first}, the draft model has {len(out.entries)} layers")
        base = base.commit(out.entries, jnp.where(window.live, window.positions, -1))
        found = []
        for layer, entry in enumerate(out.entries):
            if layer < self.first:
                continue

            def one(row: Any, layer: int = layer) -> Array:
                kv, q, at, live, share = row
                G, d = kv.shape[0], base.base.widths[layer]
                keys = kv[..., :d].astype(jnp.float32)
                scores = jnp.einsum("wgrd,gsd->grws", q.astype(jnp.float32).reshape(len(q), G, -1, d), keys)
                seen = jnp.arange(kv.shape[1]) <= at[:, None]
                paid = jax.nn.softmax(scores, axis=-1, where=seen)[..., :n] * jnp.where(live, share, 0)[:, None]
                return paid.max((0, 1, 2)) if self.reduce == "max" else paid.sum((0, 1, 2))

            found.append(lax.map(one, (base.base.kv[layer], entry[2], window.positions, window.live, share)))
        paid = jnp.stack(found)
        return paid.max(0) if self.reduce == "max" else paid.sum(0), base, out

    def chosen(self, paid: Array, length: Array) -> Array:
        """`bool[N]`: which tokens of a row stay, by what is paid to each, `f32[N]`: the latest, and the best ones with
        their neighbours, each with the nearest first, as far as the budget goes."""
        n, valid = len(paid), jnp.arange(len(paid)) < length
        left = (self.kernel - 1) // 2
        around = jnp.pad(paid, (left, self.kernel - 1 - left))
        parts = jnp.stack([around[i:i + n] for i in range(self.kernel)])
        worth = parts.mean(0) if self.pool == "mean" else parts.max(0)
        order = jnp.lexsort((-jnp.arange(n), jnp.where(valid, -worth, jnp.inf), ~valid))
        rank = jnp.argsort(order)
        rank = jnp.where(valid & (rank < self.budget), rank, n)
        left = (self.neighbours - 1) // 2
        near = np.arange(-left, self.neighbours - left)
        near = near[np.argsort(np.abs(near), kind="stable")]
        place = jnp.arange(n)
        turn = jnp.full(n, jnp.iinfo(jnp.int32).max)
        for i, by in enumerate(near.tolist()):
            of = place - by
            own = jnp.where((of >= 0) & (of < n), rank[jnp.clip(of, 0, n - 1)], n)
            turn = jnp.minimum(turn, jnp.where(own < n, own * len(near) + i, jnp.iinfo(jnp.int32).max))
        turn = jnp.where(place >= length - self.window, -1, turn)
        return best(-turn.astype(jnp.float32)[None], valid[None], jnp.minimum(length, self.budget))[0]

    def __call__(self, layers: Sequence[tuple[Any, ...]], batch: int, capacity: int, dtype: jax.typing.DTypeLike,
                 inputs: PyTree = None) -> Cache:
        shapes = tuple(KVLayer(*layer) for layer in layers) if capacity else ()
        if any(shape.rope is None for shape in shapes):
            raise ValueError(f"cache: {self.name} moves tokens together, which takes a model with rotary positions in "
                             "every layer")
        slots = min(capacity, self.budget + (capacity if self.new is None else self.new))
        slots = slots if slots <= BLOCK else -(-slots // BLOCK) * BLOCK
        return Shortened(base=dense(shapes, batch, slots, dtype, inputs), gone=jnp.zeros(batch, jnp.int32),
                         size=capacity, shapes=shapes, kind=self)
