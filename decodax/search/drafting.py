"""Drafting by steps: a small model generates whole steps, and a large model decides which of them are kept."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from decodax.common.registry import FUNCTIONS
from decodax.core.state import Status
from decodax.engine.methods import model
from decodax.front.score import score
from decodax.io.appended import appended
from decodax.io.load import LM
from decodax.search.forks import Forks

Same = Callable[[str, str], bool]


def same_words(a: str, b: str) -> bool:
    """True if two steps are equal apart from white space and case."""
    return "".join(a.split()).lower() == "".join(b.split()).lower()


@dataclasses.dataclass(frozen=True)
class DraftedSteps:
    """The result of `lookahead_reasoning`.

    Attributes:
        text: the text of each prompt.
        steps: number of steps of each text.
        accepted: number of steps of each text that the draft model has generated.
        rounds: number of rounds in which the target model generated steps, for all prompts together.
        tokens: number of tokens that the target model has generated.
        drafted: number of tokens that the draft model has generated.
    """

    text: list[str]
    steps: list[int]
    accepted: list[int]
    rounds: int
    tokens: int
    drafted: int


@FUNCTIONS.register("search.lookahead_reasoning", "Scaling Speculative Decoding with Lookahead Reasoning",
                    "Fu et al. 2025", "a small model drafts whole steps, which stand if the large one says the same")
def lookahead_reasoning(lm: Any, draft: Any, prompts: Any, *, until: str | Sequence[str], depth: int = 4,
                        same: Same = same_words, step_tokens: int | None = None, **sampling: Any) -> DraftedSteps:
    """Lookahead Reasoning (Fu et al., 2025): a draft model generates several reasoning steps, which the target model
    checks in parallel.

    In a round the draft model generates `depth` steps one after the other. The target model then generates, in
    parallel, its own version of each step after the drafted steps before it, and of the step after the last. A drafted
    step is accepted if `same` holds for both versions, and if the text ends after both or after neither. The first step
    that is not accepted is replaced by the target's version. So a round adds from 1 to `depth + 1` steps.

    The text is not that of plain decoding, but equivalent in the sense of `same`. By default steps have to be equal
    apart from white space and case, so that greedy results differ in little else. The paper's judges, which compare
    meanings, are not included: pass one as `same` to accept more steps. `algorithm=` can also draft tokens within the
    steps.

    Args:
        lm: the target model, or a name for `load`.
        draft: the draft model, or a name for `load`.
        prompts: the prompts.
        until: strings that end a step.
        depth: number of drafted steps.
        same: returns True if the drafted step and the target's version are equivalent.
        step_tokens: maximum number of tokens of a step. None: no limit.
        sampling: arguments of `generate`, for both models.

    Raises:
        ValueError: a model without a tokenizer, or as in `generate`.
    """
    target, small = model(lm), model(draft)
    if target.tokenizer is None or small.tokenizer is None:
        raise ValueError("lookahead_reasoning: takes models with tokenizers, since steps are compared as texts")
    if depth < 1:
        raise ValueError(f"depth: got {depth}, takes at least 1")
    wide = depth + 1
    own = Forks.begin(target, prompts, wide, until=until, step_tokens=step_tokens, **sampling)
    theirs = Forks.begin(small, prompts, 1, until=until, step_tokens=step_tokens,
                         **{k: v for k, v in sampling.items() if k not in ("algorithm", "cache")})
    P, alike = len(own), _alike(target, small)
    steps, accepted, rounds = [0] * P, [0] * P, 0
    first = np.zeros((P, wide), bool)
    first[:, 0] = True
    while (live := own.live[:, 0]).any():
        rounds += 1
        guesses: list[list[WrittenStep]] = [[] for _ in range(P)]
        ahead = theirs.ahead(np.zeros((P, 1), bool), tokens=1)      # a copy in which the draft writes
        for _ in range(depth):
            for p, row in enumerate(_write(ahead, ahead.live & live[:, None], alike)):
                guesses[p] += [step for step in row if step is not None]
        # Row j of the target follows j drafted steps, none of which ended the draft's text.
        own.fork(np.where(live[:, None], 0, np.arange(wide)))
        given: list[list[Any]] = [[None] * wide for _ in range(P)]
        active = first & live[:, None]
        for p, drafted in enumerate(guesses):
            for j in range(1, len(drafted) + 1 - any(step.ends for step in drafted)):
                active[p, j] = True
                given[p][j] = _joined(drafted[:j], alike)
        own.feed(given)
        active &= own.live
        written = _write(own, active, alike)
        parents = np.tile(np.arange(wide), (P, 1))
        stood: list[list[Any]] = [[None] for _ in range(P)]
        said: list[list[Any]] = [[None] for _ in range(P)]
        for p in np.flatnonzero(live).tolist():
            stands = 0
            for guess, mine in zip(guesses[p], written[p], strict=False):
                # If one text ends and the other continues, they do not say the same.
                if mine is None or mine.ends != guess.ends or not same(guess.text, mine.text):
                    break
                accepted[p] += 1
                if mine.ends or not active[p, stands + 1]:
                    break
                stands += 1
            parents[p] = stands
            steps[p] += stands + 1
            # The draft is fed its own text as ids, and the target's as ids or as text.
            stood[p], mine = [_joined(guesses[p][:stands], True)], written[p][stands]
            assert mine is not None
            said[p] = [_joined([mine], alike)]
        own.fork(parents)
        if alike:
            theirs.feed([[a[0] + b[0]] if a[0] is not None else [None] for a, b in zip(stood, said, strict=True)])
        else:
            theirs.feed(stood)
            theirs.feed(said)
        theirs.spent += ahead.spent
    return DraftedSteps([row[0] for row in own.texts(first)], steps, accepted, rounds, own.spent, theirs.spent)


@dataclasses.dataclass(frozen=True)
class WrittenStep:
    """A step that a row has generated.

    Attributes:
        ids: its token ids.
        text: its text.
        status: status of the row after it.
    """

    ids: list[int]
    text: str
    status: int

    @property
    def ends(self) -> bool:
        """True if the row's text ends with this step."""
        return self.status != Status.RUNNING


