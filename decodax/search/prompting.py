"""Methods that combine the answers to several prompts."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from decodax.common.registry import FUNCTIONS
from decodax.engine.methods import text_model
from decodax.front.generate import generate


@dataclasses.dataclass(frozen=True)
class Ensembled:
    """The result of `pedal`.

    Attributes:
        text: the final text of each prompt.
        answers: the answers of each prompt from which the final text was made.
        tokens: number of tokens generated, for all prompts together.
    """

    text: list[str]
    answers: list[list[str]]
    tokens: int


def summary(prompt: Any, answers: Sequence[str]) -> str:
    """Returns a prompt that lists several answers and asks for the answer on which most of them agree."""
    listed = "".join(f"{i + 1}. {answer.strip()}\n" for i, answer in enumerate(answers))
    return f"{prompt}\nSeveral people answered:\n{listed}The answer on which most agree: "


@FUNCTIONS.register("search.pedal",
                    "PEDAL: Enhancing Greedy Decoding with Large Language Models using Diverse Exemplars",
                    "Prabhu 2024", "greedy answers after different exemplars, of which the model makes one")
def pedal(lm: Any, prompts: Any, exemplars: Sequence[str], n: int = 3, shots: int = 3, *,
          join: Callable[[Sequence[str], Any], str] = lambda shots, prompt: "\n\n".join([*shots, str(prompt)]),
          aggregate: Callable[[Any, Sequence[str]], str] = summary, seed: int = 0, **options: Any) -> Ensembled:
    """PEDAL (Prabhu, 2024): greedy answers after different exemplars, which the model combines into one answer.

    Each of `n` copies of a prompt begins with `shots` exemplars, drawn without replacement; all copies are answered
    greedily in one batch. The model then gets the answers in a second prompt and generates the final answer.

    Args:
        lm: the model.
        prompts: one or several.
        exemplars: solved examples, as texts.
        n: number of answers to each prompt.
        shots: number of exemplars before a prompt.
        join: makes a prompt from exemplars and the bare prompt.
        aggregate: makes the second prompt from the bare prompt and the answers.
        seed: seed of the choice of exemplars.
        options: options of `generate`; greedy by default.

    Raises:
        ValueError: fewer exemplars than `shots`, or as in `generate`.
    """
    if shots > len(exemplars):
        raise ValueError(f"shots: got {shots} with {len(exemplars)} exemplars, takes at most as many")
    lm = text_model(lm, "its answers are read as texts")
    given = [prompts] if isinstance(prompts, str) else list(prompts)
    asked = []
    for p, prompt in enumerate(given):
        rng = np.random.default_rng([seed, p])
        asked += [join([exemplars[i] for i in rng.choice(len(exemplars), shots, replace=False)], prompt)
                  for _ in range(n)]
    first = generate(lm, asked, **options)
    assert first.text is not None
    answers = [first.text[p * n:(p + 1) * n] for p in range(len(given))]
    last = generate(lm, [aggregate(prompt, row) for prompt, row in zip(given, answers, strict=True)], **options)
    assert last.text is not None
    return Ensembled(last.text, answers, int(first.lengths.sum() + last.lengths.sum()))


@dataclasses.dataclass(frozen=True)
class Batched:
    """The result of `batch_prompt`.

    Attributes:
        answers: the answer to each item; None if no round gave one.
        votes: for each item, the number of rounds that gave its answer, and the number of rounds that asked it.
        prompts: number of prompts that were answered.
    """

    answers: list[Hashable | None]
    votes: list[tuple[int, int]]
    prompts: int


@FUNCTIONS.register("search.batch_prompt", "BatchPrompt: Accomplish more with less", "Lin et al. 2024",
                    "many items in one prompt, asked again in other orders")
def batch_prompt(lm: Any, items: Sequence[str], ask: Callable[[Sequence[str]], str],
                 read: Callable[[str, int], Sequence[tuple[Hashable | None, bool]]], *, size: int = 16,
                 rounds: int = 5, seed: int = 0, **options: Any) -> Batched:
    """BatchPrompt (Lin et al., 2024): many items in one prompt, asked repeatedly in different orders.

    In each round the items are shuffled and put into prompts of `size` items; the answer to an item is the one that
    most rounds gave (batch permutation and ensembling). An item to which two rounds in a row gave the same answer, both
    marked as sure, is not asked again (self-reflection-guided early stopping).

    Args:
        lm: the model.
        items: the items.
        ask: makes one prompt from several items.
        read: takes a generated text and its number of items; returns for each item the answer (or None) and True if the
            model is sure of it.
        size: number of items in a prompt.
        rounds: maximum number of rounds.
        seed: seed of the orders.
        options: options of `generate`.

    Raises:
        ValueError: `read` returns a list whose length is not the number of items, or as in `generate`.
    """
    lm, rng = text_model(lm, "its answers are read as texts"), np.random.default_rng(seed)
    given: list[list[Hashable]] = [[] for _ in items]
    sure: list[Hashable | None] = [None] * len(items)
    open_, count, was = list(range(len(items))), 0, [0] * len(items)
    for _ in range(rounds):
        if not open_:
            break
        order = [open_[i] for i in rng.permutation(len(open_))]
        parts = [order[i:i + size] for i in range(0, len(order), size)]
        texts = generate(lm, [ask([items[i] for i in part]) for part in parts], **options).text
        assert texts is not None
        count += len(parts)
        for part, text in zip(parts, texts, strict=True):
            found = list(read(text, len(part)))
            if len(found) != len(part):
                raise ValueError(f"read: got {len(found)} answers for {len(part)} items, takes one for each")
            for i, (answer, certain) in zip(part, found, strict=True):
                was[i] += 1
                if answer is None:
                    sure[i] = None
                    continue
                given[i].append(answer)
                if certain and sure[i] == answer:
                    open_.remove(i)
                sure[i] = answer if certain else None
    best = [Counter(row).most_common(1)[0] if row else (None, 0) for row in given]
    return Batched([answer for answer, _ in best], [(votes, n) for (_, votes), n in zip(best, was, strict=True)], count)


@dataclasses.dataclass(frozen=True)
class Sketched:
    """The result of `sketch_guided`.

    Attributes:
        text: the text of each prompt, which satisfies the constraint.
        sketches: the sketch of each prompt.
    """

    text: list[str]
    sketches: list[str]


@FUNCTIONS.register("search.sketch_guided", "Sketch-Guided Constrained Decoding for Boosting Blackbox Large Language "
                    "Models without Logit Access", "Geng et al. 2024",
                    "a black box sketches, a local model writes under a constraint")
def sketch_guided(lm: Any, prompts: Any, sketch: Callable[[Any], str], *,
                  ask: Callable[[Any, str], str] = lambda prompt, sketch: f"{prompt}\nDraft: {sketch}\nFinal: ",
                  **constraint: Any) -> Sketched:
    """Sketch-guided constrained decoding (Geng et al., 2024).

    A model whose logits are not accessible writes a sketch. The local model then gets the sketch in its prompt and
    generates the text under a constraint.

    Args:
        lm: the local model.
        prompts: one or several.
        sketch: returns the sketch of a prompt, for example by a call to a remote model.
        ask: makes the local model's prompt from a prompt and its sketch.
        constraint: `regex`, `json_schema`, `grammar`, ... and other arguments of `generate`.

    Raises:
        ValueError: as in `generate`.
    """
    lm = text_model(lm, "texts are held to a constraint")
    given = [prompts] if isinstance(prompts, str) else list(prompts)
    sketches = [sketch(prompt) for prompt in given]
    out = generate(lm, [ask(p, s) for p, s in zip(given, sketches, strict=True)], **constraint)
    assert out.text is not None
    return Sketched(out.text, sketches)
