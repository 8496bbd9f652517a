"""Context parallelism: the positions of a text are divided over devices ("Context Parallelism for Scalable
Million-Token Inference", Yang et al., 2024).

Each of the `N` devices of the mesh axis "context" stores a fixed part of every text. Prompts are read in chunks whose
tokens are divided, too, by ring attention (`decodax.caches.context.ring`): a block of the text is cut into `2 N`
pieces, and device `i` takes pieces `i` and `2 N - 1 - i`, which balances the work under a causal mask. Tokens after the
prompt go to the devices in turn. While decoding, each device computes attention of a round's queries to its part, and
one exchange in each layer merges the results by the logarithms of the softmax sums. (The paper instead divides the
queries of a batch over the devices and sends them around the ring. Mnemosyne's KV parallelism, Agrawal et al., 2024,
decodes as is done here.)

Without the axis "context" it is a cache on one device with positions in another order. It is exact: no token is left
out.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from decodax.cache.dense import write
from decodax.cache.entry import own_entry
from decodax.cache.key_values import KeyValues, KVConfig, KVLayer, empty_kv, key_widths
from decodax.caches.context.ring import Keys, Mode, Partial, Queries, RingChoice, gathered, pass_kv, pass_q
from decodax.common.axes import CONTEXT, DATA, MODEL, free_axes, shardwise
from decodax.common.options import Count, Positive, check_options
from decodax.common.registry import CACHES
from decodax.common.struct import Struct, static, struct
from decodax.core.cache import ALL, Entries, Feature, Layout, PyTree
from decodax.core.capabilities import PromptPhase, ReadPrompt, Truncates
from decodax.pallas_kernels.window_attention import (
    BLOCK,
    Bias,
    whole_blocks,
    window_attention,
    window_attention_lse,
    with_sinks,
)


@struct
class SlotMap(Struct):
    """Maps each position of a text to one of `N` devices and to a slot of that device. The positions below `fixed` are
    cut into blocks of `2 N` pieces: device `i` gets pieces `i` and `2 N - 1 - i` of each block, so that all devices do
    the same amount of causal attention. Later position `p` is on device `p % N`.

    Attributes:
        fixed: `i32[B]`, number of first positions of each row that are laid out in blocks.
        parts: static; number of devices, `N`.
        piece: static; number of positions of a piece.
    """

    fixed: Array
    parts: int = static()
    piece: int = static()

    @property
    def block(self) -> int:
        return 2 * self.parts * self.piece

    def part(self, at: Array) -> Array:
        """Returns the index of the device that stores each position `at` (`i32[B, M]`): `i32[B, M]`."""
        number = at % self.block // self.piece
        return jnp.where(at < self.fixed[:, None], jnp.minimum(number, 2 * self.parts - 1 - number), at % self.parts)

    def slot(self, at: Array) -> Array:
        """Returns the slot of each position `at` (`i32[B, M]`) on the device that stores it: `i32[B, M]`."""
        fixed, number = self.fixed[:, None], at % self.block // self.piece
        first = at // self.block * 2 * self.piece + jnp.where(number < self.parts, 0, self.piece) + at % self.piece
        part = at % self.parts
        later = self._in_blocks(part) + at // self.parts - self._turns(part)
        return jnp.where(at < fixed, first, later)

    def _in_blocks(self, part: Array) -> Array:
        """Returns the number of block positions of each device, `i32[B, M]`, for devices `part`, `i32[B or 1, M]`."""
        whole, rest = jnp.divmod(self.fixed[:, None], self.block)
        piece = lambda i: jnp.clip(rest - i * self.piece, 0, self.piece)
        return whole * 2 * self.piece + piece(part) + piece(2 * self.parts - 1 - part)

    def _turns(self, part: Array) -> Array:
        """Returns the number of positions of each device, if the positions in blocks were laid out in turn, too."""
        return (self.fixed[:, None] - part + self.parts - 1) // self.parts

    def position(self, part: Array, slot: Array) -> Array:
        """Returns the position whose token belongs in slot `slot[i]` of device `part[i]` (both `i32[M]`), for each row:
        `i32[B, M]`. It is the inverse of `part` and `slot`."""
        part, slot, c = part[None], slot[None], self.piece
        number, place = jnp.divmod(slot % (2 * c), c)
        first = slot // (2 * c) * self.block + jnp.where(number == 0, part, 2 * self.parts - 1 - part) * c + place
        before = self._in_blocks(part)
        return jnp.where(slot < before, first, (self._turns(part) + slot - before) * self.parts + part)


@struct
class ContextParallelCache(KeyValues, PromptPhase, Truncates):
    """Keys and values in `N` parts of `S` slots, one part for each device of the mesh axis "context".

    Attributes:
        kv: a tuple with one array `f[B, G, N S, d + e]` for each layer; slot `s` of part `i` is slot `i * S + s`.
        length: `i32[B]`, number of tokens of the verified text.
        places: the device and the slot of each position.
        given: inputs of each row beside its tokens; see `Cache.inputs`.
        widths: static; the key width `d` of each layer.
        size: static; maximum number of tokens of a text.
        choice: static; decides whether keys or queries are sent in a prefill.
    """

    kv: tuple[Array, ...]
    length: Array
    places: SlotMap
    given: PyTree = None
    widths: tuple[int, ...] = static(default=())
    size: int = static(default=0)
    choice: RingChoice = static(default=RingChoice())

    supports: ClassVar[frozenset[Feature]] = ALL

    @property
    def capacity(self) -> int:
        return self.size

    @property
    def parts(self) -> int:
        return self.places.parts

    @property
    def layout(self) -> Layout:
        return Layout(specs=dict(kv=tuple(P(DATA, MODEL, CONTEXT) for _ in self.kv)), order=self._order)

    def _order(self, width: int) -> np.ndarray | None:
        if not self._divided or width % self.places.block:
            return None
        text = np.arange(width, dtype=np.int32)
        number = text % self.places.block // self.places.piece
        return text[np.argsort(np.minimum(number, 2 * self.parts - 1 - number), kind="stable")]

    @property
    def _divided(self) -> bool:
        return bool(self.kv) and self.parts > 1 and free_axes().get(CONTEXT) == self.parts

    def held(self, places: SlotMap, length: Array, part: Array | None = None) -> Array:
        """Returns the position of the token in each slot, `i32[B, 1, slots]`; -1: empty.

        Args:
            places: the layout of positions.
            length: `i32[B]`, number of tokens of each row; slots of later positions are empty.
            part: index of one device, whose `S` slots are meant. None: the `N S` slots of all devices.
        """
        slots = self.kv[0].shape[2] // self.parts
        index = jnp.arange(slots * self.parts if part is None else slots, dtype=jnp.int32)
        of = index // slots if part is None else jnp.full(slots, part, jnp.int32)
        at = places.position(of, index % slots)
        return jnp.where(at < length[:, None], at, -1)[:, None]

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               sliding: int | None = None, softcap: float | None = None,
               bias: Bias | None = None, sinks: Array | None = None) -> tuple[Array, PyTree]:
        options: dict[str, Any] = dict(scale=scale, sliding=sliding, softcap=softcap)
        W, entry = q.shape[1], own_entry(q, k, v)
        if bias is not None or not self._divided:
            held = _only(self.held(self.places, self.length), window.cached)
            return window_attention(q, k, v, window.visible(), window.positions, self.kv[layer], bias=bias, sinks=sinks,
                                    slot_positions=held, key_positions=window.key_positions, **options), entry
        if window.is_prefill and window.cached is None and W % self.parts == 0:
            return self._ring(layer, q, k, v, window, sinks, options), entry
        return self._merged(layer, q, k, v, window, sinks, options), entry

    def _merged(self, layer: int, q: Array, k: Array, v: Array, window: Any, sinks: Array | None,
                options: dict[str, Any]) -> Array:
        """Computes attention of a decoding round: each device attends to its part, and the first one to the window,
        too. One exchange merges the results."""

        def local(q: Array, k: Array, v: Array, mask: Array, at: Array, where: Array, cached: Array | None,
                  kv: Array, length: Array, places: Array, sinks: Array | None) -> Array:
            me = lax.axis_index(CONTEXT)
            held = _only(self.held(self.places.replace(fixed=places), length, me), cached)
            out, lse = window_attention_lse(q, k, v, mask & (me == 0), at, kv, slot_positions=held,
                                            key_positions=where, **options)
            both = jnp.concatenate([out.astype(jnp.float32), lse[..., None]], -1)
            found = gathered(lax.all_gather(both, CONTEXT))
            return (found if sinks is None else with_sinks(found, sinks))[0].astype(q.dtype)

        heads, rows, mask = P(DATA, None, MODEL), P(DATA), window.visible()
        specs = (heads, heads, heads, rows if mask.shape[0] == q.shape[0] else P(), rows, rows, rows,
                 P(DATA, MODEL, CONTEXT), rows, rows, P(MODEL))
        return shardwise(local, specs, heads, q, k, v, mask, window.positions, window.key_positions, window.cached,
                         self.kv[layer], self.length, self.places.fixed, sinks, whole=True)

    def _ring(self, layer: int, q: Array, k: Array, v: Array, window: Any, sinks: Array | None,
              options: dict[str, Any]) -> Array:
        W, parts = q.shape[1], self.parts
        slots, width = self.kv[layer].shape[2] // parts, self.widths[layer]
        step = min(slots, BLOCK)
        # the same on all devices, whatever rows they have: all have to take equally many turns, in the same way
        longest = self.length.max()
        blocks = -(-jnp.where(longest > 0, jnp.minimum(longest // parts + 2 * self.places.piece + 1, slots), 0) // step)
        kind = self.choice.passes_kv(W, longest, parts, q.shape[2], k.shape[2], self.kv[layer].dtype.itemsize)

        def local(q: Array, k: Array, v: Array, at: Array, live: Array, kv: Array, length: Array, fixed: Array,
                  blocks: Array, sinks: Array | None, kind: Array | bool) -> Array:
            held = self.held(self.places.replace(fixed=fixed), length, lax.axis_index(CONTEXT))
            queries, keys = Queries(q, at), Keys(k, v, jnp.where(live, at, -1))

            def cached(i: Array) -> Keys:
                both = lax.dynamic_slice_in_dim(kv, i * step, step, 2).swapaxes(1, 2)
                where = lax.dynamic_slice_in_dim(held, i * step, step, 2)[:, 0]
                return Keys(both[..., :width], both[..., width:], where)

            def mine(queries: Queries) -> Partial:
                # with a window of keys that nobody sees
                nobody = jnp.zeros((1, queries.q.shape[1], 1), bool)
                out, lse = window_attention_lse(queries.q, k[:, :1], v[:, :1], nobody, queries.at, kv,
                                                slot_positions=held, key_positions=at[:, :1], **options)
                return out.astype(jnp.float32), lse

            kvs = lambda: pass_kv(queries, keys, cached, blocks, parts, options)
            qs = lambda: pass_q(queries, keys, mine, parts, options)
            if isinstance(kind, bool):
                found = kvs() if kind else qs()
            else:
                found = lax.cond(kind, kvs, qs)
            return (found if sinks is None else with_sinks(found, sinks))[0].astype(q.dtype)

        nodes, chunk, rows = P(DATA, CONTEXT, MODEL), P(DATA, CONTEXT), P(DATA)
        specs = nodes, nodes, nodes, chunk, chunk, P(DATA, MODEL, CONTEXT), rows, rows, P(), P(MODEL)
        given = (q, k, v, window.positions, window.live, self.kv[layer], self.length, self.places.fixed, blocks,
                 sinks)
        if isinstance(kind, bool):
            return shardwise(functools.partial(local, kind=kind), specs, nodes, *given, whole=True)
        return shardwise(local, (*specs, P()), nodes, *given, kind, whole=True)

    def commit(self, entries: Entries, slots: Array) -> ContextParallelCache:
        if not self.kv:
            return self
        own, to = self.places.part(slots), jnp.where(slots >= 0, self.places.slot(slots), -1)
        put = self._put(own, to, slots.shape[1])
        kv = tuple(put(held, entry.both) for held, entry in zip(self.kv, entries, strict=True))
        return self.replace(kv=kv, length=jnp.maximum(self.length, slots.max(1) + 1))

    def _put(self, own: Array, to: Array, width: int) -> Any:
        parts, heads, kept = self.parts, P(DATA, None, MODEL), P(DATA, MODEL, CONTEXT)
        if not self._divided:
            slots = self.kv[0].shape[2] // parts
            return lambda held, new: write(held, new, jnp.where(to >= 0, own * slots + to, -1))

        def all_nodes(held: Array, new: Array, own: Array, to: Array) -> Array:
            return write(held, new, jnp.where(own == lax.axis_index(CONTEXT), to, -1))

        if self._order(width) is None:
            return lambda held, new: shardwise(all_nodes, (kept, heads, P(DATA), P(DATA)), kept, held, new, own, to,
                                               whole=True)
        # most nodes were computed on the device where they belong. A loop of one trip or none, since XLA copies the
        # caches that a conditional writes to
        strays = ((own != jnp.arange(width) // (width // parts)) & (to >= 0)).any()

        def some_nodes(held: Array, new: Array, own: Array, to: Array, strays: Array) -> Array:
            held = all_nodes(held, new, own, to)

            def again(carry: tuple[Array, Array]) -> tuple[Array, Array]:
                every = [lax.all_gather(x, CONTEXT, axis=1, tiled=True) for x in (new, own, to)]
                return jnp.zeros((), bool), all_nodes(carry[1], *every)

            return lax.while_loop(lambda carry: carry[0], again, (strays, held))[1]

        nodes, chunk = P(DATA, CONTEXT, MODEL), P(DATA, CONTEXT)
        return lambda held, new: shardwise(some_nodes, (kept, nodes, chunk, chunk, P()), kept, held, new, own, to,
                                           strays, whole=True)

    def truncate(self, length: Array) -> ContextParallelCache:
        return self.replace(length=jnp.minimum(self.length, length))

    def finish_prefill(self, prompt: ReadPrompt) -> ContextParallelCache:
        return self.replace(places=self.places.replace(fixed=self.length))


def _only(held: Array, cached: Array | None) -> Array:
    """Returns the positions `held` with -1 in place of those that `cached` (`Window.cached`) hides."""
    if cached is None:
        return held
    if not cached.shape[1]:
        return jnp.full_like(held, -1)
    seen = jnp.take_along_axis(cached, jnp.maximum(held[:, 0], 0), 1)[:, None]
    return jnp.where(seen, held, -1)


@CACHES.register("context-parallel", "Context Parallelism for Scalable Million-Token Inference", "Yang et al. 2024",
                 family="context", guarantee="exact")
@dataclasses.dataclass(frozen=True)
class ContextParallelConfig(KVConfig):
    """Keeps all tokens, with positions divided over the mesh axis "context"; prompts are read by ring attention.

    For texts that are too long for the memory of one device. `flops` and `bandwidth` are used by `mode="auto"` alone.

    Attributes:
        mode: what is sent between devices in a prefill: keys and values ("pass-kv"), queries ("pass-q"), or whichever
            is estimated to be faster ("auto").
        block: number of positions of a prompt that are divided into pieces at a time; best the chunk of a prefill
            round.
        flops: operations per second of a device. The default is that of a TPU v5e.
        bandwidth: bytes per second of a link between devices, in one direction.
    """

    mode: Mode = "auto"
    block: Count = 256
    flops: Positive = RingChoice.flops
    bandwidth: Positive = RingChoice.bandwidth

    def __post_init__(self) -> None:
        check_options(type(self), vars(self))

    def empty(self, shapes: tuple[KVLayer, ...], batch: int, size: int, dtype: Any,
              inputs: PyTree) -> ContextParallelCache:
        parts = free_axes().get(CONTEXT, 1)
        piece = max(min(self.block, size) // (2 * parts), 1)
        # as many as a part may get when its prompt ended within a block
        slots = whole_blocks(-(-size // parts) + 2 * piece + 1)
        return ContextParallelCache(
            kv=empty_kv(shapes, batch, slots * parts, dtype), length=jnp.zeros(batch, jnp.int32), given=inputs,
            places=SlotMap(fixed=jnp.full(batch, size, jnp.int32), parts=parts, piece=piece), size=size,
            widths=key_widths(shapes), choice=RingChoice(self.mode, self.flops, self.bandwidth))
