"""GGUF files: small models as llama.cpp's converter writes them are loaded as they are, and broken ones are named."""

from __future__ import annotations

import builtins
import dataclasses
import logging
import re
from pathlib import Path
from typing import Any, ClassVar

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.bench.plan.front import abstract
from decodax.cli import main
from decodax.engine.methods import model
from decodax.io.files import CheckpointError
from decodax.io.gguf.reader import GgufFile
from decodax.io.load import find
from decodax.models.formats import Int8
from decodax.models.formats.ggml import GgmlBlocks
from decodax.models.formats.scaled import Scaled
from decodax.models.names import flatten, sources
from tests.io.gguf.writing import SHAPES, Type, mixed, network, restored, write

IDS = jnp.asarray(np.arange(3, 23)[None] * 7 % 250)
FLOAT = lambda tensor: Type.F32


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama in mixed types."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    write(path, "llama", network("llama")[1], mixed)
    return path


@pytest.mark.wide(but=("gemma3",))
@pytest.mark.parametrize("name", SHAPES)
def test_logits_are_those_of_the_weights_that_were_written(name: str, tmp_path: Path) -> None:
    model, weights = network(name)
    kept = write(tmp_path / "m.gguf", name, weights, FLOAT if SHAPES[name].fused else mixed)
    lm: Any = dx.load(tmp_path / "m.gguf")
    assert lm.model.config == model.config
    wanted = model.forward(restored(model, kept), IDS)
    np.testing.assert_allclose(lm.model.forward(lm.params, IDS), wanted, atol=2e-4 * float(jnp.abs(wanted).max()))


@pytest.mark.wide(but=("llama", "gemma3", "glm4moe"))
@pytest.mark.parametrize("name", sorted(SHAPES.keys() - {"granitemoe", "gpt-oss", "gemma4-moe"}))   # renamed by hand
def test_tensors_have_the_names_that_the_package_gguf_gives_them(name: str, tmp_path: Path) -> None:
    model, weights = network(name)
    write(tmp_path / "m.gguf", name, weights, FLOAT)
    found = GgufFile(tmp_path / "m.gguf")
    kind = next(kind for kind, text in gguf.MODEL_ARCH_NAMES.items() if text == found.metadata["general.architecture"])
    names = gguf.get_tensor_name_map(kind, len(model.config.layers))
    published = sources(SHAPES[name].entries["model_type"], model.config, model.abstract_params())
    # As the converter renames them first.
    own = {re.sub(r"e_score_correction_bias$", "e_score_correction.bias", source.tensors[0].replace(
        ".experts.0.", ".experts.").removesuffix("_bias")).replace("moe_statics.", "") for source in published.values()}
    given = {names.get_name(each, try_suffixes=(".weight", ".bias", "_bias")) for each in own}
    stems = lambda tensors: {tensor.removesuffix(".weight").removesuffix(".bias") for tensor in tensors}
    assert stems(found.tensors.keys() - SHAPES[name].tensors.keys()) == stems(given)


