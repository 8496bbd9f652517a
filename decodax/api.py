"""The front door: `generate` and `stream`, from prompts to text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from decodax.core.types import Algorithm
from decodax.io.load import LM
from decodax.job import Job
from decodax.result import Result, Statistics

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A text, token ids, or a chat (messages with `role` and `content`)."""

CHUNK = 256
"""Prompt tokens a prefill round."""

BURST_SECONDS = 0.05
"""How long a stream lets the device run before it looks: a host visit then costs little and text still flows."""


def generate(lm: LM, prompts: Prompt | Sequence[Prompt], *, max_new_tokens: int | Sequence[int] | None = None,
             min_new_tokens: int | Sequence[int] = 0, algorithm: Algorithm | None = None, seed: int | Sequence[int] = 0,
             num_samples: int = 1, stop: str | Sequence[str] | None = None, logprobs: int | None = None,
             request_ids: Sequence[int] | None = None, guidance_scale: float | None = None,
             negative_prompts: Prompt | Sequence[Prompt] | None = None, chunk: int = CHUNK,
             batch_size: int | None = None, progress: bool = False, **sampling: Any) -> Result:
    """Continues prompts.

    Args:
        lm: what `load` gave.
        prompts: a text, a list of texts, a list of id lists, a chat or a list of chats.
        max_new_tokens: tokens to make at most; default the model's generation config, or 64. One for all rows or one
            for each prompt, as `min_new_tokens` (an end of sequence does not count before it) and `seed`.
        algorithm: the decoding method; default plain autoregressive decoding, and for a model that fills masks one
            position a round, the surest first.
        seed: addresses every draw, together with the request's id and the token's position.
        num_samples: continuations of each prompt; the prompt is prefilled once.
        stop: strings that end a row, found also across token borders; the text returned ends before them.
        logprobs: record log-probabilities of the chosen tokens and of this many most likely ones.
        request_ids: what a row's randomness is addressed by; default its place in `prompts`.
        guidance_scale: classifier-free guidance of this scale against `negative_prompts` (default: the last prompt
            token alone, as transformers does); masked diffusion guides against a prompt of masks, and LLaDA's
            `cfg_scale` is this less 1.
        chunk: prompt tokens a prefill round.
        batch_size: prompts a batch; default all at once. Batches are made of prompts of similar length.
        progress: shows a progress bar.
        sampling: what the policy is built from, by the names of Hugging Face's GenerationConfig: temperature, top_k,
            top_p, min_p, repetition_penalty, bad_words_ids, ... See `decodax.policy.build`. They override the model's
            generation config; without any the decoding is greedy.

    Raises:
        ValueError: an empty prompt, a prompt beyond the model's positions, or an argument out of its range, by name.
        RuntimeError: the algorithm stopped making progress.
    """
    ids = _ids(lm, prompts)
    options: dict[str, Any] = {"algorithm": algorithm, "num_samples": num_samples, "stop": stop, "logprobs": logprobs,
                               "chunk": chunk, "guidance_scale": guidance_scale, "sampling": sampling}
    given = dict(max_new_tokens=max_new_tokens, min_new_tokens=min_new_tokens, seed=seed,
                 request_ids=range(len(ids)) if request_ids is None else request_ids)
    each: dict[str, Any] = {name: _each(value, len(ids), name) for name, value in given.items()}
    each["negative"] = None if negative_prompts is None else _each(_ids(lm, negative_prompts), len(ids),
                                                                   "negative_prompts")
    order = sorted(range(len(ids)), key=lambda i: len(ids[i])) if batch_size else list(range(len(ids)))
    size = batch_size or len(ids)
    parts: list[Result] = []
    with _bar(progress, len(ids) * num_samples) as report:
        for start in range(0, len(ids), size):
            rows = order[start:start + size]
            own: dict[str, Any] = {name: values and [values[i] for i in rows] for name, values in each.items()}
            job = Job.begin(lm, [ids[i] for i in rows], **own, **options)
            while job.running:
                job.advance(None if not progress else BURST_SECONDS * 4)
                report(sum(len(p) for p in parts) + job.finished)
            parts.append(job.result())
    return parts[0] if len(parts) == 1 and not batch_size else _merge(parts, order, num_samples, lm.pad)


def stream(lm: LM, prompt: Prompt, **options: Any) -> Stream:
    """Continues one prompt piece by piece. Takes the arguments of `generate` but for those that need many rows.

    Pieces never hold half a character, nor the beginning of what may turn out to be a stop string; together they are
    the text that `generate` returns, and the tokens are the same. After the last piece `.result` holds the result.
    """
    return Stream(lm, prompt, **options)


