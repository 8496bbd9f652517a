"""HAMburger: groups of tokens are one position of the model ("HAMburger: Accelerating LLM Inference via Token
Smashing", Liu and Zhu, 2025).

The model reads the tokens that were written last, up to four, as one vector, which leaves one entry in the cache. From
the hidden states of that position a small decoder writes the next group. Nothing is verified: the model was tuned
together with the decoder and with the embedder that merges a group (`decodax.train.tuning.HamburgerLoss`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.algorithms.speculative.heads.source import trained
from decodax.common.options import Count, Share
from decodax.common.registry import ALGORITHMS
from decodax.common.struct import Struct, short, struct
from decodax.core.algorithm import Algorithm, Traits
from decodax.core.around import AroundModel
from decodax.core.cache import Cache
from decodax.core.capabilities import needs_refresh
from decodax.core.composed import data
from decodax.core.state import State
from decodax.core.target import RunsTarget
from decodax.core.types import Decision, Model, Out, Params, embeddings, logits_of
from decodax.core.window import Window, causal, take
from decodax.models.drafters.hamburger import HamburgerHead


@struct
class MergedPosition(Struct):
    """State of HAMburger: the newest position of each row.

    Attributes:
        features: `f[B, F, D]`, its hidden states, from which the next group is written.
        known: `bool[B]`, False before the first round, which only computes them.
    """

    features: Array
    known: Array


@struct
class MergedGroup(Struct):
    """A hint (`Window.hints`) for the model `Merging`: the group of up to `M` tokens that each row has decoded last,
    which the model reads as one position.

    Attributes:
        tokens: `i32[B, M]`, the group's tokens; negative where the distribution was invalid.
        count: `i32[B]`, number of its tokens; 0: the model reads the last token of the prompt.
        hidden: `f[B, M, D]`, the hidden states from which the tokens were predicted.
    """

    tokens: Array
    count: Array
    hidden: Array


@dataclasses.dataclass(frozen=True)
class EntryPositions:
    """A stand-in for a cache whose entries are fewer than the tokens of the text: queries and keys stay rotated by the
    positions of tokens, and sliding windows, biases and the cache itself count entries.

    Attributes:
        cache: the cache.
        positions: `i32[B, W]`, the number of entries before each node of the window.
    """

    cache: Any
    positions: Array

    @property
    def inputs(self) -> Any:
        return self.cache.inputs

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Window, **options: Any) -> tuple[Array, Any]:
        return self.cache.attend(layer, q, k, v, window.replace(positions=self.positions), **options)


@dataclasses.dataclass(frozen=True)
class Merging(AroundModel):
    """A model that reads each group as one position, that of the group's last token. Its output has the hidden states
    that predicted the group's tokens as `hidden`, and those of the position as `layers`, the final one last."""

    def init_cache(self, batch: int, capacity: int, *, params: Any = None, inputs: Any = None) -> Cache:
        cache = super().init_cache(batch, capacity, params=params, inputs=inputs)
        if needs_refresh(cache) is not None:
            raise ValueError(f"cache: got {type(cache).__name__}, which computes entries anew from single tokens; "
                             "'hamburger' takes one that does not")
        return cache

    def apply(self, params: Any, window: Window, cache: Cache) -> Out:
        group = window.hint(MergedGroup)
        if group is None:           # a chunk of the prompt
            return self.base.apply(params, window, cache)
        assert window.embeddings is not None and window.embedded is not None
        newest = take(jnp.concatenate([window.tokens[:, :1], jnp.maximum(group.tokens, 0)], 1), group.count[:, None])
        one = causal(newest, window.positions[:, 0] + group.count, window.live[:, :1])
        one = one.replace(embeddings=window.embeddings[:, :1], embedded=window.embedded[:, :1])
        places: Any = EntryPositions(cache, cache.length[:, None])
        out = self.base.apply(params, one, places)
        return dataclasses.replace(out, hidden=group.hidden, layers=(*(out.layers or ()), out.hidden))


