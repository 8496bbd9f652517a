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
    alias,
    entry,
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
from decodax.io.appended import appended

# a draft model

@entry("speculative-decoding", "Fast Inference from Transformers via Speculative Decoding",
       "Leviathan, Kalman, Matias 2023", LINEAR, "a draft model's chain by rejection sampling", DRAFT,
       "distribution-exact")
def _leviathan(draft: Any, length: int = 4) -> Any:
    return Speculative(drafts.DraftModel(draft), Rejection(), trees.Chain(length))


alias("speculative-sampling", "speculative-decoding", "Accelerating Large Language Model Decoding with Speculative "
      "Sampling", "Chen et al. 2023", LINEAR, "the same rule, found at the same time")


@entry("seed-exact", "Speculative sampling that keeps the seed's tokens", "", LINEAR,
       "a draft model's chain; the output is plain sampling's, token for token", DRAFT)
def _seed_exact(draft: Any, length: int = 4, shape: Any = None) -> Any:
    return Speculative(drafts.DraftModel(draft), SeedExact(), shape or trees.Chain(length))


@entry("pearl", "PEARL: Parallel Speculative Decoding with Adaptive Draft Length", "Liu et al. 2024", LINEAR,
       "the draft model writes the next chain while the target verifies the last one", DRAFT)
def _pearl(draft: Any, gamma: int = 4) -> Any:
    return Speculative(drafts.Pearl(drafts.DraftModel(draft), gamma))


@entry("specbranch", "SpecBranch: Speculative Decoding via Hybrid Drafting and Rollback-Aware Branch Parallelism",
       "Shen et al. 2025", LINEAR, "while the target verifies, the draft model goes on from several of its tokens; how "
       "much of it waits is said by confidence and, with lengths=, by a classifier of the target's states", DRAFT)
def _specbranch(draft: Any, gamma: int = 4, branches: int = 3, least: float = 0.4, lengths: Any = None) -> Any:
    return Speculative(drafts.SpecBranch(drafts.DraftModel(draft), gamma, branches, least, lengths))


@entry("block-verification", "Block Verification Accelerates Speculative Decoding", "Sun et al. 2024", THEORY,
       "drafts are accepted jointly, never fewer in expectation", DRAFT, "distribution-exact")
def _block(draft: Any, length: int = 6) -> Any:
    return Speculative(drafts.DraftModel(draft), Block(), trees.Chain(length))


@entry("spectr", "SpecTr: Fast Speculative Decoding via Optimal Transport", "Sun et al. 2023", THEORY,
       "k-SEQ: several independent drafts by approximate optimal transport", DRAFT, "distribution-exact")
def _spectr(draft: Any, drafts_a_node: int = 3, length: int = 3) -> Any:
    return Speculative(drafts.DraftModel(draft), KSeq(), trees.Fixed.balanced(drafts_a_node, *(1,) * (length - 1)))


@entry("specinfer", "SpecInfer: Accelerating Large Language Model Serving with Tree-based Speculative Inference and "
       "Verification", "Miao et al. 2024", TREE, "the merged trees of one or several draft models (draft= takes a "
       "tuple), by multi-round rejection with replacement", DRAFT, "distribution-exact")
def _specinfer(draft: Any, branching: tuple[int, ...] = (3, 2, 1), verify: Any = None) -> Any:
    models = tuple(map(drafts.DraftModel, draft if isinstance(draft, (tuple, list)) else (draft,)))
    shape, rule = trees.Fixed.balanced(*branching), verify or MultiRound(replacement=True)
    if len(models) == 1:
        return Speculative(models[0], rule, shape)
    return Speculative(drafts.Merged(models, shape), rule)


@entry("mcsd", "Multi-Candidate Speculative Decoding", "Yang et al. 2024", TREE,
       "several candidates a node, without replacement", DRAFT, "distribution-exact")
def _mcsd(draft: Any, branching: tuple[int, ...] = (4, 2, 2)) -> Any:
    return Speculative(drafts.DraftModel(draft), MultiRound(), trees.Fixed.balanced(*branching))


@entry("improved-mcsd", "Improving Multi-candidate Speculative Decoding", "Lu, Zeng, Ma, Yu, Levorato 2024", TREE,
       "the target picks first tokens, the longest branch wins; drafting stops when rejection is likely, by the "
       "draft's own probability or a fitted predictor", DRAFT, "approximate")
def _improved_mcsd(draft: Any, branching: tuple[int, ...] = (4, 2, 1, 1), least: float = 0.3,
                   predictor: Any = trees.probability, verify: Any = None) -> Any:
    shape = trees.Sliced(trees.Fixed.balanced(*branching), least, predictor)
    source = drafts.TargetRooted(drafts.DraftModel(draft), min(16, draft.vocab_size))
    return Speculative(source, verify or LongestBranch(branching[0]), shape)


