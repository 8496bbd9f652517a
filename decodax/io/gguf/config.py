"""Turns the metadata of a GGUF file into the entries of a `config.json`, which the families' readers take.

Names and meanings of the metadata are those of llama.cpp, which writes some numbers into tensors and leaves others out
where they follow from the architecture.
"""

from __future__ import annotations

import difflib
from typing import Any

from decodax.io.files import CheckpointError
from decodax.io.gguf.architectures import ARCHITECTURES
from decodax.io.gguf.encoder_decoder import T5, t5_entries
from decodax.io.gguf.metadata import Factors, Metadata
from decodax.io.gguf.reader import GgufFile
from decodax.io.gguf.recurrent import NETWORKS, recurrent_entries
from decodax.io.gguf.tensors import ROPE


def read_entries(file: GgufFile, factors: Factors) -> dict[str, Any]:
    """Returns the entries of a `config.json`.

    Args:
        file: the file.
        factors: its tensors named in `ROPE`, as numbers.

    Raises:
        CheckpointError: the architecture is not supported (the message names similar ones), or an entry is missing or
            not supported.
    """
    m = Metadata(file, factors)
    if m.name not in (known := sorted([*ARCHITECTURES, *NETWORKS, T5])):
        near = difflib.get_close_matches(m.name, known, n=3, cutoff=0.4)
        raise CheckpointError(f"{file.path}: general.architecture: got {m.name!r}, "
                              f"{'near to ' + ', '.join(near) + '; ' if near else ''}supported are {', '.join(known)}")
    table = file.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise CheckpointError(f"{file.path}: lacks tensor token_embd.weight, or its shape is not that of a table")
    if m.name == T5:
        return t5_entries(m, table.shape[0])
    # Lists of a wrong number of layers would fill the memory. Layers that predict further tokens may be left out.
    held = 1 + max((int(number) for name in file.tensors if name.startswith("blk.")
                    and (number := name.split(".")[1]).isdecimal()), default=-1)
    if (layers := m.count("block_count")) > held + 8:
        raise CheckpointError(f"{file.path}: {m.name}.block_count: got {layers}, the file holds {held} layers")
    if m.name in NETWORKS:
        return recurrent_entries(m, table.shape[0], layers)
    architecture = ARCHITECTURES[m.name]
    m.by_layer = architecture.by_layer
    heads, width = m.count("attention.head_count"), m.count("embedding_length")
    head = m.count("attention.key_length", max(width // heads, 1))
    if (values := m.count("attention.value_length", head)) != head and not architecture.latent:
        raise CheckpointError(f"{file.path}: {m.name}.attention.value_length: got {values}, takes that of the keys, "
                              f"{head}")
    shared: dict[str, Any] = {
        "vocab_size": table.shape[0], "hidden_size": width, "intermediate_size": m.count(
            "feed_forward_length", m.get("expert_feed_forward_length")),
        "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": m.count("attention.head_count_kv", heads), "head_dim": head,
        "max_position_embeddings": m.count("context_length"), "rope_theta": m.get("rope.freq_base", 10_000.0),
        "tie_word_embeddings": "output.weight" not in file.tensors}
    for key, name in (("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
                      ("attention.layer_norm_epsilon", "layer_norm_eps")):
        if (eps := m.get(key)) is not None:
            shared[name] = eps
    turned = m.count("rope.dimension_count", head, 0)
    if turned != head:
        shared["partial_rotary_factor"] = turned / head
    if architecture.scaled and (scaling := _scaling(m, factors, architecture.yarn_log)) is not None:
        shared["rope_scaling"] = scaling
    return architecture.entries(m, shared)


def _scaling(m: Metadata, factors: Factors, log: float) -> dict[str, Any] | None:
    """Returns the entry `rope_scaling`, or None; `log` is `Architecture.yarn_log`."""
    kind, attention = m.get("rope.scaling.type"), m.get("rope.scaling.attn_factor")
    context = m.count("context_length")
    trained = m.get("rope.scaling.original_context_length") or context
    listed = lambda name: [float(x) for x in factors[name]]
    if ROPE[0] in factors:      # Llama 3.1's scaling, as the divisors that it amounts to
        return {"rope_type": "longrope", "short_factor": listed(ROPE[0]), "long_factor": listed(ROPE[0]),
                "attention_factor": attention or 1.0, "original_max_position_embeddings": context}
    if ROPE[1] in factors and ROPE[2] in factors:
        return {"rope_type": "longrope", "long_factor": listed(ROPE[1]), "short_factor": listed(ROPE[2]),
                "attention_factor": attention or 1.0, "original_max_position_embeddings": trained}
    if kind == "yarn":
        several = log * m.get("rope.scaling.yarn_log_multiplier", 0.0)
        for key, takes in (("yarn_ext_factor", 1), ("yarn_log_multiplier", 0)):
            if (given := m.get(f"rope.scaling.{key}", takes)) != takes and not (several and "log" in key):
                raise CheckpointError(f"{m.file.path}: {m.name}.rope.scaling.{key}: got {given}, takes {takes}")
        # Converters write the factor of cosine and sine under either name.
        own = {"attention_factor": m.get("rope.scaling.yarn_attn_factor", attention),
               "beta_fast": m.get("rope.scaling.yarn_beta_fast"), "beta_slow": m.get("rope.scaling.yarn_beta_slow")}
        own |= {} if not several else dict.fromkeys(("mscale", "mscale_all_dim"), float(f"{several:.6g}"))
        return {"rope_type": "yarn", "factor": m.need("rope.scaling.factor"),
                "original_max_position_embeddings": trained} | {k: v for k, v in own.items() if v is not None}
    if kind == "linear" or (kind is None and m.get("rope.scale_linear")):
        factor = m.get("rope.scaling.factor") or m.get("rope.scale_linear") or m.need("rope.scaling.factor")
        return {"rope_type": "linear", "factor": factor}
    if kind in (None, "none"):
        return None
    raise CheckpointError(f"{m.file.path}: {m.name}.rope.scaling.type: got {kind!r}, supported are none, linear and "
                          "yarn, and longrope with its factors")
