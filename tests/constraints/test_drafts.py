"""Draft models under constraints: held to them as the target is, they change nothing but how much is accepted."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest
from scipy.stats import chisquare

import decodax as dx
from decodax.algorithms.speculative import MultiRound, Rejection, SeedExact, Speculative, drafts, trees
from decodax.algorithms.speculative.grown import Grown
from decodax.constraints.transform import Constrained, TokenTable
from decodax.core.window import causal
from decodax.io.load import LM
from decodax.sampling.base import Temperature
from decodax.sampling.distribution import Policy
from tests.constraints.schemas import PERSON
from tests.matrix import often

PROMPTS = ["one", '{"name": "x", "n": 3}', "def f("]


@pytest.fixture(scope="module")
def pair(tiny_model: Path) -> tuple[LM, LM]:
    """A model, and one that says nearly the same."""
    lm = dx.load(tiny_model)
    noise = iter(jax.random.split(jax.random.key(2), 100))
    near = jax.tree.map(lambda x: x + 0.3 * x.std() * jax.random.normal(next(noise), x.shape), lm.params)
    return lm, lm.with_params(near)


@dataclasses.dataclass(frozen=True)
class Unheld(Grown):
    """Drafts that know nothing of the constraint."""

    def propose(self, params: Any, policy: Any, s: Any, state: Any, drawn: Any) -> Any:
        free = [(t, z) for t, z in zip(policy.transforms, s.policy, strict=True) if not t.by_token]
        links, states = zip(*free, strict=True)
        return super().propose(params, policy.replace(transforms=links), s.replace(policy=states), state, drawn)


def test_states_follow_what_is_drafted_and_after_the_end_all_is_free() -> None:
    """The language of the text 0 1, whose end is 3, in one row; the other one is free."""
    following = np.full((4, 4), -1, np.int16)
    following[[0, 1, 2], [0, 1, 3]] = 1, 2, 3
    table = TokenTable(classes=jnp.arange(4, dtype=jnp.uint16), next=jnp.asarray(following),
                       distance=jnp.array([3, 2, 1, 0]), forced=jnp.array([0, 1, 3, -1]))
    link = Constrained(start=jnp.array([0, -1]), end=jnp.array([9, 9]))
    policy = Policy((link, Temperature(jnp.ones(2))), eos=jnp.full((2, 1), 3), tables=(table,), vocab_size=4)
    s: Any = SimpleNamespace(tokens=jnp.zeros((2, 9), jnp.int32), length=jnp.array([1, 1]), policy=(link.start, None),
                             prompt_length=jnp.array([1, 1]), key=jax.random.split(jax.random.key(0)))
    window, logits = causal(jnp.array([[0, 0, 1, 3]] * 2), jnp.zeros(2, jnp.int32)), jnp.zeros((2, 4, 4))
    states = [jax.tree.map(lambda x: x[:, None], policy.drafted(s.policy))]
    for node in (1, 2, 3):
        states.append(policy.follow(states[-1], window.tokens[:, node:node + 1]))
    nodes = jnp.tile(jnp.arange(4), (2, 1))
    raw, warm = policy.on_draft(s, window, logits, nodes, jax.tree.map(lambda *x: jnp.concatenate(x, 1), *states))
    allowed = np.asarray(raw) > -np.inf
    assert allowed[0].tolist() == [[True, False, False, False], [False, True, False, False],
                                   [False, False, False, True], [True] * 4]
    assert allowed[1].all() and np.array_equal(np.asarray(warm()) > -np.inf, allowed)


FORMS: dict[str, Any] = {
    "chain": trees.Chain(4), "tree": trees.Fixed.balanced(3, 2, 1), "sure chain": trees.ConfidenceChain(4, 0.01),
    "confident tree": trees.ConfidenceTree(nodes=8, length=4, width=3), "opt tree": trees.OptTree(nodes=8, length=4)}


@pytest.mark.wide
@pytest.mark.parametrize(("form", "temperature"), often([("chain", 1.0)], [(f, t) for f in FORMS for t in (0.0, 1.0)]))
def test_a_draft_under_the_constraint_changes_nothing_and_is_accepted_more_often(
        pair: tuple[LM, LM], form: str, temperature: float) -> None:
    lm, small = pair
    given: dict[str, Any] = dict(constraint=[dx.constraints.json_schema(PERSON), dx.constraints.json_schema(PERSON),
                                             None], max_new_tokens=32, temperature=temperature)
    plain = dx.generate(lm, PROMPTS, **given)
    assert plain.text is not None
    for text in plain.text[:2]:
        jsonschema.validate(json.loads(text), PERSON)
    shape, source = FORMS[form], drafts.DraftModel(small)
    held = dx.generate(lm, PROMPTS, algorithm=Speculative(source, shape=shape), **given)
    free = dx.generate(lm, PROMPTS, algorithm=Speculative(Unheld(source, shape)), **given)
    for out in (held, free):
        assert out.tokens.tolist() == plain.tokens.tolist() and out.status == plain.status
    rate = lambda out: np.asarray(out.stats.accepted) / np.maximum(out.stats.rounds, 1)
    assert (rate(held)[:2] > rate(free)[:2]).all()
    assert rate(held)[2] == rate(free)[2]            # a row without a constraint is as it was


@pytest.mark.wide
def test_a_constraint_mask_raises_the_acceptance_of_the_shipped_draft_model() -> None:
    """The figures of docs/choose/constraints.md."""
    lm, source = dx.load("pycode"), drafts.DraftModel(dx.load("pycode-draft"))
    person = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12},
                                               "age": {"type": "integer", "minimum": 0}}, "required": ["name", "age"]}
    for temperature, held, unheld in ((0.0, 2.27, 1.09), (1.0, 2.62, 1.17)):
        given: dict[str, Any] = dict(constraint=dx.constraints.json_schema(person), max_new_tokens=40,
                                     temperature=temperature)
        prompts, found = ["x = ", "# a person\n", "data = json.loads(", "def f():\n    return "], []
        for draft in (Grown(source, trees.Chain(4)), Unheld(source, trees.Chain(4))):
            found.append(dx.generate(lm, prompts, algorithm=Speculative(draft), **given))
        assert found[0].tokens.tolist() == found[1].tokens.tolist()
        for out, want in zip(found, (held, unheld), strict=True):
            assert abs(out.stats.mean_accepted_length - want) < 0.2


WORDS = ["ab", "a", "ba", "b", "abba", "bab", "baab"]


@pytest.mark.wide
@pytest.mark.parametrize("way", ["rejection", "seeds", "multi-round", "multi-round with replacement"])
def test_draws_have_the_law_of_plain_draws(pair: tuple[LM, LM], way: str) -> None:
    """Counts of 2,000 texts, against the chances that plain decoding states. At 1e-5."""
    lm, small = pair
    verify, form = {"rejection": (Rejection(), "chain"), "seeds": (SeedExact(), "tree"),
                    "multi-round": (MultiRound(), "tree"),
                    "multi-round with replacement": (MultiRound(replacement=True), "tree")}[way]
    rows = 2000
    given: dict[str, Any] = dict(constraint=dx.constraints.choices(WORDS), max_new_tokens=5, temperature=1.0)
    plain = dx.generate(lm, ["one"] * rows, logprobs=0, seed=3, **given)
    assert plain.text is not None and plain.logprobs is not None
    ways = {tuple(plain.row(i).tolist()): (float(plain.logprobs.processed[i].sum()), plain.text[i])
            for i in range(rows)}
    law = np.array([sum(np.exp(q) for q, text in ways.values() if text == word) for word in WORDS])
    assert abs(law.sum() - 1) < 0.01            # all ways were met but for rare ones
    alg = Speculative(drafts.DraftModel(small), verify, shape=FORMS[form])
    out = dx.generate(lm, ["one"] * rows, algorithm=alg, seed=4, **given)
    assert out.text is not None and out.stats.mean_accepted_length > 1.3
    counts = np.array([out.text.count(word) for word in WORDS])
    assert counts.sum() == rows and chisquare(counts, law / law.sum() * rows).pvalue > 1e-5


@pytest.mark.wide
def test_a_draft_model_that_agrees_is_accepted_whole(pair: tuple[LM, LM]) -> None:
    """The target as its own draft model, under the same mask: every draft holds up to the end of the text."""
    lm, _ = pair
    for temperature in (0.0, 1.0):
        out = dx.generate(lm, PROMPTS[:2], constraint=dx.constraints.json_schema(PERSON), max_new_tokens=32,
                          temperature=temperature,
                          algorithm=Speculative(drafts.DraftModel(lm), shape=trees.Chain(4)))
        least = -(-np.asarray(out.lengths) // 5)
        assert (np.asarray(out.stats.rounds) == least).all()
