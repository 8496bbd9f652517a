"""DeepSeek V4 on a mesh whose axes are explicit: heads and groups of outputs are divided, keys and their means are not.
Automatic axes are a case of `test_families_mesh`."""

from __future__ import annotations

import jax
import pytest

from decodax.io.load import LM
from decodax.models import Transformer
from decodax.models.families import read_config
from tests.meshes import mesh_of, same_tokens, spread
from tests.models.tiny import COMMON, V4

pytestmark = pytest.mark.mesh

PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8, 5], [9, 10, 11], [1, 2], [3, 4, 5, 6, 7]]
CONFIG = {"model_type": "deepseek_v4", **COMMON, **V4, "o_groups": 4, "num_hidden_layers": 3}


@pytest.mark.full
def test_explicit_axes_give_the_tokens_of_one_device() -> None:
    model = Transformer(read_config(CONFIG))
    params = jax.tree.map(lambda x: 6 * x if x.ndim > 1 else x, model.init_params(jax.random.key(0)))
    params["layers"]["0"]["mlp"]["hashed"] /= 6         # numbers of experts
    alone = LM(model=model, params=params, vocab_size=97)
    parted = spread(alone, mesh_of("Explicit", data=2, model=4))
    for name in ("q_b", "o_a", "o_b"):
        kernel = parted.params["layers"]["1"]["attn"][name]["kernel"]
        assert kernel.addressable_shards[0].data.size * 4 == kernel.size
    same_tokens(alone, parted, PROMPTS, 12)
