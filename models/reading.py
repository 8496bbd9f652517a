"""Reads the entries that the `config.json` files of most families have in common: shapes, layers, rotary embedding and
its scalings.

Newer files have `rope_parameters` in place of the older `rope_theta` and `rope_scaling`; both are supported.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from decodax.models.blocks.options import Layer
from decodax.models.config import Activation, NormConfig
from decodax.models.rope import Dynamic, LinearScaling, Llama3, LongRope, Proportional, Rope, Scaling, Yarn, mscale
from decodax.models.routing import Experts

Json = Mapping[str, Any]

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "quick_gelu": "quick_gelu", "relu": "relu", "relu2": "relu2", "xielu": "xielu"}


def read_shape(c: Json, **changes: Any) -> dict[str, Any]:
    """Returns the keyword arguments of `DecoderConfig` that most model families share (vocab, width, mlp, heads,
    kv_heads, head_dim, context, norm, activation, tied), read from the entries `c` of a `config.json` by their usual
    names. `changes` adds or replaces arguments."""
    heads = c["num_attention_heads"]
    kv_heads = c.get("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads: got {heads}, not a multiple of num_key_value_heads = {kv_heads}")
    head_dim = changes.get("head_dim") or c.get("head_dim") or head_width(c, "hidden_size", "num_attention_heads")
    return {
        "vocab": c["vocab_size"], "width": c["hidden_size"], "mlp": c["intermediate_size"], "heads": heads,
        "kv_heads": kv_heads, "head_dim": head_dim,
        "context": c.get("max_position_embeddings", 2048), "norm": NormConfig(eps=c.get("rms_norm_eps", 1e-6)),
        "activation": changes.get("activation") or read_activation(c, "hidden_act", "silu"),
        "tied": c.get("tie_word_embeddings", False), **changes,
    }


def read_experts(count: int, chosen: int, width: int, normalise: bool = True, key: str = "num_experts_per_tok",
                 **fields: Any) -> Experts:
    """Returns the options of a mixture with `count` experts of `width` inner channels, `chosen` of them for each token.
    `normalise` and `fields` are those of `Experts`; `key` is the name of the entry with `chosen`, for error messages.
    """
    if count < 1:
        raise ValueError(f"num_experts, num_local_experts or n_routed_experts: got {count}, takes 1 or more")
    if chosen > (every := count + fields.get("zero", 0)):
        raise ValueError(f"{key}: got {chosen}, takes at most the number of experts (num_experts or "
                         f"n_routed_experts), {every}")
    try:
        return Experts(count, chosen, width, normalise, **fields)
    except ValueError as e:
        raise ValueError(f"{key}, n_routed_experts, n_group, num_expert_group or topk_group: {e}") from None


def renamed(c: Json, names: Mapping[str, str]) -> dict[str, Any]:
    """Returns the entries under one name each. `names` has the entries' other names, with the one that is taken.

    >>> renamed({"moe_top_k": 8, "n_routed_experts": 64}, {"moe_top_k": "num_experts_per_tok"})
    {'num_experts_per_tok': 8, 'n_routed_experts': 64}

    Raises:
        ValueError: two names of an entry have different values.
    """
    found: dict[str, Any] = {}
    for key, value in c.items():
        if found.setdefault(names.get(key, key), value) != value:
            same = [name for name in c if names.get(name, name) == names.get(key, key)]
            raise ValueError(f"{key}: got {', '.join(f'{name} = {c[name]}' for name in same)}, takes the same value "
                             "for all")
    return found


def refuse_others(c: Json, **fixed: Any) -> None:
    """Refuses entries of `c` with other values than those of `fixed`, which a missing entry stands for."""
    for key, value in fixed.items():
        if c.get(key, value) != value:
            raise ValueError(f"{key}: got {c[key]!r}, supported is {value!r}")


def read_kinds(c: Json, key: str, older: Any, names: tuple[str, str], default: Callable[[int], bool]) -> list[str]:
    """Returns the kind of each layer.

    Args:
        c: the content of `config.json`.
        key: name of the entry with a list of kinds.
        older: the older form of the entry, a list of 0 and 1; None: there is none.
        names: the kinds for 0 and 1.
        default: 0 or 1 by the index of a layer, if neither is there.

    Raises:
        ValueError: there are too few entries, or unknown ones.
    """
    count = c["num_hidden_layers"]
    found: Any = c.get(key) or [names[int(x != 0)] for x in older or map(default, range(count))]
    if len(found) < count:
        raise ValueError(f"{key}: got {len(found)} entries for num_hidden_layers = {count}")
    if not set(found) <= set(names):
        raise ValueError(f"{key}: got {found}, takes a list of {names[0]!r} and {names[1]!r}")
    return list(found[:count])


def with_experts(layers: tuple[Layer, ...], experts: Experts,
                 sparse: Callable[[int], bool] = lambda i: True) -> tuple[Layer, ...]:
    """Returns the layers with the mixture `experts` in place of the MLP in those for whose index `sparse` is True."""
    return tuple(dataclasses.replace(layer, experts=experts) if sparse(i) else layer for i, layer in enumerate(layers))


def head_width(c: Json, width: str, heads: str) -> int:
    """Returns the width of an attention head: the entry named `width` of a `config.json`, divided by that named
    `heads`."""
    if c[width] % c[heads]:
        raise ValueError(f"{heads}: got {c[heads]}, which does not divide {width} = {c[width]}")
    return c[width] // c[heads]


def read_layers(c: Json, shape: Json, *, sliding: int | None = None, slides: Callable[[int], bool] = lambda i: True,
                scale: float | None = None, near: Rope | None = None, interleaved: bool = False) -> tuple[Layer, ...]:
    """Returns the options of each layer of a decoder. `layer_types` in the file, if present, determines which layers
    have a sliding window; else `slides` does.

    Args:
        c: the content of `config.json`.
        shape: sizes of the network, of which `head_dim` and `context` are used.
        sliding: size of the sliding window in tokens, or None.
        slides: returns True for the index of a layer with a sliding window.
        scale: factor of the attention scores; None: `head_dim ** -0.5`.
        near: the rotary embedding of layers with a sliding window; None: the same as in other layers.
        interleaved: True if rotated pairs are adjacent; see `Rope`.

    Raises:
        ValueError: `layer_types` has too few entries, or unknown ones.
    """
    rope, count, kinds = read_rope(c, shape, interleaved), c["num_hidden_layers"], c.get("layer_types")
    if kinds is not None and len(kinds) < count:
        raise ValueError(f"layer_types: got {len(kinds)} entries for num_hidden_layers = {count}")
    if kinds is not None and not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise ValueError(f"layer_types: got {kinds}, takes a list of 'full_attention' and 'sliding_attention'")
    local = lambda i: kinds[i] == "sliding_attention" if kinds else slides(i)
    far = Layer(rope, None, scale)
    close = far if sliding is None else Layer(near or rope, sliding, scale)
    return tuple(close if local(i) else far for i in range(count))


def rotated_layers(c: Json) -> list[int]:
    """Returns 1 for each layer that a `config.json` gives a rotary embedding, 0 for the others: as `no_rope_layers`
    says, else all but every `no_rope_layer_interval`-th.

    Raises:
        ValueError: `no_rope_layers` has too few entries.
    """
    period, count = c.get("no_rope_layer_interval", 4), c["num_hidden_layers"]
    found = c.get("no_rope_layers") or [int((i + 1) % period != 0) for i in range(count)]
    if len(found) < count:
        raise ValueError(f"no_rope_layers: got {len(found)} entries for num_hidden_layers = {count}")
    return list(found[:count])


def read_period(c: Json, default: int) -> int:
    """Returns the entry `sliding_window_pattern` of a `config.json`, `default` if there is none. If it is `n`, every
    `n`-th layer has no sliding window."""
    period = c.get("sliding_window_pattern", default)
    if not isinstance(period, int):
        raise ValueError(f"sliding_window_pattern: got {period!r}, takes a whole number from 1 to 10,000")
    return period


def read_rope(c: Json, shape: Json, interleaved: bool = False) -> Rope:
    """Returns the rotary embedding that the entries `c` of a `config.json` describe; `head_dim` and `context` of
    `shape` are used. `interleaved`: rotated pairs are adjacent, see `Rope`."""
    r = {**(c.get("rope_scaling") or {}), **(c.get("rope_parameters") or {})}
    fraction = r.get("partial_rotary_factor", c.get("partial_rotary_factor", 1.0))
    theta, width = float(r.get("rope_theta") or c.get("rope_theta") or 10_000.0), int(shape["head_dim"] * fraction)
    if r.get("rope_type") == "proportional":
        return Rope(shape["head_dim"], theta, Proportional(width // 2, float(r.get("factor", 1.0))), interleaved)
    if width < 2 or width % 2:
        raise ValueError(f"head_dim: got {shape['head_dim']}, of which partial_rotary_factor = {fraction} leaves "
                         f"{width} to rotate; takes an even number from 2")
    try:
        return Rope(width, theta, read_scaling(c, r, shape["context"]), interleaved)
    except ArithmeticError:
        raise ValueError(f"rope_scaling: got {r}, which gives no finite frequencies") from None


def read_scaling(c: Json, r: Json, context: int) -> Scaling | None:
    """Returns the scaling of rotary frequencies in `r`, the entries `rope_scaling` or `rope_parameters` of the
    `config.json` `c`; None if there is none. `context` is the trained length, unless the file has another one for it.
    """
    kind = r.get("rope_type") or r.get("type")
    if kind is None and "factor" in r:
        raise ValueError(f"rope_type: got none with factor = {r['factor']}, takes the name of a scaling")
    if kind == "su" or (kind == "yarn" and c.get("model_type") == "phi3"):
        kind = "longrope"                   # earlier names in Phi-3 files
    trained = c.get("original_max_position_embeddings") or r.get("original_max_position_embeddings") or context
    if kind in ("default", None):
        return None
    if kind == "linear":
        return LinearScaling(float(r["factor"]))
    if kind == "dynamic":
        return Dynamic(float(r["factor"]), context)
    if kind == "llama3":
        return Llama3(float(r["factor"]), float(r["low_freq_factor"]), float(r["high_freq_factor"]), trained)
    if kind == "yarn":
        factor = float(r.get("factor") or context / trained)
        attention = r.get("attention_factor")
        if attention is None and r.get("mscale") and r.get("mscale_all_dim"):
            attention = mscale(factor, r["mscale"]) / mscale(factor, r["mscale_all_dim"])
        return Yarn(factor, trained, r.get("beta_fast") or 32.0, r.get("beta_slow") or 1.0, attention,
                    r.get("truncate", True))
    if kind == "longrope":
        factor = r.get("factor") or context / trained
        attention = r.get("attention_factor")
        if attention is None:
            attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
        return LongRope(tuple(r["short_factor"]), tuple(r["long_factor"]), trained, attention)
    raise ValueError(f"rope_type: got {kind!r}, supported are default, linear, dynamic, yarn, longrope, llama3, "
                     "proportional")


def read_activation(c: Json, key: str, default: str) -> Activation:
    """Returns the name of the activation function in the entry `key` of a `config.json`; `default` without the entry.
    """
    name = c.get(key, default)
    if name not in ACTIVATIONS:
        raise ValueError(f"{key}: got {name!r}, supported are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
