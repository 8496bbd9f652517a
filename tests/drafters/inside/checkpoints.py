"""Checkpoints with layers for multi-token prediction, in the layouts of releases, and what the layers compute in
transformers."""

import copy
import functools
import json
import re

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import decodax as dx
from decodax.io.drafters import load_drafter
from tests.drafters.inside.layers import Streams, layer_of
from tests.drafters.inside.names import AROUND, LAYER, one_by_one, released_target, renamed
from tests.models import tiny

LAYERS = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
PARTS = "enorm", "hnorm", "eh_proj", "post_norm", "mtp_block"
DEEPSEEK = dict(zip(PARTS, [f"model.layers.2{part}" for part in (
    ".enorm", ".hnorm", ".eh_proj", ".shared_head.norm", "")], strict=True))
QWEN = dict(zip(PARTS, ["mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm", "mtp.layers.0"],
                strict=True))
MIMO = dict(zip(PARTS, [f"model.mtp_layers.0{part}" for part in (
    ".token_layernorm", ".hidden_layernorm", ".input_proj", ".final_layernorm", "")], strict=True))

MIMO_V2 = dict(zip(PARTS, [f"model.mtp.layers.0{part}" for part in (
    ".enorm", ".hnorm", ".eh_proj", ".final_layernorm", "")], strict=True))
ERNIE = dict(zip(PARTS, [f"model.mtp_{part}.0" for part in ("emb_norm", "hidden_norm", "linear_proj", "", "block")],
                 strict=True))
HY3 = {**DEEPSEEK, "post_norm": "model.layers.2.final_layernorm"}
NEMOTRON = {**{part: f"mtp.layers.0.{part}" for part in PARTS[:3]}, "post_norm": "mtp.layers.1.final_layernorm",
            "attention": "mtp.layers.0", "moe": "mtp.layers.1"}
LONGCAT = {**{part: f"model.mtp.layers.0.{part}" for part in (
    "eh_proj", "self_attn", "input_layernorm", "post_attention_layernorm")}, "enorm": "model.mtp.layers.0.enorm.m",
           "hnorm": "model.mtp.layers.0.hnorm.m", "post_norm": "model.mtp.norm",
           "mlp": "model.mtp.layers.0.transformer_layer.mlp"}
STEP = {**DEEPSEEK, "post_norm": "model.layers.2.transformer.shared_head.norm"}
SLIDES = {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"], "swiglu_limits": [0, 0.2],
          "mlp_layer_types": ["sparse"] * 2, "mtp_layer_types": ["sliding_attention"] * 2,
          "mtp_mlp_layer_types": ["dense"] * 2, "mtp_per_layer_config": {0: {"num_attention_heads": 6}}}
LING = dict(zip(PARTS, [f"model.layers.2{part}" for part in (
    ".enorm", ".hnorm", ".eh_proj", ".final_layernorm", "")], strict=True))
HY4 = {part: name.replace("model.layers.2", "model.mtp_layers.0") for part, name in LING.items()}
M3 = {**{part: name.replace("model.layers.2", "model.mtp.layers.0") for part, name in LING.items()},
      "mtp_block": "model.mtp.layers.0.transformer_layer"}
GLM = {part: name.replace("layers.2", "layers.5") for part, name in DEEPSEEK.items()}
V4 = {**dict.fromkeys(("mtp_block", "collapse"), "mtp.0"), "post_norm": "mtp.0.norm",
      **{part: f"mtp.0.{part}" for part in ("enorm", "hnorm", "e_proj", "h_proj")}}
ZEROS = "mimo", "ernie4.5", "ernie4.5-moe", "hy3"
"""Layouts whose layers read zeros in place of the first embedding."""
BEFORE = "mimo", "mimo-v2-flash", "step3p7", "step3p7-two"
"""Layouts whose layers read the target's hidden states before its final norm."""

