"""Prompts that are read group by group, each of which leaves a part of its tokens ("QuickVideo: Real-Time Long Video
Understanding with System Algorithm Co-Design", Schneider et al., 2025: its QuickPrefill).

A group of tokens attends to what the groups before it have left and to itself. Of its tokens those stay whose keys, of
all heads of a layer together, have the smallest norms; each layer keeps its own ones. So a long prompt never lies in
memory as a whole: there is room for the share that is kept and for one group. The latest tokens of a prompt, where a
question stands, and everything behind it stay.

Groups are counted from the beginning of a text, whatever the chunks that it comes in: no layer reads these
(`decodax.caches.prefill.unread`). The authors' groups are frames of a video; here they are any tokens of a prompt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.cache import Slotted, empty_slots
from decodax.caches.prefill.unread import Unread
from decodax.common.struct import static, struct
from decodax.core.cache import Cache, CacheConfig, Entries, PyTree, ReadPrompt
from decodax.core.window import causal


def smallest(keys: Array, number: int) -> Array:
    """`bool[B, W]`: the `number` tokens whose keys `f[B, W, G, d]` have the smallest norms over all heads. Of equal
    ones the earlier stay."""
    norms = jnp.square(keys.astype(jnp.float32)).sum((2, 3))
    rank = jnp.argsort(jnp.argsort(norms, axis=1, stable=True), axis=1, stable=True)
    return rank < number


@struct
class Grouped(Slotted):
    """What the groups of a prompt have left, and what follows it.

    Attributes:
        count: `i32[B]` tokens that each layer holds. kind: static.
    """

    count: Array
    kind: ByGroups = static()

    supports = frozenset({"trees"})

    def room(self, running: Array) -> Array | None:
        return self.kv[0].shape[2] - self.count if self.kv else None

    def place(self, layer: int, entry: PyTree, positions: Array) -> Array:
        wanted = positions >= 0
        return jnp.where(wanted, self.count[:, None] + jnp.cumsum(wanted, 1, dtype=jnp.int32) - 1, -1)[:, None]

    def commit(self, entries: Entries, slots: Array) -> Grouped:
        return self._with(entries, [slots] * len(self.kv), slots) if self.kv else self

    def _with(self, entries: Entries, chosen: Sequence[Array], read: Array) -> Grouped:
        """With the tokens at positions `chosen` (`i32[B, W]`, -1: none) in each layer, of those that were `read`."""
        new = [self._placed(layer, entry, at) for layer, (entry, at) in enumerate(zip(entries, chosen, strict=True))]
        kv, positions = zip(*new, strict=True)
        return self.replace(kv=kv, positions=positions, length=jnp.maximum(self.length, read.max(1) + 1),
                            count=self.count + (chosen[0] >= 0).sum(1, dtype=jnp.int32))

    def for_prompt(self) -> Cache:
        return Unread(length=jnp.zeros_like(self.length), into=self) if self.kv else self

    def read(self, prompt: ReadPrompt, length: Array) -> Grouped:
        """With the first `length` tokens (`i32[B]`) of a prompt; the newest one comes behind them."""
        group, (B, n) = self.kind.group, prompt.tokens.shape
        tokens = jnp.pad(prompt.tokens, ((0, 0), (0, -n % group)))

        def visit(i: Array, held: Grouped) -> Grouped:
            start = i * group
            at = jnp.broadcast_to(start + jnp.arange(group, dtype=jnp.int32), (B, group))
            live = at < length[:, None]
            out = prompt.model.apply(prompt.params, causal(lax.dynamic_slice_in_dim(tokens, start, group, 1), at[:, 0],
                                                           live), held)
            read = jnp.where(live & jnp.isfinite(out.hidden).all((1, 2), where=live[..., None])[:, None], at, -1)
            leaves = start + group <= length + 1 - self.kind.recent
            chosen = [jnp.where(~leaves[:, None] | smallest(entry[0], self.kind.kept), read, -1)
                      for entry in out.entries]
            return held._with(out.entries, chosen, read)

        return lax.fori_loop(0, (length.max() + group - 1) // group, visit, self)


@dataclasses.dataclass(frozen=True)
class ByGroups(CacheConfig):
    """A `Grouped` cache.

    Attributes:
        keep: the share of a group that stays; by default that of the authors' example. group: tokens of a group.
        recent: so many of the latest tokens of a prompt stay, and the groups in which they are.
        new: the most tokens behind a prompt; None: not known. name: what errors call it.
    """

    keep: float = 0.2
    group: int = 1024
    recent: int = 64
    new: int | None = None
    name: str = "quick-prefill"

    def __post_init__(self) -> None:
        if isinstance(self.keep, bool) or not isinstance(self.keep, (int, float)) or not 0 < self.keep <= 1:
            raise ValueError(f"keep: got {self.keep!r}, takes a share above 0, up to 1")
        for name, least in (("group", 1), ("recent", 0)):
            if not isinstance(value := getattr(self, name), int) or value < least:
                raise ValueError(f"{name}: got {value!r}, takes a number from {least}")
        if self.kept < 1:
            raise ValueError(f"keep: got {self.keep}, which leaves no token of a group of {self.group}")

    @property
    def kept(self) -> int:
        """How many tokens of a group stay."""
        return int(self.group * self.keep)

    def fit(self, new: int) -> ByGroups:
        return dataclasses.replace(self, new=new)

    def __call__(self, layers: Sequence[tuple[Any, ...]], batch: int, capacity: int, dtype: jax.typing.DTypeLike,
                 inputs: PyTree = None) -> Cache:
        # the last groups stay whole: that which is not full, and those with the latest tokens
        whole = (2 + self.recent // self.group) * self.group
        more = capacity if self.new is None else self.new
        slots = min(capacity, capacity // self.group * self.kept + whole + more)
        return Grouped(**empty_slots(layers if capacity else (), batch, capacity, dtype, inputs, slots=slots),
                       count=jnp.zeros(batch, jnp.int32), kind=self)
