"""Constraints on canvases: every text is of its language, whatever is committed first, and the draws are exact."""

import dataclasses
import functools
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chi2

import decodax as dx
from decodax.common.registry import ALGORITHMS
from decodax.constraints import TokenDfa, TokenTable
from decodax.constraints.canvas import OnCanvas, Region, accepted
from decodax.constraints.expressions import regex
from decodax.constraints.tokens import trie_of
from decodax.io.text import Tokenizer
from tests.contracts.diffusion import BLOCK, SPEAKS
from tests.laws.cases import VOCABULARY, WORDS, model
from tests.matrix import often
from tests.small_tokenizers import of_words

PATTERN = "(ab|cd)+e?f(gh|a)*"
HELD = [dx.constraints.regex(PATTERN), dx.constraints.regex(PATTERN), None]


@functools.cache
def lm(speaks: str) -> dx.LM:
    network, weights = model("llama")
    return dx.LM(model=network, params=weights, vocab_size=VOCABULARY, diffusion=SPEAKS[speaks],
                 generation_config={"eos_token_id": 1}, tokenizer=Tokenizer(of_words(WORDS[0], "</s>")))


WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "blocks": ("full", dict(name="llada", block_length=BLOCK, steps=2)),
    "whole": ("full", dict(name="mdlm", steps=4, size=16)),
    "at once": ("full", dict(name="mdlm", steps=1, size=16)),
    "shifted": ("shifted", dict(name="dream", steps=3, size=16)),
    "block-causal": ("blocks", dict(name="sdar", threshold=0.15)),
    "renoised": ("canvas", dict(name="diffusion-gemma", canvas_length=BLOCK, steps=4, entropy_bound=2.0)),
    "remasked": ("full", dict(name="remdm", steps=6, eta=0.3, size=16)),
    "dual cache": ("shifted", dict(name="fast-dllm", block_length=BLOCK, threshold=0.15, cache="dual")),
    "drafts": ("full", dict(name="freedave", block_length=BLOCK, draft_steps=3)), "edited": ("blocks", dict(
        name="llada2.1", threshold=0.15, editing_threshold=0.12))}


@pytest.mark.wide
@pytest.mark.parametrize("way", often(["at once", "dual cache"], WAYS))
def test_every_text_is_of_its_language(way: str) -> None:
    speaks, given = WAYS[way]
    alg = ALGORITHMS[str(given["name"])].make(lm(speaks), **{k: v for k, v in given.items() if k != "name"})
    for temperature, more in ((0.0, {}), (1.0, {}), (1.5, dict(top_k=2)), (1.0, dict(presence_penalty=0.5))):
        for budget in (4, 5, 7, 12, 16):
            out = dx.generate(lm(speaks), ["ab", "h", "cdcd"], constraint=HELD, algorithm=alg,
                             max_new_tokens=budget, temperature=temperature, seed=budget, **more)
            assert out.text is not None
            for text, status in list(zip(out.text, out.status, strict=True))[:2]:
                assert re.fullmatch(PATTERN, text) and status == dx.Status.EOS, (text, status, budget)
    free = dx.generate(lm(speaks), ["cdcd"], request_ids=[2], algorithm=alg, max_new_tokens=16, temperature=1.0)
    beside = dx.generate(lm(speaks), ["ab", "h", "cdcd"], constraint=HELD, algorithm=alg,
                             max_new_tokens=16, temperature=1.0)
    assert free.text is not None and beside.text is not None and free.text[0] == beside.text[2]


@pytest.mark.wide
def test_gaps_are_filled_so_that_the_whole_is_of_the_language() -> None:
    for seed in range(4):
        out = dx.infill(lm("full"), [["ab", 4, "f", 2, "gh"], ["h", 3, "cdf", 3]],
                        constraint=dx.constraints.regex(PATTERN),
                        temperature=1.0, seed=seed)
        assert out.text is not None
        assert re.fullmatch(PATTERN, out.text[0][2:]) and re.fullmatch(PATTERN, out.text[1][1:]), out.text
        assert "f" in out.text[0] and out.text[0].endswith("gh")
    with pytest.raises(ValueError, match="ends=True cannot be combined with a constraint"):
        dx.infill(lm("full"), ["ab", 4], constraint=dx.constraints.regex("a*"), ends=True)
    impossible = dx.infill(lm("full"), ["ab", 2, "h"], constraint=dx.constraints.regex("(ab)*"))
    assert impossible.status == [dx.Status.DEAD_END]


