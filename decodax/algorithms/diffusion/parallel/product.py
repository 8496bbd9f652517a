"""Adaptive parallel decoding, APD (Israel, Van den Broeck, Grover 2025): a diffusion model writes from left to right,
and a small autoregressive model decides how many of its tokens are kept at once.

One forward gives a distribution `p_D` at each of the next positions, and candidates are drawn from it with Gumbel
noise. The autoregressive model scores the candidates as a sequence, `p_AR`, and a token is drawn with the same noise
from the product of both, `p_D^R p_AR^(1-R)`. Candidates are kept up to the first one that differs; the first candidate
is always kept. With shared noise two similar distributions draw the same token, so the run is longer the more the
models agree.

The rule is the paper's. The authors' code draws the product's token without noise, so it is a token of largest
probability at any temperature; at temperature 0 the two are the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.algorithms.diffusion.adapter import Full, Nodes
from decodax.algorithms.diffusion.parallel.branches import Sequential
from decodax.algorithms.diffusion.policies import Caching, Memory, Seen, Unmask, View, span
from decodax.common.axes import constrain
from decodax.common.struct import Struct, struct
from decodax.core import keys
from decodax.core.cache import Cache, Entries
from decodax.core.keys import Purpose
from decodax.core.loaded import network_of
from decodax.core.mesh import heads
from decodax.core.state import State
from decodax.core.types import INVALID, Params
from decodax.core.window import causal
from decodax.sampling.draw import draw


@struct
class Assistant(Struct):
    """The state of the second model. `cache`: its entries of all final tokens but the last."""

    cache: Cache


class Judged(Sequential):
    """Base of rules by which a second, autoregressive model with the same tokenizer judges the candidates
    (`Seen.agreed`). Subclasses define `verdict`; their attributes include `model`, `weights` and `chunk`, as in
    `Product`."""

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

    def bare(self) -> Any:
        return dataclasses.replace(self, weights=None)      # type: ignore[call-arg]

    def begin(self, params: Params, s: State, slots: int) -> Assistant:
        """Puts the prompts, except for their last tokens, into a cache of `slots`."""
        if params.draft is None:
            raise ValueError(f"params: {type(self).__name__} needs its model's weights in Params.draft")
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
        """The candidates `i32[B, W]`, which of them the second model agrees to `bool[B, W]`, and its entries of the
        positions `start - 1 ..`.

        Args:
            weights: the second model's.
            last: `i32[B]` the token before the region. logits: `f32[B, W, V]` the diffusion model's.
            process: the policy's chain of transforms at the region's positions.
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
        """`bool[B, W]`: whether the second model agrees to the candidates `token`.

        Args:
            logits, own: `f32[B, W, V]` of the diffusion model and of the second model.
            draw: the policy's token from given logits, with the noise that drew the candidates.
        """
        raise NotImplementedError

    def settle(self, state: Assistant, entries: Entries, begun: Array, start: Array) -> Assistant:
        """Writes the entries of newly final tokens, after a step that moved the region from `begun` to `start`
        (`i32[B]`)."""
        positions = begun[:, None] - 1 + jnp.arange(jax.tree.leaves(entries)[0].shape[1], dtype=jnp.int32)
        true = (positions >= 0) & (positions < start[:, None] - 1)
        return Assistant(cache=state.cache.commit(entries, jnp.where(true, positions, -1)))


@dataclasses.dataclass(frozen=True)
class Product(Judged):
    """APD's judge: it agrees if the token drawn from the product of both models is the candidate.

    Attributes:
        model: a `Model`, or what `decodax.load` returns.
        weight: `R`, 0 to 1. 1 agrees with everything; 0 agrees only with the autoregressive model's own draws.
        weights: the model's weights, if it is a bare `Model`; at low level they go into `Params.draft` instead.
        chunk: prompt tokens a forward when the model begins.
    """

    model: Any
    weight: float = 0.7
    weights: Any = dataclasses.field(default=None, compare=False, repr=False)
    chunk: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.weight <= 1:
            raise ValueError(f"weight: got {self.weight}, takes 0 to 1")

    def verdict(self, token: Array, logits: Array, own: Array, draw: Callable[[Array], Array]) -> Array:
        # 0 times -inf is no number, and what the diffusion model cannot say the product cannot either
        product = logits if self.weight == 1 else self.weight * jnp.where(logits == -jnp.inf, 0, logits) + \
            (1 - self.weight) * own
        return draw(jnp.where(logits == -jnp.inf, -jnp.inf, product)) == token


