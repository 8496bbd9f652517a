"""Distillation of a draft model that exists already from the model that it drafts for, on answers to prompts: of all
their tokens, or of those that the draft model can still learn (AdaSPEC: Hu et al., 2025).

AdaSPEC distils a copy of the draft model first, the reference, by the divergence from the teacher alone (`mix=1`). The
loss of the draft model is then its divergence at the share of tokens at which this is furthest above the reference's,
since a small model cannot learn all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.models import Transformer
from decodax.train.drafting.losses import overlap_of
from decodax.train.language_model import Network, cross_entropy, distance, divergence, share_of
from decodax.train.loop import cast

Tree = Any

PROBE = "def f(x):\n    return 12 * x  # Größe, then a list: [1, 2]\n"
"""A text of which two tokenizers that are the same make the same tokens."""


@dataclass(frozen=True)
class DistilledAnswers:
    """The loss `mix * KL(teacher || network) + (1 - mix) * cross-entropy`, a mean over the tokens of answers.

    Attributes:
        network: the trained network.
        teacher: the network whose distribution is distilled.
        mix: weight of the divergence from the teacher, 0 to 1; None: 1 with a reference, as in AdaSPEC, else 0.7.
        reference: a network of the student's size that was distilled before, or None: the divergence then counts only
            where the student can still learn, see `decodax.train.language_model.hardest`.
        keep: share of the tokens that counts then.
        dtype: dtype of the computation.
    """

    network: Network
    teacher: Network
    mix: float | None = None
    reference: Network | None = None
    keep: float = 0.4
    dtype: str = "float32"

    def __call__(self, params: Tree, batch: tuple[Array, Array], extra: Tree) -> tuple[Array, dict[str, Array]]:
        """Returns the loss and scalars to log, in nats but for "acceptance", see `figures`.

        Args:
            params: the weights.
            batch: tokens `i32[B, T + 1]`, and `bool[B, T + 1]`, True for tokens of answers.
            extra: the weights of the teacher and of the reference network, None for one that is not there.
        """
        tokens, learned = batch[0], batch[1][:, 1:]
        logits, guide = self._logits(params, extra[0], tokens)
        truth = _mean(cross_entropy(logits, tokens[:, 1:]), learned)
        known = None if self.reference is None else jax.lax.stop_gradient(
            self.reference.forward(cast(extra[1], self.dtype), tokens[:, :-1]))
        share = share_of(self.mix, self.reference)
        loss = share * distance(guide, logits, known, self.keep, learned) + (1 - share) * truth
        return loss, {"loss": loss, "cross_entropy": truth, "divergence": _mean(divergence(guide, logits), learned),
                      "acceptance": _mean(overlap_of(guide, logits), learned)}

    def _logits(self, params: Tree, guide: Tree, tokens: Array) -> tuple[Array, Array]:
        """Returns the logits `f32[B, T, V]` of the network and of the teacher."""
        taught = self.teacher.forward(cast(guide, self.dtype), tokens[:, :-1])
        return self.network.forward(cast(params, self.dtype), tokens[:, :-1]), jax.lax.stop_gradient(taught)


def _mean(x: Array, counted: Array) -> Array:
    return jnp.where(counted, x, 0).sum() / jnp.maximum(counted.sum(), 1)


def check_teacher(teacher: Any, student: Any, what: str = "teacher") -> Any:
    """Returns a model, a result of `decodax.load`, if its distributions can be compared with those of a student.

    Raises:
        ValueError: another kind of model, another number of logits, or another tokenizer; `what` is the entry's name.
    """
    if not isinstance(teacher.model, Transformer) or teacher.diffusion is not None:
        raise ValueError(f"{what}: got {teacher.name!r}, a {type(teacher.model).__name__}; takes a decoder that reads "
                         "from left to right")
    if teacher.vocab_size != student.vocab_size:
        raise ValueError(f"{what}: got {teacher.name!r} with {teacher.vocab_size} logits; takes a model with the "
                         f"{student.vocab_size} of {student.name!r}")
    if teacher.tokenizer is None or student.tokenizer is None or (
            teacher.tokenizer.encode(PROBE, add_special_tokens=False) != student.tokenizer.encode(
                PROBE, add_special_tokens=False)):
        raise ValueError(f"{what}: got {teacher.name!r}, whose tokenizer gives other tokens; takes a model with that "
                         f"of {student.name!r}")
    return teacher


__all__ = ["DistilledAnswers", "check_teacher"]
