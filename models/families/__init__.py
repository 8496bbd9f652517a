"""Reads a Hugging Face `config.json` as a `DecoderConfig`, with one short function for each model family.

Options and defaults are those of the families' reference implementations in transformers, and for diffusion models
those of the code released with them (`decodax.models.diffusion`). Older files omit entries that equal a default, and
have `rope_theta` and `rope_scaling` where newer ones have `rope_parameters`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

from decodax.models.config import DecoderConfig
from decodax.models.diffusion import MIXTURE
from decodax.models.families import (
    deepseek,
    deepseek_v4,
    gemma,
    glm,
    gpt,
    gpt_oss,
    granite,
    hybrids,
    laguna,
    lfm,
    llada,
    llama,
    longcat,
    mimo,
    minimax,
    mixtures,
    muse,
    qwen,
    qwen4,
    state_spaces,
    step,
)
from decodax.models.families.flags import refuse_unread
from decodax.models.families.nearest import nearest
from decodax.models.fields import INSIDE, checked
from decodax.models.reading import Json


def read_config(c: Json) -> DecoderConfig:
    """Returns the decoder that a `config.json` describes.

    Raises:
        ValueError: `model_type` is not a supported family (the message names the one that takes the most of the other
            entries, the entries that this one does not take, and families of a similar name), an entry is missing, of
            the wrong type or out of its range, or an option is not supported here.
    """
    known = [*FAMILIES, *WITH_IMAGES]
    # Checked only for known families: the entries of another family may have other types.
    if str(c.get("model_type")) in known:
        c = text_part(checked(c))
    kind = family_of(c)
    if not isinstance(kind, str) or kind not in FAMILIES:
        differs = ""
        if isinstance(kind, str):
            inner = c.get("text_config")
            own = {key: value for key, value in c.items() if not key.endswith("_config")}
            best, more = nearest({**own, **inner} if isinstance(inner, dict) else c, FAMILIES)
            alike = [name for name in difflib.get_close_matches(kind, known, n=3, cutoff=0.7) if name != best]
            named = f"{', '.join(alike)}, by its name, and to " if alike else ""
            differs = f"near to {named}{best}{', by its entries' if alike else ''}; " + (
                f"beside what a {best} model takes it has {', '.join(more[:8])}{' ...' if len(more) > 8 else ''}; "
                if more else "")
        raise ValueError(f"model_type: got {kind!r} (architectures {c.get('architectures')}), {differs}supported are "
                         f"{', '.join(known)}")
    try:
        found = FAMILIES[kind](c)
    except KeyError as e:
        raise ValueError(f"config.json of a {kind} model lacks {e}") from None
    refuse_unread(c, found)
    return found


def family_of(c: Json) -> Any:
    """Returns the `model_type` of the decoder that a `config.json` describes; "lladamoe" for LLaDA-MoE, whose files
    have that of LLaDA, another network.

    >>> family_of({"model_type": "llada", "num_experts": 64}), family_of({"model_type": "gemma3", "vision_config": {}})
    ('lladamoe', 'gemma3_text')
    """
    kind = text_part(c).get("model_type")
    return "lladamoe" if kind == "llada" and any(c.get(key) is not None for key in MIXTURE) else kind


def text_part(c: Json) -> Json:
    """Returns the configuration of the language model inside a multimodal one; other configurations are returned
    unchanged.

    >>> text_part({"model_type": "gemma3", "text_config": {"hidden_size": 8}, "vision_config": {}, "eos_token_id": 1})
    {'model_type': 'gemma3_text', 'eos_token_id': 1, 'hidden_size': 8}
    """
    kind = str(c.get("model_type"))
    if kind not in WITH_IMAGES:
        return c
    inner = c.get("text_config") or {}
    family = INSIDE.get(kind) or inner.get("model_type", WITH_IMAGES[kind])
    own = {key: value for key, value in c.items() if not key.endswith("_config") and key != "architectures"}
    # The whole model's entry decides about tying the head, whatever text_config says.
    tied = {"tie_word_embeddings": c["tie_word_embeddings"]} if "tie_word_embeddings" in c else {}
    found = {**own, **inner, **tied, "model_type": TEXT_PARTS.get(family, family)}
    for key in ("rope_scaling", "rope_parameters"):
        if "mrope_section" in (found.get(key) or {}):
            # A position has time, height and width: for text they are equal, and the rope is the usual one. A scaling
            # of its frequencies stays.
            rope = {k: v for k, v in found[key].items() if not k.startswith("mrope") and k != "type"}
            scaling = rope.get("rope_type") or found[key].get("type")
            found[key] = {**rope, "rope_type": "default" if scaling in (None, "mrope") else scaling}
    return found


FAMILIES: dict[str, Callable[[Json], DecoderConfig]] = dict(sorted({
    **deepseek.FAMILIES, **deepseek_v4.FAMILIES, **gemma.FAMILIES, **glm.FAMILIES, **gpt.FAMILIES, **gpt_oss.FAMILIES,
    **granite.FAMILIES, **hybrids.FAMILIES, **laguna.FAMILIES, **lfm.FAMILIES, **llada.FAMILIES, **llama.FAMILIES,
    **longcat.FAMILIES, **mimo.FAMILIES, **minimax.FAMILIES, **mixtures.FAMILIES, **muse.FAMILIES, **qwen.FAMILIES,
    **qwen4.FAMILIES, **state_spaces.FAMILIES, **step.FAMILIES,
}.items(), key=lambda item: item[0].lower()))
"""Reader of each family, by `model_type`."""

WITH_IMAGES = {"diffusion_gemma": "diffusion_gemma_text", "gemma3": "gemma3_text", "gemma3n": "gemma3n_text",
               "gemma4": "gemma4_text", "gemma4_unified": "gemma4_unified_text", "glm5_next": "glm5_next_text",
               "hy_v4_vl": "hy_v4_vl_text", "kimi_k25": "deepseek_v3", "lfm2_vl": "lfm2", "lfm3_vl": "lfm3",
               "llama4": "llama4_text", "minimax_m3_vl": "minimax_m3_vl_text", "mistral3": "mistral",
               "mistral_large4": "mistral_large4_text", "muse_glimmer": "muse_glimmer_text", "phi4_multimodal": "phi3",
               "phi4mm": "phi3", "qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3",
               "qwen3_vl_moe": "qwen3_vl_moe_text", "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text",
               "qwen4_exp": "qwen4_exp_text", "step3p7": "step3p5"}
"""Multimodal families, and the family of their language model if text_config does not name one."""

TEXT_PARTS = {"minimax_m3": "minimax_m3_vl_text", "qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2",
              "qwen3_vl_text": "qwen3"}
"""Families by the names that such a text_config uses."""
