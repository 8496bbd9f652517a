"""Tasks of a comparison from a file of questions: Spec-Bench's `question.jsonl`, or another file in its form.

Each line is a JSON object with `turns`, the list of a user's messages in order, and optionally a `category` and a
`question_id`. Spec-Bench (Xia et al., 2024: "Unlocking Efficiency in Large Language Model Inference: A Comprehensive
Survey of Speculative Decoding") has six tasks of 80 questions each; the categories of MT-bench together are one of
them. It runs one text at a time, greedily, with at most 1,024 new tokens, and reports the mean number of accepted
tokens and the speedup over plain decoding.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from pathlib import Path
from typing import Any

from decodax.bench.tasks import Task
from decodax.front.generate import generate
from decodax.io.load import LM

MT_BENCH = frozenset(("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"))
"""Categories that Spec-Bench counts as one task named "mt_bench"."""


@dataclasses.dataclass(frozen=True)
class Question:
    """One conversation of a file of questions.

    Attributes:
        name: the question's id in the file, or its line number.
        turns: the user's messages.
    """

    name: str
    turns: tuple[str, ...]


def questions(path: str | Path) -> list[Task]:
    """Returns the tasks of a file, one for each category, in the order of their first questions.

    A prompt is a turn with everything before it; the answers between the turns come from plain greedy decoding. If the
    model has a chat template, the prompt is a chat; otherwise the texts are joined with empty lines.

    Raises:
        ValueError: a line is not a question (the message gives its number), or the file has no questions.
    """
    groups: dict[str, list[Question]] = {}
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                given = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
            turns = given.get("turns") if isinstance(given, dict) else None
            if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t for t in turns):
                raise ValueError(f"{path}, line {number}: takes an object with turns, a list of texts")
            category = str(given.get("category", Path(path).stem))
            groups.setdefault("mt_bench" if category in MT_BENCH else category, []).append(
                Question(str(given.get("question_id", number)), tuple(turns)))
    if not groups:
        raise ValueError(f"{path}: has no questions")
    summary = lambda asked: f"greedy; {len(asked)} questions of {Path(path).name}"
    return [Task(name, summary(asked), functools.partial(_prompts, name, tuple(asked)), {"temperature": 0.0})
            for name, asked in groups.items()]


def _prompts(name: str, asked: tuple[Question, ...], lm: LM, count: int, new_tokens: int, seed: int) -> list[list[int]]:
    """Returns the token ids of the first `count` prompts of a task, question by question, one for each turn."""
    if lm.tokenizer is None:
        raise ValueError("model: has no tokenizer, which is needed to encode questions")
    turns = list(itertools.accumulate(len(q.turns) for q in asked))
    if count > turns[-1]:
        raise ValueError(f"prompts: got {count}, takes at most {turns[-1]} for {name}")
    asked = asked[:next(i for i, n in enumerate(turns) if n >= count) + 1]
    made: list[list[list[int]]] = [[] for _ in asked]
    said: list[list[str]] = [[] for _ in asked]
    for turn in range(max(len(q.turns) for q in asked)):
        here = [i for i, q in enumerate(asked) if turn < len(q.turns)]
        for i in here:
            said[i].append(asked[i].turns[turn])
            made[i].append(_encoded(lm, said[i]))
            if (room := lm.model.trained_positions) and len(made[i][-1]) + new_tokens > room:
                raise ValueError(f"question {asked[i].name}: has {len(made[i][-1])} tokens and {new_tokens} new ones, "
                                 f"more than the model's context of {room}")
        on = [i for i in here if turn + 1 < len(asked[i].turns)]
        if on:
            out = generate(lm, [made[i][-1] for i in on], max_new_tokens=new_tokens, temperature=0.0,
                           batch_size=min(8, len(on)))
            assert out.text is not None
            for i, answer in zip(on, out.text, strict=True):
                said[i].append(answer)
    return [ids for each in made for ids in each][:count]


def _encoded(lm: LM, said: list[str]) -> list[int]:
    """Returns the token ids of a conversation whose messages alternate between user and model, the user first."""
    tokenizer: Any = lm.tokenizer
    if not tokenizer.chat_templates:
        return list(tokenizer.encode("\n\n".join(said)))
    return list(tokenizer.encode_chat([{"role": role, "content": text} for role, text in zip(
        itertools.cycle(("user", "assistant")), said, strict=False)]))
