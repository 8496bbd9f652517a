"""Keys and values of texts that are computed independently of a batch, for `decodax.generate(context=...)`.

`read_prefix` computes those of a text. `decodax.caches.prefix.pie` edits the text, and
`decodax.caches.prefix.cacheblend` joins texts that were prefilled separately. Both move keys: since rotations add up, a
key is moved from position `a` to position `b` by rotating it by `b - a` positions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.cache.dense import unpadded
from decodax.cache.key_values import KVLayer
from decodax.cache.prefix import Prefix
from decodax.caches.rotation import moved
from decodax.caches.shapes import layers_of
from decodax.core.capabilities import load_prefix
from decodax.core.loaded import Loaded, network_of
from decodax.core.mesh import auto_region, on_mesh
from decodax.core.types import Model
from decodax.core.window import causal
from decodax.pallas_kernels.window_attention import BLOCK as WALK

STEP = 64
"""Texts are padded to multiples of this length, so that few programs are compiled."""

P = ParamSpec("P")
T = TypeVar("T")


def check_layers(prefix: Prefix, model: Model) -> None:
    """Raises ValueError if the prefix does not fit the model's layers, or is a part of a longer text."""
    wanted = [(shape.heads, len(prefix), shape.both) for shape in layers_of(model)]
    if [x.shape for x in prefix.kv] != wanted:
        raise ValueError(f"context: got a prefix of {len(prefix.kv)} layers {prefix.kv[0].shape if prefix.kv else ()}, "
                         f"the model has {len(wanted)} of {wanted[0]}")
    if prefix.begin:
        raise ValueError("context: got a part of a prefix that began elsewhere; decodax.caches.blended moves it")


def on_model_mesh(fn: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Wraps a function whose first argument is a loaded model, so that it runs on the model's mesh."""
    @functools.wraps(fn)
    def there(lm: Any, *args: P.args, **options: P.kwargs) -> T:
        with on_mesh(lm.mesh if isinstance(lm, Loaded) else None):
            return fn(lm, *args, **options)

    return there


@on_model_mesh
def read_prefix(lm: Any, text: Sequence[int], params: Any = None) -> Prefix:
    """Computes the keys and values of a text.

    Args:
        lm: a result of `decodax.load`, or a `Model`.
        text: token ids.
        params: the weights of a bare `Model`.

    Raises:
        ValueError: the text is empty.
    """
    if not len(text):
        raise ValueError("text: got no tokens, takes at least one")
    model, weights = network_of(lm, params)
    shapes = layers_of(model)
    nothing = [np.zeros((shape.heads, 0, shape.both), model_dtype(model)) for shape in shapes]
    return Prefix(tuple(map(int, text)), extended(model, shapes, weights, nothing, 0, text))


def model_dtype(model: Model) -> Any:
    """Returns the dtype of a model's cache."""
    return jax.eval_shape(lambda: model.with_cache(unpadded).init_cache(1, 8)).kv[0].dtype


def shifted(shape: KVLayer, kv: np.ndarray, by: int) -> np.ndarray:
    """Moves the keys of `kv`, `f[G, n, d + e]`, by `by` positions."""
    if by == 0 or kv.shape[1] == 0:
        return kv
    if shape.rope is None:
        raise ValueError("prefix: takes a model with rotary positions in each layer, since keys are moved by rotating "
                         "them")
    return np.asarray(_moved(shape, kv, np.int32(by)))


@functools.partial(jax.jit, static_argnums=(0,))
def _moved(shape: KVLayer, kv: Array, by: Array) -> Array:
    keys = moved(shape, kv[None, :, :, :shape.width].swapaxes(1, 2), jnp.full((1, kv.shape[1]), by, jnp.int32))
    return jnp.concatenate([keys.swapaxes(1, 2)[0], kv[..., shape.width:]], -1)


def extended(model: Model, shapes: Sequence[KVLayer], params: Any, kv: Sequence[np.ndarray], start: int,
          new: Sequence[int]) -> tuple[np.ndarray, ...]:
    """Computes the keys and values of new tokens, and appends them to those of the tokens before.

    Args:
        model: the network.
        shapes: the `KVLayer` of each layer.
        params: the weights.
        kv: for each layer `f[G, start, d + e]`.
        start: number of tokens before the new ones.
        new: token ids.
    """
    stop = start + len(new)
    tokens = np.zeros((1, -(-len(new) // STEP) * STEP), np.int32)
    tokens[0, :len(new)] = [int(token) for token in new]
    room = start + tokens.shape[1]
    block = STEP if room <= WALK else WALK
    room = -(-room // block) * block
    held = tuple(np.pad(x, ((0, 0), (0, room - x.shape[1]), (0, 0)))[None] for x in kv)
    found = _extended(model.with_cache(unpadded), params, held, tokens, np.int32(start), np.int32(stop))
    return tuple(np.asarray(x)[0, :, :stop] for x in found)


@functools.partial(jax.jit, static_argnums=(0,))
def _extended(model: Model, params: Any, kv: tuple[Array, ...], tokens: Array, start: Array,
              stop: Array) -> tuple[Array, ...]:
    def read(params: Any, kv: tuple[Array, ...], tokens: Array, start: Array, stop: Array) -> tuple[Array, ...]:
        cache = model.init_cache(1, kv[0].shape[2], params=params)
        cache = load_prefix(cache, kv, start[None])
        positions = start + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        window = causal(tokens, start[None], positions < stop).replace(is_prefill=True)
        out = model.apply(params, window, cache)
        return cache.commit(out.entries, jnp.where(window.live, positions, -1)).kv      # type: ignore[attr-defined]

    return auto_region(read, params, kv, tokens, start, stop)
