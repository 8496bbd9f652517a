"""Weights that a GGUF file stores in another form than a kernel's rows in the network's order.

llama.cpp's converter writes the decays of recurrent layers as `-exp(A_log)`, convolutions without their middle axis,
and, for Qwen3.5, heads of values in an order by which they are repeated instead of grouped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from decodax.models.blocks.options import Layer
from decodax.models.config import DecoderConfig

Order = Callable[[DecoderConfig, Layer], np.ndarray]
"""Returns the indices in a file, in the network's order."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """The place and form of a weight in a file.

    Attributes:
        name: name of the tensor within the layer, or of an entry of the metadata with a number for each layer.
        of: the weights whose rows the tensor has, in its order, by their paths within a layer, or whole paths outside
            of layers; empty: this one alone.
        turn: makes the weight of the tensor's numbers `f32[rows, entries]`, by the configuration; None: they are it.
        rows, columns: order of the rows, and of the entries of a row; None: the network's.
        entry: True if `name` is that of an entry.
        older: the form in files without this tensor, which other converters wrote; None: there are none.
    """

    name: str
    of: tuple[str, ...] = ()
    turn: Callable[[np.ndarray, DecoderConfig], np.ndarray] | None = None
    rows: Order | None = None
    columns: Order | None = None
    entry: bool = False
    older: Stored | None = None


def taps(x: np.ndarray, config: DecoderConfig) -> np.ndarray:
    """Returns the weights of a convolution, `f32[K, 1, channels]`, from `f32[channels, K]`."""
    return x.T[:, None]


def rates(x: np.ndarray, config: DecoderConfig) -> np.ndarray:
    """Returns the weights `A_log` of a recurrence from the numbers `x` of a file, which are `-exp(A_log)`."""
    return np.log(-x)


def tiled(wide: bool) -> Order:
    """Returns the order of heads of values that are repeated in the file: one for each head of keys, then the next.
    `wide` is True for a row, or entry, for each channel of a head, False for one for each head."""
    def order(config: DecoderConfig, layer: Layer) -> np.ndarray:
        rule: Any = layer.recurrent
        size = rule.value_dim if wide else 1
        heads = np.arange(rule.value_heads).reshape(-1, rule.key_heads).T.ravel()
        return (heads[:, None] * size + np.arange(size)).ravel()

    return order


def halves(second: bool) -> Order:
    """Returns the rows of queries, or of the output gates that follow those of each head."""
    def order(config: DecoderConfig, layer: Layer) -> np.ndarray:
        width = config.head_dim
        return (np.arange(config.heads)[:, None] * 2 * width + width * second + np.arange(width)).ravel()

    return order


def rates_of_keys(second: bool) -> Order:
    """Returns the rows of `b`, or of `a`, where those of the values of one head of keys stand side by side."""
    def order(config: DecoderConfig, layer: Layer) -> np.ndarray:
        rule: Any = layer.recurrent
        each = rule.value_heads // rule.key_heads
        return (np.arange(rule.key_heads)[:, None] * 2 * each + each * second + np.arange(each)).ravel()

    return order


def expanded(x: np.ndarray, config: DecoderConfig) -> np.ndarray:
    """Returns rows of keys `f32[heads * plain, rank]` from `f32[heads * rank, plain]`."""
    heads = config.heads
    return x.reshape(heads, -1, x.shape[-1]).swapaxes(1, 2).reshape(heads * x.shape[-1], -1)


def of_heads(values: bool) -> Order:
    """Returns the order of rows for a tensor of multi-head latent attention in which each head has the rows of its keys
    and then those of its values. The order takes the keys' rows of all heads, or those of the values if `values`."""
    def order(config: DecoderConfig, layer: Layer) -> np.ndarray:
        assert layer.latent is not None
        keys = config.head_dim - layer.latent.shared(layer.rope)
        size = keys + layer.latent.value_width
        own = np.arange(keys, size) if values else np.arange(keys)
        return (np.arange(config.heads)[:, None] * size + own).ravel()

    return order


KEYS_AND_VALUES: dict[str, Stored] = {
    "attn.k_b.kernel": Stored("attn_k_b.weight", turn=expanded, older=Stored(
        "attn_kv_b.weight", rows=of_heads(False))),
    "attn.v_b.kernel": Stored("attn_v_b.weight", older=Stored("attn_kv_b.weight", rows=of_heads(True)))}
"""Keys and values of latent attention. Files from before llama.cpp multiplied queries with the keys' kernel have one
tensor for both."""

PARTS = ("z", "x", "b", "c", "dt")


def ssd(inside: str) -> dict[str, Stored]:
    """Returns the views of a block of Mamba-2, by path within a layer; `inside` is the block's."""
    into = tuple(f"{inside}.in_{part}.kernel" for part in PARTS)
    return {**{path: Stored("ssm_in.weight", into) for path in into},
            f"{inside}.conv_taps": Stored("ssm_conv1d.weight", turn=taps),
            f"{inside}.conv_bias": Stored("ssm_conv1d.bias"), f"{inside}.A_log": Stored("ssm_a", turn=rates),
            f"{inside}.D": Stored("ssm_d"), f"{inside}.dt_bias": Stored("ssm_dt.bias"),
            f"{inside}.y_scale": Stored("ssm_norm.weight"), f"{inside}.out.kernel": Stored("ssm_out.weight")}


