"""A state of constant size for the tokens that have left a window ("Get More with LESS: Synthesizing Recurrence with KV
Cache Compression for Efficient LLM Inference", Dong et al., 2024).

The first tokens and the latest ones keep their keys and values; the paper calls this choice Lambda. Every other token
is added to a state for each head of keys: `H += psi(k)^T v` and `z += psi(k)^T`. A query reads both parts as one
attention, `(phi(q) H + sum exp(s) v) / (phi(q) z + sum exp(s))` with the scores `s` of the tokens that are kept. The
kernels `phi` and `psi` are small networks of each layer and head, which `decodax.train.less` trains.

A query at position `p` reads the first tokens and those from `p - recent` on exactly, and the others through the
kernels, whether they have left the window yet or not. So what a query sees depends on the text alone: no round is cut,
prompts are read in the same way in chunks of any width, and no more than the window is ever kept.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.cache.key_values import KVLayer
from decodax.cache.slotted import empty_slots
from decodax.caches.bounded.sinks import SinkCache
from decodax.caches.constant import Constant
from decodax.common.struct import Struct, static, struct
from decodax.core.cache import Cache, CacheConfig, Entries, PyTree
from decodax.pallas_kernels.window_attention import BLOCK, Bias, merge, window_attention_lse


@struct
class LayerKernels(Struct):
    """The kernels of one layer, for `H` heads of queries and `G` of keys, with `h` hidden numbers and the rank `r`.

    Attributes:
        query_in, query_out: `f32[H, d, h]` and `f32[H, h, r]`, the two layers of `phi`.
        key_in, key_out: `f32[G, d, h]` and `f32[G, h, r]`, the first two layers of `psi`.
        scale: `f32[G, r]`, by whose size what comes out of these is multiplied.
        mix: `f32[G, r, r]`, the third layer of `psi`, which is added. mix_scale: `f32[G, r]`, its factors.
    """

    query_in: Array
    query_out: Array
    key_in: Array
    key_out: Array
    scale: Array
    mix: Array
    mix_scale: Array

    def phi(self, q: Array, dropped: Array | float = 1.0) -> Array:
        """`f32[..., H, r]` of queries `f[..., H, d]`, as they are before the scores' scale; never below 0. `dropped` is
        multiplied with the hidden numbers before their activation, where kernels are trained."""
        return jnp.abs(_two_layers(q, self.query_in, self.query_out, dropped))

    def psi(self, k: Array, dropped: Array | float = 1.0) -> Array:
        """`f32[..., G, r]` of rotated keys `f[..., G, d]`; as `phi`."""
        x = jnp.abs(self.scale) * _two_layers(k, self.key_in, self.key_out, dropped)
        return jnp.abs(x + jnp.einsum("...hr,hrs->...hs", x, self.mix) * self.mix_scale)


def _two_layers(x: Array, first: Array, second: Array, dropped: Array | float) -> Array:
    gelu = lambda x: jax.nn.gelu(x, approximate=False)
    x = gelu(jnp.einsum("...hd,hde->...he", x.astype(jnp.float32), first) * dropped)
    return gelu(jnp.einsum("...he,her->...hr", x, second))


@dataclasses.dataclass(frozen=True)
class LessKernels:
    """The kernels of all layers: the arrays of `LayerKernels`, each with an axis of `L` layers in front."""

    query_in: Constant
    query_out: Constant
    key_in: Constant
    key_out: Constant
    scale: Constant
    mix: Constant
    mix_scale: Constant

    @classmethod
    def of(cls, layers: Sequence[LayerKernels]) -> LessKernels:
        """Those of so many layers."""
        return cls(**{field.name: Constant(np.stack([np.asarray(getattr(own, field.name), np.float32)
                                                     for own in layers])) for field in dataclasses.fields(cls)})

    def layer(self, layer: int) -> LayerKernels:
        """Those of one layer."""
        return LayerKernels(**{name: jnp.asarray(x[layer]) for name, x in self._arrays().items()})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the arrays to a file `.npz`, by their names."""
        np.savez(path, **self._arrays())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LessKernels:
        """What `save` wrote.

        Raises:
            ValueError: a file without one of the arrays.
        """
        with np.load(path, allow_pickle=False) as found:
            names = [field.name for field in dataclasses.fields(cls)]
            if lacking := [name for name in names if name not in found]:
                raise ValueError(f"kernels: {os.fspath(path)} has no {' and no '.join(lacking)}, takes a file that "
                                 "LessKernels.save wrote")
            return cls(**{name: Constant(found[name]) for name in names})

    def check(self, shapes: Sequence[KVLayer]) -> None:
        """Raises ValueError where they are those of another model."""
        depth, heads, width = self.key_in.value.shape[:3]
        queries = self.query_in.value.shape[1]
        for shape in shapes:
            if (heads, width) != shape[:2] or shape.queries not in (None, queries) or depth != len(shapes):
                raise ValueError(f"kernels: got those of {depth} layers with {queries} heads of queries and {heads} of "
                                 f"keys, {width} wide; the model has {len(shapes)} layers with {shape.queries} and "
                                 f"{shape.heads}, {shape.width} wide")

    def _arrays(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name).value for field in dataclasses.fields(self)}


