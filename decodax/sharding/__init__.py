"""Running over meshes: placing batches, prompts read by several devices, replicas that leave their loops alone, draft
model and target on halves or in two programs, halves of a batch whose communication overlaps."""

from decodax.axes import CONTEXT, DATA, EXPERT, MODEL
from decodax.sharding.apart import ROLE, apart
from decodax.sharding.lanes import lanes
from decodax.sharding.place import place
from decodax.sharding.sequence import LayerCost, PartitionTable, Pipeline, PrefillChain, chain_time, chunks, partition
from decodax.sharding.split import Costs, Split
from decodax.sharding.weave import weave

__all__ = ["CONTEXT", "DATA", "EXPERT", "MODEL", "ROLE", "Costs", "LayerCost", "PartitionTable", "Pipeline",
           "PrefillChain", "Split", "apart", "chain_time", "chunks", "lanes", "partition", "place", "weave"]
