"""Prefixes in files: what is coded comes back, and in few bytes."""

from __future__ import annotations

import io
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.kvcache import Prefix, load_prefix, read_prefix, save_prefix
from decodax.kvcache.cachegen import CacheGen
from decodax.kvcache.entropy import decoded, encoded, frequencies
from tests.kvcache.test_policies import DEEP, PROMPTS

pytestmark = pytest.mark.wide


@pytest.mark.parametrize(("length", "count"), [(0, 3), (1, 1), (300, 1), (400, 7), (400, 200)])
def test_symbols_come_back_and_take_the_bits_of_their_entropy(length: int, count: int) -> None:
    random = np.random.default_rng(count)
    symbols = np.minimum(random.geometric(0.4, (length, 50)) - 1, count - 1)
    share = frequencies(symbols, count)
    assert (share.sum(1) == 1 << 16).all()
    state, words = encoded(symbols, share)
    np.testing.assert_array_equal(decoded(state, words, share, length), symbols)
    if length > 100 and count > 1:
        p = share / share.sum(1, keepdims=True)
        bits = -np.log2(p[np.arange(50), symbols]).sum()
        assert bits <= 16 * len(words) + 16 * 50 <= bits + 50 * 32
        with pytest.raises(ValueError, match=r"^words: got too few"):
            decoded(state, words[:-1], share, length)


def written(prefix: Prefix, **given: Any) -> tuple[Prefix, int]:
    file = io.BytesIO()
    save_prefix(prefix, file, **given)
    return load_prefix(io.BytesIO(file.getvalue())), len(file.getvalue())


def alike(tokens: int = 600) -> Prefix:
    """Tokens whose keys and values drift slowly."""
    random = np.random.default_rng(0)
    drift = lambda: (0.1 * random.standard_normal((2, tokens, 64))).cumsum(1).astype(np.float32)
    return Prefix(tuple(range(tokens)), tuple(drift() for _ in range(3)))


def test_a_file_holds_the_rule() -> None:
    """Anchors in 8 bits, the rest within half a step of its channel, and coarser in deeper layers."""
    held = alike()
    back, size = written(held)
    assert back.tokens == held.tokens and size < 0.16 * sum(x.nbytes for x in held.kv)
    off = []
    for x, y, step in zip(held.kv, back.kv, (0.5, 1.0, 1.5), strict=True):
        first = x[:, ::10]
        assert (np.abs(y[:, ::10] - first) <= np.abs(first).max((0, 2))[None, :, None] / 127 * 0.501).all()
        behind = np.arange(600) % 10 > 0
        apart = x[:, behind] - np.repeat(y[:, ::10], 9, 1)
        assert (np.abs(y[:, behind] - x[:, behind]) <= 0.501 * step * apart.std(1, keepdims=True)).all()
        off.append(np.square(y - x).mean())
    assert off[0] < off[1] < off[2]


def test_bytes_of_smaller_steps_give_the_tokens_of_the_text() -> None:
    held = read_prefix(DEEP, PROMPTS[0])
    back, _ = written(held, group=1)
    fine, _ = written(held, steps=(0.02,) * 3)
    for own in (back, fine):
        assert all(np.abs(a - b).max() < 0.01 * np.abs(b).max() for a, b in zip(own.kv, held.kv, strict=True))
    options: dict[str, Any] = dict(max_new_tokens=8)
    want = dx.generate(DEEP, [[3, 1], [4]], context=PROMPTS[0], **options)
    assert dx.generate(DEEP, [[3, 1], [4]], context=fine, **options).tokens.tolist() == want.tokens.tolist()


def test_a_part_that_is_written_stays_where_it_was_read() -> None:
    held = read_prefix(DEEP, PROMPTS[0])
    part, _ = written(held[2:])
    assert part.begin == 2 and part.tokens == held.tokens[2:]
    with pytest.raises(ValueError, match="began elsewhere"):
        part.check(DEEP.model)


def test_what_it_cannot_read_or_write_is_refused(tmp_path: Any) -> None:
    short = Prefix((5,), (np.ones((1, 1, 4), np.float32).astype(jnp.bfloat16),))
    save_prefix(short, tmp_path / "one.npz")
    one = load_prefix(tmp_path / "one.npz")
    assert one.tokens == (5,) and one.kv[0].dtype == jnp.bfloat16 and (one.kv[0] == 1).all()
    (tmp_path / "other.npz").write_bytes(b"none")
    with pytest.raises(ValueError, match=r"file: got no prefix|pickle"):
        load_prefix(tmp_path / "other.npz")
    with pytest.raises(ValueError, match=r"^group, steps, most: got 0"):
        CacheGen(0)
