"""The results of a generation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from decodax.common.struct import short
from decodax.core.state import State, Status


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Counts and times of a generation; arrays have one entry for each row. The definitions are those of vLLM.

    Attributes:
        forwards: number of forward passes of the target model in the decode loop, for the whole batch.
        prefill_forwards: number of forward passes of the prefill.
        rounds: `i64[B]`, number of forward passes while each row was running.
        tokens: `i64[B]`, number of new tokens.
        drafted: `i64[B]`, number of draft tokens that were verified.
        accepted: `i64[B]`, number of draft tokens that were accepted.
        histogram: `i64[B, M + 1]`, number of rounds of each row in which 0, 1, ..., M tokens were decided.
        seconds: wall time of the decode loop.
        prefill_seconds: wall time of the prefill, including compilation.
    """

    __repr__ = short

    forwards: int
    prefill_forwards: int
    rounds: np.ndarray
    tokens: np.ndarray
    drafted: np.ndarray
    accepted: np.ndarray
    histogram: np.ndarray
    seconds: float
    prefill_seconds: float

    @property
    def tokens_per_forward(self) -> float:
        """Mean number of new tokens of a row in a forward pass of the target model that it took part in, over all
        rows."""
        return float(self.tokens.sum() / max(self.rounds.sum(), 1))

    @property
    def mean_accepted_length(self) -> float:
        """Mean number of tokens that a row gets in a verification, over all rows: the accepted draft tokens, and 1 for
        the target model's own token (vLLM's mean_acceptance_length)."""
        return 1 + float(self.accepted.sum() / max(self.rounds.sum(), 1))

    @property
    def draft_acceptance_rate(self) -> float:
        """Share of the verified draft tokens that were accepted; NaN if there were none."""
        return float(self.accepted.sum() / self.drafted.sum()) if self.drafted.sum() else float("nan")

    @property
    def acceptance_per_position(self) -> np.ndarray:
        """`f64[M - 1]`: entry `i` is the share of the rounds of all rows in which at least `i + 1` draft tokens were
        accepted, counted as rounds with at least `i + 2` decided tokens."""
        rounds = self.histogram.sum(0)
        return rounds[::-1].cumsum()[::-1][2:] / max(rounds.sum(), 1)

    @property
    def tokens_per_second(self) -> float:
        """New tokens of the batch per second of the decode loop."""
        return float(self.tokens.sum() / self.seconds) if self.seconds > 0 else float("nan")


