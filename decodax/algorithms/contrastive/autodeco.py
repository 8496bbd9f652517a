"""AutoDeco: a temperature and a top-p for each token, predicted from the hidden state by two small heads ("The End of
Manual Decoding: Towards Truly End-to-End Language Models", Wang et al., 2025)."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array

from decodax.common.registry import FUNCTIONS
from decodax.common.struct import Struct, struct
from decodax.core.around import Readout
from decodax.core.cache import Cache
from decodax.core.loaded import Loaded
from decodax.core.types import Out, embeddings, outputs
from decodax.core.window import Window
from decodax.sampling.warpers import TopP

COLDEST = 1e-2
"""Least temperature, as in training."""

STEEPNESS = 30.0
"""Rate at which the soft top-p of training falls beyond the bound."""


@struct
class Head(Struct):
    """Two layers with a ReLU between them and a final sigmoid. `up`: `f32[D, M]`, `up_bias`: `f32[M]`, `down`:
    `f32[M]`, `down_bias`: `f32[]`."""

    up: Array
    up_bias: Array
    down: Array
    down_bias: Array

    def __call__(self, x: Array) -> Array:
        """Returns `f32[...]`, from 0 to 1, of `f32[..., D]`."""
        return jax.nn.sigmoid(jax.nn.relu(x @ self.up + self.up_bias) @ self.down + self.down_bias)


@struct
class Heads(Struct):
    """The two heads. `temperature` reads hidden states. `top_p` reads these, the temperature, and four statistics of
    the distribution (`features`)."""

    temperature: Head
    top_p: Head

    @classmethod
    def init(cls, key: Array, width: int, middle: int = 256) -> Heads:
        """Returns heads with random weights, for models of this width."""
        def one(key: Array, size: int) -> Head:
            first, second = jax.random.split(key)
            return Head(jax.random.normal(first, (size, middle)) * size ** -0.5, jnp.zeros(middle),
                        jax.random.normal(second, (middle,)) * middle ** -0.5, jnp.zeros(()))

        a, b = jax.random.split(key)
        return cls(one(a, width), one(b, width + 5))

    @classmethod
    def of(cls, tensors: Mapping[str, Any]) -> Heads:
        """Returns the heads of the authors' checkpoints, by their names (`temp_head.mlp.0.weight`, ...).

        Raises:
            ValueError: one is missing.
        """
        def one(name: str) -> Head:
            parts = [f"{name}.mlp.{layer}.{kind}" for layer in (0, 2) for kind in ("weight", "bias")]
            if missing := [part for part in parts if part not in tensors]:
                raise ValueError(f"heads: no {missing[0]!r} among {len(tensors)} tensors; takes those of a checkpoint "
                                 "of AutoDeco")
            up, up_bias, down, down_bias = (jnp.asarray(tensors[part], jnp.float32) for part in parts)
            return Head(up.T, up_bias, down[0], down_bias[0])

        return cls(one("temp_head"), one("top_p_head"))

    def __call__(self, hidden: Array, logits: Array) -> tuple[Array, Array]:
        """Returns temperature, from 0 to 2, and top-p `f32[...]` of hidden states `f[..., D]` and their logits."""
        hidden = hidden.astype(jnp.float32)
        temperature = 2 * self.temperature(hidden)
        known = jax.lax.stop_gradient(temperature)
        return temperature, self.top_p(jnp.concatenate([hidden, known[..., None], features(logits, known)], -1))


def features(logits: Array, temperature: Array) -> Array:
    """Returns `f32[..., 4]` of the distribution at a temperature: its largest probability, its entropy in nats, the
    variance of probabilities, and the sum of the five largest."""
    p = jax.nn.softmax(logits / (temperature[..., None] + 1e-8))
    entropy = -(p * jnp.log(p + 1e-8)).sum(-1)
    best = jax.lax.top_k(p, min(5, p.shape[-1]))[0].sum(-1)
    return jnp.stack([p.max(-1), entropy, p.var(-1, ddof=1), best], -1)


@dataclasses.dataclass(frozen=True)
class AutoDeco(Readout):
    """Logits divided by the temperature, and cut to the top-p, that two heads choose for each position (Wang et al.,
    2025, "The End of Manual Decoding").

    At `temperature=1.0` of the request a draw has the paper's distribution; another one multiplies the heads'. Greedy
    rows take the model's own token. Penalties and bans of the request act after the heads.
    The weights are a pair, those of the network and of the heads.
    """

    def apply(self, params: Any, window: Window, cache: Cache) -> Out:
        out = self.base.apply(params[0], window, cache)
        heads: Heads = params[1]

        def head(hidden: Array) -> Array:
            logits = out.head(hidden)
            temperature, top_p = heads(hidden, logits)
            rows = (logits / jnp.maximum(temperature, COLDEST)[..., None]).reshape(-1, logits.shape[-1])
            cut = jax.vmap(lambda row, p: TopP(p).logits(None, cast(Any, None), row))(rows, top_p.reshape(-1))
            return cut.reshape(logits.shape)

        return dataclasses.replace(out, head=head)

    def init_cache(self, batch: int, capacity: int, *, params: Any = None, inputs: Any = None) -> Cache:
        own = None if params is None else params[0]
        return self.base.init_cache(batch, capacity, params=own, inputs=inputs)

    def embeddings(self, params: Any, tokens: Array) -> Array:
        return embeddings(self.base, params[0], tokens)

    def outputs(self, params: Any, layer: int) -> Array:
        return outputs(self.base, params[0], layer)


@FUNCTIONS.register("algorithms.contrastive.autodeco",
                    "The End of Manual Decoding: Towards Truly End-to-End Language Models", "Wang et al. 2025")
def autodeco(lm: Loaded, heads: Heads | Mapping[str, Any] | str | os.PathLike[str]) -> Any:
    """Returns a model that chooses temperature and top-p of each token itself.

    Replaces the tuning of both by hand; every decoding method takes the model. See `AutoDeco`.

    Args:
        lm: loaded model.
        heads: trained heads; or tensors by the names of the authors' checkpoints, or the directory of such a checkpoint
            (`*.safetensors`).

    Raises:
        ValueError: tensors are missing.
    """
    if isinstance(heads, (str, os.PathLike)):
        from safetensors.numpy import load_file

        heads = {name: x for file in sorted(Path(heads).glob("*.safetensors")) for name, x in load_file(file).items()}
    found = heads if isinstance(heads, Heads) else Heads.of(heads)
    return dataclasses.replace(cast(Any, lm), model=AutoDeco(lm.model), params=(lm.params, found))


def losses(heads: Heads, hidden: Array, logits: Array, labels: Array, key: Array) -> tuple[Array, Array]:
    """Returns the training losses of the heads on a text: for the temperature, and for top-p. The network is not
    trained; the authors minimise the sum.

    Both are cross-entropies of the next token, weighted by the probability that the network gives to it: at the
    temperature, and after a top-p that cuts softly, by `exp(-30 * excess)`. The first loss leaves out
    60% of the positions where the network's best token is right, at random.

    Args:
        hidden: `f[..., D]`. logits: `f32[..., V]`. labels: `i32[...]`, the token after each position, negative where
            none counts. key: for the choice of the positions that are left out.

    Returns:
        Two means, `f32[]`, over the positions that count.
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
