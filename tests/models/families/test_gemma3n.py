"""Gemma 3n: released files, and what several residual streams do not take. Logits, drafts and trees are cases of
`test_families`."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file

import decodax as dx
from decodax.io.saving import save_model
from decodax.models import Transformer
from decodax.models.families import read_config
from decodax.models.names import flatten
from tests.models.tiny import CASES, COMMON, saved

ENTRIES: dict[str, Any] = {"model_type": "gemma3n_text", **COMMON, **CASES["gemma3n"][1]}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as the released ones, with the model that sees and hears around it."""
    root = tmp_path_factory.mktemp("gemma3n")
    saved("gemma3n", root)
    tensors = {name.replace("model.", "model.language_model."): x
               for name, x in load_file(root / "model.safetensors").items()}
    for name in ("model.vision_tower.timm_model.x", "model.audio_tower.x", "model.embed_audio.x",
                 "model.language_model.layers.3.self_attn.k_proj.weight"):
        tensors[name] = np.ones(1, np.float32)
    save_file(tensors, root / "model.safetensors", {"format": "pt"})
    text = json.loads((root / "config.json").read_text())
    (root / "config.json").write_text(json.dumps({
        "model_type": "gemma3n", "text_config": text, "vision_config": {"model_type": "gemma3n_vision"},
        "audio_config": {"model_type": "gemma3n_audio"}, "vision_soft_tokens_per_image": 256}))
    return root


def test_a_directory_is_written_as_it_was_read(home: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"skips 3 tensors of images or sound, such as model\.audio_tower\.x"):
        lm = dx.load(home)
    save_model(tmp_path, lm.model, lm.params, json.loads((home / "config.json").read_text()))
    again = dx.load(tmp_path)
    assert again.model == lm.model
    for path, leaf in flatten(again.params).items():
        np.testing.assert_array_equal(leaf, flatten(lm.params)[path])


def test_defaults_and_older_entries() -> None:
    theirs = transformers.AutoConfig.for_model("gemma3n_text").to_dict()
    assert read_config({"model_type": "gemma3n_text"}) == read_config(theirs)
    old = {key: value for key, value in ENTRIES.items() if key != "rope_parameters"} | {
        "rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    new = {**ENTRIES, "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4}}}
    assert read_config(old) == read_config(new)


@pytest.mark.parametrize(("entries", "message"), [
    ({"intermediate_size": [48, 48]}, "intermediate_size: got 2 entries for num_hidden_layers = 4"),
    ({"intermediate_size": "48"}, "intermediate_size: got '48', takes a whole number from 1 to .*, or a list of them"),
    ({"activation_sparsity_pattern": [0.5]}, "activation_sparsity_pattern: got 1 entries for num_hidden_layers = 4"),
    ({"activation_sparsity_pattern": [1.0] * 4}, "activation_sparsity_pattern: got .*takes a list of numbers from 0"),
    ({"altup_active_idx": 3}, "altup_num_inputs, altup_active_idx: count: got 3 streams with the active one 3"),
    ({"altup_num_inputs": 1}, "altup_num_inputs, altup_active_idx: count: got 1 streams"),
    ({"hidden_size_per_layer_input": 0}, "hidden_size_per_layer_input: got 0, takes 1 or more"),
    ({"num_kv_shared_layers": 3}, "num_kv_shared_layers: got 3, which leaves no layer of type full_attention"),
])
def test_other_entries_are_refused(entries: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_config({**ENTRIES, **entries})


def test_methods_that_run_some_layers_are_refused() -> None:
    entries = {**ENTRIES, "num_kv_shared_layers": 0}
    model = Transformer(read_config(entries))
    params, tokens = model.abstract_params(), jax.ShapeDtypeStruct((1, 3), "int32")
    with pytest.raises(ValueError, match="they have several residual streams, so they cannot run one by one"):
        model.pieces(params)
    with pytest.raises(ValueError, match="they have several residual streams, so none can be left out"):
        jax.eval_shape(lambda p, t: model.features(p, t, keep=[(True, True)] * 3 + [(False, False)])[0], params, tokens)


def test_lists_of_widths_are_of_gemma_3n_alone() -> None:
    with pytest.raises(ValueError, match=r"intermediate_size: got .*takes a whole number"):
        read_config({**COMMON, "model_type": "llama", "intermediate_size": [48, 48]})
