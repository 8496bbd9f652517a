"""Weights lie in huge pages of memory after loading, on CPU, and nothing else changes."""

import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.io import arrays
from decodax.io.huge_pages import PAGE, empty, move, moved

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux gives them")


def trees() -> dict[str, Any]:
    r = np.random.default_rng(0)
    return {"large": jnp.asarray(r.standard_normal((1000, 600)), jnp.float32), "odd": jnp.arange(7),
            "half": jnp.asarray(r.standard_normal((300, 500)), jnp.bfloat16), "codes": jnp.ones((40, 40), jnp.int8),
            "four": jnp.asarray(r.integers(-7, 8, (33, 16)), jnp.int4), "none": jnp.zeros((0, 3)), "number": 3}


def asked(*arrays: Any) -> list[bool]:
    """Whether the system was asked for huge pages where each array lies."""
    maps = Path("/proc/self/smaps").read_text()
    found = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) .*?^VmFlags:(.*?)$", maps, re.M | re.S)
    return [any(int(a, 16) <= x.unsafe_buffer_pointer() < int(b, 16) and " hg" in flags for a, b, flags in found)
            for x in arrays]


def test_arrays_are_the_same_in_huge_pages_side_by_side() -> None:
    old = trees()
    new = moved(old)
    for name, x in old.items():
        assert new[name] is x if name in ("none", "number") else new[name].dtype == x.dtype
        assert np.array_equal(np.asarray(new[name]), np.asarray(x))
    held = [new[name] for name in ("large", "odd", "half", "codes")]
    assert all(asked(*held))
    assert np.ptp([x.unsafe_buffer_pointer() for x in held]) < 2 * PAGE     # one block, of a whole page and a half


def test_an_array_alone_holds_no_more_pages_than_it_fills() -> None:
    size = PAGE + PAGE // 2
    own = empty((size,), np.uint8)
    own[:] = 1
    own, tail = jax.device_put((own, own[PAGE:]))
    assert asked(own, tail) == [True, False]


def test_small_models_stay_where_they_are() -> None:
    small = [jnp.ones((16, 16))]
    before = small[0]
    move(small)
    assert small[0] is before


def test_training_may_donate_them() -> None:
    held = moved({"w": jnp.ones((1024, 1024))})
    out = jax.jit(lambda p: {"w": p["w"] + 1}, donate_argnums=0)(held)
    assert held["w"].is_deleted() and out["w"][0, 0] == 2


@pytest.mark.parametrize("how", ["load", "load packed", "quantize"])
def test_loading_and_packing_move_weights(how: str) -> None:
    lm = dx.load("pycode", weights="int8" if how == "load packed" else None)
    lm = dx.quantize(lm, "int8") if how == "quantize" else lm
    assert all(asked(*(x for x in jax.tree.leaves(lm.params) if x.size)))


def test_a_saved_model_is_used_where_its_file_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels and norms, whose values do not change when another model is saved over it."""
    monkeypatch.setattr(arrays, "MAPPED", 0)
    dx.save(dx.load("pycode-draft", dtype="bfloat16"), tmp_path)
    lm = dx.load(tmp_path, dtype="bfloat16")
    maps = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()
            if str(tmp_path) in line]
    inside = lambda x: any(int(a, 16) <= x.unsafe_buffer_pointer() < int(b, 16) for a, b in maps)
    assert all(inside(x) for x in jax.tree.leaves(lm.params))
    before = [np.array(x) for x in jax.tree.leaves(lm.params)]
    dx.save(lm.with_params(jax.tree.map(lambda x: x + 1, lm.params)), tmp_path)
    assert all((old == np.asarray(x)).all() for old, x in zip(before, jax.tree.leaves(lm.params), strict=True))
