"""Contrastive decoding: tokens that a large model rates higher than a small one ("Contrastive Decoding: Open-ended Text
Generation as Optimization", Li et al., 2023)."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array

from decodax.cache.dense import dense
from decodax.cache.views import WithView
from decodax.cache.wrapper import Combined
from decodax.common.registry import FUNCTIONS
from decodax.common.struct import struct
from decodax.core.around import PairedReadout
from decodax.core.cache import Cache, Entries
from decodax.core.loaded import Loaded
from decodax.core.types import CacheKind, Model, Out, no_inputs
from decodax.core.window import Window
from decodax.pallas_kernels.vocabulary import cooled


@struct
class TwoCaches(Combined):
    """The cache of `Contrastive`: the caches of its two models, the expert and the amateur, which process the same
    text."""

    members = ("expert", "amateur")

    expert: Any
    amateur: Any

    def commit(self, entries: Entries, slots: Array) -> TwoCaches:
        one, other = entries
        return TwoCaches(self.expert.commit(one, slots), self.amateur.commit(other, slots))


@dataclasses.dataclass(frozen=True)
class Contrastive(PairedReadout):
    """A model whose logits contrast a large model (the expert, `base`) with a small one (the amateur).

    With `beta=None` the logits are `log p - log q`, where `p` and `q` are the probabilities of expert and amateur (Li
    et al., 2023). With `beta` they are `(1 + beta) l - beta k`, where `l` and `k` are their logits (O'Brien and Lewis,
    2023). In both cases only tokens at least `alpha` times as likely as the expert's most likely token are kept. The
    weights are a pair: those of expert and amateur.

    Attributes:
        base: the expert.
        amateur: the amateur; it has the same vocabulary.
        alpha: in (0, 1].
        beta: strength of the contrast in the second rule; None: the first rule.
        temperature: temperature of the amateur in the first rule.
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
        whole = kind
        while isinstance(whole, WithView):      # drafts may read another cache
            whole = whole.base
        if whole is not dense:
            raise ValueError(f"cache: got {kind}, but two models against one another keep dense caches")
        return dataclasses.replace(self, base=self.base.with_cache(kind), amateur=self.amateur.with_cache(kind))

    def init_cache(self, batch: int, capacity: int, *, params: Any = None, inputs: Any = None) -> Cache:
        no_inputs(self, inputs)
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
    """Returns a model that decodes by contrast with a smaller model.

    For open-ended text. It can be combined with every decoding method. See `Contrastive` for the rule.

    Args:
        lm: the larger model, a result of `decodax.load`.
        amateur: the smaller model, with the same vocabulary.
        alpha: tokens at least this times as likely as the most likely one are kept; in (0, 1]. Li et al. use 0.1.
        beta: None: the rule of Li et al., who search with `num_beams=5`. A number: the rule of O'Brien and Lewis, who
            advise 0.5 for reasoning.
        temperature: temperature of the amateur in the rule of Li et al.

    Raises:
        ValueError: the vocabularies differ in size, or a number is out of its range.
    """
    mine, theirs = (each.vocab_size if isinstance(each, Loaded) else None for each in (lm, amateur))
    if mine != theirs:
        raise ValueError(f"amateur: has {theirs} tokens, the expert {mine}; takes a model with the same tokenizer")
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha: got {alpha}, takes a number in (0, 1]")
    if temperature <= 0 or (beta is not None and beta < 0):
        raise ValueError(f"temperature and beta: got {temperature} and {beta}, takes one above 0, and one from 0 on")
    model = Contrastive(lm.model, amateur.model, alpha, beta, temperature)
    return dataclasses.replace(cast(Any, lm), model=model, params=(lm.params, amateur.params))
