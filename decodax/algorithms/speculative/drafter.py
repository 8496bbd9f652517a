"""The common base class of drafts and sources."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from decodax.algorithms.speculative.tree import Drawn
from decodax.core.cache import Feature
from decodax.core.composed import Fitting, parts_of
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params
from decodax.core.window import Window

CHAINS: frozenset[Feature] = frozenset()
TREES: frozenset[Feature] = frozenset(("trees",))

Form = Literal["trees", "probes", "draws", "mixtures", "matches"]
"""A property that a drafter's proposals may have; one without any proposes a chain of tokens that it looked up.
"trees": a node may have several children. "probes": `Proposal.probes` is set. "draws": `log_q` is set, for verifiers
that need drawn drafts. "mixtures": `drawn_at` is set, for draws from several sources. "matches": `match` is set."""


class Drafter(Fitting):
    """Base class of drafts and sources, with defaults for a drafter without weights and state. A drafter with parts
    forwards to them (`Composed`).

    Attributes:
        cache_needs: features that the target's cache must have (`Feature`): trees and probes need "trees".
        proposes: what the proposals may have (`Form`). Parts that do not take it refuse the drafter before tracing.
        free: True if drafts come from the text at almost no cost. `Adaptive` then also compares them with the decoded
            tokens in rounds without drafts.
        defers: True if rounds of plain decoding may be passed to `observe` later, several of them as a chunk of the
            prompt. `Adaptive` then keeps what `unread` says, and such rounds cost no more than plain decoding.
    """

    cache_needs: ClassVar[frozenset[Feature]] = TREES
    proposes: ClassVar[frozenset[Form]] = frozenset()
    free: ClassVar[bool] = False
    # With `takes_gaps` and `unread` a member of every drafter: all trained heads answer them, of many papers, and the
    # arms of every adaptive method ask for them.
    defers: ClassVar[bool] = False

    def for_vocabulary(self, size: int) -> Self:
        """Returns the drafter for a target with `size` logits: its own logits, if they have another size, are cut or
        padded (with -inf) to it."""
        return self._with(lambda part: part.for_vocabulary(size))

    @property
    def exact(self) -> bool:
        """True if decoding with the drafter keeps the target's output; False if it replaces the target's cache by a
        lossy one (`wrap_model`)."""
        return all(part.exact for part in parts_of(self))

    @property
    def prefill_observer(self) -> Drafter | None:
        """The part that learns from the prompt: its `observe` is called with each prefill chunk, on the same state.
        None if there is none.

        A drafter that learns from prompts returns itself. By default, so does one with a part that learns. Prefill is
        compiled once for each reader, so a smaller reader is shared by more methods.
        """
        return None if all(part.prefill_observer is None for part in parts_of(self)) else self

    @property
    def takes_gaps(self) -> bool:
        """True if the drafter need not read every token of the text. After a long stretch of plain decoding, `observe`
        then gets only the last tokens, as a chunk with a gap before it."""
        return False

    def check_drawn(self, drawn: Drawn) -> None:
        """Raises ValueError if the drafter cannot draw its drafts as a verifier needs it (`Verifier.drawn`)."""

    def init(self, params: Params, s: State) -> Any:
        """Returns the drafter's state before prefill, for the prompts in `s`: a pytree whose leaves have a leading
        batch axis and an explicit dtype. None: the drafter has no state."""
        return None

    def unread(self, params: Params, batch: int) -> tuple[Any, Any]:
        """Returns an example, of zeros, of what `observe` reads of the target's output for one token of each row:
        hidden states `f[B, 1, D]` (or `f[B, 1, 0]`), and a tuple of layer outputs with None for those that are not
        read, or None if no layer is. Only called if `defers`."""
        raise NotImplementedError(type(self).__name__)

    def observe(self, params: Params, s: State, window: Window, out: Out, decision: Decision | None, state: Any) -> Any:
        """Returns the state after a round.

        It is also called for prefill chunks (see `prefill_observer`), and for windows that another drafter proposed.

        Args:
            params: weights of the model and of the drafter.
            s: the decoding state before the round.
            window: the scored window.
            out: the target's output for it.
            decision: the decision of the round; None for a prefill chunk.
            state: the drafter's state.
        """
        return state


class AroundSource(Drafter):
    """Base class of drafters that wrap another one, their field `source`: prompt reading, state and cache needs are
    those of the wrapped drafter."""

    if TYPE_CHECKING:
        source: Any
    else:       # of a class variable

        @property
        def cache_needs(self) -> frozenset[Feature]:
            return self.source.cache_needs

        @property
        def proposes(self) -> frozenset[Form]:
            return self.source.proposes

    @property
    def prefill_observer(self) -> Drafter | None:
        return self.source.prefill_observer

    def check_drawn(self, drawn: Drawn) -> None:
        self.source.check_drawn(drawn)

    def check_chained(self) -> None:
        self.source.check_chained()

    def init(self, params: Params, s: State) -> Any:
        return self.source.init(params, s)

    def observe(self, params: Params, s: State, window: Window, out: Out, decision: Decision | None, state: Any) -> Any:
        return self.source.observe(params, s, window, out, decision, state)
