"""The front door: `generate` and `stream`, from prompts to text."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any, Unpack

import numpy as np

from decodax.caches.prefix.prefix import Prefix
from decodax.common.arguments import flag, scalar, shown, whole
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
from decodax.front.options import Sampling, SamplingOptions, merged
from decodax.io.load import LM
from decodax.io.prompts import Prompt

BURST_SECONDS = 0.05
"""How long a stream lets the device run before it looks: a host visit then costs little and text still flows."""


def generate(lm: LM | str | os.PathLike[str], prompts: Prompt | Sequence[Prompt], *,
             max_new_tokens: int | Sequence[int] | None = None, algorithm: Algorithm | Configured | str | None = None,
             draft: LM | str | os.PathLike[str] | None = None, cache: CacheKind | Configured | str | None = None,
             constraint: Constraint | str | Sequence[Constraint | str | None] | None = None,
             search: Search | str | None = None, select: Select | str | None = None,
             sampling: Sampling | None = None, seed: int | Sequence[int] = 0, num_samples: int | None = None,
             stop: str | Sequence[str] | None = None, logprobs: int | None = None,
             context: Prompt | Prefix | Sequence[Prompt | Prefix] | None = None,
             adapter: str | Sequence[str | None] | None = None, inputs: Any = None, batch_size: int | None = None,
             max_time: float | None = None, progress: bool = False, **options: Unpack[SamplingOptions]) -> Result:
    """Continues prompts.

    A slot (`algorithm`, `cache`, `constraint`, `search`, `select`) takes an object, or a string that is short for one:
    `cache=dx.caches.snapkv(budget=512)` and `cache="snapkv:budget=512"` say the same. Numbers are one for all prompts
    or one for each. What is left out comes from the model's generation config, if it says something.

    >>> import decodax as dx
    >>> dx.generate("pycode", "def fib(n):", max_new_tokens=64).text                  # doctest: +SKIP
    >>> dx.generate("pycode", "def fib(n):", temperature=0.8, top_p=0.95).text        # doctest: +SKIP

    Args:
        lm: what `load` returned; or what `load` takes, and then the model is loaded once and kept.
        prompts: a text, token ids or a chat, or several of them; a list or an array of numbers is one prompt, an array
            of two dimensions has one in each row. Also what a tokenizer of transformers returns: `input_ids`, of which
            those count that the `attention_mask` lets through. An iterator of prompts is read to its end first. An
            empty prompt begins with the model's BOS token.
        max_new_tokens: number of tokens to make at most; default 64. Memory for all of them is taken at once.
        algorithm: decoding method, from `decodax.algorithms`; default plain autoregressive decoding, and for a model
            that fills masks one position a round, the surest first.
        draft: draft model, for an algorithm that is given by name and needs one.
        cache: what the cache keeps, from `decodax.caches`; default everything.
        constraint: language that each text has to belong to, from `decodax.constraints`; one for all, or one for each
            prompt, in which None leaves a prompt free.
        search: search over texts, from `decodax.search`. The result has one text for each prompt, and `findings` has
            what the search found.
        select: rule that chooses one of `num_samples` samples (default 8), from `decodax.select`. The result has the
            chosen text for each prompt, and `findings` the candidates with their scores.
        sampling: sampling options as an object; they may be given as arguments as well.
        seed: addresses every draw, together with the request's id and the token's position; from 0 to 2**64 - 1. The id
            is the prompt's place in the batch unless `request_ids` says otherwise.
        num_samples: number of continuations of each prompt; the prompt is prefilled once.
        stop: strings that end a row, found also across token borders. They are sought in the text as it is returned;
            one that contains the text of a special token, such as "<|im_end|>", in the text with special tokens. The
            text returned ends before the string, or with `include_stop` after it.
        logprobs: records log-probabilities of the chosen tokens and of this many most likely ones.
        context: text in front of the prompts, one for all or one for each, as a text or with its keys and values
            (`decodax.caches.Prefix`). A cache policy chooses from it what the cache keeps before it sees the prompts,
            so that several questions are asked of one compressed text; equal contexts are read once.
        adapter: name of the adapter that the prompts take (`LM.with_adapters`); one for all or one for each.
        inputs: what the model takes for each prompt beside its tokens, a pytree of arrays `[prompts, ...]`: what an
            encoder reads, a soft prompt (`decodax.models.Embeddings`), an adapter.
        batch_size: number of prompts that run at once; default all. A prompt takes the place of one that has ended;
            results come in the order of the prompts, and no row depends on it.
        max_time: seconds after which rows that have not ended do so with `Status.TIME` and what they have, counted from
            the beginning of the call. It is looked at between bursts of rounds, and between the steps in which
            constraints are built. A compilation is not cut short: it may take many times as long as `max_time` in the
            first call of a kind, and is short from the second process on with `decodax.cache_programs`.
        progress: shows a progress bar, which moves with every token of a prompt that runs.
        options: `SamplingOptions`, named as in Hugging Face's GenerationConfig: temperature, top_k, top_p, min_p,
            repetition_penalty, bad_words_ids, min_new_tokens, ... See `decodax.sampling.build`. They override the
            model's generation config; without any the decoding is greedy. Each is one for all, one for each prompt, or
            one for each row of the result: `num_samples=3, temperature=[0.2, 0.7, 1.0]` samples one prompt at three
            temperatures. Further ones:
            request_ids: ids that address each prompt's randomness, from 0 to 2**32 - 1; default its place in `prompts`.
            With ids of their own, such as `request_ids=[dx.jobs.address(p) for p in prompts]`, texts do not depend on
            the order of a batch.
            guidance_scale, negative_prompts: classifier-free guidance of this scale against these prompts (default: the
            last prompt token alone, as in transformers); masked diffusion guides against a prompt of masks, and LLaDA's
            `cfg_scale` is this less 1.
            max_length: as max_new_tokens, with the prompt counted. min_new_tokens: neither an end of sequence nor a
            stop string counts before it. include_stop, skip_special_tokens: of the texts. chunk: prompt tokens that are
            read in one forward. arithmetic_sampling: the samples of a prompt cover the distribution evenly
            (`decodax.sampling.Arithmetic`).

    Raises:
        ValueError: an empty prompt where the model has no BOS token to begin with, a token beyond the model's
            vocabulary, a prompt or new tokens beyond its positions (`Model.max_positions`), more than the machine's
            memory holds, an algorithm that does not fit the model, or an argument out of its range, by name.
        TypeError: an argument of the wrong kind, or an unknown one, by name.
        RuntimeError: the algorithm stopped making progress.

    Warns:
        UserWarning: prompt and new tokens are more than the model was trained on (`Model.trained_positions`), which
            rotary positions allow; says both numbers.
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
    """The result of a search, or of a rule that chooses."""
    if search is not None and select is not None:
        raise ValueError("search and select: got both, takes one of them")
    given = {name: x for name, x in given.items() if x is not None and not (name == "seed" and x == 0)}
    for slot, found, shelf, kind in (("search", search, SEARCHES, Search), ("select", select, SELECTS, Select)):
        if found is None:
            continue
        found = shelf.read(found) if isinstance(found, str) else found
        found = found.build(model(lm)) if isinstance(found, Configured) else found
        if not isinstance(found, kind):
            raise TypeError(f"{slot}: got {shown(found)}, takes a function of decodax.{slot}, or the name of one")
        if isinstance(found, Search):
            if num_samples is not None:
                raise ValueError(f"num_samples: got {num_samples} beside a search, which says how many rows it takes")
            return found.run(lm, prompts, given)
        return found.run(lm, prompts, 8 if num_samples is None else whole("num_samples", num_samples, 1), given)
    raise AssertionError


