"""Quamba2: post-training quantization of Mamba-2.

Source: Chiang, Chang, Frumkin, Wu, Abdelfattah and Marculescu, 2025, "Quamba2: A Robust and Scalable Post-training
Quantization Framework for Selective State Space Models". W8A8 and W4A8 quantize everything in a layer with scales
calibrated on texts: the inputs of its kernels, the gate, the inputs of the convolution, the time steps, the inputs `x`,
`B` and `C` of the recurrence, and its state between two tokens. Three methods make 8 bits enough for the recurrence:

- *Sorted and clustered channels.* Which channels and heads of `x` are large does not depend on the text. The channels
  of a head are sorted by their calibrated size, heads of similar profile are clustered, and then the channels of each
  cluster of heads; each cluster has its own scale. The weights are rearranged to that order.
- *State groups.* `B` and `C` have a scale for each of the `G` groups. The state has one for each cluster of channels
  and each of its `N` entries.
- *Rotation.* The residual stream and the input of the output projection are rotated by Hadamard matrices. They are
  merged into the weights, except the latter's, which is applied to activations.

Weights have 8 bits with one scale per projection (separate ones for `z`, `x`, `B`, `C` and `dt`), or 4 bits with one
scale per 128 inputs of an output. W4A16 has 4-bit weights in the rotated network and quantizes nothing else.

Clusters, scales and codes are those of the authors' code (enyac-group/Quamba, c474646) to the last bit on small arrays,
and results those of its Triton kernels within float16; its CUDA code was not run. Here channels are clustered by the
profiles of their own heads (the code divides some by those of others), and clusters are numbered by their first heads.
Rotations of widths that are no power of 2 take another Hadamard matrix for the rest; scales of embeddings are the
largest size of a row; activations between quantized places are float32. Not implemented: GPTQ, mixtures of W4A8 and
W4A16, Mamba-1, and the authors' checkpoints. The network with 8-bit states is `decodax.models.formats.rounded_mamba2`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from decodax.common.hadamard import rotation
from decodax.common.options import Count
from decodax.models.formats.format import ModelFormat
from decodax.models.formats.integers import InputsRotated, Integers, Static, nibbles, quarter
from decodax.models.formats.quamba2_scales import arranged, scale_of, scales_of, watched
from decodax.models.formats.rounded_mamba2 import QuantizedMamba2
from decodax.models.formats.scaled import Scaled
from decodax.models.names import flatten
from decodax.models.packed import Packed
from decodax.models.recurrent.mamba2 import Mamba2, Mamba2Config
from decodax.models.transformer import Weights
from decodax.models.weight_source import nested


@dataclasses.dataclass(frozen=True)
class Quamba2(ModelFormat):
    """A Mamba-2 with quantized weights and activations, as made by the authors' code without GPTQ.

    Attributes:
        weights: number of bits of the kernels, 8 or 4.
        activations: number of bits of activations and states, 8, or 16 (with 4-bit weights) for no quantization.
        heads: maximum number of clusters of heads in each of the `G` groups.
        channels: maximum number of clusters of channels in each cluster of heads.
        head: True quantizes the output head, too.
        table: True quantizes the embedding table, too.
    """

    weights: Literal[4, 8] = 8
    activations: Literal[8, 16] = 8
    heads: Count = 4
    channels: Count = 4
    head: bool = True
    table: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.weights, self.activations) not in ((8, 8), (4, 8), (4, 16)):
            raise ValueError(f"weights, activations: got {self.weights} and {self.activations} bits, takes 8 and 8, 4 "
                             "and 8, or 4 and 16")

    @property
    def data(self) -> bool:
        return self.activations == 8

    def convert(self, model: Any, params: Weights, tokens: np.ndarray | None,
                report: Callable[[float], None] = lambda done: None) -> tuple[Mamba2, Weights]:
        """Returns the quantized model and its weights.

        Args:
            model: a `Mamba2`.
            params: its weights.
            tokens: `i32[S, T]` of texts, one sequence per row; None unless activations have 8 bits.
            report: called with the share of the sequences that are done.

        Raises:
            ValueError: the model is not a Mamba-2, has biases of its projections, or has packed weights.
        """
        if type(model) is not Mamba2:
            raise ValueError(f"lm: got a {type(model).__name__}, {self} takes a Mamba2")
        c = model.config
        if c.bias:
            raise ValueError(f"lm: got projections with biases, {self} takes a model without")
        if self.weights == 4 and (c.width % 2 or c.inner % 2):
            raise ValueError(f"lm: got {c.width} and {c.inner} inputs, {self} takes even numbers, since two codes "
                             "share a byte")
        leaves = {path: np.asarray(jax.device_get(leaf), np.float64) for path, leaf in flatten(params).items()}
        leaves = fused(c, leaves)
        c = dataclasses.replace(c, tied=False)
        scales: list[dict[str, np.ndarray]] = [{} for _ in range(c.layers + 1)]
        if self.data:
            assert tokens is not None
            show = lambda first: lambda done: report((first + done) / 2)
            seen = watched(c, leaves, tokens, show(0))
            clusters = []
            for i in range(c.layers):
                order, own = arranged(seen[i]["mean"].reshape(c.groups, -1, c.head_dim), self.heads, self.channels)
                leaves |= reordered(c, leaves, i, order)
                clusters.append(own)
            seen = watched(c, leaves, tokens, show(1))
            scales = [scales_of(c, own, groups) for own, groups in zip(seen, [*clusters, None], strict=True)]
        made = self._packed(c, leaves, scales, model.dtype)
        kind: Any = QuantizedMamba2 if self.data else Mamba2
        return kind(c, dtype=model.dtype), nested(made)

    def _packed(self, c: Mamba2Config, leaves: dict[str, np.ndarray], scales: list[dict[str, np.ndarray]],
                dtype: str) -> dict[str, Any]:
        made: dict[str, Any] = {}
        float32 = lambda a: jnp.asarray(a, jnp.float32)
        for path, leaf in leaves.items():
            own = scales[int(path.split(".")[1])] if path.startswith("layers.") else scales[-1]
            name = path.split(".", 2)[-1]
            if path == "embed" and self.table:
                made[path] = _rows(leaf, self.weights)
            elif path == "lm_head.kernel" and self.head:
                made[path] = self.pack_kernel(leaf.T, own.get("head"))
            elif name == "in.kernel":
                made[path] = self.pack_kernel(leaf.T, own.get("in"), _sections(c), own.get("outs"))
            elif name == "out.kernel":
                # Rows are rotated when they are multiplied; the weights are rotated already.
                made[path] = InputsRotated(kernel=self.pack_kernel(leaf.T, own.get("out")))
            elif self.data and name in ("conv.taps", "conv.bias"):
                parts = np.split(leaf, np.cumsum([c.inner, c.groups * c.state]), -1)
                made[path] = float32(np.concatenate([_eight(part) for part in parts], -1))
            elif self.data and name in ("A_log", "D"):
                made[path] = float32(_eight(leaf))
            elif self.data and name == "dt_bias":
                made[path] = float32(leaf.astype(np.float16))
            else:
                made[path] = jnp.asarray(leaf, jnp.float32 if self.data and name != "embed" else dtype)
        for i, own in enumerate(scales[:-1]):
            if self.data:
                made |= {f"layers.{i}.grid.{name}": float32(own[name]) for name in ("into", "conv", "state")}
        return made

    def pack_kernel(self, w: np.ndarray, step: np.ndarray | None, sections: list[int] | None = None,
                outs: np.ndarray | None = None) -> Packed:
        """Returns the packed kernel of a projection.

        Args:
            w: `[N, K]`, its weights.
            step: quantization step of the inputs; None, with 4-bit weights only: they are not quantized.
            sections: sizes of groups of outputs that have separate scales, with 8-bit weights; None: one group.
            outs: quantization steps of the outputs, `[N]`; None: they are not quantized.
        """
        row = lambda a: jnp.asarray(a, jnp.float32).reshape(-1, 1)
        if self.weights == 4:
            codes, scales, groups = quarter(w, self.activations == 8)
            if step is None:
                return Scaled(codes=nibbles(codes, 0), scales=jnp.asarray(groups, jnp.float32))
            kernel = Integers(codes=nibbles(codes, 8), steps=None if groups is None else jnp.asarray(groups))
        else:
            parts = np.split(w.astype(np.float32), np.cumsum(sections or [len(w)])[:-1])
            each = [scale_of(np.abs(part).max()) for part in parts]
            kernel = Integers(codes=jnp.asarray(np.concatenate(
                [np.clip(np.round(part / s), -128, 127) for part, s in zip(parts, each, strict=True)]), jnp.int8))
            scales = np.concatenate([np.full(len(part), s, np.float32) for part, s in zip(parts, each, strict=True)])
        return Static(kernel=kernel, scales=row(scales), step=row(step), outs=None if outs is None else row(outs))


def _sections(c: Mamba2Config) -> list[int]:
    """Returns the numbers of outputs of the input projection: `z`, `x`, `B`, `C` and `dt`."""
    return [c.inner, c.inner, c.groups * c.state, c.groups * c.state, c.heads]


def _eight(w: np.ndarray) -> np.ndarray:
    """Rounds a tensor to 8 bits with one scale."""
    w = w.astype(np.float32)
    scale = scale_of(np.abs(w).max())
    return np.clip(np.round(w / scale), -128, 127) * scale


def _rows(w: np.ndarray, bits: int) -> Scaled:
    """Packs an embedding table with a scale per row."""
    most = np.abs(w).max(-1, keepdims=True)
    scales = np.where(most > 0, most, 1) / (127 if bits == 8 else 8)
    codes = np.clip(np.round(w / scales), -128 if bits == 8 else -8, 127 if bits == 8 else 7)
    own = jnp.asarray(codes, jnp.int8) if bits == 8 else nibbles(codes.astype(np.int32), 0)
    return Scaled(codes=own, scales=jnp.asarray(scales.astype(np.float16), jnp.float32))


def fused(c: Mamba2Config, leaves: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns an equivalent network with rotated residual stream, norm scales merged into kernels, and a separate
    output head.

    The output projections take rotated inputs (`rotate`).
    """
    stream, inner = rotation(c.width), rotation(c.inner)
    found = dict(leaves)
    if c.tied:
        found["lm_head.kernel"] = leaves["embed"].T
    found["lm_head.kernel"] = stream.T @ (leaves["norm"][:, None] * found["lm_head.kernel"])
    found["embed"], found["norm"] = leaves["embed"] @ stream, np.ones_like(leaves["norm"])
    for i in range(c.layers):
        path = f"layers.{i}"
        found[f"{path}.in.kernel"] = stream.T @ (leaves[f"{path}.norm"][:, None] * leaves[f"{path}.in.kernel"])
        found[f"{path}.norm"] = np.ones_like(leaves[f"{path}.norm"])
        found[f"{path}.out.kernel"] = inner.T @ leaves[f"{path}.out.kernel"] @ stream
    return found


