"""Writes small checkpoints of RWKV-7 as GGUF files, see `tests.io.gguf.converting`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from decodax.models.recurrent.rwkv7 import describe_rwkv7
from tests.io.gguf.converting import VOCAB
from tests.models.networks.rwkv7 import HEAD, WIDTH, tensors, write

PIECES = ("\n\n", "he", "hello", " hello", "hell", "o w", "ä", "\\x", "äu", "語", "語の", "日本語]", "[", "[]")
"""Tokens of one or several bytes beside the 256 single ones."""

WHOLE = {"emb": "model.embeddings.", "ln_out": "model.ln_out."}
TURNED = re.compile(r"time_mix_[wavg][12]\.weight$")


def spelled(piece: bytes) -> str:
    """Returns the text of a token in a file: that of Python's literal of bytes, without its quotes."""
    return repr(piece)[2:-1]


def world(file: gguf.GGUFWriter, vocabulary: int = VOCAB) -> None:
    """Adds a tokenizer of single bytes and `PIECES`, which fills up with unused tokens."""
    single = {bytes([i]) for i in range(256)}
    pieces = [*sorted(single), *(own for text in PIECES if (own := text.encode()) not in single)]
    tokens = ["<s>", *map(spelled, pieces)][:vocabulary]
    file.add_tokenizer_model("rwkv")
    file.add_token_list([*tokens, *(f"[PAD{i}]" for i in range(len(tokens), vocabulary))])
    file.add_token_types([3, *[1] * (len(tokens) - 1), *[5] * (vocabulary - len(tokens))])
    file.add_uint32("tokenizer.ggml.eot_token_id", 257)
    file.add_chat_template("rwkv-world")


def converted(found: dict[str, np.ndarray], path: Path, kind: Type = Type.F32, tokenizer: Any = world, **own: Any
              ) -> Path:
    """Writes the tensors of a published file as a GGUF file.

    Args:
        found: the tensors.
        path: the file.
        kind: the type of the large kernels and the table.
        tokenizer: adds a tokenizer to a file.
        own: further metadata.
    """
    c = describe_rwkv7({name: x.shape for name, x in found.items()})
    file = gguf.GGUFWriter(str(path), "rwkv7")
    metadata = {
        "context_length": 1048576, "embedding_length": c["hidden_size"], "block_count": c["num_hidden_layers"],
        "attention.layer_norm_epsilon": 1e-5, "wkv.head_size": c["head_dim"], "attention.head_count": 0,
        "attention.decay_lora_rank": c["decay_low_rank_dim"], "attention.iclr_lora_rank": c["a_low_rank_dim"],
        "attention.value_residual_mix_lora_rank": c["v_low_rank_dim"],
        "attention.gate_lora_rank": c["gate_low_rank_dim"], "feed_forward_length": c["intermediate_size"]} | own
    for key, value in metadata.items():
        (file.add_float32 if isinstance(value, float) else file.add_uint32)(f"rwkv7.{key}", value)
    tokenizer(file)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.RWKV7, c["num_hidden_layers"])
    for place, x in _placed(found, c["num_hidden_layers"], names):
        packs = x.ndim == 2 and not re.search(r"lerp|_[wavg][012]\.", place)
        file.add_tensor(place, gguf.quants.quantize(x, kind) if packs and kind != Type.F32 else x,
                        raw_dtype=kind if packs and kind != Type.F32 else None)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return path


def _placed(found: dict[str, np.ndarray], layers: int, names: Any) -> list[tuple[str, np.ndarray]]:
    made = [(f"blk.{i}.time_mix_lerp_fused.weight", np.stack([found[f"blocks.{i}.att.x_{name}"] for name in "rwkvag"]))
            for i in range(layers)]
    for name, x in found.items():
        first, x = name.startswith("blocks.0."), x.squeeze()
        if ".att.x_" in name or (first and re.search(r"\.v[012]$", name)):
            continue
        own = name.replace("blocks", "model.layers").replace(".att.", ".attention.").replace("ffn", "feed_forward")
        own = re.sub(r"^(emb|ln_out)\.", lambda found: WHOLE[found[1]], own)
        own = own.replace("layers.0.ln0", "layers.0.pre_norm")
        place = names.get_name(own, try_suffixes=(".weight", ".bias"))
        assert place is not None, name
        place = place if place.endswith((".weight", ".bias")) else f"{place}.weight"
        x = x.T if TURNED.search(place) else x.ravel() if "r_k" in place else x
        x = np.ascontiguousarray(x)
        if first and re.search(r"time_mix_a[012]", place):      # llama.cpp requires such tensors, and uses none
            made.append((place.replace("time_mix_a", "time_mix_v"), x))
        made.append((place, x))
    return made


def small(directory: Path, width: int = WIDTH, head: int = HEAD, **own: Any) -> tuple[Path, Path]:
    """Returns the directory of a small checkpoint and its GGUF file; `own` are arguments of `converted`."""
    found = tensors(vocabulary=VOCAB, width=width, head=head)
    return write(directory, found), converted(found, directory / "model.gguf", **own)
