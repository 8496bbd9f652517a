"""Tasks of a comparison from a file of questions: Spec-Bench's `question.jsonl`, a split of SPEED-Bench, or another
file in their form.

Each line is a JSON object with `turns`, the list of a user's messages in order, and optionally a `category` and a
`question_id`. Spec-Bench (Xia et al., 2024: "Unlocking Efficiency in Large Language Model Inference: A Comprehensive
Survey of Speculative Decoding") has six tasks of 80 questions each; the categories of MT-bench together are one of
them. It runs one text at a time, greedily, with at most 1,024 new tokens, and reports the mean number of accepted
tokens and the speedup over plain decoding.

SPEED-Bench (Abramovich et al., 2026: "SPEED-Bench: A Unified and Diverse Benchmark for Speculative Decoding") has 11
categories of 80 questions each, of which none are counted together, and prompts of fixed lengths in three categories of
entropy. Its rows also have `sub_category`, `source`, `src_id`, `difficulty` and `multiturn`, and once they are prepared
`messages` with a role and a content each in place of `turns`. They are published as Parquet files, in which many texts
are placeholders until the authors' script has fetched them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from decodax.bench.tasks import Task
from decodax.front.generate import generate
from decodax.io.load import LM
from decodax.jobs.lines import LineError, rows

MT_BENCH = frozenset(("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"))
"""Categories that Spec-Bench counts as one task named "mt_bench"."""

APART = "sub_category", "src_id", "multiturn", "messages"
"""Fields of SPEED-Bench's rows that Spec-Bench's do not have. Categories of rows with one of them stay apart."""

UNFETCHED = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
"""The beginning of a text of SPEED-Bench that its script has not fetched yet."""


@dataclasses.dataclass(frozen=True)
class Question:
    """One conversation of a file of questions.

    Attributes:
        name: the question's id in the file, or its line number.
        turns: the user's messages.
        system: the system's message before them, or None.
    """

    name: str
    turns: tuple[str, ...]
    system: str | None = None


def questions(path: str | Path, temperature: float = 0.0, top_p: float | None = None) -> list[Task]:
    """Returns the tasks of a file, one for each category, in the order of their first questions.

    A prompt is a turn with everything before it; the answers between the turns come from plain greedy decoding at any
    temperature, so the prompts of a file are the same. If the model has a chat template, the prompt is a chat;
    otherwise the texts are joined with empty lines.

    Args:
        path: a file of JSON lines, or a Parquet file or a directory of such files.
        temperature: that of the continuations; 0: greedy.
        top_p: their nucleus; None: all tokens.

    Raises:
        ValueError: a line is not a question (the message gives its number), the file has no questions, or `top_p` is
            given without a temperature.
    """
    if top_p is not None and not temperature:
        raise ValueError(f"top_p: got {top_p} with temperature 0, which is greedy; takes None")
    groups: dict[str, list[Question]] = {}
    for number, given in _rows(Path(path)):
        where = f"{path}, line {number}"
        if isinstance(given, LineError):
            raise ValueError(f"{where}: {given}")
        found = _said(given, where)
        if any(text.startswith(UNFETCHED) for _, text in found):
            raise ValueError(f"{where}: has a placeholder in place of a text, which the authors' script fetches")
        category = str(given.get("category") or Path(path).stem)
        together = category in MT_BENCH and not any(key in given for key in APART)
        groups.setdefault("mt_bench" if together else category, []).append(Question(
            str(number if (name := given.get("question_id")) is None else name),
            tuple(text for role, text in found if role == "user"),
            next((text for role, text in found if role == "system"), None)))
    if not groups:
        raise ValueError(f"{path}: has no questions")
    sampling = {"temperature": temperature} | ({} if top_p is None else {"top_p": top_p})
    how = "greedy" if not temperature else ", ".join(f"{key.replace('_', '-')} {x:g}" for key, x in sampling.items())
    summary = lambda asked: f"{how}; {len(asked)} questions of {Path(path).name}"
    return [Task(name, summary(asked), functools.partial(_prompts, name, tuple(asked)), sampling)
            for name, asked in groups.items()]


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Yields the rows of a file with their numbers, from 1."""
    if path.suffix == ".parquet" or path.is_dir():
        yield from rows(path)
        return
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error


def _said(given: Any, where: str) -> list[tuple[str, str]]:
    """Returns the role and the text of each message of a row.

    Raises:
        ValueError: the row has neither turns nor messages in the form of a question.
    """
    takes = f"{where}: takes an object with turns, a list of texts"
    if not isinstance(given, Mapping):
        raise ValueError(takes)
    messages, turns = given.get("messages"), given.get("turns")
    if messages is None and isinstance(turns, list):
        messages = [{"role": "user", "content": text} for text in turns]
    if not isinstance(messages, list) or not messages or not all(
            isinstance(m, Mapping) and isinstance(m.get("content"), str) and m["content"] for m in messages):
        raise ValueError(f"{takes}, or messages, a list of objects with role and content")
    found = [(str(m.get("role")), str(m["content"])) for m in messages]
    roles = [role for role, _ in found]
    if {*roles[roles[0] == "system":]} != {"user"}:
        raise ValueError(f"{where}: messages: got the roles {', '.join(roles)}, takes those of a user, and before them "
                         "one of the system")
    return found


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
            made[i].append(_encoded(lm, said[i], asked[i].system))
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


def _encoded(lm: LM, said: list[str], system: str | None) -> list[int]:
    """Returns the token ids of a conversation whose messages alternate between user and model, the user first, after
    the system's message `system`, if there is one."""
    tokenizer: Any = lm.tokenizer
    first = [] if system is None else [{"role": "system", "content": system}]
    if not tokenizer.chat_templates:
        return list(tokenizer.encode("\n\n".join([message["content"] for message in first] + said)))
    return list(tokenizer.encode_chat(first + [{"role": role, "content": text} for role, text in zip(
        itertools.cycle(("user", "assistant")), said, strict=False)]))
