"""Reads the published files of stacked heads: Medusa, Hydra and the MLP speculator."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from decodax.io.drafters.eagle import layer_names
from decodax.io.drafters.reading import placed, same
from decodax.io.drafters.tensors import Tensors
from decodax.io.files import INDEX, ONE, CheckpointError, Files, read_json
from decodax.models.config import DecoderConfig
from decodax.models.drafters.further import MEDUSA
from decodax.models.drafters.hydra import HydraHead
from decodax.models.drafters.prefixed import plain_layers
from decodax.models.drafters.stack import MedusaHead, MLPSpeculatorHead


def medusa_in(path: Path) -> list[str]:
    """Returns the names of the tensors of Medusa's heads in a model's directory; empty if it holds none."""
    held = any((path / name).is_file() for name in (ONE, INDEX))
    return [name for name in Files(path).home if name.startswith(MEDUSA)] if held else []


def medusa_tensors(path: Path, names: Sequence[str]) -> Tensors:
    """Returns the tensors of Medusa's heads in a model's directory under the names that a directory of heads alone
    has; `names` is the result of `medusa_in`."""
    files = Files(path)
    return Tensors({name.removeprefix(MEDUSA): files.slice(name)[...] for name in names},
                   read_json(path / "config.json"), f"{path}: {MEDUSA}*")


def _numbers(tensors: Tensors, pattern: str) -> list[int]:
    """Returns the distinct numbers that the group of a pattern matches in the names of tensors, ascending."""
    return sorted({int(found[1]) for name in tensors.names if (found := re.fullmatch(pattern, name))})


def _heads(tensors: Tensors, pattern: str, example: str) -> int:
    """Returns the number of heads, from the names of tensors."""
    found = _numbers(tensors, pattern)
    if not found or found != list(range(len(found))):
        raise CheckpointError(f"{tensors.name}: has no heads 0, 1, ...: tensors such as {example!r}")
    return len(found)


def _vocabulary(tensors: Tensors, own: str) -> int:
    """Returns the number of logits: of the matrix `own`, or, without one, `vocab_size`."""
    if own in tensors:
        return tensors[own].shape[0]
    if "vocab_size" not in tensors.config:
        raise CheckpointError(f"{tensors.name}: config.json lacks vocab_size, and the heads have no vocabulary "
                              "matrices")
    return int(tensors.config["vocab_size"])


def read_medusa(tensors: Tensors, dtype: Any) -> tuple[MedusaHead, Any]:
    """Returns the heads of a Medusa file (`medusa_lm_head.pt` or `.safetensors`).

    Uploaded configurations name wrong numbers of heads, so tensors are counted.
    """
    heads = _heads(tensors, r"(\d+)\.\d+\.linear\.weight", "0.0.linear.weight")
    blocks = _numbers(tensors, r"0\.(\d+)\.linear\.weight")
    last, own = len(blocks), f"0.{len(blocks)}.weight"
    head = MedusaHead((), _vocabulary(tensors, own), width=tensors["0.0.linear.weight"].shape[0], heads=heads,
                      blocks=last, own_head=own in tensors)
    names: dict[str, str] = {}
    for i in range(heads):
        for part in ("weight", "bias"):
            same(tensors, [f"{i}.{j}.linear.{part}" for j in blocks])
        names |= {f"heads.{i}.block.kernel": f"{i}.0.linear.weight", f"heads.{i}.block.bias": f"{i}.0.linear.bias",
                  f"heads.{i}.head.kernel": f"{i}.{last}.weight"}
    return head, placed(tensors, head, names, dtype)


def read_hydra(tensors: Tensors, dtype: Any, target: DecoderConfig | None = None) -> tuple[HydraHead, Any]:
    """Returns the heads of a Hydra file (`hydra_lm_head.pt`) of the architecture "mlp", or "prefix-mlp" (Hydra++) for a
    target of whose shape its first layer is.

    Raises:
        CheckpointError: another architecture, or Hydra++ without the target's configuration.
    """
    if tensors.config.get("grounded_heads") is False:
        raise CheckpointError(f"{tensors.name}: grounded_heads is false, so its heads do not read the tokens drafted "
                              "before; supported are heads that do")
    if (kind := tensors.config.get("hydra_head_arch", "mlp")) not in ("mlp", "prefix-mlp"):
        raise CheckpointError(f"{tensors.name}: hydra_head_arch is {kind!r}, supported are 'mlp' and 'prefix-mlp'")
    if (prefixed := kind == "prefix-mlp") and target is None:
        raise CheckpointError(f"{tensors.name}: leaves the shape of its first layer to the target, takes "
                              "load_drafter(DIRECTORY, lm)")
    heads = _heads(tensors, r"hydra_mlp\.(\d+)\.\d+\.linear\.weight", "hydra_mlp.0.1.linear.weight")
    first, *rest = _numbers(tensors, r"hydra_mlp\.0\.(\d+)\.linear\.weight")     # between them were dropouts
    stem = "hydra_lm_head.{}" if "hydra_lm_head.0.weight" in tensors else "hydra_lm_head.{}.1"      # after a dropout
    own = f"{stem.format(0)}.weight"
    vocab, theirs = _vocabulary(tensors, own), "prefix_embeding_layer."      # spelling as is
    head = HydraHead((), vocab, width=tensors[f"hydra_mlp.0.{first}.linear.weight"].shape[0], heads=heads,
                     blocks=1 + len(rest), own_head=own in tensors,
                     prefix=plain_layers(target, vocab) if prefixed and target is not None else None)
    names = {f"prefix.{name}": of for name, of in layer_names(f"{theirs}layers.", 1).items()}
    names["prefix.norm.scale"] = f"{theirs}norm.weight"
    tensors.skip(f"{theirs}embed_tokens.weight", f"{theirs}layers.0.self_attn.rotary_emb.inv_freq")
    for i in range(heads):
        block = f"hydra_mlp.{i}"
        for ours, part in (("residual", f"{first}.res_connection"), ("first", f"{first}.linear"),
                           *([("block", f"{rest[0]}.linear")] if rest else [])):
            names |= {f"heads.{i}.{ours}.kernel": f"{block}.{part}.weight",
                      f"heads.{i}.{ours}.bias": f"{block}.{part}.bias"}
        names |= {f"heads.{i}.head.kernel": f"{stem.format(i)}.weight",
                  f"heads.{i}.head.bias": f"{stem.format(i)}.bias"}
        for part in ("weight", "bias"):
            same(tensors, [f"{block}.{j}.linear.{part}" for j in rest])
    return head, placed(tensors, head, names, dtype)


def read_mlp_speculator(tensors: Tensors, dtype: Any) -> tuple[MLPSpeculatorHead, Any]:
    """Returns an MLP speculator (`model_type` "mlp_speculator"); tied weights are repeated in the file. `n_candidates`
    and `top_k_tokens_per_head` do not belong to the network: the entry `mlp-speculator` takes them as options."""
    config = tensors.config
    heads, tied = int(config["n_predict"]), bool(config.get("tie_weights", False))
    inner = int(config.get("inner_dim") or config["emb_dim"])
    head = MLPSpeculatorHead((), int(config["vocab_size"]), width=int(config["emb_dim"]), heads=heads, inner=inner,
                             tied=tied, scale_input=bool(config.get("scale_input", False)))
    own = lambda part, i: f"speculator.{part}.{i}"
    names: dict[str, str] = {}
    for i in range(min(heads, 2) if tied else heads):
        names[f"project.{i}.kernel"] = f"{own('proj', i)}.weight"
    for i in range(1 if tied else heads):
        names |= {f"norm.{i}.scale": f"{own('ln', i)}.weight", f"norm.{i}.shift": f"{own('ln', i)}.bias",
                  f"embed.{i}.table": f"{own('emb', i)}.weight", f"head.{i}.kernel": f"{own('head', i)}.weight"}
    if tied:
        for part, kind in (("emb", "weight"), ("head", "weight"), ("ln", "weight"), ("ln", "bias"), ("proj", "weight")):
            each = [f"{own(part, i)}.{kind}" for i in range(part == "proj", heads)]
            same(tensors, [name for name in each if name in tensors])
    return head, placed(tensors, head, names, dtype)
