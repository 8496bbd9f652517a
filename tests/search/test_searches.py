"""Searches over steps: laws by enumeration, rules by what they must come to."""

import functools
import itertools
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import logsumexp

import decodax as dx
from decodax import search, select
from decodax.algorithms.contrastive.awrs import AWRS
from decodax.search import Forks
from decodax.search.explorer import log_mean, normal, settled
from decodax.search.particles import kept
from decodax.search.phi import k_means, tf_idf
from decodax.search.tree import shares
from tests.laws.cases import lm as worded
from tests.search.tiny import EOS, NEW, V, law, tiny
from tests.small_models import PROMPTS, net


def potential(prompt: Any, texts: Any) -> list[float]:
    """Favours 3, and rules out 1 behind 1. It is a product over tokens."""
    return [-np.inf if any(a == b == 1 for a, b in itertools.pairwise(t)) else 0.8 * sum(x == 3 for x in t)
            for t in map(list, texts)]


def target(prompt: tuple[int, ...]) -> tuple[dict[tuple[int, ...], float], float]:
    weights = {t: p * float(np.exp(potential(None, [t])[0])) for t, p in law(prompt).items()}
    total = sum(weights.values())
    return {t: w / total for t, w in weights.items()}, total


def frequencies(out: search.Explored) -> dict[tuple[int, ...], float]:
    assert out.weights is not None
    found: dict[tuple[int, ...], float] = {}
    for text, weight in zip(out.texts[0], out.weights[0], strict=True):
        found[tuple(text)] = found.get(tuple(text), 0) + weight
    return found


OPTIONS: dict[str, Any] = dict(step_tokens=1, max_new_tokens=NEW, temperature=1.0)


@pytest.mark.wide
@pytest.mark.parametrize(("count", "near"), [(1000, 0.08), pytest.param(10_000, 0.02, marks=pytest.mark.full)])
@pytest.mark.parametrize("least", [0.5, pytest.param(1.0, marks=pytest.mark.full),
                                   pytest.param(0.0, marks=pytest.mark.full)])
def test_particles_have_the_law_of_model_and_potential(count: int, near: float, least: float) -> None:
    prompt = (1, 3)
    want, total = target(prompt)
    out = search.explore(tiny(), [list(prompt)], search.SMC(potential, n=count, least=least), **OPTIONS)
    assert out.log_evidence is not None
    assert abs(np.exp(out.log_evidence[0]) / total - 1) < near
    got = frequencies(out)
    assert sum(abs(got.get(t, 0) - w) for t, w in want.items()) / 2 < (3.5 if count < 5000 else 6) * near


@pytest.mark.wide
def test_a_twist_and_a_late_potential_change_no_law() -> None:
    prompt = (1, 3)
    want, total = target(prompt)
    guess = lambda prompt, texts: [0.3 * x for x in potential(prompt, texts)]
    for method in (search.SMC(potential, n=1000, twist=guess), search.SMC(potential, n=1000, ended=True)):
        out = search.explore(tiny(), [list(prompt)], method, **OPTIONS)
        assert out.log_evidence is not None and abs(np.exp(out.log_evidence[0]) / total - 1) < 0.12
        got = frequencies(out)
        assert sum(abs(got.get(t, 0) - w) for t, w in want.items()) / 2 < 0.3


@pytest.mark.full
def test_steering_is_unbiased() -> None:
    prompt = (1, 3)
    want, total = target(prompt)
    first: dict[int, float] = {}
    for t, w in want.items():
        first[t[0]] = first.get(t[0], 0) + w
    out = search.explore(tiny(), [list(prompt)] * 300, search.Steering(potential, n=4, factor=3), **OPTIONS)
    assert out.log_evidence is not None and out.weights is not None
    evidence = np.exp(out.log_evidence)
    assert abs(evidence.mean() - total) < 4 * evidence.std() / np.sqrt(300) + 1e-9
    got = np.zeros(V)           # weighted by the evidence, particles are unbiased
    for p in range(300):
        for text, weight in zip(out.texts[p], out.weights[p], strict=True):
            got[text[0]] += weight * evidence[p] / evidence.sum() if weight else 0
    assert abs(got - [first.get(x, 0) for x in range(V)]).max() < 0.06


