"""Options of layers for multi-token prediction that do not go together, and what an output holds for them."""

import dataclasses

import jax.numpy as jnp
import pytest

from decodax.core.types import Out
from decodax.models.drafters.depthwise import DepthwiseHead
from decodax.models.drafters.recurrent import RecurrentHead
from decodax.models.families import read_config
from decodax.models.weight_source import stored_dtype
from tests.models.tiny import CASES, COMMON


def head(case, at, **options):
    """A head with the layer `at` of a tiny configuration."""
    kind, own, _ = CASES[case]
    c = read_config({"model_type": kind, **COMMON, **own})
    return RecurrentHead((), c.vocab, config=dataclasses.replace(c, layers=c.layers[at:at + 1]),
                         **{"fuse": "norms", **options})


def test_a_second_layer_whose_queries_choose_tokens_is_refused():
    with pytest.raises(ValueError, match="queries choose the tokens that they attend to, takes another for count = 2"):
        DepthwiseHead((), 97, layer=head("glm5", 0), count=2)


@pytest.mark.parametrize("options", [{"fuse": "fc"}, {"hidden_first": True}, {"feeds_back": "before norm"}])
def test_a_head_with_several_streams_has_a_linear_layer_for_each_input(options):
    made = head("deepseek-v4", 0)
    assert (made.streams, made.target_width, made.tap_width, made.state_width) == (3, 32, 96, 96)
    made.check_target(made.config)
    with pytest.raises(ValueError, match="reads 3 residual streams, takes one for those of the target, 1"):
        made.check_target(dataclasses.replace(made.config, streams=None))
    assert stored_dtype("streams.fn", "bfloat16") == stored_dtype("depths.1.streams.fn", "bfloat16") == "float32"
    with pytest.raises(ValueError, match="config: got several residual streams"):
        head("deepseek-v4", 0, **options)


def test_all_streams_follow_the_outputs_of_the_layers():
    x, wide = jnp.zeros((2, 3, 4)), jnp.ones((2, 3, 8))
    out = Out(hidden=x, entries=(), head=lambda x: x, layers=(x, x))
    assert out.states == out.layers
    several = dataclasses.replace(out, streams=wide)
    assert [y.shape[-1] for y in several.first(2).states] == [4, 4, 8]
    assert several.first(2).streams.shape == (2, 2, 8) and several.rows(jnp.array([1])).streams.shape == (1, 3, 8)
