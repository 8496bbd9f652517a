"""Layers that use the attention weights of another layer, with their own values.

Source: "EchoAtt: Attend, Copy, then Adjust for More Efficient Large Language Models", Rajabzadeh et al., 2024. The
first layer of a group attends for all of them: the values of all layers are concatenated to one wide head, so that keys
are scored and stored once. The values of the other layers for the tokens of a call are known only when these layers
run. Attention to the cache does not need them and is computed in the first layer's call. The rest is attention among
the tokens of the call, times their share of the total attention. A last column of the wide head measures that share: it
is 1 for tokens of the call, and 0 in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax.numpy as jnp
from jax import Array

from decodax.cache.entry import KVEntry
from decodax.models.config import DecoderConfig


class Near(Protocol):
    """A function that computes attention among the tokens of a call alone, from queries `f[B, W, H, d]`, keys `f[B, W,
    G, d]` and values `f[B, W, G, e]`."""

    def __call__(self, q: Array, k: Array, v: Array, **options: Any) -> Array: ...


def value_width(config: DecoderConfig, layer: int, wide: int | None) -> int | None:
    """Returns the number of channels that the cache stores as the value of a layer's key/value head: the values of all
    layers that use its attention weights, side by side, and one channel more. None for a layer used by no other, if
    `wide`, the width of one layer's values, is None: it equals that of keys."""
    members = config.group(layer)
    return wide if len(members) == 1 else (config.head_dim if wide is None else wide) * len(members) + 1


class Echoes:
    """The attention function of one call, for a network in which some layers use the attention weights of others. It
    must be called once for each layer, in order."""

    def __init__(self, config: DecoderConfig, attend: Any, near: Near):
        self.config, self.attend, self.near = config, attend, near
        self.place = {layer: i for i, layer in enumerate(config.own)}
        self.values: dict[int, list[Array]] = {}
        self.found: dict[int, tuple[Array, Array, Array, dict[str, Any]]] = {}

    def __call__(self, layer: int, q: Any, k: Any, v: Any, **options: Any) -> tuple[Array, Any]:
        """Attends as `Cache.attend` does. For layers that use the attention weights of others, `q` and `k` are None."""
        lead = self.config.layers[layer].echoes
        if lead is not None:
            self.values[lead].append(v)
            out, q, keys, given = self.found[lead]
            at, e = len(self.values[lead]) - 1, v.shape[-1]
            near = self.near(q, keys, v, **{**given, "sinks": None})      # the share has them
            return out[..., at * e:(at + 1) * e] + out[..., -1:] * near.astype(out.dtype), ()
        others = len(self.config.group(layer)) - 1
        if not others:
            return self.attend(self.place[layer], q, k, v, **options)
        rest = jnp.zeros((*v.shape[:-1], others * v.shape[-1]), v.dtype)
        out, entry = self.attend(self.place[layer], q, k, jnp.concatenate([v, rest, jnp.ones_like(v[..., :1])], -1),
                                 **options)
        self.values[layer], self.found[layer] = [v], (out, q, k, options)
        return out[..., :v.shape[-1]], entry

    def entries(self, entries: Sequence[Any]) -> list[Any]:
        """Returns the entries to be committed to the cache, from those that its `attend` returned: the values of each
        layer whose attention weights others use are followed by the values of those layers.

        Raises:
            ValueError: the cache's entries are not keys and values alone.
        """
        made = list(entries)
        for layer, values in self.values.items():
            entry = made[self.place[layer]]
            if type(entry) is not KVEntry:
                raise ValueError("cache: some layers repeat the attention of others, which takes a cache whose entries "
                                 "are keys and values only")
            made[self.place[layer]] = KVEntry(entry.keys, jnp.concatenate([*values, jnp.zeros_like(values[0][..., :1])],
                                                                          -1))
        return made
