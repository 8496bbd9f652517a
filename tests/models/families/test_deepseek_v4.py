"""DeepSeek V4: released files, pooled keys of long texts, caches, and what is refused. Logits, drafts and trees of a
small case are in `test_families`, shares of the residual streams in `test_hyper_connections`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

import decodax as dx
from decodax.core.window import causal
from decodax.io.files import CheckpointError
from decodax.io.saving import save_model
from decodax.models.compressed.options import PoolIndex, Pooling
from decodax.models.compressed.pooling import pooled
from decodax.models.families import read_config
from decodax.models.names import flatten
from decodax.models.packed import Packed
from tests.io.quantised.test_quantised_checkpoints import assert_same_weights
from tests.io.quantised.writer import float8, mxfp4, write_safetensors
from tests.models.tiny import CASES, COMMON, V4, build, saved, write

CONFIG: dict[str, Any] = {"model_type": "deepseek_v4", **COMMON, **CASES["deepseek-v4"][1]}
PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8, 5], [9, 10, 11], [1, 2]]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("deepseek_v4")
    saved("deepseek-v4", root)
    return root


def copy(home: Path, root: Path, change: Any) -> Path:
    """Writes the directory with `change(tensors)`."""
    save_file(change(load_file(home / "model.safetensors")), root / "model.safetensors", {"format": "pt"})
    (root / "config.json").write_text((home / "config.json").read_text())
    return root


def released(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The names of DeepSeek's own files, in which transformers 5.24 also renames a norm and the ends of the model."""
    swap = {"embed_tokens.": "embed.", ".attn.norm.": ".attn.kv_norm.", "hc_head.hc_": "hc_head_"}
    found = {}
    for name, x in tensors.items():
        for theirs, own in swap.items():
            name = name.replace(theirs, own)
        found[name.removeprefix("model.")] = x
    return found


def test_the_released_layout_is_read_and_layers_for_further_tokens_are_skipped(home: Path, tmp_path: Path) -> None:
    more = {"mtp.0.attn.wkv.weight": np.zeros((16, 32), np.float32), "mtp.0.e_proj.weight": np.ones(1, np.float32)}
    copy(home, tmp_path, lambda tensors: released(tensors) | more)
    with pytest.warns(UserWarning, match=r"skips 2 tensors of layers that predict further tokens, such as mtp\.0\.att"):
        again = dx.load(tmp_path)
    lm = dx.load(home)
    assert again.model == lm.model
    for path, leaf in flatten(again.params).items():
        np.testing.assert_array_equal(leaf, flatten(lm.params)[path])


def test_a_directory_is_written_in_the_released_layout(home: Path, tmp_path: Path) -> None:
    lm = dx.load(home)
    save_model(tmp_path, lm.model, lm.params, json.loads((home / "config.json").read_text()))
    wanted = released(load_file(home / "model.safetensors"))
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == wanted.keys()
    for name, x in found.items():
        np.testing.assert_array_equal(x, wanted[name])
        assert x.dtype == wanted[name].dtype, name
    assert dx.load(tmp_path).model == lm.model


