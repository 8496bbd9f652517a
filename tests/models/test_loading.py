"""`dx.load` before any weight is read: what it refuses by name, what it takes from which file, its recipes."""

import dataclasses
import itertools
import json
import re
import textwrap
import time
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
from tokenizers import Tokenizer as Backend
from tokenizers import models as backends

import decodax as dx
from decodax.io.checkpoint import CheckpointError, load_model
from decodax.io.saving import save_model
from decodax.models import Rope, llama
from decodax.models.families import read_config
from decodax.models.fields import KINDS
from decodax.models.rope import Dynamic
from tests.models.tiny import CASES, COMMON, build, saved
from tests.models.tiny_diffusion import CASES as DIFFUSION

ODD: list[Any] = [None, -1, 0, 3, 7, 10**9, 10**400, 1.5, float("nan"), True, "", "x", [], [1], {}, {"a": 1}]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    saved("llama", tmp_path)
    return tmp_path


def edited(directory: Path, **entries: Any) -> Path:
    """The directory with other entries in config.json; `...` takes one out."""
    config = {**json.loads((directory / "config.json").read_text()), **entries}
    (directory / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    return directory


@pytest.mark.parametrize("dtype", ["int8", bool, "float64", float, np.int32, torch.float32, "float8_e4m3fn", "halfish"])
def test_weights_are_of_three_dtypes_and_no_other(dtype: Any, directory: Path) -> None:
    with pytest.raises(ValueError, match=r"^dtype: got .*, takes float32, bfloat16, float16$"):
        dx.load(directory, dtype=dtype)
    model, params = load_model(directory)
    with pytest.raises(ValueError, match=r"^dtype: got .*, takes float32, bfloat16, float16$"):
        save_model(directory / "out", model, params, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", np.float16, jnp.bfloat16, np.dtype("float32"), ml_dtypes.bfloat16])
def test_a_dtype_may_be_a_name_or_a_type(dtype: Any, directory: Path) -> None:
    assert dx.load(directory, dtype=dtype).params["embed"].dtype == jnp.dtype(dtype)


@pytest.mark.parametrize("context", [0, -1, 2.5, True])
def test_a_context_is_a_number_of_tokens(context: Any, directory: Path) -> None:
    with pytest.raises(ValueError, match=r"context: got .*, takes a number of tokens of at least 1"):
        dx.load(directory, context=context)


@pytest.mark.parametrize("name", ["../x.safetensors", "../../etc/passwd", "a/../../x", "/etc/passwd", "..\\x", "C:\\x"])
def test_an_index_stays_in_its_directory(name: str, tmp_path: Path) -> None:
    saved("llama", tmp_path / "model", max_shard_size="20KB")
    index = tmp_path / "model" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    shard = content["weight_map"]["model.norm.weight"]
    # what it points to would load
    (tmp_path / "x.safetensors").write_bytes((tmp_path / "model" / shard).read_bytes())
    content["weight_map"] = {k: name if v == shard else v for k, v in content["weight_map"].items()}
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"index\.json: places tensor .* takes a file in the same directory"):
        dx.load(tmp_path / "model")


def test_shards_may_be_links_to_files_elsewhere(tmp_path: Path) -> None:
    """As in the Hugging Face cache."""
    saved("llama", tmp_path / "model", max_shard_size="20KB")
    (tmp_path / "blobs").mkdir()
    for path in (tmp_path / "model").glob("*.safetensors"):
        path.rename(tmp_path / "blobs" / path.name)
        path.symlink_to(tmp_path / "blobs" / path.name)
    assert dx.load(tmp_path / "model").vocab_size == 97


def test_one_whole_file_goes_before_an_index(tmp_path: Path) -> None:
    """A model saved into the directory of one in several files is the one that is loaded."""
    saved("llama", tmp_path, max_shard_size="20KB")
    model, params = load_model(tmp_path)
    save_model(tmp_path, model, {**params, "embed": params["embed"] + 1})
    assert float(load_model(tmp_path)[1]["embed"][0, 0]) == pytest.approx(float(params["embed"][0, 0]) + 1)


@pytest.mark.parametrize(("entries", "message"), [
    ({"num_hidden_layers": 10**9}, "num_hidden_layers: got 1000000000, takes a whole number from 1 to 10,000"),
    ({"num_hidden_layers": 9999}, r"num_hidden_layers: got 9999, .*model\.safetensors holds 2 layers"),
    ({"num_hidden_layers": 0}, "num_hidden_layers: got 0, takes"),
    ({"vocab_size": 0}, "vocab_size: got 0, takes"),
    ({"hidden_size": -32}, "hidden_size: got -32, takes"),
    ({"hidden_size": "32"}, "hidden_size: got '32', takes a whole number"),
    ({"hidden_size": 32.0}, "hidden_size: got 32.0, takes a whole number"),
    ({"num_attention_heads": True}, "num_attention_heads: got True, takes a whole number"),
    ({"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": ...},
     "num_attention_heads: got 3, which does not divide hidden_size = 32"),
    ({"head_dim": 7}, "head_dim: got 7, .* takes an even number from 2"),
    ({"rms_norm_eps": -1.0}, "rms_norm_eps: got -1.0, takes a number from 0"),
    ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "rope_parameters.factor: got 0, takes a number"),
    ({"rope_parameters": {"rope_type": "linear", "factor": [2]}}, r"rope_parameters.factor: got \[2\], takes a number"),
    ({"rope_parameters": [1]}, r"rope_parameters: got \[1\], takes an object"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1.0}}, "gives no finite frequencies"),
    ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0], "factor": 2.0}},
     "longrope factors: got 1, a rotary width of 8 takes 4"),
    ({"rope_parameters": {"factor": 2.0}}, "rope_type: got none with factor = 2.0"),
    ({"model_type": ["llama"]}, r"model_type: got \['llama'\], takes a name"),
    ({"model_type": "qwen3_later", "layer_types": ["linear_attention"] * 2, "head_dim": 0},
     "model_type: got 'qwen3_later' .*near to qwen"),
    ({"hidden_act": {}}, "hidden_act: got {}, takes a name"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: got 'yes', takes true or false"),
    ({"layer_types": ["chunked_attention"] * 2, "model_type": "mistral"}, "layer_types: got .*takes a list of 'full"),
    ({"layer_types": ["sliding_attention"] * 2, "model_type": "llama4_text", "attention_chunk_size": 5},
     "layer_types: got .*takes a list of 'full_attention' and 'chunked_attention'"),
    ({"layer_types": ["full_attention"], "model_type": "mistral"}, "layer_types: got 1 entries for num_hidden"),
    ({"sliding_window": 0, "model_type": "mistral"}, "sliding_window: got 0, takes"),
    ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config.quant_method: got 'hqq', takes 'fp8', "),
    ({"eos_token_id": "2"}, "eos_token_id: got '2', takes a token id or a list of them"),
])
def test_a_wrong_entry_is_named_at_once(entries: dict[str, Any], message: str, directory: Path) -> None:
    clock = time.perf_counter()
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{message}"):
        dx.load(edited(directory, **entries))
    assert time.perf_counter() - clock < 5


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.wide)])
def test_every_wrong_entry_of_every_family_is_named(every: int) -> None:
    """A configuration is read, or the error has the key at fault or one that it goes with: one without which another
    has no effect is refused by the name of the other. By default every fifth case is tried."""
    tried = itertools.count()
    configs = [{**COMMON, **options, "model_type": kind} for kind, options, _ in CASES.values()]
    configs += [config for config, _ in DIFFUSION.values()]
    for config in configs:
        nested = [(place, key) for place in ("rope_parameters", "rope_scaling") for key in config.get(place) or {}]
        for place, key in [(None, key) for key in config if key in KINDS] + nested:
            if key == "model_type" and config is not configs[0]:
                continue        # an unknown one is compared with all families, which takes long and is the same for all
            for value in ODD:
                if next(tried) % every:
                    continue
                changed = {**config, place: {**config[place], key: value}} if place else {**config, key: value}
                error = refused(changed)
                related = (key, place or key, "heads", "rotary", "rope", "does not have here")
                assert error is None or any(name in error for name in related), (
                    config["model_type"], key, value, error)


