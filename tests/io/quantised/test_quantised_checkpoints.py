"""Quantised checkpoints in Hugging Face layout: a loaded network has the dequantised weights, packed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.io.checkpoint import load_model
from decodax.io.files import CheckpointError
from decodax.models.names import flatten
from decodax.models.packed import Packed
from tests.io.quantised.writer import EXPERTS, FUSED, KINDS, LLAMA, TIED, Tensors, Written, write_checkpoint
from tests.matrix import often

FAMILIES = {"llama": LLAMA, "fused": FUSED, "tied": TIED, "experts": EXPERTS}
OFTEN = [("gptq", "llama"), ("gptq-act-order", "experts"), ("awq", "fused"), ("w4a16-asym", "experts"),
         ("w8a8", "tied"), ("mxfp4", "experts"), ("nvfp4", "fused"), ("modelopt-nvfp4", "experts"), ("mxfp8", "tied"),
         ("fp8", "experts"), ("fp8", "fused"), ("nf4-double", "fused"),
         ("bnb-8", "llama")]


def weights_of(params: Any) -> dict[str, np.ndarray]:
    values = lambda path, leaf: leaf.values(jnp.float32) if path == "embed" else jnp.swapaxes(
        leaf.values(jnp.float32), -1, -2)
    return {path: np.asarray(values(path, leaf) if isinstance(leaf, Packed) else leaf)
            for path, leaf in flatten(params).items()}


def assert_same_weights(one: Any, other: Any) -> None:
    one, other = weights_of(one), weights_of(other)
    assert one.keys() == other.keys()
    for path in one:
        np.testing.assert_allclose(one[path], other[path], atol=1e-7, err_msg=path)


def described(written: Written, **entries: Any) -> None:
    path = written.quantised / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


@pytest.mark.parametrize(("kind", "family"), often(OFTEN, [(kind, family) for kind in KINDS for family in FAMILIES]))
@pytest.mark.wide(but=("awq-fused", "fp8-experts", "bnb-8-llama"))
def test_weights_are_the_dequantised_ones(kind: str, family: str, tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path, kind, FAMILIES[family])
    params, plain = load_model(written.quantised, "float32")[1], load_model(written.plain, "float32")[1]
    assert_same_weights(params, plain)
    packed = [path for path, leaf in flatten(params).items() if isinstance(leaf, Packed)]
    # Layers of attention and MLP, the table of embeddings and a head in 16 bits.
    assert len(packed) == 2 * 7 + (1 if family == "tied" else 2)


@pytest.mark.parametrize(("kind", "family"), [("gptq-act-order", "experts"), ("nf4", "fused")])
@pytest.mark.wide
def test_a_packed_model_decodes_as_its_dequantised_one_and_is_saved(kind: str, family: str, tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path, kind, FAMILIES[family])
    lm, plain = dx.load(written.quantised), dx.load(written.plain)
    prompts = [[5, 17, 3, 60, 8], [9, 2]]
    wanted = dx.generate(plain, prompts, max_new_tokens=6)
    assert (dx.generate(lm, prompts, max_new_tokens=6).tokens == wanted.tokens).all()
    texts = [[5, 17, 3, 60, 8, 7, 7, 1]]
    np.testing.assert_allclose(dx.score(lm, texts).logprobs[0], dx.score(plain, texts).logprobs[0], atol=1e-4)
    dx.save(lm, tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    again = dx.load(tmp_path / "saved")
    jax.tree.map(np.testing.assert_array_equal, again.params, lm.params)
    assert (dx.generate(again, prompts, max_new_tokens=6).tokens == wanted.tokens).all()


def test_layers_that_are_not_converted_stay_as_they_are(tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path, "awq", LLAMA, left=("layers.1.mlp", "k_proj"))
    params = load_model(written.quantised, "float16")[1]
    assert_same_weights(params, load_model(written.plain, "float32")[1])
    layers = params["layers"]
    assert isinstance(layers["1"]["attn"]["q"]["kernel"], Packed)
    assert not isinstance(layers["1"]["mlp"]["up"]["kernel"], Packed)
    assert not isinstance(layers["0"]["attn"]["k"]["kernel"], Packed)


def test_a_quantised_head_and_table(tmp_path: Path) -> None:
    """A head is a layer like others; a table of embeddings may be quantised as well."""
    written, writer = write_checkpoint(tmp_path, "w8a8", LLAMA), KINDS["w8a8"][1]
    weights = {}

    def change(tensors: Tensors) -> None:
        for stem in ("lm_head", "model.embed_tokens"):
            made, weights[stem] = writer(stem, tensors.pop(f"{stem}.weight").astype(np.float32))
            tensors |= made

    written.rewrite(change)
    params = load_model(written.quantised, "float32")[1]
    np.testing.assert_array_equal(params["lm_head"]["kernel"].values(jnp.float32), weights["lm_head"])
    np.testing.assert_array_equal(params["embed"].values(jnp.float32), weights["model.embed_tokens"])


def test_a_quantised_router_becomes_an_array_and_the_load_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture
                                                                  ) -> None:
    written, writer = write_checkpoint(tmp_path, "fbgemm", EXPERTS), KINDS["fbgemm"][1]
    stem = "model.layers.1.mlp.gate"
    made, wanted = writer(stem, written.tensors()[f"{stem}.weight"].astype(np.float32))
    written.rewrite(lambda tensors: tensors.update(made))
    params = load_model(written.quantised, "float32")[1]
    np.testing.assert_array_equal(params["layers"]["1"]["mlp"]["router"]["kernel"], wanted.T)
    assert "1 weights (layers.1.mlp.router.kernel) become float32, since routers and the like" in caplog.text


def test_the_load_says_which_codes_take_more_bits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_model(write_checkpoint(tmp_path / "3", "gptq-3", LLAMA).quantised, "float32")
    assert "weights that take more memory than in the file: codes of 3 bits take 4" in caplog.text
    caplog.clear()
    load_model(write_checkpoint(tmp_path / "4", "gptq", LLAMA).quantised, "float32")
    assert not caplog.text


def test_biases_of_zeros_in_older_files_are_left_out(tmp_path: Path) -> None:
    written, stem = write_checkpoint(tmp_path, "gptq", LLAMA), "model.layers.0.mlp.up_proj"
    written.rewrite(lambda tensors: tensors.update({f"{stem}.bias": np.zeros(96, np.float16)}))
    load_model(written.quantised)
    written.rewrite(lambda tensors: tensors.update({f"{stem}.bias": np.ones(96, np.float16)}))
    with pytest.raises(CheckpointError, match=r"holds tensor model\.layers\.0\.mlp\.up_proj\.bias, which"):
        load_model(written.quantised)


def test_scales_of_activations_are_left_out(tmp_path: Path) -> None:
    written, stem = write_checkpoint(tmp_path, "fp8-tensor", LLAMA), "model.layers.0.mlp.up_proj"
    written.rewrite(lambda tensors: tensors.update({f"{stem}.input_scale": np.ones((), np.float32)}))
    assert_same_weights(load_model(written.quantised, "float32")[1], load_model(written.plain, "float32")[1])


def test_the_configuration_may_lie_in_a_file_beside(tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path, "gptq", LLAMA)
    config = json.loads((written.quantised / "config.json").read_text())
    (written.quantised / "quantize_config.json").write_text(json.dumps(
        {key: value for key, value in config.pop("quantization_config").items() if key != "quant_method"}))
    (written.quantised / "config.json").write_text(json.dumps(config))
    assert isinstance(dx.load(written.quantised).params["layers"]["0"]["mlp"]["up"]["kernel"], Packed)


TOGETHER = {**{key: value for key, value in EXPERTS.items() if key != "decoder_sparse_step"},
            "model_type": "qwen3_vl_moe_text", "mlp_only_layers": []}
"""A mixture whose experts are in one tensor, `[E, K, N]`, gates before the rest."""


def test_experts_in_one_tensor(tmp_path: Path) -> None:
    written, writer = write_checkpoint(tmp_path, "fp8", TOGETHER, left=("experts",)), KINDS["fp8"][1]
    plain, wanted = written.tensors(), {}

    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".experts." in name]:
            made = [writer("x", w.astype(np.float32).T) for w in tensors.pop(name)]
            tensors[name] = np.stack([own["x.weight"].T for own, _ in made])
            tensors[f"{name}_scale_inv"] = np.stack([own["x.weight_scale_inv"].T for own, _ in made])
            wanted[name] = np.stack([values.T for _, values in made])

    written.rewrite(change)
    assert len(wanted) == 4 and plain.keys() >= wanted.keys()
    mlp = load_model(written.quantised, "float32")[1]["layers"]["1"]["mlp"]
    stem = "model.layers.1.mlp.experts"
    gate, up = np.split(wanted[f"{stem}.gate_up_proj"], 2, -1)
    for part, values in (("gate", gate), ("up", up), ("down", wanted[f"{stem}.down_proj"])):
        np.testing.assert_array_equal(mlp[part]["kernel"].values(jnp.float32), np.swapaxes(values, -1, -2))


def test_experts_that_were_quantised_one_by_one(tmp_path: Path) -> None:
    written, writer = write_checkpoint(tmp_path, "w4a16", TOGETHER, left=("experts",)), KINDS["w4a16"][1]
    wanted = {}

    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".experts." in name]:
            for e, w in enumerate(tensors.pop(name)):
                parts = zip(("gate", "up"), np.split(w, 2, -1), strict=True) if "gate_up" in name else [("down", w)]
                for part, own in parts:
                    stem = f"{name.rpartition('.')[0]}.{e}.{part}_proj"
                    made, wanted[stem] = writer(stem, own.astype(np.float32).T)
                    tensors |= made

    written.rewrite(change)
    mlp = load_model(written.quantised, "float32")[1]["layers"]["0"]["mlp"]
    for part in ("gate", "up", "down"):
        np.testing.assert_array_equal(mlp[part]["kernel"].values(jnp.float32), np.stack([
            wanted[f"model.layers.0.mlp.experts.{e}.{part}_proj"] for e in range(4)]))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return write_checkpoint(tmp_path_factory.mktemp("whole"), "gptq", EXPERTS)


@pytest.fixture
def small(whole: Written, tmp_path: Path) -> Written:
    shutil.copytree(whole.quantised, tmp_path / "quantised")
    return Written(tmp_path / "quantised", whole.plain, whole.weights)


def test_a_missing_tensor_is_named(small: Written) -> None:
    stem = "model.layers.1.mlp.experts.2.down_proj"
    small.rewrite(lambda tensors: tensors.pop(f"{stem}.scales"))
    with pytest.raises(CheckpointError, match=f"lacks tensor {stem}.scales, which its quantization requires"):
        load_model(small.quantised)
    small.rewrite(lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith(f"{stem}.")])
    with pytest.raises(CheckpointError, match=f"experts.0.down_proj is quantised and {stem} is not; takes experts of"):
        load_model(small.quantised)


def test_a_model_optimizer_file_beside_the_configuration_is_read(tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path, "modelopt-nvfp4", LLAMA)
    path = written.quantised / "config.json"
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items()
                                if key != "quantization_config"}))
    (written.quantised / "hf_quant_config.json").write_text(json.dumps({
        "producer": {"name": "modelopt", "version": "0.47.0"},
        "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16}}))
    cache = {f"model.layers.0.self_attn.{side}_proj.{side}_scale": np.ones((), np.float32) for side in "kv"}
    written.rewrite(lambda tensors: tensors.update(cache))
    assert_same_weights(load_model(written.quantised, "float32")[1], load_model(written.plain, "float32")[1])
    name = "model.layers.1.mlp.down_proj.pre_quant_scale"
    written.rewrite(lambda tensors: tensors.update({name: np.ones(96, np.float32)}))
    with pytest.raises(CheckpointError, match=f"tensor {name}: got a factor for each input, takes layers without one"):
        load_model(written.quantised)


def test_tensors_of_no_layer_are_named(small: Written) -> None:
    small.rewrite(lambda tensors: tensors.update({"model.layers.0.mlp.extra_proj.qweight": np.zeros((8, 4), np.int32)}))
    with pytest.raises(CheckpointError, match=r"holds tensor model\.layers\.0\.mlp\.extra_proj\.qweight, which"):
        load_model(small.quantised)


@pytest.mark.parametrize(("entries", "said"), [
    ({"quant_method": "gptqq"}, "quantization_config.quant_method: got 'gptqq', takes 'fp8', .*; did you mean 'gptq'"),
    ({"quant_method": "hqq"}, r"quant_method: got 'hqq', takes .*; transformers' model.dequantize\(\) turns"),
    ({"quant_method": "gptq", "bits": 5}, "quantization_config.bits: got 5, takes 2, 3, 4 or 8"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size: got 0, takes -1 or a number from 1"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format: got 'marlin', takes 'gp"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 48}, "got 64 inputs, takes a multiple of the group_size 48"),
    ({"quant_method": "awq", "version": "gemv", "group_size": 32}, "version: got 'gemv', takes 'gemm'"),
    ({"quant_method": "bitsandbytes"}, "load_in_4bit, load_in_8bit: got None and None, takes one of them true"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size: got \[128\], takes two numbers"),
    ({"quant_method": "compressed-tensors", "format": "mxfp6-pack-quantized", "config_groups": {}},
     "format: got 'mxfp6-pack-quantized', takes 'pack-quantized'"),
    ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {
        "group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 32}}}},
     r"config_groups\.group_0\.weights: got group_size 32, symmetric None, format 'nvfp4-pack-quantized' takes 16"),
    ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "quant_algo: got 'W4A16_AWQ', takes 'NVFP4'"),
    ({"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"}, "quant_algo: got 'fp8_pb_wo', takes 'NVFP4'"),
    ({"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "config_groups": {
        "group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}}},
     r"config_groups\.group_0\.weights: got group_size 16, symmetric None, format 'mxfp4-pack-quantized' takes 32"),
    ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "config_groups: got None, takes an object"),
])
def test_a_format_that_is_not_read_is_named(entries: dict[str, Any], said: str, small: Written) -> None:
    described(small, quantization_config=entries)
    with pytest.raises(CheckpointError, match=said):
        load_model(small.quantised)


def test_weights_have_a_format_already(small: Written) -> None:
    with pytest.raises(ValueError, match=r"^weights: got 'int8', but the weights of 'quantised' are packed already"):
        dx.load(small.quantised, weights="int8")


def test_a_quantised_t5_is_refused(small: Written) -> None:
    described(small, model_type="t5")
    with pytest.raises(CheckpointError, match="got quantised weights, takes floats for model_type 't5'"):
        dx.load(small.quantised)
