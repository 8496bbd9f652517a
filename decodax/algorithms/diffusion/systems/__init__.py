"""The published samplers of the family, each an entry of `decodax.common.registry`.

`entries` has what they share. `basic` has the samplers that decide tokens step by step, `adaptive` those whose pace
follows what the model says, `parallel` those that take several steps or blocks in one forward, and `caching` the caches
for models that see the text in both directions.
"""

# Each adds its entries. The order of these is the order of the table.
# isort: off
from decodax.algorithms.diffusion.systems import basic, adaptive, parallel, caching  # noqa: F401
# isort: on
