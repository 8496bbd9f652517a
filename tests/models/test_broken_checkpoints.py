"""Seeded damage to a model directory: it loads to the same model, or an error names the file and what is wrong in it.

What cannot be told from a sound file is left out: other values of the right type that no tensor knows of, flipped bits
of weights, and a stored dtype exchanged for another one of the same width.
"""

import json
import random
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import decodax as dx
from decodax.io.saving import save_model
from decodax.models import Transformer, llama
from tests.small_tokenizers import byte_level

SECONDS = 5
ODD: list[Any] = [None, -1, 0, 3, 7, 10**9, 10**18, 10**400, 1.5, float("nan"), float("inf"), True, "", "x", [], [1],
                  {}, {"a": 1}, [[]]]
FREE = {"rms_norm_eps", "rope_theta", "max_position_embeddings", "eos_token_id", "bos_token_id", "factor",
        "architectures", "dtype", "torch_dtype", "original_max_position_embeddings", "low_freq_factor",
        "high_freq_factor"}
"""Entries that no tensor knows of: another number is another model, and no damage."""

FILES = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dx.LM]:
    """A Llama with a scaled rope in two files, and a tokenizer."""
    root = tmp_path_factory.mktemp("sound")
    tokenizer = byte_level()
    tokenizer.save(str(root / "tokenizer.json"))
    model = Transformer(llama(vocab=tokenizer.get_vocab_size(), width=16, layers=2, heads=4, kv_heads=2, mlp=24))
    save_model(root, model, model.init_params(jax.random.key(0)), {"eos_token_id": 0})
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64}
    change(root, lambda c: c.update(rope_scaling=scaling, rope_parameters={**scaling, "rope_theta": 10_000.0}))
    tensors = load_file(root / "model.safetensors")
    parts = [dict(sorted(tensors.items())[:12]), dict(sorted(tensors.items())[12:])]
    for name, part in zip(FILES, parts, strict=True):
        save_file(part, root / name)
    where = {tensor: name for name, part in zip(FILES, parts, strict=True) for tensor in part}
    (root / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (root / "model.safetensors").unlink()
    (root / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, "temperature": 1.0}))
    return root, dx.load(root)


def change(root: Path, edit: Callable[[Any], Any], name: str = "config.json") -> None:
    """Rewrites a JSON file."""
    content = json.loads((root / name).read_text())
    edit(content)
    (root / name).write_text(json.dumps(content))


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def loaded(root: Path) -> dx.LM | str:
    """The model, or the error's text."""
    try:
        with at_most(SECONDS):
            return dx.load(root)
    except (ValueError, FileNotFoundError) as e:
        return str(e)


def header(path: Path) -> tuple[dict[str, Any], bytes]:
    raw = path.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8:8 + size]), raw[8 + size:]


def rewritten(path: Path, head: Any, body: bytes) -> None:
    text = json.dumps(head).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


# each makes its damage in a copy of the directory and returns what an error has to name

def config_entry(root: Path, draw: random.Random) -> list[str]:
    config = json.loads((root / "config.json").read_text())
    key, value = draw.choice(sorted(config)), draw.choice([*ODD, ...])
    change(root, lambda c: c.pop(key) if value is ... else c.update({key: value}))
    return ["config.json", key]


def rope_entry(root: Path, draw: random.Random) -> list[str]:
    place = draw.choice(["rope_scaling", "rope_parameters"])
    config = json.loads((root / "config.json").read_text())
    key, value = draw.choice(sorted(config[place])), draw.choice(ODD)
    change(root, lambda c: c[place].update({key: value}))
    return ["config.json", key]


def index_entry(root: Path, draw: random.Random) -> list[str]:
    names = ["../x.safetensors", "/etc/passwd", str(root / FILES[0]), "C:\\x", "..\\x.safetensors", "", ".",
             "a/../../x", "config.json", "gone.safetensors", None, 3, ["x"], "x\0y", FILES[0], FILES[1]]
    tensor, name = draw.choice(sorted(json.loads((root / INDEX).read_text())["weight_map"])), draw.choice(names)
    change(root, lambda c: c["weight_map"].update({tensor: name}), INDEX)
    return [INDEX if name != "gone.safetensors" and name != "config.json" else str(name)]


def index_whole(root: Path, draw: random.Random) -> list[str]:
    value = draw.choice([[], {}, None, "x", {"weight_map": None}, {"weight_map": []}, {"weight_map": {}},
                         {"weight_map": {"a": FILES[0]}}, {"weight_map": FILES}])
    (root / INDEX).write_text(json.dumps(value))
    return [INDEX]


