"""The weights that an objective of fine-tuning trains, how they are measured on held-out rows, and how they are saved:
those of a whole model, of a model and the parts around it (NMST, HAMburger), or of AutoDeco's heads alone. For some
objectives also the tokens of a forward pass are measured, by the decoding method that the model is tuned for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
from decodax.algorithms.speculative import Speculative
from decodax.io.drafters import TrainedDrafter, save_drafter
from decodax.io.drafters.hamburger import FOLDER
from decodax.io.quantize import save
from decodax.models import Diffusion, Transformer
from decodax.models.packed import Packed
from decodax.train.language_model import token_losses
from decodax.train.loop import Objective
from decodax.train.tuning import (
    AnySubsetLoss,
    ConsistencyLoss,
    DecodingHeadsLoss,
    DistilledAnswers,
    ExampleRows,
    HamburgerLoss,
    NoisyLoss,
    SelfTerminatingLoss,
    SemiAutoregressiveLoss,
    SetBlockLoss,
    SkippyLoss,
    grouped,
    losses_by_layer,
)
from decodax.train.tuning.examples import prompts_of
from decodax.train.tuning.nmst import first_end_head

MEASURED = 16
"""Prompts at most whose threads are counted."""

ENDS_FROM = 16
"""Rows whose hidden states give the head for the end its first weights."""


class Tuned:
    """The weights that a tuning run trains, and how they are measured. This class trains all weights of the model
    `lm` and measures the cross-entropy of next tokens; with `exits` also that of the network cut after each layer.

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
        """Returns a `NamedSharding` for each weight that is trained, on the given mesh."""
        return self.lm.model.shardings(mesh)

    def arrays(self, rows: ExampleRows) -> tuple[np.ndarray, ...]:
        """Returns the arrays of rows, `[N, ...]` each, that the objective and `measure` read."""
        return rows.arrays

    def measure(self, params: Any, tokens: jax.Array, learned: jax.Array) -> jax.Array:
        """Returns the figures called `names`, `f32[k]`, such as cross-entropies in nats: means over the tokens of a
        batch, `tokens`, `i32[B, T + 1]`, that count (`learned`, `bool[B, T + 1]`)."""
        if self.exits:
            return losses_by_layer(self.lm.model, params, (tokens, learned))
        own = token_losses(self.lm.model, params, tokens)
        return jnp.where(learned[:, 1:], own, 0).sum()[None] / learned[:, 1:].sum()

    def decoding(self, params: Any) -> tuple[Any, Any] | None:
        """Returns the tuned model with the weights `params`, and the decoding method that it is tuned for; None if it
        is tuned for all methods."""
        return None

    def tokens_a_forward(self, params: Any, prompts: Sequence[Sequence[int]], new: int) -> float | None:
        """Returns the mean number of tokens of a forward pass of the method that the model is tuned for, in greedy
        texts of `new` tokens after some prompts; None if there is no such method."""
        if type(self).decoding is Tuned.decoding:
            return None
        found = self.decoding(on_one_device(params))
        assert found is not None
        return float(dx.generate(found[0], prompts, algorithm=found[1], max_new_tokens=new, temperature=0.0,
                                 eos_token_id=[]).stats.tokens_per_forward)

    def write(self, target: Path, shipped: Any) -> None:
        """Writes the model with the weights `shipped` into the directory `target`, which `decodax.load` can load."""
        save(self.lm.with_params(jax.tree.map(np.asarray, shipped)), target)


def on_one_device(params: Any) -> Any:
    """Returns weights on the first device, whatever mesh they were trained on."""
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), params)


def add_entries(target: Path, entries: Mapping[str, Any]) -> None:
    """Adds entries to the `config.json` of the directory `target`."""
    file = target / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}, indent=2) + "\n")


class TunedDrafts(Tuned):
    """A tuning run of a model that drafts for itself: CLLM, Make Some Noise, SPACE or S3D. Measures the cross-entropy
    of next tokens. What the training decides for decoding, such as the mask token, is written to `config.json`.

    Raises:
        ValueError: an objective of another method.
    """

    def __init__(self, lm: Any, objective: Objective, drafts: int):
        super().__init__(lm)
        self.drafts, self.entries, self.passes = drafts, dict[str, Any](), 1.0
        match objective:
            case ConsistencyLoss() | NoisyLoss():
                self.name = "jacobi"
            case SkippyLoss():
                self.name, skip = "s3d", objective.head.skip
                self.entries = {"mask": objective.mask, "skip": skip}
                self.passes = 2 - len(skip) / lm.model.depth    # a pass that drafts counts by its share of the layers
            case SemiAutoregressiveLoss():
                self.name, self.entries = "space", {"mask": objective.mask}
            case _:
                raise ValueError(f"objective: got {type(objective).__name__}, takes one of a model that drafts")
        if self.entries:
            self.use = f'dx.generate(dx.load("DIRECTORY"), prompt, algorithm="{self.name}:length={drafts}")'

    def decoding(self, params: Any) -> tuple[Any, Any]:
        own = self.lm.with_params(params)
        if not self.entries:
            return own, Speculative(dx.drafts.Jacobi(self.drafts, "text"))
        return own, dx.algorithms.make(self.name, own, length=self.drafts, **self.entries)

    def tokens_a_forward(self, params: Any, prompts: Sequence[Sequence[int]], new: int) -> float | None:
        made = super().tokens_a_forward(params, prompts, new)
        return None if made is None else made / self.passes

    def write(self, target: Path, shipped: Any) -> None:
        super().write(target, shipped)
        words = {"mask": "mask_token", "skip": "skip"}
        add_entries(target, {f"{self.name}_{words[name]}": value for name, value in self.entries.items()})


