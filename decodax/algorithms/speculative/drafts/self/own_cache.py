"""Drafting with the target itself and a smaller cache, with fewer tokens or fewer bits.

With `OwnCache(kind)` the target has a second cache of that configuration beside its own (`decodax.cache.views`), or
one cache of which drafts use a part (QuantSpec). Drafts attend to the smaller cache, and the verification to the
complete one. Only verified tokens are written to either, so no buffers for drafts are needed. MagicDec, TriForce and
QuantSpec are built from this class.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax

from decodax.algorithms.speculative.drafts.self.self_draft import SelfDraft, conditional
from decodax.algorithms.speculative.source import Answer, Level
from decodax.cache import dense
from decodax.cache.views import WithView
from decodax.common.struct import short
from decodax.core.cache import Cache, CacheConfig, Feature
from decodax.core.capabilities import Draftable, check_drafts, draft_view
from decodax.core.composed import data
from decodax.core.loaded import Loaded, network_of
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params, wrap_cache
from decodax.core.window import Window


@dataclasses.dataclass(frozen=True)
class OwnCache(SelfDraft):
    """Drafts with the target and a smaller view of its cache.

    Attributes:
        kind: configuration of the cache for drafts, beside the target's own. With `alone`: of one cache for both, of
            which drafts use the view.
        alone: True: `kind` replaces the target's cache.
        packed: the target with other weights for drafting, such as a result of `decodax.quantize`; None: its own
            weights.
        weights: weights of `packed`, if that is a bare `Model`.
    """

    __repr__ = short

    kind: Any
    alone: bool = False
    packed: Any = None
    weights: Any = data()
    cache_needs: ClassVar[frozenset[Feature]] = frozenset()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.packed is not None:
            network, weights = network_of(self.packed)      # the network is static, its weights are data
            object.__setattr__(self, "packed", network)
            object.__setattr__(self, "weights", self.weights if weights is None else weights)

    @property
    def exact(self) -> bool:
        return not self.alone

    def for_target(self, model: Any) -> OwnCache:
        new = super().for_target(model)
        if self.target is None and isinstance(model, Loaded) and isinstance(new.kind, CacheConfig):
            new = dataclasses.replace(new, kind=new.kind.of_model(model))
        return new

    def with_length(self, budget: int) -> OwnCache:
        fits = isinstance(self.kind, CacheConfig)
        return dataclasses.replace(self, kind=self.kind.with_length(1 << (budget - 1).bit_length())) if fits else self

    def wrap_model(self, model: Any) -> Any:
        return wrap_cache(model, self._kind)

    def _kind(self, own: Any) -> Any:
        if not self.alone:      # several drafts that read a cache of one kind share it
            return own if isinstance(own, WithView) and own.holds(self.kind) else WithView(self.kind, own)
        if isinstance(own, WithView):
            return dataclasses.replace(own, base=self._kind(own.base))
        if own not in (dense, self.kind):
            raise ValueError(f"cache: got {own}, but the method brings a cache of its own; takes none")
        return self.kind

    def check_fit(self, model: Any, cache: Any) -> None:
        check_drafts(jax.eval_shape(lambda: draft_view(cache, None if self.alone else self.kind)))

    def start(self, params: Params, s: State, state: Any, room: int) -> tuple[Draftable, Answer]:
        buffer, out = self.run_root(params, s, state, room)
        return buffer, Answer(out.logits(), out.hidden)

    def extend(self, params: Params, s: State, state: Draftable, level: Level) -> tuple[Draftable, Answer]:
        buffer, out = self.run_level(params, s, state, state, level)
        return buffer, Answer(out.logits(), out.hidden)

    def observe(self, params: Params, s: State, window: Window, out: Out, decision: Decision | None,
                state: Any) -> None:
        return None

    def forward(self, params: Params, window: Window, cache: Any, keep: Any) -> Out:
        if self.packed is None:
            return super().forward(params, window, cache, keep)
        return self.packed.apply(params.draft, window, cache)

    def view(self, s: State) -> Cache:
        return draft_view(conditional(s), None if self.alone else self.kind)
