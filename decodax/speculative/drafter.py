"""What drafts and sources share."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, Self

from decodax.cache import Feature, Window
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params

CHAINS: frozenset[Feature] = frozenset()
TREES: frozenset[Feature] = frozenset(("trees",))


class Drafter:
    """What drafts and sources share, with defaults for one that has no weights and carries nothing.

    Attributes:
        cache_needs: what it asks of the target's cache, as in `Algorithm`: trees and probes need "trees".
        free: reads its drafts off the text, at no cost to speak of: they may be tried on paper (see `Adaptive`).
    """

    cache_needs: ClassVar[frozenset[Feature]] = TREES
    free: ClassVar[bool] = False

    @property
    def weights(self) -> Any:
        """Weights that it was made with, a pytree: what becomes `Params.draft`."""
        return None

    def bare(self) -> Self:
        """The drafter without its weights."""
        return self

    def for_vocabulary(self, size: int) -> Self:
        """The drafter for a target whose logits have `size` entries, if its own may have another number."""
        return self

    @property
    def exact(self) -> bool:
        """Whether the target answers as it would without it: it does not where `through` puts a lossy cache in place of
        the target's."""
        return True

    @property
    def reader(self) -> Drafter | None:
        """What of it learns from the prompt: whose `observe` is called with each prefill chunk, on the same state.

        None, the default: nothing does. A drafter that learns from prompts returns itself, one made of others what is
        enough. Prefill is compiled once for each reader, so the less is in it, the more methods share the program.
        """
        return None

    def fit(self, budget: int) -> Self:
        """As `Algorithm.fit`."""
        return self

    def through(self, model: Any) -> Any:
        """As `Algorithm.through`: the target's model, where it should keep another cache."""
        return model

    def init(self, params: Params, s: State) -> Any:
        """Its state for a prompt; every leaf with an explicit dtype and a leading batch axis."""
        return None

    def observe(self, s: State, window: Window, out: Out, decision: Decision | None, state: Any) -> Any:
        """Learns from a scored window and what was decided of it (None: a prefill chunk, see `reader`), whoever
        proposed it."""
        return state


class AroundSource(Drafter):
    """A drafter around another one, its field `source`: forwards what both have in common."""

    if TYPE_CHECKING:
        source: Any

    if not TYPE_CHECKING:       # of a class variable

        @property
        def cache_needs(self) -> frozenset[Feature]:
            return self.source.cache_needs

    @property
    def weights(self) -> Any:
        return self.source.weights

    @property
    def exact(self) -> bool:
        return self.source.exact

    @property
    def reader(self) -> Drafter | None:
        return self.source.reader

    def bare(self) -> Self:
        return dataclasses.replace(self, source=self.source.bare())      # type: ignore[type-var]

    def for_vocabulary(self, size: int) -> Self:
        return dataclasses.replace(self, source=self.source.for_vocabulary(size))      # type: ignore[type-var]

    def fit(self, budget: int) -> Self:
        return dataclasses.replace(self, source=self.source.fit(budget))     # type: ignore[type-var]

    def through(self, model: Any) -> Any:
        return self.source.through(model)

    def init(self, params: Params, s: State) -> Any:
        return self.source.init(params, s)

    def observe(self, s: State, window: Window, out: Out, decision: Decision | None, state: Any) -> Any:
        return self.source.observe(s, window, out, decision, state)
