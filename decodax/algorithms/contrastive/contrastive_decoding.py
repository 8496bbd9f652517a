"""Contrastive decoding: a large model against a small one ("Contrastive Decoding: Open-ended Text Generation as
Optimization", Li et al., 2023)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array

from decodax.cache.wrapper import Combined
from decodax.common.registry import FUNCTIONS
from decodax.common.struct import struct
from decodax.core.around import Readout
from decodax.core.cache import Cache, Entries
from decodax.core.loaded import Loaded
from decodax.core.types import CacheKind, Model, Out
from decodax.core.window import Window
from decodax.pallas_kernels.vocabulary import cooled


@struct
class TwoCaches(Combined):
    """Caches of two models that read the same text."""

    members = ("expert", "amateur")

    expert: Any
    amateur: Any

    def commit(self, entries: Entries, slots: Array) -> TwoCaches:
        one, other = entries
        return TwoCaches(self.expert.commit(one, slots), self.amateur.commit(other, slots))


@dataclasses.dataclass(frozen=True)
class Contrastive(Readout):
    """Logits are `log p - log q` of an expert and an amateur, among tokens at least `alpha` times as likely for the
    expert as the likeliest one (Li et al., 2023); with `beta` they are `(1 + beta) l - beta k` of the logits of both
    (O'Brien and Lewis, 2023).

    The weights are a pair, those of the expert and of the amateur.

    Attributes:
        base, amateur: the two networks, over one vocabulary.
        alpha: in (0, 1]. beta: None for the first rule. temperature: temperature of the amateur, in the first rule.
    """

    amateur: Model
    alpha: float = 0.1
    beta: float | None = None
    temperature: float = 1.0

    @property
    def max_positions(self) -> int | None:
        return min((m for m in (self.base.max_positions, self.amateur.max_positions) if m is not None), default=None)

    @property
    def trained_positions(self) -> int | None:
        return min((m for m in (self.base.trained_positions, self.amateur.trained_positions) if m is not None),
                   default=None)

    def with_cache(self, kind: CacheKind) -> Contrastive:
        raise ValueError(f"cache: got {kind}, but two models against one another keep dense caches")

    def wrap_cache(self, wrap: Callable[[CacheKind], CacheKind]) -> Contrastive:
        return dataclasses.replace(self, base=self.base.wrap_cache(wrap), amateur=self.amateur.wrap_cache(wrap))

    def share(self, prefix: int, more: int) -> None:
        return None

    def fit(self, new: int) -> Contrastive:
        return self

    def init_cache(self, batch: int, capacity: int, *, params: Any = None, inputs: Any = None) -> Cache:
        self.no_inputs(inputs)
        one, other = (None, None) if params is None else params
        return TwoCaches(self.base.init_cache(batch, capacity, params=one),
                         self.amateur.init_cache(batch, capacity, params=other))

    def apply(self, params: Any, window: Window, cache: Any) -> Out:
        expert = self.base.apply(params[0], window, cache.expert)
        amateur = self.amateur.apply(params[1], window.replace(hints=()), cache.amateur)
        width = expert.hidden.shape[-1]

        def head(hidden: Array) -> Array:
            strong = expert.head(hidden[..., :width].astype(expert.hidden.dtype))
            weak = amateur.head(hidden[..., width:].astype(amateur.hidden.dtype))
            if self.beta is None:
                scores = jax.nn.log_softmax(strong) - jax.nn.log_softmax(cooled(weak, jnp.float32(self.temperature)))
            else:
                scores = (1 + self.beta) * strong - self.beta * weak
            likely = strong >= strong.max(-1, keepdims=True) + jnp.log(self.alpha)
            return jnp.where(likely | jnp.isnan(strong), scores, -jnp.inf)

        return Out(hidden=jnp.concatenate([expert.hidden, amateur.hidden], -1),
                   entries=(expert.entries, amateur.entries), head=head)


@FUNCTIONS.register("algorithms.contrastive.contrast",
                    "Contrastive Decoding: Open-ended Text Generation as Optimization", "Li et al. 2023")
def contrast(lm: Loaded, amateur: Loaded, alpha: float = 0.1, beta: float | None = None,
             temperature: float = 1.0) -> Any:
    """Returns a model that decodes by contrast with a smaller one.

    For open-ended text; every decoding method takes the model. See `Contrastive` for the rule.

    Args:
        lm, amateur: loaded models with one vocabulary.
        alpha, beta, temperature: as in `Contrastive`. `beta=0.5` is what O'Brien and Lewis advise for reasoning; Li et
            al. search with `num_beams=5`.

    Raises:
        ValueError: the vocabularies differ in size, or a number is out of its range.
    """
    if (mine := getattr(lm, "vocab_size", None)) != (theirs := getattr(amateur, "vocab_size", None)):
        raise ValueError(f"amateur: has {theirs} tokens, the expert {mine}; takes a model with the same tokenizer")
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha: got {alpha}, takes a number in (0, 1]")
    if temperature <= 0 or (beta is not None and beta < 0):
        raise ValueError(f"temperature and beta: got {temperature} and {beta}, takes one above 0, and one from 0 on")
    model = Contrastive(lm.model, amateur.model, alpha, beta, temperature)
    return dataclasses.replace(cast(Any, lm), model=model, params=(lm.params, amateur.params))
