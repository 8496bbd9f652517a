"""The layout of released files of a family that transformers 5.24 loads but does not write."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    import transformers


def released(model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    """The tensors of an OLMo Hybrid under the names of released files, which transformers 5.24 loads but does not
    save: it gives a norm of attention layers another name, and divides the convolution into equal parts."""
    c, found = model.config, {}
    keys, values = (heads * size for heads, size in ((c.linear_num_key_heads, c.linear_key_head_dim),
                                                     (c.linear_num_value_heads, c.linear_value_head_dim)))
    for tensor, x in model.state_dict().items():
        if tensor.endswith("conv1d.weight"):
            for part, own in zip("qkv", x.split((keys, keys, values)), strict=True):
                found[tensor.replace("conv1d", f"{part}_conv1d")] = own.contiguous()
        elif ".layers." in tensor and c.layer_types[int(tensor.split(".")[2])] == "linear_attention":
            found[tensor.replace("input_layernorm", "attention_layer_norm").replace(
                "post_attention_layernorm", "feedforward_layer_norm")] = x
        else:
            found[tensor] = x
    return found
