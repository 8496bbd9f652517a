"""The contract of weight formats: a small model packed in each is saved, drafted for and batched like any other."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.common.registry import FORMATS
from decodax.io.load import LM
from decodax.models import Mamba2, Mamba2Config, Transformer, llama
from decodax.models.packed import Packed, multiply
from tests.matrix import often

VOCABULARY = 96
DATA = np.random.default_rng(0).integers(0, VOCABULARY, (4, 40)).tolist()
PROMPTS = [[3, 1, 4, 1, 5, 3, 1, 4, 1], [1, 5], [7, 7, 7, 7]]
OPTIONS: dict[str, dict[str, Any]] = {
    "int4": dict(group=16), "qserve": dict(group=16), "glvq": dict(group=32, steps=4), "quamba2": dict(heads=2)}
"""Options that fit a model of width 32."""


def model(name: str) -> LM:
    network: Any = Transformer(llama(vocab=VOCABULARY, width=32, layers=2, heads=4, kv_heads=2, mlp=64, tied=True))
    if name == "quamba2":
        network = Mamba2(Mamba2Config(vocab=VOCABULARY, width=32, layers=2, heads=8, head_dim=8, groups=2, state=8,
                                      chunk=8))
    params = network.init_params(jax.random.key(1))
    if name != "quamba2":
        params = jax.tree.map(lambda x: 4 * x if x.ndim > 1 else x, params)
    return LM(model=network, params=params, vocab_size=VOCABULARY)


@functools.cache
def packed(name: str) -> LM:
    return dx.quantize(model(name), FORMATS[name].make(**OPTIONS.get(name, {})), DATA, length=32)


def generated(name: str, rows: tuple[int, ...] = (0, 1, 2), **more: Any) -> Any:
    return dx.generate(packed(name), [PROMPTS[i] for i in rows], request_ids=rows, seed=5, max_new_tokens=12,
                       temperature=[(0.0, 0.8, 0.0)[i] for i in rows], eos_token_id=[], **more)


def leaves(name: str) -> list[Any]:
    return [x for x in jax.tree.leaves(packed(name).params, is_leaf=lambda x: isinstance(x, Packed))
            if isinstance(x, Packed)]


OFTEN = ["int8", "qserve", "squeezellm"]


@pytest.mark.wide
@pytest.mark.parametrize("name", often(OFTEN, FORMATS))
def test_speculative_equals_plain_with_packed_weights(name: str) -> None:
    plain = generated(name)
    drafted = generated(name, algorithm="prompt-lookup:length=3")
    assert drafted.tokens.tolist() == plain.tokens.tolist() and drafted.stats.accepted.sum() > 0


@pytest.mark.wide
@pytest.mark.parametrize("name", often(OFTEN, FORMATS))
def test_a_row_does_not_depend_on_batch_mates_order_or_chunks(name: str) -> None:
    whole, back = generated(name).tokens.tolist(), generated(name, (2, 1, 0)).tokens.tolist()
    assert back == whole[::-1]
    assert generated(name, (0,), chunk=4).tokens.tolist() == whole[:1]


@pytest.mark.wide(but=("int8",))
@pytest.mark.parametrize("name", often(OFTEN, FORMATS))
def test_a_packed_model_is_loaded_as_it_was_saved(name: str, tmp_path: Path) -> None:
    dx.save(packed(name), tmp_path)
    again = dx.load(tmp_path)
    assert again.model == packed(name).model and len(leaves(name)) > 2
    assert jax.tree.structure(again.params) == jax.tree.structure(packed(name).params)
    jax.tree.map(np.testing.assert_array_equal, again.params, packed(name).params)


@pytest.mark.wide
@pytest.mark.parametrize("name", often(OFTEN, FORMATS))
def test_a_nan_among_the_inputs_makes_its_row_nan_and_no_other(name: str) -> None:
    for leaf in [x for x in leaves(name) if x.values(jnp.float32).ndim == 2][:2]:
        x = jax.random.normal(jax.random.key(2), (3, leaf.values(jnp.float32).shape[1]))
        found = np.asarray(multiply(x.at[1, 4].set(jnp.nan), leaf))
        assert np.isnan(found[1]).all() and np.isfinite(found[[0, 2]]).all()
