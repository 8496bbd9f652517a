"""SpecPC: a draft model chooses the tokens of a prompt, and the target model prefills only these ("Draft-based
Approximate Inference for LLMs", Galim et al., 2025).

The draft model prefills the prompt. The score of a token is the maximum attention that it receives from the prompt's
latest queries, with larger weights for later ones, and from those of tokens that are decoded ahead, in any head of the
draft model's layers except the first ones. The best tokens and their neighbours are kept, and the latest tokens. The
target model prefills these as if they were the prompt, without gaps. Here their positions are the last ones before the
tokens that follow, which is the same for a model whose attention depends on distances alone.

The kept tokens are those of the authors' code (d79e404). Positions have to be rotary.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.cache.dense import Dense, dense
from decodax.cache.key_values import FittedConfig, KVLayer, Score
from decodax.cache.wrapper import Wrapper
from decodax.caches.asking import AskingDense
from decodax.caches.configs import PaperConfig, taken
from decodax.caches.evict.drafted import CHUNK, DraftedConfig, check_dense, paired, read
from decodax.caches.evict.selection import best
from decodax.caches.prefill.whole_prompt import ReadAtOnce
from decodax.common.options import Count, Whole
from decodax.common.registry import CACHES
from decodax.common.struct import static, struct
from decodax.core.cache import Cache, CacheConfig, Entries, Feature, PyTree
from decodax.core.capabilities import ReadPrompt
from decodax.core.loaded import Loaded
from decodax.core.window import Window, causal
from decodax.pallas_kernels.window_attention import whole_blocks


@struct
class SpecPCCache(ReadAtOnce, Wrapper):     # type: ignore[misc]
    """The kept tokens of a prompt, without gaps, and the tokens after it.

    Attributes:
        base: the dense cache of these tokens.
        gone: `i32[B]`, number of tokens of the prompt that were not kept. The token at position `p` after the prompt is
            in slot `p - gone`.
        size: static; maximum number of tokens of a text.
        shapes: static; the `KVLayer` of each layer.
        kind: static; the configuration.
    """

    base: Dense
    gone: Array
    size: int = static()
    shapes: tuple[KVLayer, ...] = static()
    kind: SpecPCConfig = static()

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

    def check_windows(self) -> None:
        raise ValueError(f"cache: {self.kind.name} moves tokens to new positions, which a draft model does not follow; "
                         "takes another cache for the draft model")

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, **options: Any) -> tuple[Array, PyTree]:
        if window.is_prefill:
            self.check_windows()
        return self.base.attend(layer, q, k, v, window, **options)

    def commit(self, entries: Entries, slots: Array) -> SpecPCCache:
        return self.replace(base=self.base.commit(entries, jnp.where(slots >= 0, slots - self.gone[:, None], -1)))

    def read_prompt(self, prompt: ReadPrompt, length: Array) -> SpecPCCache:
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
            # tokens that the last chunk shares with the one before are read from the window
            window = causal(lax.dynamic_slice_in_dim(tokens, begin, chunk, 1), begin + gone, slots < number[:, None])
            out = own.apply(params, window, base.replace(length=jnp.minimum(base.length, begin)))
            return base.commit(out.entries, jnp.where(live & jnp.isfinite(out.hidden).all(-1), slots, -1))

        return self.replace(base=lax.fori_loop(0, (number.max() + chunk - 1) // chunk, visit, empty), gone=gone)


@dataclasses.dataclass(frozen=True)
class SpecPCConfig(FittedConfig, PaperConfig):
    """Configuration of a `SpecPCCache`, for a target model paired with a draft model. See `specpc` for the fields."""

    budget: Count = 1024
    lookahead_tokens: Count = 1
    window_size: Count = 64
    kernel_size: Count = 64
    pooling: Literal["mean", "max"] = "max"
    neighbours: Count | None = None
    reduction_type: Literal["mean", "max"] = "max"
    first: int = 8
    weighted: bool = True

    name: ClassVar[str] = "specpc"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.budget < self.window_size:
            raise ValueError(f"budget: got {self.budget}, takes the {self.window_size} latest tokens or more")

    def beyond(self, longest: int) -> int:
        return self.lookahead_tokens - 1

    def attention(self, draft: Any, weights: PyTree, tokens: Array, length: Array) -> Array:
        """Returns the attention of the draft model to each token, `f32[B, N]`; 0 from `length` on.

        Args:
            draft, weights: the draft model and its weights.
            tokens: `i32[B, N]`, the prompts.
            length: `i32[B]`, number of tokens of each prompt.
        """
        B, n = tokens.shape
        w, before = self.window_size, jnp.maximum(length - self.window_size, 0)
        cache = read(draft, weights, tokens, before, w + self.lookahead_tokens)
        assert isinstance(cache, Dense)
        at = before[:, None] + jnp.arange(w, dtype=jnp.int32)
        window = causal(jnp.take_along_axis(tokens, jnp.minimum(at, n - 1), 1), before, at < length[:, None])
        share = jnp.linspace(0, 1, w) if self.weighted and w > 1 else jnp.ones(w)
        # the latest query of a shorter text counts in full as well
        share = share[jnp.clip(jnp.arange(w) + w - (length - before)[:, None], 0, w - 1)]
        paid, base, out = self._paid(draft, weights, AskingDense(base=cache), window, share, n)

        def ahead(carry: tuple[Array, Any, Array], _: None) -> tuple[tuple[Array, Any, Array], None]:
            paid, base, token = carry
            window = causal(token[:, None], base.length, jnp.ones((B, 1), bool))
            new, base, out = self._paid(draft, weights, base, window, jnp.ones((B, 1)), n)
            both = jnp.maximum(paid, new) if self.reduction_type == "max" else paid + new
            return (both, base, out.logits()[:, 0].argmax(-1).astype(jnp.int32)), None

        if self.lookahead_tokens > 1:
            newest = jnp.minimum(length - before, w)[:, None] - 1
            token = out.logits(newest)[:, 0].argmax(-1).astype(jnp.int32)
            (paid, _, _), _ = lax.scan(ahead, (paid, base, token), None, self.lookahead_tokens - 1)
        return jnp.where(jnp.arange(n) < length[:, None], paid, 0)

    def _paid(self, draft: Any, weights: PyTree, base: AskingDense, window: Window, share: Array,
              n: int) -> tuple[Array, AskingDense, Any]:
        """Runs the draft model on a window. Returns the attention of its queries to the first `n` tokens, weighted by
        `share` (`f32[B, w]`), the cache after the window, and the model's output."""
        out = draft.apply(weights, window, base)
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
                return paid.max((0, 1, 2)) if self.reduction_type == "max" else paid.sum((0, 1, 2))

            found.append(lax.map(one, (base.base.kv[layer], entry.queries, window.positions, window.live, share)))
        paid = jnp.stack(found)
        return paid.max(0) if self.reduction_type == "max" else paid.sum(0), base, out

    def chosen(self, paid: Array, length: Array) -> Array:
        """Returns a mask of the tokens of a row to keep, `bool[N]`: the latest ones, then the best ones with their
        neighbours (the nearest first), up to the budget.

        Args:
            paid: `f32[N]`, attention to each token.
            length: `i32[]`, number of tokens.
        """
        n, valid = len(paid), jnp.arange(len(paid)) < length
        left = (self.kernel_size - 1) // 2
        around = jnp.pad(paid, (left, self.kernel_size - 1 - left))
        parts = jnp.stack([around[i:i + n] for i in range(self.kernel_size)])
        worth = parts.mean(0) if self.pooling == "mean" else parts.max(0)
        order = jnp.lexsort((-jnp.arange(n), jnp.where(valid, -worth, jnp.inf), ~valid))
        rank = jnp.argsort(order)
        rank = jnp.where(valid & (rank < self.budget), rank, n)
        near_by = self.kernel_size if self.neighbours is None else self.neighbours
        left = (near_by - 1) // 2
        near = np.arange(-left, near_by - left)
        near = near[np.argsort(np.abs(near), kind="stable")]
        place = jnp.arange(n)
        turn = jnp.full(n, jnp.iinfo(jnp.int32).max)
        for i, by in enumerate(near.tolist()):
            of = place - by
            own = jnp.where((of >= 0) & (of < n), rank[jnp.clip(of, 0, n - 1)], n)
            turn = jnp.minimum(turn, jnp.where(own < n, own * len(near) + i, jnp.iinfo(jnp.int32).max))
        turn = jnp.where(place >= length - self.window_size, -1, turn)
        return best(-turn.astype(jnp.float32)[None], valid[None], jnp.minimum(length, self.budget))[0]

    def refuses(self, layer: int, shape: KVLayer) -> frozenset[Score]:
        return frozenset(("sliding windows", "biases"))

    def empty(self, shapes: tuple[KVLayer, ...], batch: int, size: int, dtype: Any, inputs: PyTree) -> Cache:
        if any(shape.rope is None for shape in shapes):
            raise ValueError(f"cache: {self.name} moves tokens together, which takes a model with rotary positions in "
                             "every layer")
        slots = whole_blocks(min(size, self.budget + self.new_tokens(size)))
        return SpecPCCache(base=dense(shapes, batch, slots, dtype, inputs), gone=jnp.zeros(batch, jnp.int32),
                           size=size, shapes=shapes, kind=self)