@dataclasses.dataclass(frozen=True)
class Hamburger(RunsTarget, Algorithm):
    """Writes groups of tokens, each of which the model then reads as one position (Liu and Zhu, 2025).

    A round writes the next group from the hidden states of the newest position, and runs the model once over that
    group, merged. The first round only runs the model over the last token of the prompt. So the sampling policy knows
    every token of a group before it draws the next one: penalties, constraints and log-probabilities are those of the
    text as it is. An end of sequence or a stop string inside a group cuts the group.

    The position of a group, by which queries and keys are rotated, is that of its last token, as in the authors'
    training and in their implementation for GPT-Fast; the one for transformers places each group one further. The cache
    counts groups, so it fills more slowly than the text grows, and any kind of cache goes with it except those that
    run the model over single tokens again. The authors take the most likely token; here it is drawn as usual.

    Attributes:
        head: embedder and decoder.
        parameters: their weights.
        confidence: a group goes on while the probability that it does is at least this.
        length: largest number of tokens of a group; 1 is plain decoding.

    Raises:
        ValueError: a length that the decoder does not have.
    """

    __repr__ = short

    head: HamburgerHead
    parameters: Any = data()
    confidence: float = data(0.9, bare=0.0)
    length: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.length <= self.head.steps:
            raise ValueError(f"length: got {self.length}, takes 1 to {self.head.steps}")

    @property
    def traits(self) -> Traits:
        alone = "got one with 'hamburger', whose decoder writes from the states of one text; takes None, or another " \
                "algorithm"
        return Traits("HAMburger", emits=self.length, commits=1, refuses=(("guidance_scale", alone),))

    def wrap_model(self, model: Model) -> Model:
        return Merging(model)

    def init(self, params: Params, s: State) -> MergedPosition:
        dtype = params.draft[0]["places"].dtype
        shape = s.batch, self.head.read, self.head.config.width
        return MergedPosition(features=jnp.zeros(shape, dtype), known=jnp.zeros(s.batch, bool))

    def propose(self, params: Params, policy: Any, s: State) -> tuple[Window, MergedPosition]:
        tokens, count, hidden = self._written(params, policy, s)
        if (most := s.cache.max_commit()) is not None:
            count = jnp.minimum(count, most)
        newest = s.newest[:, None]
        read = jnp.where(s.algo.known[:, None], jnp.maximum(tokens, 0), newest)
        read = jnp.pad(read, ((0, 0), (0, self.head.steps - self.length)))
        vector = self.head.merge(params.draft[0], embeddings(self.model, params.target, read), jnp.maximum(count, 1))
        window = causal(jnp.concatenate([newest, jnp.maximum(tokens[:, :-1], 0)], 1), s.length - 1,
                        jnp.broadcast_to(s.running[:, None], tokens.shape))
        return window.replace(hints=(MergedGroup(tokens=tokens, count=count, hidden=hidden),),
                              embeddings=jnp.broadcast_to(vector[:, None], (*tokens.shape, vector.shape[-1])),
                              embedded=jnp.broadcast_to(jnp.arange(self.length) == 0, tokens.shape)), s.algo

    def _written(self, params: Params, policy: Any, s: State) -> tuple[Array, Array, Array]:
        """Returns the next group of each row: its tokens `i32[B, M]`, their number `i32[B]`, and the hidden states that
        predict them, `f[B, M, D]`."""
        head, (weights, confidence), features = self.head, params.draft, s.algo.features
        B, read = s.batch, head.read
        logits = lambda hidden: logits_of(self.model, params.target, hidden)
        embed = lambda tokens: embeddings(self.model, params.target, tokens).astype(features.dtype)

        def write(i: int, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            goes, count, tokens, hidden, cache = carry
            new = features[:, -1]
            if i > 0:
                x = embed(jnp.maximum(tokens[:, i - 1:i], 0))
                x = x if i > 1 else jnp.concatenate([features, x], 1)
                nodes = causal(jnp.zeros(x.shape[:2], jnp.int32), jnp.full(B, read + i - x.shape[1], jnp.int32))
                attend = lambda layer, q, k, v, **options: cache.attend(layer, q, k, v, nodes, **options)
                made = head.step(weights, nodes.tokens, embed, x, nodes.positions, i, attend)
                cache, new = cache.commit(made.entries, nodes.positions), made.hidden[:, -1]
            hidden = hidden.at[:, i].set(new)
            text = causal(jnp.concatenate([s.newest[:, None], jnp.maximum(tokens[:, :i], 0)], 1), s.length - 1)
            dist = policy.over(s, text, Out(hidden=hidden[:, :i + 1], entries=(), head=logits))
            token = dist.draw(jnp.full((B, 1), i, jnp.int32))[:, 0]
            tokens, count = tokens.at[:, i].set(jnp.where(goes, token, 0)), count + goes
            goes = goes & (token >= 0) & (jax.nn.sigmoid(-head.stop(weights, new)) >= confidence)
            return goes, count, tokens, hidden, cache

        shape = B, self.length
        carry = (s.running & s.algo.known, jnp.zeros(B, jnp.int32), jnp.zeros(shape, jnp.int32),
                 jnp.zeros((*shape, features.shape[-1]), features.dtype),
                 head.init_cache(B, read + self.length - 1, features.dtype))
        for i in range(self.length):
            carry = lax.cond(carry[0].any(), lambda carry, i=i: write(i, carry), lambda carry: carry, carry)
        _, count, tokens, hidden, _ = carry
        return tokens, count, hidden

    def decide(self, params: Params, dist: Any, s: State, window: Window, out: Out, algo: MergedPosition) -> Decision:
        group = window.hint(MergedGroup)
        assert group is not None and out.layers is not None
        features = self.head.features(out.layers[-1], out.layers[:-1])[:, 0].astype(algo.features.dtype)
        # the slot depends on the output, or XLA on CPU copies the cache to protect its readers
        slot = jnp.where(jnp.isfinite(features).all((1, 2)), s.cache.length, -1)
        source = jnp.broadcast_to(jnp.arange(self.length, dtype=jnp.int32), group.tokens.shape)
        return Decision(tokens=group.tokens, count=group.count, source=source,
                        slots=jnp.where(source == 0, slot[:, None], -1),
                        algo=MergedPosition(features=features, known=jnp.ones_like(algo.known)))


@ALGORITHMS.register("hamburger", "HAMburger: Accelerating LLM Inference via Token Smashing", "Liu & Zhu 2025",
                     family="speculative-self", needs="a trained drafter", guarantee="approximate")
def hamburger(lm: Any, draft: Any = None, confidence: Share = 0.9,
              length: Count | None = None) -> Hamburger:
    """Writes groups of up to four tokens, each of which is one position of the model, and verifies nothing.

    For models that were tuned for it (`scripts/train.py tune --objective hamburger`), with the decoder that was tuned
    with them. The cache has one entry for each group.

    Args:
        lm: the tuned model.
        draft: its embedder and decoder, from `decodax.load_drafter`.
        confidence: a group goes on while the probability that it does is at least this; lower is faster.
        length: largest number of tokens of a group; None: that of the decoder. 1 is plain decoding of `lm`.
    """
    made = trained(lm, draft, "hamburger")
    if not isinstance(made.head, HamburgerHead):
        raise ValueError(f"draft: got one with a {type(made.head).__name__}, 'hamburger' takes a HamburgerHead")
    return Hamburger(made.head, made.weights.head, confidence, length or made.head.steps)


__all__ = ["EntryPositions", "Hamburger", "hamburger"]
