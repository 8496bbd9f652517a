"""Cascaded decoding against enumeration of all texts, and against the authors' code.

`cascade.json` has what harvardnlp/cascaded-generation (37c624e, `fairseq/sequence_generator.py`) makes of tables of
scores: the n-grams that survive each order, and the texts.
"""

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.algorithms.parallel.cascade import Cascade, TargetLengths, sight
from decodax.algorithms.parallel.max_plus import best_path, max_marginals
from decodax.algorithms.parallel.survivors import EPSILON, Bounds, best_text, edges, first, prune
from decodax.core.window import Window
from decodax.models import Transformer, llama
from tests.matrix import often
from tests.small_models import random_lm

V, EOS, BARRIER, L = 5, 2, 4, 4
AUTHORS = json.loads((Path(__file__).parent / "cascade.json").read_text())["cases"]
PROMPTS = [[1, 3, 0], [3, 3, 1, 0, 1]]


@functools.cache
def net() -> dx.LM:
    network = llama(vocab=V, width=16, layers=2, heads=4, kv_heads=2, mlp=24, context=64)
    return random_lm(Transformer(network), 3, generation_config={"eos_token_id": EOS})


@functools.cache
def behind(prompt: tuple[int, ...], place: int, known: tuple[int, ...]) -> np.ndarray:
    """`f64[V]`: log-probabilities of the token at a place, `known` before it behind a barrier, by one forward."""
    tokens = [*prompt, BARRIER, *known]
    start = len(prompt) + place - len(known)
    positions = [*range(len(prompt)), *range(start, start + 1 + len(known))]
    spare = [0] * (10 - len(tokens))
    log_p = forward(net().params, jnp.array([tokens + spare]), jnp.array([positions + spare]))
    return np.asarray(log_p[0, len(tokens) - 1], float)


@jax.jit
def forward(params: Any, tokens: jax.Array, positions: jax.Array) -> jax.Array:
    return jax.nn.log_softmax(net().model.forward(params, tokens, positions))       # type: ignore[attr-defined]


def score(prompt: tuple[int, ...], text: tuple[int, ...], order: int) -> float:
    """The log-probability of a text, whose end epsilon may follow, by a Markov model."""
    real = [t for t in text if t != EPSILON]
    return sum(behind(prompt, i, tuple(real[max(i - order, 0):i]))[t] for i, t in enumerate(real))


def all_texts(least: int, most: int, closed: bool) -> list[tuple[int, ...]]:
    """All texts, filled up with epsilon."""
    words = [t for t in range(V) if t != EOS]
    ended = [(*text, EOS) for n in range(least, most + 1) for text in itertools.product(words, repeat=n - 1)]
    cut = [] if closed else list(itertools.product(words, repeat=most))
    return [text + (EPSILON,) * (L - len(text)) for text in ended + cut]


def by_hand(prompt: tuple[int, ...], orders: int, keep: int,
            texts: list[tuple[int, ...]]) -> tuple[tuple[int, ...], float]:
    """The cascade with every max-marginal taken over all texts that are left."""
    def token(t: int, place: int) -> float:
        return 0.0 if t in (EOS, EPSILON) else behind(prompt, place, ())[t]

    for m in range(orders):
        total = {text: score(prompt, text, m) for text in texts}
        for place in range(L - m):
            best: dict[tuple[int, ...], float] = {}
            for text, value in total.items():
                gram = text[place:place + m + 1]
                best[gram] = max(best.get(gram, -np.inf), token(gram[0], place) if m == 0 else value)
            held = sorted(best, key=lambda g: -best[g])[:keep]
            texts = [t for t in texts if t[place:place + m + 1] in held]
    total = {text: score(prompt, text, orders) for text in texts}
    best = max(total, key=lambda t: total[t])
    return best, total[best]


@pytest.mark.parametrize(("columns", "states"), [(2, 3), (5, 3), (6, 2)])
def test_max_marginals_and_the_best_path_are_those_of_all_paths(columns: int, states: int) -> None:
    rng = np.random.default_rng(columns)
    edges = rng.normal(size=(columns - 1, states, states)).astype(np.float32)
    edges[rng.random(edges.shape) < 0.2] = -np.inf
    want, best = np.full(edges.shape, -np.inf), (-np.inf, ())
    for path in itertools.product(range(states), repeat=columns):
        steps = list(enumerate(itertools.pairwise(path)))
        total = sum(edges[i, x, y] for i, (x, y) in steps)
        best = max(best, (total, path))
        for i, (x, y) in steps:
            want[i, x, y] = max(want[i, x, y], total)
    np.testing.assert_allclose(max_marginals(jnp.asarray(edges)), want, rtol=1e-5)
    path, total = best_path(jnp.asarray(edges))
    assert tuple(path.tolist()) == best[1] and abs(float(total) - best[0]) < 1e-5


