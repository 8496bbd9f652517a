"""Self-infilling: the texts of the authors' code, and what loops put together.

`self_infilling.json` has what the logits processor and stopping criterion of LZhengisme/self-infilling (c7864c7,
`self_infill_utils.py`) write with the weights of `sharp`, greedily, 24 tokens at most: prompt, opening, stop strings,
`tau`, the end's token, text with marks, where `$` is token 23.
"""

import json
from pathlib import Path
from typing import Any

import pytest

import decodax as dx
from decodax import search
from decodax.core.stops import cut_at_stop
from decodax.search.self_infilling import Parts
from tests.algorithms.contrastive.followers import sharp
from tests.matrix import often
from tests.search.letters import LETTERS, filling

pytestmark = pytest.mark.wide

EXPECTED = json.loads((Path(__file__).parent / "self_infilling.json").read_text())


def split(text: str, stops: list[str], end: str) -> Parts:
    """As the authors divide a text, cut at its stop strings."""
    before, interrupted, rest = text.removesuffix(end).partition("S")
    after, closed, middle = rest.partition("M")
    cut = lambda x: cut_at_stop(x, stops)
    complete = bool(closed) and text.endswith(end)
    return Parts(before if interrupted else cut(before), cut(middle), cut(after) if complete or not closed else "",
                 bool(interrupted), complete)


@pytest.mark.parametrize("setting", often([1], range(4)))
def test_texts_are_those_of_the_authors(setting: int) -> None:
    cases = EXPECTED[setting::4]
    _, opening, stops, tau, end, _ = cases[0]
    out = search.self_infill(filling(), [c[0] for c in cases], marks=["P", "S", "M"], opening=opening, stop=stops,
                            tau=tau, max_new_tokens=24, eos_token_id=[end])
    wanted = [split(c[5], stops, [*LETTERS.split(), "$"][end]) for c in cases]
    assert [row[0] for row in out.parts] == wanted
    assert out.text == [part.text for part in wanted]
    assert any(part.interrupted for part in wanted)
    made, marks = sum(len(c[5]) for c in cases), sum("M" in c[5] for c in cases)
    assert made - marks <= out.tokens <= made           # a mark that is put there was not drawn


@pytest.mark.full
def test_parts_are_written_anew_in_turn() -> None:
    """Each text against the runs that it is put together from."""
    lm, prompts, opening = filling(), ["cq", "tik", "jjc"], "m"
    given: dict[str, Any] = dict(stop=["o", "pp"], tau=0.42, max_new_tokens=16, eos_token_id=[13])
    out = search.self_infill(lm, prompts, marks=[20, 21, 22], opening=opening, loops=2, **given)
    once = search.self_infill(lm, prompts, marks=[20, 21, 22], opening=opening, **given)
    tail = {k: v for k, v in given.items() if k != "tau"}
    assert lm.tokenizer is not None
    kept = 0
    for p, prompt in enumerate(prompts):
        first, second = out.parts[p]
        assert first == once.parts[p][0]
        end = dx.generate(lm, [prompt + first.head(opening)], **tail).text[0]       # type: ignore[index]
        good = opening in first.head(opening) + end
        after = end if good else first.after
        begins = after[:after.rfind(opening) + 1] if opening in after else opening
        marked = dx.generate(lm, [lm.tokenizer.encode(f"P{prompt}S{begins}")], suppress_tokens=[20, 21],
                             **{**tail, "max_new_tokens": 1}).text[0]               # type: ignore[index]
        assert second.before == "" and second.interrupted
        if second.complete:
            assert second.after.startswith(begins)
        elif second.after:
            assert second.after[:1] == marked[:1] or marked in ("o", "")
        whole = second.head(opening) + dx.generate(lm, [prompt + second.head(opening)], **tail).text[0]  # type: ignore[index]
        assert out.text[p] == (whole if opening in whole else second.text)
        kept += opening in whole
    assert kept
    given_up = search.self_infill(lm, prompts, marks=[20, 21, 22], opening=opening, loops=1,
                                 degenerate=lambda text: True, **given)
    assert given_up.text == once.text


def test_marks_that_are_no_single_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="marks: got 'ab', which is 2 tokens"):
        search.self_infill(filling(), "a", marks=["ab", "S", "M"])
    with pytest.raises(ValueError, match="takes three different tokens"):
        search.self_infill(filling(), "a", marks=["P", "S", "S"])
    with pytest.raises(ValueError, match="lm: has no tokenizer"):
        search.self_infill(sharp(), "a", marks=[20, 21, 22])
    assert Parts("xmy", "z", "", True).head("m") == "x"
    assert Parts("xy", "", "", True).head("m") == "xy" and Parts("xy").head("m") == ""
