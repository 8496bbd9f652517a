"""Models, data and helpers of `test_lift.py` that other tests use too."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from decodax.common.struct import Struct, struct
from decodax.core.types import Out
from decodax.core.window import Window, causal
from decodax.sampling import Policy
from tests.sampling.oracle import row_keys

VOCAB, ROOM = 12, 40
BATCH = 2
PROMPTS = [[1, 2, 3, 1, 2, 3, 4, 1, 2], [5, 5, 1, 5]]
LENGTHS = [len(p) for p in PROMPTS]

# children of node 0: 1, 2; of 1: 3, 4; of 2: 5; of 4: 6
TREE, CHAIN, DEPTH = [-1, 0, 0, 1, 1, 2, 4], [-1, 0, 1, 2], 4


@struct
class Decoding(Struct):
    """The fields of a decoding state that the lift reads."""

    tokens: Any
    length: Any
    prompt_length: Any
    key: Any
    policy: Any


def tree_window(tokens: np.ndarray, parents: list[int]) -> Window:
    """The newest token of each row and a tree of drafts below it."""
    width = len(parents)
    mask, depth = np.eye(width, dtype=bool), np.zeros(width, int)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
            depth[node] = depth[parent] + 1
    positions = np.array(LENGTHS)[:, None] - 1 + depth
    return Window(tokens=jnp.asarray(tokens, jnp.int32), positions=jnp.asarray(positions, jnp.int32),
                  mask=jnp.asarray(mask[None]), live=jnp.ones(tokens.shape, bool))


def out_of(logits: np.ndarray) -> Out:
    return Out(hidden=jnp.asarray(logits), entries=(), head=lambda x: x)


def window_and_logits(parents: list[int], seed: int) -> tuple[Window, np.ndarray]:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 5, (BATCH, len(parents)))
    tokens[:, 0] = [p[-1] for p in PROMPTS]
    chain = parents == list(range(-1, len(parents) - 1))
    window = causal(jnp.asarray(tokens), jnp.asarray(LENGTHS) - 1) if chain else tree_window(tokens, parents)
    return window, (rng.normal(size=(BATCH, len(parents), VOCAB)) * 2).astype(np.float32)


def start(policy: Policy) -> Decoding:
    tokens = np.random.default_rng(9).integers(0, VOCAB, (BATCH, ROOM))    # what lies beyond the length means nothing
    for row, prompt in zip(tokens, PROMPTS, strict=True):
        row[:len(prompt)] = prompt
    tokens, length = jnp.asarray(tokens, jnp.int32), jnp.asarray(LENGTHS, jnp.int32)
    key = row_keys(BATCH, seed=3)
    return Decoding(tokens, length, length, key, policy.init(tokens, length, length, key))


@jax.jit
def log_probs(policy: Policy, s: Decoding, window: Window, logits: jax.Array, nodes: Any = None) -> jax.Array:
    return policy.over(s, window, out_of(logits)).log_probs(nodes)