@dataclasses.dataclass(frozen=True)
class GuidedDiffusion(Judged):
    """Guided diffusion (FlashDLM, Hu et al. 2025): an autoregressive model agrees to the tokens that it finds likeliest
    itself.

    Attributes:
        model, weights, chunk: as in `Product`.
        top: the number of likeliest tokens that are accepted; 1 is the authors' "deterministic" rule, more is their
            "topk".
        relative: the least probability of an accepted token, as a share of the likeliest one's ("topk_relative").
    """

    model: Any
    top: int = 1
    relative: float = 0.0
    weights: Any = dataclasses.field(default=None, compare=False, repr=False)
    chunk: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top < 1:
            raise ValueError(f"top: got {self.top}, takes 1 or more")
        if not 0 <= self.relative <= 1:
            raise ValueError(f"relative: got {self.relative}, takes 0 to 1")

    def verdict(self, token: Array, logits: Array, own: Array, draw: Callable[[Array], Array]) -> Array:
        likelihood = jnp.take_along_axis(own, jnp.maximum(token, 0)[..., None], -1)
        # the mask token, which the diffusion model cannot say, has no place in the list
        listed = jnp.where(logits > -jnp.inf, own, -jnp.inf)
        near = likelihood[..., 0] >= listed.max(-1) + jnp.log(jnp.float32(self.relative))
        return ((listed > likelihood).sum(-1) < self.top) & near


@dataclasses.dataclass(frozen=True)
class Agreed(Unmask):
    """The first open position, and those that follow it up to the first on which the models disagree.

    Attributes:
        go_on: if the models disagree on the first position, the run still continues behind it (APD); False: it ends
            there (FlashDLM).
    """

    go_on: bool = True

    def __call__(self, view: View, seen: Seen, score: Array, memory: Memory) -> Array:
        assert seen.agreed is not None
        first = jnp.cumsum(view.active, 1) == 1
        agreed = seen.agreed | ~view.active
        return first | jnp.cumprod(agreed | (first & self.go_on), 1).astype(bool)


@dataclasses.dataclass(frozen=True)
class LimitedLookahead(Full):
    """Full attention to the text up to the region's end. The positions behind it are not scored (APD's `M`)."""

    def reach(self, start: Array, width: int, end: Array) -> Array:
        return jnp.minimum(start + width, end)


@dataclasses.dataclass(frozen=True)
class Trailing(Caching):
    """APD's cache: a forward recomputes what the one before it decided, the `window - 1` positions before that, and the
    region. Older entries stay as they were computed last.

    Attributes:
        window: `W`, 1 or more.
    """

    window: int = 16

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window: got {self.window}, takes 1 or more")

    def init(self, view: View) -> Memory:
        return view.start + 0       # where the region began in the forward before

    def learn(self, before: View, seen: Seen, after: View, memory: Memory) -> Memory:
        return before.start

    def stale(self, view: View, memory: Memory) -> Array:
        return view.refreshed < 0

    def nodes(self, view: View, left: int, memory: Memory) -> Nodes:
        W = view.positions.shape[1]
        nodes = span(view, self.window - 1 + W, W)
        return nodes.replace(live=nodes.live & (nodes.positions >= memory[:, None] - self.window + 1))

    def writes(self, view: View, positions: Array, final: Array, valid: Array, memory: Memory) -> Array:
        return (positions < view.start[:, None] - self.window + 1) & ~valid
