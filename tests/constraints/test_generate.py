"""Constraints on texts of models: each text is of its language, however it is decoded, and closes within its budget."""

import json
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
from scipy.stats import chisquare

import decodax as dx
from decodax.constraints.expressions import regex
from decodax.constraints.languages import from_names
from decodax.constraints.schema import json_schema
from decodax.core import drivers
from decodax.io.load import LM
from tests.constraints.schemas import CALL, PERSON
from tests.matrix import often

PROMPTS = ["one", "def f(", "x"]


@pytest.mark.wide
@pytest.mark.parametrize("base", often([False], [False, True]))
def test_forced_tokens_are_drafted(lm: LM, base: bool) -> None:
    from decodax.algorithms.speculative import drafts

    alg = dx.Speculative(drafts.Forced(6, drafts.PromptLookup(4) if base else None))
    named = {"type": "object", "properties": {"identifier": {"type": "boolean"}, "description": {"type": "null"}},
             "required": ["identifier", "description"]}
    given: dict[str, Any] = dict(constraint=[dx.constraints.json_schema(named), None,
                                             dx.constraints.json_schema(PERSON)], max_new_tokens=60, temperature=1.0)
    plain, found = dx.generate(lm, PROMPTS, **given), dx.generate(lm, PROMPTS, algorithm=alg, **given)
    assert found.tokens.tolist() == plain.tokens.tolist() and found.status == plain.status
    assert found.stats.rounds[0] < 0.8 * plain.stats.rounds[0]
    free = dx.generate(lm, "one", max_new_tokens=9, algorithm=alg)
    assert base or int(free.stats.drafted[0]) == 0


@pytest.mark.full
def test_drafted_beams_keep_to_it(lm: LM) -> None:
    from decodax.algorithms.beams import BeamSearch
    from decodax.algorithms.speculative import drafts

    given: dict[str, Any] = dict(constraint=dx.constraints.regex(CALL), max_new_tokens=14, num_samples=2)
    plain = dx.generate(lm, PROMPTS[:2], algorithm=BeamSearch(2), **given)
    found = dx.generate(lm, PROMPTS[:2], algorithm=BeamSearch(2, draft=drafts.DraftModel(lm)), **given)
    assert found.tokens.tolist() == plain.tokens.tolist() and found.text is not None
    assert all(re.fullmatch(CALL, t) for t in found.text)


@pytest.mark.wide
def test_every_budget_closes(lm: LM) -> None:
    """From the shortest possible on."""
    with pytest.raises(ValueError, match=r"^json_schema: prompt 0 has room for 1 new tokens; the shortest") as error:
        dx.generate(lm, "one", constraint=dx.constraints.json_schema(PERSON), max_new_tokens=1)
    found = re.search(r"takes (\d+) tokens", str(error.value))
    assert found is not None
    least = int(found[1])
    budgets = list(range(least, least + 20))
    out = dx.generate(lm, ["one"] * 20, constraint=dx.constraints.json_schema(PERSON), max_new_tokens=budgets,
                      temperature=1.2)
    assert out.text is not None and {*out.status} == {dx.Status.EOS}
    for text in out.text:
        jsonschema.validate(json.loads(text), PERSON)
    assert out.lengths[0] == least and all(n <= b for n, b in zip(out.lengths, budgets, strict=True))
    # without an end of the sequence the text is whole where its budget ends
    whole = dx.generate(lm, ["one"] * 3, constraint=dx.constraints.regex(r"(ab)+"), max_new_tokens=[2, 5, 8],
                        eos_token_id=[])
    assert whole.text is not None and all(re.fullmatch("(ab)+", t) for t in whole.text)


