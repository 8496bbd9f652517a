"""A second, autoregressive model that judges the candidates of a diffusion model (APD, FlashDLM).

The text is decided from left to right. Candidates are kept up to the first one on which the models disagree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.algorithms.diffusion.policies import Memory, Unmask
from decodax.algorithms.diffusion.rules.defaults import Sequential
from decodax.algorithms.diffusion.view import Seen, View
from decodax.common.axes import constrain
from decodax.common.struct import Struct, struct
from decodax.core import keys
from decodax.core.cache import Cache, Entries
from decodax.core.checks import draft_weights
from decodax.core.keys import Purpose
from decodax.core.loaded import network_of
from decodax.core.mesh import heads
from decodax.core.state import State
from decodax.core.types import INVALID, Params
from decodax.core.window import causal
from decodax.sampling.draw import draw


@struct
class Assistant(Struct):
    """State of the second, autoregressive model of a `Judged` rule.

    Attributes:
        cache: its cache, with entries for all final tokens of each row except the last.
    """

    cache: Cache


class Judged(Sequential):
    """Base of rules by which a second, autoregressive model with the same tokenizer judges the candidates
    (`Seen.agreed`). Implement `verdict`.

    Attributes:
        model: the second model: a `Model`, or the result of `decodax.load`.
        weights: the weights of a bare `Model`.
        chunk: number of prompt tokens in a forward pass of its prefill.
    """

    model: Any
    weights: Any
    chunk: int
    assists = True

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise ValueError(f"chunk: got {self.chunk}, takes 1 or more")
        network, weights = network_of(self.model)       # the network is static, its weights are data
        object.__setattr__(self, "model", network)
        object.__setattr__(self, "weights", self.weights if weights is None else weights)

    def begin(self, params: Params, s: State, slots: int) -> Assistant:
        """Returns the second model's state after it has processed the prompts, except for their last tokens. `slots` is
        the capacity of its cache; its weights are `params.draft`."""
        draft_weights(params.draft, self, what="model's weights")
        cache = self.model.init_cache(s.batch, slots, params=params.draft)
        chunk = min(self.chunk, s.tokens.shape[1])

        def visit(i: Array, cache: Any) -> Any:
            # the buffer's end may cut the last chunk short: it then starts earlier
            start = jnp.minimum(i * chunk, s.tokens.shape[1] - chunk)
            positions = start + jnp.arange(chunk, dtype=jnp.int32)
            live = (positions < s.prompt_length[:, None] - 1) & (positions >= i * chunk)
            tokens = lax.dynamic_slice_in_dim(s.tokens, start, chunk, 1)
            out = self.model.apply(params.draft, causal(tokens, jnp.broadcast_to(start, (s.batch,)), live), cache)
            return cache.commit(out.entries, jnp.where(live & jnp.isfinite(out.hidden).all(-1), positions, -1))

        chunks = (jnp.max(s.prompt_length) - 1 + chunk - 1) // chunk
        return Assistant(cache=lax.fori_loop(0, chunks, visit, constrain(cache, heads(cache))))

    def judge(self, weights: Any, state: Assistant, view: View, last: Array, logits: Array,
              process: Callable[[Array], Array]) -> tuple[Array, Array, Entries]:
        """Returns the candidates, `i32[B, W]`, a mask of those with which the second model agrees, `bool[B, W]`, and
        its entries of the positions from `start - 1` on.

        Args:
            weights: weights of the second model.
            state: its state.
            view: the windows.
            last: `i32[B]`, the token before the window.
            logits: `f32[B, W, V]`, logits of the diffusion model.
            process: the policy's chain of transforms at the window's positions.
        """
        V = logits.shape[-1]
        address = keys.addresses(view.key, view.positions, Purpose.CANVAS, view.round)
        pick = lambda x: draw(process(x), address)
        token = pick(logits)
        text = jnp.where(view.open, jnp.maximum(token, 0), view.tokens)
        window = causal(jnp.concatenate([last[:, None], text[:, :-1]], 1), view.start - 1, view.inside)
        out = self.model.apply(weights, window, state.cache)
        own = out.logits()
        own = jnp.pad(own, ((0, 0), (0, 0), (0, max(V - own.shape[-1], 0))), constant_values=-jnp.inf)[..., :V]
        broken = jnp.isnan(own).any(-1)
        token, verdict = jnp.where(broken, jnp.minimum(token, INVALID), token), self.verdict(token, logits, own, pick)
        return token, verdict, out.entries

    def verdict(self, token: Array, logits: Array, own: Array, draw: Callable[[Array], Array]) -> Array:
        """Returns a mask of the candidates with which the second model agrees, `bool[B, W]`.

        Args:
            token: `i32[B, W]`, the candidates.
            logits: `f32[B, W, V]`, logits of the diffusion model.
            own: `f32[B, W, V]`, logits of the second model.
            draw: draws tokens from given logits by the policy, with the noise that drew the candidates.
        """
        raise NotImplementedError

    def settle(self, state: Assistant, entries: Entries, begun: Array, start: Array) -> Assistant:
        """Returns the state after a step, with the entries of newly final tokens written.

        Args:
            state: the state before.
            entries: entries of the second model, from `judge`.
            begun, start: `i32[B]`, start of the window before and after the step.
        """
        positions = begun[:, None] - 1 + jnp.arange(jax.tree.leaves(entries)[0].shape[1], dtype=jnp.int32)
        true = (positions >= 0) & (positions < start[:, None] - 1)
        return Assistant(cache=state.cache.commit(entries, jnp.where(true, positions, -1)))


@dataclasses.dataclass(frozen=True)
class Agreed(Unmask):
    """Unmasks the first open position, and the following ones up to the first on which the models disagree.

    Attributes:
        go_on: if the models disagree on the first position, True continues after it (APD), False ends there (FlashDLM).
    """

    go_on: bool = True

    def __call__(self, view: View, seen: Seen, score: Array, memory: Memory) -> Array:
        assert seen.agreed is not None
        first = jnp.cumsum(view.active, 1) == 1
        agreed = seen.agreed | ~view.active
        return first | jnp.cumprod(agreed | (first & self.go_on), 1).astype(bool)
