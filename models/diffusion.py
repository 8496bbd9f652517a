"""The decoding-related options of a masked-diffusion checkpoint: mask token, alignment, attention, block size.

The network of LLaDA (Nie et al. 2025), LLaDA-MoE (Zhu et al. 2025) and LLaDA 2 (Bie et al. 2025), Dream (Ye et al.
2025), DiffuCoder (Gong et al. 2025), SDAR (Cheng et al. 2025) and TraDo (Wang et al. 2025), Fast-dLLM v2 (Wu et al.
2025) and SDLM (Liu et al. 2025) is a decoder like any other (`decodax.models.families`). Such models differ only in
the data here. DiffusionGemma (Google DeepMind 2026) has no mask token, and reads its last predictions
(`decodax.models.residual.conditioning`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

from decodax.models.fields import checked

Attention = Literal["full", "block-causal", "causal-prefix", "causal", "any-subset"]


@dataclasses.dataclass(frozen=True)
class Diffusion:
    """Settings of a masked diffusion model: how it was trained to fill masks.

    Attributes:
        mask: id of the mask token; None for a model of uniform diffusion, whose undecided positions have random tokens.
        shift: True if the logits at a position predict the next position, as in models made from autoregressive ones;
            False if they predict the position itself.
        attention: the attention mask. "full": all positions attend to all, the prompt included. "block-causal": a
            position attends to its own block and earlier blocks, counted from the first token of the prompt.
            "causal-prefix": the text is causal; its last token and the masks after it attend to all of it and to one
            another. "causal": masks, too, attend only to earlier positions. "any-subset": given tokens attend to one
            another, a filled one also to those that were filled before it, and a mask to all of these and to no other
            mask.
        block: number of positions in a block, or in the canvas after a causal text; None with full attention, where the
            sampler chooses it, and with any-subset attention.
        conditioning: number of channels of the embeddings of its last predictions that the model reads beside a canvas
            (self-conditioning); 0: it reads none.
    """

    mask: int | None
    shift: bool = False
    attention: Attention = "full"
    block: int | None = None
    conditioning: int = 0

    def __post_init__(self) -> None:
        if self.mask is not None and (not isinstance(self.mask, int) or isinstance(self.mask, bool) or self.mask < 0):
            raise ValueError(f"mask: got {self.mask}, takes a token id")
        if self.conditioning and (self.conditioning < 0 or self.shift or self.attention != "causal-prefix"):
            raise ValueError(f"conditioning: got {self.conditioning}, takes 0, or the model's width with causal-prefix "
                             "attention and no shift")
        if not isinstance(self.shift, bool):
            raise ValueError(f"shift: got {self.shift!r}, takes True or False")
        if self.attention not in get_args(Attention):
            raise ValueError(f"attention: got {self.attention!r}, takes {', '.join(get_args(Attention))}")
        if self.attention == "any-subset" and self.shift:
            raise ValueError("shift: got True, takes False with any-subset attention")
        free = self.attention in ("full", "any-subset")
        if free and self.block is not None:
            raise ValueError(f"block: got {self.block}, takes None with {self.attention} attention")
        if not free and (not isinstance(self.block, int) or isinstance(self.block, bool) or self.block < 1):
            raise ValueError(f"block: got {self.block!r}, takes 1 or more with {self.attention} attention")

    @property
    def mask_token(self) -> int:
        """Id of the mask token.

        Raises:
            ValueError: the model has none.
        """
        if self.mask is None:
            raise ValueError("mask: got None, takes a model with a mask token")
        return self.mask


PUBLISHED: dict[str, Diffusion] = {
    "Dream": Diffusion(mask=151666, shift=True),
    "diffusion_gemma": Diffusion(mask=None, attention="causal-prefix", block=256),
    "Fast_dLLM_Qwen": Diffusion(mask=151665, shift=True, attention="block-causal", block=32),
    "llada": Diffusion(mask=126336),
    "llada2_moe": Diffusion(mask=156895, attention="block-causal", block=32),
    "lladamoe": Diffusion(mask=156895),
    "sdar": Diffusion(mask=151669, attention="block-causal", block=4),
    "sdlm": Diffusion(mask=151665, shift=True, attention="causal-prefix", block=4),
}
"""Defaults of the released models of each `model_type`, for entries that config.json lacks. SDLM's `model_type` is that
of Qwen 2; its `text_mask_token_id` identifies it."""

FIELDS = {"mask": ("mask_token_id", "text_mask_token_id"), "block": ("bd_size", "block_size", "canvas_length")}
"""Keys of config.json that override them."""

MIXTURE = ("num_experts", "moe_layer_freq", "expert_intermediate_size")
"""Keys that identify LLaDA-MoE, whose `model_type` is that of LLaDA."""

READ = ("model_type", "vocab_size", "diffusion", "causal_attn", "text_config", *MIXTURE,
        *(name for names in FIELDS.values() for name in names))


def read_diffusion(c: Mapping[str, Any]) -> Diffusion | None:
    """Returns the masked diffusion settings in a `config.json`; None for an autoregressive model.

    A model of any family may have an entry `diffusion` with the fields of `Diffusion`; `mask` defaults to
    `mask_token_id`.

    Raises:
        ValueError: a field is out of its range, or an option is not supported.

    >>> read_diffusion({"model_type": "sdar", "mask_token_id": 7, "block_size": 16, "vocab_size": 9})
    Diffusion(mask=7, shift=False, attention='block-causal', block=16, conditioning=0)
    >>> read_diffusion({"model_type": "llama", "mask_token_id": 8, "diffusion": {"shift": True}})
    Diffusion(mask=8, shift=True, attention='full', block=None, conditioning=0)
    """
    c = checked({key: c[key] for key in READ if key in c})
    own, kind = c.get("diffusion"), str(c.get("model_type"))
    if kind == "qwen2" and "text_mask_token_id" in c:
        kind = "sdlm"
    if kind == "llada" and any(key in c for key in MIXTURE):
        kind = "lladamoe"
    if own is not None:
        try:
            found = Diffusion(**{"mask": c.get("mask_token_id", -1), **own})
        except TypeError as e:
            raise ValueError(f"diffusion: got {own!r} ({e})") from None
    elif kind in PUBLISHED:
        found = PUBLISHED[kind]
        given = {field: c[name] for field, names in FIELDS.items() for name in names if c.get(name) is not None}
        if found.attention == "full":
            given.pop("block", None)
        found = dataclasses.replace(found, **given)
    else:
        return None
    if kind == "diffusion_gemma":
        found = dataclasses.replace(found, conditioning=(c.get("text_config") or {}).get("hidden_size", 2304))
    if kind == "sdlm" and c.get("causal_attn"):
        found = dataclasses.replace(found, attention="causal")
    if found.mask is not None and found.mask >= c.get("vocab_size", math.inf):
        raise ValueError(f"mask token: got {found.mask}, takes an id below the vocabulary size, {c['vocab_size']}")
    return found
