"""Recurrences over the nodes of a window, as layers pass them to their caches, and the states before a text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from decodax.cache import ConvInputs, LinearRecurrent
from decodax.cache.recurrence import chained
from decodax.cache.recurrent import Along, Step, stepped
from decodax.models.compressed.options import Pooling
from decodax.models.recurrent.options import GatedDelta, ShortConv, Ssd
from decodax.models.residual.options import HashedNGrams

Inputs = tuple[Array, ...]
"""Inputs of a convolution."""


class Terms(NamedTuple):
    """The inputs `q`, `k`, `v`, `decay` and `rate` of a linear recurrence, as `LinearRecurrent.recur` takes them, and
    `skip`, `f32[B, W, H, P]`, which is added to the outputs of the recurrence; None: nothing."""

    q: Array
    k: Array
    v: Array
    decay: Array
    rate: Array | None = None
    skip: Array | None = None

    def skipped(self, y: Array) -> Array:
        return y if self.skip is None else y + self.skip


@dataclasses.dataclass(frozen=True)
class LinearWalk:
    """A short causal convolution and the linear recurrence whose inputs are computed from it: a part of a recurrent
    block that runs on a window with a cache (`run`) or on whole texts (`over_text`).

    Attributes:
        rule: options of the block.
        x: inputs of the convolution, arrays `f[B, W, ...]` with the shapes of `rule.rings`.
        terms: returns the inputs of the recurrence from those of the convolution, the farthest first, each like `x`.
    """

    rule: GatedDelta | Ssd
    x: Inputs
    terms: Callable[[list[Inputs]], Terms]

    def run(self, cache: Any, layer: int, window: Any) -> tuple[Array, Any]:
        """Returns the outputs `f32[B, W, H, P]` for the nodes of `window`, and what is to be committed to the cache.
        `layer` is the number of the block among those with a state in `cache`, which has the state before the window.
        """
        terms = self.terms(_before(cache, layer, self.x, window))
        y, entry = cache.recur(layer, terms.q, terms.k, terms.v, terms.decay, self.x, window,
                               chunk=self.rule.chunk or 64, rate=terms.rate)
        return terms.skipped(y), entry

    def over_text(self) -> Array:
        """Returns the outputs `f32[B, T, H, P]` for all tokens of texts, from an empty state and without a cache."""
        B, T, *_ = self.x[0].shape
        terms, state = self.terms(_shifted(self.x, self.rule.conv)), jnp.zeros((B, *self.rule.state_shape), jnp.float32)
        y, _ = chained(state, terms.q, terms.k, terms.v, terms.decay, jnp.ones((B, T), bool), self.rule.chunk or 64,
                       terms.rate)
        return terms.skipped(y)


@dataclasses.dataclass(frozen=True)
class ConvWalk:
    """A short causal convolution without a recurrence after it; it runs like a `LinearWalk`.

    Attributes:
        rule: options of the block.
        x: inputs of the convolution, an array `f[B, W, C]`.
        convolve: returns the outputs `f[B, W, C]` from the inputs, the farthest first, each like `x`.
    """

    rule: ShortConv
    x: Inputs
    convolve: Callable[[list[Inputs]], Array]

    def run(self, cache: Any, layer: int, window: Any) -> tuple[Array, Any]:
        """Returns the outputs `f[B, W, C]` for the nodes of `window`, and what is to be committed to the cache. `layer`
        is the number of the block among those with a state in `cache`."""
        return self.convolve(_before(cache, layer, self.x, window)), ConvInputs(inputs=self.x)

    def over_text(self) -> Array:
        """Returns the outputs `f[B, T, C]` for all tokens of texts, without a cache; inputs before a text are zeros."""
        return self.convolve(_shifted(self.x, self.rule.conv))


@dataclasses.dataclass(frozen=True)
class StepWalk:
    """A recurrence that is computed token by token, with a state for each node of a window; it runs like a
    `LinearWalk`.

    Attributes:
        step: maps a state and the input of a node to the state after it and its output; see `Recurrent.walk`.
        x: inputs of all nodes, arrays `[B, W, ...]`.
        empty: the state before a text.
        along: a faster function for nodes that follow one another, as `Recurrent.walk` takes it; None: `step` runs for
            each.
    """

    step: Step
    x: Any
    empty: Any
    along: Along | None = None

    def run(self, cache: Any, layer: int, window: Any) -> tuple[Array, Any]:
        """Returns the outputs for the nodes of `window`, and what is to be committed to the cache. `layer` is the
        number of the block among those with a state in `cache`."""
        return cache.walk(layer, self.step, self.x, window, self.along)

    def over_text(self) -> Array:
        """Returns the outputs for all tokens of texts, beginning with the state `empty`, without a cache."""
        live = jnp.ones(jax.tree.leaves(self.x)[0].shape[:2], bool)
        if self.along is not None:
            return self.along(self.empty, self.x, live)[1]
        return stepped(self.step, self.empty, self.x, live)[0]


def _before(cache: Any, layer: int, x: Inputs, window: Any) -> list[Inputs]:
    """Returns the convolution's inputs at the nearest ancestors of each node, the farthest first, and at the node."""
    past = cache.before(layer, x, window)
    return [*(tuple(part[:, :, i] for part in past) for i in range(past[0].shape[2])), x]


def _shifted(x: Inputs, conv: int) -> list[Inputs]:
    """Returns the same for whole texts, before which there are zeros."""
    whole = [jnp.pad(part, ((0, 0), (conv - 1, 0), *[(0, 0)] * (part.ndim - 2))) for part in x]
    return [tuple(part[:, i:i + x[0].shape[1]] for part in whole) for i in range(conv)]


def linear_block_states(rules: Sequence[GatedDelta | ShortConv | Ssd | Pooling | HashedNGrams], batch: int,
                        capacity: int, dtype: jax.typing.DTypeLike, inputs: Any) -> LinearRecurrent:
    """Returns the empty states of layers with a convolution and a linear recurrence, or a convolution alone, and
    of embeddings of n-grams; `inputs` are `Cache.inputs`."""
    def ring(r: Any) -> Inputs:
        if isinstance(r, HashedNGrams):       # the last tokens, and the last inputs of the convolution
            return jnp.full((batch, r.size - 1), r.stop, jnp.int32), jnp.zeros((batch, r.span, *r.streams), dtype)
        return tuple(jnp.zeros((batch, r.conv - 1, *shape), dtype) for shape in r.rings)

    return LinearRecurrent(
        rings=tuple(map(ring, rules)),
        states=tuple(None if isinstance(r, HashedNGrams) or r.state_shape is None else
                     jnp.zeros((batch, *r.state_shape), jnp.float32) for r in rules),
        length=jnp.zeros(batch, jnp.int32), size=capacity, given=inputs,
        # of residual streams, each of which a device has whole
        replicated=tuple(i for i, r in enumerate(rules) if isinstance(r, HashedNGrams)))
