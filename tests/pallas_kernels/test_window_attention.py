"""Attention of windows by each implementation: sinks, forms of the cache, prefixes in common, meshes."""

import functools
import itertools
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from decodax.pallas_kernels.window_attention import (
    Implementation,
    merge,
    prefix_attention,
    quantized,
    slot_weights,
    tpu,
    window_attention,
    window_attention_lse,
)
from tests.matrix import often
from tests.pallas_kernels.caches import FORMS, LENGTHS, B, G, S, arrays, stored

FEW = ["xla", "mosaic_tpu"]
"""By default, where what differs is not the kernel."""
IMPLEMENTATIONS = get_args(Implementation)


@pytest.mark.wide(but=("True",))
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


@pytest.mark.wide
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


@pytest.mark.wide(but=("1-200-dense-xla",))
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


@pytest.mark.wide(but=("dense",))
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


def test_bad_arguments_are_refused_by_name() -> None:
    q, cache, length, positions, _ = arrays(64, 64, "all")
    with pytest.raises(ValueError, match="cache: got 200 slots, takes a multiple of the block of 128"):
        tpu.cache_attention(q, cache[:, :, :200], length, positions, scale=1.0, value_width=64)
    with pytest.raises(ValueError, match="implementation: got 'cudnn', takes 'xla', 'mosaic_tpu' or 'triton'"):
        window_attention(q.swapaxes(1, 2), cache[..., :64], cache[..., 64:], cache, positions, scale=1.0,
                         implementation="cudnn")       # type: ignore[arg-type]
    with pytest.raises(ValueError, match="scales: got none for a cache of int8, takes them with a cache of"):
        slot_weights(q.swapaxes(1, 2), q[..., 0].swapaxes(1, 2), positions, cache.astype(np.int8), length, scale=1.0)


@pytest.mark.parametrize("sliding", [None, 3, 300])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_window_attention_equals_attention_to_everything(sliding, softcap):
    """The merge of cache blocks and window against one float64 softmax over all keys in sight."""
    draw = np.random.default_rng(0)
    B, W, H, G, d, S = 2, 3, 4, 2, 8, 512
    length = np.array([300, 7])
    q, k, v = (draw.normal(size=(B, W, h, d)).astype(np.float32) for h in (H, G, G))
    ck, cv = (draw.normal(size=(B, G, S, d)).astype(np.float32) for _ in range(2))
    positions = length[:, None] + np.arange(W)
    mask = np.tril(np.ones((1, W, W), bool))
    out = window_attention(q, k, v, jnp.asarray(mask), jnp.asarray(positions), np.concatenate([ck, cv], -1),
                           jnp.asarray(length), scale=0.4, sliding=sliding, softcap=softcap)
    for b in range(B):
        n = length[b]
        for w in range(W):
            for h in range(H):
                g = h // (H // G)
                keys = np.concatenate([ck[b, g, :n], k[b, :w + 1, g]]).astype(np.float64)
                values = np.concatenate([cv[b, g, :n], v[b, :w + 1, g]]).astype(np.float64)
                score = keys @ q[b, w, h] * 0.4
                score = score if softcap is None else softcap * np.tanh(score / softcap)
                if sliding is not None:
                    keep = n + w - np.arange(n + w + 1) < sliding
                    score, values = score[keep], values[keep]
                weight = np.exp(score - score.max())
                assert np.allclose(out[b, w, h], weight @ values / weight.sum(), atol=2e-6)


def test_attention_to_parts_merges_into_attention_to_all():
    """Sinks and the rest, where some queries see nothing of one part."""
    draw = np.random.default_rng(1)
    B, W, H, G, d, S = 2, 3, 4, 2, 8, 16
    q, k, v = (jnp.asarray(draw.normal(size=(B, W, h, d)), jnp.float32) for h in (H, G, G))
    ck, cv = (jnp.asarray(draw.normal(size=(B, G, S, d)), jnp.float32) for _ in range(2))
    cache, length = jnp.concatenate([ck, cv], -1), jnp.array([9, 0])
    positions = length[:, None] + jnp.arange(W)
    held = jnp.where(jnp.arange(S) < length[:, None], jnp.arange(S), -1)[:, None]
    mask = jnp.tril(jnp.ones((1, W, W), bool))

    def part(mine):
        return window_attention_lse(q, k, v, mask & mine(positions)[:, None], positions, cache, scale=0.4,
                                    slot_positions=jnp.where(mine(held), held, -1))

    whole, lse = window_attention_lse(q, k, v, mask, positions, cache, length, scale=0.4)
    out, total = merge(part(lambda at: at < 2), part(lambda at: at >= 2))
    assert np.allclose(out, whole, atol=1e-6) and np.allclose(total, lse, atol=1e-6)
    # the weight of a key is exp(score - lse): those of all keys in sight add up to one
    scores = 0.4 * jnp.einsum("bwgrd,bkgd->bwgrk", q.reshape(B, W, G, H // G, d),
                              jnp.concatenate([ck.swapaxes(1, 2), k], 1))
    sees = jnp.concatenate([jnp.broadcast_to((jnp.arange(S) < length[:, None])[:, None], (B, W, S)),
                            jnp.broadcast_to(mask, (B, W, W))], 2)[:, :, None, None]
    weights = jnp.where(sees, jnp.exp(scores - lse.reshape(B, W, G, H // G)[..., None]), 0)
    assert np.allclose(weights.sum(-1), 1, atol=1e-5)
