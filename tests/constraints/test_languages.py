"""Grammars, tools, phrases, and constraints that begin later; masks against those of llguidance."""

import json
from typing import Any

import jsonschema
import lark
import llguidance
import numpy as np
import pytest

import decodax as dx
from decodax.constraints.automata import anything, phrases, tools, up_to, without
from decodax.constraints.dfa import Dfa
from decodax.constraints.ebnf import Elsewhere, Recursive, ebnf
from decodax.constraints.hosted import Matcher
from decodax.constraints.matching import VocabularyBytes, hosted, language
from decodax.constraints.tokens import TokenDfa, trie_of
from decodax.io.load import LM
from tests.constraints.languages import EXPR, TIME, WEATHER

GRAMMARS = {
    "alternatives": ('start: greeting " " name ("," " " name)~0..2 "!"\ngreeting: "hello"i | "hi"     // both\n'
                     '   | "hey" -> informal\nname: /[a-c]+/\n',
                     ["hi a!", "HELLO b, c!", "hey a, b, c!", "hey !", "hi a, b, c, a!"]),
    "options": ('start: [sign] INT ("." INT)?\nsign: "+" | "-"\n%import common.INT\n',
                ["-3.14", "12", "+0", "--1", "1."]),
    "ranges": ('start: ("a".."f")+ "x"{2,3} | "#" /[^#]/*\n', ["abxx", "fxxx", "gxx", "axxxx", "#hello", "##"]),
    "priorities": ('?start.2: word+\n!word: "un" | "do"\n', ["undo", "ununun", "", "und"])}


@pytest.mark.parametrize("name", GRAMMARS)
def test_rules_are_read_as_lark_reads_them(name: str) -> None:
    source, texts = GRAMMARS[name]
    # Lark has repetition counts by ~ alone
    parser = lark.Lark(source.replace("{2,3}", "~2..3").replace("?start.2", "start"), parser="earley",
                       lexer="dynamic_complete")
    automaton = ebnf(source)
    for text in texts:
        try:
            parser.parse(text)
            valid = True
        except lark.exceptions.LarkError:
            valid = False
        assert automaton.accepts(text.encode()) == valid, text


@pytest.mark.parametrize(("source", "message"), [
    ('start: "(" start ")" | "x"', r"refers to itself \(start -> start\)"), ("%ignore X\nstart: X", "%ignore"),
    ('start: b', "no rule 'b'"), ('a: "x"', "a rule named start"), ('start: ("a"', "'\\(' is not closed"),
    ('start: "a" ~ x', "got 'x', takes a number"), ('start: "a"\nstart: "b"', "'start' is defined twice"),
    ('start: "a" $', "line 1: unexpected '\\$'"), ("%import common.NOPE\nstart: NOPE", "takes common.NAME"),
    ("start: /a/g", "no rule 'g'"),
    ("start: /a/u", "has the flags 'u'"), ("start /a/", "expected a colon"),
    ("start: /[^\\x00-\\U0010ffff]/", "no text")])