def refused(config: dict[str, Any]) -> str | None:
    """What is said of a configuration that cannot be read."""
    try:
        read_config(config)
    except ValueError as e:
        return str(e)
    return None


def test_sizes_of_a_decoder_are_checked_without_a_file_too() -> None:
    config = llama(vocab=8, width=8, layers=1, heads=2, mlp=8)
    for name in ("vocab", "width", "heads", "kv_heads", "head_dim", "mlp", "context"):
        with pytest.raises(ValueError, match=f"{name}: got 0, takes 1 or more"):
            dataclasses.replace(config, **{name: 0})
    with pytest.raises(ValueError, match="layers: got none"):
        dataclasses.replace(config, layers=())
    with pytest.raises(ValueError, match="sliding: got 0, takes 1 or more"):
        dataclasses.replace(config.layers[0], sliding=0)
    with pytest.raises(ValueError, match="rope width: got 3, takes an even number"):
        Rope(3)
    with pytest.raises(ValueError, match=r"rope scaling: got Dynamic.*no finite frequencies"):
        Rope(4, scaling=Dynamic(float("nan"), 16))


def test_a_head_beside_a_tied_embedding_says_the_same(tmp_path: Path) -> None:
    saved("llama-tied-bias", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}, file)
    dx.load(tmp_path)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, file)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor lm_head\.weight differs from .*tie_word"):
        dx.load(tmp_path)
    dx.load(edited(tmp_path, tie_word_embeddings=False))


