"""Trees of canvases: the law of their leaves by enumeration, and what a search of them finds."""

import functools
import itertools
from typing import Any, ClassVar

import numpy as np
import pytest
from scipy.stats import chi2

import decodax as dx
from decodax import search
from decodax.core.state import Status
from tests.algorithms.diffusion.toy import lm, raw
from tests.laws.cases import MASK, VOCABULARY

pytestmark = pytest.mark.wide

NEW, TOKENS, PROMPT, LAM, WARM = 4, (2, 5, 9), [3, 7, 1], 1.5, 3.0
OTHERS = [t for t in range(VOCABULARY) if t not in TOKENS]
OPTIONS: dict[str, Any] = dict(algorithm="llada:block_length=4,remasking=random", temperature=WARM, max_new_tokens=NEW,
                               suppress_tokens=OTHERS)


def reward(prompt: Any, texts: Any) -> list[float]:
    return [0.9 * sum(t == 5 for t in x) - 0.8 * sum(a == b for a, b in itertools.pairwise(x))
            for x in map(list, texts)]


@functools.cache
def law() -> dict[tuple[int, ...], float]:
    """The probability of each text: one position a step, each as likely as another, its token from the model."""
    @functools.cache
    def reach(canvas: tuple[int, ...]) -> float:
        where = [i for i, t in enumerate(canvas) if t != MASK]
        if not where:
            return 1.0
        total = 0.0
        for i in where:                     # which one came last
            before = (*canvas[:i], MASK, *canvas[i + 1:])
            logits = raw(np.array([*PROMPT, *before]))[len(PROMPT) + i, list(TOKENS)]
            p = np.exp((logits - logits.max()) / WARM)
            total += reach(before) / (NEW - len(where) + 1) * float(p[TOKENS.index(canvas[i])] / p.sum())
        return total

    return {t: reach(t) for t in itertools.product(TOKENS, repeat=NEW)}


def target() -> tuple[dict[tuple[int, ...], float], float]:
    weights = {t: p * float(np.exp(LAM * reward(None, [t])[0])) for t, p in law().items()}
    total = sum(weights.values())
    return {t: w / total for t, w in weights.items()}, total


def p_value(texts: list[tuple[int, ...]], want: dict[tuple[int, ...], float]) -> float:
    """Of chi-square; texts that are expected less than five times are one cell."""
    n = len(texts)
    order = sorted(want, key=lambda t: -want[t])
    cells = [t for t in order if n * want[t] >= 5]
    expected = np.array([n * want[t] for t in cells] + [n - sum(n * want[t] for t in cells)])
    seen = np.array([texts.count(t) for t in cells] + [0])
    seen[-1] = n - seen.sum()
    return float(chi2.sf(((seen - expected) ** 2 / expected).sum(), len(cells)))


def test_the_model_s_own_law_is_the_enumerated_one() -> None:
    assert np.isclose(sum(law().values()), 1)
    out = dx.generate(lm(), PROMPT, num_samples=800, **OPTIONS)
    assert p_value([tuple(out.row(i).tolist()) for i in range(800)], law()) > 1e-3


class Kept(search.DTS):
    """Keeps its trees to look at."""

    trees: ClassVar[list[Any]] = []

    def leaves(self, tree: Any, rng: Any) -> list[int]:
        self.trees.append((tree, rng))
        return super().leaves(tree, rng)


def leaf_law(tree: Any, lam: float) -> dict[int, float]:
    """The probability of each leaf in a walk down the tree."""
    chances, order = {0: 1.0}, [0]
    for node in order:
        if children := tree.children[node]:
            p = np.exp(lam * np.array([tree.value[c] for c in children]))
            chances |= {c: chances[node] * x for c, x in zip(children, p / p.sum(), strict=True)}
            order += children
    return {node: chances[node] for node in order if tree.ended[node]}


@functools.cache
def grown() -> tuple[search.Explored, list[Any]]:
    """What a sampling gave, with its trees."""
    Kept.trees.clear()
    out = search.explore(lm(), [PROMPT] * 24, Kept(reward, LAM, n=8, simulations=96), **OPTIONS)
    return out, [tree for tree, _ in Kept.trees]


