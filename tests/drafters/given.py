"""Random tensors that two programs can make alike, for heads and for what they read."""

import zlib

import numpy as np


def tensor(name, shape, seed=0):
    """A tensor for a name: norms are near 1, all others have a spread with which logits differ."""
    draw = np.random.default_rng([seed, zlib.crc32(name.encode())])
    x = draw.standard_normal(shape).astype(np.float32)
    if "norm" in name:
        return 1 + 0.1 * x
    if name.endswith("base_kernel"):
        return np.stack([np.ones(shape[-1])] + [np.zeros(shape[-1])] * (shape[1] - 1)).astype(np.float32) + 0.3 * x
    return 0.3 * x if len(shape) == 2 else 0.2 * x


def tensors(shapes, seed=0):
    return {name: tensor(name, tuple(shape), seed) for name, shape in shapes.items()}


def inputs(positions, features, vocabulary, seed=0):
    """Features of a text, and its tokens."""
    draw = np.random.default_rng([seed, 1])
    return (draw.standard_normal((1, positions, features)).astype(np.float32),
            draw.integers(0, vocabulary, (1, positions)).astype(np.int32))