@CACHES.register("specpc", "Draft-based Approximate Inference for LLMs", "Galim et al. 2025", family="prefill")
def specpc(draft: Any = None, budget: Count = 1024, lookahead_tokens: Count = 1, window_size: Count = 64,
           kernel_size: Count = 64, pooling: Literal["mean", "max"] = "max", neighbours: Count | None = None,
           reduction_type: Literal["mean", "max"] = "max", first: Whole = 8, weighted: bool = True) -> CacheConfig:
    """Keeps the prompt tokens that a draft model attends to, and their neighbours; the target model prefills only
    these.

    It saves prefill time for long prompts, and memory. The draft model must have the same tokenizer. Example:
    `cache=caches.specpc(draft=decodax.load("small"), budget=512)`.

    Args:
        draft: the draft model, from `decodax.load`.
        budget: number of tokens of a prompt that are kept, including its newest one; at least `window_size`.
        lookahead_tokens: number of tokens that the draft model decodes ahead; the queries of all but the last one
            count.
        window_size: number of latest tokens whose queries count, and which are kept.
        kernel_size: number of neighbouring tokens over which scores are pooled.
        pooling: "max" or "mean", how they are pooled.
        neighbours: number of tokens around each of the best ones that are kept; None: `kernel_size`.
        reduction_type: "max" or "mean" over queries, heads and layers.
        first: number of first layers of the draft model that do not count.
        weighted: whether the queries of the window have weights from 0 for the first to 1 for the last; else 1 for all.
    """
    kind = SpecPCConfig(budget, lookahead_tokens, window_size, kernel_size, pooling, neighbours, reduction_type,
                        first, weighted)
    taken("draft", draft, Loaded, "a smaller model with the same tokenizer, as decodax.load gives it")
    if first >= (layers := check_dense("draft", draft)):
        raise ValueError(f"first: got {first}, the draft model has {layers} layers")
    return DraftedConfig(kind, draft, "specpc")
