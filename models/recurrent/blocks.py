"""The recurrent blocks that layers of a decoder may have in place of attention: by their options, the network and the
states of its cache."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from decodax.cache import Recurrent
from decodax.core.cache import Cache
from decodax.models.compressed.options import Pooling
from decodax.models.config import DecoderConfig
from decodax.models.recurrent import rg_lru, selective_scan
from decodax.models.recurrent.gated_delta import DeltaBlock
from decodax.models.recurrent.options import GatedDelta, RecurrentBlocks, RgLru, SelectiveScan, ShortConv, Ssd
from decodax.models.recurrent.rg_lru import RecurrentBlock
from decodax.models.recurrent.selective_scan import SelectiveScanBlock
from decodax.models.recurrent.short_conv import ShortConvBlock
from decodax.models.recurrent.ssd import SsdBlock
from decodax.models.recurrent.walks import linear_block_states
from decodax.models.residual.options import TokenNGrams

Block = RecurrentBlock | DeltaBlock | ShortConvBlock | SsdBlock | SelectiveScanBlock
"""The network of any of the blocks."""


def recurrent_block(c: DecoderConfig, rule: RecurrentBlocks, rngs: nnx.Rngs) -> Block:
    """Returns the module of a recurrent block, which a layer has in place of attention, with random weights.

    Args:
        c: the decoder's configuration.
        rule: options of the block; their type selects its kind, such as `GatedDelta` or `Ssd`.
        rngs: random numbers for the weights.
    """
    match rule:
        case RgLru():
            return RecurrentBlock(c, rule, rngs)
        case ShortConv():
            return ShortConvBlock(c, rule, rngs)
        case Ssd():
            return SsdBlock(c, rule, rngs)
        case SelectiveScan():
            return SelectiveScanBlock(c, rule, rngs)
        case Pooling():
            raise ValueError("recurrent: got a Pooling, takes a layer with shared_key or an indexer for it")
    return DeltaBlock(c, rule, rngs)


def recurrent_states(c: DecoderConfig, batch: int, capacity: int, dtype: jax.typing.DTypeLike, inputs: Any) -> Cache:
    """Returns the empty cache for the states of a decoder's recurrent blocks, for `batch` rows of up to `capacity`
    tokens. `inputs` are kept as the attribute `Cache.inputs`."""
    rules = [c.layers[i].recurrent if part == 1 else c.layers[i].ngrams for i, part in c.entries if part]
    linear = [rule for rule in rules if isinstance(rule, GatedDelta | ShortConv | Ssd | Pooling | TokenNGrams)]
    if linear:
        return linear_block_states(linear, batch, capacity, dtype, inputs)
    states = [rg_lru.empty(rule, batch, dtype) if isinstance(rule, RgLru) else
              selective_scan.empty(rule.conv, rule.inner, rule.state, batch, dtype)
              for rule in rules if isinstance(rule, RgLru | SelectiveScan)]
    return Recurrent(states=tuple(states), length=jnp.zeros(batch, jnp.int32), size=capacity, given=inputs)
