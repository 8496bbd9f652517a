"""SpeCache: a low-bit cache on the device, the full-precision one in host memory, and a guessed token that chooses what
is fetched ("SpeCache: Speculative Key-Value Caching for Efficient Generation of LLMs", Jie et al., 2025).

The device holds keys and values in one or two bits, the latest tokens unquantized, and the `top` positions of each head
that were fetched from the host. A round runs the model on two tokens in one forward pass: the newest one, and a guess
of the token after it. Both attend to the low-bit cache, in which the fetched positions are replaced by their full
values. The newest token gives the next one, and is committed: quantized on the device, unquantized on the host. The
guess gives the guess of the next round, and the positions that it attends to most are fetched for that round. So what a
round needs from the host is known one round before, and can be copied meanwhile.

The first round runs on the newest token of the prompt alone, which gives the first guess and the first positions, and
runs again in the second round; nothing is committed in between (Algorithms 1 to 3 of the paper). A guess is drawn as
the token in its place would be, and is never emitted. The heads of a group take the positions of the largest mean
weight.

The authors have published no code. The paper does not say how heads of a group share positions; a reimplementation
(github.com/intelli-jsong/SpeCache, b447f6f) takes means, as is done here.

It does not combine with drafts, and saves no memory on TPUs yet (docs/results/tpu.md).
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.cache import Wrapper, dense
from decodax.cache.entry import KVEntry
from decodax.cache.key_values import KVLayer, Score
from decodax.caches.configs import PaperConfig
from decodax.caches.quantize.codecs import Span
from decodax.caches.quantize.kivi import KIVICodec, OneBitCodec
from decodax.caches.quantize.quantized import PromptToQuantize, QuantizedCache, QuantizedConfig
from decodax.common.options import Count, Range
from decodax.common.struct import Struct, static, struct
from decodax.core.algorithm import Algorithm, Traits
from decodax.core.cache import Cache, Entries, Layout, PyTree
from decodax.core.capabilities import ReadPrompt
from decodax.core.host_memory import PAGES, empty_pages, fetch, store, to_host
from decodax.core.state import State
from decodax.core.types import Decision, Model, Out, Params, wrap_cache
from decodax.core.window import Window, causal, take
from decodax.pallas_kernels.window_attention import BLOCK as WALK
from decodax.pallas_kernels.window_attention import merge, prefix_attention, slot_weights, window_attention_lse


@struct
class Chooser(Struct):
    """A hint (`Window.hint`): the index of the node of each row whose attention chooses what is fetched for the next
    round, `i32[B]`."""

    node: Array


@struct
class SpeCacheEntry(KVEntry):
    """Keys and values of the two nodes of a window, with the positions to fetch.

    Attributes:
        best: `i32[B, W, G, n]`, positions of the tokens to which the choosing node attends most; -1: none.
    """

    best: Array


@struct
class SpeCacheCache(Wrapper):
    """A low-bit cache, and the unquantized one in host memory.

    Attributes:
        base: the low-bit cache, with the latest tokens.
        pages: for each layer `f[B, G, S, 2, d]` in host memory; each token is a page with a key and a value.
        chosen: for each layer `i32[B, G, K]`, the positions that the next round attends to unquantized; -1: none.
        fetched: for each layer `f[B, G, K, 2, d]`, their keys and values.
        ready: `bool[B]`, True after the first choice of positions.
        kind: static; the configuration.
    """

    base: QuantizedCache
    pages: tuple[Array, ...]
    chosen: tuple[Array, ...]
    fetched: tuple[Array, ...]
    ready: Array
    kind: SpeCacheConfig = static()

    @property
    def layout(self) -> Layout:
        return Layout(hosted=self.pages, specs=dict(pages=tuple(PAGES for _ in self.pages)))

    def select(self, rows: Array) -> SpeCacheCache:
        return Cache.select(self, rows)     # handles what is on the host

    def prefill_cache(self) -> Cache:      # type: ignore[override]
        if not self.pages:
            return self
        prompt: Any = self.base.prefill_cache()
        return PromptToPrefetch(base=prompt, kind=self.kind)

    def finish_prefill(self, prompt: ReadPrompt) -> SpeCacheCache:
        return self

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, **options: Any) -> tuple[Array, PyTree]:
        hint = window.hint(Chooser) if isinstance(window, Window) else None
        if hint is None:
            raise ValueError("cache: specache is read by its own method, two tokens at a time; takes "
                             "algorithm=\"specache\"")
        sinks = options.get("sinks")
        options = {name: options.get(name) for name in ("scale", "sliding", "softcap")}
        base, G, softcap = self.base, k.shape[2], options["softcap"]
        coded = base.held - base.whole
        latest = base.kind.places(coded, base.rest[layer].shape[2])
        latest = jnp.where(latest < base.held[:, None], latest, -1)
        near = window_attention_lse(q, k, v, window.visible(), window.positions, base.rest[layer],
                                    slot_positions=latest[:, None], key_positions=window.key_positions, sinks=sinks,
                                    **options)
        block = base.kind.block(base.slots)
        blocks = (coded.max() + block - 1) // block

        def part(i: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
            count = jnp.clip(coded - i * block, 0, block)
            own = prefix_attention(q, window.positions - i * block, self._block(layer, i, q.dtype), count, **options)
            return merge(found, own)

        out, lse = lax.fori_loop(0, blocks, part, near)

        # the attention that the node that chooses gives to each position
        asks, at, sums = (take(x, hint.node[:, None]) for x in (q, window.positions, lse))

        def weigh(i: Array, weights: Array) -> Array:
            count = jnp.clip(coded - i * block, 0, block)
            own = slot_weights(asks, sums, at - i * block, self._block(layer, i, q.dtype), count, **options)
            return lax.dynamic_update_slice_in_dim(weights, own[:, :, :block], i * block, 2)

        size = max(base.slots, base.size)
        weights = lax.fori_loop(0, blocks, weigh, jnp.zeros((len(q), G, size), jnp.float32))
        own = slot_weights(asks, sums, at, base.rest[layer], slot_positions=latest[:, None], **options)
        put = jax.vmap(lambda weights, places, own: weights.at[:, places].set(own, mode="drop"))
        weights = put(weights, jnp.where(latest >= 0, latest, size), own)
        # the attention to the newest token, if the guess chooses
        score = jnp.einsum("bgrd,bgd->bgr", asks[:, 0].reshape(len(q), G, -1, k.shape[3]), k[:, 0],
                           preferred_element_type=jnp.float32) * options["scale"]
        score = score if softcap is None else softcap * jnp.tanh(score / softcap)
        newest = jnp.exp(score - sums[:, 0].reshape(score.shape)).sum(-1)
        place = jnp.arange(size, dtype=jnp.int32)
        weights = jnp.where((place == base.length[:, None])[:, None], newest[..., None], weights)
        seen = place < (base.length + hint.node)[:, None]
        found, best = lax.top_k(jnp.where(seen[:, None], weights, -1), self.chosen[layer].shape[2])
        best = jnp.where(found >= 0, best.astype(jnp.int32), -1)
        return out, SpeCacheEntry(k, v, jnp.broadcast_to(best[:, None], (*k.shape[:2], *best.shape[1:])))

    def _block(self, layer: int, i: Array, dtype: Any) -> Array:
        """Returns block `i` of the low-bit cache, `f[B, G, n, d + e]`, with the fetched positions unquantized."""
        base, kind = self.base, self.base.kind
        block = kind.block(base.slots)

        def some(x: Array) -> Array:
            size = block * x.shape[2] // base.slots
            return lax.dynamic_slice_in_dim(x, i * size, size, 2)

        decode = lambda codes: kind.codec.decode(base.shapes[layer], codes, dtype, Span(i * block, None, layer))
        both = jax.vmap(decode)(jax.tree.map(some, base.codes[layer]))
        both = jnp.pad(both, ((0, 0), (0, 0), (0, -block % WALK if block > WALK else 0), (0, 0)))
        at = self.chosen[layer] - i * block
        at = jnp.where((at >= 0) & (at < block), at, both.shape[2])
        fetched = jnp.concatenate([self.fetched[layer][..., 0, :], self.fetched[layer][..., 1, :]], -1)
        put = lambda both, at, new: both.at[at].set(new.astype(dtype), mode="drop")
        return jax.vmap(jax.vmap(put))(both, at, fetched)

    def commit(self, entries: Entries, slots: Array) -> SpeCacheCache:
        if not self.pages:
            return self
        base = self.base.commit([entry.pair for entry in entries], slots)
        chooses = (slots[:, 0] >= 0) | ~self.ready
        pages, chosen, fetched = [], [], []
        for old, entry, before in zip(self.pages, entries, self.chosen, strict=True):
            pages.append(store(old, jnp.stack([entry.keys, entry.values], 3).swapaxes(1, 2), slots))
            chosen.append(jnp.where(chooses[:, None, None], entry.best[:, 0], before))
            fetched.append(fetch(pages[-1], jnp.maximum(chosen[-1], 0)))
        return self.replace(base=base, pages=tuple(pages), chosen=tuple(chosen), fetched=tuple(fetched),
                            ready=jnp.ones_like(self.ready))


@struct
class PromptToPrefetch(Wrapper):
    """SpeCache's cache during prefill, with all tokens of the prompt on the device. `finish_prefill` quantizes them and
    copies them to the host."""

    base: PromptToQuantize
    kind: SpeCacheConfig = static()

    def finish_prefill(self, prompt: ReadPrompt) -> Cache:     # type: ignore[override]
        whole, coded = self.base.base, self.base.finish_prefill(prompt)
        assert isinstance(coded, QuantizedCache)
        into = self.kind.around(coded, whole.kv[0].dtype)
        pages = tuple(lax.dynamic_update_slice(page, to_host(kv.reshape(page.shape)), (0,) * 5)
                      for page, kv in zip(into.pages, whole.kv, strict=True))
        return into.replace(pages=pages)


@dataclasses.dataclass(frozen=True)
class SpeCacheConfig(PaperConfig):
    """Configuration of a `SpeCacheCache`.

    Attributes:
        bits: number of bits of the cache on the device, 1 or 2.
        top: number of positions of each head that are fetched for a round.
        group_size: number of values that share a quantization step.
        residual_length: number of tokens that are quantized together; the latest tokens are unquantized until there are
            that many.
    """

    bits: Annotated[int, Range(1, 2)] = 2
    top: Count = 64
    group_size: Count = 32
    residual_length: Count = 32

    name: ClassVar[str] = "specache"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.low        # noqa: B018  checks the rest

    def refuses(self, layer: int, shape: KVLayer) -> frozenset[Score]:
        return frozenset(("biases",))

    @property
    def low(self) -> QuantizedConfig:
        """Config of the low-bit cache."""
        codec = OneBitCodec(group_size=self.group_size) if self.bits == 1 else KIVICodec(2, 2, self.group_size)
        return QuantizedConfig(codec, self.residual_length, "specache")

    def around(self, base: QuantizedCache, dtype: Any) -> SpeCacheCache:
        """Returns a cache with the low-bit cache `base` and empty host memory."""
        B = base.length.shape[0]
        some = lambda shape: (B, shape.heads, min(self.top, base.size))
        return SpeCacheCache(
            base=base, pages=tuple(empty_pages(B, x.heads, base.size, 2, x.width, dtype=dtype) for x in base.shapes),
            chosen=tuple(jnp.full(some(x), -1, jnp.int32) for x in base.shapes),
            fetched=tuple(jnp.zeros((*some(x), 2, x.width), dtype) for x in base.shapes),
            ready=jnp.zeros(B, bool), kind=self)

    def empty(self, shapes: tuple[KVLayer, ...], batch: int, size: int, dtype: Any, inputs: PyTree) -> Cache:
        if odd := [x for x in shapes if x.both != 2 * x.width]:
            raise ValueError(f"cache: specache got keys of {odd[0].width} numbers and values of "
                             f"{odd[0].both - odd[0].width}, takes those of one width")
        return self.around(self.low.empty(shapes, batch, size, dtype, inputs), dtype)


@dataclasses.dataclass(frozen=True)
class SpeCache(Algorithm):
    """Plain decoding with a `SpeCacheCache`: each round runs on the newest token and on a guess of the token after it.

    Attributes:
        cache: configuration of the cache, which replaces the model's dense one.
    """

    cache: SpeCacheConfig = SpeCacheConfig()

    @property
    def traits(self) -> Traits:
        return Traits("specache")

    def wrap_model(self, model: Model) -> Model:
        def kind(base: Any) -> Any:
            if base is not dense:
                raise ValueError(f"cache: specache has a cache of its own, got {base}; takes a model with a dense one")
            return self.cache

        return wrap_cache(model, kind)

    def init(self, params: Params, s: State) -> Array:
        return jnp.full(s.batch, -1, jnp.int32)     # the guess; -1 for none

    def propose(self, params: Params, policy: Any, s: State) -> tuple[Window, Any]:
        guess = s.algo
        there = guess >= 0
        tokens = jnp.stack([s.newest, jnp.maximum(guess, 0)], 1)
        window = causal(tokens, s.length - 1, jnp.stack([s.running, s.running & there], 1))
        return window.replace(hints=(*window.hints, Chooser(there.astype(jnp.int32)))), guess

    def decide(self, params: Params, dist: Any, s: State, window: Window, out: Out, algo: Any) -> Decision:
        drawn, there = dist.draw(), algo >= 0
        slots = jnp.where(there & (drawn[:, 0] >= 0), window.positions[:, 0], -1)
        guess = jnp.maximum(jnp.where(there, drawn[:, 1], drawn[:, 0]), 0)
        return Decision(tokens=drawn[:, :1], count=there.astype(jnp.int32), source=jnp.zeros_like(drawn[:, :1]),
                        slots=jnp.stack([slots, jnp.full_like(slots, -1)], 1),
                        algo=jnp.where(s.running, guess, algo))
