"""Texts with tools, thoughts cut short, and steps that a small model drafts."""

import dataclasses
from typing import Any

import numpy as np
import pytest

import decodax as dx
from decodax import search
from decodax.io.text import Tokenizer
from tests.laws.cases import lm as worded
from tests.laws.toy import Toy
from tests.small_tokenizers import KINDS

OPTIONS: dict[str, Any] = dict(max_new_tokens=24, min_new_tokens=24)


@pytest.mark.wide
def test_a_result_follows_its_call_and_is_read() -> None:
    lm, seen = worded("llama"), []

    def act(prompt: Any, text: str) -> str:
        seen.append((prompt, text))
        return "hg"

    tools = search.WithTools(act, rounds=2, last="fa")
    out = search.explore(lm, ["abcd", "hgh"], tools, until=["b", "c", "e"], **OPTIONS)
    assert {p for p, _ in seen} <= {"abcd", "hgh"} and len(seen) == 4
    for p, prompt in enumerate(("abcd", "hgh")):
        first, second = [t for q, t in seen if q == prompt]
        assert out.text[p].startswith(first + "hg") and out.text[p].startswith(second + "hgfa")
        # the text goes on as the model has it behind what was put there
        ids = out.result.row(p).tolist()
        assert lm.tokenizer is not None
        rest = dx.generate(lm, [lm.tokenizer.encode(prompt) + ids[:-2]], max_new_tokens=2, min_new_tokens=2)
        assert rest.row(0).tolist() == ids[-2:]
    assert lm.tokenizer is not None
    assert out.fed == sum(len(lm.tokenizer.encode(t, add_special_tokens=False)) for t in ("hg", "hgfa")) * 2


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["sentencepiece", "unigram", "byte-level"])
def test_a_result_goes_on_within_the_word_before_it(kind: str) -> None:
    tok = Tokenizer(KINDS[kind]())
    lm = dx.LM(model=Toy(len(tok)), params=Toy(len(tok)).init_params(0), vocab_size=len(tok), tokenizer=tok)
    seen: list[str] = []

    def act(prompt: Any, text: str) -> str:
        seen.append(text)
        return "ib(n)"

    tools = search.WithTools(act, rounds=3, last="\n  retur")
    out = search.explore(lm, ["def f", "return n if"], tools, step_tokens=3, max_new_tokens=60, temperature=1.0)
    assert len(seen) == 6
    for text in out.text:
        rounds = [t for t in seen if text.startswith(t)]
        assert len(rounds) == 3 and all(text.startswith(t + "ib(n)") for t in rounds)
        assert text.startswith(rounds[-1] + "ib(n)\n  retur")


@pytest.mark.wide
def test_thoughts_that_repeat_are_ended_once() -> None:
    lm, asked = worded("llama"), []

    def redundant(prompt: Any, thoughts: Any) -> bool:
        asked.append(list(thoughts))
        return True

    out = search.explore(lm, ["abcd"], search.TrimR(redundant, guidance="hghg", patience=2, least=1),
                        until=["b", "c", "e", "a"], **OPTIONS)
    assert [len(x) for x in asked] == [2, 3]
    assert out.text[0].startswith("".join(asked[-1]) + "hghg")
    free = search.explore(lm, ["abcd"], search.TrimR(lambda p, t: False, guidance="hghg"), until=["b", "c"], **OPTIONS)
    assert free.text == dx.generate(lm, ["abcd"], **OPTIONS).text


@pytest.mark.wide
@pytest.mark.parametrize("draft", ["llama", "sliding"])
def test_steps_drafted_and_compared_word_for_word_are_the_targets_own(draft: str) -> None:
    lm, prompts = worded("llama"), ["abcd", "hgh"]
    plain = dx.generate(lm, prompts, **OPTIONS)
    out = search.lookahead_reasoning(lm, worded(draft), prompts, until=["a", "b", "c", "d", "e"], depth=2,
                                    same=str.__eq__, step_tokens=6, **OPTIONS)
    assert out.text == plain.text
    if draft == "llama":                # a draft that is the target is always right
        assert sum(out.accepted) > 0 and out.rounds < max(out.steps)
    looser = search.lookahead_reasoning(lm, worded(draft), prompts, until=["a", "b", "c"], depth=2,
                                       same=lambda a, b: True, step_tokens=6, **OPTIONS)
    assert sum(looser.accepted) >= sum(looser.steps) // 2


