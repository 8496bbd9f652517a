"""Regular expressions as automata over the bytes of UTF-8.

The syntax is that of Python's `re`, whose parser is used. Classes such as `\\d` are ASCII, as in ECMAScript and JSON
Schema. Anchors (`^`, `$`, `\\A`, `\\Z`) have their usual meaning anywhere in the expression. Features that no finite
automaton can have raise an error that names them.
"""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from decodax.constraints.builder import Anchor, Builder, Part
from decodax.constraints.dfa import Dfa, TooLarge

TOP = 0x10FFFF

Spans = list[tuple[int, int]]

CATEGORIES: dict[str, Spans] = {
    "CATEGORY_DIGIT": [(48, 57)], "CATEGORY_SPACE": [(9, 13), (32, 32)],
    "CATEGORY_WORD": [(48, 57), (65, 90), (95, 95), (97, 122)]}

ECMA_SPACE: Spans = [(9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
                     (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)]
ECMA_LINE_ENDS: Spans = [(10, 10), (13, 13), (0x2028, 0x2029)]


def regex(pattern: str) -> Dfa:
    """Returns the automaton of the texts that a regular expression matches as a whole.

    >>> word = regex("[a-c]+|é")
    >>> word.accepts(b"abc"), word.accepts("é".encode()), word.accepts(b"")
    (True, True, False)

    Raises:
        TypeError: `pattern` is not a string.
        ValueError: the expression is invalid, matches nothing, has too large an automaton, or uses features that an
            automaton cannot have: back-references, look-around, word boundaries, atomic groups.
    """
    if not isinstance(pattern, str):
        raise TypeError(f"regex: got {pattern!r}, takes a string")
    found = whole(pattern)
    if found.empty:
        raise ValueError(f"regex: got {pattern!r}, which matches nothing; takes an expression that matches some text")
    return found


def check(pattern: str) -> None:
    """Checks that an expression can be a constraint, without building its automaton.

    Raises:
        ValueError: it is invalid, uses features that an automaton cannot have, or is too long when its repetitions are
            written out.
    """
    with _named(pattern):
        ExpressionReader(Builder(), pattern).matched()


@functools.lru_cache(maxsize=256)
def whole(pattern: str) -> Dfa:
    """Returns the automaton of the texts that a regular expression matches as a whole, like `regex`, but without an
    error if there is no such text."""
    b = Builder()
    with _named(pattern):
        return b.build(ExpressionReader(b, pattern).matched())


def search(pattern: str) -> Dfa:
    """Returns the automaton of the texts in which a regular expression matches somewhere, as for `pattern` in JSON
    Schema.

    `^` and `$` are the ends of the text; white space and line ends are those of ECMAScript.

    Raises:
        TypeError, ValueError: as in `regex`.
    """
    b = Builder()
    with _named(pattern):
        return b.build(ExpressionReader(b, pattern, ECMA_SPACE, ECMA_LINE_ENDS, "end").found())


@contextlib.contextmanager
def _named(pattern: str) -> Iterator[None]:
    """Adds the expression to the message of a TooLarge error within the context."""
    try:
        yield
    except TooLarge as error:
        raise TooLarge(f"regex: {pattern!r}: {error}") from None


class ExpressionReader:
    """Parses one regular expression and adds parts for its texts to a `Builder`, by `matched` or `found`."""

    def __init__(self, b: Builder, pattern: str, space: Spans = CATEGORIES["CATEGORY_SPACE"],
                 line_ends: Spans = [(10, 10)], dollar: Anchor = "line"):       # noqa: B006
        self.b, self.pattern, self.line_ends, self.dollar = b, pattern, line_ends, dollar
        self.categories = {**CATEGORIES, "CATEGORY_SPACE": space}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            try:
                compiled = re.compile(pattern)
                self.tree = list(re._parser.parse(pattern))     # type: ignore[attr-defined]
            except (re.error, RecursionError, OverflowError) as error:
                raise ValueError(f"regex: {pattern!r}: {error}") from error
        if flags := compiled.flags & ~(re.UNICODE | re.DOTALL):
            raise ValueError(f"regex: {pattern!r}: got the flags {re.RegexFlag(flags)!r}, takes (?s) only")
        self.dotall = bool(compiled.flags & re.DOTALL)

    def wrong(self, what: str) -> ValueError:
        return ValueError(f"regex: {self.pattern!r}: {what} cannot be a constraint")

    def matched(self) -> Part:
        """Adds a part for the texts that the expression matches as a whole."""
        return self.sequence(self.tree)

    def found(self) -> Part:
        """Adds a part for the texts in which the expression matches somewhere."""
        branches = self.tree[0][1][1] if len(self.tree) == 1 and str(self.tree[0][0]) == "BRANCH" else [self.tree]
        more = lambda: self.b.star(self.characters([(0, TOP)]))
        at = lambda node: self._place(node[1]) if str(node[0]) == "AT" else None
        parts = []
        for tree in map(list, branches):        # nothing can come before `^` or after `$`, so it is not built
            front, back = bool(tree) and at(tree[0]) == "front", bool(tree) and at(tree[-1]) == "end"
            parts.append(self.b.seq(*([] if front else [more()]), self.sequence(tree), *([] if back else [more()])))
        return self.b.any_of(*parts)

    def _place(self, name: Any) -> Anchor:
        places: dict[str, Anchor] = {"AT_BEGINNING": "front", "AT_BEGINNING_STRING": "front", "AT_END": self.dollar,
                                     "AT_END_STRING": "end"}
        if str(name) not in places:
            raise self.wrong("a word boundary")
        return places[str(name)]

    def sequence(self, tree: Iterable[Any]) -> Part:
        return self.b.seq(*[self.node(str(op), value) for op, value in tree])

    def node(self, op: str, value: Any) -> Part:
        if op == "LITERAL":
            return self.characters([(value, value)])
        if op == "NOT_LITERAL":
            return self.characters(_other([(value, value)]))
        if op == "ANY":
            return self.characters([(0, TOP)] if self.dotall else _other(self.line_ends))
        if op == "IN":
            return self.characters(self.members(value))
        if op == "AT":
            return self.b.anchor(self._place(value))
        if op == "BRANCH":
            return self.b.any_of(*map(self.sequence, value[1]))
        if op == "SUBPATTERN":
            if (value[1] | value[2]) & ~re.DOTALL:
                raise self.wrong("a change of flags other than s")
            outside, self.dotall = self.dotall, bool((self.dotall or value[1] & re.DOTALL) and not value[2] & re.DOTALL)
            part = self.sequence(value[3])
            self.dotall = outside
            return part
        if op in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, inner = value
            bound = None if str(most) == "MAXREPEAT" else int(most)
            return self.b.repeat(lambda: self.sequence(inner), int(least), bound)
        names = {"GROUPREF": "a reference to a group", "GROUPREF_EXISTS": "a reference to a group",
                 "ASSERT": "a look-around", "ASSERT_NOT": "a look-around",
                 "ATOMIC_GROUP": "an atomic group", "POSSESSIVE_REPEAT": "a possessive repetition"}
        raise self.wrong(names.get(op, op.lower()))

    def members(self, items: Any) -> list[tuple[int, int]]:
        """Returns the ranges of code points of a character class."""
        spans: list[tuple[int, int]] = []
        negated = False
        for op, value in items:
            if str(op) == "NEGATE":
                negated = True
            elif str(op) == "LITERAL":
                spans.append((value, value))
            elif str(op) == "RANGE":
                spans.append(value)
            elif str(op) == "CATEGORY":
                name = str(value)
                own = self.categories[name.replace("_NOT_", "_")]
                spans += _other(own) if "_NOT_" in name else own
            else:
                raise self.wrong(str(op).lower())
        return _other(spans) if negated else spans

    def characters(self, spans: list[tuple[int, int]]) -> Part:
        """Adds a part for one character in the given ranges of code points."""
        return characters(self.b, spans)


def characters(b: Builder, spans: Iterable[tuple[int, int]]) -> Part:
    """Adds a part for one character, encoded in UTF-8, in the given ranges of code points; surrogates are left out."""
    start, end = b.state(), b.state()
    for low, high in spans:
        for sequence in utf8(low, high):
            here = start
            for i, (first, last) in enumerate(sequence):
                there = end if i == len(sequence) - 1 else b.state()
                b.moves[here].append((first, last, there))
                here = there
    return start, end


def utf8(low: int, high: int) -> list[list[tuple[int, int]]]:
    """Returns the UTF-8 encodings of a range of code points, as sequences of ranges of bytes.

    >>> utf8(0x61, 0x7A), utf8(0xE9, 0xE9)
    ([[(97, 122)]], [[(195, 195), (169, 169)]])
    """
    for a, z in ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, TOP)):
        if low < a <= high:
            return utf8(low, a - 1) + utf8(a, high)
        if low <= z < high:
            return utf8(low, z) + utf8(z + 1, high)
    if low > high or (0xD800 <= low and high <= 0xDFFF):
        return []
    first, last = chr(low).encode(), chr(high).encode()
    # Split until all trailing bytes have full ranges, so that each byte has an independent range.
    for tail in range(1, len(first)):
        block = 64 ** tail
        if low // block != high // block:
            if low % block:
                return utf8(low, low // block * block + block - 1) + utf8(low // block * block + block, high)
            if high % block != block - 1:
                return utf8(low, high // block * block - 1) + utf8(high // block * block, high)
    return [list(zip(first, last, strict=True))]


def _other(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the ranges of code points that are in none of the given ranges."""
    found, at = [], 0
    for low, high in sorted(spans):
        if low > at:
            found.append((at, low - 1))
        at = max(at, high + 1)
    return [*found, (at, TOP)] if at <= TOP else found
