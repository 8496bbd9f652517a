"""Grouped lattice vector quantisation: rounding to lattices, how they are learned, and models that are kept in them."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.models.formats import GLVQ, Lattice, kernels, read_format
from decodax.models.formats.glvq import GroupInputs, bit_planes, group_size
from decodax.models.formats.lattices import babai, compand, expand, salience
from decodax.models.names import flatten
from decodax.models.packed import Packed, multiply
from tests.matrix import often

PROMPT = "def area(r):\n    return"


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def weights(K: int, N: int, *above: int) -> np.ndarray:
    """Heavy tails, as trained kernels have them."""
    return (0.04 * np.random.default_rng(K + N).standard_t(5, (*above, K, N))).astype(np.float32)


def inputs(K: int, rows: int = 400) -> np.ndarray:
    """Inputs of which some are louder than others and which go together."""
    return normal(rows, K, seed=1) @ (np.eye(K) + 0.3 * normal(K, K, seed=2) / K**0.5) * np.geomspace(0.3, 3, K)


def packed(w: np.ndarray, x: np.ndarray, **options: Any) -> Lattice:
    own = GLVQ(**{"group": 32, "steps": 10, **options})
    seen = own.statistic.of(jnp.asarray(x), jnp.ones((len(x), 1)))
    return own.pack(jnp.asarray(w), jnp.broadcast_to(seen, (*w.shape[:-2], *seen.shape)))


values = jax.jit(lambda made, dtype=jnp.float32: made.values(dtype), static_argnames="dtype")


def error(made: Packed | np.ndarray, w: np.ndarray, x: np.ndarray, group: int = 32) -> float:
    """The squared error of the outputs of each group of inputs, over the square of the outputs."""
    own = made if isinstance(made, np.ndarray) else np.asarray(values(made)).T
    parts = [slice(i, i + group) for i in range(0, len(w), group)]
    square = lambda weights: sum(((x[:, part] @ weights[part]) ** 2).sum() for part in parts)
    return float(square(own - w) / square(w))


def to_nearest(w: np.ndarray, bits: int, group: int) -> np.ndarray:
    """Each weight rounded as `Int4` does, with codes of other widths and a scale for each output's `group` inputs."""
    own = w.T.reshape(w.shape[1], -1, int(np.gcd(group, len(w))))
    step = np.abs(own).max(-1, keepdims=True) / (2 ** (bits - 1) - 1)
    return (np.round(own / step) * step).reshape(w.shape[1], -1).T


