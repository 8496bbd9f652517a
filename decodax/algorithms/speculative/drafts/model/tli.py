"""Token-level intersection (TLI): a draft model with another vocabulary, limited to the tokens that the target has, too
("Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies", Timor et
al., 2025).

The draft model's distribution, limited to the common tokens and normalised again, is a distribution over the target's
ids like any other. So every verifier keeps its guarantee, `Rejection` as in the paper, and every tree shape works. Two
tokens are the same if they have the same bytes; special tokens, if they have the same name.

The text may have target tokens that the draft model lacks. Systems that map ids give it the unknown token there. Here
it gets the token's bytes, tokenized with its own vocabulary, separately for each target token. So its positions differ
from the target's in each row, and tokens in its cache never change. If the vocabularies have little in common,
`Realigned` drafts better, since it uses the draft model's own tokenization of the text.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafts.model.draft_model import Drafting, DraftModel
from decodax.algorithms.speculative.drafts.model.uag import WIDTH, prefix, room_for, with_tokenizer
from decodax.algorithms.speculative.fixed_trees import Chain
from decodax.algorithms.speculative.source import Answer, Level, Source
from decodax.algorithms.speculative.verify.rejection import Rejection
from decodax.algorithms.speculative.vocabulary import Merges, append
from decodax.common.axes import constrain
from decodax.common.options import Count
from decodax.common.registry import ALGORITHMS
from decodax.common.struct import Struct, short, static, struct
from decodax.core.cache import require
from decodax.core.capabilities import check_draft_cache
from decodax.core.checks import draft_weights
from decodax.core.composed import data
from decodax.core.mesh import heads
from decodax.core.state import State, Status
from decodax.core.types import Decision, Out, Params
from decodax.core.window import Window


@struct
class CommonTokens(Struct):
    """The weights of `Intersection`, in `Params.draft`.

    Attributes:
        weights: weights of the draft model.
        ids: `i32[V]`, for each target token the draft model's id of the same token, or -1.
        pieces: `i32[C]`, the draft model's tokens for each target token, one after the other; for a common token the
            token itself.
        starts: `i32[V + 1]`, index in `pieces` of each target token's first piece.
        prefix: `i32[P]`, tokens that the draft model expects before a text.
        longest: static; largest number of pieces of a target token.
    """

    weights: Any
    ids: Array
    pieces: Array
    starts: Array
    prefix: Array
    longest: int = static()


@struct
class Mapped(Struct):
    """State of `Intersection`: each row's text in the draft model's tokens.

    Attributes:
        tokens: `i32[B, M]`, the text.
        length: `i32[B]`, number of valid tokens in it.
        seen: `i32[B]`, number of target tokens that have been converted.
        drafting: the draft model's own state, with M slots.
    """

    tokens: Array
    length: Array
    seen: Array
    drafting: Drafting


@dataclasses.dataclass(frozen=True)
class Intersection(Source):
    """Drafts with a draft model of another vocabulary, limited to the tokens that the target has, too (Timor et al.,
    2025). Make one with `Intersection.of`.

    Attributes:
        source: the draft model.
        room: number of slots of the draft model's cache for each slot of the target's. A row whose text needs more
            continues with worse drafts.
        weights: a `CommonTokens`. If you call `decodax.core.drivers` yourself, put it into `Params.draft`.

    Raises:
        ValueError: `room` is below 1.
    """

    __repr__ = short

    source: DraftModel
    room: int = 2
    weights: Any = data()

    def __post_init__(self) -> None:
        if self.room < 1:
            raise ValueError(f"room: got {self.room}, takes at least 1")

    @classmethod
    def of(cls, lm: Any, draft: Any, room: int | None = None) -> Intersection:
        """Makes the source for a target and a draft model, both results of `decodax.load` with tokenizers.

        Args:
            lm: the target.
            draft: the draft model.
            room: see `Intersection`; None: the mean number of the draft model's tokens for a target token, rounded up,
                plus one.

        Raises:
            ValueError: a model has no tokenizer, or they have no token in common.
        """
        with_tokenizer(lm, draft)
        ids, pieces = common(lm, draft)
        starts = np.cumsum([0, *map(len, pieces)])
        weights = CommonTokens(weights=draft.params, ids=jnp.asarray(ids), prefix=prefix(draft),
                               pieces=jnp.array([x for tokens in pieces for x in tokens], jnp.int32),
                               starts=jnp.asarray(starts, jnp.int32), longest=max(map(len, pieces)))
        return cls(DraftModel(draft.model), room or int(np.ceil(starts[-1] / len(pieces))) + 1, weights)

    def for_vocabulary(self, size: int) -> Intersection:
        """Returns the source unchanged: the draft model keeps its own vocabulary, and its logits are mapped to the
        target's."""
        return self

    def check_fit(self, model: Any, cache: Any) -> None:
        own = check_draft_cache(self.source.model, cache.capacity)
        require(own, frozenset(("truncation",)), "a draft model with a vocabulary of its own")

    def init(self, params: Params, s: State) -> Mapped:
        draft_weights(params.draft, self, CommonTokens)
        size, capacity = room_for(self.source.model, self.room * s.cache.capacity)
        cache = self.source.model.init_cache(s.batch, capacity, params=params.draft.weights)
        first = params.draft.prefix[:size]
        tokens = jnp.zeros((s.batch, size), jnp.int32).at[:, :first.shape[0]].set(first)
        return Mapped(tokens=tokens, length=jnp.full(s.batch, first.shape[0], jnp.int32),
                      seen=jnp.zeros(s.batch, jnp.int32), drafting=Drafting(cache=constrain(cache, heads(cache))))

    def start(self, params: Params, s: State, state: Mapped, room: int) -> tuple[Mapped, Answer]:
        own: CommonTokens = params.draft
        state = self.read_text(own, s, state)
        drafting, answer = self.source.start(_inner(params), self._own(s, state), state.drafting, room)
        return state.replace(drafting=drafting), _limited(own, answer)

    def extend(self, params: Params, s: State, state: Mapped, level: Level) -> tuple[Mapped, Answer]:
        own: CommonTokens = params.draft
        shift = state.length - s.length
        level = level.replace(tokens=jnp.maximum(own.ids[level.tokens], 0), positions=level.positions + shift[:, None])
        drafting, answer = self.source.extend(_inner(params), self._own(s, state), state.drafting, level)
        return state.replace(drafting=drafting), _limited(own, answer)

    def place(self, state: Mapped, slots: Array) -> Mapped:
        return state.replace(drafting=self.source.place(state.drafting, slots))

    def observe(self, params: Params, s: State, window: Window, out: Out, decision: Decision | None,
                state: Mapped) -> Mapped:
        if decision is not None:
            shift = (state.length - s.length)[:, None]
            fits = self._fits(state)[:, None] & (decision.slots >= 0) & (decision.slots + shift < state.tokens.shape[1])
            decision = decision.replace(slots=jnp.where(fits, decision.slots + shift, -1))
        return state.replace(drafting=self.source.observe(_inner(params), s, window, out, decision, state.drafting))

    def _fits(self, state: Mapped) -> Array:
        """Returns True for rows whose text fits in the draft model's cache, `bool[B]`."""
        return (state.length > 0) & (state.length <= state.tokens.shape[1])

    def _own(self, s: State, state: Mapped) -> State:
        """Returns the decoding state with the text in the draft model's tokens."""
        status = jnp.where(self._fits(state), s.status, jnp.asarray(Status.CAPACITY, jnp.int32))
        return s.replace(tokens=state.tokens, length=state.length, status=status)

    def read_text(self, own: CommonTokens, s: State, state: Mapped) -> Mapped:
        """Converts the target tokens that each row has got since the last call to tokens of the draft model, and
        returns the state with them appended.

        Args:
            own: the common tokens of both vocabularies.
            s: the decoding state, with the text in target tokens.
            state: the source's state, with the text in the draft model's tokens.
        """
        block = jnp.zeros(max(64, own.longest), jnp.int32)

        def row(running: Array, text: Array, length: Array, tokens: Array, end: Array,
                seen: Array) -> tuple[Array, Array, Array, Array]:
            at = seen + jnp.arange(WIDTH, dtype=jnp.int32)
            new = jnp.where((at < length) & running, text[jnp.minimum(at, text.shape[0] - 1)], -1)
            found, count, taken = append(own.pieces, own.starts, block, jnp.zeros((), jnp.int32), new)
            place = jnp.arange(block.shape[0], dtype=jnp.int32)
            now = tokens.at[jnp.where(place < count, end + place, tokens.shape[0])].set(found, mode="drop")
            # a draft that is no common token (where the policy forbids all of them) was not what it is read as
            new = jnp.maximum(new, 0)
            strange = (at - seen < taken) & (own.ids[new] < 0)
            sizes = own.starts[new + 1] - own.starts[new]
            kept = jnp.min(jnp.where(strange, jnp.cumsum(sizes) - sizes, block.shape[0]))
            return now, end + count, seen + taken, end + kept

        def step(state: Mapped) -> Mapped:
            tokens, length, seen, kept = jax.vmap(row)(s.running, s.tokens, s.length, state.tokens, state.length,
                                                       state.seen)
            cache: Any = state.drafting.cache
            cache = cache.truncate(jnp.maximum(kept, 0))
            return Mapped(tokens, length, seen, Drafting(cache=cache))

        return lax.while_loop(lambda state: (s.running & (state.seen < s.length)).any(), step, state)