def run(request: Request, clock: float, progress: bool = False) -> Result:
    """Runs a request. `clock` is when its time began, by `time.monotonic`."""
    size, end = request.batch_size, None if request.max_time is None else clock + request.max_time
    through = through_slots if size and size < len(request) and possible(request) else through_batches
    return through(request, end, progress)


def through_batches(request: Request, end: float | None = None, progress: bool = False) -> Result:
    """Runs a request batch by batch, each until its last prompt has ended."""
    count, size = len(request), request.batch_size
    order = sorted(range(count), key=lambda i: len(request.prompts[i])) if size else list(range(count))
    parts: list[Result] = []
    with bar(progress, "generating", count * request.samples) as report:
        for start in range(0, count, size or count):
            part = request.select(order[start:start + size]) if size else request
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
    """Runs a request with `batch_size` prompts at once, each in the place of one that has ended."""
    assert request.batch_size is not None
    # the longest texts first, so that few places stand empty in the end; among those of about the same length, prompts
    # of similar length side by side, which are read together
    order = sorted(range(len(request)), key=lambda i: (-power(int(request.max_new[i])), len(request.prompts[i])))
    use, parts = Use() if use is None else use, {}
    with bar(progress, "generating", len(request) * request.samples) as report:
        answers = schedule(order, request.batch_size, read=lambda i: Ticket(request.select([i]), i), end=end,
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


def stream(lm: LM | str | os.PathLike[str], prompt: Prompt, **options: Any) -> Stream:
    """Continues one prompt piece by piece. Takes the arguments of `generate` but for those that need many rows:
    `num_samples`, `batch_size` and `progress`.

    Pieces never hold half a character, nor the beginning of what may turn out to be a stop string; together they are
    the text that `generate` returns, and the tokens are the same. After the last piece `.result` holds the result.
    `max_time` counts from this call, with the time that the reader takes.

    Raises:
        TimeoutError: `max_time` was out before the constraints had been built. Others as `generate`.
    """
    return Stream(lm, prompt, **options)


class Stream(Iterator[str]):
    """Pieces of text as they come; `.result` after the last."""

    def __init__(self, lm: LM | str | os.PathLike[str], prompt: Prompt, **options: Any):
        clock = time.monotonic()
        request = one_row("stream", lm, prompt, options)
        if request.lm.tokenizer is None:
            raise ValueError("stream: this model has no tokenizer, so it makes no text; use generate")
        self.result: Result | None = None
        self._end = None if request.max_time is None else clock + request.max_time
        self._job = Job.begin(request)
        self._text = request.lm.tokenizer.detokenizer(
            request.prompts[0], stop=request.stop, min_new=int(request.min_new[0]), include_stop=request.include_stop,
            skip_special_tokens=request.skip_special_tokens)
        self._read = 0

    def __repr__(self) -> str:
        made = int(self._job.state.length[0] - self._job.state.prompt_length[0])
        status = "running" if self.result is None else self.result.status[0].name.lower()
        return f"<Stream of {self._job.request.lm.name!r}: {made} tokens, {status}>"

    def __next__(self) -> str:
        while self._job.running:
            self._job.advance(BURST_SECONDS)
            if self._end is not None and time.monotonic() > self._end:
                self._job.expire()
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


def one_row(where: str, lm: Any, prompt: Any, options: dict[str, Any]) -> Request:
    """The request of a front end that takes one prompt.

    Raises:
        TypeError, ValueError: as `Request.read`; also for arguments that need many rows.
    """
    for name, none in (("num_samples", 1), ("batch_size", 1), ("progress", False)):
        given = options.pop(name, None)
        plain = scalar(name, given, repr(none))
        if given is not None and (type(plain) is not type(none) or plain != none):
            raise ValueError(f"{name}: got {given!r}; for generate only, a {where} is one row")
    return Request.read(lm, prompt, where, **options)


def merge(parts: list[Result], order: list[int], samples: int, pad: int) -> Result:
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
