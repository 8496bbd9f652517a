"""Pages in the memory of the host: the same numbers as with all on the device, and what lies and moves where."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.cache import KVLayer, Window, causal
from decodax.core import drivers
from decodax.kvcache import kv
from decodax.kvcache.offloaded import HostRetrieval, Offloaded
from decodax.kvcache.retrieval import KeyBounds, Retrieval, Retrieving
from decodax.models import Transformer, llama
from decodax.plan import plan
from decodax.plan.aot import devices
from decodax.plan.count import count, setup
from tests.kvcache.test_policies import BOTH, LOOKUP, PROMPTS, SMALL, TREE, half, run, same
from tests.matrix import often

LENGTHS, SIZE, P, RECENT = (61, 30, 9), 64, 4, 6
SHAPES = [KVLayer(2, 8), KVLayer(2, 8), KVLayer(1, 8, sliding=5)]
KEYS, VALUES = np.random.default_rng(0).standard_normal((2, 3, SIZE, 2, 8)).astype(np.float32)


def filled(kind: type[Retrieval], chunk: int, lengths: tuple[int, ...] = LENGTHS) -> Any:
    """Random tokens, taken in so many at a time; the first layer reads everything and the last one has a window."""
    cache = kind(KeyBounds(), 12, P, RECENT, skip=(0,))(SHAPES, len(lengths), SIZE, jnp.float32)
    for start in range(0, SIZE, chunk):
        at = start + jnp.arange(chunk)
        new = jnp.asarray(KEYS[:, start:start + chunk]), jnp.asarray(VALUES[:, start:start + chunk])
        cache = cache.commit([new, new, jax.tree.map(lambda x: x[:, :, :1], new)],
                             jnp.where(at < jnp.array(lengths)[:, None], at, -1))
    return cache


def look(cache: Any, layer: int = 1, certain: bool = False) -> jax.Array:
    """What three random queries a row see of it and of one another."""
    rows = cache.length.shape[0]
    draw = lambda seed, heads: jax.random.normal(jax.random.key(seed), (rows, 3, heads, 8))
    window: Window = causal(jnp.zeros((rows, 3), jnp.int32), cache.length).replace(certain=certain)
    heads = SHAPES[layer].heads
    return cache.attend(layer, draw(1, 4), draw(2, heads), draw(3, heads), window, scale=0.4,
                        sliding=SHAPES[layer].sliding)[0]


@pytest.mark.parametrize("chunk", [1, 16, 64])
def test_queries_read_from_the_host_what_they_read_on_the_device(chunk: int) -> None:
    """Bit for bit; a chunk of a prompt, which is summed in other blocks, to rounding."""
    there, here = filled(HostRetrieval, chunk), filled(Retrieval, 16)
    assert isinstance(there, Offloaded) and isinstance(here, Retrieving) and there.capacity == SIZE
    for layer in range(3):
        np.testing.assert_array_equal(look(there, layer), look(here, layer))
        np.testing.assert_allclose(look(there, layer, True), look(here, layer, True), atol=2e-6)
    assert not np.allclose(look(there)[0], look(there, certain=True)[0], atol=1e-2)


def test_pages_lie_on_the_host_and_the_latest_tokens_on_the_device() -> None:
    cache = filled(HostRetrieval, 16)
    assert [x is None for x in cache.pages] == [True, False, True] == [x is None for x in cache.host]
    assert cache.pages[1].sharding.memory_kind == "pinned_host"
    assert all(x.sharding.memory_kind != "pinned_host" for x in jax.tree.leaves(cache.replace(pages=())))
    assert cache.kv[1].shape == (3, 2, 16, 16)      # 6 tokens, and two pages, in whole pages
    of = np.concatenate([KEYS, VALUES], -1).swapaxes(1, 2)
    for b, n in enumerate(LENGTHS):                 # whole pages were written, and nothing else was
        pages = np.asarray(cache.pages[1][b]).reshape(2, -1, 16)[:, :SIZE]
        np.testing.assert_array_equal(pages[:, :n // P * P], of[b, :, :n // P * P])
        assert not pages[:, n // P * P:].any()


def test_rows_are_forked_and_replaced() -> None:
    cache, other = filled(HostRetrieval, 16), filled(HostRetrieval, 16, (12, 64, 47))
    rows = jnp.array([2, 0, 0, 1])
    picked = jax.jit(lambda c: c.select(rows))(cache)
    assert picked.pages[1].sharding.memory_kind == "pinned_host"
    np.testing.assert_array_equal(look(picked), look(filled(Retrieval, 16).select(rows)))
    places = jnp.array([3, 0, 2])                   # the first one is left out
    mixed = jax.jit(lambda a, b: a.put(b, places))(cache, other)
    assert mixed.length.tolist() == [64, 30, 47]
    alike = filled(Retrieval, 16).put(filled(Retrieval, 16, (12, 64, 47)), places)
    np.testing.assert_array_equal(look(mixed), look(alike))


def test_drafts_give_the_tokens_of_no_drafts() -> None:
    """With the pages on the host, rows with drafts and without in one batch."""
    out = run("quest", BOTH, (0, 1, 2, 0, 1, 2), offload=True)
    assert same(half(out, slice(0, 3)), half(out, slice(3, 6)))
    assert out.stats.accepted[:3].sum() > 0 == out.stats.drafted[3:].sum()


@pytest.mark.wide
@pytest.mark.parametrize(("how", "chunk"), often([("plain", 512), ("chain", 7)], [
    ("plain", 512), ("plain", 7), ("chain", 7), ("tree", 512)]))
def test_tokens_are_those_of_the_policy_on_the_device(how: str, chunk: int) -> None:
    there = run("quest", {"plain": None, "chain": LOOKUP, "tree": TREE}[how], chunk=chunk, offload=True)
    assert same(there, run("quest")) and not same(there, run("dense"))


@pytest.mark.wide
def test_samples_beams_and_slots_go_their_own_ways() -> None:
    """What forks rows, and what replaces them while others run."""
    cache = lambda offload: kv("quest", budget=6, page=2, recent=12, skip=(), offload=offload)
    for given in (dict(num_samples=2, temperature=1.0), dict(num_beams=2, temperature=0.0)):
        one, other = (dx.generate(SMALL, PROMPTS, cache=cache(offload), max_new_tokens=9, seed=3, **given)
                      for offload in (True, False))
        assert one.tokens.tolist() == other.tokens.tolist(), given
    served, again = ({one.index: one.result.tokens.tolist() for one in dx.serve(
        SMALL, PROMPTS, slots=2, cache=cache(offload), max_new_tokens=9)} for offload in (True, False))
    assert served == again and len(served) == 3


def test_a_budget_that_holds_everything_stays_on_the_device() -> None:
    cache = kv("quest", budget=200, offload=True)([KVLayer(2, 8)] * 3, 2, 64, jnp.float32)
    assert type(cache) is Retrieving and not jax.tree.leaves(cache.host)


def test_what_cannot_be_had_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^offload: got 'yes', takes True"):
        kv("quest", offload="yes")
    cache, x = filled(HostRetrieval, 64), jnp.zeros((3, 3, 2, 8))
    for certain in (True, False):
        window = causal(jnp.zeros((3, 3), jnp.int32), cache.length).replace(certain=certain)
        with pytest.raises(ValueError, match="takes a model without a soft cap"):
            cache.attend(1, x, x, x, window, scale=1.0, softcap=3.0)
    if jax.device_count() > 1:
        mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
        with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"^offload: got a mesh of 2 devices"):
            HostRetrieval(KeyBounds(), 12, P, RECENT)(SHAPES, 2, SIZE, jnp.float32)


def small_plan(offload: bool, **given: Any) -> Any:
    model = Transformer(llama(vocab=256, width=256, layers=2, heads=4, kv_heads=2, head_dim=128, mlp=256, context=8192),
                        dtype="bfloat16")
    lm = dx.LM(model=model, params=model.abstract_params(jnp.bfloat16), vocab_size=256)
    cache = kv("quest", budget=512, skip=(), offload=offload)
    return plan(lm, "v5e:1x1", batch=4, capacity=4096, cache=cache, **given)[0] if given else (lm, cache)


def test_a_plan_counts_host_and_device_apart() -> None:
    there, here = (small_plan(offload, compile=False) for offload in (True, False))
    store = 2 * 4 * 4096 * 2 * 256 * 2              # layers, rows, tokens, heads, a key and a value, bytes
    assert there.counts.host == store and here.counts.host == 0 and there.counts.cache < 0.1 * here.counts.cache
    assert there.largest > here.largest and there.json()["counts"]["host"] == store
    assert there.cells()[3] == "0.00 GB + 0.03 GB on the host"


@pytest.mark.wide
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_a_tpu_takes_pages_from_the_host_inside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds, a prompt, forks, and rows that are replaced, as XLA's compiler lays them out for one v5e."""
    jax.devices()                                   # has read the flags, which libtpu does not know
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    lm, cache = small_plan(True)
    s = setup(lm, devices("v5e:2x4")[:1], (1, 1), batch=4, capacity=4096, cache=cache)
    c, row = count(s), jax.ShapeDtypeStruct((4,), jnp.int32)
    seen = s.state.replace(tokens=jax.ShapeDtypeStruct((4, 4096), jnp.int32), cache=None, algo=None, policy=None,
                           record=None, stats=None)
    read = jax.jit(lambda p, held, s: drivers.commit_prompts(None, lm.model, p, held, s, width=256, rows=4),
                   donate_argnums=1)
    with jax.set_mesh(s.mesh):
        rounds, prompts, forks, slots = (x.compile() for x in (
            s.lower(), read.lower(s.params, (s.state.cache, None), seen),
            jax.jit(lambda c, rows: c.select(rows)).lower(s.state.cache, row),
            jax.jit(lambda c, new, rows: c.put(new, rows), donate_argnums=0).lower(s.state.cache, s.state.cache, row)))
    for name, done, loads, stores in (("rounds", rounds, 2, 2), ("prompts", prompts, 4, 2), ("forks", forks, 2, 3),
                                      ("slots", slots, 2, 2)):
        memory, text = done.memory_analysis(), done.as_text()
        assert memory.host_argument_size_in_bytes in (c.host, 2 * c.host), name
        assert memory.host_temp_size_in_bytes == 0 and memory.temp_size_in_bytes < 0.2 * c.host, name
        assert memory.host_alias_size_in_bytes == (0 if name == "forks" else c.host), name
        # pages go one by one, and the array that holds them is copied nowhere: it alone lies in space 5
        found = lambda what, text=text: len(re.findall(rf"%[\w.-]*{what}-start[\w.]* = ", text))
        assert (found("dynamic-slice"), found("dynamic-update-slice")) == (loads, stores), name
        assert not re.search(r"S\(5\)\S* copy(-start)?\(", text) and "callback" not in text, name
    assert rounds.memory_analysis().argument_size_in_bytes < 1.2 * (c.weights + c.cache)
