"""Models, data and helpers of `test_kvpress.py` that other tests use too."""

from typing import Any

import jax
import numpy as np

from decodax.models import Transformer, llama
from decodax.models.names import flatten

MODEL = Transformer(llama(vocab=320, width=32, layers=3, heads=4, kv_heads=2, mlp=48, context=1024))
# no token stands twice in a text: in the first layer two of a kind would tie
TEXTS = [np.random.RandomState(i + 1).permutation(320)[:n].tolist() for i, n in enumerate((300, 169))]


def weights(model: Transformer = MODEL) -> Any:
    r, leaves, shapes = np.random.RandomState(0), [], model.abstract_params()
    for path, leaf in flatten(shapes).items():
        x = r.standard_normal(leaf.shape).astype(np.float32)
        leaves.append(1 + 0.1 * x if path.endswith("scale") else x * (0.8 if "embed" in path else
                                                                      1.5 / np.sqrt(leaf.shape[0])))
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def keeps(cache: Any, wanted: Any, texts: list[list[int]] = TEXTS) -> None:
    """Asserts that a cache holds the tokens of texts that `wanted` says: for each text, layer and head its bits."""
    for row, text in enumerate(texts):
        for layer, heads in enumerate(wanted[row]):
            for head, bits in enumerate(heads):
                found = np.asarray(cache.heads(layer)[1][row, head])
                found = found[found >= 0]
                kept = np.unpackbits(np.frombuffer(bytes.fromhex(bits), np.uint8))[:len(text)]
                np.testing.assert_array_equal(found, np.flatnonzero(kept))
                assert cache.count[layer][row, head] == len(found)