alias("rsd-c", "mcsd", "Recursive Speculative Decoding: Accelerating LLM Inference via Sampling Without Replacement",
      "Jeon et al. 2024", TREE, "its Gumbel-top-k children are draws without replacement, its recursive rejection is "
      "multi-round rejection")


@entry("rsd-s", "Recursive Speculative Decoding: Accelerating LLM Inference via Sampling Without Replacement",
       "Jeon et al. 2024", TREE, "a stochastic beam, recursive rejection", DRAFT, "distribution-exact")
def _rsd_s(draft: Any, width: int = 4, length: int = 4) -> Any:
    return Speculative(drafts.DraftModel(draft), MultiRound(), trees.StochasticBeam(width, length))


@entry("sequoia", "Sequoia: Scalable, Robust, and Hardware-aware Speculative Decoding", "Chen et al. 2024", TREE,
       "the best tree for given chances of acceptance (accept=, by default a constant vector, not measured) by dynamic "
       "programming, without replacement", DRAFT,
       "distribution-exact")
def _sequoia(draft: Any, accept: tuple[float, ...] = (0.6, 0.15, 0.07, 0.04), nodes: int = 24,
             length: int | None = 8) -> Any:
    return Speculative(drafts.DraftModel(draft), MultiRound(), trees.sequoia(accept, nodes, length))


@entry("opt-tree", "OPT-Tree: Speculative Decoding with Adaptive Draft Tree Structure", "Wang et al. 2024", TREE,
       "the tree of the largest expected length, deeper while it pays", DRAFT)
def _opt_tree(draft: Any, nodes: int = 24, delta: float = 0.5, length: int = 8) -> Any:
    return Speculative(drafts.DraftModel(draft), SeedExact(), trees.OptTree(nodes, delta, length))


@entry("dyspec", "DySpec: Faster Speculative Decoding with Dynamic Token Tree Structure", "Xiong et al. 2024", TREE,
       "grown greedily by what earlier siblings left", DRAFT, "distribution-exact")
def _dyspec(draft: Any, nodes: int = 16, length: int = 6, width: int | None = 8) -> Any:
    return Speculative(drafts.DraftModel(draft), MultiRound(), trees.DySpec(nodes, length, width=width))


@entry("confidence-tree", "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees (its tree)",
       "Li et al. 2024", TREE, "the likeliest nodes of each layer, ranked again over all", DRAFT)
def _confidence(draft: Any, nodes: int = 24, length: int = 5, width: int = 6) -> Any:
    return Speculative(drafts.DraftModel(draft), SeedExact(), trees.ConfidenceTree(nodes, length, width))


@entry("cape", "GliDe with a CaPE: A Low-Hassle Method to Accelerate Speculative Decoding (its tree)",
       "Du et al. 2024", TREE, "a chain with more siblings where the draft is in doubt", DRAFT)
def _cape(draft: Any, length: int = 5, nodes: int | None = 12) -> Any:
    return Speculative(drafts.DraftModel(draft), SeedExact(), trees.CaPE(length, nodes=nodes))


@entry("staged", "Accelerating LLM Inference with Staged Speculative Decoding", "Spector, Re 2023", TREE,
       "a tree along the draft model's continuation, which n-grams draft for it", DRAFT)
def _staged(draft: Any, length: int = 6, nodes: int = 16, width: int = 4, branches: int = 4, inner: int = 4,
            order: int = 3) -> Any:
    ngrams = drafts.NGram(inner, order)
    return Speculative(drafts.Staged(drafts.DraftModel(draft), ngrams, length, nodes, width, branches))


@entry("confidence-threshold", "Assisted generation with a confidence threshold", "Gante 2023; Joao et al. 2024",
       LINEAR, "drafting stops at the first doubtful token", DRAFT)
def _threshold(draft: Any, length: int = 12, least: float = 0.4) -> Any:
    return Speculative(drafts.DraftModel(draft), SeedExact(), trees.ConfidenceChain(length, least))


@entry("disco", "Accelerating Speculative Decoding using Dynamic Speculation Length", "Mamou et al. 2024", LINEAR,
       "drafting stops when a fitted predictor, a logistic regression on five numbers of the draft (the paper: a net "
       "of two layers), says that the draft is rejected", SAMPLED)
def _disco(lm: Any, draft: Any, length: int = 12, least: float = 0.4, predictor: Any = None,
           samples: Any = None) -> Any:
    shape = trees.ConfidenceChain(length, least, _predictor("disco", lm, draft, predictor, samples))
    return Speculative(drafts.DraftModel(draft), SeedExact(), shape)


