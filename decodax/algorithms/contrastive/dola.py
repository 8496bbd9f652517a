"""DoLa: decoding by contrast of the last layer with an early one ("DoLa: Decoding by Contrasting Layers Improves
Factuality in Large Language Models", Chuang et al., 2024)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.common.arguments import is_whole, plain, wrong
from decodax.common.registry import FUNCTIONS
from decodax.core.around import Readout
from decodax.core.cache import Cache
from decodax.core.loaded import Loaded
from decodax.core.types import LayeredModel, Out
from decodax.core.window import Window

Layers = Literal["low", "high"] | Sequence[int]


@dataclasses.dataclass(frozen=True)
class DoLa(Readout):
    """Decoding by contrasting layers: logits are `log p - log q`, where `p` is the model's distribution and `q` that of
    its head on an early layer, among tokens at least `relative_top` times as likely as the likeliest.

    Of several early layers, the one whose distribution is farthest from the model's counts at each position. As in the
    authors' code and in transformers, the head reads early layers without the final norm, and the distance is the mean
    of `KL(m || p)` and `KL(m || q)` with `m` between them; `distance="jensen-shannon"` takes that of the paper's text.

    Attributes:
        layers: early layers, in order; 0: the embeddings, `i`: after the `i`-th layer.
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
        """Returns the distance `f32[...]`, up to a factor that all layers share."""
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

    Improves facts and short answers; every decoding method takes the model. See `DoLa` for the rule.

    Args:
        lm: loaded model.
        layers: "low", the even layers of the lower half; "high", those of the upper half (of the last 20 of more than
            40 layers); or layers by number. The paper advises "high" for short answers and facts, "low" for reasoning,
            and a `repetition_penalty` of 1.2.
        relative_top, distance: as in `DoLa`.
        tied: True if the head is the embedding table: "low" then begins at layer 2, since the head would predict the
            tokens of the embeddings. None: as in the model's configuration.

    Raises:
        ValueError: a model whose layers cannot be seen, or layers that it does not have.
    """
    model, given = lm.model, cast(Any, lm)
    if not isinstance(model, LayeredModel):
        raise ValueError(f"dola: takes a model whose layers can be seen; got {type(model).__name__}")
    depth = model.depth
    if tied is None:
        tied = bool(getattr(model.config, "tied", False))
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


def asked(lm: Loaded, given: Any, said: Callable[..., Any]) -> Any:
    """Returns the model for the argument `dola_layers`, or the entry of a generation config."""
    def read(name: str, layers: Any) -> Any:
        takes = "'low', 'high', or numbers of layers"
        rows = plain(name, layers, takes)
        if not isinstance(rows, str) and not (isinstance(rows, list) and all(map(is_whole, rows))):
            raise wrong(name, layers, takes)
        return dola(lm, cast(Any, rows))

    return said("dola_layers", given, read, lm)
