"""What only a canvas can do: `infill` gaps between given pieces of text, and `watch` a text as it clears up."""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from decodax.algorithms.diffusion import MaskedDiffusion, Template
from decodax.common.arguments import flag, id_rows, is_whole, whole
from decodax.common.struct import short
from decodax.constraints import Constraint
from decodax.core.algorithm import Algorithm
from decodax.engine.batch import Job
from decodax.engine.methods import chosen, model
from decodax.engine.names import check_names
from decodax.engine.request import CHUNK, Request
from decodax.engine.result import Result
from decodax.front.generate import one_row, run
from decodax.io.load import LM
from decodax.io.prompts import Prompt, collected, read_prompt, spell

LARGEST_GAP = 1 << 24

Piece = str | int | Sequence[int]
"""Given text, a gap of so many tokens, or given token ids."""


@dataclasses.dataclass(frozen=True)
class Infilled:
    """Texts with their gaps filled.

    Attributes:
        text: of each row, pieces and gaps; None without a tokenizer.
        gaps: text of each row's gaps; None without a tokenizer. tokens: their ids.
        result: of the decoding; its tokens and text begin with the row's first gap.
    """

    __repr__ = short

    text: list[str] | None
    gaps: list[list[str]] | None
    tokens: list[list[list[int]]]
    result: Result

    def __len__(self) -> int:
        return len(self.tokens)


def infill(lm: LM | str | os.PathLike[str], pieces: Sequence[Piece] | Sequence[Sequence[Piece]], *,
           algorithm: Algorithm | str | None = None, seed: int | Sequence[int] = 0, ends: bool = False,
           logprobs: int | None = None, request_ids: Sequence[int] | None = None,
           guidance_scale: float | Sequence[float] | None = None, skip_special_tokens: bool = True,
           max_time: float | None = None, chunk: int = CHUNK, batch_size: int | None = None,
           constraint: Constraint | str | Sequence[Constraint | str | None] | None = None,
           **sampling: Any) -> Infilled:
    """Fills gaps between pieces of text that stay as they are.

    >>> dx.infill(lm, ["def add(a, b):", 12, "return c"]).text[0]                 # doctest: +SKIP

    How much a gap knows of what follows it is up to the model: one with full attention sees all, a block-causal one its
    own block.

    Args:
        lm: a diffusion model.
        pieces: strings or lists of token ids, and numbers: a gap of so many tokens. One text or a list of them. A piece
            may hold the mask token itself, as an id or in its text: a gap as well. Gaps side by side are one. Each of
            the pieces is encoded by itself.
        algorithm: a sampler of masked diffusion; default one position a step in blocks as the model has them.
        seed: addresses every draw; one or one a text.
        ends: whether a gap may hold an end of sequence (`eos_token_id`, default the model's), which cuts it short
            there. Without it none is drawn.
        constraint: as in `generate`, on the text from the first gap to the end.
        logprobs, request_ids, guidance_scale, skip_special_tokens, max_time, chunk, batch_size, sampling: as in
            `generate`.

    Raises:
        ValueError: a model or an algorithm that does not fill masks, a text without a gap, or without anything before
            its first gap where the model has no BOS token.
    """
    clock, lm = time.monotonic(), model(lm)
    check_names("infill", sampling)
    method = filling(lm, algorithm)
    mask = method.adapter.mask
    if mask is None:
        raise ValueError(f"algorithm: got {method}, which has no mask token to put into gaps")
    method = dataclasses.replace(method, adapter=dataclasses.replace(method.adapter, canvas=Template()))
    ids = [_template(lm, mask, row, i) for i, row in enumerate(_texts(pieces))]
    named = [sampling.pop(name) for name in ("eos", "eos_token_id") if name in sampling]
    eos = id_rows("eos_token_id", next((e for e in named if e is not None), []) if named else lm.eos, len(ids),
                  lm.vocab_size)
    if flag("ends", ends) and constraint is not None:
        raise ValueError("ends=True cannot be combined with a constraint: the text after a gap is part of the "
                         "constrained text")
    if not ends:
        given = sampling.get("suppress_tokens")
        banned = id_rows("suppress_tokens", [] if given is None else given, len(ids))
        rows = [[t for t in (*a, *b) if t >= 0] for a, b in zip(banned.tolist(), eos.tolist(), strict=True)]
        sampling = {**sampling, "suppress_tokens": rows} if any(rows) else sampling
    before = [row[:row.index(mask)] for row in ids]
    behind = [row[len(start):] for row, start in zip(ids, before, strict=True)]
    request = Request.read(
        lm, before, "infill", behind, max_new_tokens=[len(row) for row in behind], min_new_tokens=0, algorithm=method,
        seed=seed, stop=(), logprobs=logprobs, request_ids=request_ids, guidance_scale=guidance_scale,
        skip_special_tokens=skip_special_tokens, max_time=max_time, chunk=chunk, batch_size=batch_size,
        constraint=constraint, **{**sampling, "eos_token_id": None})
    result = run(request, clock)
    read = [_read(request, row, [*start, *result.row(i).tolist()], mask, frozenset(eos[i].tolist()))
            for i, (row, start) in enumerate(zip(ids, before, strict=True))]
    text, gaps, tokens = (list(x) for x in zip(*read, strict=True))
    written = lm.tokenizer is not None
    return Infilled(text=text if written else None, gaps=gaps if written else None, tokens=tokens, result=result)


def filling(lm: LM, algorithm: Any) -> MaskedDiffusion:
    """The sampler of masked diffusion that is given, or the model's default.

    Raises:
        ValueError: another algorithm, or a model that does not fill masks.
    """
    if lm.diffusion is None:
        raise ValueError(f"lm: got {lm.name}, which is autoregressive, takes a diffusion model")
    method = chosen(lm, algorithm, 1)
    if not isinstance(method, MaskedDiffusion):
        raise ValueError(f"algorithm: got {method}, takes a sampler of masked diffusion")
    return method