def test_constraints_that_a_canvas_cannot_keep_are_refused() -> None:
    with pytest.raises(ValueError, match=r"grammar: .* takes a grammar whose rules do not refer to themselves"):
        dx.generate(lm("full"), ["ab"], constraint=dx.constraints.grammar('start: "a" start | "b"'))
    with pytest.raises(ValueError, match="regex: prompt 0 has room for 2 new tokens"):
        dx.generate(lm("full"), ["ab"], constraint=dx.constraints.regex("abcdabcd"), max_new_tokens=2)


@functools.cache
def automaton() -> tuple[TokenDfa, tuple[bytes, ...]]:
    tokens = (b"", b"a", b"b", b"ab", b"ba", b"c")
    return TokenDfa.build([regex("(ab)*c?|b(a|b)*")], trie_of(tokens), (0,)), tokens


def texts(width: int, fixed: dict[int, int]) -> list[tuple[int, ...]]:
    """All sequences of the language, ended and filled up with ends."""
    found, _ = automaton()
    out = []
    for text in itertools.product(range(6), repeat=width):
        state = int(found.starts[0])
        for token in text:
            if state == len(found.next) - 1:
                state = state if token == 0 else -1
            else:
                state = int(found.next[state, found.classes[token]]) if state >= 0 else -1
        if state == len(found.next) - 1 and all(text[i] == t for i, t in fixed.items()):
            out.append(text)
    return out


@pytest.mark.wide
@pytest.mark.parametrize("fixed", [{1: 2}, pytest.param({}, marks=pytest.mark.full)])
def test_draws_have_the_law_of_the_product_held_to_the_language(fixed: dict[int, int]) -> None:
    width, count = 4, 8_000
    table = TokenTable.of(automaton()[0])
    rng = np.random.default_rng(1)
    log_p = np.log(rng.dirichlet(np.ones(6), size=width)).astype(np.float32)
    every = texts(width, fixed)
    law = np.exp([sum(log_p[i, t] for i, t in enumerate(text) if i not in fixed) for text in every])
    law /= law.sum()
    given: Any = np.array([fixed.get(i, 5) for i in range(width)], np.int32)
    open_ = np.array([i not in fixed for i in range(width)])
    wide = lambda x: jnp.broadcast_to(jnp.asarray(x), (count, *np.shape(x)))
    N = 6
    region = Region(tokens=wide(np.zeros(N, np.int32)), known=wide(np.zeros(N, bool)), begin=wide(np.int32(1)),
                    end=wide(np.int32(1 + width)), start=wide(np.int32(1)), given=wide(given), open=wide(open_))
    link = OnCanvas(wide(np.int32(automaton()[0].starts[0])), wide(np.int32(9)))
    address = jax.random.bits(jax.random.key(0), (count, width, 2), jnp.uint32)
    run = jax.jit(lambda cold: accepted(link, (table,), wide(np.array([0, -1], np.int32)), region, wide(log_p), cold,
                                        address, wide(given)))
    got = np.asarray(run(jnp.zeros(count, bool)))
    place = {text: i for i, text in enumerate(every)}
    seen = np.bincount([place[tuple(row)] for row in got.tolist()], minlength=len(every))
    want = law * count
    some = want > 5
    rest = max(want[~some].sum(), 1e-9)
    statistic = ((seen - want) ** 2 / want)[some].sum() + (seen[~some].sum() - rest) ** 2 / rest
    assert chi2.sf(statistic, some.sum()) > 1e-4
    likeliest = np.asarray(run(jnp.ones(count, bool)))[0]
    assert tuple(likeliest.tolist()) == every[int(law.argmax())]


@pytest.mark.wide
def test_rows_without_a_text_say_so() -> None:
    found = automaton()[0]
    region = Region(tokens=jnp.zeros((1, 3), jnp.int32), known=jnp.zeros((1, 3), bool), begin=jnp.zeros(1, jnp.int32),
                    end=jnp.full(1, 2, jnp.int32), start=jnp.zeros(1, jnp.int32), given=jnp.full((1, 2), 5, jnp.int32),
                    open=jnp.array([[True, False]]))
    link = OnCanvas(jnp.asarray(found.starts[:1]), jnp.full(1, 9, jnp.int32))
    address = jnp.zeros((1, 2, 2), jnp.uint32)
    out = accepted(link, (TokenTable.of(found),), jnp.array([[0]]), region, jnp.zeros((1, 2, 6)), jnp.ones(1, bool),
                   address, region.given)
    assert out[0, 0] == -2                              # nothing may stand behind a c but the end
    assert dataclasses.is_dataclass(found)
