"""Multi-head latent attention on a mesh: every device has the latents, and each its own heads."""

import jax
import pytest

from decodax.io.load import LM
from decodax.models import Transformer
from decodax.models.families import read_config
from tests.meshes import mesh_of, same_tokens, spread
from tests.models.families.tiny_seeing import GLM5_NEXT
from tests.models.latent.test_latent import CONFIG
from tests.models.tiny import COMMON, HY4, LARGE, LONGCAT

pytestmark = pytest.mark.mesh

PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8, 5], [9, 10, 11], [1, 2], [3, 4, 5, 6, 7]]
SHARED = {**CONFIG, "model_type": "glm_moe_dsa", "indexer_types": ["full", "shared"], "index_n_heads": 4,
          "index_head_dim": 12, "index_topk": 4}
READ = {**COMMON, **LARGE, "model_type": "mistral_large4_text", "vocab_size": 61}
SHORTCUTS = {**COMMON, **LONGCAT, "model_type": "longcat_flash", "vocab_size": 61}
SINKS = {**COMMON, **HY4, "model_type": "hy_v4", "vocab_size": 61}
GROUPS = {**COMMON, **GLM5_NEXT, "model_type": "glm5_next_text", "vocab_size": 61, "num_hidden_layers": 3,
          "layer_types": ["indexed_attention", "indexed_attention", "linear_attention"],
          "indexer_types": ["full", "shared", "full"], "mlp_layer_types": ["sparse", "dense", "dense"]}


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("config", [CONFIG, SHARED, READ, SINKS, GROUPS, SHORTCUTS],
                         ids=["all", "chosen", "read", "sinks", "groups", "shortcuts"])
def test_a_mesh_gives_the_tokens_of_one_device(kind, config):
    model = Transformer(read_config(config))
    params = jax.tree.map(lambda x: 6 * x if x.ndim > 1 else x, model.init_params(jax.random.key(0)))
    alone = LM(model=model, params=params, vocab_size=61)
    parted = spread(alone, mesh_of(kind, data=2, model=4))
    kernel = parted.params["layers"]["0"]["attn"]["k_b"]["kernel"]
    assert kernel.addressable_shards[0].data.size * 4 == kernel.size
    same_tokens(alone, parted, PROMPTS, 12)


def test_heads_are_divided_and_latents_are_not_sent():
    """Attention takes no collective: only the output projection and the MLP are summed up."""
    from decodax.bench.report import collectives, parse
    from decodax.core.window import causal

    mesh = mesh_of(data=1, model=4)
    dense = Transformer(read_config({**CONFIG, "first_k_dense_replace": 2}))
    place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    params = jax.tree.map(place, dense.abstract_params(), dense.shardings(mesh))
    whole = jax.NamedSharding(mesh, jax.P())
    cache = jax.tree.map(lambda x: place(x, whole), jax.eval_shape(lambda: dense.init_cache(2, 64)))

    def step(params, cache, tokens):
        return dense.apply(params, causal(tokens, cache.length), cache).hidden

    with jax.set_mesh(mesh):
        tokens = jax.ShapeDtypeStruct((2, 4), "int32", sharding=whole)
        text = jax.jit(step).lower(params, cache, tokens).compile().as_text()
    found = [x for x, _ in collectives(parse(text))]
    assert len([x for x in found if x.opcode.startswith("all-reduce")]) <= 2 * 2 + 1, [x.text[:150] for x in found]
    assert not [x for x in found if x.opcode.startswith(("all-gather", "all-to-all"))], [x.text[:200] for x in found]
