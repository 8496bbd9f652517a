"""The main functions of the library: `generate` and `stream`, from prompts to text."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np

from decodax.cache.prefix import Prefix
from decodax.common.arguments import flag, shown, whole
from decodax.common.progress import bar
from decodax.common.registry import SEARCHES, SELECTS, Configured
from decodax.constraints import Constraint
from decodax.core.algorithm import Algorithm
from decodax.core.memory import power
from decodax.core.types import CacheKind
from decodax.engine.answers import Search, Select
from decodax.engine.batch import Job
from decodax.engine.methods import model
from decodax.engine.queue import Ticket, schedule, unstarted
from decodax.engine.request import OutOfTime, Request
from decodax.engine.result import Result, Statistics
from decodax.engine.slots import Use, possible
from decodax.front.live import Live, one_row
from decodax.front.options import Inputs, Sampling, SamplingOptions, StreamOptions, merged
from decodax.io.load import LM
from decodax.io.prompts import Prompt

BURST_SECONDS = 0.05
"""Seconds that the device runs between two pieces of a stream: the host then costs little, and the text still flows."""


def generate(lm: LM | str | os.PathLike[str], prompts: Prompt | Sequence[Prompt], *,
             max_new_tokens: int | Sequence[int] | None = None, algorithm: Algorithm | Configured | str | None = None,
             draft: LM | str | os.PathLike[str] | None = None, cache: CacheKind | Configured | str | None = None,
             constraint: Constraint | str | Sequence[Constraint | str | None] | None = None,
             search: Search | str | None = None, select: Select | str | None = None,
             sampling: Sampling | None = None, seed: int | Sequence[int] = 0, num_samples: int | None = None,
             stop: str | Sequence[str] | None = None, logprobs: int | None = None,
             context: Prompt | Prefix | Sequence[Prompt | Prefix] | None = None,
             adapter: str | Sequence[str | None] | None = None, inputs: Inputs = None, batch_size: int | None = None,
             max_time: float | None = None, progress: bool = False, **options: Unpack[SamplingOptions]) -> Result:
    """Continues prompts.

    A slot (`algorithm`, `cache`, `constraint`, `search`, `select`) takes an object, or a string that is short for one:
    `cache=dx.caches.snapkv(budget=512)` and `cache="snapkv:budget=512"` mean the same. A numeric option is one number
    for all prompts, or a list with one for each. Options that are not given come from the model's generation config, if
    it has them.

    >>> import decodax as dx
    >>> dx.generate("pycode", "def fib(n):", max_new_tokens=64).text                  # doctest: +SKIP
    >>> dx.generate("pycode", "def fib(n):", temperature=0.8, top_p=0.95).text        # doctest: +SKIP

    Args:
        lm: a result of `load`; or an argument of `load`, and then the model is loaded once and kept in memory.
        prompts: a text, token ids or a chat, or several of them. A list or a one-dimensional array of numbers is one
            prompt; a two-dimensional array has a prompt in each row. Also the output of a tokenizer of transformers,
            with `input_ids` and `attention_mask` (masked ids do not count). An iterator is read to its end first. An
            empty prompt becomes the model's BOS token.
        max_new_tokens: maximum number of new tokens; default 64. Memory for all of them is allocated at the start.
        algorithm: decoding method, from `decodax.algorithms`. None: plain autoregressive decoding; a masked diffusion
            model unmasks the most confident position in each round.
        draft: draft model, for an algorithm that is given by name and needs one.
        cache: cache policy, from `decodax.caches`. None: the cache keeps the keys and values of all tokens.
        constraint: language to which each text has to belong, from `decodax.constraints`; one for all prompts, or a
            list with one for each, in which None means no constraint.
        search: search over texts, from `decodax.search`. The result has one text for each prompt; its `findings` have
            details of the search.
        select: rule that chooses one of `num_samples` samples (default 8), from `decodax.select`. The result has the
            chosen text for each prompt; its `findings` have the candidates and their scores.
        sampling: sampling options as an object; they can also be given as arguments.
        seed: random seed, from 0 to 2**64 - 1. Each random number depends only on the seed, the request id of the
            prompt and the position of the token. The request id is the index of the prompt, unless `request_ids` is
            given.
        num_samples: number of continuations of each prompt; the prompt is prefilled once.
        stop: strings that end a row, also if they are spread over several tokens. They are searched in the returned
            text; a string that contains the name of a special token, such as "<|im_end|>", is searched in the text with
            special tokens. The returned text ends before the string, or with `include_stop` after it.
        logprobs: records the log-probabilities of the new tokens and of this number of most likely tokens.
        context: text before the prompts, one for all or one for each, as a text or as its keys and values
            (`decodax.caches.Prefix`). A cache policy evicts or compresses the context before the prompts are prefilled,
            so that several prompts can be answered from one compressed text. Equal contexts are prefilled once.
        adapter: name of the adapter of the prompts (`LM.with_adapters`); one for all or one for each.
        inputs: further inputs of the model for each prompt, a pytree of arrays `[prompts, ...]`: the source of an
            encoder (`decodax.models.EncoderText`, or a text for each prompt), a soft prompt
            (`decodax.models.Embeddings`), images (`decodax.models.Images`), an adapter.
        batch_size: number of prompts that run at once; default all. When a prompt has ended, the next one takes its
            rows. Prompts whose sources have similar lengths run together. Results are in the order of the prompts, and
            their tokens do not depend on `batch_size`.
        max_time: seconds, counted from the beginning of the call, after which all unfinished rows end with
            `Status.TIME` and the text so far. The clock is checked between bursts of rounds and while constraints are
            built. A compilation is not interrupted: the first call of its kind may take much longer than `max_time`.
            With `decodax.cache_programs`, later processes do not compile again.
        progress: True shows a progress bar of the generated tokens.
        options: `SamplingOptions`, named as in Hugging Face's GenerationConfig: temperature, top_k, top_p, min_p,
            repetition_penalty, bad_words_ids, min_new_tokens, ... See `decodax.sampling.build`. They override the
            model's generation config; if there are none, decoding is greedy. Each is one value for all prompts, one for
            each prompt, or one for each row of the result: `num_samples=3, temperature=[0.2, 0.7, 1.0]` samples one
            prompt at three temperatures. Further options:
        request_ids: numbers from 0 to 2**32 - 1 on which the random numbers of each prompt depend; default: its index
            in `prompts`. With `request_ids=[dx.jobs.address(p) for p in prompts]`, for example, texts do not depend on
            the order of the prompts.
        guidance_scale, negative_prompts: scale of classifier-free guidance, and the prompts against which it guides
            (default: the last prompt token alone, as in transformers). Masked diffusion guides against a prompt of
            masks; LLaDA's `cfg_scale` is `guidance_scale - 1`.
        max_length: maximum number of tokens, prompt included, in place of max_new_tokens.
        min_new_tokens: number of new tokens before which neither an end-of-sequence token nor a stop string ends a
            text.
        include_stop, skip_special_tokens: contents of the returned texts.
        chunk: number of prompt tokens in one forward pass.
        arithmetic_sampling: True makes the samples of a prompt cover the distribution evenly
            (`decodax.sampling.Arithmetic`).

    Raises:
        ValueError: an empty prompt for a model without a BOS token, a token outside the model's vocabulary, more prompt
            and new tokens than the model has positions (`Model.max_positions`) or than fit in memory, an algorithm that
            does not fit the model, or an argument out of its range; the message names the argument.
        TypeError: an argument of the wrong kind, or an unknown one; the message names it.
        RuntimeError: the algorithm makes no progress.

    Warns:
        UserWarning: prompt and new tokens exceed the trained length (`Model.trained_positions`), which rotary positions
            allow; the warning gives both numbers.
    """
    clock, given = time.monotonic(), merged(sampling, options)
    given |= dict(max_new_tokens=max_new_tokens, algorithm=algorithm, draft=draft, cache=cache, constraint=constraint,
                  seed=seed, stop=stop, logprobs=logprobs, context=context, adapter=adapter, inputs=inputs,
                  batch_size=batch_size, max_time=max_time)
    if search is not None or select is not None:
        return _answered(lm, prompts, search, select, num_samples, progress, given)
    try:
        request = Request.read(lm, prompts, num_samples=num_samples, **given)
    except OutOfTime as late:
        return unstarted(late.request)
    return run(request, clock, flag("progress", progress))


def _answered(lm: Any, prompts: Any, search: Any, select: Any, num_samples: int | None, progress: bool,
              given: dict[str, Any]) -> Result:
    """Returns the result of a search, or of a rule that chooses among samples."""
    if search is not None and select is not None:
        raise ValueError("search and select: got both, takes one of them")
    given = {name: x for name, x in given.items() if x is not None and not (name == "seed" and x == 0)}
    for slot, found, shelf, kind in (("search", search, SEARCHES, Search), ("select", select, SELECTS, Select)):
        if found is None:
            continue
        found = shelf.object(found, model(lm))
        if not isinstance(found, kind):
            raise TypeError(f"{slot}: got {shown(found)}, takes a function of decodax.{slot}, or the name of one")
        if isinstance(found, Search):
            if num_samples is not None:
                raise ValueError(f"num_samples: got {num_samples} beside a search, which says how many rows it takes")
            return found.run(lm, prompts, given)
        return found.run(lm, prompts, 8 if num_samples is None else whole("num_samples", num_samples, 1), given)
    raise AssertionError


def run(request: Request, clock: float, progress: bool = False) -> Result:
    """Runs a checked request of `generate` and returns its result. `clock` is the time at which the call began, by
    `time.monotonic`, from which `max_time` counts."""
    size, end = request.batch_size, None if request.max_time is None else clock + request.max_time
    through = through_slots if size and size < len(request) and possible(request) else through_batches
    return through(request, end, progress)


def through_batches(request: Request, end: float | None = None, progress: bool = False) -> Result:
    """Runs a request in batches of `batch_size` prompts, one after the other; a batch runs until all its rows have
    ended. `end` is the time by `time.monotonic` at which unfinished rows end."""
    count, size = len(request), request.batch_size
    widths = request.widths
    order = sorted(range(count), key=lambda i: (widths[i], len(request.prompts[i]))) if size else list(range(count))
    parts: list[Result] = []
    with bar(progress, "generating", count * request.samples) as report:
        for start in range(0, count, size or count):
            part = request.select(order[start:start + size]).narrow() if size else request
            if parts and end is not None and time.monotonic() > end:
                parts.append(unstarted(part))
                continue
            job = Job.begin(part, request)
            while job.running:
                job.advance(None if end is None and not progress else BURST_SECONDS * (1 if end else 4))
                report(sum(len(p) for p in parts) + job.done)
                if end is not None and time.monotonic() > end:
                    job.expire()
            parts.append(job.result())
    return merge(parts, order, request.answers, request.lm.pad) if size else parts[0]


def through_slots(request: Request, end: float | None = None, progress: bool = False, use: Use | None = None,
                  token_budget: int | None = None) -> Result:
    """Runs a request with `batch_size` prompts at once; when a prompt has ended, the next one takes its rows. Results
    are in the order of the prompts.

    Args:
        request: the request; its `batch_size` is not None.
        end: time by `time.monotonic` at which unfinished rows end, with their text so far. None: no limit.
        progress: True shows a progress bar.
        use: counts of forward passes and times are added to it; None: to a new one.
        token_budget: see `serve`.
    """
    assert request.batch_size is not None
    # sources of one width after the other, since a batch has one; the longest texts first, so that few places stand
    # empty in the end; among those of about the same length, prompts of similar length side by side, which are read
    # together
    widths = _filled(request.widths, request.batch_size)
    order = sorted(range(len(request)), key=lambda i: (widths[i], -power(int(request.max_new[i])),
                                                       len(request.prompts[i])))
    use, parts = Use() if use is None else use, {}
    with bar(progress, "generating", len(request) * request.samples) as report:
        ticket = lambda i: Ticket(request.select([i]).narrow(int(widths[i])), i)
        answers = schedule(order, request.batch_size, read=ticket, end=end,
                           longest=request.longest, more=request.more, use=use, token_budget=token_budget)
        for i, part in answers:
            if isinstance(part, Exception):
                raise part
            parts[i] = part
            report(len(parts) * request.samples)
    found = merge([parts[i] for i in range(len(request))], list(range(len(request))), request.answers, request.lm.pad)
    return dataclasses.replace(found, stats=dataclasses.replace(
        found.stats, forwards=use.forwards, prefill_forwards=use.prefill_forwards, seconds=use.seconds,
        prefill_seconds=use.prefill_seconds))


def _filled(widths: np.ndarray, seats: int) -> np.ndarray:
    """Returns the widths, with those that fewer than `seats` rows have raised to the next larger one: their batch would
    not be full, and costs programs of its own.

    >>> _filled(np.array([16, 16, 32, 64, 64, 64]), 3).tolist()
    [32, 32, 32, 64, 64, 64]
    """
    for width in sorted(set(widths.tolist()))[:-1]:
        if (few := widths == width).sum() < seats:
            widths = np.where(few, widths[widths > width].min(), widths)
    return widths


def stream(lm: LM | str | os.PathLike[str], prompt: Prompt, **options: Unpack[StreamOptions]) -> Stream:
    """Continues one prompt and yields its text piece by piece.

    Takes the arguments of `generate` except those that need several rows: `search`, `select`, `num_samples`,
    `batch_size` and `progress`.

    A piece never contains part of a character, nor text that may be the beginning of a stop string. The pieces together
    are the text that `generate` returns. `.result` is the result after the last piece, and None before. `max_time`
    counts from this call and includes the time that the caller takes between pieces. The memory of the cache is freed
    after the last piece, or when the stream is closed: by `close`, or as a context manager. Arguments are checked
    by this call, not by the first piece.

    >>> import decodax as dx
    >>> with dx.stream("pycode", "def fib(n):") as pieces:                                # doctest: +SKIP
    ...     for piece in pieces:
    ...         print(piece, end="")

    Raises:
        TimeoutError: `max_time` was over before the constraints had been built.
        ValueError, TypeError: as in `generate`.
    """
    return Stream(lm, prompt, **options)


class Stream(Live[str]):
    """An iterator over the pieces of a text; `.result` is the result after the last piece. A context manager with
    `close`."""

    def __init__(self, lm: LM | str | os.PathLike[str], prompt: Prompt, **options: Unpack[StreamOptions]):
        clock = time.monotonic()
        request = one_row("stream", lm, prompt, options)
        if request.lm.tokenizer is None:
            raise ValueError("stream: this model has no tokenizer, so it makes no text; use generate")
        super().__init__(request, clock)
        self._text = request.lm.tokenizer.detokenizer(
            request.prompts[0], stop=request.stop, min_new=int(request.min_new[0]), include_stop=request.include_stop,
            skip_special_tokens=request.skip_special_tokens)
        self._read = 0

    def __repr__(self) -> str:
        status = "running" if self.result is None else self.result.status[0].name.lower()
        status = "closed" if self._closed and self.result is None else status
        return f"<Stream of {self._request.lm.name!r}: {self._read} tokens, {status}>"

    def __next__(self) -> str:
        if self._closed:
            raise StopIteration
        while self._job.running:
            self._advance(BURST_SECONDS)
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


def merge(parts: list[Result], order: list[int], samples: int, pad: int) -> Result:
    """Joins the results of batches to one result, with the rows in the order of the prompts.

    Args:
        parts: results of the batches.
        order: index of the prompt of each entry of `parts`, in their order.
        samples: number of rows of a prompt.
        pad: token that fills rows beyond their length.
    """
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
        from decodax.engine.result import LogProbs
        noted = LogProbs(**{f.name: rows(lambda p, n=f.name: getattr(p.logprobs, n), 0, width)
                            for f in dataclasses.fields(LogProbs)})
    status, text = flat(lambda p: p.status), None if parts[0].text is None else flat(lambda p: p.text)
    # prompts whose time was out before they began have none
    whose = next((p.findings for p in parts if p.findings), {})
    findings = {n: rows(lambda p, n=n, x=x: p.findings.get(n, np.zeros((len(p), *x.shape[1:]), x.dtype)))
                for n, x in whose.items()}
    total = lambda name: sum(getattr(p.stats, name) for p in parts)
    counts: dict[str, Any] = {n: rows(lambda p, n=n: getattr(p.stats, n))
                              for n in ("rounds", "tokens", "drafted", "accepted")}
    return Result(tokens=rows(lambda p: p.tokens, pad, width), lengths=rows(lambda p: p.lengths),
                  status=[status[i] for i in back], text=None if text is None else [text[i] for i in back],
                  logprobs=noted, findings=findings,
                  stats=Statistics(histogram=rows(lambda p: p.stats.histogram, 0, widest), **counts, **{
                      n: total(n) for n in ("forwards", "prefill_forwards", "seconds", "prefill_seconds")}))
