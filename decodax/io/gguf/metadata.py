"""The metadata of a GGUF file, and what tells architectures apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from decodax.io.files import CheckpointError
from decodax.io.gguf.reader import GgufFile
from decodax.io.gguf.views import Stored

Factors = Mapping[str, np.ndarray]
"""Tensors of rope factors by name, as numbers."""


SIZES = "attention.head_count", "attention.head_count_kv", "feed_forward_length"
"""Entries that may differ between the layers of an architecture that is read `by_layer`."""


@dataclasses.dataclass(frozen=True)
class Architecture:
    """How an architecture of llama.cpp is read.

    Attributes:
        entries: adds the family's own entries to those that all families share.
        permuted: True if rows of queries and keys are stored in pairs of neighbours, for a rotation of neighbours; they
            are put back into halves.
        shifted: True if norms are stored with 1 added to their scales.
        names: tensor names that differ from those of `decodax.io.gguf.tensors`, by the network's path; of several with
            "|" between them the first that the file has.
        by_layer: True if numbers of heads and inner channels (`SIZES`) may differ between layers; the entries that all
            families share are then the largest.
        scaled: False if factors of the rotary frequencies are not a scaling of all layers.
        views: the form of weights that are no rows of a tensor in the network's order, by their paths within a layer.
        outside: the same for weights outside of layers, by their paths.
        latent: True if keys and values have widths of their own, as those of multi-head latent attention.
        numbers: a regular expression for names of tensors that hold entries of the configuration and no weights.
        yarn_log: factor by which `yarn_log_multiplier` becomes `mscale_all_dim`; 0: files have none.
    """

    entries: Callable[[Metadata, dict[str, Any]], dict[str, Any]]
    permuted: bool = False
    shifted: bool = False
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    by_layer: bool = False
    scaled: bool = True
    views: Mapping[str, Stored] = dataclasses.field(default_factory=dict)
    outside: Mapping[str, Stored] = dataclasses.field(default_factory=dict)
    latent: bool = False
    numbers: str = ""
    yarn_log: float = 0.0


class Metadata:
    """The metadata of one architecture.

    Attributes:
        file: the file.
        name: name of the architecture.
        factors: the file's tensors with factors of the rotary frequencies and those of `Architecture.numbers`, by name.
        by_layer: see `Architecture`.
    """

    def __init__(self, file: GgufFile, factors: Factors):
        self.file, self.factors, self.by_layer = file, factors, False
        self.name = str(file.metadata.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        """Returns an entry of the architecture; of numbers for each layer the one that they all are, of `SIZES` the
        largest.

        Raises:
            CheckpointError: the numbers of layers differ in another entry.
        """
        full = f"{self.name}.{key}"
        found = self.file.metadata.get(full, default)
        if isinstance(found, np.ndarray):
            several = self.by_layer and key in SIZES
            if len(found) == 0 or (len(set(found.tolist())) != 1 and not several):
                raise CheckpointError(f"{self.file.path}: {full}: got {found.tolist()[:8]}, takes the same number for "
                                      "all layers")
            found = max(found.tolist())
        # Files hold 32-bit floats: 1e-5 is read as written in the configuration, not as 9.999999747378752e-06.
        return float(f"{found:.7g}") if isinstance(found, float) else found

    def each(self, key: str, default: Sequence[Any] | Any = None) -> list[Any]:
        """Returns an entry of the architecture for each layer. A default that is a sequence has an item a layer. A list
        in the file may leave out the layers that predict further tokens, as that of `attention.indexer.types` does."""
        found, count = self.file.metadata.get(f"{self.name}.{key}"), self.count("block_count")
        if found is None:
            found = default
        elif isinstance(found, np.ndarray):
            found = found.tolist()
        found = list(found) if isinstance(found, list) else [found] * count
        if len(found) not in (count, count - self.count("nextn_predict_layers", 0, 0)):
            raise CheckpointError(f"{self.file.path}: {self.name}.{key}: got {len(found)} entries for {count} layers")
        return found

    def need(self, key: str) -> Any:
        """Returns an entry of the architecture that the file must have."""
        found = self.get(key)
        if found is None:
            raise CheckpointError(f"{self.file.path}: lacks {self.name}.{key}, which the architecture requires")
        return found

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        """Returns an entry that is a whole number of at least `least`. Without a default the file must have it."""
        found = self.need(key) if default is None else self.get(key, default)
        if not isinstance(found, int) or isinstance(found, bool) or found < least:
            without = ": layers without attention are not supported" if found == 0 and "head_count" in key else ""
            raise CheckpointError(f"{self.file.path}: {self.name}.{key}: got {found!r}, takes a whole number of at "
                                  f"least {least}{without}")
        return found

    def mixes(self) -> list[bool]:
        """Returns True for each layer that is a mixture of experts."""
        return [f"blk.{i}.ffn_gate_inp.weight" in self.file.tensors for i in range(self.count("block_count"))]

    @property
    def biased(self) -> bool:
        """True if queries have a bias."""
        return self.has("attn_q.bias") or self.has("attn_qkv.bias")

    def has(self, tensor: str) -> bool:
        """True if the first layer has a tensor of this name."""
        return f"blk.0.{tensor}" in self.file.tensors

    def held(self, tensor: str) -> bool:
        """True if some layer has a tensor of this name."""
        return any(name.endswith(f".{tensor}") for name in self.file.tensors)
