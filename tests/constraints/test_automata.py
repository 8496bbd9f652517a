"""Automata against Python's `re` on random expressions, anchors included; their sizes, and how quickly they are made or
refused."""

import itertools
import random
import re
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from decodax.constraints import Dfa, TokenDfa
from decodax.constraints.dfa import LARGEST, TooLarge
from decodax.constraints.ebnf import ebnf
from decodax.constraints.expressions import regex, search, whole
from decodax.constraints.schema import json_schema
from decodax.constraints.tokens import TokenTrie
from tests.matrix import often

TEXTS = ["".join(letters) for n in range(5) for letters in itertools.product("ab\né", repeat=n)]


def expression(rng: random.Random, depth: int = 3) -> str:
    """A random one; anchors may stand anywhere."""
    one = lambda: expression(rng, depth - 1)
    groups = [lambda: f"({one()})", lambda: f"(?:{one()})", lambda: f"(?s:{one()})"] * (depth > 0)
    atom = lambda: rng.choice([lambda: rng.choice("abé."), lambda: rng.choice([r"\n", "[^a]", "[ab]", r"\s", r"\w"]),
                               *groups])()
    kinds: list[Callable[[], str]] = [
        atom, atom, atom, lambda: rng.choice(["^", "$", "$", r"\A", r"\Z"]),
        lambda: atom() + rng.choice(["*", "+", "?", "*?", "{2}", "{1,2}", "{0,2}?", "{,1}", "{2,}"])]
    alternatives = ["".join(rng.choice(kinds)() for _ in range(rng.randint(0, 3)))
                    for _ in range(rng.choice([1, 1, 1, 2, 3]))]
    return "|".join(alternatives)


@pytest.mark.parametrize("first", often([0], range(0, 3000, 150)))
def test_random_expressions_match_what_python_matches(first: int) -> None:
    anchored = 0
    for seed in range(first, first + 150):
        pattern = expression(random.Random(seed))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            theirs, found = re.compile(pattern, re.ASCII), re.compile(pattern.replace("$", r"\Z"), re.ASCII)
        mine, part = whole(pattern), search(pattern)
        for text in TEXTS:
            data = text.encode()
            assert mine.accepts(data) == bool(theirs.fullmatch(text)), (pattern, text)
            assert part.accepts(data) == bool(found.search(text)), (pattern, text)
        anchored += any(x in pattern for x in ("^", "$", r"\A", r"\Z"))
    assert anchored > 75


@pytest.mark.parametrize(("pattern", "valid", "wrong"), [
    ("^a$|^b$", "a b", "ab c"), ("(^a|b)$", "a b xb", "ba bc"), (r"^$|^\d{4}$", " 2024", "12 20245"),
    ("^(?:a)$|c", "a c xcx", "ab b"), ("(^a$)|(b)", "a xb", "aa"), ("((^a)|^b)c$", "ac bc", "xac acc"),
    ("(?:^|x)a(?:$|y)", "a xa ay zxayz", "za az")])
def test_each_alternative_has_its_anchors(pattern: str, valid: str, wrong: str) -> None:
    """In schemas, where an expression is searched for."""
    language = json_schema({"type": "string", "pattern": pattern})
    for text in valid.split(" "):
        assert language.accepts(f'"{text}"'.encode()), text
    for text in wrong.split(" "):
        assert not language.accepts(f'"{text}"'.encode()), text


def test_an_anchor_in_a_terminal_is_the_terminals() -> None:
    assert ebnf('start: A A\nA: /^a$|^b$/').accepts(b"ab")


@pytest.mark.parametrize("seed", range(4))
def test_the_smallest_automaton_is_that_of_moores_rounds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(40):
        states, letters = int(rng.integers(1, 12)), int(rng.integers(1, 4))
        columns = rng.integers(-1, states, (states, letters)).astype(np.int32)
        following, final = columns[:, rng.integers(0, letters, 256)], rng.random(states) < 0.4
        small = Dfa.of(following, final)
        for text in itertools.product(range(0, 256, 40), repeat=3):
            for n in range(4):
                state = 0
                for byte in text[:n]:
                    state = int(following[state, byte]) if state >= 0 else -1
                assert small.accepts(bytes(text[:n])) == bool(state >= 0 and final[state])
        # by hand: pairs that some text tells apart
        whole_next = np.where(small.next < 0, len(small), small.next)
        whole_next, ends = np.vstack([whole_next, np.full((1, 256), len(small))]), np.append(small.final, False)
        apart = ends[:, None] != ends
        for _ in range(len(ends)):
            apart |= apart[whole_next[:, None], whole_next[None]].any(-1)
        assert small.empty or (apart | np.eye(len(ends), dtype=bool))[:-1, :-1].all()


