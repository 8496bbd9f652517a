"""What the library's own makers share: names of families, and verifiers and shapes that are defaults."""

from decodax.algorithms.speculative import Rejection, SeedExact, trees
from decodax.common.registry import BOTH, DRAFT, SAMPLED, TARGET, alias, entry, system

LINEAR, TREE, SELF, THEORY = "speculative-linear", "speculative-tree", "speculative-self", "speculative-theory"
JACOBI, BATCH, BLOCKWISE, SEARCH = "parallel-jacobi", "batching-scheduling", "blockwise-parallel", "search"
EXACT, REJECTION, CHAIN = SeedExact(), Rejection(), trees.Chain(4)

__all__ = ["BATCH", "BLOCKWISE", "BOTH", "CHAIN", "DRAFT", "EXACT", "JACOBI", "LINEAR", "REJECTION", "SAMPLED",
           "SEARCH", "SELF", "TARGET", "THEORY", "TREE", "alias", "entry", "system"]
