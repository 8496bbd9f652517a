"""What data shows of kernels, packing by it, and saving what was packed."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import decodax as dx
from decodax.io.files import CheckpointError, Files
from decodax.io.load import LM
from decodax.io.text import Tokenizer
from decodax.models import Transformer, llama
from decodax.models.calibration import Statistic, mean_loss, observe
from decodax.models.diffusion import Diffusion
from decodax.models.formats import FORMATS, Format, Ggml, Int8, kernels, pack
from decodax.models.names import flatten
from decodax.models.packed import Packed
from decodax.models.routing import Experts
from tests.matrix import often
from tests.models.tiny import saved

SHAPE = dict(vocab=61, width=16, layers=2, heads=4, kv_heads=2, mlp=24)
TOKENS = np.asarray(jax.random.randint(jax.random.key(1), (3, 9), 0, 61))
MODELS = {"dense": (llama(**SHAPE), None), "tied": (llama(**SHAPE, tied=True), None),
          "experts": (dataclasses.replace(llama(**SHAPE), layers=tuple(
              dataclasses.replace(layer, experts=Experts(count=4, chosen=2, width=12))
              for layer in llama(**SHAPE).layers)), None),
          "masks": (llama(**SHAPE), Diffusion(mask=60)),
          "blocks": (llama(**SHAPE), Diffusion(mask=60, shift=True, attention="block-causal", block=4))}


@dataclasses.dataclass(frozen=True)
class Gradients(Statistic):
    """The gradient of the kernel, of each sequence to a power."""

    power: int = 1

    def of(self, x: jax.Array, gradient: jax.Array) -> jax.Array:
        return x.T @ gradient

    def each(self, total: jax.Array) -> jax.Array:
        return total**self.power


@dataclasses.dataclass(frozen=True)
class Loudest(Format):
    """Integers of 8 bits of the inputs that were largest: a format that goes by data."""

    keep: int = 4

    @property
    def statistic(self) -> Statistic:
        return Squares()

    def packs(self, path: str) -> bool:
        return path.startswith("layers.")

    def pack(self, kernel: jax.Array, seen: Any = None) -> Packed:
        least = jnp.sort(seen)[..., -self.keep, None]
        return Int8().pack(jnp.where((seen >= least)[..., None], kernel, 0))


@dataclasses.dataclass(frozen=True)
class Squares(Statistic):
    def of(self, x: jax.Array, gradient: jax.Array) -> jax.Array:
        return (x**2).sum(0)


def lm(name: str = "dense") -> LM:
    config, diffusion = MODELS[name]
    model = Transformer(config)
    return LM(model=model, params=model.init_params(jax.random.key(0)), vocab_size=61, diffusion=diffusion)


@pytest.mark.wide
@pytest.mark.parametrize("name", often(["tied", "experts", "blocks"], MODELS))
def test_watched_kernels_see_what_gradients_are_made_of(name: str) -> None:
    """Their sum of outer products of inputs and gradients is the kernel's own gradient; fillers of experts add none."""
    own = lm(name)
    diffusion = MODELS[name][1]
    paths = kernels(own.params)
    seen = observe(own.model, own.params, TOKENS, Gradients(2), paths, diffusion)
    loss = jax.jit(jax.grad(lambda p, row, key: mean_loss(own.model, p, row, diffusion, key)))
    each = [flatten(loss(own.params, jnp.asarray(row[None]), jax.random.key(i))) for i, row in enumerate(TOKENS)]
    for path in paths:
        if path == "embed":     # whose gradient is also that of the embeddings
            continue
        wanted = sum(np.square(np.asarray(one[path], np.float64)) for one in each)
        assert wanted.max() > 0
        np.testing.assert_allclose(seen[path], wanted, rtol=1e-4, atol=1e-4 * wanted.max())


@pytest.mark.wide
def test_a_tied_head_sees_hidden_states() -> None:
    own = lm("tied")
    seen = observe(own.model, own.params, TOKENS, Squares(), ["embed"])["embed"]
    hidden = np.concatenate([own.model.features(own.params, row[None, :-1])[0][0] for row in TOKENS])
    np.testing.assert_allclose(seen, np.square(hidden).sum(0), rtol=1e-5)


@pytest.mark.full
def test_memory_changes_how_often_the_data_is_read_and_nothing_else() -> None:
    own, data = lm(), TOKENS.tolist()
    made = [dx.quantize(own, Loudest(), data, length=9, memory=memory).params for memory in (700, 1 << 30)]
    jax.tree.map(np.testing.assert_array_equal, *made)
    packed = {path for path, leaf in flatten(made[0]).items() if isinstance(leaf, Packed)}
    assert packed == set(kernels(own.params)) - {"lm_head.kernel"}


@pytest.mark.wide
def test_sequences_are_taken_from_all_over_the_data() -> None:
    seen = [dx.quantize(lm(), Loudest(), data, length=3, sequences=count).params
            for data, count in ((TOKENS[:2].tolist(), 2), ([TOKENS[0, :3].tolist(), TOKENS[1, 6:].tolist()], 9))]
    jax.tree.map(np.testing.assert_array_equal, *seen)


def test_a_format_without_data_is_packed_as_load_packs_it() -> None:
    made = dx.quantize(lm("tied"), "int4").params
    jax.tree.map(np.testing.assert_array_equal, made, pack(lm("tied").params, "int4"))


