"""Draft lengths by measured cost, with a trained drafter."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.algorithms.speculative import NOTHING, Adaptive, Automatic, Speculative
from decodax.algorithms.speculative.adaptive import later, measure
from decodax.algorithms.speculative.adaptive.controllers import Arms, Controller, RoundOutcome
from decodax.algorithms.speculative.adaptive.measure import automatic_entry
from decodax.algorithms.speculative.heads import drafting_source
from decodax.algorithms.speculative.trees import Chain
from decodax.core.state import State
from decodax.core.types import Params, embeddings
from decodax.core.window import causal
from decodax.io.drafters import save_drafter
from decodax.io.load import LM
from decodax.models.drafters.block import BlockHead
from decodax.models.drafters.cross_kv import CrossKVHead
from decodax.models.drafters.falcon import FalconHead
from tests.drafters.fresh import fresh
from tests.laws import cases


@pytest.mark.wide
def test_automatic_takes_a_trained_drafter_and_no_longer_chains_than_it_drafts(lm: LM, tmp_path: Path) -> None:
    drafter = fresh("medusa", lm)
    save_drafter(tmp_path, drafter)
    made = automatic_entry(lm, drafter, lengths=(2, 7))
    assert [arm.drafter.length for arm in made.arms[1:]] == [2, drafter.head.longest]
    options = dict(max_new_tokens=12, temperature=[0.0, 0.9], seed=1, eos_token_id=[])
    plain, out = (dx.generate(lm, ["def f(self):", "a"], **options, **more) for more in (
        {}, dict(algorithm=dx.algorithms.automatic(lengths=(2,)), draft=str(tmp_path))))
    assert np.array_equal(out.tokens, plain.tokens)


COSTS = {1: (1.0, 1.1, 1.2, 1.4), 8: (1.0, 1.4, 2.2, 3.6), 32: (1.0, 2.6, 4.4, 7.6)}
"""Made-up durations of rounds with 0, 2, 4 and 7 drafts, by batch size."""


@pytest.mark.wide(but=("dflash", "pard", "prompt-lookup"))
@pytest.mark.parametrize("name", ["medusa", "hydra", "eagle-3", "mtp", "p-eagle", "dflash", "dspark", "dflash2",
                                  "xpress", "jetspec", "glide", "pard", "prompt-lookup"])
def test_the_length_that_pays_is_chosen_for_each_batch_size_and_none_where_none_pays(
        name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If 80% of the drafts are accepted at each depth, a round has 1 + .8 + .64 + .51 + .41 + ... tokens."""
    lm, drafter = cases.lm("llama"), None
    if name == "pard":
        (tmp_path / "config.json").write_text(json.dumps({"pard_token": 5}))
        drafter = dataclasses.replace(cases.lm("sliding"), directory=tmp_path)
    elif name != "prompt-lookup":
        drafter = fresh(name, lm)
    monkeypatch.setattr(measure, "measure", lambda model, weights, arms, *, batch, **more: COSTS[batch][:len(arms)])
    chosen = {}
    for batch in COSTS:
        made = automatic_entry(lm, drafter, batch=batch)
        lengths, rule = made.known.lengths, made.controller
        assert made.arms[0] == NOTHING and lengths[:2] == (0, 2) and len({arm.draft for arm in made.arms[1:]}) == 1
        state = rule.init(made.known, batch)
        state = state.replace(tried=jnp.full_like(state.tried, 100.0), held=jnp.full_like(state.held, 80.0))
        s: Any = SimpleNamespace(running=np.ones(batch, bool), max_length=np.full(batch, 99), length=np.full(batch, 9))
        chosen[batch] = lengths[int(rule.choose(made.known, state, s))]
    assert chosen == {1: lengths[-1], 8: 2, 32: 0}


