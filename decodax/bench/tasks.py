"""Prompts for comparing decoding methods: code that the shipped models were not trained on, copied code, and sampled
code.

The text comes from the standard library of the running interpreter, from files that `decodax.train.corpus` excludes
from the training of `pycode` and its tokenizer. So nothing is downloaded, and the prompts depend only on the Python
version and a seed.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import re
import sysconfig
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from decodax.front.generate import generate
from decodax.io.load import LM
from decodax.train.corpus import load_corpus

SHORTEST, LONGEST = 24, 96
"""The shortest and the longest head of a prompt, in tokens. The prompts of a task then have similar lengths and share
few compiled programs."""

RUN = 8
"""The number of consecutive tokens that count as a copy."""

@dataclasses.dataclass(frozen=True)
class Task:
    """Prompts and the sampling settings of their continuations.

    Attributes:
        name: the name, such as "copy-edit".
        summary: a description in one line.
        prompts: function `(lm, count, new_tokens, seed)` that returns the token ids of `count` prompts; it returns the
            same prompts at every call, and a larger count only appends prompts.
        sampling: keyword arguments of `generate`.
    """

    name: str
    summary: str
    prompts: Callable[[LM, int, int, int], list[list[int]]]
    sampling: Mapping[str, Any]


def held_out_files(root: Path | None = None) -> list[tuple[str, str]]:
    """Returns the files that `pycode` was not trained on, in a fixed order, as pairs of path and text.

    Args:
        root: directory of .py files, to which paths are relative (with "/"); the same rule holds files out of it. None:
            the standard library of this interpreter.
    """
    return [(document.path, document.text) for document in load_corpus(root)[1]]


def functions(files: Sequence[tuple[str, str]], seed: int) -> list[str]:
    """Returns the unindented source of every function and method. The functions of the files alternate, one from each
    file in turn, in an order that depends on `seed`."""
    found = []
    for path, text in files:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")       # test files contain unusual literals
            try:
                tree = ast.parse(text)
            except (SyntaxError, ValueError):
                continue
        lines = text.split("\n")
        each = []
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                order = hashlib.sha256(f"{seed}:{path}:{node.lineno}".encode()).digest()
                each.append((order, textwrap.dedent("\n".join(lines[node.lineno - 1:node.end_lineno]))))
        found += [(turn, *function) for turn, function in enumerate(sorted(each))]
    return [source for *_, source in sorted(found)]


def heads(lm: LM, count: int, longest: int, seed: int) -> list[str]:
    """Returns the first halves of `count` held-out functions, cut at a line end, with `SHORTEST` to `longest` tokens.

    Raises:
        ValueError: the model has no tokenizer, or there are fewer such functions.
    """
    if lm.tokenizer is None:
        raise ValueError("model: has no tokenizer, which the tasks need to encode texts")
    out: list[str] = []
    for source in functions(held_out_files(), seed):
        lines = source.split("\n")
        head = "\n".join(lines[:(len(lines) + 1) // 2]).rstrip()
        if head not in out and SHORTEST <= len(lm.tokenizer.encode(head)) <= longest:
            out.append(head)
        if len(out) == count:
            return out
    raise ValueError(f"prompts: got {count}, the held-out files of {sysconfig.get_path('stdlib')} have {len(out)} "
                     f"functions with a first half of {SHORTEST} to {longest} tokens")


def completion(lm: LM, count: int, new_tokens: int, seed: int) -> list[list[int]]:
    """Returns the token ids of `count` prompts, the first halves of held-out functions, chosen by `seed`. Each fits
    into the model's context together with `new_tokens` more."""
    texts = heads(lm, count, _longest(lm, new_tokens, copies=1), seed)
    return [lm.tokenizer.encode(text) for text in texts] if lm.tokenizer else []


def copy_edit(lm: LM, count: int, new_tokens: int, seed: int) -> list[list[int]]:
    """Returns prompts that consist of a function, whose second half the model itself has completed greedily, and then
    its first half again with the function renamed.

    The expected continuation is a copy of the second half. A large model copies any text, but one as small as `pycode`
    copies little beyond what it would have generated anyway; so the text to copy is the model's own output. `copied`
    measures the share of copied tokens.
    """
    texts = heads(lm, count, _longest(lm, new_tokens, copies=2), seed)
    assert lm.tokenizer is not None
    tokenizer = lm.tokenizer
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
    first = [tokenizer.encode(text) for text in texts]
    written = generate(lm, first, max_new_tokens=new_tokens, temperature=0.0)
    out = []
    for i, text in enumerate(texts):
        body = [token for token in written.row(i).tolist() if token not in lm.eos]
        again = re.sub(r"^(async def|def)( \w+)", r"\1\2_2", text)
        out.append(first[i] + body + encode("\n\n\n") + encode(again))
    return out


def _longest(lm: LM, new_tokens: int, copies: int) -> int:
    """Returns the maximum length of a head in tokens, such that `copies` times head and new tokens fit into the model's
    context."""
    context = lm.model.trained_positions or 1 << 30
    room = min(LONGEST, context // copies - new_tokens - 8)
    if room < SHORTEST:
        raise ValueError(f"new_tokens: got {new_tokens}, takes at most {context // copies - SHORTEST - 8} for this "
                         f"task and a model with a context of {context} tokens")
    return room


def copied(prompt: list[int], new: list[int], own: bool = False) -> float:
    """Returns the share of new tokens that end a sequence of `RUN` tokens which occurs in the prompt, or with `own` in
    the prompt or earlier output.

    >>> copied(list(range(20)), [*range(5, 15), 99, 99]), copied([0], [1] * 16), copied([0], [1] * 16, own=True)
    (0.25, 0.0, 0.5)
    """
    text = prompt + new
    run = lambda end: tuple(text[max(end - RUN, 0):end])
    runs = {run(end) for end in range(RUN, len(prompt) + 1)}
    hits = 0
    for end in range(len(prompt) + 1, len(text) + 1):
        hits += run(end) in runs
        if own:
            runs.add(run(end))
    return hits / max(len(new), 1)


def sampled(temperature: float = 0.8, top_p: float = 0.95) -> Task:
    """Returns the task of continuing the first halves of held-out functions, sampled with these options."""
    return Task("sampled", f"the prompts of completion at temperature {temperature:g}, top-p {top_p:g}",
                completion, {"temperature": temperature, "top_p": top_p})


TASKS = {task.name: task for task in (
    Task("copy-edit", "greedy; a function, then its first half again under another name: the rest is a copy",
         copy_edit, {"temperature": 0.0}),
    Task("completion", "greedy; the first half of a function that the shipped models were not trained on",
         completion, {"temperature": 0.0}),
    sampled(),
)}
"""The tasks by name."""
