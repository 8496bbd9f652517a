"""The table of the field: published systems by name, each built from this library's parts.

An entry stands here only when it works: `tests/laws/test_systems.py` runs the laws over all of them. Two papers that
come to the same algorithm are one entry and an alias of it. The makers lie in `text`, `models`, `layers` and `lengths`;
those of masked diffusion in `decodax.diffusion`.

>>> system("prompt-lookup", length=5)
Speculative(draft=PromptLookup(length=5, max_ngram=3, min_ngram=1, pick='latest'), verify=SeedExact(), shape=None)
"""

from decodax.diffusion.systems import ENTRIES
from decodax.systems.registry import DIFFUSION, FILLING, SYSTEMS, Needs, System, alias, entry, parse, system

# The order of these is the order of the table.
# isort: off
from decodax.systems import text, models, layers, lengths  # noqa: F401
# isort: on

for _name, _entry in ENTRIES.items():
    entry(_name, _entry.title, _entry.authors, _entry.family, _entry.summary,
          DIFFUSION if _entry.draft else FILLING, _entry.guarantee)(_entry.make)

__all__ = ["SYSTEMS", "Needs", "System", "alias", "entry", "parse", "system"]
