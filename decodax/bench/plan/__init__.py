"""Plans a job before any machine is rented: whether it fits a slice of devices, and how fast it can be there at
best."""

from decodax.bench.plan.front import COLUMNS, Plan, abstract, meshes, plan
from decodax.bench.plan.hardware import DEVICES, Device, Slice, slice_of
from decodax.bench.plan.presets import PRESETS, SLICES

__all__ = ["COLUMNS", "DEVICES", "PRESETS", "SLICES", "Device", "Plan", "Slice", "abstract", "meshes", "plan",
           "slice_of"]
