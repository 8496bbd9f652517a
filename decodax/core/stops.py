"""Stop strings: a device automaton over the bytes of tokens, and the same rule on the host for text.

A match may cross token borders, lie in the middle of a token, or share its beginning with another stop string. Two stop
strings that overlap are told apart by which one is completed first, so the result does not depend on how the text was
cut into tokens. The prompt does not count: a row starts in the automaton's root.

The automaton is that of A. Aho and M. Corasick (1975), run over whole tokens: every token is a map from state to state.
Tokens with the same map share a column, so a table for 150,000 tokens has a few hundred columns.
"""

from __future__ import annotations

import itertools
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import AnyStr

import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.struct import Struct, struct


@struct
class StopTable(Struct):
    """The automaton of a set of stop strings over a vocabulary; made by `build`. Rows share it.

    Attributes:
        columns: `u[V]` the column of each token (u8, u16 or u32).
        next: `u[S, C]` the state after a token, with the dtype's top bit set where a stop string was completed in it.
            Both sides are padded to powers of two, so that other stop strings of about the same length do not retrace.
    """

    columns: Array
    next: Array

    @classmethod
    def build(cls, token_bytes: Sequence[bytes], stop: str | Sequence[str], size: int | None = None) -> StopTable:
        """Builds the automaton on the host; 0.1 s for a vocabulary of 150,000.

        Args:
            token_bytes: the bytes that each token adds to the text; a token that adds none leaves the state alone.
            stop: one stop string or several.
            size: entries of the model's vocabulary where it is larger than the tokenizer's.

        Raises:
            ValueError: there is no stop string, or an empty one.
        """
        delta, out = _automaton([s.encode() for s in stop_strings(stop)])
        states = len(delta)
        tokens = list(token_bytes) + [b""] * ((size or 0) - len(token_bytes))
        final, hit, pairs = _run(delta, out, tokens)

        # a column is the result from the root, whatever the state before, and exceptions to it
        room = _bucket(states, 32)
        bits = next(b for b in (8, 16, 32) if room <= 1 << (b - 1))
        code = lambda state, hit: (state + (hit.astype(np.int64) << (bits - 1))).astype(f"u{bits // 8}")
        root = code(final, hit)
        state, token, end, pair_hit = (x[np.lexsort(pairs[:2])] for x in pairs)
        coded = code(end, pair_hit)
        odd, start = np.unique(token, return_index=True)
        known: dict[tuple[int, bytes, bytes], int] = {}
        where = [known.setdefault((int(root[t]), state[i:j].tobytes(), coded[i:j].tobytes()), len(known))
                 for t, i, j in zip(odd, start, np.append(start, len(token))[1:], strict=True)]
        common, columns = np.unique(root, return_inverse=True)
        columns[odd] = len(common) + np.array(where, int)
        columns[[i for i, t in enumerate(tokens) if not t]] = len(common) + len(known)
        table = np.zeros((room, len(common) + len(known) + 1), root.dtype)
        filled, example = np.unique(columns, return_index=True)
        table[:, filled] = root[example]
        table[state, columns[token]] = coded
        table[:, -1] = np.arange(room)

        width = _bucket(table.shape[1], 256)
        index = np.dtype("u1" if width <= 1 << 8 else "u2" if width <= 1 << 16 else "u4")
        table = np.pad(table, ((0, 0), (0, width - table.shape[1])))
        return cls(jnp.asarray(columns.astype(index)), jnp.asarray(table))

    def start(self, batch: int) -> Array:
        """`i32[B]`: nothing matched yet."""
        return jnp.zeros(batch, jnp.int32)

    def advance(self, state: Array, token: Array) -> tuple[Array, Array]:
        """The states after `token` (`i32[...]`) and whether it completed a stop string: `i32[...]`, `bool[...]`.

        >>> table = StopTable.build([b"a", b"b", b"cab"], ["ab"])
        >>> state, hit = table.advance(table.start(2), jnp.array([0, 2]))
        >>> hit.tolist(), table.advance(state, jnp.array([1, 1]))[1].tolist()
        ([False, True], [True, False])
        """
        code = self.next[state, self.columns[token].astype(jnp.int32)]
        top = jnp.iinfo(code.dtype).bits - 1
        return (code & ((1 << top) - 1)).astype(jnp.int32), (code >> top).astype(bool)


LONGEST = 1 << 16
"""Bytes of all stop strings together. The automaton has a state for each, of 1 KiB while it is built."""


def stop_strings(stop: str | Iterable[str] | None, name: str = "stop") -> tuple[str, ...]:
    """The stop strings as a tuple, checked; none for None. `name` begins errors.

    Raises:
        ValueError: one of them is empty or is no text (a lone surrogate), or together they are longer than `LONGEST`.
        TypeError: one of them is not a string.
    """
    if isinstance(stop, (bytes, bytearray, Mapping)) or not isinstance(stop, (str, Iterable, type(None))) \
            or getattr(stop, "ndim", None) == 0:
        raise TypeError(f"{name}: got {reprlib.repr(stop)}, takes a string or several")
    strings = () if stop is None else (stop,) if isinstance(stop, str) else tuple(itertools.islice(stop, LONGEST + 1))
    total = 0
    for s in strings:
        if not isinstance(s, str):
            raise TypeError(f"{name}: got {reprlib.repr(s)}, takes a string or several")
        if not s:
            raise ValueError(f"{name}: got an empty string, which would match everywhere")
        try:
            total += len(s.encode())
        except UnicodeEncodeError as error:
            raise ValueError(f"{name}: got {reprlib.repr(s)}, which is no Unicode text ({error.reason})") from None
        if total > LONGEST:
            raise ValueError(f"{name}: got strings of more than {LONGEST} bytes together, takes at most so many")
    return strings


