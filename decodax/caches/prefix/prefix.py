"""Keys and values of texts outside of any batch: read once, edited, put together, and handed to `decodax.generate` as
`context=`.

- `read_prefix` reads a text.
- `edited` changes tokens of it and keeps what stands behind (Positional Integrity Encoding: "Let the Code LLM Edit
  Itself When You Edit the Code", He et al., 2024).
- `blended` puts texts together that were read apart, and computes a few of their tokens anew (CacheBlend: "CacheBlend:
  Fast Large Language Model Serving for RAG with Cached Knowledge Fusion", Yao et al., 2024). `matched` cuts a new text
  into what an old one has of it and what is new, so that the same serves a text that is like another one. With
  `score="kvshare"` tokens are chosen as the first stage of KVShare chooses them ("KVShare: An LLM Service System with
  Efficient and Effective Multi-Tenant KV Cache Reuse", Yang et al., 2025), and the result holds what its second stage
  goes on with (`decodax.caches.prefix.kvshare`).

A key that was rotated to position `a` is rotated to `b` by `b - a` more, since rotations add up.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.cache import dense
from decodax.cache.key_values import KVLayer
from decodax.caches.prefill.listening import Listening
from decodax.caches.rotation import moved
from decodax.caches.shapes import layers_of
from decodax.common.struct import short
from decodax.core.loaded import Loaded, network_of
from decodax.core.mesh import auto_region, on_mesh
from decodax.core.types import LayeredModel, Model
from decodax.core.window import causal
from decodax.pallas_kernels.window_attention import BLOCK as WALK
from decodax.pallas_kernels.window_attention import slot_weights, window_attention_lse

STEP = 64
"""Texts are padded to multiples of so many tokens, so that there are few programs."""


Score = Literal["cacheblend", "kvshare"]

ROUNDING = 64
"""Relative differences of values up to this number of units in the last place are rounding."""
P = ParamSpec("P")
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, eq=False)
class Reuse:
    """What is known of the tokens of a text that were computed in another one, in the layer where both were compared.

    Attributes:
        attention: `f32[T]`, the weights that each token received from all queries of the text, in the mean over heads.
        change: `f32[T]`, how far its value lies from the one that was reused, the sum of the absolute differences; 0:
            it was not reused, or has been computed anew.
    """

    __repr__ = short

    attention: np.ndarray
    change: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Prefix:
    """A text of `T` tokens with its keys and values.

    Attributes:
        tokens: ids. kv: `f[G, T, d + e]` of each layer. begin: the position to which the first key is rotated; 0 but
            for a part that was cut out of a longer text.
        reuse: of a text that `blended` put together by the score of KVShare; a part of it, an edit and a file have
            none.
    """

    __repr__ = short

    tokens: tuple[int, ...]
    kv: tuple[np.ndarray, ...]
    begin: int = 0
    reuse: Reuse | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def check(self, model: Model) -> None:
        """Raises ValueError where a model has other layers, or the text is a part that began elsewhere."""
        wanted = [(shape.heads, len(self), shape.both) for shape in layers_of(model)]
        if [x.shape for x in self.kv] != wanted:
            raise ValueError(f"context: got a prefix of {len(self.kv)} layers {self.kv[0].shape if self.kv else ()}, "
                             f"the model has {len(wanted)} of {wanted[0]}")
        if self.begin:
            raise ValueError("context: got a part of a prefix that began elsewhere; decodax.caches.blended moves it")

    def __getitem__(self, part: slice) -> Prefix:
        """A part of the text, for `blended`; its keys stay where they were read."""
        if not isinstance(part, slice) or part.step not in (None, 1):
            raise TypeError("prefix: takes a slice without steps")
        start, stop, _ = part.indices(len(self))
        stop = max(start, stop)
        return Prefix(self.tokens[start:stop], tuple(x[:, start:stop] for x in self.kv), self.begin + start)


def _on_its_mesh(fn: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """A function of a loaded model, in the context of the model's mesh."""
    @functools.wraps(fn)
    def there(lm: Any, *args: P.args, **options: P.kwargs) -> T:
        with on_mesh(lm.mesh if isinstance(lm, Loaded) else None):
            return fn(lm, *args, **options)

    return there


