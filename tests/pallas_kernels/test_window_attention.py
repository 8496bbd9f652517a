"""The kernel that reads a cache and its XLA reference, both against attention in float64."""

from __future__ import annotations

import functools
import importlib
import itertools
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from decodax.pallas_kernels.window_attention import (
    Implementation,
    gpu,
    merge,
    prefix_attention,
    quantized,
    reference,
    slot_weights,
    tpu,
    window_attention,
    window_attention_lse,
)
from tests.matrix import often, pairs

B, G, R, S = 3, 2, 5, 512
LENGTHS = np.array([0, 301, 512], np.int32)
FORMS = ("int8", "pages of 128", "int8 pages of 256")
HELD = ("all", "some", "some of each head", "none")


def arrays(d: int, e: int, held: str) -> tuple[Any, ...]:
    """Queries, cache, lengths, positions and what is held."""
    r = np.random.default_rng(d + e)
    q, cache = r.normal(size=(B, G, R, d)).astype(np.float32), r.normal(size=(B, G, S, d + e)).astype(np.float32)
    heads = G if held == "some of each head" else 1
    kept = r.random((B, heads, S)) < (0 if held == "none" else 0.7)
    where = None if held == "all" else np.where(kept, np.arange(S), -1)
    return q, cache, LENGTHS, LENGTHS[:, None] + np.arange(R, dtype=np.int32), \
        where if where is None else where.astype(np.int32)


def scores(q: Any, keys: Any, length: Any, positions: Any, held: Any, scale: float, sliding: int | None = None,
           softcap: float | None = None, causal: bool = False) -> tuple[Any, Any]:
    """Scores `f64[B, G, R, S]` and which of them are seen."""
    s = np.einsum("bgrd,bgsd->bgrs", q.astype(np.float64), keys.astype(np.float64)) * scale
    s = s if softcap is None else softcap * np.tanh(s / softcap)
    where = np.broadcast_to(np.arange(S) if held is None else held, (B, G, S))
    seen = ((np.arange(S) < length[:, None, None]) & (where >= 0))[:, :, None]
    behind = positions[:, None, :, None] - where[:, :, None]
    return s, seen & (True if sliding is None else behind < sliding) & (behind >= 0 if causal else True)


def exact(q: Any, cache: Any, length: Any, positions: Any, held: Any, *, value_width: int,
          **options: Any) -> tuple[Any, Any]:
    d = q.shape[3]
    s, seen = scores(q, cache[..., :d], length, positions, held, **options)
    weights = np.where(seen, np.exp(s - s.max()), 0)
    total = weights.sum(-1)
    out = np.einsum("bgrs,bgse->bgre", weights, cache[..., d:].astype(np.float64))
    some = total > 0
    return out / np.where(some, total, 1)[..., None], np.where(some, s.max() + np.log(np.where(some, total, 1)), -1e30)


def exact_weights(q: Any, lse: Any, cache: Any, *given: Any, **options: Any) -> Any:
    s, seen = scores(q, cache[..., :q.shape[3]], *given, **options)
    return np.exp(np.where(seen, s - np.asarray(lse)[..., None], -np.inf)).sum(2)


IMPLEMENTATIONS = {"xla": reference.cache_attention,
                   "mosaic_tpu": functools.partial(tpu.cache_attention, block=128, interpret=True),
                   "triton": functools.partial(gpu.cache_attention, interpret=True)}
FEW = ["xla", "mosaic_tpu"]
"""By default, where what differs is not the kernel."""
WEIGHTS = {"xla": reference.slot_weights,
           "mosaic_tpu": functools.partial(tpu.slot_weights, block=128, interpret=True),
           "triton": functools.partial(gpu.slot_weights, interpret=True)}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("widths", "sliding", "softcap", "held"), pairs(
    ((64, 64), (96, 96), (128, 128), (256, 256), (64, 32)), (None, 70), (None, 5.0), HELD))
