"""Many requests: continuous batches, and batch jobs that survive."""

from decodax.jobs.schedule import Ticket, schedule
from decodax.jobs.slots import Slots

__all__ = ["Slots", "Ticket", "schedule"]
