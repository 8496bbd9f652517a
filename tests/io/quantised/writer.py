"""Writes small quantised checkpoints in the layouts in which they are released, with the weights that each format's own
dequantisation gives. It imports no torch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from decodax.io.saving import save_model
from decodax.models import Transformer
from decodax.models.families import read_config

Tensors = dict[str, np.ndarray]

NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
         "float8_e8m0fnu": "F8_E8M0", "int8": "I8", "uint8": "U8", "int32": "I32", "int64": "I64"}

SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
         "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "torch_dtype": "float16"}
LLAMA = {**SIZES, "model_type": "llama", "tie_word_embeddings": False}
FUSED = {**SIZES, "model_type": "phi3", "tie_word_embeddings": False, "pad_token_id": 0}
TIED = {**SIZES, "model_type": "qwen2", "tie_word_embeddings": True}
EXPERTS = {**SIZES, "model_type": "qwen3_moe", "tie_word_embeddings": False, "num_experts": 4, "num_experts_per_tok": 2,
           "moe_intermediate_size": 32, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}


def write_safetensors(path: Path, tensors: Tensors) -> None:
    """Writes a file with any dtype; the package knows none of 8-bit floats with NumPy."""
    head, at, parts = dict[str, Any](), 0, []
    for name, value in tensors.items():
        raw = np.ascontiguousarray(value).tobytes()
        head[name] = {"dtype": NAMES[value.dtype.name], "shape": value.shape, "data_offsets": [at, at + len(raw)]}
        at += len(raw)
        parts.append(raw)
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))


def dense(codes: np.ndarray, bits: int) -> np.ndarray:
    """Packs rows of codes, the first one in the lowest bits, in 32-bit words: `i32[n, ceil(K * bits / 32)]`."""
    n, K = codes.shape
    words = -(-K * bits // 32)
    made = [[0] * words for _ in range(n)]
    for row, own in zip(made, codes.tolist(), strict=True):
        for i, code in enumerate(own):
            word, shift = divmod(i * bits, 32)
            row[word] |= code << shift & 0xFFFFFFFF
            if shift + bits > 32:
                row[word + 1] |= code >> 32 - shift
    return np.array(made, np.uint64).astype(np.uint32).view(np.int32)


def _rounded(w: np.ndarray, bits: int, group: int, symmetric: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns codes from 0 on, scales in float16 and zero points of groups of consecutive inputs."""
    top, groups = 2 ** bits - 1, w.reshape(len(w), -1, group)
    if symmetric:
        scales = (np.abs(groups).max(-1) * 2 / top).astype(np.float16)
        zeros = np.full(scales.shape, 2 ** (bits - 1))
    else:
        low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
        scales = ((high - low) / top).astype(np.float16)
        zeros = np.clip(np.round(-low / scales.astype(np.float32)), 0, top).astype(np.int64)
    codes = np.clip(np.round(groups / scales[..., None].astype(np.float32)) + zeros[..., None], 0, top)
    return codes.astype(np.int64).reshape(w.shape), scales, zeros


