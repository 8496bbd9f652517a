"""Multi-token prediction: a layer that is trained with the target and predicts the token after the next ("DeepSeek-V3
Technical Report", DeepSeek-AI, 2024; "Better & Faster Large Language Models via Multi-token Prediction", Gloeckle et
al., 2024), and FastMTP, one such layer tuned to be applied several times ("FastMTP: Accelerating LLM Inference with
Enhanced Multi-Token Prediction", Cui et al., 2025). Also the assistants of Gemma 4 (Google, 2026), several such layers
in a checkpoint of their own, which attend to the target's cache (`decodax.algorithms.speculative.heads.assistant`)."""

from __future__ import annotations

from typing import Any

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.fixed_trees import Chain
from decodax.algorithms.speculative.heads.assistant import next_tokens
from decodax.algorithms.speculative.source import Shape
from decodax.algorithms.speculative.verifier import SeedExact, Verifier
from decodax.common.options import Count
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("mtp", "DeepSeek-V3 Technical Report (multi-token prediction)", "DeepSeek-AI 2024",
                     family="speculative-linear", needs="a trained drafter", drafters=("fastmtp", "mtp"),
                     guarantee="seed-exact")
def mtp(lm: Any, draft: Any = None, length: Count = 3, shape: Shape | None = None,
        verify: Verifier | None = None) -> Speculative:
    """Drafts a chain with a layer that was trained to predict the token after the next, applied again and again.

    Of several layers each drafts one token, and the last one all that follow.

    Args:
        lm: the target.
        draft: a drafter from `decodax.load_drafter`, such as an assistant of Gemma 4; None: the shipped one, else the
            layers in the target's own directory or GGUF file.
        length: number of drafts in a round.
        shape: another shape of the draft tree.
        verify: the rule that accepts drafts; None: seed-exact.
    """
    return Speculative(next_tokens(lm, draft, "mtp", "fastmtp"), verify or SeedExact(), shape or Chain(length))


ALGORITHMS.alias("fastmtp", "mtp", "FastMTP: Accelerating LLM Inference with Enhanced Multi-Token Prediction",
                 "Cui et al. 2025", "One layer for all drafted tokens, trained with weights that fall with their "
                 "distance.", family="speculative-linear")