@pytest.mark.wide
def test_released_weights_in_8_and_4_bits_are_the_dequantised_ones(monkeypatch: pytest.MonkeyPatch,
                                                                    tmp_path: Path) -> None:
    """Blocks of 128 x 128 in FP8 with powers of two, experts in MXFP4, and parts of the attention that stay floats."""
    wide = {**V4, "hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 32, "head_dim": 64}
    monkeypatch.setitem(CASES, "wide", ("deepseek_v4", wide, None))
    saved("wide", tmp_path)
    tensors = released(load_file(tmp_path / "model.safetensors"))
    made, plain, kinds = dict(tensors), dict(tensors), set()
    for name, x in tensors.items():
        stem, _, last = name.rpartition(".")
        if last != "weight" or x.ndim != 2 or re.search(r"compressor|weights_proj|gate|embed|head", name):
            continue
        if ".experts." in name:
            codes, plain[name] = mxfp4(stem, x)
            made[name] = codes[f"{stem}.weight_packed"].view(np.int8)
            scale = codes[f"{stem}.weight_scale"]
        else:
            codes, plain[name] = float8(stem, x, (128, 128), "scale")
            scale = np.log2(codes[f"{stem}.scale"]).round() + 127
            made[name] = codes[f"{stem}.weight"]
            plain[name] = made[name].astype(np.float32) * np.repeat(np.repeat(
                2.0 ** (scale - 127), 128, 0)[:len(x)], 128, 1)[:, :x.shape[1]]
        made[f"{stem}.scale"] = scale.astype(np.uint8).view(ml_dtypes.float8_e8m0fnu)
        kinds.add(made[name].dtype.name)
    assert kinds == {"int8", "float8_e4m3fn"}
    entries = json.loads((tmp_path / "config.json").read_text())
    save_file(plain, tmp_path / "model.safetensors", {"format": "pt"})
    want = dx.load(tmp_path, dtype="float32").params
    (tmp_path / "config.json").write_text(json.dumps({**entries, "expert_dtype": "fp4", "quantization_config": {
        "quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "activation_scheme": "dynamic",
        "weight_block_size": [128, 128]}}))
    write_safetensors(tmp_path / "model.safetensors", made)
    found = dx.load(tmp_path, dtype="float32").params
    assert_same_weights(found, want)
    assert {type(flatten(found)[f"layers.1.{path}.kernel"]).__name__ for path in ("attn.q_a", "mlp.up")} == {
        "Scaled", "Mxfp4Blocks"}


@pytest.mark.parametrize(("dtype", "value"), [(np.int64, 4), (np.int32, -1), (np.float32, 7)])
def test_a_table_of_experts_with_other_numbers_is_refused(home: Path, tmp_path: Path, dtype: Any, value: int) -> None:
    name = "model.layers.0.ffn.gate.tid2eid"

    def change(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        tensors[name] = tensors[name].astype(dtype)
        tensors[name][5, 1] = value
        return tensors

    with pytest.raises(CheckpointError, match=rf"tensor {name}: got numbers from .* to .*, takes 0 to 3"):
        dx.load(copy(home, tmp_path, change))


def test_defaults_and_earlier_entries() -> None:
    theirs = transformers.AutoConfig.for_model("deepseek_v4").to_dict()
    assert read_config({"model_type": "deepseek_v4"}) == read_config(theirs)
    yarn = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65_536, "beta_fast": 32, "beta_slow": 1}
    old = {"num_hidden_layers": 4, "compress_ratios": [0, 4, 128, 4], "num_hash_layers": 2, "qk_rope_head_dim": 64,
           "rope_scaling": yarn, "compress_rope_theta": 160_000, "topk_method": "noaux_tc", "compress_rate_csa": 8}
    new = transformers.AutoConfig.for_model("deepseek_v4", **old).to_dict()
    found = read_config({"model_type": "deepseek_v4", **old})
    assert found == read_config(new)
    assert [layer.rope.scaling is not None for layer in found.layers] == [False, True, True, True]
    assert [layer.recurrent and layer.recurrent.every for layer in found.layers] == [None, 8, 128, 8]


@pytest.mark.parametrize(("entries", "message"), [
    ({"layer_types": ["full_attention"] * 4}, "layer_types: got .* takes for each layer one of 'sliding_attention'"),
    ({"layer_types": ["sliding_attention"]}, "layer_types: got .* for num_hidden_layers = 4"),
    ({"layer_types": None, "compress_ratios": [0, 4, 16, 4]}, r"compress_ratios: got \[0, 4, 16, 4\], takes a list of"),
    ({"mlp_layer_types": ["moe", "dense", "moe", "moe"]}, "mlp_layer_types: got .* takes 'hash_moe' or 'moe'"),
    ({"compress_rates": {"other_attention": 3}}, "compress_rates: got .*'other_attention'"),
    ({"compress_rates": {"compressed_sparse_attention": 0}}, r"compress_rates\.compressed_sparse_attention: got 0"),
    ({"num_key_value_heads": 2}, "num_key_value_heads: got 2, supported is 1"),
    ({"n_shared_experts": 2}, "n_shared_experts: got 2, supported is 1"),
    ({"norm_topk_prob": False}, "norm_topk_prob: got False, supported is True"),
    ({"scoring_func": "softmax"}, "scoring_func: got 'softmax', supported are"),
    ({"hidden_act": "gelu"}, "hidden_act: got 'gelu', supported is 'silu'"),
    ({"mlp_bias": True}, "mlp_bias: got True, supported is False"),
    ({"o_groups": 3}, "o_groups: got 3, takes a divisor of num_attention_heads = 4"),
    ({"index_head_dim": 6}, "index_head_dim: got 6, takes at least the number of rotated channels, 8"),
    ({"sliding_window": None}, "sliding_window: got None, takes the number of tokens"),
    ({"hc_mult": 0}, "hc_mult: got 0, takes a whole number from 1"),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_parameters: got .* does not depend on the"),
])
def test_other_entries_are_refused(entries: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_config({**CONFIG, **entries})


def test_a_mean_is_the_one_of_the_rule() -> None:
    """Values of the group before come from the first half of the channels, those of the group from the second."""
    rule, draw = Pooling(3, 2, True, PoolIndex(1, 1, 1)), np.random.default_rng(0)
    x, bias = draw.normal(size=(6, sum(rule.inputs))), draw.normal(size=(3, 6))
    for first in (0, 3):                # all tokens of the group before, or none
        got = pooled(rule, jnp.asarray(x), jnp.arange(6) >= first, jnp.asarray(bias))
        for out, value, score, b in ((0, 0, 4, 0), (1, 1, 5, 1), (2, 8, 10, 4)):
            wide = 2 if out < 2 else 1
            column = [(x[t, value + (wide if t >= 3 else 0)], x[t, score + (wide if t >= 3 else 0)]
                       + bias[t % 3, b + (wide if t >= 3 else 0)]) for t in range(first, 6)]
            weights = np.exp([z for _, z in column])
            np.testing.assert_allclose(got[out], (weights * [c for c, _ in column]).sum() / weights.sum(), rtol=1e-5)


LONG = {**V4, "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
        "index_topk": 20, "sliding_window": 128, "max_position_embeddings": 1024, "num_hidden_layers": 3,
        "layer_types": V4["layer_types"][1:]}


@pytest.mark.wide
def test_long_texts_with_the_released_sizes_of_groups_equal_transformers(monkeypatch: pytest.MonkeyPatch,
                                                                         tmp_path: Path) -> None:
    """Several loops over groups in one window, windows that end within groups, and groups that windows divide."""
    monkeypatch.setitem(CASES, "long", ("deepseek_v4", LONG, None))
    reference = build("long")
    write(reference, tmp_path)
    lm = dx.load(tmp_path)
    model, params, T = lm.model, lm.params, 560
    tokens = np.random.default_rng(1).integers(3, 97, (2, T)).astype(np.int32)
    with torch.no_grad():
        want = reference(input_ids=torch.tensor(tokens, dtype=torch.long), use_cache=False).logits.numpy()
    np.testing.assert_allclose(jax.jit(model.forward)(params, tokens), want, atol=1e-4)

    @jax.jit(static_argnums=2)
    def read(window: Any, cache: Any, is_prefill: bool) -> Any:
        out = model.apply(params, window.replace(is_prefill=is_prefill), cache)
        logits = out.logits()
        return logits, cache.commit(out.entries, window.positions + 0 * logits.argmax(-1))

    cache, at, found = jax.device_put(model.init_cache(2, 640), jax.devices()[0]), 0, []
    for width in (130, 300, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 60):
        logits, cache = read(causal(tokens[:, at:at + width], jnp.full(2, at)), cache, width > 7)
        found.append(logits)
        at += width
    assert at == T
    np.testing.assert_allclose(jnp.concatenate(found, 1), want, atol=1e-4)


def run(lm: dx.LM, **options: Any) -> list[list[int]]:
    return dx.generate(lm, PROMPTS, max_new_tokens=10, eos_token_id=[], seed=3, **options).tokens.tolist()


@pytest.mark.full
def test_pages_trees_of_a_draft_model_and_samples_change_nothing(home: Path) -> None:
    lm = dx.load(home)
    options = dict(num_samples=2, temperature=0.8)
    plain = run(lm, **options)
    trees = dx.Speculative(dx.drafts.DraftModel(lm), shape=dx.trees.Fixed.balanced(2, 2))
    assert run(lm, algorithm=trees, **options) == plain
    assert run(lm, cache="paged:page=4,pages=64", algorithm="prompt-lookup:length=3", **options) == plain


def test_a_token_takes_its_key_and_the_keys_of_its_group(home: Path) -> None:
    """Beside them the last tokens' projections: of two groups of 2 but one, and of a group of 5 but one."""
    cache = dx.load(home).model.init_cache(3, 64)
    assert [x.shape for x in cache.base.kv] == [(3, 1, 64, n) for n in (16, 16 + 16 + 12, 16 + 16, 16 + 16 + 12)]
    assert [ring[0].shape for ring in cache.linear.rings] == [(3, 3, 4 * 16 + 4 * 12), (3, 4, 2 * 16), (3, 3, 112)]


@pytest.mark.parametrize("cache", ["knorm", "snapkv", "h2o", "kivi", "quest", "sink-window"])
def test_caches_without_all_keys_by_position_are_refused(home: Path, cache: str) -> None:
    with pytest.raises(ValueError, match=rf"cache: {cache} takes a model"):
        run(dx.load(home), cache=cache)


def test_embeddings_and_methods_that_need_single_layers_or_heads_are_refused(home: Path) -> None:
    lm = dx.load(home)
    given = dx.models.Embeddings(values=jnp.zeros((1, 4, 32)), given=jnp.ones((1, 4), bool))
    with pytest.raises(ValueError, match="inputs: got embeddings, takes tokens"):
        dx.generate(lm, [[1, 2, 3, 4]], inputs=given, max_new_tokens=2)
    with pytest.raises(ValueError, match="several residual streams"):
        lm.model.pieces(lm.params)
    with pytest.raises(ValueError, match="narrow the outputs of heads, so several matrices"):
        lm.model.outputs(lm.params, 0)


@pytest.mark.wide
def test_weights_may_be_packed(home: Path) -> None:
    packed, tokens = dx.load(home, weights="int8"), np.random.default_rng(0).integers(3, 97, (1, 12))
    want = jax.jit(packed.model.forward)(packed.params, tokens)
    window, cache = causal(tokens, jnp.zeros(1, jnp.int32)), packed.model.init_cache(1, 16)
    got = jax.jit(lambda params: packed.model.apply(params, window, cache).logits())(packed.params)
    np.testing.assert_allclose(got, want, atol=1e-4)
    assert isinstance(flatten(packed.params)["layers.1.attn.o_a.kernel"], Packed)
    kept = [path for path, leaf in flatten(packed.params).items() if re.search(r"hashed|_hc\.|bias", path)]
    assert len(kept) > 20 and all(flatten(packed.params)[path].dtype == jnp.float32 for path in kept)


def test_in_16_bits_what_decides_stays_float32(home: Path) -> None:
    leaves = flatten(dx.load(home, dtype="bfloat16").params)
    wide = {path for path, leaf in leaves.items() if not isinstance(leaf, Packed) and leaf.dtype == jnp.float32}
    assert {path for path in leaves if re.search(r"hashed|correction|_hc\.|streams\.", path)} == wide