def header_entry(root: Path, draw: random.Random) -> list[str]:
    """A header that lies about a tensor."""
    file = root / draw.choice(FILES)
    head, body = header(file)
    tensor = draw.choice(sorted(k for k in head if k != "__metadata__"))
    entry = head[tensor]
    kind = draw.randrange(8)
    if kind == 0:
        entry["dtype"] = draw.choice(["F64", "I8", "BOOL", "F16", "F8_E4M3", "Q4", None, 3])
    elif kind == 1:
        entry["shape"] = draw.choice([[1], [10**9, 10**9], [-1], [0], entry["shape"] + [2], "x", None])
    elif kind == 2:
        entry["shape"] = entry["shape"][::-1] if entry["shape"] != entry["shape"][::-1] else [1, *entry["shape"]]
    elif kind == 3:
        start, end = entry["data_offsets"]
        entry["data_offsets"] = draw.choice([[start, end + 4], [end, start], [start - 4, end], [0, 2**60], [-4, 0], []])
    elif kind == 4:
        head[f"{tensor}.more"] = head.pop(tensor)
    elif kind == 5:
        del head[tensor]
    elif kind == 6:
        del entry[draw.choice(sorted(entry))]
    else:
        head[draw.choice(["", "a" * 500, "model.layers.9.x"])] = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    rewritten(file, head, body)
    return [".safetensors"]


def raw_bytes(root: Path, draw: random.Random) -> list[str]:
    """A truncated file, one with a tail, or one whose header is damaged."""
    file = root / draw.choice(FILES)
    raw = bytearray(file.read_bytes())
    size = struct.unpack("<Q", raw[:8])[0]
    kind = draw.randrange(5)
    if kind == 0:
        raw = raw[:draw.choice([0, 1, 7, 8, 9, size, size + 8, draw.randrange(len(raw)), len(raw) - 1])]
    elif kind == 1:
        raw += bytes(draw.choice([1, 4, 1000]))
    elif kind == 2:
        raw[:8] = struct.pack("<Q", draw.choice([0, 1, size - 1, size + 1, len(raw), 2**40, 2**64 - 1]))
    elif kind == 3:
        for _ in range(3):
            raw[8 + draw.randrange(size)] = draw.randrange(256)
    else:
        raw = bytearray(draw.choice([b"PK\x03\x04", b"\x80\x02}q", b"version https://git-lfs", b"{}"])) + raw[40:]
    file.write_bytes(raw)
    return [".safetensors"]


def tensor_value(root: Path, draw: random.Random) -> list[str]:
    """A tensor of another shape, dtype or name."""
    file = root / draw.choice(FILES)
    tensors = load_file(file)
    tensor = draw.choice(sorted(tensors))
    x = tensors[tensor]
    other = draw.choice([x.astype(np.int8), x.astype(bool), x.astype(np.float64), x[:-1], x[None], x.reshape(-1),
                         x.T if x.ndim > 1 and x.shape[0] != x.shape[1] else x[1:], np.zeros(0, np.float32),
                         np.float32(1).reshape(())])
    tensors[tensor] = np.ascontiguousarray(other)
    save_file(tensors, file)
    return [".safetensors", tensor]


def file_content(root: Path, draw: random.Random) -> list[str]:
    """A file that is not what its name says, or none."""
    name = draw.choice(["config.json", INDEX, "generation_config.json", "tokenizer.json", "tokenizer_config.json",
                        "special_tokens_map.json", *FILES])
    content = draw.choice([b"", b"[]", b"null", b"{", b"\xff\xfe{}", b"[" * 5000, b"3", None])
    if content is None:
        (root / name).unlink(missing_ok=True)
    else:
        (root / name).write_bytes(content)
    return [name] if name != INDEX else ["model.safetensors"]


def generation_entry(root: Path, draw: random.Random) -> list[str]:
    key, value = draw.choice(["eos_token_id", "bos_token_id", "pad_token_id"]), draw.choice(ODD)
    file = draw.choice(["config.json", "generation_config.json"])
    change(root, lambda c: c.update({key: value}), file)
    return [file, key]


DAMAGE: list[tuple[Callable[[Path, random.Random], list[str]], int]] = [
    (config_entry, 45), (rope_entry, 20), (index_entry, 20), (index_whole, 6), (header_entry, 20), (raw_bytes, 16),
    (tensor_value, 12), (file_content, 16), (generation_entry, 10)]


@pytest.mark.parametrize(("damage", "count"), DAMAGE, ids=[damage.__name__ for damage, _ in DAMAGE])
def test_damage_is_harmless_or_named(damage: Any, count: int, sound: tuple[Path, dx.LM], tmp_path: Path) -> None:
    root, whole = sound
    refused = 0
    for seed in range(count):
        broken = tmp_path / str(seed)
        shutil.copytree(root, broken)
        named = damage(broken, random.Random(seed))
        found = loaded(broken)
        if isinstance(found, str):
            refused += 1
            # what a size in the configuration disagrees with is a tensor
            against = named[0] == "config.json" and ".safetensors" in found and "configuration requires" in found
            assert against or all(part in found for part in [str(broken), *named]), (seed, named, found)
            assert len(found) < 2000
        else:
            assert found.model.config == whole.model.config or named[-1] in FREE, (seed, named, found.model.config)
            jax.tree.map(np.testing.assert_array_equal, found.params, whole.params)
    assert refused >= count // 4
