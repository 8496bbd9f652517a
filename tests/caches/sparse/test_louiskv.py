"""LouisKV against its rule written out token by token."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.cache import KVLayer
from decodax.cache.entry import KVEntry
from decodax.caches.sparse.clusters import first_centroids
from decodax.caches.sparse.louiskv import LouisKVCache, LouisKVConfig
from decodax.core.capabilities import ReadPrompt
from decodax.core.window import Window, causal
from tests.caches.small import DEEP, LOOKUP, PROMPTS, SMALL, TREE

KIND = LouisKVConfig(budget=9, tau=0.2, cluster_size=4, sinks=2, buffer=6, iterations=3)


class ByHand:
    """One layer of one row in NumPy: a list of chunks to choose from and a buffer of segments, lists of positions.

    Attributes:
        read: the positions that each token read, of each head of keys. turns: the tokens that chose.
    """

    def __init__(self, kind: LouisKVConfig, keys: np.ndarray, values: np.ndarray, scale: float) -> None:
        self.kind, self.scale, self.start = kind, scale, len(keys)
        self.keys, self.values = list(keys.astype(np.float64)), list(values.astype(np.float64))
        self.heads, self.first = keys.shape[1], min(kind.sinks, len(keys))
        self.pool: list[list[list[int]]] = [self.clusters(g) for g in range(self.heads)]
        self.buffer: list[list[int]] = []
        self.before: np.ndarray | None = None
        self.chosen: list[list[int]] = []
        self.read: list[list[list[int]]] = []
        self.turns: list[int] = []

    def clusters(self, g: int) -> list[list[int]]:
        """K-means by cosines from the keys that the library begins with."""
        first, n = self.first, self.start
        at = np.arange(first, n)
        if not len(at):
            return []
        number = max(len(at) // self.kind.cluster_size, 1)
        begin = np.asarray(first_centroids(self.kind.seed, jnp.int32(first), jnp.int32(n), jnp.int32(number), number))
        keys = np.stack([self.keys[i][g] for i in at])
        unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
        centroids = np.stack([self.keys[i][g] for i in begin])
        for _ in range(self.kind.iterations):
            nearest = (unit(keys) @ unit(centroids).T).argmax(-1)
            centroids = np.stack([keys[nearest == c].mean(0) if (nearest == c).any() else centroids[c]
                                  for c in range(number)])
        nearest = (unit(keys) @ unit(centroids).T).argmax(-1)
        return [found for c in range(number) if (found := at[nearest == c].tolist())]

    def retrieve(self, q: np.ndarray) -> list[list[int]]:
        chosen = []
        for g in range(self.heads):
            if not self.pool[g]:
                chosen.append([])
                continue
            means = np.stack([np.mean([self.keys[i][g] for i in own], 0) for own in self.pool[g]])
            each = np.exp(self.scale * (means @ q.reshape(self.heads, -1, q.shape[-1])[g].T))       # [chunks, r]
            found: list[int] = []
            for c in np.argsort(-(each / each.sum(0)).mean(1), kind="stable"):
                room = self.kind.budget - len(found)
                if len(self.pool[g][c]) > room and not self.kind.cut:
                    break
                found += self.pool[g][c][:room]
            chosen.append(found)
        return chosen

    def step(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """What a token finds, `[H, e]`, whose queries are `[H, d]`, key and value `[G, d]` and `[G, e]`."""
        q, at = q.astype(np.float64), len(self.keys)
        cosine = lambda a, b: a @ b / np.linalg.norm(a) / np.linalg.norm(b)
        like = 0.0 if self.before is None else np.mean([cosine(a, b) for a, b in zip(self.before, q, strict=True)])
        boundary = self.before is None or like < self.kind.tau
        if boundary:
            self.chosen = self.retrieve(q)
            self.turns.append(at)
        if boundary or not self.buffer:
            self.buffer.append([])
        self.keys.append(k.astype(np.float64))
        self.values.append(v.astype(np.float64))
        self.read.append([sorted([*range(self.first), *own, *(i for part in self.buffer for i in part)])
                          for own in self.chosen])
        self.buffer[-1].append(at)
        out = np.zeros((len(q), v.shape[-1]))
        for h in range(len(q)):
            g = h // (len(q) // self.heads)
            own = [*self.read[-1][g], at]
            weights = np.exp(self.scale * np.stack([self.keys[i][g] for i in own]) @ q[h])
            out[h] = weights / weights.sum() @ np.stack([self.values[i][g] for i in own])
        self.before = q
        while sum(map(len, self.buffer)) >= self.kind.buffer:
            oldest = self.buffer.pop(0)
            for chunks in self.pool:
                chunks.append(oldest)
        return out


@functools.cache
def given() -> tuple[np.ndarray, ...]:
    """Queries, keys and values of three rows of 70 tokens, `f32[3, 70, H or G, 8]`. Queries stay much the same for a
    while, and then they do not; in the last row none is like the one before for long."""
    r = np.random.default_rng(3)
    q = np.zeros((3, 70, 4, 8))
    for b, calm in enumerate((0.7, 0.5, 0.2)):
        for i in range(70):
            fresh = r.standard_normal((4, 8))
            q[b, i] = fresh if i == 0 or r.random() > calm else q[b, i - 1] + 0.5 * fresh
    return tuple(x.astype(np.float32) for x in (q, *r.standard_normal((2, 3, 70, 2, 8))))


LENGTHS = (40, 23, 1)


def settled(kind: LouisKVConfig) -> Any:
    _, k, v = given()
    cache: Any = kind([KVLayer(2, 8, queries=4)], 3, 128, jnp.float32).prefill_cache()
    slots = jnp.where(jnp.arange(40) < jnp.array(LENGTHS)[:, None], jnp.arange(40), -1)
    return cache.commit([KVEntry(jnp.asarray(k[:, :40]), jnp.asarray(v[:, :40]))], slots).finish_prefill(
        ReadPrompt(None, None, jnp.zeros((3, 0), jnp.int32)))


@functools.cache
def wanted(kind: LouisKVConfig) -> list[tuple[ByHand, np.ndarray]]:
    """The rule by hand over the last 28 tokens of each row and what they find, `[28, 4, 8]`."""
    q, k, v = given()
    made = []
    for b, n in enumerate(LENGTHS):
        own = ByHand(kind, k[b, :n], v[b, :n], 0.4)
        made.append((own, np.stack([own.step(*(x[b, n + i] for x in (q, k, v))) for i in range(28)])))
    return made


def later(cache: Any, count: int) -> tuple[list[Any], np.ndarray]:
    """Queries, keys and values of the `count` tokens of each row behind what it holds, and where they stand."""
    at = np.asarray(cache.length)[:, None] + np.arange(count)
    return [jnp.asarray(np.take_along_axis(x, np.minimum(at, 69)[..., None, None], 1)) for x in given()], at


@jax.jit
def attended(cache: Any, q: Any, k: Any, v: Any, window: Any) -> tuple[Any, Any]:
    return cache.attend(0, q, k, v, window, scale=0.4)      # type: ignore[no-any-return]


@jax.jit
def committed(cache: Any, entry: Any, slots: Any) -> Any:
    return cache.commit([entry], slots)


KINDS = [KIND, dataclasses.replace(KIND, cut=False, tau=0.0), dataclasses.replace(KIND, tau=-2.0, buffer=4),
         dataclasses.replace(KIND, tau=2.0, budget=5), dataclasses.replace(KIND, buffer=1)]


@pytest.mark.wide(but=("5-kind3", "1-kind3", "1-kind1"))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 5])
def test_each_token_reads_what_the_rule_reads(kind: LouisKVConfig, width: int) -> None:
    """One by one, and in windows that end where the cache says. Rows of other lengths; no token turns but the first one
    with a `tau` of -2, and all do with 2."""
    cache, found = settled(kind), np.full((3, 28, 4, 8), np.nan)
    done = np.zeros(3, int)
    while (done < 28).any():
        (q, k, v), at = later(cache, width)
        out, entry = attended(cache, q, k, v, causal(jnp.zeros((3, width), jnp.int32), cache.length))
        count = np.minimum(np.minimum(np.asarray(cache.max_commit()), width), 28 - done)
        assert (np.asarray(cache.max_commit()) >= 1).all()
        for b in range(3):
            found[b, done[b]:done[b] + count[b]] = out[b, :count[b]]
        cache = committed(cache, entry, jnp.where(jnp.arange(width) < count[:, None], at, -1))
        done += count
    for b, (own, outs) in enumerate(wanted(kind)):
        np.testing.assert_allclose(found[b], outs, atol=2e-5)
        held = cache.retrieved[0]
        chosen = [sorted(x for x in row if x >= 0) for row in np.asarray(held.chosen[b]).tolist()]
        assert chosen == [sorted(x) for x in own.chosen]


def test_the_rows_reuse_choices_and_tell_heads_apart() -> None:
    """Choices that are used again, segments that are read when they have left the buffer, and heads that differ."""
    own, short = wanted(KIND)[0][0], wanted(KIND)[1][0]
    assert 4 < len(own.turns) < 15 < len(wanted(KIND)[2][0].turns) < 28
    far = [i for at, read in enumerate(short.read, 23) for i in read[0] + read[1] if 23 <= i < at - KIND.buffer]
    assert far and any(one != other for one, other in own.read)
    assert all(len(read) <= 2 + 9 + 5 for each in own.read for read in each)
    unturned = wanted(dataclasses.replace(KIND, tau=-2.0, buffer=4))[0][0]
    assert unturned.turns == [40] and [len(x) for x in unturned.pool[0][-7:]] == [4] * 7


@pytest.mark.wide
def test_nodes_of_a_tree_read_what_their_own_path_says() -> None:
    """Two branches behind a trunk, at once and level by level."""
    cache = settled(KIND)
    for _ in range(3):
        (q, k, v), at = later(cache, 1)
        _, entry = attended(cache, q, k, v, causal(jnp.zeros((3, 1), jnp.int32), cache.length))
        cache = committed(cache, entry, jnp.asarray(at))
    assert (cache.max_commit() >= 3).all()
    (q, k, v), _ = later(cache, 5)
    parent = [-1, 0, 0, 1, 2]       # nodes 1 and 3 are one branch, 2 and 4 the other
    depth = jnp.array([0, 1, 1, 2, 2])
    sees = np.eye(5, dtype=bool)
    for node, above in enumerate(parent):
        sees[node] |= above >= 0 and sees[above]
    positions = cache.length[:, None] + depth
    tree = Window(tokens=jnp.zeros((3, 5), jnp.int32), positions=positions, mask=jnp.asarray(sees)[None],
                  live=jnp.ones((3, 5), bool))
    out, entry = attended(cache, q, k, v, tree)
    buffer, levels = cache.tree_buffer([entry], 5), []
    for level in ([0], [1, 2], [3, 4]):
        pick = lambda x, level=level: x[:, jnp.array(level)]
        window = Window(tokens=jnp.zeros((3, len(level)), jnp.int32), positions=pick(positions),
                        mask=jnp.eye(len(level), dtype=bool)[None], live=jnp.ones((3, len(level)), bool))
        seen = jnp.broadcast_to(jnp.asarray(sees & ~np.eye(5, dtype=bool))[jnp.array(level)], (3, len(level), 5))
        got, new = attended(buffer.seen_by(seen), pick(q), pick(k), pick(v), window)
        buffer = buffer.append([new], pick(positions), jnp.int32(level[0]))
        levels.append(got)
    np.testing.assert_allclose(jnp.concatenate(levels, 1), out, atol=1e-5)
    turns = []
    for b, n in enumerate(LENGTHS):
        for path in ([0, 1, 3], [0, 2, 4]):
            own = ByHand(KIND, given()[1][b, :n], given()[2][b, :n], 0.4)
            for i in range(3):
                own.step(*(x[b, n + i] for x in given()))
            for node in path:
                np.testing.assert_allclose(out[b, node], own.step(*(np.asarray(x[b, node]) for x in (q, k, v))),
                                           atol=2e-5)
            turns.append(own.turns)
            slots = jnp.full((3, 5), -1).at[b, jnp.array(path)].set(positions[b, jnp.array(path)])
            held = committed(cache, entry, slots).retrieved[0]
            assert [sorted(x for x in row if x >= 0) for row in held.chosen[b].tolist()] == [
                sorted(x) for x in own.chosen]
    assert len({tuple(each) for each in turns}) > 3


class Layers:
    """What a model reads in a cache's place: its layers by hand, the tokens of one row one by one."""

    inputs = None

    def __init__(self, made: list[ByHand]) -> None:
        self.made = made

    def attend(self, layer: int, q: Any, k: Any, v: Any, window: Any, **options: Any) -> tuple[Any, tuple[()]]:
        out = self.made[layer].step(*(np.asarray(x)[0, 0] for x in (q, k, v)))
        return jnp.asarray(out, jnp.float32)[None, None], ()