class TunedBranches(Tuned):
    """A tuning run of a model that forks its own text with the control tokens `fork` and `child` (APAR). Measures the
    cross-entropy of the threads' tokens."""

    use = 'dx.generate(dx.load("DIRECTORY"), prompt, search="apar")'

    def __init__(self, lm: Any, fork: int, child: int, rows: Sequence[ExampleRows]):
        super().__init__(lm)
        self.control = {"fork": fork, "child": child}
        mains = ([x for x in prompts_of(some, len(some)) if child not in x] for some in rows)
        self.prompts = next((found[:MEASURED] for found in mains if found), [])

    def tokens_a_forward(self, params: Any, prompts: Sequence[Sequence[int]], new: int) -> float:
        """Returns the mean number of tokens of all threads of a prompt for each forward pass until its last thread
        ends. The threads are greedy, of at most `new` tokens, and their prompts those of the first `rows` that have
        some, in place of `prompts`."""
        own = self.lm.with_params(on_one_device(params))
        found = dx.search.explore(own, self.prompts, dx.search.apar(**self.control), max_new_tokens=new,
                                  temperature=0.0)
        return float(np.mean([sum(len(x.tokens) for x in tree) / max(x.rounds for x in tree)
                              for tree in found.details or ()]))

    def write(self, target: Path, shipped: Any) -> None:
        super().write(target, shipped)
        add_entries(target, {f"apar_{name}_token": token for name, token in self.control.items()})


class TunedAnySubset(Tuned):
    """A tuning run of all weights of an any-subset model. Measures the cross-entropy of randomly hidden tokens, the
    same ones at each evaluation."""

    use = 'dx.infill(dx.load("DIRECTORY"), pieces)'

    def __init__(self, lm: Any, objective: AnySubsetLoss, key: jax.Array):
        super().__init__(lm)
        self.objective, self.key, self.mask = jax.jit(objective), key, objective.mask

    def measure(self, params: Any, tokens: jax.Array, learned: jax.Array) -> jax.Array:
        return self.objective(params, (tokens, learned), self.key)[0][None]

    def write(self, target: Path, shipped: Any) -> None:
        made = self.lm.with_params(jax.tree.map(np.asarray, shipped))
        save(replace(made, diffusion=Diffusion(self.mask, attention="any-subset")), target)


class TunedBlocks(Tuned):
    """A tuning run of a model that fills blocks of masks after a causal text (SBD, SDLM). Measures the loss with the
    same noise at each evaluation, for SBD by its parts."""

    def __init__(self, lm: Any, objective: SetBlockLoss, key: jax.Array):
        super().__init__(lm)
        self.kind, self.name, self.key = objective.kind, objective.method, key
        self.losses = jax.jit(objective.measure)
        self.names = ("bound", "cross_entropy") if self.name == "sbd" else ("cross_entropy",)
        self.use = f'dx.generate(dx.load("DIRECTORY"), prompt, algorithm="{self.name}")'

    def measure(self, params: Any, tokens: jax.Array, learned: jax.Array) -> jax.Array:
        return self.losses(params, (tokens, learned), self.key)

    def decoding(self, params: Any) -> tuple[Any, Any]:
        return replace(self.lm.with_params(params), diffusion=self.kind), self.name

    def write(self, target: Path, shipped: Any) -> None:
        save(self.decoding(jax.tree.map(np.asarray, shipped))[0], target)