# name: case of tests/models/tiny.py, further options, the released name of each part, and model_type if it is another
LAYOUTS = {
    "glm4-moe": ("glm4-moe", {"num_hidden_layers": 2}, DEEPSEEK, None),
    "glm4-moe-two": ("glm4-moe", {"num_hidden_layers": 2, "num_mtp_layers": 2}, DEEPSEEK, None),
    "deepseek-v3": ("deepseek-v3", {"num_hidden_layers": 2}, DEEPSEEK, None),
    "deepseek-v3-two": ("deepseek-v3", {"num_hidden_layers": 2, "num_mtp_layers": 2}, DEEPSEEK, None),
    "deepseek-v32": ("deepseek-v32", {"num_hidden_layers": 2}, DEEPSEEK, None),
    "glm4-moe-lite": ("glm4-moe-lite", {"num_hidden_layers": 2}, DEEPSEEK, None),
    "qwen3-next": ("qwen3-next", {**LAYERS, "mlp_only_layers": []}, QWEN, None),
    "qwen3.5": ("qwen3.5", LAYERS, QWEN, None),
    "qwen3.5-moe": ("qwen3.5-moe", LAYERS, QWEN, None),
    "mimo-v2-flash": ("mimo-v2-flash", {"mtp_layer_types": ["sliding_attention"], "mtp_mlp_layer_types": ["dense"]},
                      MIMO_V2, None),
    "ernie4.5": ("ernie4.5", {"tie_word_embeddings": False}, ERNIE, None),
    "ernie4.5-moe": ("ernie4.5-moe", {"tie_word_embeddings": False}, ERNIE, None),
    "glm5": ("glm5", {"num_hidden_layers": 2, "indexer_types": ["full", "shared"]}, DEEPSEEK, None),
    "ling3": ("ling3", {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
                        "mlp_layer_types": ["sparse", "dense"]}, LING, None),
    "hy4": ("hy4", {"mlp_layer_types": ["sparse", "dense", "sparse"], "indexer_types": ["full", "full", "shared"]},
            HY4, None),
    "minimax-m3": ("minimax-m3", {}, M3, None),
    "glm5-next": ("glm5-next", {}, GLM, None), "deepseek-v4": ("deepseek-v4", {}, V4, None),
    "deepseek-v4-two": ("deepseek-v4", {"num_mtp_layers": 2}, V4, None),
    "longcat-flash": ("longcat-flash", {}, LONGCAT, None),
    "step3p7": ("step3p7", {**SLIDES, "swiglu_limits_shared": [0, 0.2]}, STEP, None),
    "step3p7-two": ("step3p7", {**SLIDES, "swiglu_limits_shared": None, "num_mtp_layers": 2, "mtp_per_layer_config": {
        i: {"num_attention_heads": 6} for i in range(2)}}, STEP, None),
    "hy3": ("hy3", {}, HY3, None), "nemotron-h": ("nemotron-h", {}, NEMOTRON, None),
    "mimo": ("qwen2", {"tie_word_embeddings": False, "mtp_hidden_states_first": True}, MIMO, "mimo")}
PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 9, 31], [9, 10, 11], [1]]


def released(state: dict, parts: dict, layout: str, stacked: bool) -> dict:
    """The tensors of an `MtpModel` under the names of released files, with experts one by one or together."""
    found = {}
    for name, x in state.items():
        if (place := re.fullmatch(r"layers\.(\d)\.(\w+)\.(.+)", name)) is None:
            continue        # the target's
        stem = parts[place[2]].replace("layers.2", f"layers.{2 + int(place[1])}").replace("mtp.0", f"mtp.{place[1]}")
        inner = {place[3]: x} if stacked else one_by_one(place[3], x)
        found |= {f"{stem}.{renamed(LAYER.get(layout, ()), own)}": y for own, y in inner.items()}
    return {name: x.detach().numpy().copy() for name, x in found.items()}


def released_layer_tables(tensors, count):
    """Other tables for each layer than the target's."""
    draw = np.random.default_rng(5)
    return {f"model.layers.{2 + i}.{name}.weight": tensors["lm_head.weight"] + draw.normal(
        size=tensors["lm_head.weight"].shape).astype(np.float32) * 0.2
        for i in range(count) for name in ("embed_tokens", "shared_head.head")}


