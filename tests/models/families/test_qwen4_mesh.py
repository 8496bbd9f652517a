"""Qwen4 on a mesh: heads and tables of n-grams are divided, streams and the last tokens of a text are not."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import PartitionSpec

from decodax.cache import PerLayer
from decodax.core.mesh import cache_specs
from decodax.io.load import LM
from decodax.models import Transformer
from decodax.models.families import read_config
from tests.meshes import mesh_of, same_tokens, spread
from tests.models.families.tiny_qwen4 import QWEN4
from tests.models.tiny import COMMON

pytestmark = pytest.mark.mesh

PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8, 5], [9, 10, 11], [1, 2], [3, 4, 5, 6, 7]]
CONFIG = {"model_type": "qwen4_exp_text", **COMMON, **QWEN4, "num_hidden_layers": 3, "ple_layer_ids": [1]}


def test_inputs_of_all_streams_are_on_every_device() -> None:
    """Also if the number of streams is that of the devices."""
    cache = Transformer(read_config({**CONFIG, "hc_count": 4})).init_cache(1, 16)
    assert isinstance(cache, PerLayer)
    specs = cache_specs(cache).linear.rings
    assert cache.linear.rings[1][1].shape[2] == 4 and specs[1] == (PartitionSpec("data"),) * 2
    assert specs[0] == specs[2] == (PartitionSpec("data", None, "model"),)


@pytest.mark.wide
@pytest.mark.parametrize(("kind", "streams"), [("Auto", 3), ("Explicit", 3), ("Auto", 4)])
def test_a_mesh_gives_the_tokens_of_one_device(kind: str, streams: int) -> None:
    model = Transformer(read_config({**CONFIG, "hc_count": streams}))
    params = jax.tree.map(lambda x: 6 * x if x.ndim > 1 else x, model.init_params(jax.random.key(0)))
    alone = LM(model=model, params=params, vocab_size=97)
    parted = spread(alone, mesh_of(kind, data=2, model=4))
    for part in (parted.params["layers"]["0"]["ngrams"]["table"], parted.params["layers"]["1"]["attn"]["q"]["kernel"]):
        assert part.addressable_shards[0].data.size * 4 == part.size
    same_tokens(alone, parted, PROMPTS, 12)
