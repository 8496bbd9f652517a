"""Entropy coding of many parallel streams of small integers, with asymmetric numeral systems (Duda, 2009). As in
arithmetic coding, frequent symbols of a stream get short codes."""

from __future__ import annotations

import numpy as np

WHOLE = 1 << 16
"""Sum of the frequencies of a stream."""


def frequencies(symbols: np.ndarray, count: int) -> np.ndarray:
    """Returns the frequency of each symbol below `count` in each stream, `i64[C, count]`, scaled so that the sum is
    `WHOLE`.

    A symbol that occurs has a frequency of at least 1.

    Args:
        symbols: `[T, C]`, `C` streams of `T` symbols.
        count: number of different symbols.

    Raises:
        ValueError: a stream has more than `WHOLE` different symbols.
    """
    T, C = symbols.shape
    if not T:
        return np.full((C, count), WHOLE // count) + (np.arange(count) < WHOLE % count)
    seen = np.zeros((C, count), np.int64)
    np.add.at(seen, (np.arange(C)[None].repeat(T, 0), symbols), 1)
    kinds = (seen > 0).sum(1)
    if (most := max(kinds, default=0)) > WHOLE:
        raise ValueError(f"symbols: got {most} in a stream, takes at most {WHOLE}")
    # one for each symbol that occurs, and the rest in proportion; the rounding error goes to the most frequent symbol
    share = (seen > 0) + seen * (WHOLE - kinds)[:, None] // T
    share[np.arange(C), seen.argmax(1)] += WHOLE - share.sum(1)
    return share


def in_16_bits(share: np.ndarray) -> np.ndarray:
    """Converts frequencies to `u16[C, count]`. The frequency `WHOLE` of a stream with only one symbol does not fit, and
    is written as `WHOLE - 1`; `from_16_bits` recognizes this case by the sum of the stream."""
    return (share - (share == WHOLE)).astype(np.uint16)


def from_16_bits(stored: np.ndarray) -> np.ndarray:
    """Inverts `in_16_bits`, and returns frequencies `i64[C, count]`."""
    share = stored.astype(np.int64)
    return share + ((share == WHOLE - 1) & (share.sum(1, keepdims=True) == WHOLE - 1))


def encoded(symbols: np.ndarray, share: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Encodes `C` streams of `T` symbols each by asymmetric numeral systems.

    Args:
        symbols: `[T, C]`, the symbols, from 0 to `count - 1`.
        share: `[C, count]`, the frequency of each symbol in each stream, from `frequencies`.

    Returns:
        The final state of the coder of each stream, `u32[C]`, and the coded words of all streams, `u16[n]`: the first
        two arguments of `decoded`.
    """
    T, C = symbols.shape
    each, begin = np.arange(C), np.cumsum(share, 1) - share
    state, words = np.full(C, WHOLE, np.uint64), []
    for t in range(T - 1, -1, -1):
        f, low = (x[each, symbols[t]].astype(np.uint64) for x in (share, begin))
        full = state >= f << np.uint64(16)
        words.append((state[full] & np.uint64(0xFFFF)).astype(np.uint16))
        state = np.where(full, state >> np.uint64(16), state)
        state = (state // f << np.uint64(16)) + state % f + low
    return state.astype(np.uint32), np.concatenate([*words[::-1], np.zeros(0, np.uint16)])


def decoded(state: np.ndarray, words: np.ndarray, share: np.ndarray, length: int) -> np.ndarray:
    """Inverts `encoded`, and returns symbols `i64[length, C]`.

    Args:
        state, words: the results of `encoded`.
        share: its argument.
        length: number of symbols of a stream.

    Raises:
        ValueError: there are too few words, or too many.
    """
    C = len(share)
    each, ends = np.arange(C), np.cumsum(share, 1)
    begin, state, at = ends - share, state.astype(np.uint64), 0
    found = np.zeros((length, C), np.int64)
    for t in range(length):
        slot = (state & np.uint64(0xFFFF)).astype(np.int64)
        symbol = (slot[:, None] >= ends).sum(1)
        found[t] = symbol
        state = share[each, symbol].astype(np.uint64) * (state >> np.uint64(16)) \
            + (slot - begin[each, symbol]).astype(np.uint64)
        empty = state < WHOLE
        more = words[at:at + int(empty.sum())]
        if len(more) < empty.sum():
            raise ValueError("words: got too few of them; the file has been cut")
        at += len(more)
        state[empty] = state[empty] << np.uint64(16) | more.astype(np.uint64)
    if at < len(words):
        raise ValueError("words: got more than the text takes; the file is not whole")
    return found
