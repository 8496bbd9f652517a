"""Rules by name."""

from __future__ import annotations

from typing import Any

from decodax.common.registry import Named, made
from decodax.select.best import BestOfN, Likelihood, QualityAware
from decodax.select.candidates import Rule
from decodax.select.consensus import Asked, Corrected, EquilibriumRanking
from decodax.select.evidence import XMBR, CalibratedBestOfN
from decodax.select.mbr import MBR, AggregateMBR, LowRankMBR, PruningMBR
from decodax.select.pairs import PairRanker
from decodax.select.vote import SelfConsistency

RULES: dict[str, Named] = {entry.name: entry for entry in (
    Named("best-of-n", "WebGPT", "Nakano et al. 2021", "the largest reward", BestOfN),
    Named("likelihood", "", "", "the largest mean log-probability, or sum", Likelihood),
    Named("self-consistency", "Self-Consistency Improves Chain of Thought Reasoning", "Wang et al. 2022",
          "the answer that most samples give", SelfConsistency),
    Named("mbr", "Is MAP Decoding All You Need?", "Eikema and Aziz 2020",
          "the largest mean utility against all samples", MBR),
    Named("aggregate-mbr", "Linear-time Minimum Bayes Risk Decoding with Reference Aggregation",
          "Vamvas and Sennrich 2024", "chrF against one reference made of all samples", AggregateMBR),
    Named("pruning-mbr", "Faster Minimum Bayes Risk Decoding with Confidence-based Pruning", "Cheng and Vlachos 2023",
          "candidates are dropped as references are added", PruningMBR),
    Named("low-rank-mbr", "Efficient Minimum Bayes Risk Decoding using Low-Rank Matrix Completion",
          "Trabelsi et al. 2024", "a part of the utilities, and the rest by a matrix of low rank", LowRankMBR),
    Named("quality-aware", "Quality-Aware Decoding for Neural Machine Translation", "Fernandes et al. 2022",
          "the best by an estimate of quality, then another rule", QualityAware),
    Named("pair-reranker", "LLM-Blender", "Jiang et al. 2023", "the winner of comparisons of two", PairRanker),
    Named("equilibrium-ranking", "The Consensus Game: Language Model Generation via Equilibrium Search",
          "Jacob et al. 2024", "what the model as a generator and as a judge of texts agree on", EquilibriumRanking),
    Named("universal-self-consistency", "Universal Self-Consistency for Large Language Models", "Chen et al. 2023",
          "what a model names that sees all candidates", Asked),
    Named("local-normalization", "Local Normalization Distortion and the Thermodynamic Formalism of Decoding "
          "Strategies for Large Language Models", "Kempton and Burrell 2025",
          "a draw by what truncation took from each", Corrected),
    Named("x-mbr", "When Life Gives You Samples: The Benefits of Scaling up Inference Compute for Multilingual LLMs",
          "Khairi et al. 2025", "minimum Bayes risk with evidence from other languages", XMBR),
    Named("infalign-ctrl", "InfAlign: Inference-aware language model alignment", "Balashankar et al. 2024",
          "best of n by the reward's quantile among reference samples; the training of a policy on it is not included",
          CalibratedBestOfN))}
"""All of them, by name."""


def rule(name: str, **options: Any) -> Rule:
    """The rule that stands in the table under a name.

    Raises:
        ValueError: an unknown name (near ones are listed), an option that it does not take, one that is missing, or one
            out of its range.

    >>> rule("self-consistency").weight
    'count'
    """
    return made("rule", RULES, name, options)
