"""Layers for multi-token prediction that transformers does not have as an `MtpModel`, made of its parts."""

import torch
from transformers.modeling_layers import MtpModel

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


class OneStream(torch.nn.Module):
    """A layer of Hy4 or GLM-5.3 Flash, which have one without hyper-connections, or of MiniMax M3, in the place of an
    `MtpModel`."""

    def __init__(self, target, block, rotary):
        super().__init__()
        c = target.config.get_text_config()
        norm = lambda: type(block.input_layernorm)(c.hidden_size, eps=c.rms_norm_eps)
        for part in {"attn_hc", "ffn_hc"} & set(dict(block.named_children())):
            delattr(block, part)
        self.rotary, self.embed_tokens = rotary, target.get_input_embeddings()
        self.layers = torch.nn.ModuleList([torch.nn.ModuleDict({
            "enorm": norm(), "hnorm": norm(), "post_norm": norm(), "mtp_block": block,
            "eh_proj": torch.nn.Linear(64, 32, bias=False)})])

    def forward_layer(self, layer, hidden, where, cache, inputs_embeds):
        one, size = self.layers[layer], hidden.shape[1]
        block = one["mtp_block"]
        x = one["eh_proj"](torch.cat([one["enorm"](inputs_embeds), one["hnorm"](hidden)], -1))
        if self.rotary is None:     # which has no positions, and a mask of rows
            seen = dict(attention_mask=torch.ones((1, size), dtype=torch.bool))
        else:
            seen = dict(attention_mask=torch.full((size, size), -torch.inf).triu(1)[None, None],
                        position_embeddings=self.rotary(x, position_ids=where), position_ids=where)
        x = x + block.self_attn(hidden_states=block.input_layernorm(x), **seen)[0]
        return one["post_norm"](x + block.mlp(block.post_attention_layernorm(x)))


class Streams(torch.nn.Module):
    """A layer of DeepSeek V4, which reads and writes all residual streams, in the place of an `MtpModel`. `hidden` has
    the streams beside each other."""

    def __init__(self, target, blocks):
        super().__init__()
        c, own = target.config, target.get_decoder()
        norm = lambda: type(own.norm)(c.hidden_size, eps=c.rms_norm_eps)
        into = lambda: torch.nn.Linear(c.hidden_size, c.hidden_size, bias=False)
        self.rotary, self.embed_tokens, self.count = own.rotary_emb, target.get_input_embeddings(), c.hc_mult
        self.window = c.sliding_window
        self.layers = torch.nn.ModuleList([torch.nn.ModuleDict({
            "enorm": norm(), "hnorm": norm(), "post_norm": norm(), "mtp_block": block, "e_proj": into(),
            "h_proj": into(), "collapse": type(own.hc_head)(c)}) for block in blocks])

    def forward_layer(self, layer, hidden, where, cache, inputs_embeds):
        one, size = self.layers[layer], hidden.shape[1]
        x = one["h_proj"](one["hnorm"](hidden.unflatten(-1, (self.count, -1))))
        x = x + one["e_proj"](one["enorm"](inputs_embeds)).unsqueeze(2)
        far = torch.arange(size)[:, None] - torch.arange(size)
        mask = torch.zeros((size, size)).masked_fill((far < 0) | (far >= self.window), -torch.inf)
        turned = {kind: self.rotary(inputs_embeds, position_ids=where, layer_type=kind) for kind in (
            "main", "compress")}
        return one["mtp_block"](x, position_embeddings=turned, position_ids=where, attention_mask=mask[None, None],
                                cache=None).flatten(2)

    def joined(self, layer, hidden):
        one = self.layers[layer]
        return one["post_norm"](one["collapse"](hidden.unflatten(-1, (self.count, -1))))


ALONE = {"nemotron-h": Halves, "longcat-flash": Dense}


def layer_of(name, target, count, more):
    """The layers of a layout, with the methods of an `MtpModel`; `more` are further options of the target."""
    block = lambda case, index, **options: tiny.build(case, **{**options, **more}).get_decoder().layers[index]
    if name in ALONE:
        return ALONE[name](target)
    if name == "hy4":
        return OneStream(target, block("hy4", 0, mlp_layer_types=["sparse", "dense", "sparse"]),
                         target.get_decoder().rotary_emb)
    if name == "minimax-m3":
        return OneStream(target, block("minimax-m3", 0), target.get_decoder().rotary_emb)
    if name == "glm5-next":
        return OneStream(target, block("glm5-next", 1), None)
    if name.startswith("deepseek-v4"):
        return Streams(target, [block("deepseek-v4", 0, num_hash_layers=0) for _ in range(count)])
    found = MtpModel(target, count)
    if name == "glm5":      # transformers 5.24 does not expect that a layer returns its choice of tokens, too
        layer = found.layers[0].mtp_block
        layer.forward = lambda *args, **options: type(layer).forward(layer, *args, **options)[0]
    return found
