"""Running over meshes: placing batches, replicas that leave their loops alone, draft model and target on halves."""

from decodax.axes import DATA, MODEL
from decodax.sharding.apart import ROLE, apart
from decodax.sharding.lanes import lanes
from decodax.sharding.place import place

__all__ = ["DATA", "MODEL", "ROLE", "apart", "lanes", "place"]
