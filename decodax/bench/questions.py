"""Questions from a file as tasks of a comparison: Spec-Bench's `question.jsonl`, or any in its form.

Each line is a JSON object with `turns`, a list of what a user says one after the other, and may have a `category` and a
`question_id`. Spec-Bench (Xia et al., 2024: "Unlocking Efficiency in Large Language Model Inference: A Comprehensive
Survey of Speculative Decoding") has six tasks of 80 questions each; the categories of MT-bench are one of them. Its
setting is one text at a time, greedy, at most 1,024 new tokens; its figures are the mean of accepted tokens and the
speedup over plain decoding.
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
"""Categories that Spec-Bench counts as one task, "mt_bench"."""


@dataclasses.dataclass(frozen=True)
class Question:
    """What a user says, turn by turn. `name` is its id in the file, or its line."""

    name: str
    turns: tuple[str, ...]


def questions(path: str | Path) -> list[Task]:
    """The tasks of a file, one a category, in the order in which they come.

    A prompt is a turn with all that was said before it; between two turns stands the answer that plain greedy decoding
    gives. A model with a chat template is asked as a chat, another one gets the texts with empty lines between them.

    Raises:
        ValueError: a line that is no question, by its number; a file without questions.
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
        raise ValueError(f"{path}: there are no questions")
    summary = lambda asked: f"greedy; {len(asked)} questions of {Path(path).name}"
    return [Task(name, summary(asked), functools.partial(_prompts, name, tuple(asked)), {"temperature": 0.0})
            for name, asked in groups.items()]


def _prompts(name: str, asked: tuple[Question, ...], lm: LM, count: int, new_tokens: int, seed: int) -> list[list[int]]:
    """Token ids of the first `count` turns, question by question."""
    if lm.tokenizer is None:
        raise ValueError("model: has no tokenizer, and questions are texts")
    turns = list(itertools.accumulate(len(q.turns) for q in asked))
    if count > turns[-1]:
        raise ValueError(f"prompts: got {count}, {name} has {turns[-1]}")
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
                                 f"the model was made for {room}")
        on = [i for i in here if turn + 1 < len(asked[i].turns)]
        if on:
            out = generate(lm, [made[i][-1] for i in on], max_new_tokens=new_tokens, temperature=0.0,
                           batch_size=min(8, len(on)))
            assert out.text is not None
            for i, answer in zip(on, out.text, strict=True):
                said[i].append(answer)
    return [ids for each in made for ids in each][:count]


def _encoded(lm: LM, said: list[str]) -> list[int]:
    """What user and model have said in turn, the user first."""
    tokenizer: Any = lm.tokenizer
    if not tokenizer.chat_templates:
        return list(tokenizer.encode("\n\n".join(said)))
    return list(tokenizer.encode_chat([{"role": role, "content": text} for role, text in zip(
        itertools.cycle(("user", "assistant")), said, strict=False)]))
