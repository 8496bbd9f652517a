"""The largest of a vocabulary."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from decodax.pallas_kernels.vocabulary import by_nodes, nodes, top_k
from decodax.pallas_kernels.vocabulary.selection import by_blocks


@pytest.mark.parametrize("size", [5000, 128 * 40])
@pytest.mark.parametrize("k", [1, 8])
def test_blocks_give_the_largest_and_of_equal_entries_the_first(size: int, k: int) -> None:
    r = np.random.default_rng(size + k)
    x = r.integers(0, 60, (4, 3, size)).astype(np.float32)         # many ties
    x[1] = -np.inf
    x[2, 1, size - 1] = np.inf
    x[3, 2] = r.normal(size=size)
    for got, want in zip(by_blocks(x, k), jax.lax.top_k(x, k), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("count", "most", "width"),
                         [(6, 4, 4), (9, 2, 2), (5, 1, 1), (25, 12, 8), (7, 7, 7), (3, 0, 1)])
def test_a_few_nodes_at_a_time_give_what_all_at_once_do(count: int, most: int, width: int,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "platform", lambda: "tpu")
    monkeypatch.setattr(nodes, "FAST", most * 3 * 16 * 4)
    x = np.random.default_rng(count).normal(size=(3, count, 16)).astype(np.float32)
    places = np.random.default_rng(0).integers(0, 99, (3, count)).astype(np.int32)
    widths = []

    def fn(x: jax.Array, places: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
        widths.append(x.shape[1])
        return x.argmax(-1), places

    token, place = by_nodes(fn, x, places)
    assert widths == [width]
    np.testing.assert_array_equal(token, x.argmax(-1))
    np.testing.assert_array_equal(place, places)
    if width < count:
        np.testing.assert_array_equal(by_nodes(fn, x)[1], np.tile(np.arange(count), (3, 1)))


@pytest.mark.mesh
def test_a_divided_vocabulary_gives_what_a_whole_one_does() -> None:
    x = np.random.default_rng(0).integers(0, 40, (4, 2, 4096)).astype(np.float32)
    want = jax.lax.top_k(x, 8)
    with jax.set_mesh(jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)):
        got = jax.jit(lambda x: top_k(x, 8))(x)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)
