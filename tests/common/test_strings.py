"""A string is short for an object: its values are read as the options' annotations ask."""

from pathlib import Path
from typing import Any

import pytest

import decodax as dx
from decodax.common.options import REQUIRED, Option
from decodax.common.strings import parse_options, split


@pytest.mark.parametrize(("text", "value"), [
    ("regex:[0-9]+", {"pattern": "[0-9]+"}), ("regex:pattern=[0-9]{1,3}", {"pattern": "[0-9]{1,3}"}),
    ("regex:a,b=c", {"pattern": "a,b=c"}), ("regex:pattern='x y'", {"pattern": "x y"}),
    ("regex:12", {"pattern": "12"}), ("regex:true", {"pattern": "true"}),
    ("choices:texts=(yes,no)", {"texts": ("yes", "no")}), ("choices:yes,no", {"texts": ("yes", "no")}),
    ("choices:(don't know, 1)", {"texts": ("don't know", "1")}), ("choices:yes", {"texts": ("yes",)}),
    ('json-schema:{"type": "integer"}', {"schema": '{"type": "integer"}'}),
    ("phrases:required=(a b,c),banned=(d,)", {"required": ("a b", "c"), "banned": ("d",)})])
def test_a_constraint_is_said_as_it_is_read(text: str, value: dict[str, Any]) -> None:
    found = dx.constraints.parse(text)[1]
    if "schema" in found and not isinstance(found["schema"], str):
        found = {"schema": '{"type": "integer"}'}
    assert found == value


@pytest.mark.parametrize("word", ["true", "True", "TRUE", "yes"])
def test_true_and_false_may_be_written_in_any_case(word: str) -> None:
    assert dx.select.parse(f"mbr:greedy={word}")[1] == {"greedy": True}
    assert dx.select.parse("mbr:greedy=no,itself=false")[1] == {"greedy": False, "itself": False}
    assert dx.caches.parse("snapkv:every=none")[1] == {"every": None}


def test_a_schema_or_grammar_may_be_in_a_file(tmp_path: Path) -> None:
    schema, rules = tmp_path / "schema.json", tmp_path / "rules.lark"
    schema.write_text('{"type": "integer"}')
    rules.write_text('start: "a"+')
    read = lambda text: dx.constraints.make(text.partition(":")[0], **dx.constraints.parse(text)[1])
    assert read(f"json-schema:{schema}") == dx.constraints.json_schema({"type": "integer"})
    assert read(f"grammar:{rules}") == dx.constraints.grammar('start: "a"+')
    with pytest.raises(ValueError, match=r"schema: got 'absent\.json', and there is no such file"):
        dx.constraints.parse("json-schema:absent.json")


@pytest.mark.parametrize(("text", "message"), [
    ("snapkv:windw=3", r"^cache: 'snapkv' takes no option 'windw'; takes budget=2048, .*; did you mean window_size\?"),
    ("snapkv:512", r"takes NAME:OPTION=VALUE,\.\.\.; got '512' without an option's name; takes budget=2048"),
    ("snapkv:budget=1,budget=2", "got budget twice")])
def test_a_wrong_option_is_named_with_all_that_there_are(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dx.caches.parse(text)


def test_an_option_that_resembles_the_only_one_is_no_text() -> None:
    with pytest.raises(ValueError, match="'regex' takes no option 'patern'; takes pattern"):
        dx.constraints.parse("regex:patern=a")


def test_the_call_says_the_same_of_a_wrong_option_as_the_string() -> None:
    for call, text in (
            (lambda: dx.algorithms.beam_search(num_beams=4), "beam-search:num_beams=4"),
            (lambda: dx.algorithms.contrastive_search(penalty_alpha=0.6), "contrastive-search:penalty_alpha=0.6")):
        with pytest.raises(TypeError) as called:
            call()
        with pytest.raises(ValueError, match="takes no option") as written:
            dx.algorithms.parse(text)
        assert str(called.value) == str(written.value)
        assert "did you mean" in str(called.value)
    with pytest.raises(TypeError, match=r"^cache: 'snapkv' takes no option 'windw'; takes budget=2048"):
        dx.caches.snapkv(windw=3)
    with pytest.raises(TypeError, match=r"^search: 'particle-filter' takes no option 'rewrd'; .*did you mean reward"):
        dx.search.particle_filter(rewrd=len)


def test_values_are_read_by_their_annotations() -> None:
    known = {"size": Option(1, int | str), "at": Option((), tuple[int, ...]), "name": Option(None, str | None),
             "free": Option(None)}
    given = parse_options("x:size=64MB,at=(1,2),name=1e3,free=[0.5,a-b]", known)
    assert given == {"size": "64MB", "at": (1, 2), "name": "1e3", "free": [0.5, "a-b"]}
    assert parse_options("x:free=((1,2),(3,))", known) == {"free": ((1, 2), (3,))}
    assert parse_options("x", {"y": Option(REQUIRED)}) == {}


def test_commas_within_brackets_and_quotes_do_not_split() -> None:
    assert split("a=[1,{2,3}],b='x,y',c=it's,d") == ["a=[1,{2,3}]", "b='x,y'", "c=it's", "d"]


def test_a_configured_method_is_written_as_the_call_that_makes_it() -> None:
    assert repr(dx.algorithms.fast_dllm(threshold=0.9)) == "dx.algorithms.fast_dllm(threshold=0.9)"
    assert repr(dx.algorithms.speculative_decoding(length=4)) == "dx.algorithms.speculative_decoding(length=4)"


def test_every_entry_is_a_function_of_its_shelf() -> None:
    from decodax.common.registry import ALGORITHMS, CACHES, CONSTRAINTS, SEARCHES, SELECTS

    for home, shelf in ((dx.algorithms, ALGORITHMS), (dx.caches, CACHES), (dx.search, SEARCHES),
                        (dx.select, SELECTS), (dx.constraints, CONSTRAINTS)):
        for name in shelf.identifiers():
            assert callable(getattr(home, name)), f"{home.__name__}.{name}"
    assert dx.algorithms.autoregressive() == dx.Autoregressive()


@pytest.mark.parametrize(("make", "message"), [
    (lambda: dx.constraints.regex("(?=a)"), "a look-around cannot be a constraint"),
    (lambda: dx.constraints.regex("a("), "regex: 'a[(]': missing"),
    (lambda: dx.constraints.json_schema({"type": "objct"}), "#/type: got 'objct', takes string"),
    (lambda: dx.constraints.grammar('x: "a"'), "grammar: has no rule start")])
def test_a_wrong_constraint_is_refused_when_it_is_made(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_list_of_one_item_needs_no_parentheses() -> None:
    known = {"lengths": Option((2, 4), tuple[int, ...]), "batch": Option(1, int)}
    assert parse_options("automatic:lengths=2,batch=8", known) == {"lengths": (2,), "batch": 8}
    assert parse_options("automatic:lengths=(2,4)", known) == {"lengths": (2, 4)}
