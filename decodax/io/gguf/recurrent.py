"""Mamba and Mamba-2 in GGUF files: networks of state-space layers alone, which are no decoders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
from decodax.models.transformer import Weights


def _mamba(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    if m.get("ssm.dt_b_c_rms", False):
        raise CheckpointError(f"{m.file.path}: {m.name}.ssm.dt_b_c_rms: got True, as in Falcon Mamba's files, which "
                              "are not read; takes False")
    return {**c, "model_type": "mamba", "time_step_rank": m.need("ssm.time_step_rank")}


def _mamba2(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    heads, inner = m.count("ssm.time_step_rank"), m.count("ssm.inner_size")
    return {**c, "model_type": "mamba2", "num_heads": heads, "head_dim": inner // heads,
            "n_groups": m.count("ssm.group_count")}


LAYER = {
    "norm": Stored("attn_norm.weight"), "in.kernel": Stored("ssm_in.weight"), "in.bias": Stored("ssm_in.bias"),
    "conv.taps": Stored("ssm_conv1d.weight", turn=taps), "conv.bias": Stored("ssm_conv1d.bias"),
    "A_log": Stored("ssm_a", turn=rates), "D": Stored("ssm_d"), "out.kernel": Stored("ssm_out.weight"),
    "out.bias": Stored("ssm_out.bias")}
"""The form of the weights of both kinds of layers."""

NETWORKS: dict[str, Architecture] = {
    "mamba": Architecture(_mamba, names={"norm": "output_norm.weight"}, views={
        **LAYER, "x.kernel": Stored("ssm_x.weight"), "dt.kernel": Stored("ssm_dt.weight"),
        "dt.bias": Stored("ssm_dt.bias")}),
    "mamba2": Architecture(_mamba2, names={"norm": "output_norm.weight"}, views={
        **LAYER, "dt_bias": Stored("ssm_dt.bias"), "gated_norm": Stored("ssm_norm.weight")})}
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
    width, inner = m.count("embedding_length"), m.count("ssm.inner_size")
    if inner % width:
        raise CheckpointError(f"{m.file.path}: {m.name}.ssm.inner_size: got {inner}, takes a multiple of the width, "
                              f"{width}")
    return NETWORKS[m.name].entries(m, {
        "vocab_size": vocab, "hidden_size": width, "num_hidden_layers": layers, "expand": inner // width,
        "state_size": m.count("ssm.state_size"), "conv_kernel": m.count("ssm.conv_kernel"),
        "layer_norm_epsilon": m.need("attention.layer_norm_rms_epsilon"), "use_bias": m.held("ssm_in.bias"),
        "use_conv_bias": m.held("ssm_conv1d.bias"), "tie_word_embeddings": "output.weight" not in m.file.tensors})


def load_recurrent(file: GgufFile, entries: Mapping[str, Any], dtype: str | None, packing: Format | None
                   ) -> tuple[Mamba | Mamba2, Weights]:
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
    refuse_others(file, sources)
    with RowReader(file) as rows:
        return model, load_weights(rows, sources, shapes, name, places(model, shapes, None), packing)
