"""Text after tokens that are already there: exactly that text, in the tokens that it has in its place."""

import pytest

import decodax as dx
from decodax import search
from decodax.engine.request import Request
from decodax.front.infill import template_of
from decodax.io.appended import appended
from decodax.io.text import Tokenizer
from tests.laws.toy import Toy
from tests.small_tokenizers import KINDS

WHOLE = ["def fib(n):\n    return fib(n - 1) + fib(n - 2)\n", "it's  what we don't know, I don't", "n < 2 ' quoted ' ?"]
SPELLING = ["byte-level", "sentencepiece", "gemma", "unigram"]


@pytest.fixture(scope="module", params=SPELLING)
def tok(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer(KINDS[request.param]())


def test_any_text_is_added_as_it_is(tok: Tokenizer) -> None:
    for whole in WHOLE:
        for cut in range(1, len(whole)):
            ids = tok.encode(whole[:cut])
            for middle in (cut + 1, cut + 3, len(whole)):
                new = appended(tok, ids, whole[cut:middle])
                assert tok.continuation(ids, new) == whole[cut:middle], (whole, cut, middle)
                # and again after what was added, whatever the tokens are
                more = appended(tok, ids + new, whole[middle:])
                assert tok.continuation(ids + new, more) == whole[middle:], (whole, cut, middle)


def test_tokens_are_those_of_the_whole_text_where_it_begins_with_those_before(tok: Tokenizer) -> None:
    stable = 0
    for whole in WHOLE:
        for cut in range(1, len(whole)):
            before, both = tok.encode(whole[:cut]), tok.encode(whole)
            if both[:len(before)] == before and tok.decode(both) == whole:
                assert appended(tok, before, whole[cut:]) == both[len(before):], (whole, cut)
                stable += 1
    assert stable > 20


def test_words_after_the_border_keep_their_tokens(tok: Tokenizer) -> None:
    """Where a token spans the border, the words after it are those of the whole text."""
    ids = tok.encode("def fi")
    assert appended(tok, ids, "b(n - 1) + fib(n - 2)")[-3:] == tok.encode("def fib(n - 1) + fib(n - 2)")[-3:]


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece", "gemma"])
@pytest.mark.parametrize(("before", "text"), [("Hé", "llo wörld 🦜"), ("日", "本語 Q"), ("x", "\t\n\n  ")])
def test_bytes_stand_for_characters_without_a_token(kind: str, before: str, text: str) -> None:
    tok = Tokenizer(KINDS[kind]())
    ids = tok.encode(before)
    assert tok.continuation(ids, appended(tok, ids, text)) == text


def test_after_special_tokens_a_text_begins_or_goes_on() -> None:
    tok = Tokenizer(KINDS["sentencepiece"]())
    begin, end = tok.encode("")[0], tok.backend.token_to_id("</s>")
    assert tok.decode([begin, *appended(tok, [begin], "fib(n)")]) == "fib(n)"
    ids = [*tok.encode("def fib"), end]
    assert tok.decode(ids + appended(tok, ids, "return n")) == "def fibreturn n"
    assert tok.decode(ids + appended(tok, ids, " return n")) == "def fib return n"
    named = appended(tok, tok.encode("def"), " fib</s>")
    assert named[-1] == end and tok.decode(named) == "fib"


def test_text_that_a_tokenizer_cannot_spell_is_read_as_it_reads_it() -> None:
    tok = Tokenizer(KINDS["unigram"]())
    ids = tok.encode("def fi")
    new = appended(tok, ids, "b(n) Q fib")
    assert tok.continuation(ids, new) == "b(n)  fib"        # the unknown token has no text
    for kind in ("word-piece", "word-level"):
        tok = Tokenizer(KINDS[kind]())
        ids = tok.encode("return n")
        assert tok.continuation(ids, appended(tok, ids, " if n")) == " if n"
        assert appended(tok, ids, "?") == tok.encode("return n ?", add_special_tokens=False)[len(ids):]


def toy(kind: str) -> dx.LM:
    tok = Tokenizer(KINDS[kind]())
    return dx.LM(model=Toy(len(tok)), params=Toy(len(tok)).init_params(0), vocab_size=len(tok), tokenizer=tok)


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece", "unigram"])
def test_texts_after_a_context_a_gap_and_a_system_text_go_on_from_there(kind: str) -> None:
    lm = toy(kind)
    tok = lm.tokenizer
    assert tok is not None
    first, second = Request.read(lm, ["b(n)", tok.encode("it's")], context="def fi", max_new_tokens=2).prompts
    assert first[:len(tok.encode("def fi"))] == tok.encode("def fi") and tok.decode(first) == "def fib(n)"
    assert second == tok.encode("def fi") + tok.encode("it's")         # ids stay as they are
    ids = template_of(lm, 0, ["def fi", 2, "b(n)"], 0)
    at = len(tok.encode("def fi"))
    assert ids[at:at + 2] == [0, 0]
    assert tok.continuation(tok.encode("def fi"), ids[at + 2:]) == "b(n)"
    run = search.lag_decode(lm, ["b(n)"], window=1, steps=0, system="def fi")
    assert tok.continuation(tok.encode("def fi"), run.queue[0]) == "b(n)"


def test_a_text_within_another_has_no_space_that_is_not_its_own() -> None:
    for kind in SPELLING:
        tok = Tokenizer(KINDS[kind]())
        ids = tok.encode("n")
        for text in ("fib", " fib(n)", "\n", "return n\n"):
            assert tok.continuation(ids, appended(tok, None, text)) == text
