"""Weights are read straight from files to where they stay: the same entries as of whole tensors, cast and turned."""

import itertools
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from decodax.io import arrays
from decodax.io.arrays import ArrayReader
from decodax.io.files import ALIGNMENT, Files, write_files
from decodax.io.huge_pages import HugeBlocks
from decodax.models.weight_source import Columns, WeightSource, plain

SHAPES: dict[str, tuple[int, ...]] = {"matrix": (24, 20), "other": (24, 20), "vector": (24,), "number": (),
                                      "experts": (3, 24, 20), "taps": (1, 24, 5)}
PARTS = None, Columns(3, 6, 12), Columns(0, 12, 24)
SOURCES = [
    *(WeightSource(("matrix",), True, part, SHAPES["matrix"]) for part in PARTS),
    *(WeightSource(("matrix",), False, part, SHAPES["matrix"]) for part in (None, Columns(3, 5, 10))),
    *(WeightSource(("experts",), turn, part if turn else None, SHAPES["experts"], leading=True)
      for turn in (True, False) for part in PARTS[:2]),
    WeightSource(("matrix", "other"), True, None, SHAPES["matrix"]), WeightSource(("vector",), False, None, (24,)),
    WeightSource(("vector",), False, PARTS[1], (24,)), WeightSource(("number",), False, None, ()),
    WeightSource(("taps",), False, None, SHAPES["taps"])]


@pytest.mark.wide(but=("bfloat16-sizes0",))
@pytest.mark.parametrize("sizes", [(7, 3), (1 << 20, 256)])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_parts_are_those_of_whole_tensors(stored: str, sizes: tuple[int, int], tmp_path: Path,
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if each thread copies a few entries, in tiles of nine."""
    monkeypatch.setattr(arrays, "CHUNK", sizes[0])
    monkeypatch.setattr(arrays, "TILE", sizes[1])
    draw = np.random.default_rng(0)
    tensors = {name: draw.standard_normal(shape).astype(jnp.dtype(stored)) for name, shape in SHAPES.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    blocks = HugeBlocks(1 << 22)
    with ArrayReader(Files(tmp_path)) as reader:
        for source, dtype in itertools.product(SOURCES, ("float32", "bfloat16", "float16")):
            each = [source.turned(tensors[name])[source.index] for name in source.tensors]
            whole = np.stack(each) if len(each) > 1 else each[0]
            whole = whole[0] if source.tensors == ("taps",) else whole
            ranges = [[(0, n), (n // 3, n)] for n in whole.shape]
            for bounds in itertools.product(*ranges):
                wanted = whole[tuple(slice(*b) for b in bounds)].astype(jnp.dtype(dtype))
                found: Any = reader.read(source, bounds, np.dtype(jnp.dtype(dtype)), blocks)
                assert found.dtype == wanted.dtype and found.tobytes() == wanted.tobytes()
                if found.ndim > 1:
                    turned = reader.read(source, bounds, np.dtype(jnp.dtype(dtype)), turned=True)
                    assert turned.tobytes() == np.swapaxes(wanted, -1, -2).tobytes()


@pytest.mark.skipif(os.name != "posix", reason="Windows copies them")
@pytest.mark.parametrize("stored", ["bfloat16", "uint8"])
def test_tensors_that_lie_well_stay_in_the_file(stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole ones, as the file has them; what is cast, cut, stacked or transposed is copied. Writing to them does not
    change the file."""
    monkeypatch.setattr(arrays, "MAPPED", 32 * 64)
    tensors = {"odd": np.arange(3), "number": np.array(2.5, np.float32), "flags": np.array([True, False]),
               **{name: np.arange(32 * 64).reshape(32, 64).astype(jnp.dtype(stored)) for name in ("a", "b")}}
    write_files(tmp_path, tensors, {}, "np")
    read = load_file(tmp_path / "model.safetensors")
    assert all(read[name].dtype == x.dtype and (read[name] == x).all() for name, x in tensors.items())
    own, float32 = np.dtype(jnp.dtype(stored)), np.dtype("float32")
    whole, blocks = ((0, 32), (0, 64)), HugeBlocks(1 << 22)
    kernel = WeightSource(("a",), True, None, (32, 64))
    with ArrayReader(Files(tmp_path)) as reader:
        for source, bounds, dtype, turned, stays in (
                (kernel, whole[::-1], own, True, True), (plain("a", 32, 64), whole, own, False, True),
                (kernel, whole[::-1], own, False, False),
                (kernel, ((0, 64), (0, 16)), own, True, False), (kernel, whole[::-1], float32, True, False),
                (WeightSource(("a", "b"), False, None, (32, 64)), ((0, 2), *whole), own, False, False)):
            found = reader.read(source, bounds, dtype, blocks, turned)
            base: Any = found
            while isinstance(base, np.ndarray):
                base = base.base
            assert (isinstance(base, memoryview) and base.nbytes == (tmp_path / "model.safetensors").stat().st_size
                    ) == stays
            assert found.ctypes.data % ALIGNMENT == 0
            assert (found.reshape(-1, 64)[:16] == tensors["a"][:16]).all() or not turned
            found[...] = 7
    assert (load_file(tmp_path / "model.safetensors")["a"] == tensors["a"]).all()
