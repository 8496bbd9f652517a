"""Gemma 4: released files, and what its layers do that those of others do not. Logits, drafts and trees are cases of
`test_families`, its multimodal directories are in `test_images`."""

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

import decodax as dx
from decodax.io.saving import save_model
from decodax.models import Embeddings, Transformer
from decodax.models.families import read_config
from decodax.models.names import flatten
from tests.matrix import often
from tests.models.tiny import CASES, COMMON, GEMMA4, saved

PROMPTS = [[5, 6, 7, 5, 6, 7, 5], [9], [3, 4, 3, 4, 3, 4, 3, 4, 3, 4, 3, 4]]
ENTRIES: dict[str, Any] = {"model_type": "gemma4_text", **COMMON, **GEMMA4}
LARGE = {**ENTRIES, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A directory of a small one, with keys and values of all layers, as in released files, and transformers' model."""
    root = tmp_path_factory.mktemp("gemma4")
    reference = saved("gemma4", root)
    tensors = load_file(root / "model.safetensors")
    for i in (2, 3):
        for part in ("k_proj", "v_proj", "k_norm"):
            tensors[f"model.layers.{i}.self_attn.{part}.weight"] = np.ones((3, 2), np.float32)
    save_file(tensors, root / "model.safetensors", {"format": "pt"})
    return root, reference


@pytest.fixture(scope="module")
def lm(home: tuple[Path, Any]) -> dx.LM:
    return dx.load(home[0])


def random_lm(**entries: Any) -> dx.LM:
    model = Transformer(read_config({**LARGE, **entries}))
    params = jax.tree.map(lambda x: 6 * x if x.ndim > 1 else x, model.init_params(jax.random.key(0)))
    return dx.LM(model=model, params=params, vocab_size=97)


def decoded(lm: dx.LM, prompts: list[list[int]] = PROMPTS, **more: Any) -> Any:
    return dx.generate(lm, prompts, max_new_tokens=9, eos_token_id=[], **more).tokens.tolist()


def test_a_directory_is_written_as_it_was_read(home: tuple[Path, Any], lm: dx.LM, tmp_path: Path) -> None:
    """Without the keys and values that nothing reads."""
    save_model(tmp_path, lm.model, lm.params, json.loads((home[0] / "config.json").read_text()))
    again = dx.load(tmp_path)
    assert again.model == lm.model
    assert len(load_file(tmp_path / "model.safetensors")) == len(load_file(home[0] / "model.safetensors")) - 6
    for path, leaf in flatten(again.params).items():
        np.testing.assert_array_equal(leaf, flatten(lm.params)[path])


def test_layers_store_and_share_keys_of_two_widths(lm: dx.LM) -> None:
    cache = lm.model.init_cache(3, 64)
    assert [x.shape for x in cache.kv] == [(3, 2, 64, 16), (3, 2, 64, 32)]
    assert [layer.reads for layer in lm.model.config.layers] == [None, None, 0, 1]
    large = read_config({**LARGE, "num_global_key_value_heads": 1})
    assert [x.shape for x in Transformer(large).init_cache(3, 64).kv] == [(3, 2, 64, 16), (3, 1, 64, 32)] * 2


def test_released_and_newer_entries_describe_one_model() -> None:
    """Released files have `global_head_dim`, newer ones `per_layer_config`."""
    for more in ({}, {"num_global_key_value_heads": 1, "attention_k_eq_v": True}, {"num_global_key_value_heads": 1},
                 {"global_head_dim": 8}):
        released = {**ENTRIES, **more}
        newer = transformers.AutoConfig.for_model(**released).to_dict()
        assert "per_layer_config" in newer and "global_head_dim" not in newer
        assert read_config(newer) == read_config(released)


@pytest.mark.parametrize(("entries", "message"), [
    ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention: got 'all', a decoder takes 'vision' or fal"),
    ({"num_kv_shared_layers": 4}, "num_kv_shared_layers: got 4, which leaves no layer of type full_attention"),
    ({"num_kv_shared_layers": 3}, "num_kv_shared_layers: got 3, which leaves no layer of type full_attention"),
    ({"per_layer_config": {"1": {"sliding_window": 4}}}, "per_layer_config.1: got sliding_window, supported are head"),
    ({"per_layer_config": {"4": {"head_dim": 4}}}, "per_layer_config.4: got .*takes an object for a layer below 4"),
    ({"per_layer_config": {"1": {"head_dim": "4"}}}, "per_layer_config.1.head_dim: got '4', takes a whole number"),
    ({"per_layer_config": {"1": {"head_dim": 4}}}, r"per_layer_config: got head_dim \[4, 8\] for layers of type full_"),
    ({"enable_moe_block": True}, "config.json of a gemma4_text model lacks 'num_experts'"),
    ({"model_type": "gemma4_unified_text", "hidden_size_per_layer_input": 4}, "hidden_size_per_layer_input: got 4"),
    ({"layer_types": ["chunked_attention"] * 4}, "layer_types: got .*takes 'full_attention' or 'sliding_attention'"),
])
def test_other_entries_are_refused(entries: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_config({**ENTRIES, **entries})


@pytest.mark.wide
def test_given_embeddings_have_the_layers_inputs_of_the_padding_token(home: tuple[Path, Any], lm: dx.LM) -> None:
    reference = home[1]
    tokens, given = np.array([[7, 11, 13, 17, 19]]), np.array([[False, True, True, False, False]])
    values = np.random.default_rng(0).normal(0, 0.2, (1, 5, 32)).astype(np.float32)
    with torch.no_grad():
        ids = torch.tensor(np.where(given, 0, tokens))
        own = torch.where(torch.tensor(given)[..., None], torch.tensor(values) * 32 ** 0.5,
                          reference.model.embed_tokens(ids))
        want = reference(inputs_embeds=own, per_layer_inputs=reference.model.get_per_layer_inputs(ids)).logits.numpy()
    hidden, head = jax.jit(lambda p: lm.model.features(p, jnp.asarray(tokens), inputs=Embeddings(
        values=jnp.asarray(values), given=jnp.asarray(given)))[0])(lm.params), lm.model.features(
            lm.params, jnp.asarray(tokens))[1]
    np.testing.assert_allclose(head(hidden), want, atol=1e-4)


@pytest.mark.wide
@pytest.mark.parametrize("cache", often(["hydragen"], ["paged:page=4,pages=64", "hydragen"]))
def test_samples_share_a_prefill_and_chunks_change_no_token(lm: dx.LM, cache: str) -> None:
    options = dict(temperature=0.9, seed=3, num_samples=2)
    samples = decoded(lm, PROMPTS[2:], **options)
    assert decoded(lm, PROMPTS[2:], cache=cache, chunk=4, **options) == samples


@pytest.mark.full
@pytest.mark.parametrize("cache", ["snapkv:budget=12,window_size=2", "kivi", "streaming-llm", "quest",
                                   "h2o:budget=8,recent_size=2"])
@pytest.mark.parametrize("shared", [False, True])
def test_drafts_change_no_token_with_other_caches(lm: dx.LM, cache: str, shared: bool) -> None:
    one = lm if shared else random_lm(num_global_key_value_heads=1)
    assert decoded(one, cache=cache, algorithm="prompt-lookup:length=3") == decoded(one, cache=cache)


def test_methods_that_run_layers_one_by_one_are_refused(lm: dx.LM) -> None:
    with pytest.raises(ValueError, match="layers: some read the keys and values of others"):
        lm.model.pieces(lm.params)
    large = Transformer(read_config(LARGE))
    with pytest.raises(ValueError, match="config: got layers with inputs of their own or a factor"):
        large.pieces(large.abstract_params())


@pytest.mark.full
def test_drafts_with_some_of_the_layers_change_no_token() -> None:
    large = random_lm(enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=24)
    drafts = dx.Speculative(dx.drafts.LayerSkip(skip=(1,)))
    assert decoded(large, algorithm=drafts) == decoded(large)


@pytest.mark.parametrize("name", ["gemma4", "gemma4-moe"])
def test_adapters_have_the_names_of_files(name: str, tmp_path: Path) -> None:
    config = read_config({"model_type": "gemma4_text", **COMMON, **CASES[name][1]})
    model = Transformer(config)
    adapter = dx.adapters.init(model.init_params(jax.random.key(0)), jax.random.key(1), 2, ("q", "gate"))
    dx.adapters.save(tmp_path, adapter, model, "gemma4_text")
    assert "base_model.model.model.layers.0.mlp.gate_proj.lora_A.weight" in load_file(
        tmp_path / "adapter_model.safetensors")
    again = dx.adapters.read(tmp_path, model, "gemma4_text")
    jax.tree.map(np.testing.assert_array_equal, again, adapter)
