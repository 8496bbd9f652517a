"""Multi-head latent attention: its two forms, its caches, its files. The families are in test_families, the laws of
decoding in tests/contracts/test_model."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.core.window import causal
from decodax.io.checkpoint import load_model
from decodax.io.files import write_files
from decodax.io.load import LM
from decodax.io.saving import save_model
from decodax.models import DecoderConfig, Layer, Rope, Transformer
from decodax.models.families import read_config
from decodax.models.latent.shape import Latent
from decodax.models.names import flatten
from tests.matrix import often

CONFIG = {"model_type": "deepseek_v3", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48,
          "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 16,
          "q_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10, "n_routed_experts": 4,
          "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1,
          "first_k_dense_replace": 1, "max_position_embeddings": 64}
PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8, 5], [9, 10, 11], [1, 2]]


@pytest.fixture(scope="module")
def lm() -> LM:
    model = Transformer(read_config(CONFIG))
    params = jax.tree.map(lambda x: 6 * x if x.ndim > 1 else x, model.init_params(jax.random.key(0)))
    return LM(model=model, params=params, vocab_size=61)


def run(lm: LM, **options: object) -> list[list[int]]:
    return dx.generate(lm, PROMPTS, max_new_tokens=10, eos_token_id=[], seed=3, **options).tokens.tolist()


def test_prompts_are_expanded_windows_absorbed_and_both_agree(lm: LM) -> None:
    model, params = lm.model, lm.params
    tokens = jax.random.randint(jax.random.key(1), (2, 24), 0, 61)
    cache, start = model.init_cache(2, 64), jnp.zeros(2, jnp.int32)

    @jax.jit(static_argnums=2)
    def read(window, cache, is_prefill):
        out = model.apply(params, window.replace(is_prefill=is_prefill), cache)
        return out.logits(), cache.commit(out.entries, window.positions + 0 * out.logits().argmax(-1))

    full = model.forward(params, tokens)
    for expanded in (True, False):
        first, after = read(causal(tokens[:, :16], start), cache, expanded)
        second, _ = read(causal(tokens[:, 16:], start + 16), after, expanded)
        np.testing.assert_allclose(jnp.concatenate([first, second], 1), full, atol=2e-5)
    one = str(jax.make_jaxpr(lambda w: model.apply(params, w, cache).hidden)(causal(tokens[:, :16], start)))
    assert "16,4,20]" not in one.replace("2,16,4,20]", "")     # keys of the heads exist nowhere in a window


def test_a_token_takes_one_latent_and_one_rotated_key(lm: LM) -> None:
    cache = lm.model.init_cache(3, 64)
    assert [x.shape for x in cache.kv] == [(3, 1, 64, 16 + 8)] * 2
    assert sum(x.nbytes for x in cache.kv) == 3 * 64 * 2 * (16 + 8) * 4


@pytest.mark.wide
def test_drafts_and_chunks_change_nothing(lm: LM) -> None:
    assert run(lm, chunk=4, algorithm="prompt-lookup:length=3") == run(lm)


@pytest.mark.wide
def test_samples_share_a_prefill_and_trees_change_nothing(lm: LM) -> None:
    options = dict(num_samples=2, temperature=0.8)
    trees = dx.Speculative(dx.drafts.DraftModel(lm), shape=dx.trees.Fixed.balanced(2, 2))
    assert run(lm, algorithm=trees, **options) == run(lm, **options)


@pytest.mark.wide
@pytest.mark.parametrize("cache", ["paged:page=4,pages=64", "hydragen"])
def test_caches_that_keep_all_tokens_change_nothing(lm: LM, cache: str) -> None:
    options = dict(num_samples=2, temperature=0.8)
    assert run(lm, cache=cache, **options) == run(lm, **options)


@pytest.mark.wide
@pytest.mark.parametrize(("cache", "budget"), often([("h2o", 2)], itertools.product(
    ("h2o", "tova", "snapkv", "keydiff", "sink-window"), (2, 3))))
def test_evicting_caches_take_latents_as_the_keys_of_one_head(lm: LM, cache: str, budget: int) -> None:
    """A text that fits is kept; drafts do not change what is evicted."""
    options = {"snapkv": ",window_size=2", "sink-window": ",n_sink=1", "h2o": ",recent_size=1"}.get(cache, "")
    every = "" if cache == "snapkv" else f",every={1 if cache in ('tova', 'sink-window') else 2}"
    assert run(lm, cache=f"{cache}:budget=40{options}") == run(lm)
    few = f"{cache}:budget={budget + 3}{options}{every}"
    plain = run(lm, cache=few)
    assert plain != run(lm) and run(lm, cache=few, algorithm="prompt-lookup:length=3") == plain


@pytest.mark.parametrize("cache", ["knorm", "adakv", "quest", "kivi", "streaming-llm", "minference", "fastkv"])
def test_other_caches_are_refused_by_name(lm: LM, cache: str) -> None:
    with pytest.raises(ValueError, match=f"cache: {cache} takes a model with keys and values for each head"):
        run(lm, cache=cache)


@pytest.mark.wide
def test_kernels_may_be_packed(lm: LM, tmp_path) -> None:
    save_model(tmp_path, lm.model, lm.params, config=CONFIG)
    model, params = load_model(tmp_path, weights="int8")
    plain, _ = load_model(tmp_path)
    tokens = jax.random.randint(jax.random.key(1), (2, 24), 0, 61)
    window = causal(tokens, jnp.zeros(2, jnp.int32))
    full = model.forward(params, tokens)
    found = model.apply(params, window, model.init_cache(2, 64)).logits()
    np.testing.assert_allclose(found, full, atol=1e-4)
    assert plain == model and float(jnp.abs(full - lm.model.forward(lm.params, tokens)).max()) < 0.5


def test_a_directory_is_written_as_it_was_read(lm: LM, tmp_path) -> None:
    save_model(tmp_path, lm.model, lm.params, config=CONFIG)
    model, params = load_model(tmp_path)
    assert model == lm.model
    for path, leaf in flatten(params).items():
        np.testing.assert_array_equal(leaf, flatten(lm.params)[path])


def test_layers_that_predict_further_tokens_are_skipped(lm: LM, tmp_path) -> None:
    from safetensors.numpy import load_file

    save_model(tmp_path, lm.model, lm.params, config=CONFIG)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {"model.layers.2.eh_proj.weight": np.zeros((32, 64), np.float32),
                "model.layers.2.shared_head.norm.weight": np.zeros(32, np.float32)}
    write_files(tmp_path, tensors, {**CONFIG, "num_nextn_predict_layers": 1}, "pt")
    with pytest.warns(UserWarning, match="skips 2 tensors of layers that predict further tokens"):
        model, _ = load_model(tmp_path)
    assert model == lm.model


def test_kimi_k2_is_a_deepseek_v3() -> None:
    released = {**CONFIG, "model_type": "kimi_k2", "scoring_func": "sigmoid", "topk_method": "noaux_tc",
                "moe_layer_freq": 1, "rope_scaling": {
                    "type": "yarn", "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 1.0,
                    "beta_slow": 1.0, "original_max_position_embeddings": 4096}}
    found = read_config(released)
    assert found.layers[0].scale == pytest.approx(20 ** -0.5 * (0.1 * np.log(32) + 1) ** 2)
    inside = read_config({"model_type": "kimi_k25", "text_config": released, "vision_config": {}})
    assert found == inside == read_config({**released, "model_type": "deepseek_v3"})
    with pytest.raises(ValueError, match="scoring_func: got 'softmax', supported is 'sigmoid'"):
        read_config({**released, "scoring_func": "softmax"})


def test_options_of_other_attention_are_refused() -> None:
    rope, latent = Rope(8), Latent(16, 10)
    for options in ({"rope": None}, {"rope": rope, "sliding": 4}, {"rope": rope, "reads": 0}):
        with pytest.raises(ValueError, match="latent: takes a rope"):
            Layer(latent=latent, **options)
    with pytest.raises(ValueError, match="latent: takes all layers"):
        DecoderConfig(8, 8, 2, 2, 8, 8, (Layer(rope, latent=latent), Layer(rope)), 64)
    with pytest.raises(ValueError, match="rank: got 0, takes 1 or more"):
        dataclasses.replace(latent, rank=0)


def test_null_query_rank_means_none() -> None:
    """V2-Lite has no latent of queries; a missing entry is transformers' default."""
    entries = json.loads(json.dumps({**CONFIG, "q_lora_rank": None}))
    assert read_config(entries).layers[0].latent.query_rank is None
    entries.pop("q_lora_rank")
    assert read_config(entries).layers[0].latent.query_rank == 1536


def test_layers_that_take_the_choice_of_others_run_together() -> None:
    chosen = {**CONFIG, "model_type": "glm_moe_dsa", "index_n_heads": 4, "index_head_dim": 12, "index_topk": 4}
    shared = read_config({**chosen, "indexer_types": ["full", "shared"]})
    model = Transformer(shared)
    params, cache = model.abstract_params(), model.init_cache(1, 8)
    assert "indexer" in params["layers"]["0"]["attn"] and "indexer" not in params["layers"]["1"]["attn"]
    window = causal(jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32))
    with pytest.raises(ValueError, match="or their choice, or repeat their attention, so they cannot run one by"):
        model.walk(params, window, cache)
    with pytest.raises(ValueError, match="some take the choice of tokens of others, so none can be left out"):
        jax.eval_shape(lambda params: model.apply(params, window, cache, keep=[(True, True), (False, True)]), params)
    with pytest.raises(ValueError, match=r"^indexer: got a shared one in layer 0, takes one of its own there"):
        dataclasses.replace(shared, layers=shared.layers[::-1])
    Transformer(read_config({**chosen, "indexer_types": ["full", "full"]}))._apart()
