"""A target and its heads learn together: the target's share of the gradient, the warm-up of the heads, and what is
written."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from decodax.models import adapters
from decodax.train.drafting.features import target_outputs
from decodax.train.drafting.joint import JOINT, JointInputs, JointLoss, JointTarget, joint_settings
from decodax.train.drafting.systems import first_weights, objective_of
from decodax.train.drafting.unrolled import unrolled
from decodax.train.language_model import NextTokens, divergence
from tests.laws.cases import VOCABULARY, lm

BATCH = jnp.asarray(np.random.default_rng(0).integers(0, VOCABULARY, (3, 14)), jnp.int32)
ON, OFF = JointInputs(None, jnp.float32(1)), JointInputs(None, jnp.float32(0))


def parts(system: str = "medusa"):
    target = lm("llama")
    heads = objective_of(system, target, loss="hard")
    # fresh heads predict what the target does; others give every weight a gradient
    first = first_weights(heads, target, jax.random.key(0))
    noise = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves(first))))
    return target, heads, jax.tree.map(lambda x: x + 0.1 * jax.random.normal(next(noise), x.shape), first)


def near(a, b, tolerance: float = 1e-6) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, atol=tolerance, rtol=1e-4)


def gradient(loss, params, extra, batch=BATCH):
    return jax.jit(jax.grad(lambda p: loss(p, batch, extra)[0]))(params)


def test_without_the_heads_loss_the_targets_gradient_is_that_of_fine_tuning():
    target, heads, head = parts()
    own, of_heads = gradient(JointLoss(heads, 0.0), (target.params, head), ON)
    near(own, gradient(NextTokens(target.model), target.params, None))
    assert not any(np.any(x) for x in jax.tree.leaves(of_heads))


@pytest.mark.wide
@pytest.mark.parametrize("system", ["medusa", "blockwise-parallel"])
def test_the_loss_is_the_papers_sum(system):
    """`-log p(x[t+1]) + lambda sum_k decay ** k (-log p_k(x[t+1+k]))`, from the logits of each head."""
    target, heads, head = parts(system)
    found, scalars = JointLoss(heads, JOINT[system].weight)((target.params, head), BATCH, ON)
    tokens = BATCH[:, :-1]
    logits, features = target_outputs(target.model, heads.head, target.params, tokens, "float32")
    cross = lambda x, y: -jnp.take_along_axis(jax.nn.log_softmax(x), y[..., None], -1).mean()
    expected = cross(logits, BATCH[:, 1:])
    assert float(scalars["cross_entropy"]) == pytest.approx(float(expected), rel=1e-5)
    decay = 0.8 if system == "medusa" else 1.0
    for k, (own, _) in enumerate(unrolled(target.model, heads.head, head, target.params, tokens, features, 4), 1):
        one = cross(own[:, :-1 - k], BATCH[:, 1 + k:-1])
        count = tokens.shape[1] - k             # the last label is not in the text: it counts as 0
        expected += JOINT[system].weight * decay ** k * one * (count - 1) / count
    assert float(found) == pytest.approx(float(expected), rel=1e-5)


def test_while_the_heads_learn_alone_the_target_has_no_gradient_and_they_have_all_of_theirs():
    target, heads, head = parts()
    loss = JointLoss(heads, 0.2)
    own, alone = gradient(loss, (target.params, head), OFF)
    assert not any(np.any(x) for x in jax.tree.leaves(own))
    near(alone, gradient(loss, (target.params, head), ON)[1])
    near(jax.tree.map(lambda x: x / (0.2 * loss.total), alone), gradient(heads, head, target.params), 1e-5)


@pytest.mark.wide
def test_the_heads_loss_reaches_the_target_and_its_vocabulary_matrix():
    target, heads, head = parts()
    both, own = (gradient(JointLoss(heads, weight), (target.params, head), ON)[0] for weight in (0.2, 0.0))
    moved = jax.tree.map(lambda x, y: float(jnp.abs(x - y).max()), both, own)
    assert all(x > 0 for x in jax.tree.leaves(moved)), moved


@pytest.mark.wide
def test_an_adapter_learns_as_the_weights_that_it_adapts_say():
    """At `b = 0` its gradient is that of the whole kernel times `a`."""
    target, heads, head = parts()
    whole = gradient(JointLoss(heads, 0.2), (target.params, head), ON)[0]
    joint = JointTarget.of(target, heads, JOINT["medusa"], rank=2)
    low = gradient(joint.loss, (joint.start, head), joint.inputs(target.params, 1000))[0]
    for part in ("q", "k", "v", "o"):
        a, wide = joint.start["layers"]["0"]["attn"][part]["kernel"]["a"], whole["layers"]["0"]["attn"][part]["kernel"]
        np.testing.assert_allclose(low["layers"]["0"]["attn"][part]["kernel"]["b"], a.T @ wide, atol=1e-5)
    near(joint.weights(joint.start), target.params)
    assert {"gate", "up", "down"} == set(joint.start["layers"]["0"]["mlp"])


@pytest.mark.wide
def test_self_distillation_keeps_the_target_near_itself():
    target, heads, head = parts()
    loss, moved = JointLoss(heads, 0.0, distill=1.0), jax.tree.map(lambda x: 1.05 * x, target.params)
    inputs = JointInputs(target.params, jnp.float32(1))
    guide, own = (target.model.forward(p, BATCH[:, :-1]) for p in (target.params, moved))
    assert float(loss((moved, head), BATCH, inputs)[0]) == pytest.approx(float(divergence(guide, own).mean()), rel=1e-4)
    near(gradient(loss, (target.params, head), inputs)[0], jax.tree.map(jnp.zeros_like, target.params), 1e-5)


@pytest.mark.wide
@pytest.mark.parametrize("rank", [None, 2])
def test_a_few_steps_lower_the_loss_and_change_the_target(rank):
    target, heads, head = parts()
    joint, optimizer = JointTarget.of(target, heads, JOINT["medusa"], rank=rank), optax.adam(3e-3)
    extra = joint.inputs(target.params, 1000)

    @jax.jit
    def steps(weights):
        def one(carry, _):
            weights, state = carry
            loss, slope = jax.value_and_grad(lambda w: joint.loss(w, BATCH, extra)[0])(weights)
            updates, state = optimizer.update(slope, state)
            return (optax.apply_updates(weights, updates), state), loss

        (weights, _), losses = jax.lax.scan(one, (weights, optimizer.init(weights)), None, 12)
        return weights, losses

    (own, _), losses = steps((joint.start, head))
    assert losses[-1] < 0.97 * losses[0]
    changed = jax.tree.map(lambda x, y: bool(jnp.any(x != y)), joint.weights(own), target.params)
    kernels = adapters.init(target.params, jax.random.key(0), 1, None) if rank else target.params
    assert sum(jax.tree.leaves(changed)) >= len(jax.tree.leaves(kernels)) // (2 if rank else 1)


def test_settings_that_mean_nothing_are_refused():
    _, heads, _ = parts()
    with pytest.raises(ValueError, match=r"^distill: got 1\.5, takes a share"):
        JointLoss(heads, 0.2, 1.5)
    with pytest.raises(ValueError, match=r"^head_weight: got -1"):
        joint_settings("medusa", -1)
    with pytest.raises(ValueError, match=r"^joint: got True for 'eagle-3', takes it for 'medusa' and 'blockwise"):
        joint_settings("eagle-3")
