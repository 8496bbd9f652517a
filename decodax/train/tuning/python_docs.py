"""Training texts from the documentation that every Python interpreter has: the topics of `help()`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pydoc_data.topics import topics

DOCS, QUESTIONS = "python-docs", "python-questions"
"""Names that stand for a file of these texts: the topics, and questions on their sections with the answers."""

LEAST = 200
"""Characters of the shortest section that answers a question."""

QUESTION = 'What does the Python documentation say about "{}"?'

_HEADING = re.compile(r"^(\S.*)\n([*=~-])\2{2,}\n", re.MULTILINE)


def python_docs() -> Iterator[str]:
    """Yields the text of each topic of `help()`, in order."""
    yield from topics.values()


def python_questions() -> Iterator[tuple[str, str]]:
    """Yields a question on each section of the topics that has a text of its own, and that text. A title is asked for
    once."""
    asked = set()
    for text in python_docs():
        found = list(_HEADING.finditer(text))
        for here, end in zip(found, [*(x.start() for x in found[1:]), len(text)], strict=True):
            title, body = here[1].replace('"', "").strip(), text[here.end():end].strip()
            if len(body) >= LEAST and title not in asked:
                asked.add(title)
                yield QUESTION.format(title), body


__all__ = ["DOCS", "QUESTIONS", "python_docs", "python_questions"]