@dataclasses.dataclass(frozen=True)
class LogProbs:
    """Log-probabilities of the new tokens in nats; entries beyond a row's length are 0.

    Attributes:
        raw: `f32[B, N]`, log-probability of each token under the model.
        processed: `f32[B, N]`, log-probability under the policy; 0 for greedy rows.
        top_ids: `i32[B, N, n]`, the most likely tokens of the model at each position.
        top: `f32[B, N, n]`, their log-probabilities.
    """

    __repr__ = short

    raw: np.ndarray
    processed: np.ndarray
    top_ids: np.ndarray
    top: np.ndarray


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a generation. Rows are ordered by prompt; the samples of a prompt are adjacent.

    Attributes:
        tokens: `i32[B, N]`, the new tokens, padded beyond `lengths`.
        lengths: `i32[B]`, number of new tokens.
        status: why each row ended.
        text: the new text of each row without the stop string, for `infill` the whole text; None without a tokenizer.
        logprobs: log-probabilities of the new tokens, if they were requested; else None.
        stats: counts and times.
        findings: further results of the method for each row (scores of beams, weights of particles), by name, arrays
            `[B, ...]`; `{}` for most methods.
    """

    __repr__ = short

    tokens: np.ndarray
    lengths: np.ndarray
    status: list[Status]
    text: list[str] | None
    logprobs: LogProbs | None
    stats: Statistics
    findings: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.status)

    @property
    def log_weights(self) -> np.ndarray:
        """`f64[B]`, log of the ratio of each text's probability under the model to its probability under the
        distribution from which it was sampled.

        With weights `exp(log_weights)`, samples under a constraint, a truncation or another temperature are samples of
        the model, restricted to the texts that could be sampled. With a constraint alone, at temperature 1, the
        log-weight is the sum over the tokens of the log of the probability that the constraint left. If a method
        returns weights of its own (`decodax.algorithms.contrastive.awrs.AWRS`), its `findings["log_weight"]` is
        included. Rows must be sampled: the weights of greedy rows have no meaning.

        Raises:
            ValueError: log-probabilities were not requested (`logprobs=0`).
        """
        if self.logprobs is None:
            raise ValueError("log_weights: needs log-probabilities; pass logprobs=0 to generate")
        own = (self.logprobs.raw.astype(np.float64) - self.logprobs.processed).sum(1)
        return own + self.findings.get("log_weight", 0.0)

    def row(self, i: int) -> np.ndarray:
        """Returns the new tokens of row `i` without padding, `i32[n]`."""
        return self.tokens[i, :self.lengths[i]]

    def select(self, rows: Sequence[int] | np.ndarray) -> Result:
        """Returns the result of some rows, in the given order. Counts of the whole batch do not change."""
        at: Any = np.asarray(rows, np.int64)
        pick = lambda xs: None if xs is None else [xs[i] for i in at]
        noted = self.logprobs and LogProbs(*(getattr(self.logprobs, f.name)[at] for f in dataclasses.fields(LogProbs)))
        counts = {name: getattr(self.stats, name)[at]
                  for name in ("rounds", "tokens", "drafted", "accepted", "histogram")}
        return dataclasses.replace(
            self, tokens=self.tokens[at], lengths=self.lengths[at], status=[self.status[i] for i in at],
            text=pick(self.text), logprobs=noted, stats=dataclasses.replace(self.stats, **counts),
            findings={name: x[at] for name, x in self.findings.items()})

    def to_dict(self) -> dict[str, Any]:
        """Returns the result as lists, numbers and texts, for JSON: tokens and log-probabilities without padding,
        statuses by name, None for numbers that are not finite."""
        noted = self.logprobs and {f.name: [json_ready(row[:n]) for row, n in zip(
            getattr(self.logprobs, f.name), self.lengths, strict=True)] for f in dataclasses.fields(LogProbs)}
        return {"text": self.text, "tokens": [self.row(i).tolist() for i in range(len(self))],
                "status": [status.name.lower() for status in self.status], "logprobs": noted,
                "stats": {f.name: json_ready(getattr(self.stats, f.name)) for f in dataclasses.fields(Statistics)},
                "findings": {name: json_ready(x) for name, x in self.findings.items()}}


def json_ready(value: Any) -> Any:
    """Converts a value to the types of JSON: lists, dictionaries with texts as keys, numbers, texts, True, False and
    None.

    >>> json_ready({"scores": np.array([1.0, -np.inf]), "status": Status.EOS})
    {'scores': [1.0, None], 'status': 'eos'}
    """
    if isinstance(value, Status):
        return value.name.lower()
    if isinstance(value, np.ndarray | np.generic) or hasattr(value, "__array__"):
        return json_ready(np.asarray(value).tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | bool | int):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: json_ready(getattr(value, f.name)) for f in dataclasses.fields(value)
                if not f.name.startswith("_")}
    if isinstance(value, Mapping):
        return {str(name): json_ready(x) for name, x in value.items()}
    if isinstance(value, list | tuple | set | frozenset | range):
        return [json_ready(x) for x in value]
    return str(value)


def new_tokens(s: State, pad: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the new tokens of a state, `i32[B, N]` padded with `pad`, and their numbers, `i32[B]`."""
    tokens, start, end = (np.asarray(x) for x in (s.tokens, s.prompt_length, s.length))
    out, keep = _gather(tokens, start, end)
    return np.where(keep, out, pad).astype(np.int32), (end - start).astype(np.int32)


def log_probs(s: State, count: int | None = None) -> LogProbs | None:
    """Returns the recorded log-probabilities of the new tokens, with the `count` most likely tokens; None: all that
    were recorded."""
    if s.record is None:
        return None
    start, end = np.asarray(s.prompt_length), np.asarray(s.length)

    def part(x: Any) -> np.ndarray:
        out, keep = _gather(np.asarray(x), start, end)
        return out * keep.reshape(*keep.shape, *[1] * (out.ndim - 2))

    return LogProbs(part(s.record.raw), part(s.record.processed), part(s.record.top_ids[..., :count]),
                    part(s.record.top[..., :count]))


def _gather(x: np.ndarray, start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns entries `start[b]` to `end[b]` of each row, left-aligned, and True where an entry is not padding."""
    offset = np.arange(int((end - start).max(initial=0)))
    index = np.minimum(start[:, None] + offset, x.shape[1] - 1)
    return x[np.arange(len(x))[:, None], index], offset < (end - start)[:, None]
