"""The front door: `generate` and `stream`, from prompts to text."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from decodax.autoregressive import Autoregressive
from decodax.core import drivers, keys
from decodax.core.state import State, Status
from decodax.core.stops import StopTable, stop_strings
from decodax.core.types import Algorithm, Params
from decodax.io.load import LM
from decodax.policy import Policy, from_generation_config
from decodax.policy.guidance import guide
from decodax.result import Result, Statistics, log_probs, new_tokens
from decodax.sharding import place

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
        algorithm: the decoding method; default plain autoregressive decoding.
        seed: addresses every draw, together with the request's id and the token's position.
        num_samples: continuations of each prompt; the prompt is prefilled once.
        stop: strings that end a row, found also across token borders; the text returned ends before them.
        logprobs: record log-probabilities of the chosen tokens and of this many most likely ones.
        request_ids: what a row's randomness is addressed by; default its place in `prompts`.
        guidance_scale: classifier-free guidance of this scale against `negative_prompts` (default: the last prompt
            token alone, as transformers does).
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


@dataclasses.dataclass
class Job:
    """A batch on its way: the compiled drivers, and the clock. The state is donated from burst to burst."""

    lm: LM
    algorithm: Algorithm
    model: Any
    params: Params
    policy: Policy
    state: State
    prompts: list[list[int]]
    stop: str | Sequence[str] | None
    prefill_forwards: int
    prefill_seconds: float
    seconds: float = 0.0
    forwards: int = 0
    burst: int = 1
    status: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(1, np.int32))

    @classmethod
    def begin(cls, lm: LM, ids: list[list[int]], *, max_new_tokens: list[int | None], min_new_tokens: list[int],
              seed: list[int], request_ids: list[int], negative: list[list[int]] | None, algorithm: Algorithm | None,
              num_samples: int, stop: str | Sequence[str] | None, logprobs: int | None, chunk: int,
              guidance_scale: float | None, sampling: dict[str, Any]) -> Job:
        """Builds the policy, prefills the prompts and fans out the samples."""
        algorithm = algorithm or Autoregressive()
        for name, value, low in (("num_samples", num_samples, 1), ("chunk", chunk, 1), ("logprobs", logprobs or 0, 0)):
            if value < low:
                raise ValueError(f"{name}: got {value}, takes {low} or more")
        default = lm.generation_config.get("max_new_tokens") or 64
        budget = [default if n is None else n for n in max_new_tokens]
        for name, values in (("max_new_tokens", budget), ("min_new_tokens", min_new_tokens)):
            if min(values) < 0:
                raise ValueError(f"{name}: got {min(values)}, takes 0 or more")
        lengths = np.array([len(row) for row in ids], np.int32)
        longest = max(n + new for n, new in zip(lengths, budget, strict=True))
        limit = getattr(lm.model, "longest", None)
        if limit is not None and longest > limit:
            raise ValueError(f"max_new_tokens: prompt and new tokens are {longest}, the model has {limit} positions")
        size = bucket(int(longest))
        tokens = np.zeros((len(ids), size), np.int32)
        for row, prompt in zip(tokens, ids, strict=True):
            row[:len(prompt)] = prompt

        clock = time.perf_counter()
        policy = from_generation_config(
            lm.generation_config, batch=len(ids), vocab_size=lm.vocab_size,
            max_length=lengths + np.array(budget, np.int32), min_new_tokens=np.array(min_new_tokens, np.int32),
            **{"eos_token_id": lm.eos, **sampling})
        if strings := stop_strings(stop):
            if lm.tokenizer is None:
                raise ValueError("stop: stop strings need a tokenizer, and this model has none")
            policy = policy.replace(stops=StopTable.build(lm.tokenizer.token_bytes(), strings, lm.vocab_size))
        model, params = lm.model, Params(target=lm.params)
        seeds = np.array(seed, np.int64).astype(np.uint32)       # negative and large ones wrap around
        tokens, policy = place(lm.mesh, tokens), place(lm.mesh, policy)
        s = drivers.begin(algorithm, model, params, policy, tokens, lengths, size=size, seed=seeds,
                          max_new=np.array(budget, np.int32), min_new=np.array(min_new_tokens, np.int32),
                          request=np.array(request_ids, np.uint32), sample=np.zeros(len(ids), np.uint32),
                          top_logprobs=logprobs)
        forwards = 0
        if algorithm.caches and lengths.max() > 1:
            width = min(_power(int(lengths.max()) - 1), chunk, size)
            forwards = -(-(int(lengths.max()) - 1) // width)
            s = drivers.prefill(algorithm, model, params, policy, s, width=width)
        if guidance_scale is not None and guidance_scale != 1:
            model, s = guide(algorithm, model, params, policy, s, guidance_scale, negative)
        if num_samples > 1:
            repeat = lambda x: np.repeat(np.asarray(x), num_samples)
            each = keys.row_keys(jnp.asarray(repeat(seeds)), jnp.asarray(repeat(np.array(request_ids, np.uint32))),
                                 jnp.asarray(np.tile(np.arange(num_samples, dtype=np.uint32), len(ids))))
            s, policy = drivers.fan_out(s, policy, each, samples=num_samples)
        # no round at all: compiles the loop, if it must, before the decode clock starts
        s = drivers.advance(algorithm, model, params, policy, s, jnp.int32(0))
        jax.block_until_ready(s.length)
        job = cls(lm, algorithm, model, params, policy, s, [p for p in ids for _ in range(num_samples)], stop, forwards,
                  time.perf_counter() - clock)
        job.status = np.asarray(s.status)
        return job

    @property
    def running(self) -> bool:
        return bool((self.status == Status.RUNNING).any())

    @property
    def finished(self) -> int:
        return int((self.status != Status.RUNNING).sum())

    def advance(self, seconds: float | None) -> None:
        """Runs to the end, or for about this long."""
        clock = time.perf_counter()
        before = int(np.asarray(self.state.stats.rounds).max())
        budget = int(np.asarray(self.state.max_length - self.state.length).max())
        # each round of a running row makes progress, at least one position in `emits` of a canvas
        bound = 2 * (budget + self.algorithm.emits) + 8
        rounds = bound if seconds is None else min(self.burst, bound)
        self.state = drivers.advance(self.algorithm, self.model, self.params, self.policy, self.state,
                                     jnp.int32(rounds))
        self.status = np.asarray(self.state.status)
        spent = time.perf_counter() - clock
        self.seconds += spent
        done = int(np.asarray(self.state.stats.rounds).max()) - before
        self.forwards += done
        if self.running and seconds is None:
            raise RuntimeError(f"{self.algorithm}: rows still running after {rounds} rounds; it makes no progress")
        if seconds is not None and spent < seconds:
            self.burst = min(self.burst * 2, 256)

    def result(self) -> Result:
        """What came out."""
        tokens, lengths = new_tokens(self.state, self.lm.pad)
        text = None
        if self.lm.tokenizer is not None:
            rows = zip(self.prompts, tokens, lengths, np.asarray(self.state.min_new), strict=True)
            text = [self.lm.tokenizer.continuation(p, row[:n].tolist(), stop=self.stop, min_new=int(least))
                    for p, row, n, least in rows]
        stats = {k: np.asarray(getattr(self.state.stats, k)).astype(np.int64)
                 for k in ("rounds", "drafted", "accepted", "histogram")}
        return Result(tokens=tokens, lengths=lengths, status=[Status(int(x)) for x in self.status], text=text,
                      logprobs=log_probs(self.state),
                      stats=Statistics(forwards=self.forwards, prefill_forwards=self.prefill_forwards,
                                       tokens=lengths.astype(np.int64), seconds=self.seconds,
                                       prefill_seconds=self.prefill_seconds, **stats))


def bucket(length: int) -> int:
    """The buffer size for sequences of this length: powers of two from 64 to 1,024, then multiples of 1,024.

    Programs are compiled once a size; a step costs what the rows hold, not what the buffer would.

    >>> [bucket(n) for n in (5, 65, 1000, 1025)]
    [64, 128, 1024, 2048]
    """
    return max(_power(length), 64) if length <= 1024 else -(-length // 1024) * 1024


def _power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


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
