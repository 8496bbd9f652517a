"""The options of multi-head latent attention."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (MLA; "DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language
    Model", DeepSeek-AI, 2024). See `decodax.models.latent.attention`.

    The width of a head's queries and keys is `DecoderConfig.head_dim`, and `Layer.rope.width` of it is rotated.

    Attributes:
        rank: number of channels of a token's latent, from which the keys and values of all heads are computed.
        value_width: number of channels of a head's values.
        query_rank: number of channels of the latent from which the queries are computed; None: queries are computed
            from the residual stream.
        eps: added to the mean square in the norms of the latents.
    """

    rank: int
    value_width: int
    query_rank: int | None = None
    eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("rank", "value_width", "query_rank"):
            if (size := getattr(self, name)) is not None and size < 1:
                raise ValueError(f"{name}: got {size}, takes 1 or more")
