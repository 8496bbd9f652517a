"""N-gram drafts: the most frequent continuation of the last tokens, and a smoothed n-gram model as a source for trees.

`NGram` is the plain table. The longest context of at most `order - 1` tokens that has occurred before (in the prompt,
the output or an optional corpus) is used, and the token that followed it most often is the next draft; of equally
frequent tokens it is the most recent. The context includes the drafts so far, so a draft need not occur in the text as
a whole.

`NGramModel` is the classic model: orders from `order` down to 1, each smoothed with the next lower one by the method of
Witten and Bell (1991), and order 1 with the uniform distribution. It is a proper distribution over the vocabulary, so
it can be used with every shape and every verifier.

Counts are taken by a pass over the tokens for each drafted node instead of from stored tables.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafter import CHAINS
from decodax.algorithms.speculative.drafts.text.history import Corpus, FromText, best_places, matched, tail
from decodax.algorithms.speculative.fixed_trees import Chain
from decodax.algorithms.speculative.source import Answer, Draft, Drawn, Level, Shape, Source
from decodax.algorithms.speculative.tree import Proposal, chain
from decodax.algorithms.speculative.verifier import SeedExact, Verifier
from decodax.common.arguments import check_counts
from decodax.common.options import Count, Range, check_options
from decodax.common.registry import ALGORITHMS
from decodax.common.struct import Struct, struct
from decodax.core.cache import Feature
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params
from decodax.core.window import Window, take


@dataclasses.dataclass(frozen=True)
class NGram(FromText, Draft):
    """Drafts a chain of the tokens that most often followed the last tokens.

    Attributes:
        length: largest number of tokens in a draft.
        order: length of the longest n-gram, including the drafted token; the shortest is a bigram.
        places: largest number of occurrences of a context that are counted; the most recent ones.

    Raises:
        ValueError: a length or number of places below 1, or an order below 2.
    """

    length: Count = 5
    order: Annotated[int, Range(2)] = 4
    places: Count = 32
    free: ClassVar[bool] = True
    cache_needs: ClassVar[frozenset[Feature]] = CHAINS

    def __post_init__(self) -> None:
        super().__post_init__()
        check_options(type(self), vars(self))

    def propose(self, params: Params, policy: Any, s: State, state: Any, drawn: Drawn) -> tuple[Proposal, Any]:
        history = self.history(params, s)

        def step(context: Array, _: None) -> tuple[Array, Array]:
            places, match = best_places(matched(history, context), self.places)
            votes = (match == match[:, :1]) & (match > 0)
            next_ = take(history, jnp.minimum(places + 1, history.shape[1] - 1))
            count = ((next_[:, :, None] == next_[:, None]) & votes[:, None]).sum(-1)
            best = jnp.argmax(jnp.where(votes, count, -1), 1)
            token = jnp.where(match[:, 0] > 0, jnp.take_along_axis(next_, best[:, None], 1)[:, 0], -1)
            # after a missing draft, -1 matches nothing
            return jnp.concatenate([context[:, 1:], token[:, None]], 1), token

        tokens = lax.scan(step, tail(s, self.order - 1), None, self.length)[1].T
        return chain(jnp.maximum(tokens, 0), (tokens >= 0).sum(1, dtype=jnp.int32)), state


@struct
class Paths(Struct):
    """State of an n-gram source while a draft tree grows: the last `n` tokens, of the text and of the path in the tree,
    up to and including each node.

    Attributes:
        contexts: `i32[B, 1 + room, n]`, oldest token first, for the newest token (index 0) and each node expanded so
            far.
    """

    contexts: Array

    @classmethod
    def start(cls, s: State, count: int, room: int) -> Paths:
        """Returns the state for a tree that has no draft yet, with space for `room` nodes. The context of the newest
        token is the last `count` tokens of each row's text."""
        contexts = jnp.full((s.batch, 1 + room, count), -1, jnp.int32)
        return cls(contexts.at[:, 0].set(tail(s, count)))

    def extend(self, level: Level) -> tuple[Paths, Array]:
        """Returns the state with the `w` nodes of `level` added, and the contexts of these nodes, `i32[B, w, n]`."""
        above = take(self.contexts, level.parents)
        new = jnp.concatenate([above[..., 1:], level.tokens[..., None]], -1)
        return Paths(lax.dynamic_update_slice_in_dim(self.contexts, new, 1 + level.at, 1)), new


