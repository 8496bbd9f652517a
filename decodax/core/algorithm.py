"""The contract of a decoding method: what it proposes in a round, and what of it it decides is true.

A method that can do more also derives from `LearnsFromPrompt`, `Varies`, `Grouped`, `Concludes`, `Paced` or
`GuidesItself`. The functions below answer for methods that do not.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, Protocol

from jax import Array

from decodax.common.registry import Guarantee
from decodax.core.cache import NONE, Feature
from decodax.core.composed import Composed
from decodax.core.state import State
from decodax.core.types import Decision, Model, Out, Params
from decodax.core.window import Window

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Traits:
    """What a method declares of itself, checked against the model and the cache before anything is compiled.

    Attributes:
        name: what errors call it; "": the name of its class.
        emits: `M`, the largest number of tokens that a round can append.
        commits: the largest number of entries of a row that a round keeps, if that is less than the nodes of its
            window, as of a tree whose longest path is accepted. None: any number.
        guarantee: what is true of the output. "seed-exact": the tokens of plain decoding with the same seed.
            "distribution-exact": other tokens of the same distribution. "exact": another promise, kept exactly.
            "approximate": none of these.
        needs: features of the cache beyond chains that grow at the end. With "rewrites" the method writes entries of
            tokens that are not emitted yet; otherwise the core holds back entries of what has not been emitted.
        canvas: True if it fills masks, in any order, with a model that was trained for it.
        caches: True if it reads a cache. Without one the prompt is not prefilled and the cache has capacity 0.
        prefills: True if the core writes the prompt into the cache before the first round; False for a method that
            caches and does this by rounds of its own. None: as `caches`.
        samples: number of rows of one prompt that it works on together, side by side (beams, particles). `generate`
            makes that number of rows of each prompt, after `init`. None: rows do not know of one another.
        answers: number of those rows, the first ones, that are the answers to a prompt; None: all.
    """

    name: str = ""
    emits: int = 1
    commits: int | None = None
    guarantee: Guarantee = "approximate"
    needs: frozenset[Feature] = NONE
    canvas: bool = False
    caches: bool = True
    prefills: bool | None = None
    samples: int | None = None
    answers: int | None = None

    def __post_init__(self) -> None:
        if self.prefills is None:
            object.__setattr__(self, "prefills", self.caches)


class Observer(Protocol):
    """Learns from the prompt while it is prefilled. It is compared by value, and static under jit."""

    def observe(self, s: State, window: Window, out: Out, algo: PyTree) -> PyTree:
        """Returns the algorithm's state after a prefill chunk (`window`), whose hidden states and logits are in `out`.

        `s.policy` and `s.record` are None: prefill does not see the policy.
        """


class Algorithm(Composed, abc.ABC):
    """A decoding method: derive a frozen dataclass from this. It is compared by value, and static under jit.

    Only `init`, `propose` and `decide` have to be defined. The defaults of the other members suit a method which emits
    a token a round, reads a cache, and has no weights but those of the methods and drafts that it holds (`Composed`).
    A method around another one derives from `decodax.core.around.Around`.

    Numbers that a user may change between calls without a retrace belong in the policy, the weights or the state.
    """

    @property
    def traits(self) -> Traits:
        """What the method declares of itself."""
        return Traits()

    @abc.abstractmethod
    def init(self, params: Params, s: State) -> PyTree:
        """Returns the algorithm's state for the prompts; every leaf with an explicit dtype and a leading batch axis.
        The samples of a prompt are made of it later."""

    @abc.abstractmethod
    def propose(self, params: Params, policy: Any, s: State) -> tuple[Window, PyTree]:
        """Returns the window to score next, and what `decide` gets as `algo`."""

    @abc.abstractmethod
    def decide(self, params: Params, dist: Any, s: State, window: Window, out: Out, algo: PyTree) -> Decision:
        """Decides what of the window is true. `dist` is the policy at each node of the window: a
        `decodax.sampling.Distribution`."""


class LearnsFromPrompt(Algorithm):
    """A method that is shown the prompt's hidden states and logits while it is prefilled."""

    @property
    @abc.abstractmethod
    def observer(self) -> Observer | None:
        """Learns from the prompt while it is prefilled; None: nothing does after all. Prefill is compiled once for each
        observer and model, so methods with equal observers share it."""


