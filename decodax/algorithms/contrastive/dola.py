"""DoLa: contrast of the last layer's distribution with that of an early layer ("DoLa: Decoding by Contrasting Layers
Improves Factuality in Large Language Models", Chuang et al., 2024)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.common.registry import FUNCTIONS
from decodax.core.around import Readout
from decodax.core.cache import Cache
from decodax.core.loaded import Loaded
from decodax.core.types import LayeredModel, Out
from decodax.core.window import Window

Layers = Literal["low", "high"] | Sequence[int]


@dataclasses.dataclass(frozen=True)
class DoLa(Readout):
    """A model whose logits are `log p - log q`: `p` is its distribution, and `q` that of its output head applied to an
    early layer (Chuang et al., 2024). Only tokens at least `relative_top` times as likely as the most likely one are
    kept.

    If there are several early layers, each position uses the one whose distribution differs most from `p`. As in the
    authors' code and in transformers, the head is applied to early layers without the final norm, and the distance is
    the mean of `KL(m || p)` and `KL(m || q)` with `m = (p + q) / 2`. `distance="jensen-shannon"` takes `KL(p || m)` and
    `KL(q || m)`, as in the text of the paper.

    Attributes:
        layers: the early layers in ascending order; 0: the embeddings, `i`: the output of the `i`-th layer.
        relative_top: in (0, 1].
        distance: "reference" or "jensen-shannon".
    """

    layers: tuple[int, ...]
    relative_top: float = 0.1
    distance: Literal["reference", "jensen-shannon"] = "reference"

    def apply(self, params: Any, window: Window, cache: Cache) -> Out:
        out = self.base.apply(params, window, cache)
        early = [self._embedded(params, window, cache) if i == 0 else _shown(self.base, out)[i - 1]
                 for i in self.layers]
        parts = len(early) + 1

        def head(hidden: Array) -> Array:
            last, *others = (jax.nn.log_softmax(out.head(h)) for h in jnp.split(hidden, parts, axis=-1))
            far = jnp.stack([self._far(last, other) for other in others])
            q = lax.select_n(*[jnp.broadcast_to(far.argmax(0)[..., None], last.shape)], *others) \
                if len(others) > 1 else others[0]
            likely = last >= last.max(-1, keepdims=True) + jnp.log(self.relative_top)
            # a NaN stays, so that the draw reports it
            return jnp.where(likely | jnp.isnan(last), last - q, -jnp.inf)

        return dataclasses.replace(out, hidden=jnp.concatenate([out.hidden, *early], -1), head=head)

    def _embedded(self, params: Any, window: Window, cache: Cache) -> Array:
        assert isinstance(self.base, LayeredModel)
        return self.base.walk(params, window, cache)[0]

    def _far(self, log_p: Array, log_q: Array) -> Array:
        """Returns the distance of two distributions, `f32[...]`, up to a constant factor."""
        p, q = jnp.exp(log_p), jnp.exp(log_q)
        m = (p + q) / 2
        log_m = jnp.log(jnp.maximum(m, jnp.finfo(m.dtype).tiny))
        if self.distance == "reference":
            return (m * (2 * log_m - log_p - log_q)).sum(-1)
        return (p * (log_p - log_m) + q * (log_q - log_m)).sum(-1)


def _shown(base: Any, out: Out) -> tuple[Array, ...]:
    if out.layers is None:
        raise ValueError(f"dola: {type(base).__name__} does not show its layers")
    return out.layers


@FUNCTIONS.register("algorithms.contrastive.dola",
                    "DoLa: Decoding by Contrasting Layers Improves Factuality in Large Language Models",
                    "Chuang et al. 2024")
def dola(lm: Loaded, layers: Layers = "high", relative_top: float = 0.1,
         distance: Literal["reference", "jensen-shannon"] = "reference", tied: bool | None = None) -> Any:
    """Returns a model that decodes by contrast of its last layer with an early one.

    Improves facts and short answers. It can be combined with every decoding method. See `DoLa` for the rule.

    Args:
        lm: the result of `decodax.load`.
        layers: the candidates for the early layer. "low": the even layers of the lower half. "high": those of the upper
            half; with more than 40 layers, of the first or last 20. Or numbers of layers; 0: the embeddings. The paper
            advises "high" for short answers and facts, "low" for reasoning, and a `repetition_penalty` of 1.2.
        relative_top: tokens at least this times as likely as the most likely one are kept; in (0, 1].
        distance: how layers are compared, "reference" (the authors' code) or "jensen-shannon" (the paper's text).
        tied: True if the output head is the embedding table. "low" then begins at layer 2, since the head would only
            predict the input tokens from the embeddings. None: as in the model's configuration.

    Raises:
        ValueError: the model does not return its layers, or does not have the given ones.
    """
    model, given = lm.model, cast(Any, lm)
    if not isinstance(model, LayeredModel):
        raise ValueError(f"dola: takes a model whose layers can be seen; got {type(model).__name__}")
    depth = model.depth
    if tied is None:
        tied = model.config.tied
    if isinstance(layers, str):
        if layers not in ("low", "high"):
            raise ValueError(f"dola_layers: got {layers!r}, takes 'low', 'high', or numbers of layers")
        first = 2 if tied and depth > 2 else 1 if tied and depth == 2 else 0
        low = range(first, depth // 2 if depth <= 40 else 20, 2)
        high = range(depth // 2 if depth <= 40 else depth - 20, depth, 2)
        # of a shallow model the lower half may be empty
        found = tuple(low if layers == "low" else high) or (min(first, depth - 1),)
    else:
        found = tuple(sorted({int(i) for i in layers}))
        if not found or found[0] < 0 or found[-1] >= depth:
            raise ValueError(f"dola_layers: got {list(layers)}, takes layers from 0, the embeddings, to {depth - 1}")
    if not 0 < relative_top <= 1:
        raise ValueError(f"relative_top: got {relative_top}, takes a number in (0, 1]")
    if distance not in ("reference", "jensen-shannon"):
        raise ValueError(f"distance: got {distance!r}, takes 'reference' or 'jensen-shannon'")
    return dataclasses.replace(given, model=DoLa(model, found, relative_top, distance))
