"""Metadata of GGUF files: ends of texts and sampling are those of llama.cpp, and entries that are wrong are named."""

from __future__ import annotations

import contextlib
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from decodax.io.files import CheckpointError
from decodax.io.gguf.architectures import ARCHITECTURES
from decodax.io.gguf.config import read_entries
from decodax.io.gguf.metadata import Metadata
from decodax.io.gguf.reader import GgufFile
from decodax.io.gguf.vocabulary import read_generation, read_tokenizer
from decodax.models.families import read_config
from tests.io.gguf.writing import SHAPES, Type, byte_level, network, write


def heads(folder: Path, fill: Callable[[gguf.GGUFWriter], Any]) -> GgufFile:
    """Returns a file without tensors, with the metadata that `fill` adds."""
    writer = gguf.GGUFWriter(str(folder / "m.gguf"), "llama")
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return GgufFile(folder / "m.gguf")


ENDING: dict[str, tuple[list[str], dict[str, int], list[str]]] = {
    "by-text": (["<end_of_turn>", "</s>", "<eos>"], {}, ["<eos>", "<end_of_turn>", "</s>"]),
    "by-id": (["<a>", "<b>", "<c>", "<d>"], {"eos": 1, "eot": 2, "eom": 0, "fim_pad": 3}, ["<b>", "<c>", "<a>", "<d>"]),
    "code": (["<|file_sep|>", "<|repo_name|>", "<|fim_pad|>", "<|im_end|>"], {"eos": 3},
             ["<|im_end|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]),
    "another-id": (["<reponame>", "<x>", "<eos>"], {"fim_rep": 1}, ["<eos>", "<x>"]),
    "messages": (["<|end|>", "<|return|>", "<|call|>"], {"eos": 1}, ["<|return|>", "<|call|>"]),
    "calls": (["<|end|>", "<|flush|>", "<|calls|>"], {}, ["<|flush|>", "<|calls|>"]),
    "no-calls": (["<|end|>", "<|return|>"], {}, ["<|end|>", "<|return|>"]),
    "tools": (["</s>", "<|tool_response>", "<turn|>"], {}, ["<|tool_response>", "<turn|>"]),
}
"""Tokens, the ids that a file names, and the tokens at which llama.cpp stops, those first that the file names."""


@pytest.mark.parametrize("case", ENDING)
def test_texts_end_at_the_tokens_at_which_llama_cpp_stops(case: str, tmp_path: Path) -> None:
    tokens, named, wanted = ENDING[case]
    tokenizer: Any = read_tokenizer(heads(tmp_path, lambda writer: byte_level(writer, tokens, named)))
    spelled = [tokenizer.backend.id_to_token(i) for i in tokenizer.eos_ids]
    assert sorted(spelled) == sorted(wanted) and (not named or spelled[0] == wanted[0])
    assert tokenizer.encode("".join(wanted)) == [tokens.index(text) for text in wanted]


RECOMMENDED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {}, ""),
    ({"temp": 0.7, "min_p": 0.1, "penalty_repeat": 1.1},
     {"temperature": 0.7, "min_p": 0.1, "repetition_penalty": 1.1, "do_sample": True}, ""),
    ({"top_k": 64, "top_p": 0.95}, {"top_k": 64, "top_p": 0.95, "do_sample": True}, ""),            # as Gemma 3's
    ({"penalty_repeat": 1.1, "top_k": 0}, {"repetition_penalty": 1.1, "top_k": 0}, ""),
    ({"temp": 0.0, "top_k": 20, "penalty_repeat": 1.1}, {"repetition_penalty": 1.1, "do_sample": False}, ""),
    ({"temp": 1.0, "mirostat": 2, "mirostat_tau": 5.0, "xtc_probability": 0.0, "penalty_last_n": 64},
     {"temperature": 1.0, "do_sample": True}, "not applied: mirostat=2$"),
    ({"temp": 1.0, "xtc_probability": 0.5, "penalty_repeat": 1.1, "penalty_last_n": 64},
     {"temperature": 1.0, "repetition_penalty": 1.1, "do_sample": True},
     r"not applied: xtc_probability=0\.5, penalty_last_n=64$"),
]
"""Entries under `general.sampling`, the generation config that they make, and the warning about others."""


