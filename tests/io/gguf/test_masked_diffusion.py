"""GGUF files of masked diffusion models hold the networks and the settings of the checkpoints."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import decodax as dx
from decodax.io.files import CheckpointError
from decodax.models.names import flatten
from tests.io.gguf.converting import Kind, converted, permuted
from tests.models import tiny_diffusion

PLACES = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "attn_out": "attn_output",
          "attn_norm": "attn_norm", "ff_norm": "ffn_norm", "ff_proj": "ffn_gate", "up_proj": "ffn_up",
          "ff_out": "ffn_down"}


def llada(name: str, x: np.ndarray, c: dict[str, Any]) -> dict[str, np.ndarray]:
    """Renames OLMo's tensors, and puts rotated halves into pairs of neighbours."""
    first, *more = name.removeprefix("model.transformer.").split(".")
    if first != "blocks":
        return {{"wte": "token_embd.weight", "ln_f": "output_norm.weight", "ff_out": "output.weight"}[first]: x}
    heads = {"q_proj": c["n_heads"], "k_proj": c["n_kv_heads"]}.get(more[1])
    return {f"blk.{more[0]}.{PLACES[more[1]]}.weight": permuted(x, heads) if heads else x}


def entries(c: dict[str, Any], tensors: Any) -> dict[str, Any]:
    shift = {} if c["model_type"] == "Dream" else {"diffusion.shift_logits": False}
    named = {"embedding_length": "d_model", "feed_forward_length": "mlp_hidden_size",
             "attention.head_count": "n_heads", "attention.head_count_kv": "n_kv_heads", "block_count": "n_layers",
             "context_length": "max_sequence_length"}
    return {**{key: c[name] for key, name in named.items() if name in c}, **shift, "attention.causal": False,
            "tokenizer.ggml.mask_token_id": c["mask_token_id"]}


def mixture(c: dict[str, Any], tensors: Any) -> dict[str, Any]:
    return {**entries(c, tensors), "expert_count": c["num_experts"], "expert_used_count": c["num_experts_per_tok"],
            "expert_feed_forward_length": c["expert_intermediate_size"], "feed_forward_length": 48}


KINDS = {"dream": Kind("dream", "", entries), "llada": Kind("llada", "", entries, llada),
         "llada-moe": Kind("llada-moe", "", mixture)}


def written(name: str, directory: Path, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> Path:
    changes = {}
    if name == "llada-moe":     # as in released files, all layers are mixtures
        monkeypatch.setitem(tiny_diffusion.MIXTURES["qwen3_moe"], "mlp_only_layers", [])
        changes = {"moe_layer_freq": [1, 1]}
    tiny_diffusion.saved(name, directory, **changes)
    return converted(directory, kind, {**tiny_diffusion.CASES[name][0], **changes})


@pytest.mark.wide
@pytest.mark.parametrize("name", KINDS)
def test_a_file_holds_the_network_and_its_settings(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm, wanted = dx.load(written(name, tmp_path, KINDS[name], monkeypatch)), dx.load(tmp_path)
    assert lm.diffusion == wanted.diffusion and lm.model.config == wanted.model.config
    ours, theirs = flatten(lm.params), flatten(wanted.params)
    assert ours.keys() == theirs.keys()
    for path, leaf in theirs.items():
        np.testing.assert_allclose(ours[path], leaf, atol=1e-6, rtol=1e-5, err_msg=path)


@pytest.mark.wide
def test_another_alignment_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = dataclasses.replace(KINDS["dream"], metadata=lambda c, t: {**entries(c, t), "diffusion.shift_logits": False})
    with pytest.raises(CheckpointError, match=r"diffusion\.shift_logits: got False, takes True for dream"):
        dx.load(written("dream", tmp_path, kind, monkeypatch))
