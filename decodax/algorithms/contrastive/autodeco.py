"""AutoDeco: a temperature and a top-p for each token, predicted from the hidden state by two small heads ("The End of
Manual Decoding: Towards Truly End-to-End Language Models", Wang et al., 2025)."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.algorithms.contrastive.paired import TrainedReadout, tensors_of
from decodax.common.registry import FUNCTIONS
from decodax.common.struct import Struct, struct
from decodax.core.loaded import Loaded
from decodax.sampling.warpers import TopP

COLDEST = 1e-2
"""Smallest temperature, as in training."""

STEEPNESS = 30.0
"""Decay rate of the differentiable top-p in training, for tokens beyond the top-p set."""


@struct
class Head(Struct):
    """A network that predicts a number from 0 to 1: two dense layers, with a ReLU between them and a sigmoid at the
    end.

    It maps `f32[..., F]` to `f32[...]`. `F` is the model width `D` in the temperature head, and `D + 5` in the top-p
    head.

    Attributes:
        up: `f32[F, M]`, kernel of the first layer.
        up_bias: `f32[M]`.
        down: `f32[M]`, kernel of the second layer.
        down_bias: `f32[]`.
    """

    up: Array
    up_bias: Array
    down: Array
    down_bias: Array

    def __call__(self, x: Array) -> Array:
        """Returns the prediction, `f32[...]` from 0 to 1, for features `f32[..., F]`."""
        return jax.nn.sigmoid(jax.nn.relu(x @ self.up + self.up_bias) @ self.down + self.down_bias)


@struct
class Heads(Struct):
    """The two heads of AutoDeco.

    Attributes:
        temperature: predicts half the temperature from the hidden state.
        top_p: predicts top-p from the hidden state, the temperature and four statistics of the distribution
            (`features`).
    """

    temperature: Head
    top_p: Head

    @classmethod
    def init(cls, key: Array, width: int, middle: int = 256) -> Heads:
        """Returns heads with random weights, for training.

        Args:
            key: random key.
            width: width `D` of the model's hidden states.
            middle: width `M` of the layer in the middle.
        """
        def one(key: Array, size: int) -> Head:
            first, second = jax.random.split(key)
            return Head(jax.random.normal(first, (size, middle)) * size ** -0.5, jnp.zeros(middle),
                        jax.random.normal(second, (middle,)) * middle ** -0.5, jnp.zeros(()))

        a, b = jax.random.split(key)
        return cls(one(a, width), one(b, width + 5))

    @classmethod
    def of(cls, tensors: Mapping[str, Any]) -> Heads:
        """Returns the heads in a checkpoint of the authors. `tensors` are arrays by their names
        (`temp_head.mlp.0.weight`, ...).

        Raises:
            ValueError: a tensor is missing.
        """
        def one(name: str) -> Head:
            parts = [f"{name}.mlp.{layer}.{kind}" for layer in (0, 2) for kind in ("weight", "bias")]
            if missing := [part for part in parts if part not in tensors]:
                raise ValueError(f"heads: no {missing[0]!r} among {len(tensors)} tensors; takes those of a checkpoint "
                                 "of AutoDeco")
            up, up_bias, down, down_bias = (jnp.asarray(tensors[part], jnp.float32) for part in parts)
            return Head(up.T, up_bias, down[0], down_bias[0])

        return cls(one("temp_head"), one("top_p_head"))

    def tensors(self) -> dict[str, np.ndarray]:
        """Returns the weights by the names of the authors' checkpoints, as `of` reads them."""
        found: dict[str, np.ndarray] = {}
        for name, head in (("temp_head", self.temperature), ("top_p_head", self.top_p)):
            up, up_bias, down, bias = (np.asarray(x) for x in (head.up, head.up_bias, head.down, head.down_bias))
            found |= {f"{name}.mlp.0.weight": np.ascontiguousarray(up.T), f"{name}.mlp.0.bias": up_bias,
                      f"{name}.mlp.2.weight": down[None], f"{name}.mlp.2.bias": bias[None]}
        return found

    def __call__(self, hidden: Array, logits: Array) -> tuple[Array, Array]:
        """Returns temperature (0 to 2) and top-p (0 to 1), both `f32[...]`, for hidden states `f[..., D]` and their
        logits `f32[..., V]`."""
        hidden = hidden.astype(jnp.float32)
        temperature = 2 * self.temperature(hidden)
        known = jax.lax.stop_gradient(temperature)
        return temperature, self.top_p(jnp.concatenate([hidden, known[..., None], features(logits, known)], -1))


