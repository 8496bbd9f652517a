"""A trained drafter beside a target on a mesh."""

import jax
import numpy as np
import pytest

import decodax as dx
from decodax.io.drafters import TrainedDrafter, load_drafter, save_drafter
from decodax.models.drafters.assistant import AssistantHead
from decodax.models.families import read_config
from decodax.models.transformer import Transformer
from tests.drafters.fresh import fresh
from tests.meshes import mesh_of, spread

pytestmark = [pytest.mark.mesh, pytest.mark.wide]
PROMPTS = ["def area(r):", "import os\n", "class Point:\n    def", "for i in"]


@pytest.mark.parametrize("name", ["eagle-3", "hydra", "dspark", "mtp"])
def test_a_drafter_goes_where_its_target_is(name, tmp_path):
    """Rows over one axis and the target's heads over the other: the tokens are those of plain decoding there."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    alone, lm = dx.load("pycode"), dx.load("pycode", mesh=mesh)
    save_drafter(tmp_path, fresh(name, alone), dtype="float32")
    options = dict(max_new_tokens=12, temperature=[0.0, 0.8, 0.0, 1.0], seed=3)
    wanted = dx.generate(lm, PROMPTS, **options)
    found = dx.generate(lm, PROMPTS, algorithm=name, draft=load_drafter(tmp_path, lm), **options)
    np.testing.assert_array_equal(found.tokens, wanted.tokens)
    np.testing.assert_array_equal(found.tokens, dx.generate(alone, PROMPTS, algorithm=name, draft=str(tmp_path),
                                                            **options).tokens)
    assert found.stats.drafted.sum() > 0


def test_an_assistant_reads_the_keys_of_a_target_on_a_mesh():
    """Heads of the target and of the assistant's queries lie on several devices."""
    entries = {"model_type": "gemma4_text", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48,
               "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
               "global_head_dim": 16, "sliding_window": 5, "hidden_size_per_layer_input": 0,
               "layer_types": ["sliding_attention", "full_attention"]}
    model = Transformer(read_config(entries))
    drawn = lambda x: x + 0.2 * jax.random.normal(jax.random.key(x.size), x.shape)
    alone = dx.LM(model=model, params=jax.tree.map(drawn, model.init_params(jax.random.key(0))), vocab_size=96)
    head = AssistantHead((), 96, config=read_config({**entries, "hidden_size": 24}), backbone=32, centroids=12,
                         chosen=3)
    drafter = TrainedDrafter("mtp", head, jax.tree.map(drawn, head.init_params(jax.random.key(1))))
    options = dict(max_new_tokens=10, temperature=[0.0, 0.8, 0.0, 1.0], seed=3, eos_token_id=[])
    prompts = [[5, 6, 7, 8, 5, 6, 7], [9, 10], [1], [3, 4, 3, 4]]
    lm = spread(alone, mesh_of(data=4, model=2))
    found = dx.generate(lm, prompts, algorithm="mtp", draft=drafter, **options)
    np.testing.assert_array_equal(found.tokens, dx.generate(alone, prompts, **options).tokens)
    assert found.stats.drafted.sum() > 0
