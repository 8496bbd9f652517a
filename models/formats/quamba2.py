"""Quamba2: a Mamba-2 in few bits (Chiang, Chang, Frumkin, Wu, Abdelfattah and Marculescu, 2025, "Quamba2: A Robust and
Scalable Post-training Quantization Framework for Selective State Space Models").

W8A8 and W4A8 quantise everything in a layer with scales that texts have shown beforehand: the inputs of its kernels,
the gate, the inputs of the convolution, the time steps, the inputs `x`, `B` and `C` of the recurrence, and its state
between two tokens. What makes 8 bits enough for the recurrence:

- *Sorted and clustered channels.* Which channels and heads of `x` are large does not depend on the text. The channels
  of a head are sorted by their size on texts, heads of like profile are clustered, and then the channels of each
  cluster of heads; a cluster has a scale of its own. The weights are rearranged to that order.
- *State groups.* `B` and `C` have a scale for each of the `G` groups. The state has one for each cluster of channels
  and each of its `N` entries.
- *Rotation.* The residual stream and the input of the output projection are rotated by Hadamard matrices, which go into
  the weights, but for the latter's, which is applied to activations.

Weights have 8 bits with one scale a projection (and one each for `z`, `x`, `B`, `C` and `dt`), or 4 with one for each
128 inputs of an output. W4A16 is the 4-bit weights in the rotated network, and nothing else.

Scales, codes and rounding are those of the authors' code (enyac-group/Quamba), but for what docs/weights.md lists. A
state is rounded once a token as text is written, and not while a prompt is read, as there. That rounding is no linear
step, so windows walk their nodes one by one; what a node's state is depends on its ancestors alone, and drafts leave
the tokens as they are.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.axes import platform
from decodax.cache import Cache, ReadPrompt, Recurrent, Window, causal, take
from decodax.cache.recurrence import chained
from decodax.models.formats.format import ModelFormat
from decodax.models.formats.qserve import EXACT, hadamard
from decodax.models.formats.scaled import Scaled
from decodax.models.mamba2 import Mamba2, Mamba2Config, biased, convolved, gated, mixed, projected, steps
from decodax.models.names import flatten
from decodax.models.packed import Packed, dot, multiply
from decodax.models.t5 import nested
from decodax.models.transformer import Weights
from decodax.struct import struct

GROUP = 128
"""Inputs of an output that share a scale of 4-bit weights."""

LEAST = 1e-5
"""The smallest largest value that a scale is taken of."""


# Kernels


@struct
class Integers(Packed):
    """A kernel of 8-bit integers. Its products are of rows of integers from -128 to 127, and exact.

    Attributes:
        codes: `i8[N, K]`, the integers; or `u8[N, K // 2]`, 4-bit codes from -8 to 7 plus 8, of the first half of the
            inputs in the low bits and of the second half in the high bits.
        steps: `f16[N, groups]`: an integer is its code times the step of its group, rounded; None: the code.
    """

    codes: Array
    steps: Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        N, K = self.codes.shape
        return N, K * (2 if self.codes.dtype == jnp.uint8 else 1)

    def values(self, dtype: Any) -> Array:
        if self.codes.dtype != jnp.uint8:
            return self.codes.astype(dtype)
        codes = jnp.concatenate([self.codes & 15, self.codes >> 4], -1).astype(jnp.int32).astype(jnp.float32) - 8
        if self.steps is None:
            return codes.astype(dtype)
        N, K = self.shape
        each = codes.reshape(N, self.steps.shape[-1], -1) * self.steps.astype(jnp.float32)[..., None]
        return jnp.clip(jnp.round(each), -128, 127).reshape(N, K).astype(dtype)

    def product(self, x: Array, dtype: Any) -> Array:
        """`[R, N]` from `f[R, K]`; `dtype` may be int32."""
        if platform() != "cpu":
            return dot(x.astype(jnp.int8), self.values(jnp.int8), jnp.int32).astype(dtype)
        kernel, parts = self.values(jnp.float32), []        # XLA has no fast products of integers there
        for start in range(0, x.shape[1], EXACT):
            parts.append(dot(x[:, start:start + EXACT].astype(jnp.float32), kernel[:, start:start + EXACT],
                             jnp.float32))
        return functools.reduce(jnp.add, [part.astype(jnp.int32) for part in parts]).astype(dtype)


@struct
class Static(Packed):
    """A kernel of integers whose rows, and whose products where they go on in 8 bits, are quantised with scales that
    are known beforehand.

    Attributes:
        kernel: the integers. scales: `f32[N, 1]`, of an output's.
        step: `f32[1, 1]`, of the rows. outs: `f32[N, 1]`, of the products; None: they stay as they are.
    """

    kernel: Integers
    scales: Array
    step: Array
    outs: Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.kernel.shape

    def values(self, dtype: Any) -> Array:
        return (self.kernel.values(jnp.float32) * self.scales).astype(dtype)

    def product(self, x: Array, dtype: Any) -> Array:
        return self._scaled(x, dtype, self.kernel.product)

    def times(self, x: Array, dtype: Any) -> Array:
        return self._scaled(x, dtype, self.kernel.times)

    def rows(self, which: Array, dtype: Any) -> Array:
        return self.values(dtype)[which]

    def _scaled(self, x: Array, dtype: Any, multiply: Callable[[Array, Any], Array]) -> Array:
        found = multiply(codes_of(x.astype(jnp.float32), self.step), jnp.int32).astype(jnp.float32)
        if self.outs is None:
            return (found * (self.scales * self.step)[:, 0]).astype(dtype)
        codes = jnp.clip(jnp.round(found * (self.scales / self.outs * self.step)[:, 0]), -128, 127)
        return (codes * self.outs[:, 0]).astype(dtype)


@struct
class Rotated(Packed):
    """A kernel whose inputs are rotated before they are multiplied, see `rotate`."""

    kernel: Packed

    @property
    def shape(self) -> tuple[int, ...]:
        return self.kernel.shape

    def values(self, dtype: Any) -> Array:
        back = jnp.asarray(rotation(self.shape[-1]).T, jnp.float32)
        return (self.kernel.values(jnp.float32) @ back).astype(dtype)

    def product(self, x: Array, dtype: Any) -> Array:
        return self.kernel.product(rotate(x), dtype)

    def times(self, x: Array, dtype: Any) -> Array:
        return self.kernel.times(rotate(x), dtype)


def rotate(x: Array) -> Array:
    """`x @ rotation(K)` of rows `f[..., K]`, in float32, without the matrix.

    >>> rotate(jnp.array([[1.0, 3.0]])).round(3).tolist()
    [[2.828000068664551, -1.4140000343322754]]
    """
    K = x.shape[-1]
    core, many = _core(K)
    y = x.astype(jnp.float32).reshape(-1, many, len(core)) @ jnp.asarray(core, jnp.float32)
    width = many
    while width > 1:
        y = y.reshape(len(y), -1, 2, width // 2, len(core))
        y = jnp.stack([y[:, :, 0] + y[:, :, 1], y[:, :, 0] - y[:, :, 1]], 2)
        width //= 2
    return (y.reshape(x.shape) / jnp.float32(K ** 0.5)).astype(x.dtype)


def rotation(n: int) -> np.ndarray:
    """An orthogonal matrix `f64[n, n]`: Sylvester's Hadamard matrix, as far as `n` is a power of 2, times the smallest
    one of what is left (`hadamard`).

    Raises:
        ValueError: there is none here.
    """
    core, many = _core(n)
    while many > 1:
        core, many = np.kron([[1, 1], [1, -1]], core), many // 2
    return core / n ** 0.5


@functools.lru_cache(maxsize=16)
def _core(n: int) -> tuple[np.ndarray, int]:
    """The smallest Hadamard matrix of which doubling makes one of `n`, and the power of 2 between them."""
    size = n
    while size % 2 == 0:
        try:
            hadamard(size // 2)
        except ValueError:
            break
        size //= 2
    return np.round(hadamard(size) * size ** 0.5), n // size


def codes_of(x: Array, scale: Array) -> Array:
    """The 8-bit integers, as floats, of numbers with a scale: the nearest ones, from -128 to 127."""
    return jnp.clip(jnp.round(x / scale), -128, 127)


def quarter(w: np.ndarray, inner: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """4-bit weights `f16[N, K]`: codes from -8 to 7, a scale of each output `f32[N, 1]`, and steps `f16[N, groups]`.

    Up to 128 inputs an output has one scale, and codes from -7 to 7.

    Args:
        inner: as W4A8 has it: codes times steps, rounded, are 8-bit integers, which the output's scale belongs to. Else
            as W4A16: codes times steps are the weights, and the scales 1.
    """
    w = w.astype(np.float16)
    N, K = w.shape
    one = np.ones((N, 1), np.float32)
    if K <= GROUP:
        scales = np.abs(w).max(-1, keepdims=True) / np.float16(7)
        codes = np.clip(_rounded(w, scales), -7, 7)
        return (codes, scales.astype(np.float32), None) if inner else (codes, one, scales)
    size = math.gcd(GROUP, K)
    groups = w.reshape(N, K // size, size)
    found = (np.abs(groups).max(-1).astype(np.float32) * np.float32(2 / 15)).astype(np.float16)
    codes = np.clip(_rounded(groups, found[..., None]) + 8, 0, 15) - 8
    if not inner:
        return codes.reshape(N, K), one, found
    whole = (codes.astype(np.float16) * found[..., None]).reshape(N, K)
    scales = (np.abs(whole).max(-1, keepdims=True) / np.float16(127)).astype(np.float32)
    with np.errstate(invalid="ignore", divide="ignore"):
        fused = np.nan_to_num((found / scales).astype(np.float16), posinf=0)
    return codes.reshape(N, K), scales, fused


def _rounded(w: np.ndarray, scales: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.nan_to_num(np.round(w / scales), posinf=0, neginf=0).astype(np.int32)


def _nibbles(codes: np.ndarray, offset: int) -> Array:
    low, high = np.split((codes + offset).astype(np.uint8) & 15, 2, -1)
    return jnp.asarray(low | (high << 4))


# The network with 8-bit states


@struct
class Rounded(Recurrent):
    """States in 8 bits: of each layer a dict of "ring", `i8[B, R, C]`, and "state", `i8[B, H, N, P]`. While a prompt is
    read states are `f32[B, H, N, P]`: they are rounded behind it, wherever its chunks end."""

    def for_prompt(self) -> Rounded:
        wide = lambda own: {**own, "state": own["state"].astype(jnp.float32)}
        return self.replace(states=tuple(map(wide, self.states)))

    def settled(self, prompt: ReadPrompt) -> Rounded:
        grids = [prompt.params["layers"][str(i)]["grid"]["state"] for i in range(len(self.states))]
        near = lambda own, grid: {**own, "state": codes_of(own["state"], grid).astype(jnp.int8)}
        return self.replace(states=tuple(map(near, self.states, grids)))


@dataclasses.dataclass(frozen=True)
class QuantizedMamba2(Mamba2):
    """A Mamba-2 whose activations and states have 8 bits. Its layers' weights have a further dict "grid" of scales:
    "into" and "conv", `f32[channels]`, before and behind the convolution, and "state", `f32[H, N, P]`."""

    def init_cache(self, batch: int, capacity: int, *, params: Any = None, inputs: Any = None) -> Cache:
        self.no_inputs(inputs)
        c = self.config
        empty = lambda: {"ring": jnp.zeros((batch, c.conv - 1, c.channels), jnp.int8),
                         "state": jnp.zeros((batch, c.heads, c.state, c.head_dim), jnp.int8)}
        return Rounded(states=tuple(empty() for _ in range(c.layers)), length=jnp.zeros(batch, jnp.int32),
                       size=capacity)

    def abstract_params(self, dtype: jax.typing.DTypeLike = jnp.float32) -> Weights:
        c, shapes = self.config, super().abstract_params(dtype)
        shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
        grid = {"into": shape(c.channels), "conv": shape(c.channels), "state": shape(c.heads, c.state, c.head_dim)}
        return {**shapes, "layers": {i: {**layer, "grid": grid} for i, layer in shapes["layers"].items()}}

    def mixer(self, p: Weights, layer: int, x: Array, window: Window, cache: Any) -> tuple[Array, Any]:
        c, grid = self.config, p["grid"]["conv"]
        z, into, dt = projected(c, p, x)
        near = lambda y: codes_of(y, grid) * grid
        y, entry = scanned(c, p, layer, into, dt, lambda taps: convolved(c, p, taps, near), window, cache)
        y = gated(c, p["gated_norm"], y.reshape(z.shape), z).astype(x.dtype)
        return biased(multiply(y, p["out"]["kernel"]), p["out"]), entry

    def forward(self, params: Weights, tokens: Array) -> Array:
        """As of `Mamba2`: as a prompt is read, with states that are not rounded."""
        window = causal(tokens, jnp.zeros(len(tokens), jnp.int32)).replace(certain=True)
        cache: Any = self.init_cache(len(tokens), 0)
        return self.apply(params, window, cache.for_prompt()).logits()


def scanned(c: Mamba2Config, p: Weights, layer: int, into: Array, dt: Array,
            convolve: Callable[[Array], tuple[Array, Array, Array]], window: Window, cache: Any) -> tuple[Array, Any]:
    """Convolution and recurrence of a layer with rounded states: `f32[B, W, H, P]`, and the layer's entry.

    Args:
        into: `f[B, W, channels]`, multiples of the grid "into". dt: `f[B, W, H]`, before the bias.
        convolve: `x`, `B` and `C` of the inputs `[B, W, conv, channels]` that each node sees.
    """
    grid, D = p["grid"], p["D"][:, None]

    def wide(own: dict[str, Array]) -> Array:
        state = own["state"]
        return state * grid["state"] if state.dtype == jnp.int8 else state

    def kept(ring: Array, state: Array, own: dict[str, Array]) -> dict[str, Array]:
        if own["state"].dtype == jnp.int8:
            state = codes_of(state, grid["state"]).astype(jnp.int8)
        return {"ring": codes_of(ring, grid["into"]).astype(jnp.int8), "state": state}

    def inner(taps: Array, dt: Array) -> tuple[Array, ...]:
        u, B, C = convolve(taps)
        return u.reshape(*u.shape[:2], c.heads, c.head_dim), B, C, *steps(c, p, dt)

    def step(own: dict[str, Array], node: tuple[Array, Array]) -> tuple[dict[str, Array], Array]:
        whole = jnp.concatenate([own["ring"] * grid["into"], node[0][:, None]], 1)
        heads, B, C, dt, decay = (a[:, 0] for a in inner(whole[:, None], node[1][:, None]))
        B, C = (jnp.repeat(a, c.heads // c.groups, 1) for a in (B, C))                      # [B, H, N]
        state = wide(own) * jnp.exp(decay)[..., None, None] + B[..., None] * (heads * dt[..., None])[:, :, None]
        # read before it is rounded
        return kept(whole[:, 1:], state, own), jnp.einsum("bhn,bhnp->bhp", C, state) + heads * D

    def along(own: dict[str, Array], nodes: tuple[Array, Array], live: Array) -> tuple[dict[str, Array], Array]:
        order, rank = jnp.argsort(~live, 1, stable=True), jnp.maximum(jnp.cumsum(live, 1) - 1, 0)
        into, dt = (take(a, order) for a in nodes)          # live nodes first
        whole, W = jnp.concatenate([own["ring"] * grid["into"], into], 1), live.shape[1]
        taps = jnp.stack([whole[:, i:i + W] for i in range(c.conv)], 2)
        heads, B, C, dt, decay = inner(taps, dt)
        y, state = chained(wide(own), C, B, heads * dt[..., None], decay, take(live, order), c.chunk)
        ring = take(whole, live.sum(1)[:, None] + jnp.arange(c.conv - 1))
        return kept(ring, state, own), take(y + heads * D, rank)

    return cache.walk(layer, step, (into, dt), window, along)


# Quantising


@dataclasses.dataclass(frozen=True)
class Quamba2(ModelFormat):
    """A Mamba-2 in few bits, as the authors' code makes it without GPTQ.

    Attributes:
        weights: bits of the kernels, 8 or 4. activations: bits of all else, 8, or 16 (with 4-bit weights) for none.
        heads, channels: clusters of heads in each of the `G` groups, and of channels in each of those; no more than
            there are.
        head, table: whether the output head and the embedding table are quantised, too.
    """

    weights: Literal[4, 8] = 8
    activations: Literal[8, 16] = 8
    heads: int = 4
    channels: int = 4
    head: bool = True
    table: bool = True

    def __post_init__(self) -> None:
        if (self.weights, self.activations) not in ((8, 8), (4, 8), (4, 16)):
            raise ValueError(f"weights, activations: got {self.weights} and {self.activations} bits, takes 8 and 8, 4 "
                             "and 8, or 4 and 16")
        for name in ("heads", "channels"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, takes 1 or more")

    @property
    def data(self) -> bool:
        return self.activations == 8

    def convert(self, model: Any, params: Weights, tokens: np.ndarray | None,
                report: Callable[[float], None] = lambda done: None) -> tuple[Mamba2, Weights]:
        """The quantised model and its weights.

        Args:
            tokens: `i32[S, T]` of texts, one sequence a row; None without activations of 8 bits.
            report: called with the share of the sequences that are done.

        Raises:
            ValueError: no Mamba-2, one with biases of its projections, or packed weights.
        """
        if type(model) is not Mamba2:
            raise ValueError(f"lm: got a {type(model).__name__}, {self} takes a Mamba2")
        c = model.config
        if c.bias:
            raise ValueError(f"lm: has biases of its projections, {self} takes a model without")
        if self.weights == 4 and (c.width % 2 or c.inner % 2):
            raise ValueError(f"lm: has {c.width} and {c.inner} inputs, {self} takes even numbers: two codes lie in a "
                             "byte")
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
                made[path] = self._kernel(leaf.T, own.get("head"))
            elif name == "in.kernel":
                made[path] = self._kernel(leaf.T, own.get("in"), _sections(c), own.get("outs"))
            elif name == "out.kernel":
                # rows are rotated, and the weights were
                made[path] = Rotated(kernel=self._kernel(leaf.T, own.get("out")))
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

    def _kernel(self, w: np.ndarray, step: np.ndarray | None, sections: list[int] | None = None,
                outs: np.ndarray | None = None) -> Packed:
        """Of weights `[N, K]`, whose outputs are in `sections` with scales of their own."""
        row = lambda a: jnp.asarray(a, jnp.float32).reshape(-1, 1)
        if self.weights == 4:
            codes, scales, groups = quarter(w, self.activations == 8)
            if step is None:
                return Scaled(codes=_nibbles(codes, 0), scales=jnp.asarray(groups, jnp.float32))
            kernel = Integers(codes=_nibbles(codes, 8), steps=None if groups is None else jnp.asarray(groups))
        else:
            parts = np.split(w.astype(np.float32), np.cumsum(sections or [len(w)])[:-1])
            each = [_scale(np.abs(part).max()) for part in parts]
            kernel = Integers(codes=jnp.asarray(np.concatenate(
                [np.clip(np.round(part / s), -128, 127) for part, s in zip(parts, each, strict=True)]), jnp.int8))
            scales = np.concatenate([np.full(len(part), s, np.float32) for part, s in zip(parts, each, strict=True)])
        return Static(kernel=kernel, scales=row(scales), step=row(step), outs=None if outs is None else row(outs))


def _sections(c: Mamba2Config) -> list[int]:
    """The outputs of the input projection: `z`, `x`, `B`, `C` and `dt`."""
    return [c.inner, c.inner, c.groups * c.state, c.groups * c.state, c.heads]


def _scale(most: Any) -> Any:
    return np.maximum(most, LEAST).astype(np.float32) / np.float32(127)


def _eight(w: np.ndarray) -> np.ndarray:
    """A tensor rounded to 8 bits with one scale."""
    w = w.astype(np.float32)
    scale = _scale(np.abs(w).max())
    return np.clip(np.round(w / scale), -128, 127) * scale


def _rows(w: np.ndarray, bits: int) -> Scaled:
    """An embedding table with a scale a row."""
    most = np.abs(w).max(-1, keepdims=True)
    scales = np.where(most > 0, most, 1) / (127 if bits == 8 else 8)
    codes = np.clip(np.round(w / scales), -128 if bits == 8 else -8, 127 if bits == 8 else 7)
    own = jnp.asarray(codes, jnp.int8) if bits == 8 else _nibbles(codes.astype(np.int32), 0)
    return Scaled(codes=own, scales=jnp.asarray(scales.astype(np.float16), jnp.float32))


def fused(c: Mamba2Config, leaves: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same network with the scales of its norms in the kernels behind them, an output head of its own, and the
    residual stream rotated; the output projections take rotated inputs (`rotate`)."""
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
    """A layer's weights with channels and heads in another order: `order`, `i64[G, H / G, P]`, has each place's."""
    path, channels = f"layers.{layer}", order.reshape(-1)
    heads = channels.reshape(c.heads, c.head_dim)[:, 0] // c.head_dim
    rest = np.arange(c.inner, c.channels)
    conv, into = np.concatenate([channels, rest]), c.inner + c.channels
    own = lambda name: leaves[f"{path}.{name}"]
    inner = rotation(c.inner)
    found = {"in.kernel": own("in.kernel")[:, np.concatenate([channels, c.inner + conv, into + heads])],
             "conv.taps": own("conv.taps")[..., conv], "gated_norm": own("gated_norm")[channels],
             **{name: own(name)[heads] for name in ("A_log", "D", "dt_bias")},
             # rotated in the new order
             "out.kernel": inner.T @ (inner @ own("out.kernel"))[channels]}
    if c.conv_bias:
        found["conv.bias"] = own("conv.bias")[conv]
    return {f"{path}.{name}": leaf for name, leaf in found.items()}