def first_match(text: AnyStr, stops: Sequence[AnyStr], after: int = 0) -> tuple[int, int] | None:
    """Start and end of the stop string that is completed first in `text`, the longest of those that end together.

    Only matches whose end lies beyond `after` count.

    >>> first_match("abcd", ["abcd", "bc"])
    (1, 3)
    """
    best: tuple[int, int] | None = None
    for stop in stops:
        start = text.find(stop, max(0, after - len(stop) + 1))
        end = start + len(stop)
        if start >= 0 and (best is None or (end, start) < (best[1], best[0])):
            best = start, end
    return best


def cut_at_stop(text: AnyStr, stops: Sequence[AnyStr]) -> AnyStr:
    """`text` up to the stop string that is completed first, which is left out.

    >>> cut_at_stop("one, two. three", [".", "three"])
    'one, two'
    """
    match = first_match(text, stops)
    return text if match is None else text[: match[0]]


def held(text: AnyStr, stops: Sequence[AnyStr]) -> int:
    r"""How much of the end of `text` may be the beginning of a stop string, so that a stream must not show it yet.

    >>> held("x = 1\n\nde", ["\n\ndef", "\n\nclass"])
    4
    """
    longest = min(len(text), max((len(s) - 1 for s in stops), default=0))
    return next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in stops)), 0)


def _bucket(size: int, least: int) -> int:
    """The power of two from `least` on that holds `size`."""
    return max(least, 1 << (size - 1).bit_length())


def _automaton(strings: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Transitions `i32[S, 256]` and, for each state, whether some string ends there: `bool[S]`."""
    if not strings:
        raise ValueError("stop: got no stop string, takes at least one")
    children: list[dict[int, int]] = [{}]
    ends = [False]
    for string in strings:
        state = 0
        for byte in string:
            if byte not in children[state]:
                children[state][byte] = len(children)
                children.append({})
                ends.append(False)
            state = children[state][byte]
        ends[state] = True

    # breadth first: the fallback of a state is shallower, so its row is complete when it is copied
    delta, out = np.zeros((len(children), 256), np.int32), np.array(ends)
    queue, fallback = [0], [0] * len(children)
    for state in queue:
        if state:
            delta[state] = delta[fallback[state]]
            out[state] |= out[fallback[state]]
        for byte, child in children[state].items():
            fallback[child] = int(delta[fallback[state], byte]) if state else 0
            queue.append(child)
        for byte, child in children[state].items():
            delta[state, byte] = child
    return delta, out


def _run(delta: np.ndarray, out: np.ndarray, tokens: Sequence[bytes]
         ) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, ...]]:
    """Runs every token from every state.

    Returns:
        final state `i32[V]` and hit `bool[V]` from the root, and the exceptions to it: arrays of equal length with
        state before, token, state after and hit.

    A run from another state joins the root's run as soon as it holds nothing from before the token, mostly after one
    byte; so only the few pairs that have not joined yet are followed. A run that has joined can differ by a hit alone.
    """
    length = np.array([len(t) for t in tokens])
    offset = np.concatenate([[0], np.cumsum(length)[:-1]])
    data = np.frombuffer(b"".join(tokens) + b"\0", np.uint8)
    order = np.argsort(-length, kind="stable")              # the tokens that reach byte p come first
    reach = np.searchsorted(-length[order], -np.arange(length.max(initial=0)))

    final, hit = np.zeros(len(tokens), np.int32), np.zeros(len(tokens), bool)
    first = np.where(length > 0, data[np.minimum(offset, len(data) - 1)].astype(np.int32), -1)
    by_first = np.argsort(first, kind="stable")
    bounds = np.searchsorted(first[by_first], np.arange(257))
    before, byte = np.nonzero(delta != delta[0])
    starts = [by_first[bounds[b]:bounds[b + 1]] for b in byte]
    token = np.concatenate([np.zeros(0, np.int64), *starts])
    state = np.repeat(before, [len(s) for s in starts])
    end, pair_hit = state.astype(np.int32), np.zeros(len(token), bool)

    settled: list[tuple[np.ndarray, ...]] = []
    for p, count in enumerate(reach):
        active = order[:count]
        final[active] = delta[final[active], data[offset[active] + p]]
        hit[active] |= out[final[active]]
        ended = length[token] <= p
        settled.append((state[ended], token[ended], end[ended], pair_hit[ended]))
        state, token, end, pair_hit = (x[~ended] for x in (state, token, end, pair_hit))
        end = delta[end, data[offset[token] + p]]
        pair_hit = pair_hit | out[end]
        joined = end == final[token]
        keep = joined & pair_hit
        settled.append((state[keep], token[keep], np.full(keep.sum(), -1, np.int32), pair_hit[keep]))
        state, token, end, pair_hit = (x[~joined] for x in (state, token, end, pair_hit))
    settled.append((state, token, end, pair_hit))
    state, token, end, pair_hit = (np.concatenate(x) for x in zip(*settled, strict=True))
    end = np.where(end < 0, final[token], end)
    return final, hit, (state, token, end, pair_hit | hit[token])