def test_kernels_stay_packed_and_the_rest_becomes_arrays(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    leaves = flatten(dx.load(file).params)
    kernels = [path for path in leaves if path.endswith("kernel") or path == "embed"]
    assert all(isinstance(leaves[path], GgmlBlocks) for path in kernels)
    assert not any(isinstance(leaf, GgmlBlocks) for path, leaf in leaves.items() if path not in kernels)
    bits = lambda path: 8 * sum(x.nbytes for x in jax.tree.leaves(leaves[path])) / np.prod(leaves[path].shape)
    assert [bits(f"layers.0.{path}.kernel") for path in ("attn.q", "attn.v")] == [4.5, 6] and bits("embed") == 8.5
    assert not caplog.records


def test_half_precision_kernels_stay_as_they_are(tmp_path: Path) -> None:
    model, weights = network("qwen2")
    kinds = lambda tensor: Type.F16 if "attn" in tensor else Type.BF16
    kept = write(tmp_path / "m.gguf", "qwen2", weights, kinds)
    lm: Any = dx.load(tmp_path / "m.gguf")
    leaves = flatten(lm.params)
    stored = {path: leaf.codes.dtype.name for path, leaf in leaves.items() if isinstance(leaf, Scaled)}
    assert stored["layers.0.attn.q.kernel"] == "float16"
    assert stored["layers.0.mlp.up.kernel"] == stored["embed"] == "bfloat16"
    wanted = model.forward(restored(model, kept), IDS)
    np.testing.assert_allclose(lm.model.forward(lm.params, IDS), wanted, atol=2e-4)


def test_a_type_without_a_packed_form_is_widened_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, weights = network("llama")
    write(tmp_path / "m.gguf", "llama", weights, lambda tensor: Type.Q8_0)
    plain: Any = dx.load(tmp_path / "m.gguf")
    data = bytearray((tmp_path / "m.gguf").read_bytes())
    tensor = GgufFile(tmp_path / "m.gguf").tensors["blk.0.attn_k.weight"]
    draw = np.random.default_rng(0).integers(0, 256, (128, 84), dtype=np.uint8)         # Q2_K: 84 bytes for 256
    draw[:, 80:] = np.array([0.01, 0.01], np.float16).view(np.uint8)
    data[tensor.start:tensor.start + draw.size] = draw.tobytes()
    at = data.index(b"blk.0.attn_k.weight") + len("blk.0.attn_k.weight") + 4 + 16
    data[at:at + 4] = int(Type.Q2_K).to_bytes(4, "little")
    (tmp_path / "m.gguf").write_bytes(data)
    lm: Any = dx.load(tmp_path / "m.gguf")
    assert len(caplog.records) == 1 and caplog.records[0].levelno == logging.WARNING
    assert "1 of type Q2_K (blk.0.attn_k.weight) become float32" in caplog.text
    found = flatten(lm.params)["layers.0.attn.k.kernel"]
    own = gguf.quants.dequantize(draw, Type.Q2_K).reshape(2, 32, 2, 256).swapaxes(1, 2).reshape(128, 256)
    np.testing.assert_array_equal(found, own.T)
    assert isinstance(flatten(plain.params)["layers.0.attn.k.kernel"], GgmlBlocks)


@pytest.mark.wide
@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_another_format_of_the_weights(weights: str, file: Path) -> None:
    lm, other = dx.load(file), dx.load(file, weights=weights)
    leaves = flatten(other.params)
    assert all(isinstance(leaf, Scaled) for path, leaf in leaves.items() if path.endswith("kernel"))
    one, two = (each.model.forward(each.params, IDS) for each in (lm, other))       # type: ignore[attr-defined]
    np.testing.assert_allclose(one, two, atol=(1e-4 if weights == "float32" else 0.05) * float(jnp.abs(one).max()))


def test_a_file_is_packed_anew(file: Path, tmp_path: Path) -> None:
    own, anew = dx.quantize(dx.load(file), "int8"), dx.load(file, weights="int8")
    assert jax.tree.structure(own.params) == jax.tree.structure(anew.params)
    jax.tree.map(np.testing.assert_array_equal, own.params, anew.params)
    with pytest.raises(ValueError, match=r"^lm: got 'small' with packed weights, takes arrays"):
        dx.quantize(anew, "int8")


@pytest.mark.wide
def test_the_command_quantize_takes_a_file(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", str(file), str(tmp_path / "out"), "--weights", "int8"]) == 0
    assert re.search(r"out: 1\.\d MB in int8, 0\.8 MB before\n$", capsys.readouterr().out)
    anew: Any = dx.load(file, weights="int8")
    jax.tree.map(np.testing.assert_array_equal, dx.load(tmp_path / "out").params, anew.params)


@dataclasses.dataclass(frozen=True)
class Counted(Int8):
    """int8 that notes each kernel that it is traced for."""

    traced: ClassVar[list[tuple[int, ...]]] = []

    def pack(self, kernel: jax.Array, seen: Any = None) -> Scaled:
        self.traced.append(kernel.shape)
        return super().pack(kernel, seen)


def test_kernels_of_one_shape_are_packed_and_converted_by_one_program(file: Path, tmp_path: Path,
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    lm: Any = dx.load(file, weights=Counted())
    shapes = [leaf.shape for leaf in flatten(lm.params).values() if isinstance(leaf, Scaled)]
    assert len(shapes) == 15 and 1 <= len(Counted.traced) <= 5
    dx.save(lm, tmp_path)
    here, traced = Scaled.here, []
    monkeypatch.setattr("decodax.models.packed.platform", lambda: "gpu")      # on CPU nothing is converted
    monkeypatch.setattr(Scaled, "here", lambda self: traced.append(self.shape) or here(self))
    dx.load(tmp_path)
    assert 1 <= len(traced) <= 5


@pytest.mark.wide
def test_drafted_text_is_that_of_plain_decoding(file: Path) -> None:
    lm = dx.load(file)
    prompts = ["hello hello hello", "abcabcabc"]
    plain = dx.generate(lm, prompts, max_new_tokens=8, eos_token_id=[])
    drafted = dx.generate(lm, prompts, max_new_tokens=8, eos_token_id=[], algorithm="prompt-lookup:length=3")
    assert drafted.tokens.tolist() == plain.tokens.tolist()


def test_a_string_names_a_file_wherever_a_model_is_taken(file: Path) -> None:
    lm, name = dx.load(file), str(file)
    options: dict[str, Any] = dict(max_new_tokens=4, eos_token_id=[])
    wanted = dx.generate(lm, ["hello"], **options)
    assert dx.generate(name, ["hello"], **options).tokens.tolist() == wanted.tokens.tolist()
    assert find(file) == file and model(name) is model(file)
    assert dx.score(name, ["hello"]).bits_per_byte == dx.score(lm, ["hello"]).bits_per_byte
    assert abstract(name).model.config == lm.model.config       # type: ignore[attr-defined]


def test_tokenizer_special_ids_and_template_come_from_the_file(file: Path) -> None:
    lm = dx.load(file)
    tokenizer: Any = lm.tokenizer
    assert (lm.bos, lm.eos, lm.pad) == (1, [2, 0], 2) and len(tokenizer) == 260
    text = "he said: \u00e9t\u00e9\n\n 12<|im_end|>"
    ids = tokenizer.encode(text)
    assert ids[0] == 259 and ids[-1] == 2 and tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.chat_text([{"role": "user", "content": "hi"}]) == "<|im_start|>user\nhi<|im_end|>\n"


def test_sentence_piece_merges_by_score_and_falls_back_to_bytes(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "llama", network("llama")[1], FLOAT, tokenizer="llama")
    lm = dx.load(tmp_path / "m.gguf")
    tokenizer: Any = lm.tokenizer
    spell = lambda text: [tokenizer.backend.id_to_token(i) for i in tokenizer.encode(text)]
    assert spell("hello") == ["<s>", "▁hello"] and spell("hell") == ["<s>", "▁", "he", "ll"]
    assert spell("ho!")[-1] == "<0x21>" and tokenizer.decode(tokenizer.encode("hello ho!")) == "hello ho!"


@pytest.mark.wide
def test_calls_sample_as_the_file_recommends(tmp_path: Path) -> None:
    recommend = lambda writer: [writer.add_int32("general.sampling.top_k", 64),
                                writer.add_float32("general.sampling.top_p", 0.95)]
    write(tmp_path / "m.gguf", "llama", network("llama")[1], FLOAT, change=recommend)
    lm, options = dx.load(tmp_path / "m.gguf"), dict[str, Any](max_new_tokens=8, seed=1, eos_token_id=[])
    own = dx.generate(lm, ["hello"], **options).tokens.tolist()
    assert own == dx.generate(lm, ["hello"], temperature=1.0, top_k=64, top_p=0.95, **options).tokens.tolist()
    assert own != dx.generate(lm, ["hello"], temperature=0.0, **options).tokens.tolist()


def test_a_loaded_file_is_saved_and_loaded_as_a_directory(file: Path, tmp_path: Path) -> None:
    lm: Any = dx.load(file)
    dx.save(lm, tmp_path)
    again: Any = dx.load(tmp_path)
    assert again.model == lm.model and jax.tree.structure(again.params) == jax.tree.structure(lm.params)
    jax.tree.map(np.testing.assert_array_equal, again.params, lm.params)
    assert (again.bos, again.eos, again.pad) == (lm.bos, lm.eos, lm.pad)
    chat, text = [{"role": "user", "content": "hi"}], "he said<|im_end|>"
    assert again.tokenizer.encode(text) == lm.tokenizer.encode(text)
    assert again.tokenizer.chat_text(chat) == lm.tokenizer.chat_text(chat)


def broken(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_a_truncated_file_names_the_tensor(file: Path, tmp_path: Path) -> None:
    data = file.read_bytes()
    last = max(GgufFile(file).tensors.values(), key=lambda tensor: tensor.start)
    with pytest.raises(CheckpointError, match=rf"tensor {last.name}: takes bytes .* it is cut off"):
        dx.load(broken(tmp_path / "m.gguf", data[:-100]))
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.tokens: the file ends within it"):
        dx.load(broken(tmp_path / "m.gguf", data[:data.index(b"<|im_end|>")]))
    with pytest.raises(CheckpointError, match=r"begins with b'GG'"):
        dx.load(broken(tmp_path / "m.gguf", b"GG"))
    with pytest.raises(CheckpointError, match=r"version: got 9, takes 2 or 3"):
        dx.load(broken(tmp_path / "m.gguf", data[:4] + b"\x09" + data[5:]))


def test_an_unsupported_type_names_it_and_the_tensor(file: Path, tmp_path: Path) -> None:
    data, name = bytearray(file.read_bytes()), b"blk.1.attn_v.weight"
    at = data.index(name) + len(name) + 4 + 16
    data[at:at + 4] = (99).to_bytes(4, "little")
    with pytest.raises(CheckpointError, match=r"tensor blk\.1\.attn_v\.weight: has type 99, which"):
        dx.load(broken(tmp_path / "m.gguf", bytes(data)))
    data[at:at + 4] = int(Type.I8).to_bytes(4, "little")
    with pytest.raises(CheckpointError, match=r"tensor blk\.1\.attn_v\.weight: has type I8, takes F32"):
        dx.load(broken(tmp_path / "m.gguf", bytes(data)))


def test_an_unknown_architecture_lists_the_near_ones(file: Path, tmp_path: Path) -> None:
    data = file.read_bytes().replace(b"general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0llama",
                                     b"general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0gemmo")
    with pytest.raises(CheckpointError, match=r"general\.architecture: got 'gemmo', near to gemma.*; supported are"):
        dx.load(broken(tmp_path / "m.gguf", data))


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    _, weights = network("llama")
    write(tmp_path / "m.gguf", "llama", weights, FLOAT, drop="blk.1.ffn_up.weight")
    with pytest.raises(CheckpointError, match=r"lacks tensor blk\.1\.ffn_up\.weight"):
        dx.load(tmp_path / "m.gguf")
    write(tmp_path / "m.gguf", "llama", weights, FLOAT, change=lambda file: file.add_uint32("llama.expert_count", 4))
    with pytest.raises(CheckpointError, match=r"lacks llama\.expert_used_count"):
        dx.load(tmp_path / "m.gguf")
    wrong = {path: w[:100] if path == "embed" else w for path, w in weights.items()}
    write(tmp_path / "m.gguf", "llama", wrong, FLOAT)
    with pytest.raises(CheckpointError, match=r"tensor output\.weight has shape \(260, 256\), the metadata requires"):
        dx.load(tmp_path / "m.gguf")
    more = {**weights, "layers.0.attn_out.scale": np.ones(256, np.float32)}
    write(tmp_path / "m.gguf", "llama", more, FLOAT)
    with pytest.raises(CheckpointError, match=r"holds tensor blk\.0\.post_attention_norm\.weight, which"):
        dx.load(tmp_path / "m.gguf")


def test_an_unknown_splitting_rule_lists_the_near_ones(file: Path, tmp_path: Path) -> None:
    path = broken(tmp_path / "m.gguf", file.read_bytes().replace(b"smollm", b"smollx"))
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.pre: got 'smollx', near to smollm.*, takes a.x"):
        dx.load(path)
    assert dx.load(path, tokenizer=dx.load("pycode").tokenizer).tokenizer is not None


def test_without_the_package_the_error_names_the_extra(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **more: Any) -> Any:
        if name == "gguf":
            raise ImportError(name)
        return real(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install 'decodax\[gguf\]'"):
        dx.load(file)
