"""Batches with the target's hidden states, which are computed once and read from a file, for drafters that read nothing
else of the target.

The target does not change, so its hidden states are the same in every epoch. It is mostly much larger than the drafter,
and then its forward pass takes most of the time of a training step.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.core.types import logits_of
from decodax.core.window import causal
from decodax.models.drafters.head import DraftHead
from decodax.train.corpus import Batches
from decodax.train.loop import cast

Tree = Any


class TargetStates(NamedTuple):
    """A batch of windows with the target's hidden states.

    Attributes:
        tokens: `i32[B, T + 1]`.
        hidden: `f[B, T, D]`, its hidden states after the final norm.
        features: `f[B, T, F]`, what the head reads of it.
    """

    tokens: Any
    hidden: Any
    features: Any


def target_states(target: Any, head: DraftHead, weights: Tree, tokens: Array,
                  dtype: str) -> tuple[Array, Array, Callable[[], Array]]:
    """Runs the target on texts `tokens`, `i32[B, T]`, with `weights` cast to `dtype`. Returns its hidden states `f[B,
    T, D]`, the features `f[B, T, F]` that `head` reads, and a function without arguments that returns its logits
    `f32[B, T, V]`."""
    out = target.apply(cast(weights, dtype), causal(tokens, jnp.zeros(tokens.shape[0], jnp.int32)),
                       target.init_cache(tokens.shape[0], 0))
    return out.hidden, head.features(out.hidden, out.states), out.logits


def target_outputs(target: Any, head: DraftHead, weights: Tree, tokens: Array, dtype: str) -> tuple[Array, Array]:
    """Runs the target on texts `tokens`, `i32[B, T]`, and returns its logits `f32[B, T, V]` and the features `f[B, T,
    F]` that `head` reads, without gradients. `weights`, the target's, are cast to `dtype`."""
    _, features, logits = target_states(target, head, weights, tokens, dtype)
    return jax.lax.stop_gradient((logits(), features))


def read_batch(target: Any, head: DraftHead, weights: Tree, batch: Array | TargetStates,
               dtype: str) -> tuple[Array, Array, Array]:
    """Returns the tokens `i32[B, T + 1]` of a batch, and for all but the last of them the target's logits `f32[B, T,
    V]` and the features `f[B, T, F]` that the head reads, without gradients. Given `TargetStates`, only the target's
    output head runs."""
    if not isinstance(batch, TargetStates):
        return batch, *target_outputs(target, head, weights, batch[:, :-1], dtype)
    logits = logits_of(target, cast(weights, dtype), batch.hidden)
    return batch.tokens, *jax.lax.stop_gradient((logits, batch.features))


class KeptFeatures:
    """Batches with the target's hidden states, which are computed once and then read from a file:
    `KeptFeatures(...)[step]` is the `TargetStates` of a step.

    The first use runs the target on all windows and writes the file, `4 * (D + F)` bytes a token in float32; a run
    that is killed meanwhile begins it anew.
    """

    def __init__(self, path: Path, batches: Batches, target: Any, head: DraftHead, weights: Tree, dtype: str,
                 report: Callable[[Iterable[int], int], Iterable[int]] = lambda steps, count: steps):
        """
        Args:
            path: the file; one that is there must be of the same text, target and head.
            batches: the windows; they have to be `fixed`.
            target: the target's network.
            head: the head.
            weights: the target's weights.
            dtype: dtype of the computation and of the file.
            report: wraps the loop over the steps and gets their number, as a progress bar does.

        Raises:
            ValueError: the windows of the epochs differ, or the disk has no room.
        """
        if not batches.fixed:
            raise ValueError("batches: got other windows in each epoch, takes fixed=True")
        self.batches = batches
        read = partial(_states, target, head, dtype)
        first = jnp.asarray(batches.stream[None, :batches.length])
        self.width, whole = (jax.eval_shape(read, weights, first)[i].shape[-1] for i in (0, 1))
        shape = batches.per_epoch, batches.length, self.width + whole
        if not path.is_file():
            size, free = int(np.prod(shape)) * jnp.dtype(dtype).itemsize, shutil.disk_usage(path.parent).free
            if size > free:
                raise ValueError(f"features: they take {size / 1e9:.1f} GB, the disk has {free / 1e9:.1f}; takes a "
                                 "shorter text")
            part = path.with_name(path.name + ".part")
            kept = np.memmap(part, jnp.dtype(dtype), "w+", shape=shape)
            starts = range(0, shape[0], batches.batch)
            for at in report(starts, len(starts)):
                # the last windows once more, so that all steps have one shape
                some = np.minimum(np.arange(at, at + batches.batch), shape[0] - 1)
                tokens = batches.windows(some * batches.length)[:, :-1]
                kept[some] = np.concatenate(jax.device_get(read(weights, tokens)), -1)
            kept.flush()
            part.rename(path)
        self.kept = np.memmap(path, jnp.dtype(dtype), "r", shape=shape)

    def __getitem__(self, step: int) -> TargetStates:
        starts = self.batches.starts(step)
        states = self.kept[starts // self.batches.length]
        return TargetStates(self.batches.windows(starts), states[..., :self.width], states[..., self.width:])


@partial(jax.jit, static_argnums=(0, 1, 2))
def _states(target: Any, head: DraftHead, dtype: str, weights: Tree, tokens: Array) -> tuple[Array, Array]:
    hidden, features, _ = target_states(target, head, weights, tokens, dtype)
    return hidden.astype(dtype), features.astype(dtype)


__all__ = ["KeptFeatures", "TargetStates", "read_batch", "target_outputs"]
