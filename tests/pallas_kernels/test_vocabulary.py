"""The largest of a vocabulary."""

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


@pytest.mark.parametrize(("count", "most", "widths"), [
    (6, 4, [4, 2]), (9, 3, [3, 3, 3]), (25, 12, [8, 8, 8, 1]), (7, 7, [7]),       # the head is read for each part
    (9, 2, [2]), (5, 1, [1]), (6, 0, [1])])                                         # more parts than that: a loop
def test_a_few_nodes_at_a_time_give_what_all_at_once_do(count: int, most: int, widths: list[int],
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "platform", lambda: "tpu")
    monkeypatch.setattr(nodes, "FAST", most * 3 * 16 * 4)
    hidden = np.random.default_rng(count).normal(size=(3, count, 8)).astype(np.float32)
    kernel = np.random.default_rng(1).normal(size=(8, 16)).astype(np.float32)
    places = np.random.default_rng(0).integers(0, 99, (3, count)).astype(np.int32)
    seen, read = [], []

    def head(hidden: jax.Array) -> jax.Array:
        read.append(hidden.shape[1])
        return hidden @ kernel

    def fn(x: jax.Array, places: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
        seen.append(x.shape[1])
        return x.argmax(-1), places

    token, place = by_nodes(fn, head, hidden, places)
    assert seen == widths and read[1:] == (widths if sum(widths) == count else [count])
    np.testing.assert_array_equal(token, (hidden @ kernel).argmax(-1))
    np.testing.assert_array_equal(place, places)
    if len(widths) > 1 or widths[0] < count:
        np.testing.assert_array_equal(by_nodes(fn, head, hidden)[1], np.tile(np.arange(count), (3, 1)))
    if sum(widths) < count:
        seen.clear()
        by_nodes(fn, head, hidden, places, once=True)
        assert seen == [count]


def test_the_largest_of_many_nodes_are_found_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(0).integers(0, 40, (2, 19, 1200)).astype(np.float32)
    want = jax.lax.top_k(x, 2)
    assert all((a == b).all() for a, b in zip(by_blocks(x, 2), want, strict=True))      # 1200 is not 9 blocks of 128
    monkeypatch.setattr(nodes, "platform", lambda: "tpu")
    monkeypatch.setattr(nodes, "FAST", 5 * 2 * 1200 * 4)
    assert all((a == b).all() for a, b in zip(top_k(x, 2), want, strict=True))


@pytest.mark.mesh
def test_a_divided_vocabulary_gives_what_a_whole_one_does() -> None:
    x = np.random.default_rng(0).integers(0, 40, (4, 2, 4096)).astype(np.float32)
    want = jax.lax.top_k(x, 8)
    with jax.set_mesh(jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)):
        got = jax.jit(lambda x: top_k(x, 8))(x)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)
