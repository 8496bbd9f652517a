"""The published samplers of the family, each a line in the table of `decodax.systems`.

`entries` has the table and what its lines share. `basic` has the samplers that decide tokens step by step, `adaptive`
those whose pace follows what the model says, `parallel` those that take several steps or blocks in one forward, and
`caching` the caches for models that see the text in both directions.
"""

from decodax.diffusion.systems import adaptive, basic, caching, parallel  # noqa: F401  (each adds its lines)
from decodax.diffusion.systems.entries import ENTRIES, Entry

__all__ = ["ENTRIES", "Entry"]
