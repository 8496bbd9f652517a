"""Decoders with short convolutions or state-space blocks: the layouts of released files, bounds of time steps, what a
draft stores, and what is refused."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import decodax as dx
from decodax.core.window import causal
from decodax.io.load import LM
from decodax.io.saving import save_model
from decodax.models import Transformer, llama
from decodax.models.blocks.options import Layer
from decodax.models.config import DecoderConfig
from decodax.models.families import read_config
from decodax.models.recurrent.options import GatedDelta, SelectiveScan, ShortConv, Ssd
from decodax.models.routing import Experts

BASE = llama(vocab=16, width=16, layers=2, heads=4, kv_heads=2, mlp=24, context=256)
COMMON = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4,
          "num_key_value_heads": 2, "head_dim": 4}
LFM2 = {**COMMON, "model_type": "lfm2", "num_hidden_layers": 2, "full_attn_idxs": [1], "block_multiple_of": 8}
NEMOTRON = {**COMMON, "model_type": "nemotron_h", "hybrid_override_pattern": "ME*-M", "mamba_num_heads": 4,
            "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 6, "n_routed_experts": 4, "moe_intermediate_size": 12,
            "moe_shared_expert_intermediate_size": 10}
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_state": 6}
GRANITE = {**COMMON, **MAMBA2, "model_type": "granitemoehybrid", "num_hidden_layers": 2, "layer_types": [
    "mamba", "attention"], "num_local_experts": 0, "num_experts_per_tok": 0, "position_embedding_type": "nope"}
FALCON = {**COMMON, **MAMBA2, "model_type": "falcon_h1", "num_hidden_layers": 2, "mamba_d_ssm": 24}
KIMI = {**COMMON, "model_type": "kimi_linear", "num_key_value_heads": 4, "num_hidden_layers": 2, "kv_lora_rank": 8,
        "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 6, "num_experts": 4, "num_experts_per_token": 2,
        "moe_intermediate_size": 12, "linear_attn_config": {"full_attn_layers": [2], "head_dim": 6, "num_heads": 2}}
LING = {**COMMON, "model_type": "bailing_hybrid", "num_key_value_heads": 4, "num_hidden_layers": 2,
        "layer_group_size": 2, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 6,
        "num_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 12,
        "first_k_dense_replace": 1}
JAMBA = {**COMMON, "model_type": "jamba", "num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1,
         "num_experts": 4}


def entries(model: Transformer) -> Any:
    """Shapes of the entries of three nodes of two rows."""
    def run() -> Any:
        window = causal(jnp.zeros((2, 3), jnp.int32), jnp.zeros(2, jnp.int32))
        return model.apply(model.init_params(jax.random.key(0)), window, model.init_cache(2, 64)).entries

    return jax.tree.leaves(jax.tree.map(lambda x: x.shape, jax.eval_shape(run)), is_leaf=lambda x: isinstance(x, tuple)
                           and all(isinstance(n, int) for n in x))


def test_what_a_cache_and_a_draft_store() -> None:
    """Halves and blocks beside attention included: an MLP stores nothing, a layer with both has two entries."""
    keys = [(2, 3, 2, 4)] * 2
    assert entries(Transformer(read_config(LFM2))) == [(2, 3, 16), *keys]
    space = [(2, 3, 4, 8), *[(2, 3, 2, 6)] * 3, (2, 3, 4, 8), (2, 3, 4, 2)]
    assert entries(Transformer(read_config(NEMOTRON))) == [*space, *keys, *space]
    assert len(entries(Transformer(read_config(FALCON)))) == 2 * (2 + 6)
    for size in (64, 4096):
        cache = Transformer(read_config(LFM2)).init_cache(2, size)
        assert [x.shape for x, in cache.linear.rings] == [(2, 2, 16)] and cache.linear.states == (None,)


@pytest.mark.parametrize("entries", [LFM2, NEMOTRON, {**GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2},
                                     FALCON, JAMBA, KIMI, LING], ids=lambda c: c["model_type"])
def test_a_directory_is_written_and_read(entries: dict[str, Any], tmp_path: Path) -> None:
    """Under the names and with the entries of released files; tensors of layers for further tokens are skipped."""
    model = Transformer(read_config(entries))
    params = model.init_params(jax.random.key(0))
    save_model(tmp_path, model, params, entries)
    if entries is NEMOTRON:
        file = tmp_path / "model.safetensors"
        tensors = load_file(file)
        assert {"backbone.embeddings.weight", "backbone.layers.1.mixer.experts.3.up_proj.weight",
                "backbone.layers.4.mixer.conv1d.bias"} < set(tensors)
        save_file({**tensors, "mtp.layers.0.norm.weight": np.ones(16, np.float32)}, file)
        with pytest.warns(UserWarning, match=r"skips 1 tensors of layers that predict further tokens, such as mtp\."):
            lm = dx.load(tmp_path)
    else:
        lm = dx.load(tmp_path)
    assert lm.model == model
    jax.tree.map(np.testing.assert_array_equal, lm.params, params)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == entries["model_type"]


def test_time_steps_have_bounds() -> None:
    free, bound = (read_config({**NEMOTRON, "time_step_limit": limit}).layers[0].recurrent
                   for limit in ([0.0, {"__float__": "Infinity"}], [0.3, 0.9]))
    assert isinstance(free, Ssd) and isinstance(bound, Ssd)
    assert free.steps == (0.0, float("inf")) and bound.steps == (0.3, 0.9)


@pytest.mark.wide
@pytest.mark.parametrize("config", [read_config(LFM2), read_config(NEMOTRON), DecoderConfig(**{
    **vars(BASE), "layers": (Layer(recurrent=GatedDelta(2, 4, 6, 4)), BASE.layers[1])})],
    ids=["short convolutions", "Mamba-2", "gated delta rule"])
def test_samples_and_beams_take_their_states_along(config: DecoderConfig) -> None:
    model = Transformer(config)
    params = jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, model.init_params(jax.random.key(0)))
    lm, prompts = LM(model=model, params=params, vocab_size=16), [[1, 2, 3, 1, 2, 3, 1, 2], [4, 5]]
    tokens = lambda prompts, **options: dx.generate(lm, prompts, max_new_tokens=8, eos_token_id=[], seed=5,
                                                    **options).tokens.tolist()
    samples: dict[str, Any] = dict(num_samples=2, temperature=1.0)
    together = tokens(prompts, **samples)
    assert together == [row for i in (0, 1) for row in tokens(prompts[i:i + 1], request_ids=[i], **samples)]
    assert together[0] != together[1]
    beams = dx.algorithms.make("beam-search", lm, width=3)
    assert tokens(prompts, algorithm=beams)[1:] == tokens(prompts[1:], algorithm=beams)


@pytest.mark.parametrize(("entries", "message"), [
    ({**LFM2, "full_attn_idxs": []}, r"layer_types, full_attn_idxs: got no layer with attention"),
    ({**LFM2, "layer_types": ["conv", "sliding_attention"]}, r"layer_types: got .*takes 'conv' or 'full_attention'"),
    ({**LFM2, "model_type": "lfm2_moe"}, r"config\.json of a lfm2_moe model lacks 'layer_types'"),
    ({**LFM2, "model_type": "llama", "layer_types": ["conv", "conv"]}, r"layer_types: got .*takes a list of 'full_att"),
    ({**NEMOTRON, "hybrid_override_pattern": "MX*"}, r"layers_block_type, hybrid_override_pattern: got \['X'\], takes"),
    ({**NEMOTRON, "hybrid_override_pattern": "M-"}, r"layers_block_type.*: got no layer with attention"),
    ({**NEMOTRON, "hybrid_override_pattern": "*-"}, r"layers_block_type.*: got no layer with a state-space block"),
    ({**NEMOTRON, "num_hidden_layers": 4}, r"num_hidden_layers: got 4 with 5 layers in"),
    ({**NEMOTRON, "mlp_bias": True}, r"mlp_bias: got True with mixtures of experts, takes False"),
    ({**NEMOTRON, "attention_bias": True}, r"attention_bias: got True, supported is False"),
    ({**NEMOTRON, "sliding_window": 8}, r"sliding_window: got 8, supported is none"),
    ({**NEMOTRON, "time_step_limit": [2.0, 1.0]}, r"time_step_limit: got .*takes two numbers from 0"),
    ({**GRANITE, "layer_types": ["mamba", "conv"]}, r"layer_types: got .*takes 'attention' or 'mamba' for each"),
    ({**GRANITE, "layer_types": ["mamba"] * 2}, r"layer_types: got no layer with attention"),
    ({**GRANITE, "mamba_d_head": 5}, r"mamba_n_heads: got 4 of 5 channels, takes 32 channels in all"),
    ({**GRANITE, "position_embedding_type": "alibi"}, r"position_embedding_type: got 'alibi', takes 'rope' or 'nope'"),
    ({**FALCON, "mlp_multipliers": [1.0]}, r"mlp_multipliers: got \[1\.0\], takes 2 numbers"),
    ({**FALCON, "projectors_bias": True}, r"projectors_bias: got True, supported is False"),
    ({**FALCON, "mamba_n_groups": 3}, r"mamba_n_groups: got 3, takes a divisor of mamba_n_heads = 4"),
    ({**KIMI, "mla_use_nope": False}, r"mla_use_nope: got False, supported is True"),
    ({**KIMI, "linear_attn_config": {"full_attn_layers": [3]}}, r"layer_types, .*: got no layer with attention"),
    ({**JAMBA, "attn_layer_offset": 2}, r"attn_layer_offset: got 2, takes less than attn_layer_period = 2")])
def test_wrong_entries_are_refused_by_name(entries: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        read_config(entries)


def test_wrong_layers_are_refused_by_name() -> None:
    of = lambda *layers, **more: DecoderConfig(**{**vars(BASE), "layers": layers, **more})
    ssd = Ssd(4, 8, 2, 6)
    for make, message in (
            (lambda: Layer(half="mlp", rope=BASE.layers[0].rope), "half: got 'mlp' with options of attention"),
            (lambda: Layer(half="attention", experts=Experts(4, 2, 8)), "half: got 'attention' with experts"),
            (lambda: of(Layer(half="mlp"), BASE.layers[0]), "half: takes a decoder in which some layers"),
            (lambda: of(Layer(recurrent=ssd, half="attention"), BASE.layers[0], block="parallel"), "block: got one"),
            (lambda: Layer(beside=True), "beside: takes a layer with a recurrent block"),
            (lambda: Layer(recurrent=ssd, sliding=4), "recurrent: cannot be combined with options of attention"),
            (lambda: of(Layer(recurrent=ssd), Layer(recurrent=ShortConv(16)), BASE.layers[0]), "recurrent: got blocks"),
            (lambda: of(Layer(recurrent=GatedDelta(2, 2, 4, 4)), Layer(experts=Experts(4, 2, 8, bias=True)),
                        gated=False), "experts: got a bias or a gated activation"),
            (lambda: Ssd(4, 8, groups=3), "groups: got 3, takes a divisor of heads = 4"),
            (lambda: Ssd(4, 8, factors=(1.0,)), "factors: got"), (lambda: ShortConv(0), "channels: got 0"),
            (lambda: SelectiveScan(8, 0), "rank: got 0")):
        with pytest.raises(ValueError, match=f"^{message}"):
            make()
