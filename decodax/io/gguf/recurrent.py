"""Mamba, Mamba-2 and RWKV-7 in GGUF files: networks of recurrent layers alone, which are no decoders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from decodax.io.checkpoint import RECURRENT, places
from decodax.io.files import CheckpointError
from decodax.io.gguf.metadata import Architecture, Metadata
from decodax.io.gguf.reader import GgufFile
from decodax.io.gguf.tensors import RowReader, find_rows, refuse_others
from decodax.io.gguf.views import Stored, rates, taps
from decodax.io.gguf.weights import FLOATS, load_weights
from decodax.models.formats import Format
from decodax.models.names import flatten
from decodax.models.recurrent.mamba import Mamba
from decodax.models.recurrent.mamba2 import Mamba2
from decodax.models.recurrent.rwkv7 import EPS, MIXES, Rwkv7
from decodax.models.transformer import Weights

SMALL = {"decay": ("w", "decay", "decay"), "rate": ("a", "iclr", "a"), "value": ("v", "value_residual_mix", "v"),
         "gate": ("g", "gate", "gate")}
"""The pairs of small matrices of RWKV-7: the letter of their tensors, and the names of their rank in the metadata and
in a `config.json`."""


def _mamba(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    c = _states(m, c)
    if m.get("ssm.dt_b_c_rms", False):
        raise CheckpointError(f"{m.file.path}: {m.name}.ssm.dt_b_c_rms: got True, as in Falcon Mamba's files, which "
                              "are not read; takes False")
    return {**c, "model_type": "mamba", "time_step_rank": m.need("ssm.time_step_rank")}


def _mamba2(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    heads, inner = m.count("ssm.time_step_rank"), m.count("ssm.inner_size")
    return {**_states(m, c), "model_type": "mamba2", "num_heads": heads, "head_dim": inner // heads,
            "n_groups": m.count("ssm.group_count")}


def _states(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    """Returns the entries that Mamba and Mamba-2 share."""
    width, inner = c["hidden_size"], m.count("ssm.inner_size")
    if inner % width:
        raise CheckpointError(f"{m.file.path}: {m.name}.ssm.inner_size: got {inner}, takes a multiple of the width, "
                              f"{width}")
    return {**c, "expand": inner // width, "state_size": m.count("ssm.state_size"),
            "conv_kernel": m.count("ssm.conv_kernel"),
            "layer_norm_epsilon": m.need("attention.layer_norm_rms_epsilon"), "use_bias": m.held("ssm_in.bias"),
            "use_conv_bias": m.held("ssm_conv1d.bias"), "tie_word_embeddings": "output.weight" not in m.file.tensors}


def _rwkv7(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    for key, takes in (("attention.layer_norm_epsilon", EPS), ("token_shift_count", 2)):
        if (got := m.get(key, takes)) != takes:
            raise CheckpointError(f"{m.file.path}: {m.name}.{key}: got {got}, takes {takes}")
    ranks = {f"{ours}_low_rank_dim": m.count(f"attention.{theirs}_lora_rank") for _, theirs, ours in SMALL.values()}
    return {**c, "model_type": "rwkv7", "head_dim": m.count("wkv.head_size"),
            "intermediate_size": m.count("feed_forward_length"), **ranks, "tie_word_embeddings": False}


def by_head(x: np.ndarray, config: Any) -> np.ndarray:
    """Returns a vector over channels, `f32[D, 1]`, as `f32[H, N]`."""
    return x.reshape(config.heads, config.head_dim)


LAYER = {
    "norm": Stored("attn_norm.weight"), "in.kernel": Stored("ssm_in.weight"), "in.bias": Stored("ssm_in.bias"),
    "conv.taps": Stored("ssm_conv1d.weight", turn=taps), "conv.bias": Stored("ssm_conv1d.bias"),
    "A_log": Stored("ssm_a", turn=rates), "D": Stored("ssm_d"), "out.kernel": Stored("ssm_out.weight"),
    "out.bias": Stored("ssm_out.bias")}
"""The form of the weights of both kinds of layers."""

MIXED = tuple(f"time.mix.{name}" for name in MIXES)

TIME = {
    **{f"{ours}.{leaf}": Stored(f"{theirs}.{tail}") for ours, theirs in (
        ("time_norm", "attn_norm"), ("channel_norm", "attn_norm_2"), ("time.head_norm", "time_mix_ln"))
       for leaf, tail in (("scale", "weight"), ("bias", "bias"))},
    **{path: Stored("time_mix_lerp_fused.weight", MIXED) for path in MIXED},
    **{f"time.{name}.{ours}": Stored(f"time_mix_{letter}{number}.weight") for name, (letter, *_) in SMALL.items()
       for number, ours in enumerate(("bias", "down.kernel", "up.kernel"))},
    **{f"time.{ours}.kernel": Stored(f"time_mix_{theirs}.weight") for ours, theirs in (
        ("r", "receptance"), ("k", "key"), ("v", "value"), ("o", "output"))},
    "time.taken": Stored("time_mix_k_k.weight"), "time.kept": Stored("time_mix_k_a.weight"),
    "time.now": Stored("time_mix_r_k.weight", turn=by_head), "channels.mix": Stored("channel_mix_lerp_k.weight"),
    "channels.k.kernel": Stored("channel_mix_key.weight"), "channels.v.kernel": Stored("channel_mix_value.weight")}
"""The form of the weights of a layer of RWKV-7."""

NETWORKS: dict[str, Architecture] = {
    "mamba": Architecture(_mamba, names={"norm": "output_norm.weight"}, views={
        **LAYER, "x.kernel": Stored("ssm_x.weight"), "dt.kernel": Stored("ssm_dt.weight"),
        "dt.bias": Stored("ssm_dt.bias")}),
    "mamba2": Architecture(_mamba2, names={"norm": "output_norm.weight"}, views={
        **LAYER, "dt_bias": Stored("ssm_dt.bias"), "gated_norm": Stored("ssm_norm.weight")}),
    "rwkv7": Architecture(_rwkv7, names={"first_norm": "token_embd_norm"}, views=TIME)}
"""Architectures by their names in `general.architecture`."""


def recurrent_entries(m: Metadata, vocab: int, layers: int) -> dict[str, Any]:
    """Returns the entries of the `config.json` of a network in `NETWORKS`.

    Args:
        m: the metadata.
        vocab: number of rows of the table of embeddings.
        layers: number of layers.

    Raises:
        CheckpointError: an entry is missing or not supported.
    """
    return NETWORKS[m.name].entries(m, {
        "vocab_size": vocab, "hidden_size": m.count("embedding_length"), "num_hidden_layers": layers})


def load_recurrent(file: GgufFile, entries: Mapping[str, Any], dtype: str | None, packing: Format | None
                   ) -> tuple[Mamba | Mamba2 | Rwkv7, Weights]:
    """Loads a network in `NETWORKS` onto the first device.

    Args:
        file: the file.
        entries: the entries of its `config.json`.
        dtype: dtype of arrays; None takes that of the table of embeddings if it has floats, else bfloat16.
        packing: another format for the kernels; None: the file's.

    Raises:
        CheckpointError: the metadata do not describe a network, or the tensors are not those that they describe.
    """
    network, read, _ = RECURRENT[entries["model_type"]]
    try:
        config = read(entries)
    except ValueError as error:
        raise CheckpointError(f"{file.path}: {error}") from None
    name = dtype or FLOATS.get(file.tensors["token_embd.weight"].type, "bfloat16")
    model = network(config, dtype=name)
    shapes = model.abstract_params()
    sources = find_rows(file, NETWORKS[file.metadata["general.architecture"]], config, flatten(shapes))
    # Converters fill the first layer's shares of its own values, which no network uses.
    refuse_others(file, sources, tuple(f"blk.0.time_mix_v{i}." for i in range(3)) if network is Rwkv7 else ())
    with RowReader(file) as rows:
        return model, load_weights(rows, sources, shapes, name, places(model, shapes, None), packing)
