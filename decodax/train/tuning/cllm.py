"""Consistency large language models ("CLLMs: Consistency Large Language Models", Kou et al., 2024): tuning after which
Jacobi decoding needs few iterations.

First the model's own Jacobi trajectories are collected: `PGJ` decodes blocks of `n` tokens, and the guesses before each
iteration are the states of a block, which end in its fixed point, the text of plain decoding. Then the model learns to
give after any state what it gives after the fixed point: the cross-entropy between its distributions after the fixed
point, without gradients, and those after the state, from the first token on in which the two differ. To it `weight`
times the cross-entropy of the fixed point is added, without which the model would forget its texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.algorithms.speculative.adaptive.fit_trees import begun
from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafts.jacobi.jacobi import PGJ, filling
from decodax.core import drivers
from decodax.core.state import State
from decodax.train.loop import cast
from decodax.train.tuning.exits import learned_mean

Tree = Any


@dataclass(frozen=True)
class Trajectory:
    """The iterations by which Jacobi decoding finds the `n` tokens of a block: the guesses before each of `J`
    iterations, and the final tokens, those of greedy decoding (the fixed point).

    Attributes:
        prefix: `i32[P]`, the tokens before the block.
        states: `i32[J, n]`, the block before each iteration; decided tokens are in their place. The last guess is never
            read and is that of the fixed point.
        fixed: `i32[n]`, the fixed point.
    """

    prefix: np.ndarray
    states: np.ndarray
    fixed: np.ndarray


def collect_trajectories(lm: Any, prompts: Sequence[Sequence[int]], block: int = 16, blocks: int = 2, seed: int = 0,
                         end: Sequence[int] = ()) -> list[Trajectory]:
    """Returns the trajectories of the blocks that a model decodes greedily after prompts, in one batch.

    The first guesses of a block are tokens at random positions of the text before it.

    Args:
        lm: a result of `decodax.load`.
        prompts: token ids, none empty.
        block: `n`, number of tokens of a block, at least 2.
        blocks: number of blocks after each prompt.
        seed: seed of the first guesses.
        end: ids that end a text. A block with one is the last of its prompt.

    Raises:
        ValueError: no prompts or an empty one, or a number out of range.
    """
    draft = PGJ(block, "text")
    alg, params, policy, s = begun(lm, Speculative(draft), prompts, block * blocks, seed)
    found: list[list[list[np.ndarray]]] = [[[] for _ in range(blocks)] for _ in prompts]
    while bool(np.asarray(s.running).any()):
        # copies, since a round donates the state
        tokens, length, start, running, guesses = map(np.array, (
            s.tokens, s.length, s.prompt_length, s.running, _guesses(draft, s)))
        for i in np.flatnonzero(running):
            number, decided = divmod(int(length[i] - start[i]), block)
            own = tokens[i, length[i] - decided:length[i]]
            found[i][number].append(np.concatenate([own, guesses[i, :block - 1 - decided]]))
        s = drivers.advance(alg, lm.model, params, policy, s, jnp.int32(1))
    made: list[Trajectory] = []
    for text, start, each in zip(np.asarray(s.tokens), np.asarray(s.prompt_length), found, strict=True):
        for number, states in enumerate(each):
            at = int(start) + number * block
            fixed = text[at:at + block]
            last = np.full((len(states), 1), fixed[-1])
            made.append(Trajectory(text[:at], np.concatenate([np.stack(states), last], 1), fixed))
            if np.isin(fixed, list(end)).any():
                break
    return made


@partial(jax.jit, static_argnums=0)
def _guesses(draft: PGJ, s: State) -> Array:
    """Returns the guesses of the next round, `i32[B, n - 1]`."""
    own = s.algo[0].tokens
    return jnp.where(own >= 0, own, filling(draft.fill, s, draft.length))


@dataclass(frozen=True)
class TrajectoryBatches:
    """Batches of trajectories: `TrajectoryBatches(...)[step]` is the fixed points and the states, `i32[batch, T + 1]`
    each with their prefix, and `bool[batch, T + 1]`, True for the tokens of the block; the same at every call.

    A state is drawn from those of its trajectory.

    Attributes:
        trajectories: the trajectories.
        batch: number of rows.
        length: `T`; of longer prefixes the last tokens are kept.
        seed: seed of the draws.
        end: ids that end a text: tokens after one are not learned.

    Raises:
        ValueError: no trajectories, or a block longer than `length`.
    """

    trajectories: Sequence[Trajectory]
    batch: int
    length: int
    seed: int = 0
    end: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        size = max((len(one.fixed) for one in self.trajectories), default=0)
        if not 0 < size <= self.length:
            raise ValueError(f"trajectories: got {len(self.trajectories)}, the longest block of {size} tokens; takes "
                             f"one or more, with blocks of at most {self.length}")

    def __getitem__(self, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rng = np.random.default_rng([self.seed, step])
        fixed, state = np.zeros((2, self.batch, self.length + 1), np.int32)
        learned = np.zeros(fixed.shape, bool)
        for row in range(self.batch):
            one = self.trajectories[int(rng.integers(len(self.trajectories)))]
            n = len(one.fixed)
            prefix = one.prefix[max(len(one.prefix) + n - self.length - 1, 0):]
            begin, stop = len(prefix), len(prefix) + n
            fixed[row, :begin] = state[row, :begin] = prefix
            fixed[row, begin:stop], state[row, begin:stop] = one.fixed, one.states[rng.integers(len(one.states))]
            ends = np.flatnonzero(np.isin(one.fixed, self.end))
            learned[row, begin:begin + ends[0] + 1 if len(ends) else stop] = True
        return fixed, state, learned


@dataclass(frozen=True)
class ConsistencyLoss:
    """The training loss of a consistency model (an `Objective`): after the guesses of an iteration of Jacobi decoding
    the model is to predict what it predicts after the final tokens; to this the cross-entropy of the final tokens is
    added.

    Attributes:
        network: the trained network.
        weight: weight of the cross-entropy of the fixed point; 10 in the authors' code.
        smoothing: share of a uniform distribution in the labels of that cross-entropy; 0.1 in the authors' code.
        dtype: dtype of the computation.

    Raises:
        ValueError: a negative weight, or a smoothing that is no share.
    """

    network: Any
    weight: float = 10.0
    smoothing: float = 0.1
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.weight < 0 or not 0 <= self.smoothing < 1:
            raise ValueError(f"weight, smoothing: got {self.weight} and {self.smoothing}, take 0 or more, and a share "
                             "below 1")

    def __call__(self, params: Tree, batch: tuple[Array, Array, Array],
                 extra: Any) -> tuple[Array, dict[str, Array]]:
        """Returns the loss and scalars to log, in nats: "loss", "consistency", and the cross-entropy of fixed points.

        Args:
            params: the weights.
            batch: from `TrajectoryBatches`.
            extra: ignored.
        """
        fixed, state, learned = batch
        params = cast(params, self.dtype)
        after = lambda tokens: jax.nn.log_softmax(self.network.forward(params, tokens[:, :-1]).astype(jnp.float32))
        right, guessed, counted = after(fixed), after(state), learned[:, 1:]
        own = jnp.take_along_axis(right, fixed[:, 1:, None], -1)[..., 0]
        truth = -learned_mean((1 - self.smoothing) * own + self.smoothing * right.mean(-1), counted)
        apart = jnp.cumsum(fixed[:, 1:] != state[:, 1:], 1) > 0      # from the first token that differs
        distance = -(jax.lax.stop_gradient(jnp.exp(right)) * guessed).sum(-1)
        consistency = learned_mean(distance, counted & apart)
        loss = consistency + self.weight * truth
        return loss, {"loss": loss, "consistency": consistency, "fixed_points": -learned_mean(own, counted)}


__all__ = ["ConsistencyLoss", "Trajectory", "TrajectoryBatches", "collect_trajectories"]
