"""Questions in plain English on long texts, for models of natural language: RULER's needles with several keys (Hsieh et
al., 2024).

A text is filler with four sentences that each name a number of seven digits for a city. The question asks for one of
them and begins its answer, so that base models answer, too.

>>> problem = problems(1, length=80, seed=0)[0]
>>> len(problem.context.split()), problem.correct(f" {problem.answer}. The"), problem.correct(f"{problem.answer}0")
(80, True, False)
"""

from __future__ import annotations

import random

from decodax.bench.problems.recall import RecallProblem

FILLER = """The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. Birds sing in the
morning. The river runs to the sea. Bread is made of flour. Cats sleep all day. The train leaves at noon. Snow falls in
winter. Children play in the park. The old man reads a book. Apples grow on trees. Rain makes the roads wet. The baker
gets up early.""".replace("\n", " ").split(". ")
CITIES = """Berlin Madrid Cairo Tokyo Lima Oslo Dublin Athens Vienna Lisbon Warsaw Prague Sydney Toronto Boston Chicago
Denver Seattle Havana Delhi""".split()
NEEDLES = 4


class ProseProblem(RecallProblem):
    """A question on a text, with the number that answers it."""

    __slots__ = ()

    @property
    def prompt(self) -> str:
        return self.context + self.question

    def correct(self, text: str) -> bool:
        """Returns True if an answer begins with the number and no further digit."""
        text = text.lstrip()
        return text.startswith(self.answer) and not text[len(self.answer):len(self.answer) + 1].isdigit()


def problems(count: int, length: int, seed: int = 0) -> list[ProseProblem]:
    """Returns `count` problems with texts of `length` words.

    Raises:
        ValueError: if `length` has no room for the four sentences.
    """
    out = []
    for i in range(count):
        rng = random.Random(f"prose {length} {seed} {i}")
        keys = rng.sample(CITIES, NEEDLES)
        numbers = [str(rng.randrange(10 ** 6, 10 ** 7)) for _ in keys]
        facts = [f"One of the special magic numbers for {key} is: {number}." for key, number in zip(keys, numbers,
                                                                                                   strict=True)]
        filler = length - sum(len(fact.split()) for fact in facts)
        if filler < 0:
            raise ValueError(f"length: got {length}, takes at least {length - filler} for prose")
        words = list[str]()
        while len(words) < filler:
            words += f"{rng.choice(FILLER).rstrip('.')}.".split()
        words = words[:filler]
        ends = [0, *(j + 1 for j, word in enumerate(words) if word.endswith("."))]
        cuts = sorted(rng.choices(ends, k=NEEDLES))
        text = list[str]()
        for start, end, fact in zip([0, *cuts], [*cuts, filler], [*facts, ""], strict=True):
            text += [*words[start:end], *fact.split()]
        asked = rng.randrange(NEEDLES)
        question = (f"\nWhat is the special magic number for {keys[asked]} mentioned in the text? The special magic "
                    f"number for {keys[asked]} mentioned in the text is:")
        out.append(ProseProblem("prose", question, numbers[asked], " ".join(text)))
    return out
