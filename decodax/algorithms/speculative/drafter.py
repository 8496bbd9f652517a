"""The base of drafts and sources."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Self

from decodax.core.cache import Feature
from decodax.core.composed import Composed, parts_of
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params
from decodax.core.window import Window

CHAINS: frozenset[Feature] = frozenset()
TREES: frozenset[Feature] = frozenset(("trees",))


class Drafter(Composed):
    """The base of drafts and sources, with defaults for a drafter without weights and state. A drafter that is made of
    others forwards to them (`Composed`).

    Attributes:
        cache_needs: features that the target's cache must have, as in `Algorithm`: trees and probes need "trees".
        free: True if drafts come from the text at hardly any cost: they may be tried on paper (see `Adaptive`).
    """

    cache_needs: ClassVar[frozenset[Feature]] = TREES
    free: ClassVar[bool] = False

    def for_vocabulary(self, size: int) -> Self:
        """Returns the drafter for a target whose logits have `size` entries, if its own may have another number."""
        return self._with(lambda part: part.for_vocabulary(size))

    @property
    def exact(self) -> bool:
        """True if the drafter leaves the target's output as it is; False if `through` replaces the target's cache by a
        lossy one."""
        return all(part.exact for part in parts_of(self))

    @property
    def reader(self) -> Drafter | None:
        """The part that learns from the prompt, whose `observe` is called with each prefill chunk, on the same state;
        None if nothing does.

        A drafter that learns from prompts returns itself; by default, so does one with a part that learns. Prefill is
        compiled once for each reader, so a smaller reader is shared by more methods.
        """
        return None if all(part.reader is None for part in parts_of(self)) else self

    def init(self, params: Params, s: State) -> Any:
        """Returns its state for a prompt. Every leaf has an explicit dtype and a leading batch axis."""
        return None

    def observe(self, s: State, window: Window, out: Out, decision: Decision | None, state: Any) -> Any:
        """Returns the state after a scored window and its decision (None for a prefill chunk, see `reader`). It is
        called for windows that another drafter proposed, too."""
        return state


class AroundSource(Drafter):
    """A drafter around another one, its field `source`, to which it forwards everything. They share one state."""

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
