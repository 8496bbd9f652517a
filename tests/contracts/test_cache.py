"""The contract of caches: what every policy of the registry does, and every kind of storage.

A policy may change the text. It does so in the same way whatever drafts, chunks and batch mates there are.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax import cache
from decodax.cache.entry import KVEntry
from decodax.caches import make
from decodax.common.registry import CACHES
from decodax.common.struct import struct
from decodax.core.window import causal
from decodax.engine.batch import Job
from decodax.engine.request import Request
from tests.caches.small import (
    AT_ONCE,
    BOTH,
    DEEP,
    DEEPER,
    EXACT,
    IN_PARTS,
    ITSELF,
    LOOKUP,
    OPTIONS,
    PROMPTS,
    SMALL,
    TREE,
    TREES,
    asked,
    dense,
    half,
    run,
    same,
    with_sinks_in,
)
from tests.matrix import often


def test_every_cache_of_the_registry_has_options_here() -> None:
    assert OPTIONS.keys() == CACHES.keys()


def drafts_give_the_tokens_of_no_drafts(name: str, algorithm: Any) -> Any:
    out = run(name, algorithm, (0, 1, 2, 0, 1, 2))
    drafted = half(out, slice(0, 3))
    assert same(drafted, half(out, slice(3, 6)))
    assert out.stats.accepted[:3].sum() > 0 == out.stats.drafted[3:].sum()
    return drafted


CHAINS, TREED = {"streaming-llm", "kivi", *list(OPTIONS)[::4]}, {"recycled-attention", *list(OPTIONS)[2::4]}
"""Caches of which the wider tests draft chains, and trees."""


@pytest.mark.wide(but=("streaming-llm", "kivi"))
@pytest.mark.parametrize("name", often(CHAINS, OPTIONS))
def test_drafted_chains_change_no_token_in_any_order_of_the_batch(name: str) -> None:
    drafted = drafts_give_the_tokens_of_no_drafts(name, BOTH)
    others = run(name, BOTH, (2, 0, 0, 2, 1, 1))        # the same program; row 4 is without drafts
    for row, request in ((0, 2), (1, 0), (4, 1)):
        assert same(half(others, slice(row, row + 1)), half(drafted, slice(request, request + 1)))
    # a policy that changed nothing would pass: log-probabilities tell, tokens may agree by chance
    plain = half(run(dense(name), BOTH, (0, 1, 2, 0, 1, 2)), slice(0, 3))
    assert same(drafted, plain) == (name in EXACT)
    # while it holds everything it is the dense cache: the third prompt has 5 tokens
    assert same(half(drafted, np.s_[2:, :3]), half(plain, np.s_[2:, :3])) == (name in EXACT or name not in AT_ONCE)


@pytest.mark.wide(but=("recycled-attention",))
@pytest.mark.parametrize("name", often(TREED, OPTIONS))
def test_drafted_trees_change_no_token(name: str) -> None:
    drafts_give_the_tokens_of_no_drafts(name, TREES)


@pytest.mark.wide
@pytest.mark.parametrize(("name", "algorithm"), often(
    [("h2o", LOOKUP), ("gear", LOOKUP), ("adakv", TREE)], [(name, alg) for name in OPTIONS for alg in (LOOKUP, TREE)]))
def test_speculative_equals_plain_on_the_same_cache(name: str, algorithm: Any) -> None:
    drafted = run(name, algorithm)
    assert same(drafted, run(name)) and drafted.stats.accepted.sum() > 0


def everything(name: str) -> Any:
    """Returns the cache of a name with a budget that holds all tokens."""
    wide: dict[str, Any] = {
            "streaming-llm": {"recent_size": 200}, "gear": {"buffer": 200}, "minicache": {"retention": 1.0},
            "hyper-attention": {"min_seq_len": 200}, "quick-prefill": {"keep": 1.0}, "less": {"recent_size": 200},
            "freqkv": {"size": 200}, "leank": {"recent": 200}, "subgen": {"recent": 200},
            "shadowkv": {"budget": 200, "rank": 64}, "fastkv": {"budget": 200, "tsp_length": 200},
            "minference": {"vertical_size": 200}, "kv-prediction": {"auxiliary": DEEP, "maps": ITSELF},
            "quantized-pruning": {"budget": 200, "residual_length": 200},
            "shotkv": {"budget": 200, "pool": 200}, "tim": {"depth": 200}, "louiskv": {"budget": 200, "buffer": 200},
            "scope": {"budget": 200, "decoding_window_size": 400, "decoding_recent_size": 200},
            "prefixkv": {"layers": (1.0, 1.0)},
            "plphp": {"rate": 1.0, "change": 0.0},
            **{codec: {"residual_length": 200} for codec in (
                "kivi", "kv-adaquant", "mustafar", "squat", "cq", "rotatekv", "cskv", "aqua-kv")}}.get(
        name, {} if name in EXACT else {"budget": 200})
    return make(name, **{**OPTIONS[name], **wide})


@pytest.mark.wide
@pytest.mark.parametrize("name", often(["snapkv", "pyramidkv", "adakv", "kivi"], [
    name for name in OPTIONS if name not in EXACT | {"zipcache", "qaq"}]))
def test_a_budget_that_holds_everything_is_the_dense_cache(name: str) -> None:
    out, drafted = (dx.generate(DEEP if name in DEEPER else SMALL, PROMPTS, cache=everything(name), algorithm=algorithm,
                                seed=5, temperature=[0.0, 0.9, 0.0], max_new_tokens=20, logprobs=0)
                    for algorithm in (None, LOOKUP))
    want = run(dense(name))
    assert same(drafted, run(dense(name), LOOKUP))
    if name in IN_PARTS:
        assert same(out, want, atol=2e-6)
    else:
        assert out.tokens.tolist() == want.tokens.tolist() and np.array_equal(out.logprobs.raw, want.logprobs.raw)


EVERY_WEIGHT = (40.0,) * 4
"""Scores of sinks beside which no token has a weight."""


@functools.cache
def with_sinks(deep: bool, cache: Any, sinks: tuple[float, ...] = (1.0, -1.0, 3.0, 0.5)) -> Any:
    """Decodes with a model with attention sinks in each layer."""
    lm = with_sinks_in(DEEP if deep else SMALL, sinks)
    return dx.generate(lm, PROMPTS, cache=cache, seed=5, temperature=[0.0, 0.9, 0.0], max_new_tokens=12, logprobs=0)


@pytest.mark.wide(but=("quest",))
@pytest.mark.parametrize("name", often(["kivi", "quest", "adakv", "paged", "streaming-llm"], [
    name for name in OPTIONS if name not in {"zipcache", "qaq"}]))
def test_sinks_join_the_softmax_once_in_every_cache(name: str) -> None:
    deep = name in DEEPER
    assert same(with_sinks(deep, everything(name)), with_sinks(deep, None), atol=1e-5)


@pytest.mark.wide
@pytest.mark.parametrize("name", often(["zipcache", "qaq", "less"], OPTIONS))
def test_sinks_with_all_the_weight_leave_nothing_of_what_a_cache_holds(name: str) -> None:
    deep = name in DEEPER
    held = with_sinks(deep, make(name, **OPTIONS[name]), EVERY_WEIGHT)
    assert same(held, with_sinks(deep, None, EVERY_WEIGHT), atol=1e-5)


@pytest.mark.wide
@pytest.mark.parametrize("name", often(["adakv", "snapkv", "lagkv"], OPTIONS))
def test_a_row_does_not_depend_on_batch_mates_chunks_or_streaming(name: str) -> None:
    whole = run(name)
    alone = run(name, rows=(1,), chunk=7)
    assert alone.tokens.tolist() == whole.tokens[1:2].tolist()
    np.testing.assert_allclose(alone.logprobs.raw, whole.logprobs.raw[1:2], atol=1e-4)
    lm, prompts, options = asked(name)
    job = Job.begin(Request.read(lm, prompts, **options))
    while job.running:
        job.advance(None, rounds=3)
    assert job.result().tokens.tolist() == whole.tokens.tolist()


@pytest.mark.wide
@pytest.mark.parametrize("name", often(["h2o", "kivi", "quest"], OPTIONS))
def test_a_second_call_traces_nothing(name: str) -> None:
    lm, prompts, options = asked(name)
    call = lambda prompts, seed: dx.generate(lm, prompts, **options | dict(seed=seed))
    call(prompts, 5)        # programs of `run` may have been dropped since
    with jax.no_tracing(True):
        call([prompt[::-1] for prompt in prompts], 6)


@pytest.mark.wide
@pytest.mark.parametrize("name", ["recycled-attention", "h2o", "sentence-kv", "louiskv", "gear"])
def test_drafts_that_read_a_smaller_cache_change_no_token(name: str) -> None:
    """What a policy asks of an entry beyond keys and values goes along beside the cache that drafts read."""
    drafted = run(name, dx.algorithms.make("magicdec", SMALL, budget=14))
    assert same(drafted, run(name)) and drafted.stats.accepted.sum() > 0


@pytest.mark.parametrize("name", ["act-qkv", "token-butler"])
def test_drafts_on_another_cache_are_refused_by_a_cache_that_combines_with_none(name: str) -> None:
    with pytest.raises(ValueError, match=r"^cache: got \w+, which cannot be combined with another"):
        dx.generate(DEEP, PROMPTS, cache=make(name, **OPTIONS[name]), algorithm=dx.algorithms.make("magicdec", DEEP,
                                                                                                   budget=14),
                    max_new_tokens=2)


@struct
class WithoutSinks(cache.Dense):
    """A cache whose attention takes no sinks."""

    def attend(self, layer: int, q: Any, k: Any, v: Any, window: Any, *, scale: float, sliding: int | None = None,
               softcap: float | None = None, bias: Any = None) -> Any:
        raise NotImplementedError


def test_a_model_with_sinks_is_refused_by_name_where_a_cache_takes_none() -> None:
    make = lambda *given: WithoutSinks(**vars(cache.dense(*given)))
    assert isinstance(cache.cache_of(make, [cache.KVLayer(2, 4)], 1, 8, jnp.float32), WithoutSinks)
    with pytest.raises(ValueError, match=r"^cache: got a WithoutSinks, whose attend takes no sinks; takes a mod"):
        cache.cache_of(make, [cache.KVLayer(2, 4, sinks=True)], 1, 8, jnp.float32)


@struct
class Backwards(cache.Slotted):
    """A cache whose slots are positions counted from the end."""

    def place(self, layer: int, entry: Any, positions: jax.Array) -> jax.Array:
        return jnp.where(positions < self.size, self.size - 1 - positions, -1)[:, None]


WIDTHS = [(2, 4), (1, 8)]
WIDE = [(2, 4, 6), (1, 8, 3)]
KINDS: dict[str, Callable[[int, int], Any]] = {
    "dense": lambda batch, size: cache.dense(WIDTHS, batch, size, jnp.float32),
    "dense of other values": lambda batch, size: cache.dense(WIDE, batch, size, jnp.float32),
    "slotted": lambda batch, size: Backwards(**cache.empty_slots(WIDTHS, batch, size, jnp.float32, slots=size)),
    "slotted of other values": lambda batch, size: Backwards(
        **cache.empty_slots(WIDE, batch, size, jnp.float32, slots=size)),
}
OFTEN = ["dense of other values", "slotted of other values"]


def entries(key: int, batch: int, width: int, kind: str) -> Any:
    """Returns random keys and values for a kind of storage."""
    empty, draw = KINDS[kind](1, 8), iter(jax.random.split(jax.random.key(key), 4))
    one = lambda held: jax.random.normal(next(draw), (batch, width, held.shape[1], held.shape[3]))
    return tuple(KVEntry(one(k), one(v)) for k, v in ((empty.keys(i), empty.values(i)) for i in range(len(empty.kv))))


def look(held: Any, layer: int = 0) -> jax.Array:
    """Returns what a fixed query attends to."""
    batch = held.length.shape[0]
    q = jax.random.normal(jax.random.key(9), (batch, 1, 4, 4))
    zeros = lambda x: jnp.zeros((batch, 1, 2, x.shape[3]))
    window = causal(jnp.zeros((batch, 1), jnp.int32), held.length)
    return held.attend(layer, q, zeros(held.keys(layer)), zeros(held.values(layer)), window, scale=0.5)[0]


def test_an_entry_that_is_no_struct_is_named() -> None:
    pairs = [(entry.keys, entry.values) for entry in entries(0, 2, 3, "dense of other values")]
    with pytest.raises(TypeError, match=r"^entries: got a tuple for layer 0, takes a decodax\.cache\.KVEntry$"):
        KINDS["dense of other values"](2, 8).commit(pairs, jnp.broadcast_to(jnp.arange(3), (2, 3)))


@pytest.mark.wide(but=("dense of other values",))
@pytest.mark.parametrize("kind", often(OFTEN, KINDS))
def test_chunks_of_any_size_commit_the_same_entries(kind: str) -> None:
    kv = entries(0, 3, 6, kind)
    part = lambda a, b: jax.tree.map(lambda x: x[:, a:b], kv)
    slots = jnp.broadcast_to(jnp.arange(6), (3, 6))
    whole = KINDS[kind](3, 8).commit(kv, slots)
    pieces = KINDS[kind](3, 8)
    for a, b in ((0, 1), (1, 4), (4, 6)):
        pieces = pieces.commit(part(a, b), slots[:, a:b])
    assert np.array_equal(look(whole), look(pieces))


@pytest.mark.wide(but=("4-dense of other values",))
@pytest.mark.parametrize("kind", often(OFTEN, KINDS))
@pytest.mark.parametrize("width", [1, 4])
def test_dropped_entries_leave_no_trace(kind: str, width: int) -> None:
    full = KINDS[kind](2, 8).commit(entries(0, 2, 3, kind), jnp.broadcast_to(jnp.arange(3), (2, 3)))
    same = full.commit(entries(1, 2, width, kind), jnp.full((2, width), -1))
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(full), jax.tree.leaves(same), strict=True))
    beyond = full.commit(entries(1, 2, width, kind), jnp.full((2, width), 8)) if width > 1 else full
    assert np.array_equal(look(full), look(beyond.replace(length=full.length)))


@pytest.mark.wide(but=("dense of other values",))
@pytest.mark.parametrize("kind", often(OFTEN, KINDS))
def test_rows_commit_different_numbers_of_entries(kind: str) -> None:
    kv = entries(0, 2, 4, kind)
    slots = jnp.array([[0, 1, -1, -1], [0, 1, 2, 3]])
    ragged = KINDS[kind](2, 8).commit(kv, slots)
    assert ragged.length.tolist() == [2, 4]
    for row, count in enumerate((2, 4)):
        alone = KINDS[kind](1, 8).commit(jax.tree.map(lambda x, r=row, n=count: x[r:r + 1, :n], kv),
                                         jnp.arange(count)[None])
        assert np.allclose(look(ragged.select(jnp.array([row]))), look(alone), atol=1e-6)


@pytest.mark.wide(but=("dense of other values",))
@pytest.mark.parametrize("kind", often(OFTEN, KINDS))
def test_select_gathers_rows(kind: str) -> None:
    full = KINDS[kind](3, 8).commit(entries(0, 3, 4, kind), jnp.array([[0, 1, 2, 3], [0, 1, -1, -1], [0, -1, -1, -1]]))
    rows = jnp.array([2, 0, 0, 1])
    picked = full.select(rows)
    assert picked.length.tolist() == [1, 4, 4, 2]
    for layer in (0, 1):
        assert np.array_equal(picked.kv[layer], full.kv[layer][rows])


@pytest.mark.wide(but=("dense of other values",))
@pytest.mark.parametrize("kind", often(OFTEN, KINDS))
def test_committed_entries_are_attended_to(kind: str) -> None:
    """Against a softmax over the entries themselves."""
    kv = entries(0, 2, 5, kind)
    full = KINDS[kind](2, 8).commit(kv, jnp.broadcast_to(jnp.arange(5), (2, 5)))
    q = np.asarray(jax.random.normal(jax.random.key(9), (2, 1, 4, 4)))
    k, v = (np.concatenate([x, np.zeros((2, 1, *x.shape[2:]))], 1) for x in (kv[0].keys, kv[0].values))
    for b in range(2):
        for h in range(4):
            weight = np.exp(k[b, :, h // 2] @ q[b, 0, h] * 0.5)
            assert np.allclose(look(full)[b, 0, h], weight @ v[b, :, h // 2] / weight.sum(), atol=1e-6)
