"""SEAL: a beam search whose texts all occur in a corpus, and the n-grams that it has considered ("Autoregressive Search
Engines: Generating Substrings as Document Identifiers", Bevilacqua et al., 2022)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.algorithms.beams.algorithm import BeamSearch, EarlyStopping
from decodax.algorithms.beams.beam_search import BeamStep
from decodax.algorithms.beams.corpus import Corpus, CorpusSpan
from decodax.algorithms.beams.pool import append
from decodax.algorithms.beams.step import Beams, BeamText, Group
from decodax.common.options import Count, TokenId
from decodax.common.registry import ALGORITHMS
from decodax.common.struct import Struct, struct
from decodax.core.composed import data
from decodax.core.state import State, Status
from decodax.core.types import Decision, Params
from decodax.core.window import Window

NGram = tuple[tuple[int, ...], float]


@struct
class Passed(Struct):
    """Candidates of all steps of a search. A step has `2 k` best candidates; each row stores two of them, and its live
    beam.

    Attributes:
        beam: `i32[B, N, 2]`, the beam of the prompt that a candidate continues.
        token: `i32[B, N, 2]`, its last token.
        log_prob: `f32[B, N, 2]`, log-probability of its text; -inf: there is no candidate.
        parent: `i32[B, N]`, the beam that the row's live beam continues.
        newest: `i32[B, N]`, its last token.
    """

    beam: Array
    token: Array
    log_prob: Array
    parent: Array
    newest: Array


@struct
class Known(Struct):
    """Additional state of `CorpusBeams`.

    Attributes:
        span: for each live beam, `[B]`, the rows of the corpus's suffix array whose suffixes begin with the beam's
            text.
        passed: the candidates that each step so far has considered, `[B, N, ...]`, by the index of the step.
    """

    span: CorpusSpan
    passed: Passed


@dataclasses.dataclass(frozen=True)
class CorpusBeams(BeamSearch):
    """Beam search whose texts occur in a document of a corpus, at every step (Bevilacqua et al., 2022).

    A text is extended only by tokens that follow it somewhere in the corpus; log-probabilities are not normalised over
    these. It ends at the largest length, or with an end-of-text token where the corpus has one. If all beams of a
    prompt reach the end of documents, its results are the texts with an end-of-text token, or none (`Status.DEAD_END`).

    The candidates of all steps are in `findings` (`passed`). `ngrams` lists them, and
    `decodax.algorithms.beams.evidence` computes scores of documents from them.

    Attributes:
        length_penalty, early_stopping, patience: see `BeamSearch`. By default a search continues to the largest length,
            as the authors' does.
        corpus: the corpus; another one of the same size needs no retrace.
        prefix: tokens that precede each n-gram in the corpus and are not generated, such as the mark of a title.
        may_end: True: end-of-text tokens are allowed anywhere.
        look: number of most likely tokens of a beam that are looked up first; it does not change the result.

    Raises:
        ValueError: the errors of `BeamSearch`; groups, a regulariser or a draft are given; or `look` is below 1.
    """

    length_penalty: float = data(0.0, bare=1.0)
    early_stopping: EarlyStopping = True
    patience: float = data(math.inf, bare=1.0)
    corpus: Corpus | None = data()
    prefix: tuple[int, ...] = ()
    may_end: bool = False
    look: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("groups", "uid", "draft"):
            if getattr(self, name) not in (1, None):
                raise ValueError(f"{name}: got {getattr(self, name)!r} with a corpus, takes none")
        if self.look < 1:
            raise ValueError(f"look: got {self.look}, takes 1 or more")
        if self.corpus is not None and self.prefix and not self.corpus.count(self.prefix):
            raise ValueError(f"prefix: got {self.prefix}, which is nowhere in the corpus")

    @property
    def name(self) -> str:
        return f"CorpusBeams({self.width})"

    @property
    def weights(self) -> Any:
        return (*super().weights, self.corpus)

    def memory(self, params: Params, like: Array) -> CorpusSpan:
        corpus: Corpus | None = params.draft[2]
        if corpus is None:
            raise ValueError("corpus: got None, takes a decodax.algorithms.beams.Corpus")
        return corpus.whole(like.shape, self.prefix)

    def init(self, params: Params, s: State) -> Beams:
        beams, shape = super().init(params, s), s.tokens.shape
        one, two = jnp.zeros(shape, jnp.int32), jnp.zeros((*shape, 2), jnp.int32)
        passed = Passed(two, two, jnp.full(two.shape, -jnp.inf, jnp.float32), one, one)
        return beams.replace(memory=Known(beams.memory, passed))

    def stepper(self, params: Params, *scored: Any) -> BeamStep:
        return CorpusStep(self, params.draft[2], params.draft[0], *scored)

    def _decision(self, s: State, window: Window, raw: Array, processed: Array, algo: Beams,
                  groups: tuple[Group, ...]) -> tuple[Decision, Beams]:
        known: Known = algo.memory
        d, after = super()._decision(s, window, raw, processed, algo.replace(memory=known.span), groups)
        at, new = s.length - s.prompt_length, (s.running & ~algo.over & (d.status != Status.INVALID)).astype(jnp.int32)
        # rows of `passed` are not moved with the texts: they name the beam that each candidate continues
        note = lambda held, seen: append(held, seen.reshape(s.batch, 1, *seen.shape[2:]), at, new)
        passed = jax.tree.map(note, known.passed, groups[0].seen)
        return d, after.replace(memory=Known(after.memory, passed))

    def findings(self, s: State) -> dict[str, Array]:
        """Returns the findings of `BeamSearch`, and those that `ngrams` needs, equal in all rows of a prompt: `passed`,
        `i32[B, N, 2 k, 2]`, beam and token of the candidates of each step; `passed_log_prob`, `f32[B, N, 2 k]`; and
        `lived`, `i32[B, N, k, 2]`, beam and token of the texts that became live beams."""
        passed: Passed = s.algo.memory.passed

        def by_prompt(x: Array) -> Array:
            """Returns `[B, N, c]` with the rows of each prompt joined and repeated: `[B, N, k c]`."""
            x = x.reshape(-1, self.width, *x.shape[1:]).swapaxes(1, 2)
            return jnp.repeat(x.reshape(*x.shape[:2], -1), self.width, 0)

        pair = lambda a, b: jnp.stack([by_prompt(a), by_prompt(b)], -1)
        return dict(super().findings(s), passed=pair(passed.beam, passed.token),
                    passed_log_prob=by_prompt(passed.log_prob),
                    lived=pair(passed.parent[..., None], passed.newest[..., None]))


class CorpusStep(BeamStep):
    """A step of `CorpusBeams`: extends beams only by tokens that follow their text somewhere in the corpus, and records
    the candidates that it has considered (`Group.seen`)."""

    def __init__(self, alg: CorpusBeams, corpus: Corpus, *rest: Any):
        super().__init__(alg, *rest)
        self.corpus = corpus

    def begin(self, algo: Beams) -> tuple[Group, ...]:
        groups = super().begin(algo.replace(memory=algo.memory.span))
        nothing = jax.tree.map(lambda x: self.grouped(x)[:, 0, :, 0], algo.memory.passed)
        return tuple(g.replace(seen=nothing) for g in groups)

    def totals(self, g: Group, log_p: Array, taken: Array | None) -> Array:
        alg, total = self.alg, super().totals(g, log_p, taken)
        assert isinstance(alg, CorpusBeams)
        may = self.corpus.allowed(g.live.memory, self.ranks(0, g, total), self.candidates(total.shape[-1]), alg.look)
        if alg.may_end:
            may = may | (jnp.arange(total.shape[-1]) == self.eos[:, 0, :, None]).any(1)[:, None]
        return jnp.where(may, total, -jnp.inf)

    def remember(self, memory: CorpusSpan, beam: Array, token: Array, own: Array, log_p: Array) -> CorpusSpan:
        return self.corpus.extend(memory, token)

    def after(self, i: int, g: Group, text: BeamText, stop: Array, closed: Array, may: Array, chosen: Array) -> Group:
        new = super().after(i, g, text, stop, closed, may, chosen)
        two = lambda x: x[:, :2 * self.k].reshape(x.shape[0], self.k, 2)
        # an n-gram with an end of text repeats the one without it
        counts = (text.score > -jnp.inf) & (text.status != Status.EOS)
        return new.replace(seen=Passed(
            beam=two(text.beams[..., 0]), token=two(text.tokens[..., 0]),
            log_prob=two(jnp.where(counts, text.log_prob, -jnp.inf)), parent=new.live.beams[..., 0],
            newest=new.live.tokens[..., 0]))


def ngrams(findings: dict[str, np.ndarray], row: int) -> list[NGram]:
    """Returns the n-grams that a search with `CorpusBeams` has considered for a prompt, each once, in the order of
    steps.

    Args:
        findings: `findings` of the result.
        row: one of the prompt's rows.

    Returns:
        Token ids and log-probability of each. Without penalties and temperature these are the model's `log p(n |
        prompt)`.
    """
    passed, log_prob, lived = (findings[name][row] for name in ("passed", "passed_log_prob", "lived"))
    texts: list[tuple[int, ...]] = [()] * lived.shape[1]
    found: dict[tuple[int, ...], float] = {}
    steps = 1 + np.flatnonzero((log_prob > -np.inf).any(1)).max(initial=-1)
    for candidates, scores, on in zip(passed[:steps], log_prob[:steps], lived[:steps], strict=True):
        for (beam, token), score in zip(candidates.tolist(), scores.tolist(), strict=True):
            if score > -np.inf:
                found.setdefault((*texts[beam], token), score)
        texts = [(*texts[beam], token) for beam, token in on.tolist()]
    return list(found.items())


@ALGORITHMS.register("seal", "Autoregressive Search Engines: Generating Substrings as Document Identifiers",
                     "Bevilacqua et al. 2022", family="search")
def seal(corpus: Any, width: Count = 15, length_penalty: float = 0.0, prefix: tuple[TokenId, ...] = (),
         may_end: bool = False, look: Count = 256) -> CorpusBeams:
    """Searches for texts that occur in a corpus, to find documents by their n-grams.

    For retrieval with a model that was trained to write parts of relevant documents. `ngrams` and `Evidence` rank the
    documents.

    Args:
        corpus: a `decodax.algorithms.beams.Corpus`, or a list of documents, each a list of token ids.
        width: number of beams of a prompt.
        length_penalty: exponent of the length by which a score is divided.
        prefix: token ids that come before each text in the corpus, such as a mark of titles.
        may_end: True: a text may end anywhere. False: only where the corpus has an end-of-text token.
        look: number of most likely tokens of a beam that are looked up first; it does not change the result.
    """
    corpus = corpus if isinstance(corpus, Corpus) else Corpus.build(corpus)
    return CorpusBeams(width, length_penalty=length_penalty, corpus=corpus, prefix=tuple(prefix), may_end=may_end,
                       look=look)
