"""Published samplers that adapt to what the model predicts: early stops, learned and local rules, memories of earlier
steps, blocks that end at delimiters, and canvases of noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from decodax.algorithms.diffusion.adapter import Adapter, Noise
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.caching.blocks import NoCache, PrefixCache
from decodax.algorithms.diffusion.caching.refreshes import OwnBlock
from decodax.algorithms.diffusion.policies import Caching, Score, Unmask
from decodax.algorithms.diffusion.rules.coherence import Agreeing
from decodax.algorithms.diffusion.rules.confident import Confident
from decodax.algorithms.diffusion.rules.learned import ClosingToken, Filter, Learned, PredictedEnd
from decodax.algorithms.diffusion.rules.remasking import Keep, Renoise
from decodax.algorithms.diffusion.rules.scores import Confidence, Margin, NegEntropy, Random
from decodax.algorithms.diffusion.rules.shapers import Anneal, Average, Credit
from decodax.algorithms.diffusion.rules.stops import EndOfText, Gap, Stable, Steps
from decodax.algorithms.diffusion.rules.unmasking import (
    Anchored,
    BlockQuota,
    EntropyBound,
    LocalLeap,
    Quota,
    Segments,
    Threshold,
)
from decodax.algorithms.diffusion.rules.windows import Delimited, Whole, WholeBlocks
from decodax.algorithms.diffusion.systems.entries import (
    FILLING,
    MASKED,
    blocks,
)
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("prophet", "Diffusion Language Models Know the Answer Before Decoding", "Li et al. 2025",
                     "LLaDA that unmasks everything at once as soon as the answer is sure", family=MASKED,
                     needs=FILLING, guarantee="approximate")
def prophet(lm: Any, block: int = 32, steps: int | None = None, answer: tuple[int, int] | None = None,
            gaps: tuple[float, float, float] = (7.5, 5.0, 2.5), size: int | None = None) -> MaskedDiffusion:
    """`steps`: of a block. `answer`: the first position of the answer behind the prompt, and its length (5 as
    published); None: the whole text."""
    gap = Gap(block if steps is None else steps, block, answer, gaps)
    return MaskedDiffusion(Adapter.of(lm), WholeBlocks(size, block), unmask=BlockQuota(block, steps),
                           stops=(gap, EndOfText()))


@ALGORITHMS.register("learn2pd", "Learning to Parallel: Accelerating Diffusion Large Language Models via Adaptive "
                     "Parallel Decoding", "Bao et al. 2025", "a filter on a block's confidences, and the canvas cut "
                     "at the predicted end of text; filters come with the shipped models, `scripts/train.py diffusion "
                     "--stage filter` trains others", family=MASKED, needs=FILLING, guarantee="approximate")
def learn2pd(lm: Any, filter: Filter | str | None = None, threshold: float = 0.96, steps: int | None = None,
             end_of_text: bool = True, size: int | None = None) -> MaskedDiffusion:
    """`filter`: its weights, or their file; None: the `filter.safetensors` in the model's directory, which the shipped
    models have. For another model of text, of any attention,

        python scripts/train.py diffusion --preset pycode-diffusion --stage filter --init DIR --output runs/filter

    writes `runs/filter/model/filter.safetensors`. Its width is the block. `steps`: of a block.

    Raises:
        ValueError: no filter given, and none in the model's directory.
    """
    own = filter if isinstance(filter, Filter) else Filter.load(filter or _beside(lm))
    learned = Learned(own, threshold, steps)
    return MaskedDiffusion(Adapter.of(lm), WholeBlocks(size, own.block), unmask=learned,
                           remask=ClosingToken() if end_of_text else Keep(),
                           stops=(PredictedEnd(learned) if end_of_text else EndOfText(),))


def _beside(lm: Any) -> Path:
    """The filter in a model's directory."""
    directory = lm.directory
    if directory is None or not (directory / "filter.safetensors").is_file():
        where = directory or "a directory of the model"
        raise ValueError(f"filter: got None, and no filter.safetensors lies in {where}; train one with "
                         "scripts/train.py diffusion --stage filter --init DIR, or give a Filter or its file's path")
    return Path(directory) / "filter.safetensors"


