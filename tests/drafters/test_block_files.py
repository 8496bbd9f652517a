"""Block heads in published layouts: the logits of the public code, and files that leave something open."""

import functools
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from decodax.io.drafters.dflash import read
from decodax.models.drafters.block_training import blocks_at
from tests.drafters import given

PUBLIC = json.loads((Path(__file__).parent / "speculators.json").read_text())
CASES = {case["name"]: case for case in PUBLIC["cases"]}


@functools.cache
def loaded(name):
    case = CASES[name]
    tensors = given.tensors(case["shapes"])
    if case["config"]["draft_vocab_size"] < PUBLIC["vocabulary"]:
        tensors["t2d"] = np.arange(PUBLIC["vocabulary"]) % 2 == 0
        tensors["t2d"][-4:] = False
        tensors["d2t"] = np.flatnonzero(tensors["t2d"]) - np.arange(10)
    return read(tensors, case["config"])


@pytest.mark.wide
@pytest.mark.parametrize("name", list(CASES))
def test_logits_are_those_of_the_public_code(name):
    case, (head, weights, ids) = CASES[name], loaded(name)
    assert head.taps == (0, 2)          # the file counts from the embeddings
    features, tokens = given.inputs(PUBLIC["positions"], PUBLIC["features"], PUBLIC["vocabulary"])
    out = blocks_at(head, weights, jnp.asarray(features), jnp.asarray(tokens), jnp.asarray([PUBLIC["anchors"]]),
                    None, None)
    wanted = np.asarray(case["logits"], np.float32)
    wanted = np.where(wanted < -1e8, -np.inf, wanted)
    assert out.logits.shape[1:] == wanted.shape
    np.testing.assert_allclose(out.logits[0], wanted, atol=1e-5, rtol=1e-5)
    if "chance" in case:
        np.testing.assert_allclose(out.chance[0], case["chance"], atol=1e-5, rtol=1e-5)
    assert (ids is None) == (head.vocab == PUBLIC["vocabulary"])