class Varies(Algorithm):
    """A method whose rounds have several shapes: a draft length that adapts, a refresh now and then."""

    @property
    @abc.abstractmethod
    def variants(self) -> tuple[Algorithm, ...]:
        """A method for each shape, on the same state. Of the method itself only `traits`, `init`, `choose` and
        the observer are then used. Empty: its rounds have one shape after all."""

    @abc.abstractmethod
    def choose(self, params: Params, policy: Any, s: State) -> Array:
        """Returns the index of the variant that runs the next round, for the whole batch: `i32[]`."""


class Grouped(Algorithm):
    """A method that works on several rows of a prompt together, and can give any number of them as answers."""

    @abc.abstractmethod
    def answering(self, count: int) -> Algorithm:
        """Returns this method with `count` answers to a prompt.

        Raises:
            ValueError: it cannot give that many.
        """


class Concludes(Algorithm):
    """A method whose results are more, or others, than the tokens of its rows."""

    def outcome(self, s: State) -> State:
        """Returns the state whose rows are the results, after the last round or where somebody stops earlier: of a
        method that keeps finished texts beside its rows. A row that is still running has not been ended."""
        return s

    def findings(self, s: State) -> dict[str, Array]:
        """Returns what it has found of each row beside the tokens (scores, weights): arrays `[B, ...]` for
        `Result.findings`."""
        return {}


class Paced(Algorithm):
    """A method whose number of rounds does not follow from the number of tokens."""

    @abc.abstractmethod
    def most_rounds(self, budget: int, rows: int) -> int:
        """Returns a bound of the rounds of a batch of `rows` for `budget` new tokens a row."""


class GuidesItself(Algorithm):
    """A method with its own rule of classifier-free guidance."""

    @abc.abstractmethod
    def guide(self, model: Model, params: Params, policy: Any, s: State, scale: Any) -> tuple[Model, State] | None:
        """Returns the model and a prefilled state under guidance of `scale`; None: the usual rule holds."""


def name_of(alg: Algorithm) -> str:
    """Returns what errors call a method."""
    return alg.traits.name or type(alg).__name__


def observer(alg: Algorithm) -> Observer | None:
    """Returns what learns from the prompt while it is prefilled; None: nothing does."""
    return alg.observer if isinstance(alg, LearnsFromPrompt) else None


def variants(alg: Algorithm) -> tuple[Algorithm, ...]:
    """Returns the rounds of a method by their shapes; empty if they have one shape."""
    return alg.variants if isinstance(alg, Varies) else ()


def answering(alg: Algorithm, count: int) -> Algorithm:
    """Returns a method that works on rows together with `count` answers to a prompt.

    Raises:
        ValueError: it cannot give that many.
    """
    traits = alg.traits
    if isinstance(alg, Grouped):
        return alg.answering(count)
    if count != (traits.answers or traits.samples):
        raise ValueError(f"num_samples: got {count}, {name_of(alg)} works on {traits.samples} rows a prompt")
    return alg


def outcome(alg: Algorithm, s: State) -> State:
    """Returns the state whose rows are the results."""
    return alg.outcome(s) if isinstance(alg, Concludes) else s


def findings(alg: Algorithm, s: State) -> dict[str, Array]:
    """Returns what a method has found of each row beside the tokens."""
    return alg.findings(s) if isinstance(alg, Concludes) else {}


def most_rounds(alg: Algorithm, budget: int, rows: int) -> int:
    """Returns a bound of the rounds of a batch of `rows` for `budget` new tokens a row."""
    if isinstance(alg, Paced):
        return alg.most_rounds(budget, rows)
    # each round of a running row makes progress, at least one position in `emits` of a canvas
    return 2 * (budget + alg.traits.emits) + 8


def guide(alg: Algorithm, model: Model, params: Params, policy: Any, s: State,
          scale: Any) -> tuple[Model, State] | None:
    """Returns the model and a prefilled state under a method's own rule of guidance; None: it has none."""
    return alg.guide(model, params, policy, s, scale) if isinstance(alg, GuidesItself) else None
