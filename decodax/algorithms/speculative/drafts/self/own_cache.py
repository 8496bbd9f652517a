"""Drafting with the target itself on a smaller cache: a part of the tokens, or fewer bits.

`OwnCache(lm, kind)` has the target keep a second cache of that kind beside its own (`decodax.cache.views`), or one of
which drafts read a part (QuantSpec's halves). A round's drafts attend to that, the verification to all. Nothing but
what was verified is ever written to either, so none of the buffers is needed that engines keep for drafts.

MagicDec (Sadhukhan et al. 2024) drafts with SnapKV's choice of a prompt, or with sinks and a window, and with all
tokens that follow; QuantSpec (Tiwari et al. 2025) with 4 of 8 bits, and weights of 4 bits.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp

from decodax.algorithms.speculative.source import Answer, Level, Source
from decodax.cache import dense
from decodax.cache.views import WithView
from decodax.common.struct import short
from decodax.core.cache import Cache, CacheConfig, Draftable, Feature
from decodax.core.loaded import network_of
from decodax.core.state import State
from decodax.core.types import Decision, Model, Out, Params
from decodax.core.window import Window, causal
from decodax.sampling.guidance import GuidedCache


@dataclasses.dataclass(frozen=True)
class OwnCache(Source):
    """Drafts from the target on a smaller view of its cache.

    Attributes:
        model: the target: a `Model`, or what `decodax.load` gave. Weights are `Params.target`.
        kind: the kind of cache that drafts read beside the target's own; or with `alone` one for both, whose `view`
            drafts read.
        alone: whether `kind` takes the place of the target's cache.
        packed: the target with other weights to draft with, as `decodax.quantize` gives it; None: its own.
        weights: those, if `packed` is a bare `Model`.
    """

    __repr__ = short

    model: Any
    kind: Any
    alone: bool = False
    packed: Any = None
    weights: Any = dataclasses.field(default=None, compare=False, repr=False)
    cache_needs: ClassVar[frozenset[Feature]] = frozenset()

    def __post_init__(self) -> None:
        if isinstance(self.kind, CacheConfig) and not isinstance(self.model, Model):
            object.__setattr__(self, "kind", self.kind.of_model(self.model))
        object.__setattr__(self, "model", network_of(self.model)[0])
        if self.packed is not None:
            network, weights = network_of(self.packed)      # the network is static, its weights are data
            object.__setattr__(self, "packed", network)
            object.__setattr__(self, "weights", self.weights if weights is None else weights)

    @property
    def exact(self) -> bool:
        return not self.alone

    def bare(self) -> OwnCache:
        return dataclasses.replace(self, weights=None)

    def fit(self, budget: int) -> OwnCache:
        fits = isinstance(self.kind, CacheConfig)
        return dataclasses.replace(self, kind=self.kind.fit(1 << (budget - 1).bit_length())) if fits else self

    def through(self, model: Any) -> Any:
        return model.wrap_cache(self._kind)

    def _kind(self, own: Any) -> Any:
        if not self.alone:      # of several drafts that read a cache of one kind it stands there once
            return own if isinstance(own, WithView) and own.holds(self.kind) else WithView(self.kind, own)
        if own not in (dense, self.kind):
            raise ValueError(f"cache: got {own}, but the method brings a cache of its own; takes none")
        return self.kind

    def start(self, params: Params, s: State, state: Any, room: int) -> tuple[Draftable, Answer]:
        view = self._view(s)
        out = self._apply(params, causal(s.newest[:, None], s.length - 1), view)
        scratch = view.scratch(out.entries, 1 + room)
        scratch = scratch.append(out.entries, s.length[:, None] - 1, jnp.zeros((), jnp.int32))
        return scratch.replace(base=None), Answer(out.logits(), out.hidden)

    def extend(self, params: Params, s: State, state: Draftable, level: Level) -> tuple[Draftable, Answer]:
        sees = jnp.pad(level.sees, ((0, 0), (0, 0), (1, 0)), constant_values=True)   # all stand below the newest token
        window = Window(tokens=level.tokens, positions=level.positions, mask=level.inside,
                        live=jnp.ones(level.tokens.shape, bool))
        out = self._apply(params, window, state.replace(base=self._view(s)).seen_by(sees))
        return state.append(out.entries, level.positions, level.at + 1), Answer(out.logits(), out.hidden)

    def observe(self, s: State, window: Window, out: Out, decision: Decision | None, state: Any) -> None:
        return None

    def _apply(self, params: Params, window: Window, cache: Any) -> Out:
        if self.packed is None:
            return self.model.apply(params.target, window, cache)
        return self.packed.apply(params.draft, window, cache)

    def _view(self, s: State) -> Cache:
        """What drafts read of the target's cache; under guidance of that of the branch with the prompt."""
        cache: Cache = s.cache.conditional if isinstance(s.cache, GuidedCache) else s.cache
        return cache.view if self.alone else cache.view_of(self.kind)