SHORT: dict[str, Stored] = {
    **{f"attn.{x}.kernel": Stored("shortconv.in_proj.weight", tuple(f"attn.{y}.kernel" for y in "bcx")) for x in "bcx"},
    "attn.conv_taps": Stored("shortconv.conv.weight", turn=taps),
    "attn.out.kernel": Stored("shortconv.out_proj.weight")}
"""The gated short convolution of LFM2. Its attention has none of these paths."""

SCAN: dict[str, Stored] = {
    **{f"attn.in_{x}.kernel": Stored("ssm_in.weight", ("attn.in_x.kernel", "attn.in_z.kernel")) for x in "xz"},
    "attn.conv_taps": Stored("ssm_conv1d.weight", turn=taps), "attn.conv_bias": Stored("ssm_conv1d.bias"),
    "attn.low.kernel": Stored("ssm_x.weight"), "attn.dt.kernel": Stored("ssm_dt.weight"),
    "attn.dt.bias": Stored("ssm_dt.bias"), "attn.A_log": Stored("ssm_a", turn=rates), "attn.D": Stored("ssm_d"),
    **{f"attn.{x}_norm.scale": Stored(f"ssm_{x}_norm.weight") for x in ("dt", "b", "c")},
    "attn.out.kernel": Stored("ssm_out.weight")}
"""The selective scan of Jamba."""

QKV = tuple(f"attn.in_{x}.kernel" for x in "qkv")
TAPS = tuple(f"attn.{x}_taps" for x in "qkv")


def delta(repeated: bool) -> dict[str, Stored]:
    """Returns the views of the gated delta rule and of the attention beside it; `repeated` is True if heads of values
    are repeated in the file (Qwen3.5)."""
    one, wide = (tiled(False), tiled(True)) if repeated else (None, None)
    apart = {"a": Stored("ssm_alpha.weight", rows=one), "b": Stored("ssm_beta.weight", rows=one)}
    joined = {x: Stored("ssm_ba.weight", rows=rates_of_keys(x == "a")) for x in "ab"}
    small = {f"attn.in_{x}.kernel": stored for x, stored in (apart if repeated else joined).items()}
    return {**{path: Stored("attn_qkv.weight", QKV, rows=wide if path == QKV[2] else None) for path in QKV},
            **{path: Stored("ssm_conv1d.weight", TAPS, taps, wide if path == TAPS[2] else None) for path in TAPS},
            **small, "attn.in_z.kernel": Stored("attn_gate.weight", rows=wide),
            "attn.A_log": Stored("ssm_a", turn=rates, rows=one), "attn.dt_bias": Stored("ssm_dt.bias", rows=one),
            "attn.y_norm.scale": Stored("ssm_norm.weight"), "attn.out.kernel": Stored("ssm_out.weight", columns=wide),
            "attn.q.kernel": Stored("attn_q.weight", rows=halves(False)),
            "attn.gate.kernel": Stored("attn_q.weight", rows=halves(True))}


CHANNELS: dict[str, Stored] = {
    **{f"attn.in_{x}.kernel": Stored(f"attn_{x}.weight") for x in "qkv"},
    **{f"attn.{x}_taps": Stored(f"ssm_conv1d_{x}.weight", turn=taps) for x in "qkv"},
    **{f"attn.{ours}.kernel": Stored(f"{theirs}.weight") for ours, theirs in (
        ("in_b", "ssm_beta"), ("low_a", "ssm_f_a"), ("in_a", "ssm_f_b"), ("low_z", "ssm_g_a"), ("in_z", "ssm_g_b"),
        ("out", "attn_output"))},
    "attn.A_log": Stored("ssm_a", turn=rates), "attn.dt_bias": Stored("ssm_dt.bias"),
    "attn.y_norm.scale": Stored("ssm_norm.weight")}
"""The gated delta rule with a decay for each channel (Kimi Linear)."""

ALTUP = {f"streams.{ours}.{i}.kernel": Stored(
    f"{theirs}.weight", tuple(f"streams.{ours}.{j}.kernel" for j in range(3)))
    for ours, theirs in (("into", "altup_proj"), ("out", "altup_unembd_proj")) for i in range(3)}
"""The projections of Gemma 3n's residual streams, one tensor for all streams but the active one."""

XIELU = {f"mlp.act.{name}": Stored(f"xielu.{name}", entry=True) for name in ("alpha_p", "alpha_n", "beta", "eps")}
"""The parameters of the activation xIELU (Apertus)."""

__all__ = ["ALTUP", "CHANNELS", "KEYS_AND_VALUES", "SCAN", "SHORT", "XIELU", "Stored", "delta", "expanded", "ssd"]
