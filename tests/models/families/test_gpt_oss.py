"""GPT-OSS in the released layout: experts in MXFP4, which transformers widens and this library reads as stored."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

import decodax as dx
from decodax.io.checkpoint import CheckpointError, load_model
from decodax.models.formats.mxfp4 import Mxfp4Blocks
from tests.models.families.gpt_oss import as_released
from tests.models.tiny import CASES, saved

PROMPTS = [[5, 6, 7, 5, 6, 7, 5], [9], [3, 4, 3, 4, 3, 4, 3, 4, 3, 4, 3, 4]]
SIZES = {"hidden_size": 64, "intermediate_size": 96}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as OpenAI's: bfloat16 beside the bytes of the experts."""
    root = tmp_path_factory.mktemp("gpt-oss")
    CASES["gpt-oss-wide"] = CASES["gpt-oss"][0], CASES["gpt-oss"][1] | SIZES, None
    saved("gpt-oss-wide", root)
    del CASES["gpt-oss-wide"]
    as_released(root)
    return root


@pytest.fixture(scope="module")
def lm(home: Path) -> dx.LM:
    return dx.load(home)


def decoded(lm: dx.LM, prompts: list[list[int]] = PROMPTS, **more: Any) -> Any:
    return dx.generate(lm, prompts, max_new_tokens=9, eos_token_id=[], **more).tokens.tolist()


@pytest.mark.wide
def test_logits_and_greedy_tokens_are_those_of_the_widened_model(home: Path, lm: dx.LM) -> None:
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        home, quantization_config=transformers.Mxfp4Config(dequantize=True), dtype=torch.float32,
        attn_implementation="eager").eval()
    experts = lm.params["layers"]["0"]["mlp"]
    assert all(isinstance(experts[part]["kernel"], Mxfp4Blocks) for part in ("gate", "up", "down"))
    tokens = np.random.default_rng(0).integers(3, 97, (2, 22)).astype(np.int32)
    with torch.no_grad():
        wanted = reference(torch.tensor(tokens, dtype=torch.long), use_cache=False).logits.numpy()
    np.testing.assert_allclose(jax.jit(lm.model.forward)(lm.params, tokens), wanted, atol=1e-4)
    reference.generation_config.eos_token_id = None
    width = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in PROMPTS])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in PROMPTS])
    greedy = reference.generate(ids, attention_mask=mask, max_new_tokens=9, do_sample=False, pad_token_id=0)
    assert decoded(lm) == greedy[:, width:].tolist()


@pytest.mark.wide
def test_samples_share_a_prefill_and_chunks_change_no_token(lm: dx.LM) -> None:
    """Drafts in chains and trees are cases of `tests/laws/test_families.py`."""
    options = dict(temperature=0.9, seed=3, num_samples=2)
    samples = decoded(lm, PROMPTS[2:], **options)
    assert decoded(lm, PROMPTS[2:], cache="hydragen", chunk=4, **options) == samples


def test_a_tensor_of_another_shape_or_dtype_is_named(home: Path, tmp_path: Path) -> None:
    tensors = load_file(home / "model.safetensors")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    (tmp_path / "config.json").write_text((home / "config.json").read_text())
    for changed, wrong in ((f"{name}_scales", tensors[f"{name}_scales"][..., :1]),
                           (f"{name}_blocks", tensors[f"{name}_blocks"].astype(np.int8))):
        save_file(tensors | {changed: np.ascontiguousarray(wrong)}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=f"tensor {changed} is .*requires U8 of shape"):
            load_model(tmp_path)
