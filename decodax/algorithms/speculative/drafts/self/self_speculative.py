"""Self-speculative decoding: drafts with the target without layers that a search has found dispensable ("Draft &
Verify: Lossless Large Language Model Acceleration via Self-Speculative Decoding", Zhang et al., 2023).

`LayerSkip` drafts, `DraftExit` ends the drafts, and this file has the search and the registry entry. The paper measures
the tokens per second of self-speculative decoding on samples as a black-box function of the skipped attention and MLP
halves, and maximises it by Bayesian optimisation: a Gaussian process is fitted to the measurements, and the next set to
try is the one with the largest upper confidence bound (its code uses `bayes_opt` with a Matern 5/2 kernel, noise 1e-2
and 1,000 trials). Here the function is the number of tokens divided by the work: a forward pass of the target is 1, a
draft step the share of the weights that it reads. This has no noise, needs no idle machine, and is proportional to the
speed if steps are bound by reading weights. All sets run in one compiled program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from decodax.algorithms.speculative.adaptive.fit_trees import continued
from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafts.self.draft_exit import DraftExit
from decodax.algorithms.speculative.drafts.self.knn_ssd import Anchors, KNNSkip
from decodax.algorithms.speculative.drafts.self.layer_skip import LayerSkip
from decodax.algorithms.speculative.drafts.self.self_draft import layered
from decodax.algorithms.speculative.verifier import SeedExact
from decodax.common.options import Count, Share, Whole
from decodax.common.registry import ALGORITHMS

KAPPA = 2.576
"""Number of standard deviations of the confidence bound above the mean, the default of `bayes_opt`."""


@dataclasses.dataclass(frozen=True)
class Skips:
    """The result of a search for layers to skip.

    Attributes:
        attention: layers whose attention is skipped.
        mlp: layers whose MLP is skipped.
        gain: number of tokens for the work of one forward pass of the target.
    """

    attention: tuple[int, ...]
    mlp: tuple[int, ...]
    gain: float


def fit_skipped_layers(lm: Any, samples: Sequence[Sequence[int]], *, trials: int = 100, length: int = 8,
               max_new_tokens: int = 32, seed: int = 0, **sampling: Any) -> Skips:
    """Searches the halves of layers (attention or MLP) whose omission gives `LayerSkip` the most tokens for its work.

    Args:
        lm: the result of `decodax.load`.
        samples: token ids of prompts that are typical for later use. They are decoded in one batch, once in each trial.
        trials: number of sets that are tried.
        length: largest number of drafts in a round; chains end by the rule of `DraftExit`.
        max_new_tokens: number of tokens to decode for each sample.
        seed: random seed of decoding and search.
        sampling: sampling options of `decodax.generate`.

    Raises:
        ValueError: no samples or an empty one, or a number below 1.

        found = fit_skipped_layers(lm, samples)
        draft = drafts.LayerSkip(skip_attention=found.attention, skip_mlp=found.mlp)
    """
    if trials < 1:
        raise ValueError(f"trials: got {trials}, takes at least 1")
    network = layered(lm)
    L, work = network.depth, shares(lm.params, network.depth)
    alg = Speculative(DraftExit(KNNSkip(), length), SeedExact())

    def gain(skipped: np.ndarray) -> float:
        keep = ~skipped.reshape(1, L, 2)
        anchor = Anchors(vectors=jnp.ones((1, network.config.width), jnp.float32), keep=jnp.asarray(keep))
        s = continued(lm, _given(alg, anchor), samples, max_new_tokens, seed, **sampling)
        tokens, rounds, drafted = (float(np.asarray(x).sum()) for x in
                                   (s.length - s.prompt_length, s.stats.rounds, s.stats.drafted))
        return tokens / (rounds + drafted * (1 - float((work * skipped).sum())))

    best, value = maximise(gain, 2 * L, trials, seed)
    halves = best.reshape(L, 2)
    attention, mlp = (tuple(int(i) for i in np.flatnonzero(halves[:, half])) for half in (0, 1))
    return Skips(attention=attention, mlp=mlp, gain=round(value, 4))


@ALGORITHMS.register("self-speculative",
                     "Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative Decoding",
                     "Zhang et al. 2023", family="speculative-self", needs="samples", guarantee="seed-exact")
def self_speculative(lm: Any, samples: Any = None, skip: tuple[Whole, ...] = (), skip_attention: tuple[Whole, ...] = (),
                     skip_mlp: tuple[Whole, ...] = (), trials: Count = 100, length: Count = 8, gamma: Share = 0.8,
                     alpha: Share = 0.9, epsilon: Share = 0.01, beta1: Share = 0.5,
                     beta2: Share = 0.9) -> Speculative:
    """Drafts with the target without layers that a search has found dispensable, until a draft is uncertain.

    Give `samples` to search the layers, or the layers that `fit_skipped_layers` has found.

    Args:
        lm: the target.
        samples: prompts as token ids, for the search.
        skip: layers that are skipped.
        skip_attention, skip_mlp: layers whose attention or MLP alone is skipped.
        trials: number of sets of layers that the search tries.
        length: largest number of drafts in a round.
        gamma: first threshold of a draft's probability, which then adapts to the acceptance rate.
        alpha: target acceptance rate.
        epsilon: step of the threshold.
        beta1: weight of the old acceptance rate.
        beta2: weight of the old threshold.
    """
    if (samples is None) != bool(skip or skip_attention or skip_mlp):
        raise ValueError("system: 'self-speculative' needs samples=, prompts as token ids to search the layers with, "
                         "or skip=, skip_attention=, skip_mlp=, what fit_skipped_layers found; takes one of the two")
    if samples is not None:
        found = fit_skipped_layers(lm, samples, trials=trials, length=length)
        skip_attention, skip_mlp = found.attention, found.mlp
    source = LayerSkip(None, skip, skip_attention, skip_mlp)
    return Speculative(DraftExit(source, length, gamma, alpha, epsilon, beta1, beta2))


def _given(alg: Speculative, anchors: Anchors) -> Speculative:
    draft: Any = alg.draft
    return dataclasses.replace(alg, draft=dataclasses.replace(draft, source=KNNSkip(anchors)))


def shares(params: Any, layers: int) -> np.ndarray:
    """Returns the share that each half layer has in the number of weights read in a step, `f64[2 L]`: attention and MLP
    of each layer in turn. `params` are the weights, `layers` is `L`. An embedding table that is not also the output
    head is not counted, since a step reads only one of its rows."""
    sizes, rest, embed = np.zeros((layers, 2)), 0, 0
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        names = [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
        if "layers" in names:
            layer, half = int(names[names.index("layers") + 1]), any(name.startswith("mlp") for name in names)
            sizes[layer, int(half)] += leaf.size
        elif "embed" in names:
            embed += leaf.size
        else:
            rest += leaf.size
            embed = 0 if "lm_head" in names else embed
    return (sizes / (sizes.sum() + rest + embed)).reshape(-1)


def maximise(function: Callable[[np.ndarray], float], size: int, trials: int,
             seed: int = 0) -> tuple[np.ndarray, float]:
    """Maximises a function of binary vectors by Bayesian optimisation. Returns the best of `trials` vectors,
    `bool[size]`, and its value.

    The first vectors are all False, every second pair of entries, and random ones of different density. Then the next
    vector is the one with the largest upper confidence bound among random ones and neighbours of the best.
    """
    draw = np.random.default_rng(seed)
    random = lambda n: draw.random((n, size)) < draw.random((n, 1))
    tried = [np.zeros(size, bool), np.arange(size) % 4 < 2, *random(max(min(trials // 5, 10), 1))][:trials]
    values = [function(x) for x in tried]
    while len(tried) < trials:
        best = tried[int(np.argmax(values))]
        flips = np.eye(size, dtype=bool)
        pairs = flips[draw.integers(size, size=64)] | flips[draw.integers(size, size=64)]
        found = np.concatenate([best ^ flips, best ^ pairs, random(512)])
        known = {x.tobytes() for x in tried}
        found = np.array([x for x in found if x.tobytes() not in known])
        if not len(found):
            break
        mean, deviation = posterior(np.array(tried, float), np.array(values), found.astype(float))
        tried.append(found[int(np.argmax(mean + KAPPA * deviation))])
        values.append(function(tried[-1]))
    i = int(np.argmax(values))
    return tried[i], values[i]


def posterior(x: np.ndarray, y: np.ndarray, at: np.ndarray, noise: float = 1e-2) -> tuple[np.ndarray, np.ndarray]:
    """Returns mean and standard deviation, `f64[m]` each, of a Gaussian process with a Matern 5/2 kernel at the points
    `at` (`f64[m, d]`), given values `y` (`f64[n]`) at `x` (`f64[n, d]`). Values are standardised; of several length
    scales the one with the largest likelihood is used."""
    shift, scale = y.mean(), y.std() or 1.0
    z = (y - shift) / scale
    distance = lambda a, b: np.sqrt(np.maximum(((a[:, None] - b[None]) ** 2).sum(-1), 0))

    def kernel(d: np.ndarray, length: float) -> np.ndarray:
        r = np.sqrt(5) * d / length
        return (1 + r + r * r / 3) * np.exp(-r)

    near, fits = distance(x, x), []
    for length in np.sqrt(x.shape[1]) * np.array([0.25, 0.5, 1.0, 2.0, 4.0]):
        lower = np.linalg.cholesky(kernel(near, length) + noise * np.eye(len(x)))
        half = np.linalg.solve(lower, z)
        fits.append((-0.5 * half @ half - np.log(np.diag(lower)).sum(), length, lower, half))
    _, length, lower, half = max(fits, key=lambda fit: fit[0])
    across = np.linalg.solve(lower, kernel(distance(x, at), length))
    return shift + scale * across.T @ half, scale * np.sqrt(np.maximum(1 - (across**2).sum(0), 0))
