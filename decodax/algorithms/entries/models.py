"""Drafts of a second model: chains and trees, with its own tokenizer too, by exact and relaxed verifiers."""

from __future__ import annotations

from typing import Any

from decodax.algorithms.entries.shared import (
    BLOCKWISE,
    BOTH,
    CHAIN,
    DRAFT,
    EXACT,
    LINEAR,
    SAMPLED,
    THEORY,
    TREE,
)
from decodax.algorithms.speculative import (
    Block,
    Distance,
    Greedy,
    KSeq,
    LongestBranch,
    MultiRound,
    Reflective,
    Rejection,
    SeedExact,
    Speculative,
    TopKAcceptance,
    TypicalAcceptance,
    drafts,
    fit_predictor,
    trees,
)
from decodax.common.registry import ALGORITHMS
from decodax.io.appended import appended

# a draft model

@ALGORITHMS.register("speculative-decoding", "Fast Inference from Transformers via Speculative Decoding",
                     "Leviathan, Kalman, Matias 2023", "a draft model's chain by rejection sampling", family=LINEAR,
                     needs=DRAFT, guarantee="distribution-exact")
def _leviathan(draft: Any, length: int = 4) -> Any:
    return Speculative(drafts.DraftModel(draft), Rejection(), trees.Chain(length))


ALGORITHMS.alias("speculative-sampling", "speculative-decoding",
                 "Accelerating Large Language Model Decoding with Speculative Sampling", "Chen et al. 2023",
                 "the same rule, found at the same time", family=LINEAR)


@ALGORITHMS.register("seed-exact", "Speculative sampling that keeps the seed's tokens", "",
                     "a draft model's chain; the output is plain sampling's, token for token", family=LINEAR,
                     needs=DRAFT, guarantee="seed-exact")
def _seed_exact(draft: Any, length: int = 4, shape: Any = None) -> Any:
    return Speculative(drafts.DraftModel(draft), SeedExact(), shape or trees.Chain(length))


@ALGORITHMS.register("pearl", "PEARL: Parallel Speculative Decoding with Adaptive Draft Length", "Liu et al. 2024",
                     "the draft model writes the next chain while the target verifies the last one", family=LINEAR,
                     needs=DRAFT, guarantee="seed-exact")
def _pearl(draft: Any, gamma: int = 4) -> Any:
    return Speculative(drafts.Pearl(drafts.DraftModel(draft), gamma))


@ALGORITHMS.register("specbranch",
                     "SpecBranch: Speculative Decoding via Hybrid Drafting and Rollback-Aware Branch Parallelism",
                     "Shen et al. 2025", "while the target verifies, the draft model goes on from several of its "
                     "tokens; how much of it waits is said by confidence and, with lengths=, by a classifier of the "
                     "target's states", family=LINEAR, needs=DRAFT, guarantee="seed-exact")
def _specbranch(draft: Any, gamma: int = 4, branches: int = 3, least: float = 0.4, lengths: Any = None) -> Any:
    return Speculative(drafts.SpecBranch(drafts.DraftModel(draft), gamma, branches, least, lengths))


@ALGORITHMS.register("block-verification", "Block Verification Accelerates Speculative Decoding", "Sun et al. 2024",
                     "drafts are accepted jointly, never fewer in expectation", family=THEORY, needs=DRAFT,
                     guarantee="distribution-exact")
def _block(draft: Any, length: int = 6) -> Any:
    return Speculative(drafts.DraftModel(draft), Block(), trees.Chain(length))


@ALGORITHMS.register("spectr", "SpecTr: Fast Speculative Decoding via Optimal Transport", "Sun et al. 2023",
                     "k-SEQ: several independent drafts by approximate optimal transport", family=THEORY, needs=DRAFT,
                     guarantee="distribution-exact")
def _spectr(draft: Any, drafts_a_node: int = 3, length: int = 3) -> Any:
    return Speculative(drafts.DraftModel(draft), KSeq(), trees.Fixed.balanced(drafts_a_node, *(1,) * (length - 1)))


