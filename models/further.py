"""The place of layers for multi-token prediction in the checkpoints of the models that were trained with them.

Such a layer is a decoder layer of the model's own kind. It reads the embedding of a token beside the hidden state of
the position before it, each after a norm, through one linear layer. Families differ in the order of the two and in the
hidden state that is meant, and no file says so; it is written here, with its source.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class FurtherLayers:
    """The tensors of a family's further layers, and what they compute.

    In names, `{stem}` is the prefix of the model's tensors and `{layer}` the prefix `block` of the layer's own.

    Attributes:
        block: prefix of the tensors of a layer, which has the names of a layer of the decoder.
        continued: True if the numbers of the layers, `{index}` in `block`, continue those of the decoder; False if they
            begin with 0.
        around: name of each tensor outside of the decoder layer, by the weight's path in a
            `decodax.models.drafters.recurrent.RecurrentHead`.
        hidden_first: True if the linear layer reads the hidden state before the embedding.
        drop_first: True replaces the embedding by zeros at position 0.
        before_norm: True if the layer reads the target's hidden states before the final norm; False: after it. In both
            cases its own ones after its final norm take their place while drafting.
    """

    block: str
    continued: bool
    around: Mapping[str, str]
    hidden_first: bool = False
    drop_first: bool = False
    before_norm: bool = False


DEEPSEEK = FurtherLayers("{stem}layers.{index}.", True, {
    "embed_norm.scale": "{layer}enorm.weight", "state_norm.scale": "{layer}hnorm.weight",
    "fc.kernel": "{layer}eh_proj.weight", "norm.scale": "{layer}shared_head.norm.weight",
    "embed": "{layer}embed_tokens.weight", "lm_head.kernel": "{layer}shared_head.head.weight"})
"""DeepSeek-V3 and GLM-4.5. As `MtpModel` of transformers 5.24 and SGLang compute it; vLLM also takes a zero for the
first embedding, which the equations of the technical report do not."""

QWEN = FurtherLayers("mtp.layers.{index}.", False, {
    "embed_norm.scale": "mtp.pre_fc_norm_embedding.weight", "state_norm.scale": "mtp.pre_fc_norm_hidden.weight",
    "fc.kernel": "mtp.fc.weight", "norm.scale": "mtp.norm.weight"})
"""Qwen3-Next and Qwen3.5, as in vLLM's `qwen3_next_mtp`. The layer has full attention."""

MIMO = FurtherLayers("{stem}mtp_layers.{index}.", False, {
    "embed_norm.scale": "{layer}token_layernorm.weight", "state_norm.scale": "{layer}hidden_layernorm.weight",
    "fc.kernel": "{layer}input_proj.weight", "norm.scale": "{layer}final_layernorm.weight"},
    hidden_first=True, drop_first=True, before_norm=True)
"""MiMo-7B, as in the authors' `mimo` and `mimo_mtp` of vLLM."""

FURTHER = {**dict.fromkeys(("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite"), DEEPSEEK),
           **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), QWEN), "mimo": MIMO}
"""By `model_type`. Of other families further layers are not read."""