def test_leaves_have_the_law_of_model_and_reward() -> None:
    out, trees = grown()
    want, total = target()
    assert out.log_evidence is not None
    assert abs(np.exp(out.log_evidence).mean() / total - 1) < 0.1
    by_value: dict[float, float] = {}           # leaves by their reward, over all trees
    worth = lambda text: round(reward(None, [text])[0], 6)
    for tree in trees:
        for leaf, p in leaf_law(tree, LAM).items():
            by_value[round(tree.value[leaf], 6)] = by_value.get(round(tree.value[leaf], 6), 0) + p / 24

    def gap(law: dict[tuple[int, ...], float]) -> float:
        return sum(abs(by_value.get(v, 0) - sum(p for t, p in law.items() if worth(t) == v))
                   for v in set(map(worth, law))) / 2

    # trees of 96 simulations are a little behind
    assert gap(want) < 0.08 and gap(law()) > 0.2
    assert out.weights is not None and (out.weights == 1 / 8).all()
    np.testing.assert_allclose(out.scores[0], reward(None, out.texts[0]))


def test_values_are_the_soft_means_of_the_children() -> None:
    out, trees = grown()
    assert len(trees) == 24 and trees[0].value[0] != trees[1].value[0]
    for tree in trees:
        assert sum(map(len, tree.children)) == len(tree.parent) - 1 and tree.visits[0] == 96
        for node, children in enumerate(tree.children):
            assert len(children) < tree.visits[node] ** 0.8 + 1 + 7 * (node == 0)   # the first 8 begin side by side
            assert bool(children) != tree.ended[node] and tree.step[node] <= NEW
            if children:
                mean = np.mean([np.exp(LAM * tree.value[c]) for c in children])
                assert np.isclose(tree.value[node], np.log(mean) / LAM)
                assert all(tree.parent[c] == node and tree.step[c] == tree.step[node] + 1 for c in children)
    assert out.log_evidence is not None and np.isclose(out.log_evidence[0], LAM * trees[0].value[0])
    assert set(out.result.status) == {Status.LENGTH}


def test_the_search_finds_the_best_text_with_few_canvases() -> None:
    best = max(reward(None, list(law())))
    out = search.explore(lm(), [PROMPT, [4]], search.dts_star(reward=reward, n=8, simulations=96), **OPTIONS)
    assert out.scores[:, 0].tolist() == [best, best] and out.tokens < 2 * 96 * NEW
    assert reward(None, out.text) == [best, best]
    explores = search.DTSStar(reward, n=8, simulations=96, exploration=1.0)
    assert search.explore(lm(), [PROMPT, [4]], explores, **OPTIONS).scores.max() == best
    # as many texts by themselves: seldom as good
    plain = dx.generate(lm(), PROMPT, num_samples=8, **OPTIONS)
    assert np.mean(reward(None, [plain.row(i).tolist() for i in range(8)])) < best - 0.6


@pytest.mark.parametrize("algorithm", [
    "mdlm:steps=3,size=8", pytest.param("remdm:steps=6,eta=0.3,size=8", marks=pytest.mark.full),
    pytest.param("fast-dllm:block_length=4,threshold=0.3,cache=dual", marks=pytest.mark.full),
    pytest.param("sdar:threshold=0.3", marks=pytest.mark.full)])
def test_any_sampler_denoises_and_no_prompt_depends_on_another(algorithm: str) -> None:
    speaks = "blocks" if algorithm.startswith("sdar") else "full"
    options = {**OPTIONS, "algorithm": algorithm, "max_new_tokens": 8}
    method = search.DTS(reward, 2.0, n=3, simulations=24, every=2)
    both = search.explore(lm(speaks), [PROMPT, [4, 4, 6, 8]], method, request_ids=[5, 6], **options)
    alone = search.explore(lm(speaks), [[4, 4, 6, 8]], method, request_ids=[6], **options)
    assert both.texts[1] == alone.texts[0] and both.scores[1].tolist() == alone.scores[0].tolist()
    assert all(set(t) <= set(TOKENS) and len(t) == 8 for row in both.texts for t in row)
    plain = dx.generate(lm(speaks), [PROMPT, [4, 4, 6, 8]], num_samples=3, **options)
    assert both.scores.mean() > np.mean(reward(None, [plain.row(i).tolist() for i in range(6)]))


@pytest.mark.parametrize(("by", "options", "more", "message"), [
    ("dts", dict(reward=reward), dict(until="x"), "until, step_tokens: take None"),
    ("dts", dict(reward=reward), dict(algorithm="autoregressive"), "fills no canvas|takes a"),
    ("dts", dict(reward=reward, lam=0.0), {}, "lam: got 0.0, takes a number above 0"),
    ("dts", dict(reward=reward, simulations=0), {}, "simulations: got 0, takes a whole number from 1"),
    ("dts", {}, {}, "'dts' needs reward=")])
def test_bad_arguments_are_refused_by_name(by: str, options: Any, more: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        search.explore(lm(), [PROMPT], search.make(by, **options), **{**OPTIONS, **more})
