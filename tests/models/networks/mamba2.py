"""Models of transformers with random weights, for the tests of both versions of Mamba."""

import tempfile
from pathlib import Path
from typing import Any

VOCABULARY = 97


def with_random_weights(model: Any) -> tuple[Any, Path]:
    """The model with other weights, norms around 1, and its directory."""
    import torch

    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn_like(weight) * 0.3 + (1.0 if "norm" in name else 0.0))
    directory = Path(tempfile.mkdtemp())
    model.save_pretrained(directory)
    return model, directory