def arranged(mean: np.ndarray, heads: int, channels: int) -> tuple[np.ndarray, np.ndarray]:
    """Sorts and clusters the channels of a layer.

    Args:
        mean: `f[G, H / G, P]`, the mean size of each channel. heads, channels: how many clusters at most.

    Returns:
        The channel of each place, `i64[G, H / G, P]`, and the number of its cluster, `i64[G, H / G, P]`.
    """
    G, H, P = mean.shape
    order = np.arange(mean.size).reshape(mean.shape)
    by_size = np.argsort(mean, -1, kind="stable")
    order, size = np.take_along_axis(order, by_size, -1), np.take_along_axis(mean, by_size, -1).astype(np.float32)
    size = size / np.maximum(np.linalg.norm(size, axis=-1, keepdims=True), np.finfo(np.float32).tiny)
    found, count = np.zeros(mean.shape, np.int64), 0
    for g in range(G):
        label = ward(size[g], min(heads, H))
        place = np.argsort(label, kind="stable")
        order[g], size[g], label = order[g][place], size[g][place], label[place]
        for each in range(label.max() + 1):
            own = label == each
            # sorted in each head, so clusters are intervals
            inside = np.maximum.accumulate(lloyd(size[g][own].T, min(channels, P)))
            found[g, own] = count + inside
            count += min(channels, P)
    return order, found


