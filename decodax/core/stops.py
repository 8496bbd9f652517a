"""Stop strings: an automaton over the bytes of tokens that runs on the device, and the same rule for text on the host.

Stop strings are searched in the text as it is returned. If special tokens are left out of that text, a stop string that
contains the name of a special token is searched in the text with special tokens written out: "<|im_end|>" stops at that
token.

A match may cross token borders, lie in the middle of a token, or share its beginning with another stop string. Of two
overlapping stop strings, the one that is completed first counts, so the result does not depend on how the text is split
into tokens. The prompt does not count: a row starts in the automaton's root. If no text has been written yet, it starts
in a state from which the first token adds the bytes that it has at the start of a text.

The automaton is that of A. Aho and M. Corasick (1975), run over complete tokens: every token is a map from state to
state. Tokens with the same map share a column, so a table for 150,000 tokens has a few hundred columns.
"""

from __future__ import annotations

import itertools
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, AnyStr

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.common.struct import Struct, struct


@struct
class StopTable(Struct):
    """The automaton for a set of stop strings over a vocabulary, made by `build`. All rows share it.

    Attributes:
        columns: `u[V]`, the column of each token (u8, u16 or u32).
        next: `u[S, C]`, the state after a token, by state and column; the top bit is set if the token completes a stop
            string. Both axes are padded to powers of two, so that other stop strings of about the same length do not
            retrace.
        fresh: `i32[]`; states from this number on mean that no text has been written yet. 0: there are no such states,
            since the first token has the same bytes as later ones.
    """

    columns: Array
    next: Array
    fresh: Array

    @classmethod
    def build(cls, token_bytes: Sequence[bytes], stop: str | Sequence[str], size: int | None = None, *,
              first: Sequence[bytes] | None = None, hidden: Mapping[int, bytes] | None = None) -> StopTable:
        """Builds the automaton on the host; 0.1 s for a vocabulary of 150,000.

        Args:
            token_bytes: the bytes that each token adds to the text; a token without bytes does not change the state.
            stop: one stop string or several.
            size: size of the model's vocabulary; None: the length of `token_bytes`.
            first: the bytes that each token adds at the start of a text; default `token_bytes`.
            hidden: special tokens that are left out of the returned text, with their names as bytes. They do not count
                as the start of a text.

        Raises:
            ValueError: there is no stop string, or an empty one; or the automaton for strings with and without special
                tokens has too many states.
        """
        hidden = hidden or {}
        plain, shown = sought(stop_strings(stop), hidden.values())
        if not plain and not shown:
            raise ValueError("stop: got no stop string, takes at least one")
        delta, out = _both(_automaton(plain), _automaton(shown)) if shown else _automaton(plain)
        none = [b""] * ((size or 0) - len(token_bytes))
        texts, starts = [*token_bytes, *none], [*(first or token_bytes), *none]
        for i, text in hidden.items():
            texts[i] = starts[i] = text if shown else b""
        mute: np.ndarray = np.array([not t for t in texts])
        lifted: np.ndarray = np.isin(np.arange(len(texts)), [*hidden, *range(len(token_bytes), len(texts))])
        states, (final, hit, pairs) = len(delta), _run(delta, out, *_flat(texts, lifted))

        # states in which no text has begun: a hidden token leads from one to another
        fresh = _closed(delta, [text for text in hidden.values() if shown and text]) if starts != texts else []
        room = _bucket(states + len(fresh), 32)
        bits = next(b for b in (8, 16, 32) if room <= 1 << (b - 1))
        code = lambda state, hit: (state + (hit.astype(np.int64) << (bits - 1))).astype(f"u{bits // 8}")
        before = []
        for begin in fresh:
            there, met = _from(begin, delta, out, *_flat(starts, lifted))
            before.append(code(np.where(lifted, states + np.searchsorted(fresh, there), there), met))

        # a column is the result from the root, whatever the state before, and exceptions to it
        root = code(final, hit)
        state, token, end, pair_hit = (x[np.lexsort(pairs[:2])] for x in pairs)
        coded = code(end, pair_hit)
        odd, start = np.unique(token, return_index=True)
        known: dict[bytes, int] = {}
        apart: np.ndarray = np.zeros(len(texts), np.int64)
        apart[odd] = [1 + known.setdefault(state[i:j].tobytes() + coded[i:j].tobytes(), len(known))
                      for i, j in zip(start, np.append(start, len(token))[1:], strict=True)]
        apart[mute] = 1 + len(known)
        columns: np.ndarray = np.zeros(len(texts), np.int64)
        for part in (root, apart, *before):
            _, example, columns = np.unique(columns * (1 << 32) + part, return_index=True, return_inverse=True)
            columns = columns.reshape(-1)
        table = np.zeros((room, len(example)), root.dtype)
        table[:states] = root[example]
        table[state, columns[token]] = coded
        table[:states, mute[example]] = np.arange(states)[:, None]
        for i, part in enumerate(before):
            table[states + i] = part[example]

        width = _bucket(table.shape[1], 256)
        index = np.dtype("u1" if width <= 1 << 8 else "u2" if width <= 1 << 16 else "u4")
        table = np.pad(table, ((0, 0), (0, width - table.shape[1])))
        return cls(jnp.asarray(columns.astype(index)), jnp.asarray(table), jnp.int32(states if fresh else 0))

    def start(self, batch: int) -> Array:
        """Returns the states of `batch` rows with a text in which nothing has matched yet, `i32[B]`."""
        return jnp.zeros(batch, jnp.int32)

    def begin(self, tokens: Array, length: Array, policy: Any = None) -> Array:
        """Returns the states after prompts, `i32[B]`. No match has begun; only whether the prompt has text matters.

        Args:
            tokens: `i32[B, T]`, the prompts.
            length: `i32[B]`, their lengths.
            policy: the sampling policy; not used here, but by `decodax.constraints.transform.Closing`.
        """
        after = self.advance(jnp.broadcast_to(self.fresh, tokens.shape), jnp.maximum(tokens, 0))[0]
        begun = (after < self.fresh) & (jnp.arange(tokens.shape[1]) < length[:, None])
        return jnp.where(begun.any(1), 0, self.fresh)

    def resume(self, tokens: Array, prompt_length: Array, length: Array) -> Array:
        """Returns the states after generated tokens, `i32[B]`.

        Args:
            tokens: `i32[B, N]`, prompt and generated tokens.
            prompt_length: `i32[B]`, index of the first generated token.
            length: `i32[B]`, index after the last one.
        """
        def visit(state: Array, x: tuple[Array, Array]) -> tuple[Array, None]:
            token, place = x
            inside = (place >= prompt_length) & (place < length)
            return jnp.where(inside, self.advance(state, jnp.maximum(token, 0))[0], state), None

        places = jnp.arange(tokens.shape[1])
        return jax.lax.scan(visit, self.begin(tokens, prompt_length), (tokens.T, places))[0]

    def advance(self, state: Array, token: Array, left: Array | int = 0) -> tuple[Array, Array]:
        """Returns the states after `token` (`i32[...]`), `i32[...]`, and whether it completed a stop string,
        `bool[...]`. `left`, the number of tokens that may still follow, is not used here, but by
        `decodax.constraints.transform.Closing`.

        >>> table = StopTable.build([b"a", b"b", b"cab"], ["ab"])
        >>> state, hit = table.advance(table.start(2), jnp.array([0, 2]))
        >>> hit.tolist(), table.advance(state, jnp.array([1, 1]))[1].tolist()
        ([False, True], [True, False])
        """
        code = self.next[state, self.columns[token].astype(jnp.int32)]
        top = jnp.iinfo(code.dtype).bits - 1
        return (code & ((1 << top) - 1)).astype(jnp.int32), (code >> top).astype(bool)


