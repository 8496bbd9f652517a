"""Decoding on meshes: placement of batches, replicas that run separate loops, halves of a batch whose communication
overlaps, and prompts that several devices prefill together."""

from decodax.common.axes import CONTEXT, DATA, EXPERT, MODEL
from decodax.common.names import directory
from decodax.sharding.lanes import lanes
from decodax.sharding.place import place
from decodax.sharding.sequence import (
    LayerCost,
    PartitionTable,
    PrefillChain,
    PrefillPipeline,
    chain_time,
    chunks,
    partition,
)
from decodax.sharding.weave import weave

__all__ = [
    "CONTEXT",
    "DATA",
    "EXPERT",
    "MODEL",
    "LayerCost",
    "PartitionTable",
    "PrefillChain",
    "PrefillPipeline",
    "chain_time",
    "chunks",
    "lanes",
    "partition",
    "place",
    "weave",
]

__dir__ = directory(__all__)