@ALGORITHMS.register("specinfer", "SpecInfer: Accelerating Large Language Model Serving with Tree-based Speculative "
                     "Inference and Verification", "Miao et al. 2024", "the merged trees of one or several draft "
                     "models (draft= takes a tuple), by multi-round rejection with replacement", family=TREE,
                     needs=DRAFT, guarantee="distribution-exact")
def _specinfer(draft: Any, branching: tuple[int, ...] = (3, 2, 1), verify: Any = None) -> Any:
    models = tuple(map(drafts.DraftModel, draft if isinstance(draft, (tuple, list)) else (draft,)))
    shape, rule = trees.Fixed.balanced(*branching), verify or MultiRound(replacement=True)
    if len(models) == 1:
        return Speculative(models[0], rule, shape)
    return Speculative(drafts.Merged(models, shape), rule)


@ALGORITHMS.register("mcsd", "Multi-Candidate Speculative Decoding", "Yang et al. 2024",
                     "several candidates a node, without replacement", family=TREE, needs=DRAFT,
                     guarantee="distribution-exact")
def _mcsd(draft: Any, branching: tuple[int, ...] = (4, 2, 2)) -> Any:
    return Speculative(drafts.DraftModel(draft), MultiRound(), trees.Fixed.balanced(*branching))


@ALGORITHMS.register("improved-mcsd", "Improving Multi-candidate Speculative Decoding",
                     "Lu, Zeng, Ma, Yu, Levorato 2024", "the target picks first tokens, the longest branch wins; "
                     "drafting stops when rejection is likely, by the draft's own probability or a fitted predictor",
                     family=TREE, needs=DRAFT, guarantee="approximate")
def _improved_mcsd(draft: Any, branching: tuple[int, ...] = (4, 2, 1, 1), least: float = 0.3,
                   predictor: Any = trees.probability, verify: Any = None) -> Any:
    shape = trees.Sliced(trees.Fixed.balanced(*branching), least, predictor)
    source = drafts.TargetRooted(drafts.DraftModel(draft), min(16, draft.vocab_size))
    return Speculative(source, verify or LongestBranch(branching[0]), shape)


ALGORITHMS.alias("rsd-c", "mcsd",
                 "Recursive Speculative Decoding: Accelerating LLM Inference via Sampling Without Replacement",
                 "Jeon et al. 2024", "its Gumbel-top-k children are draws without replacement, its recursive "
                 "rejection is multi-round rejection", family=TREE)


@ALGORITHMS.register("rsd-s",
                     "Recursive Speculative Decoding: Accelerating LLM Inference via Sampling Without Replacement",
                     "Jeon et al. 2024", "a stochastic beam, recursive rejection", family=TREE, needs=DRAFT,
                     guarantee="distribution-exact")
def _rsd_s(draft: Any, width: int = 4, length: int = 4) -> Any:
    return Speculative(drafts.DraftModel(draft), MultiRound(), trees.StochasticBeam(width, length))


@ALGORITHMS.register("sequoia", "Sequoia: Scalable, Robust, and Hardware-aware Speculative Decoding",
                     "Chen et al. 2024", "the best tree for given chances of acceptance (accept=, by default a "
                     "constant vector, not measured) by dynamic programming, without replacement", family=TREE,
                     needs=DRAFT, guarantee="distribution-exact")
def _sequoia(draft: Any, accept: tuple[float, ...] = (0.6, 0.15, 0.07, 0.04), nodes: int = 24,
             length: int | None = 8) -> Any:
    return Speculative(drafts.DraftModel(draft), MultiRound(), trees.sequoia(accept, nodes, length))


@ALGORITHMS.register("opt-tree", "OPT-Tree: Speculative Decoding with Adaptive Draft Tree Structure",
                     "Wang et al. 2024", "the tree of the largest expected length, deeper while it pays", family=TREE,
                     needs=DRAFT, guarantee="seed-exact")
def _opt_tree(draft: Any, nodes: int = 24, delta: float = 0.5, length: int = 8) -> Any:
    return Speculative(drafts.DraftModel(draft), SeedExact(), trees.OptTree(nodes, delta, length))


