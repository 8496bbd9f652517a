"""Shipped models as entries of `decodax list`, described by their cards."""

from __future__ import annotations

import dataclasses
import re

from decodax.common.entries import Entry
from decodax.io.load import ZOO, load, zoo


@dataclasses.dataclass(frozen=True)
class ModelEntry(Entry):
    """A shipped model as an entry.

    Attributes:
        card: first paragraph of its card.
    """

    card: str = ""

    @property
    def description(self) -> str:
        """The first paragraph of the card, a call that loads the model, and the file of the card."""
        return f"{self.card}\n\nExample: dx.load(\"{self.name}\")\nCard: {ZOO / self.name / 'README.md'}"


def listed_models() -> list[Entry]:
    """Returns the shipped models as entries of `decodax list`."""
    found: list[Entry] = []
    for name in zoo():
        text = (ZOO / name / "README.md").read_text().partition("\n# ")[2]       # the model card after its heading
        card = text.split("\n\n")[1]
        found.append(ModelEntry("models", name, load, "", "", first_sentence(card).rstrip("."), guarantee="",
                                card=card))
    return found


def first_sentence(text: str) -> str:
    """Returns the first sentence of a text as one line.

    >>> first_sentence("Answers questions (Ho et al. 2024), or what one\\ncalls so. It is small.")
    'Answers questions (Ho et al. 2024), or what one calls so.'
    """
    return re.split(r"(?<=\.)(?<!\bal\.) (?=[A-Z])", " ".join(text.split()))[0]
