"""R-Sparse: the authors' sets and products, its laws, and what it does to a model."""

import argparse
import functools
import inspect
import json
import textwrap
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.core.window import causal
from decodax.models import formats
from decodax.models.calibration import observe
from decodax.models.formats import RankSparse, RSparse
from decodax.models.formats.rsparse import RATIOS, Magnitudes
from decodax.models.names import flatten
from decodax.models.packed import multiply
from tests.matrix import often
from tests.models.tiny import saved


def seen_of(x: np.ndarray) -> jax.Array:
    return Magnitudes().of(jnp.asarray(x), jnp.ones((len(x), 1)))


def rank_of(packed: RankSparse) -> int:
    return 0 if packed.down is None else packed.down.shape[-2]


def problem() -> tuple[np.ndarray, np.ndarray]:
    """A kernel `[20, 12]` and rows `[512, 20]`."""
    r = np.random.default_rng(0)
    kernel = r.standard_normal((20, 12)) * np.exp(r.standard_normal((20, 1)))
    x = r.standard_normal((512, 20)) * np.exp(r.standard_normal((1, 20)))
    return kernel.astype(np.float32), x.astype(np.float32)


AUTHORS = [
    (0.5, 1.0, 0, 0.72648776, ("11000100101001100111", "01001001101001100010"),
     [[-2.47908, -1.46621, 6.55275, -14.57177], [-42.64474, -70.69830, -29.21145, 12.79013]], [154.96141, 422.72281]),
    (0.5, 0.7, 1, 6.66604519, ("00000101101001100011", "00001001001001100011"),
     [[1.91882, -5.39546, 4.50154, -22.49756], [-47.53212, -77.56125, -36.73602, 1.41562]], [157.15115, 420.99918]),
    (0.7, 0.4, 1, 19.28502274, ("00000000001000000001", "00001001000000000001"),
     [[2.20993, -0.15280, -4.63147, -24.15056], [-41.72288, -72.50324, -32.07211, 7.66150]], [154.74066, 408.95090]),
]
"""Of `R_Sparse_Linear` with thresholds by the rows of `problem`, in VITA-Group/R-Sparse at 59e9a8ed389c, with singular
components of float64 (they are stored as float16 there): sparsity, ratio, rank, threshold, the large inputs of the
first two rows, their first four outputs, and the sums of the magnitudes of all outputs."""


@pytest.mark.parametrize(("sparsity", "ratio", "rank", "threshold", "large", "outputs", "sums"), AUTHORS)
def test_sets_and_products_are_the_authors(sparsity: float, ratio: float, rank: int, threshold: float,
                                           large: tuple[str, str], outputs: list[list[float]],
                                           sums: list[float]) -> None:
    kernel, x = problem()
    packed = RSparse(sparsity, ratio).pack(jnp.asarray(kernel), seen_of(x))
    weights = np.sqrt((kernel**2).sum(1)) if ratio < 1 else 1.0
    np.testing.assert_allclose(packed.limits * weights, threshold, rtol=0.02)      # theirs is one of the 10,240 values
    assert rank_of(packed) == rank
    assert tuple("".join(map(str, row)) for row in np.asarray(packed.large(x[:2]), int).tolist()) == large
    found = np.asarray(multiply(x[:2], packed))
    np.testing.assert_allclose(found[:, :4], outputs, atol=1e-4)
    np.testing.assert_allclose(np.abs(found).sum(1), sums, rtol=1e-5)


def by_the_rule(x: np.ndarray, packed: RankSparse) -> np.ndarray:
    large = ~(np.abs(x) <= np.asarray(packed.limits))
    y = np.where(large, x, 0).astype(np.float64) @ np.asarray(packed.kernel, np.float64)
    if packed.down is not None:
        y += np.where(large, 0, x) @ np.asarray(packed.down, np.float64).T @ np.asarray(packed.up, np.float64).T
    return y