class Stream(Iterator[str]):
    """Pieces of text as they come; `.result` after the last."""

    def __init__(self, lm: LM, prompt: Prompt, **options: Any):
        if lm.tokenizer is None:
            raise ValueError("stream: this model has no tokenizer, so it makes no text; use generate")
        ids = _ids(lm, prompt)
        if len(ids) != 1:
            raise ValueError(f"stream: takes one prompt, got {len(ids)}")
        if many := [name for name in ("num_samples", "batch_size", "progress") if options.pop(name, None)]:
            raise ValueError(f"stream: {', '.join(many)}: for generate only; a stream is one row")
        own = {k: options.pop(k) for k in _STREAM & options.keys()}
        negative = own.pop("negative_prompts", None)
        self.result: Result | None = None
        self._job = Job.begin(
            lm, ids, max_new_tokens=[own.pop("max_new_tokens", None)], seed=[own.pop("seed", 0)],
            min_new_tokens=[own.get("min_new_tokens", 0)], request_ids=own.pop("request_ids", [0]),
            negative=None if negative is None else _ids(lm, negative), num_samples=1, sampling=options,
            **{"algorithm": None, "stop": None, "logprobs": None, "chunk": CHUNK, "guidance_scale": None,
               **{k: v for k, v in own.items() if k != "min_new_tokens"}})
        self._text = lm.tokenizer.detokenizer(ids[0], stop=own.get("stop"), min_new=own.get("min_new_tokens", 0))
        self._read = 0

    def __next__(self) -> str:
        while self._job.running:
            self._job.advance(BURST_SECONDS)
            if piece := self._text.feed(self._fresh()):
                return piece
        if self.result is None:
            self.result = self._job.result()
            if piece := self._text.feed(self._fresh()) + self._text.finish():
                return piece
        raise StopIteration

    def _fresh(self) -> list[int]:
        s = self._job.state
        start, end = int(s.prompt_length[0]) + self._read, int(s.length[0])
        self._read += end - start
        return np.asarray(s.tokens)[0, start:end].tolist()


_STREAM = {"max_new_tokens", "min_new_tokens", "algorithm", "seed", "stop", "logprobs", "request_ids",
           "guidance_scale", "negative_prompts", "chunk"}


def _ids(lm: LM, prompts: Prompt | Sequence[Prompt]) -> list[list[int]]:
    """Token ids of prompts in any of the accepted forms."""
    single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], (int, np.integer, Mapping)))
    rows: list[Any] = [prompts] if single else list(prompts)
    if not rows:
        raise ValueError("prompts: got none")
    out = []
    for i, row in enumerate(rows):
        if not isinstance(row, str) and len(row) and not isinstance(row[0], Mapping):
            ids = [int(t) for t in np.asarray(row).reshape(-1)]
            if bad := [t for t in ids if not 0 <= t < lm.vocab_size]:
                raise ValueError(f"prompts[{i}]: token id {bad[0]} is outside the vocabulary of {lm.vocab_size}")
        elif not len(row):
            ids = []
        elif lm.tokenizer is None:
            raise ValueError(f"prompts[{i}]: got text, but this model has no tokenizer; give token ids")
        else:
            ids = lm.tokenizer.encode(row) if isinstance(row, str) else lm.tokenizer.encode_chat(row)
        if not ids and lm.bos is not None:
            ids = [lm.bos]
        if not ids:
            raise ValueError(f"prompts[{i}]: is empty, and the model has no BOS token to begin with")
        out.append(ids)
    return out


def _each(value: Any, count: int, name: str) -> list[Any]:
    if value is None or isinstance(value, (int, np.integer)):
        return [value] * count
    values = list(value)
    if len(values) != count:
        raise ValueError(f"{name}: got {len(values)} values for {count} prompts")
    return values


def _merge(parts: list[Result], order: list[int], samples: int, pad: int) -> Result:
    """Results of batches as one, rows back in the order of the prompts."""
    width = max(p.tokens.shape[1] for p in parts)
    widest = max(p.stats.histogram.shape[1] for p in parts)
    back = np.argsort(np.repeat(np.array(order) * samples, samples) + np.tile(np.arange(samples), len(order)))

    def rows(pick: Any, fill: Any = 0, to: int | None = None) -> np.ndarray:
        arrays = [pick(p) for p in parts]
        if to is not None:
            arrays = [np.pad(a, [(0, 0), (0, to - a.shape[1])] + [(0, 0)] * (a.ndim - 2), constant_values=fill)
                      for a in arrays]
        return np.concatenate(arrays)[back]

    flat = lambda pick: [x for p in parts for x in pick(p)]
    noted = None
    if parts[0].logprobs is not None:
        from decodax.result import LogProbs
        noted = LogProbs(**{f.name: rows(lambda p, n=f.name: getattr(p.logprobs, n), 0, width)
                            for f in dataclasses.fields(LogProbs)})
    status, text = flat(lambda p: p.status), None if parts[0].text is None else flat(lambda p: p.text)
    total = lambda name: sum(getattr(p.stats, name) for p in parts)
    counts: dict[str, Any] = {n: rows(lambda p, n=n: getattr(p.stats, n))
                              for n in ("rounds", "tokens", "drafted", "accepted")}
    return Result(tokens=rows(lambda p: p.tokens, pad, width), lengths=rows(lambda p: p.lengths),
                  status=[status[i] for i in back], text=None if text is None else [text[i] for i in back],
                  logprobs=noted,
                  stats=Statistics(histogram=rows(lambda p: p.stats.histogram, 0, widest), **counts, **{
                      n: total(n) for n in ("forwards", "prefill_forwards", "seconds", "prefill_seconds")}))


class _bar:
    """A progress bar of finished rows, or nothing."""

    def __init__(self, show: bool, total: int):
        self.show, self.total = show, total

    def __enter__(self) -> Any:
        if not self.show:
            return lambda done: None
        from rich.progress import Progress
        self.progress = Progress()
        self.progress.start()
        task = self.progress.add_task("generating", total=self.total)
        return lambda done: self.progress.update(task, completed=done)

    def __exit__(self, *exc: Any) -> None:
        if self.show:
            self.progress.stop()
