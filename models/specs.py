"""Layouts of a decoder's weights on a mesh, from the logical names of their axes."""

from __future__ import annotations

import math

from jax.sharding import Mesh, PartitionSpec

from decodax.common.axes import EXPERT
from decodax.models.config import DecoderConfig
from decodax.models.recurrent.options import GatedDelta, RgLru, SelectiveScan, ShortConv, Ssd

RECURRENT = {"conv_channels": (ShortConv, "channels"), "delta_heads": (GatedDelta, "key_heads"),
             "ssm_heads": (Ssd, "heads"), "ssm_groups": (Ssd, "groups"), "scan_channels": (SelectiveScan, "inner"),
             "rg_blocks": (RgLru, "blocks")}
"""Axes of recurrent blocks: the options in which their number is, and its name there."""


def weight_spec(config: DecoderConfig, axes: tuple[str | None, ...], mesh: Mesh, axis: str) -> PartitionSpec:
    """Returns the layout of a weight on a mesh.

    Args:
        config: the network's configuration.
        axes: the logical name of each axis of the weight; None: never sharded.
        mesh: the mesh.
        axis: name of the mesh's axis over which heads, MLP and vocabulary are sharded where it divides them.
    """
    # Heads are sharded whole: their number must divide, not their total width.
    experts = [layer.mixture for layer in config.layers if layer.mixture is not None]
    rows = 0 if config.layer_inputs is None else config.layer_inputs.rows
    units = {"heads": math.gcd(*map(config.query_heads, config.layers)),
             "mlp": math.gcd(config.mlp, *(layer.mlp or 0 for layer in config.layers)),
             "vocab": math.gcd(config.vocab, rows),
             "kv_heads": math.gcd(*(config.groups(layer) for layer in config.layers)),
             "expert_mlp": math.gcd(*(e.width for e in experts)), "experts": math.gcd(*(e.count for e in experts)),
             "out_groups": math.gcd(*(layer.shared_key.groups for layer in config.layers if layer.shared_key)),
             "ngrams": math.gcd(*(layer.ngrams.rows for layer in config.layers if layer.ngrams)),
             "shared_mlp": math.gcd(*(e.shared for e in experts)),
             **{name: math.gcd(*(getattr(layer.recurrent, what) for layer in config.layers
                                 if isinstance(layer.recurrent, kind))) for name, (kind, what) in RECURRENT.items()}}
    size = dict(mesh.shape)

    def over(name: str | None) -> str | None:
        where = EXPERT if name == "experts" else axis
        return where if name in units and where in size and units[name] % size[where] == 0 else None

    return PartitionSpec(*map(over, axes))
