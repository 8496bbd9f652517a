"""Chains of retrieval: which of them stands, by counting it out."""

from typing import Any

import numpy as np
import pytest

import decodax as dx
from decodax import search
from tests.laws.cases import lm as worded

PROMPTS = ["abcd", "hgh"]
OPTIONS: dict[str, Any] = dict(step_tokens=3, max_new_tokens=48, temperature=1.0)


def retrieve(prompt: Any, text: str) -> str | None:
    return "ab"


@pytest.mark.wide
def test_the_chain_after_which_nothing_found_is_least_likely_is_chosen() -> None:
    method = search.CoRAG(retrieve, n=4, rounds=2, last="cc", nothing="dh")
    out = search.explore(worded("llama"), PROMPTS, method, **OPTIONS)
    plain = search.explore(worded("llama"), PROMPTS, search.WithTools(retrieve, n=4, rounds=2), **OPTIONS)
    lm, whole, judged = worded("llama"), 3 + 1 + 3 + 3 + 1 + 3, 0          # "ab" is one token, "cc" two
    assert lm.tokenizer is not None
    for p, prompt in enumerate(PROMPTS):
        rows = [out.result.row(4 * p + i).tolist() for i in range(4)]
        alive = [i for i in range(4) if len(rows[i]) > whole]
        assert all(rows[i][whole:whole + 2] == [3, 3] for i in alive)
        pairs = [([*lm.tokenizer.encode(prompt), *rows[i][:whole], 3, 3], lm.tokenizer.encode("dh")) for i in alive]
        np.testing.assert_allclose(out.scores[p, alive], -dx.score(lm, pairs).sum, rtol=1e-4)
        judged += len(alive)
        assert out.index[p] == out.scores[p].argmax()
        # the questions are those of interleaved retrieval with the same draws
        assert [row[:4] for row in rows] == [plain.result.row(4 * p + i).tolist()[:4] for i in range(4)]
    assert judged > 4


@pytest.mark.wide
def test_the_tree_keeps_the_question_whose_rollouts_are_best() -> None:
    seen: list[tuple[Any, list[str]]] = []

    def penalty(prompt: Any, texts: Any) -> list[float]:
        seen.append((prompt, list(texts)))
        return [float(text.count("a") - text.count("h")) for text in texts]

    method = search.CoRAG(retrieve, n=6, rounds=2, way="tree", rollouts=2, ahead=1, penalty=penalty)
    out = search.explore(worded("llama"), PROMPTS, method, **OPTIONS)
    for p, prompt in enumerate(PROMPTS):
        first, second, last = (texts for asked, texts in seen if asked == prompt)
        if len(first) < 6 or len(second) < 6:
            continue                                    # a text ended early
        asks = [first[i].index("ab", 1) for i in range(6)]
        assert all(a[:k] == b[:k] for a, b, k in zip(first[::2], first[1::2], asks[::2], strict=True))
        best = 2 * int(np.array(penalty(None, first)).reshape(3, 2).mean(1).argmin())
        assert len({t[:asks[best]] for t in second}) == 1 and second[0].startswith(first[best][:asks[best]])
        best = 2 * int(np.array(penalty(None, second)).reshape(3, 2).mean(1).argmin())
        assert set(last) == {second[best]}              # nothing was left to roll out
        assert all(text.startswith(last[0]) for text in out.texts[p])
    assert any(len(texts) == 6 for _, texts in seen)
    assert out.tokens > sum(len(t) for row in out.texts for t in row) / 6


@pytest.mark.parametrize(("options", "message"), [
    (dict(way="x"), "way: got 'x'"), (dict(way="tree", n=5), "rollouts: got 2 for 5 rows"),
    (dict(rounds=0), "rounds: got 0")])
def test_bad_arguments_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        search.make("corag", retrieve=retrieve, **options)
