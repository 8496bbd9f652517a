"""Names of families, and verifiers and shapes that are defaults of many entries."""

from decodax.algorithms.speculative import Rejection, SeedExact, trees
from decodax.common.registry import Needs

LINEAR, TREE, SELF, THEORY = "speculative-linear", "speculative-tree", "speculative-self", "speculative-theory"
JACOBI, BATCH, BLOCKWISE = "parallel-jacobi", "batching-scheduling", "blockwise-parallel"
EXACT, REJECTION, CHAIN = SeedExact(), Rejection(), trees.Chain(4)
DRAFT: Needs = "a draft model"
TARGET: Needs = "a model"
BOTH: Needs = "a model and a draft model"
SAMPLED: Needs = "a draft model and samples"
