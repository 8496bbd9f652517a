"""Drafters with random weights for any target, for tests that are not about what a drafter has learned."""

import dataclasses
from typing import Any

import jax

from decodax.common.registry import ALGORITHMS
from decodax.io.drafters import TrainedDrafter
from decodax.models.drafters.parallel import ParallelHead
from decodax.train.drafter_systems import objective_of

TRAINED_FOR = {"eagle-2": "eagle", "mtp": "fastmtp"}
"""The method whose drafter an entry takes, where it is not the entry's own."""

NAMES = [name for name, entry in ALGORITHMS.items() if entry.needs == "a trained drafter"]


def fresh(name: str, lm: Any) -> TrainedDrafter:
    """A drafter for an entry of the registry and a target."""
    system = TRAINED_FOR.get(name, name)
    eagle = objective_of("eagle-3", lm).head if name == "p-eagle" else None
    head: Any = objective_of(system, lm).head if eagle is None else ParallelHead(**{
        field.name: getattr(eagle, field.name) for field in dataclasses.fields(eagle)}, mask=0)
    weights = jax.tree.map(lambda x: x + 0.2 * jax.random.normal(jax.random.key(x.size), x.shape),
                           head.init_params(jax.random.key(0)))
    return TrainedDrafter(system, head, weights)
