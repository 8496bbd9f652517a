"""QuickPrefill: prompts are prefilled in groups, and a share of each group's tokens is kept ("QuickVideo: Real-Time
Long Video Understanding with System Algorithm Co-Design", Schneider et al., 2025).

A group of tokens attends to the kept tokens of the groups before it, and to itself. Of its tokens those are kept whose
keys have the smallest norms, over all heads of a layer together; each layer keeps its own tokens. So a long prompt is
never entirely in memory: there are slots for the kept share and for one group. The latest tokens of a prompt, which
contain the question, and all tokens after the prompt are kept.

The authors' groups are frames of a video. Here they are any tokens of a prompt.

The kept tokens are those of the authors' code (QuickVideo f079e45, `key_norms_small`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import jax.numpy as jnp
from jax import Array, lax

from decodax.cache import Slotted, empty_slots
from decodax.cache.key_values import FittedConfig, KVLayer
from decodax.caches.configs import PaperConfig
from decodax.caches.prefill.whole_prompt import ReadAtOnce, padded, segment
from decodax.common.options import Count, Range, Whole
from decodax.common.registry import CACHES
from decodax.common.struct import static, struct
from decodax.core.cache import Cache, Entries, PyTree
from decodax.core.capabilities import ReadPrompt


def smallest(keys: Array, number: int) -> Array:
    """Returns a mask of the `number` tokens whose keys `f[B, W, G, d]` have the smallest norms over all heads, `bool[B,
    W]`. Of equal norms the earlier token is chosen."""
    norms = jnp.square(keys.astype(jnp.float32)).sum((2, 3))
    rank = jnp.argsort(jnp.argsort(norms, axis=1, stable=True), axis=1, stable=True)
    return rank < number


@struct
class QuickPrefillCache(ReadAtOnce, Slotted):
    """The kept tokens of a prompt, and the tokens after it.

    Attributes:
        kv, positions, length, given, widths, size: see `Slotted`.
        count: `i32[B]`, number of tokens that each layer stores.
        kind: static; the configuration.
    """

    count: Array
    kind: QuickPrefillConfig = static()

    supports = frozenset({"trees"})

    def room(self, running: Array) -> Array | None:
        return self.kv[0].shape[2] - self.count if self.kv else None

    def place(self, layer: int, entry: PyTree, positions: Array) -> Array:
        wanted = positions >= 0
        return jnp.where(wanted, self.count[:, None] + jnp.cumsum(wanted, 1, dtype=jnp.int32) - 1, -1)[:, None]

    def commit(self, entries: Entries, slots: Array) -> QuickPrefillCache:
        return self._with(entries, [slots] * len(self.kv), slots) if self.kv else self

    def _with(self, entries: Entries, chosen: Sequence[Array], read: Array) -> QuickPrefillCache:
        """Returns the cache with further tokens.

        Args:
            entries: the entries of a window.
            chosen: `i32[B, W]` for each layer, positions of the nodes to store; -1: not stored.
            read: `i32[B, W]`, positions of all nodes; -1: dead.
        """
        new = [self._placed(layer, entry, at) for layer, (entry, at) in enumerate(zip(entries, chosen, strict=True))]
        kv, positions = zip(*new, strict=True)
        return self.replace(kv=kv, positions=positions, length=jnp.maximum(self.length, read.max(1) + 1),
                            count=self.count + (chosen[0] >= 0).sum(1, dtype=jnp.int32))

    def read_prompt(self, prompt: ReadPrompt, length: Array) -> QuickPrefillCache:
        group = self.kind.group_size
        tokens = padded(prompt.tokens, group)

        def visit(i: Array, held: QuickPrefillCache) -> QuickPrefillCache:
            start = i * group
            window = segment(tokens, start, group, length)
            out, live = prompt.model.apply(prompt.params, window, held), window.live
            read = jnp.where(live & jnp.isfinite(out.hidden).all((1, 2), where=live[..., None])[:, None],
                             window.positions, -1)
            leaves = start + group <= length + 1 - self.kind.recent
            chosen = [jnp.where(~leaves[:, None] | smallest(entry.keys, self.kind.kept), read, -1)
                      for entry in out.entries]
            return held._with(out.entries, chosen, read)

        return lax.fori_loop(0, -(-length.max() // group), visit, self)


@CACHES.register("quick-prefill", "QuickVideo: Real-Time Long Video Understanding with System Algorithm Co-Design",
                 "Schneider et al. 2025", family="prefill")
@dataclasses.dataclass(frozen=True)
class QuickPrefillConfig(FittedConfig, PaperConfig):
    """Keeps, of each group of prompt tokens, those whose keys have the smallest norms; and the latest tokens of the
    prompt and all tokens after it.

    It saves memory and prefill time for long prompts with much repetition, such as the frames of a video. Example:
    `cache="quick-prefill:keep=0.5"`.

    Attributes:
        keep: share of a group that is kept; the default is that of the authors' example.
        group_size: number of tokens of a group.
        recent: number of latest tokens of a prompt; their groups are kept entirely.
    """

    keep: Annotated[float, Range(0, 1, above=True)] = 0.2
    group_size: Count = 1024
    recent: Whole = 64

    name: ClassVar[str] = "quick-prefill"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kept < 1:
            raise ValueError(f"keep: got {self.keep}, which leaves no token of a group of {self.group_size}")

    @property
    def kept(self) -> int:
        """Number of tokens of a group to keep."""
        return int(self.group_size * self.keep)

    def empty(self, shapes: tuple[KVLayer, ...], batch: int, size: int, dtype: Any, inputs: PyTree) -> Cache:
        # the last groups are kept whole: the one that is not full, and those with the latest tokens
        whole = (2 + self.recent // self.group_size) * self.group_size
        slots = min(size, size // self.group_size * self.kept + whole + self.new_tokens(size))
        return QuickPrefillCache(**empty_slots(shapes, batch, size, dtype, inputs, slots=slots),
                                 count=jnp.zeros(batch, jnp.int32), kind=self)
