"""Fits the dynamic sparse trees of parallel prompt decoding to a model: measures how often the target's token is each
of the guesses at its prompt tokens (Chen et al., 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.algorithms.speculative.adaptive.measure import measure
from decodax.algorithms.speculative.heads.prompted.ppd import ppd
from decodax.algorithms.speculative.trees.sparse_trees import SparseTrees, expected_tokens, sparse_trees
from decodax.models.drafters.prompt_tokens import LookAheadHead, PromptTokensHead
from decodax.train.drafting.prompt_tokens import InsertedPrompts

Tree = Any


def fit_sparse_trees(lm: Any, drafter: Any, tokens: Any, size: int | None = None, *, ranks: int = 10, places: int = 64,
                     rows: int = 8, sizes: Sequence[int] = (8, 16, 32, 64), batch: int = 1,
                     **options: Any) -> SparseTrees:
    """Returns the trees with the most tokens for windows of at most `size` nodes, by the acceptance on some texts. A
    size that is not given follows from the time of rounds, as in the paper.

        trees = fit_sparse_trees(lm, drafter, texts)
        dx.generate(lm, prompts, algorithm=dx.algorithms.ppd(shape=trees), draft=drafter)

    Args:
        lm: the target, a result of `decodax.load`.
        drafter: a drafter of `ppd`, from `decodax.load_drafter`.
        tokens: `i32[B, T]`, texts of the target's tokens that are typical for later use.
        size: number of nodes: the newest token, drafts and prompt tokens. None: that of `sizes` with the most tokens
            per second on this machine.
        ranks: number of guesses at a prompt token.
        places: number of random places in a text.
        rows: number of texts in a forward pass.
        sizes: numbers of nodes to consider; not used with `size`.
        batch: number of rows for which rounds are measured.
        options: see `decodax.algorithms.speculative.measure`.

    Raises:
        ValueError: another drafter, texts that are too short, no sizes, or too few nodes for a draft.
    """
    if size is None and not sizes:
        raise ValueError("sizes: got none, takes one or more")
    head, texts = drafter.head, np.asarray(tokens, np.int32)
    if not isinstance(head, PromptTokensHead) or isinstance(head, LookAheadHead):
        raise ValueError(f"drafter: got one with a {type(head).__name__}, takes one of 'ppd'")
    if texts.ndim != 2 or texts.shape[1] < head.heads + 2:
        raise ValueError(f"tokens: got an array of shape {texts.shape}, takes texts of at least {head.heads + 2} "
                         "tokens")
    objective = InsertedPrompts(lm.model, head, places)
    found = [guess_counts(objective, lm.params, drafter.params, jnp.asarray(texts[i:i + rows]), ranks)
             for i in range(0, len(texts), rows)]
    hits, total = (np.sum([np.asarray(x) for x in some], 0) for some in zip(*found, strict=True))
    accuracy = hits / np.maximum(total, 1)[:, None]
    if size is not None:
        return sparse_trees(accuracy, size, head.ensemble)

    def speed(trees: SparseTrees) -> float:
        """Returns the expected tokens of a row per second."""
        seconds, = measure(lm.model, lm.params, [ppd(lm, drafter, trees)], batch=batch, vocab_size=lm.vocab_size,
                           **options)
        return expected_tokens(trees, accuracy) / seconds

    return max((sparse_trees(accuracy, n, head.ensemble) for n in sorted(set(sizes))), key=speed)


@partial(jax.jit, static_argnames=("objective", "ranks"))
def guess_counts(objective: InsertedPrompts, weights: Tree, params: Tree, tokens: Array, ranks: int
                 ) -> tuple[Array, Array]:
    """Counts on texts how often each guess of each prompt token is right, which is if it is the target's most likely
    token.

    Returns the counts, `i32[K, ranks]` (guess `r` is the token with the `r`-th highest logit), and the number of
    comparisons, `i32[K]`. `weights` are the target's, `params` the head's; `tokens` are the texts, `i32[B, T]`.
    """
    truth, own, _, live = objective.compared(params, tokens, weights)
    K = objective.steps
    guesses = jax.lax.top_k(own, min(ranks, own.shape[-1]))[1]
    hits = (guesses == truth.argmax(-1)[..., None]) & live[..., None]
    return (hits.reshape(-1, K, hits.shape[-1]).sum(0, dtype=jnp.int32), live.reshape(-1, K).sum(0, dtype=jnp.int32))


__all__ = ["fit_sparse_trees", "guess_counts"]
