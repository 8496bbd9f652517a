"""Base classes of methods and models that wrap another one: they forward every member that they do not override."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, Self

from jax import Array

from decodax.core import algorithm
from decodax.core.algorithm import (
    Algorithm,
    Concludes,
    Grouped,
    GuidesItself,
    LearnsFromPrompt,
    Observer,
    Paced,
    Traits,
    Varies,
    name_of,
)
from decodax.core.cache import Cache
from decodax.core.state import State
from decodax.core.types import CacheKind, Decision, Model, Out, Params, ShowsWeights, embeddings, logits_of, outputs
from decodax.core.window import Window


class Around(LearnsFromPrompt, Varies, Grouped, Concludes, Paced, GuidesItself):
    """A method that wraps another one, which is one of its fields.

    Derive a frozen dataclass, return that field from `inner`, and override what differs. Every other member of
    `Algorithm` and of its optional capabilities is forwarded to `inner`.
    """

    @property
    @abc.abstractmethod
    def inner(self) -> Any:
        """The wrapped method, a field of this one."""

    @property
    def traits(self) -> Traits:
        return dataclasses.replace(self.inner.traits, name=name_of(self.inner))

    @property
    def prefill_observer(self) -> Observer | None:
        return algorithm.prefill_observer(self.inner)

    @property
    def variants(self) -> tuple[Algorithm, ...]:
        """One method for each shape of a round: this wrapper around each variant of the wrapped method. Empty if that
        has none."""
        return tuple(map(self._around, algorithm.variants(self.inner)))

    def choose(self, params: Params, policy: Any, s: State) -> Array:
        return self.inner.choose(params, policy, s)

    def answering(self, count: int) -> Self:
        return self._around(algorithm.answering(self.inner, count))

    def outcome(self, s: State) -> State:
        return algorithm.outcome(self.inner, s)

    def findings(self, s: State) -> dict[str, Array]:
        return algorithm.findings(self.inner, s)

    def most_rounds(self, budget: int, rows: int) -> int:
        return algorithm.most_rounds(self.inner, budget, rows)

    def guide(self, model: Model, params: Params, policy: Any, s: State, scale: Any) -> tuple[Model, State] | None:
        return algorithm.guide(self.inner, model, params, policy, s, scale)

    def init(self, params: Params, s: State) -> Any:
        return self.inner.init(params, s)

    def propose(self, params: Params, policy: Any, s: State) -> tuple[Window, Any]:
        return self.inner.propose(params, policy, s)

    def decide(self, params: Params, dist: Any, s: State, window: Window, out: Out, algo: Any) -> Decision:
        return self.inner.decide(params, dist, s, window, out, algo)

    def _around(self, method: Any) -> Self:
        """Returns this wrapper around another method; drafts and methods in its other fields are kept."""
        inner = self.inner
        return self._with(lambda part: method if part is inner else part)


class ReadsInPart(Model):
    """A model whose `apply` runs only the first layers in a prefill, for caches that ask for it
    (`decodax.core.capabilities.PromptPhase.layers_read`)."""


@dataclasses.dataclass(frozen=True)
class AroundModel(ShowsWeights):
    """A model that wraps another model, `base`.

    Derive a frozen dataclass and override what differs. Every other member of `Model` and `ShowsWeights` is forwarded
    to `base`.
    """

    base: Model

    @property
    def max_positions(self) -> int | None:
        return self.base.max_positions

    @property
    def trained_positions(self) -> int | None:
        return self.base.trained_positions

    def over(self, base: Model) -> Self:
        """Returns this wrapper around another model."""
        return dataclasses.replace(self, base=base)

    @property
    def cache_kind(self) -> CacheKind | None:
        return self.base.cache_kind

    def with_cache(self, kind: CacheKind) -> Self:
        return self.over(self.base.with_cache(kind))

    def init_cache(self, batch: int, capacity: int, *, params: Any = None, inputs: Any = None) -> Cache:
        return self.base.init_cache(batch, capacity, params=params, inputs=inputs)

    def apply(self, params: Any, window: Window, cache: Cache) -> Out:
        return self.base.apply(params, window, cache)

    def outputs(self, params: Any, layer: int) -> Array:
        return outputs(self.base, params, layer)

    def embeddings(self, params: Any, tokens: Array) -> Array:
        return embeddings(self.base, params, tokens)

    def logits(self, params: Any, hidden: Array) -> Array:
        return logits_of(self.base, params, hidden)


def reads_in_part(model: Any) -> bool:
    """Returns True if a model, or the one that it wraps (`AroundModel`), is a `ReadsInPart`."""
    while isinstance(model, AroundModel):
        model = model.base
    return isinstance(model, ReadsInPart)


@dataclasses.dataclass(frozen=True)
class Readout(AroundModel, abc.ABC):
    """A model that computes its output from the hidden states of `base` in another way; cache and weights are those of
    `base`."""

    @abc.abstractmethod
    def apply(self, params: Any, window: Window, cache: Cache) -> Out:
        """Runs `base` on the window and computes this class's logits from its hidden states.

        Args:
            params: the weights.
            window: the tokens to score.
            cache: the cache, which is not written.

        Returns:
            The output. The logits of node `w` predict the token after it.
        """


class PairedReadout(Readout):
    """A `Readout` whose weights are a pair: those of `base`, and others."""

    def init_cache(self, batch: int, capacity: int, *, params: Any = None, inputs: Any = None) -> Cache:
        return self.base.init_cache(batch, capacity, params=None if params is None else params[0], inputs=inputs)

    def outputs(self, params: Any, layer: int) -> Array:
        return super().outputs(params[0], layer)

    def embeddings(self, params: Any, tokens: Array) -> Array:
        return super().embeddings(params[0], tokens)

    def logits(self, params: Any, hidden: Array) -> Array:
        return super().logits(params[0], hidden)