@pytest.mark.parametrize(("given", "wanted", "warning"), RECOMMENDED)
def test_recommended_sampling_is_that_of_the_file(given: dict[str, Any], wanted: dict[str, Any], warning: str,
                                                  tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = heads(tmp_path, lambda writer: [
        (writer.add_float32 if isinstance(value, float) else writer.add_int32)(f"general.sampling.{key}", value)
        for key, value in given.items()])
    assert read_generation(file, None) == wanted
    assert re.search(warning, caplog.text.strip()) if warning else not caplog.records


def test_a_recommendation_that_is_no_number_is_named(tmp_path: Path) -> None:
    file = heads(tmp_path, lambda writer: writer.add_string("general.sampling.temp", "hot"))
    with pytest.raises(CheckpointError, match=r"general\.sampling\.temp: got 'hot', takes a number"):
        read_generation(file, None)


WRONG: list[Any] = [0, -1, 10 ** 12, 0.0, float("nan"), "x", True, ["a", "b"], *(np.array(x, np.int32) for x in (
    [], [0, 0], [0, 2]))]
"""Values that most entries cannot have."""


def read(file: GgufFile) -> None:
    """Reads all metadata, and suppresses the errors that a reader may raise: what is left breaks it."""
    with contextlib.suppress(CheckpointError):
        read_generation(file, read_tokenizer(file))
    with contextlib.suppress(CheckpointError):
        entries = read_entries(file, {})
        with contextlib.suppress(ValueError):
            read_config(entries)


@pytest.mark.parametrize("name", SHAPES)
def test_no_value_of_an_entry_breaks_the_reader(name: str, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", name, network(name)[1], lambda tensor: Type.F32,
          tokenizer="gpt2" if name == "llama" else "llama")
    file = GgufFile(tmp_path / "m.gguf")
    first = (f"{file.metadata['general.architecture']}.", "tokenizer.ggml.")
    own = [key for key in file.metadata if key.startswith(first)]
    assert len(own) >= 15
    for key in [*own, "tokenizer.ggml.eot_token_id", "general.sampling.temp", "general.sampling.sequence"]:
        before = file.metadata.get(key)
        for value in WRONG:
            file.metadata[key] = value
            read(file)
        file.metadata[key] = before
    read_config(read_entries(file, {}))


@pytest.mark.parametrize(("key", "value", "message"), [
    ("llama.attention.head_count", 0, "got 0, takes a whole number of at least 1: layers without attention are not"),
    ("llama.attention.head_count_kv", np.array([2, 0], np.int32), r"got \[2, 0\], takes the same number for all"),
    ("llama.attention.head_count_kv", np.array([0, 0], np.int32), "got 0, takes a whole number of at least 1: layers"),
    ("llama.embedding_length", "wide", "got 'wide', takes a whole number of at least 1$"),
    ("llama.attention.key_length", 0, "got 0, takes a whole number of at least 1$"),
    ("llama.block_count", 2.0, "got 2.0, takes a whole number of at least 1$"),
    ("tokenizer.ggml.tokens", 3, "got 3, takes a list of texts$"),
    ("tokenizer.ggml.eos_token_id", "x", "got 'x', takes an id$"),
    ("tokenizer.ggml.add_bos_token", np.array([1], np.int32), r"got array\(.*takes true or false$"),
])
def test_a_wrong_entry_is_named(key: str, value: Any, message: str, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "llama", network("llama")[1], lambda tensor: Type.F32)
    file = GgufFile(tmp_path / "m.gguf")
    file.metadata[key] = value
    reader = read_tokenizer if key.startswith("tokenizer") else lambda file: read_entries(file, {})
    with pytest.raises(CheckpointError, match=rf"{re.escape(key)}: {message}"):
        reader(file)


def test_too_many_layers_are_refused_before_lists_of_them_are_made(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "exaone4", network("exaone4")[1], lambda tensor: Type.F32)
    file = GgufFile(tmp_path / "m.gguf")
    file.metadata["exaone4.block_count"] = 10 ** 9
    with pytest.raises(CheckpointError, match=r"exaone4\.block_count: got 1000000000, the file holds \d layers"):
        read_entries(file, {})


def test_three_layers_of_four_slide_if_exaone4_does_not_say_which(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "exaone4", network("exaone4")[1], lambda tensor: Type.F32)
    file = GgufFile(tmp_path / "m.gguf")
    file.metadata.pop("exaone4.attention.sliding_window_pattern", None)
    file.metadata |= {"exaone4.attention.sliding_window": 8, "exaone4.block_count": 5}
    slide, full = "sliding_attention", "full_attention"
    assert read_entries(file, {})["layer_types"] == [slide, slide, slide, full, slide]


def given(name: str, entries: dict[str, Any], tensors: tuple[str, ...] = ()) -> Metadata:
    """Returns the metadata of an architecture, of a file that has these entries and tensors of these names."""
    file: Any = types.SimpleNamespace(path="m.gguf", tensors=dict.fromkeys(tensors), metadata={
        "general.architecture": name, **{f"{name}.{key}": value for key, value in entries.items()}})
    m = Metadata(file, {})
    m.by_layer = ARCHITECTURES[name].by_layer
    return m


LIMITED = {"swiglu_clamp_exp": [0.0, 7.0], "swiglu_clamp_shexp": [0.0, 7.0], "expert_weights_scale": [1.0, 2.0],
           "rope.freq_base": [1e4, 1e6], "attention.indexer.top_k": [4, 8]}


@pytest.mark.parametrize("key", LIMITED)
def test_other_numbers_of_layers_than_sizes_are_not_replaced_by_the_largest(key: str) -> None:
    m = given("deepseek4", {"attention.head_count": np.array([2, 4]), key: np.array(LIMITED[key])})
    assert m.get("attention.head_count") == 4
    with pytest.raises(CheckpointError, match=rf"{re.escape(key)}: got .*, takes the same number for all layers"):
        m.get(key)


def test_a_list_may_leave_out_the_layers_that_predict_further_tokens() -> None:
    m = given("glm5-next", {"block_count": 3, "nextn_predict_layers": 1, "a": np.array([1, 0]), "b": np.array([1])})
    assert m.each("a") == [1, 0]
    with pytest.raises(CheckpointError, match="b: got 1 entries for 3 layers"):
        m.each("b")


ROUTED = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 24, "expert_shared_count": 1,
          "expert_group_count": 2, "expert_group_used_count": 1}