def test_attention_to_a_cache_is_that_of_float64(implementation: str, widths: tuple[int, int], sliding: int | None,
                                                 softcap: float | None, held: str) -> None:
    """With rows that hold nothing, some slots, and all; where no slot is seen, zeros and a sum of nothing."""
    given = arrays(*widths, held)
    options = dict(scale=0.3, value_width=widths[1], sliding=sliding, softcap=softcap)
    out, lse = IMPLEMENTATIONS[implementation](*given, **options)
    want, sums = exact(*given, **options)
    np.testing.assert_allclose(out, want, atol=2e-5)
    np.testing.assert_allclose(np.where(sums > -1e29, lse, 0), np.where(sums > -1e29, sums, 0), atol=2e-5)
    assert (np.asarray(lse)[sums < -1e29] < -1e29).all()


def stored(cache: Any, width: int, form: str, length: Any = LENGTHS) -> tuple[Any, dict[str, Any], Any]:
    """A cache in some form, what else describes it, and what it stands for."""
    given: dict[str, Any] = {}
    if "int8" in form:
        kept = quantized(cache, width)
        cache, scales = (np.asarray(x) for x in kept)
        each = np.repeat(scales.swapaxes(2, 3), (width, cache.shape[3] - width), 3)
        given, exact = dict(scales=scales), cache.astype(np.float64) * each
    else:
        exact = cache
    if "pages" in form:
        page, rows = int(form.split()[-1]), cache.shape[0]
        pages = cache.shape[2] // page
        order = np.random.default_rng(1).permutation(rows * pages + 3)[:rows * pages]      # three are nobody's

        def pool(x: Any, axis: int) -> Any:
            apart = np.moveaxis(x.reshape(*x.shape[:axis], pages, page, *x.shape[axis + 1:]), axis, 1)
            out = np.full((rows * pages + 3, *apart.shape[2:]), 77, x.dtype)
            out[order] = apart.reshape(rows * pages, *apart.shape[2:])
            return out

        table = np.where(np.arange(pages) * page < length[:, None], order.reshape(rows, pages), -1)
        cache, given = pool(cache, 2), {k: pool(x, 3) for k, x in given.items()} | dict(table=table.astype(np.int32))
    return cache, given, exact


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("form", "widths", "sliding", "held"), often(
    [("int8", (64, 64), 70, "some"), ("int8", (128, 128), None, "all"),
     ("pages of 128", (64, 64), None, "some of each head"), ("pages of 128", (128, 128), 70, "all"),
     ("int8 pages of 256", (96, 96), 70, "all")],
    itertools.product(FORMS, ((64, 64), (96, 96), (128, 128), (256, 128)), (None, 70), HELD)))
def test_each_form_of_a_cache_is_attended_to_as_in_float64(implementation: str, form: str, widths: tuple[int, int],
                                                           sliding: int | None, held: str) -> None:
    q, cache, *where = arrays(*widths, held)
    kept, given, meant = stored(cache, widths[0], form)
    options = dict(scale=0.3, value_width=widths[1], sliding=sliding, softcap=5.0 if sliding else None)
    out, lse = IMPLEMENTATIONS[implementation](q, kept, *where, **given, **options)
    want, sums = exact(q, meant, *where, **options)
    np.testing.assert_allclose(out, want, atol=3e-5)
    np.testing.assert_allclose(np.where(sums > -1e29, lse, 0), np.where(sums > -1e29, sums, 0), atol=2e-5)
    assert (np.asarray(lse)[sums < -1e29] < -1e29).all()
    options.pop("value_width")
    got = WEIGHTS[implementation](q, np.where(sums > -1e29, sums, 0), kept, *where, **given, **options)
    np.testing.assert_allclose(got, exact_weights(q, sums, meant, *where, **options), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("implementation", WEIGHTS)
@pytest.mark.parametrize(("widths", "sliding", "softcap", "held", "causal"), often(
    [((64, 64), 70, None, "all", False), ((128, 128), None, 5.0, "some of each head", True),
     ((96, 96), 70, 5.0, "none", True)],
    itertools.product(((64, 64), (96, 96), (128, 128), (256, 128)), (None, 70), (None, 5.0), HELD, (False, True))))
def test_the_weights_of_slots_are_those_of_float64(implementation: str, widths: tuple[int, int], sliding: int | None,
                                                   softcap: float | None, held: str, causal: bool) -> None:
    """Summed over queries; one that does not count has an infinite sum."""
    q, cache, length, positions, where = arrays(*widths, held)
    positions = positions - np.arange(0, 30, 10, dtype=np.int32)[:, None]       # some slots are behind the queries
    lse = np.random.default_rng(7).uniform(2, 6, (B, G, R)).astype(np.float32)
    lse[2, 1, 3] = np.inf
    options = dict(scale=0.1, sliding=sliding, softcap=softcap, causal=causal)
    got = WEIGHTS[implementation](q, lse, cache, length, positions, where, **options)
    want = exact_weights(q, lse, cache, length, positions, where, **options)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)
    assert (want > 0).any() == (held != "none")


