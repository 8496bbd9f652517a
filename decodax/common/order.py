"""The order in which listings show the entries of the registry: by family, and the most used of each family first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from decodax.common.entries import Entry

FAMILIES = ("ar-sampling", "speculative-linear", "speculative-tree", "speculative-self", "parallel-jacobi",
            "masked-diffusion", "diffusion-cache", "search", "evict", "quantize", "sparse")
"""Families that listings show first."""

COMMON = ("autoregressive", "prompt-lookup", "speculative-decoding", "ngram", "mtp", "eagle-3", "medusa",
          "suffix-decoding", "token-recycling", "sequoia", "layerskip", "self-speculative", "lookahead", "jacobi",
          "llada", "dream", "mdlm", "fast-dllm", "dkv-cache", "beam-search", "contrastive-search",
          "snapkv", "h2o", "pyramidkv", "kivi", "quest", "streaming-llm", "minference",
          "best-of-n", "self-consistency", "mbr", "step-beams", "particle-filter",
          "json-schema", "regex", "grammar", "int8", "int4", "fp8", "bfloat16",
          "pycode", "pycode-draft", "pycode-diffusion")
"""The most used names of all listings, which listings show before the others of their family."""


def ordered(entries: Iterable[Entry]) -> list[Entry]:
    """Returns entries as listings show them: by family, and the most used of each family first."""
    entries = list(entries)
    families = [*FAMILIES, *(entry.family for entry in entries)]
    return sorted(entries, key=lambda entry: (families.index(entry.family), COMMON.index(entry.name)
                                              if entry.name in COMMON else len(COMMON)))
