"""Small GGUF files give the probabilities of llama.cpp (`pip install xllamacpp`), in float32 and without its flash
attention, which computes in 16 bits."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from tests.io.gguf.converting import KINDS, Kind, Tensors, converted, written
from tests.io.gguf.converting_more import MORE, RECURRENT
from tests.io.gguf.converting_new import NEW
from tests.io.gguf.test_recurrent import small

xllamacpp: Any = pytest.importorskip("xllamacpp")
pytestmark = pytest.mark.full
IDS = np.arange(3, 43) * 7 % 250 + 3
LENGTHS = (1, 5, 16, 33)


def half(name: str, y: np.ndarray, c: dict[str, Any]) -> dict[str, np.ndarray]:
    """Orders the channels of Bamba that are rotated, and not all of them, as llama.cpp takes them."""
    if (found := re.search(r"\.([qk])_proj\.weight$", name)) is None:
        return MORE["bamba"].change(name, y, c)
    heads = c["num_attention_heads" if found[1] == "q" else "num_key_value_heads"]
    turned = y.shape[0] // heads // 2
    first, second, rest = np.split(y.reshape(heads, -1, y.shape[1]), [turned // 2, turned], 1)
    pairs = np.stack([first, second], 2).reshape(heads, -1, y.shape[1])
    return {name: np.concatenate([pairs, rest], 1).reshape(y.shape)}


def without_experts(name: str, y: np.ndarray, c: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: y * 0 if ".w2." in name else y}


def unused_keys(c: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Adds what llama.cpp requires of layers that share keys and values, and does not use."""
    for i in range(c["num_hidden_layers"] - c["num_kv_shared_layers"], c["num_hidden_layers"]):
        for part in ("k_proj", "v_proj", "k_norm"):
            own = f"model.layers.{{}}.self_attn.{part}.weight"
            tensors[own.format(i)] = np.ones_like(tensors[own.format(0)])
    return MORE["gemma3n"].metadata(c, tensors)


def released(layers: int) -> dict[str, Any]:
    """The numbers of Gemma 3n that llama.cpp does not read from files."""
    return {**MORE["gemma3n"].more, "num_hidden_layers": layers, "intermediate_size": [2048] * layers,
            "layer_types": ([*["sliding_attention"] * 4, "full_attention"] * layers)[:layers], "altup_active_idx": 0,
            "num_kv_shared_layers": max(layers - 20, 0), "hidden_size_per_layer_input": 256, "laurel_rank": 64,
            "activation_sparsity_pattern": [0.95 if i < 10 else 0.0 for i in range(layers)],
            "final_logit_softcapping": 30.0}


ONE_GROUP = {"n_group": 1, "topk_group": 1, "topk_method": "greedy"}
DIFFERENT = {"phimoe", "deepseek-v2", "deepseek-v2-before", "bamba"}
"""Files with which llama.cpp computes something else than the model that they were made from; see the cases below."""
ROUGH = {"gemma3n": 0.01, "gpt-oss-mxfp4": 0.3, "falcon": 0.005, "falcon-40b": 0.005, "bloom": 0.005}
"""Bounds for files with which llama.cpp rounds: activations to 8 bits, or GELU to 16."""
REFUSED = {"qwen3.5", "qwen3.5-moe", "qwen3-next", "gptj", "kimi-linear-query"}
"""Files that llama.cpp does not load: it has no such architecture, or takes other widths than those of the tests."""
EQUAL: dict[str, Kind] = {
    **{name: kind for name, kind in {**KINDS, **MORE, **NEW, **RECURRENT}.items() if name not in DIFFERENT | REFUSED},
    **{f"{name}-one-group": dataclasses.replace(kind, more=kind.more | ONE_GROUP)
       for name, kind in (("deepseek-v2", KINDS["deepseek-v2"]), ("deepseek-v2-before", MORE["deepseek-v2-before"]))},
    "bamba-half": dataclasses.replace(MORE["bamba"], change=half),
    "gemma3n": dataclasses.replace(MORE["gemma3n"], metadata=unused_keys, more=released(3))}


def peer(path: Path) -> np.ndarray:
    """Returns llama.cpp's log-probabilities of the token after each of the prefixes."""
    p = xllamacpp.CommonParams()
    p.model.path, p.n_ctx, p.n_parallel, p.warmup = str(path), 64, 1, False
    p.cpuparams.n_threads = p.cpuparams_batch.n_threads = 1
    p.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    p.cache_type_k = p.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server, found = xllamacpp.Server(p), np.zeros((len(LENGTHS), 260))
    for row, length in zip(found, LENGTHS, strict=True):
        answer = server.handle_completions({
            "prompt": IDS[:length].tolist(), "n_predict": 1, "temperature": 1.0, "n_probs": 300, "logprobs": 300,
            "cache_prompt": False, "samplers": ["temperature"], "seed": 1})
        for each in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
            row[each["id"]] = each["logprob"]
    return found


def ours(lm: Any) -> np.ndarray:
    logits = jax.jit(lm.model.forward)(lm.params, jnp.asarray(IDS[None]))[0]
    return np.asarray(jax.nn.log_softmax(logits))[np.array(LENGTHS) - 1]


def made(name: str, kind: Kind, directory: Path) -> tuple[Path, Path]:
    if name not in RECURRENT:
        return written(kind, directory)
    model, home = small(name)
    return home, converted(home, kind, model.config.to_dict())


@pytest.mark.parametrize("name", EQUAL)
def test_probabilities_are_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    directory, file = made(name, EQUAL[name], tmp_path)
    lm = dx.load(directory if name == "bamba-half" else file)
    np.testing.assert_allclose(ours(lm), peer(file), atol=ROUGH.get(name, 1e-4))


@pytest.mark.parametrize("name", sorted(DIFFERENT))
def test_llama_cpp_still_computes_something_else(name: str, tmp_path: Path) -> None:
    file = written({**KINDS, **MORE}[name], tmp_path)[1]
    assert np.abs(ours(dx.load(file)) - peer(file)).max() > 0.02


def test_phimoe_without_experts_has_rms_norms_in_llama_cpp(tmp_path: Path) -> None:
    file = written(dataclasses.replace(KINDS["phimoe"], change=without_experts), tmp_path)[1]
    lm: Any = dx.load(file)
    config = lm.model.config
    model = dataclasses.replace(lm.model, config=dataclasses.replace(config, norm=dataclasses.replace(
        config.norm, kind="rms")))
    np.testing.assert_allclose(ours(dataclasses.replace(lm, model=model)), peer(file), atol=1e-4)


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v2-before"])
def test_groups_of_deepseek_v2_count_by_two_scores_in_llama_cpp(name: str, tmp_path: Path) -> None:
    file = written({**KINDS, **MORE}[name], tmp_path)[1]
    lm: Any = dx.load(file)
    layers = tuple(layer if layer.experts is None else dataclasses.replace(layer, experts=dataclasses.replace(
        layer.experts, group_score="top2")) for layer in lm.model.config.layers)
    model = dataclasses.replace(lm.model, config=dataclasses.replace(lm.model.config, layers=layers))
    np.testing.assert_allclose(ours(dataclasses.replace(lm, model=model)), peer(file), atol=1e-4)