def ward(x: np.ndarray, count: int) -> np.ndarray:
    """Clusters rows `f[n, d]` by Ward's method: `i64[n]`, numbered in the order of their first rows."""
    clusters = [([i], row.astype(np.float64)) for i, row in enumerate(x)]
    while len(clusters) > count:
        mean, size = np.array([m for _, m in clusters]), np.array([len(i) for i, _ in clusters])
        grown = np.square(mean[:, None] - mean).sum(-1) * size[:, None] * size / (size[:, None] + size)
        grown[np.tril_indices(len(clusters))] = np.inf
        a, b = np.unravel_index(np.argmin(grown), grown.shape)
        rows = clusters[a][0] + clusters[b][0]
        clusters[a] = (rows, x[rows].astype(np.float64).mean(0))
        del clusters[b]
    label = np.empty(len(x), np.int64)
    for number, (rows, _) in enumerate(sorted(clusters, key=lambda each: min(each[0]))):
        label[rows] = number
    return label


def lloyd(x: np.ndarray, count: int) -> np.ndarray:
    """k-means of rows `f[n, d]` from evenly spaced ones: `i64[n]`."""
    x = x.astype(np.float64)
    centers = x[::max(1, len(x) // count)][:count].copy()
    label = np.full(len(x), -1)
    for _ in range(300):
        old, before = label, centers.copy()
        label = np.square(x[:, None] - centers).sum(-1).argmin(-1)
        if (label == old).all():
            break
        for i in range(len(centers)):
            if (label == i).any():
                centers[i] = x[label == i].mean(0)
        if np.square(centers - before).sum() <= 1e-4 * x.var(0).mean():
            label = np.square(x[:, None] - centers).sum(-1).argmin(-1)
            break
    return label


def scales_of(c: Mamba2Config, seen: Mapping[str, np.ndarray], clusters: np.ndarray | None) -> dict[str, np.ndarray]:
    """The scales of a layer's activations from what texts have shown (`watched`); of the head without `clusters`."""
    if clusters is None:
        return {"head": _scale(seen["head"])}
    wide = lambda names: np.concatenate([np.full(n, _scale(seen[name]), np.float32) for name, n in names])
    state = c.groups * c.state
    flat = clusters.reshape(-1)
    most, inner = np.zeros(flat.max() + 1), np.zeros((flat.max() + 1, c.state))
    np.maximum.at(most, flat, seen["x out"].reshape(-1))
    np.maximum.at(inner, flat, seen["state"].swapaxes(1, 2).reshape(-1, c.state))
    conv = np.concatenate([_scale(most)[flat], np.repeat(_scale(seen["B out"]), c.state),
                           np.repeat(_scale(seen["C out"]), c.state)])
    return {"in": _scale(seen["in"]), "out": _scale(seen["out"]), "conv": conv,
            "outs": wide([("z", c.inner), ("x", c.inner), ("B", state), ("C", state), ("dt", c.heads)]),
            "into": wide([("x", c.inner), ("B", state), ("C", state)]),
            "state": _scale(inner)[flat].reshape(c.heads, c.head_dim, c.state).swapaxes(1, 2)}


def watched(c: Mamba2Config, leaves: Mapping[str, np.ndarray], tokens: np.ndarray,
            report: Callable[[float], None] = lambda done: None) -> list[dict[str, np.ndarray]]:
    """What texts show of the network that `fused` makes, a dict a layer and one for the head: the largest sizes, and
    "mean", the largest of the sequences' mean sizes of each channel of `x`. Of states those behind a sequence."""
    params = nested({path: jnp.asarray(leaf, jnp.float32) for path, leaf in leaves.items()})
    model = _Watched(c)

    @jax.jit
    def one(params: Weights, row: Array) -> list[dict[str, Array]]:
        found: list[dict[str, Array]] = []
        window = causal(row, jnp.zeros(len(row), jnp.int32)).replace(certain=True)
        cache: Any = model.init_cache(len(row), 0)
        out = dataclasses.replace(model, found=_Found(found)).apply(params, window, cache)
        after = cache.commit(out.entries, window.positions)
        for own, state in zip(found, after.states, strict=True):
            own["state"] = jnp.abs(state).max(0)
        return [*found, {"head": jnp.abs(out.hidden).max()}]

    total: Any = None
    for i, row in enumerate(tokens):
        own = one(params, jnp.asarray(row[None], jnp.int32))
        total = own if total is None else jax.tree.map(jnp.maximum, total, own)
        report((i + 1) / len(tokens))
    return jax.tree.map(lambda a: np.asarray(a, np.float32), total)


class _Found:
    """A list that is equal to nothing else."""

    def __init__(self, found: list[dict[str, Array]]):
        self.found = found


@dataclasses.dataclass(frozen=True)
class _Watched(Mamba2):
    """A model that notes what its layers see, within one trace."""

    found: Any = None

    def mixer(self, p: Weights, layer: int, x: Array, window: Window, cache: Any) -> tuple[Array, Any]:
        c = self.config
        z, into, dt = projected(c, p, x)
        parts = jnp.split(into, [c.inner, c.inner + c.groups * c.state], -1)
        own = {"in": x, "z": z, "dt": dt, "x": parts[0], "B": parts[1], "C": parts[2]}
        found = {name: jnp.abs(a).max() for name, a in own.items()}

        def note(y: Array) -> Array:
            u, B, C = (jnp.abs(a) for a in jnp.split(y, [c.inner, c.inner + c.groups * c.state], -1))
            found.update({"x out": u.max((0, 1)), "mean": u.mean((0, 1))})
            for name, a in (("B out", B), ("C out", C)):
                found[name] = a.max((0, 1)).reshape(c.groups, -1).max(-1)
            return y

        def out(y: Array) -> Array:
            y = rotate(y)
            found["out"] = jnp.abs(y).max()
            return y

        made = mixed(c, p, layer, x, window, cache, note, out)
        self.found.found.append(found)
        return made
