"""Universal assisted generation: a draft model with another tokenizer, whose text is tokenized again for the target
(Korat et al., 2024). It is string-level exact match (SLEM) of "Accelerating LLM Inference with Lossless Speculative
Decoding Algorithms for Heterogeneous Vocabularies" (Timor et al., 2025).

In each round the bytes of the target's new tokens are tokenized for the draft model, the draft model continues the
text, and the bytes of its continuation are tokenized for the target; these tokens are the drafts. With `SeedExact` the
output has exactly the tokens of plain decoding, greedy or sampled, which is the papers' exact match. The draft model
takes its most likely token, since its own draw would equal the target's draw less often.

The papers call the two tokenizers between rounds; here all of this happens inside the compiled round. So text is
tokenized by `decodax.algorithms.speculative.vocabulary`, which follows the tokenizer's own rule except for its split
into words. This affects how much is accepted, but not the output. New bytes may change the tokenization of the last
word. Tokens count as final up to the last border that no token crosses, and the draft model's cache is truncated to the
tokens that did not change (the papers go back a fixed number of tokens). Special tokens have no bytes: as in the
papers, the draft model does not get the target's, and one of its own ends the draft.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.algorithms.plain import Autoregressive
from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafter import CHAINS
from decodax.algorithms.speculative.drafts.model.draft_model import catch_up
from decodax.algorithms.speculative.source import Draft, Drawn
from decodax.algorithms.speculative.tree import Proposal, chain
from decodax.algorithms.speculative.verifier import SeedExact, Verifier
from decodax.algorithms.speculative.vocabulary import ByteVocabulary, append
from decodax.common.axes import constrain
from decodax.common.options import Count
from decodax.common.registry import ALGORITHMS
from decodax.common.struct import Struct, short, struct
from decodax.core.cache import Feature, require
from decodax.core.capabilities import check_draft_cache
from decodax.core.checks import draft_weights
from decodax.core.composed import data
from decodax.core.mesh import heads
from decodax.core.round import run
from decodax.core.state import State, Stats, Status
from decodax.core.types import Decision, Model, Out, Params
from decodax.core.window import Window
from decodax.pallas_kernels.window_attention import whole_blocks
from decodax.sampling.base import Temperature
from decodax.sampling.distribution import Policy

WIDTH = 32
"""Number of target tokens that are converted at once."""


@struct
class AlignedVocabularies(Struct):
    """The weights of `Realigned`, in `Params.draft`.

    Attributes:
        weights: weights of the draft model.
        draft: the draft model's vocabulary.
        target: the target's vocabulary.
        prefix: `i32[P]`, tokens that the draft model expects before a text.
        ends: `i32[E]`, the draft model's end tokens.
    """

    weights: Any
    draft: ByteVocabulary
    target: ByteVocabulary
    prefix: Array
    ends: Array


@struct
class Reading(Struct):
    """State of `Realigned`: each row's text in the draft model's tokens.

    Attributes:
        tokens: `i32[B, M + 1]`, the text, and after it the draft model's continuation.
        cache: the draft model's cache, with M slots.
        length: `i32[B]`, number of tokens of the text.
        final: `i32[B]`, number of these that later text cannot change.
        tail: `u8[B, T]`, the bytes after the final tokens.
        waiting: `i32[B]`, number of valid bytes in `tail`.
        seen: `i32[B]`, number of target tokens that have been converted.
    """

    tokens: Array
    cache: Any
    length: Array
    final: Array
    tail: Array
    waiting: Array
    seen: Array


@dataclasses.dataclass(frozen=True)
class Realigned(Draft):
    """Drafts the text of a draft model in the target's tokens (Korat et al., 2024; Timor et al., 2025). Make one with
    `Realigned.of`.

    Attributes:
        model: the draft model.
        length: `K`, largest number of target tokens in a draft.
        steps: number of tokens that the draft model makes in a round; None: `length`. A draft model with short tokens,
            such as bytes, needs more.
        room: number of slots of the draft model's cache for each slot of the target's. A row whose text needs more, or
            more positions than the draft model has, continues without drafts.
        window: number of bytes `T` that are tokenized at once, at least twice the longest target token.
        weights: an `AlignedVocabularies`. If you call `decodax.core.drivers` yourself, put it into `Params.draft`.

    Raises:
        ValueError: a number below 1, or `model` is no `Model`.
    """

    __repr__ = short

    model: Any
    length: int = 5
    steps: int | None = None
    room: int = 2
    window: int = 256
    weights: Any = data()
    cache_needs: ClassVar[frozenset[Feature]] = CHAINS

    def __post_init__(self) -> None:
        for name in ("length", "steps", "room", "window"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}: got {value}, takes at least 1")
        if not isinstance(self.model, Model):
            raise ValueError(f"model: got {type(self.model).__name__}, takes a Model; Realigned.of takes what "
                             "decodax.load gave")
        if self.weights is not None:
            self._check_window(self.weights)

    def _check_window(self, weights: AlignedVocabularies) -> None:
        if self.window < 2 * weights.target.longest:
            raise ValueError(f"window: got {self.window} bytes, takes {2 * weights.target.longest} or more, twice the "
                             "longest target token")

    @classmethod
    def of(cls, lm: Any, draft: Any, length: int = 5, steps: int | None = None, room: int | None = None) -> Realigned:
        """Makes the draft for a target and a draft model, both results of `decodax.load` with tokenizers.

        Args:
            lm: the target.
            draft: the draft model.
            length: see `Realigned`.
            steps: see `Realigned`.
            room: see `Realigned`; None: the ratio of the mean lengths of both vocabularies' tokens, rounded up, plus
                one.

        Raises:
            ValueError: a model has no tokenizer, or no text can be split into its tokens.
        """
        with_tokenizer(lm, draft)
        own, target = (ByteVocabulary.build(x.tokenizer, x.vocab_size) for x in (draft, lm))
        mean = lambda v: float(v.starts[-1]) / np.count_nonzero(np.diff(v.starts))
        alignment = AlignedVocabularies(weights=draft.params, draft=own, target=target, prefix=prefix(draft),
                              ends=jnp.array(draft.eos, jnp.int32))
        return cls(draft.model, length, steps, room or int(np.ceil(mean(target) / mean(own))) + 1,
                   max(128, 1 << (2 * target.longest - 1).bit_length()), alignment)

    def check_fit(self, model: Any, cache: Any) -> None:
        own = check_draft_cache(self.model, cache.capacity, drafts=False)
        require(own, frozenset(("truncation",)), "a draft model with a vocabulary of its own")

    def init(self, params: Params, s: State) -> Reading:
        self._check_window(draft_weights(params.draft, self, AlignedVocabularies))
        size, capacity = room_for(self.model, self.room * s.cache.capacity)
        cache = self.model.init_cache(s.batch, capacity, params=params.draft.weights)
        first = params.draft.prefix[:size]
        zero = lambda: jnp.zeros(s.batch, jnp.int32)
        return Reading(tokens=jnp.zeros((s.batch, size + 1), jnp.int32).at[:, :first.shape[0]].set(first),
                       cache=constrain(cache, heads(cache)), length=zero() + first.shape[0],
                       final=zero() + first.shape[0], tail=jnp.zeros((s.batch, self.window), jnp.uint8), waiting=zero(),
                       seen=zero())

    def propose(self, params: Params, policy: Any, s: State, state: Reading, drawn: Drawn) -> tuple[Proposal, Reading]:
        own: AlignedVocabularies = params.draft
        state = self.read_text(own, s, state)
        steps = self.steps or self.length
        drafts = s.running & (state.length > 0) & (state.length + steps < state.tokens.shape[1])
        cache = state.cache.truncate(jnp.maximum(state.length - 1, 0))
        greedy = Policy(transforms=(Temperature(jnp.zeros(s.batch)),),
                        eos=jnp.broadcast_to(own.ends, (s.batch, own.ends.shape[0])))
        zero = lambda: jnp.zeros_like(s.length)
        mine = s.replace(tokens=state.tokens, length=state.length, cache=cache, algo=None, policy=(None,), stop=zero(),
                         record=None, status=jnp.where(drafts, Status.RUNNING, Status.LENGTH).astype(jnp.int32),
                         stats=Stats(zero(), zero(), zero(), jnp.zeros((s.batch, 2), jnp.int32), zero()),
                         prompt_length=state.length, min_new=zero(), max_length=state.length + steps)
        for chunk, newest in ((64, 9), (8, 1)):     # a prompt, then the few tokens that a round adds
            mine = mine.replace(cache=catch_up(self.model, own.weights, mine, mine.cache, chunk, newest))
        done = run(Autoregressive(), self.model, Params(own.weights), greedy, mine, steps)

        index = state.length[:, None] + jnp.arange(steps, dtype=jnp.int32)
        made = jnp.take_along_axis(done.tokens, jnp.minimum(index, done.tokens.shape[1] - 1), 1)
        spelled = (index < done.length[:, None]) & (own.draft.lengths(made) > 0)
        empty = jnp.zeros((s.batch, self.window), jnp.uint8)
        data, count, _ = jax.vmap(append, (None, None, 0, 0, 0))(own.draft.text, own.draft.starts, empty, zero(),
                                                                jnp.where(spelled, made, -1))
        tokens, covered = jax.vmap(lambda data, count: self.drafts_of(own.target, data, count))(data, count)
        return chain(tokens, covered), state.replace(tokens=done.tokens, cache=done.cache)

    def observe(self, params: Params, s: State, window: Window, out: Out, decision: Decision | None,
                state: Reading) -> Reading:
        return state

    def read_text(self, own: AlignedVocabularies, s: State, state: Reading) -> Reading:
        """Converts the target tokens that each row has got since the last call to tokens of the draft model, and
        returns the state with them.

        Args:
            own: both vocabularies.
            s: the decoding state, with the text in target tokens.
            state: the draft's state, with the text in the draft model's tokens.
        """
        place = jnp.arange(self.window, dtype=jnp.int32)

        def row(running: Array, text: Array, length: Array, tokens: Array, final: Array, tail: Array, waiting: Array,
                seen: Array) -> tuple[Array, ...]:
            at = seen + jnp.arange(WIDTH, dtype=jnp.int32)
            new = jnp.where((at < length) & running, text[jnp.minimum(at, text.shape[0] - 1)], -1)
            data, count, taken = append(own.target.text, own.target.starts, tail, waiting, new)
            found, cut = own.draft.split(data, count)
            cut = jnp.where(count - cut > self.window // 2, count, cut)      # the next token must find room
            rank = final + jnp.cumsum(found >= 0) - 1
            now = tokens.at[jnp.where(found >= 0, rank, tokens.shape[0])].set(found, mode="drop")
            changed = now != tokens
            kept = jnp.where(changed.any(), jnp.argmax(changed), tokens.shape[0]).astype(jnp.int32)
            fixed = final + ((found >= 0) & (place < cut)).sum(dtype=jnp.int32)
            moved = data[jnp.minimum(place + cut, self.window - 1)]
            return (now, final + (found >= 0).sum(dtype=jnp.int32), fixed, moved, count - cut, seen + taken, kept)

        def step(state: Reading) -> Reading:
            tokens, length, final, tail, waiting, seen, kept = jax.vmap(row)(
                s.running, s.tokens, s.length, state.tokens, state.final, state.tail, state.waiting, state.seen)
            cache = state.cache.truncate(kept)
            return Reading(tokens, cache, length, final, tail, waiting, seen)

        return lax.while_loop(lambda state: (s.running & (state.seen < s.length)).any(), step, state)

    def drafts_of(self, target: ByteVocabulary, data: Array, count: Array) -> tuple[Array, Array]:
        """Tokenizes one row's drafted text for the target.

        Args:
            target: the target's vocabulary.
            data: `u8[T]`, the bytes of the text.
            count: `i32[]`, number of valid bytes.

        Returns:
            `i32[K]`, target tokens, and `i32[]`, how many of them spell the text without leaving out a byte.
        """
        found, _ = target.split(data, count)
        order = jnp.nonzero(found >= 0, size=self.length, fill_value=self.window - 1)[0].astype(jnp.int32)
        tokens = found[order]
        ends = order + target.lengths(jnp.maximum(tokens, 0))
        follows = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]]) == order
        return jnp.maximum(tokens, 0), jnp.cumprod((tokens >= 0) & follows).sum(dtype=jnp.int32)


def with_tokenizer(*lms: Any) -> None:
    """Raises ValueError unless all models have a tokenizer."""
    for lm in lms:
        if lm.tokenizer is None:
            raise ValueError(f"{lm.name}: has no tokenizer, and drafts with another "
                             "vocabulary go by the text")


def prefix(draft: Any) -> Array:
    """Returns the beginning-of-text token if the model's tokenizer puts one before every text, `i32[1]`, else
    `i32[0]`."""
    bos = draft.tokenizer.bos_id
    return jnp.array([bos] if bos is not None and draft.tokenizer.encode("")[:1] == [bos] else [], jnp.int32)


def room_for(model: Model, wanted: int) -> tuple[int, int]:
    """Returns the largest number of tokens that the draft model reads of a text, which is `wanted` or the model's
    number of positions if that is smaller, and the number of cache slots for these tokens (whole blocks)."""
    tokens = min(wanted, model.max_positions or wanted)
    return tokens, whole_blocks(tokens)


@ALGORITHMS.register("uag", "Universal Assisted Generation: Faster Decoding with Any Assistant Model",
                     "Korat et al. 2024; Timor et al. 2025", family="speculative-linear",
                     needs="a model and a draft model", guarantee="seed-exact")
def uag(lm: Any, draft: Any, length: Count = 5, steps: Count | None = None,
        verify: Verifier = SeedExact()) -> Speculative:
    """Drafts with a draft model of any vocabulary, whose text is tokenized again for the target.

    For tokenizers that have little in common; both models need one. This is string-level exact match (SLEM).

    Args:
        lm: the target.
        draft: the draft model.
        length: largest number of target tokens in a draft.
        steps: number of tokens that the draft model makes in a round; None: `length`.
        verify: the rule that accepts drafts.
    """
    return Speculative(Realigned.of(lm, draft, length, steps), verify)
