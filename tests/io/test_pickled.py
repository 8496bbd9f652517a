"""Files of PyTorch are read without it, and nothing in them is executed."""

import os
import pickle
import zipfile

import numpy as np
import pytest
import torch

from decodax.io.drafters.pickled import read_pickled

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
          torch.int8, torch.uint8, torch.bool]


def test_tensors_are_those_that_pytorch_loads(tmp_path):
    draw = torch.Generator().manual_seed(0)
    table = torch.randn(6, 5, generator=draw)
    held = {str(dtype): (table * 3).to(dtype) for dtype in DTYPES} | {
        "turned": table.T, "part": table[1:4, ::2], "same": table, "scalar": torch.tensor(2.5), "none":
        torch.zeros(0, 3), "parameter": torch.nn.Parameter(table.clone())}
    torch.save(held, tmp_path / "a.bin")
    found = read_pickled(tmp_path / "a.bin")
    wanted = torch.load(tmp_path / "a.bin", weights_only=True)
    assert list(found) == list(wanted)
    for name, x in wanted.items():
        x = x.detach()
        assert found[name].dtype == (np.float32 if x.is_floating_point() else x.numpy().dtype)
        np.testing.assert_array_equal(found[name], (x.float() if x.is_floating_point() else x).numpy())
    torch.save(torch.nn.Linear(3, 2).state_dict(), tmp_path / "b.bin")      # an ordered dictionary with attributes
    assert {name: x.shape for name, x in read_pickled(tmp_path / "b.bin").items()} == {"weight": (2, 3), "bias": (2,)}


class Call:
    """Calls a function when it is unpickled."""

    def __init__(self, function, *given):
        self.call = function, given

    def __reduce__(self):
        return self.call


def archive(path, held, **files):
    """An archive with a pickle of any content."""
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("a/data.pkl", pickle.dumps(held, 2))
        for name, data in files.items():
            made.writestr(f"a/{name}", data)
    return path


def test_what_is_no_tensor_is_refused_before_it_is_called(tmp_path):
    path, touched = tmp_path / "a.bin", tmp_path / "touched"
    with pytest.raises(ValueError, match=r"names (posix|nt)\.mkdir, which is no part of a tensor"):
        read_pickled(archive(path, {"a": Call(os.mkdir, str(touched))}))
    assert not touched.exists()
    with pytest.raises(ValueError, match="holds 'epoch' beside tensors"):
        read_pickled(archive(path, {"epoch": 3}))
    with pytest.raises(ValueError, match="holds a list, takes tensors by name"):
        read_pickled(archive(path, [3]))
    path.write_bytes(b"other")
    with pytest.raises(ValueError, match=r"is no archive that PyTorch 1\.6 or newer has saved"):
        read_pickled(path)
    with pytest.raises(ValueError, match="takes little-endian"):
        read_pickled(archive(path, {}, byteorder=b"big"))
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("a/other", b"")
    with pytest.raises(ValueError, match=r"holds no data\.pkl"):
        read_pickled(path)


def test_a_tensor_beyond_its_storage_is_refused(tmp_path):
    torch.save({"a": torch.zeros(4)}, tmp_path / "a.bin")
    with zipfile.ZipFile(tmp_path / "a.bin") as given, zipfile.ZipFile(tmp_path / "b.bin", "w") as made:
        for name in given.namelist():
            data = given.read(name)
            if name.endswith("data.pkl"):       # its shape: four, as one byte
                assert data.count(b"K\x04\x85") == 1
                data = data.replace(b"K\x04\x85", b"K\x09\x85")
            made.writestr(name, data)
    with pytest.raises(ValueError, match=r"a tensor of shape \(9,\) beyond the 4 numbers of its storage"):
        read_pickled(tmp_path / "b.bin")