LONGEST = 1 << 16
"""Largest number of bytes of all stop strings together. The automaton has one state for each byte, which takes 1 KiB
while it is built."""


def stop_strings(stop: str | Iterable[str] | None, name: str = "stop") -> tuple[str, ...]:
    """Checks stop strings and returns them as a tuple; it is empty for None. Errors begin with `name`.

    Raises:
        ValueError: one of them is empty or not valid Unicode (a lone surrogate), or together they are longer than
            `LONGEST` bytes.
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
            raise ValueError(f"{name}: got strings of more than {LONGEST} bytes together, takes at most that")
    return strings


def sought(strings: Iterable[str], special: Iterable[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Splits stop strings into those without and those with the name of a special token. The second ones are searched
    in the text with special tokens written out.

    >>> sought(["a", "b</s>"], [b"</s>", b"<s>"])
    ([b'a'], [b'b</s>'])
    """
    names = [name for name in special if name]
    found: tuple[list[bytes], list[bytes]] = [], []
    for text in (s.encode() for s in strings):
        found[any(name in text for name in names)].append(text)
    return found


def first_match(text: AnyStr, stops: Sequence[AnyStr], after: int = 0) -> tuple[int, int] | None:
    """Returns start and end of the stop string that is completed first in `text`, or None. Of several that end at the
    same place it is the longest.

    Only matches that end after index `after` count.

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
    """Returns `text` before the stop string that is completed first; all of it if there is none.

    >>> cut_at_stop("one, two. three", [".", "three"])
    'one, two'
    """
    match = first_match(text, stops)
    return text if match is None else text[: match[0]]


def held(text: AnyStr, stops: Sequence[AnyStr]) -> int:
    r"""Returns the number of last characters of `text` that may be the beginning of a stop string. A stream must not
    show them yet.

    >>> held("x = 1\n\nde", ["\n\ndef", "\n\nclass"])
    4
    """
    longest = min(len(text), max((len(s) - 1 for s in stops), default=0))
    return next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in stops)), 0)


def _bucket(size: int, least: int) -> int:
    """Returns the smallest power of two that is at least `size` and `least`."""
    return max(least, 1 << (size - 1).bit_length())


def _automaton(strings: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Builds the automaton for byte strings: transitions `i32[S, 256]`, and for each state whether a string ends there,
    `bool[S]`."""
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


