"""Decoders whose layers share keys, values or attention weights, or have fewer heads of keys than of values.

Each function returns the configuration of another network, which has to be trained.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from decodax.models.config import DecoderConfig


def cla(config: DecoderConfig, share: int = 2) -> DecoderConfig:
    """Returns a configuration with cross-layer attention: only every `share`-th layer computes keys and values.

    The layers after it attend to these, so the cache is smaller by the factor `share` ("Reducing Transformer Key-Value
    Cache Size with Cross-Layer Attention", Brandon et al., 2024). It is another network, which has to be trained.

    >>> from decodax.models import llama
    >>> [layer.reads for layer in cla(llama(vocab=64, width=32, layers=4, heads=4, mlp=96)).layers]
    [None, 0, None, 2]
    """
    if share < 1:
        raise ValueError(f"share: got {share}, takes 1 or more")
    return dataclasses.replace(config, layers=tuple(
        dataclasses.replace(layer, reads=i - i % share if i % share else None)
        for i, layer in enumerate(config.layers)))


def yoco(config: DecoderConfig, window: int = 1024) -> DecoderConfig:
    """Returns a decoder-decoder ("You Only Cache Once: Decoder-Decoder Architectures for Language Models", Sun et al.,
    2024).

    The layers of the first half attend to a sliding `window`. All layers of the second half attend to the keys and
    values that its first layer computes for the whole text. This is the form with sliding windows, not the one with
    gated retention. It is another network, which has to be trained.

    >>> from decodax.models import llama
    >>> c = yoco(llama(vocab=64, width=32, layers=4, heads=4, mlp=96), window=16)
    >>> [(layer.sliding, layer.reads) for layer in c.layers]
    [(16, None), (16, None), (None, None), (None, 2)]
    """
    half = len(config.layers) // 2
    if half < 1:
        raise ValueError("layers: got one, takes at least two")
    return dataclasses.replace(config, layers=tuple(
        dataclasses.replace(layer, sliding=window if i < half else None, reads=half if i > half else None)
        for i, layer in enumerate(config.layers)))


def echo_att(config: DecoderConfig, groups: Sequence[Sequence[int]]) -> DecoderConfig:
    """Returns a configuration with groups of layers that use the attention weights of the first layer of each group.

    The other layers of a group compute values, but neither queries nor keys ("EchoAtt: Attend, Copy, then Adjust for
    More Efficient Large Language Models", Rajabzadeh et al., 2024). It is another network, which has to be distilled:
    `decodax.train.echo_att`.

    >>> from decodax.models import llama
    >>> c = echo_att(llama(vocab=64, width=32, layers=6, heads=4, mlp=96), [(1, 2), (3, 4)])
    >>> [layer.echoes for layer in c.layers]
    [None, None, 1, None, 3, None]
    """
    flat = [i for group in groups for i in group]
    if len(set(flat)) < len(flat) or any(list(group) != sorted(group) or not group for group in groups) or not (
            all(0 <= i < len(config.layers) for i in flat)):
        raise ValueError(f"groups: got {tuple(map(tuple, groups))}, takes groups of the {len(config.layers)} layers, "
                         "each in their order, and a layer in one of them")
    lead = {i: group[0] for group in groups for i in group[1:]}
    return dataclasses.replace(config, layers=tuple(
        dataclasses.replace(layer, echoes=lead.get(i)) for i, layer in enumerate(config.layers)))


def diffqkv(config: DecoderConfig, key_heads: int) -> DecoderConfig:
    """Returns a configuration with fewer key heads than value heads.

    These are the numbers of heads of DiffQKV ("Sigma: Differential Rescaling of Query, Key and Value for Efficient
    Language Models", Lin et al., 2025), which found that a model needs fewer keys than values. Queries that are wider
    than the model are set by `heads * head_dim > width`. It is another network, which has to be trained.

    >>> from decodax.models import llama
    >>> c = diffqkv(llama(vocab=64, width=32, layers=1, heads=8, kv_heads=4, mlp=96), key_heads=2)
    >>> c.kv_heads, c.value_heads
    (2, 4)
    """
    if key_heads < 1 or config.kv_heads % key_heads:
        raise ValueError(f"key_heads: got {key_heads}, takes a divisor of kv_heads = {config.kv_heads}")
    return dataclasses.replace(config, kv_heads=key_heads, value_heads=config.kv_heads)
