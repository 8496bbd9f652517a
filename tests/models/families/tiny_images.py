"""Tiny checkpoints of models that see images, as transformers writes them."""

import copy
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.models.families.tiny_qwen4 import QWEN4
from tests.models.families.tiny_seeing import GLM5_NEXT, GLM_EYE, HY4_EYE, MUSE_EYE
from tests.models.tiny import COMMON, DELTA, GEMMA4, HY4, LARGE, MINIMAX_M3, MUSE, SHARED, SMALL_WINDOW

SIGHT = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 16,
         "patch_size": 8}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]}}
MROPE_NEXT = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2],
                                  "mrope_interleaved": True}}
MROPE_YARN = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mrope_section": [1, 1, 2],
                                  "original_max_position_embeddings": 16}}
PIXTRAL = {**SIGHT, "image_size": 32, "model_type": "pixtral", "head_dim": 8}
DEEPSTACK = {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": 32,
             "deepstack_visual_indexes": [0]}
EYE = {key: size for key, size in DEEPSTACK.items() if key != "deepstack_visual_indexes"}
EYES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "position_embedding_size": 16}
PLACES = {"image_token_id": 96, "video_token_id": 95, "vision_start_token_id": 94, "vision_end_token_id": 93}

# model_type, text_config on top of COMMON, vision_config, further entries; where the tensors of the layers are
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    "gemma3": ("gemma3", {**SMALL_WINDOW, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]},
               SIGHT, {"mm_tokens_per_image": 4, "image_token_index": 96}, "language_model.model.layers."),
    "mistral3": ("mistral3", {"model_type": "mistral", "head_dim": 8, "sliding_window": None},
                 PIXTRAL, {"image_token_index": 96,
                                                                     "tie_word_embeddings": False},
                 "language_model.model.layers."),
    "mistral3-tied": ("mistral3", {"model_type": "mistral", "head_dim": 8, "sliding_window": None},
                      PIXTRAL, {"image_token_index": 96},
                      "language_model.model.layers."),
    "mistral-large4": ("mistral_large4", LARGE, PIXTRAL, {"image_token_index": 96}, "layers."),
    "qwen2-vl": ("qwen2_vl", MROPE, {"embed_dim": 16, "depth": 1, "num_heads": 2, "hidden_size": 32}, PLACES,
                 "model.layers."),
    "qwen2.5-vl": ("qwen2_5_vl", MROPE, {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2,
                                         "out_hidden_size": 32, "fullatt_block_indexes": [0]}, PLACES, "model.layers."),
    "qwen2.5-vl-yarn": ("qwen2_5_vl", MROPE_YARN, {
        "hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": 32,
        "fullatt_block_indexes": [0]}, PLACES, "model.layers."),
    "qwen3-vl": ("qwen3_vl", {**MROPE_NEXT, "head_dim": 16}, DEEPSTACK, PLACES, "model.language_model.layers."),
    "qwen3-vl-moe": ("qwen3_vl_moe", {**MROPE_NEXT, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
                                      "moe_intermediate_size": 24, "mlp_only_layers": [1]}, DEEPSTACK, PLACES,
                     "model.language_model.layers."),
    "qwen3.5": ("qwen3_5", {**DELTA, **MROPE_NEXT, "head_dim": 16}, EYE, PLACES, "model.language_model.layers."),
    "qwen3.5-moe": ("qwen3_5_moe", {**DELTA, **SHARED, **MROPE_NEXT, "head_dim": 16, "num_hidden_layers": 2,
                                    "layer_types": DELTA["layer_types"][:2]}, EYE, PLACES,
                    "model.language_model.layers."),
    "qwen4": ("qwen4_exp", {**QWEN4, "eos_token_id": 2, "rope_parameters": {
        **MROPE_NEXT["rope_parameters"], "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}}, EYE, PLACES,
              "model.language_model.layers."),
    "ministral3": ("mistral3", {"model_type": "ministral3", "head_dim": 8, "sliding_window": None, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 8, "mscale": 1.0,
        "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}}, PIXTRAL,
                   {"image_token_index": 96, "tie_word_embeddings": False}, "language_model.model.layers."),
    "gemma4": ("gemma4", {**GEMMA4, "attention_k_eq_v": True, "use_bidirectional_attention": "vision",
                          "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 4,
                          "top_k_experts": 2, "moe_intermediate_size": 24}, EYES, {
        "audio_config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 16,
                         "subsampling_conv_channels": [4, 4]}, "image_token_id": 96, "video_token_id": 95,
        "audio_token_id": 94}, "model.language_model.layers."),
    "gemma4-unified": ("gemma4_unified", {**GEMMA4, "num_hidden_layers": 2, "layer_types": GEMMA4["layer_types"][:2]},
                       {"patch_size": 4, "mm_embed_dim": 32, "mm_posemb_size": 8, "output_proj_dims": 32}, {
                           "image_token_id": 96, "video_token_id": 95, "audio_token_id": 94},
                       "model.language_model.layers."),
    "lfm2-vl": ("lfm2_vl", {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "block_multiple_of": 12},
                {**SIGHT, "num_patches": 16}, {"image_token_id": 96, "projector_hidden_size": 16},
                "model.language_model.layers."),
    "lfm3-vl": ("lfm3_vl", {"model_type": "lfm3", "layer_types": ["conv", "sliding_attention"], "head_dim": 16,
                            **SMALL_WINDOW}, {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "patch_size": 4}, {"image_token_id": 96, "projector_hidden_size": 16},
                "model.language_model.layers."),
    "minimax-m3": ("minimax_m3_vl", MINIMAX_M3, {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
                                                 "num_attention_heads": 2, "image_size": 32, "patch_size": 4},
                   {"projector_hidden_size": 32, "image_token_index": 96}, "language_model.model.layers."),
    "hy4-vl": ("hy_v4_vl", {**HY4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                                       "mrope_section": [2, 1, 1]}}, HY4_EYE,
               {"image_token_id": 96, "video_token_id": 95}, "model.layers."),
    "glm5-next": ("glm5_next", GLM5_NEXT, GLM_EYE, {"image_token_id": 96}, "model.language_model.layers."),
    "muse-glimmer": ("muse_glimmer", MUSE, MUSE_EYE["vision_config"], {
        "image_token_id": 96, "video_token_id": 95, "out_hidden_size": 64, "projector_hidden_size": 16},
                     "model.language_model.layers."),
    "phi4-multimodal": ("phi4_multimodal", {
        "original_max_position_embeddings": 16, "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.2, 1.6], "partial_rotary_factor": 0.75,
            "long_factor": [1.5, 2.0, 6.0]}}, SIGHT, {"audio_config": {
                "hidden_size": 16, "intermediate_size": 16, "num_blocks": 1, "num_attention_heads": 2,
                "ext_pw_out_channel": 16, "depthwise_separable_out_channel": 16, "nemo_conv_channels": 16}},
                        "model.layers."),
    "llama4": ("llama4", {"head_dim": 16, "num_local_experts": 4, "intermediate_size_mlp": 40, "floor_scale": 6,
                          "attention_chunk_size": 5, "no_rope_layers": [1, 0], "interleave_moe_layer_step": 2},
               {**SIGHT, "intermediate_size": 16, "vision_output_dim": 16, "projector_input_dim": 16,
                "projector_output_dim": 16}, {"image_token_index": 96}, "language_model.model.layers."),
}


def saved(name: str, directory: Path) -> Any:
    kind, text, sight, more, _ = copy.deepcopy(CASES[name])        # transformers adds entries to nested ones
    text = {**COMMON, **text}
    of_text: dict[str, Any] = text if kind == "phi4_multimodal" else {"text_config": text}
    config = transformers.AutoConfig.for_model(kind, **of_text, vision_config=sight, **more)
    torch.manual_seed(0)
    auto = transformers.AutoModelForCausalLM if of_text is text else transformers.AutoModelForImageTextToText
    model = auto.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * 0.2 + (1.0 if weight.ndim == 1 else 0.0))
    model.save_pretrained(directory)
    return model