def _decoded(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Returns `(code - zero) * scale` with the group of each input."""
    return (codes - zeros[:, group]).astype(np.float32) * scales.astype(np.float32)[:, group]


def gptq(stem: str, w: np.ndarray, bits: int = 4, group: int = 32, symmetric: bool = False, act: bool = False,
         v2: bool = False) -> tuple[Tensors, np.ndarray]:
    K = w.shape[1]
    group = K if group == -1 else group
    # With act-order inputs are sorted by importance, groups are formed in that order, and codes are stored in the old.
    order = np.random.default_rng(len(stem)).permutation(K) if act else np.arange(K)
    codes, scales, zeros = _rounded(w[:, order], bits, group, symmetric)
    index = np.empty(K, np.int32)
    index[order] = np.arange(K) // group
    codes = codes[:, np.argsort(order)]
    kept = zeros if v2 else (zeros - 1) % 2 ** bits
    return {f"{stem}.qweight": dense(codes, bits).T, f"{stem}.qzeros": dense(kept.T, bits),
            f"{stem}.scales": scales.T, f"{stem}.g_idx": index}, _decoded(codes, scales, zeros, index)


def awq(stem: str, w: np.ndarray, group: int = 32) -> tuple[Tensors, np.ndarray]:
    codes, scales, zeros = _rounded(w, 4, group, False)
    shuffled = lambda x: dense(x.reshape(len(x), -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]].reshape(x.shape), 4)
    return {f"{stem}.qweight": shuffled(codes.T), f"{stem}.qzeros": shuffled(zeros.T), f"{stem}.scales": scales.T}, \
        _decoded(codes, scales, zeros, np.arange(w.shape[1]) // group)


def packed(stem: str, w: np.ndarray, bits: int = 4, group: int = 32, symmetric: bool = True
           ) -> tuple[Tensors, np.ndarray]:
    codes, scales, zeros = _rounded(w, bits, group, symmetric)
    scales = scales.astype(jnp.bfloat16)
    made = {f"{stem}.weight_packed": dense(codes, bits), f"{stem}.weight_scale": scales,
            f"{stem}.weight_shape": np.array(w.shape)}
    if not symmetric:
        made[f"{stem}.weight_zero_point"] = dense(zeros.T, bits).T
    return made, _decoded(codes, scales, zeros, np.arange(w.shape[1]) // group)


LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
"""The codes of a 4-bit float without their sign."""


def _float4(groups: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bytes of the nearest codes, two consecutive inputs in each, and the weights that they stand for."""
    scaled = groups / scales[..., None]
    codes = np.abs(np.abs(scaled)[..., None] - LEVELS).argmin(-1)
    decoded = np.sign(scaled) * LEVELS[codes] * scales[..., None]
    both = (codes | (scaled < 0) * 8).reshape(len(groups), -1, 2)
    return (both[..., 0] | both[..., 1] << 4).astype(np.uint8), decoded.reshape(len(groups), -1).astype(np.float32)


def mxfp4(stem: str, w: np.ndarray) -> tuple[Tensors, np.ndarray]:
    """Floats of 4 bits, with a power of two for 32 consecutive inputs, which the largest of them determines."""
    groups = w.reshape(len(w), -1, 32)
    exponents = np.floor(np.log2(np.abs(groups).max(-1))).astype(np.int64) - 2
    codes, decoded = _float4(groups, 2.0 ** exponents)
    return {f"{stem}.weight_packed": codes, f"{stem}.weight_scale": (exponents + 127).astype(np.uint8)}, decoded


def nvfp4(stem: str, w: np.ndarray, optimizer: bool = False) -> tuple[Tensors, np.ndarray]:
    """Floats of 4 bits, with one of 8 bits for 16 consecutive inputs and a number of the layer, by which compressed-
    tensors divides and NVIDIA's Model Optimizer multiplies."""
    groups = w.reshape(len(w), -1, 16)
    factor = np.float32(np.abs(w).max() / (6 * 448))
    scales = (np.abs(groups).max(-1) / (6 * factor)).astype(jnp.float8_e4m3fn)
    kept = factor if optimizer else 1 / factor
    codes, decoded = _float4(groups, scales.astype(np.float32) * (kept if optimizer else 1 / kept))
    names = ("weight", "weight_scale_2", "input_scale") if optimizer else (
        "weight_packed", "weight_global_scale", "input_global_scale")
    return {f"{stem}.{names[0]}": codes, f"{stem}.weight_scale": scales,
            **{f"{stem}.{name}": np.full(() if optimizer else (1,), kept, np.float32) for name in names[1:]}}, decoded


def mxfp8(stem: str, w: np.ndarray) -> tuple[Tensors, np.ndarray]:
    """Floats of 8 bits, with a power of two for 32 consecutive inputs."""
    groups = w.reshape(len(w), -1, 32)
    exponents = np.ceil(np.log2(np.abs(groups).max(-1) / 448)).astype(np.int64)
    codes = (groups / 2.0 ** exponents[..., None]).astype(jnp.float8_e4m3fn)
    return {f"{stem}.weight": codes.reshape(w.shape), f"{stem}.weight_scale": (exponents + 127).astype(np.uint8)}, (
        codes.astype(np.float32) * 2.0 ** exponents[..., None]).reshape(w.shape).astype(np.float32)


def int8(stem: str, w: np.ndarray, tail: str = "weight_scale") -> tuple[Tensors, np.ndarray]:
    largest = np.abs(w).max(-1, keepdims=True)
    scales = (largest / 127).astype(jnp.bfloat16) if tail == "weight_scale" else largest[:, 0].astype(np.float32)
    own = scales.reshape(-1, 1).astype(np.float32) / (1 if tail == "weight_scale" else 127)
    codes = np.clip(np.round(w / own), -128, 127).astype(np.int8)
    return {f"{stem}.weight": codes, f"{stem}.{tail}": scales}, codes.astype(np.float32) * own


def float8(stem: str, w: np.ndarray, block: tuple[int, int] | None, tail: str, dtype: Any = np.float32
           ) -> tuple[Tensors, np.ndarray]:
    """Blocks, or one scale for each output where a block has all inputs; None: one scale."""
    rows, columns = block or w.shape
    at = np.arange(w.shape[0])[:, None] // rows, np.arange(w.shape[1])[None] // columns
    scales = np.zeros((at[0].max() + 1, at[1].max() + 1), np.float32)
    np.maximum.at(scales, np.broadcast_arrays(*at), np.abs(w))
    scales = (scales / 448).astype(dtype)
    codes = (w / scales.astype(np.float32)[at]).astype(jnp.float8_e4m3fn)
    return {f"{stem}.weight": codes, f"{stem}.{tail}": scales if block else scales.reshape(())}, \
        codes.astype(np.float32) * scales.astype(np.float32)[at]


NF4 = np.array([-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
                -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
                0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023,
                1.0], np.float32)


def nf4(stem: str, w: np.ndarray, double: bool) -> tuple[Tensors, np.ndarray]:
    """Blocks of 64 of the flattened weights."""
    flat = np.pad(w.reshape(-1), (0, -w.size % 64)).reshape(-1, 64)
    absmax = np.abs(flat).max(-1).astype(np.float32)
    name, state = f"{stem}.weight", {"quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": w.shape}
    made = {f"{name}.absmax": absmax, f"{name}.quant_map": NF4}
    if double:
        offset = absmax.mean()
        padded = np.pad(absmax - offset, (0, -len(absmax) % 256)).reshape(-1, 256)
        outer = np.abs(padded).max(-1)
        table = np.linspace(-1, 1, 256, dtype=np.float32)
        inner = np.abs((padded / outer[:, None])[..., None] - table).argmin(-1).reshape(-1)[:len(absmax)]
        absmax = table[inner] * np.repeat(outer, 256)[:len(absmax)] + offset
        made |= {f"{name}.absmax": inner.astype(np.uint8), f"{name}.nested_absmax": outer,
                 f"{name}.nested_quant_map": table}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(offset)}
    codes = np.abs((flat / absmax[:, None])[..., None] - NF4).argmin(-1)
    own = codes.reshape(-1)[:w.size]
    made[name] = (own[::2] << 4 | own[1::2]).astype(np.uint8)[:, None]
    made[f"{name}.quant_state.bitsandbytes__nf4"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    return made, (NF4[codes] * absmax[:, None]).reshape(-1)[:w.size].reshape(w.shape)


def _groups(kind: str, **weights: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": kind, "ignore": ["lm_head"], "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": weights}}}


Writer = Callable[[str, np.ndarray], tuple[Tensors, np.ndarray]]

KINDS: dict[str, tuple[dict[str, Any], Writer]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}, gptq),
    "gptq-sym": ({"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": False, "sym": True},
                 lambda stem, w: gptq(stem, w, group=-1, symmetric=True)),
    "gptq-act-order": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False},
                       lambda stem, w: gptq(stem, w, act=True)),
    "gptq-v2": ({"quant_method": "gptq", "bits": 4, "group_size": 16, "checkpoint_format": "gptq_v2"},
                lambda stem, w: gptq(stem, w, group=16, v2=True)),
    "gptq-8": ({"quant_method": "gptq", "bits": 8, "group_size": 32, "desc_act": True},
               lambda stem, w: gptq(stem, w, bits=8, act=True)),
    "gptq-3": ({"quant_method": "gptq", "bits": 3, "group_size": 32}, lambda stem, w: gptq(stem, w, bits=3)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}, awq),
    "w4a16": (_groups("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, symmetric=True),
              packed),
    "w4a16-asym": (_groups("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, symmetric=False),
                   lambda stem, w: packed(stem, w, symmetric=False)),
    "w8a16": (_groups("pack-quantized", num_bits=8, type="int", strategy="group", group_size=32, symmetric=True),
              lambda stem, w: packed(stem, w, bits=8)),
    "mxfp4": (_groups("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32,
                      symmetric=True, scale_dtype="torch.uint8"), mxfp4),
    "nvfp4": (_groups("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16,
                      symmetric=True, scale_dtype="torch.float8_e4m3fn"), nvfp4),
    "mxfp8": (_groups("mxfp8-quantized", num_bits=8, type="float", strategy="group", group_size=32, symmetric=True,
                      scale_dtype="torch.uint8"), mxfp8),
    "modelopt-nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"], "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "group_size": 16}}}},
        lambda stem, w: nvfp4(stem, w, optimizer=True)),
    "modelopt-fp8": ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
                     lambda stem, w: float8(stem, w, None, "weight_scale")),
    "w8a8": (_groups("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=True), int8),
    "fp8-channel": (_groups("float-quantized", num_bits=8, type="float", strategy="channel", symmetric=True),
                    lambda stem, w: float8(stem, w, (1, w.shape[1]), "weight_scale", jnp.bfloat16)),
    "fp8-tensor": (_groups("float-quantized", num_bits=8, type="float", strategy="tensor", symmetric=True),
                   lambda stem, w: float8(stem, w, None, "weight_scale")),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [40, 24], "activation_scheme": "dynamic", "fmt": "e4m3"},
            lambda stem, w: float8(stem, w, (40, 24), "weight_scale_inv")),
    "fbgemm": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
               lambda stem, w: float8(stem, w, (1, w.shape[1]), "weight_scale")),
    "bnb-8": ({"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False},
              lambda stem, w: int8(stem, w, "SCB")),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
            lambda stem, w: nf4(stem, w, False)),
    "nf4-double": ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
                    "bnb_4bit_use_double_quant": True}, lambda stem, w: nf4(stem, w, True)),
}
"""The entry `quantization_config` and the writer of a layer, by kind."""


