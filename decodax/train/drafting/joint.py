"""Training of a target together with its heads: Medusa-2 (Cai et al., 2024), and blockwise parallel decoding with a
target that is trained, too (Stern et al., 2018).

The loss is that of the target's next tokens plus a multiple of the heads' losses, and gradients of both reach the
target. At first the heads learn alone, so that their first losses do not disturb the target (Medusa's warm-up), and the
target's learning rate is a fraction of theirs. The target learns by all its weights, or by a LoRA adapter.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.io.drafters import TrainedDrafter, save_drafter
from decodax.io.drafters.files import JOINT_FOLDER
from decodax.io.quantize import save
from decodax.models import adapters
from decodax.train.drafting.features import target_states
from decodax.train.drafting.unrolled import Unrolled
from decodax.train.language_model import cross_entropy, divergence
from decodax.train.loop import cast
from decodax.train.tuning.tuned import checked

Tree = Any


@dataclass(frozen=True)
class JointSettings:
    """How the authors of a method train the target with its heads.

    Attributes:
        weight: factor of the sum of the heads' losses, `lambda_0` of Medusa-2.
        rate: learning rate of the target, relative to that of the heads.
        alone: number of first steps in which the heads learn alone.
    """

    weight: float
    rate: float
    alone: int


JOINT = {"medusa": JointSettings(0.2, 0.25, 200), "blockwise-parallel": JointSettings(1.0, 1.0, 0)}
"""Methods whose authors also train the target. The numbers of Medusa are those of the authors' settings, but for the
warm-up, which is a run of its own there."""


def joint_settings(system: str, weight: float | None = None, rate: float | None = None,
                   alone: int | None = None) -> JointSettings:
    """Returns the settings of a method, with some numbers replaced; None: those of the method.

    Raises:
        ValueError: a method whose authors train the drafter alone, or a number that is too small.
    """
    if system not in JOINT:
        raise ValueError(f"joint: got True for {system!r}, takes it for {' and '.join(map(repr, JOINT))}, whose "
                         "authors train the target, too")
    own = JOINT[system]
    made = JointSettings(own.weight if weight is None else weight, own.rate if rate is None else rate,
                         own.alone if alone is None else alone)
    for name, value in (("head_weight", weight), ("target_rate", rate), ("heads_alone", alone)):
        if value is not None and value < 0:
            raise ValueError(f"{name}: got {value}, takes a number of at least 0")
    return made


class JointInputs(NamedTuple):
    """The inputs of `JointLoss` beside weights and batch.

    Attributes:
        frozen: the target's weights before the training; None if neither an adapter nor `JointLoss.distill` needs them.
        share: `f32[]`, factor of the target's gradient: 0 while the heads learn alone, then 1.
    """

    frozen: Tree
    share: Array


@dataclass(frozen=True)
class JointLoss:
    """The training loss of a target and its heads: `target + weight * sum_k decay ** k head_k` (an `Objective`).

    The weights are a pair: those of the target, or its adapter, and those of the head.

    Attributes:
        heads: the loss of the heads.
        weight: factor of the heads' losses, `lambda_0`.
        distill: share of the divergence from the target before the training in its loss, 0 to 1; the rest is the
            cross-entropy of the text's tokens. 1: the self-distillation of Medusa-2.
        adapted: True if the target's part of the weights is a LoRA adapter.
    """

    heads: Unrolled
    weight: float
    distill: float = 0.0
    adapted: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.distill <= 1:
            raise ValueError(f"distill: got {self.distill}, takes a share of the target's loss, 0 to 1")

    @property
    def total(self) -> float:
        """Sum of the weights `decay ** k`, `k` from 1: the loss of `heads` is a mean with the weights `decay ** k`."""
        return sum(self.heads.decay ** (k + 1) for k in range(self.heads.steps))

    def target_weights(self, own: Tree, frozen: Tree) -> Tree:
        """Returns the target's weights from its part of the trained ones and the frozen ones."""
        return adapters.apply(frozen, own) if self.adapted else own

    def __call__(self, params: tuple[Tree, Tree], batch: Array, extra: JointInputs) -> tuple[Array, dict[str, Array]]:
        """Returns the loss and scalars to log: "loss", "cross_entropy" of the target's next tokens, "heads", and the
        acceptance at each depth.

        Args:
            params: the weights of the target, or its adapter, and those of the head.
            batch: `i32[B, T + 1]`.
            extra: the inputs that do not change within a step.
        """
        own, head = params
        stopped = jax.lax.stop_gradient(own)
        # the values of `own`, with a gradient that is multiplied by `share`
        own = jax.tree.map(lambda x, fixed: fixed + extra.share.astype(x.dtype) * (x - fixed), own, stopped)
        network, dtype, weights = self.heads.target, self.heads.dtype, self.target_weights(own, extra.frozen)
        tokens = batch[:, :-1]
        _, features, project = target_states(network, self.heads.head, weights, tokens, dtype)
        logits = project()
        loss = truth = cross_entropy(logits, batch[:, 1:]).mean()
        if self.distill:
            _, _, known = target_states(network, self.heads.head, extra.frozen, tokens, dtype)
            loss = (1 - self.distill) * truth + self.distill * divergence(
                jax.lax.stop_gradient(known()), logits).mean()
        drafts, scalars = self.heads.beside(head, weights, tokens, jax.lax.stop_gradient(logits), features)
        loss = loss + self.weight * self.total * drafts
        return loss, {**scalars, "loss": loss, "cross_entropy": truth, "heads": drafts}