def features(logits: Array, temperature: Array) -> Array:
    """Returns four statistics of the distribution at a temperature, `f32[..., 4]`: its largest probability, its entropy
    in nats, the variance of the probabilities, and the sum of the five largest."""
    p = jax.nn.softmax(logits / (temperature[..., None] + 1e-8))
    entropy = -(p * jnp.log(p + 1e-8)).sum(-1)
    best = jax.lax.top_k(p, min(5, p.shape[-1]))[0].sum(-1)
    return jnp.stack([p.max(-1), entropy, p.var(-1, ddof=1), best], -1)


@dataclasses.dataclass(frozen=True)
class AutoDeco(TrainedReadout):
    """A model whose logits are divided by the temperature, and cut to the top-p, that two heads predict for each
    position (Wang et al., 2025).

    With `temperature=1.0` in the request, a draw has the paper's distribution; another value multiplies the predicted
    temperature. Greedy rows take the most likely token of the model. Penalties and bans of the request are applied
    after the heads. The weights are a pair: those of the network and the `Heads`.
    """

    def read(self, own: Heads, hidden: Array, logits: Array) -> Array:
        temperature, top_p = own(hidden, logits)
        rows = (logits / jnp.maximum(temperature, COLDEST)[..., None]).reshape(-1, logits.shape[-1])
        cut = jax.vmap(lambda row, p: TopP(p).logits(None, cast(Any, None), row))(rows, top_p.reshape(-1))
        return cut.reshape(logits.shape)


@FUNCTIONS.register("algorithms.contrastive.autodeco",
                    "The End of Manual Decoding: Towards Truly End-to-End Language Models", "Wang et al. 2025")
def autodeco(lm: Loaded, heads: Heads | Mapping[str, Any] | str | os.PathLike[str]) -> Any:
    """Returns a model that predicts temperature and top-p for each token by itself.

    It replaces tuning both by hand, and can be combined with every decoding method. See `AutoDeco`.

    Args:
        lm: the result of `decodax.load`.
        heads: trained heads; or tensors by the names of the authors' checkpoints; or the directory of such a checkpoint
            (`*.safetensors`).

    Raises:
        ValueError: tensors are missing.
    """
    if isinstance(heads, (str, os.PathLike)):
        heads = tensors_of(heads)
    found = heads if isinstance(heads, Heads) else Heads.of(heads)
    return dataclasses.replace(cast(Any, lm), model=AutoDeco(lm.model), params=(lm.params, found))


def losses(heads: Heads, hidden: Array, logits: Array, labels: Array, key: Array) -> tuple[Array, Array]:
    """Returns the training losses of the heads on a text: for the temperature, and for top-p. The authors minimise
    their sum; the network itself is not trained.

    Both are cross-entropies of the next token, in nats, weighted by the network's probability for it at temperature 1.
    The first is that of the distribution at the predicted temperature, on a random subset: each position at which the
    network's most likely token is right is left out with probability 0.6. The second is that of the distribution at the
    predicted temperature after a soft top-p, on all positions: each probability is multiplied by `exp(-30 * excess)`,
    where `excess` is the sum of the probabilities down to and including this one less the predicted top-p, at least 0;
    then they are normalised.

    Args:
        heads: the heads.
        hidden: `f[..., D]`, hidden states.
        logits: `f32[..., V]`, their logits.
        labels: `i32[...]`, the token after each position; a negative one leaves the position out.
        key: random key for the choice of the subset.

    Returns:
        Two means over the positions that are not left out, `f32[]`; 0 if there are none.
    """
    temperature, top_p = heads(hidden, logits)
    at = lambda x: jnp.take_along_axis(x, jnp.maximum(labels, 0)[..., None], -1)[..., 0]
    counts = labels >= 0
    weight = at(jax.nn.softmax(logits))
    drops = (jax.random.uniform(key, labels.shape) < 0.6) & (jnp.argmax(logits, -1) == labels)
    mean = lambda x, which: jnp.where(which, x, 0).sum() / jnp.maximum(which.sum(), 1)

    warm = logits / jnp.maximum(temperature, COLDEST)[..., None]
    first = mean(-at(jax.nn.log_softmax(warm)) * weight, counts & ~drops)

    p = jax.nn.softmax(logits / jnp.maximum(temperature, 1e-8)[..., None])
    order = jnp.argsort(-p, -1, stable=True)
    ranked = jnp.take_along_axis(p, order, -1)
    excess = jax.nn.relu(jnp.cumsum(ranked, -1) - top_p[..., None])
    kept = p * jnp.take_along_axis(jnp.exp(-STEEPNESS * excess), jnp.argsort(order, -1), -1)
    kept = kept / (kept.sum(-1, keepdims=True) + 1e-9)
    return first, mean(-jnp.log(at(kept) + 1e-9) * weight, counts)
