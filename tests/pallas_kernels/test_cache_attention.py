"""The kernels that read a cache and their XLA reference, against attention in float64."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from decodax.pallas_kernels.window_attention import gpu, reference, slot_weights, tpu, window_attention_lse
from tests.matrix import often, pairs
from tests.pallas_kernels.caches import (
    FORMS,
    HELD,
    LENGTHS,
    B,
    G,
    R,
    S,
    agrees_with_float64,
    arrays,
    exact,
    exact_weights,
    stored,
)
from tests.pallas_kernels.races import no_races

HOPPER = AbstractMesh((1,), ("data",), abstract_device=AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu"))
"""A GPU that is not there."""
IMPLEMENTATIONS = {"xla": reference.cache_attention,
                   "mosaic_tpu": functools.partial(tpu.cache_attention, block=128, interpret=True),
                   "triton": functools.partial(gpu.cache_attention, interpret=True)}
FEW = ["xla", "mosaic_tpu"]
"""By default, where what differs is not the kernel."""
WEIGHTS = {"xla": reference.slot_weights,
           "mosaic_tpu": functools.partial(tpu.slot_weights, block=128, interpret=True),
           "triton": functools.partial(gpu.slot_weights, interpret=True)}


@pytest.mark.wide(but=("widths0-None-None-all-mosaic_tpu", "widths0-None-None-all-triton", "widths0-None-None-all-xla",
                       "widths13-70-5.0-some-mosaic_tpu", "widths13-70-5.0-some-triton", "widths13-70-5.0-some-xla",
                       "widths3-None-None-none-mosaic_tpu", "widths3-None-None-none-triton",
                       "widths3-None-None-none-xla", "widths49-None-None-some-mosaic_tpu",
                       "widths49-None-None-some-triton", "widths49-None-None-some-xla",
                       "widths58-70-None-some of each head-mosaic_tpu", "widths58-70-None-some of each head-triton",
                       "widths58-70-None-some of each head-xla", "widths34-None-None-some of each head-mosaic_tpu",
                       "widths34-None-None-some of each head-triton", "widths34-None-None-some of each head-xla"))
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


@pytest.mark.wide
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("form", "widths", "sliding", "held"), often(
    [("int8", (64, 64), 70, "some"), ("pages of 128", (128, 128), 70, "some of each head"),
     ("int8 pages of 256", (96, 96), None, "all")],
    itertools.product(FORMS, ((64, 64), (96, 96), (128, 128), (256, 128)), (None, 70), HELD)))
def test_each_form_of_a_cache_is_attended_to_as_in_float64(implementation: str, form: str, widths: tuple[int, int],
                                                           sliding: int | None, held: str) -> None:
    agrees_with_float64(IMPLEMENTATIONS[implementation], WEIGHTS[implementation], form, widths, sliding, held)


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


@pytest.mark.wide
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


@pytest.mark.wide
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


@pytest.mark.full     # by default in the form that has all
def test_the_kernel_has_no_races() -> None:
    q, cache, length, positions, held = arrays(64, 64, "some of each head")
    out, lse = no_races(tpu.cache_attention, q, cache, length, positions, held, scale=0.3, value_width=64, block=128)
    np.testing.assert_allclose(out, exact(q, cache, length, positions, held, scale=0.3, value_width=64)[0], atol=2e-5)
    got = no_races(tpu.slot_weights, q, lse, cache, length, positions, held, scale=0.3, block=256)
    np.testing.assert_allclose(got, exact_weights(q, lse, cache, length, positions, held, scale=0.3), atol=2e-5)


@pytest.mark.wide
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


@pytest.mark.full
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

    with use_abstract_mesh(HOPPER):
        text = jax.jit(both).trace(q, cache, *where, held, scales, table).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("xla.gpu.triton") == 2


def test_a_program_for_gpus_takes_their_kernel_and_can_be_lowered_for_a_cpu() -> None:
    """With a capacity that no kernel for TPUs takes."""
    given = arrays(64, 64, "all")
    q, own, cache = given[0][:, 0, :, None], np.ones((B, R, 1, 64), np.float32), given[1][:, :1, :100]

    def attend(*arrays: Any) -> Array:
        return window_attention_lse(*arrays, scale=0.3)[0]

    arguments = (q, own, own, np.tril(np.ones((1, R, R), bool)), given[3], cache, np.minimum(LENGTHS, 100))
    with use_abstract_mesh(HOPPER):
        traced = jax.jit(attend).trace(*arguments)
        assert traced.lower(lowering_platforms=("cuda",)).as_text().count("xla.gpu.triton") == 1
        assert "xla.gpu.triton" not in traced.lower(lowering_platforms=("cpu",)).as_text()


@pytest.mark.wide
def test_shares_of_slots_lie_side_by_side() -> None:
    """However many there are: also more than there is to share, and with rows that hold nothing."""
    q, cache, length, positions, held = arrays(64, 32, "some")
    options = dict(scale=0.3, value_width=32)
    want, sums = exact(q, cache, length, positions, held, **options)
    for shares in (1, 3, 12):
        out, lse = gpu.cache_attention(q, cache, length, positions, held, **options, shares=shares, interpret=True)
        np.testing.assert_allclose(out, want, atol=2e-5)
        np.testing.assert_allclose(lse, sums, atol=2e-5, rtol=1e-6)
