"""APD, adaptive parallel decoding: a diffusion model decides tokens from left to right, and a small autoregressive
model determines how many of them are kept in a step ("Accelerating Diffusion LLMs via Adaptive Parallel Decoding",
Israel, Van den Broeck, Grover, 2025).

One forward pass gives a distribution `p_D` at each of the next positions, and candidates are drawn from it with Gumbel
noise. The autoregressive model scores the candidates as a sequence, `p_AR`, and a token is drawn with the same noise
from the product of both, `p_D^R p_AR^(1-R)`. Candidates are kept up to the first one that differs; the first candidate
is always kept. With shared noise, two similar distributions draw the same token, so the more the models agree, the more
candidates are kept.

The rule is the paper's. The authors' code draws the product's token without noise, so it is the likeliest token at any
temperature; at temperature 0 the two are the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.diffusion.adapter import Adapter, BlockCausal, Full, Nodes
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.caching.blocks import NoCache
from decodax.algorithms.diffusion.policies import Caching, Memory
from decodax.algorithms.diffusion.rules.judged import Agreed, Judged
from decodax.algorithms.diffusion.rules.scores import Position
from decodax.algorithms.diffusion.rules.stops import EndOfText
from decodax.algorithms.diffusion.rules.windows import Sliding
from decodax.algorithms.diffusion.view import Seen, View, span
from decodax.common.options import Count, Share
from decodax.common.registry import ALGORITHMS
from decodax.core.composed import data


@dataclasses.dataclass(frozen=True)
class Product(Judged):
    """APD's judge: it agrees with a candidate if the token drawn from the product of both models is the same.

    Attributes:
        model: the autoregressive model: a `Model`, or the result of `decodax.load`.
        weight: `R`, from 0 to 1. 1 agrees with every candidate; 0 agrees only with the autoregressive model's own
            draws.
        weights: the weights of a bare `Model`. If you call `decodax.core.drivers` yourself, put them into
            `Params.draft` instead.
        chunk: number of prompt tokens in a forward pass of its prefill.
    """

    model: Any
    weight: float = 0.7
    weights: Any = data()
    chunk: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.weight <= 1:
            raise ValueError(f"weight: got {self.weight}, takes 0 to 1")

    def verdict(self, token: Array, logits: Array, own: Array, draw: Callable[[Array], Array]) -> Array:
        # 0 times -inf is no number; tokens that the diffusion model excludes are excluded from the product
        product = logits if self.weight == 1 else self.weight * jnp.where(logits == -jnp.inf, 0, logits) + \
            (1 - self.weight) * own
        return draw(jnp.where(logits == -jnp.inf, -jnp.inf, product)) == token


@dataclasses.dataclass(frozen=True)
class LimitedLookahead(Full):
    """Full attention to the text up to the window's end. The positions after it are not computed (APD's `M`)."""

    def reach(self, start: Array, width: int, end: Array) -> Array:
        return jnp.minimum(start + width, end)


@dataclasses.dataclass(frozen=True)
class Trailing(Caching):
    """APD's cache: a forward pass recomputes the tokens that the one before it decided, the `window - 1` positions
    before these, and the sampler's window. Older entries are not changed.

    Attributes:
        window: the paper's `W`, at least 1.
    """

    window: int = 16

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window: got {self.window}, takes 1 or more")

    def init(self, view: View) -> Memory:
        return view.start + 0       # start of the window in the forward before

    def learn(self, before: View, seen: Seen, after: View, memory: Memory) -> Memory:
        return before.start

    def needs_refresh(self, view: View, memory: Memory) -> Array:
        return view.refreshed < 0

    def nodes(self, view: View, left: int, memory: Memory) -> Nodes:
        W = view.positions.shape[1]
        nodes = span(view, self.window - 1 + W, W)
        return nodes.replace(live=nodes.live & (nodes.positions >= memory[:, None] - self.window + 1))

    def writes(self, view: View, positions: Array, final: Array, valid: Array, memory: Memory) -> Array:
        return (positions < view.start[:, None] - self.window + 1) & ~valid


@ALGORITHMS.register("apd", "Accelerating Diffusion LLMs via Adaptive Parallel Decoding",
                     "Israel, Van den Broeck, Grover 2025", family="masked-diffusion",
                     needs="a diffusion model and a draft model")
def apd(lm: Any, draft: Any, mixture_weight: Share = 0.7, max_lookahead: Count = 32,
        kv_window: Count | None = 16) -> MaskedDiffusion:
    """Decides tokens from left to right, in each step up to the first one with which a small autoregressive model
    disagrees.

    The diffusion model has to attend to the whole text, and share its vocabulary with the draft model. No shipped model
    does; this makes one of `pycode` and writes it to `runs/pycode-full/model`:

        python scripts/train.py diffusion --preset pycode-diffusion --block 0 --output runs/pycode-full

    Args:
        draft: loaded autoregressive model.
        mixture_weight: weight of the diffusion model in the product, the paper's R.
        max_lookahead: number of masked positions that are computed, the paper's M (theirs: 100 and more).
        kv_window: number of positions before them that are recomputed, the paper's W. None: all.
    """
    adapter = Adapter.of(lm)
    if adapter.attention.causal or isinstance(adapter.attention, BlockCausal):
        raise ValueError(f"lm: got {adapter.attention}, takes a model that sees the whole text")
    return MaskedDiffusion(dataclasses.replace(adapter, attention=LimitedLookahead()), Sliding(max_lookahead),
                           Position(), Agreed(), caching=NoCache() if kv_window is None else Trailing(kv_window),
                           verify=Product(draft, mixture_weight), stops=(EndOfText(),))
