"""Drafting by steps: a small model writes steps ahead, and a large one says which of them stand."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from decodax.io.load import LM
from decodax.methods import model
from decodax.scoring import score
from decodax.steps.forks import Forks

Same = Callable[[str, str], bool]


def same_words(a: str, b: str) -> bool:
    """Whether two steps are the same but for white space and case."""
    return "".join(a.split()).lower() == "".join(b.split()).lower()


@dataclasses.dataclass(frozen=True)
class Drafted:
    """What came of drafting by steps.

    Attributes:
        text: of each prompt. steps, accepted: how many steps there are in it, and how many of them were drafted.
        rounds: in which the target wrote, of all prompts together. tokens, drafted: that target and draft made.
    """

    text: list[str]
    steps: list[int]
    accepted: list[int]
    rounds: int
    tokens: int
    drafted: int


def lookahead_reasoning(lm: Any, draft: Any, prompts: Any, *, until: str | Sequence[str], depth: int = 4,
                        same: Same = same_words, step_tokens: int | None = None, **sampling: Any) -> Drafted:
    """Lookahead Reasoning (Fu et al., 2025): reasoning in which whole steps are drafted.

    In a round the draft model writes `depth` steps one after the other. The target then writes, side by side, its own
    version of each of them, behind those before it, and of the step behind the last. A step stands if it says the same
    as the target's own; the first that does not is replaced by the target's. So a round makes 1 to `depth + 1` steps.

    The text is not that of plain decoding, but what `same` takes for the same: by default steps equal but for white
    space and case, and then, with greedy rows, little else differs. The paper's judges, which compare meanings, are not
    included: give one as `same`, and more is accepted. Within steps `algorithm=` drafts tokens as usual.

    Args:
        lm, draft: models, or what `load` calls them. until: strings with which a step ends.
        same: from the drafted step and the target's. step_tokens: tokens of a step at most.
        sampling: arguments of `generate`, for both.

    Raises:
        ValueError: a model without a tokenizer, or as `generate`.
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
    P = len(own)
    steps, accepted, rounds = [0] * P, [0] * P, 0
    alike = _alike(target, small)
    first = np.zeros((P, wide), bool)
    first[:, 0] = True
    while (live := own.live[:, 0]).any():
        rounds += 1
        base = [len(own.tokens(p, 0)) for p in range(P)]
        guesses: list[list[str]] = [[] for _ in range(P)]
        ids: list[list[list[int]]] = [[] for _ in range(P)]
        ahead = theirs.ahead(np.zeros((P, 1), bool), tokens=1)      # a copy that the draft writes on
        for _ in range(depth):
            before, made = [row[0] for row in ahead.texts()], [len(ahead.tokens(p, 0)) for p in range(P)]
            wrote = ahead.extend(ahead.live & live[:, None])
            after = ahead.texts()
            for p in np.flatnonzero(wrote[:, 0]).tolist():
                guesses[p].append(after[p][0][len(before[p]):])
                ids[p].append(ahead.tokens(p, 0)[made[p]:])
        # row j of the target stands behind j drafted steps
        own.fork(np.where(live[:, None], 0, np.arange(wide)))
        given: list[list[Any]] = [[None] * wide for _ in range(P)]
        active = np.zeros((P, wide), bool)
        for p in np.flatnonzero(live).tolist():
            active[p, :len(guesses[p]) + 1] = True
            for j in range(1, len(guesses[p]) + 1):
                given[p][j] = list(itertools.chain(*ids[p][:j])) if alike else "".join(guesses[p][:j])
        own.feed(given)
        begun = own.texts()
        active &= own.live
        own.extend(active)
        now = own.texts()
        parents = np.tile(np.arange(wide), (P, 1))
        added: list[list[Any]] = [[None] for _ in range(P)]
        texts = own.texts(first)
        for p in np.flatnonzero(live).tolist():
            stands = 0
            own_steps = [b[len(a):] for a, b in zip(begun[p], now[p], strict=True)]
            while stands < len(guesses[p]) and active[p, stands + 1] and same(guesses[p][stands], own_steps[stands]):
                stands += 1
            parents[p] = stands
            accepted[p] += stands
            steps[p] += stands + 1
            added[p] = [own.tokens(p, stands)[base[p]:] if alike else now[p][stands][len(texts[p][0]):]]
        own.fork(parents)
        theirs.feed(added)
        theirs.spent += ahead.spent
    return Drafted([row[0] for row in own.texts(first)], steps, accepted, rounds, own.spent, theirs.spent)


