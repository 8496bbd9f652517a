"""Writes small checkpoints of T5 as GGUF files, see `tests.io.gguf.converting`."""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import load_file

SHARED = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


@functools.cache
def pieces(vocabulary: int, more: str = "") -> bytes:
    """Returns a SentencePiece unigram model, trained on the words of this file and those of `more`."""
    import sentencepiece

    model = io.BytesIO()
    lines = [line for line in (Path(__file__).read_text(encoding="utf-8") + more).splitlines() if line.strip()]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=vocabulary, model_type="unigram", pad_id=0,
        eos_id=1, unk_id=2, bos_id=-1, num_threads=1, minloglevel=2)
    return model.getvalue()


def unigram(file: gguf.GGUFWriter, model: bytes, vocabulary: int) -> None:
    """Adds the tokens of a SentencePiece model, filled up with unused ones, as the converter does."""
    from sentencepiece import SentencePieceProcessor
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    proto, processor = ModelProto(), SentencePieceProcessor(model_proto=model)
    proto.ParseFromString(model)
    ids, rest = range(processor.vocab_size()), range(processor.vocab_size(), vocabulary)
    kind = lambda i: 2 if processor.IsUnknown(i) else 3 if processor.IsControl(i) else 1
    file.add_tokenizer_model("t5")
    file.add_tokenizer_pre("default")
    file.add_token_list([*map(processor.IdToPiece, ids), *(f"[PAD{i}]" for i in rest)])
    file.add_token_scores([*map(processor.GetScore, ids), *(-10000.0 for _ in rest)])
    file.add_token_types([*map(kind, ids), *(5 for _ in rest)])
    file.add_add_space_prefix(proto.normalizer_spec.add_dummy_prefix)
    file.add_remove_extra_whitespaces(proto.normalizer_spec.remove_extra_whitespaces)
    file.add_precompiled_charsmap(proto.normalizer_spec.precompiled_charsmap)
    for name, i in (("eos", 1), ("unknown", 2), ("padding", 0)):
        file.add_uint32(f"tokenizer.ggml.{name}_token_id", i)


def converted(directory: Path, path: Path, kind: Type = Type.F32, model: bytes | None = None,
              change: Callable[[dict[str, np.ndarray]], None] = lambda tensors: None, **own: Any) -> Path:
    """Writes the checkpoint in a directory as a GGUF file.

    Args:
        directory: the directory.
        path: the file.
        kind: the type of the matrices, but for the positions.
        model: a SentencePiece model; None: no tokenizer.
        change: changes the tensors by their names in the file.
        own: further metadata; None leaves out an entry.
    """
    c, found = json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")
    file = gguf.GGUFWriter(str(path), "t5")
    metadata = {
        "context_length": c.get("n_positions", 512), "embedding_length": c["d_model"],
        "feed_forward_length": c["d_ff"], "block_count": c["num_layers"],
        "decoder_block_count": c["num_decoder_layers"], "attention.head_count": c["num_heads"],
        "attention.key_length": c["d_kv"], "attention.value_length": c["d_kv"],
        "attention.layer_norm_epsilon": c["layer_norm_epsilon"],
        "attention.relative_buckets_count": c["relative_attention_num_buckets"],
        "attention.layer_norm_rms_epsilon": c["layer_norm_epsilon"],
        "decoder_start_token_id": c["decoder_start_token_id"]} | own
    for key, value in metadata.items():
        if value is not None:
            (file.add_float32 if isinstance(value, float) else file.add_uint32)(f"t5.{key}", value)
    if model is not None:
        unigram(file, model, c["vocab_size"])
    names, tensors = gguf.get_tensor_name_map(gguf.MODEL_ARCH.T5, 64), dict[str, np.ndarray]()
    for name, x in found.items():
        place = names.get_name("shared.weight" if name in SHARED else name, try_suffixes=(".weight",))
        assert place is not None, name
        tensors[place] = x
    change(tensors)
    for place, x in tensors.items():
        packs = kind != Type.F32 and x.ndim == 2 and "attn_rel_b" not in place
        file.add_tensor(place, gguf.quants.quantize(x, kind) if packs else x, raw_dtype=kind if packs else None)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return path
