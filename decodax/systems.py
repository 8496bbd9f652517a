"""The table of the field: published systems by name, each built from this library's parts.

An entry stands here only when it works: `tests/laws/test_systems.py` runs the laws over all of them.

>>> system("prompt-lookup", length=5)
Speculative(draft=PromptLookup(length=5, max_ngram=3, min_ngram=1), verify=SeedExact(), shape=None)
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable
from typing import Any, Literal

from decodax.autoregressive import Autoregressive
from decodax.core.types import Algorithm
from decodax.diffusion.systems import ENTRIES
from decodax.speculative import (
    Adaptive,
    Bandit,
    Bass,
    Block,
    Distance,
    Greedy,
    KSeq,
    LongestBranch,
    MultiRound,
    Rejection,
    SeedExact,
    Speculative,
    TopK,
    Typical,
    drafts,
    shapes,
)
from decodax.speculative.adaptive import NOTHING
from decodax.speculative.drafts.recycling import template
from decodax.speculative.measure import automatic
from decodax.speculative.verify import Guarantee

Needs = Literal["nothing", "a model", "a draft model", "a model and a draft model", "samples", "a diffusion model",
                "a diffusion model and a draft model"]
"""What a maker must be given: nothing, the target itself (`lm`), a smaller model with its tokenizer (`draft`), both,
with a tokenizer each, or the target and samples of the texts to come (its options say how), or a
target that fills masks (`lm`), alone or with an autoregressive one (`draft`)."""


@dataclasses.dataclass(frozen=True)
class System:
    """A published system.

    Attributes:
        name: what it is chosen by. title: the paper's. authors: and year. family: as in the field's surveys.
        guarantee: of the output, as the verifier states it. needs: what `make` must be given.
        make: builds the algorithm from `lm`, `draft` and the options that its signature names.
        summary: one line.
    """

    name: str
    title: str
    authors: str
    family: str
    guarantee: Guarantee
    needs: Needs
    make: Callable[..., Algorithm]
    summary: str

    @property
    def drafts(self) -> bool:
        """Whether it needs a draft model."""
        return self.needs in (DRAFT, BOTH, DIFFUSION)

    @property
    def options(self) -> dict[str, Any]:
        """What can be set, with defaults."""
        given = inspect.signature(self.make).parameters.values()
        return {p.name: p.default for p in given if p.name not in ("lm", "draft")}


SYSTEMS: dict[str, System] = {}
"""All of them, by name."""


def system(name: str, lm: Any = None, draft: Any = None, **options: Any) -> Algorithm:
    """The algorithm of a published system.

    Args:
        name: one of `SYSTEMS`.
        lm: what `load` gave, for systems that look at the target: its layers, or what its rounds cost.
        draft: a smaller model from `load`, for systems that draft with one.
        options: the system's own; `SYSTEMS[name].options` lists them with their defaults.

    Raises:
        ValueError: an unknown name (near ones are listed), a model that is missing, or an option it does not take.
    """
    entry = SYSTEMS.get(name)
    if entry is None:
        near = difflib.get_close_matches(name, SYSTEMS, n=4, cutoff=0.5)
        near += [n for n in SYSTEMS if name.lower() in n and n not in near]
        raise ValueError(f"system: unknown name {name!r}; " + (f"near ones: {', '.join(near)}" if near else
                                                               f"takes one of {', '.join(SYSTEMS)}"))
    needed = {"lm": lm} if entry.needs not in ("nothing", DRAFT) else {}
    needed |= {"draft": draft} if entry.drafts else {}
    if missing := [f"{how}=decodax.load(...)" for how, given in needed.items() if given is None]:
        raise ValueError(f"system: {name!r} needs {entry.needs}; give {' and '.join(missing)}")
    if unknown := sorted(options.keys() - entry.options.keys()):
        raise ValueError(f"system: {name!r} takes no option {unknown[0]!r}; takes "
                         f"{', '.join(f'{k}={v!r}' for k, v in entry.options.items()) or 'none'}")
    given = {"lm": lm, "draft": draft}
    takes = inspect.signature(entry.make).parameters
    return entry.make(**{k: v for k, v in given.items() if k in takes}, **options)


def _system(name: str, title: str, authors: str, family: str, summary: str, needs: Needs = "nothing",
            guarantee: Guarantee = "seed-exact") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(make: Callable[..., Any]) -> Callable[..., Any]:
        assert name not in SYSTEMS
        SYSTEMS[name] = System(name, title, authors, family, guarantee, needs, make, summary)
        return make

    return add


DRAFT: Needs = "a draft model"
TARGET: Needs = "a model"
BOTH: Needs = "a model and a draft model"
DIFFUSION: Needs = "a diffusion model and a draft model"
LINEAR, TREE, SELF, THEORY = "speculative-linear", "speculative-tree", "speculative-self", "speculative-theory"
EXACT, REJECTION, CHAIN = SeedExact(), Rejection(), shapes.Chain(4)
JACOBI, BATCH, BLOCKWISE = "parallel-jacobi", "batching-scheduling", "blockwise-parallel"


@_system("autoregressive", "Plain autoregressive decoding", "", "ar-sampling", "one token a forward")
def _autoregressive() -> Any:
    return Autoregressive()


# drafts from text and tables

@_system("prompt-lookup", "Prompt Lookup Decoding", "Saxena 2023", LINEAR, "what followed the last n-gram before")
def _prompt_lookup(length: int = 10, max_ngram: int = 3, min_ngram: int = 1, verify: Any = EXACT) -> Any:
    return Speculative(drafts.PromptLookup(length, max_ngram, min_ngram), verify)


@_system("aggressive-decoding", "Lossless Acceleration for Seq2seq Generation with Aggressive Decoding",
         "Ge, Xia, Sun, Chen, Wei 2022", LINEAR, "IAD: copies the input on after the place that the output matches")
def _iad(length: int = 16, verify: Any = EXACT) -> Any:
    return Speculative(drafts.InputGuided(length), verify)


@_system("sam-decoding", "SAM Decoding: Speculative Decoding via Suffix Automaton", "Hu et al. 2024", LINEAR,
         "the longest suffix that occurred before, in text or corpus, and what followed it")
def _sam(length: int = 10, corpus: Any = (), verify: Any = EXACT) -> Any:
    return Speculative(drafts.SuffixAutomaton(length, corpus=corpus), verify)


@_system("sam-decoding-hybrid", "SAM Decoding: Speculative Decoding via Suffix Automaton", "Hu et al. 2024", LINEAR,
         "suffix matches, and a draft model where the match is short", DRAFT)
def _sam_hybrid(draft: Any, length: int = 10, model_length: int = 4, threshold: int = 5,
                verify: Any = EXACT) -> Any:
    text = drafts.SuffixAutomaton(length)
    return Speculative(drafts.Fallback(text, drafts.DraftModel(draft), threshold, shapes.Chain(model_length)), verify)


@_system("pain-lookahead", "Lookahead: An Inference Acceleration Framework for Large Language Model with Lossless "
         "Generation Accuracy", "Zhao et al. 2023", TREE, "a trie of n-grams with counts, several branches at once")
def _pain(nodes: int = 32, branch: int = 8, corpus: Any = (), verify: Any = EXACT) -> Any:
    return Speculative(drafts.Trie(nodes, branch, corpus=corpus), verify)


@_system("suffix-decoding", "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications",
         "Oliaro et al. 2024", TREE, "a suffix tree with frequencies: the likeliest continuations of the best pattern")
def _suffix_decoding(alpha: float = 2.0, pattern: int = 16, nodes: int = 16, branch: int = 12, corpus: Any = (),
                     verify: Any = EXACT) -> Any:
    return Speculative(drafts.SuffixTree(alpha, pattern, nodes, branch, corpus=corpus), verify)


@_system("token-recycling", "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token "
         "Recycling", "Luo et al. 2024", TREE, "the latest candidates after each token, grown into a fixed tree")
def _recycling(k: int = 8, nodes: int | None = None, tree: Any = None, verify: Any = EXACT) -> Any:
    if tree is not None and nodes is not None:
        raise ValueError(f"nodes: got {nodes} beside a tree, takes one of the two; nodes cuts the paper's own tree")
    return Speculative(drafts.TokenRecycling(tree or template(80 if nodes is None else nodes), k=k), verify)


@_system("stand", "Accelerated Test-Time Scaling with Model-Free Speculative Sampling", "Song et al. 2025", TREE,
         "n-gram tables of the target's own probability vectors", TARGET)
def _stand(lm: Any, order: int = 3, k: int = 10, shape: Any = None, verify: Any = EXACT) -> Any:
    return Speculative(drafts.Stand(lm.vocab_size, order, min(k, lm.vocab_size)), verify, shape)


@_system("aded", "Adaptive Draft-Verification for Efficient Large Language Model Decoding", "Liu et al. 2024", TREE,
         "an online trigram matrix searched by PUCT")
def _aded(nodes: int = 24, depth: int = 6, verify: Any = EXACT) -> Any:
    return Speculative(drafts.ADED(nodes, depth), verify)


@_system("ngram", "N-gram drafts", "", LINEAR, "the commonest continuation of the last tokens")
def _ngram(length: int = 5, order: int = 4, corpus: Any = (), verify: Any = EXACT) -> Any:
    return Speculative(drafts.NGram(length, order, corpus=corpus), verify)


@_system("ngram-model", "N-gram drafts", "", TREE, "an n-gram model with backoff, grown into any shape",
         TARGET)
def _ngram_model(lm: Any, order: int = 4, shape: Any = CHAIN, verify: Any = EXACT) -> Any:
    return Speculative(drafts.NGramModel(lm.vocab_size, order), verify, shape)


# the target's own guesses

@_system("jacobi", "Accelerating Transformer Inference for Translation via Parallel Decoding", "Santilli et al. 2023",
         JACOBI, "a window of guesses iterated to its fixed point, moving with the text")
def _jacobi(length: int = 8, verify: Any = EXACT) -> Any:
    return Speculative(drafts.Jacobi(length), verify)


@_system("pj", "Accelerating Transformer Inference for Translation via Parallel Decoding", "Santilli et al. 2023",
         JACOBI, "Jacobi iteration over the whole output at once")
def _pj(size: int = 64, verify: Any = EXACT) -> Any:
    return Speculative(drafts.PJ(size), verify)


@_system("pgj", "Accelerating Transformer Inference for Translation via Parallel Decoding", "Santilli et al. 2023",
         JACOBI, "Gauss-Seidel over blocks, Jacobi inside")
def _pgj(block: int = 5, verify: Any = EXACT) -> Any:
    return Speculative(drafts.PGJ(block), verify)


@_system("hgj", "Accelerating Transformer Inference for Translation via Parallel Decoding", "Santilli et al. 2023",
         JACOBI, "PGJ up to a length, plain decoding after it")
def _hgj(block: int = 5, until: int = 48, verify: Any = EXACT) -> Any:
    return Speculative(drafts.HGJ(block, until), verify)


@_system("lookahead", "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding", "Fu et al. 2024",
         JACOBI, "a window of Jacobi levels that harvests n-grams, and guesses from their pool")
def _lookahead(window: int = 7, ngram: int = 5, guesses: int = 7, verify: Any = EXACT) -> Any:
    return Speculative(drafts.Lookahead(window, ngram, guesses), verify)


@_system("sjd", "Accelerating Auto-regressive Text-to-Image Generation with Training-free Speculative Jacobi Decoding",
         "Teng et al. 2024", JACOBI, "Jacobi with the previous iteration's conditional as the draft distribution",
         TARGET, "distribution-exact")
def _sjd(lm: Any, length: int = 16, top: int = 64, verify: Any = REJECTION) -> Any:
    return Speculative(drafts.SJD(lm.vocab_size, length, min(top, lm.vocab_size)), verify)


@_system("fastcot", "Fast Chain-of-Thought: A Glance of Future from Parallel Decoding Leads to Answers Faster",
         "Zhang et al. 2023", JACOBI, "a Jacobi window whose width follows a schedule")
def _fastcot(verify: Any = EXACT) -> Any:
    return Speculative(drafts.FastCoT(), verify)


# a draft model

@_system("speculative-decoding", "Fast Inference from Transformers via Speculative Decoding",
         "Leviathan, Kalman, Matias 2023", LINEAR, "a draft model's chain by rejection sampling", DRAFT,
         "distribution-exact")
def _leviathan(draft: Any, length: int = 4) -> Any:
    return Speculative(drafts.DraftModel(draft), Rejection(), shapes.Chain(length))


@_system("speculative-sampling", "Accelerating Large Language Model Decoding with Speculative Sampling",
         "Chen et al. 2023", LINEAR, "the same rule, found at the same time", DRAFT, "distribution-exact")
def _chen(draft: Any, length: int = 4) -> Any:
    return Speculative(drafts.DraftModel(draft), Rejection(), shapes.Chain(length))


@_system("seed-exact", "Speculative sampling that keeps the seed's tokens", "", LINEAR,
         "a draft model's chain; the output is plain sampling's, token for token", DRAFT)
def _seed_exact(draft: Any, length: int = 4, shape: Any = None) -> Any:
    return Speculative(drafts.DraftModel(draft), SeedExact(), shape or shapes.Chain(length))


@_system("block-verification", "Block Verification Accelerates Speculative Decoding", "Sun et al. 2024", THEORY,
         "drafts are accepted jointly, never fewer in expectation", DRAFT, "distribution-exact")
def _block(draft: Any, length: int = 6) -> Any:
    return Speculative(drafts.DraftModel(draft), Block(), shapes.Chain(length))


@_system("spectr", "SpecTr: Fast Speculative Decoding via Optimal Transport", "Sun et al. 2023", THEORY,
         "k-SEQ: several independent drafts by approximate optimal transport", DRAFT, "distribution-exact")
def _spectr(draft: Any, drafts_a_node: int = 3, length: int = 3) -> Any:
    return Speculative(drafts.DraftModel(draft), KSeq(), shapes.Fixed.balanced(drafts_a_node, *(1,) * (length - 1)))


@_system("specinfer", "SpecInfer: Accelerating Large Language Model Serving with Tree-based Speculative Inference and "
         "Verification", "Miao et al. 2024", TREE, "a tree by multi-round rejection with replacement", DRAFT,
         "distribution-exact")
def _specinfer(draft: Any, branching: tuple[int, ...] = (3, 2, 1)) -> Any:
    return Speculative(drafts.DraftModel(draft), MultiRound(replacement=True), shapes.Fixed.balanced(*branching))


@_system("mcsd", "Multi-Candidate Speculative Decoding", "Yang et al. 2024", TREE,
         "several candidates a node, without replacement", DRAFT, "distribution-exact")
def _mcsd(draft: Any, branching: tuple[int, ...] = (4, 2, 2)) -> Any:
    return Speculative(drafts.DraftModel(draft), MultiRound(), shapes.Fixed.balanced(*branching))


@_system("improved-mcsd", "Improving Multi-candidate Speculative Decoding", "Lu, Zeng, Ma, Yu, Levorato 2024", TREE,
         "the target picks first tokens, the longest branch wins; drafting stops when rejection is likely", DRAFT,
         "approximate")
def _improved_mcsd(draft: Any, branching: tuple[int, ...] = (4, 2, 1, 1), least: float = 0.3,
                   predictor: Any = shapes.probability, verify: Any = None) -> Any:
    shape = shapes.Sliced(shapes.Fixed.balanced(*branching), least, predictor)
    source = drafts.TargetRooted(drafts.DraftModel(draft), min(16, draft.vocab_size))
    return Speculative(source, verify or LongestBranch(branching[0]), shape)


@_system("rsd-c", "Recursive Speculative Decoding: Accelerating LLM Inference via Sampling Without Replacement",
         "Jeon et al. 2024", TREE, "Gumbel-top-k children, recursive rejection", DRAFT, "distribution-exact")
def _rsd_c(draft: Any, branching: tuple[int, ...] = (2, 2, 2)) -> Any:
    return Speculative(drafts.DraftModel(draft), MultiRound(), shapes.Fixed.balanced(*branching))


@_system("rsd-s", "Recursive Speculative Decoding: Accelerating LLM Inference via Sampling Without Replacement",
         "Jeon et al. 2024", TREE, "a stochastic beam, recursive rejection", DRAFT, "distribution-exact")
def _rsd_s(draft: Any, width: int = 4, length: int = 4) -> Any:
    return Speculative(drafts.DraftModel(draft), MultiRound(), shapes.StochasticBeam(width, length))


@_system("sequoia", "Sequoia: Scalable, Robust, and Hardware-aware Speculative Decoding", "Chen et al. 2024", TREE,
         "the best tree for measured acceptance by dynamic programming, without replacement", DRAFT,
         "distribution-exact")
def _sequoia(draft: Any, accept: tuple[float, ...] = (0.6, 0.15, 0.07, 0.04), nodes: int = 24,
             length: int | None = 8) -> Any:
    return Speculative(drafts.DraftModel(draft), MultiRound(), shapes.sequoia(accept, nodes, length))


@_system("opt-tree", "OPT-Tree: Speculative Decoding with Adaptive Draft Tree Structure", "Wang et al. 2024", TREE,
         "the tree of the largest expected length, deeper while it pays", DRAFT)
def _opt_tree(draft: Any, nodes: int = 24, delta: float = 0.5, length: int = 8) -> Any:
    return Speculative(drafts.DraftModel(draft), SeedExact(), shapes.OptTree(nodes, delta, length))


@_system("dyspec", "DySpec: Faster Speculative Decoding with Dynamic Token Tree Structure", "Xiong et al. 2024", TREE,
         "grown greedily by what earlier siblings left", DRAFT, "distribution-exact")
def _dyspec(draft: Any, nodes: int = 16, length: int = 6, width: int | None = 8) -> Any:
    return Speculative(drafts.DraftModel(draft), MultiRound(), shapes.DySpec(nodes, length, width=width))


@_system("confidence-tree", "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees (its tree)",
         "Li et al. 2024", TREE, "the likeliest nodes of each layer, ranked again over all", DRAFT)
def _confidence(draft: Any, nodes: int = 24, length: int = 5, width: int = 6) -> Any:
    return Speculative(drafts.DraftModel(draft), SeedExact(), shapes.ConfidenceTree(nodes, length, width))


@_system("cape", "GliDe with a CaPE: A Low-Hassle Method to Accelerate Speculative Decoding (its tree)",
         "Du et al. 2024", TREE, "a chain with more siblings where the draft is in doubt", DRAFT)
def _cape(draft: Any, length: int = 5, nodes: int | None = 12) -> Any:
    return Speculative(drafts.DraftModel(draft), SeedExact(), shapes.CaPE(length, nodes=nodes))


@_system("staged", "Accelerating LLM Inference with Staged Speculative Decoding", "Spector, Re 2023", TREE,
         "the draft model's own decoding is speculative", DRAFT)
def _staged(draft: Any, length: int = 7, inner: int = 4) -> Any:
    return Speculative(drafts.Staged(drafts.DraftModel(draft), Speculative(drafts.PromptLookup(inner)), length))


@_system("confidence-threshold", "Assisted generation with a confidence threshold", "Gante 2023; Joao et al. 2024",
         LINEAR, "drafting stops at the first doubtful token", DRAFT)
def _threshold(draft: Any, length: int = 12, least: float = 0.4) -> Any:
    return Speculative(drafts.DraftModel(draft), SeedExact(), shapes.Threshold(length, least))


@_system("disco", "Accelerating Speculative Decoding using Dynamic Speculation Length", "Mamou et al. 2024", LINEAR,
         "drafting stops when a predictor of acceptance says so", DRAFT)
def _disco(draft: Any, length: int = 12, least: float = 0.4, predictor: Any = shapes.probability) -> Any:
    return Speculative(drafts.DraftModel(draft), SeedExact(), shapes.Threshold(length, least, predictor))


@_system("specdec++", "SpecDec++: Boosting Speculative Decoding via Adaptive Candidate Lengths", "Huang et al. 2024",
         LINEAR, "drafting stops when some draft is likely rejected", DRAFT)
def _specdec(draft: Any, length: int = 12, most: float = 0.3, predictor: Any = shapes.probability) -> Any:
    return Speculative(drafts.DraftModel(draft), SeedExact(), shapes.RiskThreshold(length, most, predictor))


# a draft model with another tokenizer

@_system("uag", "Universal Assisted Generation: Faster Decoding with Any Assistant Model",
         "Korat et al. 2024; Timor et al. 2025", LINEAR,
         "a draft model with any vocabulary: its text in the target's tokens (string-level exact match, SLEM)", BOTH)
def _uag(lm: Any, draft: Any, length: int = 5, steps: int | None = None, verify: Any = EXACT) -> Any:
    return Speculative(drafts.Realigned.of(lm, draft, length, steps), verify)


@_system("tli", "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous "
         "Vocabularies", "Timor et al. 2025", LINEAR, "a draft model on the tokens that both vocabularies have", BOTH,
         "distribution-exact")
def _tli(lm: Any, draft: Any, length: int = 4) -> Any:
    return Speculative(drafts.Intersection.of(lm, draft), Rejection(), shapes.Chain(length))


# relaxed verification

@_system("greedy-verification", "Speculative decoding with greedy verification", "Stern, Shazeer, Uszkoreit 2018",
         BLOCKWISE, "drafts hold while they are the argmax", DRAFT, "approximate")
def _greedy(draft: Any, length: int = 4) -> Any:
    return Speculative(drafts.DraftModel(draft), Greedy(), shapes.Chain(length))


@_system("typical-acceptance", "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads (its "
         "acceptance)", "Cai et al. 2024", TREE, "drafts hold while they are typical", DRAFT, "approximate")
def _typical(draft: Any, epsilon: float = 0.09, delta: float = 0.3, shape: Any = CHAIN) -> Any:
    return Speculative(drafts.DraftModel(draft), Typical(epsilon, delta), shape)


@_system("blockwise-top-k", "Blockwise Parallel Decoding for Deep Autoregressive Models (its acceptance)",
         "Stern, Shazeer, Uszkoreit 2018", BLOCKWISE, "drafts hold while they are among the k likeliest", DRAFT,
         "approximate")
def _top_k(draft: Any, k: int = 3, length: int = 4) -> Any:
    return Speculative(drafts.DraftModel(draft), TopK(k), shapes.Chain(length))


@_system("blockwise-distance", "Blockwise Parallel Decoding for Deep Autoregressive Models (its acceptance)",
         "Stern, Shazeer, Uszkoreit 2018", BLOCKWISE, "drafts hold while they are near the argmax as numbers", DRAFT,
         "approximate")
def _distance(draft: Any, epsilon: int = 2, length: int = 4) -> Any:
    return Speculative(drafts.DraftModel(draft), Distance(epsilon), shapes.Chain(length))


# layers of the target left out

@_system("self-speculative", "Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative Decoding",
         "Zhang et al. 2023", SELF, "the target without a fixed set of layers", TARGET)
def _self(lm: Any, skip: tuple[int, ...] | None = None, length: int = 4, shape: Any = None) -> Any:
    layers = len(lm.model.config.layers)
    left_out = tuple(range(1, layers - 1, 2)) if skip is None else skip
    return Speculative(drafts.LayerSkip(lm, left_out), SeedExact(), shape or shapes.Chain(length))


@_system("layerskip", "LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding", "Elhoushi et al. 2024",
         SELF, "the target's first layers and its head", TARGET)
def _layerskip(lm: Any, layer: int | None = None, length: int = 4) -> Any:
    layers = len(lm.model.config.layers)
    return Speculative(drafts.LayerSkip.exit(lm, layer or max(layers // 2, 1)), SeedExact(), shapes.Chain(length))


@_system("clasp", "CLaSp: In-Context Layer Skip for Self-Speculative Decoding", "Chen et al. 2025", SELF,
         "layers left out by dynamic programming over the last token's states", TARGET)
def _clasp(lm: Any, skips: int | None = None, every: int = 4, length: int = 4) -> Any:
    layers = len(lm.model.config.layers)
    return Speculative(drafts.CLaSp(lm, skips or max(layers // 2, 1), every), SeedExact(), shapes.Chain(length))


@_system("del", "DEL: Context-Aware Dynamic Exit Layer for Efficient Self-Speculative Decoding",
         "Entezari Zarch et al. 2025", SELF, "exit layer and length that promise most tokens a layer", TARGET)
def _del(lm: Any, most: int = 6) -> Any:
    return Speculative(drafts.DynamicExit(lm, most))


@_system("knn-ssd", "KNN-SSD: Enabling Dynamic Self-Speculative Decoding via Nearest Neighbor Layer Set Optimization",
         "Song et al. 2025", SELF, "the skipped layers of the nearest of some sampled domains", "samples")
def _knn(lm: Any, domains: Any = None, length: int = 4) -> Any:
    if domains is None:
        raise ValueError("system: 'knn-ssd' needs domains=, for each domain a list of samples as token ids")
    anchors = drafts.fit_anchors(lm, domains)
    return Speculative(drafts.KNNSkip(lm, anchors), SeedExact(), shapes.Chain(length))


# the length of drafts, and batches

@_system("automatic", "Draft length by measured cost and acceptance", "", THEORY,
         "chains as long as they pay here, or none", TARGET)
def _automatic(lm: Any, draft: Any = None, lengths: tuple[int, ...] = (2, 4, 7), batch: int = 1) -> Any:
    source = drafts.PromptLookup(max(lengths)) if draft is None else drafts.DraftModel(draft)
    return automatic(lm, source, lengths, batch=batch)


def _arms(draft: Any, lengths: tuple[int, ...]) -> tuple[Speculative, ...]:
    source = drafts.PromptLookup(max(lengths)) if draft is None else drafts.DraftModel(draft)
    return tuple(NOTHING if k == 0 else Speculative(source, shape=shapes.Chain(k)) for k in lengths)


def _choices(lm: Any, draft: Any, lengths: tuple[int, ...], arms: Any) -> tuple[Speculative, ...]:
    """Arms of a bandit, given or by default: chains of several lengths from the text, and from a draft model."""
    if arms is None:
        suffix, ngram = drafts.SuffixAutomaton(max(lengths)), drafts.NGram(max(lengths))
        return (*_arms(None, lengths), Speculative(suffix), Speculative(ngram),
                *(() if draft is None else _arms(draft, tuple(k for k in lengths if k))))
    made: Any = tuple(a if not isinstance(a, str) else NOTHING if a == "autoregressive" else system(a, lm, draft)
                      for a in arms)
    if wrong := [a for a in made if not isinstance(a, Speculative)]:
        raise ValueError(f"arms: got {type(wrong[0]).__name__}, takes Speculative algorithms and names of such systems")
    return made


BANDIT = "BanditSpec: Adaptive Speculative Decoding via Bandit Algorithms"


@_system("ucbspec", BANDIT, "Hou et al. 2025", THEORY,
         "drafts and their lengths as arms of a bandit, by upper confidence bounds")
def _ucb(lm: Any = None, draft: Any = None, lengths: tuple[int, ...] = (0, 3, 7), arms: Any = None) -> Any:
    return Adaptive(_choices(lm, draft, lengths, arms), Bandit("ucb"))


@_system("exp3spec", BANDIT, "Hou et al. 2025", THEORY, "drafts and their lengths as arms of a bandit, by exponential "
         "weights")
def _exp3(lm: Any = None, draft: Any = None, lengths: tuple[int, ...] = (0, 3, 7), arms: Any = None) -> Any:
    return Adaptive(_choices(lm, draft, lengths, arms), Bandit("exp3"))


@_system("bass", "BASS: Batched Attention-optimized Speculative Sampling", "Qian et al. 2024", BATCH,
         "ragged acceptance, one draft length that follows the best row", DRAFT)
def _bass(draft: Any, lengths: tuple[int, ...] = (1, 2, 3, 5, 7)) -> Any:
    return Adaptive(_arms(draft, lengths), Bass())


@_system("eqspec", "Batch Speculative Decoding Done Right", "Zhang et al. 2025", BATCH,
         "rows accept different lengths and stay equal to plain decoding", DRAFT)
def _eqspec(draft: Any, length: int = 4) -> Any:
    return Speculative(drafts.DraftModel(draft), SeedExact(), shapes.Chain(length))


@_system("tetris", "TETRIS: Optimal Draft Token Selection for Batch Speculative Decoding", "Wu et al. 2025", BATCH,
         "the batch's likeliest drafts share one budget", DRAFT)
def _tetris(draft: Any, capacity: int = 16, length: int = 7) -> Any:
    return Speculative(drafts.DraftModel(draft), SeedExact(), shapes.Tetris(capacity, length))


# masked diffusion

for _name, _entry in ENTRIES.items():
    _system(_name, _entry.title, _entry.authors, _entry.family, _entry.summary,
            DIFFUSION if _entry.draft else "a diffusion model", _entry.guarantee)(_entry.make)
