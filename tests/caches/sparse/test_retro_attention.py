"""RetroAttention against its rule told token by token: outputs that are kept and added to, pages that were seen."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax.caches import make
from decodax.caches.sparse.retro_attention import Rereading
from decodax.core.window import Window, causal
from decodax.engine.methods import with_cache
from tests.caches.small import DEEP, PROMPTS

SIZES = dict(budget=6, page_size=2, recent=9, skip=())


class ByHand:
    """The cache of one row in NumPy. Of each layer: keys and values by position, of each token behind the prompt what
    its attention has found so far with the sum of its weights, and which pages it has seen, by head of keys."""

    def __init__(self, window: int, began: int, sizes: Any) -> None:
        self.window, self.began, self.sizes = window, began, sizes
        self.layers = [({}, {}, {}, {}) for _ in range(DEEP.model.depth)]     # type: ignore[var-annotated]
        self.added, self.inputs = 0, None

    def attend(self, layer: int, q: Any, k: Any, v: Any, window: Any, *, scale: float, **options: Any) -> Any:
        keys, values, found, seen = self.layers[layer]
        positions = np.asarray(window.positions)[0].tolist()
        q, k, v = (np.asarray(x, np.float64)[0] for x in (q, k, v))
        q, (_, G, _) = scale * q, k.shape
        keys.update(zip(positions, k, strict=True))
        values.update(zip(positions, v, strict=True))
        r = q.shape[1] // G
        page, start = self.sizes["page_size"], max(positions[0] - self.sizes["recent"], 0) // self.sizes["page_size"]

        def attention(query: np.ndarray, at: list[int], g: int) -> tuple[np.ndarray, float]:
            weights = np.exp([keys[i][g] @ query for i in at])
            return weights @ np.array([values[i][g] for i in at]), float(weights.sum())

        out = np.zeros((*q.shape[:2], v.shape[-1]))
        if positions[0] < self.began:       # a prompt
            for row, at in enumerate(positions):
                for h in range(len(q[row])):
                    total, weight = attention(q[row, h], list(range(at + 1)), h // r)
                    out[row, h] = total / weight
            return jnp.asarray(out, jnp.float32)[None], (jnp.zeros((1, len(positions))),)
        count = max(3, self.sizes["budget"] // page)
        for g in range(G):
            group = range(g * r, g * r + r)
            worth = [max(np.maximum(q[0, h] * np.min([keys[i][g] for i in own], 0),
                                    q[0, h] * np.max([keys[i][g] for i in own], 0)).sum() for h in group)
                     for p in range(start) for own in [range(p * page, p * page + page)]]
            pages = set(np.argsort(worth)[::-1][:count].tolist())
            for row, at in enumerate(positions):
                if row == 0:
                    reads = [i for p in pages for i in range(p * page, p * page + page)]
                    reads += range(start * page, at + 1)
                    seen[at, g] = pages | set(range(start, at // page + 1))
                else:
                    new = pages - seen[at, g]
                    self.added += len(new)
                    seen[at, g] |= pages
                    reads = [i for p in new for i in range(p * page, p * page + page)]
                for h in group:
                    if reads:
                        total, weight = attention(q[row, h], reads, g)
                        before = found.get((at, h), (0.0, 0.0)) if row else (0.0, 0.0)
                        found[at, h] = before[0] + total, before[1] + weight
                    out[row, h] = found[at, h][0] / found[at, h][1]
        return jnp.asarray(out, jnp.float32)[None], (jnp.zeros((1, len(positions))),)


@functools.cache
def by_hand(window: int, began: int, text: tuple[int, ...], skip: tuple[int, ...] = ()) -> tuple[np.ndarray, int]:
    """Hidden states `f32[N, D]` of the tokens behind a prompt of `began`, and how many pages were read for others."""
    held = ByHand(window, began, SIZES)
    row = lambda tokens, at: Window(tokens=jnp.asarray([tokens]), positions=jnp.asarray([at]),
                                    live=jnp.ones((1, len(at)), bool), mask=jnp.eye(len(at), dtype=bool)[None])
    if began:
        DEEP.model.apply(DEEP.params, row(text[:began], list(range(began))), held)      # type: ignore[arg-type]
    made = []
    for t in range(began, len(text)):
        at = [t - v for v in range(window) if t - v >= began]
        out = DEEP.model.apply(DEEP.params, row([text[i] for i in at], at), held)       # type: ignore[arg-type]
        made.append(np.asarray(out.hidden[0, 0]))
    return np.stack(made), held.added


@functools.partial(jax.jit, static_argnums=0)
def through(model: Rereading, window: Window, cache: Any) -> tuple[Any, Any]:
    """Hidden states of a window, and what it leaves for the cache."""
    out = model.apply(DEEP.params, window, cache)
    return out.hidden, out.entries


@jax.jit
def committed(cache: Any, entries: Any, slots: Any) -> Any:
    return cache.commit(entries, slots)


def begun(window: int, prompt: list[int], capacity: int = 64, **more: Any) -> tuple[Rereading, Any]:
    lm = with_cache(DEEP, make("retro-attention", **{**SIZES, **more}, window=window))
    cache = lm.model.init_cache(1, capacity)
    if prompt:
        read = causal(jnp.asarray([prompt]), jnp.zeros(1, jnp.int32)).replace(is_prefill=True)
        cache = committed(cache, through(lm.model, read, cache)[1], read.positions)
    return lm.model, cache


TEXT = tuple(np.random.default_rng(9).integers(0, 16, 41).tolist())


@pytest.mark.wide
@pytest.mark.parametrize(("window", "began"), [(2, 17), (4, 17), (3, 0)])
def test_logits_are_those_of_the_rule_by_hand(window: int, began: int) -> None:
    expected, added = by_hand(window, began, TEXT)
    assert added > 20
    model, cache = begun(window, list(TEXT[:began]))
    made: list[np.ndarray] = []
    widths = [1, 1, 3, 2, 4, 1, 5]
    while len(made) < len(expected):
        t = began + len(made)
        chain = causal(jnp.asarray([TEXT[t:t + widths[len(made) % 7]]]), jnp.asarray([t]))
        hidden, entries = through(model, chain, cache)
        cache = committed(cache, entries, chain.positions)
        made.extend(np.asarray(hidden[0]))
    np.testing.assert_allclose(np.stack(made), expected, atol=2e-4)
    dense = causal(jnp.asarray([TEXT]), jnp.zeros(1, jnp.int32))
    plain = DEEP.model.apply(DEEP.params, dense, DEEP.model.init_cache(1, 64)).hidden[0, began:]
    assert np.abs(plain - expected).max() > 0.1         # a rule that changes nothing would pass


@pytest.mark.wide
def test_a_node_reads_what_its_own_path_has_found() -> None:
    began, window, n = 19, 3, 27
    model, cache = begun(window, list(TEXT[:began]))
    for t in range(began, n):
        one = causal(jnp.asarray([TEXT[t:t + 1]]), jnp.asarray([t]))
        cache = committed(cache, through(model, one, cache)[1], one.positions)
    # a root, two children, and a chain below each
    parents, tokens = [-1, 0, 0, 1, 2, 4], [TEXT[n], 3, 7, 11, 2, 5]
    sees = np.eye(6, dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            sees[node] |= sees[parent]
    depth = sees.sum(1) - 1
    tree = Window(tokens=jnp.asarray([tokens]), positions=jnp.asarray([n + depth], jnp.int32),
                  live=jnp.ones((1, 6), bool), mask=jnp.asarray(sees)[None])
    hidden, entries = through(model, tree, cache)
    for leaf in (3, 5):
        path = np.flatnonzero(sees[leaf])
        text = (*TEXT[:n], *(tokens[i] for i in path))
        np.testing.assert_allclose(hidden[0, path], by_hand(window, began, text)[0][n - began:], atol=2e-4)
    # the longer path stays, and the text goes on behind it
    kept = [0, 2, 4, 5]
    cache = committed(cache, entries, jnp.asarray([[n + depth[i] if i in kept else -1 for i in range(6)]]))
    text = (*TEXT[:n], *(tokens[i] for i in kept), 1, 9, 4)
    last = causal(jnp.asarray([text[-3:]]), jnp.asarray([n + 4]))
    np.testing.assert_allclose(through(model, last, cache)[0][0], by_hand(window, began, text)[0][-3:], atol=2e-4)


@pytest.mark.wide
def test_layers_that_read_everything_add_nothing() -> None:
    """With the second layer left out, what the first one adds still reaches its keys."""
    model, cache = begun(3, PROMPTS[0][:20], skip=(1,))
    both, other = begun(3, PROMPTS[0][:20], skip=(0, 1))
    said = []
    for net, held in ((model, cache), (both, other)):
        for t in range(20, 40):
            one = causal(jnp.asarray([TEXT[t:t + 1]]), jnp.asarray([t]))
            hidden, entries = through(net, one, held)
            held = committed(held, entries, one.positions)
        said.append(np.asarray(hidden[0, 0]))
    everything = causal(jnp.asarray([[*PROMPTS[0][:20], *TEXT[20:40]]]), jnp.zeros(1, jnp.int32))
    dense = DEEP.model.apply(DEEP.params, everything, DEEP.model.init_cache(1, 64)).hidden[0, -1]
    np.testing.assert_allclose(said[1], dense, atol=2e-4)
    assert np.abs(said[0] - dense).max() > 0.01