def common(lm: Any, draft: Any) -> tuple[np.ndarray, list[list[int]]]:
    """Compares the vocabularies of a target and a draft model. Returns the draft model's id of each target token,
    `i32[V]`, -1 where it has no such token, and for each target token the list of draft-model tokens that spell it.

    Raises:
        ValueError: the vocabularies have no token in common.
    """
    target, own = (Merges.of(x.tokenizer, x.vocab_size) for x in (lm, draft))
    ids = np.full(target.size, -1, np.int32)
    names = [_special(x.tokenizer, y) for x, y in ((lm, target), (draft, own))]
    for mine, others in ((target.ids, own.ids), names):
        for word in mine.keys() & others.keys():
            ids[mine[word]] = others[word]
    if (ids < 0).all():
        raise ValueError("draft: its vocabulary has no token in common with the target's")
    pieces = [[int(i)] if i >= 0 else own.split(word) for i, word in zip(ids, target.spelled, strict=True)]
    return ids, pieces


def _special(tokenizer: Any, merges: Merges) -> dict[bytes, int]:
    """Returns the ids of the special tokens by name."""
    literal = tokenizer.token_bytes(skip_special_tokens=False)[:merges.size]
    return {word: i for i, word in enumerate(literal) if word and not merges.spelled[i]}


def _inner(params: Params) -> Params:
    return params.replace(draft=params.draft.weights)


def _limited(own: CommonTokens, answer: Answer) -> Answer:
    """Returns the draft model's answer with logits for the target's ids, -inf for tokens that are not common."""
    chosen = answer.logits[..., jnp.maximum(own.ids, 0)]
    return answer.replace(logits=jnp.where(own.ids >= 0, chosen, -jnp.inf))


@ALGORITHMS.register("tli", "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for "
                     "Heterogeneous Vocabularies", "Timor et al. 2025", family="speculative-linear",
                     needs="a model and a draft model", guarantee="distribution-exact")
def tli(lm: Any, draft: Any, length: Count = 4) -> Speculative:
    """Drafts with a draft model of another vocabulary, limited to the tokens that both vocabularies have.

    For sampled texts, if most tokens are common; both models need a tokenizer.

    Args:
        lm: the target.
        draft: the draft model.
        length: number of drafts in a round.
    """
    return Speculative(Intersection.of(lm, draft), Rejection(), Chain(length))
