"""The configuration of a loaded model, and loaded models with another one."""

from __future__ import annotations

import dataclasses
from typing import Any

from decodax.core.loaded import Loaded
from decodax.core.types import LayeredModel
from decodax.models.config import DecoderConfig


def decoder_of(lm: Loaded, method: str) -> DecoderConfig:
    """Returns the configuration of a decoder-only transformer. `method` is named in the error.

    Raises:
        ValueError: the loaded model `lm` has another network, or is a masked diffusion model.
    """
    model = lm.model
    if lm.diffusion is None and isinstance(model, LayeredModel) and isinstance(model.config, DecoderConfig):
        return model.config
    fills = " that fills masks" if lm.diffusion else ""
    raise ValueError(f"model: got a {type(model).__name__}{fills}; {method} takes a Transformer that reads from left "
                     "to right")


def with_config(lm: Loaded, config: DecoderConfig, params: Any) -> Any:
    """Returns the loaded model with another configuration of its network, and its weights for it."""
    own: Any = lm
    return dataclasses.replace(own, model=dataclasses.replace(own.model, config=config), params=params)
