"""T5 in GGUF files: an encoder and a decoder, whose tensors have names of their own.

Files do not say which activation a T5 has, nor whether its hidden states are scaled before the head. As in llama.cpp, a
gated MLP has GELU and another one ReLU. Hidden states are scaled if the head is the table of embeddings, as in version
1.0; llama.cpp leaves this factor out, which changes probabilities, but not which token is the likeliest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from decodax.io.checkpoint import places
from decodax.io.files import CheckpointError
from decodax.io.gguf.metadata import Architecture, Metadata
from decodax.io.gguf.reader import GgufFile
from decodax.io.gguf.tensors import RowReader, find_rows, refuse_others
from decodax.io.gguf.weights import FLOATS, load_weights
from decodax.models.encoder_decoder.network import EncoderDecoder
from decodax.models.encoder_decoder.reading import read_encoder_decoder
from decodax.models.formats import Format
from decodax.models.names import flatten
from decodax.models.transformer import Weights

T5 = "t5"
"""Name of the architecture in `general.architecture`."""

SIDES = {"encoder": "enc", "decoder": "dec"}
HALVES = {"attn": "attn", "cross": "cross_attn", "mlp": "ffn"}
"""Beginnings of the names of tensors, by the parts of the network's paths."""

WHOLE = {"embed": "token_embd.weight", "head.kernel": "output.weight"}
"""Names of the tensors outside of both stacks, by path."""

UNUSED = r"dec\.blk\.\d+\.cross_attn_rel_b\.weight"
"""Regular expression for positions of cross-attention, which no network uses."""


def t5_entries(m: Metadata, vocab: int) -> dict[str, Any]:
    """Returns the entries of the `config.json` of a T5.

    Args:
        m: the metadata.
        vocab: number of rows of the table of embeddings.

    Raises:
        CheckpointError: an entry is missing or not supported, or the file has fewer layers than it says.
    """
    layers = {"encoder": m.count("block_count"), "decoder": m.count("decoder_block_count", m.count("block_count"))}
    for side, count in layers.items():
        own = SIDES[side]
        if f"{own}.blk.{count - 1}.ffn_down.weight" not in m.file.tensors:
            raise CheckpointError(f"{m.file.path}: {m.name}: got {count} layers of the {side}, the file holds fewer")
        if f"{own}.blk.1.attn_rel_b.weight" in m.file.tensors:
            raise CheckpointError(f"{m.file.path}: holds tensor {own}.blk.1.attn_rel_b.weight, relative positions of "
                                  "a second layer as in UMT5, which is not supported")
    head = m.count("attention.key_length")
    if (values := m.count("attention.value_length", head)) != head:
        raise CheckpointError(f"{m.file.path}: {m.name}.attention.value_length: got {values}, takes that of the keys, "
                              f"{head}")
    heads = m.count("attention.head_count")
    if (groups := m.count("attention.head_count_kv", heads)) != heads:
        raise CheckpointError(f"{m.file.path}: {m.name}.attention.head_count_kv: got {groups}, takes that of the "
                              f"queries, {heads}")
    gated = "enc.blk.0.ffn_gate.weight" in m.file.tensors
    return {"model_type": "t5", "vocab_size": vocab, "d_model": m.count("embedding_length"), "num_heads": heads,
            "d_kv": head, "d_ff": m.count("feed_forward_length"), "num_layers": layers["encoder"],
            "num_decoder_layers": layers["decoder"], "feed_forward_proj": "gated-gelu" if gated else "relu",
            "relative_attention_num_buckets": m.count("attention.relative_buckets_count"),
            "layer_norm_epsilon": m.need("attention.layer_norm_rms_epsilon"),
            "decoder_start_token_id": m.count("decoder_start_token_id", least=0),
            "tie_word_embeddings": "output.weight" not in m.file.tensors}


def tensor_names(paths: Iterable[str]) -> dict[str, str]:
    """Returns the name of the tensor of each weight.

    >>> tensor_names(["decoder.layers.2.cross.q.kernel", "encoder.norm.scale"])
    {'decoder.layers.2.cross.q.kernel': 'dec.blk.2.cross_attn_q.weight', 'encoder.norm.scale': 'enc.output_norm.weight'}
    """
    found = {}
    for path in paths:
        side, _, rest = path.partition(".")
        if path in WHOLE:
            found[path] = WHOLE[path]
        elif rest == "relative":
            found[path] = f"{SIDES[side]}.blk.0.attn_rel_b.weight"
        elif rest == "norm.scale":
            found[path] = f"{SIDES[side]}.output_norm.weight"
        else:
            _, number, half, module, _ = rest.split(".")
            found[path] = f"{SIDES[side]}.blk.{number}.{HALVES[half]}_{module}.weight"
    return found


def load_t5(file: GgufFile, entries: Mapping[str, Any], dtype: str | None, mesh: Mesh | None, packing: Format | None
            ) -> tuple[EncoderDecoder, Weights]:
    """Loads a T5.

    Args:
        file: the file.
        entries: the entries of its `config.json`.
        dtype: dtype of arrays; None takes that of the table of embeddings if it has floats, else bfloat16.
        mesh: the mesh on which the weights are placed; None: the first device.
        packing: another format for the kernels; None: the file's.

    Raises:
        CheckpointError: the metadata do not describe a network, or the tensors are not those that they describe.
    """
    try:
        config = read_encoder_decoder(dict(entries), [] if entries["tie_word_embeddings"] else ["lm_head.weight"])
    except ValueError as error:
        raise CheckpointError(f"{file.path}: {error}") from None
    name = dtype or FLOATS.get(file.tensors["token_embd.weight"].type, "bfloat16")
    model = EncoderDecoder(config, dtype=name)
    shapes = jax.eval_shape(model.init_params, jax.random.key(0))
    leaves = flatten(shapes)
    sources = find_rows(file, Architecture(lambda m, c: c, names=tensor_names(leaves)), config, leaves)
    refuse_others(file, sources, numbers=UNUSED)
    with RowReader(file) as rows:
        return model, load_weights(rows, sources, shapes, name, places(model, shapes, mesh), packing)