def _texts(pieces: Any) -> list[Any]:
    """The pieces of each text."""
    rows = collected(pieces, "pieces", "a list of strings, gaps and token ids, or several")
    if not rows:
        raise ValueError("pieces: got none")
    return [rows] if any(isinstance(p, (str, int, float, np.generic)) for p in rows) else rows


def _template(lm: LM, mask: int, pieces: Any, row: int) -> list[int]:
    """The ids of a text, with the mask token in its gaps."""
    name, out = f"pieces[{row}]", []
    for i, piece in enumerate(collected(pieces, name, "a list of strings, gaps and token ids")):
        if isinstance(piece, (int, float, np.integer, np.floating)):
            if not is_whole(piece) or not 1 <= piece <= LARGEST_GAP:
                raise ValueError(f"{name}: got a gap of {piece} tokens, takes a whole number from 1 to {LARGEST_GAP}")
            out += [mask] * int(piece)
        elif isinstance(piece, str) and lm.tokenizer is not None:
            out += spell(lm, piece, f"{name}[{i}]", after=out)
        elif not hasattr(piece, "__len__") or len(piece):
            out += read_prompt(lm, piece, f"{name}[{i}]")
    if mask not in out:
        raise ValueError(f"{name}: has no gap; a number among the pieces is a gap of so many tokens")
    if out[0] == mask and lm.bos is not None:
        out = [lm.bos, *out]
    if out[0] == mask:
        raise ValueError(f"{name}: begins with a gap, and the model has no BOS token to stand before it")
    return out


def _read(request: Request, before: list[int], after: list[int], mask: int, eos: frozenset[int]
          ) -> tuple[str, list[str], list[list[int]]]:
    """The text, and text and ids of its gaps, cut at an end of sequence."""
    tokenizer = request.lm.tokenizer
    feed = tokenizer.detokenizer(skip_special_tokens=request.skip_special_tokens).feed if tokenizer else lambda ids: ""
    text, filled, gaps = "", [], []
    for gap, pairs in itertools.groupby(zip(before, after, strict=False), key=lambda pair: pair[0] == mask):
        ids = [token for _, token in pairs]
        if gap:
            end = next((i + 1 for i, token in enumerate(ids) if token in eos), len(ids))
            ids = ids[:end]
        piece = feed(ids)
        text += piece
        if gap:
            filled.append(piece)
            gaps.append(ids)
    return text, filled, gaps


@dataclasses.dataclass(frozen=True)
class Frame:
    """A canvas between two rounds.

    Attributes:
        tokens: `i32[n]` behind the prompt. open: `bool[n]`: not decided; the token there is a mask, or noise.
        round: forwards so far.
    """

    __repr__ = short

    tokens: np.ndarray
    open: np.ndarray
    round: int
    _request: Request = dataclasses.field(repr=False)

    def text(self, hole: str = "_") -> str:
        """The text with `hole` for each token that is not decided."""
        tokenizer = self._request.lm.tokenizer
        if tokenizer is None:
            raise ValueError("text: this model has no tokenizer")
        pieces = tokenizer.detokenizer(skip_special_tokens=self._request.skip_special_tokens)
        parts = [pieces.finish() + hole if open else pieces.feed([token])
                 for token, open in zip(self.tokens.tolist(), self.open, strict=True)]
        return "".join(parts) + pieces.finish()


def watch(lm: LM | str | os.PathLike[str], prompt: Prompt, *, algorithm: MaskedDiffusion | str | None = None,
          every: int = 1, **options: Any) -> Watch:
    """A text as it clears up: the canvas before the first round and after each `every` rounds (`Frame`).

    >>> for frame in dx.watch(lm, "def fib(n):"): print(frame.text())             # doctest: +SKIP

    Takes the arguments of `stream`; the last frame is the text of `generate`, and `.result` its result.
    """
    return Watch(lm, prompt, algorithm=algorithm, every=every, **options)


class Watch(Iterator[Frame]):
    """Frames as they come; `.result` after the last."""

    def __init__(self, lm: LM | str | os.PathLike[str], prompt: Prompt, *,
                 algorithm: MaskedDiffusion | str | None = None, every: int = 1, **options: Any):
        clock, lm = time.monotonic(), model(lm)
        self._every = whole("every", every, 1)
        request = one_row("watch", lm, prompt, {**options, "algorithm": filling(lm, algorithm)})
        self.result: Result | None = None
        self._begun, self._job = False, Job.begin(request)
        self._end = None if request.max_time is None else clock + request.max_time

    def __repr__(self) -> str:
        return f"<Watch of {self._job.request.lm.name!r}: round {self._job.forwards}>"

    def __next__(self) -> Frame:
        if self._begun:
            if not self._job.running:
                raise StopIteration
            self._job.advance(None, self._every)
            if self._end is not None and time.monotonic() > self._end:
                self._job.expire()
        self._begun = True
        if not self._job.running:
            self.result = self._job.result()
        return self._frame()

    def _frame(self) -> Frame:
        s = self._job.state
        canvas = s.algo
        begin = int(s.prompt_length[0])
        end = min(int(canvas.end[0]), int(s.max_length[0])) if self._job.running else int(s.length[0])
        tokens, open = np.asarray(canvas.tokens)[0, begin:end], np.asarray(canvas.open)[0, begin:end]
        return Frame(tokens=tokens.copy(), open=open.copy(), round=self._job.forwards,
                     _request=self._job.request)
