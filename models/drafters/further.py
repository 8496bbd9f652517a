"""The place of layers for multi-token prediction in the checkpoints of the models that were trained with them.

Such a layer is a decoder layer of the model's own kind. It reads the embedding of a token beside the hidden state of
the position before it, each after a norm, through one linear layer. Families differ in the order of the two and in the
hidden state that is meant, and no file says so; it is written here, with its source.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class FurtherLayers:
    """The tensors of a family's layers for multi-token prediction, and what they compute.

    In names, `{stem}` is the prefix of the model's tensors, `{layer}` and `{second}` are the prefixes `block` and
    `second` of the layer's own, and `{index}` is its number.

    Attributes:
        block: prefix of the tensors of a layer, which has the names of a layer of the decoder. `{even}` and `{odd}` in
            it are twice the index, and the number after that.
        continued: True if the numbers of the layers continue those of the decoder; False if they begin with 0.
        around: name of each tensor outside of the decoder layer, by the weight's path in a
            `decodax.models.drafters.recurrent.RecurrentHead`. Without that of the final norm there is none.
        second: prefix of the tensors of the layer's MLP and its norm, if that differs from `block`.
        renamed: names within a layer by those within a layer of the decoder, where they differ.
        unused: name of a tensor that files have and nothing reads; empty: none.
        sliding: True if the layer has the kind of the decoder's last layer with a sliding window.
        indexed: True if the layer has the kind of the decoder's last layer with an index of blocks.
        alone: True loads the first layer only, since the later ones do not read its output.
        hidden_first: True if the linear layer reads the hidden state before the embedding.
        drop_first: True replaces the embedding by zeros at position 0.
        before_norm: True if the layer reads the target's hidden states before the final norm; False: after it. In both
            cases its own ones after its final norm take their place while drafting, unless `feeds_before`.
        feeds_before: True: its own hidden states before its final norm take that place.
        unclipped: True if its MLP is not clipped, whatever those of the decoder are.
        one_stream: True if the layer has one residual stream where those of the decoder have several.
        entries: entries of the `config.json` with which the family is a decoder of such a layer alone; empty: the layer
            is the decoder's last one with attention.
    """

    block: str
    continued: bool
    around: Mapping[str, str]
    second: str = ""
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unused: str = ""
    sliding: bool = False
    indexed: bool = False
    alone: bool = False
    hidden_first: bool = False
    drop_first: bool = False
    before_norm: bool = False
    feeds_before: bool = False
    unclipped: bool = False
    one_stream: bool = False
    entries: Mapping[str, Any] = dataclasses.field(default_factory=dict)


INTO = {"embed_norm.scale": "{layer}enorm.weight", "state_norm.scale": "{layer}hnorm.weight",
        "fc.kernel": "{layer}eh_proj.weight"}
"""The names of the inputs' norms and their projection in many families."""

DEEPSEEK = FurtherLayers("{stem}layers.{index}.", True, {
    **INTO, "norm.scale": "{layer}shared_head.norm.weight", "embed": "{layer}embed_tokens.weight",
    "lm_head.kernel": "{layer}shared_head.head.weight"})
"""DeepSeek-V3 and GLM-4.5 to 5.2. As `MtpModel` of transformers 5.24 and SGLang compute it; vLLM also takes a zero for
the first embedding, which the equations of the technical report do not. An indexer is the layer's own, also where those
of the decoder's last layers are shared. With `index_share_for_mtp_iteration` (GLM-5.2) vLLM takes the tokens chosen for
the first draft for all drafts of a round; here each draft chooses."""

QWEN = FurtherLayers("mtp.layers.{index}.", False, {
    "embed_norm.scale": "mtp.pre_fc_norm_embedding.weight", "state_norm.scale": "mtp.pre_fc_norm_hidden.weight",
    "fc.kernel": "mtp.fc.weight", "norm.scale": "mtp.norm.weight"})
"""Qwen3-Next and Qwen3.5, as in vLLM's `qwen3_next_mtp`. The layer has full attention."""

