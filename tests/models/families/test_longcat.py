"""LongCat-Flash: layouts of files, experts that compute nothing, mixtures that are added a layer later, and what is
refused. Logits, drafts and trees of small cases are in `test_families`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file

import decodax as dx
from decodax.io.checkpoint import load_model
from decodax.io.files import CheckpointError
from decodax.io.load import LM
from decodax.models import Transformer, adapters
from decodax.models.blocks.options import Layer
from decodax.models.config import llama
from decodax.models.experts import mix
from decodax.models.families import read_config
from decodax.models.routing import Experts, route
from decodax.train import sub_model
from decodax.train.tuning.exits import text_output
from tests.models.tiny import COMMON, LONGCAT, saved

CONFIG: dict[str, Any] = {"model_type": "longcat_flash", **COMMON, **LONGCAT}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("longcat")
    saved("longcat-flash", root)
    return root


def test_experts_that_compute_nothing_have_no_tensors_in_released_files(home: Path, tmp_path: Path) -> None:
    """transformers 5.24 gives them first projections, which nothing reads, and cannot load files without these."""
    tensors, entries = load_file(home / "model.safetensors"), json.loads((home / "config.json").read_text())
    found = {name: x for name, x in tensors.items() if not any(f"experts.{e}." in name for e in (6, 7, 8))}
    assert len(tensors) - len(found) == 2 * 3 * 2
    more = {"model.mtp.layers.0.eh_proj.weight": np.zeros((32, 64), np.float32)}
    save_file(found | more, tmp_path / "model.safetensors")
    own = {"num_nextn_predict_layers": 1, "nextn_use_scmoe": False, "mla_scale_q_lora": True, "mla_scale_kv_lora": True,
           "attention_method": "MLA", "zero_expert_type": "identity"}
    (tmp_path / "config.json").write_text(json.dumps({**entries, **own}))
    with pytest.warns(UserWarning, match="skips 1 tensors .* further tokens, .*; the algorithm 'mtp' drafts with them"):
        model, params = load_model(tmp_path)
    again, same = load_model(home)
    assert model == again
    jax.tree.map(np.testing.assert_array_equal, params, same)
    assert params["layers"]["0"]["shortcut"]["gate"]["kernel"].shape == (6, 32, 24)
    assert params["layers"]["2"]["shortcut"]["router"]["kernel"].shape == (32, 9) and "shortcut" not in params[
        "layers"]["1"]
    save_file({name: x for name, x in found.items() if "experts.5." not in name}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks tensors model.layers.0.mlp.experts.5.down_proj.weight"):
        load_model(tmp_path)


def test_missing_entries_have_the_values_of_transformers() -> None:
    theirs = transformers.AutoConfig.for_model("longcat_flash").to_dict()
    found = read_config({"model_type": "longcat_flash"})
    assert found == read_config(theirs)
    latent, experts = found.layers[0].latent, found.layers[0].shortcut
    assert latent is not None and experts is not None
    assert (latent.query_factor, latent.factor, len(found.layers)) == (2.0, 12 ** 0.5, 56)
    assert (experts.count, experts.zero, experts.outputs, experts.chosen) == (512, 256, 768, 12)
    assert read_config({"model_type": "longcat_flash", "num_hidden_layers": 56}) == found
    without = read_config({"model_type": "longcat_flash", "zero_expert_num": None}).layers[0].shortcut
    assert without is not None and (without.zero, without.outputs) == (0, 512)


@pytest.mark.parametrize(("entries", "message"), [
    ({"router_bias": True}, "router_bias: got True, supported is False"),
    ({"norm_topk_prob": True}, "norm_topk_prob: got True, supported is False"),
    ({"mla_scale_q_lora": False}, "mla_scale_q_lora: got False, supported is True"),
    ({"attention_method": "MHA"}, "attention_method: got 'MHA', supported is 'MLA'"),
    ({"zero_expert_type": "copy"}, "zero_expert_type: got 'copy', supported is 'identity'"),
    ({"head_dim": 16}, "head_dim: got 16, supported is 8"),
    ({"qk_head_dim": 16}, "qk_head_dim: got 16, supported is 20"),
    ({"q_lora_rank": None}, "q_lora_rank: got None, takes the width of the latent of queries"),
    ({"num_hidden_layers": 1}, "num_hidden_layers: got 1, takes an even number from 2"),
    ({"num_layers": 3}, "num_hidden_layers: got 4, takes 6, two for each of num_layers = 3"),
    ({"moe_topk": 10}, "moe_topk: got 10, takes at most the number of experts .num_experts or n_routed_experts., 9"),
    ({"num_local_experts": 5}, "num_local_experts: got n_routed_experts = 6, num_local_experts = 5, takes the same"),
    ({"moe_topk": [4, 4]}, "moe_topk: got .4, 4., takes a whole number from 1"),
    ({"zero_expert_num": -1}, "zero_expert_num: got -1, takes a whole number from 0"),
    ({"mlp_bias": True}, "mlp_bias: got True, supported is False"),
])
def test_other_entries_are_refused(entries: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_config({**CONFIG, **entries})


def test_experts_that_compute_nothing_are_not_multiplied() -> None:
    """A choice of them alone gives zeros from `mix`, whatever the kernels are: not even NaNs are read."""
    nan = jnp.full((2, 4, 3), jnp.nan)
    x, weights = jnp.ones((3, 4)), jnp.full((3, 2), 0.5)
    run = lambda which: mix(x, which, weights, nan, nan, nan.swapaxes(1, 2), jax.nn.silu, more=True)
    np.testing.assert_array_equal(run(jnp.full((3, 2), 2)), 0)
    found = run(jnp.array([[2, 3], [3, 1], [2, 2]]))
    assert np.isnan(found).all(1).tolist() == [False, True, False]


def test_experts_that_compute_nothing_keep_the_weight_of_the_router() -> None:
    e = Experts(2, 2, 3, False, zero=2, correction=True, scale=3.0)
    which, weights = route(jnp.log(jnp.array([[0.1, 0.2, 0.3, 0.4]])), e, jnp.array([0.0, 1.0, 0.0, 0.0]))
    assert which.tolist() == [[1, 3]]
    np.testing.assert_allclose(weights, [[0.6, 1.2]], rtol=1e-6)


@pytest.mark.parametrize(("fields", "message"), [
    (dict(zero=-1), "zero: got -1, takes 0 or more"), (dict(zero=2, bias=True), "zero: got 2, .* no sparsemixer, bias"),
    (dict(zero=2, groups=2), "zero: got 2, takes 0 or more, and one group"),
    (dict(zero=2, latent=4), "experts as wide as the model"),
    (dict(zero=1, chosen=6), "chosen: got 6, takes at most .*5")])
def test_options_of_such_experts_are_checked(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Experts(**{"count": 4, "chosen": 2, "width": 3, **fields})


def test_a_shortcut_takes_a_next_layer() -> None:
    e = Experts(2, 1, 4)
    with pytest.raises(ValueError, match=r"shortcut: got .* takes a layer with attention and a dense MLP"):
        Layer(experts=e, shortcut=e)
    c = llama(vocab=8, width=8, layers=2, heads=2, mlp=8)
    one, other = dataclasses.replace(c.layers[0], shortcut=e), c.layers[0]
    for layers, more in (((other, one), {}), ((one, one), {}), ((one, other), {"block": "post"}),
                         ((one, other), {"residual_scale": 0.5})):
        with pytest.raises(ValueError, match=r"shortcut: got .* takes a next layer without one, pre blocks, and one"):
            dataclasses.replace(c, layers=layers, **more)


def test_a_model_with_shortcuts_is_not_cut_after_a_layer() -> None:
    model = Transformer(read_config(CONFIG))
    lm = LM(model=model, params=model.abstract_params(), vocab_size=97)
    for layers in (1, 2):
        with pytest.raises(ValueError, match="lm: got a model with mixtures that are added after the next layer"):
            sub_model(lm, layers)
    with pytest.raises(ValueError, match="lm: got a model with mixtures that are added after the next layer"):
        text_output(model, lm.params, jnp.ones((1, 4), jnp.int32))


def test_methods_that_run_single_layers_refuse_shortcuts() -> None:
    model = Transformer(read_config(CONFIG))
    params = model.init_params(jax.random.key(0))
    with pytest.raises(ValueError, match="layers: some add what the mixture of another computed, so they cannot run"):
        model.pieces(params)
    with pytest.raises(ValueError, match="some add what the mixture of another computed, so none can be left out"):
        model.features(params, jnp.ones((1, 4), jnp.int32), keep=[(True, True)] * 3 + [(False, False)])


@pytest.mark.wide
def test_packed_experts_give_nearly_the_tokens_scores(home: Path) -> None:
    plain, packed = dx.load(home), dx.load(home, weights="int8")
    texts = [[5, 6, 7, 8, 9, 10, 11], [3, 4, 5, 6]]
    want, got = (np.concatenate(dx.score(lm, texts).logprobs) for lm in (plain, packed))
    np.testing.assert_allclose(got, want, atol=0.2)
    assert not np.array_equal(got, want)


def test_adapters_have_the_names_of_the_layers_of_files(home: Path, tmp_path: Path) -> None:
    model, _ = load_model(home)
    low = {"a": jnp.ones((40, 2)), "b": jnp.ones((2, 32))}
    adapter = {"layers": {"3": {"attn": {"o": {"kernel": low}}}}}
    adapters.save(tmp_path, adapter, model, "longcat_flash")
    assert set(load_file(tmp_path / "adapter_model.safetensors")) == {
        f"base_model.model.model.layers.1.self_attn.1.o_proj.lora_{part}.weight" for part in "AB"}
    back = adapters.read(tmp_path, model, "longcat_flash")
    jax.tree.map(np.testing.assert_array_equal, back, adapter)
