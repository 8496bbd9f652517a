"""Self-infilling: where the model is uncertain, it generates the end of a text first, and then the missing middle."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.common.registry import FUNCTIONS
from decodax.common.struct import struct
from decodax.core.state import Status
from decodax.core.stops import stop_strings
from decodax.engine.methods import text_model
from decodax.front.generate import generate
from decodax.io.appended import appended
from decodax.io.load import LM
from decodax.sampling.base import Context, PyTree, Transform
from decodax.search.forks import Forks


@struct
class Phases(Transform):
    """The automaton over the three tokens of an infilling model (`<PRE>`, `<SUF>`, `<MID>`). Its phase follows from the
    text so far.

    - Before `<SUF>`, the model generates freely. If the probability of its most likely token is below `tau`, and the
      last line does not yet contain `opening`, `<SUF>` is forced.
    - After `<SUF>`, the tokens `opening` are forced; then the model generates the suffix and may generate `<MID>`.
    - After `<MID>`, it generates the middle.

    In all other cases the three tokens are forbidden.

    Attributes:
        marks: `i32[B, 3]`, ids of the three tokens.
        tau: `f32[B]`, threshold of the probability.
        opening: `i32[B, F]`, the first tokens of the suffix, padded with -1.
        breaks: `i32[B, L]`, tokens that end a line, padded with -1.
    """

    marks: Array
    tau: Array
    opening: Array
    breaks: Array

    needs = "sequence"

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        place = jnp.arange(ctx.tokens.shape[0])
        here = place < ctx.length
        last = jnp.where((ctx.tokens[:, None] == self.marks) & here[:, None], place[:, None], -1).max(0)
        behind_suffix, behind_middle = last[1] >= 0, last[2] >= 0
        vocabulary = jnp.arange(logits.shape[-1])
        banned = (vocabulary[:, None] == self.marks).any(-1)
        banned = banned & ~((vocabulary == self.marks[2]) & behind_suffix & ~behind_middle)
        logits = jnp.where(banned, -jnp.inf, logits)

        only = lambda token: jnp.where(vocabulary == token, 0.0, -jnp.inf)
        unsure = jax.nn.softmax(logits).max() < self.tau
        stops = ~behind_suffix & ~behind_middle & unsure & ~self._begun(ctx, place, here)
        logits = jnp.where(stops, only(self.marks[1]), logits)
        at = ctx.length - 1 - last[1]
        forced = jnp.where(at < self.opening.shape[0], self.opening[jnp.minimum(at, self.opening.shape[0] - 1)], -1)
        return jnp.where(behind_suffix & ~behind_middle & (forced >= 0), only(forced), logits)

    def _begun(self, ctx: Context, place: Array, here: Array) -> Array:
        """True if `opening` occurs in the last line of the generated text."""
        wanted = self.opening >= 0
        ahead = jnp.minimum(place[:, None] + jnp.arange(self.opening.shape[0]), place.shape[0] - 1)
        hit = ((ctx.tokens[ahead] == self.opening) | ~wanted).all(-1)
        ends = place + wanted.sum() <= ctx.length
        line = jnp.where((ctx.tokens[:, None] == self.breaks).any(-1) & here, place, -1).max()
        return (hit & ends & (place > line) & (place >= ctx.prompt_length)).any() & wanted.any()


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of the text that an infilling has generated.

    Attributes:
        before: the text before the interruption; the whole text if there was none.
        middle: the middle, generated last; empty without an interruption.
        after: the end of the text, generated before the middle. Empty without an interruption, or if an end-of-sequence
            token ended the middle early.
        interrupted: True if `<SUF>` was generated.
        complete: True if the middle ended by itself.
    """

    before: str
    middle: str = ""
    after: str = ""
    interrupted: bool = False
    complete: bool = False

    @property
    def text(self) -> str:
        return self.before + self.middle + self.after

    def head(self, opening: str) -> str:
        """Returns the text after which the end is generated again from left to right: all text before the end, which
        begins with `opening`."""
        written = self.before + self.middle
        if self.complete or (self.interrupted and not self.middle):
            return written
        # A text that was not interrupted is cut where its end begins.
        return written[:max(written.rfind(opening), 0)]


@dataclasses.dataclass(frozen=True)
class SelfInfilled:
    """The result of `self_infill`.

    Attributes:
        text: the text of each prompt, without the prompt.
        parts: the parts of each infilling of each prompt.
        tokens: number of tokens generated, for all prompts together.
    """

    text: list[str]
    parts: list[list[Parts]]
    tokens: int


@FUNCTIONS.register("search.self_infill", "Self-Infilling Code Generation", "Zheng et al. 2023",
                    "where the model is uncertain it writes the end first, and then what is missing")
