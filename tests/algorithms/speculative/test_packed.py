"""Packed windows: dense layers see the live nodes alone, and every live node gets what it gets in a whole window."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.core.packing import Packing
from decodax.core.types import Out
from decodax.core.window import causal
from tests.caches.small import DEEP, SMALL
from tests.matrix import often

ROWS, WIDTH = 5, 6


@functools.cache
def scored(hint: Packing | None, counts: tuple[int, ...], begins: tuple[int, ...] = (0,) * ROWS) -> tuple[Any, ...]:
    """Returns the live nodes of windows after texts of unequal length, and the model's logits, entries and layers.

    In each row `counts` nodes are live, the first of them at `begins`.
    """
    @jax.jit
    def run(params: Any, cache: Any, counts: jax.Array) -> tuple[Any, ...]:
        def over(start: jax.Array, live: jax.Array, *hints: Any) -> Out:
            tokens = jax.random.randint(jax.random.key(3), (ROWS, WIDTH), 2, 15)
            return DEEP.model.apply(params, causal(tokens, start, live).replace(hints=hints), cache)

        start = jnp.arange(ROWS, dtype=jnp.int32)
        first = causal(jnp.full((ROWS, WIDTH), 3), jnp.zeros(ROWS, jnp.int32))
        text = DEEP.model.apply(params, first, cache)
        cache = cache.commit(text.entries, jnp.where(jnp.arange(WIDTH) < start[:, None], jnp.arange(WIDTH), -1))
        first, node = jnp.array(begins)[:, None], jnp.arange(WIDTH)
        live = (node >= first) & (node < first + counts[:, None])
        out = over(start, live, *([] if hint is None else [hint]))
        return live, out.logits(), out.entries, out.layers

    return run(DEEP.params, DEEP.model.init_cache(ROWS, 16), jnp.array(counts, jnp.int32))


@pytest.mark.wide(but=("tail",))
@pytest.mark.parametrize(("hint", "counts", "begins"), [
    pytest.param(Packing((8, 16)), (3, 0, 1, 2, 2), (0,) * ROWS, id="fits"),
    pytest.param(Packing((8, 16)), (3, 1, 1, 2, 2), (0,) * ROWS, id="one-more"),
    pytest.param(Packing((8, 16)), (6, 6, 1, 6, 6), (0,) * ROWS, id="more-than-the-last"),
    pytest.param(Packing((8, 16), True), (6, 0, 1, 6, 3), (0,) * ROWS, id="bound"),
    pytest.param(Packing((8, 99), True), (6, 6, 6, 6, 6), (0,) * ROWS, id="bound-beyond-the-window"),
    pytest.param(Packing((8,), True), (0, 0, 0, 0, 0), (0,) * ROWS, id="none"),
    # rows 2 and 4 read their prompts after the first two nodes; the other rows decode in these two
    pytest.param(Packing((8, 16), True, (2, 2)), (2, 0, 3, 1, 4), (0, 0, 2, 0, 2), id="tail"),
    pytest.param(Packing((12,), True, (2, 3)), (2, 2, 1, 1, 4), (0, 0, 2, 0, 2), id="tail-of-fewer-rows")])
def test_live_nodes_are_those_of_a_whole_window(hint: Packing, counts: Any, begins: Any) -> None:
    live, *wanted = scored(None, counts, begins)
    assert live.sum() == sum(counts)
    found = scored(hint, counts, begins)[1:]
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.shape == b.shape and np.isfinite(a).all()
        np.testing.assert_allclose(np.asarray(a)[np.asarray(live)], np.asarray(b)[np.asarray(live)], atol=2e-6)


def test_dense_layers_see_the_live_nodes_alone() -> None:
    """By the shapes that the program multiplies: of 5 rows with 6 nodes each, 8 nodes."""
    def text(*hints: Any) -> str:
        window = causal(jnp.zeros((ROWS, WIDTH), jnp.int32), jnp.zeros(ROWS, jnp.int32)).replace(hints=hints)
        program = jax.jit(lambda params, cache: SMALL.model.apply(params, window, cache).hidden)
        return program.lower(SMALL.params, SMALL.model.init_cache(ROWS, 16)).as_text()

    mlp = SMALL.model.config.mlp
    assert f"tensor<{ROWS}x{WIDTH}x{mlp}xf32>" in text() and f"tensor<1x8x{mlp}xf32>" not in text()
    packed = text(Packing((8,), bounded=True))
    assert f"tensor<{ROWS}x{WIDTH}x{mlp}xf32>" not in packed and f"tensor<1x8x{mlp}xf32>" in packed


PROMPTS = [[3, 4, 5, 3, 4, 5, 3, 4][:n] for n in (3, 8, 5, 7, 2)]


METHODS: dict[str, Any] = {
    "lookup": lambda: dx.algorithms.make("ems-sd"),
    "model": lambda: dx.algorithms.make("ems-sd", draft=SMALL, length=3),
    "tetris": lambda: dx.algorithms.make("tetris", draft=SMALL, capacity=9, length=3),
    "tree": lambda: dataclasses.replace(dx.algorithms.make("token-recycling"), packed=True)}


@pytest.mark.wide
@pytest.mark.parametrize("case", often(["lookup"], METHODS))
def test_packed_rounds_are_those_of_whole_windows(case: str) -> None:
    """Their tokens, and how many rounds they take; in a batch whose rows end one after the other."""
    method = METHODS[case]()
    assert method.packed
    options: dict[str, Any] = dict(max_new_tokens=[20, 3, 12, 9, 17], temperature=[0.0, 0.8, 0.0, 0.8, 0.0], seed=4)
    found = dx.generate(DEEP, PROMPTS, algorithm=method, **options)
    whole = dx.generate(DEEP, PROMPTS, algorithm=dataclasses.replace(method, packed=False), **options)
    assert found.tokens.tolist() == whole.tokens.tolist() == dx.generate(DEEP, PROMPTS, **options).tokens.tolist()
    assert found.stats.rounds.tolist() == whole.stats.rounds.tolist() and found.stats.accepted.sum() > 0
