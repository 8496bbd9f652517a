"""Extended autoregressive decoding: the model reads the head of a queue of tokens, and its output is appended to the
tail.

With a window of fixed size, such a model is a lag system, a machine whose tape is a queue. Lag systems can compute
whatever a Turing machine computes (Schuurmans, Dai and Zanini, 2024, "Autoregressive Large Language Models are
Computationally Universal").
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from decodax.common.arguments import whole
from decodax.common.registry import FUNCTIONS
from decodax.engine.methods import model
from decodax.front.generate import generate
from decodax.io.load import LM
from decodax.io.prompts import prompt_rows, read_prompt, read_prompts, spell

Halt = Callable[[Sequence[int]], bool]


@dataclasses.dataclass(frozen=True)
class Run:
    """The result of `lag_decode`; the lists have an entry for each string.

    Attributes:
        queue: the token ids that are left in the queue.
        written: all token ids that were appended.
        steps: number of steps.
        halted: True if the string ended by itself, and not because `steps` were reached.
    """

    queue: list[list[int]]
    written: list[list[int]]
    steps: list[int]
    halted: list[bool]


@FUNCTIONS.register("search.lag_decode", "Autoregressive Large Language Models are Computationally Universal",
                    "Schuurmans et al. 2024", "a text as a queue: read at the head, written at the tail")
def lag_decode(lm: LM | Any, strings: Any, *, window: int, advance: int = 1, steps: int = 100, most: int = 8,
               end: int | Sequence[int] | None = None, halt: Halt | None = None, system: Any = (), seed: int = 0,
               **sampling: Any) -> Run:
    """Runs strings as queues: extended autoregressive decoding (Schuurmans, Dai and Zanini, 2024).

    In each step the model reads the first `window` tokens of each string, its output is appended to the end of the
    string, and the first `advance` tokens are removed. The strings run side by side; the tokens of a string depend on
    its index and on `seed`, but not on the other strings. With sampling, each step draws new random numbers.

    Args:
        lm: the model.
        strings: one or several texts or lists of ids.
        window: number of tokens that the model reads in a step, `N` in the paper.
        advance: number of tokens that are removed after each step.
        steps: maximum number of steps.
        most: maximum number of tokens that a step appends.
        end: the token or tokens that end the output of a step; they are not appended. None: those of the model.
        halt: returns True if a string ends; takes the token ids that are left in it. A string shorter than the window
            always ends.
        system: a text or ids before each window, such as a list of rules. Strings given as texts are tokenized as its
            continuation.
        seed: seed of the random numbers.
        sampling: arguments of `generate`; greedy by default.

    Raises:
        ValueError: a number out of its range, a string shorter than the window, or as in `generate`.

    >>> import decodax as dx
    >>> run = dx.search.lag_decode(dx.load("pycode"), [list(range(40, 60))], window=8, steps=3, most=2)
    >>> run.steps, len(run.queue[0]) == 20 - 3 + len(run.written[0])
    ([3], True)
    """
    lm = model(lm)
    window, advance, most = whole("window", window, 1), whole("advance", advance, 1), whole("most", most, 1)
    if advance > window:
        raise ValueError(f"advance: got {advance} with a window of {window}, takes at most the window")
    for name in ("num_samples", "num_return_sequences", "request_ids", "max_new_tokens", "eos_token_id"):
        if name in sampling:
            raise TypeError(f"{name}: lag_decode takes no such argument")
    front = [] if isinstance(system, (list, tuple)) and not system else read_prompts(lm, [system], "system")[0]
    queue = [spell(lm, row, name, after=front) if front and isinstance(row, str) else list(read_prompt(lm, row, name))
             for row, name in prompt_rows(strings, "strings")]
    if short := [len(ids) for ids in queue if len(ids) < window]:
        raise ValueError(f"strings: got one of {short[0]} tokens, takes at least the window's {window}")
    ends = set(lm.eos if end is None else [end] if isinstance(end, int) else end)
    written: list[list[int]] = [[] for _ in queue]
    taken, halted = [0] * len(queue), [False] * len(queue)
    for step in range(whole("steps", steps, 0)):
        for i, ids in enumerate(queue):
            halted[i] = halted[i] or len(ids) < window or (halt is not None and bool(halt(ids)))
        if all(halted):
            break
        # Strings that have ended are read too, so that a step has a fixed shape.
        heads = [front + (ids[:window] if not halted[i] else [0] * window) for i, ids in enumerate(queue)]
        out = generate(lm, heads, max_new_tokens=[1 if done else most for done in halted], eos_token_id=sorted(ends),
                       seed=seed + (step << 32), request_ids=list(range(len(queue))), **sampling)
        for i, ids in enumerate(queue):
            if halted[i]:
                continue
            new = [t for t in out.row(i).tolist() if t not in ends]
            written[i] += new
            queue[i] = ids[advance:] + new
            taken[i] += 1
    halted = [done or len(ids) < window or (halt is not None and bool(halt(ids)))
              for done, ids in zip(halted, queue, strict=True)]
    return Run(queue, written, taken, halted)
