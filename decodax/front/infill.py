"""Functions for masked diffusion models: `infill` fills gaps between given pieces of text, and `watch` shows a text
while it is denoised."""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np

from decodax.algorithms.diffusion import FillsCanvas
from decodax.common.arguments import flag, id_rows, is_whole, whole
from decodax.common.registry import Configured
from decodax.common.struct import short
from decodax.constraints import Constraint
from decodax.core.algorithm import Algorithm
from decodax.engine.methods import chosen, model
from decodax.engine.names import check_names
from decodax.engine.request import CHUNK, Request
from decodax.engine.result import Result
from decodax.front.generate import run
from decodax.front.live import Live, one_row
from decodax.front.options import Sampling, TokenOptions, WatchOptions, merged
from decodax.io.load import LM
from decodax.io.prompts import Prompt, collected, read_prompt, spell

LARGEST_GAP = 1 << 24

Piece = str | int | Sequence[int]
"""A given text, a gap (its number of tokens), or given token ids."""


def infill(lm: LM | str | os.PathLike[str], pieces: Sequence[Piece | Sequence[Piece]], *,
           algorithm: Algorithm | Configured | str | None = None,
           draft: LM | str | os.PathLike[str] | None = None, seed: int | Sequence[int] = 0, ends: bool = False,
           logprobs: int | None = None, request_ids: Sequence[int] | None = None,
           guidance_scale: float | Sequence[float] | None = None, skip_special_tokens: bool = True,
           max_time: float | None = None, chunk: int = CHUNK, batch_size: int | None = None,
           constraint: Constraint | str | Sequence[Constraint | str | None] | None = None,
           sampling: Sampling | None = None, **options: Unpack[TokenOptions]) -> Result:
    """Fills gaps between pieces of text, which do not change.

    >>> dx.infill(lm, ["def add(a, b):", 12, "return c"]).text[0]                 # doctest: +SKIP

    It depends on the model how much of the text after a gap it takes into account: a model with full attention sees all
    of it, a block-causal model only the rest of the block.

    Args:
        lm: a masked diffusion model, or an any-subset model.
        pieces: one text or a list of texts. A text is a list of strings or lists of token ids, and numbers; a number is
            a gap of that many tokens. A mask token in a piece, as an id or by its name, is a gap as well. Adjacent gaps
            are one gap. Each piece is tokenized separately.
        algorithm: a sampler of such models. None: one position in each step, in the blocks of the model, or `assd`.
        draft: draft model, for a sampler that needs one.
        seed: random seed, one for all texts or one for each.
        ends: True allows an end-of-sequence token (`eos_token_id`, default the model's) in a gap, which ends the gap
            there. False: none is generated.
        constraint: as in `generate`, for the text from the first gap to the end.
        logprobs, request_ids, guidance_scale, skip_special_tokens, max_time, chunk, batch_size, sampling, options: as
        in `generate`.

    Returns:
        A result as of `generate`. `text` has each whole text, with pieces and gaps; `tokens` begin with the first gap
        of the row. `findings["gaps"]` has a list of the texts of each row's gaps (None without a tokenizer), and
        `findings["gap_tokens"]` a list of their ids.

    Raises:
        ValueError: a model or an algorithm that does not do masked diffusion, a text without a gap, or a text that
            begins with a gap if the model has no BOS token.
    """
    clock, lm, given = time.monotonic(), model(lm), merged(sampling, options)
    check_names("infill", given)
    method = filling(lm, algorithm, draft)
    mask = method.adapter.mask
    if mask is None:
        raise ValueError(f"algorithm: got {method}, which has no mask token to put into gaps")
    method = method.infilling()
    ids = [template_of(lm, mask, row, i) for i, row in enumerate(_texts(pieces))]
    named = [given.pop(name) for name in ("eos", "eos_token_id") if name in given]
    eos = id_rows("eos_token_id", next((e for e in named if e is not None), []) if named else lm.eos, len(ids),
                  lm.vocab_size)
    if flag("ends", ends) and constraint is not None:
        raise ValueError("ends=True cannot be combined with a constraint: the text after a gap is part of the "
                         "constrained text")
    if not ends:
        own = given.get("suppress_tokens")
        banned = id_rows("suppress_tokens", [] if own is None else own, len(ids))
        rows = [[t for t in (*a, *b) if t >= 0] for a, b in zip(banned.tolist(), eos.tolist(), strict=True)]
        given = {**given, "suppress_tokens": rows} if any(rows) else given
    before = [row[:row.index(mask)] for row in ids]
    behind = [row[len(start):] for row, start in zip(ids, before, strict=True)]
    request = Request.read(
        lm, before, "infill", behind, max_new_tokens=[len(row) for row in behind], min_new_tokens=0, algorithm=method,
        seed=seed, stop=(), logprobs=logprobs, request_ids=request_ids, guidance_scale=guidance_scale,
        skip_special_tokens=skip_special_tokens, max_time=max_time, chunk=chunk, batch_size=batch_size,
        constraint=constraint, **{**given, "eos_token_id": None})
    result = run(request, clock)
    read = [_read(request, row, [*start, *result.row(i).tolist()], mask, frozenset(eos[i].tolist()))
            for i, (row, start) in enumerate(zip(ids, before, strict=True))]
    text, gaps, tokens = (list(x) for x in zip(*read, strict=True))
    written = lm.tokenizer is not None
    return dataclasses.replace(result, text=text if written else None, findings={
        **result.findings, "gaps": _lists(gaps if written else [None] * len(gaps)), "gap_tokens": _lists(tokens)})


