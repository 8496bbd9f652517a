"""Qwen4 on a mesh: heads and tables of n-grams are divided, streams and the last tokens of a text are not."""

from __future__ import annotations

import jax
import pytest

from decodax.io.load import LM
from decodax.models import Transformer
from decodax.models.families import read_config
from tests.meshes import mesh_of, same_tokens, spread
from tests.models.families.tiny_qwen4 import QWEN4
from tests.models.tiny import COMMON

pytestmark = pytest.mark.mesh

PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8, 5], [9, 10, 11], [1, 2], [3, 4, 5, 6, 7]]
CONFIG = {"model_type": "qwen4_exp_text", **COMMON, **QWEN4, "num_hidden_layers": 3, "ple_layer_ids": [1]}


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_a_mesh_gives_the_tokens_of_one_device(kind: str) -> None:
    model = Transformer(read_config(CONFIG))
    params = jax.tree.map(lambda x: 6 * x if x.ndim > 1 else x, model.init_params(jax.random.key(0)))
    alone = LM(model=model, params=params, vocab_size=97)
    parted = spread(alone, mesh_of(kind, data=2, model=4))
    for part in (parted.params["layers"]["0"]["ngrams"]["table"], parted.params["layers"]["1"]["attn"]["q"]["kernel"]):
        assert part.addressable_shards[0].data.size * 4 == part.size
    same_tokens(alone, parted, PROMPTS, 12)
