"""Prefixes in files: what is coded comes back, and in few bytes."""

import io
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.caches import Prefix, load_prefix, read_prefix, save_prefix
from decodax.caches.prefix.cachegen import CacheGen
from decodax.caches.prefix.entropy import WHOLE, decoded, encoded, frequencies, from_16_bits, in_16_bits
from decodax.caches.prefix.prefix import check_layers
from tests.caches.small import DEEP, PROMPTS


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


def stored(symbols: np.ndarray, count: int) -> np.ndarray:
    """Symbols from what a file holds of them."""
    share = frequencies(symbols, count)
    assert (share.sum(1) == WHOLE).all() and (share >= 0).all()
    np.testing.assert_array_equal(from_16_bits(in_16_bits(share)), share)
    return decoded(*encoded(symbols, share), from_16_bits(in_16_bits(share)), len(symbols))


def test_streams_of_extreme_frequencies_come_back() -> None:
    """Beside one another: one symbol alone, all but one or two of the tokens the same, and two halves."""
    at = np.arange(WHOLE)
    long = np.stack([at * 0 + 1, (at == 9) * 2, (at == 0) + (at == WHOLE - 1), at.clip(0, 2), at % 2], 1)
    assert frequencies(long, 3).max(1).tolist() == [WHOLE, WHOLE - 1, WHOLE - 2, WHOLE - 2, WHOLE // 2]
    np.testing.assert_array_equal(stored(long, 3), long)


@pytest.mark.parametrize(("symbols", "count"), [
    (np.zeros(0, np.int64), 3), (np.array([4]), 7), (np.arange(500), 500),
    (np.concatenate([np.arange(300), np.arange(2_000) % 2]), 300)])
def test_short_streams_come_back(symbols: np.ndarray, count: int) -> None:
    np.testing.assert_array_equal(stored(symbols[:, None], count), symbols[:, None])


def test_as_many_symbols_as_there_are_shares_have_one_each() -> None:
    assert (frequencies(np.arange(WHOLE)[:, None], WHOLE) == 1).all()
    with pytest.raises(ValueError, match=r"^symbols: got 65537 in a stream, takes at most 65536"):
        frequencies(np.arange(WHOLE + 1)[:, None], WHOLE + 1)


def test_streams_of_random_frequencies_come_back() -> None:
    """Beside one another, from nearly even to nearly one symbol alone."""
    random = np.random.default_rng(0)
    for _ in range(8):
        count, length = int(random.integers(1, 40)), int(random.integers(1, 400))
        chances = random.dirichlet(np.full(count, 10.0 ** random.uniform(-3, 1)), 30)
        symbols = np.stack([random.choice(count, length, p=p) for p in chances], 1)
        np.testing.assert_array_equal(stored(symbols, count), symbols)


def test_channels_that_are_nearly_still_come_back_from_a_file() -> None:
    """Of 65,536 differences none, one and two are not 0."""
    group, tokens = 2, 2 * WHOLE
    x = np.zeros((1, tokens, 3), np.float32)
    x[0, 1, 1] = x[0, 1:5:group, 2] = 1.0
    file = io.BytesIO()
    CacheGen(group, most=2_000).save(Prefix((0,) * tokens, (x,)), file)
    back = load_prefix(io.BytesIO(file.getvalue()))
    np.testing.assert_allclose(back.kv[0], x, atol=0.01)


def written(prefix: Prefix, **given: Any) -> tuple[Prefix, int]:
    file = io.BytesIO()
    save_prefix(prefix, file, **given)
    return load_prefix(io.BytesIO(file.getvalue())), len(file.getvalue())


def alike(tokens: int = 600) -> Prefix:
    """Tokens whose keys and values drift slowly."""
    random = np.random.default_rng(0)
    drift = lambda: (0.1 * random.standard_normal((2, tokens, 64))).cumsum(1).astype(np.float32)
    return Prefix(tuple(range(tokens)), tuple(drift() for _ in range(3)))


@pytest.mark.wide
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
        wrong = np.abs(y[:, behind] - x[:, behind]) / (step * apart.std(1, keepdims=True))
        assert 0.49 < wrong.max() <= 0.501          # in steps of the layer: neither larger ones nor smaller ones
        off.append(np.square(y - x).mean())
    assert off[0] < off[1] < off[2]


@pytest.mark.wide
def test_bytes_of_smaller_steps_give_the_tokens_of_the_text() -> None:
    held = read_prefix(DEEP, PROMPTS[0])
    back, _ = written(held, group=1)
    fine, _ = written(held, steps=(0.02,) * 3)
    for own in (back, fine):
        assert all(np.abs(a - b).max() < 0.01 * np.abs(b).max() for a, b in zip(own.kv, held.kv, strict=True))
    options: dict[str, Any] = dict(max_new_tokens=8)
    want = dx.generate(DEEP, [[3, 1], [4]], context=PROMPTS[0], **options)
    assert dx.generate(DEEP, [[3, 1], [4]], context=fine, **options).tokens.tolist() == want.tokens.tolist()


@pytest.mark.wide
def test_a_part_that_is_written_stays_where_it_was_read() -> None:
    held = read_prefix(DEEP, PROMPTS[0])
    part, _ = written(held[2:])
    assert part.begin == 2 and part.tokens == held.tokens[2:]
    with pytest.raises(ValueError, match="began elsewhere"):
        check_layers(part, DEEP.model)


def test_files_and_sizes_out_of_range_are_refused_by_name(tmp_path: Any) -> None:
    short = Prefix((5,), (np.ones((1, 1, 4), np.float32).astype(jnp.bfloat16),))
    save_prefix(short, tmp_path / "one.npz")
    one = load_prefix(tmp_path / "one.npz")
    assert one.tokens == (5,) and one.kv[0].dtype == jnp.bfloat16 and (one.kv[0] == 1).all()
    (tmp_path / "other.npz").write_bytes(b"none")
    with pytest.raises(ValueError, match=r"file: got no prefix|pickle"):
        load_prefix(tmp_path / "other.npz")
    with pytest.raises(ValueError, match=r"^group, steps, most: got 0"):
        CacheGen(0)
    with pytest.raises(ValueError, match=r"^group, steps, most: got 10, .* and 32768, takes .* and 1 to 32767"):
        CacheGen(most=1 << 15)