COMPLETE: list[tuple[str, dict[str, Any]]] = [
    ("yes|no", dict(constraint=dx.constraints.choices(["yes", "no"]))),
    ("ab|cd", dict(constraint=dx.constraints.regex("ab|cd"))),
    ("true|false", dict(constraint=dx.constraints.json_schema({"type": "boolean"}))),
    ("abb", dict(constraint=dx.constraints.grammar('start: "a" "b"~2'))),
    ("(ab){1,2}", dict(constraint=dx.constraints.regex("(ab){1,2}"), stop="zz")),
    ("a|a{9}", dict(constraint=dx.constraints.regex("a|a{9}"), max_new_tokens=4))]
"""Texts that are complete where none goes on, or none that fits into the budget."""
DECODED: dict[str, dict[str, Any]] = {
    "greedy": {}, "sampled": dict(temperature=1.0), "drafted": dict(algorithm="prompt-lookup:length=4"),
    "beams": dict(algorithm=dx.algorithms.beam_search(3)), "samples": dict(temperature=1.0, num_samples=2),
    "best first": dict(algorithm="best-first-beam-search"), "places": dict(batch_size=1)}


@pytest.mark.wide
@pytest.mark.parametrize("way", often(["drafted", "beams"], DECODED))
def test_a_complete_text_ends_without_an_end_of_sequence(lm: LM, way: str) -> None:
    """Each constraint in a row of its own, which the free row beside them does not feel."""
    for pattern, one in COMPLETE:
        given: dict[str, Any] = {**dict(max_new_tokens=12, eos_token_id=[]), **one, **DECODED[way]}
        out = dx.generate(lm, ["one", "no no abab aa"], **given)
        assert {*out.status} == {dx.Status.STOP}, (one, out.status, out.text)
        assert out.text is not None and all(re.fullmatch(pattern, text) for text in out.text), out.text


def test_a_free_row_beside_one_that_closes_is_as_it_was(lm: LM) -> None:
    given: dict[str, Any] = dict(max_new_tokens=9, eos_token_id=[], temperature=1.0)
    out = dx.generate(lm, ["one", "x"], constraint=[dx.constraints.regex("ab"), None], **given)
    assert out.status == [dx.Status.STOP, dx.Status.LENGTH]
    assert out.row(1).tolist() == dx.generate(lm, ["one", "x"], **given).row(1).tolist()


@pytest.mark.wide
def test_a_least_length_that_nothing_can_have_is_said(lm: LM) -> None:
    cases = (dict(constraint=dx.constraints.choices(["ab", "abc"])),
             3), (dict(constraint=dx.constraints.regex("a{1,5}")),
                  5), (dict(constraint=dx.constraints.json_schema({"const": 1})), 1)
    for given, most in cases:
        with pytest.raises(ValueError, match=rf"^min_new_tokens: got 9 for prompt 0, and the longest .* takes {most} "):
            dx.generate(lm, "one", min_new_tokens=9, max_new_tokens=20, **given)      # type: ignore[arg-type]
    out = dx.generate(lm, "one", constraint=dx.constraints.regex("(ab)+"), min_new_tokens=9, max_new_tokens=20)
    assert out.lengths[0] > 9 and out.status == [dx.Status.EOS]
    with pytest.warns(UserWarning, match="^min_new_tokens: got 9 for prompt 0, which has room for 4 new tokens"):
        dx.generate(lm, "one", min_new_tokens=9, max_new_tokens=4)


@pytest.mark.wide
def test_the_law_is_the_models_held_to_the_language(lm: LM) -> None:
    """Weighted samples of a choice have the model's own proportions. At 1e-5."""
    texts, rows = ["ab", "a", "ba", "b"], 4000
    assert lm.tokenizer is not None
    out = dx.generate(lm, ["one"] * rows, constraint=dx.constraints.choices(texts), max_new_tokens=4, temperature=1.0,
                      logprobs=0, seed=3)
    assert out.text is not None and out.logprobs is not None
    counts = np.array([out.text.count(t) for t in texts])
    # by hand: every way to write a text in tokens, each token by the model's chances held to what goes on
    ways: dict[tuple[int, ...], tuple[float, float, str]] = {}
    for i in range(rows):
        row = tuple(out.row(i).tolist())
        ways[row] = float(out.logprobs.raw[i].sum()), float(out.logprobs.processed[i].sum()), out.text[i]
    drawn = np.array([sum(np.exp(q) for _, q, text in ways.values() if text == t) for t in texts])
    assert abs(drawn.sum() - 1) < 0.01          # all ways were met but for rare ones
    assert chisquare(counts, drawn / drawn.sum() * rows).pvalue > 1e-5
    weights, mass = np.exp(out.log_weights), sum(np.exp(p) for p, _, _ in ways.values())
    assert abs(weights.mean() / mass - 1) < 5 * weights.std() / mass / rows ** 0.5 + 0.01