@dataclasses.dataclass(frozen=True)
class Written:
    """A quantised checkpoint and one of floats with the same weights.

    Attributes:
        quantised, plain: the directories.
        weights: the dequantised weights by layer.
    """

    quantised: Path
    plain: Path
    weights: dict[str, np.ndarray]

    def tensors(self) -> Tensors:
        return _read(self.quantised / "model.safetensors")

    def rewrite(self, change: Callable[[Tensors], Any]) -> None:
        """Changes the tensors of the quantised checkpoint."""
        tensors = self.tensors()
        change(tensors)
        write_safetensors(self.quantised / "model.safetensors", tensors)


def _read(path: Path) -> Tensors:
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    kinds = {form: jnp.dtype(name) for name, form in NAMES.items()}
    return {name: np.frombuffer(raw[8 + size:][slice(*entry["data_offsets"])], kinds[entry["dtype"]]).reshape(
        entry["shape"]).copy() for name, entry in json.loads(raw[8:8 + size]).items()}


def write_checkpoint(root: Path, kind: str, entries: dict[str, Any], left: tuple[str, ...] = ()) -> Written:
    """Writes a network with random weights, whose layers of attention, MLP and experts are quantised, except those with
    a part of `left` in their names."""
    model = Transformer(read_config(entries))
    save_model(root / "plain", model, model.init_params(jax.random.key(0)), entries, dtype="float16")
    tensors, made, weights = load_file(root / "plain" / "model.safetensors"), Tensors(), Tensors()
    config, writer = KINDS[kind]
    for name, value in tensors.items():
        stem = name.removesuffix(".weight")
        if value.ndim == 2 and any(part in name for part in ("attn.", "attention.", "mlp.")) and not any(
                part in name for part in ("mlp.gate.weight", *left)):
            own, weights[stem] = writer(stem, value.astype(np.float32))
            made |= own
        else:
            made[name] = value
    (root / "quantised").mkdir()
    write_safetensors(root / "quantised" / "model.safetensors", made)
    write_safetensors(root / "plain" / "model.safetensors", {name: weights.get(
        name.removesuffix(".weight"), value).astype(np.float32) for name, value in tensors.items()})
    entries = json.loads((root / "plain" / "config.json").read_text())
    (root / "quantised" / "config.json").write_text(json.dumps({**entries, "quantization_config": config}))
    return Written(root / "quantised", root / "plain", weights)
