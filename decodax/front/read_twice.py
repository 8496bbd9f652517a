"""JRT-Prompt: a prompt that contains its context twice ("Just read twice: closing the recall gap for recurrent language
models", Arora et al., 2024).

A recurrent state of constant size cannot hold all of a context, and what it should hold is known only after the
question. When the context comes for the second time, the model has already seen the question.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from decodax.common.registry import FUNCTIONS

FORMS = ("context question context question", "question context context question")


@FUNCTIONS.register("read_twice", "Just read twice: closing the recall gap for recurrent language models",
                    "Arora et al. 2024", "a prompt with its context twice")
def read_twice(prompt: Any, question: Any = None, between: Any = "\n", form: str = FORMS[0]) -> Any:
    """Returns a prompt that contains its context twice.

    Args:
        prompt: a text, token ids, or a chat. With a `question` it is the context; otherwise it is both, and the whole
            prompt is repeated. In a chat, the last message of the user is repeated within that message.
        question: a text or token ids, of the same kind as `prompt`.
        between: a text between two parts, or token ids if `prompt` is token ids (a text has no effect there).
        form: the order of context and question. The first form is that of the paper; in the second one, the question
            comes before the context, as in most of the authors' evaluations.

    Returns:
        A text, a list of token ids, or a list of messages: a prompt for `generate`.

    Raises:
        ValueError: an unknown form, a chat without a message of the user, or a chat with a question.
        TypeError: `prompt` or `question` is of another kind.

    >>> read_twice("Ann is 7. Bob is 9.", "How old is Ann?", between=" ")
    'Ann is 7. Bob is 9. How old is Ann? Ann is 7. Bob is 9. How old is Ann?'
    >>> read_twice([3, 1, 4], [9], form="question context context question")
    [9, 3, 1, 4, 3, 1, 4, 9]
    """
    if form not in FORMS:
        raise ValueError(f"form: got {form!r}, takes one of {', '.join(map(repr, FORMS))}")
    if isinstance(prompt, str):
        if question is not None and not isinstance(question, str):
            raise TypeError(f"question: got {type(question).__name__}, takes a text beside one")
        return str(between).join(_parts(prompt, question, form))
    if not isinstance(prompt, Sequence) and not hasattr(prompt, "tolist"):
        raise TypeError(f"prompt: got {type(prompt).__name__}, takes a text, token ids or a chat")
    rows = list(prompt)
    if rows and isinstance(rows[0], Mapping):
        return _chat(rows, question, between)
    if isinstance(question, str):
        raise TypeError("question: got a text, takes token ids beside some")
    ids: list[int] = []
    for part in _parts(rows, question, form):
        ids += [*([] if not ids or isinstance(between, str) else between), *part]
    return [int(token) for token in ids]


def _parts(context: Any, question: Any, form: str) -> list[Any]:
    if question is None:
        return [context, context]
    return [context if word == "context" else question for word in form.split()]


def _chat(messages: list[Mapping[str, Any]], question: Any, between: Any) -> list[Mapping[str, Any]]:
    if question is not None:
        raise ValueError("question: got one beside a chat, whose last message of the user has it")
    mine = [i for i, message in enumerate(messages) if message.get("role") == "user"]
    if not mine or not isinstance(messages[mine[-1]].get("content"), str):
        raise ValueError("prompt: got a chat without a text of the user, takes one with some")
    last = messages[mine[-1]]
    return [*messages[:mine[-1]], {**last, "content": read_twice(last["content"], between=between)},
            *messages[mine[-1] + 1:]]