def self_infill(lm: LM | Any, prompts: Any, *, marks: Sequence[int | str], opening: str = "return",
                stop: str | Sequence[str] = (), tau: float = 0.25, loops: int = 0, max_new_tokens: int = 128,
                degenerate: Callable[[str], bool] | None = None, **sampling: Any) -> SelfInfilled:
    """Self-infilling (Zheng et al., 2023): an infilling model interrupts itself where it is uncertain.

    It then generates the end of the text, which begins with `opening`, and fills in the missing middle. The rules are
    those of the authors' code. With `loops`, the parts are rewritten in turn (mode "vanilla" of that code): first the
    end, from left to right after beginning and middle; then, in the next loop, the beginning, before this end up to the
    last `opening` in it. If an end has no `opening`, or makes the text degenerate, the previous text is kept. A text is
    degenerate if `degenerate` says so; by default, if zlib compresses it to less than a tenth. To find `opening` in the
    last line, this function compares tokens, the authors' code text.

    An infilling is one run: each phase continues from the state of the previous one, and the model processes no token
    twice.

    Args:
        lm: a model with a tokenizer.
        prompts: one or several texts.
        marks: the tokens `<PRE>`, `<SUF>` and `<MID>`, by id or by name.
        opening: the text with which the end begins.
        stop: strings that end a text, and so each of its parts.
        tau: the model interrupts itself if its most likely token has a probability below this.
        loops: number of times that the end is generated from left to right.
        max_new_tokens: maximum number of tokens of an infilling with its marks, and of each end.
        degenerate: returns True for a degenerate text; takes the text without its prompt.
        sampling: arguments of `generate`. The token that ends a middle is an `eos_token_id`.

    Raises:
        ValueError: a model without a tokenizer, a mark that is not a single token, or as in `generate`.
    """
    lm = text_model(lm, "self_infill puts texts together")
    tokenizer = lm.tokenizer
    assert tokenizer is not None
    ids = [int(mark) if not isinstance(mark, str) else _mark(mark, tokenizer.encode(mark, add_special_tokens=False))
           for mark in marks]
    if len(set(ids)) != 3:
        raise ValueError(f"marks: got {list(marks)!r}, takes three different tokens")
    ends = stop_strings(stop)
    given = [prompts] if isinstance(prompts, str) else list(prompts)
    options: dict[str, Any] = dict(max_new_tokens=max_new_tokens, **sampling)
    follow = lambda before, text: [*before, *appended(tokenizer, before, text)]
    starts = [follow([ids[0]], prompt) for prompt in given]
    begins = appended(tokenizer, None, opening)
    parts, tokens = _infill(lm, starts, ids, begins, ends, tau, options, False)
    text, history = [part.text for part in parts], [[part] for part in parts]
    tails: list[str] = []
    for i in range(loops):
        if i:
            openings = [after[:at + len(opening)] if (at := after.rfind(opening)) >= 0 else opening
                        for after in tails]
            behind = [follow([*start, ids[1]], own) for start, own in zip(starts, openings, strict=True)]
            parts, spent = _infill(lm, behind, ids, [], ends, tau, options, True)
            parts = [dataclasses.replace(part, after=head + part.after) if part.complete else part
                     for part, head in zip(parts, openings, strict=True)]
            tokens += spent
            for row, part in zip(history, parts, strict=True):
                row.append(part)
        heads = [part.head(opening) for part in parts]
        out = generate(lm, [prompt + head for prompt, head in zip(given, heads, strict=True)], stop=list(ends) or None,
                       **options)
        assert out.text is not None
        tokens += int(out.lengths.sum())
        tails = []
        for p, (part, head, tail) in enumerate(zip(parts, heads, out.text, strict=True)):
            whole = head + tail
            bad = opening not in whole or _repeats(whole) or (degenerate is not None and degenerate(whole))
            text[p] = part.text if bad else whole
            tails.append(part.after if bad else tail)
    return SelfInfilled(text, history, tokens)


def _mark(name: str, ids: list[int]) -> int:
    if len(ids) != 1:
        raise ValueError(f"marks: got {name!r}, which is {len(ids)} tokens; takes one")
    return ids[0]


def _repeats(text: str) -> bool:
    data = text.encode()
    return len(data) > 0 and len(zlib.compress(data)) / len(data) < 0.1


def _infill(lm: LM, starts: list[list[int]], marks: list[int], opening: list[int], stop: tuple[str, ...], tau: float,
            options: dict[str, Any], begun: bool) -> tuple[list[Parts], int]:
    """Runs one infilling of prompts that begin with `<PRE>`; returns its parts and the number of generated tokens.

    With `begun`, the prompts also contain the beginnings of their ends.
    """
    tokenizer = lm.tokenizer
    assert tokenizer is not None
    pieces = tokenizer.token_bytes(False)
    lines = [t for t in range(min(lm.vocab_size, len(pieces))) if b"\n" in pieces[t]]
    rows = lambda x: jnp.tile(jnp.asarray(x or [-1], jnp.int32), (len(starts), 1))
    automaton = Phases(marks=rows(marks), tau=jnp.full(len(starts), tau, jnp.float32), opening=rows(opening),
                       breaks=rows(lines))
    forks = Forks.begin(lm, starts, 1, until=stop or None, transforms=(automaton,), **options)
    forks.extend()
    whole = lambda p: starts[p] + forks.tokens(p, 0)
    # A finished end is followed by the middle.
    waits = np.array([[forks.live[p, 0] and marks[1] in whole(p) and marks[2] not in whole(p)]
                      for p in range(len(starts))])
    forks.feed([[[marks[2]] if row[0] else None] for row in waits])
    forks.extend(waits)
    read = lambda ids, first, last, stop=stop: tokenizer.continuation(ids[:first], ids[first:last], stop=stop or None)
    parts = []
    for p, start in enumerate(starts):
        ended = forks.status[p, 0] == Status.EOS
        ids = whole(p)[:-1] if ended else whole(p)
        suffix = ids.index(marks[1]) if marks[1] in ids else len(ids)
        middle = ids.index(marks[2]) if marks[2] in ids else len(ids)
        interrupted, complete = suffix < len(ids), bool(ended and middle < len(ids))
        closed = middle < len(ids) or waits[p, 0]       # the budget may end before the mark
        before = "" if begun else read(ids, len(start), suffix, () if interrupted else stop)
        after = read(ids, len(start) if begun else suffix + 1, middle) if complete or not closed else ""
        parts.append(Parts(before, read(ids, middle + 1, len(ids)), after, interrupted, complete))
    return parts, forks.spent