def with_ones(values: Array) -> Array:
    """Values `f[..., e]` in float32 with a 1 behind each, so that sums of them are also sums of weights."""
    return jnp.concatenate([values.astype(jnp.float32), jnp.ones((*values.shape[:-1], 1), jnp.float32)], -1)


@struct
class StateAndWindow(SinkCache):
    """The first `sinks` tokens and the latest `recent` ones, and a state that has taken in the others.

    Attributes:
        states: a tuple of one `f32[B, G, r, e + 1]` a layer: `H`, and in the last column `z`.
        kind: static.
    """

    states: tuple[Array, ...]
    kind: Synthesis = static()

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               sliding: int | None = None, softcap: float | None = None,
               bias: Bias | None = None) -> tuple[Array, PyTree]:
        if bias is not None or softcap is not None or sliding is not None:
            raise ValueError("cache: less takes a model without sliding windows, and without a bias or a soft cap of "
                             "the scores")
        at, keys_at, held, own = window.positions, window.key_positions, self.positions[layer], q.shape[1]
        options: dict[str, Any] = dict(scale=scale, key_positions=keys_at)
        is_first = lambda at: at < self.sinks
        mask = window.visible()
        parts = [window_attention_lse(
            q, k, v, mask & ~is_first(keys_at)[:, None], at, self.kv[layer], sliding=self.recent + 1,
            slot_positions=jnp.where(is_first(held), -1, held), **options)]
        if self.sinks:
            few = min(held.shape[2], self.sinks if self.sinks <= BLOCK else -(-self.sinks // BLOCK) * BLOCK)
            held = held[:, :, :few]
            parts.append(window_attention_lse(
                q, k, v, mask & is_first(keys_at)[:, None], at, self.kv[layer][:, :, :few],
                slot_positions=jnp.where(is_first(held), held, -1), **options))
        parts = [(out.astype(jnp.float32), lse) for out, lse in parts]
        out, _ = merge(*parts, self._far(layer, q, k, v, mask, at, keys_at))
        return out.astype(q.dtype), (k[:, -own:], v[:, -own:])

    def _far(self, layer: int, q: Array, k: Array, v: Array, mask: Array, at: Array,
             keys_at: Array) -> tuple[Array, Array]:
        """What queries see through the kernels, as a part for `merge`."""
        kernels, (B, W, H, _), (K, G) = self.kind.kernels.layer(layer), q.shape, k.shape[1:3]
        phi = kernels.phi(q).reshape(B, W, G, H // G, -1)
        sums = jnp.einsum("bwgmr,bgre->bwgme", phi, self.states[layer])

        def more(k: Array, v: Array, seen: Array) -> Array:
            weights = jnp.einsum("bwgmr,bngr->bwgmn", phi, kernels.psi(k))
            return jnp.einsum("bwgmn,bnge->bwgme", jnp.where(seen[:, :, None, None], weights, 0), with_ones(v))

        # tokens that the window still holds, of which the later nodes are too far away
        ends = (at - self.recent)[:, :, None]
        if self.size and (count := min(K - 1, self.recent)):
            keys, values, where = self._oldest(layer, count)
            sums = sums + more(keys, values, (where >= 0)[:, None] & (where[:, None] < ends))
        if K - 1 > self.recent:
            sums = sums + more(k, v, mask & (keys_at >= self.sinks)[:, None] & (keys_at[:, None] < ends))
        sums = sums.reshape(B, W, H, -1)
        total = sums[..., -1]
        lse = jnp.where(total > 0, jnp.log(jnp.maximum(total, 1e-37)), -1e30)
        return sums[..., :-1] / jnp.maximum(total, 1e-37)[..., None], lse

    def _oldest(self, layer: int, count: int) -> tuple[Array, Array, Array]:
        """Keys `f[B, count, G, d]`, values and positions `i32[B, count]` of the tokens that are next to leave the
        window; -1 where the text is shorter."""
        at = self.length[:, None] - self.recent + jnp.arange(count, dtype=jnp.int32)
        slot = self.sinks + (at - self.sinks) % self.recent
        some = jnp.take_along_axis(self.kv[layer], slot[:, None, :, None], 2).swapaxes(1, 2)
        d = self.widths[layer]
        return some[..., :d], some[..., d:], jnp.where(at >= self.sinks, at, -1)

    def commit(self, entries: Entries, slots: Array) -> StateAndWindow:
        if not self.size:
            return self
        length = jnp.maximum(self.length, slots.max(1) + 1)
        states = tuple(self._taken_in(layer, entry, slots, length[:, None]) for layer, entry in enumerate(entries))
        placed: StateAndWindow = super().commit(entries, slots)
        return placed.replace(states=states)

    def _taken_in(self, layer: int, entry: PyTree, slots: Array, length: Array) -> Array:
        """The state with the tokens that a text of that `length` (`i32[B, 1]`) leaves behind."""
        k, v, at = self._oldest(layer, min(slots.shape[1], self.recent))
        if slots.shape[1] > self.recent:        # some of the new ones are behind the window at once
            k, v, at = (jnp.concatenate([old, new.astype(old.dtype)], 1) for old, new in zip(
                (k, v, at), (*entry, jnp.where(slots >= self.sinks, slots, -1)), strict=True))
        psi = self.kind.kernels.layer(layer).psi(k)
        psi = jnp.where(((at >= 0) & (at < length - self.recent))[:, :, None, None], psi, 0)
        return self.states[layer] + jnp.einsum("bngr,bnge->bgre", psi, with_ones(v))


@dataclasses.dataclass(frozen=True)
class Synthesis(CacheConfig):
    """A `StateAndWindow` cache.

    Attributes:
        kernels: what `decodax.train.less` made. sinks, recent: the first tokens and the latest ones, which are
            kept.
    """

    kernels: LessKernels
    sinks: int = 4
    recent: int = 512

    def __post_init__(self) -> None:
        if self.sinks < 0 or self.recent < 1:
            raise ValueError(f"sinks, recent: got {self.sinks} and {self.recent}, takes 0 and 1 or more")

    def __call__(self, layers: Sequence[tuple[Any, ...]], batch: int, capacity: int, dtype: jax.typing.DTypeLike,
                 inputs: PyTree = None) -> Cache:
        shapes = tuple(KVLayer(*layer) for layer in layers)
        self.kernels.check(shapes)
        if any(shape.sliding is not None for shape in shapes):
            raise ValueError("cache: less takes a model without sliding windows")
        rank = self.kernels.scale.value.shape[-1]
        states = tuple(jnp.zeros((batch, s.heads, rank, s.both - s.width + 1), jnp.float32) for s in shapes)
        slots = self.sinks + self.recent if capacity else 0
        return StateAndWindow(**empty_slots(shapes, batch, capacity, dtype, inputs, slots=slots), states=states,
                              sinks=self.sinks, recent=self.recent, shapes=shapes, kind=self)
