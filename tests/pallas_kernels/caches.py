"""Caches of every form for the kernels that read them, and attention to them in float64."""

from typing import Any

import numpy as np

from decodax.pallas_kernels.window_attention import quantized

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


def agrees_with_float64(attend: Any, weigh: Any, form: str, widths: tuple[int, int], sliding: int | None, held: str,
                        causal: bool = False) -> None:
    """`cache_attention` and `slot_weights` of an implementation, over a cache in some form."""
    q, cache, *where = arrays(*widths, held)
    kept, given, meant = stored(cache, widths[0], form)
    options = dict(scale=0.3, value_width=widths[1], sliding=sliding, softcap=5.0 if sliding else None)
    out, lse = attend(q, kept, *where, **given, **options)
    want, sums = exact(q, meant, *where, **options)
    np.testing.assert_allclose(out, want, atol=3e-5)
    np.testing.assert_allclose(np.where(sums > -1e29, lse, 0), np.where(sums > -1e29, sums, 0), atol=2e-5)
    assert (np.asarray(lse)[sums < -1e29] < -1e29).all()
    options.pop("value_width")
    options["causal"] = causal
    got = weigh(q, np.where(sums > -1e29, sums, 0).astype(np.float32), kept, *where, **given, **options)
    np.testing.assert_allclose(got, exact_weights(q, sums, meant, *where, **options), rtol=1e-4, atol=1e-6)