def _lists(rows: list[Any]) -> np.ndarray:
    """Returns an object array with one list for each row."""
    out = np.empty(len(rows), object)
    for i, row in enumerate(rows):
        out[i] = row
    return out


def filling(lm: LM, algorithm: Any, draft: Any = None) -> FillsCanvas:
    """Returns the given sampler of masked diffusion, or the model's default one.

    Raises:
        ValueError: another kind of algorithm or of model.
    """
    if lm.diffusion is None:
        raise ValueError(f"lm: got {lm.name}, which is autoregressive, takes a diffusion model")
    method = chosen(lm, algorithm, 1, draft)
    if not isinstance(method, FillsCanvas):
        raise ValueError(f"algorithm: got {method}, takes a sampler of masked diffusion")
    return method


def _texts(pieces: Any) -> list[Any]:
    """Returns the list of pieces of each text."""
    rows = collected(pieces, "pieces", "a list of strings, gaps and token ids, or several")
    if not rows:
        raise ValueError("pieces: got none")
    return [rows] if any(isinstance(p, (str, int, float, np.generic)) for p in rows) else rows


def template_of(lm: LM, mask: int, pieces: Any, row: int) -> list[int]:
    """Returns the token ids of one text of `infill`, `pieces`, with the token `mask` for each position of its gaps.
    `row` is its index, for error messages."""
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
    """Returns the whole text, and the texts and token ids of its gaps, which end at an end-of-sequence token."""
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
        tokens: `i32[n]`, the tokens after the prompt.
        open: `bool[n]`, True for positions that are not decided yet; their tokens are masks or noise.
        round: number of forward passes so far.
    """

    __repr__ = short

    tokens: np.ndarray
    open: np.ndarray
    round: int
    _request: Request = dataclasses.field(repr=False)

    def text(self, hole: str = "_") -> str:
        """Returns the text with `hole` in place of each token that is not decided yet."""
        tokenizer = self._request.lm.tokenizer
        if tokenizer is None:
            raise ValueError("text: this model has no tokenizer")
        pieces = tokenizer.detokenizer(skip_special_tokens=self._request.skip_special_tokens)
        parts = [pieces.finish() + hole if open else pieces.feed([token])
                 for token, open in zip(self.tokens.tolist(), self.open, strict=True)]
        return "".join(parts) + pieces.finish()


def watch(lm: LM | str | os.PathLike[str], prompt: Prompt, *,
          algorithm: FillsCanvas | Configured | str | None = None, every: int = 1,
          **options: Unpack[WatchOptions]) -> Watch:
    """Yields the canvas of a text while it is denoised: before the first round and after each `every` rounds (`Frame`).

    >>> for frame in dx.watch(lm, "def fib(n):"): print(frame.text())             # doctest: +SKIP

    Takes the arguments of `stream`, and can be closed in the same way. The last frame has the text of `generate`, and
    `.result` is the result.
    """
    return Watch(lm, prompt, algorithm=algorithm, every=every, **options)


class Watch(Live[Frame]):
    """An iterator over the frames of a canvas; `.result` is the result after the last frame. A context manager with
    `close`."""

    def __init__(self, lm: LM | str | os.PathLike[str], prompt: Prompt, *,
                 algorithm: FillsCanvas | Configured | str | None = None, every: int = 1,
                 **options: Unpack[WatchOptions]):
        clock, lm = time.monotonic(), model(lm)
        self._every, self._begun = whole("every", every, 1), False
        method = filling(lm, algorithm, options.pop("draft", None))
        super().__init__(one_row("watch", lm, prompt, {**options, "algorithm": method}), clock)

    def __repr__(self) -> str:
        at = "closed" if self._closed else f"round {self._job.forwards}"
        return f"<Watch of {self._request.lm.name!r}: {at}>"

    def __next__(self) -> Frame:
        if self._closed or (self._begun and not self._job.running):
            raise StopIteration
        if self._begun:
            self._advance(None, self._every)
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
                     _request=self._request)
