"""Drafts read off the text, out of tables and from the target's own guesses."""

from __future__ import annotations

from typing import Any

import numpy as np

from decodax.algorithms.autoregressive import Autoregressive
from decodax.algorithms.entries.shared import (
    CHAIN,
    EXACT,
    JACOBI,
    LINEAR,
    REJECTION,
    TARGET,
    TREE,
)
from decodax.algorithms.speculative import Cut, Speculative, SpecVerification, drafts, fit_tree, trees
from decodax.algorithms.speculative.drafts.text.token_recycling import template
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("autoregressive", "Plain autoregressive decoding", "", "one token a forward", family="ar-sampling",
                     guarantee="seed-exact")
def _autoregressive() -> Any:
    return Autoregressive()


# drafts from text and tables

@ALGORITHMS.register("prompt-lookup", "Prompt Lookup Decoding", "Saxena 2023", "what followed the last n-gram before",
                     family=LINEAR, guarantee="seed-exact")
def _prompt_lookup(length: int = 10, max_ngram: int = 3, min_ngram: int = 1, pick: Any = "latest",
                   verify: Any = EXACT) -> Any:
    return Speculative(drafts.PromptLookup(length, max_ngram, min_ngram, pick), verify)


@ALGORITHMS.register("aggressive-decoding", "Lossless Acceleration for Seq2seq Generation with Aggressive Decoding",
                     "Ge, Xia, Sun, Chen, Wei 2022", "IAD: copies the input on after the place that the output "
                     "matches; beta= and tau= relax the check as GAD++ does, and then tokens are approximate; GAD's "
                     "non-autoregressive drafter is not included", family=LINEAR, guarantee="seed-exact")
def _iad(length: int = 16, max_match: int | None = None, beta: int | None = None, tau: float | None = None,
         verify: Any = None) -> Any:
    draft = drafts.InputGuided(length, max_match=max_match)
    if beta is None and tau is None:
        return Speculative(draft, verify or EXACT)
    if verify is not None:
        raise ValueError(f"verify: got {verify} beside beta={beta} and tau={tau}, which are a verifier of their own")
    return Speculative(draft, SpecVerification(3 if beta is None else beta, 1.0 if tau is None else tau))


@ALGORITHMS.register("sam-decoding", "SAM Decoding: Speculative Decoding via Suffix Automaton", "Hu et al. 2024",
                     "the longest suffix that occurred before, in text or corpus, and what followed it", family=LINEAR,
                     guarantee="seed-exact")
def _sam(length: int = 10, corpus: Any = (), verify: Any = EXACT) -> Any:
    return Speculative(drafts.SuffixAutomaton(length, corpus=corpus), verify)


@ALGORITHMS.register("sam-decoding-hybrid", "SAM Decoding: Speculative Decoding via Suffix Automaton", "Hu et al. 2024",
                     "what followed a long suffix match; where the match is short, Token Recycling's tree or a draft "
                     "model's chain", family=LINEAR, guarantee="seed-exact")
def _sam_hybrid(draft: Any = None, length: int = 39, threshold: int = 5, bias: int = 5, corpus: Any = (),
                model_length: int = 4, verify: Any = EXACT) -> Any:
    text = drafts.SuffixAutomaton(length, bias=bias, full=True, corpus=corpus)
    other = drafts.TokenRecycling() if draft is None else drafts.DraftModel(draft)
    return Speculative(drafts.Fallback(text, other, threshold, trees.Chain(model_length)), verify)


@ALGORITHMS.register("pain-lookahead", "Lookahead: An Inference Acceleration Framework for Large Language Model with "
                     "Lossless Generation Accuracy", "Zhao et al. 2023",
                     "a trie of n-grams with counts, several branches at once", family=TREE, guarantee="seed-exact")
def _pain(nodes: int = 32, branch: int = 8, corpus: Any = (), verify: Any = EXACT) -> Any:
    return Speculative(drafts.Trie(nodes, branch, corpus=corpus), verify)


@ALGORITHMS.register("suffix-decoding", "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications",
                     "Oliaro et al. 2024",
                     "a suffix tree with frequencies: the likeliest continuations of the best pattern", family=TREE,
                     guarantee="seed-exact")
def _suffix_decoding(alpha: float = 2.0, pattern: int = 16, nodes: int = 16, branch: int = 12, corpus: Any = (),
                     verify: Any = EXACT) -> Any:
    return Speculative(drafts.SuffixTree(alpha, pattern, nodes, branch, corpus=corpus), verify)


@ALGORITHMS.register("token-recycling", "Turning Trash into Treasure: Accelerating Inference of Large Language Models "
                     "with Token Recycling", "Luo et al. 2024",
                     "the latest candidates after each token, grown into a fixed tree", family=TREE,
                     guarantee="seed-exact")
