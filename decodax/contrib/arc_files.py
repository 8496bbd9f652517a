"""Reads and writes the files of an ARC-Encoder in the authors' layouts (kyutai-labs/ARC-Encoder, 2025).

A released encoder consists of a `config.json` with the groups `model_args`, `embedder_args` and `bridge_args`, and a
`model.safetensors`. A checkpoint of their training consists of a `params.json` with `embedder_params` and
`bridge_module`, and two folders of weights; sizes and untrained weights come from the backbone's directory, in Llama's
own layout.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from decodax.io.checkpoint import dtype_name
from decodax.io.files import CheckpointError, read_json
from decodax.models.arc_encoder import ArcEncoder, End
from decodax.models.blocks.options import Layer
from decodax.models.config import DecoderConfig, NormConfig
from decodax.models.rope import Rope
from decodax.models.transformer import Weights

ATTENTION = {"q": "wq", "k": "wk", "v": "wv", "o": "wo"}
MLP = {"gate": "w1", "down": "w2", "up": "w3"}
POOLING = {"pool_type": "mean_pooled_queries", "where": "before"}
ENDS: tuple[End, ...] = ("cont", "rec")


def read_arc(path: Path, backbone: Path | None = None, decoder: int = 0,
             dtype: jax.typing.DTypeLike | None = None) -> tuple[ArcEncoder, Weights]:
    """Reads the encoder of a directory in either layout.

    Args:
        path: the directory.
        backbone: the directory of the encoder's backbone, if `path` is a checkpoint of the authors' training.
        decoder: the index of the decoder, if the encoder was trained for several.
        dtype: dtype of the weights; None keeps the stored one.

    Returns:
        The encoder and its weights.

    Raises:
        CheckpointError: a file or a tensor is missing or has another shape; the message names it.
        ValueError: an option is not supported; the message names it.
    """
    sizes: Any
    embedder: Any
    bridge: Any
    if (path / "params.json").exists():
        if backbone is None:
            raise ValueError(f"backbone: got none, but {path} is a checkpoint of a training, which needs the directory "
                             "of the encoder's backbone")
        given = read_json(path / "params.json")
        found = {f"embedder.{name}": get for name, get in _tensors(backbone / "consolidated.safetensors", True).items()}
        for part in ("embedder", "bridge_module"):
            found |= {f"{part}.{name}": get
                      for name, get in _tensors(path / part / "consolidated.safetensors").items()}
        sizes, embedder, bridge = _sizes(read_json(backbone / "params.json")), given.get("embedder_params"), \
            given.get("bridge_module")
    else:
        given = read_json(path / "config.json")
        found = _tensors(path / "model.safetensors")
        sizes, embedder, bridge = given.get("model_args"), given.get("embedder_args"), given.get("bridge_args")
    if not all(isinstance(part, Mapping) for part in (sizes, embedder, bridge)):
        raise CheckpointError(f"{path}: takes model_args, embedder_args and bridge_args in config.json, or "
                              "embedder_params and bridge_module in params.json")
    try:
        encoder = _encoder(sizes, embedder, bridge)
    except KeyError as e:
        raise CheckpointError(f"{path}: the configuration lacks {e}") from None
    many = bridge.get("bridge_type") == "multi_module"

    def tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name not in found:
            raise CheckpointError(f"{path}: has no tensor {name}")
        value = found[name]()
        if value.shape != shape:
            raise CheckpointError(f"{path}: tensor {name}: got shape {value.shape}, takes {shape}")
        return value

    shapes = jax.eval_shape(lambda: encoder.init_params(jax.random.key(0)))
    return encoder, jax.tree.map(lambda x: jnp.asarray(x, dtype), _weights(encoder, shapes, tensor, decoder, many))


def write_arc(path: Path, encoder: ArcEncoder, params: Weights, dtype: jax.typing.DTypeLike | None = None) -> None:
    """Writes an encoder for one decoder in the layout of the released encoders."""
    c, rope = encoder.config, encoder.config.layers[0].rope
    assert rope is not None
    config = {
        "model_args": dict(dim=c.width, n_layers=len(c.layers), head_dim=c.head_dim, hidden_dim=c.mlp, n_heads=c.heads,
                           n_kv_heads=c.kv_heads, norm_eps=c.norm.eps, vocab_size=c.vocab, rope_theta=rope.theta,
                           max_batch_size=1),
        "embedder_args": dict(n_truncated_layers=0, pooling_module=POOLING, compress_rates=[-encoder.pool],
                              memory_tokens=0, rec_tok="rec" in encoder.ends, cont_tok="cont" in encoder.ends,
                              trained_layers=len(c.layers), causal_embedder=False, train_embedding_mtx=True),
        "bridge_args": dict(bridge_type="linear" if encoder.hidden is None else "rms" if encoder.normed else "mlp",
                            in_dim=c.width, hidden_dim=encoder.hidden, out_dim=encoder.out),
        "empty_init": 1,
    }
    tensors: dict[str, np.ndarray] = {}

    def put(name: str, value: Any) -> Any:
        tensors[name] = np.ascontiguousarray(np.asarray(value, dtype and dtype_name(dtype)))
        return value

    _each(encoder, params, lambda name, x, turned: put(name, x.T if turned else x), 0, False)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, path / "model.safetensors")


def _weights(encoder: ArcEncoder, shapes: Weights, tensor: Callable[[str, tuple[int, ...]], np.ndarray], decoder: int,
             many: bool) -> Weights:
    read = lambda name, x, turned: tensor(name, x.shape[::-1]).T if turned else tensor(name, x.shape)
    return _each(encoder, shapes, read, decoder, many)


def _each(encoder: ArcEncoder, tree: Weights, do: Callable[[str, Any, bool], Any], decoder: int,
          many: bool) -> Weights:
    """Returns the weights with each weight replaced by `do(tensor name, weight, True if it is stored transposed)`."""
    layers = {}
    for i, layer in tree["layers"].items():
        at = f"embedder.layers.{i}"
        layers[i] = {
            "attn_in": {"scale": do(f"{at}.attention_norm.weight", layer["attn_in"]["scale"], False)},
            "mlp_in": {"scale": do(f"{at}.ffn_norm.weight", layer["mlp_in"]["scale"], False)},
            "attn": {mine: {"kernel": do(f"{at}.attention.{name}.weight", layer["attn"][mine]["kernel"], True)}
                     for mine, name in ATTENTION.items()},
            "mlp": {mine: {"kernel": do(f"{at}.feed_forward.{name}.weight", layer["mlp"][mine]["kernel"], True)}
                    for mine, name in MLP.items()},
        }
    place = f"bridge_module.{decoder}." if many else "bridge_module."
    bridge = {name: do(f"{place}norm.weight" if name == "norm" else f"{place}layer{int(name) + 1}.weight", x,
                       name != "norm") for name, x in tree["bridge"].items()}
    ends: Weights = {end: do(f"embedder.{end}_tok.{decoder}.weight", tree[end], False) for end in encoder.ends}
    return {"embed": do("embedder.tok_embeddings.weight", tree["embed"], False), "layers": layers, "bridge": bridge,
            **ends}


def _encoder(sizes: Mapping[str, Any], embedder: Mapping[str, Any], bridge: Mapping[str, Any]) -> ArcEncoder:
    rates, pooling = embedder["compress_rates"], {**POOLING, **embedder.get("pooling_module", {})}
    if len(rates) != 1 or rates[0] > -2:
        raise ValueError(f"compress_rates: got {rates}, takes one number below -1, the tokens for each vector")
    for name, value, takes in (("pooling_module", pooling, POOLING), ("memory_tokens", embedder.get("memory_tokens", 0),
                               0), ("causal_embedder", embedder.get("causal_embedder", False), False),
                               ("non_parametric_norm", sizes.get("non_parametric_norm", False), False)):
        if value != takes:
            raise ValueError(f"{name}: got {value}, takes {takes}")
    kind = bridge.get("bridge_type")
    if kind not in ("mlp", "multi_module", "rms", "linear"):
        raise ValueError(f"bridge_type: got {kind!r}, takes 'mlp', 'multi_module', 'rms' or 'linear'")
    count = sizes["n_layers"] - embedder.get("n_truncated_layers", 16)
    rope = Rope(width=sizes["head_dim"], theta=sizes.get("rope_theta") or 1e6, interleaved=True)
    config = DecoderConfig(vocab=sizes["vocab_size"], width=sizes["dim"], heads=sizes["n_heads"],
                           kv_heads=sizes["n_kv_heads"], head_dim=sizes["head_dim"], mlp=sizes["hidden_dim"],
                           layers=(Layer(rope=rope),) * count, context=128_000, norm=NormConfig(eps=sizes["norm_eps"]))
    out = bridge.get("out_dim") or bridge["in_dim"]
    return ArcEncoder(config, out=out, pool=-rates[0], normed=kind == "rms",
                      hidden=None if kind == "linear" else bridge.get("hidden_dim") or out,
                      ends=tuple(end for end in ENDS if embedder.get(f"{end}_tok", False)))


def _sizes(params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a backbone's sizes from its `params.json`; sizes that Llama's own files omit are computed."""
    found = dict(params)
    if "hidden_dim" not in found:
        wide = int(2 * 4 * params["dim"] / 3)
        wide = int((params.get("ffn_dim_multiplier") or 1) * wide)
        found["hidden_dim"] = -(-wide // params["multiple_of"]) * params["multiple_of"]
    found.setdefault("head_dim", params["dim"] // params["n_heads"])
    found.setdefault("n_kv_heads", params["n_heads"])
    found.setdefault("rope_theta", 1e4)
    return found


def _tensors(path: Path, optional: bool = False) -> dict[str, Callable[[], np.ndarray]]:
    """Returns, for each tensor of a file, a function that reads it."""
    if not path.exists():
        if optional:
            return {}
        raise CheckpointError(f"{path}: file not found")
    try:
        file = safe_open(path, "np")
        names = list(file.keys())
    except (SafetensorError, OSError) as e:
        raise CheckpointError(f"{path}: not a complete safetensors file ({e})") from None
    read = lambda name: lambda: file.get_tensor(name)
    return {name: read(name) for name in names}
