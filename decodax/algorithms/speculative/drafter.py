"""What drafts and sources share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Self

from decodax.core.cache import Feature
from decodax.core.composed import Composed
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params
from decodax.core.window import Window

CHAINS: frozenset[Feature] = frozenset()
TREES: frozenset[Feature] = frozenset(("trees",))


class Drafter(Composed):
    """What drafts and sources share, with defaults for one that has no weights and carries nothing. One that is made of
    others forwards to them (`Composed`).

    Attributes:
        cache_needs: what it asks of the target's cache, as in `Algorithm`: trees and probes need "trees".
        free: reads its drafts off the text, at no cost to speak of: they may be tried on paper (see `Adaptive`).
    """

    cache_needs: ClassVar[frozenset[Feature]] = TREES
    free: ClassVar[bool] = False

    def for_vocabulary(self, size: int) -> Self:
        """The drafter for a target whose logits have `size` entries, if its own may have another number."""
        return self._with(lambda part: part.for_vocabulary(size))

    @property
    def exact(self) -> bool:
        """Whether the target answers as it would without it: it does not where `through` puts a lossy cache in place of
        the target's."""
        return all(part.exact for part in self.parts)

    @property
    def reader(self) -> Drafter | None:
        """What of it learns from the prompt: whose `observe` is called with each prefill chunk, on the same state.

        None: nothing does. A drafter that learns from prompts returns itself; by default, so does one with a part that
        learns. Prefill is compiled once for each reader, so the less is in it, the more methods share the program.
        """
        return None if all(part.reader is None for part in self.parts) else self

    def init(self, params: Params, s: State) -> Any:
        """Its state for a prompt; every leaf with an explicit dtype and a leading batch axis."""
        return None

    def observe(self, s: State, window: Window, out: Out, decision: Decision | None, state: Any) -> Any:
        """Learns from a scored window and what was decided of it (None: a prefill chunk, see `reader`), whoever
        proposed it."""
        return state


class AroundSource(Drafter):
    """A drafter around another one, its field `source`, to which it forwards everything. Both have one state."""

    if TYPE_CHECKING:
        source: Any
    else:       # of a class variable

        @property
        def cache_needs(self) -> frozenset[Feature]:
            return self.source.cache_needs

    @property
    def reader(self) -> Drafter | None:
        return self.source.reader

    def init(self, params: Params, s: State) -> Any:
        return self.source.init(params, s)

    def observe(self, s: State, window: Window, out: Out, decision: Decision | None, state: Any) -> Any:
        return self.source.observe(s, window, out, decision, state)