@ALGORITHMS.register("dyspec", "DySpec: Faster Speculative Decoding with Dynamic Token Tree Structure",
                     "Xiong et al. 2024", "grown greedily by what earlier siblings left", family=TREE, needs=DRAFT,
                     guarantee="distribution-exact")
def _dyspec(draft: Any, nodes: int = 16, length: int = 6, width: int | None = 8) -> Any:
    return Speculative(drafts.DraftModel(draft), MultiRound(), trees.DySpec(nodes, length, width=width))


@ALGORITHMS.register("confidence-tree",
                     "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees (its tree)",
                     "Li et al. 2024", "the likeliest nodes of each layer, ranked again over all", family=TREE,
                     needs=DRAFT, guarantee="seed-exact")
def _confidence(draft: Any, nodes: int = 24, length: int = 5, width: int = 6) -> Any:
    return Speculative(drafts.DraftModel(draft), SeedExact(), trees.ConfidenceTree(nodes, length, width))


@ALGORITHMS.register("cape", "GliDe with a CaPE: A Low-Hassle Method to Accelerate Speculative Decoding (its tree)",
                     "Du et al. 2024", "a chain with more siblings where the draft is in doubt", family=TREE,
                     needs=DRAFT, guarantee="seed-exact")
def _cape(draft: Any, length: int = 5, nodes: int | None = 12) -> Any:
    return Speculative(drafts.DraftModel(draft), SeedExact(), trees.CaPE(length, nodes=nodes))


@ALGORITHMS.register("staged", "Accelerating LLM Inference with Staged Speculative Decoding", "Spector, Re 2023",
                     "a tree along the draft model's continuation, which n-grams draft for it", family=TREE,
                     needs=DRAFT, guarantee="seed-exact")
def _staged(draft: Any, length: int = 6, nodes: int = 16, width: int = 4, branches: int = 4, inner: int = 4,
            order: int = 3) -> Any:
    ngrams = drafts.NGram(inner, order)
    return Speculative(drafts.Staged(drafts.DraftModel(draft), ngrams, length, nodes, width, branches))


@ALGORITHMS.register("confidence-threshold", "Assisted generation with a confidence threshold",
                     "Gante 2023; Joao et al. 2024", "drafting stops at the first doubtful token", family=LINEAR,
                     needs=DRAFT, guarantee="seed-exact")
def _threshold(draft: Any, length: int = 12, least: float = 0.4) -> Any:
    return Speculative(drafts.DraftModel(draft), SeedExact(), trees.ConfidenceChain(length, least))


@ALGORITHMS.register("disco", "Accelerating Speculative Decoding using Dynamic Speculation Length", "Mamou et al. 2024",
                     "drafting stops when a fitted predictor, a logistic regression on five numbers of the draft (the "
                     "paper: a net of two layers), says that the draft is rejected", family=LINEAR, needs=SAMPLED,
                     guarantee="seed-exact")
def _disco(lm: Any, draft: Any, length: int = 12, least: float = 0.4, predictor: Any = None,
           samples: Any = None) -> Any:
    shape = trees.ConfidenceChain(length, least, _predictor("disco", lm, draft, predictor, samples))
    return Speculative(drafts.DraftModel(draft), SeedExact(), shape)


@ALGORITHMS.register("specdec++", "SpecDec++: Boosting Speculative Decoding via Adaptive Candidate Lengths",
                     "Huang et al. 2024", "drafting stops when some draft is likely rejected, by a logistic "
                     "regression on five numbers of the draft; the paper trains a head on the draft model's hidden "
                     "states", family=LINEAR, needs=SAMPLED, guarantee="seed-exact")
def _specdec(lm: Any, draft: Any, length: int = 12, most: float = 0.7, predictor: Any = None,
             samples: Any = None) -> Any:
    shape = trees.RiskThreshold(length, most, _predictor("specdec++", lm, draft, predictor, samples, rejected=6.0))
    return Speculative(drafts.DraftModel(draft), SeedExact(), shape)


