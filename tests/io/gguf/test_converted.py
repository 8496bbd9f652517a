"""GGUF files of hybrids and others hold the networks of the checkpoints from which they were made."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.models.names import flatten
from decodax.models.recurrent.options import Ssd
from tests.io.gguf.converting import KINDS, written
from tests.io.gguf.converting_more import MORE
from tests.io.gguf.converting_new import NEW
from tests.matrix import often

# A packed file: see test_mxfp4.py.
ALL = KINDS | NEW | {name: kind for name, kind in MORE.items() if name != "gpt-oss-mxfp4"}
IDS = jnp.asarray(np.arange(3, 19)[None] * 7 % 250)


def same(lm: Any) -> Any:
    """The network's configuration without what no file says and no number depends on: trained positions of some
    families, and the size of chunks of a prompt."""
    chunked = lambda rule: dataclasses.replace(rule, chunk=8) if isinstance(rule, Ssd) else rule
    return dataclasses.replace(lm.model.config, context=64, layers=tuple(
        dataclasses.replace(layer, recurrent=chunked(layer.recurrent)) for layer in lm.model.config.layers))


@pytest.mark.wide(but=("qwen3.5",))
@pytest.mark.parametrize("name", often([name for name in ALL if "falcon-h1" not in name], ALL))
def test_a_file_holds_the_network_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    directory, file = written(ALL[name], tmp_path)
    wanted, lm = dx.load(directory), dx.load(file)
    if name.startswith("falcon-h1"):        # the file has its factors in the weights
        run: Any = lambda lm: jax.jit(lm.model.forward, compiler_options={"xla_backend_optimization_level": 0})(
            lm.params, IDS)
        np.testing.assert_allclose(run(lm), run(wanted), atol=1e-4)
        return
    assert same(lm) == same(wanted)
    ours, theirs = flatten(lm.params), flatten(wanted.params)
    assert ours.keys() == theirs.keys()
    for path, leaf in theirs.items():
        assert ours[path].shape == leaf.shape
        np.testing.assert_allclose(ours[path], leaf, atol=1e-6, rtol=1e-5, err_msg=path)
