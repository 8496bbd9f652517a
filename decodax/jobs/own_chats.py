"""Chats that a model writes itself, both the questions and the answers, as data for a drafter of that model.

A chat model that reads its template up to the place of the user's words goes on with a question, and then answers it
like any other (Magpie; Xu et al., 2024, "Magpie: Alignment Data Synthesis from Scratch by Prompting Aligned LLMs with
Nothing"). No prompts are needed, and the text is the model's own, which is what a drafter has to predict.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from decodax.front.generate import generate

ROWS = 64
"""Chats that are written together."""

MARK = "\x1f"
"""A character that stands for the user's words in a chat, and occurs in no template."""


def question_prompt(lm: Any) -> list[int]:
    """Returns the token ids of a chat up to the place where the user's words begin.

    Raises:
        ValueError: the model has no tokenizer or chat template, or its template leaves out the user's words.
    """
    if lm.tokenizer is None:
        raise ValueError(f"target: got {lm.name!r}, which has no tokenizer; takes a chat model with one")
    before, mark, _ = lm.tokenizer.chat_text([{"role": "user", "content": MARK}]).partition(MARK)
    if not mark:
        raise ValueError(f"target: the chat template of {lm.name!r} leaves out the words of the user")
    return lm.tokenizer.encode(before, add_special_tokens=False)


def write_chats(lm: Any, path: Path, count: int, *, question: int = 48, answer: int = 192, temperature: float = 0.6,
                seed: int = 0, report: Callable[[int], None] = lambda done: None) -> None:
    """Writes chats to a file of JSON lines with "id", "messages" and "text", the answer, as `decodax batch` does. The
    chats of a file that is there already are kept, so a run that was killed goes on.

    Questions are drawn at temperature 1; those that have no end, or were asked before, are left out.

    Args:
        lm: a chat model, a result of `decodax.load`.
        path: the file.
        count: number of chats that are begun.
        question: largest number of tokens of a question.
        answer: largest number of tokens of an answer.
        temperature: temperature of the answers.
        seed: seed of the draws.
        report: called with the number of chats that are begun, after every `ROWS` of them.

    Raises:
        ValueError: see `question_prompt`.
    """
    before = question_prompt(lm)
    kept = [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.is_file() else []
    asked, begun = {row["messages"][0]["content"] for row in kept}, 0
    if kept:
        begun = ROWS * (kept[-1]["id"] // ROWS + 1)
    while begun < count:
        ids = range(begun, min(begun + ROWS, count))
        same: dict[str, Any] = dict(seed=seed, request_ids=ids)
        words = generate(lm, [before] * len(ids), max_new_tokens=question, temperature=1.0, **same)
        new: dict[str, int] = {}
        for i, text, status in zip(ids, words.text or (), words.status, strict=True):
            if status.name == "EOS" and text.strip() not in asked | {""}:
                new.setdefault(text.strip(), i)
        if new:
            chats: list[Any] = [[{"role": "user", "content": text}] for text in new]
            made = generate(lm, chats, max_new_tokens=answer, temperature=temperature, seed=seed,
                            request_ids=list(new.values()))
            lines = [json.dumps({"id": i, "messages": chat, "text": text}) for i, chat, text in zip(
                new.values(), chats, made.text or (), strict=True)]
            with path.open("a", encoding="utf-8") as file:
                file.write("".join(line + "\n" for line in lines))
        asked |= new.keys()
        begun = ids.stop
        report(begun)


__all__ = ["question_prompt", "write_chats"]