def found(out: Any, row: int) -> tuple[int, ...]:
    text = tuple(out.row(row).tolist())
    return text + (EPSILON,) * (L - len(text))


@pytest.mark.wide
@pytest.mark.parametrize(("orders", "keep"), often([(1, 90)], [(m, k) for m in (0, 1, 2, 3) for k in (90, 8, 3)]))
def test_a_cascade_is_that_of_enumeration(orders: int, keep: int) -> None:
    out = dx.generate(net(), PROMPTS, algorithm=Cascade(BARRIER, orders, keep, L), max_new_tokens=L)
    assert out.stats.forwards == orders + 1
    for i, prompt in enumerate(PROMPTS):
        want, total = by_hand(tuple(prompt), orders, keep, all_texts(1, L, closed=False))
        assert found(out, i) == want
        np.testing.assert_allclose(out.findings["log_prob"][i], total, rtol=1e-4)


@pytest.mark.wide
@pytest.mark.parametrize(("spread", "least", "budget"), [(1, 0, 4), (0, 0, 4), (None, 2, 4), (None, 0, 2), (1, 0, 3)])
def test_lengths_are_bounded_as_asked(spread: int | None, least: int, budget: int) -> None:
    lengths = None if spread is None else TargetLengths(0.0, 2.0, spread)
    alg = Cascade(BARRIER, 2, 40, L, lengths)
    out = dx.generate(net(), PROMPTS, algorithm=alg, max_new_tokens=budget, min_new_tokens=least)
    low, high = (least + 1, budget) if spread is None else (3 - spread, min(3 + spread, budget))
    for i, prompt in enumerate(PROMPTS):
        want, _ = by_hand(tuple(prompt), 2, 40, all_texts(low, high, closed=lengths is not None))
        assert found(out, i) == want
        ended = dx.Status.EOS if EOS in want else dx.Status.LENGTH
        assert out.status[i] == ended and (lengths is None or ended == dx.Status.EOS)


def test_a_barrier_hides_the_text_before_it() -> None:
    """The scores behind an n-gram are the same to the last bit, whatever the others of its window are."""
    lm, rng, K, m = net(), np.random.default_rng(0), 3, 2

    @jax.jit
    def scores(grams: jax.Array) -> jax.Array:
        tokens = jnp.concatenate([jnp.array([1, BARRIER]), grams.reshape(-1)])[None]
        places = jnp.array([[0, 5, *[6, 7] * K]])
        window = Window(tokens=tokens, positions=places, mask=sight(K, m)[None], live=jnp.ones(tokens.shape, bool))
        return lm.model.apply(lm.params, window, lm.model.init_cache(1, 8)).logits()[0, 3::2]

    grams = rng.integers(0, V, (K, m))
    plain = np.asarray(scores(grams))
    for k in range(K):
        other = (grams + rng.integers(1, V, (K, m))) % V
        other[k] = grams[k]
        moved = np.asarray(scores(other))
        assert (moved[k] == plain[k]).all() and (np.delete(moved, k, 0) != np.delete(plain, k, 0)).all()


@pytest.mark.wide
def test_log_probabilities_are_those_of_the_last_order() -> None:
    for orders in (0, 2):
        out = dx.generate(net(), PROMPTS, algorithm=Cascade(BARRIER, orders, 8, L), max_new_tokens=L, logprobs=2)
        for i, prompt in enumerate(PROMPTS):
            text = out.row(i).tolist()
            want = [behind(tuple(prompt), j, tuple(text[max(j - orders, 0):j])) for j in range(len(text))]
            np.testing.assert_allclose(out.logprobs.raw[i][:len(text)], [x[t] for x, t in zip(want, text, strict=True)],
                                       atol=1e-4)
            np.testing.assert_allclose(out.logprobs.top[i][:len(text)], [np.sort(x)[:-3:-1] for x in want], atol=1e-4)
            np.testing.assert_allclose(out.findings["log_prob"][i], sum(out.logprobs.raw[i][:len(text)]), rtol=1e-4)