def test_tiles_of_queries_change_nothing() -> None:
    q, cache, length, positions, held = arrays(64, 64, "some of each head")
    q, positions = (np.concatenate([x] * 7, -2 if x.ndim > 2 else -1) for x in (q, positions))      # 35 queries
    for tile in (16, 32):
        options: dict[str, Any] = dict(scale=0.3, block=128, tile=tile, interpret=True)
        out, lse = tpu.cache_attention(q, cache, length, positions, held, value_width=64, sliding=70, **options)
        want, sums = exact(q, cache, length, positions, held, scale=0.3, value_width=64, sliding=70)
        np.testing.assert_allclose(out, want, atol=2e-5)
        lse = np.where(sums > -1e29, lse, 1e30)
        got = tpu.slot_weights(q, lse, cache, length, positions, held, **options)
        np.testing.assert_allclose(got, exact_weights(q, lse, cache, length, positions, held, scale=0.3), rtol=2e-5,
                                   atol=1e-6)


def test_the_attention_that_slots_receive_and_that_of_the_window_is_all_there_is() -> None:
    """The weights of a head's queries add up to one each: what a mask of the window hides is the rest."""
    r = np.random.default_rng(3)
    W, H, d = 4, 2 * G, 64
    q, k, v = (r.normal(size=(B, W, heads, d)).astype(np.float32) for heads in (H, G, G))
    cache = r.normal(size=(B, G, S, 2 * d)).astype(np.float32)
    mask, positions = np.eye(W, dtype=bool)[None], LENGTHS[:, None] + np.arange(W, dtype=np.int32)
    _, lse = window_attention_lse(q, k, v, mask, positions, cache, LENGTHS, scale=0.2, sliding=400)
    own = np.exp(0.2 * np.einsum("bwgrd,bwgd->bwgr", q.reshape(B, W, G, 2, d), k) - lse.reshape(B, W, G, 2))
    for implementation in IMPLEMENTATIONS:
        weights = slot_weights(q, lse, positions, cache, LENGTHS, scale=0.2, sliding=400,
                               implementation=implementation)       # type: ignore[arg-type]
        np.testing.assert_allclose(weights.sum(-1) + own.sum((1, 3)), 2 * W, rtol=1e-5)
        np.testing.assert_array_equal(weights[0], 0)
        assert (weights[2, :, :512 - 400 + 1] == 0).all() and (weights[2, :, 512 - 400 + 1:] > 0).all()
    alone = slot_weights(q[:, 1:2], lse[:, 1:2], positions[:, 1:2], cache, LENGTHS, scale=0.2, sliding=400)
    counted = np.where(np.arange(W)[:, None] == 1, lse, np.inf)
    np.testing.assert_allclose(slot_weights(q, counted, positions, cache, LENGTHS, scale=0.2, sliding=400), alone,
                               atol=1e-6)


