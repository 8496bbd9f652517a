"""Mixtures of experts on a mesh: each device has a part of every expert's inner width, or of some whole experts."""

import jax
import pytest

import decodax as dx
from decodax.io.saving import save_model
from decodax.models import Transformer
from decodax.models.families import read_config
from tests.meshes import mesh_of, same_tokens

pytestmark = pytest.mark.mesh

CONFIG = {"model_type": "qwen3_moe", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8,
          "moe_intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
          "num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True, "decoder_sparse_step": 1,
          "mlp_only_layers": [], "rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 64,
          "hidden_act": "silu", "tie_word_embeddings": False}
PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [1, 2], [3, 4, 5, 6, 7]]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    model = Transformer(read_config(CONFIG))
    params = jax.tree.map(lambda x: x * 4 if x.ndim > 1 else x, model.init_params(jax.random.key(0)))
    save_model(tmp_path_factory.mktemp("experts") / "moe", model, params, config=CONFIG)
    return tmp_path_factory.getbasetemp() / "experts0" / "moe"


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("weights", [None, "int8"])
def test_the_same_tokens(home, kind, weights):
    mesh = mesh_of(kind, data=2, model=4)
    alone, parted = dx.load(home, weights=weights), dx.load(home, weights=weights, mesh=mesh)
    gate = jax.tree.leaves(parted.params["layers"]["0"]["mlp"]["gate"])[0]
    assert gate.addressable_shards[0].data.size * 4 == gate.size
    same_tokens(alone, parted, PROMPTS, 12)


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize(("weights", "shape"), [
    *((weights, shape) for weights in (None, "int8") for shape in ((2, 2, 2), (1, 1, 3))),
    *((weights, (2, 1, 3)) for weights in ("nvfp4", "int4:group=16"))])
def test_whole_experts_have_an_axis(home, kind, weights, shape):
    mesh = mesh_of(kind, **dict(zip(("data", "model", "expert"), shape, strict=True)))
    alone, parted = dx.load(home, weights=weights), dx.load(home, weights=weights, mesh=mesh)
    for name in ("gate", "up", "down"):
        kernel = jax.tree.leaves(parted.params["layers"]["1"]["mlp"][name])[0]
        assert kernel.addressable_shards[0].data.size * shape[1] * shape[2] == kernel.size
    same_tokens(alone, parted, PROMPTS, 12)


@pytest.mark.wide
def test_four_bits_that_share_bytes_over_experts_and_channels(home):
    """Such kernels of a CPU cannot be divided along their inputs: the compiler lays them out."""
    mesh = mesh_of(data=1, model=2, expert=2)
    same_tokens(dx.load(home, weights="int4:group=8"), dx.load(home, weights="int4:group=8", mesh=mesh), PROMPTS, 6)


@pytest.mark.parametrize("weights", [None, "int8"])
@pytest.mark.parametrize(("shape", "names"), [((1, 4), ("data", "model")), ((1, 2, 2), ("data", "model", "expert"))])
def test_the_parts_are_added_up_once(home, shape, names, weights):
    """One collective of all tokens a layer, not one a block of an expert."""
    from decodax.bench.report import collectives, parse

    mesh = mesh_of(**dict(zip(names, shape, strict=True)))
    lm = dx.load(home, mesh=mesh, weights=weights)
    with jax.set_mesh(mesh):
        model = lm.model
        tokens = jax.ShapeDtypeStruct((4, 8), "int32", sharding=jax.NamedSharding(mesh, jax.P()))
        text = jax.jit(model.forward).lower(lm.params, tokens).compile().as_text()
    wide = [x for x, _ in collectives(parse(text)) if x.opcode.startswith(("all-reduce", "reduce-scatter"))]
    assert 0 < len(wide) <= 2 * 2 + 2, [x.text[:150] for x in wide]


SMALL = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 64}
OTHERS = [
    {**SMALL, "model_type": "longcat_flash", "num_hidden_layers": 2, "num_key_value_heads": 4, "ffn_hidden_size": 48,
     "q_lora_rank": 12, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10,
     "n_routed_experts": 6, "zero_expert_num": 3, "moe_topk": 4, "expert_ffn_hidden_size": 24},
    {**SMALL, "model_type": "glm4_moe", "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
     "moe_intermediate_size": 24, "routed_scaling_factor": 2.5},
    {**SMALL, "model_type": "llama4_text", "head_dim": 8, "num_local_experts": 4, "intermediate_size_mlp": 40,
     "no_rope_layers": [1, 0], "attention_chunk_size": 5, "floor_scale": 6},
    {**SMALL, "model_type": "qwen2_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
     "shared_expert_intermediate_size": 20},
    {**SMALL, "model_type": "bloom", "n_layer": 2, "n_head": 4},
    {**SMALL, "model_type": "falcon", "alibi": True, "multi_query": False, "parallel_attn": False}]


@pytest.mark.wide
@pytest.mark.parametrize("config", OTHERS, ids=lambda config: config["model_type"])
def test_shared_experts_corrections_and_slopes_of_heads_on_a_mesh(config, tmp_path):
    model = Transformer(read_config(config))
    leaves, tree = jax.tree.flatten(model.init_params(jax.random.key(0)))
    drawn = [x + 0.2 * jax.random.normal(jax.random.key(i), x.shape) for i, x in enumerate(leaves)]
    save_model(tmp_path, model, jax.tree.unflatten(tree, drawn), config=config)
    mesh = mesh_of(data=2, model=2, expert=2)
    alone, parted = dx.load(tmp_path), dx.load(tmp_path, mesh=mesh)
    same_tokens(alone, parted, PROMPTS, 12)