def run(recipe: str) -> None:
    """Runs the indented lines of an error."""
    lines = [line for line in recipe.splitlines() if line.startswith("    ")]
    assert lines, recipe
    import transformers
    exec(textwrap.dedent("\n".join(lines)), {"transformers": transformers})


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "flax_model.msgpack"])
def test_weights_in_another_format_come_with_a_recipe(name: str, directory: Path) -> None:
    reference = build("llama")
    (directory / "model.safetensors").unlink()
    torch.save(reference.state_dict(), directory / name)
    with pytest.raises(CheckpointError, match=rf"holds {name} .*safetensors") as error:
        dx.load(directory)
    assert "safe_serialization=True" in str(error.value)
    if name == "pytorch_model.bin":
        run(str(error.value))
        np.testing.assert_array_equal(dx.load(directory).params["embed"], reference.model.embed_tokens.weight.detach())
    (directory / "config.json").unlink()
    with pytest.raises(CheckpointError, match=rf"has no config\.json.*; .*holds {name}"):
        dx.load(directory)


def test_the_directory_of_a_gguf_file_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"holds model\.gguf, which is a whole model"):
        dx.load(tmp_path)


def test_other_safetensors_and_a_files_path_are_named(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "model.fp16.safetensors")
    with pytest.raises(CheckpointError, match=r"found neither .* beside model\.fp16\.safetensors"):
        dx.load(directory)
    with pytest.raises(ValueError, match=r"got the file .*config\.json, takes the directory of a model"):
        dx.load(directory / "config.json")


@pytest.mark.parametrize("config", [True, False])
def test_an_adapter_is_no_model(config: bool, directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "base/model"}))
    if not config:
        (directory / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"holds an adapter .*base/model\. .*\n.*decodax\.load\(.*adapter="):
        dx.load(directory)