def test_a_syntax_error_of_a_grammar_says_where(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ebnf(source)


def test_languages_of_free_text() -> None:
    d = up_to(b"</t>")
    assert d.accepts(b"a<</t>") and not d.accepts(b"</t></t>") and not d.accepts(b"a")
    d = without((b"ab", b"c"))
    assert all(d.accepts(t) != (b"ab" in t or b"c" in t) for t in (b"", b"ba", b"xaab", b"c", b"aaa", b"acb"))
    d = phrases(anything(), ["foo", "oof"], ["fo!"])
    for text in ("foof", "foo oof", "foo", "foo!oof", "oofoo", "fo!oofoo"):
        assert d.accepts(text.encode()) == ("foo" in text and "oof" in text and "fo!" not in text)
    with pytest.raises(ValueError, match="required_phrases: no text has"):
        phrases(anything(), ["ab"], ["b"])
    d = tools([WEATHER, TIME])
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    for text, valid in (("", True), ("so", True), (f"so {call}", True), (f"{call}{call} and", True),
                        (call.replace("Rome", "Sao Paulo"), False), (call.replace("get_", "set_"), False),
                        ("<tool_call>\n", False), (call.replace("city", "town"), False),
                        ('<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>', True)):
        assert d.accepts(text.encode()) == valid, text
    only = tools([WEATHER, TIME], "required")
    assert only.accepts(f"{call}\n{call}".encode()) and not only.accepts(b"") and not only.accepts(b"so")
    assert not tools([WEATHER, TIME], "time").accepts(call.encode())


def test_a_schema_that_refers_to_itself_goes_by_a_grammar(lm: LM) -> None:
    tree = {"$defs": {"node": {"type": "object", "properties": {
        "v": {"type": "integer", "maximum": 99, "minimum": 0},
        "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
        "required": ["v", "next"], "additionalProperties": False}}, "$ref": "#/$defs/node"}
    assert lm.tokenizer is not None
    short = {i: 6.0 for i, t in enumerate(lm.tokenizer.token_bytes()) if t in (b"null", b"n", b"u")}
    out = dx.generate(lm, "one", constraint=dx.constraints.grammar(f"start: %json {json.dumps(tree)}"),
                      max_new_tokens=120, temperature=0.7,
                      logit_bias=short, num_samples=4)
    assert out.text is not None
    ended = [text for text, status in zip(out.text, out.status, strict=True) if status == dx.Status.EOS]
    assert ended
    for text in ended:
        jsonschema.validate(json.loads(text), tree)


def test_grammars_that_need_no_stack_close_within_their_budget(lm: LM) -> None:
    assert not hosted(GRAMMARS["options"][0]) and hosted(EXPR) and hosted("{}")
    out = dx.generate(lm, ["one", "x"], constraint=dx.constraints.grammar(GRAMMARS["alternatives"][0]),
                      max_new_tokens=14, temperature=1.0)
    assert out.text is not None and all(ebnf(GRAMMARS["alternatives"][0]).accepts(t.encode()) for t in out.text)
    for bad, error in (("%ignore X\nstart: X", Elsewhere), ('start: start "x"', Recursive)):
        with pytest.raises(error):
            ebnf(bad)


@pytest.mark.parametrize("name", ["regex", "schema", "grammar"])
def test_masks_are_those_of_llguidance(lm: LM, name: str) -> None:
    """On what both honour: the same tokens may come next, all along texts of the language."""
    assert lm.tokenizer is not None
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "yz"]}, "b": {"type": "boolean"}},
              "required": ["a", "b"], "additionalProperties": False}
    pattern = r"(ab|a[0-9]{1,3}c)*x?"
    whole, theirs, texts = {
        "regex": (language(("regex", pattern)), f"start: /{pattern}/", ["aba12cx", "a9c", "", "ab"]),
        "schema": (language(("regex", r'\{"a":"(x|yz)","b":(true|false)\}')),
                   "start: %json " + json.dumps({**schema, "x-guidance": {"whitespace_flexible": False}}),
                   ['{"a":"yz","b":true}', '{"a":"x","b":false}']),
        "grammar": (language(("grammar", GRAMMARS["ranges"][0])), GRAMMARS["ranges"][0], ["abxx", "#hello"])}[name]
    assert isinstance(whole, Dfa)
    vocabulary = VocabularyBytes(lm.tokenizer, lm.vocab_size).all()
    eos = tuple(lm.eos)
    matcher = Matcher([theirs], vocabulary, eos, lm.tokenizer.encode)
    mine = TokenDfa.build([whole], trie_of(vocabulary), eos)
    compared = 0
    for text in texts:
        for ids in ([*text.encode()], lm.tokenizer.encode(text, add_special_tokens=False)):
            if ids and vocabulary[ids[0]][:1] != text.encode()[:1]:
                continue
            state = int(mine.starts[0])
            for k in range(len(ids) + 1):
                allowed = mine.next[state][mine.classes] >= 0
                held = matcher.after(0, tuple(ids[:k]))
                assert held is not None
                got = np.unpackbits(matcher.allowed_of(held), bitorder="little")[:lm.vocab_size].astype(bool)
                odd = np.flatnonzero(allowed != got)
                if got.sum() == 1:      # where one text must follow llguidance allows the longest token of it alone
                    forced = vocabulary[int(got.argmax())]
                    odd = odd[[not (allowed[t] and forced.startswith(vocabulary[t])) for t in odd]] if len(odd) else odd
                assert not len(odd), (text, k, [(int(t), vocabulary[t], bool(allowed[t])) for t in odd[:5]])
                compared += 1
                if k < len(ids):
                    state = int(mine.next[state, mine.classes[ids[k]]])
    assert compared > 4 and llguidance.__name__


@pytest.mark.parametrize(("given", "message"), [
    (lambda c: c.tools([]), "tools: got .*takes a list"),
    (lambda c: c.tools([3]), r"tools\[0\]: got 3, takes a function"),
    (lambda c: c.tools([TIME], choice="x"), "tool_choice: got 'x'"),
    (lambda c: c.tools([TIME], tags="x"), "tool_tags: got 'x'"),
    (lambda c: c.grammar(EXPR).after("x"), "after: got some beside a grammar"),
    (lambda c: c.phrases(["x"], within=c.grammar(EXPR)), "required_phrases: got some beside a grammar"),
    (lambda c: c.grammar("start: ("), "grammar: line 1"), (lambda c: c.phrases([""]), "required_phrases: got"),
    (lambda c: c.phrases(banned=[["a"]]), r"banned_phrases: got \['a'\]"), (lambda c: c.phrases(),
                                                                            "phrases: got neither"),
    (lambda c: c.phrases(["a" * 300]), "phrases: prompt 0 has room for 4"), (lambda c: c.grammar("start: %nope"),
                                                                             "grammar: ")])
def test_bad_arguments_are_refused_by_name(lm: LM, given: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        dx.generate(lm, "one", max_new_tokens=4, constraint=given(dx.constraints))
