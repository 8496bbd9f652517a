"""Qwen4 beyond what every family has to do: rows of n-grams, files, caches, and options that do not fit."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_tensors
from transformers.models.qwen4_exp import modeling_qwen4_exp as published

import decodax as dx
from decodax.io.checkpoint import CheckpointError
from decodax.models import Embeddings, Transformer
from decodax.models.blocks.options import GroupIndex, Layer
from decodax.models.compressed.options import Pooling
from decodax.models.families import read_config
from decodax.models.names import flatten
from decodax.models.recurrent.options import GatedDelta, RgLru
from decodax.models.residual.ngrams import own_text, table_rows
from decodax.models.residual.options import HashedNGrams
from decodax.models.weight_source import stored_dtype
from decodax.train.tuning import losses_by_layer
from tests.models.families.tiny_qwen4 import QWEN4
from tests.models.tiny import CASES, COMMON, saved

CONFIG = {"model_type": "qwen4_exp_text", **COMMON, **QWEN4}
PROMPTS = [[5, 6, 7, 5, 6, 7, 5], [9], [3, 4, 3, 4, 3, 4, 3, 4, 3, 4, 3, 4]]
REAL = HashedNGrams(2048, 3, 8, 20_000_000, 1, 1234, 128, 248_044, 248_320, (4, 2048))
"""Sizes of the defaults of transformers, in the second layer with such embeddings."""


def test_rows_of_n_grams_are_those_of_whole_numbers_of_64_bits() -> None:
    theirs = published._build_layer_multipliers(REAL.vocab, REAL.size, REAL.number, REAL.seed)
    assert list(REAL.multipliers) == theirs.tolist()
    assert REAL.sizes[0] == published._find_nth_prime_after(REAL.base - 1, 17) and len(set(REAL.sizes)) == 16
    assert REAL.rows % 128 == 0 and 0 <= REAL.rows - sum(REAL.sizes) < 128
    tokens = np.random.default_rng(0).integers(0, REAL.vocab, (50, 3))
    tokens[:2] = [REAL.vocab - 1] * 3, [0] * 3
    want = []
    for row in tokens.tolist():
        found, mixed = [], row[0] * REAL.multipliers[0]
        for token, factor in zip(row[1:], REAL.multipliers[1:], strict=True):
            mixed ^= token * factor
            found += [mixed % size for size in REAL.sizes[len(found):len(found) + 8]]
        want.append(np.add(found, np.cumsum([0, *REAL.sizes[:-1]])))
    np.testing.assert_array_equal(jax.jit(lambda x: table_rows(REAL, x))(tokens), want)


def test_n_grams_end_at_the_beginning_and_at_the_token_that_ends_a_text() -> None:
    text = [4, 7, 5, 6, 8, 9]
    rule = HashedNGrams(9, 4, 1, 50, 0, 0, 1, 7, 10, (2, 8))
    tokens = jnp.asarray([[[text[max(i - j, 0)] for j in range(4)] for i in range(6)]])
    found = own_text(rule, tokens, jnp.arange(6)[None])
    assert found[0].tolist() == [[4, 7, 7, 7], [7, 4, 7, 7], [5, 7, 7, 7], [6, 5, 7, 7], [8, 6, 5, 7], [9, 8, 6, 5]]


def test_a_table_in_any_number_of_shards_is_the_same(tmp_path: Path) -> None:
    """The last shard of transformers may be shorter, and its buffers are not read."""
    saved("qwen4", tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.0.ple.ple_embedding.ngram_embedding"
    tensors, lm = load_file(file), dx.load(tmp_path)
    table = np.concatenate([tensors.pop(f"{name}.shard_{i}.weight") for i in range(3)])
    np.testing.assert_array_equal(lm.params["layers"]["0"]["ngrams"]["table"], table)
    for count in (1, 7):
        parts = {f"{name}.shard_{i}.weight": x.numpy() for i, x in enumerate(torch.tensor(table).chunk(count))}
        save_file({**tensors, **parts}, file)
        jax.tree.map(np.testing.assert_array_equal, dx.load(tmp_path).params, lm.params)
    del parts[f"{name}.shard_6.weight"]
    save_file({**tensors, **parts}, file)
    with pytest.raises(CheckpointError, match=r"shard_0\.weight has shape \(35, 6\), the configuration requires"):
        dx.load(tmp_path)


@pytest.mark.wide
def test_a_table_in_fp8_with_one_scale_stays_packed(tmp_path: Path) -> None:
    saved("qwen4", tmp_path)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors, want = {key: torch.tensor(x) for key, x in load_file(file).items()}, dx.load(tmp_path)
    for name in [name for name in tensors if ".shard_" in name]:
        tensors[name] = (tensors[name] / 0.25).to(torch.float8_e4m3fn)
        tensors[f"{name.partition('.shard_')[0]}.weight_scale"] = torch.tensor([0.25])
    save_tensors(tensors, file)
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": {
        "quant_method": "fp8", "weight_block_size": [128, 128]}}))
    lm = dx.load(tmp_path)
    table, full = (x.params["layers"]["3"]["ngrams"]["table"] for x in (lm, want))
    assert table.codes.dtype == jnp.float8_e4m3fn
    rounded = torch.tensor(np.asarray(full) / 0.25).to(torch.float8_e4m3fn).float().numpy() * 0.25
    np.testing.assert_array_equal(table.values(jnp.float32), rounded)
    tokens = jnp.asarray(PROMPTS[:1])
    plain = jax.tree.map(lambda x: x, want.params)
    for layer in ("0", "3"):
        plain["layers"][layer]["ngrams"]["table"] = lm.params["layers"][layer]["ngrams"]["table"].values(jnp.float32)
    np.testing.assert_allclose(lm.model.forward(lm.params, tokens), want.model.forward(plain, tokens), atol=1e-5)


def test_layers_that_predict_further_tokens_are_skipped(tmp_path: Path) -> None:
    saved("qwen4-plain", tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "mtp.fc.weight": np.zeros((32, 64), np.float32)}, file)
    with pytest.warns(UserWarning, match="skips 1 tensors of layers that predict further tokens, such as mtp.fc"):
        dx.load(tmp_path)


def test_embeddings_are_refused() -> None:
    model = Transformer(read_config({**CONFIG, "num_hidden_layers": 2, "ple_layer_ids": [1]}))
    lm = dx.LM(model=model, params=model.init_params(jax.random.key(0)), vocab_size=97)
    given = Embeddings(values=jnp.zeros((1, 2, 32)), given=jnp.ones((1, 2), bool))
    with pytest.raises(ValueError, match="inputs: got embeddings, takes tokens, by which this model"):
        dx.generate(lm, [[5, 6]], inputs=given, max_new_tokens=2)


def test_options_are_those_of_released_files() -> None:
    flat = {key: value for key, value in CONFIG.items() if key != "model_type"}
    whole = {"model_type": "qwen4_exp", "vision_config": {}, "tie_word_embeddings": False}
    assert read_config({**whole, "text_config": flat}) == read_config(CONFIG)
    full = [kind.replace("indexed", "full") for kind in CONFIG["layer_types"]]
    assert read_config({**CONFIG, "layer_types": full}) == read_config(CONFIG)
    real = {**transformers.AutoConfig.for_model("qwen4_exp_text", eos_token_id=5).to_dict(), "ple_layer_ids": [2],
            "indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 2048,
            "indexer_compress_ratio": 16}
    found = read_config(real)
    bare = {key: value for key, value in real.items() if key.startswith(("model_type", "indexer", "ple_lay", "eos"))}
    assert found == read_config(bare) and found.attending == tuple(range(3, 40, 4))
    assert found.layers[1].ngrams == dataclasses.replace(REAL, number=0, stop=5)
    kept = {path for path in flatten(Transformer(read_config(CONFIG)).abstract_params())
            if stored_dtype(path, "bfloat16") == "float32"}
    assert all(path.endswith((".A_log", ".dt_bias")) for path in kept)


@pytest.mark.parametrize(("change", "message"), [
    ({"indexer_n_heads": None}, "indexer_n_heads: got none, takes numbers for the index"),
    ({"indexer_kv_heads": 2}, "indexer_kv_heads: got 2, supported is 1"),
    ({"indexer_budget": 7}, "indexer_budget: got 7, takes a multiple of indexer_compress_ratio = 3"),
    ({"indexer_head_dim": 6}, "indexer_head_dim: got 6, takes at least the rotated part"),
    ({"output_gate_type": "tanh"}, "output_gate_type: got 'tanh', takes 'silu' or 'sigmoid'"),
    ({"hc_count": 1}, "hc_count: got 1, takes 2 or more"),
    ({"ple_layer_ids": [2]}, r"ple_layer_ids: got \[2\], takes layers without attention"),
    ({"ple_layer_ids": [6]}, r"ple_layer_ids: got \[6\], takes numbers of layers from 1"),
    ({"eos_token_id": None}, "eos_token_id: got none with ple_layer_ids"),
    ({"ple_embed_dim": 25}, "ple_embed_dim: got 25 with ngram_size = 3"),
    ({"layer_types": ["linear_attention"] * 5}, "takes one or more 'indexed_attention'"),
    ({"linear_num_value_heads": 3}, "linear_num_value_heads: got 3, takes a multiple"),
])
def test_configurations_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_config({**CONFIG, **change})


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Layer(index=GroupIndex(2, 8, 2)), "takes beside with it a Pooling that is not scored"),
    (lambda: Layer(index=GroupIndex(2, 8, 2), recurrent=Pooling(3, 8), beside=True), "a Pooling that is not scored"),
    (lambda: Layer(index=GroupIndex(2, 8, 2), recurrent=Pooling(3, 7, scored=False), beside=True), "as wide as"),
    (lambda: Layer(index=GroupIndex(2, 8, 2), recurrent=Pooling(3, 8, scored=False), beside=True, sinks=True),
     "of the other options"),
    (lambda: Pooling(3, 8, True, scored=False), "scored: got False with overlap"),
    (lambda: Layer(ngrams=REAL), "ngrams: got .* recurrent = None .*, takes one with a GatedDelta"),
    (lambda: Layer(ngrams=REAL, recurrent=RgLru(8, 2)), "ngrams: got .*RgLru.*, takes one with a GatedDelta"),
    (lambda: dataclasses.replace(read_config(CONFIG), streams=None), "ngrams: got .* takes GatedConnections"),
    (lambda: dataclasses.replace(REAL, base=1 << 28), "base: got"),
    (lambda: dataclasses.replace(REAL, width=2047), "width: got 2047, takes a multiple"),
    (lambda: dataclasses.replace(REAL, stop=248_320), "stop: got 248320"),
    (lambda: GatedDelta(2, 2, 4, 4, gate="relu"), "gate: got 'relu'"),  # type: ignore[arg-type]
])
def test_options_that_do_not_fit_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.wide
def test_long_texts_with_groups_of_16_equal_transformers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Chunks that end within groups and at their ends, and queries that attend to a part of the text."""
    options = {**QWEN4, "indexer_compress_ratio": 16, "indexer_budget": 64, "max_position_embeddings": 512}
    monkeypatch.setitem(CASES, "long", ("qwen4_exp_text", options, None))
    reference = saved("long", tmp_path)
    lm, tokens = dx.load(tmp_path), np.random.default_rng(0).integers(3, 97, (1, 200)).astype(np.int32)
    with torch.no_grad():
        want = reference(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    far = np.abs(jax.jit(lm.model.forward)(lm.params, jnp.asarray(tokens)) - want)
    # Of 200 positions a few have a gate score near zero, whose square root enlarges float32's rounding.
    assert (far < 1e-4).mean() > 0.995 and far.max() < 1e-3
    made = dx.generate(lm, [tokens[0, :187].tolist()], max_new_tokens=13, eos_token_id=[], chunk=50).tokens
    reference.generation_config.eos_token_id = None
    ids = torch.tensor(tokens[:, :187], dtype=torch.long)
    theirs = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=13, do_sample=False,
                                pad_token_id=0)
    assert made[0].tolist() == theirs[0, 187:].tolist()


@pytest.mark.wide
def test_exits_refuse_a_model_without_a_final_norm() -> None:
    model = Transformer(read_config(CONFIG))
    batch = jnp.ones((1, 9), jnp.int32), jnp.ones((1, 9), bool)
    with pytest.raises(ValueError, match="model: got one whose head cannot read outputs of layers"):
        jax.eval_shape(functools.partial(losses_by_layer, model), model.abstract_params(), batch)