@pytest.mark.parametrize(("options", "message"), [
    (dict(data=None), r"^data: got None, but Loudest\(keep=4\) needs calibration data"),
    (dict(data=[]), r"^data: got \[\]"),
    (dict(data="text"), r"^data: got a string"),
    (dict(data=["text"]), r"^data\[0\]: got a text for 'model', which has no tokenizer"),
    (dict(data=[[1, 2], [3, 61]]), r"^data\[1\]: got id 61, takes 0 to 60$"),
    (dict(data=[[1]]), r"^data: got 1 tokens, takes at least 2$"),
    (dict(data=[[1, 2]], length=1), r"^length: got 1, takes an int of at least 2$"),
    (dict(data=[[1, 2]], sequences=0), r"^sequences: got 0, takes an int of at least 1$"),
    (dict(data=[[1, 2]], memory=0.5), r"^memory: got 0.5, takes an int of at least 1$"),
])
def test_bad_arguments_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dx.quantize(lm(), Loudest(), **options)


def test_bad_models_and_formats_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^weights: got 'int9', takes 'int8'"):
        dx.quantize(lm(), "int9")
    with pytest.raises(ValueError, match=r"^lm: got 'model' with packed weights"):
        dx.quantize(dx.quantize(lm(), "int8"), "int8")
    blind = dataclasses.replace(lm(), diffusion=Diffusion(mask=60, attention="causal", block=2))
    with pytest.raises(ValueError, match=r"^lm: got causal attention, takes a model with full"):
        dx.quantize(blind, Loudest(), [[1, 2]])
    with pytest.raises(ValueError, match=r"^weights: Loudest\(keep=4\) needs calibration data: decodax.quan"):
        pack(lm().params, Loudest())


@pytest.mark.parametrize("weights", often(["int4", "fp8", "bfloat16"], FORMATS))
def test_packed_weights_are_loaded_as_they_were_saved(weights: str, tmp_path: Path) -> None:
    if FORMATS[weights].statistic is not None or isinstance(FORMATS[weights], Ggml):
        pytest.skip("in the tests of this format")
    saved("qwen2", tmp_path / "whole")
    own = dx.load(tmp_path / "whole", weights=weights)
    dx.save(own, tmp_path / "packed")
    again = dx.load(tmp_path / "packed")
    assert jax.tree.structure(own.params) == jax.tree.structure(again.params)
    jax.tree.map(np.testing.assert_array_equal, own.params, again.params)
    assert again.eos == own.eos and again.model == own.model
    half = dx.load(tmp_path / "packed", dtype="bfloat16").params
    assert half["norm"]["scale"].dtype == jnp.bfloat16


def test_arrays_are_saved_for_transformers_too(tmp_path: Path) -> None:
    saved("qwen2", tmp_path / "whole")
    own = dx.load(tmp_path / "whole")
    dx.save(own, tmp_path / "again")
    jax.tree.map(np.testing.assert_array_equal, own.params, dx.load(tmp_path / "again").params)
    assert "packed_weights" not in json.loads((tmp_path / "again" / "config.json").read_text())


def test_a_packed_model_is_saved_whole(tmp_path: Path) -> None:
    """With another tokenizer than that of its directory, defaults that were changed, and how it fills masks."""
    own = dx.load("pycode-draft")
    defaults = {"temperature": 0.3, "eos_token_id": [5, 7]}
    changed = dataclasses.replace(own, tokenizer=dx.load("tasks-diffusion").tokenizer, generation_config=defaults,
                                  diffusion=Diffusion(mask=3, attention="block-causal", block=4))
    dx.save(changed, tmp_path, dtype="bfloat16")
    again = dx.load(tmp_path)
    assert again.tokenizer is not None and changed.tokenizer is not None
    assert again.tokenizer.encode("sort 1") == changed.tokenizer.encode("sort 1")
    assert again.diffusion == changed.diffusion and again.eos == [5, 7]
    assert again.generation_config["temperature"] == 0.3
    assert Files(tmp_path).slice("model.norm.weight").get_dtype() == "BF16"
    with pytest.raises(ValueError, match=r"^lm: got 'pycode-draft' with a tokenizer that was made in memory"):
        dx.save(dataclasses.replace(own, tokenizer=Tokenizer(own.tokenizer.backend)), tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_broken_packed_weights_are_named(tmp_path: Path) -> None:
    saved("qwen2", tmp_path / "whole")
    dx.save(dx.load(tmp_path / "whole", weights="int8"), tmp_path)
    with pytest.raises(ValueError, match=r"^weights: got 'int4', but the weights of .* are packed already; takes None"):
        dx.load(tmp_path, weights="int4")
    config = json.loads((tmp_path / "config.json").read_text())
    path = "layers.1.mlp.up.kernel"

    def fails(message: str, **changes: Any) -> None:
        entries = {**config["packed_weights"], **changes}
        (tmp_path / "config.json").write_text(json.dumps(config | {"packed_weights": {
            key: value for key, value in entries.items() if value != "gone"}}))
        with pytest.raises(CheckpointError, match=message):
            dx.load(tmp_path)

    fails(r"config.json: packed_weights: differs from the network: " + path, **{path: "gone"})
    fails(path + r": kind: got 'Other', takes Scaled", **{path: {"kind": "Other", "fields": {}}})
    fails(path + r": 'codes'", **{path: {"kind": "Scaled", "fields": {}}})
    array = {"dtype": "float32", "shape": [32, 48]}
    fails(path + r": .*model.safetensors lacks tensor " + path, **{path: array})
    fails(path + r": 'shape'", **{path: {"dtype": "float32"}})
    file = tmp_path / "model.safetensors"
    tensors, name = load_file(file), path + ".codes"
    for broken in (tensors[name][:-1], tensors[name].astype(np.int16)):
        save_file(tensors | {name: broken}, file)
        fails(rf"{path}: .*model.safetensors: tensor {name} is \w+ of shape .*, takes I8 of shape \(48, 32\)")
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 40}))
    with pytest.raises(CheckpointError, match=r"weight layers.0.mlp.down.kernel has shape \(32, 48\), .* \(32, 40\)"):
        dx.load(tmp_path)