MIMO = FurtherLayers("{stem}mtp_layers.{index}.", False, {
    "embed_norm.scale": "{layer}token_layernorm.weight", "state_norm.scale": "{layer}hidden_layernorm.weight",
    "fc.kernel": "{layer}input_proj.weight", "norm.scale": "{layer}final_layernorm.weight"},
    hidden_first=True, drop_first=True, before_norm=True)
"""MiMo-7B, as in the authors' `mimo` and `mimo_mtp` of vLLM."""

MIMO_V2 = FurtherLayers("{stem}mtp.layers.{index}.", False, {**INTO, "norm.scale": "{layer}final_layernorm.weight"},
    renamed={"post_attention_layernorm": "pre_mlp_layernorm"}, sliding=True, alone=True, before_norm=True)
"""MiMo-V2-Flash: layers with a sliding window and a dense MLP. As in SGLang, whose layers all read the target's hidden
states before the final norm, the later ones beside later tokens; vLLM takes those after it, and the first layer alone,
as is done here."""

ERNIE = FurtherLayers("{stem}mtp_block.{index}.", False, {
    "embed_norm.scale": "{stem}mtp_emb_norm.{index}.weight", "state_norm.scale": "{stem}mtp_hidden_norm.{index}.weight",
    "fc.kernel": "{stem}mtp_linear_proj.{index}.weight"}, drop_first=True)
"""ERNIE 4.5, as in vLLM's `ernie_mtp` but for the rotation, which is that of the decoder's layers. The MLP is dense."""

DEEPSEEK_V4 = FurtherLayers("mtp.{index}.", False, {
    **{part: name for part, name in INTO.items() if part != "fc.kernel"}, "embed_fc.kernel": "{layer}e_proj.weight",
    "state_fc.kernel": "{layer}h_proj.weight", "norm.scale": "{layer}norm.weight",
    **{f"streams.{part}": f"{{layer}}hc_head_{part}" for part in ("fn", "base", "scale")},
    "embed": "{layer}emb.tok_emb.weight", "lm_head.kernel": "{layer}head.weight"},
    entries={"num_hidden_layers": 1, "layer_types": ["sliding_attention"], "mlp_layer_types": ["moe"]})
"""DeepSeek V4, as `MTPBlock` of the authors' `inference/model.py`: a layer with a sliding window alone and a mixture,
which reads and writes all residual streams, before they are joined. vLLM's `deepseek_v4_mtp` also takes a zero for the
first embedding; it feeds the streams back for further drafts."""

HY3 = FurtherLayers("{stem}layers.{index}.", True, {
    **INTO, "norm.scale": "{layer}final_layernorm.weight", "embed": "{layer}embed_tokens.weight"},
    unused="{layer}shared_head.weight", drop_first=True)
"""Hy3, as in vLLM's `hy_v3_mtp`, which takes the target's vocabulary matrix whatever the layer's own."""

HY4 = FurtherLayers("{stem}mtp_layers.{index}.", False, {**INTO, "norm.scale": "{layer}final_layernorm.weight"},
                    one_stream=True)
"""Hy4, as in SGLang's `hunyuan_v4_nextn` and in NeMo AutoModel: one residual stream, read from the hidden state after
the final norm, and an indexer of its own. vLLM's `hy_v4_mtp` also takes a zero for the first embedding."""

LING = FurtherLayers("{stem}layers.{index}.", True, {**INTO, "norm.scale": "{layer}final_layernorm.weight"})
"""Ling 3, as the authors' `BailingMoeV3MTPLayer`: a layer with latent attention and a mixture. vLLM's
`bailing_moe_mtp` also takes a zero for the first embedding."""

GLM5_NEXT = dataclasses.replace(DEEPSEEK, one_stream=True)
"""GLM-5.3 Flash, as in SGLang's `glm5_next_nextn`: one residual stream, read from the hidden state after the final
norm, latent attention with an indexer of its own, and a mixture. vLLM's `Glm5NextMTP` also takes a zero for the first
embedding, and the tokens chosen for the first draft for all drafts of a round."""