@pytest.mark.parametrize(("given", "error", "message"), [
    (lambda c: c.regex("("), ValueError, "^regex: "), (lambda c: c.regex(3), TypeError, "^regex: got 3"),
    (lambda c: c.choices([]), ValueError, "^choices: "), (lambda c: c.choices("yes"), ValueError, "^choices: "),
    (lambda c: c.choices([""]), ValueError, "^choices: got an empty"),
    (lambda c: c.json_schema("{"), ValueError, "^json_schema: not JSON"),
    (lambda c: c.json_schema({"not": {}}), ValueError, "^json_schema: #/not"),
    (lambda c: "[ab]+", ValueError, "^constraint: unknown name"), (lambda c: 3, TypeError,
                                                                   "^constraint: got 3, takes a"),
    (lambda c: [c.regex("a"), c.regex("b")], ValueError, "^constraint: got 2 for 1 prompts"),
    (lambda c: c.regex("[☃]{40}"), ValueError, "^regex: prompt 0 has room for 8 new tokens")])
def test_values_that_are_no_constraint_are_refused(lm: LM, given: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        dx.generate(lm, "one", max_new_tokens=8, constraint=given(dx.constraints))


def test_a_string_means_the_constraint(lm: LM) -> None:
    texts = [dx.generate(lm, "one", max_new_tokens=8, temperature=1.0, constraint=given).text
             for given in (dx.constraints.regex("[ab]{3}"), "regex:pattern='[ab]{3}'")]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(("given", "message"), [
    (dict(regex="a", choices=["a"]), "^regex and choices: got both"),
    (dict(tool_choice="auto"), "tool_choice: got 'auto' without tools"),
    (dict(constraint_after="x"), "constraint_after: got 'x' without a constraint")])
def test_unsupported_keys_of_data_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_names(given)


@pytest.mark.parametrize(("name", "value"), [("regex", "a"), ("num_beams", 4), ("penalty_alpha", 0.6)])
def test_options_of_slots_are_no_arguments_of_generate(lm: LM, name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"^{name}: unknown argument; (constraint|algorithm)=decodax\."):
        dx.generate(lm, "one", **{name: value})


@pytest.mark.wide
def test_a_constraint_and_a_ban_that_leave_nothing_end_the_row(lm: LM) -> None:
    assert lm.tokenizer is not None
    ids = [i for i, b in enumerate(lm.tokenizer.token_bytes(True)) if b"y" in b]
    out = dx.generate(lm, "one", constraint=dx.constraints.choices(["yes", "yet"]), max_new_tokens=8,
                      suppress_tokens=ids)
    assert out.status == [dx.Status.DEAD_END] and out.lengths[0] == 0


@pytest.mark.wide
def test_another_constraint_of_the_same_size_compiles_nothing(lm: LM) -> None:

    dx.generate(lm, "one", constraint=dx.constraints.regex("[a-c]{2,3}"), max_new_tokens=8)
    before = drivers.compiled()
    for given in (dict(constraint=dx.constraints.regex("[x-z]{2}")),
                  dict(constraint=dx.constraints.choices(["on", "off"]))):
        dx.generate(lm, "one", max_new_tokens=8, **given)
    assert drivers.compiled() == before


def test_languages_are_made_once() -> None:
    assert json_schema(PERSON) is json_schema(json.dumps(PERSON)) and regex("a").accepts(b"a")
