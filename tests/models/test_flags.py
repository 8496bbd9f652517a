"""Entries of `config.json` that are not read: none that changes the model is ignored, for any family."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from decodax.models.families import FAMILIES, read_config
from decodax.models.families.flags import HARMLESS, MISSING, SHOWN
from decodax.models.families.nearest import nearest
from decodax.models.fields import FLAG, KINDS
from tests.models.tiny import CASES, COMMON

FIRST = {kind: options for kind, options, _ in reversed(CASES.values())}
"""The options of the first case of each family."""

WITHOUT_EFFECT_HERE = {
    # sizes under the names of other families, which the configurations of the cases have in common
    "gpt2": {"intermediate_size", "num_key_value_heads"}, "gptj": {"intermediate_size", "num_key_value_heads"},
    "gpt_neox": {"num_key_value_heads"}, "opt": {"intermediate_size", "num_key_value_heads"},
    "bloom": {"intermediate_size", "num_key_value_heads", "max_position_embeddings"},
    "falcon": {"intermediate_size", "num_key_value_heads", "num_kv_heads"}, "minimax_m2": {"rotary_dim"},
    # read, and decided by another entry of the case
    "qwen2": {"use_sliding_window", "max_window_layers", "layer_types"},
    "qwen3": {"use_sliding_window", "max_window_layers", "layer_types"},
    "qwen3_moe": {"use_sliding_window"},
    "qwen2_moe": {"sliding_window", "max_window_layers", "decoder_sparse_step", "layer_types"},
    "smollm3": {"use_sliding_window", "no_rope_layer_interval", "layer_types"},
    "deepseek_v4": {"compress_rope_theta", "partial_rotary_factor", "qk_rope_head_dim", "rope_theta"},
    "ernie4_5_moe": {"moe_layer_end_index", "moe_layer_interval"}, "exaone4": {"sliding_window_pattern"},
    "llama4_text": {"interleave_moe_layer_step", "no_rope_layer_interval"},
    # computed from the widths of the two parts of a head
    **{kind: {"head_dim", "qk_head_dim"} for kind in ("deepseek_v2", "deepseek_v3", "kimi_linear", "mistral4",
                                                                 "youtu")},
    "glm4_moe_lite": {"qk_head_dim"},
    **{kind: {"head_dim", "qk_head_dim", "first_k_dense_replace"}
       for kind in ("deepseek_v32", "glm_moe_dsa", "mistral_large4_text")},
    # nor does transformers read the number of key/value heads, which is that of heads
    **{kind: {"head_dim", "qk_head_dim", "num_key_value_heads"} for kind in ("hy_v4", "hy_v4_vl_text")},
    "glm5_next_text": {"qk_head_dim"},
    # the shards of a table are counted, and the states of convolutions are those of other options
    "qwen4_exp_text": {"number_of_conv_states", "split_ngram_parts"},
    "bailing_hybrid": {"head_dim", "qk_head_dim", "first_k_dense_replace", "layer_group_size", "rope_theta",
                       "short_conv_kernel_size"},
    "falcon_h1": {"mamba_expand", "mamba_norm_before_gate"}, "jamba": {"attn_layer_period", "expert_layer_period"},
    # not read by transformers either
    "nemotron_h": {"expand", "residual_in_fp32"},
    "phi3": {"original_max_position_embeddings"}, "recurrent_gemma": {"head_dim"},
}

SWAPPED: dict[Any, Any] = {
    "full_attention": "sliding_attention", "sliding_attention": "full_attention", "chunked_attention": "full_attention",
    "recurrent": "attention", "attention": "recurrent", "dense": "sparse", "sparse": "dense", 0: 1, 1: 0,
    "full": "shared", "shared": "full"}
"""Other values of entries of lists. A list in the opposite order may be the same."""


def read(config: dict[str, Any]) -> Any:
    try:
        return read_config(config)
    except ValueError as e:
        return str(e)


@pytest.mark.parametrize("kind", FIRST)
def test_every_entry_of_transformers_is_read_or_changes_nothing(kind: str) -> None:
    """Another value gives another decoder or an error."""
    config = transformers.AutoConfig.for_model(kind, **{**COMMON, **FIRST[kind]}).to_dict()
    known = read(config)
    assert not isinstance(known, str), known
    ignored = set()
    for key, value in config.items():
        match value:
            case bool():
                other: Any = not value
            case float():
                other = value / 2 if value else 0.5
            case int():
                other = 2 * value if value else 1
            case str():
                other = value + "x"
            case list():
                other = [SWAPPED.get(entry, entry) for entry in value]
                other = other if other != value else [*value[1:], 0]
            case None:
                other = 0.5
            case _:
                continue
        if read({**config, key: other}) == known:
            ignored.add(key)
    assert {key for key in ignored if not HARMLESS.search(key)} == WITHOUT_EFFECT_HERE.get(kind, set())


@pytest.mark.parametrize("key", [*SHOWN, *MISSING])
def test_an_entry_that_the_family_does_not_have_is_refused(key: str) -> None:
    flag = KINDS.get(key) is FLAG
    config = {**COMMON, "model_type": "llama", key: True if flag else 3}
    with pytest.raises(ValueError, match=f"^{key}: got (True|3), which a llama model does not have here"):
        read_config(config)
    for off in (None, False if flag else 1):
        assert read_config({**config, key: off}) == read_config({**COMMON, "model_type": "llama"})


def test_of_an_unknown_family_the_nearest_one_and_the_differences_are_named() -> None:
    config = transformers.AutoConfig.for_model("minimax").to_dict()
    with pytest.raises(ValueError, match=r"near to minimax_m2, .*it has .*full_attn_alpha_factor.*; supported are"):
        read_config(config)
    with pytest.raises(ValueError, match=r"got 'x' .*near to llama; supported are"):
        read_config({"model_type": "x", "vocab_size": 8})


@pytest.mark.wide(but=("flex_olmo-olmoe-",))
@pytest.mark.parametrize(("kind", "best", "differs"), [
    ("solar_open", "glm4_moe", ""), ("dots1", "glm4_moe", "sliding_window, max_window_layers"),
    ("flex_olmo", "olmoe", ""), ("vaultgemma", "gemma2", ""), ("helium", "llama", ""), ("persimmon", "stablelm", ""),
    ("jetmoe", "qwen3_moe", "kv_channels, activation_function"), ("axk1", "deepseek_v3", "qk_head_dim")])
def test_the_nearest_family_is_the_one_that_reads_the_most_entries(kind: str, best: str, differs: str) -> None:
    config = transformers.AutoConfig.for_model(kind).to_dict()
    name, more = nearest(config, FAMILIES)
    assert name == best and differs in ", ".join(more) and bool(differs) == bool(more)
    with pytest.raises(ValueError, match=f"got '{kind}' .*near to .*{best}.*; supported are"):
        read_config(config)


def test_the_nearest_family_of_a_model_with_an_index_has_one() -> None:
    config = transformers.AutoConfig.for_model("glm_moe_dsa").to_dict() | {"model_type": "sparse_later"}
    assert nearest(config, FAMILIES)[0] == "glm_moe_dsa"


def test_the_nearest_family_of_a_model_with_images_is_that_of_its_text() -> None:
    text = transformers.AutoConfig.for_model("qwen3_moe").to_dict()
    with pytest.raises(ValueError, match=r"near to qwen3_moe; beside what .* it has own_scale; supported"):
        read_config({"model_type": "my_vl", "text_config": {**text, "own_scale": 2.0}, "vision_config": {}})


def test_every_family_has_a_case() -> None:
    assert set(FAMILIES) - set(FIRST) == {"Dream", "Fast_dLLM_Qwen", "llada", "llada2_moe", "lladamoe",
                                         "sdar",                                         # test_diffusion.py
                                         "diffusion_gemma_text",                         # test_diffusion_gemma.py
                                         "kimi_k2",                                      # test_latent.py
                                         "mimo",                                         # test_further.py
                                         "qwen3_vl_moe_text"}                            # test_images.py
