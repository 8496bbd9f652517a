"""LESS: a state of constant size for the tokens that have left a window ("Get More with LESS: Synthesizing Recurrence
with KV Cache Compression for Efficient LLM Inference", Dong et al., 2024).

The first tokens and the latest ones keep their keys and values, as in StreamingLLM. Every other token is added to a
state of each key head: `H += psi(k)^T v` and `z += psi(k)^T`. A query attends to both parts at once: `(phi(q) H + sum
exp(s) v) / (phi(q) z + sum exp(s))` with the scores `s` of the kept tokens. The kernels `phi` and `psi` are small
networks of each layer and head, trained by `decodax.train.fit_less`.

A query at position `p` attends exactly to the first tokens and to those from `p - recent_size` on, and to the others
through the kernels, even if they are still stored. So its result depends on the text alone: drafts and chunks of a
prompt may have any width, and no more than the window is stored.

With grouped queries each query head has its own `phi` and shares the state of its key head, as in the authors' code for
Falcon. Unlike here, their code prefills a prompt with full attention. Kernels are constants of the compiled programs.

The outputs are those of the authors' code (0e0cf98) with base Lambda, without the 1e-6 that it adds to sums. Prompts
are read through the state, as in its evaluation of perplexity. H2O as the base is not implemented.
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

from decodax.cache.entry import own_entry
from decodax.cache.key_values import KVConfig, KVLayer, Score
from decodax.cache.slotted import empty_slots
from decodax.caches.bounded.streaming_llm import StreamingLLMCache
from decodax.caches.constant import Constant
from decodax.common.options import Count, Whole, check_options
from decodax.common.registry import CACHES
from decodax.common.struct import Struct, static, struct
from decodax.core.cache import Cache, Entries, PyTree
from decodax.pallas_kernels.window_attention import Bias, merge, whole_blocks, window_attention_lse


@struct
class LayerKernels(Struct):
    """The learned feature maps of one layer: `phi(q) psi(k)` approximates the weight of attention `exp(q k)`. For `H`
    query heads and `G` key heads, with `h` hidden channels and rank `r`.

    Attributes:
        query_in, query_out: `f32[H, d, h]` and `f32[H, h, r]`, the two layers of `phi`.
        key_in, key_out: `f32[G, d, h]` and `f32[G, h, r]`, the first two layers of `psi`.
        scale: `f32[G, r]`; its absolute value multiplies the output of these two layers.
        mix: `f32[G, r, r]`, the third layer of `psi`, whose output is added to its input.
        mix_scale: `f32[G, r]`, factors of the output of `mix`.
    """

    query_in: Array
    query_out: Array
    key_in: Array
    key_out: Array
    scale: Array
    mix: Array
    mix_scale: Array

    def phi(self, q: Array, dropped: Array | float = 1.0) -> Array:
        """Returns the features of queries, `f32[..., H, r]`, at least 0. Their products with the features of keys
        (`psi`) approximate attention weights.

        Args:
            q: `f[..., H, d]`, rotated queries, not scaled for attention.
            dropped: factors of the hidden channels before their activation, for dropout in training.
        """
        return jnp.abs(_two_layers(q, self.query_in, self.query_out, dropped))

    def psi(self, k: Array, dropped: Array | float = 1.0) -> Array:
        """Returns the features of keys, `f32[..., G, r]`, at least 0, for products with the features of queries
        (`phi`).

        Args:
            k: `f[..., G, d]`, rotated keys.
            dropped: factors of the hidden channels before their activation, for dropout in training.
        """
        x = jnp.abs(self.scale) * _two_layers(k, self.key_in, self.key_out, dropped)
        return jnp.abs(x + jnp.einsum("...hr,hrs->...hs", x, self.mix) * self.mix_scale)


def _two_layers(x: Array, first: Array, second: Array, dropped: Array | float) -> Array:
    gelu = lambda x: jax.nn.gelu(x, approximate=False)
    x = gelu(jnp.einsum("...hd,hde->...he", x.astype(jnp.float32), first) * dropped)
    return gelu(jnp.einsum("...he,her->...hr", x, second))


@dataclasses.dataclass(frozen=True)
class LessKernels:
    """The learned feature maps of queries and keys in all layers of a model: the arrays of `LayerKernels`, each with a
    leading axis of `L` layers."""

    query_in: Constant
    query_out: Constant
    key_in: Constant
    key_out: Constant
    scale: Constant
    mix: Constant
    mix_scale: Constant

    @classmethod
    def of(cls, layers: Sequence[LayerKernels]) -> LessKernels:
        """Stacks the kernels of the layers of a model."""
        return cls(**{field.name: Constant(np.stack([np.asarray(getattr(own, field.name), np.float32)
                                                     for own in layers])) for field in dataclasses.fields(cls)})

    def layer(self, layer: int) -> LayerKernels:
        """Returns the kernels of one layer."""
        return LayerKernels(**{name: jnp.asarray(x[layer]) for name, x in self._arrays().items()})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the arrays to a file `.npz`."""
        np.savez(path, **self._arrays())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LessKernels:
        """Reads a file that `save` wrote.

        Raises:
            ValueError: the file lacks one of the arrays.
        """
        with np.load(path, allow_pickle=False) as found:
            names = [field.name for field in dataclasses.fields(cls)]
            if lacking := [name for name in names if name not in found]:
                raise ValueError(f"kernels: {os.fspath(path)} has no {' and no '.join(lacking)}, takes a file that "
                                 "LessKernels.save wrote")
            return cls(**{name: Constant(found[name]) for name in names})

    def check(self, shapes: Sequence[KVLayer]) -> None:
        """Raises ValueError if the kernels do not fit the shapes of a model's layers."""
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
    """Appends a 1 to each value `f[..., e]` and returns float32, so that a weighted sum of them also has the sum of
    weights."""
    return jnp.concatenate([values.astype(jnp.float32), jnp.ones((*values.shape[:-1], 1), jnp.float32)], -1)


