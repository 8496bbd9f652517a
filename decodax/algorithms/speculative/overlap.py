"""The base of PEARL and SpecBranch: drafts that are written while the target verifies earlier ones.

In a round the target verifies the pending drafts, and the draft model writes what may come after them. Neither
depends on what the other computes, so the two can run at the same time on devices of their own
(`decodax.algorithms.speculative.halves`). On the same devices one runs after the other, with the same result.
"""

from __future__ import annotations

import abc
from typing import Any, ClassVar, Self

from decodax.algorithms.speculative.drafter import AroundSource
from decodax.algorithms.speculative.source import Draft
from decodax.algorithms.speculative.tree import Drawn, Proposal
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params
from decodax.core.window import Window


class Overlapping(AroundSource, Draft):
    """A draft around a `source` that writes ahead of the target. Derive a frozen dataclass from this.

    Its state is a struct with a field `source`, the source's state, which only the draft model's devices need.

    Attributes:
        written: fields of the state that `write` makes beside `source`, which the target's devices need.
    """

    written: ClassVar[tuple[str, ...]]

    @property
    def reader(self) -> Self | None:
        return None if self.source.reader is None else self

    @abc.abstractmethod
    def offer(self, params: Params, s: State, state: Any) -> tuple[Proposal, Any]:
        """Returns the pending drafts, and the state of the round. It runs neither model."""

    @abc.abstractmethod
    def write(self, params: Params, policy: Any, s: State, state: Any, drawn: Drawn) -> Any:
        """Runs the draft model's part of the round. Returns the state with a new `source` and the fields `written`."""

    def look(self, out: Out, decision: Decision | None) -> Any:
        """Returns what it reads of the target's forward, a pytree; None: nothing."""
        return None

    @abc.abstractmethod
    def learn(self, s: State, window: Window, out: Out, decision: Decision | None, seen: Any, state: Any) -> Any:
        """Does what `observe` does, with the result of `look` in `seen`. Only the source may read more of `out`."""

    def propose(self, params: Params, policy: Any, s: State, state: Any, drawn: Drawn) -> tuple[Proposal, Any]:
        proposal, state = self.offer(params, s, state)
        return proposal, self.write(params, policy, s, state, drawn)

    def observe(self, s: State, window: Window, out: Out, decision: Decision | None, state: Any) -> Any:
        return self.learn(s, window, out, decision, self.look(out, decision), state)
