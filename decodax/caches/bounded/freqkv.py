"""FreqKV: a cache of constant size. Each time it is full, its older part is compressed to low frequencies ("FreqKV:
Frequency Domain Key-Value Compression for Efficient Context Window Extension", Kai et al., 2025).

When the cache is full, the keys and values after the first tokens (the sinks) go through a discrete cosine transform
over the tokens. The lower frequencies are transformed back to fewer tokens of the same scale. So older tokens are
compressed again and again instead of being evicted. Keys are transformed before rotation, and positions are counted in
the cache. Here keys are rotated to the last positions before the tokens that follow; the result is the same for a model
whose attention depends on distances alone. A round commits no token beyond the point where the cache is full, and
prompts are read in the same way, so neither drafts nor chunks change the result.

The outputs are those of the authors' code (8783a2d) without its separate recent tokens. The authors also train the
model for a few steps with this cache.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import jax.numpy as jnp
from jax import Array, lax
from jax.scipy import fft

from decodax.cache.dense import write_entries
from decodax.cache.entry import own_entry
from decodax.cache.key_values import KeyValues, KVConfig, KVLayer, Score, empty_kv, key_widths
from decodax.caches.prefill.whole_prompt import Collected
from decodax.caches.rotation import after_rotation, before_rotation, moved, rope_of
from decodax.common.options import Count, Range, Whole, check_options
from decodax.common.registry import CACHES
from decodax.common.struct import static, struct
from decodax.core.cache import Cache, Entries, PyTree
from decodax.core.capabilities import ReadPrompt, WholePrompt
from decodax.core.window import causal
from decodax.pallas_kernels.window_attention import Bias, whole_blocks, window_attention

CHUNK = 256
"""Number of prompt tokens that are prefilled at a time."""


def low_frequencies(x: Array, count: int) -> Array:
    """Compresses `n` tokens (`f32[n, ...]`) to `count` (`f32[count, ...]`): keeps the lowest frequencies of their
    discrete cosine transform along the token axis, and transforms them back."""
    spectrum = fft.dct(x, axis=0, norm="ortho")[:count]
    return fft.idct(spectrum, axis=0, norm="ortho") * (count / len(x)) ** 0.5


@struct
class FreqKVCache(KeyValues, WholePrompt):
    """The first tokens, the compressed older tokens, and the latest tokens.

    Attributes:
        kv: for each layer `f[B, G, S, d + e]`. The token at position `p` is written to slot `p - gone`, and the key in
            slot `s` is rotated to position `s + gone`.
        gone: `i32[B]`, number of tokens minus number of filled slots.
        count: `i32[B]`, number of filled slots.
        given: inputs of each row beside its tokens; see `Cache.inputs`.
        widths: static; the key width `d` of each layer.
        size: static; maximum number of tokens of a text.
        shapes: static; the `KVLayer` of each layer.
        kind: static; the configuration.
    """

    kv: tuple[Array, ...]
    gone: Array
    count: Array
    given: PyTree
    widths: tuple[int, ...] = static()
    size: int = static()
    shapes: tuple[KVLayer, ...] = static()
    kind: FreqKVConfig = static()

    supports = frozenset({"trees"})

    @property
    def capacity(self) -> int:
        return self.size

    @property
    def length(self) -> Array:
        return self.gone + self.count

    def max_commit(self) -> Array | None:
        return self.kind.size - self.count if self.kv else None

    def prefill_cache(self) -> Cache:
        return Collected(length=jnp.zeros_like(self.count), into=self) if self.kv else self

    def read_prompt(self, prompt: ReadPrompt, length: Array) -> FreqKVCache:
        """Returns the cache after the first `length` (`i32[B]`) tokens of a prompt."""
        n = prompt.tokens.shape[1]
        width = min(CHUNK, self.kind.size, n)

        def visit(cache: FreqKVCache) -> FreqKVCache:
            at = cache.length[:, None] + jnp.arange(width, dtype=jnp.int32)
            live = (at < length[:, None]) & (jnp.arange(width) < cache.kind.size - cache.count[:, None])
            tokens = jnp.take_along_axis(prompt.tokens, jnp.minimum(at, n - 1), 1)
            out = prompt.model.apply(prompt.params, causal(tokens, cache.length, live), cache)
            # NaNs are committed, too, or the loop would not end; the next round reports them
            slots = jnp.where(live, at, -1) + (out.hidden[..., 0] * 0 > 0)
            return cache.commit(out.entries, slots)

        return lax.while_loop(lambda cache: (cache.length < length).any(), visit, self)

    def check_windows(self) -> None:
        raise ValueError(f"cache: {self.kind.name} moves tokens to new positions, which a draft model does not follow; "
                         "takes another cache for the draft model")

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               sliding: int | None = None, softcap: float | None = None,
               bias: Bias | None = None, sinks: Array | None = None) -> tuple[Array, PyTree]:
        if window.is_prefill:
            self.check_windows()
        out = window_attention(q, k, v, window.visible(), window.positions, self.kv[layer], self.count, scale=scale,
                               softcap=softcap, key_positions=window.key_positions, sinks=sinks)
        return out, own_entry(q, k, v)

    def commit(self, entries: Entries, slots: Array) -> FreqKVCache:
        if not self.kv:
            return self
        to = jnp.where(slots >= 0, slots - self.gone[:, None], -1)
        kv = write_entries(self.kv, entries, to)
        new = self.replace(kv=kv, count=jnp.maximum(self.count, to.max(1) + 1))
        full = new.count >= self.kind.size
        # a loop of one trip or none, since XLA copies what a conditional writes to
        once = lambda c: (jnp.zeros((), bool), c[1]._compressed(full))
        return lax.while_loop(lambda c: c[0], once, (full.any(), new))[1]

    def _compressed(self, rows: Array) -> FreqKVCache:
        """Returns the cache with the tokens of `rows` (`bool[B]`) compressed."""
        kind, made = self.kind, []
        sinks, n, count = kind.sinks, kind.size - kind.sinks, kind.kept
        fewer = n - count

        for shape, kv in zip(self.shapes, self.kv, strict=True):

            def one(row: Any, shape: KVLayer = shape) -> Array:
                kv, gone, choose = row
                both, d = kv[:, :sinks + n].astype(jnp.float32), shape.width
                keys, values = both[..., :d], both[..., d:]
                plain = before_rotation(shape, keys[:, sinks:], gone + sinks)
                plain, later = (low_frequencies(x.swapaxes(0, 1), count).swapaxes(0, 1)
                                for x in (plain, values[:, sinks:]))
                first = moved(shape, keys[:, :sinks].swapaxes(0, 1)[None], jnp.full((1, sinks), fewer, jnp.int32))
                keys = jnp.concatenate([first[0].swapaxes(0, 1),
                                        after_rotation(shape, plain, gone + fewer + sinks)], 1)
                values = jnp.concatenate([values[:, :sinks], later], 1)
                new = jnp.concatenate([keys, values], -1).astype(kv.dtype)
                return kv.at[:, :sinks + count].set(jnp.where(choose, new, kv[:, :sinks + count]))

            made.append(lax.map(one, (kv, self.gone, rows)))
        by = jnp.where(rows, fewer, 0)
        return self.replace(kv=tuple(made), gone=self.gone + by, count=self.count - by)


@CACHES.register("freqkv", "FreqKV: Frequency Domain Key-Value Compression for Efficient Context Window Extension",
                 "Kai et al. 2025", family="bounded")
@dataclasses.dataclass(frozen=True)
class FreqKVConfig(KVConfig):
    """Keeps the first tokens, and compresses the others to their low frequencies each time that the cache is full.

    Decodes texts of any length in constant memory, with a model that has rotary positions; prompts are prefilled in the
    same memory. The authors fine-tune the model with this cache.

    Attributes:
        size: maximum number of slots; the cache is compressed when all are filled.
        sinks: number of first tokens, which are never compressed.
        ratio: share of the other slots that are still filled after a compression.
    """

    size: Count = 4096
    sinks: Whole = 4
    ratio: Annotated[float, Range(0, 1, above=True, below=True)] = 0.5

    name = "freqkv"

    def __post_init__(self) -> None:
        check_options(type(self), vars(self))
        if self.size <= self.sinks:
            raise ValueError(f"size: got {self.size}, takes more than the {self.sinks} first tokens")
        if not self.kept:
            raise ValueError(f"ratio: got {self.ratio}, takes a number between 0 and 1 that leaves some of the "
                             f"{self.size - self.sinks} tokens")

    @property
    def kept(self) -> int:
        """Number of tokens that remain of those after the sinks when the cache is compressed: `ratio` of their
        slots."""
        return int((self.size - self.sinks) * self.ratio)

    def refuses(self, layer: int, shape: KVLayer) -> frozenset[Score]:
        return frozenset(("sliding windows", "biases"))

    def empty(self, shapes: tuple[KVLayer, ...], batch: int, size: int, dtype: Any, inputs: PyTree) -> Cache:
        if any(rope_of(shape) is None for shape in shapes):
            raise ValueError(f"cache: {self.name} moves tokens together, which takes a model with rotary positions in "
                             "every layer")
        none = jnp.zeros(batch, jnp.int32)
        return FreqKVCache(kv=empty_kv(shapes, batch, whole_blocks(self.size), dtype), gone=none, count=none,
                           given=inputs, widths=key_widths(shapes), size=size, shapes=shapes, kind=self)
