"""The draw of a token at once, by the kernel and by XLA, against float64; and the policy's own chain."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from decodax.core.types import DEAD_END, INVALID
from decodax.pallas_kernels import vocabulary
from decodax.pallas_kernels.vocabulary import reference, tpu
from decodax.sampling.draw import checked
from tests.matrix import often
from tests.pallas_kernels.races import no_races

KINDS = {"temperature": (), "k": ("k",), "p": ("p",), "min_p": ("min_p",), "all": ("k", "p", "min_p")}
SIZES = [(1, 50), (5, 384), (9, 300), (16, 1025), (3, 2049)]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu, "CHUNK", 256)      # several a row, and fewer operations to compile


def arrays(R: int, V: int, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rows one after the other: greedy, cold, warm, hot; and truncations, each of which some rows do without."""
    r = np.random.default_rng(R * V)
    given = dict(logits=(4 * r.normal(size=(R, V))).astype(np.float32),
                 address=r.integers(0, 2**32, (R, 2), dtype=np.uint32),
                 temperature=np.resize(np.array([0.7, 0, 0.2, 1, 3], np.float32), R))
    numbers = dict(k=np.resize(np.array([5, 40, 0, 1], np.int32), R),
                   p=np.resize(np.array([0.9, 0.3, 0, 1, 0.99], np.float32), R),
                   min_p=np.resize(np.array([0.02, 0, 0.3, 1], np.float32), R))
    given["logits"][:, V // 3] = -np.inf
    return given, {name: numbers[name] for name in KINDS[kind]}


def exact(logits: Any, address: Any, temperature: Any, k: Any = None, p: Any = None, min_p: Any = None) -> list[int]:
    """By sorting, in float64."""
    def mix(x: int) -> int:
        x = (x ^ (x >> 16)) * 0x7FEB352D & 0xFFFFFFFF
        x = (x ^ (x >> 15)) * 0x846CA68B & 0xFFFFFFFF
        return x ^ (x >> 16)

    tokens = []
    for row, x in enumerate(logits.astype(np.float64)):
        if temperature[row] == 0:
            tokens.append(int(x.argmax()))
            continue
        x = x / temperature[row]
        if k is not None and k[row] > 0:
            x[x < np.sort(x)[::-1][min(k[row], len(x)) - 1]] = -np.inf
        weights = np.exp(x - x.max())
        if p is not None and p[row] < 1:
            order = np.argsort(-x, kind="stable")
            enough = np.cumsum(weights[order]) >= p[row] * weights.sum()
            x[x < x[order[enough.argmax()]]] = -np.inf
        if min_p is not None:
            x[(weights < min_p[row]) & (x < x.max())] = -np.inf
        one, two = map(int, address[row])
        bits = np.array([mix(((i * 0x9E3779B1 & 0xFFFFFFFF ^ one) * 0x85EBCA6B + two) & 0xFFFFFFFF)
                         for i in range(len(x))], np.float64)
        times = -np.log1p(-(bits + 0.5) * 2**-32) / np.maximum(np.exp(x - x.max()), 1e-300)
        tokens.append(int(np.where(x == -np.inf, np.inf, times).argmin()))
    return tokens


def both(given: dict[str, Any]) -> dict[str, tuple[Array, Array]]:
    return {"xla": jax.jit(reference.draw)(**given),
            "mosaic_tpu": jax.jit(functools.partial(tpu.draw, interpret=True))(**given)}


@pytest.mark.parametrize(("size", "kind"), often([(SIZES[2], "p"), (SIZES[2], "all")],
                                                 [(size, kind) for size in SIZES for kind in KINDS]))
def test_a_draw_is_that_of_float64(size: tuple[int, int], kind: str) -> None:
    """With vocabularies and rows that do not fill their blocks."""
    given, numbers = arrays(*size, kind)
    want = exact(**given, **numbers)
    for name, (token, first) in both(given | numbers).items():
        assert token.tolist() == want, name
        assert np.isfinite(first).all(), name


def test_rows_with_nothing_to_draw_say_so() -> None:
    given, numbers = arrays(9, 300, "all")
    logits = given["logits"]
    logits[1:3], logits[3, 299], logits[4, 7], logits[5], logits[6, 1:] = -np.inf, np.nan, np.inf, np.nan, -np.inf
    logits[8, 4:] = -np.inf
    for name, found in both(given | numbers).items():
        token = checked(*found)
        assert token[1:7].tolist() == [DEAD_END, DEAD_END, INVALID, INVALID, INVALID, 0], name
        assert token[0] >= 0 and token[7] >= 0 and 0 <= token[8] < 4, name


@pytest.mark.full
def test_of_equal_logits_all_or_none_are_kept() -> None:
    """And of equal scores of a greedy row the first is taken."""
    logits = np.zeros((64, 300), np.float32)
    logits[:, ::3] = 1
    r = np.random.default_rng(0)
    given = dict(logits=logits, address=r.integers(0, 2**32, (64, 2), dtype=np.uint32),
                 temperature=np.repeat(np.float32([1, 0]), [60, 4]), p=np.full(64, 0.1, np.float32))
    for name, (token, _) in both(given).items():
        assert set((np.asarray(token) % 3).tolist()) == {0}, name
        assert len(set(token[:60].tolist())) > 30 and token[60:].tolist() == [0] * 4, name


def test_the_kernel_runs_in_a_loop() -> None:
    given, numbers = arrays(5, 384, "p")

    def body(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        i, logits = carry
        token, _ = tpu.draw(logits, given["address"], given["temperature"], p=numbers["p"], interpret=True)
        return i + 1, logits.at[jnp.arange(5), token].add(-2.0)

    looped = jax.jit(lambda x: jax.lax.while_loop(lambda c: c[0] < 3, body, (jnp.int32(0), x))[1])(given["logits"])
    want = given["logits"].copy()
    for _ in range(3):
        want[np.arange(5), exact(want, given["address"], given["temperature"], p=numbers["p"])] -= 2
    np.testing.assert_array_equal(looped, want)


@pytest.mark.wide
def test_the_kernel_has_no_races() -> None:
    given, numbers = arrays(9, 300, "p")
    assert no_races(tpu.draw, **given, **numbers)[0].tolist() == exact(**given, **numbers)


def test_an_unknown_implementation_is_refused() -> None:
    given, _ = arrays(2, 50, "p")
    with pytest.raises(ValueError, match=r"^implementation: got 'pallas'"):
        vocabulary.draw(given["logits"][None], given["address"][None], given["temperature"][:1],
                        implementation="pallas")       # type: ignore[arg-type]


@pytest.mark.mesh
@pytest.mark.parametrize("V", [384, 301])
def test_devices_share_the_rows(V: int) -> None:
    """Of a vocabulary that is divided over four devices, or is whole on each."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    given, numbers = arrays(6, V, "all")
    want = exact(*(np.repeat(x, 3, 0) if x.ndim == 1 else x for x in _windows(given)),
                 **{name: np.repeat(x[:2], 3) for name, x in numbers.items()})
    with jax.set_mesh(mesh):
        logits = jax.device_put(given["logits"].reshape(2, 3, V),
                                NamedSharding(mesh, P("data", None, "model" if V % 4 == 0 else None)))
        token, _ = jax.jit(functools.partial(vocabulary.draw, implementation="mosaic_tpu"))(
            logits, given["address"].reshape(2, 3, 2), given["temperature"][:2],
            **{name: x[:2] for name, x in numbers.items()})
    assert token.ravel().tolist() == want


def _windows(given: dict[str, Any]) -> list[Any]:
    """Six nodes of two rows."""
    return [given["logits"], given["address"], given["temperature"][:2]]
