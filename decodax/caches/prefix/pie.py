"""PIE: edits a text whose keys and values are cached ("Let the Code LLM Edit Itself When You Edit the Code", He et al.,
2024).

Positional integrity encoding computes only the new tokens, and moves the keys of later tokens to their new positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from decodax.cache.prefix import Prefix
from decodax.caches.prefix.prefix import check_layers, extended, on_model_mesh, shifted
from decodax.caches.shapes import layers_of
from decodax.core.loaded import network_of


@on_model_mesh
def edited(lm: Any, prefix: Prefix, start: int, stop: int, new: Sequence[int], params: Any = None) -> Prefix:
    """Returns a prefix in which the tokens `start` to `stop` are replaced by others.

    Only the new tokens are computed, from the tokens before them. Later keys are rotated to their new positions; they
    do not attend to the new tokens, so the result approximates that of a new prefill.

    Args:
        lm: a result of `decodax.load`, or a `Model`.
        prefix: the prefix to edit.
        start, stop: the tokens to replace, from `start` to `stop - 1`.
        new: token ids to insert there.
        params: the weights of a bare `Model`.

    Raises:
        ValueError: the edit is outside of the text or leaves no tokens, or the model has no rotary positions.
    """
    if not 0 <= start <= stop <= len(prefix):
        raise ValueError(f"start, stop: got {start} to {stop}, takes a part of the {len(prefix)} tokens")
    tokens = (*prefix.tokens[:start], *map(int, new), *prefix.tokens[stop:])
    if not tokens:
        raise ValueError("new: got an edit that leaves no tokens")
    model, weights = network_of(lm, params)
    check_layers(prefix, model)
    shapes = layers_of(model)
    kv = [x[:, :start] for x in prefix.kv]
    if len(new):
        kv = list(extended(model, shapes, weights, kv, start, new))
    later = [shifted(shape, x[:, stop:], start + len(new) - stop) for shape, x in zip(shapes, prefix.kv, strict=True)]
    return Prefix(tokens, tuple(np.concatenate(pair, 1) for pair in zip(kv, later, strict=True)))
