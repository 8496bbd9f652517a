"""GGUF files of T5 hold the network of the checkpoint from which they were made, and its tokenizer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

import decodax as dx
from decodax.core.window import causal
from decodax.io.files import CheckpointError
from decodax.models import EncoderDecoder, EncoderText
from decodax.models.formats import unpacked
from decodax.models.formats.ggml import GgmlBlocks
from decodax.models.names import flatten
from tests.io.gguf.converting_t5 import converted, pieces
from tests.models.encoder_decoder import tiny
from tests.models.small import score

VOCABULARY = 130
TEXTS = ("hello world", "  several   spaces ", "ﬁ Ⅳ ½ é", "語 語語", "", " ", "def f(x):\n\treturn  1", "Ünïcode … ①",
         "a　b c", "[PAD125]", "x▁y", "🙂🙂 a")
SOURCES = [[11, 12, 13, 14, 1], [21, 22, 1]]


@functools.cache
def model() -> bytes:
    pytest.importorskip("sentencepiece")
    return pieces(VOCABULARY - 10)


def written(name: str, directory: Path, own: Callable[[Any], None] = lambda tensors: None, kind: Type = Type.F32,
            **metadata: Any) -> tuple[Path, Path]:
    """Returns the directory of a small checkpoint, and its GGUF file. Sizes are those that files do not say."""
    entries = {"relative_attention_max_distance": 128, "relative_attention_num_buckets": 32, "vocab_size": VOCABULARY}
    home = _saved(name, tuple(entries.items()))
    return home, converted(home, directory / "model.gguf", kind, model(), own, **metadata)


@functools.cache
def _saved(name: str, entries: Any) -> Path:
    kind, before = tiny.CASES[name]
    own = f"{name}-gguf"
    tiny.CASES[own] = kind, {**before, "d_model": 32, "d_kv": 16, "num_heads": 2, "d_ff": 64, **dict(entries)}
    try:
        return tiny.saved(own)[1]
    finally:
        del tiny.CASES[own]


@pytest.mark.wide(but=("t5-1.0",))
@pytest.mark.parametrize("name", ["t5-1.0", "t5-1.1"])
def test_a_file_holds_the_network_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    directory, file = written(name, tmp_path)
    wanted: Any = dx.load(directory)
    lm: Any = dx.load(file)
    assert isinstance(lm.model, EncoderDecoder) and lm.model == wanted.model
    ours, theirs = flatten(lm.params), flatten(wanted.params)
    assert ours.keys() == theirs.keys()
    for path, leaf in theirs.items():
        np.testing.assert_array_equal(ours[path], leaf, err_msg=path)
    assert (lm.start, lm.eos, lm.pad) == (0, [1], 0) and len(lm.tokenizer) == lm.vocab_size


@pytest.mark.full
@pytest.mark.parametrize("name", ["t5-1.0", "t5-1.1"])
def test_kernels_stay_packed(name: str, tmp_path: Path) -> None:
    lm: Any = dx.load(written(name, tmp_path, kind=Type.Q8_0)[1])
    leaves = flatten(lm.params)
    assert {path for path, leaf in leaves.items() if isinstance(leaf, GgmlBlocks)} == {
        path for path in leaves if path.endswith("kernel") or path == "embed"}
    whole = unpacked(lm.params)
    window, source = causal(np.array([[0, 5, 9, 17]] * 2), jnp.zeros(2, jnp.int32)), EncoderText.of(SOURCES)
    np.testing.assert_allclose(score(lm.model, lm.params, window, source), score(lm.model, whole, window, source),
                               atol=1e-3)
    anew, directly = (flatten(dx.load(path, weights="int8").params) for path in written(name, tmp_path)[::-1])
    assert {path: type(leaf) for path, leaf in anew.items()} == {path: type(leaf) for path, leaf in directly.items()}
    run = functools.partial(dx.generate, lm, [[], []], inputs=source, max_new_tokens=6, eos_token_id=[])
    assert run(algorithm="prompt-lookup:length=3").tokens.tolist() == run().tokens.tolist()


def test_texts_are_split_as_by_sentencepiece(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    made: Any = dx.load(written("t5-1.0", tmp_path)[1]).tokenizer
    processor = sentencepiece.SentencePieceProcessor(model_proto=model())
    for text in TEXTS:
        ids = processor.EncodeAsIds(text)
        assert made.encode(text) == [*ids, 1] and made.encode(text, add_special_tokens=False) == ids, text
    assert made.decode(made.encode("hello  world")) == "hello world"


@pytest.mark.full
def test_a_source_is_read_as_a_text(tmp_path: Path) -> None:
    lm: Any = dx.load(written("t5-1.1", tmp_path)[1])
    run = functools.partial(dx.generate, lm, [[]], max_new_tokens=4, eos_token_id=[])
    ids = EncoderText.of([lm.tokenizer.encode("hello world")])
    assert run(inputs=["hello world"]).tokens.tolist() == run(inputs=ids).tokens.tolist()


@pytest.mark.full
@pytest.mark.parametrize(("own", "says"), [
    ({"decoder_start_token_id": None}, r"lacks t5\.decoder_start_token_id"),
    ({"attention.relative_buckets_count": 0}, r"t5\.attention\.relative_buckets_count: got 0, takes a whole number"),
    ({"attention.head_count_kv": 1}, r"t5\.attention\.head_count_kv: got 1, takes that of the queries, 2"),
    ({"attention.value_length": 8}, r"t5\.attention\.value_length: got 8, takes that of the keys, 16"),
    ({"decoder_block_count": 3}, r"t5: got 3 layers of the decoder, the file holds fewer"),
    ({"decoder_block_count": 1}, r"holds .*dec\.blk\.1\..*, which the metadata does not describe"),
    ({"feed_forward_length": 65}, r"dec\.blk\.0\.ffn_down\.weight has shape \(32, 64\), the metadata requires")])
def test_what_is_not_read_is_named(own: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=says):
        dx.load(written("t5-1.0", tmp_path, **own)[1])


@pytest.mark.full
def test_positions_of_each_layer_are_refused(tmp_path: Path) -> None:
    """UMT5 has such positions. Files of old checkpoints also have positions of cross-attention, which are not used."""
    def each(tensors: dict[str, np.ndarray]) -> None:
        tensors["dec.blk.1.attn_rel_b.weight"] = tensors["dec.blk.0.attn_rel_b.weight"]

    def unused(tensors: dict[str, np.ndarray]) -> None:
        tensors["dec.blk.0.cross_attn_rel_b.weight"] = tensors["dec.blk.0.attn_rel_b.weight"]

    with pytest.raises(CheckpointError, match=r"dec\.blk\.1\.attn_rel_b\.weight, relative positions of a second layer"):
        dx.load(written("t5-1.0", tmp_path, each)[1])
    file = written("t5-1.0", tmp_path, unused)[1]
    dx.load(file)
    with pytest.raises(ValueError, match=r"context: got one for 'model\.gguf', takes None: an encoder-decoder"):
        dx.load(file, context=64)
