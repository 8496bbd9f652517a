"""Writes models in Hugging Face layout: `config.json` and one safetensors file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from decodax.io import packed as packed_files
from decodax.io.checkpoint import ROUNDED, dtype_name
from decodax.io.files import write_files
from decodax.models.config import DecoderConfig
from decodax.models.encoder_decoder.names import sources as encoder_decoder_sources
from decodax.models.encoder_decoder.network import EncoderDecoder
from decodax.models.encoder_decoder.reading import read_encoder_decoder
from decodax.models.families import family_of, read_config, text_part
from decodax.models.formats.rounded_mamba2 import QuantizedMamba2
from decodax.models.names import flatten, sources
from decodax.models.packed import Packed
from decodax.models.recurrent.mamba2 import Mamba2, entries_of
from decodax.models.recurrent.mamba2 import sources as mamba2_sources
from decodax.models.rope import Dynamic, LinearScaling, Llama3, LongRope, Yarn
from decodax.models.transformer import Transformer, Weights
from decodax.models.weight_source import stored_dtype


def save_model(directory: str | os.PathLike[str], model: Transformer, params: Weights,
               config: Mapping[str, Any] | None = None, dtype: jax.typing.DTypeLike | None = None) -> None:
    """Writes `config.json` and `model.safetensors`, which `load_model` and transformers can load.

    A model with packed weights can only be loaded by `load_model`.

    Args:
        directory: path to write to; it is created if necessary.
        model: the network.
        params: its weights.
        config: entries of `config.json`. If they include a `model_type`, they are the complete configuration of that
            family, such as the one from which the model was loaded; of a multimodal configuration only the part of the
            language model is written. Otherwise the model is written as a Llama, and the entries, such as
            `eos_token_id`, are added.
        dtype: dtype of the stored weights that are not packed ("float32", "bfloat16", "float16"); None: their own.

    Raises:
        ValueError: `config` does not describe this model, or the model is not a Llama and `config` has no `model_type`.
    """
    # Weights of a quantised checkpoint are written in another layout than its own.
    entries = {key: value for key, value in text_part(config or {}).items()
               if key not in ("quantization_config", "compression_config")}
    if "model_type" not in entries:
        entries = {**_llama_config(model.config), **entries}
    if read_config(entries) != model.config:
        raise ValueError(f"config: as a {entries['model_type']} configuration it describes another model than "
                         f"{model.config}")
    leaves = flatten(params)
    if any(isinstance(leaf, Packed) for leaf in leaves.values()):
        whole = next(leaf for leaf in leaves.values() if not isinstance(leaf, Packed))
        name = dtype_name(dtype or whole.dtype)
        own = {path: leaf if isinstance(leaf, Packed) else leaf.astype(stored_dtype(path, name))
               for path, leaf in leaves.items()}
        packed_files.write(Path(directory), own, entries | {"dtype": name})
        return
    name = dtype_name(dtype or leaves["embed"].dtype)
    entries |= {"dtype": name, "torch_dtype": name}
    tensors: dict[str, np.ndarray] = {}
    for path, source in sources(family_of(entries), model.config, model.abstract_params()).items():
        value = np.asarray(jax.device_get(leaves[path])).astype(jnp.dtype(stored_dtype(path, name)))
        value = value.astype(np.int64) if source.ids else value
        if value.ndim > len(source.full):
            tensors |= {tensor: np.ascontiguousarray(row.T if source.transpose else row)
                        for tensor, row in zip(source.tensors, value, strict=True)}
            continue
        whole = tensors.setdefault(source.tensors[0], np.empty(source.full, value.dtype))
        source.turned(whole)[source.index] = value.reshape((*value.shape, *[1] * source.after))
    write_files(Path(directory), tensors, entries, "pt")


def save_mamba2(directory: str | os.PathLike[str], model: Mamba2, params: Weights,
                config: Mapping[str, Any] | None = None, dtype: jax.typing.DTypeLike | None = None) -> None:
    """Writes a Mamba-2 to a directory, as `config.json` and `model.safetensors`, which `decodax.load` can load, and
    transformers if no weights are packed. Of `config` only the special token ids are kept; `dtype` is that of the
    stored weights, None: their own."""
    entries = {**{key: value for key, value in (config or {}).items() if key in ("eos_token_id", "bos_token_id",
                                                                                 "pad_token_id")},
               **entries_of(model.config)}
    root, leaves = Path(directory), flatten(params)
    name = dtype_name(dtype or next((x.dtype for x in leaves.values() if not isinstance(x, Packed)), model.dtype))
    entries |= {"dtype": name}
    if any(isinstance(leaf, Packed) for leaf in leaves.values()):
        if isinstance(model, QuantizedMamba2):
            packed_files.write(root, leaves, entries | {ROUNDED: True})
        else:
            packed_files.write(root, {path: leaf if isinstance(leaf, Packed) else leaf.astype(name)
                                      for path, leaf in leaves.items()}, entries)
        return
    tensors = {}
    for path, source in mamba2_sources(model.config).items():
        value = np.asarray(jax.device_get(leaves[path])).astype(jnp.dtype(name))
        tensors[source.tensors[0]] = np.ascontiguousarray(value.T if source.transpose else value)
    write_files(root, tensors, entries, "pt")


def save_encoder_decoder(directory: str | os.PathLike[str], model: EncoderDecoder, params: Weights,
                         config: Mapping[str, Any], dtype: jax.typing.DTypeLike | None = None) -> None:
    """Writes an encoder-decoder to a directory that `load_encoder_decoder` and transformers can load.

    Args:
        directory: path to write to; it is created if necessary.
        model: the network.
        params: its weights, which are arrays.
        config: the entries of `config.json`, those of the family with the model's sizes.
        dtype: dtype of the stored weights; None: their own.

    Raises:
        ValueError: `config` describes another model, or weights are packed.
    """
    leaves = flatten(params)
    if packed := [path for path, leaf in leaves.items() if isinstance(leaf, Packed)]:
        raise ValueError(f"params: {packed[0]} is packed, takes arrays for an encoder-decoder")
    tensors: dict[str, np.ndarray] = {}
    name = dtype_name(dtype or leaves["embed"].dtype)
    for path, source in encoder_decoder_sources(model.config).items():
        value = np.asarray(jax.device_get(leaves[path])).astype(jnp.dtype(name))
        tensors[source.tensors[0]] = np.ascontiguousarray(value.T if source.transpose else value)
    if read_encoder_decoder(dict(config), tensors) != model.config:
        raise ValueError(f"config: as a {config['model_type']} configuration it describes another model than "
                         f"{model.config}")
    write_files(Path(directory), tensors, {**config, "dtype": name, "torch_dtype": name}, "pt")


def _llama_config(c: DecoderConfig) -> dict[str, Any]:
    rope = c.layers[0].rope
    if rope is None:
        raise ValueError("config: a model without rotary embedding is not a Llama; takes its config.json")
    if rope.chunks is not None:
        raise ValueError("config: a model with dual chunk attention is not a Llama; takes its config.json")
    scaling: dict[str, Any] = {"rope_type": "default"}
    match rope.scaling:
        case LinearScaling(factor):
            scaling = {"rope_type": "linear", "factor": factor}
        case Dynamic(factor, _):
            scaling = {"rope_type": "dynamic", "factor": factor}
        case Llama3(factor, low, high, trained):
            scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
                       "original_max_position_embeddings": trained}
        case Yarn(factor, trained, fast, slow, attention, truncate):
            scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": trained,
                       "beta_fast": fast, "beta_slow": slow, "attention_factor": attention, "truncate": truncate}
        case LongRope(short, long, trained, attention):
            scaling = {"rope_type": "longrope", "short_factor": list(short), "long_factor": list(long),
                       "original_max_position_embeddings": trained, "attention_factor": attention}
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": c.vocab, "hidden_size": c.width,
        "intermediate_size": c.mlp, "num_hidden_layers": len(c.layers), "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads, "head_dim": c.head_dim, "hidden_act": "silu",
        "max_position_embeddings": c.context, "rms_norm_eps": c.norm.eps, "tie_word_embeddings": c.tied,
        "attention_bias": c.qkv_bias, "mlp_bias": c.mlp_bias, "rope_theta": rope.theta,
        # Both spellings: older readers know rope_theta and rope_scaling, newer ones rope_parameters.
        "rope_parameters": {**scaling, "rope_theta": rope.theta},
        "rope_scaling": None if rope.scaling is None else scaling,
    }