def _alike(a: LM, b: LM) -> bool:
    """Whether two models have the same tokens."""
    assert a.tokenizer is not None and b.tokenizer is not None
    return a.tokenizer is b.tokenizer or a.tokenizer.token_bytes(False) == b.tokenizer.token_bytes(False)


@dataclasses.dataclass(frozen=True)
class Calibrated:
    """What came of `atts`. Attributes: text; turns: of each prompt; accepted: turns whose chunk the target let stand;
    p_values: of each prompt's turns."""

    text: list[str]
    turns: list[int]
    accepted: list[int]
    p_values: list[list[float]]


def atts(lm: Any, draft: Any, prompts: Any, *, step_tokens: int = 500, until: str | Sequence[str] | None = None,
         cut: float = 0.6, turns: int = 40, calibration: Sequence[float] = (), **sampling: Any) -> Calibrated:
    """The conformal gate of asynchronous test-time scaling (Xiong et al., 2025, ATTS): a small model writes chunks, and
    a large one only reads them, and writes where they are too surprising.

    Prompts have one chain each and take turns together; nothing here is asynchronous, and a turn reads whole texts for
    its perplexities.

    The target's perplexity of a chunk is ranked among those of earlier chunks of all chains: with `n` of them the
    conformal p-value is (1 + how many were at least as large) / (n + 1). A chunk whose p-value is below `1 - cut`, one
    of the most surprising, is replaced by the target's own. So a share of about `cut` of the chunks is the draft's,
    whatever the model. Each perplexity joins the calibration set.

    Args:
        lm, draft: models. step_tokens, until: of a chunk. cut: share of chunks that stand. turns: chunks of a text.
        calibration: perplexities known beforehand.
        sampling: arguments of `generate`, for both.

    Raises:
        ValueError: a model without a tokenizer, a `cut` outside [0, 1], or as `generate`.
    """
    target, small = model(lm), model(draft)
    if target.tokenizer is None or small.tokenizer is None:
        raise ValueError("atts: takes models with tokenizers, since chunks go from one to the other as texts")
    if not 0 <= cut <= 1:
        raise ValueError(f"cut: got {cut}, takes a share from 0 to 1")
    own = Forks.begin(target, prompts, 1, until=until, step_tokens=step_tokens, **sampling)
    theirs = Forks.begin(small, prompts, 1, until=until, step_tokens=step_tokens,
                         **{k: v for k, v in sampling.items() if k not in ("algorithm", "cache")})
    P = len(own)
    known, accepted = list(calibration), [0] * P
    p_values: list[list[float]] = [[] for _ in range(P)]
    ended = np.zeros(P, bool)
    text = [""] * P
    for _ in range(turns):
        ended |= ~own.live[:, 0] | ~theirs.live[:, 0]
        if ended.all():
            break
        before = [row[0] for row in theirs.texts()]
        ahead = theirs.ahead(np.zeros((P, 1), bool), tokens=1)
        wrote = ahead.extend(ahead.live & ~ended[:, None])[:, 0]
        after = ahead.texts()
        chunks = {int(p): after[p][0][len(before[p]):] for p in np.flatnonzero(wrote)}
        asked = [p for p in chunks if chunks[p]]
        told = score(target, [(own.prompts[p] + own.tokens(p, 0),
                               target.tokenizer.encode(chunks[p], add_special_tokens=False)) for p in asked]) \
            if asked else None
        writes = np.zeros((P, 1), bool)
        fed: list[list[Any]] = [[None] for _ in range(P)]
        back: list[list[Any]] = [[None] for _ in range(P)]
        for k, p in enumerate(asked):
            assert told is not None
            surprise = float(np.exp(-np.mean(told.logprobs[k])))
            value = (1 + sum(x >= surprise for x in known)) / (len(known) + 1)
            known.append(surprise)
            p_values[p].append(value)
            if value >= 1 - cut:
                accepted[p] += 1
                fed[p] = back[p] = [chunks[p]]
                if not ahead.live[p, 0]:
                    ended[p] = True
            else:
                writes[p, 0] = True
        was = [row[0] for row in own.texts()]
        own.feed(fed)
        own.extend(writes)
        now = own.texts()
        for p in np.flatnonzero(writes[:, 0]).tolist():
            back[p] = [now[p][0][len(was[p]):]]
        theirs.feed(back)
        text = [row[0] for row in own.texts()]
    return Calibrated(text, [len(x) for x in p_values], accepted, p_values)