def _store(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(later, "MOST", most)
    monkeypatch.setattr("decodax.algorithms.speculative.adaptive.arms.MOST", most)


@dataclasses.dataclass(frozen=True)
class Scripted(Controller):
    """Takes the arms of a list in turn."""

    script: tuple[int, ...]

    def init(self, of: Arms, batch: int) -> Any:
        return jnp.zeros(batch, jnp.int32)

    def choose(self, of: Arms, state: Any, s: State) -> Any:
        return jnp.array(self.script)[jnp.minimum(s.stats.rounds.max(), len(self.script) - 1)]

    def update(self, of: Arms, state: Any, seen: RoundOutcome) -> Any:
        return state


class Begins(Scripted):
    """Also says beforehand which arm is the first."""

    def first(self, of: Arms) -> int:
        return self.script[0]


@pytest.mark.wide(but=("eagle-3",))
@pytest.mark.parametrize("name", ["eagle-3", "dspark", "chimera", "medusa", "longspec", "falcon"])
def test_a_head_that_reads_rounds_without_drafts_later_drafts_the_same(name: str,
                                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """It drafts the same as a head that reads every round at once, also if the store fills up before and the head does
    not skip what is lost."""
    lm = cases.lm("llama")
    source: Any = drafting_source(lm, fresh(name, lm))
    _store(monkeypatch, 8 if source.takes_gaps else 4)
    Eager: Any = dataclasses.dataclass(frozen=True)(type("Eager", (type(source),), {"defers": False}))
    eager = Eager(source.head, source.weights)
    options: Any = dict(new=30, size=64)

    def run(source: Any) -> State:
        method = Adaptive((NOTHING, Speculative(source, shape=Chain(2))), Scripted((1, 1, *[0] * 7, 1, 0, 0, 1, 1)))
        return cases.decode(method.bare(), "llama", cases.prompts(3), {}, draft=method.weights, **options)

    told, waited = run(eager), run(source)
    assert len(waited.algo[3].read) == 1 and not told.algo[3].read
    assert cases.texts(told) == cases.texts(waited) == cases.texts(
        cases.decode(dx.Autoregressive(), "llama", cases.prompts(3), {}, **options))
    assert np.asarray(waited.stats.drafted).sum() > 0
    one, other = told.algo[1][1], waited.algo[1][1]
    if one.cache is not None:
        for row, n in enumerate(np.asarray(told.length)):
            for new, held in zip(one.cache.kv, other.cache.kv, strict=True):
                np.testing.assert_allclose(held[row, :, :n - 4], new[row, :, :n - 4], atol=2e-5, rtol=1e-5)


@pytest.mark.wide(but=("eagle-3",))
@pytest.mark.parametrize("name", ["eagle-3", "p-eagle", "medusa", "dflash", "dspark", "falcon", "longspec", "glide"])
def test_a_head_that_skips_rounds_drafts_as_if_their_tokens_were_not_there(name: str,
                                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """And the output is that of plain decoding."""
    lm = cases.lm("llama")
    source: Any = drafting_source(lm, fresh(name, lm))
    _store(monkeypatch, 4)
    method = Adaptive((NOTHING, Speculative(source, shape=Chain(2))), Scripted((1, 1, *[0] * 9, 1, 1)))
    options: Any = dict(new=30, size=64)
    s = cases.decode(method.bare(), "llama", cases.prompts(3), {}, draft=method.weights, **options)
    assert cases.texts(s) == cases.texts(cases.decode(dx.Autoregressive(), "llama", cases.prompts(3), {}, **options))
    _assert_skipped(lm, source, method, s, [5] * 3)     # of nine rounds the store holds four


@pytest.mark.wide(but=("eagle-3",))
@pytest.mark.parametrize("name", ["eagle-3", "p-eagle", "medusa", "dflash", "dspark", "falcon", "longspec", "glide"])
def test_a_head_reads_the_end_of_prompts_alone_if_decoding_begins_without_drafts(
        name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the output is that of plain decoding, with prompts that are read in one chunk or several."""
    lm = cases.lm("llama")
    source: Any = drafting_source(lm, fresh(name, lm))
    _store(monkeypatch, 4)
    method = Adaptive((NOTHING, Speculative(source, shape=Chain(2))), Begins((0, 0, 1, 1, 1)))
    assert method.skips_prompts
    lengths = [len(prompt) for prompt in cases.prompts(3)]
    for width in (4, 16):
        options: Any = dict(new=30, size=64, width=width)
        s = cases.decode(method.bare(), "llama", cases.prompts(3), {}, draft=method.weights, **options)
        plain = cases.decode(dx.Autoregressive(), "llama", cases.prompts(3), {}, **options)
        assert cases.texts(s) == cases.texts(plain) and np.asarray(s.stats.drafted).min() > 0
        # the store had all tokens of the prompt but the newest one, and those of two rounds
        _assert_skipped(lm, source, method, s, [max(n - 1 + 2 - 4, 0) for n in lengths], first=0)


def _assert_skipped(lm: LM, source: Any, method: Adaptive, s: State, skipped: list[int],
                    first: int | None = None) -> None:
    """Asserts that the head's keys and values are those of a text without `skipped` consecutive pairs in each row, from
    index `first` on (None: any)."""
    head = s.algo[1][1]
    if head.cache is None:
        return
    assert head.skipped.tolist() == skipped
    for row, n in enumerate(np.asarray(head.cache.length)):
        text, count = np.asarray(s.tokens[row, :int(s.length[row])]), skipped[row]
        n = min(n, len(text) - count - 1)       # tokens that the end has cut are forgotten when a row goes on
        out = lm.model.apply(lm.params, causal(jnp.asarray(text[None]), jnp.zeros(1, jnp.int32)),
                             lm.model.init_cache(1, 64))
        features = source.head.features(out.hidden, out.layers)
        held = np.moveaxis(np.asarray(head.cache.kv[0][row, :, :n]), 0, 1)

        def without(first: int, n: int = n, text: Any = text, features: Any = features,
                    count: int = count) -> np.ndarray:
            """The keys and values of a head that reads the text without these pairs."""
            kept = np.delete(np.arange(n + count), np.arange(first, first + count))
            pairs = causal(jnp.asarray(text[kept + 1][None]), jnp.zeros(1, jnp.int32))
            weights, own = method.weights[1], source.head
            embed = lambda at: embeddings(lm.model, lm.params, jnp.asarray(text[at][None]))
            if isinstance(own, BlockHead):
                entered = own.enter(weights.head, features[:, kept])
                return np.asarray(own.context(weights.head, entered, pairs.positions)[0].both)[0]
            if isinstance(own, FalconHead):
                read, _ = own.read(weights.head, embed(kept + 1), features[:, kept], jnp.zeros((1, own.carry_width)))
                return np.asarray(own.context(weights.head, read, pairs.positions)[0].both)[0]
            if isinstance(own, CrossKVHead):
                return np.concatenate(own.keys_values(weights.head, embed(kept), pairs.positions), -1)[0]
            states, cache = source.head.enter(weights.head, features[:, kept]), source.head.init_cache(1, 64, "float32")
            step = source._step(Params(lm.params, weights), pairs, states, 0, cache)
            return np.asarray(step.entries[0].both)[0]

        assert any(np.allclose(without(i), held, atol=2e-5, rtol=1e-5)
                   for i in (range(1, n) if first is None else [first]))


def test_a_head_that_reads_rounds_later_is_probed_when_it_is_due() -> None:
    lm = cases.lm("llama")
    source: Any = drafting_source(lm, fresh("eagle-3", lm))
    method = Adaptive((NOTHING, Speculative(source, shape=Chain(2))), Automatic((1.0, 1.2), probing=0.05, patience=8))
    s = cases.decode(method.bare(), "llama", cases.prompts(3), {}, draft=method.weights, new=60, size=128)
    rounds, drafted = np.asarray(s.stats.rounds).max(), np.asarray(s.stats.drafted)
    assert rounds > 50 and (drafted >= 2 * (rounds // 12)).all() and (drafted < rounds).all()


def test_a_head_whose_text_is_cut_to_fewer_tokens_than_it_skipped_begins_anew() -> None:
    lm = cases.lm("llama")
    source: Any = drafting_source(lm, fresh("eagle-3", lm))
    params = Params(lm.params, source.weights)
    s: Any = SimpleNamespace(batch=2, cache=lm.model.init_cache(2, 32), length=jnp.array([5, 30]))
    state = source.init(params, s).replace(skipped=jnp.array([9, 9]))
    state = state.replace(cache=state.cache.replace(length=jnp.array([3, 20])))
    begun, _ = source.start(params, s, state, 2)
    assert begun.skipped.tolist() == [4, 9] and begun.cache.length.tolist() == [0, 20]