@_on_its_mesh
def read_prefix(lm: Any, text: Sequence[int], params: Any = None) -> Prefix:
    """Reads a text.

    Args:
        lm: what `decodax.load` gave, or a `Model` with its `params`. text: ids.

    Raises:
        ValueError: an empty text.
    """
    if not len(text):
        raise ValueError("text: got no tokens, takes at least one")
    model, weights = network_of(lm, params)
    kv = _read(model, layers_of(model), weights, _none(layers_of(model), model), 0, text)
    return Prefix(tuple(map(int, text)), kv)


@_on_its_mesh
def edited(lm: Any, prefix: Prefix, start: int, stop: int, new: Sequence[int], params: Any = None) -> Prefix:
    """The prefix with tokens `start` to `stop` replaced by others: these alone are computed, from what stands before
    them; keys behind are rotated to their new places. What stands behind does not see the change, so that the result
    comes near to that of reading the text anew.

    Raises:
        ValueError: an edit outside of the text, or that leaves nothing; or a model whose positions are not rotary.
    """
    if not 0 <= start <= stop <= len(prefix):
        raise ValueError(f"start, stop: got {start} to {stop}, takes a part of the {len(prefix)} tokens")
    tokens = (*prefix.tokens[:start], *map(int, new), *prefix.tokens[stop:])
    if not tokens:
        raise ValueError("new: got an edit that leaves no tokens")
    model, weights = network_of(lm, params)
    prefix.check(model)
    shapes = layers_of(model)
    kv = [x[:, :start] for x in prefix.kv]
    if len(new):
        kv = list(_read(model, shapes, weights, kv, start, new))
    behind = [_shifted(shape, x[:, stop:], start + len(new) - stop) for shape, x in zip(shapes, prefix.kv, strict=True)]
    return Prefix(tokens, tuple(np.concatenate(pair, 1) for pair in zip(kv, behind, strict=True)))


def matched(prefix: Prefix, text: Sequence[int], least: int = 8) -> list[Prefix | list[int]]:
    """A text as parts of a prefix that it has in common with it, in their order, and ids that are new, for `blended`.

    Args:
        least: tokens of a part that is worth it.
    """
    ids = [int(token) for token in text]
    parts: list[Prefix | list[int]] = []
    done = 0
    for match in difflib.SequenceMatcher(None, prefix.tokens, ids, autojunk=False).get_matching_blocks():
        if match.size < least and match.b < len(ids):
            continue
        if match.b > done:
            parts.append(ids[done:match.b])
        if match.size:
            parts.append(prefix[match.a:match.a + match.size])
        done = match.b + match.size
    return parts