def _write(forks: Forks, which: np.ndarray, alike: bool) -> list[list[WrittenStep | None]]:
    """Lets rows generate a step, and returns the steps `[P][n]`; None for other rows.

    If the other model has different tokens (`alike` is False), a step is continued until its text ends with a complete
    character.
    """
    before = forks.lengths.copy()
    wrote = forks.extend(which)
    unread = lambda: np.array([[not text or text.endswith("\ufffd") for text in row] for row in forks.since(before)])
    while not alike and (more := wrote & forks.live & unread()).any():
        forks.extend(more, tokens=1)
    texts = forks.since(before)
    ids = lambda p, i: forks.tokens(p, i)[before[p, i] - len(forks.prompts[p]):]
    return [[WrittenStep(ids(p, i), texts[p][i], int(forks.status[p, i])) if wrote[p, i] else None
             for i in range(forks.n)] for p in range(len(forks))]


def _joined(steps: Sequence[WrittenStep], alike: bool) -> Any:
    """Joins steps that the other model is to read: to token ids if both models have the same tokens, else to a text."""
    return list(itertools.chain(*(step.ids for step in steps))) if alike else "".join(step.text for step in steps)


def _alike(a: LM, b: LM) -> bool:
    """True if two models have the same tokens, with the same ids."""
    assert a.tokenizer is not None and b.tokenizer is not None
    return a.tokenizer is b.tokenizer or a.tokenizer.token_bytes(False) == b.tokenizer.token_bytes(False)


@dataclasses.dataclass(frozen=True)
class Calibrated:
    """The result of `atts`.

    Attributes:
        text: the text of each prompt.
        turns: number of chunks of each text that the draft model has proposed.
        accepted: number of chunks of each text that were accepted.
        p_values: the conformal p-value of each proposed chunk, for each prompt.
    """

    text: list[str]
    turns: list[int]
    accepted: list[int]
    p_values: list[list[float]]


@FUNCTIONS.register("search.atts", "ATTS: Asynchronous Test-Time Scaling via Conformal Prediction", "Xiong et al. 2025",
                    "a small model's chunks stand unless they are too surprising; the gate alone, in lock step")
