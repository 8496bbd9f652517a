"""The weights that an objective of fine-tuning trains, how they are measured on held-out rows, and how they are saved:
those of a whole model, of a model and a head for the end of texts (NMST), or of AutoDeco's heads alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import save_file

import decodax as dx
from decodax.algorithms.contrastive import Heads
from decodax.algorithms.contrastive.nmst import FILE, NAME
from decodax.models import Diffusion
from decodax.train.language_model import token_losses
from decodax.train.tuning import (
    AnySubsetLoss,
    DecodingHeadsLoss,
    ExampleRows,
    SelfTerminatingLoss,
    losses_by_layer,
)
from decodax.train.tuning.nmst import first_end_head

ENDS_FROM = 16
"""Rows whose hidden states give the head for the end its first weights."""


class Tuned:
    """A whole model, of which the loss of next tokens is measured, or that of the exits after each layer.

    `start` are the first weights, `use` is how the card says that the result is loaded, and `rounded` is False for
    weights that are shipped in float32.
    """

    use = 'dx.load("DIRECTORY")'
    rounded = True

    def __init__(self, lm: Any, exits: bool = False):
        self.lm, self.exits, self.start = lm, exits, lm.params
        depth = lm.model.depth if exits else 1
        self.names = (*(f"after_layer_{i + 1}" for i in range(depth - 1)), "cross_entropy")

    def shardings(self, mesh: jax.sharding.Mesh) -> Any:
        """Returns where the weights lie."""
        return self.lm.model.shardings(mesh)

    def measure(self, params: Any, tokens: jax.Array, learned: jax.Array) -> jax.Array:
        """Returns a mean over the learned tokens for each of `names`, `f32[k]`."""
        if self.exits:
            return losses_by_layer(self.lm.model, params, (tokens, learned))
        own = token_losses(self.lm.model, params, tokens)
        return jnp.where(learned[:, 1:], own, 0).sum()[None] / learned[:, 1:].sum()

    def write(self, target: Path, shipped: Any) -> None:
        """Writes the weights into a directory."""
        dx.save(self.lm.with_params(jax.tree.map(np.asarray, shipped)), target)


class TunedAnySubset(Tuned):
    """An any-subset model, whose loss of hidden tokens is measured; the same ones each time."""

    use = 'dx.infill(dx.load("DIRECTORY"), pieces)'

    def __init__(self, lm: Any, objective: AnySubsetLoss, key: jax.Array):
        super().__init__(lm)
        self.objective, self.key, self.mask = jax.jit(objective), key, objective.mask

    def measure(self, params: Any, tokens: jax.Array, learned: jax.Array) -> jax.Array:
        return self.objective(params, (tokens, learned), self.key)[0][None]

    def write(self, target: Path, shipped: Any) -> None:
        made = self.lm.with_params(jax.tree.map(np.asarray, shipped))
        dx.save(replace(made, diffusion=Diffusion(self.mask, attention="any-subset")), target)


class TunedEnd(Tuned):
    """A model and its head for the end of texts."""

    use = 'dx.algorithms.contrastive.nmst(dx.load("DIRECTORY"), "DIRECTORY", epsilon={epsilon})'

    def __init__(self, lm: Any, objective: SelfTerminatingLoss, rows: ExampleRows):
        super().__init__(lm)
        self.objective, self.use = objective, self.use.format(epsilon=objective.epsilon)
        self.losses = jax.jit(objective.losses)
        self.start = (lm.params, first_end_head(lm, rows.tokens[:ENDS_FROM, :-1], objective.ends))

    def shardings(self, mesh: jax.sharding.Mesh) -> Any:
        return super().shardings(mesh), NamedSharding(mesh, PartitionSpec())

    def measure(self, params: Any, tokens: jax.Array, learned: jax.Array) -> jax.Array:
        own = self.losses(params, tokens, learned)
        return jnp.where(learned[:, 1:], own, 0).sum()[None] / learned[:, 1:].sum()

    def write(self, target: Path, shipped: Any) -> None:
        super().write(target, shipped[0])
        save_file({NAME: np.asarray(shipped[1], np.float32)}, target / FILE)


class TunedHeads(Tuned):
    """The heads of AutoDeco, in the layout of the authors' checkpoints."""

    use = 'dx.algorithms.contrastive.autodeco(dx.load("{target}"), "DIRECTORY")'
    rounded = False

    def __init__(self, lm: Any, objective: DecodingHeadsLoss, key: jax.Array, target: str):
        self.lm, self.target, self.objective, self.use = lm, target, jax.jit(objective), self.use.format(target=target)
        self.names = "temperature_loss", "top_p_loss"
        self.start, self.key = Heads.init(key, lm.model.config.width), key

    def shardings(self, mesh: jax.sharding.Mesh) -> Any:
        return None

    def measure(self, params: Any, tokens: jax.Array, learned: jax.Array) -> jax.Array:
        scalars = self.objective(params, (tokens, learned), (self.key, self.lm.params))[1]
        return jnp.stack([scalars["temperature"], scalars["top_p"]])

    def write(self, target: Path, shipped: Any) -> None:
        save_file(shipped.tensors(), target / "model.safetensors")
        entries = {"model_type": "autodeco", "architectures": ["AutoDecoModelForCausalLM"],
                   "base_model_name_or_path": self.target, "enable_temperature_head": True, "enable_top_p_head": True,
                   "use_enhanced_features": True, "hidden_size": self.lm.model.config.width,
                   "base_model_type": self.lm.config_entries.get("model_type")}
        (target / "config.json").write_text(json.dumps(entries, indent=2) + "\n")
