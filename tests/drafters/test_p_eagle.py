"""P-EAGLE: the logits of the public code, and drafts in one pass that change no output."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from decodax import algorithms
from decodax.algorithms.speculative.heads.source import HeadState
from decodax.algorithms.speculative.source import Level
from decodax.core.types import Params
from decodax.core.window import causal
from decodax.io.drafters import TrainedDrafter, load_drafter
from decodax.io.files import CheckpointError
from decodax.models import llama
from decodax.models.drafters.parallel import ParallelHead
from decodax.models.names import LLAMA
from decodax.models.weight_source import nested
from tests.drafters import given
from tests.drafters.test_block_heads import CONFIG, MIXED, drafted_logits, plain, weighted
from tests.laws.cases import MASK, VOCABULARY, decode, lm, model, prompts, start, texts

PUBLIC = json.loads((Path(__file__).parent / "speculators.json").read_text())["p_eagle"]
HEAD = ParallelHead((0, 1), VOCABULARY, config=CONFIG, project=True, own_head=True, own_table=True, mask=MASK, drafts=4)
NAMES = {"taps.kernel": "fc.weight", "embed_norm.scale": "layers.0.input_layernorm.weight", "embed":
         "embed_tokens.weight", "state_norm.scale": "layers.0.hidden_norm.weight", "norm.scale": "norm.weight",
         "lm_head.kernel": "lm_head.weight", "mask_feature": "mask_hidden"}


def in_one_pass(head, weights, features, tokens, last):
    """The logits after the pair at position `last`, and after each of the masks that follow it."""
    more = head.drafts - 1
    unknown = jnp.broadcast_to(head.unknown(weights), (1, more, head.state_width))
    state = jnp.concatenate([head.enter(weights, features[:, :last + 1]), unknown], 1)
    window = causal(jnp.pad(tokens[:, :last + 1], ((0, 0), (0, more)), constant_values=head.mask), jnp.zeros(1, int))
    cache = head.init_cache(1, 0, "float32")
    attend = lambda layer, q, k, v, **options: cache.attend(layer, q, k, v, window, **options)
    step = head.step(weights, window.tokens, None, state, window.positions, 0, attend)
    return head.logits(weights, step.hidden, 0, None)[0, last:]


@pytest.mark.wide
def test_logits_are_those_of_the_public_code():
    config = llama(vocab=24, width=16, layers=2, heads=4, kv_heads=2, head_dim=4, mlp=24, context=64, eps=1e-6)
    head = ParallelHead((0, 2), 24, config=config, project=True, own_head=True, own_table=True, mask=23, drafts=3)
    tensors, leaves = given.tensors(PUBLIC["shapes"]), {}
    for i in range(2):
        for ours, theirs in LLAMA.items():
            if f"layers.{i}.{theirs}.weight" in tensors and (i or ours != "attn_in"):
                leaf = "scale" if ours.endswith("_in") else "kernel"
                leaves[f"layers.{i}.{ours}.{leaf}"] = tensors[f"layers.{i}.{theirs}.weight"].T
    leaves |= {path: tensors[name].T if path.endswith("kernel") else tensors[name] for path, name in NAMES.items()}
    leaves["mask_feature"] = leaves["mask_feature"].reshape(-1)
    weights = jax.tree.map(jnp.asarray, nested(leaves))
    assert jax.tree.map(jnp.shape, weights) == jax.tree.map(lambda x: x.shape, head.abstract_params())
    features, tokens = given.inputs(PUBLIC["positions"], PUBLIC["features"], 24)
    for last, wanted in zip(PUBLIC["anchors"], PUBLIC["logits"], strict=True):
        got = in_one_pass(head, weights, jnp.asarray(features), jnp.asarray(tokens), last)
        np.testing.assert_allclose(got, np.asarray(wanted, np.float32), atol=1e-5, rtol=1e-5)


@pytest.mark.wide
def test_its_published_layout_is_read(tmp_path):
    config = llama(vocab=24, width=16, layers=2, heads=4, kv_heads=2, head_dim=4, mlp=24, context=64, eps=1e-6)
    entries = dict(architectures=["LlamaForCausalLMEagle3"], vocab_size=24, draft_vocab_size=24, hidden_size=16,
                   num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=4, intermediate_size=24,
                   max_position_embeddings=64, rms_norm_eps=1e-6, rope_theta=config.layers[0].rope.theta,
                   eagle_aux_hidden_state_layer_ids=[1, 3], mask_token_id=23)
    (tmp_path / "config.json").write_text(json.dumps(entries))
    tensors = {name: np.asarray(x, np.float32) for name, x in given.tensors(PUBLIC["shapes"]).items()}
    tensors["mask_hidden"] = tensors["mask_hidden"].reshape(1, 1, -1)
    save_file(tensors, tmp_path / "model.safetensors")
    drafter = load_drafter(tmp_path, layer_ids="inputs")
    assert drafter.system == "p-eagle" and drafter.head.mask == 23 and drafter.head.taps == (0, 2)
    features, tokens = given.inputs(PUBLIC["positions"], PUBLIC["features"], 24)
    head = dataclasses.replace(drafter.head, drafts=3)
    for last, wanted in zip(PUBLIC["anchors"], PUBLIC["logits"], strict=True):
        got = in_one_pass(head, drafter.params, jnp.asarray(features), jnp.asarray(tokens), last)
        np.testing.assert_allclose(got, np.asarray(wanted, np.float32), atol=1e-5, rtol=1e-5)
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in entries.items() if k != "mask_token_id"}))
    with pytest.raises(CheckpointError, match=r"config\.json names no mask token, as mask_token_id or ptd_token_id"):
        load_drafter(tmp_path, layer_ids="inputs")


@pytest.mark.wide
@pytest.mark.parametrize("case", [PUBLIC, PUBLIC["sliding"]], ids=["full", "sliding windows"])
def test_a_file_of_speculators_is_read_without_options(case, tmp_path):
    """Its layers are named by their inputs, as those of its EAGLE-3. The logits are those of its code."""
    (tmp_path / "config.json").write_text(json.dumps(case["config"]))
    save_file(given.tensors(case["shapes"]), tmp_path / "model.safetensors")
    drafter = load_drafter(tmp_path)
    assert drafter.system == "p-eagle" and drafter.head.taps == (0, 2)
    assert drafter.head.mask == 23 and drafter.head.drafts == 3
    assert [layer.sliding for layer in drafter.head.config.layers] == [4 if case is not PUBLIC else None] * 2
    features, tokens = given.inputs(PUBLIC["positions"], PUBLIC["features"], 24)
    for last, wanted in zip(PUBLIC["anchors"], case["logits"], strict=True):
        got = in_one_pass(drafter.head, drafter.params, jnp.asarray(features), jnp.asarray(tokens), last)
        np.testing.assert_allclose(got, np.asarray(wanted, np.float32), atol=1e-5, rtol=1e-5)


@pytest.mark.wide
def test_with_seed_exact_the_output_is_plain_decodings():
    alg = algorithms.make("p-eagle", lm("llama"), TrainedDrafter("p-eagle", HEAD, weighted(HEAD)))
    s = decode(alg.bare(), "llama", prompts(5), MIXED, eos=[1], draft=alg.weights)
    assert texts(s) == plain()
    alg = algorithms.make("p-eagle", lm("llama"), TrainedDrafter("p-eagle", HEAD, weighted(HEAD)), length=9)
    with pytest.raises(ValueError, match="length: got 9 drafts on a path, ParallelDraft takes at most 4"):
        _ = alg.drafter


@pytest.mark.wide
def test_drafting_computes_the_logits_of_one_pass():
    alg = algorithms.make("p-eagle", lm("llama"), TrainedDrafter("p-eagle", HEAD, weighted(HEAD)))
    network, target = model("llama")
    ids = jnp.asarray(np.random.default_rng(3).integers(0, VOCABULARY, (1, 13)), jnp.int32)
    bare = alg.bare()
    _, params, _, s = start(bare, "llama", ids.tolist(), {}, draft=alg.weights, width=4)
    out = network.apply(target, causal(ids, jnp.zeros(1, int)), network.init_cache(1, 0))
    wanted = in_one_pass(HEAD, alg.weights.head, HEAD.features(out.hidden, out.layers), ids[:, 1:], 11)
    got, _ = drafted_logits(dataclasses.replace(bare.draft), params, s, jnp.zeros((1, 3), jnp.int32))
    np.testing.assert_allclose(got[0], wanted, atol=2e-5, rtol=1e-5)


def test_nodes_of_one_level_may_differ_in_depth():
    """Trees that grow by their most likely nodes have such levels: each node gets the logits of its own depth."""
    alg = algorithms.make("p-eagle", lm("llama"), TrainedDrafter("p-eagle", HEAD, weighted(HEAD)))
    hidden = jax.random.normal(jax.random.key(0), (2, 4, 16))
    depth = jnp.asarray([[1, 2, 1], [3, 1, 2]])
    lengths = jnp.asarray([5, 9])
    nodes = jnp.zeros((2, 3), jnp.int32)
    level = Level(tokens=nodes, positions=lengths[:, None] - 1 + depth, parents=nodes, sees=nodes[..., None] > 0, at=0)
    state = HeadState(cache=None, hidden=hidden[:, 0], state=hidden[:, 0], states=hidden,
                      skipped=jnp.zeros(len(hidden), jnp.int32))
    _, answer = alg.bare().draft.extend(Params(None, alg.weights), SimpleNamespace(length=lengths), state, level)
    wanted = HEAD.logits(alg.weights.head, jnp.take_along_axis(hidden, depth[..., None], 1), 0, None)
    np.testing.assert_allclose(answer.logits, wanted, atol=1e-5)
