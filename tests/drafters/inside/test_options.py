"""Options of layers for multi-token prediction that do not go together, and what an output holds for them."""

import dataclasses
import types

import jax.numpy as jnp
import numpy as np
import pytest

from decodax.core.types import Out
from decodax.io.drafters import TrainedDrafter, load_drafter, save_drafter
from decodax.io.drafters.further import head_of, layer_of, repeated
from decodax.models.drafters.depthwise import DepthwiseHead
from decodax.models.drafters.further import FURTHER
from decodax.models.drafters.recurrent import RecurrentHead
from decodax.models.families import family_of, read_config, text_part
from decodax.models.names import flatten
from decodax.models.transformer import Transformer
from decodax.models.weight_source import nested, stored_dtype
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
    with pytest.raises(ValueError, match="holds 2 layers that predict further tokens: layer: got one whose"):
        inside("glm5", 2)


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


def inside(case, count=1, experts=True, **more):
    """The head of `count` layers inside a tiny checkpoint."""
    kind, own, _ = CASES[case]
    given = {"model_type": kind, **COMMON, **own, **more}
    c, rule = read_config(given), FURTHER[family_of(given)]
    layer = layer_of(c, rule, experts, text_part(given))
    return repeated(head_of(c, rule, layer, own_table=False, own_head=False), count)


@pytest.mark.parametrize(("case", "count", "experts"), [
    ("deepseek-v4", 1, True), ("deepseek-v4", 2, True), ("glm5-next", 1, True), ("hy4", 1, True), ("ling3", 1, True),
    ("minimax-m3", 1, True), ("step3p7", 2, False), ("longcat-flash", 1, False)])
def test_a_saved_layer_is_loaded_again_with_the_same_options_and_dtypes(case, count, experts, tmp_path):
    made, draw = inside(case, count, experts), np.random.default_rng(0)
    params = {path: jnp.asarray(draw.normal(size=leaf.shape), jnp.dtype(stored_dtype(path, "bfloat16")))
              for path, leaf in flatten(made.abstract_params()).items()}
    save_drafter(tmp_path, TrainedDrafter("mtp", made, nested(params)))
    back = load_drafter(tmp_path, dtype="bfloat16")
    assert back.head == made
    for path, leaf in flatten(back.params).items():
        assert leaf.dtype == params[path].dtype
        np.testing.assert_array_equal(leaf, params[path], err_msg=path)


@pytest.mark.parametrize(("case", "experts", "layers", "message"), [
    ("minimax-m3", True, "full_attention", "layer_types: got no layer with an index of blocks, takes one"),
    ("step3p7", False, "full_attention", "layer_types: got no layer with a sliding window, takes one")])
def test_a_target_without_a_layer_like_the_further_ones_is_refused(case, experts, layers, message):
    count = CASES[case][1].get("num_hidden_layers", 2)
    with pytest.raises(ValueError, match=message):
        inside(case, experts=experts, layer_types=[layers] * count)


@pytest.mark.parametrize("count", [1, 2])
def test_a_head_of_all_streams_fits_a_target_of_its_own_depth_alone(count):
    kind, own, _ = CASES["deepseek-v4"]
    c, made = read_config({"model_type": kind, **COMMON, **own}), inside("deepseek-v4", count)
    target = types.SimpleNamespace(model=Transformer(c), name="target")
    drafter = TrainedDrafter("mtp", made, {}, name="d")
    drafter.check(target)
    depth = len(c.layers)
    for more in (c.layers * 2, c.layers[:1]):
        other = types.SimpleNamespace(model=Transformer(dataclasses.replace(c, layers=more)), name="other")
        with pytest.raises(ValueError, match=rf"\({depth},\), and those of 'other' follow its {len(more)} layers"):
            drafter.check(other)