@struct
class LessCache(StreamingLLMCache):
    """The first `start_size` tokens, the latest `recent_size` tokens, and a state that sums up all other tokens.

    Attributes:
        states: a tuple with one array `f32[B, G, r, e + 1]` for each layer: the sum over the other tokens of the outer
            product of the key's features (`LayerKernels.psi`) and the value; the last column is the sum of the
            features.
        kind: static; the configuration.
    """

    states: tuple[Array, ...]
    kind: LessConfig = static()

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               sliding: int | None = None, softcap: float | None = None,
               bias: Bias | None = None, sinks: Array | None = None) -> tuple[Array, PyTree]:
        at, keys_at, held = window.positions, window.key_positions, self.positions[layer]
        options: dict[str, Any] = dict(scale=scale, key_positions=keys_at)
        is_first = lambda at: at < self.start_size
        mask = window.visible()
        parts = [window_attention_lse(
            q, k, v, mask & ~is_first(keys_at)[:, None], at, self.kv[layer], sliding=self.recent_size + 1,
            slot_positions=jnp.where(is_first(held), -1, held), sinks=sinks, **options)]
        if self.start_size:
            few = min(held.shape[2], whole_blocks(self.start_size))
            held = held[:, :, :few]
            parts.append(window_attention_lse(
                q, k, v, mask & is_first(keys_at)[:, None], at, self.kv[layer][:, :, :few],
                slot_positions=jnp.where(is_first(held), held, -1), **options))
        parts = [(out.astype(jnp.float32), lse) for out, lse in parts]
        out, _ = merge(*parts, self._far(layer, q, k, v, mask, at, keys_at))
        return out.astype(q.dtype), own_entry(q, k, v)

    def _far(self, layer: int, q: Array, k: Array, v: Array, mask: Array, at: Array,
             keys_at: Array) -> tuple[Array, Array]:
        """Returns attention through the kernels, as a part for `merge`."""
        kernels, (B, W, H, _), (K, G) = self.kind.kernels.layer(layer), q.shape, k.shape[1:3]
        phi = kernels.phi(q).reshape(B, W, G, H // G, -1)
        sums = jnp.einsum("bwgmr,bgre->bwgme", phi, self.states[layer])

        def more(k: Array, v: Array, seen: Array) -> Array:
            weights = jnp.einsum("bwgmr,bngr->bwgmn", phi, kernels.psi(k))
            return jnp.einsum("bwgmn,bnge->bwgme", jnp.where(seen[:, :, None, None], weights, 0), with_ones(v))

        # tokens that the window still holds, of which the later nodes are too far away
        ends = (at - self.recent_size)[:, :, None]
        if self.size and (count := min(K - 1, self.recent_size)):
            keys, values, where = self._oldest(layer, count)
            sums = sums + more(keys, values, (where >= 0)[:, None] & (where[:, None] < ends))
        if K - 1 > self.recent_size:
            sums = sums + more(k, v, mask & (keys_at >= self.start_size)[:, None] & (keys_at[:, None] < ends))
        sums = sums.reshape(B, W, H, -1)
        total = sums[..., -1]
        lse = jnp.where(total > 0, jnp.log(jnp.maximum(total, 1e-37)), -1e30)
        return sums[..., :-1] / jnp.maximum(total, 1e-37)[..., None], lse

    def _oldest(self, layer: int, count: int) -> tuple[Array, Array, Array]:
        """Returns the next `count` tokens to leave the window: keys `f[B, count, G, d]`, values, and positions `i32[B,
        count]`; position -1: none."""
        at = self.length[:, None] - self.recent_size + jnp.arange(count, dtype=jnp.int32)
        slot = self.start_size + (at - self.start_size) % self.recent_size
        some = jnp.take_along_axis(self.kv[layer], slot[:, None, :, None], 2).swapaxes(1, 2)
        d = self.widths[layer]
        return some[..., :d], some[..., d:], jnp.where(at >= self.start_size, at, -1)

    def commit(self, entries: Entries, slots: Array) -> LessCache:
        if not self.size:
            return self
        length = jnp.maximum(self.length, slots.max(1) + 1)
        states = tuple(self._taken_in(layer, entry, slots, length[:, None]) for layer, entry in enumerate(entries))
        placed: LessCache = super().commit(entries, slots)
        return placed.replace(states=states)

    def _taken_in(self, layer: int, entry: PyTree, slots: Array, length: Array) -> Array:
        """Returns the state of a layer after a commit: it adds the tokens that leave the window of a text of `length`
        tokens (`i32[B, 1]`)."""
        k, v, at = self._oldest(layer, min(slots.shape[1], self.recent_size))
        if slots.shape[1] > self.recent_size:        # some of the new ones leave the window at once
            k, v, at = (jnp.concatenate([old, new.astype(old.dtype)], 1) for old, new in zip(
                (k, v, at), (entry.keys, entry.values, jnp.where(slots >= self.start_size, slots, -1)), strict=True))
        psi = self.kind.kernels.layer(layer).psi(k)
        psi = jnp.where(((at >= 0) & (at < length - self.recent_size))[:, :, None, None], psi, 0)
        return self.states[layer] + jnp.einsum("bngr,bnge->bgre", psi, with_ones(v))


@dataclasses.dataclass(frozen=True)
class LessConfig(KVConfig):
    """Configuration of a `LessCache`; see `less` for the fields."""

    kernels: LessKernels
    start_size: Whole = 4
    recent_size: Count = 512

    def __post_init__(self) -> None:
        check_options(type(self), vars(self))

    def refuses(self, layer: int, shape: KVLayer) -> frozenset[Score]:
        return frozenset(("sliding windows", "soft caps", "biases"))

    def empty(self, shapes: tuple[KVLayer, ...], batch: int, size: int, dtype: Any, inputs: PyTree) -> Cache:
        if shapes:
            self.kernels.check(shapes)
        rank = self.kernels.scale.value.shape[-1]
        states = tuple(jnp.zeros((batch, s.heads, rank, s.both - s.width + 1), jnp.float32) for s in shapes)
        slots = self.start_size + self.recent_size
        return LessCache(**empty_slots(shapes, batch, size, dtype, inputs, slots=slots), states=states,
                              start_size=self.start_size, recent_size=self.recent_size, shapes=shapes, kind=self)


@CACHES.register("less",
                 "Get More with LESS: Synthesizing Recurrence with KV Cache Compression for Efficient LLM Inference",
                 "Dong et al. 2024", family="bounded")
def less(kernels: LessKernels | str | None = None, start_size: Whole = 4, recent_size: Count = 512) -> LessConfig:
    """Keeps the first tokens and the latest ones exactly, and sums up the others in a state of constant size.

    Decodes texts of any length in constant memory, with better results than the window alone. First train the kernels
    for a model with `decodax.train.fit_less`.

    Args:
        kernels: kernels that were trained on the model, or the path of a file of `LessKernels.save`. Required.
        start_size: number of first tokens, the attention sinks.
        recent_size: number of latest tokens.
    """
    if isinstance(kernels, str):
        kernels = LessKernels.load(kernels)
    if not isinstance(kernels, LessKernels):
        raise ValueError(f"kernels: got {'none' if kernels is None else type(kernels).__name__}, takes what "
                         "decodax.train.less trains on a model, or a file that its save wrote")
    return LessConfig(kernels, start_size, recent_size)