@_on_its_mesh
def blended(lm: Any, parts: Sequence[Prefix | Sequence[int]], recompute: float = 0.15, check: int = 1,
            params: Any = None, score: Score = "cacheblend") -> Prefix:
    """A text put together from prefixes that were read apart, and from ids that nothing is known of.

    Keys are rotated to their new places. The layers up to `check` are computed for all tokens. There those that score
    highest are chosen; they and the new ids alone go through the layers behind, where they attend to all tokens before
    them. The first prefix is right as it is and keeps its place, but counts among the tokens to choose from, as in the
    code of CacheBlend's authors.

    Args:
        parts: in order. recompute: the share of the tokens that were read which are computed anew.
        check: the layer behind which tokens are chosen; the second one, as CacheBlend's authors have it.
        score: what the values of layer `check` say of a token. "cacheblend": the squares of their differences from
            those that were read. "kvshare": the sum of the absolute differences, times the attention that the token
            receives there from all queries of the text.

    Raises:
        ValueError: no tokens, numbers out of their range, or a model whose positions are not rotary or whose layers
            cannot be run one by one.
    """
    model, weights = network_of(lm, params)
    if not isinstance(model, LayeredModel):
        raise ValueError("lm: got a model whose layers cannot be run one by one")
    if not 0 <= recompute <= 1:
        raise ValueError(f"recompute: got {recompute}, takes a share from 0 to 1")
    if score not in ("cacheblend", "kvshare"):
        raise ValueError(f"score: got {score!r}, takes cacheblend or kvshare")
    if not 0 <= check < model.depth:
        raise ValueError(f"check: got {check}, takes one of {model.depth} layers")
    shapes, tokens, known, stored = layers_of(model), [], [], [[] for _ in layers_of(model)]  # type: ignore[var-annotated]
    for part in parts:
        old = isinstance(part, Prefix)
        ids = part.tokens if isinstance(part, Prefix) else [int(token) for token in part]
        for layer, shape in enumerate(shapes):
            if isinstance(part, Prefix):
                new = _shifted(shape, part.kv[layer], len(tokens) - part.begin)
            else:
                new = np.zeros((shape.heads, len(ids), shape.both), model_dtype(model))
            stored[layer].append(new)
        tokens += ids
        known += [old] * len(ids)
    if not tokens:
        raise ValueError("parts: got no tokens, takes at least one")
    n, pad = len(tokens), -len(tokens) % STEP
    kv = tuple(np.pad(np.concatenate(x, 1), ((0, 0), (0, pad), (0, 0)))[None] for x in stored)
    count = int(sum(known) * recompute) + n - sum(known)
    if count == 0 and score == "cacheblend":
        return Prefix(tuple(tokens), tuple(x[0, :, :n] for x in kv))
    made, reuse = _blend(model, check, count, score, weights, np.pad(np.array(tokens, np.int32), (0, pad))[None],
                         np.pad(np.array(known), (0, pad), constant_values=True)[None], kv, np.int32(n))
    return Prefix(tuple(tokens), tuple(np.asarray(x)[0, :, :n] for x in made),
                  reuse=None if reuse is None else Reuse(*(np.asarray(x)[0, :n] for x in reuse)))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _blend(model: LayeredModel, check: int, count: int, score: Score, *arrays: Any) -> Any:
    return auto_region(functools.partial(_blending, model, check, count, score), *arrays)


def _blending(model: LayeredModel, check: int, count: int, score: Score, params: Any, tokens: Array, known: Array,
              kv: tuple[Array, ...], length: Array) -> tuple[tuple[Array, ...], tuple[Array, Array] | None]:
    """Keys and values `f[1, G, N, d + e]` of each layer, and what `Reuse` has, `f32[1, N]`, by the score of KVShare."""
    network, N = model.pieces(params), tokens.shape[1]
    every = jnp.arange(N, dtype=jnp.int32)[None]
    live = every < length
    x = network.embed(causal(tokens, jnp.zeros(1, jnp.int32), live), Listening())
    made: list[Array] = []
    asked: list[tuple[Array, Array, dict[str, Any]]] = []

    def attend(held: Array | None, at: Array, layer: int, q: Array, k: Array, v: Array, **options: Any) -> Any:
        new = jnp.concatenate([k, v], -1)
        both = new.swapaxes(1, 2) if held is None else held.at[:, :, at[0]].set(new.swapaxes(1, 2)[0], mode="drop")
        made.append(both)
        whole = both.swapaxes(1, 2)
        seen = (every[:, None] <= at[:, :, None]) & live[:, None]
        seen |= (jnp.arange(N) == 0)[None, None]
        out, lse = window_attention_lse(q, whole[..., :k.shape[-1]], whole[..., k.shape[-1]:], seen, at,
                                        key_positions=every, **options)
        asked.append((q, lse, options))
        return out, ()

    for layer in range(check + 1):
        change, _ = network.attention(layer, x, every, functools.partial(attend, None, every))
        x = x + change
        x = x + network.mlp(layer, x)
    width = made[check].shape[-1] - _value_width(model, check)
    apart = (made[check] - kv[check])[..., width:].astype(jnp.float32)
    if score == "kvshare":
        change, size = jnp.abs(apart).sum((1, 3)), jnp.abs(made[check][..., width:].astype(jnp.float32)).sum((1, 3))
        # values that differ by rounding alone are not changed: a program of another shape may add in another order
        change = jnp.where(live & known & (change > ROUNDING * jnp.finfo(made[check].dtype).eps * size), change, 0)
        attention = _received(*asked[check], every, live, made[check], length)
        worth = attention * change
    else:
        worth = jnp.square(apart).sum((1, 3))
    worth = jnp.where(live, jnp.where(known, worth, jnp.inf), -1)
    at = jnp.sort(lax.top_k(worth, count)[1], -1).astype(jnp.int32)
    reuse = (attention, change.at[:, at[0]].set(0)) if score == "kvshare" else None
    if count == 0:
        return (*made, *kv[check + 1:]), reuse
    x = jnp.take_along_axis(x, at[..., None], 1)
    for layer in range(check + 1, model.depth):
        change, _ = network.attention(layer, x, at, functools.partial(attend, kv[layer], at))
        x = x + change
        x = x + network.mlp(layer, x)
    return tuple(made), reuse