MINIMAX_M3 = FurtherLayers("{stem}mtp.layers.{index}.transformer_layer.", False, {
    part: name.format(layer="{stem}mtp.layers.{index}.")
    for part, name in (INTO | {"norm.scale": "{layer}final_layernorm.weight"}).items()}, indexed=True)
"""MiniMax M3: a layer with an index and a mixture, which reads the hidden state after the final norm, and whose own one
after `final_layernorm` takes its place, as in AMD's ATOM and NeMo AutoModel. vLLM's `MiniMaxM3MTP` takes a zero for the
first embedding, and feeds back the state before that norm. rtp-llm reads the target's state before the final norm."""

NEMOTRON = FurtherLayers("mtp.layers.{even}.", False, {**INTO, "norm.scale": "{second}final_layernorm.weight"},
                         second="mtp.layers.{odd}.")
"""Nemotron 3, as in vLLM's `nemotron_h_mtp`: attention and a mixture of experts, each with a number of its own."""

LONGCAT = FurtherLayers("{stem}mtp.layers.{index}.", False, {
    "embed_norm.scale": "{layer}enorm.m.weight", "state_norm.scale": "{layer}hnorm.m.weight",
    "fc.kernel": "{layer}eh_proj.weight", "norm.scale": "{stem}mtp.norm.weight",
    "embed": "{stem}mtp.embed_tokens.weight"}, renamed={
    "mlps.0.": "transformer_layer.mlp.", **{f"{part}.0.": f"{part}." for part in (
        "self_attn", "input_layernorm", "post_attention_layernorm")}})
"""LongCat-Flash: one block of attention and a dense MLP. As in vLLM's `longcat_flash_mtp`."""

STEP = FurtherLayers("{stem}layers.{index}.", True, {
    **INTO, "norm.scale": "{layer}transformer.shared_head.norm.weight",
    "lm_head.kernel": "{layer}transformer.shared_head.output.weight"}, sliding=True, before_norm=True,
    feeds_before=True, unclipped=True)
"""Step 3.5 and 3.7: layers with a sliding window and a dense MLP. As in vLLM's `step3p5_mtp`, where hidden states are
those before the norms in all places; `MtpModel` of transformers takes those after them."""

FURTHER = {**dict.fromkeys(("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"), DEEPSEEK),
           **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), QWEN), "mimo": MIMO,
           "deepseek_v4": DEEPSEEK_V4, **dict.fromkeys(("ernie4_5", "ernie4_5_moe"), ERNIE), "mimo_v2_flash": MIMO_V2,
           "hy_v3": HY3, **dict.fromkeys(("hy_v4", "hy_v4_vl_text"), HY4), "bailing_hybrid": LING,
           "glm5_next_text": GLM5_NEXT, "minimax_m3_vl_text": MINIMAX_M3, "nemotron_h": NEMOTRON,
           "longcat_flash": LONGCAT, "step3p5": STEP}
"""By `model_type`. Of other families layers for multi-token prediction are not read."""

SPECULATORS = FurtherLayers("mtp_layers.{index}.", False, {
    "embed_norm.scale": "{layer}token_layernorm.weight", "state_norm.scale": "{layer}hidden_layernorm.weight",
    "fc.kernel": "{layer}input_proj.weight", "norm.scale": "{layer}final_layernorm.weight",
    "embed": "embed_tokens.weight", "lm_head.kernel": "lm_head.weight"})
"""A layer in a directory of its own, as speculators 0.9.0 saves the one of a model after tuning it (FastMTP). The
tables are the target's unless the files have them, which those of speculators do not. That code reads the states that
it is given; here they are those after the target's final norm, as they are where the layer has been put back."""

TUNED = "qwen3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"
"""The `model_type` of the layers that speculators tunes."""

MEDUSA = "medusa_head."
"""The beginning of the names of Medusa's heads in the files of a model that was trained with them (Medusa-2)."""