def test_the_entries_of_ling_3_have_its_own_names() -> None:
    latents = {"attention.kv_lora_rank": 16, "attention.key_length": 20, "attention.value_length": 16,
               "rope.dimension_count": 4, "kda.head_dim": 8, "ssm.conv_kernel": 4, "kda.gate_lower_bound": -5.0}
    own: dict[str, Any] = {**ROUTED, **latents, "block_count": 2, "attention.head_count_kv": np.array([0, 1])}
    shared = {"num_hidden_layers": 2, "num_attention_heads": 4}
    read = lambda **more: ARCHITECTURES["bailingmoe3"].entries(given("bailingmoe3", {**own, **more}), shared)
    found = read()
    assert (found["num_shared_experts"], found["num_expert_group"], found["num_experts"]) == (1, 2, 8)
    assert not found.keys() & {"n_shared_experts", "n_group", "n_routed_experts", "num_experts_per_tok"}
    with pytest.raises(CheckpointError, match=r"swiglu_clamp_shexp: got \[0\.0, 7\.0\], takes 0 for all layers"):
        read(swiglu_clamp_shexp=np.array([0.0, 7.0]))


def test_bounds_of_shared_experts_that_hy4_does_not_have_are_refused() -> None:
    m = given("hy_v4", {"block_count": 2, "swiglu_clamp_exp": 7.0, "swiglu_clamp_shexp": np.array([0.0, 3.0])})
    with pytest.raises(CheckpointError, match=r"swiglu_clamp_shexp: got \[0\.0, 3\.0\], takes 0 for all layers"):
        ARCHITECTURES["hy_v4"].entries(m, {"num_hidden_layers": 2})


def test_the_layers_of_minimax_m3_are_those_that_predict_no_further_tokens() -> None:
    indexed = {f"attention.indexer.{part}": 4 for part in (
        "head_count", "key_length", "block_size", "top_k", "local_blocks")}
    m = given("minimax-m3", {**ROUTED, **indexed, "block_count": 3, "nextn_predict_layers": 1},
              tuple(f"blk.{i}.{name}.weight" for i in (1, 2) for name in ("ffn_gate_inp", "indexer.q_proj")))
    found = ARCHITECTURES["minimax-m3"].entries(m, {"num_hidden_layers": 3, "intermediate_size": 48})
    assert found["num_hidden_layers"] == 2 and found["mlp_layer_types"] == ["dense", "sparse"]
    assert found["layer_types"] == ["full_attention", "minimax_m3_sparse"]
