"""Packed weights on a mesh: loaded, made, saved. It imports no torch, beside which collectives on CPU crash."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.io.saving import save_model
from decodax.models import Transformer, llama
from decodax.models.calibration import Statistic
from decodax.models.formats import (
    FORMATS,
    GLVQ,
    Float8,
    Floats,
    Format,
    Int4,
    Int8,
    QServe,
    RSparse,
    Scaled,
    SqueezeLLM,
)
from decodax.models.formats.ggml import GgmlBlocks
from decodax.models.names import flatten
from decodax.models.packed import Packed
from tests.matrix import often

pytestmark = pytest.mark.mesh

SCALED = [name for name, own in FORMATS.items() if isinstance(own, (Int8, Int4, Float8, Floats))]


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2,
                         devices=jax.devices()[:4])


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    model = Transformer(llama(vocab=96, width=32, layers=1, heads=4, kv_heads=2, mlp=48))
    save_model(tmp_path / "whole", model, model.init_params(jax.random.key(0)))
    return tmp_path / "whole"


def lies_on_the_mesh(params: Any) -> bool:
    up = params["layers"]["0"]["mlp"]["up"]["kernel"]
    return isinstance(up, Scaled) and up.axes == ("model", None) and up.codes.sharding.spec[0] == "model" \
        and up.codes.addressable_shards[0].data.shape[0] * 2 == 48


@pytest.mark.parametrize("weights", often(["int4"], SCALED))
def test_packed_weights_lie_on_a_mesh(weights: str, whole: Path) -> None:
    alone, parted = dx.load(whole, weights=weights), dx.load(whole, weights=weights, mesh=mesh())
    dx.save(alone, whole.parent / "packed")
    again = dx.load(whole.parent / "packed", mesh=mesh())
    for one, other, read in zip(*(jax.tree.leaves(lm.params) for lm in (alone, parted, again)), strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(one, read)
    assert lies_on_the_mesh(parted.params) and lies_on_the_mesh(again.params)
    agrees(alone, parted)


@dataclasses.dataclass(frozen=True)
class Squares(Statistic):
    def of(self, x: jax.Array, gradient: jax.Array) -> jax.Array:
        return (x**2).sum(0)


@dataclasses.dataclass(frozen=True)
class Weighed(Format):
    """A format that goes by data."""

    @property
    def statistic(self) -> Statistic:
        return Squares()

    def pack(self, kernel: jax.Array, seen: Any = None) -> Packed:
        return Int8().pack(kernel * seen[:, None])


@pytest.mark.full
def test_data_is_looked_at_on_a_mesh(whole: Path) -> None:
    made = [dx.quantize(dx.load(whole, mesh=m), Weighed(), [[1, 2, 3], [4, 5]]) for m in (None, mesh())]
    assert lies_on_the_mesh(made[1].params)
    for one, other in zip(*(jax.tree.leaves(lm.params) for lm in made), strict=True):
        np.testing.assert_allclose(np.asarray(one, np.float32), np.asarray(other, np.float32), rtol=1e-4, atol=1)


def agrees(alone: dx.LM, parted: dx.LM) -> None:
    """The same arrays and, but for rounding, the same logits."""
    stored = lambda lm: [w.stored() if isinstance(w, GgmlBlocks) else w for w in flatten(lm.params).values()]
    for one, other in zip(*(jax.tree.leaves(stored(lm)) for lm in (alone, parted)), strict=True):
        np.testing.assert_array_equal(one, other)
    tokens = jnp.array([[3, 1, 4], [1, 5, 9]])
    with jax.set_mesh(parted.mesh):
        logits = jax.jit(parted.model.forward)(parted.params, tokens)
    np.testing.assert_allclose(logits, alone.model.forward(alone.params, tokens), atol=1e-5)


@pytest.mark.parametrize("own", often([QServe(8)], [QServe(8), QServe(8, "post-scale"), QServe(-1)]), ids=str)
def test_integers_of_groups_lie_on_a_mesh(own: QServe, whole: Path) -> None:
    parted = dx.load(whole, weights=own, mesh=mesh())
    mlp = parted.params["layers"]["0"]["mlp"]
    up, down = (mlp[name]["kernel"].kernel.codes.sharding.spec for name in ("up", "down"))
    assert up[0] == "model" and down[0] is None
    agrees(dx.load(whole, weights=own), parted)


@pytest.mark.parametrize("weights", often(["q4_0"], ["q4_0", "q8_0", "q5_1", "q4_k", "q6_k"]))
def test_blocks_lie_on_a_mesh(weights: str, tmp_path: Path) -> None:
    model = Transformer(llama(vocab=96, width=64, layers=1, heads=4, kv_heads=2, mlp=128))
    save_model(tmp_path / "whole", model, model.init_params(jax.random.key(0)))
    alone, parted = dx.load(tmp_path / "whole", weights=weights), dx.load(tmp_path / "whole", weights=weights,
                                                                         mesh=mesh())
    dx.save(alone, tmp_path / "packed")
    read = dx.load(tmp_path / "packed", mesh=mesh())
    for lm in (parted, read):
        up, down = (lm.params["layers"]["0"]["mlp"][name]["kernel"] for name in ("up", "down"))
        axes = lambda a: (*a.sharding.spec, *[None] * (a.ndim - len(a.sharding.spec)))
        assert axes(up.codes) == ("model", None, None) and axes(up.scales) == ("model", None)
        assert axes(down.codes) == (None, None, "model")
        assert up.codes.addressable_shards[0].data.shape[0] * 2 == 128
        assert down.codes.addressable_shards[0].data.shape[-1] * 2 == down.codes.shape[-1]
        agrees(alone, lm)


@pytest.mark.full
def test_tables_and_lists_lie_on_a_mesh(whole: Path) -> None:
    packed = whole.parent / "packed"
    dx.save(dx.quantize(dx.load(whole), SqueezeLLM(outliers=0.02), [list(range(40))], length=20), packed)
    parted = dx.load(packed, mesh=mesh())
    for name in ("up", "down"):         # the second would be cut along its inputs
        for a in jax.tree.leaves(parted.params["layers"]["0"]["mlp"][name]["kernel"]):
            assert a.sharding.spec[0] == "model" and 2 * a.addressable_shards[0].data.shape[0] == a.shape[0]
    agrees(dx.load(packed), parted)


@pytest.mark.wide
def test_large_inputs_are_found_on_a_mesh(whole: Path) -> None:
    data, own = [np.random.default_rng(0).integers(3, 90, 400).tolist()], RSparse(ratio=0.6)
    alone = dx.quantize(dx.load(whole), own, data, length=32)
    dx.save(alone, whole.parent / "packed")
    read = dx.load(whole.parent / "packed", mesh=mesh())
    up, down = (read.params["layers"]["0"]["mlp"][name]["kernel"] for name in ("up", "down"))
    assert tuple(up.kernel.sharding.spec) == (None, "model") and up.up.sharding.spec[0] == "model"
    assert down.kernel.sharding.spec[0] == down.limits.sharding.spec[0] == down.down.sharding.spec[1] == "model"
    agrees(alone, read)
    made = dx.quantize(dx.load(whole, mesh=mesh()), own, data, length=32)
    assert up.kernel.sharding == made.params["layers"]["0"]["mlp"]["up"]["kernel"].kernel.sharding


@pytest.mark.full
def test_lattices_lie_on_a_mesh(whole: Path) -> None:
    own, data = GLVQ(group=16, steps=2, bits=4), [[int(i) for i in np.arange(200) * 7 % 90]]
    alone = dx.quantize(dx.load(whole), own, data, length=50)
    dx.save(alone, whole.parent / "packed")
    parted = dx.load(whole.parent / "packed", mesh=mesh())
    q = parted.params["layers"]["0"]["attn"]["q"]["kernel"].codes
    assert q.sharding.spec[1] == "model" and q.addressable_shards[0].data.shape[1] * 2 == q.shape[1]
    agrees(alone, parted)
