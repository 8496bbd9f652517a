"""KNN-SSD: skips the layers that the sample domain nearest to the prompt does not need ("KNN-SSD: Enabling Dynamic
Self-Speculative Decoding via Nearest Neighbor Layer Set Optimization", Song et al., 2025).

The layers that a draft does not need depend on the domain. Anchors are sample prompts: each has a vector, the mean of
the target's last hidden states, and a set of half layers (attention or MLP) that its domain can skip. The anchor whose
vector has the largest cosine with that of a new prompt gives the set for all drafts of the answer.

Each row has its own set, so its drafts do not depend on the other rows of the batch. But only half layers that every
row skips save time, so batches of one domain draft fastest. The prompt's last token, which opens the first window, is
not part of its vector.

`fit_anchors` finds anchors and sets on the host. The paper searches sets by Bayesian optimisation of the measured
speed; here the search is greedy, by agreement with the complete target. Anchors from another procedure can be given as
an `Anchors`, too.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafts.self.self_draft import SkipsLayers, layered
from decodax.algorithms.speculative.fixed_trees import Chain
from decodax.algorithms.speculative.source import Answer
from decodax.common.options import Count
from decodax.common.registry import ALGORITHMS
from decodax.common.struct import Struct, struct
from decodax.core.capabilities import Draftable
from decodax.core.checks import draft_weights
from decodax.core.composed import data
from decodax.core.loaded import network_of
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params
from decodax.core.window import Window
from decodax.sampling.draw import first_argmax


@struct
class Anchors(Struct):
    """Sample prompts ("anchors"), with the parts of the target's `L` layers that draft for prompts near them.

    Attributes:
        vectors: `f32[A, D]`, a vector for each of the `A` prompts, by which the nearest one is found.
        keep: `bool[A, L, 2]`, for each layer whether its attention and whether its MLP runs while drafting.
    """

    vectors: Array
    keep: Array

    def nearest(self, vector: Array) -> Array:
        """Returns the index of the anchor with the largest cosine similarity to each vector (`f32[B, D]`): `i32[B]`,
        the smallest index of equally near ones."""
        unit = self.vectors / jnp.maximum(jnp.linalg.norm(self.vectors, axis=1, keepdims=True), 1e-30)
        return jnp.argmax(vector @ unit.T, 1).astype(jnp.int32)


@struct
class Matched(Struct):
    """State of `KNNSkip`.

    Attributes:
        vector: `f32[B, D]`, sum of the prompt's hidden states.
        keep: within a round, `bool[B, L, 2]`, the half layers that draft.
        buffer: within a round, keys and values of the tree's nodes.
    """

    vector: Array
    keep: Array | None = None
    buffer: Draftable | None = None


@dataclasses.dataclass(frozen=True)
class KNNSkip(SkipsLayers):
    """Drafts with the target without the layers that the nearest anchor skips (Song et al., 2025).

    Attributes:
        weights: the anchors. If you call `decodax.core.drivers` yourself, put them into `Params.draft`.
    """

    weights: Anchors | None = data()

    @property
    def prefill_observer(self) -> KNNSkip:
        return self

    def init(self, params: Params, s: State) -> Matched:
        c, given = self.model.config, draft_weights(params.draft, self, Anchors)
        if given.vectors.shape[1:] != (c.width,) or given.keep.shape != (len(given.vectors), self.model.depth, 2):
            raise ValueError(f"anchors: got vectors {given.vectors.shape} and keep {given.keep.shape}, takes "
                             f"(A, {c.width}) and (A, {self.model.depth}, 2)")
        return Matched(vector=jnp.zeros((s.batch, c.width), jnp.float32))

    def start(self, params: Params, s: State, state: Matched, room: int) -> tuple[Matched, Answer]:
        keep = params.draft.keep[params.draft.nearest(state.vector)] & s.running[:, None, None]
        return super().start(params, s, state.replace(keep=keep), room)

    def running(self, s: State, state: Matched) -> Array:
        assert state.keep is not None
        return state.keep

    def observe(self, params: Params, s: State, window: Window, out: Out, decision: Decision | None,
                state: Matched) -> Matched:
        if decision is not None:
            return Matched(vector=state.vector)
        # dead nodes may hold anything
        hidden = jnp.where(window.live[..., None], out.hidden.astype(jnp.float32), 0)
        return Matched(vector=state.vector + hidden.sum(1))


def fit_anchors(model: Any, domains: Sequence[Sequence[Sequence[int]]], params: Any = None, *, per_domain: int = 10,
                skips: int | None = None, length: int = 5) -> Anchors:
    """Fits anchors and their sets of half layers to sample prompts.

    In each domain, the `per_domain` prompts nearest to their mean direction become anchors. The set of a domain is
    found by a greedy search. Starting from the complete network, it drops in each step the half layer without which
    most next tokens of the samples stay the same as those of the complete network, until `skips` half layers are
    dropped. Of all sets on this path, the result is the one with the most expected tokens for its cost, `(1 + a + ... +
    a^length) / (length * share of half layers that run + 1)`, where `a` is the share of equal tokens. This takes about
    `2 L * skips` forward passes over the domain's samples.

    Args:
        model: a `Transformer`, or the result of `decodax.load`.
        domains: sample prompts of each domain, as token ids; at least two tokens in each prompt.
        params: the weights of a bare `Transformer`.
        per_domain: `k`, number of anchors of each domain.
        skips: largest number of half layers to skip, of `2 L`; None: half of them.
        length: the draft length that you will use.

    Raises:
        ValueError: no domain, a domain without prompts, a prompt of one token, or a number out of range.
    """
    network, own = layered(model), network_of(model)[1]
    weights, L = params if own is None else own, network.depth
    skips = L if skips is None else skips
    if not domains or not all(domains):
        raise ValueError(f"domains: got {[len(d) for d in domains]} prompts, takes one or more in each domain")
    if (short := min(len(p) for d in domains for p in d)) < 2:
        raise ValueError(f"domains: got a prompt of {short} tokens, takes at least 2")
    if not 0 <= skips < 2 * L:
        raise ValueError(f"skips: got {skips}, takes 0 to {2 * L - 1}")
    for name, value in (("per_domain", per_domain), ("length", length)):
        if value < 1:
            raise ValueError(f"{name}: got {value}, takes at least 1")
    T = max(len(p) for d in domains for p in d)
    vectors, keeps = [], []
    for prompts in domains:
        tokens = np.zeros((len(prompts), T), np.int32)
        for row, given in zip(tokens, prompts, strict=True):
            row[:len(given)] = given
        sizes = np.array([len(p) for p in prompts], np.int32)
        everything = np.ones((1, L, 2), bool)
        vector, whole = _read(network, weights, tokens, sizes, everything)
        agreement = lambda keep, tokens=tokens, sizes=sizes, whole=whole: float(
            ((_read(network, weights, tokens, sizes, keep)[1] == whole) & (np.arange(T) < sizes[:, None])).sum()
            / sizes.sum())
        keep = _search(agreement, everything, skips, length)
        unit = np.asarray(vector) / np.linalg.norm(vector, axis=1, keepdims=True)
        nearest = np.argsort(-(unit @ unit.mean(0)), kind="stable")[:per_domain]
        vectors.append(unit[nearest])
        keeps.append(np.repeat(keep, len(nearest), 0))
    return Anchors(vectors=jnp.asarray(np.concatenate(vectors), jnp.float32), keep=jnp.asarray(np.concatenate(keeps)))


def _search(agreement: Any, keep: np.ndarray, skips: int, length: int) -> np.ndarray:
    """Returns the best set, `bool[1, L, 2]`, on the greedy path from `keep`."""
    def gain(keep: np.ndarray, a: float) -> float:
        return sum(a**i for i in range(length + 1)) / (length * keep.mean() + 1)

    best, top = keep, gain(keep, 1.0)
    for _ in range(skips):
        tries = []
        for half in np.argwhere(keep):
            fewer = keep.copy()
            fewer[tuple(half)] = False
            tries.append((agreement(fewer), fewer))
        a, keep = max(tries, key=lambda t: t[0])        # of equal ones the first
        if gain(keep, a) > top:
            best, top = keep, gain(keep, a)
    return best


@functools.partial(jax.jit, static_argnums=0)
def _read(network: Any, weights: Any, tokens: Array, sizes: Array, keep: Array) -> tuple[Array, Array]:
    """Returns for each prompt the sum of its hidden states except the last token's, `f32[N, D]`, and the most likely
    token after each token, `i32[N, T]`. Prompts are processed one by one, to save memory for logits."""
    def one(prompt: tuple[Array, Array]) -> tuple[Array, Array]:
        tokens, size = prompt
        hidden, head = network.features(weights, tokens[None], keep=keep)
        inside = jnp.arange(tokens.shape[0]) < size - 1
        vector = jnp.where(inside[:, None], hidden[0].astype(jnp.float32), 0).sum(0)
        return vector, first_argmax(head(hidden[0]))

    return jax.lax.map(one, (tokens, sizes))


@ALGORITHMS.register("knn-ssd",
                     "KNN-SSD: Enabling Dynamic Self-Speculative Decoding via Nearest Neighbor Layer Set Optimization",
                     "Song et al. 2025", family="speculative-self", needs="samples", guarantee="seed-exact")
def knn_ssd(lm: Any, domains: Any = None, length: Count = 4) -> Speculative:
    """Drafts with the target without the layers that the nearest of several sampled domains does not need.

    Creating it searches the sets of layers with `fit_anchors`, which takes many forward passes over the samples.

    Args:
        lm: the target.
        domains: for each domain a list of samples as token ids.
        length: number of drafts in a round.
    """
    if domains is None:
        raise ValueError("system: 'knn-ssd' needs domains=, for each domain a list of samples as token ids")
    return Speculative(KNNSkip(fit_anchors(lm, domains)), shape=Chain(length))
