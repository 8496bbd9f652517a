"""The first layers of a model as a model of its own: generation at a fixed depth (SoFT, Kavehzadeh et al., 2024)."""

from __future__ import annotations

import dataclasses
from typing import Any

from decodax.core.loaded import Loaded, network_name
from decodax.models import Transformer
from decodax.models.config import DecoderConfig


def check_whole_layers(config: DecoderConfig) -> None:
    """Checks that a decoder can end after any of its layers.

    Raises:
        ValueError: a layer adds what the mixture of the one before it computed.
    """
    if config.shortcuts:
        raise ValueError("lm: got a model with mixtures that are added after the next layer (LongCat-Flash), so that "
                         "it cannot end after any layer; takes one without")


def sub_model(lm: Any, layers: int) -> Any:
    """Returns the model with its first layers only, and its own norm and head: generation at a fixed depth.

    It shares the weights of the whole model, and every method and cache takes it. It writes good texts if the model was
    tuned for it (`decodax.train.tuning`: `SortedLoss`, `EarlyExitLoss`).

    Args:
        lm: a result of `decodax.load`: an autoregressive `Transformer`.
        layers: number of layers.

    Raises:
        ValueError: another model, or a number of layers that it does not have.
    """
    network = lm.model if isinstance(lm, Loaded) else None
    if not isinstance(network, Transformer) or lm.diffusion is not None:
        raise ValueError(f"lm: got a {network_name(lm)}; takes what decodax.load gave of a Transformer "
                         "that reads from left to right")
    config = network.config
    if config.layer_inputs is not None or config.streams is not None or config.conditioned:
        raise ValueError("lm: got a model with inputs of each layer, several residual streams or self-conditioning, "
                         "whose layers do not end in its norm; takes one without")
    check_whole_layers(config)
    if not 1 <= layers <= len(config.layers):
        raise ValueError(f"layers: got {layers}, takes 1 to {len(config.layers)}")
    model = dataclasses.replace(network, config=dataclasses.replace(config, layers=config.layers[:layers]))
    params = {**lm.params, "layers": {str(i): lm.params["layers"][str(i)] for i in range(layers)}}
    # the files that it was loaded from have more layers; entries of lists are those of layers
    entries = {name: x[:layers] if isinstance(x, list) and len(x) == len(config.layers) else x
               for name, x in lm.config_entries.items()}
    if "num_hidden_layers" in entries:
        entries["num_hidden_layers"] = layers
    return dataclasses.replace(lm, model=model, params=params, directory=None, entries=entries)