@pytest.mark.wide
@pytest.mark.parametrize("cache", ["paged", "hydragen"])
def test_a_prompt_may_be_kept_once(cache: str) -> None:
    alg = Cascade(BARRIER, 2, 8, L)
    dense = dx.generate(net(), PROMPTS, algorithm=alg, max_new_tokens=L)
    once = dx.generate(net(), PROMPTS, algorithm=alg, max_new_tokens=L, cache=cache)
    assert np.array_equal(once.tokens, dense.tokens)
    np.testing.assert_allclose(once.findings["log_prob"], dense.findings["log_prob"], rtol=1e-4)


@pytest.mark.wide
def test_bad_arguments_and_policies_that_read_the_text_are_refused() -> None:
    for name, given in (("orders", -1), ("keep", 0), ("longest", 1)):
        with pytest.raises(ValueError, match=f"{name}: got {given}"):
            Cascade(BARRIER, **{name: given})
    alg = Cascade(BARRIER, 1, 4, L)
    with pytest.raises(ValueError, match="reads the text"):
        dx.generate(net(), PROMPTS, algorithm=alg, max_new_tokens=L, repetition_penalty=1.2)
    with pytest.raises(ValueError, match="longest=4, takes at most"):
        dx.generate(net(), PROMPTS, algorithm=alg, max_new_tokens=L + 1)
    with pytest.raises(ValueError, match="needs barrier="):
        dx.algorithms.make("cascade", net())
    banned = dx.generate(net(), PROMPTS, algorithm=alg, max_new_tokens=L, suppress_tokens=[0, 1])
    assert not {0, 1} & {*banned.row(0).tolist(), *banned.row(1).tolist()}
    broken = net().with_params(jax.tree.map(lambda x: x * jnp.nan, net().params))
    assert dx.generate(broken, PROMPTS, algorithm=alg, max_new_tokens=L).status == [dx.Status.INVALID] * 2
    dead = dx.generate(net(), PROMPTS, algorithm=alg, max_new_tokens=L, min_new_tokens=L, suppress_tokens=[0, 1, 3, 4])
    assert dead.status == [dx.Status.DEAD_END] * 2


def table(seed: int, size: int, place: int, known: tuple[int, ...]) -> np.ndarray:
    """`f64[V]`: the scores that the authors' code was given; token 0 is its barrier, 1 its padding, 2 the end."""
    x = np.random.default_rng([seed, place + 1, *[t + 1 for t in known]]).normal(size=size) * 2
    x[[0, 1] if known else [0, 1, 2]] = -1e9
    return x - np.logaddexp.reduce(x)


@pytest.mark.wide(but=("4",))
@pytest.mark.parametrize("seed", often([4], [c["seed"] for c in AUTHORS]))
def test_survivors_and_texts_are_those_of_the_authors(seed: int) -> None:
    case = next(c for c in AUTHORS if c["seed"] == seed)
    size, keep, orders = case["V"], case["topk"], case["rounds"] - 1
    middle = case["source"] + 1
    least, most = max(middle - case["D"], 2), middle + case["D"]
    places = most + (case["D"] > 0)         # the authors' last position is always padding
    bounds = Bounds(*(jnp.array([x]) for x in (least, most, most - 1)), eos=jnp.array([[2]]))

    def scores(known: list[list[tuple[int, ...]]]) -> np.ndarray:
        said = np.zeros((1, places, len(known[0]), size), np.float32)
        for place, grams in enumerate(known):
            for k, gram in enumerate(grams):
                said[0, place, k] = table(seed, size, place, tuple(0 if t == EPSILON else t for t in gram))
        said[..., :2] = -np.inf
        return said

    grams, score = jax.jit(first, static_argnums=(2, 3))(scores([[()]] * places)[:, :, 0], bounds, keep, orders)
    for m in range(1, orders + 1):
        known = [[tuple(g) for g in place] for place in np.array(grams[0, :, :, :m]).tolist()]
        for place, theirs in enumerate(case["grams"][m - 1]):
            ours = {g for g, x in zip(known[place], np.array(score[0, place]), strict=True) if x > -np.inf}
            assert ours == {tuple(EPSILON if t == 1 else t for t in g) for g in theirs[:len(ours)]}
        steps = jax.jit(edges, static_argnums=4)(scores(known), grams[..., :m], score, bounds, m)
        if m < orders:
            grams, score = jax.jit(prune, static_argnums=3)(steps, grams, score, m)
    text = jax.jit(best_text)(steps, grams)[0][0].tolist()
    assert [t for t in text if t != EPSILON] == case["text"]