def test_the_kernel_runs_in_a_loop_and_blocks_change_nothing_but_rounding() -> None:
    q, cache, length, positions, _ = arrays(64, 64, "all")

    def body(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        i, q = carry
        return i + 1, tpu.cache_attention(q, cache, length, positions, scale=0.3, value_width=64, block=256,
                                          interpret=True)[0]

    looped = jax.jit(lambda q: jax.lax.while_loop(lambda c: c[0] < 3, body, (jnp.int32(0), q))[1])(q)
    for _ in range(3):
        q = np.asarray(tpu.cache_attention(q, cache, length, positions, scale=0.3, value_width=64, block=128,
                                           interpret=True)[0])
    np.testing.assert_allclose(looped, q, atol=1e-6)


def no_races(kernel: Any, *args: Any, **options: Any) -> Any:
    """What a kernel gives under the interpreter that looks for races."""
    from jax.experimental.pallas import tpu as pltpu

    out = kernel(*args, interpret=pltpu.InterpretParams(detect_races=True), **options)
    jax.block_until_ready(out)
    state: Any = importlib.import_module("jax._src.pallas.mosaic.interpret.interpret_pallas_call")
    assert not state.races.races_found
    return out


@pytest.mark.matrix     # by default in the form that has all
def test_the_kernel_has_no_races() -> None:
    q, cache, length, positions, held = arrays(64, 64, "some of each head")
    out, lse = no_races(tpu.cache_attention, q, cache, length, positions, held, scale=0.3, value_width=64, block=128)
    np.testing.assert_allclose(out, exact(q, cache, length, positions, held, scale=0.3, value_width=64)[0], atol=2e-5)
    got = no_races(tpu.slot_weights, q, lse, cache, length, positions, held, scale=0.3, block=256)
    np.testing.assert_allclose(got, exact_weights(q, lse, cache, length, positions, held, scale=0.3), atol=2e-5)


@pytest.mark.parametrize("form", often(["int8 pages of 256"], FORMS))
def test_the_kernel_has_no_races_in_any_form(form: str) -> None:
    q, cache, *where = arrays(64, 64, "some")
    kept, given, meant = stored(cache, 64, form)
    out, lse = no_races(tpu.cache_attention, q, kept, *where, **given, scale=0.3, value_width=64, block=128)
    np.testing.assert_allclose(out, exact(q, meant, *where, scale=0.3, value_width=64)[0], atol=2e-5)
    got = no_races(tpu.slot_weights, q, lse, kept, *where, **given, scale=0.3, block=128)
    np.testing.assert_allclose(got, exact_weights(q, lse, meant, *where, scale=0.3), atol=2e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_nan_stays_one(implementation: str) -> None:
    q, cache, length, positions, _ = arrays(64, 64, "all")
    cache[1, 0, 300, 3] = np.nan
    cache[1, 1, 301:] = 7e4         # behind the row's end: not seen
    out, _ = IMPLEMENTATIONS[implementation](q, cache, length, positions, scale=0.3, value_width=64)
    assert np.isnan(out[1, 0]).all() and np.isfinite(out[1, 1]).all() and np.isfinite(out[2]).all()


@pytest.mark.parametrize("tree", [False, True])
def test_window_attention_is_the_same_by_each_implementation(tree: bool) -> None:
    r = np.random.default_rng(3)
    W, d = 4, 64
    q, k, v = (r.normal(size=(B, W, heads, d)).astype(np.float32) for heads in (2 * G, G, G))
    cache = r.normal(size=(B, G, S, 2 * d)).astype(np.float32)
    mask = np.tril(np.ones((1, W, W), bool))
    if tree:
        mask[:, 2, 1] = mask[:, 3, 2] = False
    positions = (LENGTHS[:, None] + np.arange(W)).astype(np.int32)
    one, *others = (window_attention(q, k, v, mask, positions, cache, LENGTHS, scale=0.2, implementation=name)
                    for name in get_args(Implementation))
    for other in others:
        np.testing.assert_allclose(one, other, atol=2e-6)


@pytest.mark.parametrize("implementation", often(FEW, IMPLEMENTATIONS))
def test_a_sink_is_a_key_whose_value_is_zero(implementation: Any) -> None:
    """GPT-OSS: it adds to the sum of a softmax, with a cache and without one."""
    r = np.random.default_rng(5)
    W, H, d = 3, 2 * G, 64
    q, k, v = (r.normal(size=(B, W, heads, d)).astype(np.float32) for heads in (H, G, G))
    cache = r.normal(size=(B, G, S, 2 * d)).astype(np.float32)
    mask, positions = np.tril(np.ones((1, W, W), bool)), (LENGTHS[:, None] + np.arange(W)).astype(np.int32)
    sinks = np.array([4.0, -1.0, 2.0, 30.0], np.float32)
    out, lse = window_attention_lse(q, k, v, mask, positions, cache, LENGTHS, scale=0.2, sinks=sinks,
                                    implementation=implementation)
    plain, sums = window_attention_lse(q, k, v, mask, positions, cache, LENGTHS, scale=0.2)
    total = np.logaddexp(np.asarray(sums, np.float64), sinks)
    np.testing.assert_allclose(lse, total, atol=2e-5)
    np.testing.assert_allclose(out, plain * np.exp(sums - total)[..., None], atol=2e-6)
    few = window_attention(q, k, v, mask, positions, scale=0.2, sinks=sinks, implementation=implementation)
    scores = np.einsum("bwgrd,bkgd->bwgrk", q.reshape(B, W, G, 2, d).astype(np.float64), k) * 0.2
    weights = np.where(mask[:, :, None, None], np.exp(scores), 0)
    weights = weights / (weights.sum(-1, keepdims=True) + np.exp(sinks.reshape(G, 2, 1)))
    np.testing.assert_allclose(few, np.einsum("bwgrk,bkgd->bwgrd", weights, v).reshape(few.shape), atol=2e-6)


@pytest.mark.parametrize("page", often([4], [4, 48, 512]))
def test_the_reference_walks_pages_of_any_size(page: int) -> None:
    """That do not make up whole blocks either: 150 pages of 4 end in the fifth."""
    q, _, _, positions, _ = arrays(64, 64, "all")
    pages = 600 // page
    r = np.random.default_rng(page)
    pool = r.normal(size=(B * pages, G, page, 128)).astype(np.float32)
    table = r.permutation(B * pages).reshape(B, pages).astype(np.int32)
    length = np.array([0, pages * page // 2, pages * page], np.int32)
    rows = pool[table].swapaxes(1, 2).reshape(B, G, -1, 128)
    keep = -(-rows.shape[2] // 128) * 128
    rows = np.pad(rows, ((0, 0), (0, 0), (0, keep - rows.shape[2]), (0, 0)))
    for name, options in (("cache_attention", dict(value_width=64)), ("slot_weights", {})):
        fn: Any = functools.partial(getattr(reference, name), scale=0.3, **options)
        more = () if options else (np.full((B, G, R), 4, np.float32),)
        for got, want in zip(jax.tree.leaves(fn(q, *more, pool, length, positions, table=table)),
                             jax.tree.leaves(fn(q, *more, rows, length, positions)), strict=True):
            np.testing.assert_allclose(got, want[..., :got.shape[-1]], rtol=1e-5, atol=2e-6)


@pytest.mark.matrix
def test_a_table_too_large_for_scalar_memory_is_read_by_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    q, cache, length, positions, held = arrays(64, 64, "some")
    kept, given, _ = stored(cache, 64, "pages of 128")
    options: dict[str, Any] = dict(scale=0.3, interpret=True, **given)
    one, lse = tpu.cache_attention(q, kept, length, positions, held, value_width=64, **options)
    weights = tpu.slot_weights(q, lse, kept, length, positions, held, **options)
    monkeypatch.setattr(tpu, "TABLE_BYTES", 2 * 4 * 4)         # of two rows
    text = str(jax.make_jaxpr(lambda q: tpu.slot_weights(q, lse, kept, length, positions, held, **options))(q))
    assert text.count("name=slot_weights") == 2
    parts = tpu.cache_attention(q, kept, length, positions, held, value_width=64, **options)[0]
    np.testing.assert_array_equal(parts, one)
    np.testing.assert_array_equal(tpu.slot_weights(q, lse, kept, length, positions, held, **options), weights)


@pytest.mark.parametrize("implementation", often(FEW, IMPLEMENTATIONS))
@pytest.mark.parametrize("form", often(["int8 pages of 256"], FORMS))
def test_a_window_attends_to_each_form(form: str, implementation: Any) -> None:
    """With some of the entries hidden, as diffusion does, and inside a loop."""
    r = np.random.default_rng(6)
    W, H, d = 3, 2 * G, 64
    q, k, v = (r.normal(size=(B, W, heads, d)).astype(np.float32) for heads in (H, G, G))
    cache = r.normal(size=(B, G, S, 2 * d)).astype(np.float32)
    kept, given, meant = stored(cache, d, form)
    mask, positions = np.tril(np.ones((1, W, W), bool)), (LENGTHS[:, None] + np.arange(W)).astype(np.int32)
    cached = r.random((B, S)) < 0.5
    one = functools.partial(window_attention_lse, k=k, v=v, mask=mask, positions=positions, length=LENGTHS, scale=0.2,
                            cached=cached)
    fn = lambda q: one(q, cache=kept, implementation=implementation, **given)[0].astype(np.float32)
    looped = jax.jit(lambda q: jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, fn(c[1])), (0, q))[1])(q)
    want = one(one(q, cache=np.float32(meant))[0], cache=np.float32(meant))
    np.testing.assert_allclose(looped, want[0], atol=3e-6)
    options: dict[str, Any] = dict(scale=0.2, cached=cached)
    got = slot_weights(looped, want[1], positions, kept, LENGTHS, **options, **given, implementation=implementation)
    np.testing.assert_allclose(got, slot_weights(looped, want[1], positions, np.float32(meant), LENGTHS, **options),
                               atol=3e-6)


@pytest.mark.parametrize("implementation", often(FEW, IMPLEMENTATIONS))
@pytest.mark.parametrize(("prefixes", "sliding", "form"), often([(1, 200, "dense"), (2, None, "int8 pages of 128")],
                         itertools.product((1, 2), (None, 200), ("dense", "int8 pages of 128"))))
def test_a_prefix_in_common_is_as_one_of_each_row(prefixes: int, sliding: int | None, form: str,
                                                  implementation: Any) -> None:
    """Beside own caches, against one cache of each row that holds both."""
    r = np.random.default_rng(8)
    rows, W, H, d = 4, 2, 2 * G, 64
    q, k, v = (r.normal(size=(rows, W, heads, d)).astype(np.float32) for heads in (H, G, G))
    shared = r.normal(size=(prefixes, G, 256, 2 * d)).astype(np.float32)
    kept, given, meant = stored(shared, d, form, np.full(prefixes, 256))
    own = r.normal(size=(rows, G, 128, 2 * d)).astype(np.float32)
    whole = np.array([200, 131])[:prefixes]         # of a prefix, what is read
    before, length = np.repeat(whole, rows // prefixes), np.array([0, 128, 5, 70])
    positions = ((before + length)[:, None] + np.arange(W)).astype(np.int32)
    mask = np.tril(np.ones((1, W, W), bool))
    where = np.where(np.arange(128) < length[:, None], before[:, None] + np.arange(128), -1)[:, None]
    options: dict[str, Any] = dict(scale=0.2, sliding=sliding, implementation=implementation)
    part = prefix_attention(q, positions, kept, whole, **options, **given)
    rest = window_attention_lse(q, k, v, mask, positions, own, **options, slot_positions=where)
    both = np.concatenate([np.repeat(meant, rows // prefixes, 0), own], 2).astype(np.float32)
    at = np.broadcast_to(np.arange(256), (rows, 256))
    at = np.concatenate([np.where(at < before[:, None], at, -1)[:, None], where], 2)
    want = window_attention_lse(q, k, v, mask, positions, both, slot_positions=at, scale=0.2, sliding=sliding)
    for got, exact in zip(merge(rest, part), want, strict=True):
        np.testing.assert_allclose(got, exact, atol=3e-6)


@pytest.mark.parametrize("form", often(["dense", "int8 pages of 256"], ["dense", *FORMS]))
def test_devices_attend_to_their_own_rows_and_heads(form: str) -> None:
    r = np.random.default_rng(9)
    W, H, d, rows = 2, 8, 64, 4
    q, k, v = (r.normal(size=(rows, W, heads, d)).astype(np.float32) for heads in (H, 4, 4))
    kept, given, _ = stored(r.normal(size=(rows, 4, S, 2 * d)).astype(np.float32), d, form, np.full(rows, S))
    mask, length = np.tril(np.ones((1, W, W), bool)), np.array([0, 512, 99, 256], np.int32)
    positions, sinks = (length[:, None] + np.arange(W)).astype(np.int32), np.arange(H, dtype=np.float32)
    one = lambda x: x[1:2] if x.shape[0] == rows else x        # of a row; a pool is everyone's

    def everything(q: Array) -> Any:
        out, lse = window_attention_lse(q, k, v, mask, positions, kept, length, sinks=sinks, scale=0.2, **given)
        return (out, slot_weights(q, lse, positions, kept, length, scale=0.2, **given),
                prefix_attention(q, positions, one(kept), one(length), scale=0.2, **jax.tree.map(one, given)))

    want = jax.jit(everything)(q)
    with jax.set_mesh(jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)):
        lowered = jax.jit(everything).lower(q)
        got = lowered.compile()(q)
    assert lowered.as_text().count("manual_computation") >= 3
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-6), got, want)


def test_codes_are_within_half_a_step_of_what_they_stand_for() -> None:
    cache = np.random.default_rng(0).normal(size=(B, G, 40, 24 + 8)).astype(np.float32)
    cache[1, 1, 3, :24] = 0
    codes, scales = quantized(cache, 24)
    assert codes.dtype == np.int8 and scales.shape == (B, G, 2, 40) and scales[1, 1, 0, 3] == 0
    for part, width in ((slice(24), 0), (slice(24, None), 1)):
        step = np.asarray(scales)[:, :, width, :, None]
        assert (np.abs(codes[..., part] * step - cache[..., part]) <= 0.5001 * step).all()
        np.testing.assert_allclose(step[..., 0] * 127, np.abs(cache[..., part]).max(-1), rtol=1e-6)


def test_what_cannot_be_had_is_refused_by_name() -> None:
    q, cache, length, positions, _ = arrays(64, 64, "all")
    with pytest.raises(ValueError, match="cache: got 200 slots, takes a multiple of the block of 128"):
        tpu.cache_attention(q, cache[:, :, :200], length, positions, scale=1.0, value_width=64)
    with pytest.raises(ValueError, match="implementation: got 'cudnn', takes 'xla', 'mosaic_tpu' or 'triton'"):
        window_attention(q.swapaxes(1, 2), cache[..., :64], cache[..., 64:], cache, positions, scale=1.0,
                         implementation="cudnn")       # type: ignore[arg-type]
    with pytest.raises(ValueError, match="scales: got none for a cache of int8, takes them where it is of integers"):
        slot_weights(q.swapaxes(1, 2), q[..., 0].swapaxes(1, 2), positions, cache.astype(np.int8), length, scale=1.0)


@pytest.mark.parametrize(("form", "width", "rows"), often([("int8 pages of 256", 96, 40)], itertools.product(
    ("dense", *FORMS), (64, 96, 128, 256), (1, 40, 300))))
def test_the_kernel_for_gpus_is_lowered_for_cuda(form: str, width: int, rows: int) -> None:
    """In bfloat16, with slots that are not positions, inside a loop."""
    page = int(form.split()[-1]) if "pages" in form else 512
    shaped = lambda *shape, dtype="bfloat16": jax.ShapeDtypeStruct(shape, dtype)
    q, held = shaped(B, G, rows, width), shaped(B, G, 512, dtype="int32")
    cache = shaped(9 if "pages" in form else B, G, page, 2 * width, dtype="int8" if "int8" in form else "bfloat16")
    scales = shaped(*cache.shape[:2], 2, page, dtype="float32") if "int8" in form else None
    table = shaped(B, 512 // page, dtype="int32") if "pages" in form else None
    where = shaped(B, dtype="int32"), shaped(B, rows, dtype="int32")

    def both(q: Any, cache: Any, length: Any, positions: Any, held: Any, scales: Any, table: Any) -> Any:
        options: dict[str, Any] = dict(scale=0.3, sliding=70, softcap=5.0)
        given = length, positions, held, scales, table
        def body(q: Any) -> Any:
            out, lse = gpu.cache_attention(q, cache, *given, **options, value_width=width)
            return (out + gpu.slot_weights(q, lse, cache, *given, **options, causal=True).sum()).astype(q.dtype)

        return jax.lax.fori_loop(0, 2, lambda _, q: body(q), q)

    text = jax.jit(both).trace(q, cache, *where, held, scales, table).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("xla.gpu.triton") == 2


def test_shares_of_slots_lie_side_by_side() -> None:
    """However many there are: also more than there is to share, and with rows that hold nothing."""
    q, cache, length, positions, held = arrays(64, 32, "some")
    options = dict(scale=0.3, value_width=32)
    want, sums = exact(q, cache, length, positions, held, **options)
    for shares in (1, 3, 12):
        out, lse = gpu.cache_attention(q, cache, length, positions, held, **options, shares=shares, interpret=True)
        np.testing.assert_allclose(out, want, atol=2e-5)
        np.testing.assert_allclose(lse, sums, atol=2e-5, rtol=1e-6)
