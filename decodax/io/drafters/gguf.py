"""Reads the layers for multi-token prediction inside a GGUF file as a drafter (`decodax.models.drafters.further`)."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from decodax.io.checkpoint import local_device
from decodax.io.drafters.further import head_of, layer_of, repeated
from decodax.io.files import CheckpointError
from decodax.io.gguf import Gguf
from decodax.io.gguf.architectures import ARCHITECTURES
from decodax.io.gguf.reader import GgufFile
from decodax.io.gguf.tensors import RowReader, RowSource, find_rows
from decodax.io.gguf.weights import load_weights
from decodax.models.drafters.depthwise import DepthwiseHead
from decodax.models.drafters.further import FURTHER
from decodax.models.drafters.recurrent import RecurrentHead
from decodax.models.families import read_config
from decodax.models.names import flatten

AROUND = {"embed_norm": "nextn.enorm", "state_norm": "nextn.hnorm", "fc": "nextn.eh_proj", "norm":
          "nextn.shared_head_norm", "embed": "nextn.embed_tokens.weight", "lm_head": "nextn.shared_head_head"}
"""Names of the tensors outside of the decoder layer, after `blk.N.`, by the head's paths."""

LAST = "layer_output_norm"
"""The name of the final norm where there is no `nextn.shared_head_norm` (Ling 3)."""


def further_blocks(path: Path) -> list[int]:
    """Returns the numbers of the layers for multi-token prediction in a GGUF file that can be read."""
    return _blocks(GgufFile(path))


def _blocks(file: GgufFile) -> list[int]:
    found = (re.fullmatch(r"blk\.(\d+)\.nextn\.eh_proj\.weight", name) for name in file.tensors)
    return sorted(int(match[1]) for match in found if match)


def read_further_blocks(path: Path, dtype: str) -> tuple[RecurrentHead | DepthwiseHead, Any]:
    """Returns the layers for multi-token prediction of a GGUF file as a head, and its weights, whose kernels stay
    packed as in the file.

    Args:
        path: the file.
        dtype: dtype of the other weights.

    Raises:
        CheckpointError: the file has no such layers, those of its family are not read, or a tensor is missing or has
            another shape.
    """
    opened = Gguf.open(path)
    file, name = opened.file, opened.file.metadata["general.architecture"]
    blocks, family = _blocks(file), opened.entries["model_type"]
    if not blocks:
        raise CheckpointError(f"{path}: holds a model and no layers that predict further tokens (blk.N.nextn.*)")
    # A layer of Nemotron 3 has two blocks. The layers of DeepSeek V4, with all residual streams, llama.cpp's converter
    # writes to a file without the model's own layers.
    if family not in FURTHER or FURTHER[family].second or FURTHER[family].entries:
        raise CheckpointError(f"{path}: holds layers that predict further tokens, and those of {name!r} are not read")
    try:
        decoder = read_config(opened.entries)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None
    rule = FURTHER[family]
    blocks = blocks[:1] if rule.alone else blocks
    with RowReader(file) as rows:
        own = {part for part, table in (("embed", "token_embd.weight"), ("lm_head", "output.weight"))
               for i in blocks if _differs(rows, f"blk.{i}.{AROUND[part].removesuffix('.weight')}.weight", table)}
        try:
            kind = layer_of(decoder, rule, f"blk.{blocks[0]}.ffn_gate_inp.weight" in file.tensors, opened.entries)
            one = head_of(decoder, rule, kind, own_table="embed" in own, own_head="lm_head" in own)
            head = repeated(one, len(blocks))
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from None
        found, architecture = dict[str, RowSource](), ARCHITECTURES[name]
        for i, block in enumerate(blocks):
            around = {part: f"blk.{block}.{theirs}" for part, theirs in AROUND.items()}
            if f"{around['norm']}.weight" not in file.tensors:
                around["norm"] = f"blk.{block}.{LAST}"
            each = find_rows(file, dataclasses.replace(architecture, names={**architecture.names, **around}),
                             one.config, flatten(one.abstract_params()), block)
            found |= {f"{f'depths.{i}.' if len(blocks) > 1 else ''}{inside}": source for inside, source in each.items()}
        shapes = head.abstract_params()
        return head, load_weights(rows, found, shapes, dtype, dict.fromkeys(found, local_device()), None)


def _differs(rows: RowReader, name: str, table: str) -> bool:
    """True if the file has the tensor `name`, and it is no copy of the tensor `table`."""
    tensors = rows.file.tensors
    if name not in tensors:
        return False
    own, other = tensors[name], tensors.get(table, tensors["token_embd.weight"])
    if (own.type, own.shape) != (other.type, other.shape):
        return True
    pieces = zip(*(rows.chunks(RowSource(one, 0, one.shape[0])) for one in (own, other)), strict=True)
    return any((a != b).any() for (_, a), (_, b) in pieces)
