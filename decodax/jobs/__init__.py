"""Functions for large numbers of prompts: results as soon as they are finished, and batch jobs that survive
interruptions."""

from decodax.common.names import directory
from decodax.engine.queue import Refused, Ticket, schedule
from decodax.engine.slots import Slots, Use
from decodax.front.serve import Served, address, serve
from decodax.jobs.batch import JobProgress, run
from decodax.jobs.lines import Fields
from decodax.jobs.worker import Worker

__all__ = ["Fields", "JobProgress", "Refused", "Served", "Slots", "Ticket", "Use", "Worker", "address", "run",
           "schedule", "serve"]

__dir__ = directory(__all__)
