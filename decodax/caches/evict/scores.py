"""The contract of a score: how much each cached token is worth keeping.

A score is computed from one layer of one row (`HeldLayer`) when something has to go. The tokens with the highest scores
stay, the newer one where two tie; those with an infinite score stay before all others.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from jax import Array

from decodax.cache.key_values import KVLayer
from decodax.caches.evict.held import HeldLayer
from decodax.common.struct import Struct, struct
from decodax.core.cache import ReadPrompt


@struct
class Taken(Struct):
    """Tokens that a layer has taken in, for `TokenScore.gather`.

    Attributes:
        queries: `f[B, W, H, d]`, scaled as attention takes them. sums: `f32[B, W, H]`, the logarithm of the sum of each
            one's exponentials. positions: `i32[B, W]`, -1 where a node was not committed.
        kv, held: the layer's `f[B, G, S, d + e]` and `i32[B, G, S]`, these tokens among them.
    """

    queries: Array
    sums: Array
    positions: Array
    kv: Array
    held: Array


@struct
class Gathered(Struct):
    """What a score has gathered of a layer.

    Attributes:
        slots: arrays `[B, G, S]` that go with the tokens. rest: arrays `[B, ...]`.
    """

    slots: Any = None
    rest: Any = None


class TokenScore(abc.ABC):
    """Derive a frozen dataclass from this. It is compared by value, and static under jit.

    Attributes:
        reads: what it gathers from: "nothing", all "queries" as they come, or the "attention" of a prompt (its queries
            with their softmax sums; those of later tokens are among the latest).
    """

    reads: ClassVar[Literal["nothing", "queries", "attention"]] = "nothing"

    @property
    def projects(self) -> bool:
        """Whether it reads `HeldLayer.outputs`, which is there when a prompt has been read, and not later."""
        return False

    @property
    def once(self) -> bool:
        """Whether it can choose behind a prompt alone, not again while decoding."""
        return self.projects

    @property
    def latest(self) -> int:
        """How many of the latest queries it looks at (`HeldLayer.queries`)."""
        return 0

    @property
    def always(self) -> int:
        """How many tokens it keeps in any case; a budget must be larger."""
        return 0

    def start(self, shape: KVLayer, batch: int, slots: int) -> Gathered:
        """What it gathers of an empty layer."""
        return Gathered()

    def gather(self, shape: KVLayer, gathered: Gathered, new: Taken) -> Gathered:
        """With tokens that were committed."""
        return gathered

    def consult(self, cache: Any, prompt: ReadPrompt) -> Sequence[Gathered]:
        """What it has gathered of each layer when a prompt is in, before anything is chosen. Some scores ask the model
        for more than it says while it reads: `cache`, an `Evicting`, holds the whole prompt."""
        gathered: Sequence[Gathered] = cache.gathered
        return gathered

    def of_model(self, lm: Any) -> TokenScore:
        """As `CacheConfig.of_model`."""
        return self

    def beyond(self, longest: int) -> int:
        """As `CacheConfig.beyond`."""
        return 0

    def renew(self, held: HeldLayer) -> Any:
        """`Gathered.slots`, with what the queries since `HeldLayer.since` add, when something is to go."""
        return held.gathered.slots

    @abc.abstractmethod
    def __call__(self, held: HeldLayer) -> Array:
        """`f32[G, S]`; slots that hold nothing do not count."""
