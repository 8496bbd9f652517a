"""The tensors of a drafter's files, and the parts that most layouts share: its vocabulary, and the layers it reads."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from decodax.io.files import CheckpointError, Files, named_tensors, read_json
from decodax.models.weight_source import WeightSource, nested, shape_of

Source = str | os.PathLike[str] | Mapping[str, Any]
"""A directory with `config.json` and safetensors files, or tensors by name."""


class Tensors:
    """The tensors of a drafter's file or directory, which records those that are used, so that unknown ones are an
    error.

    Args:
        source: where they are.
        config: the `config.json`; None: that of the directory.
        name: names the source in errors; None: the directory, or "tensors".

    Attributes:
        name: names the source in errors.
        config: the `config.json`.
        used: the tensors that have been read or passed over.
    """

    def __init__(self, source: Source, config: Mapping[str, Any] | None = None, name: str | None = None):
        self._files: Files | None = None
        if isinstance(source, Mapping):
            if config is None:
                raise ValueError("config: got None with tensors, takes the entries of their config.json")
            self.name, self._held = name or "tensors", {key: np.asarray(x) for key, x in source.items()}
        else:
            root = Path(source)
            config = read_json(root / "config.json") if config is None else config
            self._files, self.name, self._held = Files(root), name or str(root), {}
        self.config = dict(config)
        self.used: set[str] = set()
        self._names = {self._short(name): name for name in (self._held if self._files is None else self._files.home)}

    def _short(self, name: str) -> str:
        # older files of Domino and DSpark keep their heads in a container
        return name.removeprefix("model.").removeprefix("logit_head.")

    @property
    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self._names)

    def rename(self, name: str, new: str) -> None:
        """Gives a tensor another name."""
        self._names[new] = self._names.pop(name)

    def replace(self, name: str, value: np.ndarray) -> None:
        """Puts another array in the place of a tensor."""
        self._names[name], self._held[name] = name, value

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._names:
            raise CheckpointError(f"{self.name}: lacks tensor {name}")
        self.used.add(name)
        stored = self._names[name]
        held = self._files is None or stored in self._held
        return np.asarray(self._held[stored] if held else self._files.slice(stored)[...])      # type: ignore[union-attr]

    def skip(self, *names: str) -> None:
        """Marks tensors as known but not needed; they may be missing."""
        self.used |= set(names)

    def weights(self, sources: Mapping[str, WeightSource], dtype: Any) -> dict[str, Any]:
        """Returns the weights of a network, by the source of each.

        Raises:
            CheckpointError: a tensor is missing or has another shape, or the file has others.
        """
        leaves = {}
        for path, source in sources.items():
            x = self[source.tensors[0]]
            if x.shape != source.full:
                raise CheckpointError(f"{self.name}: tensor {source.tensors[0]} has shape {list(x.shape)}, takes "
                                      f"{list(source.full)}")
            leaves[path] = jnp.asarray(np.ascontiguousarray(source.turned(x)), dtype)
            assert leaves[path].shape == shape_of(source)
        if further := sorted(set(self._names) - self.used):
            raise CheckpointError(f"{self.name}: holds {named_tensors(further)}, which the network does not have")
        return nested(leaves)

    def vocabulary(self, size: int, target: int, differences: bool = False) -> np.ndarray | None:
        """Returns the target's token for each of `size` logits, `i32[size]`, from `d2t` and `t2d`; None: they are the
        target's `target` tokens.

        `d2t` has the differences to the logits' own indices, and `t2d` is True for the tokens that there are.

        Args:
            size: number of logits.
            target: number of tokens of the target.
            differences: True if the producer is known to store differences, which then need no `t2d` and may be in any
                order.

        Raises:
            CheckpointError: the two do not agree, one is missing, or `d2t` names a token twice or one that there is
                not.
        """
        held = [name for name in ("d2t", "t2d") if name in self]
        if size == target and all(not np.any(self["d2t"]) if name == "d2t" else True for name in held):
            self.skip(*held)
            return None
        if held == ["d2t"] and differences:
            ids = np.arange(size) + np.asarray(self["d2t"], np.int64)
            if len(set(ids.tolist())) < size or ids.min() < 0 or ids.max() >= target:
                raise CheckpointError(f"{self.name}: d2t does not name {size} different tokens of {target}")
            return ids.astype(np.int32)
        if len(held) < 2:
            raise CheckpointError(f"{self.name}: has {size} logits for {target} tokens, and lacks tensor "
                                  f"{'t2d' if held == ['d2t'] else 'd2t'}, without which their order is not known")
        ids = np.arange(size) + np.asarray(self["d2t"], np.int64)
        known = np.flatnonzero(np.asarray(self["t2d"]))
        if not np.array_equal(ids, known):
            raise CheckpointError(f"{self.name}: d2t and t2d name other tokens; takes differences in d2t, in the order "
                                  "of the tokens")
        return ids.astype(np.int32)


def taps(name: str, outputs: Sequence[int] | None, inputs: Sequence[int] | None, layers: int | None
         ) -> tuple[int, ...] | None:
    """Returns the layers of the target whose outputs are read, counted from 0; None if the file does not say.

    Args:
        name: names the file in errors.
        outputs: indices of layers whose outputs are meant.
        inputs: indices in the convention of `hidden_states` of transformers: layer `i - 1`'s output.
        layers: number of layers of the target, if it is known.

    Raises:
        CheckpointError: the two disagree, or an index is out of range or that of the last layer. Some files mean the
            state after the final norm by it and some the state before.
    """
    found = None if inputs is None else tuple(int(i) - 1 for i in inputs)
    if outputs is not None and found is not None and tuple(map(int, outputs)) != found:
        raise CheckpointError(f"{name}: names outputs of layers {list(outputs)} and their inputs {list(inputs or ())}, "
                              "which differ")
    found = tuple(map(int, outputs)) if outputs is not None else found
    if found is None:
        return None
    if not found or min(found) < 0 or (layers is not None and max(found) >= layers):
        raise CheckpointError(f"{name}: reads the outputs of layers {list(found)}, takes indices of the target's "
                              f"{layers or ''} layers, from 0")
    if layers is not None and max(found) == layers - 1:
        raise CheckpointError(f"{name}: reads the output of the last layer, {layers - 1}, and does not say whether "
                              "before or after the final norm")
    return found


__all__ = ["Source", "Tensors", "taps"]
