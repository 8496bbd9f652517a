"""Many prompts: answers as they finish, and batch jobs that survive."""

from decodax.engine.queue import Refused, Ticket, schedule
from decodax.engine.slots import Slots, Use
from decodax.front.serve import Served, address, serve
from decodax.jobs.batch import Progress, run
from decodax.jobs.lines import Fields
from decodax.jobs.worker import Worker

__all__ = ["Fields", "Progress", "Refused", "Served", "Slots", "Ticket", "Use", "Worker", "address", "run", "schedule",
           "serve"]