@pytest.mark.wide
@pytest.mark.parametrize(("rows", "K", "N"), [(1, 96, 50), (1, 2100, 20), (2, 33, 7), (9, 96, 50)])
def test_a_product_is_that_of_the_rule(rows: int, K: int, N: int) -> None:
    kernel, x = (np.asarray(jax.random.normal(jax.random.key(i), shape)) for i, shape in
                 enumerate([(K, N), (64 + rows, K)]))
    packed = RSparse(ratio=0.6).pack(jnp.asarray(kernel), seen_of(x[:64]))
    assert rank_of(packed) > 0 and packed.shape == (N, K)
    expected = by_the_rule(x[64:], packed)
    np.testing.assert_allclose(jax.jit(multiply)(x[64:], packed), expected, atol=2e-6 * K**0.5 * 4)
    half = jnp.asarray(x[64:], jnp.bfloat16)
    found = jax.jit(multiply)(half, packed)
    assert found.dtype == jnp.bfloat16
    expected = by_the_rule(np.asarray(half, np.float64), packed)
    np.testing.assert_allclose(found.astype(jnp.float32), expected, atol=2e-2 * K**0.5 * 4)
    start, size = N // 3, N - N // 3
    np.testing.assert_allclose(packed.part(start, size).product(half, jnp.float32), expected[:, start:],
                               atol=2e-6 * K**0.5 * 4)


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    kernel, x = problem()
    packed = RSparse(ratio=0.7).pack(jnp.asarray(kernel), seen_of(x))
    product = jax.jit(multiply)
    one, loud = product(x[:4], packed), product(np.concatenate([x[:2], 1000 * x[2:4]]), packed)
    np.testing.assert_array_equal(one[:2], loud[:2])
    np.testing.assert_array_equal(packed.large(x[:4])[1:2], packed.large(x[1:2]))
    np.testing.assert_allclose(one[1:2], product(x[1:2], packed), atol=1e-4)


def test_a_broken_weight_or_activation_makes_no_number() -> None:
    kernel, x = problem()
    for ratio in (1.0, 0.7):
        packed = RSparse(ratio=ratio).pack(jnp.asarray(kernel), seen_of(x))
        for rows in (x[:1], x[:2]):
            found = np.asarray(multiply(jnp.asarray(rows).at[0, 1].set(jnp.nan), packed))
            assert np.isnan(found[0]).all() and np.isfinite(found[1:]).all()


def test_a_single_row_on_a_cpu_reads_no_weights_of_small_inputs() -> None:
    x = jnp.where(jnp.arange(100) % 3 == 0, 2.0, 0.5)[None].at[0, 0].set(0.5).at[0, 99].set(0.5)      # 32 large ones
    kernel = jnp.where(x[0, :, None] > 1, jnp.ones((100, 5)), jnp.nan)
    packed = RankSparse(kernel=kernel, limits=jnp.ones(100))
    np.testing.assert_array_equal(jax.jit(multiply)(x, packed), np.full((1, 5), 64.0))


@pytest.mark.wide(but=("0.6",))
@pytest.mark.parametrize("ratio", [1.0, 0.6])
def test_the_share_of_small_inputs_is_kept_on_the_data(ratio: float) -> None:
    kernel, x = problem()
    whole = seen_of(x)
    parts = seen_of(x[:100]) + seen_of(x[100:])
    np.testing.assert_array_equal(whole, parts)
    for sparsity in (0.3, 0.5, 0.8):
        packed = RSparse(sparsity, ratio).pack(jnp.asarray(kernel), parts)
        assert abs(1 - np.mean(packed.large(x)) - (1 - (1 - sparsity) * ratio)) < 0.003


def test_rows_without_gradient_are_not_counted() -> None:
    x = np.ones((3, 4), np.float32)
    assert Magnitudes().of(x, jnp.array([[0.0, 1.0], [0.0, 0.0], [2.0, 0.0]])).sum() == 8


@pytest.mark.parametrize("components", often([], [4, 64]))
def test_each_kernel_has_about_the_ratio_of_the_least_error(components: int) -> None:
    """The first kernel has four components that count, the other has 64 of one size."""
    r = np.random.default_rng(1)
    left, right = (np.linalg.qr(r.standard_normal((64, 64)))[0] for _ in range(2))
    kernel = ((left * np.where(np.arange(64) < components, 1.0, 0.01)) @ right).astype(np.float32)
    x = r.standard_t(3, (512, 64)).astype(np.float32)

    def error(ratio: float | None) -> float:
        packed = RSparse(0.5, ratio).pack(jnp.asarray(kernel), seen_of(x))
        return float(((by_the_rule(x, packed) - x @ kernel)**2).sum())

    errors = [error(ratio) for ratio in RATIOS]
    assert error(None) <= 1.05 * min(errors) and max(errors) > 2 * min(errors)
    assert (rank_of(RSparse().pack(jnp.asarray(kernel), seen_of(x))) >= components) == (components == 4)