@ALGORITHMS.register("adablock", "AdaBlock-dLLM: Semantic-Aware Diffusion LLM Inference via Adaptive Block Size",
                     "Lu et al. 2025", "blocks that end with a line, all sure positions at once", family=MASKED,
                     needs=FILLING, guarantee="approximate")
def adablock(lm: Any, delimiters: tuple[int, ...] | None = None, delimiter_threshold: float = 0.3, block: int = 32,
             threshold: float = 0.9, cache: Literal["none", "prefix", "dual"] = "none", suffix: int = 256,
             size: int | None = None) -> MaskedDiffusion:
    """`delimiters`: token ids; None: the newline. `block`: the length where no delimiter is found. `suffix`: see
    `PrefixCache`. With a cache, a model whose logits point to the next position decides as in the authors' code for
    Dream: see `Anchored`."""
    if delimiters is None:
        delimiters = tuple(lm.tokenizer.encode_after(None, "\n")) if lm.tokenizer else ()
        if len(delimiters) != 1:
            raise ValueError(f"delimiters: got None, and the newline is {len(delimiters)} tokens; takes token ids")
    a = Adapter.of(lm)
    windows, anchored = Delimited(tuple(delimiters), delimiter_threshold, block, size=size), a.shift and cache != "none"
    caching: Caching = {"dual": OwnBlock(anchored=anchored, windows=windows), "none": NoCache(),
                        "prefix": PrefixCache(anchored=anchored, suffix=suffix)}[cache]
    unmask: Unmask = Threshold(threshold)
    return MaskedDiffusion(a, windows, unmask=Anchored(unmask) if anchored else unmask, caching=caching)


@ALGORITHMS.register("localleap", "Accelerating Diffusion LLM Inference via Local Determinism Propagation",
                     "Kong et al. 2025", "sure positions, and less sure ones in their neighbourhood", family=MASKED,
                     needs=FILLING, guarantee="approximate")
def localleap(lm: Any, anchor: float = 0.9, relaxed: float = 0.75, radius: int = 4,
              block: int | None = None) -> MaskedDiffusion:
    """The defaults are the authors' values for LLaDA."""
    a = Adapter.of(lm)
    windows, caching = blocks(a, block)
    return MaskedDiffusion(a, windows, unmask=LocalLeap(anchor, relaxed, radius), caching=caching)


@ALGORITHMS.register("ccd", "Beyond Confidence: Adaptive and Coherent Decoding for Diffusion Language Models",
                     "Chen et al. 2025",
                     "what two steps in a row agree on, or candidates by the mean of the last steps' distributions",
                     family=MASKED, needs=FILLING, guarantee="approximate")
def ccd(lm: Any, rule: Literal["agreement", "mean"] = "agreement", steps: int | None = None, adaptive: bool = True,
        grow: float = 4.0, order: Literal["confidence", "entropy"] = "entropy", size: int | None = None,
        past: int = 3, kept: int = 8, bound: float | None = None, block: int | None = None) -> MaskedDiffusion:
    """`rule` "agreement" is what the authors released, over the whole text: see `Agreeing` for `steps`, `adaptive` and
    `grow`. "mean" is the paper's estimate of a token's distribution over contexts, which the released code does not
    compute: candidates and their order come from the mean of this step's distributions and the `past` ones before it,
    in blocks of `block`. Each step unmasks the quota of `steps`, or with `bound` all positions whose mean has at most
    this entropy, in nats. Past distributions count with their `kept` likeliest tokens."""
    a = Adapter.of(lm)
    score: Score = NegEntropy() if order == "entropy" else Confidence()
    if rule == "agreement":
        return MaskedDiffusion(a, Whole(size), score, Agreeing(steps, adaptive, grow, score=score))
    windows, caching = blocks(a, block)
    unmask: Unmask = Quota(steps) if bound is None else Threshold(bound, "entropy")
    return MaskedDiffusion(a, windows, score, unmask, caching=caching, shaper=Average(past, kept))


