"""Drafters with random weights for any target, for tests that are not about what a drafter has learned."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from decodax.algorithms.speculative.adaptive.predictor import FEATURES, DraftClassifier
from decodax.common.registry import ALGORITHMS
from decodax.io.drafters import TrainedDrafter
from decodax.models.drafters.hamburger import HamburgerHead
from decodax.models.drafters.parallel import ParallelHead
from decodax.train.drafting.systems import objective_of

NAMES = [name for name, entry in ALGORITHMS.items() if entry.takes_drafter]


UNITS = np.array([[i, (3 * i + j) % 13, (i * j) % 11, -1 if i % 2 else 7] for i in range(16) for j in range(3)],
                 np.int32)
"""Units of MuMo for a target with 16 tokens or more."""


def fresh(name: str, lm: Any) -> TrainedDrafter:
    """A drafter for an entry of the registry and a target."""
    system = ALGORITHMS[name].systems[0]
    ids = UNITS if name == "mumo" else None
    if name == "hamburger":
        head: Any = HamburgerHead.of(lm.model.config)
    elif name == "p-eagle":
        eagle = objective_of("eagle-3", lm).head
        head = ParallelHead(**{field.name: getattr(eagle, field.name) for field in dataclasses.fields(eagle)}, mask=0)
    else:
        head = objective_of(system, lm, ids).head
    weights = jax.tree.map(lambda x: x + 0.2 * jax.random.normal(jax.random.key(x.size), x.shape),
                           head.init_params(jax.random.key(0)))
    return TrainedDrafter(system, head, weights, None if ids is None else jnp.asarray(ids))


def acceptance_head(draft: Any, seed: int = 1) -> dict[str, Any]:
    """An acceptance head with random weights for a draft model."""
    D = draft.model.config.width
    return {**_drawn({"block": (D, D), "out": (D, 2)}, seed), "block_bias": np.zeros(D, np.float32),
            "out_bias": np.array([0, 1], np.float32)}


def draft_classifier(seed: int = 1) -> DraftClassifier:
    """DISCO's classifier with random weights."""
    drawn = _drawn({"first": (FEATURES, 4), "second": (4, 1)}, seed)
    return DraftClassifier(tuple(tuple(map(float, row)) for row in drawn["first"]), (0.1,) * 4,
                           tuple(map(float, drawn["second"][:, 0])), 0.5)


def length_network(lm: Any, seed: int = 1) -> dict[str, Any]:
    """A draft length predictor with random weights for a target, which predicts about 3."""
    D = lm.model.config.width
    biases = {"first_bias": np.zeros(8, np.float32), "second_bias": np.zeros(8, np.float32),
              "third_bias": np.array([3], np.float32)}
    weights = _drawn({"first": (D, 8), "second": (8, 8), "third": (8, 1)}, seed)
    return {name: 2 * x for name, x in weights.items()} | biases | {
        "mean": np.zeros(D, np.float32), "scale": np.ones(D, np.float32)}


def _drawn(sizes: dict[str, tuple[int, int]], seed: int) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    return {name: (draw.normal(size=size) * size[0] ** -0.5).astype(np.float32) for name, size in sizes.items()}
