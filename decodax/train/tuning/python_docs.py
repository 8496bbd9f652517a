"""Training texts that every Python interpreter has: the topics of `help()`, and the source of the standard library."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pydoc_data.topics import topics

from decodax.train import corpus

DOCS, QUESTIONS, SOURCE = "python-docs", "python-questions", "python-source"
"""Names that stand for a file of these texts: the topics, questions on their sections with the answers, and the source
files that the shipped Python models were trained on."""

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


def python_source() -> Iterator[str]:
    """Yields the text of each file of the standard library that is not held out (`decodax.train.corpus`), in order."""
    yield from (document.text for document in corpus.load_corpus()[0])


__all__ = ["DOCS", "QUESTIONS", "SOURCE", "python_docs", "python_questions", "python_source"]
