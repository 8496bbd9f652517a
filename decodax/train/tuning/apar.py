"""Fine-tuning for APAR ("APAR: LLMs Can Do Auto-Parallel Auto-Regressive Decoding", Liu et al., 2024): the model learns
to write `[Fork]` where the details of an item or a paragraph may be written apart, and to write them after `[Child]`.

An answer with a list or with paragraphs becomes several examples (`decodax.search.to_apar`): the main thread with a
`[Fork]` in place of each detail, and each detail after the main thread up to it and a `[Child]`, of which the detail
alone is learned. Other answers are learned as they are, so that the model also learns where not to fork. The two
control tokens are tokens of the model that no text has, chosen by `tokens_to_write`; the tuned model's `config.json`
has them as `apar_fork_token` and `apar_child_token`, where `search="apar"` reads them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import decodax as dx
from decodax.train.tuning.examples import Example, read_examples, read_pairs, unused_tokens

MARKS = "\ue000", "\ue001"
"""Characters for private use that stand for the control tokens in texts, where a token need not have a text."""


def tokens_to_write(lm: Any, examples: Sequence[Example], fork: str | None, child: str | None) -> tuple[int, int]:
    """Returns the ids of `[Fork]` and `[Child]`, those that `fork` and `child` give by name or id; None: tokens that
    the examples do not have (`unused_tokens`).

    Raises:
        ValueError: a name is not a single token, an id is out of range, both are the same, or the examples have one.
    """
    texts = {token for example in examples for token in example.tokens}
    given = [int(x) if x is not None and x.isdecimal() else x for x in (fork, child)]
    named = {i for x in given if isinstance(x, str) for i in lm.tokenizer.encode(x, add_special_tokens=False)}
    named |= {x for x in given if isinstance(x, int)}
    free = unused_tokens(lm, texts | named, given.count(None))
    found: tuple[int, int] = dx.search.branches.control_tokens(lm, *(free.pop(0) if x is None else x for x in given))
    for name, token in zip(("fork", "child"), found, strict=True):
        if token in texts:
            raise ValueError(f"{name}: got token {token}, which the data has; takes one that it does not have")
    return found


def branching_examples(lm: Any, files: Sequence[Path], fork: int, child: int) -> list[Example]:
    """Returns the examples of files (`read_examples`), those with a list or paragraphs as the threads of APAR: main
    threads and other examples in their order, then all details.

    Args:
        lm: the model, with a tokenizer.
        files: paths.
        fork: id of `[Fork]`.
        child: id of `[Child]`.

    Raises:
        FileNotFoundError, ValueError: as in `read_examples`; or no answer has a list or paragraphs.
    """
    ids = dict(zip(MARKS, (fork, child), strict=True))

    def appended(before: Sequence[int], text: str) -> list[int]:
        made = list(before)
        for part in re.split(f"([{''.join(MARKS)}])", text):
            made += [ids[part]] if part in ids else lm.tokenizer.encode_after(made, part) if part else []
        return made

    mains: list[Example] = []
    details: list[Example] = []
    for (given, target), whole in zip(read_pairs(files, lm), read_examples(files, lm), strict=True):
        # the prompt's text is not read
        threads = [] if given is None else dx.search.to_apar("", target, fork=MARKS[0], child=MARKS[1])
        for thread in threads:
            before = appended(whole.tokens[:whole.prompt], thread.target[:thread.trained])
            tokens = *appended(before, thread.target[thread.trained:]), *lm.eos[:1]
            (details if thread.trained else mains).append(Example(tokens, len(before)))
        mains += [] if threads else [whole]
    if not details:
        raise ValueError("data: no answer has a list or paragraphs with three details, takes some that do "
                         "(decodax.search.outline)")
    return mains + details


__all__ = ["branching_examples", "tokens_to_write"]