def reordered(c: Mamba2Config, leaves: Mapping[str, np.ndarray], layer: int, order: np.ndarray
              ) -> dict[str, np.ndarray]:
    """Returns a layer's weights with its channels and heads in another order.

    Args:
        c: the configuration.
        leaves: weights by dotted path.
        layer: index of the layer.
        order: `i64[G, H / G, P]`, the old index of the channel at each new place.
    """
    path, channels = f"layers.{layer}", order.reshape(-1)
    heads = channels.reshape(c.heads, c.head_dim)[:, 0] // c.head_dim
    rest = np.arange(c.inner, c.channels)
    conv, into = np.concatenate([channels, rest]), c.inner + c.channels
    own = lambda name: leaves[f"{path}.{name}"]
    inner = rotation(c.inner)
    found = {"in.kernel": own("in.kernel")[:, np.concatenate([channels, c.inner + conv, into + heads])],
             "conv.taps": own("conv.taps")[..., conv], "gated_norm": own("gated_norm")[channels],
             **{name: own(name)[heads] for name in ("A_log", "D", "dt_bias")},
             # Rotated in the new order.
             "out.kernel": inner.T @ (inner @ own("out.kernel"))[channels]}
    if c.conv_bias:
        found["conv.bias"] = own("conv.bias")[conv]
    return {f"{path}.{name}": leaf for name, leaf in found.items()}