def _recycling(k: int = 8, nodes: int | None = None, tree: Any = None, warm: Any = None, verify: Any = EXACT) -> Any:
    if tree is not None and nodes is not None:
        raise ValueError(f"nodes: got {nodes} beside a tree, takes one of the two")
    tree = tree or (trees.RECYCLING_80 if nodes is None else template(nodes))
    if warm is None:
        return Speculative(drafts.TokenRecycling(tree, k=k), verify)
    table = np.asarray(warm, np.int32)
    if table.ndim == 2:         # a row for each token, itself and then its successors: as one reads and writes it
        table = table.T.reshape(-1)
    return Speculative(drafts.TokenRecycling(tree, k, len(table) // (1 + k), table), verify)


@ALGORITHMS.register("stand", "Accelerated Test-Time Scaling with Model-Free Speculative Sampling", "Song et al. 2025",
                     "n-gram tables of the target's own probability vectors, shared among the samples of a prompt, in "
                     "a fitted tree", family=TREE, needs=TARGET, guarantee="seed-exact")
def _stand(lm: Any, order: int = 3, k: int = 10, share: bool = True, warm: Any = None, shape: Any = None,
           samples: Any = None, nodes: int = 15, verify: Any = EXACT) -> Any:
    source = drafts.Stand(lm.vocab_size, order, min(k, lm.vocab_size), share=share, warm=warm)
    if samples is not None:
        if shape is not None:
            raise ValueError("shape: got one beside samples, to which one is fitted; takes one of the two")
        large = Speculative(source, verify, trees.Fixed.balanced(6, 3, 2, 2, 1))
        shape = fit_tree(lm, large, samples, nodes, temperature=0.8)
    return Speculative(source, verify, shape)


@ALGORITHMS.register("aded", "Adaptive Draft-Verification for Efficient Large Language Model Decoding",
                     "Liu et al. 2024", "an online trigram matrix searched by PUCT", family=TREE,
                     guarantee="seed-exact")
def _aded(nodes: int = 24, depth: int = 6, verify: Any = EXACT) -> Any:
    return Speculative(drafts.ADED(nodes, depth), verify)


@ALGORITHMS.register("ngram", "N-gram drafts", "", "the commonest continuation of the last tokens", family=LINEAR,
                     guarantee="seed-exact")
def _ngram(length: int = 5, order: int = 4, corpus: Any = (), verify: Any = EXACT) -> Any:
    return Speculative(drafts.NGram(length, order, corpus=corpus), verify)


@ALGORITHMS.register("ngram-model", "N-gram drafts", "", "an n-gram model with backoff, grown into any shape",
                     family=TREE, needs=TARGET, guarantee="seed-exact")
def _ngram_model(lm: Any, order: int = 4, shape: Any = CHAIN, verify: Any = EXACT) -> Any:
    return Speculative(drafts.NGramModel(lm.vocab_size, order), verify, shape)


# the target's own guesses

@ALGORITHMS.register("jacobi", "Accelerating Transformer Inference for Translation via Parallel Decoding",
                     "Santilli et al. 2023", "a window of guesses iterated to its fixed point, moving with the text",
                     family=JACOBI, guarantee="seed-exact")
def _jacobi(length: int = 8, fill: Any = "repeat", verify: Any = EXACT) -> Any:
    return Speculative(drafts.Jacobi(length, fill), verify)


@ALGORITHMS.register("pj", "Accelerating Transformer Inference for Translation via Parallel Decoding",
                     "Santilli et al. 2023", "Jacobi iteration over the whole output at once", family=JACOBI,
                     guarantee="seed-exact")
def _pj(size: int = 64, fill: Any = "repeat", verify: Any = EXACT) -> Any:
    return Speculative(drafts.PJ(size, fill), verify)


@ALGORITHMS.register("pgj", "Accelerating Transformer Inference for Translation via Parallel Decoding",
                     "Santilli et al. 2023", "Gauss-Seidel over blocks, Jacobi inside", family=JACOBI,
                     guarantee="seed-exact")
def _pgj(block: int = 5, fill: Any = "repeat", verify: Any = EXACT) -> Any:
    return Speculative(drafts.PGJ(block, fill), verify)


@ALGORITHMS.register("hgj", "Accelerating Transformer Inference for Translation via Parallel Decoding",
                     "Santilli et al. 2023", "PGJ up to a length, plain decoding after it", family=JACOBI,
                     guarantee="seed-exact")
def _hgj(block: int = 5, until: int = 48, fill: Any = "repeat", verify: Any = EXACT) -> Any:
    return Speculative(drafts.HGJ(block, until, fill), verify)


@ALGORITHMS.register("lookahead", "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding",
                     "Fu et al. 2024", "a window of Jacobi levels that harvests n-grams, and guesses from their pool",
                     family=JACOBI, guarantee="seed-exact")
def _lookahead(window: int = 7, ngram: int = 5, guesses: int = 7, verify: Any = EXACT) -> Any:
    return Speculative(drafts.Lookahead(window, ngram, guesses), verify)


@ALGORITHMS.register("sjd", "Accelerating Auto-regressive Text-to-Image Generation with Training-free Speculative "
                     "Jacobi Decoding", "Teng et al. 2024",
                     "Jacobi with the previous iteration's conditional as the draft distribution", family=JACOBI,
                     needs=TARGET, guarantee="distribution-exact")
def _sjd(lm: Any, length: int = 16, top: int = 64, verify: Any = REJECTION) -> Any:
    return Speculative(drafts.SJD(lm.vocab_size, length, min(top, lm.vocab_size)), verify)


@ALGORITHMS.register("fastcot",
                     "Fast Chain-of-Thought: A Glance of Future from Parallel Decoding Leads to Answers Faster",
                     "Zhang et al. 2023", "a Jacobi window whose width follows a schedule; cut= and trigger= end the "
                     "rationale early, with approximate tokens", family=JACOBI, guarantee="seed-exact")
def _fastcot(schedule: tuple[tuple[int, int], ...] = ((0, 4), (16, 8), (64, 12)), cut: int | None = None,
             trigger: tuple[int, ...] = (), verify: Any = None) -> Any:
    if cut is not None and verify is not None:
        raise ValueError(f"verify: got {verify} beside a cut, which is a verifier of its own")
    draft = drafts.FastCoT(schedule, cut=cut, trigger=tuple(trigger))
    return Speculative(draft, (verify or EXACT) if cut is None else Cut(cut))
