"""The contract of a decoding method: it proposes the nodes of a round and decides which tokens are accepted.

A method with an optional capability also derives from `LearnsFromPrompt`, `Varies`, `Grouped`, `Concludes`, `Paced` or
`GuidesItself` or `ChecksFit`. The functions below give the default for methods that do not.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, Literal, Protocol

from jax import Array

from decodax.common.registry import Guarantee
from decodax.core.cache import NONE, Feature
from decodax.core.composed import Composed, Fitting
from decodax.core.state import State
from decodax.core.types import Decision, Model, Out, Params
from decodax.core.window import Window

PyTree = Any

Refused = Literal["stop", "transforms", "constraint", "guidance_scale"]


@dataclasses.dataclass(frozen=True)
class Traits:
    """Static properties that a method declares, checked against the model and the cache before anything is compiled.

    Attributes:
        name: name of the method in error messages; "": the name of its class.
        emits: `M`, the largest number of tokens that a round can append.
        window: smallest number of nodes that the window of a round has, as far as the settings say it before tracing.
            Some caches limit it (`decodax.core.capabilities.LimitsWindow`).
        commits: the largest number of cache entries that a round keeps for a row, if that is less than the nodes of its
            window; for example the length of the longest path in a draft tree. None: any number.
        guarantee: the guarantee about the output. "seed-exact": the tokens of plain decoding with the same seed.
            "distribution-exact": other tokens with the same distribution. "exact": another exact promise, which the
            method documents. "approximate": none of these.
        needs: cache features that the method needs, see `Feature`. With "rewrites" the method may write entries of
            tokens that are not emitted yet; otherwise the core drops such entries.
        canvas: True for a method that fills mask tokens, in any order, with a model trained for this (text diffusion).
        caches: True if the method uses a cache. If False, the prompt is not prefilled and the cache has capacity 0.
        prefills: True if the core writes the prompt into the cache before the first round; False for a method with a
            cache that writes the prompt in rounds of its own. None: the value of `caches`.
        samples: number of rows of one prompt that the method works on together (beams, particles). `generate` makes
            that number of rows of each prompt, after `init`. None: rows are independent.
        answers: number of those rows that are returned as answers to a prompt; they are the first ones. None: all.
        refuses: arguments of a request that the method does not take, each with the reason, which ends the error:
            "stop" (stop strings), "transforms" (those of the sampling policy that read the text), "constraint" and
            "guidance_scale"; see `refuse` and `check_policy`.
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
    refuses: tuple[tuple[Refused, str], ...] = ()
    window: int = 1

    def __post_init__(self) -> None:
        if self.prefills is None:
            object.__setattr__(self, "prefills", self.caches)


class Observer(Protocol):
    """Updates an algorithm's state from the prompt during prefill. It is compared by value and static under jit."""

    def observe(self, params: Params, s: State, window: Window, out: Out, algo: PyTree) -> PyTree:
        """Returns the algorithm's new state after one prefill chunk.

        Args:
            params: weights of the model and of the method.
            s: the decoding state; its `policy` and `record` are None, since prefill does not depend on the policy.
            window: the tokens of the chunk.
            out: the model's output for them, with hidden states and logits.
            algo: the algorithm's state before the chunk.
        """


OPTIONAL = {"prefill_observer": "LearnsFromPrompt", "variants": "Varies", "answering": "Grouped",
            "outcome": "Concludes", "findings": "Concludes", "choose": "Varies", "most_rounds": "Paced",
            "guide": "GuidesItself", "check_fit": "ChecksFit"}
"""Members that only a derived contract has: a method that defined one alone would never be asked for it."""


class Algorithm(Composed, abc.ABC):
    """Base class of decoding methods: derive a frozen dataclass from it. It is compared by value and static under jit.

    Only `init`, `propose` and `decide` have to be defined. The defaults of the other members suit a method which emits
    one token in each round, uses a cache, and has no weights except those of the methods and drafts in its fields
    (`Composed`). A method that wraps another one derives from `decodax.core.around.Around`.

    Numbers that may change between calls without a retrace belong in the policy, the weights or the state.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        bases = {base.__name__ for base in cls.__mro__}
        for name, base in OPTIONAL.items():
            if name in vars(cls) and base not in bases:
                raise TypeError(f"{cls.__name__}.{name}: belongs to decodax.core.algorithm.{base}; derive from it, too")

    @property
    def traits(self) -> Traits:
        """The static properties of the method; by default those of a method that emits one token in each round."""
        return Traits()

    @abc.abstractmethod
    def init(self, params: Params, s: State) -> PyTree:
        """Returns the algorithm's state for the prompts: a pytree whose leaves have explicit dtypes and a leading batch
        axis. If a prompt gets several samples, its row of this state is copied for each of them."""

    @abc.abstractmethod
    def propose(self, params: Params, policy: Any, s: State) -> tuple[Window, PyTree]:
        """Returns the window that the model scores next, and the state that `decide` gets as `algo`.

        Args:
            params: weights of the model and of the method.
            policy: the sampling policy.
            s: the state before the round.
        """

    @abc.abstractmethod
    def decide(self, params: Params, dist: Any, s: State, window: Window, out: Out, algo: PyTree) -> Decision:
        """Decides which tokens of the window are accepted.

        Args:
            params: weights of the model and of the method.
            dist: a `decodax.sampling.Distribution`, the sampling policy's distribution at each node of the window.
            s: the state before the round.
            window: the window from `propose`.
            out: the model's output for the window.
            algo: the second result of `propose`.
        """


class LearnsFromPrompt(Algorithm):
    """A method that gets the prompt's hidden states and logits during prefill."""

    @property
    @abc.abstractmethod
    def prefill_observer(self) -> Observer | None:
        """The object that is called after each prefill chunk; None if this instance needs none. Prefill is compiled
        once for each pair of observer and model, so methods with equal observers share the program."""


