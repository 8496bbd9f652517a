"""Options of the parts of a decoder that change the residual stream beside attention and MLP."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class LayerInputs:
    """Options of per-layer embeddings. See `decodax.models.residual.layer_inputs`.

    Attributes:
        width: number of channels `d` of a layer's embedding of a token.
        rows: number of tokens that the table has. Tokens from there on have the embedding of token 0.
    """

    width: int
    rows: int

    def __post_init__(self) -> None:
        for name in ("width", "rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, takes 1 or more")