@dataclasses.dataclass(frozen=True)
class NGramModel(FromText, Source):
    """A smoothed n-gram model of the text so far: a `Source` for any shape and any verifier.

    Attributes:
        vocab: size of the target's vocabulary.
        order: length of the longest n-gram, including the predicted token.

    Raises:
        ValueError: a vocabulary or order below 1.
    """

    vocab: int
    order: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "vocab", "order")

    def start(self, params: Params, s: State, state: Any, room: int) -> tuple[Any, Answer]:
        paths = Paths.start(s, max(self.order - 1, 1), room)
        return paths, Answer(self.logits(self.history(params, s), paths.contexts[:, :1]))

    def extend(self, params: Params, s: State, state: Any, level: Level) -> tuple[Any, Answer]:
        paths, contexts = state.extend(level)
        return paths, Answer(self.logits(self.history(params, s), contexts))

    def observe(self, params: Params, s: State, window: Window, out: Out, decision: Decision | None, state: Any) -> Any:
        return None         # the tree's contexts end with the round

    def logits(self, history: Array, contexts: Array) -> Array:
        """Returns the n-gram model's log-probabilities of the next token, `f32[B, w, V]`.

        Args:
            history: `i32[B, C + N]`, the tokens in which n-grams are counted; -1 separates documents.
            contexts: `i32[B, w, n]`, the tokens before the predicted ones, oldest first.
        """
        def node(history: Array, context: Array) -> Array:
            next_ = jnp.pad(history[1:], (0, 1), constant_values=-1)
            match = matched(history, context)
            p = jnp.full(self.vocab, 1 / self.vocab)
            for n in range(self.order):
                counted, token = (match >= n, next_) if n else (history >= 0, history)
                seen = jnp.zeros(self.vocab).at[jnp.where(counted, token, self.vocab)].add(1, mode="drop")
                kinds = (seen > 0).sum()
                p = jnp.where(kinds > 0, (seen + kinds * p) / jnp.maximum(seen.sum() + kinds, 1), p)
            return jnp.log(p)

        return jax.vmap(jax.vmap(node, (None, 0)))(history, contexts)


@ALGORITHMS.register("ngram", "N-gram drafts", "", family="speculative-linear", guarantee="seed-exact")
def ngram(length: Count = 5, order: Annotated[int, Range(2)] = 4, corpus: Corpus = (),
          verify: Verifier = SeedExact()) -> Speculative:
    """Drafts the most frequent continuation of the last tokens.

    Unlike `prompt_lookup` it can combine drafts from parts that never occurred together.

    Args:
        length: largest number of tokens in a draft.
        order: length of the longest n-gram, including the drafted token.
        corpus: documents of token ids that are counted beside the text.
        verify: the rule that accepts drafts.
    """
    return Speculative(NGram(length, order, corpus=corpus), verify)


@ALGORITHMS.register("ngram-model", "N-gram drafts", "", family="speculative-tree", needs="a model",
                     guarantee="seed-exact")
def ngram_model(lm: Any, order: Count = 4, shape: Shape | None = Chain(4),
                verify: Verifier = SeedExact()) -> Speculative:
    """Drafts with a smoothed n-gram model of the text, for any shape of tree.

    A baseline for shapes and verifiers that need a distribution over the complete vocabulary.

    Args:
        lm: the target.
        order: length of the longest n-gram, including the predicted token.
        shape: shape of the draft tree.
        verify: the rule that accepts drafts.
    """
    return Speculative(NGramModel(lm.vocab_size, order), verify, shape)
