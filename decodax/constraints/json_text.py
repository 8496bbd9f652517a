"""Parts of automata for JSON texts: characters of strings, integers, decimal numbers."""

from __future__ import annotations

from decodax.constraints.builder import Builder, Part
from decodax.constraints.dfa import Dfa
from decodax.constraints.expressions import TOP, characters, regex

DIGITS = 15
"""Largest number of digits of an integer and of a fraction, which is what a float holds."""


def written(b: Builder) -> Part:
    """Adds a part for one character within a JSON string, plain or escaped, and returns it: its first and last
    state."""
    digit = lambda: b.ranges((48, 57), (65, 70), (97, 102))
    high = lambda: b.seq(b.ranges((68, 68), (100, 100)), b.ranges((56, 57), (65, 66), (97, 98)), digit(), digit())
    low = lambda: b.seq(b.ranges((68, 68), (100, 100)), b.ranges((67, 70), (99, 102)), digit(), digit())
    plain = b.any_of(b.seq(b.ranges((48, 57), (65, 67), (69, 70), (97, 99), (101, 102)), digit(), digit(), digit()),
                     b.seq(b.ranges((68, 68), (100, 100)), b.ranges((48, 55)), digit(), digit()))
    pair = b.seq(high(), b.bytes(b"\\u"), low())
    escape = b.any_of(b.ranges(*[(x, x) for x in b'"\\/bfnrt']), b.seq(b.bytes(b"u"), b.any_of(plain, pair)))
    return b.any_of(characters(b, [(0x20, 0x21), (0x23, 0x5B), (0x5D, TOP)]), b.seq(b.bytes(b"\\"), escape))


SHORT = {0x22: b'\\"', 0x5C: b"\\\\", 0x08: b"\\b", 0x09: b"\\t", 0x0A: b"\\n", 0x0C: b"\\f", 0x0D: b"\\r"}


def escaped(b: Builder, texts: Dfa) -> Part:
    """Adds a part for the texts of an automaton inside a JSON string. Characters that must be escaped are escaped in
    one way, and no others."""
    states, end = [b.state() for _ in range(len(texts))], b.state()
    for i, row in enumerate(texts.next.tolist()):
        if texts.final[i]:
            b.join(states[i], end)
        for byte, target in enumerate(row):
            if target < 0:
                continue
            if byte in SHORT or byte < 0x20:
                part = b.bytes(SHORT.get(byte, b"\\u%04x" % byte))
                b.join(states[i], part[0])
                b.join(part[1], states[target])
            else:
                b.moves[states[i]].append((byte, byte, states[target]))
    return states[0], end


def integers(b: Builder, first: int, last: int) -> Part:
    """Adds a part for the integers from `first` to `last`, in decimal notation."""
    parts = []
    if first < 0:
        parts.append(b.seq(b.bytes(b"-"), _digits(b, max(1, -last), -first)))
    if last >= 0:
        parts.append(_digits(b, max(0, first), last))
    return b.any_of(*parts)


def _digits(b: Builder, first: int, last: int) -> Part:
    """Adds a part for the integers from `first` to `last`, both at least 0, without leading zeros."""
    parts = []
    for length in range(len(str(first)), len(str(last)) + 1):
        low, high = max(first, 10 ** (length - 1) if length > 1 else 0), min(last, 10 ** length - 1)
        if low <= high:
            parts.append(_between(b, str(low), str(high)))
    return b.any_of(*parts)


def _between(b: Builder, low: str, high: str) -> Part:
    """Adds a part for the numbers between `low` and `high`, which have the same number of digits."""
    a, z = ord(low[0]), ord(high[0])
    if len(low) == 1:
        return b.ranges((a, z))
    rest, nines, zeros = len(low) - 1, "9" * (len(low) - 1), "0" * (len(low) - 1)
    if a == z:
        return b.seq(b.ranges((a, a)), _between(b, low[1:], high[1:]))
    parts = []
    inner_low, inner_high = a, z
    if low[1:] != zeros:
        parts.append(b.seq(b.ranges((a, a)), _between(b, low[1:], nines)))
        inner_low += 1
    if high[1:] != nines:
        parts.append(b.seq(b.ranges((z, z)), _between(b, zeros, high[1:])))
        inner_high -= 1
    if inner_low <= inner_high:
        parts.append(b.seq(b.ranges((inner_low, inner_high)), *[b.ranges((48, 57)) for _ in range(rest)]))
    return b.any_of(*parts)


def numbers(b: Builder, low: int, out_low: bool, high: int, out_high: bool) -> Part:
    """Adds a part for the decimal numbers between two integers, which are excluded if `out_low` or `out_high` is True.
    """
    def fraction(least: int) -> Part:
        """Adds a part for `.` and digits; with `least` 1 they are not all zero."""
        more = lambda: b.repeat(lambda: b.ranges((48, 57)), 0, DIGITS - 1)
        if not least:
            return b.seq(b.bytes(b"."), b.ranges((48, 57)), more())
        some = regex(rf"\.(?:0{{0,{DIGITS - 1}}}[1-9][0-9]{{0,{DIGITS - 1}}})")
        return b.dfa(some)

    def upwards(first: int, out_first: bool, last: int, out_last: bool) -> list[Part]:
        """Adds parts for the numbers in a range that has no negative numbers."""
        parts: list[Part] = []
        if first > last:
            return parts
        if first <= last - 1:
            if out_first:
                parts.append(b.seq(b.bytes(str(first).encode()), fraction(1)))
                if first + 1 <= last - 1:
                    parts.append(b.seq(_digits(b, first + 1, last - 1), b.maybe(fraction(0))))
            else:
                parts.append(b.seq(_digits(b, first, last - 1), b.maybe(fraction(0))))
        if not out_last and (first < last or not out_first):
            parts.append(b.seq(_digits(b, last, last), b.maybe(b.seq(b.bytes(b".0")))))
        return parts

    parts = []
    if high >= 0:
        parts += upwards(max(low, 0), out_low and low >= 0, high, out_high)
    if low < 0:
        first, out_first = (-high, out_high) if high < 0 else (0, True)         # -0 is not written
        parts += [b.seq(b.bytes(b"-"), x) for x in upwards(first, out_first, -low, out_low)]
    return b.any_of(*parts) if parts else (b.state(), b.state())