def atts(lm: Any, draft: Any, prompts: Any, *, step_tokens: int = 500, until: str | Sequence[str] | None = None,
         cut: float = 0.6, turns: int = 40, calibration: Sequence[float] = (), **sampling: Any) -> Calibrated:
    """The conformal test of asynchronous test-time scaling (Xiong et al., 2025, ATTS): a draft model generates chunks,
    and a target model replaces those that it finds too surprising.

    The target computes the perplexity of each drafted chunk and ranks it among those of all earlier chunks, of all
    prompts. With `n` earlier chunks, the conformal p-value is (1 + number of earlier perplexities that are at least as
    large) / (n + 1). A chunk with a p-value below `1 - cut` is replaced by one that the target generates. So a share of
    about `cut` of the chunks is accepted, for all models. Each perplexity joins the calibration set. An end-of-sequence
    token belongs to the chunk that it ends, and a chunk may consist of it alone. Where the draft model cannot continue,
    the target generates the chunk.

    All prompts take their turns together, with one text each. Unlike the paper's system, nothing is asynchronous, and
    each turn runs the target on the whole text again to compute perplexities.

    Args:
        lm: the target model.
        draft: the draft model.
        prompts: the prompts.
        step_tokens: maximum number of tokens of a chunk.
        until: strings that end a chunk. None: only `step_tokens` does.
        cut: share of chunks to accept, from 0 to 1.
        turns: maximum number of chunks of a text.
        calibration: perplexities of earlier chunks, with which the calibration set begins.
        sampling: arguments of `generate`, for both models.

    Raises:
        ValueError: a model without a tokenizer, a `cut` outside [0, 1], or as in `generate`.
    """
    target, small = model(lm), model(draft)
    if target.tokenizer is None or small.tokenizer is None:
        raise ValueError("atts: takes models with tokenizers, since chunks go from one to the other as texts")
    if not 0 <= cut <= 1:
        raise ValueError(f"cut: got {cut}, takes a share from 0 to 1")
    own = Forks.begin(target, prompts, 1, until=until, step_tokens=step_tokens, **sampling)
    theirs = Forks.begin(small, prompts, 1, until=until, step_tokens=step_tokens,
                         **{k: v for k, v in sampling.items() if k not in ("algorithm", "cache")})
    P, alike, tokenizer = len(own), _alike(target, small), target.tokenizer
    known, accepted = list(calibration), [0] * P
    p_values: list[list[float]] = [[] for _ in range(P)]
    for _ in range(turns):
        if not own.live.any():
            break
        ahead = theirs.ahead(np.zeros((P, 1), bool), tokens=1)
        chunks = {p: row[0] for p, row in enumerate(_write(ahead, ahead.live & own.live, alike)) if row[0] is not None}
        before = {p: own.prompts[p] + own.tokens(p, 0) for p in chunks}
        new = {p: chunk.ids if alike else appended(tokenizer, before[p], chunk.text) + _end(own, p, chunk)
               for p, chunk in chunks.items()}
        asked = [p for p in new if new[p]]
        told = score(target, [(before[p], new[p]) for p in asked]).logprobs if asked else []
        # Where the draft cannot continue, the target writes the chunk.
        writes = own.live & np.array([[not new.get(p)] for p in range(P)])
        fed: list[list[Any]] = [[None] for _ in range(P)]
        back: list[list[Any]] = [[None] for _ in range(P)]
        for p, log_p in zip(asked, told, strict=True):
            surprise = float(np.exp(-np.mean(log_p)))
            value = (1 + sum(x >= surprise for x in known)) / (len(known) + 1)
            known.append(surprise)
            p_values[p].append(value)
            if value >= 1 - cut:
                accepted[p] += 1
                fed[p], back[p] = [new[p]], [chunks[p].ids]
            else:
                writes[p, 0] = True
        own.feed(fed)
        for p in np.flatnonzero([row[0] is not None for row in fed]).tolist():
            if chunks[p].status in (Status.EOS, Status.STOP) and own.live[p, 0]:
                own.cut(p, 0, chunks[p].status)
        for p, (chunk,) in enumerate(_write(own, writes, alike)):
            if chunk is not None:
                back[p] = [_joined([chunk], alike)]
        theirs.feed(back)
    return Calibrated([row[0] for row in own.texts()], [len(x) for x in p_values], accepted, p_values)


def _end(own: Forks, p: int, chunk: WrittenStep) -> list[int]:
    """Returns `[id]` of the target's end-of-sequence token if the draft model's chunk ends with its own such token,
    else `[]`."""
    ends = np.asarray(own.job.request.policy.eos)[p * own.n]
    return ends[ends >= 0][:1].tolist() if chunk.status == Status.EOS else []
