"""Blockwise parallel decoding with the paper's heads ("Blockwise Parallel Decoding for Deep Autoregressive Models",
Stern, Shazeer, Uszkoreit, 2018).

The heads read the hidden state that the verifying forward pass has computed anyway, so predicting a block and verifying
it are one call. Training: cross-entropy of the heads, with the target frozen or trained, too."""

from __future__ import annotations

from typing import Any

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.fixed_trees import Chain
from decodax.algorithms.speculative.heads.source import trained
from decodax.algorithms.speculative.verifier import Verifier
from decodax.algorithms.speculative.verify.blockwise import Greedy
from decodax.algorithms.speculative.verify.minimum_block import MinimumBlock
from decodax.common.options import Count
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("blockwise-parallel", "Blockwise Parallel Decoding for Deep Autoregressive Models",
                     "Stern, Shazeer, Uszkoreit 2018", family="blockwise-parallel", needs="a trained drafter",
                     guarantee="approximate")
def blockwise_parallel(lm: Any, draft: Any = None, length: Count | None = None, minimum: Count = 1,
                       verify: Verifier | None = None) -> Speculative:
    """Drafts a block of tokens with one head for each, and accepts its longest prefix that is the target's choice.

    With the default options, greedy rows get exactly the tokens of greedy decoding, and rows with a temperature also
    get the most likely tokens.

    Args:
        lm: the target.
        draft: a drafter from `decodax.load_drafter`; None: the one shipped for the target. A ValueError is raised if
            there is none.
        length: number of drafts in a round, at most one for each head; None: one for each.
        minimum: smallest number of tokens of a round, the target's own included; above 1, guesses that the target
            rejects are kept.
        verify: the rule that accepts drafts; None: the most likely token (`dx.verify.Greedy()`). The paper's others are
            `dx.verify.TopKAcceptance(k)` and `dx.verify.Distance(epsilon)`.
    """
    source, rule = trained(lm, draft, "blockwise-parallel"), verify or Greedy()
    longest = source.longest or 1
    return Speculative(source, rule if minimum == 1 else MinimumBlock(rule, minimum),
                       Chain(min(length or longest, longest)))