class Varies(Algorithm):
    """A method whose rounds have several shapes, for example because its draft length adapts."""

    @property
    @abc.abstractmethod
    def variants(self) -> tuple[Algorithm, ...]:
        """One method for each shape of a round; all of them work on the same state. If there are any, only `traits`,
        `init`, `choose` and the observer of the method itself are used. Empty: the method's rounds have one shape."""

    @abc.abstractmethod
    def choose(self, params: Params, policy: Any, s: State) -> Array:
        """Returns the index into `variants` for the next round, `i32[]`, the same for the whole batch."""


class Grouped(Algorithm):
    """A method that works on several rows of a prompt together, and can return a chosen number of them as answers."""

    @abc.abstractmethod
    def answering(self, count: int) -> Algorithm:
        """Returns this method with `count` answers for each prompt.

        Raises:
            ValueError: the method cannot return that many.
        """


class Concludes(Algorithm):
    """A method whose results differ from the tokens of its rows, or go beyond them (scores, weights)."""

    def outcome(self, s: State) -> State:
        """Returns the state whose rows are the results. It is called after the last round or when the caller stops
        earlier, so some rows may still be running. A method that keeps finished texts outside its rows, as beam search
        does, overrides it."""
        return s

    def findings(self, s: State) -> dict[str, Array]:
        """Returns results of each row beside its tokens, such as scores or weights, for `Result.findings`: arrays `[B,
        ...]` by name."""
        return {}


class Paced(Algorithm):
    """A method whose number of rounds is not bounded by its number of tokens."""

    @abc.abstractmethod
    def most_rounds(self, budget: int, rows: int) -> int:
        """Returns an upper bound on the number of rounds.

        Args:
            budget: largest number of new tokens of a row.
            rows: number of rows in the batch.
        """


class ChecksFit(Algorithm, Fitting):
    """A method with a check of its own whether its parts, the model and the cache fit each other, beyond what `traits`
    say (`check_fit`)."""


class GuidesItself(Algorithm):
    """A method with an implementation of classifier-free guidance of its own."""

    @abc.abstractmethod
    def guide(self, model: Model, params: Params, policy: Any, s: State, scale: Any) -> tuple[Model, State] | None:
        """Returns the model and the prefilled state with which guidance of strength `scale` is decoded. None: the
        default rule is used."""


def name_of(alg: Algorithm) -> str:
    """Returns `traits.name` of a method for error messages, or else the name of its class."""
    return alg.traits.name or type(alg).__name__


def refuse(alg: Algorithm, argument: Refused) -> None:
    """Raises ValueError with the reason if a method does not take an argument of a request (`Traits.refuses`)."""
    for name, reason in alg.traits.refuses:
        if name == argument:
            raise ValueError(f"{argument}: {reason}")


def check_policy(alg: Algorithm, policy: Any) -> None:
    """Checks that a method takes a sampling policy (`Traits.refuses`).

    Raises:
        ValueError: the policy has stop strings or a transform that reads the text, and the method takes none.
    """
    if policy.stops is not None:
        refuse(alg, "stop")
    link = next((type(t).__name__ for t in policy.transforms if t.needs != "nothing"), None)
    reason = dict(alg.traits.refuses).get("transforms")
    if link is not None and reason is not None:
        raise ValueError(f"{name_of(alg)}: {link} reads the text, {reason}; takes a policy that does not")


def prefill_observer(alg: Algorithm) -> Observer | None:
    """Returns the observer that a method calls during prefill; None if it has none."""
    return alg.prefill_observer if isinstance(alg, LearnsFromPrompt) else None


def variants(alg: Algorithm) -> tuple[Algorithm, ...]:
    """Returns the methods for the shapes of a method's rounds (`Varies.variants`); empty if its rounds have one
    shape."""
    return alg.variants if isinstance(alg, Varies) else ()


def answering(alg: Algorithm, count: int) -> Algorithm:
    """Returns a method that works on several rows of a prompt, with `count` answers for each prompt.

    Raises:
        ValueError: the method cannot return that many.
    """
    traits = alg.traits
    if isinstance(alg, Grouped):
        return alg.answering(count)
    if count != (traits.answers or traits.samples):
        raise ValueError(f"num_samples: got {count}, {name_of(alg)} works on {traits.samples} rows a prompt")
    return alg


def outcome(alg: Algorithm, s: State) -> State:
    """Returns the state whose rows are the results of a method, from the state after its last round. A method that
    stores finished texts elsewhere (`Concludes`) puts them into the rows; for any other method it is `s` itself."""
    return alg.outcome(s) if isinstance(alg, Concludes) else s


def findings(alg: Algorithm, s: State) -> dict[str, Array]:
    """Returns a method's results for each row beside its tokens, such as scores: arrays `[B, ...]` by name, from
    `Concludes.findings`. Empty if the method is not a `Concludes`."""
    return alg.findings(s) if isinstance(alg, Concludes) else {}


def most_rounds(alg: Algorithm, budget: int, rows: int) -> int:
    """Returns an upper bound on the number of rounds for `budget` new tokens in each of `rows` rows."""
    if isinstance(alg, Paced):
        return alg.most_rounds(budget, rows)
    # each round of a running row makes progress, at least one position in `emits` of a canvas
    return 2 * (budget + alg.traits.emits) + 8


def guide(alg: Algorithm, model: Model, params: Params, policy: Any, s: State,
          scale: Any) -> tuple[Model, State] | None:
    """Returns the model and the prefilled state under a method's own rule of guidance (`GuidesItself.guide`). None: it
    has none."""
    return alg.guide(model, params, policy, s, scale) if isinstance(alg, GuidesItself) else None