@dataclass(frozen=True)
class JointTarget:
    """A target that is trained with its heads.

    Attributes:
        lm: the target before the training, a result of `decodax.load`.
        loss: the loss.
        start: its part of the first weights: its own, or an adapter.
        settings: learning rate and warm-up.
    """

    lm: Any
    loss: JointLoss
    start: Tree
    settings: JointSettings

    @classmethod
    def of(cls, lm: Any, heads: Any, settings: JointSettings, distill: float = 0.0, rank: int | None = None,
           key: Array | None = None) -> JointTarget:
        """Makes the training of a target with `heads`, whose loss is an `Unrolled`.

        Args:
            lm: the target.
            heads: the loss of the heads.
            settings: weight of the heads' loss, learning rate and warm-up.
            distill: see `JointLoss`.
            rank: rank of a LoRA adapter of all projections of attention and MLP, in place of all weights; None: all
                weights are trained.
            key: random key of the adapter.

        Raises:
            ValueError: the target is no decoder, or its weights are packed.
        """
        loss = JointLoss(heads, settings.weight, distill, rank is not None)
        start = checked(lm).params
        if rank is not None:
            start = adapters.init(lm.params, jax.random.key(0) if key is None else key, rank, None)
        return cls(lm, loss, start, settings)

    @property
    def needs_frozen(self) -> bool:
        """True if the loss reads the target's weights before the training."""
        return self.loss.adapted or self.loss.distill > 0

    def inputs(self, frozen: Tree, step: int) -> JointInputs:
        """Returns the inputs of the loss beside weights and batch in a step, from the target's weights before the
        training."""
        return JointInputs(frozen if self.needs_frozen else None, jnp.float32(step >= self.settings.alone))

    def weights(self, own: Tree, frozen: Tree = None) -> Tree:
        """Returns the target's weights from its part of the trained ones; an adapter is merged into `frozen`, those
        before the training where the adapter is (None: where the target is)."""
        return adapters.merge(self.lm.params if frozen is None else frozen, own) if self.loss.adapted else own

    @property
    def rounded(self) -> bool:
        """True if the weights are stored in bfloat16; False if those of the target were stored in float32."""
        entries = self.lm.config_entries
        return str(entries.get("dtype", entries.get("torch_dtype"))) != "float32"

    def trained(self, own: Tree) -> Any:
        """Returns the target with its part of the trained weights, in float32 with the values that are stored."""
        weights = self.weights(own)
        return self.lm.with_params(cast(cast(weights, jnp.bfloat16), jnp.float32) if self.rounded else weights)

    def write(self, directory: Path, own: Tree, drafter: TrainedDrafter, facts: dict[str, Any]) -> None:
        """Writes the target and its heads: `decodax.load` and `decodax.load_drafter` both read the directory."""
        made, dtype = self.trained(own), "bfloat16" if self.rounded else "float32"
        save(made.with_params(jax.tree.map(np.asarray, made.params)), directory, dtype)
        save_drafter(directory / JOINT_FOLDER, drafter, dtype, facts={"training": facts})


__all__ = ["JOINT", "JointInputs", "JointLoss", "JointSettings", "JointTarget", "joint_settings"]
