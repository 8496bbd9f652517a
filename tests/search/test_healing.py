"""Models of tokens as models of bytes, against all ways to write a text."""

import functools
import itertools
from typing import Any

import numpy as np
import pytest

import decodax as dx
from decodax import search
from decodax.core.window import causal
from decodax.search.healing import TextVocabulary, covers
from tests.laws.cases import lm as worded


@functools.cache
def behind(text: tuple[int, ...]) -> np.ndarray:
    lm = worded("llama")
    window = causal(np.array([text], np.int32), np.zeros(1, np.int32))
    out = lm.model.apply(lm.params, window, lm.model.init_cache(1, 32))
    x = np.asarray(out.logits(), np.float64)[0, -1]
    return x - np.log(np.exp(x - x.max()).sum()) - x.max()


def test_covers_are_all_ways_to_write_a_text() -> None:
    tokens = [b"", b"a", b"b", b"ab", b"abc", b"ba", b"c", b"bca"]
    found = {(*path, int(end)) for path, ends in covers(TextVocabulary.of(tokens), b"ab") for end in ends}
    every = set()
    for n in (1, 2):
        for cover in itertools.product(range(1, 8), repeat=n):
            text, inner = b"".join(tokens[t] for t in cover), b"".join(tokens[t] for t in cover[:-1])
            if text.startswith(b"ab") and len(inner) < 2 and b"ab".startswith(inner):
                every.add(cover)
    assert found == every and (1, 7) in every and (4,) in every


@pytest.mark.wide
def test_bytes_have_the_sum_of_all_ways_to_write_them() -> None:
    """Against enumeration: of all texts of three tokens those that begin with the bytes."""
    lm = worded("llama")
    assert lm.tokenizer is not None
    size = lm.tokenizer.token_bytes(True)
    prefix = (3, 9)
    found: dict[bytes, float] = {}
    for text in itertools.product([t for t in range(16) if size[t]], repeat=2):
        p = float(np.exp(behind(prefix)[text[0]] + behind((*prefix, text[0]))[text[1]]))
        whole = b"".join(size[t] for t in text)
        for n in (1, 2):
            found[whole[:n]] = found.get(whole[:n], 0) + p
    rest = float(np.exp(behind(prefix))[[t for t in range(16) if not size[t]]].sum())
    for text in (b"a", b"ab", b"cd", b"g", b"gh"):
        # a second token without bytes leaves a text of one token
        short = sum(float(np.exp(behind(prefix)[t])) * float(np.exp(behind((*prefix, t)))[
            [x for x in range(16) if not size[x]]].sum()) for t in range(16) if size[t].startswith(text))
        want = found.get(text, 0) + short
        np.testing.assert_allclose(np.exp(search.covered(lm, prefix, text).log_prob), want, rtol=1e-4)
    first = sum(np.exp(search.covered(lm, prefix, bytes([b])).log_prob) for b in b"abcdefgh")
    np.testing.assert_allclose(first + rest, 1, rtol=1e-4)


@pytest.mark.wide
def test_prompts_go_on_within_a_token() -> None:
    lm = worded("llama")
    assert lm.tokenizer is not None
    size = lm.tokenizer.token_bytes(True)
    counts: dict[Any, int] = {}
    for seed in range(300):
        healed = search.heal(lm, ["hab"], tokens=1, seed=seed)
        ids = healed.ids[0]
        counts[tuple(ids)] = counts.get(tuple(ids), 0) + 1
        assert (b"".join(size[t] for t in ids)).decode() == "hab" + healed.beyond[0]
    ids = lm.tokenizer.encode("hab")
    found = search.covered(lm, ids[:-1], size[ids[-1]])
    every = {(*ids[:-1], *path, int(e)): np.exp(x - found.log_prob) for path, ends, log_p in
             zip(found.paths, found.ends, found.log_probs, strict=True) for e, x in zip(ends, log_p, strict=True)}
    assert counts.keys() <= every.keys() and len(every) > 1
    assert all(abs(counts.get(k, 0) / 300 - p) < 0.1 for k, p in every.items())
    best = search.heal(lm, "hab", temperature=0)
    assert tuple(best.ids[0]) == max(every, key=lambda k: every[k])
    np.testing.assert_allclose(best.log_prob[0], found.log_prob)
    out = dx.generate(lm, best.ids, max_new_tokens=3)
    assert out.text is not None


@pytest.mark.parametrize(("given", "message"), [
    (dict(prompts="ab", tokens=3), r"prompts\[0\]: got"),
    (dict(prompts="ab", tokens=0), "tokens and temperature: got 0")])
def test_bad_arguments_are_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        search.heal(worded("llama"), **given)
    with pytest.raises(ValueError, match="takes bytes that the model's tokens can write"):
        search.covered(worded("llama"), [3], b"z")
