"""Pages in the host's memory: results are those of the same policy on the device, and what is read alone travels."""

import importlib.util
import math
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.algorithms.beams.algorithm import BeamSearch
from decodax.bench.plan import PRESETS, abstract, plan
from decodax.bench.report import callbacks, copies, parse
from decodax.cache import KVLayer
from decodax.cache.entry import KVEntry
from decodax.caches.sparse import host_pages
from decodax.caches.sparse.host_pages import HostPageCache
from decodax.caches.sparse.quest import QuestConfig
from decodax.core import host_memory
from decodax.core.drivers import advance
from decodax.core.window import causal
from decodax.engine.batch import Job
from decodax.engine.request import Request
from decodax.search import Forks
from tests.caches.small import BOTH, LOOKUP, OPTIONS, PROMPTS, SMALL, TREE, run

P, RECENT = 4, 6
QUEST = OPTIONS["quest"]


def equal(one: Any, other: Any) -> bool:
    """Bit for bit."""
    return one.tokens.tolist() == other.tokens.tolist() and np.array_equal(one.logprobs.raw, other.logprobs.raw)


@pytest.mark.wide
def test_results_are_those_of_the_device_bit_for_bit() -> None:
    """Of ragged rows, with drafts and without in one program."""
    rows = (0, 1, 2, 0, 1, 2)
    there = run("quest", BOTH, rows, offload=True)
    assert equal(there, run("quest", BOTH, rows)) and there.stats.accepted[:3].sum() > 0


@pytest.mark.wide
@pytest.mark.parametrize("algorithm", [None, LOOKUP, TREE], ids=["plain", "chain", "tree"])
def test_pages_on_the_host_are_those_on_the_device_with_any_algorithm(algorithm: Any) -> None:
    assert equal(run("quest", algorithm, offload=True), run("quest", algorithm))


@pytest.mark.wide
@pytest.mark.parametrize("algorithm", [BOTH, None, TREE], ids=["drafts", "plain", "tree"])
def test_values_of_shadowkv_may_lie_there_too(algorithm: Any) -> None:
    rows = (0, 1, 2, 0, 1, 2) if algorithm is BOTH else (0, 1, 2)
    assert equal(run("shadowkv", algorithm, rows, offload=True), run("shadowkv", algorithm, rows))
    job = Job.begin(Request.read(SMALL, PROMPTS, cache=dx.caches.make("shadowkv", **OPTIONS["shadowkv"], offload=True),
                                 max_new_tokens=4))
    values = [x.sharding.memory_kind for x in jax.tree.leaves(job.state.cache.layout.hosted)]
    assert values == ["pinned_host"] and job.state.cache.shadows[0].values.shape[3:] == (4, 4)


def filled(kind: QuestConfig, lengths: tuple[int, ...], chunk: int) -> Any:
    """A cache of a layer with random tokens, taken in so many at a time."""
    cache: Any = kind([(2, 8)], len(lengths), 64, jnp.float32)
    both = np.random.default_rng(0).standard_normal((2, len(lengths), 66, 2, 8)).astype(np.float32)
    for start in range(0, 64, chunk):
        at = start + np.arange(chunk, dtype=np.int32)
        slots = np.where(at < np.array(lengths, np.int32)[:, None], at, -1)
        cache = commit(cache, KVEntry(*both[:, :, start:start + chunk]), slots)
    return cache


@jax.jit
def commit(cache: Any, entry: Any, slots: Any) -> Any:
    return cache.commit([entry], slots)


def two(*given: Any, skip: tuple[int, ...] = ()) -> tuple[QuestConfig, QuestConfig]:
    return QuestConfig(*given, skip=skip), QuestConfig(*given, skip=skip, offload=True)


@pytest.mark.wide(but=("3", "64"))
@pytest.mark.parametrize("chunk", [1, 3, 16, 64])
def test_whole_pages_lie_on_the_host_and_the_latest_tokens_on_the_device(chunk: int) -> None:
    lengths = (61, 30, 9)
    here, there = (filled(kind, lengths, chunk) for kind in two(12, P, RECENT))
    assert isinstance(there, HostPageCache) and there.pages[0] is not None
    assert there.pages[0].sharding.memory_kind == "pinned_host" and host_memory.on_host(there.pages[0])
    assert {x.sharding.memory_kind for x in (*there.kv, *there.digests, there.length)} == {"device"}
    assert there.kv[0].shape[2] == RECENT + P
    for b, n in enumerate(lengths):
        whole = n // P
        kv = np.asarray(here.kv[0])[b]
        np.testing.assert_array_equal(np.asarray(there.pages[0])[b, :, :whole].reshape(2, -1, 16), kv[:, :whole * P])
        np.testing.assert_array_equal(there.digests[0][b, :, :whole], here.digests[0][b, :, :whole])
        latest = np.arange(max(n - RECENT - P, 0), n)
        np.testing.assert_array_equal(np.asarray(there.kv[0])[b][:, latest % (RECENT + P)], kv[:, latest])