def test_special_ids_are_those_of_config_json_where_nothing_else_has_them(directory: Path) -> None:
    (directory / "generation_config.json").unlink()
    lm = dx.load(edited(directory, eos_token_id=[2, 5], bos_token_id=1, pad_token_id=-1))
    assert (lm.eos, lm.bos, lm.pad) == ([2, 5], 1, 2)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 7, "bos_token_id": None}))
    lm = dx.load(directory)
    assert (lm.eos, lm.bos) == ([7], 1)
    for none in (-1, [-1], [-1, -7]):
        edited(directory, eos_token_id=none, bos_token_id=-1, pad_token_id=-2)
        (directory / "generation_config.json").write_text(json.dumps({
            "eos_token_id": none, "forced_eos_token_id": none, "forced_bos_token_id": -1, "suppress_tokens": [-1],
            "decoder_start_token_id": -1}))
        lm = dx.load(directory)
        assert (lm.eos, lm.bos, lm.pad) == ([], None, 0)
        out = dx.generate(lm, [[5, 6], [7]], max_new_tokens=[2, 4])
        assert out.lengths.tolist() == [2, 4] and out.tokens.min() == 0
    for key in ("pad_token_id", "eos_token_id"):
        (directory / "generation_config.json").write_text(json.dumps({key: 97}))
        with pytest.raises(ValueError, match=rf"generation config.*: {key}: got .*97, takes .*ids? below"):
            dx.generate(dx.load(directory), [[5]], max_new_tokens=1)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 1.5}))
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id: got 1\.5, takes a token id"):
        dx.load(directory)
    (directory / "generation_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"generation_config\.json: got list, takes a JSON object"):
        dx.load(directory)


def test_a_tokenizer_that_is_not_read_comes_with_a_recipe(directory: Path) -> None:
    vocabulary, merges = {"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}, "#version: 0.2\na b\n"
    (directory / "vocab.json").write_text(json.dumps(vocabulary))
    (directory / "merges.txt").write_text(merges)
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    with pytest.raises(CheckpointError, match=r"has merges\.txt, .*vocab\.json and no tokenizer\.json") as error:
        dx.load(directory)
    run(str(error.value))
    lm = dx.load(directory)
    assert lm.tokenizer is not None
    assert lm.tokenizer.encode("ab") == [2]


def test_a_tokenizer_may_come_from_elsewhere(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert dx.load(directory).tokenizer is None
    other = tmp_path_factory.mktemp("other")
    with pytest.raises(FileNotFoundError, match=r"other.*: takes a tokenizer\.json, has no tokenizer file"):
        dx.load(directory, tokenizer=other)
    Backend(backends.BPE(vocab={"a": 0, "b": 1}, merges=[])).save(str(other / "tokenizer.json"))
    lm = dx.load(directory, tokenizer=other)
    assert lm.tokenizer is not None
    assert lm.tokenizer.encode("ab") == [0, 1]
    assert dx.load(directory, tokenizer=lm.tokenizer).tokenizer is lm.tokenizer


WRAPPERS = {
    "torch.compile": lambda name: f"_orig_mod.{name}", "ddp": lambda name: f"module.{name}",
    "both": lambda name: f"module._orig_mod.{name}", "lightning": lambda name: f"net.{name}",
    "lightning, the same name": lambda name: f"model.{name}", "merged by peft": lambda name: f"base_model.model.{name}",
    "deepspeed in lightning": lambda name: f"_forward_module.model.{name}",
    "fsdp": lambda name: f"_fsdp_wrapped_module.{name.replace('.mlp.', '._fsdp_wrapped_module.mlp.')}",
    "compiled layers": lambda name: re.sub(r"(\d+)\.", r"\1._orig_mod.", name),
    "activation checkpoints": lambda name: re.sub(r"(\d+)\.", r"\1._checkpoint_wrapped_module.", name),
    "a compiled body": lambda name: name.replace("model.", "model._orig_mod.", 1)}


def renamed(directory: Path, change: Any) -> None:
    file = directory / "model.safetensors"
    save_file({change(name): x for name, x in load_file(file).items()}, file, metadata={"format": "pt"})


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("bare", [False, True])
def test_names_of_wrappers_are_taken_off(wrapper: str, bare: bool, directory: Path) -> None:
    plain = load_model(directory)[1]
    if bare:
        renamed(directory, lambda name: name.removeprefix("model."))
    renamed(directory, WRAPPERS[wrapper])
    jax.tree.map(np.testing.assert_array_equal, load_model(directory)[1], plain)


@pytest.mark.parametrize("kind", ["gpt2", "t5", "mamba", "mamba2"])
def test_names_of_wrappers_are_taken_off_in_other_families(kind: str, tmp_path: Path) -> None:
    """Of models without an output head in the file, too."""
    small = dict(vocab_size=32, hidden_size=16, n_embd=16, d_model=16, d_ff=16, d_kv=8, num_heads=2, n_layer=1,
                 n_head=2, num_layers=1, num_hidden_layers=1, n_positions=16, state_size=8, head_dim=16, expand=2,
                 n_groups=1)
    config = transformers.AutoConfig.for_model(kind, **small)
    auto = transformers.AutoModelForSeq2SeqLM if kind == "t5" else transformers.AutoModelForCausalLM
    auto.from_config(config).save_pretrained(tmp_path)
    plain = dx.load(tmp_path).params
    for change in (lambda name: f"module.{name}", lambda name: f"student.{name}"):
        renamed(tmp_path, change)
        jax.tree.map(np.testing.assert_array_equal, dx.load(tmp_path).params, plain)


@pytest.mark.parametrize(("change", "message"), [
    (lambda name: name.replace("layers", "blocks"),
     r"holds tensors lm_head\.weight, model\.blocks\.0.*no layer under the names .*; takes model\.embed_tokens"),
    (lambda name: f"x.{name}" if "layers" in name else f"y.{name}", r"holds tensors x\.model\.layers.*and no layer"),
    (lambda name: f"x{name}".replace("layers", "l"), r"holds tensors xlm_head\.weight, xmodel.*and no layer"),
    (lambda name: f"x{name}", r"lacks tensor lm_head\.weight.*; holds tensor xlm_head\.weight")])
def test_errors_about_other_names_say_what_is_expected(change: Any, message: str, directory: Path) -> None:
    renamed(directory, change)
    with pytest.raises(CheckpointError, match=message):
        dx.load(directory)


def test_two_copies_of_a_tensor_are_refused(directory: Path) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "module.model.norm.weight": tensors["model.norm.weight"] + 1}, file)
    with pytest.raises(CheckpointError, match=r"module\.model\.norm\.weight.*differ only in wrappers"):
        dx.load(directory)