@ALGORITHMS.register("dinfer-hierarchy", "dInfer: An Efficient Inference Framework for Diffusion Language Models",
                     "Ma et al. 2025", "all sure positions, and one in each run of open ones", family=MASKED,
                     needs=FILLING, guarantee="approximate")
def dinfer_hierarchy(lm: Any, threshold: float = 0.9, low: float = 0.4, block: int | None = None) -> MaskedDiffusion:
    a = Adapter.of(lm)
    windows, caching = blocks(a, block)
    return MaskedDiffusion(a, windows, unmask=Segments(threshold, low), caching=caching)


@ALGORITHMS.register("dinfer-credit", "dInfer: An Efficient Inference Framework for Diffusion Language Models",
                     "Ma et al. 2025", "all sure positions, where a token that stays the likeliest earns credit",
                     family=MASKED, needs=FILLING, guarantee="approximate")
def dinfer_credit(lm: Any, threshold: float = 0.9, alpha: float = 0.7, gamma: float = 0.2, beta: float = 0.8,
                  kept: int = 8, block: int | None = None) -> MaskedDiffusion:
    """`kept`: the number of tokens a position for which credit is kept."""
    a = Adapter.of(lm)
    windows, caching = blocks(a, block)
    return MaskedDiffusion(a, windows, unmask=Threshold(threshold, slack=1e-5), caching=caching,
                           shaper=Credit(alpha, gamma, beta, kept))


@ALGORITHMS.register("dimple", "Dimple: Discrete Diffusion Multimodal Large Language Model with Parallel Decoding",
                     "Yu et al. 2025", "confident decoding of the whole text, the prompt's entries computed once; a "
                     "template sets the structure", family=MASKED, needs=FILLING, guarantee="approximate")
def dimple(lm: Any, threshold: float = 0.95, steps: int | None = None,
           order: Literal["random", "confidence", "margin", "entropy"] = "random", size: int | None = None,
           prefill: bool = True) -> MaskedDiffusion:
    """`steps`: None: as many as tokens. `order`: the score by which a step unmasks if no position is above the
    threshold; "random" is the authors' "origin", "confidence" their "maskgit_plus". The threshold is on the probability
    in any order. `prefill`: the prompt's entries, except its last token's, are computed in the first forward only.
    Structure priors are given tokens in the canvas: `decodax.infill`."""
    scores: dict[str, Score] = {"random": Random(), "confidence": Confidence(), "margin": Margin(),
                                "entropy": NegEntropy()}
    return MaskedDiffusion(Adapter.of(lm), Whole(size), scores[order], Confident(threshold, steps),
                           caching=PrefixCache(suffix=1) if prefill else NoCache())


@ALGORITHMS.register("diffusion-gemma", "DiffusionGemma", "Google DeepMind 2026",
                     "a canvas of random tokens, decided anew in each step until it stands still; exact block cache",
                     family=MASKED, needs=FILLING, guarantee="approximate")
def diffusion_gemma(lm: Any, bound: float = 0.1, steps: int = 48, canvas: int | None = None, entropy: float = 0.005,
                    temperatures: tuple[float, float] = (0.8, 0.4)) -> MaskedDiffusion:
    """The temperature falls over the `steps` of a canvas; set the policy's to 1. A canvas that stops (`Stable`) or has
    no step left gets this step's candidates, and no noise stays at unsure positions. transformers takes the likeliest
    tokens there, which are the same at temperature 0. Self-conditioning is not included; it needs a model that reads
    embeddings beside tokens."""
    a = Adapter.of(lm, Noise(lm.vocab_size))
    windows, caching = blocks(a, canvas, lm.diffusion.block or 256)
    return MaskedDiffusion(a, windows, NegEntropy(), EntropyBound(bound), Renoise(lm.vocab_size), caching,
                           stops=(Stable(entropy), Steps(steps), EndOfText()), shaper=Anneal(*temperatures, steps))
