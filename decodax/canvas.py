"""What only a canvas can do: `infill` gaps between given pieces of text, and `watch` a text as it clears up."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from decodax.api import CHUNK, Prompt, _each, _ids
from decodax.core.types import Algorithm
from decodax.diffusion import MaskedDiffusion, Template
from decodax.diffusion.entries import default
from decodax.io.load import LM
from decodax.job import Job
from decodax.result import Result

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

    text: list[str] | None
    gaps: list[list[str]] | None
    tokens: list[list[list[int]]]
    result: Result

    def __len__(self) -> int:
        return len(self.tokens)


def infill(lm: LM, pieces: Sequence[Piece] | Sequence[Sequence[Piece]], *, algorithm: Algorithm | None = None,
           seed: int | Sequence[int] = 0, ends: bool = False, logprobs: int | None = None, chunk: int = CHUNK,
           guidance_scale: float | None = None, **sampling: Any) -> Infilled:
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
        ends: whether a gap may hold an end of sequence, which cuts it short there. Without it none is drawn.
        logprobs, chunk, guidance_scale, sampling: as in `generate`.

    Raises:
        ValueError: a model or an algorithm that does not fill masks, a text without a gap, or without anything before
            its first gap where the model has no BOS token.
    """
    algorithm = algorithm or default(lm)
    mask = algorithm.adapter.mask if isinstance(algorithm, MaskedDiffusion) else None
    if not isinstance(algorithm, MaskedDiffusion) or mask is None:
        raise ValueError(f"algorithm: got {algorithm}, takes a sampler of masked diffusion")
    algorithm = dataclasses.replace(algorithm, adapter=dataclasses.replace(algorithm.adapter, canvas=Template()))
    single = any(isinstance(p, (str, int, np.integer)) for p in pieces)
    rows: list[Any] = [pieces] if single else list(pieces)
    if not rows:
        raise ValueError("pieces: got none")
    ids = [_template(lm, row, i) for i, row in enumerate(rows)]
    if not ends:
        given = sampling.get("suppress_tokens")
        sampling = {**sampling, "suppress_tokens": [*(given or []), *lm.eos]} if lm.eos else sampling
    before = [row[:row.index(mask)] for row in ids]
    behind = [row[len(start):] for row, start in zip(ids, before, strict=True)]
    job = Job.begin(
        lm, before, given=behind, max_new_tokens=[len(row) for row in behind], min_new_tokens=[0] * len(ids),
        seed=_each(seed, len(ids), "seed"), request_ids=list(range(len(ids))), negative=None, algorithm=algorithm,
        num_samples=1, stop=None, logprobs=logprobs, chunk=chunk, guidance_scale=guidance_scale,
        sampling={**sampling, "eos_token_id": None})
    job.advance(None)
    result = job.result()
    read = [_read(lm, row, [*start, *result.row(i).tolist()], mask)
            for i, (row, start) in enumerate(zip(ids, before, strict=True))]
    text, gaps, tokens = (list(x) for x in zip(*read, strict=True))
    written = lm.tokenizer is not None
    return Infilled(text=text if written else None, gaps=gaps if written else None, tokens=tokens, result=result)


def _template(lm: LM, pieces: Sequence[Piece], row: int) -> list[int]:
    """The ids of a text, with the mask token in its gaps."""
    assert lm.diffusion is not None
    mask, out = lm.diffusion.mask, []
    for piece in pieces:
        if isinstance(piece, (int, np.integer)):
            if piece < 1:
                raise ValueError(f"pieces[{row}]: got a gap of {piece} tokens, takes 1 or more")
            out += [mask] * int(piece)
        elif isinstance(piece, str) and lm.tokenizer is not None:
            out += lm.tokenizer.encode(piece, add_special_tokens=not out)
        else:
            out += _ids(lm, [piece])[0] if len(piece) else []
    if mask not in out:
        raise ValueError(f"pieces[{row}]: has no gap; a number among the pieces is a gap of so many tokens")
    if out[0] == mask and lm.bos is not None:
        out = [lm.bos, *out]
    if out[0] == mask:
        raise ValueError(f"pieces[{row}]: begins with a gap, and the model has no BOS token to stand before it")
    return out


def _read(lm: LM, before: list[int], after: list[int], mask: int) -> tuple[str, list[str], list[list[int]]]:
    """The text, and text and ids of its gaps, cut at an end of sequence."""
    feed = lm.tokenizer.detokenizer().feed if lm.tokenizer else lambda ids: ""
    text, filled, gaps = "", [], []
    for gap, run in itertools.groupby(zip(before, after, strict=True), key=lambda pair: pair[0] == mask):
        ids = [token for _, token in run]
        if gap:
            end = next((i + 1 for i, token in enumerate(ids) if token in lm.eos), len(ids))
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

    tokens: np.ndarray
    open: np.ndarray
    round: int
    _lm: LM = dataclasses.field(repr=False)

    def text(self, hole: str = "_") -> str:
        """The text with `hole` for each token that is not decided."""
        if self._lm.tokenizer is None:
            raise ValueError("text: this model has no tokenizer")
        pieces = self._lm.tokenizer.detokenizer()
        parts = [pieces.finish() + hole if open else pieces.feed([token])
                 for token, open in zip(self.tokens.tolist(), self.open, strict=True)]
        return "".join(parts) + pieces.finish()


def watch(lm: LM, prompt: Prompt, *, algorithm: MaskedDiffusion | None = None, every: int = 1,
          **options: Any) -> Watch:
    """A text as it clears up: the canvas before the first round and after each `every` rounds (`Frame`).

    >>> for frame in dx.watch(lm, "def fib(n):"): print(frame.text())             # doctest: +SKIP

    Takes the arguments of `stream`; the last frame is the text of `generate`, and `.result` its result.
    """
    return Watch(lm, prompt, algorithm=algorithm, every=every, **options)


class Watch(Iterator[Frame]):
    """Frames as they come; `.result` after the last."""

    def __init__(self, lm: LM, prompt: Prompt, *, algorithm: MaskedDiffusion | None = None, every: int = 1,
                 max_new_tokens: int | None = None, min_new_tokens: int = 0, seed: int = 0, stop: Any = None,
                 logprobs: int | None = None, request_ids: Sequence[int] = (0,), guidance_scale: float | None = None,
                 chunk: int = CHUNK, **sampling: Any):
        if every < 1:
            raise ValueError(f"every: got {every}, takes 1 or more")
        algorithm = algorithm or default(lm)
        if not isinstance(algorithm, MaskedDiffusion):
            raise ValueError(f"algorithm: got {algorithm}, takes a sampler of masked diffusion")
        ids = _ids(lm, prompt)
        if len(ids) != 1:
            raise ValueError(f"watch: takes one prompt, got {len(ids)}")
        self.result: Result | None = None
        self._lm, self._every, self._begun = lm, every, False
        self._job = Job.begin(lm, ids, max_new_tokens=[max_new_tokens], min_new_tokens=[min_new_tokens], seed=[seed],
                              request_ids=list(request_ids), negative=None, algorithm=algorithm, num_samples=1,
                              stop=stop, logprobs=logprobs, chunk=chunk, guidance_scale=guidance_scale,
                              sampling=sampling)

    def __next__(self) -> Frame:
        if self._begun:
            if not self._job.running:
                raise StopIteration
            self._job.advance(None, self._every)
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
        return Frame(tokens=tokens.copy(), open=open.copy(), round=self._job.forwards, _lm=self._lm)
