"""Heads inside a target's own files (Medusa-2), a layer that was taken out of them and tuned (speculators' `mtp`), and
draft models where heads are looked for (PARD)."""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import decodax as dx
from decodax import algorithms
from decodax.io.drafters import load_drafter, save_drafter
from decodax.io.files import CheckpointError
from decodax.train.drafting.unrolled import unrolled
from tests.drafters import given
from tests.drafters.test_published import Table
from tests.models import tiny

PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8], [9, 10, 11], [1]]
SHAPES = {f"{i}.{name}": shape for i in range(2) for name, shape in (
    ("0.linear.weight", (32, 32)), ("0.linear.bias", (32,)), ("1.weight", (97, 32)))}
"""Names and shapes of the tensors of two heads that FasterDecoding/Medusa e2a5d20 saves (`medusa_head` in
medusa/model/medusa_model.py)."""


@pytest.fixture
def model(tmp_path):
    tiny.build("llama").save_pretrained(tmp_path)
    return tmp_path


def changed(path, tensors=(), **entries):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | entries))
    held = load_file(path / "model.safetensors")
    save_file(held | dict(tensors), path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.wide
def test_medusas_heads_in_the_targets_own_files_draft_without_a_drafter(model, tmp_path):
    heads = given.tensors(SHAPES)
    changed(model, {f"medusa_head.{name}": x for name, x in heads.items()}, medusa_num_heads=2, medusa_num_layers=1)
    with pytest.warns(UserWarning, match=r"skips 6 tensors of Medusa's heads, such as medusa_head\.0\.0\.linear\.bias; "
                                         "the algorithm 'medusa' drafts with them"):
        lm = dx.load(model)
    made = algorithms.make("medusa", lm)
    apart = tmp_path / "apart"
    apart.mkdir()
    (apart / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 1}))
    save_file(heads, apart / "medusa_lm_head.safetensors")
    for found in (load_drafter(model, lm), load_drafter(apart, lm)):
        assert found.system == "medusa" and found.head == made.draft.head
        jax.tree.map(np.testing.assert_array_equal, found.params, made.draft.weights.head)
    run = lambda **options: dx.generate(lm, PROMPTS, max_new_tokens=6, eos_token_id=[], seed=3,
                                        temperature=[0.0, 0.8, 1.2], **options).tokens
    np.testing.assert_array_equal(run(algorithm="medusa"), run())


def test_a_model_without_heads_needs_a_drafter(model):
    lm = dx.load(model)
    with pytest.raises(ValueError, match="'medusa' needs a drafter that was trained for"):
        algorithms.make("medusa", lm)


def test_a_missing_or_another_tensor_of_a_head_is_named(model):
    heads = {f"medusa_head.{name}": x for name, x in given.tensors(SHAPES).items()}
    changed(model, {name: x for name, x in heads.items() if name != "medusa_head.1.1.weight"}, medusa_num_heads=2)
    with pytest.raises(CheckpointError, match=r"medusa_head\.\*: lacks tensor 1\.1\.weight"):
        load_drafter(model)
    changed(model, heads | {"medusa_head.1.2.weight": np.zeros(3, np.float32)})
    with pytest.raises(CheckpointError, match=r"1\.2\.weight"):
        load_drafter(model)


def test_pards_models_are_loaded_as_models(model):
    changed(model, pard_token=96)
    lm = dx.load(model)
    said = rf"draft model of PARD.* takes draft=decodax\.load\('{re.escape(str(model))}'\)"
    with pytest.raises(CheckpointError, match=said):
        load_drafter(model, lm)
    assert algorithms.make("pard", lm, lm).draft.mask == 96
    with pytest.raises(ValueError, match=r"draft: got a TrainedDrafter, takes a language model, from decodax\.load"):
        algorithms.make("pard", lm, load_drafter("pycode-eagle-3"))


def test_other_models_are_no_drafters(model):
    with pytest.raises(CheckpointError, match=r"known layout.*a draft model is loaded by decodax\.load"):
        load_drafter(model)


REFERENCE = json.loads((Path(given.__file__).parent / "mtp.json").read_text())
CASES = {case["name"]: case for case in REFERENCE["cases"]}
V, D = REFERENCE["vocabulary"], REFERENCE["features"]


def written(path, name, more=(), without=(), **changes):
    """A directory with the tensors of a case. All norms but Qwen3's have a weight that is 1 less."""
    path.mkdir(exist_ok=True)
    case = CASES[name]
    less = lambda key: name != "qwen3" and "norm" in key
    tensors = {key: x - 1 if less(key) else x for key, x in given.tensors(case["shapes"]).items()
               if key not in without}
    (path / "config.json").write_text(json.dumps(case["config"] | changes))
    save_file(tensors | dict(more), path / "model.safetensors")
    return path


@pytest.mark.wide
@pytest.mark.parametrize("name", CASES)
def test_the_logits_of_a_tuned_layer_are_those_of_the_public_code(name, tmp_path):
    drafter = load_drafter(written(tmp_path, name))
    assert drafter.system == "mtp" and not drafter.head.own_table and not drafter.head.own_head
    features, ids = given.inputs(REFERENCE["positions"], D, V)
    table, last = (jnp.asarray(given.tensor(key, (V, D))) for key in ("embed_tokens.weight", "lm_head.weight"))
    found = unrolled(Table(), drafter.head, drafter.params, table, jnp.asarray(ids), jnp.asarray(features), 3)
    for (_, hidden), wanted in zip(found, CASES[name]["logits"], strict=True):
        got = hidden[0, :REFERENCE["read"]] @ last.T
        np.testing.assert_allclose(got, wanted, atol=2e-5, rtol=1e-4)


def test_a_tuned_layers_own_tables_are_read_and_a_copy_of_the_targets_head_is_not(tmp_path):
    tables = {key: given.tensor(key, (V, D)) for key in ("embed_tokens.weight", "lm_head.weight")}
    copy = {"verifier_lm_head.weight": np.full((V, D), np.nan, np.float32)}
    drafter = load_drafter(written(tmp_path / "a", "qwen3", tables | copy))
    assert drafter.head.own_table and drafter.head.own_head
    np.testing.assert_array_equal(drafter.params["lm_head"]["kernel"], tables["lm_head.weight"].T)
    save_drafter(tmp_path / "b", drafter, dtype="float32")
    assert load_drafter(tmp_path / "b").head == drafter.head


def test_a_tuned_layer_that_cannot_be_read_is_named(tmp_path):
    norm = "mtp_layers.0.final_layernorm.weight"
    for changes, message in (
            (dict(num_nextn_predict_layers=2), "num_nextn_predict_layers: got 2, takes 1"),
            (dict(transformer_layer_config={"model_type": "llama"}), "model_type: got 'llama', supported are qwen3, "),
            (dict(more={"mtp_layers.0.other.weight": np.zeros(3, np.float32)}), r"mtp_layers\.0\.other\.weight"),
            (dict(without=[norm]), rf"lacks tensor {norm}")):
        with pytest.raises(CheckpointError, match=message):
            load_drafter(written(tmp_path, "qwen3", **changes))
