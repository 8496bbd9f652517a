"""MBR and QE fine-tuning ("MBR and QE Finetuning: Training-time Distillation of the Best and Most Expensive Decoding
Methods", Finkelstein and Freitag, 2023): the model learns those of its own samples that a costly rule selects, such as
minimum Bayes risk or an estimate of quality, and is then decoded in a cheap way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import decodax as dx
from decodax.train.tuning.examples import Example

TOGETHER = 256
"""Samples that are drawn together, at most, if those of one prompt are not more."""


def selected_answers(lm: Any, examples: Sequence[Example], rule: Any, candidates: int = 32, max_new_tokens: int = 64,
                     seed: int = 0) -> list[Example]:
    """Returns the prompts of examples with the answer that a rule selects among samples of the model, at temperature 1.

    Args:
        lm: the model, with a tokenizer.
        examples: prompts; their targets are not read.
        rule: a rule of `decodax.select`, as `select=` takes it.
        candidates: number of samples of each prompt.
        max_new_tokens: largest number of tokens of an answer.
        seed: seed of the samples.

    Raises:
        ValueError: fewer than two candidates, or a text without a prompt.
    """
    if candidates < 2:
        raise ValueError(f"candidates: got {candidates}, takes at least 2")
    prompts = [list(e.tokens[:e.prompt]) for e in examples]
    if not all(prompts):
        raise ValueError(f"data: example {prompts.index([])} has no prompt; takes pairs of a prompt and a target")
    made: list[Example] = []
    count = max(TOGETHER // candidates, 1)
    for at in range(0, len(prompts), count):
        some = prompts[at:at + count]
        out = dx.generate(lm, some, select=rule, num_samples=candidates, temperature=1.0, top_k=0, top_p=1.0,
                          max_new_tokens=max_new_tokens, seed=seed, request_ids=range(at, at + len(some)))
        made += [Example((*given, *out.row(i).tolist()), len(given)) for i, given in enumerate(some)]
    return made


__all__ = ["selected_answers"]