def asked(cache: Any, certain: bool, width: int) -> np.ndarray:
    q, k, v = (np.random.default_rng(i).standard_normal((3, width, n, 8)).astype(np.float32) for i, n in
               enumerate((4, 2, 2)))
    window = causal(jnp.zeros((3, width), jnp.int32), cache.length)
    out, _ = cache.attend(0, *map(jnp.asarray, (q, k, v)), window.replace(is_prefill=certain), scale=0.4)
    return np.asarray(out)


@pytest.mark.wide(but=("prompt",))
@pytest.mark.parametrize("certain", [False, True], ids=["round", "prompt"])
def test_entries_that_were_not_written_on_the_host_are_not_read(certain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be anything on a TPU, so it is no number here. A prompt's pages come in several parts."""
    monkeypatch.setattr(host_pages, "AT_ONCE", 16)
    here, there = (filled(kind, (61, 30, 0), 16) for kind in two(12, P, RECENT))
    full = np.array([61, 30, 0])[:, None, None, None, None] // P
    unknown = jnp.where(np.arange(16)[:, None, None] >= full, jnp.nan, np.asarray(there.pages[0]))
    out = asked(there.replace(pages=(host_memory.to_host(unknown),)), certain, 4)
    np.testing.assert_allclose(out, asked(here, certain, 4), atol=1e-6)


def test_rows_of_the_host_move_as_rows_do() -> None:
    x, y = np.random.default_rng(0).standard_normal((2, 4, 2, 12, 4, 3)).astype(np.float32)
    there, new = host_memory.to_host(jnp.asarray(x)), host_memory.to_host(jnp.asarray(y))
    rows = jnp.array([2, 0, 2, 1, 3])
    same = lambda made, wanted: host_memory.on_host(made) and np.array_equal(made, wanted)
    assert same(jax.jit(host_memory.take_rows)(there, rows), x[rows])
    assert same(jax.jit(host_memory.permute_rows)(there, rows[:4], jnp.int32(12)), x[rows[:4]])
    few = np.concatenate([x[rows[:4]][:, :, :4], x[:, :, 4:]], 2)
    assert same(jax.jit(host_memory.permute_rows)(there, rows[:4], jnp.int32(3)), few)
    assert same(jax.jit(host_memory.permute_rows)(there, rows[:4], jnp.int32(0)), x)
    put = x.copy()
    put[[3, 0]] = y[[0, 2]]
    assert same(jax.jit(host_memory.put_rows)(there, new, jnp.array([3, 4, 0, 9])), put)
    mask = jnp.array([True, False, False, True])
    assert same(jax.jit(host_memory.choose_rows)(mask, new, there), np.where(mask[:, None, None, None, None], y, x))


@pytest.mark.wide
def test_samples_beams_forks_and_slots_go_on_from_pages_on_the_host() -> None:
    here, there = (dx.caches.make("quest", **QUEST, offload=on) for on in (False, True))
    options: dict[str, Any] = dict(max_new_tokens=12, seed=3)

    def both(**more: Any) -> list[Any]:
        return [dx.generate(SMALL, PROMPTS[:2], cache=kind, **options, **more).tokens.tolist()
                for kind in (here, there)]

    one, other = both(num_samples=3, temperature=1.0)
    assert one == other and len({*map(tuple, one)}) == 6
    one, other = both(algorithm=BeamSearch(3))
    assert one == other

    def forked(kind: Any) -> Any:
        forks = Forks.begin(SMALL, PROMPTS[:2], 2, step_tokens=4, cache=kind, temperature=1.0, **options)
        forks.extend()
        forks.fork(np.array([[1, 1], [0, 0]]))
        forks.extend()
        return [[forks.tokens(p, i) for i in range(2)] for p in range(2)]

    one, other = forked(here), forked(there)
    assert one == other and one[0][0][:4] == one[0][1][:4] and one[0][0] != one[0][1]
    served = [sorted((x.index, x.result.tokens.tolist()) for x in dx.serve(
        SMALL, [*PROMPTS, *PROMPTS], slots=2, cache=kind, max_new_tokens=6)) for kind in (here, there)]
    assert served[0] == served[1] and len(served[0]) == 6


@pytest.mark.wide
def test_a_round_copies_no_pages() -> None:
    job = Job.begin(Request.read(SMALL, PROMPTS, cache=dx.caches.make("quest", **QUEST, offload=True),
                                 max_new_tokens=4))
    pages = job.state.cache.pages[0]
    assert pages.sharding.memory_kind == "pinned_host"
    batch = job.batch
    lowered = advance.lower(batch.algorithm, batch.model, batch.params, batch.policy, batch.state, jnp.int32(4))
    program, size = parse(lowered.compile().as_text()), pages.size
    assert any(size == math.prod(b.dims) for x in program.all() for b in x.result)
    assert not [x for loop in program.loops() for x in copies(program, size, loop.attribute("body"))]
    assert not callbacks(program)


def test_a_model_with_soft_caps_is_refused_before_it_runs() -> None:
    for kind in two(12, P, RECENT):
        with pytest.raises(ValueError, match=r"^cache: quest takes a model without soft caps of its attention scores, "
                                             "which layer 1 of this one has"):
            kind([KVLayer(2, 8), KVLayer(2, 8, softcap=2.0)], 1, 64, jnp.float32)
        kind([KVLayer(2, 8, sliding=8, softcap=2.0)], 1, 64, jnp.float32)       # a layer that reads everything


def test_layers_that_read_everything_stay_on_the_device() -> None:
    layers = [KVLayer(2, 8), KVLayer(2, 8, sliding=8), KVLayer(2, 8)]
    made: Any = two(12, P, RECENT, skip=(0,))[1](layers, 3, 64, jnp.float32)
    assert [x is None for x in made.pages] == [True, True, False]
    assert [x.shape[2] for x in made.kv] == [64, 64, RECENT + P]
    small: Any = two(60, P, RECENT)[1](layers, 3, 64, jnp.float32)
    assert small.pages == (None,) * 3 and all(x.shape[2] == 64 for x in small.kv)
    assert jax.tree.leaves(small.layout.hosted) == []


@pytest.mark.wide
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="takes libtpu (the extra tpu-aot)")
@pytest.mark.parametrize("mesh", ["1x1", "2x4"])
def test_a_tpu_fetches_pages_by_asynchronous_slices(mesh: str) -> None:
    """As XLA's TPU compiler says: where arrays lie, and what moves between the two memories."""
    data, model = map(int, mesh.split("x"))
    lm = abstract({**PRESETS["llama-3-8b"], "num_hidden_layers": 2, "vocab_size": 4096})
    here, there = (plan(lm, "v5e:2x4", mesh=[(data, model)], batch=4, capacity=8192, compile=True,
                        cache=dx.caches.make("quest", skip=(), offload=on))[0] for on in (False, True))
    assert here.compiled is not None and there.compiled is not None
    assert there.padded == pytest.approx(1, abs=0.02)       # of the device's memory alone
    saved = here.compiled.arguments - there.compiled.arguments
    assert saved == pytest.approx(there.counts.host, rel=0.02) and here.counts.host == 0
    assert there.compiled.temporaries < 0.1 * there.counts.host
    text = there.compiled.text
    pages = f"bf16[{4 // data},{8 // model},512,16,256]"
    layouts = re.findall(re.escape(pages) + r"(\{\S+\})", text)
    assert layouts and all("S(5)" in x for x in layouts)
    starts = re.findall(r" (\S+)-start\(", "\n".join(line for line in text.splitlines() if "S(5)" in line))
    # of two layers: eight pages at once, and each page that is full by itself; nothing is copied as a whole
    assert Counter(starts) == {"dynamic-slice": 2 * 8, "dynamic-update-slice": 2}
    assert "HostExecute" not in text and "S(5)" not in here.compiled.text


def test_plans_count_both_memories() -> None:
    here, there = (plan("llama-3-8b", "v5p", batch=8, capacity=8192, mesh=[(1, 1)], compile=False,
                        cache=dx.caches.make("quest", offload=on))[0].counts for on in (False, True))
    entry = 32 * 8 * 2 * 128 * 2
    assert here.host == 0 and there.host == 30 / 32 * 8 * 8192 * entry      # the first two layers stay
    # what is on the device then: two layers, digests as large as an entry for each page of 16, 64 + 16 latest tokens
    near = 8 * (2 / 32 * 8192 + 8192 / 16 + 30 / 32 * 80) * entry
    assert there.cache == pytest.approx(near, rel=1e-3)
    assert here.cache == pytest.approx(8 * (8192 + 8192 / 16) * entry, rel=1e-3)
