"""A cache of hybrid models: some layers have keys and values in a cache of any kind, the others have recurrent
states."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from decodax.cache.wrapper import Combined
from decodax.common.struct import static, struct
from decodax.core.cache import Cache, Entries, PyTree
from decodax.core.capabilities import ReadPrompt, draft_view


@struct
class PerLayer(Combined):
    """One cache for the layers with keys and values, and one for the recurrent layers. Commits and row selection go to
    both.

    Attributes:
        base: the cache of the layers with keys and values.
        linear: the cache of the other layers. `LinearStates` for linear attention; `Recurrent` or `LinearRecurrent`
            for layers that pass a recurrence as the option `walk`, which calls the cache's methods.
        where: static; for each layer of the model, True if it is in `linear`, and its number in that cache.
    """

    members = ("base", "linear")

    base: Any
    linear: Any
    where: tuple[tuple[bool, int], ...] = static()

    @property
    def capacity(self) -> int:
        return self.linear.capacity

    @property
    def layers_read(self) -> int | None:
        if super().layers_read is not None:
            raise ValueError("cache: this kind reads a prompt with a model's first layers, or in a way of its own; "
                             "takes a model whose layers all have keys and values")
        return None

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, **options: Any) -> tuple[Array, PyTree]:
        linear, own = self.where[layer]
        if linear and (walk := options.get("walk")) is not None:
            return walk.run(self.linear, own, window)
        if linear:
            return self.linear.attend(own, q, k, v, window, linear=options["linear"])
        return self.base.attend(own, q, k, v, window, **options)

    def commit(self, entries: Entries, slots: Array) -> PerLayer:
        return self.replace(base=self.base.commit(self.part(entries, False), slots),
                            linear=self.linear.commit(self.part(entries, True), slots))

    def part(self, entries: Entries, linear: bool) -> list[PyTree]:
        """Returns the cache entries of some layers out of those of all layers.

        Args:
            entries: the entries of all layers of the model, in order.
            linear: True for the layers whose entries `linear` stores, False for those of `base`.
        """
        return [entry for entry, (own, _) in zip(entries, self.where, strict=True) if own == linear]

    def finish_prefill(self, prompt: ReadPrompt) -> PerLayer:
        return super().finish_prefill(_alone(prompt))

    def refresh(self, text: ReadPrompt, rows: Array) -> PerLayer:
        return super().refresh(_alone(text), rows)

    def draft_view(self, kind: Any = None) -> Cache:
        return self.replace(base=draft_view(self.base, kind))


def _alone(prompt: ReadPrompt) -> ReadPrompt:
    return ReadPrompt(model=ModelInPart(prompt.model), params=prompt.params, tokens=jnp.asarray(prompt.tokens))


class ModelInPart:
    """Replaces the model for a cache that stores only some of its layers. It gives access to the output projections
    (`outputs`) only; any other use, such as a forward pass, raises ValueError."""

    def __init__(self, model: Any):
        self.outputs = model.outputs

    def __getattr__(self, name: str) -> Any:
        raise ValueError("cache: this kind runs the model once more for its choice; takes a model whose layers all "
                         "have keys and values")
