"""Drafters learn: a few steps on one batch lower the loss, from the weights with which training starts."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from decodax.train.drafting.systems import SYSTEMS, first_weights, objective_of
from tests.laws.cases import VOCABULARY, lm
from tests.matrix import often


@pytest.mark.wide(but=("hydra-plus-plus",))
@pytest.mark.parametrize("system", often(["hydra-plus-plus", "chimera", "falcon", "dflash2"], [
    name for name in SYSTEMS if name != "mumo"]))
def test_a_few_steps_lower_the_loss(system):
    target = lm("llama")
    objective = objective_of(system, target)
    batch = jnp.asarray(np.random.default_rng(0).integers(0, VOCABULARY, (4, 17)), jnp.int32)
    optimizer = optax.adam(1e-2)

    @jax.jit
    def steps(weights):
        def one(carry, _):
            weights, state = carry
            loss, slope = jax.value_and_grad(lambda w: objective(w, batch, target.params)[0])(weights)
            updates, state = optimizer.update(slope, state)
            return (optax.apply_updates(weights, updates), state), loss

        return jax.lax.scan(one, (weights, optimizer.init(weights)), None, 12)[1]

    losses = steps(first_weights(objective, target, jax.random.key(0)))
    assert np.isfinite(losses).all() and losses[-1] < 0.97 * losses[0]
