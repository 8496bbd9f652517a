"""What a generation returns."""

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
    """Counts of a generation; arrays have one entry a row. Definitions as in vLLM.

    Attributes:
        forwards: target forwards of the decode loop that the batch took. prefill_forwards: those of the prefill.
        rounds: `i64[B]` forwards in which each row was running. tokens: `i64[B]` new tokens.
        drafted, accepted: `i64[B]` draft tokens offered and accepted.
        histogram: `i64[B, M + 1]` rounds of each row by tokens decided in them.
        seconds: wall time of the decode loop. prefill_seconds: of the prefill and of compiling whatever was new.
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
        """New tokens a row and target forward, pooled over rows."""
        return float(self.tokens.sum() / max(self.rounds.sum(), 1))

    @property
    def mean_accepted_length(self) -> float:
        """1 + accepted drafts a verification: the token of the target's own counts (vLLM's mean_acceptance_length)."""
        return 1 + float(self.accepted.sum() / max(self.rounds.sum(), 1))

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted of offered drafts; NaN if none was offered."""
        return float(self.accepted.sum() / self.drafted.sum()) if self.drafted.sum() else float("nan")

    @property
    def acceptance_per_position(self) -> np.ndarray:
        """`f64[M - 1]`: the share of rounds in which the first, second, ... draft was accepted."""
        rounds = self.histogram.sum(0)
        return rounds[::-1].cumsum()[::-1][2:] / max(rounds.sum(), 1)

    @property
    def tokens_per_second(self) -> float:
        """New tokens of the batch a second of the decode loop."""
        return float(self.tokens.sum() / self.seconds) if self.seconds > 0 else float("nan")


@dataclasses.dataclass(frozen=True)
class LogProbs:
    """Natural log-probabilities of the new tokens; entries beyond a row's length are 0.

    Attributes:
        raw: `f32[B, N]` under the model. processed: under the policy (0 for greedy rows).
        top_ids, top: `i32[B, N, n]`, `f32[B, N, n]` the model's most likely tokens at each position.
    """

    __repr__ = short

    raw: np.ndarray
    processed: np.ndarray
    top_ids: np.ndarray
    top: np.ndarray


@dataclasses.dataclass(frozen=True)
class Result:
    """A finished generation. Rows come prompt by prompt, the samples of a prompt side by side.

    Attributes:
        tokens: `i32[B, N]` new tokens, padded with `pad` beyond `lengths`. lengths: `i32[B]`.
        status: why each row ended. text: the new text of each row without the stop string, of `infill` the whole text;
            None without a tokenizer.
        logprobs: if they were asked for.
        stats: counts and times.
        findings: what the method has found of each row beside the tokens (scores of beams, weights of particles), by
            name, `[B, ...]` each; `{}` of most.
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
        """`f64[B]`: the log of how much likelier each text is under the model than under what it was drawn from.

        Weighted by `exp` of it, samples under a constraint, a truncation or another temperature are samples of the
        model, held to the texts that could be drawn. Under a constraint alone, at temperature 1, it is the log of the
        share of the model's probability that the constraint left, summed over the tokens. Where a method weighs its
        draws (`decodax.algorithms.contrastive.awrs.AWRS`), its `findings["log_weight"]` is part of it. Rows must
        sample: what greedy decoding takes was not drawn.

        Raises:
            ValueError: log-probabilities were not asked for (`logprobs=0`).
        """
        if self.logprobs is None:
            raise ValueError("log_weights: needs log-probabilities; pass logprobs=0 to generate")
        own = (self.logprobs.raw.astype(np.float64) - self.logprobs.processed).sum(1)
        return own + self.findings.get("log_weight", 0.0)

    def row(self, i: int) -> np.ndarray:
        """`i32[n]`: the new tokens of row `i`, without padding."""
        return self.tokens[i, :self.lengths[i]]

    def select(self, rows: Sequence[int] | np.ndarray) -> Result:
        """Returns the result of some rows, in the given order; counts of the whole batch stay."""
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
        statuses by name, None for a number that is not finite."""
        noted = self.logprobs and {f.name: [json_ready(row[:n]) for row, n in zip(
            getattr(self.logprobs, f.name), self.lengths, strict=True)] for f in dataclasses.fields(LogProbs)}
        return {"text": self.text, "tokens": [self.row(i).tolist() for i in range(len(self))],
                "status": [status.name.lower() for status in self.status], "logprobs": noted,
                "stats": {f.name: json_ready(getattr(self.stats, f.name)) for f in dataclasses.fields(Statistics)},
                "findings": {name: json_ready(x) for name, x in self.findings.items()}}


def json_ready(value: Any) -> Any:
    """Returns a value as JSON has it: lists, dictionaries with texts as names, numbers, texts, True, False and None.

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
    """The new tokens of a state: `i32[B, N]` padded with `pad`, and their lengths `i32[B]`."""
    tokens, start, end = (np.asarray(x) for x in (s.tokens, s.prompt_length, s.length))
    out, keep = _gather(tokens, start, end)
    return np.where(keep, out, pad).astype(np.int32), (end - start).astype(np.int32)


def log_probs(s: State, count: int | None = None) -> LogProbs | None:
    """The recorded log-probabilities of the new tokens, with the `count` most likely ones; default all recorded."""
    if s.record is None:
        return None
    start, end = np.asarray(s.prompt_length), np.asarray(s.length)

    def part(x: Any) -> np.ndarray:
        out, keep = _gather(np.asarray(x), start, end)
        return out * keep.reshape(*keep.shape, *[1] * (out.ndim - 2))

    return LogProbs(part(s.record.raw), part(s.record.processed), part(s.record.top_ids[..., :count]),
                    part(s.record.top[..., :count]))


def _gather(x: np.ndarray, start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Entries `start[b]` to `end[b]` of each row, left-aligned, and which of them are real."""
    offset = np.arange(int((end - start).max(initial=0)))
    index = np.minimum(start[:, None] + offset, x.shape[1] - 1)
    return x[np.arange(len(x))[:, None], index], offset < (end - start)[:, None]
