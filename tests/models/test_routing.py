"""The router of mixtures: each of its fields against a plain loop over tokens, and what it refuses."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from decodax.models import Experts, llama
from decodax.models.feed_forward import Mixture

ROUTERS = [Experts(6, 2, 5), Experts(6, 2, 5, False, score="sigmoid", scale=2.5),
           Experts(6, 3, 5, score="sigmoid", correction=True, groups=3, kept_groups=2),
           Experts(6, 2, 5, score="softmax", groups=2, kept_groups=1, group_score="max", normalise=False),
           Experts(6, 2, 5, score="sqrtsoftplus", correction=True, softcap=0.7),
           Experts(6, 2, 5, score="logits", bias=True),
           Experts(6, 2, 5, False, score="sigmoid", where="input", bias=True, shared=4, shared_gate=True)]



def random(e: Experts) -> Mixture:
    """A mixture of width 8 with random weights, biases included."""
    graph, state = nnx.split(Mixture(llama(vocab=8, width=8, layers=1, heads=2, mlp=8), e, nnx.Rngs(0)))
    leaves, tree = jax.tree.flatten(state)
    drawn = [jax.random.normal(jax.random.key(i), leaf.shape) for i, leaf in enumerate(leaves)]
    return nnx.merge(graph, jax.tree.unflatten(tree, drawn))


@pytest.mark.wide(but=("2", "5", "6"))
@pytest.mark.parametrize("e", ROUTERS, ids=range(len(ROUTERS)))
def test_a_router_with_each_of_its_fields_is_the_plain_loop_over_tokens(e: Experts) -> None:
    mixture = random(e)
    x = np.asarray(jax.random.normal(jax.random.key(99), (1, 9, 8)))
    got = np.asarray(mixture(jnp.asarray(x)))[0]
    value = lambda part: 0.0 if part is None else np.asarray(part[...])
    sigmoid, silu = lambda z: 1 / (1 + np.exp(-z)), lambda z: z / (1 + np.exp(-z))
    for t, token in enumerate(x[0]):
        logits = token @ value(mixture.router.kernel) + value(mixture.router.bias)
        logits = e.softcap * np.tanh(logits / e.softcap) if e.softcap else logits
        score = {"softmax": np.exp(logits) / np.exp(logits).sum(), "sigmoid": sigmoid(logits), "logits": logits,
                 "sqrtsoftplus": np.sqrt(np.log1p(np.exp(logits)))}[e.score]
        choice = (score + value(mixture.correction)).reshape(e.groups, -1)
        worth = choice.max(1) if e.group_score == "max" else np.sort(choice, 1)[:, -2:].sum(1)
        choice[np.argsort(-worth)[e.kept_groups:]] = -np.inf
        chosen = np.argsort(-choice.reshape(-1))[:e.chosen]
        weights = score[chosen]
        if e.normalise:
            weights = np.exp(weights) / np.exp(weights).sum() if e.score == "logits" else weights / weights.sum()
        want = np.zeros(8)
        for i, weight in zip(chosen, weights * e.scale, strict=True):
            own = token * weight if e.where == "input" else token
            project = lambda part, y, i=i: y @ value(part.kernel)[i] + (0 if part.bias is None else value(part.bias)[i])
            out = project(mixture.down, silu(project(mixture.gate, own)) * project(mixture.up, own))
            want += out if e.where == "input" else weight * out
        if mixture.shared is not None:
            inner = silu(token @ value(mixture.shared.gate.kernel)) * (token @ value(mixture.shared.up.kernel))
            want += sigmoid(token @ value(mixture.shared_gate.kernel)) * (inner @ value(mixture.shared.down.kernel))
        np.testing.assert_allclose(got[t], want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("fields", "message"), [
    (dict(groups=4), "groups: got 4 with kept_groups = 1, takes a divisor of the number of experts, 6"),
    (dict(groups=6, kept_groups=2), "groups: got 6 of 1 experts"),
    (dict(groups=2, kept_groups=3), "groups: got 2 with kept_groups = 3"),
    (dict(score="sparsemixer"), "score: sparsemixer takes two chosen experts, without normalise"),
    (dict(shared_gate=True), "shared_gate: got True without a shared expert"),
])
def test_fields_that_contradict_each_other_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Experts(6, 2, 5, **fields)
