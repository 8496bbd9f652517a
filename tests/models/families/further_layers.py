"""Layers for multi-token prediction that transformers does not have as an `MtpModel`, made of its parts."""

import torch

from tests.models import tiny


class Halves(torch.nn.Module):
    """A layer of Nemotron 3: blocks of attention and of a mixture of experts, in the place of an `MtpModel`."""

    def __init__(self, target):
        super().__init__()
        blocks = tiny.build("nemotron-h", layers_block_type=["full_attention", "moe"]).get_decoder().layers
        norm = lambda: type(blocks[0].norm)(target.config.hidden_size, eps=target.config.layer_norm_epsilon)
        one = torch.nn.ModuleDict({"enorm": norm(), "hnorm": norm(), "post_norm": norm(), "attention": blocks[0],
                                   "moe": blocks[1], "eh_proj": torch.nn.Linear(64, 32, bias=False)})
        self.layers, self.embed_tokens = torch.nn.ModuleList([one]), target.get_input_embeddings()

    def forward_layer(self, layer, hidden, where, cache, inputs_embeds):
        one, size = self.layers[layer], hidden.shape[1]
        x = one["eh_proj"](torch.cat([one["enorm"](inputs_embeds), one["hnorm"](hidden)], -1))
        mask = torch.full((size, size), -torch.inf).triu(1)[None, None]
        return one["post_norm"](one["moe"](one["attention"](x, attention_mask=mask)))


class Dense(torch.nn.Module):
    """A layer of LongCat-Flash: its first attention and MLP, in the place of an `MtpModel`."""

    def __init__(self, target):
        super().__init__()
        block = tiny.build("longcat-flash").model.layers[0]
        norm = lambda: type(block.input_layernorm[0])(32, eps=target.config.rms_norm_eps)
        one = torch.nn.ModuleDict({name: norm() for name in (
            "enorm", "hnorm", "post_norm", "input_layernorm", "post_attention_layernorm")})
        one.update({"eh_proj": torch.nn.Linear(64, 32, bias=False), "self_attn": block.self_attn[0],
                    "mlp": block.mlps[0]})
        self.layers, self.embed_tokens = torch.nn.ModuleList([one]), target.get_input_embeddings()
        self.rope = target.model.rotary_emb

    def forward_layer(self, layer, hidden, where, cache, inputs_embeds):
        one, size = self.layers[layer], hidden.shape[1]
        x = one["eh_proj"](torch.cat([one["enorm"](inputs_embeds), one["hnorm"](hidden)], -1))
        mask = torch.full((size, size), -torch.inf).triu(1)[None, None]
        x = x + one["self_attn"](one["input_layernorm"](x), self.rope(x, where), mask)[0]
        return one["post_norm"](x + one["mlp"](one["post_attention_layernorm"](x)))


ALONE = {"nemotron-h": Halves, "longcat-flash": Dense}
"""Layers that transformers does not have as an `MtpModel`."""
