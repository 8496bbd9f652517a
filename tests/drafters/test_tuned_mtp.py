"""A layer for multi-token prediction that speculators has tuned, in a directory of its own: the logits of its code."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from decodax.io.drafters import load_drafter, save_drafter
from decodax.io.files import CheckpointError
from decodax.train.drafting.unrolled import unrolled
from tests.drafters import given
from tests.drafters.test_published import Table

REFERENCE = json.loads((Path(__file__).parent / "mtp.json").read_text())
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


@pytest.mark.wide(but=("qwen3",))
@pytest.mark.parametrize("name", CASES)
def test_its_logits_are_those_of_the_public_code(name, tmp_path):
    drafter = load_drafter(written(tmp_path, name))
    assert drafter.system == "mtp" and not drafter.head.own_table and not drafter.head.own_head
    features, ids = given.inputs(REFERENCE["positions"], D, V)
    table, last = (jnp.asarray(given.tensor(key, (V, D))) for key in ("embed_tokens.weight", "lm_head.weight"))
    found = unrolled(Table(), drafter.head, drafter.params, table, jnp.asarray(ids), jnp.asarray(features), 3)
    for (_, hidden), wanted in zip(found, CASES[name]["logits"], strict=True):
        got = hidden[0, :REFERENCE["read"]] @ last.T
        np.testing.assert_allclose(got, wanted, atol=2e-5, rtol=1e-4)


def test_tables_of_its_own_are_read_and_a_copy_of_the_targets_head_is_not(tmp_path):
    tables = {key: given.tensor(key, (V, D)) for key in ("embed_tokens.weight", "lm_head.weight")}
    copy = {"verifier_lm_head.weight": np.full((V, D), np.nan, np.float32)}
    drafter = load_drafter(written(tmp_path / "a", "qwen3", tables | copy))
    assert drafter.head.own_table and drafter.head.own_head
    np.testing.assert_array_equal(drafter.params["lm_head"]["kernel"], tables["lm_head.weight"].T)
    save_drafter(tmp_path / "b", drafter, dtype="float32")
    assert load_drafter(tmp_path / "b").head == drafter.head


def test_what_cannot_be_read_is_named(tmp_path):
    norm = "mtp_layers.0.final_layernorm.weight"
    for changes, message in (
            (dict(num_nextn_predict_layers=2), "num_nextn_predict_layers: got 2, takes 1"),
            (dict(transformer_layer_config={"model_type": "llama"}), "model_type: got 'llama', supported are qwen3, "),
            (dict(more={"mtp_layers.0.other.weight": np.zeros(3, np.float32)}), r"mtp_layers\.0\.other\.weight"),
            (dict(without=[norm]), rf"lacks tensor {norm}")):
        with pytest.raises(CheckpointError, match=message):
            load_drafter(written(tmp_path, "qwen3", **changes))
