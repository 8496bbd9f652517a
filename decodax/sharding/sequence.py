"""Prefill of long prompts on several devices: a chain over slices of the text, and a pipeline over groups of layers.

Both are exact and yield the state of `decodax.core.drivers.prefill`. They rely on the host's asynchronous dispatch:
each device has its own queue and waits only for the arrays that are sent to it.

*Chain* ("KV-Runahead: Scalable Causal LLM Inference by Parallel Key-Value Cache Generation", Cho et al., 2024): device
`i` runs slice `i` of the text. In each layer device `i - 1` sends it the keys and values of all earlier slices; it
attends, appends its own and sends all of them on, so the last device ends up with the whole cache. Later slices attend
to more tokens, so they are shorter: `partition` finds the lengths with the least time to the first token.

*PrefillPipeline* ("Mnemosyne", Agrawal et al., 2024: sequence pipeline parallelism): each device has some of the
layers. A chunk of the text enters the first stage as soon as that stage has passed on the chunk before. `chunks` cuts
the text so that no chunk takes longer than a round may; later chunks are shorter, because they attend to more tokens
(adaptive chunking). The paper's third axis, a cache divided by positions, is `decodax.caches.context.context_parallel`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.cache import Dense
from decodax.core.state import State
from decodax.core.window import causal
from decodax.models.transformer import Transformer
from decodax.pallas_kernels.window_attention import window_attention

Cost = Callable[[int, int], float]
"""A function of the numbers of new and of cached tokens, which returns the seconds that a layer takes for them."""


@dataclasses.dataclass(frozen=True)
class LayerCost:
    """A model of the duration of one layer. Fit it to measured times, or derive it from the shape of a model and the
    speed of a device.

    Attributes:
        linear: seconds for each token.
        pair: seconds for each pair of a token and a token that it attends to.
        fixed: seconds for each call.

    >>> cost = LayerCost(linear=2.0, pair=1.0)
    >>> cost(2, 10)     # 2 tokens, which attend to 11 and 12 tokens
    27.0
    """

    linear: float
    pair: float
    fixed: float = 0.0

    def __call__(self, new: int, cached: int) -> float:
        return self.fixed + self.linear * new + self.pair * (new * cached + new * (new + 1) / 2)

    @classmethod
    def fit(cls, times: Mapping[tuple[int, int], float]) -> LayerCost:
        """Fits the cost to measured times by least squares; no coefficient is negative.

        Args:
            times: seconds by the number of new tokens and of cached tokens.

        Raises:
            ValueError: there are fewer than three times.

        >>> true = LayerCost(linear=2.0, pair=0.5, fixed=3.0)
        >>> found = LayerCost.fit({at: true(*at) for at in ((1, 0), (8, 0), (8, 64), (16, 32))})
        >>> round(found.linear, 6), round(found.pair, 6), round(found.fixed, 6)
        (2.0, 0.5, 3.0)
        """
        if len(times) < 3:
            raise ValueError(f"times: got {len(times)}, takes at least three")
        rows = np.array([(n, n * cached + n * (n + 1) / 2, 1.0) for n, cached in times])
        scale, wanted, kept = rows.max(0), np.array(list(times.values())), [0, 1, 2]
        while True:         # drop the most negative coefficient until none is negative
            found = np.linalg.lstsq(rows[:, kept] / scale[kept], wanted)[0]
            if len(kept) == 1 or (found > -1e-9 * abs(wanted).max()).all():
                parts = dict(zip(kept, np.maximum(found, 0) / scale[kept], strict=True))
                return cls(*(float(parts.get(i, 0.0)) for i in range(3)))
            kept.pop(int(found.argmin()))

    @classmethod
    def of(cls, model: Transformer, batch: int, flops: float, fixed: float = 0.0) -> LayerCost:
        """Returns the cost of a model's layers on a device.

        Args:
            model: the model.
            batch: the number of rows.
            flops: the device's operations per second.
            fixed: seconds for each call.
        """
        c = model.config
        weights = c.width * c.head_dim * (2 * c.heads + 2 * c.kv_heads) + c.width * c.mlp * (3 if c.gated else 2)
        return cls(2 * batch * weights / flops, 4 * batch * c.heads * c.head_dim / flops, fixed)


def chain_time(slices: Sequence[int], layers: int, cost: Cost, send: float = 0.0) -> float:
    """Returns the seconds until the last device of a chain has finished its last layer.

    Args:
        slices: the number of tokens of each device.
        layers: the number of layers.
        cost: the cost of a layer.
        send: seconds to send one token's keys and values of one layer.

    >>> chain_time([4, 4], 1, LayerCost(1.0, 0.0), send=0.5)
    10.0
    """
    ready = [0.0] * len(slices)
    starts = [0, *itertools.accumulate(slices)]
    for _ in range(layers):
        came = 0.0
        for i, size in enumerate(slices):
            # A device computes its own keys and values while those of the devices before it are on their way.
            ready[i] = max(ready[i], came) + cost(size, starts[i])
            came = ready[i] + send * starts[i + 1]
    return ready[-1]


def partition(tokens: int, devices: int, layers: int, cost: Cost, send: float = 0.0, unit: int = 1) -> list[int]:
    """Returns the lengths of the slices of a chain with the least time to the first token.

    It uses the search of KV-Runahead: borders move on a grid, which becomes finer around the best borders found.

    Args:
        tokens: the number of tokens of the text.
        devices: the number of slices.
        layers: the number of layers.
        cost: the cost of a layer.
        send: seconds to send one token's keys and values of one layer.
        unit: all lengths but the last are multiples of this.

    Raises:
        ValueError: there are fewer than `unit` tokens for each device.

    >>> partition(32, 2, 4, LayerCost(linear=1.0, pair=1.0))
    [22, 10]
    """
    if devices < 1 or tokens < devices * unit:
        raise ValueError(f"tokens: got {tokens} for {devices} devices, takes at least {unit} for each")
    lengths = lambda borders: [b - a for a, b in itertools.pairwise((0, *borders, tokens))]
    time = lambda borders: chain_time(lengths(borders), layers, cost, send)
    best = [tokens * i // devices // unit * unit for i in range(1, devices)]
    step = max(tokens // (2 * devices) // unit, 1) * unit
    while True:
        found = best
        # Also move all borders from one of them on together: the first slice then gains what later ones lose.
        for i, count, way in itertools.product(range(devices - 1), range(1, devices), (-step, step)):
            moved = [b + way if i <= j < i + count else b for j, b in enumerate(best)]
            if min(lengths(moved)) >= unit and time(moved) < time(found):
                found = moved
        if found is best and step == unit:
            return lengths(best)
        step = max(step // unit // 2, 1) * unit if found is best else step
        best = found


@dataclasses.dataclass(frozen=True)
class PartitionTable:
    """Partitions of texts of some lengths, interpolated to other lengths.

    This is KV-Runahead's table, which is filled once, from measured times or by `partition`, and used for each prompt.

    Attributes:
        known: the slices by the length of the text; all entries have the same number of slices.

    >>> table = PartitionTable({32: [20, 12], 64: [48, 16]})
    >>> table(48), table(64), table(10), table(128)
    ([33, 15], [48, 16], [6, 4], [96, 32])
    """

    known: Mapping[int, Sequence[int]]

    def __post_init__(self) -> None:
        if not self.known or len({len(slices) for slices in self.known.values()}) != 1 or any(
                sum(slices) != tokens or min(slices) < 1 for tokens, slices in self.known.items()):
            raise ValueError(f"known: got {dict(self.known)}, takes equally many slices for each length")

    def __call__(self, tokens: int) -> list[int]:
        """Returns the slices of a text.

        Their shares of the text are interpolated between the next shorter and the next longer known text; outside the
        known lengths the shares of the nearest one are used.

        Raises:
            ValueError: there are fewer tokens than slices.
        """
        lengths = sorted(self.known)
        shares = np.array([np.cumsum(self.known[n]) / n for n in lengths])
        if tokens < shares.shape[1]:
            raise ValueError(f"tokens: got {tokens} for {shares.shape[1]} devices, takes at least one for each")
        borders = [round(float(np.interp(tokens, lengths, share)) * tokens) for share in shares.T[:-1]]
        for i, border in enumerate(borders):        # every slice has at least one token
            before = borders[i - 1] if i else 0
            borders[i] = min(max(border, before + 1), tokens - (len(borders) - i))
        return [b - a for a, b in itertools.pairwise((0, *borders, tokens))]


def chunks(tokens: int, budget: float, layers: int, cost: Cost, sizes: Sequence[int]) -> list[int]:
    """Returns the lengths of the chunks of a text: each is the largest of `sizes` whose time in all layers is within
    `budget`, or the smallest of `sizes` if none is.

    Args:
        tokens: the number of tokens of the text.
        budget: the maximum seconds of a chunk.
        layers: the number of layers.
        cost: the cost of a layer.
        sizes: the lengths that chunks may have; the last chunk may be shorter.

    >>> chunks(40, 60.0, 1, LayerCost(linear=1.0, pair=0.25), (4, 8, 16))
    [16, 8, 4, 4, 4, 4]
    """
    if tokens < 0 or not sizes or min(sizes) < 1:
        raise ValueError(f"sizes: got {list(sizes)} for {tokens} tokens, takes positive numbers")
    found: list[int] = []
    while (left := tokens - sum(found)) > 0:
        fit = [n for n in sizes if layers * cost(n, sum(found)) <= budget]
        found.append(min(max(fit, default=min(sizes)), left))
    return found


@dataclasses.dataclass(frozen=True)
class PrefillChain:
    """A group of devices that each process one slice of a prompt (KV-Runahead).

    Attributes:
        model: the model; its cache is dense.
        devices: the devices in the order of their slices.
        weights: the model's weights on each device.
    """

    model: Transformer
    devices: tuple[Any, ...]
    weights: tuple[Any, ...]

    @classmethod
    def of(cls, model: Transformer, weights: Any, devices: Sequence[Any]) -> PrefillChain:
        """Returns a chain with the weights copied to each device."""
        return cls(model, tuple(devices), tuple(jax.device_put(weights, d) for d in devices))

    def prefill(self, s: State, slices: Sequence[int]) -> State:
        """Returns the state with its prompts in the cache, except the newest token of each prompt.

        Args:
            s: a state before prefill.
            slices: the number of tokens of each device; they add up to the longest prompt's tokens except the newest.

        Raises:
            ValueError: the cache is not a dense cache of tokens, or the slices do not fit.
        """
        _, total = _unread(s)
        if len(slices) != len(self.devices) or sum(slices) != total or min(slices, default=1) < 1:
            raise ValueError(f"slices: got {list(slices)}, takes {len(self.devices)} that add up to {total} tokens")
        starts = [0, *itertools.accumulate(slices)]
        place = list(zip(self.devices, self.weights, strict=True))
        tokens = [jax.device_put(s.tokens[:, a:b], d) for (a, b), d in zip(itertools.pairwise(starts), self.devices,
                                                                           strict=True)]
        x = [_embed(self.model, w, t, jnp.int32(a)) for (_, w), t, a in zip(place, tokens, starts, strict=False)]
        kept = []
        for layer in range(self.model.depth):
            before = None
            for i, (device, weights) in enumerate(place):
                before = None if before is None else jax.device_put(before, device)
                x[i], before = _sliced(self.model, layer, weights, x[i], before)
            kept.append(before)
        return _filled(s, kept, total)


@dataclasses.dataclass(frozen=True)
class PrefillPipeline:
    """A group of devices that each run some of the layers (sequence pipeline parallelism).

    Attributes:
        model: the model; its cache is dense.
        devices: the devices of the stages.
        borders: the first layer of each stage, and at the end the number of layers.
        weights: the weights of each stage on its device, with empty arrays in place of other layers' weights.
    """

    model: Transformer
    devices: tuple[Any, ...]
    borders: tuple[int, ...]
    weights: tuple[Any, ...]

    @classmethod
    def of(cls, model: Transformer, weights: Any, devices: Sequence[Any]) -> PrefillPipeline:
        """Returns a pipeline whose stages have the same number of layers, or numbers that differ by one."""
        stages = len(devices)
        if not 1 <= stages <= model.depth:
            raise ValueError(f"devices: got {stages}, takes 1 to {model.depth}, the number of layers")
        borders = tuple(model.depth * i // stages for i in range(stages + 1))
        placed = []
        for device, first, last in zip(devices, borders, borders[1:], strict=False):
            mine = {str(i) for i in range(first, last)}
            layers = {i: w if i in mine else jax.tree.map(lambda x: jnp.zeros(0, x.dtype), w)
                      for i, w in weights["layers"].items()}
            rest = weights if first == 0 else {
                name: w if name == "norm" else jax.tree.map(lambda x: jnp.zeros(0, x.dtype), w)
                for name, w in weights.items()}
            placed.append(jax.device_put({**rest, "layers": layers}, device))
        return cls(model, tuple(devices), borders, tuple(placed))

    def prefill(self, s: State, sizes: Sequence[int]) -> State:
        """Returns the state with its prompts in the cache, except the newest token of each prompt.

        Args:
            s: a state before prefill.
            sizes: the lengths of the chunks in order; they add up to the longest prompt's tokens except the newest.

        Raises:
            ValueError: the cache is not a dense cache of tokens, or the sizes do not fit.
        """
        empty, total = _unread(s)
        if sum(sizes) != total or min(sizes, default=1) < 1:
            raise ValueError(f"sizes: got {list(sizes)}, takes numbers that add up to {total} tokens")
        kv = [jax.device_put(tuple(jnp.zeros_like(x) for x in empty.kv[a:b]), d)
              for a, b, d in zip(self.borders, self.borders[1:], self.devices, strict=False)]
        for start, size in zip(itertools.accumulate(sizes, initial=0), sizes, strict=False):
            x = jax.device_put(s.tokens[:, start:start + size], self.devices[0])
            for i, (device, weights) in enumerate(zip(self.devices, self.weights, strict=True)):
                x, kv[i] = _stage(self.model, self.borders[i], weights, jax.device_put(x, device), kv[i],
                                  jnp.int32(start))
        return _filled(s, [layer for stage in kv for layer in stage], total)


def _unread(s: State) -> tuple[Dense, int]:
    """Returns the cache, and the number of tokens of the longest prompt without its newest token."""
    if not isinstance(s.cache, Dense) or s.cache.given is not None:
        raise ValueError(f"cache: got {type(s.cache).__name__}, takes a dense cache of tokens alone")
    return s.cache, max(int(s.prompt_length.max()) - 1, 0)


def _filled(s: State, kept: Sequence[Any], total: int) -> State:
    """Returns the state with the given keys and values of each layer, `f[B, G, total or more, d + e]`, in its cache;
    the cache keeps its placement."""
    cache, _ = _unread(s)
    kv = tuple(jax.device_put(_behind(jax.device_put(new[:, :, :total], old.sharding), old), old.sharding)
               for new, old in zip(kept, cache.kv, strict=True))
    return s.replace(cache=cache.replace(kv=kv, length=jnp.maximum(s.prompt_length - 1, 0)))


@jax.jit
def _behind(new: Array, old: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), 0, 2)


@functools.partial(jax.jit, static_argnums=0)
def _embed(model: Transformer, weights: Any, tokens: Array, start: Array) -> Array:
    cache = model.init_cache(tokens.shape[0], 0)
    return model.pieces(weights).embed(causal(tokens, jnp.broadcast_to(start, tokens.shape[:1])), cache)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _sliced(model: Transformer, layer: int, weights: Any, x: Array, before: Array | None) -> tuple[Array, Array]:
    """Runs a layer on a slice. `before` holds keys and values of earlier slices, `f[B, G, P, d + e]`. Returns the
    output, and `before` with the slice's own keys and values appended."""
    B, W, _ = x.shape
    P = 0 if before is None else before.shape[2]
    where = jnp.broadcast_to(jnp.arange(P + W, dtype=jnp.int32), (B, P + W))
    pieces = model.pieces(weights)

    def attend(layer: int, q: Array, k: Any, v: Any, **options: Any) -> tuple[Array, Any]:
        both = jnp.concatenate([k, v], -1).swapaxes(1, 2).astype(model.dtype)
        every = both if before is None else jnp.concatenate([before, both], 2)
        keys, values = jnp.split(every.swapaxes(1, 2), [k.shape[-1]], -1)
        seen = jnp.tril(jnp.ones((1, W, P + W), bool), P)
        return window_attention(q, keys, values, seen, where[:, P:], key_positions=where, **options), every

    more, every = pieces.attention(layer, x, where[:, P:], attend)
    x = x + more
    return x + pieces.mlp(layer, x), every


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(4,))
def _stage(model: Transformer, first: int, weights: Any, x: Array, kv: tuple[Array, ...],
           start: Array) -> tuple[Array, tuple[Array, ...]]:
    """Runs a chunk through the layers of a stage, whose cache is `kv`. `x` holds tokens in the first stage and hidden
    states in the others."""
    B, W = x.shape[:2]
    at = jnp.broadcast_to(start, (B,))
    window = causal(x if first == 0 else jnp.zeros((B, W), jnp.int32), at).replace(is_prefill=True)
    cache = Dense(kv=kv, length=at, widths=(model.config.head_dim,) * len(kv))
    pieces, entries = model.pieces(weights), []
    x = pieces.embed(window, model.init_cache(B, 0)) if first == 0 else x
    for i in range(len(kv)):

        def attend(layer: int, q: Array, k: Any, v: Any, **options: Any) -> tuple[Array, Any]:
            return cache.attend(layer - first, q, k, v, window, **options)

        more, entry = pieces.attention(first + i, x, window.positions, attend)
        x = x + more
        x = x + pieces.mlp(first + i, x)
        entries.append(entry)
    return x, cache.commit(entries, window.positions).kv
