"""`Transformer` as a value and as a function of its weights."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax.models import DecoderConfig, Layer, Rope, Transformer, llama
from decodax.models.rope import Dynamic, LongRope, Scaling

SMALL = llama(vocab=23, width=16, layers=2, heads=2, kv_heads=1, mlp=24, tied=True)
TOKENS = np.random.default_rng(0).integers(0, 23, (2, 8)).astype(np.int32)


def with_rope(scaling: Scaling) -> DecoderConfig:
    return dataclasses.replace(SMALL, layers=(Layer(Rope(8, scaling=scaling)),) * 2)


def test_equal_models_are_one_static_argument() -> None:
    score = jax.jit(lambda model, params, tokens: model.forward(params, tokens), static_argnums=0)
    params = Transformer(SMALL).init_params(jax.random.key(0))
    score(Transformer(SMALL), params, TOKENS)
    with jax.no_tracing(True):
        score(Transformer(dataclasses.replace(SMALL)), params, TOKENS)
    assert Transformer(SMALL) != Transformer(SMALL, dtype="bfloat16")


@pytest.mark.full
def test_packed_sequences_score_as_separate_ones() -> None:
    model = Transformer(SMALL)
    params = model.init_params(jax.random.key(0))
    segment = jnp.arange(16) // 8
    mask = (segment[:, None] == segment) & jnp.tril(jnp.ones((16, 16), bool))
    positions = (jnp.arange(16, dtype=jnp.int32) % 8)[None]
    packed = model.forward(params, jnp.asarray(TOKENS.reshape(1, 16)), positions, mask[None])
    np.testing.assert_allclose(packed.reshape(2, 8, -1), model.forward(params, jnp.asarray(TOKENS)), atol=1e-5)


def test_every_weight_has_a_finite_gradient() -> None:
    model = Transformer(dataclasses.replace(SMALL, tied=False, qkv_bias=True, mlp_bias=True, qk_norm="full"))
    params = model.init_params(jax.random.key(0))
    loss = lambda p: -jax.nn.log_softmax(model.forward(p, jnp.asarray(TOKENS)))[..., 3].mean()
    grads = jax.jit(jax.grad(loss))(params)
    assert jax.tree.structure(grads) == jax.tree.structure(params)
    assert all(jnp.isfinite(g).all() and jnp.abs(g).max() > 0 for g in jax.tree.leaves(grads))


@pytest.mark.parametrize(("config", "context", "expected"), [
    (SMALL, None, None),
    (dataclasses.replace(SMALL, layers=(Layer(),) * 2, learned_positions=40), None, 40),
    (with_rope(Dynamic(2.0, 64)), None, 64),
    (with_rope(Dynamic(2.0, 64)), 100, 100),
    (with_rope(LongRope((1.0,) * 4, (2.0,) * 4, 64, 1.0)), None, 64),
    (with_rope(LongRope((1.0,) * 4, (2.0,) * 4, 64, 1.0)), 100, None),
])
def test_the_positions_a_model_covers_are_known(
        config: DecoderConfig, context: int | None, expected: int | None) -> None:
    assert Transformer(config, context=context).max_positions == expected


def test_query_heads_of_a_layer_that_its_keys_do_not_divide_are_refused() -> None:
    for heads, message in ((3, "kv_heads: got 2 for layer 0, takes a divisor of heads = 3"),
                           (0, "heads: got 0 for layer 0, takes 1 or more")):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(SMALL, kv_heads=2, layers=(dataclasses.replace(SMALL.layers[0], heads=heads),))


@pytest.mark.parametrize(("changes", "message"), [
    ({"heads": 3, "kv_heads": 2}, "heads: got 3, which is not a multiple of kv_heads = 2"),
    ({"head_dim": 6}, "rope width: got 8, more than head_dim = 6"),
])
def test_impossible_shapes_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **changes)


def test_longrope_takes_a_divisor_for_each_frequency() -> None:
    with pytest.raises(ValueError, match="got 3, a rotary width of 8 takes 4"):
        Rope(8, scaling=LongRope((1.0,) * 3, (2.0,) * 3, 64, 1.0))