QUICK: dict[str, tuple[Any, int | None]] = {
    "a{1000}": ("a{1000}", 1001), "a{4000}": ("a{4000}", 4001), "(a|b){200}": ("(a|b){200}", 201),
    ".{0,500}": (".{0,500}", 4001), "nested": ("((a{1,20}b){1,20}c){1,20}", None),
    "in a loop": ("(a{0,9999}b)*", 10_000), "may be empty": ("(a?){500}", 501), "loops": ("(a*){5000}", 1),
    "maxLength 255": ({"type": "string", "maxLength": 255}, None),
    "maxLength 500": ({"type": "string", "maxLength": 500}, 10_003),
    "array": ({"type": "array", "items": {"type": "integer"}, "maxItems": 200}, None),
    "array of long texts": ({"type": "array", "items": {"type": "string", "maxLength": 200}}, None)}
"""What takes a fraction of a second: expressions and schemas, and how many states they have."""


@pytest.mark.parametrize("name", QUICK)
def test_long_repetitions_are_made_quickly(name: str) -> None:
    """Ten times what they take here; the rounds that they took before were far beyond that."""
    given, states = QUICK[name]
    clock = time.process_time()
    language = regex(given) if isinstance(given, str) else json_schema(given)
    trie = TokenTrie.build([bytes([i]) for i in range(256)] + [b"a" * n for n in range(2, 20)] + [b'"', b"ab",
                                                                                                  b"<end>"])
    found = TokenDfa.build([language], trie, [trie.size - 1])
    assert time.process_time() - clock < 8
    assert states is None or len(language) == states
    assert len(found.next) == len(language) + 1


@pytest.mark.parametrize(("make", "message"), [
    (lambda: regex("a{1000000000}"), r"^regex: 'a\{1000000000\}': a repetition of 1000000000 times makes more"),
    (lambda: regex("((a{1,100}){1,100}){1,100}"), "^regex: .*a repetition of 100 times makes more than 1000000"),
    (lambda: regex("(a|b)*a(a|b){20}"), f"^regex: .*more than {LARGEST} states"),
    (lambda: regex("(a?){10000}"), "^regex: .*more than 3000000 steps"),
    (lambda: regex(".{0,4000}"), f"^regex: .*32001 states, more than {LARGEST}"),
    (lambda: json_schema({"type": "string", "maxLength": 10 ** 9}), "^json_schema: .*1000000000 times"),
    (lambda: json_schema({"type": "string", "pattern": "a", "maxLength": 10 ** 7}),
     "^json_schema: .*10000000 times"),
    (lambda: json_schema({"type": "array", "items": {"type": "null"}, "maxItems": 10 ** 8}),
     "^json_schema: .*maxItems"),
    (lambda: ebnf('start: "a"~1000000000'), "^grammar: .*1000000000 times")])
def test_a_constraint_that_is_too_large_is_refused_quickly(make: Callable[[], Any], message: str) -> None:
    clock = time.process_time()
    with pytest.raises(ValueError, match=message):
        make()
    assert time.process_time() - clock < 20


def test_a_token_table_holds_what_bytes_do_at_every_state() -> None:
    """Random expressions over random vocabularies, state by state."""
    for seed in range(60):
        rng = random.Random(seed)
        try:
            language = regex(expression(rng))
        except ValueError:
            continue
        tokens = ["".join(rng.choice("ab\né") for _ in range(rng.randint(0, 3))).encode() for _ in range(30)]
        found = TokenDfa.build([language], TokenTrie.build([*tokens, b"ab"]), [30], [0])
        for state in range(len(language)):
            for i, token in enumerate(tokens):
                there = state
                for byte in token:
                    there = int(language.next[there, byte]) if there >= 0 else -1
                want = there if token and i else -1
                assert found.next[state, found.classes[i]] == want
            assert (found.next[state, found.classes[30]] >= 0) == language.final[state]


def test_a_limit_is_an_error_of_its_kind() -> None:
    with pytest.raises(TooLarge):
        regex("a{1000000000}")
