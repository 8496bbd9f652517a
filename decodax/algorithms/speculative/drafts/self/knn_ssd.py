"""KNN-SSD: leaves out the layers of the sample domain that is nearest to the prompt ("KNN-SSD: Enabling Dynamic
Self-Speculative Decoding via Nearest Neighbor Layer Set Optimization", Song et al., 2025).

Which layers a draft can do without depends on the domain. Anchors are vectors of sample
prompts, the mean of the target's last hidden states, with the set of halves (attention, MLP) that their domain can
skip; a new prompt's vector picks the nearest one by cosine, and its set drafts the whole answer.

Each row has its own set, so its drafts do not depend on its batch mates. Only halves that every row skips are saved:
batches of one domain draft fastest. The prompt's last token, which opens the first window, is not in its vector.

`fit_anchors` finds anchors and sets on the host. The paper searches sets by Bayesian optimisation of the measured
speed; here the search is greedy, by agreement with the whole target (see there). Anchors found otherwise, of the
paper's kind or any other, are an `Anchors` too.
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
from decodax.algorithms.speculative.drafts.self.self_draft import SelfDraft, layered
from decodax.algorithms.speculative.fixed_trees import Chain
from decodax.algorithms.speculative.source import Answer
from decodax.common.options import Count
from decodax.common.registry import ALGORITHMS
from decodax.common.struct import Struct, struct
from decodax.core.capabilities import Draftable
from decodax.core.composed import data
from decodax.core.loaded import network_of
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params
from decodax.core.window import Window
from decodax.sampling.draw import first_argmax


@struct
class Anchors(Struct):
    """Sample prompts: their `vectors` `f32[A, D]`, and for each the halves of layers to run, `keep` `bool[A, L, 2]`."""

    vectors: Array
    keep: Array

    def nearest(self, vector: Array) -> Array:
        """The anchor with the largest cosine to each vector (`f32[B, D]`): `i32[B]`, of equal ones the first."""
        unit = self.vectors / jnp.maximum(jnp.linalg.norm(self.vectors, axis=1, keepdims=True), 1e-30)
        return jnp.argmax(vector @ unit.T, 1).astype(jnp.int32)


@struct
class Matched(Struct):
    """The state of `KNNSkip`: `vector` `f32[B, D]`, the prompt's hidden states summed; within a round also the halves
    that draft, `keep` `bool[B, L, 2]`, and the tree's `scratch`."""

    vector: Array
    keep: Array | None = None
    scratch: Draftable | None = None


@dataclasses.dataclass(frozen=True)
class KNNSkip(SelfDraft):
    """Drafts with the target without the layers that the nearest anchor leaves out.

    Attributes:
        model: the target: a `Transformer`, or what `decodax.load` gave. Its weights are `Params.target`.
        weights: the anchors; at low level they go into `Params.draft` instead.
    """

    model: Any
    weights: Anchors | None = data()

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", layered(self.model))

    @property
    def reader(self) -> KNNSkip:
        return self

    def init(self, params: Params, s: State) -> Matched:
        c, given = self.model.config, params.draft
        if given is None:
            raise ValueError("params: KNNSkip needs its Anchors in Params.draft")
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

    def observe(self, s: State, window: Window, out: Out, decision: Decision | None, state: Matched) -> Matched:
        if decision is not None:
            return Matched(vector=state.vector)
        # dead nodes may hold anything
        hidden = jnp.where(window.live[..., None], out.hidden.astype(jnp.float32), 0)
        return Matched(vector=state.vector + hidden.sum(1))


def fit_anchors(model: Any, domains: Sequence[Sequence[Sequence[int]]], params: Any = None, *, per_domain: int = 10,
                skips: int | None = None, length: int = 5) -> Anchors:
    """Fits anchors and their skip sets to sample prompts.

    Of each domain the `per_domain` prompts nearest to their mean direction become anchors. Its set is searched
    greedily: from the whole network on, the half is dropped without which the most next tokens of the samples stay the
    same as the whole network's, until `skips` halves are gone; of the sets on that path the one counts that promises
    the most tokens for its cost, `(1 + a + ... + a^length) / (length * share of halves run + 1)` with `a` the share of
    equal tokens. That takes about `2 L * skips` forwards over the domain's samples.

    Args:
        model: a `Transformer`, or what `decodax.load` gave.
        domains: sample prompts of each domain, token ids, two or more a prompt.
        params: the weights of a bare `Transformer`.
        per_domain: `k`, anchors of each domain.
        skips: the most halves to leave out, of `2 L`; default half of them.
        length: draft length that the sets are for.

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
    """The best set `bool[1, L, 2]` on the greedy path from `keep`."""
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
    """A prompt's hidden states summed, all but the last token's, `f32[N, D]`, and the likeliest token after each,
    `i32[N, T]`. Prompt by prompt, for the logits' sake."""
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
    """Drafts with the target without the layers that the nearest of some sampled domains can do without.

    Making it searches the layer sets with `fit_anchors`, which takes many forwards over the samples.

    Args:
        lm: the target. domains: for each domain a list of samples as token ids. length: drafts a round.
    """
    if domains is None:
        raise ValueError("system: 'knn-ssd' needs domains=, for each domain a list of samples as token ids")
    return Speculative(KNNSkip(lm, fit_anchors(lm, domains)), shape=Chain(length))
