"""Prompts of which segments read columns and diagonals."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.cache import KVLayer, dense
from decodax.caches.prefill.minference import MInferenceConfig, SegmentReader, read_sizes
from decodax.caches.prefill.vertical_slash import farthest_below, last_weights, next_tile, pattern, step_of
from decodax.core.window import causal
from decodax.models import Transformer, dual_chunk
from decodax.pallas_kernels.window_attention import Added, FixedBias
from tests.caches.small import DEEP, PROMPTS

KIND = MInferenceConfig(vertical_size=6, slash_size=5, segment_size=16, last_q=4, first=2, near=2, block_size=4,
                        threshold=0)


@dataclasses.dataclass(frozen=True)
class Turned(FixedBias):
    """Something that goes by queries, keys and both positions."""

    def __call__(self, q: jax.Array, positions: jax.Array) -> Added:
        def added(k: jax.Array, where: jax.Array) -> jax.Array:
            keys = jnp.repeat(k, q.shape[1] // k.shape[1], 1)
            return jnp.einsum("bhqd,bhkd->bhqk", q, keys) * jnp.sin(0.3 * (positions - where)) - 0.01 * where

        return added


def read(kind: MInferenceConfig, parts: list[np.ndarray], lengths: list[int], bias: Any = None) -> np.ndarray:
    """What the queries of a layer, `f[B, T, H, d]`, read by segments: `f[B, T, H, e]`."""
    (B, T), G, d = parts[0].shape[:2], parts[1].shape[2], parts[1].shape[3]
    shapes = (KVLayer(G, d, queries=parts[0].shape[2]),)
    base, S, length = dense(shapes, B, -(-T // 128) * 128, jnp.float32), kind.segment_size, jnp.array(lengths)
    S = -(-S // step_of(S, kind.block_size)) * step_of(S, kind.block_size)

    @jax.jit
    def one(start: Any, base: Any, own: Any) -> Any:
        stop = jnp.minimum(length, start + kind.segment_size)
        window = causal(jnp.zeros((B, S), jnp.int32), jnp.broadcast_to(start, (B,)))
        reading = SegmentReader(base, kind, jnp.ones(B, bool), start, stop, shapes)
        out, entry = reading.attend(0, *own, window, scale=d ** -0.5, bias=bias)
        return out, base.commit([entry], jnp.where(window.positions < stop[:, None], window.positions, -1))

    out = np.zeros(parts[0].shape)
    for start in range(0, T, kind.segment_size):
        own = [np.pad(x[:, start:start + S], ((0, 0), (0, max(start + S - T, 0)), (0, 0), (0, 0))) for x in parts]
        some, base = one(jnp.int32(start), base, own)
        stop = min(start + kind.segment_size, T)
        out[:, start:stop] = np.asarray(some)[:, :stop - start]
    return out


def seen(columns: list[int], distances: list[int], end: int, block: int, size: int) -> np.ndarray:
    """Which of `size` keys the block of queries that ends at `end` reads, but for those behind each: the converter's
    rule."""
    keys = np.zeros(size, bool)
    keys[columns] = True
    tiles: list[int] = []
    for distance in sorted((n for n in distances if n < end), reverse=True):
        reach = max(end - distance, block)
        if not tiles or reach > tiles[-1] + block:
            tiles.append(reach)
        elif reach > tiles[-1]:
            tiles.append(tiles[-1] + block)
    for tile in tiles:
        keys[tile - block:tile] = True
    return keys


def softmax(s: np.ndarray) -> np.ndarray:
    weights = np.exp(s - s.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def written_out(kind: MInferenceConfig, q: np.ndarray, k: np.ndarray, v: np.ndarray, sizes: Any,
                bias: Any) -> np.ndarray:
    """One head's queries `f[T, d]`, its segments one after another."""
    T, out, place = len(q), np.zeros((len(q), v.shape[1])), np.arange(len(q))
    s = q @ k.T * q.shape[1] ** -0.5
    if bias is not None:
        added = bias(q[None, None], place[None, None, :, None])
        s = s + np.asarray(added(k[None, None], place[None, None, None]))[0, 0]
    s = np.where(place[:, None] >= place, s, -np.inf)
    for start in range(0, T, kind.segment_size):
        stop = min(start + kind.segment_size, T)
        last = np.arange(max(stop - kind.last_q, start), stop)
        weights = softmax(s[last])[:, :stop]
        vertical = weights.sum(0)
        slash = np.array([sum(weights[i, at - n] for i, at in enumerate(last) if at >= n) for n in range(stop)])
        vertical[:kind.first], slash[:kind.near] = np.inf, np.inf
        columns, distances = (np.argsort(-x, kind="stable")[:n].tolist()
                              for x, n in zip((vertical, slash), sizes, strict=True))
        for i in range(start, stop):
            end = start + ((i - start) // kind.block_size + 1) * kind.block_size
            out[i] = softmax(np.where(seen(columns, distances, end, kind.block_size, T), s[i], -np.inf)) @ v
    return out


def random_parts(B: int, T: int, H: int, G: int, d: int, seed: int = 0) -> list[np.ndarray]:
    r = np.random.RandomState(seed)
    return [2 * r.standard_normal((B, T, n, d)).astype(np.float32) for n in (H, G, G)]


@pytest.mark.parametrize("bias", [None, Turned()], ids=("plain", "bias"))
def test_queries_read_what_the_rule_says_of_rows_of_any_length(bias: Any) -> None:
    """Of one row the last segment is shorter than the queries that are asked, and of one there is none."""
    kind = dataclasses.replace(KIND, heads=read_sizes([{"0": ["vertical_and_slash", 3, 7, 0.9],
                                                        "3": ["vertical_and_slash", 9, 2, 0.8]}]))
    lengths, parts = [45, 34, 13], random_parts(3, 48, 4, 2, 8)
    out = read(kind, parts, lengths, bias)
    for row, length in enumerate(lengths):
        for h, sizes in enumerate(((3, 7), (6, 5), (6, 5), (9, 2))):
            own = [x[row, :length, h // (4 // x.shape[2])] for x in parts]
            wanted = written_out(kind, *own, sizes, bias)       # type: ignore[arg-type]
            np.testing.assert_allclose(out[row, :length, h], wanted, atol=2e-5, err_msg=f"row {row}, head {h}")


@pytest.mark.wide
def test_patterns_and_outputs_are_those_of_the_authors_kernels() -> None:
    """Of 700 tokens in a segment of 512 and one of 188, and in tiles of 16 instead of 64."""
    wanted = json.loads((Path(__file__).parents[1] / "expected" / "retrieval.json").read_text())["minference"]
    r, T, sizes = np.random.RandomState(0), 700, ((40, 104), (30, 110), (60, 100), (45, 120))
    q, k, v = (r.standard_normal((1, T, n, 8)).astype(np.float32).round(3) for n in (4, 2, 2))
    q *= 2
    for number, (start, end) in enumerate(((0, 512), (512, 700))):
        for h, (vertical, slash) in enumerate(sizes):
            at = jnp.array([end]), jnp.int32(vertical), jnp.int32(slash)
            weights = last_weights(q[:, end - 64:end, h], k[:, :, h // 2], jnp.int32(start), at[0], scale=8 ** -0.5,
                                   bias=None)
            columns, distances = pattern(weights, *at, (64, 128), 30, 100)
            for found, always, name in ((columns, 30, "columns"), (distances, 100, "distances")):
                assert found[0, :always].tolist() == list(range(always))
                assert sorted(x for x in found[0, always:].tolist() if x >= 0) == wanted[name][number][h]
            behind, tiles, there = jnp.zeros((1, 1), jnp.int32), [], True
            while there:
                behind, more = next_tile(farthest_below(distances, T), jnp.array([-(-end // 16) * 16]), behind, 16)
                there = bool(more[0, 0])
                tiles += [int(behind[0, 0]) - 16] * there
            tiles = [tile for tile in tiles if tile < end]      # the kernel leaves out one behind the last key
            assert tiles == wanted["tiles"][number][h]
    table = [{str(h): ["vertical_and_slash", *n, 1.0] for h, n in enumerate(sizes)}]
    kind = MInferenceConfig(heads=read_sizes(table), segment_size=512, block_size=16, threshold=0)
    out = read(kind, [q, k, v], [T])[0].sum(-1)[19::20]
    np.testing.assert_allclose(out.T, wanted["sums"], atol=2e-4)


CHUNKED = dataclasses.replace(DEEP, model=Transformer(dual_chunk(DEEP.model.config, 16, 4)))
SIZES = dict(vertical_size=3, slash_size=4, segment_size=16, last_q=4, first=2, near=2, block_size=4)


def scores(lm: Any, cache: Any) -> np.ndarray:
    return np.asarray(dx.generate(lm, PROMPTS, cache=cache, max_new_tokens=4, logprobs=0).logprobs.raw)


@pytest.mark.wide
def test_all_columns_are_dense_attention_with_dual_chunk_attention_too() -> None:
    whole = scores(CHUNKED, None)
    everything = dx.caches.make("minference", **{**SIZES, "vertical_size": 64, "threshold": 0})
    np.testing.assert_allclose(scores(CHUNKED, everything), whole, atol=2e-5)
    part = scores(CHUNKED, dx.caches.make("minference", **SIZES, threshold=0))
    assert (np.abs(part - whole).max(1) > 1e-3)[:2].all()


@functools.cache
def dense_scores() -> np.ndarray:
    return scores(DEEP, None)


@pytest.mark.wide
@pytest.mark.parametrize("threshold", [25, 26, 40, 41])
def test_prompts_up_to_the_threshold_read_everything_beside_longer_ones(threshold: int) -> None:
    changed = np.abs(scores(DEEP, dx.caches.make("minference", **SIZES, threshold=threshold)) - dense_scores()).max(1)
    assert (changed > 1e-4).tolist() == [len(prompt) > threshold for prompt in PROMPTS]


@pytest.mark.wide
def test_segments_of_several_steps_end_in_a_narrow_one() -> None:
    """Of 1100 tokens, a segment of 1024 and one of 76; both as those of one step read them."""
    kind = MInferenceConfig(vertical_size=20, slash_size=40, segment_size=1024, last_q=8, first=2, near=4,
                            block_size=16, threshold=0)
    lm = dataclasses.replace(DEEP, model=Transformer(dataclasses.replace(DEEP.model.config, context=2048)))
    prompt = np.random.default_rng(3).integers(0, 16, 1101).tolist()
    run = lambda cache, prompts: np.asarray(dx.generate(lm, prompts, cache=cache, max_new_tokens=4,
                                                        logprobs=0).logprobs.raw)
    alone, both = run(kind, [prompt]), run(kind, [prompt[:300], prompt])
    np.testing.assert_allclose(alone[0], both[1], atol=2e-5)
    parts = random_parts(1, 1100, 2, 1, 8)
    out = read(kind, parts, [1100])
    for h in range(2):
        wanted = written_out(kind, parts[0][0, :, h], parts[1][0, :, 0], parts[2][0, :, 0], (20, 40), None)
        np.testing.assert_allclose(out[0, :, h], wanted, atol=5e-5)


def test_a_table_of_sizes_is_read_from_a_file(tmp_path: Path) -> None:
    """Heads that it does not name, and layers behind its last one, have the sizes of `vertical` and `slash`."""
    (tmp_path / "sizes.json").write_text(json.dumps([{"1": ["vertical_and_slash", 500, 700, 0.99]}]))
    kind = dx.caches.make("minference", vertical_size=40, slash_size=8, heads=str(tmp_path / "sizes.json"))
    assert isinstance(kind, MInferenceConfig)
    assert kind.sizes(0, 2).tolist() == [[40, 500], [100, 700]] and kind.sizes(1, 2).tolist() == [[40, 40], [100, 100]]
