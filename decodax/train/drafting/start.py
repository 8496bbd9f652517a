"""Training that goes on from a drafter that was trained before, on other data or with another loss: the two phases of
the MLP speculator (Wertheimer et al., 2024), HASS from EAGLE, or further training of a published drafter."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from decodax.io.drafters import TrainedDrafter, load_drafter
from decodax.models.drafters.block import BlockHead
from decodax.models.drafters.head import Weights
from decodax.models.names import flatten


def load_start(directory: str, lm: Any, vocab: int | None = None) -> TrainedDrafter:
    """Returns the drafter in a directory, in float32, to train it further for the target `lm`. `vocab` is the number of
    tokens that it has to predict; None: any.

    Raises:
        ValueError: see `load_drafter`, or it predicts another number of tokens.
    """
    made = load_drafter(directory, lm, dtype="float32")
    if vocab not in (None, count := made.head.vocab if made.ids is None else len(made.ids)):
        raise ValueError(f"draft_vocab: got {vocab}, and {directory!r} predicts {count} tokens; takes that number")
    return made


def started(objective: Any, drafter: TrainedDrafter) -> tuple[Any, Weights]:
    """Returns the objective of a drafter, and the weights with which its training starts, from a drafter that was
    trained before.

    The options of its decoder layers, such as the number of positions or a norm's epsilon, are those of that drafter;
    all others have to be the same.

    Args:
        objective: a result of `objective_of`, with the same number of drafts.
        drafter: the drafter, a result of `load_drafter` for the same target, in float32.

    Raises:
        ValueError: a drafter with another network, with weights of other shapes, or with other tokens.
    """
    head, own = drafter.head, objective.head
    said = f"start: got {drafter.name!r}"
    if type(head) is not type(own):
        raise ValueError(f"{said} with a {type(head).__name__}, takes one with a {type(own).__name__}")
    if isinstance(head, BlockHead):     # the temperatures of a confidence head are fitted after the training
        head = dataclasses.replace(head, temperatures=own.temperatures)
    for field in dataclasses.fields(own):
        theirs, ours = getattr(head, field.name), getattr(own, field.name)
        if theirs != ours and not dataclasses.is_dataclass(ours):
            raise ValueError(f"{said} with {field.name} {theirs!r}, takes one with {ours!r}, as the options say")
    shapes = {name: x.shape for name, x in flatten(own.abstract_params()).items()}
    found = {name: x.shape for name, x in flatten(drafter.params).items()}
    wrong = [name for name in sorted({*shapes, *found}) if shapes.get(name) != found.get(name)]
    if wrong:
        raise ValueError(f"{said}, whose weight {wrong[0]!r} has the shape {found.get(wrong[0])}, takes "
                         f"{shapes.get(wrong[0])}, as the options say")
    if not np.array_equal(*(np.asarray([] if ids is None else ids) for ids in (drafter.ids, objective.ids))):
        raise ValueError(f"{said}, which predicts other tokens than the objective, takes one for the same")
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), drafter.params)
    return dataclasses.replace(objective, head=head), params


__all__ = ["load_start", "started"]
