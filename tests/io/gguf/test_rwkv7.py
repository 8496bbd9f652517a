"""GGUF files of RWKV-7 hold the network of the published file from which they were made, and its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

import decodax as dx
from decodax.io.files import CheckpointError
from decodax.io.gguf.reader import GgufFile
from decodax.io.gguf.vocabulary import read_tokenizer
from decodax.models import Rwkv7
from decodax.models.formats import unpacked
from decodax.models.formats.ggml import GgmlBlocks
from decodax.models.names import flatten
from tests.io.gguf.converting_rwkv7 import PIECES, small, world

IDS = jnp.asarray(np.arange(3, 24)[None] * 7 % 250)


@pytest.mark.wide
def test_a_file_holds_the_network_of_the_checkpoint(tmp_path: Path) -> None:
    directory, file = small(tmp_path)
    wanted: Any = dx.load(directory)
    lm: Any = dx.load(file)
    assert isinstance(lm.model, Rwkv7) and lm.model == wanted.model
    ours, theirs = flatten(lm.params), flatten(wanted.params)
    assert ours.keys() == theirs.keys()
    for path, leaf in theirs.items():
        np.testing.assert_array_equal(ours[path], leaf, err_msg=path)


@pytest.mark.full
def test_kernels_stay_packed(tmp_path: Path) -> None:
    lm: Any = dx.load(small(tmp_path, kind=Type.Q8_0)[1])
    leaves = flatten(lm.params)
    packed = {path.split(".", 2)[2] if path.startswith("layers.") else path for path, leaf in leaves.items()
              if isinstance(leaf, GgmlBlocks)}
    assert packed == {"embed", "lm_head.kernel", *(f"time.{name}.kernel" for name in "rkvo"), "channels.k.kernel",
                      "channels.v.kernel"}
    run = jax.jit(lm.model.forward)
    np.testing.assert_allclose(run(lm.params, IDS), run(unpacked(lm.params), IDS), atol=1e-4)
    again: Any = dx.generate(lm, [[3, 1, 4, 1, 5], [9]], max_new_tokens=6, eos_token_id=[])
    drafted = dx.generate(lm, [[3, 1, 4, 1, 5], [9]], max_new_tokens=6, eos_token_id=[],
                          algorithm="prompt-lookup:length=3")
    assert drafted.tokens.tolist() == again.tokens.tolist()


@pytest.mark.wide
@pytest.mark.parametrize(("own", "says"), [
    ({"attention.layer_norm_epsilon": 1e-3}, r"rwkv7\.attention\.layer_norm_epsilon: got 0\.001, takes 1e-05"),
    ({"token_shift_count": 1}, r"rwkv7\.token_shift_count: got 1, takes 2"),
    ({"attention.gate_lora_rank": 0}, r"rwkv7\.attention\.gate_lora_rank: got 0, takes a whole number of at least 1"),
    ({"attention.iclr_lora_rank": 6}, r"tensor blk\.0\.time_mix_a1\.weight has shape \(5, 32\), which does not fit")])
def test_what_is_not_read_is_named(own: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=says):
        dx.load(small(tmp_path, **own)[1])


def tokenizer(directory: Path, vocabulary: int = 280) -> Any:
    file = gguf.GGUFWriter(str(directory / "tokens.gguf"), "rwkv7")
    world(file, vocabulary)
    file.add_tensor("token_embd.weight", np.zeros((vocabulary, 4), np.float32))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return read_tokenizer(GgufFile(directory / "tokens.gguf"))


def longest(text: str) -> list[bytes]:
    """Splits a text into the longest tokens, one after the other."""
    known, rest, found = {text.encode() for text in PIECES}, text.encode(), []
    while rest:
        size = next((n for n in range(len(rest), 1, -1) if rest[:n] in known), 1)
        found, rest = [*found, rest[:size]], rest[size:]
    return found


def test_tokens_are_the_longest_that_match(tmp_path: Path) -> None:
    made = tokenizer(tmp_path)
    for text in ("hello wörld\n\nhell o w\\x äu 語の語", "[[]日本語]日本語", "", "\x00\x7f é\t\r\n'\"", "\n\n\n", "🙂"):
        ids = made.encode(text)
        assert [made.pieces().rest[i] for i in ids] == longest(text)
        assert made.decode(ids) == text
    assert made.encode("<s>h") == [0, 1 + ord("h")] and made.eos_ids == (257,) and made.bos_id is None


@pytest.mark.wide
def test_the_chat_template_has_roles_by_name(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief. "}, {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Why?"}]
    text = tokenizer(tmp_path).chat_text(messages)
    assert text == "System: Be brief.\n\nUser: Hi\n\nAssistant: Hello\n\nUser: Why?\n\nAssistant:"
