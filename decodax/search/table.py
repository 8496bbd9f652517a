"""Searches over forks by name."""

from __future__ import annotations

from typing import Any

from decodax.common.registry import Named, made
from decodax.search.apar import APAR
from decodax.search.beam import AStar, StepBeams
from decodax.search.diffusion_tree import DTS, DTSStar
from decodax.search.explorer import CanvasExplorer, Explorer
from decodax.search.monitors import TrimR, WithTools
from decodax.search.particles import SMC, ParticleFilter, Steering
from decodax.search.phi import PhiDecoding
from decodax.search.retrieval import CoRAG
from decodax.search.tree import TreePO

EXPLORERS: dict[str, Named] = {entry.name: entry for entry in (
    Named("particle-filter", "A Probabilistic Inference Approach to Inference-Time Scaling of LLMs using "
          "Particle-Based Monte Carlo Methods", "Puri et al. 2025",
          "particles resampled by the odds of a process reward", ParticleFilter),
    Named("smc", "Sequential Monte Carlo Steering of Large Language Models", "Lew et al. 2023",
          "weighted samples of the model times a potential, with an estimate of how much that is", SMC),
    Named("smc-steering", "Sequential Monte Carlo Steering of Large Language Models", "Lew et al. 2023",
          "several copies of each particle try a step, and none is kept twice", Steering),
    Named("step-beams", "Scaling LLM Test-Time Compute Optimally can be More Effective than Scaling Model Parameters",
          "Snell et al. 2024", "beam search over steps by a process reward", StepBeams),
    Named("a-star", "A*-Decoding: Token-Efficient Inference Scaling", "Chatziveroglou 2025",
          "best-first search over steps by a process reward", AStar),
    Named("phi-decoding", "phi-Decoding: Adaptive Foresight Sampling for Balanced Inference-Time Exploration and "
          "Exploitation", "Xu et al. 2025", "steps judged by how the model goes on from them", PhiDecoding),
    Named("treepo", "TreePO: Bridging the Gap of Policy Optimization and Efficacy and Inference Efficiency with "
          "Heuristic Tree-based Modeling", "Li et al. 2025", "a tree of segments that share their beginnings", TreePO),
    Named("with-tools", "Inference Scaling for Long-Context Retrieval Augmented Generation", "Yue et al. 2024",
          "a text that stops at a call, and goes on after its result (IterDRAG); one call of a text at a time",
          WithTools),
    Named("corag", "Chain-of-Retrieval Augmented Generation", "Wang et al. 2025",
          "chains of questions and what a retriever finds, of which the best is looked for", CoRAG),
    Named("trimr", "TrimR: Verifier-based Training-Free Thinking Compression for Efficient Test-Time Scaling",
          "Lin et al. 2025", "a verifier of yours ends thoughts that only say again what is known; of the paper the "
          "trigger for overthinking alone", TrimR),
    Named("apar", "APAR: LLMs Can Do Auto-Parallel Auto-Regressive Decoding", "Liu et al. 2024",
          "a tuned model forks its own text, and all branches are written at once", APAR),
    Named("dts", "Diffusion Tree Sampling: Scalable inference-time alignment of diffusion models", "Jain et al. 2025",
          "a tree of canvases, whose leaves are samples of the model times the exponential of a reward", DTS),
    Named("dts-star", "Diffusion Tree Sampling: Scalable inference-time alignment of diffusion models",
          "Jain et al. 2025", "a tree of canvases, searched for the text with the largest reward", DTSStar))}
"""All of them, by name."""


def explorer(name: str, **options: Any) -> Explorer | CanvasExplorer:
    """The search that stands in the table under a name.

    Raises:
        ValueError: an unknown name (near ones are listed), an option that it does not take, one that is missing, or one
            out of its range.
    """
    return made("explore", EXPLORERS, name, options)