def _predictor(name: str, lm: Any, draft: Any, predictor: Any, samples: Any, rejected: float = 1.0) -> Any:
    """The predictor, given or fitted to samples."""
    if (predictor is None) == (samples is None):
        raise ValueError(f"system: {name!r} needs predictor=, from decodax.train.fit_predictor, or samples=, prompts "
                         "as "
                         "token ids to fit one to; takes one of the two")
    if samples is None:
        return predictor
    return fit_predictor(lm, drafts.DraftModel(draft), samples, rejected=rejected)


# a draft model with another tokenizer

@ALGORITHMS.register("uag", "Universal Assisted Generation: Faster Decoding with Any Assistant Model",
                     "Korat et al. 2024; Timor et al. 2025", "a draft model with any vocabulary: its text in the "
                     "target's tokens (string-level exact match, SLEM)", family=LINEAR, needs=BOTH,
                     guarantee="seed-exact")
def _uag(lm: Any, draft: Any, length: int = 5, steps: int | None = None, verify: Any = EXACT) -> Any:
    return Speculative(drafts.Realigned.of(lm, draft, length, steps), verify)


@ALGORITHMS.register("tli", "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for "
                     "Heterogeneous Vocabularies", "Timor et al. 2025",
                     "a draft model on the tokens that both vocabularies have", family=LINEAR, needs=BOTH,
                     guarantee="distribution-exact")
def _tli(lm: Any, draft: Any, length: int = 4) -> Any:
    return Speculative(drafts.Intersection.of(lm, draft), Rejection(), trees.Chain(length))


# relaxed verification

@ALGORITHMS.register("greedy-verification", "Speculative decoding with greedy verification",
                     "Stern, Shazeer, Uszkoreit 2018", "drafts hold while they are the argmax", family=BLOCKWISE,
                     needs=DRAFT, guarantee="approximate")
def _greedy(draft: Any, length: int = 4) -> Any:
    return Speculative(drafts.DraftModel(draft), Greedy(), trees.Chain(length))


@ALGORITHMS.register("typical-acceptance", "Medusa: Simple LLM Inference Acceleration Framework with Multiple "
                     "Decoding Heads (its acceptance)", "Cai et al. 2024", "drafts hold while they are typical",
                     family=TREE, needs=DRAFT, guarantee="approximate")
def _typical(draft: Any, epsilon: float = 0.09, delta: float = 0.3, shape: Any = CHAIN) -> Any:
    return Speculative(drafts.DraftModel(draft), TypicalAcceptance(epsilon, delta), shape)


@ALGORITHMS.register("reflective-verification",
                     "Think Before You Accept: Semantic Reflective Verification for Faster Speculative Decoding",
                     "Wang et al. 2025", "drafts are read again behind a probe, and hold by both readings",
                     family=LINEAR, needs=BOTH, guarantee="approximate")
def _reflective(lm: Any, draft: Any, probe: Any = "\nIs that right? Again:\n", alpha: float = 0.3,
                length: int = 4) -> Any:
    if isinstance(probe, str):
        if lm.tokenizer is None:
            raise ValueError("probe: got a text, and the model has no tokenizer")
        probe = appended(lm.tokenizer, None, probe)
    return Reflective(drafts.DraftModel(draft), shape=trees.Chain(length), probe=tuple(probe), alpha=alpha)


@ALGORITHMS.register("blockwise-top-k", "Blockwise Parallel Decoding for Deep Autoregressive Models (its acceptance)",
                     "Stern, Shazeer, Uszkoreit 2018", "drafts hold while they are among the k likeliest",
                     family=BLOCKWISE, needs=DRAFT, guarantee="approximate")
def _top_k(draft: Any, k: int = 3, length: int = 4) -> Any:
    return Speculative(drafts.DraftModel(draft), TopKAcceptance(k), trees.Chain(length))


@ALGORITHMS.register("blockwise-distance",
                     "Blockwise Parallel Decoding for Deep Autoregressive Models (its acceptance)",
                     "Stern, Shazeer, Uszkoreit 2018", "drafts hold while they are near the argmax as numbers",
                     family=BLOCKWISE, needs=DRAFT, guarantee="approximate")
def _distance(draft: Any, epsilon: int = 2, length: int = 4) -> Any:
    return Speculative(drafts.DraftModel(draft), Distance(epsilon), trees.Chain(length))
