"""Searches: what they write is not what plain decoding would, by their own rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from decodax.algorithms.beams import (
    UID,
    BeamSearch,
    BestFirst,
    Corpus,
    CorpusBeams,
    DynamicBeams,
    GridBeams,
    Ordered,
    StochasticBeams,
    Unordered,
)
from decodax.algorithms.contrastive.adadec import AdaDec
from decodax.algorithms.contrastive.rejection import AWRS
from decodax.algorithms.contrastive.search import ContrastiveSearch, hidden_width
from decodax.algorithms.contrastive.vector_fsd import VectorFSD
from decodax.algorithms.entries.shared import (
    SEARCH,
    TARGET,
)
from decodax.algorithms.parallel.cascade import Cascade, TargetLengths
from decodax.algorithms.parallel.group import GroupThink
from decodax.algorithms.parallel.superposed import Superposed
from decodax.common.registry import ALGORITHMS
from decodax.io.appended import appended
from decodax.models.transformer import Transformer


@ALGORITHMS.register("beam-search", "Beam search", "", "the likeliest texts, by several beams side by side",
                     family=SEARCH, guarantee="approximate")
def _beam_search(width: int = 4, length_penalty: float = 1.0, early_stopping: Any = False, draft: Any = None) -> Any:
    return BeamSearch(width, length_penalty=length_penalty, early_stopping=early_stopping, draft=draft)


@ALGORITHMS.register("best-first-beam-search", "Best-First Beam Search", "Meister et al. 2020",
                     "what beam search finds, the best text first, with fewer texts read", family=SEARCH,
                     guarantee="approximate")
def _best_first(width: int = 4, longest: int = 32, length_penalty: float = 0.0, at_once: int = 1) -> Any:
    return BestFirst(width, longest=longest, length_penalty=length_penalty, at_once=at_once)


@ALGORITHMS.register("patience-beam-search", "Beam Decoding with Controlled Patience", "Kasai et al. 2022",
                     "ends a search when so many times as many texts as beams have ended", family=SEARCH,
                     guarantee="approximate")
def _patience(width: int = 4, patience: float = 2.0, length_penalty: float = 1.0) -> Any:
    return BeamSearch(width, length_penalty=length_penalty, early_stopping=True, patience=patience)


@ALGORITHMS.register("diverse-beam-search",
                     "Diverse Beam Search: Decoding Diverse Solutions from Neural Sequence Models",
                     "Vijayakumar et al. 2016", "groups of beams that lose score for tokens of the groups before",
                     family=SEARCH, guarantee="approximate")
def _diverse(width: int = 4, groups: int = 2, penalty: float = 0.5, counting: Any = "chosen",
             length_penalty: float = 1.0) -> Any:
    return BeamSearch(width, groups=groups, diversity_penalty=penalty, counting=counting, length_penalty=length_penalty)


@ALGORITHMS.register("uid-beam-search", "If beam search is the answer, what was the question?", "Meister et al. 2020",
                     "beams that lose score where surprisal is not spread evenly", family=SEARCH,
                     guarantee="approximate")
def _uid(width: int = 4, kind: Any = "greedy", strength: float = 1.0, length_penalty: float = 0.0) -> Any:
    return BeamSearch(width, uid=UID(kind), strength=strength, length_penalty=length_penalty)


@ALGORITHMS.register("dynamic-beam-allocation",
                     "Fast Lexically Constrained Decoding with Dynamic Beam Allocation for Neural Machine Translation",
                     "Post & Vilar 2018",
                     "beams shared out among texts with more and fewer tokens of phrases that they must have",
                     family=SEARCH, needs=TARGET, guarantee="approximate")
def _dynamic(lm: Any, phrases: Any = None, width: int = 4, ordered: bool = False, length_penalty: float = 1.0,
             early_stopping: Any = False) -> Any:
    return DynamicBeams(width, phrases=_phrases("dynamic-beam-allocation", lm, phrases), length_penalty=length_penalty,
                        progress=Ordered() if ordered else Unordered(), early_stopping=early_stopping)


@ALGORITHMS.register("grid-beam-search",
                     "Lexically Constrained Decoding for Sequence Generation Using Grid Beam Search",
                     "Hokamp & Liu 2017", "beams for each number of tokens of phrases that texts must have",
                     family=SEARCH, needs=TARGET, guarantee="approximate")
def _grid(lm: Any, phrases: Any = None, beams: int = 4, length_penalty: float = 1.0,
          early_stopping: Any = False) -> Any:
    return GridBeams(phrases=_phrases("grid-beam-search", lm, phrases), beams=beams, length_penalty=length_penalty,
                     early_stopping=early_stopping)


def _phrases(name: str, lm: Any, given: Any) -> Any:
    """Phrases as token ids: texts are encoded as they stand within a text, so that a leading space is part of them."""
    if not given:
        raise ValueError(f"system: {name!r} needs phrases=, a list of texts or of lists of token ids")
    if isinstance(given, str):
        given = [given]
    if (text := next((p for p in given if isinstance(p, str)), None)) is not None and lm.tokenizer is None:
        raise ValueError(f"phrases: got {text!r} for a model without a tokenizer; takes lists of token ids")
    encode = lambda p: appended(lm.tokenizer, None, p) if isinstance(p, str) else p
    return tuple(tuple(encode(p)) for p in given)


@ALGORITHMS.register("seal", "Autoregressive Search Engines: Generating Substrings as Document Identifiers",
                     "Bevilacqua et al. 2022", "beams of texts that occur in a corpus, whose n-grams find documents",
                     family=SEARCH, guarantee="approximate")
def _seal(corpus: Any = None, width: int = 15, length_penalty: float = 0.0, prefix: tuple[int, ...] = (),
          may_end: bool = False, look: int = 256) -> Any:
    if corpus is None:
        raise ValueError("system: 'seal' needs corpus=, a decodax.algorithms.beams.Corpus or a list of lists of "
                         "token ids")
    corpus = corpus if isinstance(corpus, Corpus) else Corpus.build(corpus)
    return CorpusBeams(width, length_penalty=length_penalty, corpus=corpus, prefix=tuple(prefix), may_end=may_end,
                       look=look)


@ALGORITHMS.register("stochastic-beam-search", "Stochastic Beams and Where to Find Them: The Gumbel-Top-k Trick for "
                     "Sampling Sequences Without Replacement", "Kool et al. 2019",
                     "different texts, drawn without replacement", family=SEARCH, guarantee="approximate")
def _stochastic(k: int = 4) -> Any:
    return StochasticBeams(k)


@ALGORITHMS.register("superposed-decoding",
                     "Superposed Decoding: Multiple Generations from a Single Autoregressive Inference Pass",
                     "Shen et al. 2024", "several drafts from one forward a token, told apart by an n-gram model",
                     family=SEARCH, guarantee="approximate")
def _superposed(k: int = 3, table: Any = None, alpha: float = 0.54, candidates: int = 9,
                temperature: float = 0.06) -> Any:
    return Superposed(k, table, alpha, candidates, temperature)


@ALGORITHMS.register("cascade", "Cascaded Text Generation with Markov Transformers", "Deng & Rush 2020",
                     "all positions at once, by Markov models of rising order, for models trained with barriers",
                     family=SEARCH, needs=TARGET, guarantee="approximate")
def _cascade(lm: Any, barrier: int | None = None, orders: int = 4, keep: int = 32, longest: int = 32,
             lengths: tuple[float, float, int] | None = None) -> Any:
    if barrier is None and lm.tokenizer is not None:
        barrier = lm.tokenizer.backend.token_to_id("<|barrier|>")
    if barrier is None:
        raise ValueError("system: 'cascade' needs barrier=, the token that the model was trained with as one; the "
                         "tokenizer has no <|barrier|>")
    return Cascade(barrier, orders, keep, longest, None if lengths is None else TargetLengths(*lengths))


@ALGORITHMS.register("contrastive-search", "A Contrastive Framework for Neural Text Generation", "Su et al. 2022",
                     "likely tokens that say nothing again", family=SEARCH, needs=TARGET, guarantee="approximate")
def _contrastive(lm: Any, alpha: float = 0.6, k: int = 4) -> Any:
    return ContrastiveSearch(hidden_width(lm), alpha, k)


@ALGORITHMS.register("vector-fsd", "A Frustratingly Simple Decoding Method for Neural Text Generation",
                     "Yang et al. 2024", "likely tokens that did not follow similar hidden states before",
                     family=SEARCH, needs=TARGET, guarantee="approximate")
def _vector_fsd(lm: Any, alpha: float = 0.45, k: int = 3, n: int = 2, stop_words: tuple[int, ...] = (),
                stop_weight: float = 0.0) -> Any:
    return VectorFSD(hidden_width(lm), alpha, k, n, tuple(stop_words), stop_weight)


@ALGORITHMS.register("adadec", "Towards Better Code Generation: Adaptive Decoding with Uncertainty Guidance",
                     "He et al. 2025",
                     "where the model is uncertain, candidates are judged by how the text goes on behind them",
                     family=SEARCH, guarantee="approximate")
def _adadec(threshold: float = 1.0, k: int = 3, length: int = 5, counting: Any = "ended") -> Any:
    return AdaDec(threshold, k, length, counting)


@ALGORITHMS.register("awrs",
                     "Fast Controlled Generation from Language Models with Adaptive Weighted Rejection Sampling",
                     "Lipkin et al. 2025", "tokens drawn until a check accepts one, and the weight of the text",
                     family=SEARCH, guarantee="approximate")
def _awrs(check: Callable[[list[int]], bool] | None = None, proper: bool = True, most: int | None = None) -> Any:
    if check is None:
        raise ValueError("system: 'awrs' needs check=, a function of the new tokens")
    return AWRS(check, proper, most)


@ALGORITHMS.register("group-think",
                     "Group Think: Multiple Concurrent Reasoning Agents Collaborating at Token Level Granularity",
                     "Hsu et al. 2025", "several threads of one text, written side by side, that read one another",
                     family=SEARCH, needs=TARGET, guarantee="approximate")
def _group_think(lm: Any, threads: int = 4, starts: tuple[tuple[int, ...], ...] = (), together: bool = True) -> Any:
    if isinstance(lm.model, Transformer) and any(layer.sliding for layer in lm.model.config.layers):
        raise ValueError("system: 'group-think' gives threads blocks of positions of their own; takes a model whose "
                         "layers attend to the whole text")
    return GroupThink(threads, tuple(map(tuple, starts)), together)
