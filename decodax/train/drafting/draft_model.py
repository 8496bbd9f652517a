"""Draft models that are tuned to predict at mask tokens: PARD and PARD-2."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

import decodax as dx
from decodax.algorithms.speculative.drafts import AlignedDrafts, MaskedDrafts
from decodax.algorithms.speculative.drafts.model.pard import config_of, mask_of
from decodax.algorithms.speculative.drafts.model.pard2 import read_projection
from decodax.train.drafting.masked import AlignedDraftModel, TunedDraftModel
from decodax.train.drafting.sizes import DrafterSize
from decodax.train.tuning.tuned import checked

SYSTEMS = ("pard", "pard-2")


@dataclass(frozen=True)
class MaskedDraft:
    """A draft model that is tuned: a result of `decodax.load`, its loss, and the first weights."""

    draft: Any
    objective: TunedDraftModel
    first: Any

    @property
    def aligned(self) -> AlignedDraftModel | None:
        """The loss of PARD-2, or None."""
        return self.objective if isinstance(self.objective, AlignedDraftModel) else None

    def source(self, weights: Any) -> MaskedDrafts:
        """Returns the drafts of the model with some weights."""
        given: dict[str, Any] = dict(drafts=self.objective.steps, mask=self.objective.mask)
        if self.aligned is None:
            return MaskedDrafts(self.draft.with_params(weights), **given)
        return AlignedDrafts(self.draft.with_params(weights["draft"]), projection=weights["projection"],
                             states=self.aligned.states, scale=self.aligned.scale, **given)

    def save(self, target: Path, weights: Any, facts: dict[str, Any]) -> None:
        """Writes the model for `pard` or `pard-2`, with the authors' names."""
        weights = jax.tree.map(np.asarray, weights)
        entries = {"pard_token": self.objective.mask, "spd_type": "pard", "training": facts}
        dx.save(self.draft.with_params(weights if self.aligned is None else weights["draft"]), target)
        if self.aligned is not None:
            projection = {f"target_proj.{name}": np.asarray(x, np.float32) for name, x in weights["projection"].items()}
            (target / "pard_warp_model").mkdir(exist_ok=True)
            save_file(projection, target / "pard_warp_model" / "model.safetensors")
            entries |= {"spd_type": "pard2", "pard2": True, "pard2_scale": self.aligned.scale,
                        "pard2_target_dim": projection["target_proj.weight"].shape[1], "pard2_proj_bias":
                        "target_proj.bias" in projection, "pard2_target_layers": self.aligned.states}
        config = target / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | entries, indent=2) + "\n")


def masked_draft(lm: Any, system: str, draft_model: str | None = None, drafts: int | None = None,
                 mask: int | None = None, loss: str | None = None, seed: int = 0, dtype: str = "float32",
                 size: DrafterSize = DrafterSize(), start: str | None = None) -> MaskedDraft:
    """Returns a draft model to tune, with its loss.

    Args:
        lm: the target.
        system: name of the method, one of `SYSTEMS`.
        draft_model: name or directory of the draft model; None: the target's first layers.
        drafts: number of drafts of a round; None: the paper's.
        mask: id of the mask token; None: the padding token.
        loss: name of the loss; None: the paper's.
        seed: seed of the projection of PARD-2.
        dtype: dtype of the computation.
        size: number of the target's first layers; None: a quarter.
        start: directory of a draft model that was tuned before, with its mask token and projection; None: none.

    Raises:
        ValueError: it cannot be trained, has another vocabulary than the target, or a size that it does not have; or
            `start` is given beside a draft model, or was tuned with another mask token or other hidden states.
    """
    if start is not None and draft_model is not None:
        raise ValueError(f"start: got {start!r} and the draft model {draft_model!r}, takes one of them")
    draft_model = draft_model or start
    size.check_only(system, *(() if draft_model is not None else ("layers",)))
    layers = size.layers or max(lm.model.depth // 4, 1)
    if layers > lm.model.depth:
        raise ValueError(f"layers: got {layers}, takes at most the {lm.model.depth} of {lm.name!r}")
    draft = checked(dx.train.sub_model(lm, layers) if draft_model is None else
                    dx.load(draft_model, dtype="float32"))
    if draft.vocab_size != lm.vocab_size:
        raise ValueError(f"draft: got {draft_model!r} with {draft.vocab_size} logits; takes a model with the "
                         f"{lm.vocab_size} of {lm.name!r}")
    if start is not None:
        known = mask_of(draft, None, "pard_token")
        if mask not in (None, known):
            raise ValueError(f"mask: got {mask}, and {start!r} was tuned with {known}; takes that one")
        mask = known
    given: dict[str, Any] = dict(dtype=dtype, draft=draft.model, mask=lm.pad if mask is None else mask)
    if system == "pard":
        return MaskedDraft(draft, TunedDraftModel(lm.model, drafts or 8, loss or "hard", **given), draft.params)
    # as the authors: the last hidden state, and those a quarter, half and three quarters of the layers before it
    depth = lm.model.depth
    states = (-1, *(i for i in dict.fromkeys(-max(depth // 4, 1) * n for n in (1, 2, 3)) if -depth <= i < -1))
    config = {} if start is None else config_of(draft)
    if "pard2_target_layers" in config:
        if (before := tuple(config["pard2_target_layers"])) != states:
            raise ValueError(f"start: got {start!r}, which reads the target's hidden states {before}, takes one that "
                             f"reads {states}")
        given["scale"] = float(config.get("pard2_scale", AlignedDraftModel.scale))
    objective = AlignedDraftModel(lm.model, drafts or 16, loss or "kl+0.1*hard", states=states, **given)
    read, width = len(states) * lm.model.config.width, draft.model.config.width
    projection = {"weight": jax.random.uniform(jax.random.key(seed), (width, read), minval=-1) * read ** -0.5}
    if "pard2_target_layers" in config:
        projection = {name: jnp.asarray(x, jnp.float32) for name, x in read_projection(draft.directory).items()}
        if (found := projection["weight"].shape) != (width, read):
            raise ValueError(f"start: got {start!r} with a projection of shape {found}, takes {(width, read)}")
    return MaskedDraft(draft, objective, {"draft": draft.params, "projection": projection})
