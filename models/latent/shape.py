"""The options of multi-head latent attention."""

from __future__ import annotations

import dataclasses

from decodax.common.arguments import check_counts
from decodax.models.compressed.options import Pooling
from decodax.models.rope import Rope


@dataclasses.dataclass(frozen=True)
class Indexer:
    """The lightning indexer of DeepSeek Sparse Attention ("DeepSeek-V3.2: Pushing the Frontier of Open Large Language
    Models", DeepSeek-AI, 2025): a query attends to the `top` tokens with the highest index scores.

    Every token has one index key, of which the first `Layer.rope.width` entries are rotated (none in a layer without a
    rope; with `last` the last ones), and each query several index queries with weights, from which `TopKeys` computes
    scores. Layers may share one choice of tokens (GLM-5 of Z.ai, 2026): a layer without an indexer of its own takes the
    choice of the nearest layer before it that has one. In a layer with a `Pooling` the tokens of each group have one
    index key, a learned mean of their keys, and a query attends to the groups with the highest scores and to the tokens
    after the last whole group (GLM-5.3 Flash).

    Attributes:
        heads: number of index queries of a token.
        width: number of channels of an index key.
        top: number of tokens that a query attends to.
        interleaved: True if rotated pairs of index keys and queries are adjacent; False: in halves.
        last: True if the last entries of index keys and queries are rotated (Hunyuan Hy4).
        eps: added to the variance in the norm of index keys.
        shared: True if the layer takes the choice of an earlier one. The cache stores the index keys of that layer with
            the entries that this one attends to, too (`DecoderConfig.index_keys`).
    """

    heads: int
    width: int
    top: int
    interleaved: bool = False
    last: bool = False
    eps: float = 1e-6
    shared: bool = False

    def __post_init__(self) -> None:
        check_counts(self, "heads", "width", "top")

    def check_groups(self, rule: Pooling) -> None:
        """Checks the options of the groups of tokens that the indexer chooses.

        Raises:
            ValueError: they do not go with those of the indexer.
        """
        if self.shared or rule != Pooling(rule.every, self.width) or self.top % rule.every:
            raise ValueError(f"indexer: got {self} with {rule}, takes one that is not shared, as wide as the pooled "
                             "keys, a top that is a multiple of the number of tokens of a group, no overlap, no index")


@dataclasses.dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (MLA; "DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language
    Model", DeepSeek-AI, 2024). See `decodax.models.latent.attention`.

    The width of a head's queries and keys is `DecoderConfig.head_dim`. A part of a key is the same for all heads: that
    which is rotated, `Layer.rope.width`, or without a rope `plain`.

    Attributes:
        rank: number of channels of a token's latent, from which the keys and values of all heads are computed.
        value_width: number of channels of a head's values.
        query_rank: number of channels of the latent from which the queries are computed; None: queries are computed
            from the residual stream, and those of an indexer from it after another norm (Mistral Large 4).
        eps: added to the mean square in the norms of the latents.
        indexer: the choice of the tokens that a query attends to; None: all.
        plain: number of channels of the key that all heads share in a layer without a rope (Kimi Linear); 0 with one.
        log_scale: True multiplies the queries of each head, and the index queries, by a learned linear function of the
            logarithm of the position. See `decodax.models.latent.attention.LogScale`.
        factor: factor of the normalised latents, without the key that all heads share.
        query_factor: factor of the queries. LongCat-Flash has both: latents narrower than the model have a smaller
            variance at initialisation, which the root of the ratio of widths undoes.
    """

    rank: int
    value_width: int
    query_rank: int | None = None
    eps: float = 1e-6
    indexer: Indexer | None = None
    plain: int = 0
    log_scale: bool = False
    factor: float = 1.0
    query_factor: float = 1.0

    def __post_init__(self) -> None:
        check_counts(self, "rank", "value_width", "query_rank")
        if self.indexer is not None and self.plain:
            raise ValueError("plain: got one with an indexer, takes 0")

    def shared(self, rope: Rope | None) -> int:
        """Returns the number of channels of the part of a key that is the same for all heads, in addition to the
        `rank` channels of the latent: the width of the layer's `rope`, or `plain` in a layer without one (None)."""
        return self.plain if rope is None else rope.width
