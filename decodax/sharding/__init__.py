"""Running over meshes: placing batches, and replicas that leave their loops alone."""

from decodax.axes import DATA, MODEL
from decodax.sharding.lanes import lanes
from decodax.sharding.place import place

__all__ = ["DATA", "MODEL", "lanes", "place"]