def with_end(which: str, word: str) -> dx.LM:
    """A model that ends its texts with a word."""
    lm = worded(which)
    assert lm.tokenizer is not None
    return dataclasses.replace(lm, generation_config={"eos_token_id": lm.tokenizer.backend.token_to_id(word)})


MANY = ["abcd", "hgh", "cab", "ef", "gab", "dd", "ha", "fe"]


@pytest.mark.wide
@pytest.mark.parametrize("draft", ["llama", "sliding"])
def test_drafted_ends_are_ends_if_the_target_says_so(draft: str) -> None:
    """A step that ends the draft's text stands where the target's own ends, too, and nothing is written after it."""
    lm, small = with_end("llama", "c"), with_end(draft, "c")
    plain = dx.generate(lm, MANY, max_new_tokens=24)
    assert {int(s) for s in plain.status} == {dx.Status.EOS, dx.Status.LENGTH}
    for until, step_tokens in ((["a", "b"], 6), (["a", "b", "c", "d", "e", "f", "g", "h"], None)):
        out = search.lookahead_reasoning(lm, small, MANY, until=until, depth=2, same=str.__eq__,
                                        step_tokens=step_tokens, max_new_tokens=24)
        assert out.text == plain.text
        if draft == "llama":        # all that is drafted stands, the ends as well
            assert out.accepted == [n - n // 3 for n in out.steps]


@pytest.mark.wide
@pytest.mark.parametrize(("draft", "step_tokens"), [("toy", 3), ("toy-draft", 1)])
def test_a_chunk_that_is_only_an_end_is_judged_like_any_other(draft: str, step_tokens: int) -> None:
    lm, small = with_end("toy", "d"), with_end(draft, "d")
    theirs, plain = (dx.generate(model, MANY, max_new_tokens=24) for model in (small, lm))
    ended = np.flatnonzero([s == dx.Status.EOS for s in theirs.status])
    assert 1 < len(ended) < len(MANY) and 1 in theirs.lengths[ended] % 3
    every = search.atts(lm, small, MANY, step_tokens=step_tokens, cut=1.0, max_new_tokens=24)
    assert theirs.text is not None and small.tokenizer is not None
    special = small.tokenizer.backend.token_to_id("</s>")
    # with another vocabulary the budgets of tokens differ, and a token without a text makes no chunk
    for p in ended if draft == "toy-draft" else range(len(MANY)):
        row = theirs.row(p).tolist()
        assert every.text[p] == theirs.text[p]
        assert every.accepted[p] == every.turns[p] == -(-len([t for t in row if t != special]) // step_tokens)
    none = search.atts(lm, small, MANY, step_tokens=step_tokens, cut=0.0, calibration=[0.0] * 500, max_new_tokens=24)
    assert sum(none.accepted) == 0 and none.text == plain.text


@pytest.mark.wide
def test_chunks_are_accepted_by_their_rank() -> None:
    lm, small, prompts = worded("llama"), worded("toy"), ["abcd", "hgh", "cab"]
    every = search.atts(lm, small, prompts, step_tokens=3, cut=1.0, **OPTIONS)
    assert every.accepted == every.turns and min(every.turns) > 3
    assert every.text == dx.generate(small, prompts, **OPTIONS).text
    none = search.atts(lm, small, prompts, step_tokens=3, cut=0.0, calibration=[0.0] * 50, **OPTIONS)
    assert sum(none.accepted) == 0 and none.text == dx.generate(lm, prompts, **OPTIONS).text
    half = search.atts(lm, small, prompts, step_tokens=3, cut=0.5, **OPTIONS)
    values = np.concatenate(half.p_values)
    assert 0 < sum(half.accepted) < sum(half.turns) and (values > 0).all() and (values <= 1).all()
    assert sum(half.accepted) == (values >= 0.5).sum()
    with pytest.raises(ValueError, match="cut: got 2"):
        search.atts(lm, small, prompts, cut=2)
