"""The base of caches that store all tokens, and attend to a part of them while decoding.

Such a cache holds keys and values of all tokens and an index of them for each layer, such as digests of pages, clusters
or codes. A query scores the index and attends to the slots that it selects; no token is ever evicted. A derived class
implements `select_slots`, or `read` if the selection is not a list of slots, and updates its index in `commit`.
Attention to the window and attention to the selected slots are computed separately and merged.

Each node of a window selects by its own query, so drafts and trees give the same result as plain decoding.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.cache.dense import Dense, dense_like, write_entries
from decodax.cache.entry import own_entry
from decodax.cache.key_values import KeyValues, KVLayer, Score, empty_kv, key_widths, refuse_prefill
from decodax.cache.wrapper import Wrapper
from decodax.caches.configs import PaperConfig
from decodax.common.struct import static, struct
from decodax.core.cache import Cache, Entries, PyTree
from decodax.core.capabilities import LimitsWindow, ReadPrompt, WholePrompt
from decodax.core.window import each_node
from decodax.pallas_kernels.window_attention import BLOCK, Bias, merge, window_attention, window_attention_lse

X = TypeVar("X")


@struct
class SparseCache(KeyValues, LimitsWindow):
    """Keys and values of all tokens, in the order of positions.

    Attributes:
        kv: for each layer `f[B, G, S, d + e]`.
        length: `i32[B]`, number of tokens of the verified text.
        given: inputs of each row beside its tokens; see `Cache.inputs`.
        shapes: static; the `KVLayer` of each layer.
        kind: static; the configuration.
    """

    kv: tuple[Array, ...]
    length: Array
    given: PyTree
    shapes: tuple[KVLayer, ...] = static()
    kind: SparseConfig = static()

    supports = frozenset({"trees"})

    @property
    def widths(self) -> tuple[int, ...]:       # type: ignore[override]
        return key_widths(self.shapes)

    def is_dense(self, layer: int, is_prefill: bool) -> bool:
        """Returns True if the nodes of a window attend to all tokens in this layer: in a prefill (`is_prefill`), in
        layers with a sliding window, and in layers in `skip`."""
        return is_prefill or self.kind.keeps_dense(layer, self.shapes[layer])

    def check_window(self, nodes: int) -> None:
        if not all(self.is_dense(layer, False) for layer in range(len(self.kv))):
            self.kind.check_window(nodes)

    def always(self, layer: int) -> Array | None:
        """Returns the slots that every node of a window attends to beside those it selects, `i32[B, 1 or G, n]`; -1:
        none. None, the default: there are no such slots."""
        return None

    def select_slots(self, layer: int, q: Array, positions: Array) -> Array:
        """Returns the slots that the queries of one token of each row select to attend to, `i32[B, G, n]` if heads of a
        group share them, else `i32[B, H, n]`; -1: none.

        Args:
            layer: number of the layer.
            q: `f32[B, H, d]`, scaled queries.
            positions: `i32[B]`, their positions.
        """
        raise NotImplementedError

    def read(self, layer: int, q: Array, positions: Array) -> tuple[Array, Array] | None:
        """Returns attention to the slots that each query selects, `f32[B, W, H, e]`, and the logarithms of its softmax
        sums, `f32[B, W, H]`. None: queries select no slots beside `always`.

        Args:
            layer: number of the layer.
            q: `f32[B, W, H, d]`, scaled queries.
            positions: `i32[B, W]`, their positions.
        """
        one = lambda q, at: attention_at(self.kv[layer], q, self.select_slots(layer, q, at), self.widths[layer])
        found: tuple[Array, Array] = each_node(one, q, positions)
        return found

    def full(self, window: Any) -> Array | None:
        """Returns a mask of the nodes of `window` that attend to all tokens, although the layer is sparse: `bool[B, 1
        or W]`. None, the default: there are no such nodes."""
        return None

    def attend_all(self, layer: int, q: Array, k: Array, v: Array, window: Any, **options: Any) -> Array:
        """Returns full attention, `f[B, W, H, e]`: the window's nodes attend to the window and to all cached tokens.

        Args:
            layer, q, k, v, window: see `Cache.attend`.
            options: the other options of `Cache.attend`, such as `scale`.
        """
        return window_attention(q, k, v, window.visible(), window.positions, self.kv[layer], self.length,
                                key_positions=window.key_positions, **options)

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               sliding: int | None = None, softcap: float | None = None,
               bias: Bias | None = None, sinks: Array | None = None) -> tuple[Array, PyTree]:
        entry = own_entry(q, k, v)
        whole = lambda: self.attend_all(layer, q, k, v, window, scale=scale, sliding=sliding, softcap=softcap,
                                        bias=bias, sinks=sinks)
        if sliding is not None or self.is_dense(layer, window.is_prefill):
            return whole(), entry
        self.check_window(k.shape[1])
        slots = self.always(layer)
        some, slots = (None, None) if slots is None else gathered(self.kv[layer], slots)
        near = window_attention_lse(q, k, v, window.visible(), window.positions, some, slot_positions=slots,
                                    scale=scale, key_positions=window.key_positions, sinks=sinks)
        far = self.read(layer, q.astype(jnp.float32) * scale, window.positions)
        out = near[0] if far is None else merge(near, far)[0]
        full = self.full(window)
        if full is None:
            return out, entry
        everything = lax.cond(full.any(), whole, lambda: jnp.zeros_like(out))
        return jnp.where(full[:, :, None, None], everything, out), entry

    def commit(self, entries: Entries, slots: Array) -> Self:
        """Writes the keys and values of a window, the first two parts of each layer's entry, at positions `slots`
        (`i32[B, W]`); -1 drops an entry."""
        if not self.kv:
            return self
        kv = write_entries(self.kv, entries, slots)
        return self.replace(kv=kv, length=jnp.maximum(self.length, slots.max(1) + 1))


class IndexedCache(SparseCache, WholePrompt):
    """Base of sparse caches whose index is computed from the whole prompt, which is prefilled into a dense cache first.
    Implement `index`."""

    def prefill_cache(self) -> Cache:
        if not self.kv:
            return self
        return PromptToIndex(base=dense_like(self), shapes=self.shapes, kind=self.kind)

    def is_dense(self, layer: int, is_prefill: bool) -> bool:
        found = super().is_dense(layer, False)
        if is_prefill and not found:
            refuse_prefill(self.kind.name)
        return found

    def check_windows(self) -> None:
        for layer in range(len(self.kv)):
            self.is_dense(layer, True)

    @abc.abstractmethod
    def index(self, prompt: Dense) -> Self:
        """Returns this empty cache with the tokens of the prompts and their index. `prompt` is the dense cache after
        prefill."""


@struct
class PromptToIndex(Wrapper):
    """The cache of an `IndexedCache` during prefill, with the prompt in the dense cache `base`. `finish_prefill`
    computes the index."""

    base: Dense
    shapes: tuple[KVLayer, ...] = static()
    kind: SparseConfig = static()

    def finish_prefill(self, prompt: ReadPrompt) -> Cache:     # type: ignore[override]
        base = self.base
        into = self.kind.empty(self.shapes, base.length.shape[0], base.capacity, base.kv[0].dtype, base.given)
        assert isinstance(into, IndexedCache)
        return into.index(base)


class SparseConfig(PaperConfig):
    """Base of the configs of sparse caches. Derive a frozen dataclass.

    Attributes:
        skip: layers that attend to all tokens; () unless a config has this option.
        recent: number of latest tokens that are always attended to; None unless a config has this option.
    """

    skip: tuple[int, ...] = ()
    recent: int | None = None

    def refuses(self, layer: int, shape: KVLayer) -> frozenset[Score]:
        return frozenset() if self.keeps_dense(layer, shape) else frozenset(("soft caps", "biases"))

    def keeps_dense(self, layer: int, shape: KVLayer) -> bool:
        """Returns True if a layer always attends to all tokens: it is in the option `skip`, or has a sliding window."""
        return layer in self.skip or shape.sliding is not None

    def check_window(self, nodes: int) -> None:
        """Raises ValueError if a window of `nodes` nodes is larger than the number of latest tokens that are always
        attended to. Some nodes would then attend to fewer tokens than in plain decoding."""
        if self.recent is not None and nodes > self.recent:
            raise ValueError(f"cache: {self.name} takes windows of at most its {self.recent} recent tokens, got one of "
                             f"{nodes} nodes; takes recent={nodes} or more")

    def parts(self, shapes: tuple[KVLayer, ...], batch: int, size: int, dtype: Any, inputs: PyTree) -> dict[str, Any]:
        """Returns the fields of an empty `SparseCache`, by name."""
        return dict(kv=empty_kv(shapes, batch, size, dtype), length=jnp.zeros(batch, jnp.int32), given=inputs,
                    shapes=shapes, kind=self)


def gathered(kv: Array, slots: Array) -> tuple[Array, Array]:
    """Returns keys and values at some slots, `f[B, G, n', d + e]`, and the slots, padded with -1 to the number `n'`
    that the attention kernels take.

    Args:
        kv: `f[B, G, S, d + e]`.
        slots: `i32[B, 1 or G, n]`; -1: none.
    """
    n = slots.shape[2]
    slots = jnp.pad(slots, ((0, 0), (0, 0), (0, -n % BLOCK if n > BLOCK else 0)), constant_values=-1)
    return jnp.take_along_axis(kv, jnp.maximum(slots, 0)[..., None], 2), slots


def attention_at(kv: Array, q: Array, slots: Array, width: int) -> tuple[Array, Array]:
    """Returns attention of one query of each row to the slots that it selected, and the logarithms of its softmax sums:
    `f32[B, H, e]` and `f32[B, H]`.

    Args:
        kv: `f[B, G, S, d + e]`.
        q: `f32[B, H, d]`, scaled.
        slots: `i32[B, N, n]` for each key head (`N = G`) or query head (`N = H`); -1: none.
        width: key width `d`.
    """
    B, N, n = slots.shape
    some = jnp.take_along_axis(kv, jnp.maximum(slots, 0).reshape(B, kv.shape[1], -1)[..., None], 2)
    some = some.astype(jnp.float32).reshape(B, N, n, -1)
    each = jax.vmap(lambda q, some, seen: attention_to(q, some, seen, width))
    return each(q.reshape(B, N, -1, width), some, slots >= 0)


def attention_to(q: Array, kv: Array, seen: Array, width: int) -> tuple[Array, Array]:
    """Returns attention of `r` queries to some of `n` keys in each of `N` heads, `f32[N r, e]`, and the logarithms of
    its softmax sums, `f32[N r]`, about -1e30 if there are no keys.

    Args:
        q: `f32[N, r, d]`, scaled queries.
        kv: `f32[N, n, d + e]`, keys and values.
        seen: `bool[N, n]`, keys that the queries attend to.
        width: key width `d`.
    """
    scores = jnp.where(seen[:, None], jnp.einsum("grd,gnd->grn", q, kv[..., :width]), -1e30)
    top = scores.max(-1, keepdims=True)
    weights = jnp.where(seen[:, None], jnp.exp(scores - top), 0)
    total = weights.sum(-1, keepdims=True)
    out = jnp.einsum("grn,gne->gre", weights, kv[..., width:]) / jnp.maximum(total, 1e-30)
    lse = top + jnp.log(jnp.maximum(total, 1e-30))
    return out.reshape(-1, out.shape[-1]), lse.reshape(-1)


def if_any(rows: Array, change: Callable[[X], X], x: X) -> X:
    """Returns `change(x)` if any of `rows` (`bool[B]`) is True, and `x` otherwise. It is a loop of at most one
    iteration, since XLA copies the arrays that a conditional writes to."""
    return lax.while_loop(lambda c: c[0], lambda c: (jnp.zeros((), bool), change(c[1])), (rows.any(), x))[1]