def _received(q: Array, lse: Array, options: dict[str, Any], at: Array, live: Array, kv: Array,
              length: Array) -> Array:
    """`f32[1, N]`: the attention that each token receives from those that are `live`, in the mean over heads."""
    if options.get("bias") is not None or options.get("sinks") is not None:
        raise ValueError("score: kvshare goes by attention of queries to keys alone; takes a model without a bias or "
                         "sinks of its attention scores, or score='cacheblend'")
    some = {name: options[name] for name in ("scale", "sliding", "softcap") if name in options}
    weights = slot_weights(q, jnp.where(live[..., None], lse, jnp.inf), at, kv, length[None], causal=True, **some)
    return weights.sum(1) / q.shape[2]


def _value_width(model: Model, layer: int) -> int:
    shape = layers_of(model)[layer]
    return shape.both - shape.width


def model_dtype(model: Model) -> Any:
    """Of a model's cache."""
    return jax.eval_shape(lambda: model.with_cache(dense).init_cache(1, 8)).kv[0].dtype


def _none(shapes: Sequence[KVLayer], model: Model) -> list[np.ndarray]:
    return [np.zeros((shape.heads, 0, shape.both), model_dtype(model)) for shape in shapes]


def _shifted(shape: KVLayer, kv: np.ndarray, by: int) -> np.ndarray:
    """`f[G, n, d + e]` with keys that stand `by` positions behind where they stood."""
    if by == 0 or kv.shape[1] == 0:
        return kv
    if shape.rope is None:
        raise ValueError("prefix: takes a model with rotary positions in each layer, since keys are moved by turning "
                         "them")
    return np.asarray(_moved(shape, kv, np.int32(by)))


@functools.partial(jax.jit, static_argnums=(0,))
def _moved(shape: KVLayer, kv: Array, by: Array) -> Array:
    keys = moved(shape, kv[None, :, :, :shape.width].swapaxes(1, 2), jnp.full((1, kv.shape[1]), by, jnp.int32))
    return jnp.concatenate([keys.swapaxes(1, 2)[0], kv[..., shape.width:]], -1)


def _read(model: Model, shapes: Sequence[KVLayer], params: Any, kv: Sequence[np.ndarray], start: int,
          new: Sequence[int]) -> tuple[np.ndarray, ...]:
    """With the keys and values of new tokens behind the first `start`."""
    stop = start + len(new)
    tokens = np.zeros((1, -(-len(new) // STEP) * STEP), np.int32)
    tokens[0, :len(new)] = [int(token) for token in new]
    room = start + tokens.shape[1]
    block = STEP if room <= WALK else WALK
    room = -(-room // block) * block
    held = tuple(np.pad(x, ((0, 0), (0, room - x.shape[1]), (0, 0)))[None] for x in kv)
    found = _extended(model.with_cache(dense), params, held, tokens, np.int32(start), np.int32(stop))
    return tuple(np.asarray(x)[0, :, :stop] for x in found)


@functools.partial(jax.jit, static_argnums=(0,))
def _extended(model: Model, params: Any, kv: tuple[Array, ...], tokens: Array, start: Array,
              stop: Array) -> tuple[Array, ...]:
    def read(params: Any, kv: tuple[Array, ...], tokens: Array, start: Array, stop: Array) -> tuple[Array, ...]:
        cache = model.init_cache(1, kv[0].shape[2], params=params)
        cache = cache.take_over(kv, start[None])
        positions = start + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        window = causal(tokens, start[None], positions < stop).replace(certain=True)
        out = model.apply(params, window, cache)
        return cache.commit(out.entries, jnp.where(window.live, positions, -1)).kv      # type: ignore[attr-defined]

    return auto_region(read, params, kv, tokens, start, stop)