@entry("specdec++", "SpecDec++: Boosting Speculative Decoding via Adaptive Candidate Lengths", "Huang et al. 2024",
       LINEAR, "drafting stops when some draft is likely rejected, by a logistic regression on five numbers of the "
       "draft; the paper trains a head on the draft model's hidden states", SAMPLED)
def _specdec(lm: Any, draft: Any, length: int = 12, most: float = 0.7, predictor: Any = None,
             samples: Any = None) -> Any:
    shape = trees.RiskThreshold(length, most, _predictor("specdec++", lm, draft, predictor, samples, rejected=6.0))
    return Speculative(drafts.DraftModel(draft), SeedExact(), shape)


def _predictor(name: str, lm: Any, draft: Any, predictor: Any, samples: Any, rejected: float = 1.0) -> Any:
    """The predictor, given or fitted to samples."""
    if (predictor is None) == (samples is None):
        raise ValueError(f"system: {name!r} needs predictor=, from decodax.fit_predictor, or samples=, prompts as "
                         "token ids to fit one to; takes one of the two")
    if samples is None:
        return predictor
    return fit_predictor(lm, drafts.DraftModel(draft), samples, rejected=rejected)


# a draft model with another tokenizer

@entry("uag", "Universal Assisted Generation: Faster Decoding with Any Assistant Model",
       "Korat et al. 2024; Timor et al. 2025", LINEAR,
       "a draft model with any vocabulary: its text in the target's tokens (string-level exact match, SLEM)", BOTH)
def _uag(lm: Any, draft: Any, length: int = 5, steps: int | None = None, verify: Any = EXACT) -> Any:
    return Speculative(drafts.Realigned.of(lm, draft, length, steps), verify)


@entry("tli", "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous "
       "Vocabularies", "Timor et al. 2025", LINEAR, "a draft model on the tokens that both vocabularies have", BOTH,
       "distribution-exact")
def _tli(lm: Any, draft: Any, length: int = 4) -> Any:
    return Speculative(drafts.Intersection.of(lm, draft), Rejection(), trees.Chain(length))


# relaxed verification

@entry("greedy-verification", "Speculative decoding with greedy verification", "Stern, Shazeer, Uszkoreit 2018",
       BLOCKWISE, "drafts hold while they are the argmax", DRAFT, "approximate")
def _greedy(draft: Any, length: int = 4) -> Any:
    return Speculative(drafts.DraftModel(draft), Greedy(), trees.Chain(length))


@entry("typical-acceptance", "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads (its "
       "acceptance)", "Cai et al. 2024", TREE, "drafts hold while they are typical", DRAFT, "approximate")
def _typical(draft: Any, epsilon: float = 0.09, delta: float = 0.3, shape: Any = CHAIN) -> Any:
    return Speculative(drafts.DraftModel(draft), TypicalAcceptance(epsilon, delta), shape)


@entry("reflective-verification", "Think Before You Accept: Semantic Reflective Verification for Faster Speculative "
       "Decoding", "Wang et al. 2025", LINEAR, "drafts are read again behind a probe, and hold by both readings", BOTH,
       "approximate")
def _reflective(lm: Any, draft: Any, probe: Any = "\nIs that right? Again:\n", alpha: float = 0.3,
                length: int = 4) -> Any:
    if isinstance(probe, str):
        if lm.tokenizer is None:
            raise ValueError("probe: got a text, and the model has no tokenizer")
        probe = appended(lm.tokenizer, None, probe)
    return Reflective(drafts.DraftModel(draft), shape=trees.Chain(length), probe=tuple(probe), alpha=alpha)


@entry("blockwise-top-k", "Blockwise Parallel Decoding for Deep Autoregressive Models (its acceptance)",
       "Stern, Shazeer, Uszkoreit 2018", BLOCKWISE, "drafts hold while they are among the k likeliest", DRAFT,
       "approximate")
def _top_k(draft: Any, k: int = 3, length: int = 4) -> Any:
    return Speculative(drafts.DraftModel(draft), TopKAcceptance(k), trees.Chain(length))


@entry("blockwise-distance", "Blockwise Parallel Decoding for Deep Autoregressive Models (its acceptance)",
       "Stern, Shazeer, Uszkoreit 2018", BLOCKWISE, "drafts hold while they are near the argmax as numbers", DRAFT,
       "approximate")
def _distance(draft: Any, epsilon: int = 2, length: int = 4) -> Any:
    return Speculative(drafts.DraftModel(draft), Distance(epsilon), trees.Chain(length))
