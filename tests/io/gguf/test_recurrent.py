"""GGUF files of Mamba and Mamba-2 hold the networks of the checkpoints from which they were made."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.io.files import CheckpointError
from decodax.io.gguf.reader import GgufFile
from decodax.models import Mamba, Mamba2
from decodax.models.formats.ggml import GgmlBlocks
from decodax.models.names import flatten
from tests.io.gguf.converting import converted
from tests.io.gguf.converting_more import RECURRENT
from tests.io.gguf.writing import Type
from tests.models.networks.mamba2 import with_random_weights

IDS = jnp.asarray(np.arange(3, 24)[None] * 7 % 250)
SHARED = dict(vocab_size=260, hidden_size=32, num_hidden_layers=2, state_size=6, pad_token_id=0, bos_token_id=1,
              eos_token_id=2)
OWN: dict[str, dict[str, Any]] = {"mamba": dict(time_step_rank=3), "mamba2": dict(
    num_heads=4, head_dim=16, n_groups=2, chunk_size=256)}


def small(name: str, **more: Any) -> tuple[Any, Path]:
    """Returns a small model of transformers with random weights, and its directory."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    config, network = {"mamba": (transformers.MambaConfig, transformers.MambaForCausalLM),
                       "mamba2": (transformers.Mamba2Config, transformers.Mamba2ForCausalLM)}[name]
    return with_random_weights(network(config(**{**SHARED, **OWN[name], **more})).eval())


def written(name: str, own: Any = None, **more: Any) -> tuple[Path, Path]:
    """Returns the directory of a small checkpoint and its GGUF file; `own` is the type of large kernels."""
    model, directory = small(name, **more)
    large = ("ssm_in.weight", "ssm_out.weight", "ssm_x.weight", "token_embd.weight", "output.weight")
    kind = RECURRENT[name] if own is None else dataclasses.replace(
        RECURRENT[name], type=lambda place: own if place.endswith(large) else Type.F32)
    return directory, converted(directory, kind, model.config.to_dict())


@pytest.mark.parametrize(("name", "more"), [
    ("mamba", {}), ("mamba2", {}), ("mamba", {"tie_word_embeddings": False}),
    ("mamba2", {"tie_word_embeddings": True})])
def test_a_file_holds_the_network_of_the_checkpoint(name: str, more: dict[str, Any]) -> None:
    directory, file = written(name, **more)
    wanted: Any = dx.load(directory)
    lm: Any = dx.load(file)
    assert isinstance(lm.model, Mamba if name == "mamba" else Mamba2) and lm.model == wanted.model
    ours, theirs = flatten(lm.params), flatten(wanted.params)
    assert ours.keys() == theirs.keys()
    for path, leaf in theirs.items():
        assert ours[path].shape == leaf.shape
        np.testing.assert_allclose(ours[path], leaf, atol=1e-6, rtol=1e-5, err_msg=path)
    run = jax.jit(lm.model.forward)
    np.testing.assert_allclose(run(lm.params, IDS), run(wanted.params, IDS), atol=1e-4)


@pytest.mark.wide
@pytest.mark.parametrize("name", RECURRENT)
def test_kernels_stay_packed(name: str, caplog: pytest.LogCaptureFixture) -> None:
    lm: Any = dx.load(written(name, Type.Q8_0)[1])
    leaves = flatten(lm.params)
    packed = {path.removeprefix("layers.0.").removeprefix("layers.1.") for path, leaf in leaves.items()
              if isinstance(leaf, GgmlBlocks)}
    assert packed == {"embed", "in.kernel", "out.kernel"} | {"mamba": {"x.kernel"}, "mamba2": {"lm_head.kernel"}}[name]
    assert not caplog.records
    wide = {path: leaf if not isinstance(leaf, GgmlBlocks) else leaf.values(jnp.float32) if path == "embed" else
            jnp.swapaxes(leaf.values(jnp.float32), -1, -2) for path, leaf in leaves.items()}
    whole = jax.tree.unflatten(jax.tree.structure(lm.model.abstract_params()), wide.values())
    run = jax.jit(lm.model.forward)
    np.testing.assert_allclose(run(lm.params, IDS), run(whole, IDS), atol=1e-4)
    again: Any = dx.generate(lm, [[3, 1, 4, 1, 5], [9]], max_new_tokens=6, eos_token_id=[])
    drafted = dx.generate(lm, [[3, 1, 4, 1, 5], [9]], max_new_tokens=6, eos_token_id=[],
                          algorithm="prompt-lookup:length=3")
    assert drafted.tokens.tolist() == again.tokens.tolist()


def test_what_is_not_read_is_named(tmp_path: Path) -> None:
    _, path = written("mamba")
    with pytest.raises(ValueError, match=r"context: got one for 'model\.gguf', takes None"):
        dx.load(path, context=64)
    data = path.read_bytes()
    key = b"mamba.ssm.dt_b_c_rms" + int(gguf.GGUFValueType.BOOL).to_bytes(4, "little")
    assert key in data and GgufFile(path).metadata["mamba.ssm.dt_b_c_rms"] is False
    (tmp_path / "m.gguf").write_bytes(data.replace(key + b"\0", key + b"\1"))
    with pytest.raises(CheckpointError, match=r"mamba\.ssm\.dt_b_c_rms: got True, as in Falcon Mamba"):
        dx.load(tmp_path / "m.gguf")
