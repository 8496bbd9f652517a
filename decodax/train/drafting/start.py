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
from decodax.models.drafters.prompt_tokens import HiddenTransferHead
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

    What no option of the recipe sets are those of that drafter: the target's layers that it reads and their width, its
    mask token, the size of its embedding table, and options of its decoder layers such as the number of positions. All
    others have to be the same.

    Args:
        objective: a result of `objective_of`, with the same number of drafts.
        drafter: the drafter, a result of `load_drafter` for the same target, in float32.

    Raises:
        ValueError: a drafter with another network, with weights of other shapes, or with other tokens.
    """
    head: Any = drafter.head
    own = objective.head
    said = f"start: got {drafter.name!r}"
    if type(head) is not type(own):
        raise ValueError(f"{said} with a {type(head).__name__}, takes one with a {type(own).__name__}")
    if isinstance(head, BlockHead):     # the temperatures of a confidence head are fitted after the training
        head = dataclasses.replace(head, temperatures=own.temperatures)
    kept = {"mask", "taps", "feature_width", "table_size"} & {field.name for field in dataclasses.fields(own)}
    if isinstance(head, HiddenTransferHead):        # whose layers are an option
        kept -= {"taps"}
    own = dataclasses.replace(own, **{name: getattr(head, name) for name in kept})
    for field in dataclasses.fields(own):
        before, now = getattr(head, field.name), getattr(own, field.name)
        if before != now and not dataclasses.is_dataclass(now):
            raise ValueError(f"{said} with {field.name} {before!r}, takes one with {now!r}, as the options say")
    shapes = {name: x.shape for name, x in flatten(own.abstract_params()).items()}
    found = {name: x.shape for name, x in flatten(drafter.params).items()}
    wrong = [name for name in sorted({*shapes, *found}) if shapes.get(name) != found.get(name)]
    if wrong:
        raise ValueError(f"{said}, whose weight {wrong[0]!r} has the shape {found.get(wrong[0])}, takes "
                         f"{shapes.get(wrong[0])}, as the options say")
    theirs, ours = (np.asarray([] if ids is None else ids) for ids in (drafter.ids, objective.ids))
    if not np.array_equal(theirs, ours):
        raise ValueError(f"{said}, which predicts other tokens than the objective, takes one for the same")
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), drafter.params)
    return dataclasses.replace(objective, head=head), params


__all__ = ["load_start", "started"]
