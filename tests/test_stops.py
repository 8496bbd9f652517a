from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax.core.stops import StopTable, cut_at_stop, first_match, held, stop_strings

VOCAB = [b"a", b"b", b"ab", b"ba", b"aab", b"\n", b"\n\n", b"xaby", b"", b"\xc3\xa9", b"\xc3", b"\xa9"]


def run(table: StopTable, tokens: list[int]) -> list[bool]:
    """Hits token by token."""
    state, hits = table.start(1), []
    for token in tokens:
        state, hit = table.advance(state, jnp.array([token]))
        hits.append(bool(hit[0]))
    return hits


def test_a_stop_string_is_found_across_token_borders() -> None:
    assert run(StopTable.build(VOCAB, "abba"), [0, 1, 3]) == [False, False, True]


def test_a_stop_string_is_found_in_the_middle_of_a_token() -> None:
    assert run(StopTable.build(VOCAB, "ab"), [1, 7]) == [False, True]


def test_a_stop_string_is_found_where_its_beginning_repeats() -> None:
    assert run(StopTable.build(VOCAB, "aab"), [0, 0, 0, 1]) == [False, False, False, True]


def test_a_character_spread_over_tokens_matches() -> None:
    assert run(StopTable.build(VOCAB, "bé"), [1, 10, 11]) == [False, False, True]


def test_tokens_without_text_leave_a_match_open() -> None:
    table = StopTable.build(VOCAB, "ab", size=20)
    assert run(table, [0, 8, 19, 1]) == [False, False, False, True]


def test_the_automaton_finds_what_a_search_finds() -> None:
    rng = random.Random(0)
    scan = jax.jit(lambda table, tokens: jax.lax.scan(table.advance, table.start(4), tokens)[1])
    word = lambda low, high: bytes(rng.choice(b"ab\n") for _ in range(rng.randint(low, high)))
    for _ in range(100):
        vocab = [word(0, 5) for _ in range(30)]
        stops = [word(1, 5).decode() for _ in range(rng.randint(1, 4))]
        table = StopTable.build(vocab, stops)
        tokens = np.array([[rng.randrange(30) for _ in range(40)] for _ in range(4)], np.int32)
        hits = np.asarray(scan(table, tokens.T)).T
        for row, hit in zip(tokens, hits, strict=True):
            text = b""
            for token, found in zip(row, hit, strict=True):
                old, text = len(text), text + vocab[token]
                assert found == (first_match(text, [s.encode() for s in stops], after=old) is not None)


def test_advance_maps_over_rows() -> None:
    table = StopTable.build(VOCAB, ["ab", "\n\n"])
    state, token = jnp.arange(4, dtype=jnp.int32) % 3, jnp.array([0, 1, 5, 7])
    whole, mapped = table.advance(state, token), jax.vmap(table.advance)(state, token)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()) and a.dtype == b.dtype, whole, mapped))


def test_other_stop_strings_do_not_retrace() -> None:
    advance = jax.jit(StopTable.advance)
    for stops in (["a"], ["\n\n", "def"], ["class Foo", "x" * 15]):
        table = StopTable.build(VOCAB, stops)
        advance(table, table.start(2), jnp.array([0, 1]))
    assert advance._cache_size() == 1


@pytest.mark.parametrize("length", [40, 200, 40_000])
def test_long_stop_strings_take_a_wider_table(length: int) -> None:
    string = "a" * (length - 1) + "b"
    table = StopTable.build(VOCAB[:2], string)
    assert table.next.dtype == {40: jnp.uint8, 200: jnp.uint16, 40_000: jnp.uint32}[length]
    state, hit = table.advance(jnp.array([length - 1, length - 2]), jnp.array([1, 0]))
    assert hit.tolist() == [True, False] and state.tolist() == [length, length - 1]


def test_a_large_vocabulary_keeps_a_small_table() -> None:
    rng = np.random.default_rng(0)
    vocab = [bytes(rng.integers(97, 123, n).astype(np.uint8)) for n in rng.integers(1, 9, 20_000)]
    table = StopTable.build(vocab, ["\n\n", "stop", "end"])
    assert table.next.shape == (32, 256) and table.columns.dtype == jnp.uint8


def test_the_string_completed_first_wins_and_then_the_longest() -> None:
    assert cut_at_stop("xabcd", ["abcd", "bc"]) == "xa"
    assert cut_at_stop("xabc", ["c", "abc", "bc"]) == "x"
    assert cut_at_stop("xabc", ["y"]) == "xabc"
    assert first_match("abab", ["ab"], after=2) == (2, 4)


def test_only_what_may_begin_a_stop_string_is_held() -> None:
    assert held("text\n", ["\n\n", "text!"]) == 1
    assert held("textte", ["texttext"]) == 6
    assert held("ab", ["ab"]) == 0             # complete, so a matter of `first_match`
    assert held("ab", []) == 0


def test_wrong_stop_strings_are_refused() -> None:
    assert stop_strings(None) == () and stop_strings("ab") == ("ab",)
    with pytest.raises(ValueError, match="empty string"):
        stop_strings(["a", ""])
    with pytest.raises(TypeError, match="got 3"):
        stop_strings(["a", 3])                 # type: ignore[list-item]
    with pytest.raises(ValueError, match="at least one"):
        StopTable.build(VOCAB, [])
