"""The table of the field: published systems by name, each built from this library's parts.

An entry stands here only when it works: `tests/laws/test_systems.py` runs the laws over all of them. Two papers that
come to the same algorithm are one entry and an alias of it. The makers lie in `text`, `models`, `layers`, `caches`,
`lengths` and `search`; those of masked diffusion in `decodax.algorithms.diffusion`. The table is that of
`decodax.common.registry`; users add to it by `entry`. Searches have laws of their own, in `tests/algorithms/beams`.

>>> system("prompt-lookup", length=5).draft
PromptLookup(length=5, max_ngram=3, min_ngram=1, pick='latest')
"""

from decodax.common.registry import SYSTEMS, Guarantee, Needs, System, alias, entry, find, parse, system

# The order of these is the order of the table.
# isort: off
from decodax.algorithms.entries import text, models, layers, caches, lengths, search  # noqa: F401
from decodax.algorithms.diffusion import systems as _diffusion  # noqa: F401
# isort: on


def _arrange() -> None:
    """Puts the library's own entries in front, those of masked diffusion last among them: the makers of
    `decodax.algorithms.diffusion` or of a user may have been imported before those of this package."""
    packages = "decodax.algorithms.entries.", "decodax.algorithms.diffusion."
    place = lambda e: next((i for i, p in enumerate(packages) if e.module.startswith(p)), len(packages))
    ordered = sorted(SYSTEMS.values(), key=place)
    SYSTEMS.clear()
    SYSTEMS.update({e.name: e for e in ordered})


_arrange()

__all__ = ["SYSTEMS", "Guarantee", "Needs", "System", "alias", "entry", "find", "parse", "system"]
