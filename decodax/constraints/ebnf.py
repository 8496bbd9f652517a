"""Grammars in Lark's notation whose rules are not recursive, so that their languages are regular.

Rules are applied to characters directly; there is no lexer.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any

from decodax.constraints.builder import Builder, Part
from decodax.constraints.dfa import Dfa, TooLarge
from decodax.constraints.expressions import whole

COMMON = {
    "DIGIT": r"[0-9]", "HEXDIGIT": r"[0-9a-fA-F]", "INT": r"[0-9]+", "SIGNED_INT": r"[+-]?[0-9]+",
    "DECIMAL": r"([0-9]+\.[0-9]*|\.[0-9]+)", "LETTER": r"[a-zA-Z]", "UCASE_LETTER": "[A-Z]", "LCASE_LETTER": "[a-z]",
    "WORD": "[a-zA-Z]+", "CNAME": "[a-zA-Z_][a-zA-Z0-9_]*", "NEWLINE": r"(\r?\n)+", "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+", "ESCAPED_STRING": r'"([^"\\]|\\.)*"',
    "FLOAT": r"([0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?)",
    "NUMBER": r"([0-9]+([eE][+-]?[0-9]+)?|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?)",
    "SIGNED_NUMBER": r"[+-]?([0-9]+([eE][+-]?[0-9]+)?|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?)"}
"""The terminals that `%import common.NAME` can import."""

TOKENS = re.compile(
    r"(?P<comment>//[^\n]*|\#[^\n]*)|(?P<string>\"(?:\\.|[^\"\\\n])*\"i?)|(?P<regex>/(?!/)(?:\\.|[^/\\\n])+/[imslux]*)"
    r"|(?P<name>[a-zA-Z_][a-zA-Z0-9_]*)|(?P<number>[0-9]+)|(?P<dots>\.\.)|(?P<arrow>->)|(?P<command>%[a-z]+)"
    r"|(?P<line>\n)|(?P<space>[ \t\r]+)|(?P<op>[:|()\[\]?*+~{},.!@])")


class Recursive(ValueError):
    """A rule refers to itself, so that no finite automaton accepts the language."""


class Elsewhere(ValueError):
    """The grammar uses a feature that only the matcher of llguidance supports."""


def ebnf(grammar: str) -> Dfa:
    """Returns the automaton of the texts of a grammar's rule `start`.

    Rules have names in lower case, terminals in upper case. An expression has alternatives (`|`), groups, options
    (`[...]`, `?`), repetitions (`*`, `+`, `~ n`, `~ n..m`, `{n,m}`), strings (followed by `i` to ignore case), ranges
    of characters and regular expressions. `%import common.NAME` imports the usual terminals.

    >>> ebnf('start: "a" b*  b: "x" | /[0-9]/'.replace("  ", chr(10))).accepts(b"ax7")
    True

    Raises:
        Recursive: a rule refers to itself.
        Elsewhere: `%ignore` and other commands that are not supported.
        TooLarge: its automaton is too large.
        ValueError: the grammar is invalid, or no text fits it.
    """
    if not isinstance(grammar, str):
        raise TypeError(f"grammar: got {grammar!r}, takes a string")
    rules = _Parser(grammar).rules()
    if "start" not in rules:
        raise ValueError("grammar: takes a rule named start, got none")
    b = Builder()
    try:
        found = b.build(_Maker(b, rules).name("start", ()))
    except TooLarge as error:
        raise TooLarge(f"grammar: {error}") from None
    if found.empty:
        raise ValueError("grammar: no text fits it, takes one that some text fits")
    return found


def check_rules(grammar: str) -> None:
    """Checks the notation of a grammar without building its automaton. Grammars that only llguidance can parse are not
    checked.

    Raises:
        ValueError: the grammar is invalid, or has no rule `start`.
    """
    try:
        rules = _Parser(grammar).rules()
    except Elsewhere:
        return
    if "start" not in rules:
        raise ValueError("grammar: has no rule start")


class _Parser:
    """Parses rules to trees: tuples of the kind of a node and its contents."""

    def __init__(self, source: str):
        self.source, self.items, at = source, [], 0
        while at < len(source):
            found = TOKENS.match(source, at)
            if found is None:
                raise self.wrong(at, f"unexpected {source[at]!r}")
            kind = str(found.lastgroup)
            if kind not in ("comment", "space"):
                self.items.append((kind, found.group(), at))
            at = found.end()
        self.items.append(("line", "\n", at))
        self.at = 0

    def wrong(self, at: int, what: str) -> ValueError:
        line = self.source.count("\n", 0, at) + 1
        return ValueError(f"grammar: line {line}: {what}")

    def peek(self, ahead: int = 0) -> tuple[str, str, int]:
        return self.items[min(self.at + ahead, len(self.items) - 1)]

    def take(self, *texts: str) -> bool:
        if self.peek()[1] in texts and self.peek()[0] in ("op", "dots", "arrow"):
            self.at += 1
            return True
        return False

    def rules(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while self.at < len(self.items):
            kind, text, at = self.peek()
            if kind == "line":
                self.at += 1
            elif kind == "command":
                self.command(found)
            else:
                while self.take("?", "!"):
                    pass
                kind, name, at = self.peek()
                if kind != "name":
                    raise self.wrong(at, f"got {text!r}, takes the name of a rule")
                self.at += 1
                if self.take("."):
                    self.at += 1                    # a priority, which does not change the language
                if not self.take(":"):
                    raise self.wrong(at, f"expected a colon after {name!r}")
                if name in found:
                    raise self.wrong(at, f"the rule {name!r} is defined twice")
                found[name] = self.choice()
        return found

    def command(self, found: dict[str, Any]) -> None:
        _, text, at = self.peek()
        if text != "%import":
            raise Elsewhere(f"grammar: line {self.source.count(chr(10), 0, at) + 1}: {text} is not supported")
        names = [x[1] for x in self.items[self.at + 1:self.at + 6] if x[0] in ("name", "op", "arrow")]
        if len(names) < 3 or names[:2] != ["common", "."] or names[2] not in COMMON:
            raise self.wrong(at, f"takes common.NAME, one of {', '.join(COMMON)}")
        alias = names[4] if len(names) > 4 and names[3] == "->" else names[2]
        found[alias] = ("regex", COMMON[names[2]], at)
        while self.peek()[0] != "line":
            self.at += 1

    def choice(self) -> Any:
        parts = [self.sequence()]
        while True:
            skip = self.at
            while self.peek()[0] == "line" and skip < len(self.items) - 1 and self.items[self.at][0] == "line" \
                    and self.at < len(self.items) - 1:
                self.at += 1
            if not self.take("|"):
                self.at = skip
                return ("choice", parts) if len(parts) > 1 else parts[0]
            parts.append(self.sequence())

    def sequence(self) -> Any:
        parts = []
        while True:
            kind, text, _ = self.peek()
            if kind in ("string", "regex", "name") or text in ("(", "["):
                parts.append(self.repeated())
            elif self.take("->"):
                self.at += 1                        # the name of an alternative
            else:
                return ("sequence", parts)

    def repeated(self) -> Any:
        part = self.atom()
        while True:
            if self.take("?"):
                part = ("repeat", part, 0, 1)
            elif self.take("*"):
                part = ("repeat", part, 0, None)
            elif self.take("+"):
                part = ("repeat", part, 1, None)
            elif self.take("~"):
                low = self.number()
                part = self.times(part, low, self.number() if self.take("..") else low)
            elif self.take("{"):
                low = self.number() if self.peek()[0] == "number" else 0
                high: int | None = low
                if self.take(","):
                    high = self.number() if self.peek()[0] == "number" else None
                if not self.take("}"):
                    raise self.wrong(self.peek()[2], "missing closing brace")
                part = self.times(part, low, high)
            else:
                return part

    def times(self, part: Any, low: int, high: int | None) -> Any:
        if high is not None and high < low:
            raise self.wrong(self.peek()[2], f"a repetition of at least {low} and at most {high} times")
        return ("repeat", part, low, high)

    def number(self) -> int:
        kind, text, at = self.peek()
        if kind != "number":
            raise self.wrong(at, f"got {text!r}, takes a number")
        self.at += 1
        return int(text)

    def atom(self) -> Any:
        kind, text, at = self.peek()
        self.at += 1
        if kind == "string":
            if self.take(".."):
                other = self.peek()[1]
                self.at += 1
                return ("range", _text(text), _text(other), at)
            return ("text", _text(text), text.endswith("i"), at)
        if kind == "regex":
            body, _, flags = text[1:].rpartition("/")
            if set(flags) - set("s"):
                raise self.wrong(at, f"/{body}/ has the flags {flags!r}; takes s")
            return ("regex", (f"(?{flags})" if flags else "") + body.replace(r"\/", "/"), at)
        if kind == "name":
            return ("name", text, at)
        inner = self.choice()
        while self.peek()[0] == "line" and self.at < len(self.items) - 1:
            self.at += 1
        if not self.take(")" if text == "(" else "]"):
            raise self.wrong(at, f"{text!r} is not closed")
        return inner if text == "(" else ("repeat", inner, 0, 1)


def _text(source: str) -> str:
    return str(ast.literal_eval(source.removesuffix("i")))


class _Maker:
    """Adds the parts of an automaton to a builder, from the trees of rules."""

    def __init__(self, b: Builder, rules: dict[str, Any]):
        self.b, self.rules = b, rules

    def name(self, name: str, inside: tuple[str, ...]) -> Part:
        if name in inside:
            raise Recursive(f"grammar: the rule {name!r} refers to itself ({' -> '.join((*inside, name))})")
        if name not in self.rules:
            raise ValueError(f"grammar: there is no rule {name!r}")
        return self.part(self.rules[name], (*inside, name))

    def part(self, tree: Any, inside: tuple[str, ...]) -> Part:
        b, make = self.b, lambda x: self.part(x, inside)
        match tree:
            case ("choice", parts):
                return b.any_of(*map(make, parts))
            case ("sequence", parts):
                return b.seq(*map(make, parts))
            case ("repeat", part, low, high):
                again: Callable[[], Part] = lambda: make(part)
                return b.star(make(part)) if (low, high) == (0, None) else b.repeat(again, low, high)
            case ("name", name, _):
                return self.name(name, inside)
            case ("regex", pattern, _):
                return b.dfa(whole(pattern))
            case ("range", low, high, _):
                return b.dfa(whole(f"[{re.escape(low)}-{re.escape(high)}]"))
            case ("text", text, either, _):
                if not either:
                    return b.bytes(text.encode())
                return b.seq(*(b.any_of(*(b.bytes(x.encode()) for x in {c.lower(), c.upper()})) for c in text))
        raise AssertionError(tree)