@pytest.mark.wide
@pytest.mark.parametrize("algorithm", [None, LOOKUP, TREE], ids=["plain", "chain", "tree"])
def test_a_llama_says_what_it_says_with_the_rule_by_hand(algorithm: Any) -> None:
    """Two layers, each with its own boundaries; the model is run token by token over what was decoded."""
    lm, new = DEEP, 16
    kind = dx.caches.make("louiskv", budget=9, tau=0.1, cluster_size=4, sinks=2, buffer=6)
    out = dx.generate(lm, PROMPTS[:2], cache=kind, max_new_tokens=new, logprobs=0, algorithm=algorithm)
    turns = []
    for b, prompt in enumerate(PROMPTS[:2]):
        dense: Any = lm.model.init_cache(1, 64, params=lm.params)
        n = len(prompt) - 1
        window = causal(jnp.asarray([prompt[:-1]], jnp.int32), jnp.zeros(1, jnp.int32)).replace(is_prefill=True)
        read = dense.commit(lm.model.apply(lm.params, window, dense).entries, jnp.arange(n)[None])
        d = read.widths[0]
        parts = [np.asarray(x)[0, :, :n].swapaxes(0, 1) for x in read.kv]
        own = Layers([ByHand(kind, x[..., :d], x[..., d:], d ** -0.5) for x in parts])
        text = [prompt[-1], *out.tokens[b].tolist()]
        for i, token in enumerate(text[:-1]):
            window = causal(jnp.asarray([[token]], jnp.int32), jnp.asarray([n + i], jnp.int32))
            logits = np.asarray(lm.model.apply(lm.params, window, own).logits())[0, 0]      # type: ignore[arg-type]
            assert int(logits.argmax()) == text[i + 1]
            np.testing.assert_allclose(out.logprobs.raw[b, i], logits.max() - np.log(np.exp(logits).sum()), atol=1e-3)
        turns += [layer.turns for layer in own.made]
    assert all(1 < len(each) < new for each in turns) and turns[0] != turns[1]
    if algorithm is not None:
        assert out.stats.accepted.sum() > 0


@pytest.mark.wide
def test_drafts_may_read_it_and_layers_that_read_everything_have_no_limit() -> None:
    cache = dx.caches.make("louiskv", skip=(0,))([KVLayer(2, 8)], 1, 16, jnp.float32)
    assert isinstance(cache, LouisKVCache) and cache.max_commit() is None
    drafts = dx.Speculative(dx.drafts.OwnCache(dx.caches.make("louiskv", budget=9, buffer=6, tau=0.1)))
    plain = dx.generate(SMALL, PROMPTS, max_new_tokens=8)
    assert dx.generate(SMALL, PROMPTS, max_new_tokens=8, algorithm=drafts).tokens.tolist() == plain.tokens.tolist()
