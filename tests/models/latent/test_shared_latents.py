"""Latents that several layers attend to, and files of Mistral Large 4, which has them. The laws of its decoding are in
test_families, its prompts with images in test_image_prompts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import decodax as dx
from decodax.io.checkpoint import CheckpointError, load_model
from decodax.io.load import LM
from decodax.models import Transformer
from decodax.models.families import read_config
from decodax.models.names import flatten
from tests.models.tiny import COMMON, LARGE, saved

CONFIG = {"model_type": "mistral_large4_text", **COMMON, **LARGE}
LATENT, ROTATED, INDEX = 16, 8, 12
PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8, 5], [9, 10, 11], [1, 2]]


@pytest.fixture(scope="module")
def lm() -> LM:
    model, draw = Transformer(read_config(CONFIG)), np.random.default_rng(0)
    params = jax.tree.map(lambda x: np.asarray(draw.normal(x.ndim == 1, 0.2, x.shape), np.float32),
                          model.abstract_params())
    return LM(model=model, params=params, vocab_size=97)


def run(lm: LM, **options: Any) -> list[list[int]]:
    return dx.generate(lm, PROMPTS, max_new_tokens=8, eos_token_id=[], seed=3, **options).tokens.tolist()


def test_a_token_takes_one_latent_and_an_index_key_of_each_indexer_for_all_layers_that_share_them(lm: LM) -> None:
    """Layers 0, 1 and 3 share latents, and so do 2 and 4, without a rope. Layers 2 and 3 choose by the keys of 1."""
    config = lm.model.config
    assert [config.index_keys(i) for i in config.own] == [(0, 1), (1, 4), (5,)]
    assert [x.shape[1:] for x in lm.model.init_cache(1, 8).kv] == [
        (1, 8, LATENT + ROTATED + 2 * INDEX), (1, 8, LATENT + 2 * INDEX), (1, 8, LATENT + ROTATED + INDEX)]
    held = {path.split(".")[1] for path in flatten(lm.params) if ".attn.kv_a." in path}
    assert held == {"0", "2", "5"}


def test_layers_that_share_latents_run_together(lm: LM) -> None:
    with pytest.raises(ValueError, match="some read the keys and values of others, or their choice"):
        lm.model._apart()


@pytest.mark.wide
def test_trees_samples_and_pages_change_nothing(lm: LM) -> None:
    options: dict[str, Any] = dict(num_samples=2, temperature=0.8)
    plain = run(lm, **options)
    trees = dx.Speculative(dx.drafts.DraftModel(lm), shape=dx.trees.Fixed.balanced(2, 2))
    assert run(lm, algorithm=trees, **options) == run(lm, cache="paged:page=4,pages=64", **options) == plain
    with pytest.raises(ValueError, match="cache: h2o takes a model whose queries attend to all"):
        run(lm, cache="h2o:budget=20")


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("released")
    saved("mistral-large4", directory)
    return directory


def test_the_head_that_drafts_is_skipped_and_a_lacking_tensor_named(released: Path, tmp_path: Path) -> None:
    tensors = load_file(released / "model.safetensors")
    (tmp_path / "config.json").write_text((released / "config.json").read_text())
    file = tmp_path / "model.safetensors"
    save_file({**tensors, "mtp_dspark.layers.0.attention.wq.weight": np.zeros((4, 4), np.float32)}, file)
    with pytest.warns(UserWarning, match="skips 1 tensors of layers that predict further tokens, such as mtp_dspark"):
        load_model(tmp_path)
    save_file({name: x for name, x in tensors.items() if name != "layers.1.attention.indexer.ssmax_scaling.s"}, file)
    with pytest.raises(CheckpointError, match=r"lacks tensor layers\.1\.attention\.indexer\.ssmax_scaling\.s"):
        load_model(tmp_path)
    # A layer that reads the latents of another one has no projection to them.
    save_file({**tensors, "layers.1.attention.wkv_a_with_mqa.weight": np.zeros((24, 32), np.float32)}, file)
    with pytest.raises(CheckpointError, match=r"holds tensor layers\.1\.attention\.wkv_a_with_mqa\.weight"):
        load_model(tmp_path)


def test_learned_frequencies_stay_float32(released: Path) -> None:
    _, params = load_model(released, dtype="bfloat16")
    assert (params["rope_factors"].dtype, params["norm"]["scale"].dtype) == (np.float32, jax.numpy.bfloat16)


@pytest.mark.parametrize(("entries", "message"), [
    ({"kv_source_layers": [0, 0, 2]}, r"^kv_source_layers: got 3 entries for num_hidden_layers = 6"),
    ({"kv_source_layers": [0, 0, 0, 0, 2, 5]}, r"^kv_source_layers: got 0 for layer 2, takes 2 or the latest layer"),
    ({"kv_source_layers": [0, 0, 2, 1, 2, 5]}, r"^kv_source_layers: got 1 for layer 3, takes 3 or the latest"),
    ({"kv_source_layers": [0, 1, 2, 1, 2, 0]}, r"^kv_source_layers: got 0 for layer 5, takes 5 or the latest"),
    ({"kv_source_layers": [1, 1, 2, 3, 4, 5]}, r"^kv_source_layers: got 1 for layer 0, takes 0 or the latest"),
    ({"kv_source_layers": [-1] * 6}, r"^kv_source_layers: got \[-1, .*takes a list of layers, from 0 on"),
    ({"no_rope_layers": [1, 0]}, "^no_rope_layers: got 2 entries for num_hidden_layers = 6"),
    ({"indexer_types": ["shared"] * 6}, r"^indexer_types, index_topk_pattern: got \['shared', "),
    ({"index_head_dim": 6}, "^index_head_dim: got 6, takes at least qk_rope_head_dim = 8"),
    ({"layer_types": ["full_attention"] * 6}, "^layer_types: got .*takes 'indexed_attention' for every layer"),
    ({"q_lora_rank": 12}, "^q_lora_rank: got 12, which a mistral_large4_text model does not have here"),
    ({"norm_topk_prob": False}, "^norm_topk_prob: got False, supported is True"),
    ({"topk_group": 3}, "topk_group: groups: got 2 with kept_groups = 3"),
])
def test_what_a_configuration_cannot_say_is_refused(entries: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_config({**CONFIG, **entries})


def test_entries_under_other_names_say_the_same() -> None:
    found = read_config(CONFIG)
    without = {key: value for key, value in CONFIG.items() if key not in ("n_routed_experts", "indexer_types")}
    assert read_config({**without, "num_experts": 8, "index_topk_pattern": "FFSSFF"}) == found
    assert read_config({**without, "num_local_experts": 8, "indexer_types": LARGE["indexer_types"]}) == found
    whole = json.loads(json.dumps({"model_type": "mistral_large4", "text_config": CONFIG, "vision_config": {}}))
    assert read_config(whole) == found
    plain = read_config({**CONFIG, "kv_source_layers": list(range(6))})
    assert plain == read_config({key: value for key, value in CONFIG.items() if key != "kv_source_layers"})
    assert plain.own == tuple(range(6)) and not any(layer.reads for layer in plain.layers)


def test_options_that_do_not_go_together_are_refused() -> None:
    config = read_config(CONFIG)
    with pytest.raises(ValueError, match="rope_factors: got 3, takes half the width of every rope, 8"):
        dataclasses.replace(config, rope_factors=3)
    layers, latent = list(config.layers), config.layers[3].latent
    assert latent is not None and latent.indexer is not None
    for other in (dataclasses.replace(latent, rank=8),
                  dataclasses.replace(latent, indexer=dataclasses.replace(latent.indexer, width=8))):
        layers[3] = dataclasses.replace(config.layers[3], latent=other)
        with pytest.raises(ValueError, match="reads: got 0 for layer 3"):
            dataclasses.replace(config, layers=tuple(layers))
    with pytest.raises(ValueError, match="plain: got one with an indexer, takes 0"):
        dataclasses.replace(latent, plain=4)
