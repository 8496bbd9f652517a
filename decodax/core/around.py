"""Methods and models around others: they forward all that they do not answer themselves."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, Self

from jax import Array

from decodax.core.cache import Cache, Feature
from decodax.core.state import State
from decodax.core.types import Algorithm, CacheKind, Decision, Model, Observer, Out, Params
from decodax.core.window import Window


class Around(Algorithm):
    """A method around another one, which it holds in a field.

    Derive a frozen dataclass, return that field from `inner`, and override what differs: every other member of
    `Algorithm` is forwarded to `inner`.
    """

    @property
    @abc.abstractmethod
    def inner(self) -> Any:
        """The method, a field of this one."""

    @property
    def emits(self) -> int:
        return self.inner.emits

    @property
    def commits(self) -> int | None:
        return self.inner.commits

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def guarantee(self) -> str:
        return self.inner.guarantee

    @property
    def canvas(self) -> bool:
        return self.inner.canvas

    @property
    def caches(self) -> bool:
        return self.inner.caches

    @property
    def prefills(self) -> bool:
        return self.inner.prefills

    @property
    def cache_needs(self) -> frozenset[Feature]:
        return self.inner.cache_needs

    @property
    def roles(self) -> dict[str, Any]:
        return self.inner.roles

    @property
    def samples(self) -> int | None:
        return self.inner.samples

    @property
    def answers(self) -> int | None:
        return self.inner.answers

    def answering(self, count: int) -> Self:
        return self._around(self.inner.answering(count))

    def outcome(self, s: State) -> State:
        return self.inner.outcome(s)

    def findings(self, s: State) -> dict[str, Array]:
        return self.inner.findings(s)

    def most_rounds(self, budget: int, rows: int) -> int:
        return self.inner.most_rounds(budget, rows)

    @property
    def variants(self) -> tuple[Algorithm, ...]:
        """The rounds of each shape, with this around them."""
        return tuple(map(self._around, self.inner.variants))

    def choose(self, params: Params, policy: Any, s: State) -> Array:
        return self.inner.choose(params, policy, s)

    @property
    def observer(self) -> Observer | None:
        return self.inner.observer

    def guide(self, model: Model, params: Params, policy: Any, s: State, scale: Any) -> tuple[Model, State] | None:
        return self.inner.guide(model, params, policy, s, scale)

    def init(self, params: Params, s: State) -> Any:
        return self.inner.init(params, s)

    def propose(self, params: Params, policy: Any, s: State) -> tuple[Window, Any]:
        return self.inner.propose(params, policy, s)

    def decide(self, params: Params, dist: Any, s: State, window: Window, out: Out, algo: Any) -> Decision:
        return self.inner.decide(params, dist, s, window, out, algo)

    def _around(self, method: Any) -> Self:
        """The same around another method; other drafts and methods in its fields stay."""
        inner = self.inner
        return self._with(lambda part: method if part is inner else part)


@dataclasses.dataclass(frozen=True)
class AroundModel(Model):
    """A model around `base`.

    Derive a frozen dataclass and override what differs: every other member of `Model` is forwarded to `base`.
    """

    base: Model

    @property
    def max_positions(self) -> int | None:
        return self.base.max_positions

    @property
    def trained_positions(self) -> int | None:
        return self.base.trained_positions

    def over(self, base: Model) -> Self:
        """The same on another network."""
        return dataclasses.replace(self, base=base)

    def with_cache(self, kind: CacheKind) -> Self:
        return self.over(self.base.with_cache(kind))

    def wrap_cache(self, wrap: Callable[[CacheKind], CacheKind]) -> Self:
        return self.over(self.base.wrap_cache(wrap))

    def fit(self, new: int) -> Self:
        fitted = self.base.fit(new)
        return self if fitted is self.base else self.over(fitted)

    def beyond(self, longest: int) -> int:
        return self.base.beyond(longest)

    def share(self, prefix: int, more: int) -> tuple[Model, Model] | None:
        pair = self.base.share(prefix, more)
        return None if pair is None else (self.over(pair[0]), self.over(pair[1]))

    def init_cache(self, batch: int, capacity: int, *, params: Any = None, inputs: Any = None) -> Cache:
        return self.base.init_cache(batch, capacity, params=params, inputs=inputs)

    def apply(self, params: Any, window: Window, cache: Cache) -> Out:
        return self.base.apply(params, window, cache)

    def outputs(self, params: Any, layer: int) -> Array:
        return self.base.outputs(params, layer)

    def embeddings(self, params: Any, tokens: Array) -> Array:
        return self.base.embeddings(params, tokens)

    def no_inputs(self, inputs: Any) -> None:
        self.base.no_inputs(inputs)


@dataclasses.dataclass(frozen=True)
class Readout(AroundModel, abc.ABC):
    """`base`, its hidden states read in another way. Cache and weights are its own."""

    @abc.abstractmethod
    def apply(self, params: Any, window: Window, cache: Cache) -> Out:
        """As `Model.apply`."""