class Case:
    """A checkpoint with a layer for multi-token prediction, what it computes in transformers, and what loads here."""

    def __init__(self, name, directory, **more):
        """`more` are further options of the target."""
        case, options, self.parts, kind = LAYOUTS[name]
        self.name, self.path, self.tables = name, directory, {}
        self.count = options.get("num_mtp_layers", 1)
        self.target = tiny.build(case, **{
            "num_mtp_layers": 1, "mtp_layer_types": ["full_attention"] * self.count,
            "mtp_mlp_layer_types": ["sparse"] * self.count, **copy.deepcopy({**options, **more})})
        if name == "mimo-v2-flash":         # transformers reads no such layers of this family
            self.target.config.num_mtp_layers = 1
        if self.parts is STEP:              # nor the number in this entry
            self.target.config.text_config.num_nextn_predict_layers = self.count
        self.layer = layer_of(name, self.target, self.count, more).eval()
        if self.parts is ERNIE:
            self.layer.layers[0].use_post_norm, self.layer.layers[0].post_norm = False, None
        for layer in self.layer.layers if self.parts is STEP else ():
            layer.use_post_norm = False     # in `logits` alone
        torch.manual_seed(1)
        with torch.no_grad():
            for weight in self.layer.layers.parameters():
                weight.copy_(torch.randn_like(weight) * 0.2 + (1.0 if weight.ndim == 1 else 0.0))
            for key, buffer in self.layer.layers.named_buffers():
                if "correction" in key:
                    buffer.copy_(torch.randn_like(buffer) * 0.2)
        self.target.save_pretrained(directory)
        self.layout, self.entries = name.removesuffix("-two"), json.loads((directory / "config.json").read_text())
        self.tensors = released_target(self.layout, load_file(directory / "model.safetensors"))
        self.tensors |= released(self.layer.state_dict(), self.parts, self.layout, name in ("qwen3.5-moe", "hy4"))
        if self.parts is DEEPSEEK:      # with the copies that released files have
            for i in range(2, 2 + self.count):
                self.tensors |= {f"model.layers.{i}.embed_tokens.weight": self.tensors["model.embed_tokens.weight"],
                                 f"model.layers.{i}.shared_head.head.weight": self.tensors["lm_head.weight"]}
        self.entries |= {"num_nextn_predict_layers": self.count} | ({} if kind is None else {"model_type": kind})
        if self.layout == "minimax-m3":
            self.entries = {"model_type": "minimax_m3_vl", "text_config": self.entries, "vision_config": {}}
        elif "text_config" in self.entries:
            self.entries["text_config"]["num_nextn_predict_layers"] = self.count
        self.write()

    def write(self, tensors=None, **entries):
        rules = [AROUND[self.layout]] if self.layout in AROUND else []
        tensors = {renamed(rules, key): x for key, x in (self.tensors if tensors is None else tensors).items()}
        save_file(tensors, self.path / "model.safetensors")
        (self.path / "config.json").write_text(json.dumps({**self.entries, **entries}))

    @functools.cached_property
    def loaded(self):
        with pytest.warns(UserWarning, match="further tokens, .*the algorithm 'mtp' drafts with them"):
            lm = dx.load(self.path)
        return lm, load_drafter(self.path, lm)

    @property
    def several(self):
        """True if the layers read several residual streams."""
        return isinstance(self.layer, Streams)

    def features(self, ids):
        """The hidden states of the target that the layer reads."""
        found = []
        decoder = self.target.get_decoder()
        at = decoder.norm_f if self.name == "nemotron-h" else decoder.hc_head if self.several else decoder.norm
        hook = at.register_forward_hook(lambda part, args, out: found.append(
            args[0].flatten(2) if self.several else args[0] if self.name in BEFORE else out))
        with torch.no_grad():
            self.target(input_ids=torch.tensor([ids]), use_cache=False)
        hook.remove()
        return found[0]

    def run(self, layer, hidden, tokens):
        """The output of a layer for pairs of hidden states and tokens."""
        with torch.no_grad():
            own = self.tables.get(f"model.layers.{2 + layer}.embed_tokens.weight")
            embedded = self.layer.embed_tokens(torch.tensor([tokens])) if own is None else torch.tensor(own[[tokens]])
            if self.name in ZEROS:
                embedded[:, 0] = 0
            where = torch.arange(len(tokens))[None] + layer
            return self.layer.forward_layer(layer, hidden, where, None, inputs_embeds=embedded)

    def logits(self, hidden, layer=0):
        with torch.no_grad():
            hidden = self.layer.joined(layer, hidden) if self.several else (
                self.layer.layers[layer].post_norm(hidden) if self.parts is STEP else hidden)
            if (own := self.tables.get(f"model.layers.{2 + layer}.shared_head.head.weight")) is not None:
                return hidden.numpy() @ own.T
            return self.target.lm_head(hidden).numpy()

    def drafts(self, ids, following):
        """The logits after a text and after each of the tokens drafted after it."""
        hidden, tokens, found, last = self.features(ids)[:, :-1], ids[1:], [], self.count - 1
        for i in range(len(following) + 1):
            out = self.run(min(i, last), hidden, tokens)
            found.append(self.logits(out[:, -1:], min(i, last))[0, 0])
            tokens = [*tokens, *following[i:i + 1]]
            hidden, tokens = (out, tokens[1:]) if i < last else (torch.cat([hidden, out[:, -1:]], 1), tokens)
        return np.stack(found)
