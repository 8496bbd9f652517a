"""Loads GGUF files, the form in which llama.cpp's models are shared."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from decodax.io.checkpoint import checked_options, places
from decodax.io.files import CheckpointError
from decodax.io.gguf.architectures import ARCHITECTURES
from decodax.io.gguf.config import read_entries
from decodax.io.gguf.encoder_decoder import T5, load_t5
from decodax.io.gguf.reader import GgufFile
from decodax.io.gguf.recurrent import NETWORKS, load_recurrent
from decodax.io.gguf.tensors import ROPE, RowReader, RowSource, row_sources
from decodax.io.gguf.vocabulary import read_generation, read_tokenizer
from decodax.io.gguf.weights import FLOATS, load_weights
from decodax.io.text import Tokenizer
from decodax.models.diffusion import Diffusion, read_diffusion
from decodax.models.encoder_decoder.network import EncoderDecoder
from decodax.models.families import read_config
from decodax.models.formats import Format
from decodax.models.names import flatten
from decodax.models.recurrent.mamba import Mamba
from decodax.models.recurrent.mamba2 import Mamba2
from decodax.models.recurrent.rwkv7 import Rwkv7
from decodax.models.transformer import Transformer, Weights

__all__ = ["Gguf"]

Network = Transformer | EncoderDecoder | Mamba | Mamba2 | Rwkv7


@dataclasses.dataclass(frozen=True)
class Gguf:
    """A GGUF file whose head has been read and checked.

    Attributes:
        file: the file.
        entries: the entries of the `config.json` that describes its network.
    """

    file: GgufFile
    entries: dict[str, Any]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Gguf:
        """Reads the head of a file.

        Raises:
            CheckpointError: it is broken, or its architecture is not supported.
            ImportError: the package `gguf` is not installed.
        """
        file = GgufFile(Path(path).expanduser())
        if (parts := int(file.metadata.get("split.count", 1) or 1)) > 1:
            raise CheckpointError(f"{file.path}: is one of {parts} parts of a model, takes a whole file; "
                                  "`llama-gguf-split --merge` joins them")
        own = ARCHITECTURES.get(str(file.metadata.get("general.architecture")))
        wanted = own.numbers if own is not None else ""
        with RowReader(file) as rows:
            factors = {name: np.concatenate([raw.view(np.float32)[:, 0] for _, raw in rows.chunks(
                RowSource(tensor, 0, tensor.shape[-1]))]) for name, tensor in file.tensors.items()
                if tensor.type == "F32" and (name in ROPE or (wanted and re.fullmatch(wanted, name)))}
        return cls(file, read_entries(file, factors))

    def tokenizer(self) -> Tokenizer | None:
        """Returns the file's tokenizer, or None if it has none."""
        return read_tokenizer(self.file)

    def diffusion(self) -> Diffusion | None:
        """Returns the settings of a masked diffusion model; None if the model is autoregressive.

        Raises:
            CheckpointError: an entry is out of its range.
        """
        try:
            return read_diffusion(self.entries)
        except ValueError as error:
            raise CheckpointError(f"{self.file.path}: {error}") from None

    def generation_config(self, tokenizer: Tokenizer | None) -> dict[str, Any]:
        """Returns the model's defaults, with the special ids of a tokenizer."""
        own = {key: value for key, value in self.entries.items() if key == "decoder_start_token_id"}
        return read_generation(self.file, tokenizer) | own

    def load(self, dtype: jax.typing.DTypeLike | None = None, mesh: Mesh | None = None, context: int | None = None,
             weights: str | Format | None = None) -> tuple[Network, Weights]:
        """Loads the network and its weights. Arguments and errors are those of `decodax.io.checkpoint.load_model`.

        Args:
            dtype: None takes that of the table of embeddings if it has floats, else bfloat16.
            mesh, context: as there; None for a Mamba, Mamba-2 or RWKV-7; T5 takes a mesh alone.
            weights: another format for the kernels; None keeps the file's.
        """
        asked, packing = checked_options(dtype, weights, context)
        if self.file.metadata["general.architecture"] in NETWORKS:
            if context is not None or mesh is not None:
                raise ValueError(f"{'context' if mesh is None else 'mesh'}: got one for {self.file.path.name!r}, takes "
                                 "None: such a network runs on one device and has no context length to set")
            return load_recurrent(self.file, self.entries, asked, packing)
        if self.file.metadata["general.architecture"] == T5:
            if context is not None:
                raise ValueError(f"context: got one for {self.file.path.name!r}, takes None: an encoder-decoder has no "
                                 "context length to set")
            return load_t5(self.file, self.entries, asked, mesh, packing)
        try:
            config = read_config(self.entries)
        except ValueError as error:
            raise CheckpointError(f"{self.file.path}: {error}") from None
        if not any(name.startswith(f"blk.{len(config.layers) - 1}.") for name in self.file.tensors):
            raise CheckpointError(f"{self.file.path}: block_count: got {len(config.layers)}, the file holds fewer "
                                  "layers")
        name = asked or FLOATS.get(self.file.tensors["token_embd.weight"].type, "bfloat16")
        model = Transformer(config, dtype=name, context=context)
        shapes = model.abstract_params()
        sources = row_sources(self.file, ARCHITECTURES[self.file.metadata["general.architecture"]], config,
                              flatten(shapes))
        with RowReader(self.file) as rows:
            return model, load_weights(rows, sources, shapes, name, places(model, shapes, mesh), packing)
