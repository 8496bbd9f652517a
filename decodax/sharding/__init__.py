"""Running over meshes: placing batches, prompts read by several devices, and replicas that leave their loops alone."""

from decodax.axes import CONTEXT, DATA, MODEL
from decodax.sharding.lanes import lanes
from decodax.sharding.place import place
from decodax.sharding.sequence import Chain, LayerCost, Pipeline, chain_time, chunks, partition

__all__ = ["CONTEXT", "DATA", "MODEL", "Chain", "LayerCost", "Pipeline", "chain_time", "chunks", "lanes", "partition",
           "place"]