APART = 256
"""Added to the bytes of special tokens, which count only in the text with special tokens written out."""


def _both(plain: tuple[np.ndarray, np.ndarray], shown: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Runs two automata in parallel as one, `i32[S, 512]` and `bool[S]`. Bytes from `APART` on move only the second
    one."""
    (one, out_one), (two, out_two) = plain, shown
    number, rows, level, most = {0: 0}, [], [0], max(1 << 14, len(one) + len(two))
    while level:
        i, j = np.divmod(np.array(level), len(two))
        rows.append(np.concatenate([one[i].astype(np.int64) * len(two) + two[j], i[:, None] * len(two) + two[j]], 1))
        level = [code for code in np.unique(rows[-1]).tolist() if code not in number]
        number.update(zip(level, range(len(number), len(number) + len(level)), strict=True))
        if len(number) > most:
            raise ValueError(f"stop: strings with special tokens in them and others take more than {most} states "
                             "together, takes shorter ones")
    known: np.ndarray = np.array(sorted(number))
    names: np.ndarray = np.array([number[code] for code in known.tolist()], np.int32)
    i, j = np.divmod(np.array(list(number)), len(two))
    return names[np.searchsorted(known, np.concatenate(rows))], out_one[i] | out_two[j]


def _closed(delta: np.ndarray, texts: Sequence[bytes]) -> list[int]:
    """Returns the states, in ascending order, that any number of special tokens with the names `texts` reach from the
    root."""
    found, todo = {0}, [0]
    for state in todo:
        for text in texts:
            there = state
            for byte in text:
                there = int(delta[there, APART + byte])
            if there not in found:
                found.add(there)
                todo.append(there)
    return sorted(found)


def _flat(tokens: Sequence[bytes], lifted: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Concatenates the bytes of all tokens; `APART` is added to those of special tokens (`lifted`, `bool[V]`). Also
    returns the start and the number of bytes of each token."""
    length = np.array([len(t) for t in tokens])
    data = np.frombuffer(b"".join(tokens) + b"\0", np.uint8).astype(np.int32)
    data[:-1] += APART * np.repeat(lifted, length)
    return data, np.concatenate([[0], np.cumsum(length)[:-1]]), length


def _from(start: int, delta: np.ndarray, out: np.ndarray, data: np.ndarray, offset: np.ndarray, length: np.ndarray
          ) -> tuple[np.ndarray, np.ndarray]:
    """Runs every token from the state `start`. Returns the final states `i32[V]` and whether a match was completed,
    `bool[V]`."""
    final, hit = np.full(len(length), start, np.int32), np.zeros(len(length), bool)
    for p in range(length.max(initial=0)):
        active = np.flatnonzero(length > p)
        final[active] = delta[final[active], data[offset[active] + p]]
        hit[active] |= out[final[active]]
    return final, hit


def _run(delta: np.ndarray, out: np.ndarray, data: np.ndarray, offset: np.ndarray, length: np.ndarray
         ) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, ...]]:
    """Runs every token from every state.

    Returns:
        For a start in the root: final state `i32[V]`, and whether a match was completed (hit), `bool[V]`. For other
            states only the exceptions to this: four arrays of equal length with state before, token, state after and
            hit.

    A run from another state joins the root's run as soon as its state no longer depends on text before the token,
    usually after one byte. So only the few pairs that have not joined are followed. After it has joined, a run can
    differ only in its hit.
    """
    order = np.argsort(-length, kind="stable")              # the tokens that reach byte p come first
    reach = np.searchsorted(-length[order], -np.arange(length.max(initial=0)))

    final, hit = np.zeros(len(length), np.int32), np.zeros(len(length), bool)
    first = np.where(length > 0, data[np.minimum(offset, len(data) - 1)], -1)
    by_first = np.argsort(first, kind="stable")
    bounds = np.searchsorted(first[by_first], np.arange(delta.shape[1] + 1))
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
