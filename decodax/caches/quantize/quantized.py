"""The cache for codecs: codes of the older tokens, and the latest tokens unquantized.

When `keep + residual_length` tokens are unquantized, the oldest `residual_length` of them are encoded together by a
codec (`decodax.caches.quantize.codecs`). A round commits no token beyond that point, so speculative decoding gets the
same result as plain decoding. A prompt is prefilled unquantized, and then encoded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.cache import Dense, KVLayer, TreeBuffer, Wrapper
from decodax.cache.dense import unpadded, write_entries
from decodax.cache.entry import AskedEntry, own_entry
from decodax.cache.key_values import KVConfig, Score, refuse_prefill
from decodax.caches.quantize.codecs import Codec, Span
from decodax.common.struct import static, struct
from decodax.core.cache import Cache, Entries, PyTree, Sized
from decodax.core.capabilities import Draftable, DraftBase, LoadsPrefix, ReadPrompt, WholePrompt
from decodax.pallas_kernels.window_attention import BLOCK as WALK
from decodax.pallas_kernels.window_attention import Bias, merge, prefix_attention, whole_blocks, window_attention_lse

BLOCK = 512
"""Number of tokens that are decoded at a time."""


@struct
class QuantizedCache(Sized, DraftBase, WholePrompt):
    """Codes of the older tokens, and the latest tokens unquantized.

    Attributes:
        codes: for each layer the codes, arrays `[B, G, S * c, ...]` for `S` tokens, where `c` differs between arrays
            (`Codec.encode`).
        rest: for each layer `f[B, G, R, d + e]`, a ring: the token with index `p` in the cache is in slot `p % ring`.
        length: `i32[B]`, number of tokens of the text.
        gone: `i32[B]`, number of prompt tokens that were evicted: a token at position `p` after the prompt has index `p
            - gone` in the cache.
        studies: for each layer the result of `Codec.study`.
        given: inputs of each row beside its tokens; see `Cache.inputs`.
        shapes: static; the `KVLayer` of each layer.
        size: static; maximum number of tokens of a text.
        most: static; maximum number of tokens in the cache.
        kind: static; the configuration.
    """

    codes: tuple[PyTree, ...]
    rest: tuple[Array, ...]
    length: Array
    gone: Array
    studies: tuple[PyTree, ...]
    given: PyTree
    shapes: tuple[KVLayer, ...] = static()
    size: int = static()
    most: int = static()
    kind: QuantizedConfig = static()

    supports = frozenset({"trees"})

    @property
    def slots(self) -> int:
        """Number of tokens of each row for whose codes the cache has memory."""
        return self.kind.slots(self.most)

    @property
    def whole(self) -> Array:
        """`i32[B]`: number of latest tokens that are stored unquantized; the tokens before them are encoded."""
        return self.kind.whole(self.held)

    @property
    def held(self) -> Array:
        """`i32[B]`: number of tokens in the cache, encoded or not: those of the text without evicted ones."""
        return self.length - self.gone

    def room(self, running: Array) -> Array | None:
        return self.most - self.held if self.rest and self.most < self.size else None

    def max_commit(self) -> Array | None:
        return self.kind.ring - self.whole if self.rest else None

    def check_windows(self) -> None:
        refuse_prefill(self.kind.name)

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               sliding: int | None = None, softcap: float | None = None,
               bias: Bias | None = None, sinks: Array | None = None) -> tuple[Array, PyTree]:
        if window.is_prefill:
            self.check_windows()
        kind, gone = self.kind, self.gone[:, None]
        at = window.positions - gone
        options: dict[str, Any] = dict(scale=scale, sliding=sliding, softcap=softcap)
        coded = self.held - self.whole
        slots, shape = self.slots, self.shapes[layer]
        block = kind.block(slots)

        def part(i: Array, so_far: tuple[Array, Array]) -> tuple[Array, Array]:
            def some(x: Array) -> Array:
                size = block * x.shape[2] // slots
                return lax.dynamic_slice_in_dim(x, i * size, size, 2)

            one = lambda codes, study: kind.codec.decode(shape, codes, q.dtype, Span(i * block, study, layer))
            codes = self.codes[:layer + 1] if kind.codec.stacked else self.codes[layer]
            both = jax.vmap(one)(jax.tree.map(some, codes), self.studies[layer])
            both = jnp.pad(both, ((0, 0), (0, 0), (0, -block % WALK if block > WALK else 0), (0, 0)))
            number = kind.codec.reads(layer, coded, self.studies[layer])
            if number is None:
                own = prefix_attention(q, at - i * block, both, jnp.clip(coded - i * block, 0, block), **options)
            else:
                own = _by_head(q, at - i * block, both, jnp.clip(number - i * block, 0, block), **options)
            return merge(so_far, own)

        held = kind.places(coded, self.rest[layer].shape[2])
        held = jnp.where(held < self.held[:, None], held, -1)[:, None]
        latest = window_attention_lse(q, k, v, window.visible(), at, self.rest[layer], slot_positions=held,
                                      key_positions=window.key_positions - gone, sinks=sinks, **options)
        out, _ = lax.fori_loop(0, (coded.max() + block - 1) // block, part, latest)
        return out, own_entry(q, k, v)

    def commit(self, entries: Entries, slots: Array) -> QuantizedCache:
        if not self.rest:
            return self
        to = jnp.where(slots >= 0, (slots - self.gone[:, None]) % self.kind.ring, -1)
        rest = write_entries(self.rest, entries, to)
        new = self.replace(rest=rest, length=jnp.maximum(self.length, slots.max(1) + 1))
        full = (new.length > self.length) & (new.held - (self.held - self.whole) == self.kind.ring)
        # a loop of one trip or none, since XLA copies what a conditional writes to
        once = lambda c: (jnp.zeros((), bool), c[1]._flushed(full))
        return lax.while_loop(lambda c: c[0], once, (full.any(), new))[1]

    def _flushed(self, rows: Array) -> QuantizedCache:
        """Encodes the oldest unquantized tokens of some rows (`bool[B]`)."""
        R = self.kind.residual_length

        def put(into: Array, new: Array, start: Array, choose: Array) -> Array:
            at = start * new.shape[1] // R
            old = lax.dynamic_slice_in_dim(into, at, new.shape[1], 1)
            return lax.dynamic_update_slice_in_dim(into, jnp.where(choose, new, old), at, 1)

        row = lambda into, own, start, choose: jax.tree.map(lambda x, y: put(x, y, start, choose), into, own)
        made, below, start = [], None, self.held - self.kind.ring
        for layer, (shape, rest, codes) in enumerate(zip(self.shapes, self.rest, self.codes, strict=True)):
            encode = lambda row, shape=shape, layer=layer: self.kind.encoded(shape, layer, *row)
            at = (start[:, None] + jnp.arange(R)) % self.kind.ring
            oldest = jnp.take_along_axis(rest, at[:, None, :, None], 2)
            new, below = jax.vmap(encode)((oldest, start, self.studies[layer], below))
            made.append(jax.vmap(row)(codes, new, start, rows))
        return self.replace(codes=tuple(made))

    def draft_view(self, kind: Any = None) -> Cache:
        """Returns a cache of the same codes that decodes them from fewer bytes (`Codec.for_drafts`)."""
        if kind is not None or (codec := self.kind.codec.for_drafts()) is None:
            return super().draft_view(kind)
        return self.replace(kind=dataclasses.replace(self.kind, codec=codec))

    def filled(self, kv: Sequence[Array], length: Array, held: Array,
               studies: Sequence[PyTree] | None = None) -> QuantizedCache:
        """Returns the cache with given tokens.

        Args:
            kv: `f[B, G, S, d + e]` for each layer, the kept tokens of the prompts.
            length: `i32[B]`, number of tokens of the prompts.
            held: `i32[B]`, number of kept tokens.
            studies: for each layer the result of `Codec.study`; None: those of this cache.
        """
        latest, below = self.rest[0].shape[2], None
        codes: list[PyTree] = []
        rests: list[Array] = []
        studies = self.studies if studies is None else tuple(studies)
        for layer, (shape, whole) in enumerate(zip(self.shapes, kv, strict=True)):
            pad = max(self.slots - whole.shape[2], 0)

            def one(row: tuple[Array, Array, PyTree, PyTree], shape: KVLayer = shape, pad: int = pad,
                    layer: int = layer) -> Any:
                kv, start, study, below = row
                kv = jnp.pad(kv, ((0, 0), (0, pad + latest), (0, 0)))
                at = self.kind.places(start[None], latest)[0]
                made, below = self.kind.encoded(shape, layer, kv[:, :self.slots], jnp.int32(0), study, below)
                return made, kv[:, at], below

            made, rest, below = lax.map(one, (whole, held - self.kind.whole(held), studies[layer], below))
            codes.append(made)
            rests.append(rest)
        return self.replace(codes=tuple(codes), rest=tuple(rests), length=length, gone=length - held, studies=studies)

    def prefill_cache(self) -> Cache:
        if not self.rest:
            return self
        B = self.length.shape[0]
        return PromptToQuantize(base=unpadded(self.shapes, B, self.size, self.rest[0].dtype, self.given),
                            gathered=tuple(self.kind.codec.start(shape, B) for shape in self.shapes),
                            shapes=self.shapes, kind=self.kind)

    def tree_buffer(self, entries: Entries, room: int) -> Draftable:
        return TreeBuffer.empty(self, entries, room)


def _by_head(q: Array, at: Array, kv: Array, number: Array, **options: Any) -> tuple[Array, Array]:
    """Computes `prefix_attention` with a different number of tokens for each group of heads, `i32[B, G]`."""
    B, W, H, d = q.shape
    G = kv.shape[1]
    q = q.reshape(B, W, G, H // G, d).swapaxes(1, 2).reshape(B * G, W, H // G, d)
    out = prefix_attention(q, jnp.repeat(at, G, 0), kv.reshape(B * G, 1, *kv.shape[2:]), number.reshape(-1), **options)
    back = lambda x: x.reshape(B, G, *x.shape[1:]).swapaxes(1, 2).reshape(B, W, H, *x.shape[3:])
    return back(out[0]), back(out[1])


@struct
class PromptToQuantize(Wrapper, LoadsPrefix):
    """The cache of a `QuantizedConfig` during prefill, with all tokens of the prompt in `base`. `finish_prefill`
    encodes them by the codec.

    Attributes:
        gathered: the codec's statistics of each layer (`Codec.gather`).
    """

    base: Dense
    gathered: tuple[PyTree, ...]
    shapes: tuple[KVLayer, ...] = static()
    kind: QuantizedConfig = static()

    @property
    def _gathers(self) -> bool:
        return bool(jax.tree.leaves(self.gathered))

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, **options: Any) -> tuple[Array, PyTree]:
        out, entry = self.base.attend(layer, q, k, v, window, **options)
        return out, AskedEntry.of(entry, q) if self._gathers else entry

    def commit(self, entries: Entries, slots: Array) -> PromptToQuantize:
        base = self.base.commit([entry.pair for entry in entries], slots)
        if not self._gathers:
            return self.replace(base=base)
        gathered = tuple(self.kind.codec.gather(shape, own, entry.queries, slots >= 0)
                         for shape, own, entry in zip(self.shapes, self.gathered, entries, strict=True))
        return self.replace(base=base, gathered=gathered)

    def check_prefix(self) -> None:
        if self._gathers:
            raise ValueError(f"context: got keys and values that were computed before; {self.kind.name} has to see "
                             "the text read, so it takes the text")

    def load_prefix(self, kv: Sequence[Array], length: Array,
                    reuse: tuple[Array, Array] | None = None) -> PromptToQuantize:
        return self.replace(base=self.base.load_prefix(kv, length))

    def finish_prefill(self, prompt: ReadPrompt) -> Cache:     # type: ignore[override]
        base = self.base
        studies = self.kind.codec.study(self.shapes, base.kv, base.length, self.gathered, prompt)
        return self.kind.empty(self.shapes, self.length.shape[0], base.capacity, base.kv[0].dtype,
                               self.inputs).filled(base.kv, base.length, base.length, studies)


@dataclasses.dataclass(frozen=True)
class QuantizedConfig(KVConfig):
    """Configuration of a `QuantizedCache`.

    Attributes:
        codec: encodes tokens.
        residual_length: number of tokens that are encoded together, a multiple of the codec's unit.
        name: name in error messages.
        keep: number of latest tokens that are always unquantized. From `keep` to `keep + residual_length - 1` tokens
            are unquantized.
    """

    codec: Codec
    residual_length: int = 128
    name: str = "coded"
    keep: int = 0

    def __post_init__(self) -> None:
        if self.residual_length < 1 or self.residual_length % self.codec.unit:
            raise ValueError(f"residual_length: got {self.residual_length}, takes a multiple of the group size of "
                             f"{self.codec.unit}")
        if self.keep < 0:
            raise ValueError(f"keep: got {self.keep}, takes 0 or more")

    def of_model(self, lm: Any) -> Self:
        self.codec.check_model(lm.model)
        return self

    @property
    def ring(self) -> int:
        """Largest number of tokens of a row that are stored unquantized, the size of the ring that stores them."""
        return self.keep + self.residual_length

    def whole(self, held: Array) -> Array:
        """Returns the number of latest tokens that are unquantized in a cache with `held` (`i32[B]`) tokens:
        `i32[B]`."""
        return jnp.where(held < self.keep, held, self.keep + (held - self.keep) % self.residual_length)

    def places(self, coded: Array, slots: int) -> Array:
        """Returns the index of the token in each slot of the ring of unquantized tokens, `i32[B, slots]`. Index 0 is
        the first token in the cache.

        Args:
            coded: `i32[B]`, number of encoded tokens, which come before those in the ring.
            slots: number of slots of the array; those beyond the ring get the largest int32.
        """
        slot = jnp.arange(slots, dtype=jnp.int32)
        at = coded[:, None] + (slot - coded[:, None]) % self.ring
        return jnp.where(slot < self.ring, at, jnp.iinfo(jnp.int32).max)

    def encoded(self, shape: KVLayer, layer: int, kv: Array, start: Array, study: PyTree,
                below: PyTree) -> tuple[PyTree, PyTree]:
        """Encodes tokens `kv`, `f[G, n, d + e]`, of a layer of a row, from position `start` on. Returns the codes, and
        the result of `Codec.below`. `study` and `below` are the fields of `Span`."""
        span = Span(start, study, layer, below)
        codes = self.codec.encode(shape, kv, span)
        return codes, self.codec.below(shape, codes, kv.dtype, span)

    def block(self, slots: int) -> int:
        """Returns the number of tokens that are decoded at a time, a multiple of the codec's unit, at most `slots`."""
        return min(max(BLOCK // self.codec.unit, 1) * self.codec.unit, slots)

    def slots(self, size: int) -> int:
        """Returns the number of tokens for which codes need memory in texts of `size` tokens: whole blocks."""
        whole = -(-size // self.codec.unit) * self.codec.unit
        return -(-whole // self.block(whole)) * self.block(whole) if size else 0

    def refuses(self, layer: int, shape: KVLayer) -> frozenset[Score]:
        return frozenset(("biases",))

    def empty(self, shapes: tuple[KVLayer, ...], batch: int, size: int, dtype: Any, inputs: PyTree,
              most: int | None = None) -> QuantizedCache:
        """Returns an empty cache. `most` is the maximum number of tokens in the cache; None: `size`."""
        most = size if most is None else most
        for shape in shapes:
            self.codec.check(shape)
        zeros = lambda shape, dtype: jnp.zeros((batch, *shape), dtype)
        codes: list[PyTree] = []
        studies = jax.eval_shape(lambda: tuple(self.codec.study(
            shapes, [zeros((s.heads, size, s.both), dtype) for s in shapes], zeros((), jnp.int32),
            [self.codec.start(s, batch) for s in shapes], None)))
        below: PyTree = None
        for layer, shape in enumerate(shapes):
            encode = lambda kv, study, below, shape=shape, layer=layer: self.encoded(
                shape, layer, kv, jnp.int32(0), study, below)
            study = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), studies[layer])
            kv = jax.ShapeDtypeStruct((shape.heads, self.slots(most), shape.both), dtype)
            one, below = jax.eval_shape(encode, kv, study, below)
            codes.append(jax.tree.map(lambda x: zeros(x.shape, x.dtype), one))
        rest = tuple(zeros((shape.heads, whole_blocks(self.ring), shape.both), dtype) for shape in shapes)
        return QuantizedCache(codes=tuple(codes), rest=rest, length=zeros((), jnp.int32), gone=zeros((), jnp.int32),
                     given=inputs, shapes=shapes, size=size, most=most, kind=self,
                     studies=jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), studies))