def ends_alone(prompt: Any, texts: Any) -> list[float]:
    """Rules out all texts that have not ended; so rows end beside others that weigh nothing."""
    return [0.0 if EOS in t else -np.inf for t in map(list, texts)]


def by_chance(prompt: Any, texts: Any) -> list[float]:
    """Rules out half of all texts, and weighs the others by numbers far apart."""
    return [-np.inf if (h := zlib.crc32(bytes(t))) % 2 else h % 3000 - 1500.0 for t in map(list, texts)]


SEARCHES = {"smc": search.SMC, "multinomial": functools.partial(search.SMC, resampling="multinomial", least=1.0),
            "twisted": functools.partial(search.SMC, twist=lambda prompt, texts: [-np.inf] * len(texts)),
            "late": functools.partial(search.SMC, ended=True), "steering": functools.partial(search.Steering, factor=2)}


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("rule", [ends_alone, by_chance, lambda prompt, texts: [-np.inf] * len(texts)])
def test_searches_end_whatever_is_ruled_out(name: str, rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over 60 prompts, each with random numbers of its own: no step is taken when no row with a weight is left."""
    taken, extend = [], Forks.extend

    def counted(forks: Forks, which: Any = None, *args: Any, **options: Any) -> Any:
        taken.append(int(forks.live.sum() if which is None else (which & forks.live).sum()))
        assert taken[-1], "a step that no row takes"
        return extend(forks, which, *args, **options)

    monkeypatch.setattr(Forks, "extend", counted)
    out = search.explore(tiny(), [[1, 3]] * 60, SEARCHES[name](rule, n=3), **OPTIONS)
    assert len(taken) <= NEW and out.weights is not None and out.log_evidence is not None
    np.testing.assert_allclose(out.weights.sum(1), 1)
    for p in range(60):
        if np.isfinite(out.log_evidence[p]):
            values = np.array(rule(None, out.texts[p]))
            assert np.isfinite(values[out.weights[p] > 0]).all() and out.weights[p, out.index[p]] > 0


@pytest.mark.wide
@pytest.mark.parametrize("method", [search.SMC(potential, n=4, least=1.0), search.SMC(potential, n=4, ended=True),
                                    search.Steering(potential, n=3, factor=2)],
                         ids=["smc", "late", "steering"])
def test_the_weights_of_a_method_that_proposes_count(method: Any) -> None:
    """The evidence is that of policy, check and potential together, on average; false alarms: 1 in 15,000 for each."""
    def allowed(ids: list[int]) -> bool:
        return ids[0] != 3 and ids.count(1) < 2

    weights = {t: p * float(np.exp(potential(None, [t])[0])) for t, p in law((1, 3)).items() if allowed(list(t))}
    want, count = sum(weights.values()), 250
    out = search.explore(tiny(), [[1, 3]] * count, method, algorithm=AWRS(allowed), **OPTIONS)
    assert out.log_evidence is not None and out.weights is not None
    evidence = np.exp(out.log_evidence)
    assert abs(evidence.mean() - want) < 4 * evidence.std() / np.sqrt(count)
    assert all(allowed(list(t)) for row, w in zip(out.texts, out.weights, strict=True)
               for t, weight in zip(row, w, strict=True) if weight and len(t))
    # weighted by the evidence, particles are draws from the law: here of the first token
    share = np.array([sum(w for t, w in weights.items() if t[0] == x) for x in range(V)]) / want
    each = np.array([np.bincount([t[0] if len(t) else EOS for t in row], w, V) for row, w in
                     zip(out.texts, out.weights, strict=True)]) * evidence[:, None] / evidence.mean()
    assert (abs(each.mean(0) - share) < 4 * each.std(0) / np.sqrt(count) + 1e-9).all()


@pytest.mark.wide
def test_a_particle_filter_takes_the_weights_of_its_method() -> None:
    """Where only 1 in 5 or 4 in 5 of a particle's next step is allowed, it is resampled by that."""
    seen: list[list[float]] = []

    def noted(weights: Any, rng: Any, how: str = "multinomial") -> Any:
        seen.append(weights.tolist())
        return np.arange(len(weights))

    method = search.ParticleFilter(lambda prompt, texts: [0.5] * len(texts), n=4, increment=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("decodax.search.particles.resample", noted)
        search.explore(tiny(), [[1, 3]], method, algorithm=AWRS(lambda ids: True), **OPTIONS)
        assert all(np.allclose(row, 0.25) for row in seen) and seen
        seen.clear()
        search.explore(tiny(), [[1, 3]], method, algorithm=AWRS(lambda ids: ids[-1] != 3), **OPTIONS)
    assert not all(np.allclose(row, 0.25) for row in seen)


def reward(prompt: Any, texts: Any) -> list[float]:
    return [1 / (1 + np.exp(-(0.7 * sum(x == 3 for x in t) - 0.5 * sum(x == 1 for x in t)))) for t in map(list, texts)]


@pytest.mark.wide
@pytest.mark.parametrize("increment", [False, True])
def test_the_particle_filter_has_the_law_of_its_weights(increment: bool) -> None:
    prompt, odds = (1, 3), lambda t: (lambda r: r / (1 - r))(reward(None, [t])[0])
    # of a text that has ended the last odds count again at each step that the others take
    weigh = lambda t: odds(t) if increment else np.prod([odds(t[:min(k + 1, len(t))]) for k in range(NEW)])
    weights = {t: p * weigh(t) for t, p in law(prompt).items()}
    total = sum(weights.values())
    method = search.ParticleFilter(reward, n=2000, increment=increment, resampling="systematic")
    out = search.explore(tiny(), [list(prompt)], method, **OPTIONS)
    got: dict[tuple[int, ...], float] = {}
    for text in out.texts[0]:
        got[tuple(text)] = got.get(tuple(text), 0) + 1 / 2000
    distance = sum(abs(got.get(t, 0) - w / total) for t, w in weights.items()) / 2
    assert distance < 0.2
    plain = sum(abs(p - weights[t] / total) for t, p in law(prompt).items()) / 2
    assert distance < 0.6 * plain
    assert out.scores[0, out.index[0]] == out.scores[0].max()


@pytest.mark.wide
def test_step_beams_take_the_best_of_each_step() -> None:
    seen: list[list[tuple[int, ...]]] = []

    def judge(prompt: Any, texts: Any) -> list[float]:
        seen.append([tuple(t) for t in texts])
        return reward(prompt, texts)

    out = search.explore(tiny(), [[1, 3]], search.StepBeams(judge, n=6, width=3), **OPTIONS)
    for before, after in itertools.pairwise(seen):
        scores = reward(None, before)
        best = {before[i] for i in np.argsort(-np.array(scores), kind="stable")[:2]}
        assert {t[:-1] for t in after} <= best
    assert out.scores[0].max() == max(reward(None, out.texts[0]))


@pytest.mark.wide
def test_a_star_expands_the_best_first_and_finds_the_best() -> None:
    out = search.explore(tiny(), [[1, 3], [0]], search.AStar(reward, n=40, branch=12, expansions=60), **OPTIONS)
    for p in range(2):
        ended = [t for i, t in enumerate(out.texts[p]) if out.result.status[p * 40 + i] in (dx.Status.EOS,
                                                                                          dx.Status.LENGTH)]
        assert reward(None, [out.text[p]])[0] == max(reward(None, ended))
    few = search.explore(tiny(), [[1, 3]], search.AStar(reward, n=40, branch=12, expansions=3), **OPTIONS)
    assert few.tokens <= 36 < out.tokens


@pytest.mark.wide
def test_a_tree_that_falls_back_branches_where_a_segment_begins() -> None:
    """Segments of any length, which end with a string: texts end after `depth` of them, and not before."""
    lm, depth, seen = worded("toy"), 4, []
    rewind = Forks.rewind

    def noted(forks: Forks, made: np.ndarray) -> None:
        seen.extend((forks.tokens(0, i), int(made[0, i])) for i in np.flatnonzero(made[0] >= 0))
        rewind(forks, made)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Forks, "rewind", noted)
        out = search.explore(lm, ["abcd"], search.TreePO(n=8, first=(2, 2), divergence=1, depth=depth), until="e",
                            max_new_tokens=60, temperature=1.0)
    assert len(seen) == 6 and len({at for _, at in seen}) > 1
    assert lm.tokenizer is not None
    for ids, at in seen:
        assert not at or "e" in lm.tokenizer.decode(ids[at - 1:at])
    for i, text in enumerate(out.texts[0]):
        count = len(re.findall("e[^e]*", text)) if out.result.lengths[i] < 60 else depth
        assert count == depth, text


@pytest.mark.parametrize("method", ["phi-decoding", "with-tools", "trimr", "corag"])
def test_searches_over_texts_ask_for_a_tokenizer_first(method: str) -> None:
    say = lambda *args: "x"
    options = {"with-tools": dict(act=say), "trimr": dict(redundant=say, guidance="x"), "corag": dict(retrieve=say)}
    with pytest.raises(ValueError, match="lm: has no tokenizer, and"):
        search.explore(tiny(), [[1, 3]], search.make(method, **options.get(method, {})), **OPTIONS)
    with pytest.raises(ValueError, match="until: got 'x', but the model has no tokenizer"):
        search.explore(tiny(), [[1, 3]], "treepo", until="x", max_new_tokens=4)


@pytest.mark.parametrize("call", [
    lambda: dx.select.choose(tiny(), [[1, 3]], "likelihood"), lambda: search.pedal(tiny(), ["a"], ["b"], shots=1),
    lambda: search.batch_prompt(tiny(), ["a"], str, lambda text, n: [(text, True)]),
    lambda: search.sketch_guided(tiny(), ["a"], str), lambda: search.integrate(tiny(), [[1, 3]]),
    lambda: select.Sampled(tiny())([1, 3])])
def test_searches_that_read_answers_ask_for_a_tokenizer_first(call: Any) -> None:
    with pytest.raises(ValueError, match="lm: has no tokenizer, and"):
        call()


@pytest.mark.wide
@pytest.mark.parametrize("name", ["particle-filter", "step-beams", "a-star", "treepo", "smc", "smc-steering"])
def test_searches_without_steps_take_a_text_for_a_step(name: str) -> None:
    options = {"smc": dict(potential=potential), "smc-steering": dict(potential=potential), "treepo": dict(n=4)}
    method = search.make(name, **options.get(name, dict(reward=reward)))
    out = search.explore(tiny(), [[1, 3]], method, max_new_tokens=NEW, temperature=1.0)
    assert len(out.text[0]) == NEW or out.text[0][-1] == EOS


@pytest.mark.wide
def test_foresight_and_trees_write_whole_texts() -> None:
    points = lambda texts: np.array([[len(t)] for t in texts], float)
    phi = search.PhiDecoding(beams=2, samples=3, steps=3, first=2, vectors=points)
    out = search.explore(worded("llama"), ["abcd", "h"], phi, step_tokens=3, max_new_tokens=12, temperature=0.8)
    assert out.tokens > out.result.lengths.sum() and out.index.max() < 2
    again = search.explore(worded("llama"), ["abcd", "h"], phi, step_tokens=3, max_new_tokens=12, temperature=0.8)
    assert again.text == out.text
    tree = search.explore(net(), PROMPTS, search.TreePO(n=8), step_tokens=4, max_new_tokens=16, min_new_tokens=16,
                         temperature=1.0)
    assert (tree.result.lengths == 16).all()
    assert tree.tokens < 3 * 8 * 16                         # beginnings are shared
    for p in range(3):
        assert len({tuple(t) for t in tree.texts[p]}) > 4


def test_helpers_of_searches_compute_shares_forks_means_and_clusters() -> None:
    rng = np.random.default_rng(0)
    assert shares(np.array([1.0, 1.0, 2.0]), 11).tolist() == [3, 3, 5]
    assert settled(np.array([2, 2, 2, 0])).tolist() == [0, 2, 2, 2]
    np.testing.assert_allclose(log_mean(np.array([0.0, -np.inf, np.log(3)])), np.log(4 / 3))
    assert normal(np.array([-np.inf, -np.inf])).tolist() == [0.5, 0.5]
    x = np.concatenate([rng.normal(0, 0.1, (5, 2)), rng.normal(5, 0.1, (4, 2))])
    label = k_means(x, 2, rng)
    assert len(set(label[:5])) == len(set(label[5:])) == 1 and label[0] != label[8]
    v = tf_idf(["the cat", "the cat", "a dog ran"])
    np.testing.assert_allclose(v[0] @ v[1], 1)
    assert v[0] @ v[2] == 0
    # each row is kept with the probability that makes its new weight unbiased
    logs = np.log(rng.dirichlet(np.full(7, 0.4)))
    total = np.zeros(7)
    for _ in range(4000):
        chosen, new = kept(logs, 3, rng)
        assert len(set(chosen.tolist())) == 3
        total[chosen] += np.exp(new)
    np.testing.assert_allclose(total / 4000, np.exp(logs), atol=0.02)
    # weights however far apart
    for _ in range(200):
        wide = np.where(rng.random(9) < 0.2, -np.inf, rng.normal(0, 2000, 9))
        chosen, new = kept(wide, 4, rng)
        some = np.isfinite(new)
        assert len(set(chosen.tolist())) == 4 and some.sum() == min(np.isfinite(wide).sum(), 4)
        assert np.isfinite(wide[chosen][some]).all() and wide.argmax() in chosen
        assert (new[some] >= wide[chosen][some] - 1e-9).all()
    assert np.isclose(logsumexp(logs), 0)


@pytest.mark.parametrize(("given", "options", "message"), [
    ("particles", {}, "search: unknown name 'particles'; near ones: particle-filter"),
    ("smc", {}, "search: 'smc' needs potential="), ("treepo", dict(x=1), "search: 'treepo' takes no option 'x'"),
    ("step-beams", dict(reward=reward, n=5, width=2), "width: got 2 for 5 rows"),
    ("a-star", dict(reward=reward, n=2, branch=2), "branch: got 2 for 2 rows"),
    ("particle-filter", dict(reward=lambda p, t: [2.0] * len(t)), "reward: got 2 to 2"),
    ("step-beams", dict(reward=lambda p, t: [np.nan] * len(t)), "score: got array"),
    ("smc", dict(potential=lambda p, t: [np.inf] * len(t)), "potential: got inf"),
    ("smc-steering", dict(potential=lambda p, t: [np.inf] * len(t), n=4, factor=2), "potential: got inf"),
    (5, {}, "by: got 5, takes a function of decodax.search")])
def test_bad_arguments_are_refused_by_name(given: Any, options: dict[str, Any], message: str) -> None:
    method = lambda: search.make(given, **options) if isinstance(given, str) else given
    with pytest.raises((ValueError, TypeError), match=message):
        search.explore(tiny(), [[1, 3]], method(), **OPTIONS)


@pytest.mark.parametrize(("name", "value"), [("max_time", 1.0), ("batch_size", 2), ("num_samples", 3)])
def test_arguments_that_a_search_does_not_honour_are_refused(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"^{name}: explore takes no such argument; "):
        search.explore(tiny(), [[1, 3]], search.particle_filter(reward=reward, n=2), **{name: value})


def test_the_guide_has_every_search() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "choose" / "search_steps.md").read_text()
    assert all(f"| `{name}` |" in guide for name in search.names())
