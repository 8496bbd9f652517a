"""Models, data and helpers of `test_cache_attention.py` that other tests use too."""

import importlib
from typing import Any

import jax


def no_races(kernel: Any, *args: Any, **options: Any) -> Any:
    """Returns the result of a kernel under the interpreter that looks for races."""
    from jax.experimental.pallas import tpu as pltpu

    out = kernel(*args, interpret=pltpu.InterpretParams(detect_races=True), **options)
    jax.block_until_ready(out)
    state: Any = importlib.import_module("jax._src.pallas.mosaic.interpret.interpret_pallas_call")
    assert not state.races.races_found
    return out
