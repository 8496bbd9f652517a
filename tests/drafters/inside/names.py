"""The names of tensors in released files, where transformers has or writes others."""

import re

# Of a layer for multi-token prediction, by layout: regular expressions, in order.
LAYER = {
    "hy3": ((r"mlp\.gate\.weight", "mlp.router.gate.weight"), (r"shared_experts", "shared_mlp"),
            (r"mlp\.(gate\.)?e_score_correction_bias", "mlp.expert_bias")),
    "mimo-v2-flash": ((r"post_attention_layernorm", "pre_mlp_layernorm"),
                      (r"self_attn\.sinks", "self_attn.attention_sink_bias")),
    "ling3": ((r"self_attn\.o_proj", "attention.dense"), (r"self_attn", "attention"),
              (r"e_score_correction_bias", "expert_bias")),
    "hy4": ((r"self_attn\.gate_proj", "self_attn.linear_gate"),
            (r"self_attn\.sinks", "self_attn.learnable_sink_param")),
    "minimax-m3": ((r"indexer\.", "index_"), (r"mlp\.gate\.e_score", "mlp.e_score"), (r"mlp\.", "block_sparse_moe."),
                   (r"(experts\.\d+\.)gate_proj", r"\1w1"), (r"(experts\.\d+\.)up_proj", r"\1w3"),
                   (r"(experts\.\d+\.)down_proj", r"\1w2")),
    "deepseek-v4": ((r"self_attn\.(q_a|q_b|kv|o_a|o_b)_proj", r"attn.w\1"), (r"self_attn\.q_a_norm", "attn.q_norm"),
                    (r"self_attn\.sinks", "attn.attn_sink"), (r"self_attn", "attn"), (r"input_layernorm", "attn_norm"),
                    (r"post_attention_layernorm", "ffn_norm"), (r"gate\.e_score_correction_bias", "gate.bias"),
                    (r"mlp\.", "ffn."), (r"gate_proj", "w1"), (r"up_proj", "w3"), (r"down_proj", "w2"),
                    (r"(attn|ffn)_hc\.", r"hc_\1_"), (r"^hc_(fn|base|scale)$", r"hc_head_\1")),
}

# Of the target, as transformers writes it.
TARGET = {
    "hy4": ((r"(mlp|shared_experts)\.linear_gate", r"\1.gate_proj"),),
    "glm5-next": ((r"^model\.language_model\.", "model."),),
    "deepseek-v4": ((r"^model\.embed_tokens", "embed"), (r"^model\.hc_head\.hc_", "hc_head_"), (r"^model\.", ""),
                    (r"attn\.norm\.", "attn.kv_norm.")),
}

# Of all tensors in the file of a model that also sees images.
AROUND = {"glm5-next": (r"^model\.", "model.language_model."), "minimax-m3": ("^", "language_model.")}


def renamed(rules, name):
    for theirs, own in rules:
        name = re.sub(theirs, own, name)
    return name


def one_by_one(name, x):
    """Returns the tensors of single experts in one of all of them, and those of two fused projections, by name."""
    of, _, part = name.partition(".experts.")
    if part and x.ndim == 3:
        each = ((f"{of}.experts.{e}.", _halves(part, own)) for e, own in enumerate(x))
        return {f"{stem}{own}.weight": y for stem, halves in each for own, y in halves.items()}
    if "gate_up" not in name:
        return {name: x}
    return {f"{own}.weight": y for own, y in _halves(name.removesuffix(".weight"), x).items()}


def _halves(name, x):
    if "gate_up_proj" not in name:
        return {name: x}
    return {name.replace("gate_up", part): y for part, y in zip(("gate", "up"), _split(x), strict=True)}


def _split(x):
    return x[:len(x) // 2], x[len(x) // 2:]


def released_target(layout, tensors):
    """Returns the tensors of a target under the names of released files."""
    if layout == "minimax-m3":
        sparse = tuple(f"{name.partition('.mlp.')[0]}." for name in tensors if ".experts." in name)
        return {renamed(LAYER[layout] if name.startswith(sparse) else (), own): y
                for name, x in tensors.items() for own, y in one_by_one(name, x).items()}
    return {renamed(TARGET.get(layout, ()), name): x for name, x in tensors.items() if "visual" not in name}
