"""The recurrent blocks that layers of a decoder may have in place of attention: by their options, the network and the
states of its cache."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from decodax.core.cache import Cache
from decodax.models.config import DecoderConfig
from decodax.models.recurrent.gated_delta import DeltaBlock, delta_states
from decodax.models.recurrent.options import GatedDelta, RecurrentBlocks, RgLru
from decodax.models.recurrent.rg_lru import RecurrentBlock, rg_lru_states


def recurrent_block(c: DecoderConfig, rule: RecurrentBlocks, rngs: nnx.Rngs) -> RecurrentBlock | DeltaBlock:
    """Returns the network of a block."""
    return RecurrentBlock(c, rule, rngs) if isinstance(rule, RgLru) else DeltaBlock(c, rule, rngs)


def recurrent_states(c: DecoderConfig, batch: int, capacity: int, dtype: jax.typing.DTypeLike, inputs: Any) -> Cache:
    """Returns the empty states of a decoder's recurrent blocks; `inputs` are `Cache.inputs`."""
    rules = [layer.recurrent for layer in c.layers if layer.recurrent is not None]
    deltas = [rule for rule in rules if isinstance(rule, GatedDelta)]
    if deltas:
        return delta_states(deltas, batch, capacity, dtype, inputs)
    return rg_lru_states([rule for rule in rules if isinstance(rule, RgLru)], batch, capacity, dtype, inputs)
