"""Weight formats by name, for `decodax.load(..., weights="int8")` and, if they need calibration data,
`decodax.quantize`."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from typing import Any

import jax
import jax.numpy as jnp

from decodax.common import registry
from decodax.common.options import options_of
from decodax.common.strings import parse_options
from decodax.models.formats.format import Format, ModelFormat, kernels
from decodax.models.formats.ggml import TYPES, Ggml, GgmlBlocks, ShiftedGroups
from decodax.models.formats.glvq import GLVQ, Lattice
from decodax.models.formats.integers import InputsRotated, Integers, Static
from decodax.models.formats.mxfp4 import Mxfp4, Mxfp4Blocks
from decodax.models.formats.nvfp4 import Nvfp4, Nvfp4Blocks
from decodax.models.formats.published import InputsPermuted, Levels, ZeroPoints
from decodax.models.formats.qserve import W4A8, Nibbles, QServe
from decodax.models.formats.quamba2 import Quamba2
from decodax.models.formats.rsparse import RankSparse, RSparse
from decodax.models.formats.scaled import Float8, Floats, Int4, Int8, Scaled
from decodax.models.formats.squeezellm import DenseSparse, Lookup, SqueezeLLM
from decodax.models.names import flatten
from decodax.models.packed import Packed
from decodax.models.weight_source import is_table, kernel_of, nested

__all__ = ["FORMATS", "GLVQ", "KINDS", "MODEL_FORMATS", "Float8", "Floats", "Format", "Ggml", "Int4", "Int8",
           "ModelFormat", "Mxfp4", "Nvfp4", "QServe", "Quamba2", "RSparse", "Scaled", "SqueezeLLM", "kernels", "pack",
           "read_format", "unpacked"]

for _name, _make, *_paper in (
        ("int8", Int8, "", "", "8-bit integers with one scale for each output"),
        ("int4", Int4, "", "", "4-bit integers with one scale for each group of inputs"),
        ("fp8", Float8, "", "", "8-bit floats (e4m3fn) with one scale for each output"),
        ("mxfp4", Mxfp4, "", "", "4-bit floats (e2m1) with a power of two for each group of 32 inputs, as GPT-OSS is "
         "released"),
        ("nvfp4", Nvfp4, "", "", "4-bit floats (e2m1) with an 8-bit float for each group of 16 inputs"),
        ("bfloat16", functools.partial(Floats, "bfloat16"), "", "", "bfloat16 weights, activations of any dtype"),
        ("float16", functools.partial(Floats, "float16"), "", "", "float16 weights, activations of any dtype"),
        ("float32", functools.partial(Floats, "float32"), "", "", "float32 weights, activations of any dtype"),
        ("qserve", QServe, "QServe: W4A8KV4 Quantization and System Co-design for Efficient LLM Serving",
         "Lin et al. 2024", "4-bit weights and 8-bit activations"),
        ("squeezellm", SqueezeLLM, "SqueezeLLM: Dense-and-Sparse Quantization", "Kim et al. 2023",
         "indices into tables of values, and the outliers as they are; takes data"),
        ("glvq", GLVQ, "Learning Grouped Lattice Vector Quantizers for Low-Bit LLM Compression", "Zhang et al. 2025",
         "points of lattices learned for each group of inputs; takes data"),
        ("r-sparse", RSparse, "R-Sparse: Rank-Aware Activation Sparsity for Efficient LLM Inference",
         "Zhang et al. 2025", "small inputs go through a product of low rank; takes data"),
        ("quamba2", Quamba2, "Quamba2: A Robust and Scalable Post-training Quantization Framework for Selective State "
         "Space Models", "Chiang et al. 2025", "a Mamba-2 in few bits; takes data")):
    registry.FORMATS.register(_name, *_paper, family="formats")(_make)

for _name in TYPES:
    registry.FORMATS.register(_name, "", "", f"blocks of GGUF's type {_name.upper()}", family="formats")(
        functools.partial(Ggml, _name))

FORMATS: dict[str, Format] = {
    "int8": Int8(), "int4": Int4(), "fp8": Float8(), "mxfp4": Mxfp4(), "nvfp4": Nvfp4(),
    "bfloat16": Floats("bfloat16"), "float16": Floats("float16"), "float32": Floats("float32"), "qserve": QServe(),
    "squeezellm": SqueezeLLM(), "glvq": GLVQ(), "r-sparse": RSparse(),
    **{_name: Ggml(_name) for _name in TYPES}}
"""Formats by the names that `decodax.load` and `decodax.quantize` accept."""

MODEL_FORMATS: dict[str, ModelFormat] = {"quamba2": Quamba2()}
"""Formats that change a whole model, by the names that `decodax.quantize` accepts."""

KINDS: dict[str, type[Packed]] = {kind.__name__: kind for kind in (
    Scaled, W4A8, Nibbles, Lookup, DenseSparse, Lattice, RankSparse, Integers, Static, InputsRotated, GgmlBlocks,
    Mxfp4Blocks, Nvfp4Blocks, ShiftedGroups, ZeroPoints, InputsPermuted, Levels)}
"""Classes of packed kernels, by the names that `decodax.save` writes to files."""


def read_format(weights: str | Format | ModelFormat | None) -> Format | ModelFormat | None:
    """Returns the format that a string `NAME[:OPTION=VALUE,...]` names; a format object is returned unchanged.

    Raises:
        ValueError: an unknown name or option; the message lists similar ones.

    >>> read_format("int8")
    Int8()
    >>> read_format("int4:group=32")
    Int4(group=32)
    """
    if weights is None or isinstance(weights, Format | ModelFormat):
        return weights
    known: dict[str, Any] = {**FORMATS, **MODEL_FORMATS}
    name = str(weights).partition(":")[0]
    if name in known:
        own = known[name]
        return dataclasses.replace(own, **parse_options(str(weights), options_of(type(own)), "weights"))
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    raise ValueError(f"weights: got {weights!r}, takes {', '.join(map(repr, known))} or a Format"
                     + (f"; did you mean {near[0]!r}?" if near else ""))


def without_data(weights: str | Format | ModelFormat | None) -> Format | None:
    """Returns a format, given by name or as an object, and checks that it needs no calibration data.

    Raises:
        ValueError: an unknown name, or a format that needs data or changes a whole model.
    """
    own = read_format(weights)
    if isinstance(own, ModelFormat):
        raise ValueError(f"weights: {weights!r} changes a whole model: decodax.quantize(lm, {weights!r}, data) packs a "
                         "loaded one, decodax.save keeps it for decodax.load")
    if own is not None and own.statistic is not None:
        raise ValueError(f"weights: {weights!r} needs calibration data: decodax.quantize(lm, {weights!r}, data) packs "
                         "a loaded model, decodax.save keeps it for decodax.load")
    return own


def pack(params: Any, weights: str | Format) -> Any:
    """Returns a decoder's weights with their kernels packed.

    Args:
        params: weights as from `Transformer.init_params`.
        weights: a name in `FORMATS`, or a format. It must not need data; for others see `decodax.quantize`.
    """
    own = without_data(weights)
    assert own is not None
    packed = jax.jit(own.pack)
    chosen, leaves = {path for path in kernels(params) if own.packs(path)}, flatten(params)
    made = [packed(kernel_of(path, leaf)) if path in chosen else leaf for path, leaf in leaves.items()]
    return jax.tree.unflatten(jax.tree.structure(params), made)


def unpacked(params: Any, dtype: Any = "float32") -> Any:
    """Returns weights with arrays of `dtype` in place of packed kernels, in the layout of `Transformer.init_params`.
    They can be trained; their products are those of the packed kernels up to rounding.

    Args:
        params: weights, of which some are packed.
        dtype: dtype of the arrays.
    """
    def one(path: str, leaf: Any) -> Any:
        if not isinstance(leaf, Packed):
            return leaf
        return leaf.values(dtype) if is_table(path) else jnp.swapaxes(leaf.values(dtype), -1, -2)

    return nested({path: one(path, leaf) for path, leaf in flatten(params).items()})