def test_experts_have_limits_of_their_own() -> None:
    kernel, x = problem()
    kernels = jnp.stack([jnp.asarray(kernel), 2 * jnp.asarray(kernel)[::-1], jnp.asarray(kernel)])
    seen = jnp.stack([seen_of(x), seen_of(5 * x), jnp.zeros_like(seen_of(x))])
    packed = RSparse(ratio=0.7).pack(kernels, seen)
    assert packed.shape == (3, 12, 20) and packed.down.shape == (3, 1, 20)
    for i, rows in enumerate((x, 5 * x)):
        own = jax.tree.map(lambda a, i=i: a[i], packed)
        alone = RSparse(ratio=0.7).pack(kernels[i], seen[i])
        np.testing.assert_allclose(own.limits, alone.limits, rtol=1e-6)
        np.testing.assert_allclose(multiply(rows[:8], own), by_the_rule(rows[:8], alone), atol=2e-3)
    # no data reached the last one
    pooled = RSparse(ratio=0.7).pack(kernels[2], seen.sum(0))
    np.testing.assert_allclose(packed.limits[2], pooled.limits, rtol=1e-6)


def test_numbers_out_of_range_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^sparsity: got 1, takes a number from 0 and below 1$"):
        RSparse(sparsity=1)
    with pytest.raises(ValueError, match=r"^ratio: got 1\.5, takes a number from 0 to 1 or None$"):
        RSparse(ratio=1.5)
    with pytest.raises(ValueError, match=r"^weights: 'r-sparse' needs calibration data"):
        dx.load("pycode-draft", weights="r-sparse")


DATA = [inspect.getsource(textwrap), inspect.getsource(json.JSONDecoder)]


@pytest.fixture(scope="module")
def draft() -> dx.LM:
    return dx.quantize(dx.load("pycode-draft", dtype="float32"), "r-sparse", DATA, length=256, sequences=8)


@pytest.mark.full
def test_a_node_of_a_window_has_the_logits_of_plain_decoding(draft: dx.LM) -> None:
    """A token's result does not depend on whether it was in the prompt, either."""
    tokens = jnp.asarray(draft.tokenizer.encode(DATA[0])[:24])[None]
    whole = draft.model.forward(draft.params, tokens)
    cache = draft.model.init_cache(1, 32)

    @jax.jit
    def step(cache: Any, token: Any, i: Any) -> Any:
        out = draft.model.apply(draft.params, causal(token[:, None], i[None]), cache)
        return cache.commit(out.entries, i[None, None]), out.logits()[:, 0]

    for i in range(24):
        cache, logits = step(cache, tokens[:, i], jnp.int32(i))
        np.testing.assert_allclose(logits, whole[:, i], atol=1e-3)


@pytest.mark.full
def test_half_of_the_kernels_is_not_read_at_little_cost() -> None:
    lm = dx.load("pycode", dtype="float32")
    code = lambda module: np.array(lm.tokenizer.encode(inspect.getsource(module)))
    leaves, text = flatten(lm.params), code(functools)[:1024].reshape(2, 512)       # which was held out
    paths = [path for path in formats.kernels(lm.params) if path.startswith("layers.")]
    seen = observe(lm.model, lm.params, code(argparse)[:2048].reshape(8, 256), Magnitudes(), paths)

    @jax.jit
    def bits(leaves: Any) -> Any:
        logits = lm.model.forward(jax.tree.unflatten(jax.tree.structure(lm.params), leaves.values()), text[:, :-1])
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), text[:, 1:, None], -1).mean() / np.log(2)

    plain, own, large = (bits({path: leaf if one is None or path not in seen else one.pack(leaf, seen[path])
                               for path, leaf in leaves.items()}) for one in (None, RSparse(), RSparse(ratio=1.0)))
    assert plain < own < large and own < 1.1 * plain


@pytest.mark.wide
@pytest.mark.parametrize("name", often(["llama"], ["llama", "mixtral"]))
def test_a_model_is_saved_and_loaded(name: str, tmp_path: Path) -> None:
    saved(name, tmp_path / "plain")
    lm = dx.load(tmp_path / "plain", dtype="float32")
    packed = dx.quantize(lm, RSparse(0.1), [np.random.default_rng(0).integers(3, 90, 400).tolist()], length=32)
    packs = {path: isinstance(leaf, RankSparse) for path, leaf in flatten(packed.params).items()}
    assert packs == {path: path.startswith("layers.") and path in formats.kernels(lm.params) for path in packs}
    dx.save(packed, tmp_path / "packed")
    again = dx.load(tmp_path / "packed")
    jax.tree.map(np.testing.assert_array_equal, packed.params, again.params)
    tokens = np.arange(3, 27).reshape(2, 12)
    logits = [jax.jit(each.model.forward)(each.params, tokens) for each in (lm, packed)]
    assert 0 < np.abs(logits[0] - logits[1]).mean() < 0.2 * np.abs(logits[0]).mean()
