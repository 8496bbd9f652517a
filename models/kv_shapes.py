"""The shapes of a decoder's keys and values, which it passes to its cache, and the numbers of its entries there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from decodax.cache import KVLayer
from decodax.models.blocks.attention import Attend
from decodax.models.compressed.options import Pooling
from decodax.models.config import DecoderConfig
from decodax.models.echoes import value_width
from decodax.models.residual.ngrams import NGramWalk


def kv_layers(c: DecoderConfig, context: int | None) -> list[KVLayer]:
    """Returns the shape of the keys and values in the cache for each layer with softmax attention and keys of its own
    (`DecoderConfig.attending`), in order. `context` is the text length for which length-dependent rope scalings are
    set; None: the trained one."""
    return [_latent(c, i) if c.layers[i].latent is not None else _shared(c, i) if c.layers[i].shared_key is not None
            else _by_head(c, i, context) for i in c.attending]


def places(c: DecoderConfig) -> tuple[tuple[bool, int], ...]:
    """Returns the place of each of `DecoderConfig.entries` in a `PerLayer` cache: False and the index among the layers
    with keys and values, or True and the index among those with states."""
    others = [part > 0 or layer in c.summing for layer, part in c.entries]
    return tuple((other, others[:i].count(other)) for i, other in enumerate(others))


def numbered(c: DecoderConfig, attend: Attend) -> Attend:
    """Returns the attention function for the indices of layers, made from `attend`, which has the numbers of a cache's
    `DecoderConfig.entries`."""
    return lambda layer, q, k, v, **options: attend(number(c, layer, options), q, k, v, **options)


def number(c: DecoderConfig, layer: int, options: Mapping[str, Any]) -> int:
    """Returns the number among `DecoderConfig.entries` of what a layer calls its attention function for, with the
    keyword arguments `options`."""
    walk = options.get("walk")
    return c.numbers[layer, 0 if walk is None else 2 if isinstance(walk, NGramWalk) else 1]


def _latent(c: DecoderConfig, i: int) -> KVLayer:
    """Returns the shape of a layer with latent attention: one head, whose keys are the values, too. A choice of keys
    takes the place of a bias."""
    latent, rope = c.layers[i].latent, c.layers[i].rope
    assert latent is not None
    more = 0 if latent.indexer is None else latent.indexer.width * len(c.index_keys(i))
    return KVLayer(1, latent.rank + latent.shared(rope) + more, 0, queries=c.heads, bias=more > 0,
                   sinks=c.layers[i].sinks, chooses=more > 0)


def _shared(c: DecoderConfig, i: int) -> KVLayer:
    """Returns the shape of a layer with one head of keys that are the values, too, and with pooled keys and their index
    keys beside. The choice among these takes the place of a bias, and has the sliding window inside."""
    layer = c.layers[i]
    pool = layer.recurrent if isinstance(layer.recurrent, Pooling) else None
    width = c.head_dim if pool is None else c.head_dim + pool.made
    return KVLayer(1, width, 0, queries=c.heads, sliding=layer.sliding if pool is None else None, bias=pool is not None,
                   sinks=True, chooses=pool is not None)


def _by_head(c: DecoderConfig, i: int, context: int | None) -> KVLayer:
    layer, chooses = c.layers[i], c.layers[i].index is not None
    wide = None if c.values_of_key == 1 and c.value_dim is None and not chooses else (
        c.value_width(layer) * c.values_of_key)
    more = 0 if layer.index is None else layer.index.width
    return KVLayer(c.groups(layer), c.key_width(layer) + more, value_width(c, i, wide), queries=c.query_heads(layer),
                   rope=layer.rope, context=context, sliding=layer.sliding, softcap=c.attention_softcap,
                   bias=layer.bias is not None or chooses or (
                       layer.rope is not None and layer.rope.chunks is not None),
                   sinks=layer.sinks, chooses=chooses)
