"""Model directories: reading, refusing and writing them."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from jax.sharding import AxisType, PartitionSpec
from safetensors.numpy import load_file, save_file

from decodax.core.mesh import auto_region
from decodax.io.arrays import ArrayReader
from decodax.io.checkpoint import CheckpointError, load_model
from decodax.io.saving import save_model
from decodax.models import Transformer, llama
from decodax.models.formats import pack
from decodax.models.names import IMAGES, flatten
from tests.models.families.tiny_seeing import SEEING
from tests.models.tiny import CASES, build, saved

TOKENS = np.random.default_rng(1).integers(3, 97, (2, 9)).astype(np.int32)
FILE = "model.safetensors"
OLDER = (*list(CASES)[:list(CASES).index("gpt-neox")], "falcon-40b", "apertus", "llama4")
"""Cases that run by default."""


def reference_logits(model: Any) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(TOKENS, dtype=torch.long)).logits.float().numpy()


def same(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


def rewritten(directory: Path, **changes: np.ndarray | None) -> Path:
    """The directory with tensors replaced, added, or (None) removed."""
    tensors = {**load_file(directory / FILE), **changes}
    save_file({k: v for k, v in tensors.items() if v is not None}, directory / FILE)
    return directory


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    saved("llama", tmp_path)
    return tmp_path


@pytest.mark.wide
def test_several_files_load_as_one(tmp_path: Path) -> None:
    saved("llama", tmp_path / "one")
    saved("llama", tmp_path / "many", max_shard_size="20KB")
    assert not (tmp_path / "many" / FILE).exists()
    same(load_model(tmp_path / "one")[1], load_model(tmp_path / "many")[1])


@pytest.mark.wide
def test_weights_have_the_stored_dtype_or_the_one_asked_for(tmp_path: Path) -> None:
    build("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    model, params = load_model(tmp_path)
    wide_model, wide = load_model(tmp_path, dtype=jnp.float32)
    assert model.dtype == "bfloat16"
    assert wide_model.dtype == "float32"
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    same(wide, jax.tree.map(lambda x: x.astype(jnp.float32), params))
    assert model.init_cache(1, 4).kv[0].dtype == jnp.bfloat16

    logits, exact = jax.jit(model.forward)(params, TOKENS), jax.jit(wide_model.forward)(wide, TOKENS)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, exact, atol=0.05 * np.abs(exact).max())


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_weights_load_straight_to_their_shards(
        directory: Path, kind: AxisType, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
    model, one = load_model(directory)
    read, elements = ArrayReader.read, []
    monkeypatch.setattr(ArrayReader, "read", lambda *a: elements.append(read(*a)) or elements[-1])
    _, params = load_model(directory, mesh=mesh)
    # every element is read once, though four replicas hold it
    assert sum(x.size for x in elements) == sum(x.size for x in jax.tree.leaves(one))
    same(one, params)

    layer = params["layers"]["0"]
    spec = lambda x: tuple(x.sharding.spec)
    assert spec(layer["attn"]["q"]["kernel"]) == spec(layer["attn"]["k"]["kernel"]) == (None, "model")
    assert spec(layer["attn"]["o"]["kernel"]) == spec(layer["mlp"]["down"]["kernel"]) == ("model", None)
    assert params["embed"].sharding.spec == PartitionSpec(None, None)     # 97 entries do not divide
    with jax.set_mesh(mesh):
        logits = jax.jit(lambda p, t: auto_region(model.forward, p, t))(params, TOKENS.repeat(2, 0))
    np.testing.assert_allclose(np.asarray(logits)[::2], jax.jit(model.forward)(one, TOKENS), atol=1e-5)


def test_heads_that_do_not_divide_are_replicated(directory: Path) -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    attn = load_model(directory, mesh=mesh)[1]["layers"]["0"]["attn"]
    assert tuple(attn["q"]["kernel"].sharding.spec) == (None, "model")     # 4 heads
    assert tuple(attn["k"]["kernel"].sharding.spec) == (None, None)        # 2 heads, 16 columns


def test_old_files_load(directory: Path) -> None:
    """`rope_theta` and `rope_scaling` in place of `rope_parameters`, and buffers that were once saved."""
    config = json.loads((directory / "config.json").read_text())
    model, params = load_model(directory)
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["rope_scaling"] = {"type": "linear", "factor": 2.0}
    (directory / "config.json").write_text(json.dumps(config))
    rewritten(directory, **{"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)})
    old, again = load_model(directory)
    same(params, again)
    assert old.config.layers[0].rope.scaling.factor == 2.0
    assert old.config.layers[0].rope.theta == model.config.layers[0].rope.theta


def test_gpt2_files_without_the_prefix_load(tmp_path: Path) -> None:
    saved("gpt2", tmp_path)
    params = load_model(tmp_path)[1]
    tensors = {k.removeprefix("transformer."): v for k, v in load_file(tmp_path / FILE).items()}
    save_file({**tensors, "h.0.attn.bias": np.ones((1, 1, 4, 4), np.float32)}, tmp_path / FILE)
    same(params, load_model(tmp_path)[1])


@pytest.mark.parametrize(("changes", "message"), [
    ({"model.norm.weight": None}, r"model\.safetensors: lacks tensor model\.norm\.weight"),
    ({"model.norm.weight": np.ones(31, np.float32)}, r"model\.norm\.weight has shape \(31,\).* requires \(32,\)"),
    ({"score.weight": np.ones(2, np.float32)}, r"holds tensor score\.weight, which"),
    ({"model.norm.weight": np.ones(32, np.int8)}, r"tensor model\.norm\.weight: got I8, takes F64"),
])
def test_a_wrong_tensor_is_named(directory: Path, changes: dict[str, Any], message: str) -> None:
    with jax.log_compiles(False), pytest.raises(CheckpointError, match=message):
        load_model(rewritten(directory, **changes))


@pytest.mark.parametrize("keep", [4, 100, 5000])
def test_a_truncated_file_is_named(directory: Path, keep: int) -> None:
    whole = (directory / FILE).read_bytes()
    (directory / FILE).write_bytes(whole[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a whole safetensors file"):
        load_model(directory)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
        load_model(tmp_path)
    saved("llama", tmp_path, max_shard_size="20KB")
    (shard := next(tmp_path.glob("model-00002*"))).unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        load_model(tmp_path)
    for path in tmp_path.glob("model*"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"found neither model\.safetensors nor"):
        load_model(tmp_path)


def test_an_index_that_lies_is_named(tmp_path: Path) -> None:
    saved("llama", tmp_path, max_shard_size="20KB")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.extra.weight"] = index["weight_map"]["model.norm.weight"]
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"places tensor model\.extra\.weight in .*, which does not hold it"):
        load_model(tmp_path)


@pytest.mark.parametrize(("changes", "message"), [
    ({"model_type": "qwen4"}, r"got 'qwen4' .*near to qwen\d, .*supported are apertus, .*cohere, .*qwen3, .*gemma3"),
    ({"model_type": None}, "supported are apertus, "),
    ({"hidden_act": "relu6"}, "hidden_act: got 'relu6', supported are silu"),
    ({"rope_parameters": {"rope_type": "axial"}}, "rope_type: got 'axial', supported are default"),
    ({"num_key_value_heads": 3}, "num_attention_heads: got 4, not a multiple of num_key_value_heads = 3"),
    ({"vocab_size": ...}, "lacks 'vocab_size'"),
])
def test_an_unknown_configuration_is_named(directory: Path, changes: dict[str, Any], message: str) -> None:
    config = {**json.loads((directory / "config.json").read_text()), **changes}
    (directory / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{message}"):
        load_model(directory)


@pytest.mark.wide(but=OLDER)
@pytest.mark.parametrize("name", CASES)
def test_saved_models_are_the_loaded_ones_for_transformers_too(name: str, tmp_path: Path) -> None:
    reference = saved(name, tmp_path / "in")
    model, params = load_model(tmp_path / "in")
    save_model(tmp_path / "out", model, params, json.loads((tmp_path / "in" / "config.json").read_text()))
    reread = load_model(tmp_path / "out")
    assert reread[0] == model
    same(params, reread[1])
    stored = load_file(tmp_path / "out" / "model.safetensors")
    if name == "longcat-flash":     # transformers writes, and expects, projections of experts that compute nothing, too
        theirs = load_file(tmp_path / "in" / "model.safetensors")
        beyond = [f".experts.{e}." for e in range(6, 9)]
        own = {key: x for key, x in theirs.items() if not any(part in key for part in beyond)}
        assert stored.keys() == own.keys() < theirs.keys()
        jax.tree.map(np.testing.assert_array_equal, stored, own)
        return
    if CASES[name][0] in SEEING:    # no class for the language model alone
        # The names that transformers itself writes are written again for these, elsewhere those of its classes.
        again = CASES[name][0] in ("glm5_next_text", "step3p5")
        theirs = load_file(tmp_path / "in" / "model.safetensors") if again else {
            key: value.numpy() for key, value in reference.state_dict().items()}
        own = {key.replace("model.language_model.", "model."): value
               for key, value in theirs.items() if not IMAGES.search(key)}
        assert stored.keys() == own.keys()
        jax.tree.map(np.testing.assert_array_equal, stored, own)
        return
    # Not with `reference`: transformers clears the embedding of the padding token when it loads a tied model.
    wanted, theirs = (type(reference).from_pretrained(tmp_path / place) for place in ("in", "out"))
    for key, value in wanted.state_dict().items():
        torch.testing.assert_close(theirs.state_dict()[key], value, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["llama-tied-bias", "llama-dynamic", "llama3", "llama-yarn", "llama-yarn-mscale"])
def test_llamas_save_without_a_configuration(name: str, tmp_path: Path) -> None:
    reference = saved(name, tmp_path / "in")
    model, params = load_model(tmp_path / "in")
    save_model(tmp_path / "out", model, params)
    assert load_model(tmp_path / "out")[0] == model
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    np.testing.assert_allclose(reference_logits(theirs), reference_logits(reference), atol=1e-5)


def test_a_model_made_here_is_loaded_by_transformers_in_bfloat16(tmp_path: Path) -> None:
    model = Transformer(llama(vocab=97, width=32, layers=2, heads=4, kv_heads=2, mlp=48, tied=True))
    params = model.init_params(jax.random.key(0))
    save_model(tmp_path, model, params, {"eos_token_id": 5}, dtype="bfloat16")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert theirs.dtype == torch.bfloat16
    assert theirs.config.eos_token_id == 5
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params)
    np.testing.assert_allclose(reference_logits(theirs.float()), jax.jit(model.forward)(rounded, TOKENS), atol=1e-5)


def test_a_configuration_of_another_model_is_refused(directory: Path, tmp_path: Path) -> None:
    model, params = load_model(directory)
    config = json.loads((directory / "config.json").read_text())
    with pytest.raises(ValueError, match="describes another model"):
        save_model(tmp_path / "out", model, params, {**config, "rms_norm_eps": 0.1})
    gpt2 = saved("gpt2", tmp_path / "gpt2") and load_model(tmp_path / "gpt2")
    with pytest.raises(ValueError, match="not a Llama"):
        save_model(tmp_path / "out", *gpt2)
    assert not (tmp_path / "out").exists()


def test_fresh_weights_have_the_loaded_ones_structure(directory: Path) -> None:
    model, params = load_model(directory)
    fresh = model.init_params(jax.random.key(0), jnp.bfloat16)
    shapes = {path: x.shape for path, x in flatten(params).items()}
    assert shapes == {path: x.shape for path, x in flatten(fresh).items()}
    assert shapes == {path: x.shape for path, x in flatten(model.abstract_params()).items()}
    assert fresh["embed"].dtype == jnp.bfloat16
    assert 0.015 < float(fresh["layers"]["0"]["mlp"]["up"]["kernel"].astype(jnp.float32).std()) < 0.025


def test_layers_that_predict_further_tokens_are_skipped_with_a_message(tmp_path: Path) -> None:
    """And the correction of experts' scores stays float32."""
    saved("glm4-moe", tmp_path)
    extra = np.ones((4, 4), np.float32)
    rewritten(tmp_path, **{"model.layers.3.eh_proj.weight": extra, "model.layers.3.enorm.weight": extra[0]})
    with pytest.warns(UserWarning, match=r"skips 2 tensors of layers .* such as model\.layers\.3\.eh_proj\.weight"):
        model, params = load_model(tmp_path, dtype="bfloat16")
    mixture = params["layers"]["1"]["mlp"]
    assert (mixture["correction"].dtype, mixture["router"]["kernel"].dtype) == (jnp.float32, jnp.bfloat16)
    assert len(model.config.layers) == 3
    config = json.loads((tmp_path / "config.json").read_text())
    save_model(tmp_path / "packed", model, pack(params, "int8"), config)
    again = load_model(tmp_path / "packed")[1]["layers"]["1"]["mlp"]
    assert (again["correction"].dtype, again["router"]["kernel"].dtype) == (jnp.float32, jnp.bfloat16)
    np.testing.assert_array_equal(again["correction"], mixture["correction"])
    assert load_model(tmp_path / "packed", dtype="float16")[1]["layers"]["1"]["mlp"]["correction"].dtype == jnp.float32
    rewritten(tmp_path, **{"model.layers.4.enorm.weight": extra[0]})
    with pytest.raises(CheckpointError, match=r"holds tensor model\.layers\.4\.enorm\.weight"):
        load_model(tmp_path)