class TunedEnd(Tuned):
    """A tuning run of a model together with the head that predicts the end of a text (`SelfTerminatingLoss`)."""

    use = 'dx.algorithms.contrastive.nmst(dx.load("DIRECTORY"), "DIRECTORY", epsilon={epsilon})'

    def __init__(self, lm: Any, objective: SelfTerminatingLoss, rows: ExampleRows):
        super().__init__(lm)
        self.objective, self.use = objective, self.use.format(epsilon=objective.epsilon)
        self.losses = jax.jit(objective.losses)
        self.start = (lm.params, first_end_head(lm, rows.tokens[:ENDS_FROM, :-1], objective.ends))

    def shardings(self, mesh: jax.sharding.Mesh) -> Any:
        return super().shardings(mesh), NamedSharding(mesh, PartitionSpec())

    def arrays(self, rows: ExampleRows) -> tuple[np.ndarray, ...]:
        return *rows.arrays, rows.before

    def measure(self, params: Any, tokens: jax.Array, learned: jax.Array, before: jax.Array | None = None
                ) -> jax.Array:
        own = self.losses(params, tokens, learned, before)
        return jnp.where(learned[:, 1:], own, 0).sum()[None] / learned[:, 1:].sum()

    def write(self, target: Path, shipped: Any) -> None:
        super().write(target, shipped[0])
        save_file({NAME: np.asarray(shipped[1], np.float32)}, target / FILE)


class TunedGroups(Tuned):
    """A model that reads and writes groups of tokens, with its embedder and decoder. The loss of next tokens is that of
    the model alone, the others are those of tokens in groups and of their ends, in the groups of the first weights."""

    use = f'dx.generate(dx.load("DIRECTORY"), prompt, algorithm="hamburger", draft="DIRECTORY/{FOLDER}")'

    def __init__(self, lm: Any, objective: HamburgerLoss, key: jax.Array):
        super().__init__(lm)
        self.objective, self.losses = objective, jax.jit(objective)
        self.start = lm.params, objective.head.init_params(key)
        self.names = "next_tokens", "ends", "cross_entropy"

    def shardings(self, mesh: jax.sharding.Mesh) -> Any:
        return super().shardings(mesh), jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), self.start[1])

    def measure(self, params: Any, tokens: jax.Array, learned: jax.Array) -> jax.Array:
        rows = ExampleRows(np.asarray(tokens), np.asarray(learned))
        groups = tuple(map(jnp.asarray, grouped(self.lm, rows, self.objective.head.steps)))
        own = self.losses(params, groups, self.lm.params)[1]
        return jnp.stack([super().measure(params[0], tokens, learned)[0], own["stop"], own["cross_entropy"]])

    def drafter(self, weights: Any) -> TrainedDrafter:
        """Returns embedder and decoder with their weights."""
        return TrainedDrafter("hamburger", self.objective.head, jax.tree.map(lambda x: jnp.asarray(np.asarray(x)),
                                                                             weights))

    def decoding(self, params: Any) -> tuple[Any, Any]:
        return self.lm.with_params(params[0]), dx.algorithms.make("hamburger", self.lm, self.drafter(params[1]))

    def write(self, target: Path, shipped: Any) -> None:
        super().write(target, shipped[0])
        save_drafter(target / FOLDER, self.drafter(shipped[1]), "bfloat16" if shipped[1]["places"].dtype == jnp.bfloat16
                     else "float32")


class TunedStudent(Tuned):
    """A tuning run of a draft model that is distilled from a teacher with the weights `guide`. Measures the
    cross-entropy of next tokens, the divergence from the teacher, and the probability that it accepts a draft at
    temperature 1."""

    use = 'dx.generate(target, prompt, algorithm="seed-exact", draft=dx.load("DIRECTORY"))'

    def __init__(self, lm: Any, objective: DistilledAnswers, guide: Any):
        super().__init__(lm)
        # neither part of the loss matters here
        self.losses, self.guide = jax.jit(replace(objective, reference=None)), guide
        self.names = "cross_entropy", "divergence", "acceptance"

    def measure(self, params: Any, tokens: jax.Array, learned: jax.Array) -> jax.Array:
        own = self.losses(params, (tokens, learned), (self.guide, None))[1]
        return jnp.stack([own[name] for name in self.names])


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


def checked(lm: Any, fills: bool = False) -> Any:
    """Returns the model if all its weights can be trained. `fills` is True if it has to be one that fills masks.

    Raises:
        ValueError: another kind of model, or packed weights.
    """
    if fills and (not isinstance(lm.model, Transformer) or lm.diffusion is None or lm.diffusion.mask is None):
        raise ValueError(f"target: got {lm.name!r}, which fills no masks; takes a diffusion model with this objective")
    if not fills and (not isinstance(lm.model, Transformer) or lm.diffusion is not None):
        raise ValueError(f"target: got {lm.name!r}, a {type(lm.model).__name__}"
                         f"{'' if lm.diffusion is None else ' that fills masks'}; takes a decoder that reads from left "
                         "to right")
    packed = lambda x: isinstance(x, Packed)
    if any(map(packed, jax.tree.leaves(lm.params, is_leaf=packed))):
        raise ValueError(f"target: got {lm.name!r} with packed weights; takes a model whose weights are arrays "
                         "(--widen)")
    return lm