def points(lattice: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """All codes, and the points that they stand for."""
    codes = np.array(list(itertools.product(range(2**bits), repeat=len(lattice))))
    return codes, (codes - (2**bits - 1) / 2) @ lattice.T


@pytest.mark.parametrize("mu", [10.0, 100.0, 255.0])
def test_companding_is_undone(mu: float) -> None:
    w = jnp.linspace(-2, 2, 101)
    np.testing.assert_allclose(expand(compand(w, jnp.float32(mu)), jnp.float32(mu)), w, rtol=3e-6, atol=1e-8)
    slopes = np.diff(compand(w, jnp.float32(mu)))
    assert (slopes > 0).all() and slopes.argmax() in (49, 50)       # finest about zero


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_codes_of_an_orthogonal_basis_are_those_of_the_nearest_point(bits: int) -> None:
    """Also of vectors outside of the codes' range."""
    lattice = (np.linalg.qr(normal(3, 3))[0] * np.array([0.5, 1, 2])).astype(np.float32)
    y = 2 * normal(200, 3, seed=1)
    codes, all_points = points(lattice, bits)
    nearest = ((y[:, None] - all_points) ** 2).sum(-1).argmin(1)
    np.testing.assert_array_equal(babai(jnp.asarray(lattice), jnp.asarray(y), bits), codes[nearest])


def test_codes_of_any_basis_are_within_half_a_step_of_each_basis_vector() -> None:
    lattice = np.eye(3, dtype=np.float32) + 0.3 * normal(3, 3)
    _, all_points = points(lattice, 3)
    y = (np.random.default_rng(1).uniform(-4, 4, (200, 3)) @ lattice.T).astype(np.float32)     # within the range
    found = np.asarray(babai(jnp.asarray(lattice), jnp.asarray(y), 3))
    off = y - (found - 3.5) @ lattice.T
    assert (np.abs(off @ np.linalg.inv(lattice).T) <= 0.5 + 1e-5).all()
    nearest = np.linalg.norm(y[:, None] - all_points, axis=-1).min(1)
    assert (nearest <= np.linalg.norm(off, axis=1) + 1e-5).all()
    assert 0.5 < np.isclose(nearest, np.linalg.norm(off, axis=1), rtol=1e-4).mean() < 1     # the nearest mostly


@pytest.mark.wide(but=("bits0-48", "bits3-24"))
@pytest.mark.parametrize(("bits", "K"), [((2, 2), 48), ((3, 1, 2), 70), ((5, 4, 3, 4), 96), ((8,), 24)])
def test_a_weight_is_its_expanded_point(bits: tuple[int, ...], K: int) -> None:
    size, N, d = group_size(K, -(-K // len(bits) // 8) * 8, 8), 5, 4
    rng = np.random.default_rng(0)
    codes = np.stack([rng.integers(0, 2**b, (N, size)) for b in bits]).astype(np.uint8)
    spacing = 0.4 / 2.0 ** np.array(bits)[:, None, None]
    lattices = (spacing * (np.eye(d) + 0.2 * rng.standard_normal((len(bits), d, d)))).astype(np.float16)
    curvatures, scales = (rng.uniform(*ends, n).astype(np.float16) for *ends, n in ((10, 255, len(bits)), (0.5, 2, N)))
    expected = []
    for u, b, lattice, mu in zip(codes, bits, lattices.astype(float), curvatures.astype(float), strict=True):
        y = np.concatenate([lattice @ z for row in u - (2**b - 1) / 2 for z in row.reshape(-1, d)]).reshape(N, size)
        expected.append(np.sign(y) * ((1 + mu) ** np.abs(y) - 1) / mu)
    made = Lattice(codes=bit_planes(jnp.asarray(codes)[None], bits)[0], lattices=jnp.asarray(lattices),
                   curvatures=jnp.asarray(curvatures), scales=jnp.asarray(scales), bits=bits, inputs=K)
    assert made.shape == (N, K) and made.codes.nbytes == N * size * sum(bits) // 8
    with jax.enable_x64(True):
        found = np.asarray(values(made, jnp.float64))
    np.testing.assert_allclose(found, scales.astype(float)[:, None] * np.concatenate(expected, 1)[:, :K], rtol=1e-12)
    np.testing.assert_allclose(values(made), found, rtol=2e-5, atol=1e-7)
    which = jnp.array([[3, 0], [4, 4]])
    np.testing.assert_allclose(jax.jit(lambda made: made.rows(which, jnp.float32))(made),
                               found[np.asarray(which)], rtol=2e-5, atol=1e-7)


CASES = [(rows, *sizes) for rows in (1, 2, 8, 9, 40) for sizes in ((96, 50), (70, 7), (256, 1), (640, 900))]


@pytest.mark.wide
@pytest.mark.parametrize(("rows", "K", "N"), often([(9, 70, 7)], CASES))
def test_a_product_is_that_of_the_values(rows: int, K: int, N: int) -> None:
    made, x = packed(weights(K, N), inputs(K), steps=0, bits=3, scales=True), normal(rows, K, seed=3)
    with jax.enable_x64(True):
        expected = x.astype(np.float64) @ np.asarray(values(made, jnp.float64)).T
    np.testing.assert_allclose(jax.jit(multiply)(x, made), expected, atol=2e-6 * K**0.5)
    half = jax.jit(multiply)(jnp.asarray(x, jnp.bfloat16), made)
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(half.astype(jnp.float32), expected, atol=4e-3 * K**0.5)


@pytest.mark.wide(but=("4", "3"))
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_learning_lowers_the_error_which_is_below_that_of_rounding(bits: int) -> None:
    w, x = weights(128, 256), inputs(128)
    start, learned = (error(packed(w, x, bits=bits, spread=0, steps=steps, group=64), w, x, 64) for steps in (0, 60))
    assert learned < 0.97 * start
    assert learned < error(to_nearest(w, bits, 64), w, x, 64)


def test_scales_help_where_outputs_differ() -> None:
    w, x = weights(64, 96) * np.geomspace(0.1, 3, 96, dtype=np.float32), inputs(64)
    made, without = (packed(w, x, steps=0, spread=0, scales=scales) for scales in (True, False))
    assert made.scales.shape == (96,) and without.scales is None
    worst = lambda made: max(error(np.asarray(values(made)).T[:, n:n + 1], w[:, n:n + 1], x) for n in range(96))
    assert 2 * worst(made) < worst(without)


@pytest.mark.full
def test_more_salient_groups_have_more_bits() -> None:
    w, x = weights(128, 60), inputs(128)
    x[:, 32:64] *= 10
    x[:, 96:] /= 10
    made = packed(w, x, steps=0)
    assert made.bits[1] == 3 and made.bits[3] == 1 and np.mean(made.bits) == 2
    assert error(made, w, x) < 0.8 * error(packed(w, x, steps=0, spread=0), w, x)
    of = lambda rows: np.asarray(GroupInputs(32, 8).of(jnp.asarray(rows), jnp.ones((len(rows), 1))))
    own = np.asarray(salience(jnp.asarray(w.T.reshape(1, 60, 4, 32).swapaxes(1, 2)), jnp.asarray(of(x))[None]))[0]
    assert own.argmax() == 1 and own.argmin() == 3


def test_statistics_are_products_of_the_inputs_of_a_group() -> None:
    x = normal(9, 20)
    gradient = jnp.ones((9, 3)).at[4].set(0)        # a row that stands for nothing
    found = np.asarray(GroupInputs(16, 8).of(jnp.asarray(x), gradient))
    own = np.pad(np.delete(x, 4, 0), ((0, 0), (0, 12)))
    np.testing.assert_allclose(found, [own[:, :16].T @ own[:, :16], own[:, 16:].T @ own[:, 16:]], atol=1e-5)


@pytest.mark.full
def test_experts_are_packed_one_by_one_with_the_same_bits() -> None:
    w, x = weights(64, 24, 2), inputs(64)
    every = packed(w, x, spread=0, scales=True)
    for e in range(2):
        alone = packed(w[e], x, spread=0, scales=True)
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda a, e=e: a[e], every), alone)
        np.testing.assert_array_equal(values(every)[e], values(alone))
    assert len(packed(w, x).bits) == 2 and every.shape == (2, 24, 64)


def test_kernels_without_data_or_weights_are_packed_too() -> None:
    own = GLVQ(group=32, steps=3, spread=0)
    seen = jnp.zeros((2, 32, 32))
    w = weights(64, 40)
    assert 0 < error(own.pack(jnp.asarray(w), seen), w, inputs(64)) < 0.3
    assert np.abs(values(own.pack(jnp.zeros((64, 40)), seen))).max() < 1e-5


def test_wrong_parameters_are_refused() -> None:
    assert read_format("glvq") == GLVQ()
    for options, message in ((dict(bits=0), "bits: got 0, takes a whole number from 1 to 7"),
                             (dict(bits=8), "bits: got 8"), (dict(bits=1), "spread: got 1 with 1 bits, takes 0"),
                             (dict(group=100), "group: got 100"),
                             (dict(group=32, dimension=64), "group: got 32, takes a multiple of 64"),
                             (dict(dimension=0), "dimension: got 0"), (dict(steps=-1), "steps: got -1"),
                             (dict(rate=-1.0), "rate: got -1.0, takes a number from 0")):
        with pytest.raises(ValueError, match=f"^{message}"):
            GLVQ(**options)
    with pytest.raises(ValueError, match="needs calibration data"):
        dx.load("pycode-draft", weights="glvq")


def arrays(lm: dx.LM) -> dx.LM:
    """The same with the values of its packed kernels as arrays."""
    return dataclasses.replace(lm, params=jax.tree.map(
        lambda x: jnp.swapaxes(x.values(jnp.float32), -1, -2) if isinstance(x, Packed) else x, lm.params,
        is_leaf=lambda x: isinstance(x, Packed)))


def texts() -> list[str]:
    root = Path(__file__).parents[3]
    return [(root / "models" / name).read_text() for name in ("transformer.py", "config.py", "packed.py")]


OWN = GLVQ(steps=20)


@pytest.fixture(scope="module")
def draft() -> dx.LM:
    return dx.quantize(dx.load("pycode-draft"), OWN, texts(), sequences=8, length=256)


def loses_less_than_by_rounding(lm: dx.LM, own: GLVQ, made: dx.LM, share: float) -> None:
    chosen = [path for path in kernels(lm.params) if own.packs(path)]
    leaves = flatten(made.params)
    assert [path for path, leaf in leaves.items() if isinstance(leaf, Packed)] == chosen
    size = sum(a.nbytes for path in chosen for a in jax.tree.leaves(leaves[path]))
    count = sum(int(np.prod(leaves[path].shape)) for path in chosen)
    assert own.bits < 8 * size / count < own.bits + 0.2
    plain = flatten(lm.params)
    plain |= {path: jnp.asarray(to_nearest(np.asarray(plain[path]), own.bits, 128)) for path in chosen}
    rounded = dataclasses.replace(lm, params=jax.tree.unflatten(jax.tree.structure(lm.params), plain.values()))
    common = Path(__file__).parents[3] / "decodax" / "common"
    held = [(common / name).read_text()[:1200] for name in ("struct.py", "axes.py")]
    whole, lattices, nearest = (float(np.mean(dx.score(one, held).bits_per_byte)) for one in (lm, made, rounded))
    assert whole < lattices < whole + share * (nearest - whole)


@pytest.mark.full
def test_a_model_loses_less_than_by_rounding(draft: dx.LM) -> None:
    """Which takes more bits: a scale of 32 of them for 128 weights."""
    loses_less_than_by_rounding(dx.load("pycode-draft"), OWN, draft, 0.6)


@pytest.mark.full
@pytest.mark.parametrize(("bits", "scales", "share"), [(2, False, 0.5), (2, True, 0.3), (3, True, 0.9), (4, True, 4)])
def test_a_larger_model_loses_less_than_by_rounding(bits: int, scales: bool, share: float) -> None:
    """But with 4 bits, where either loses less than 0.02 bits a byte."""
    lm, own = dx.load("pycode"), GLVQ(bits=bits, scales=scales)
    made = dx.quantize(lm, own, texts(), sequences=32, length=256)
    loses_less_than_by_rounding(lm, own, made, share)


@pytest.mark.full
def test_generation_from_a_saved_model_is_that_of_its_values(draft: dx.LM, tmp_path: Path) -> None:
    dx.save(draft, tmp_path)
    same = dx.load(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, same.params, draft.params)
    options: dict[str, Any] = dict(max_new_tokens=12, min_new_tokens=12)
    plain = dx.generate(same, [PROMPT, "import"], **options).text
    assert plain == dx.generate(arrays(draft), [PROMPT, "import"], **options).text
