"""Input-guided aggressive decoding (IAD): drafts copy the input ("Instantaneous Grammatical Error Correction with
Shallow Aggressive Decoding", Sun et al., 2021; "Lossless Acceleration for Seq2seq Generation with Aggressive Decoding",
Ge et al., 2022).

For outputs that repeat most of their input: corrections, edits, simplifications. The input of an encoder-decoder, as in
the papers, is the source that its encoder reads; that of a decoder alone is its prompt. Drafts are the input's tokens
from its beginning on. After the first token that differs, tokens are decoded one by one until some suffix of the output
occurs exactly once in the input; then drafts are the tokens after that place.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafter import CHAINS
from decodax.algorithms.speculative.fixed_trees import Chain
from decodax.algorithms.speculative.source import Draft, Drawn, Source
from decodax.algorithms.speculative.tree import Proposal, chain
from decodax.algorithms.speculative.verifier import SeedExact, Verifier
from decodax.algorithms.speculative.verify.spec_verification import SpecVerification
from decodax.common.options import Count, NonNegative, Whole, check_options
from decodax.common.registry import ALGORITHMS
from decodax.common.struct import Struct, struct
from decodax.core.cache import Feature
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params
from decodax.core.window import Window, take
from decodax.models.encoder_decoder.network import EncoderMemory
from decodax.models.inputs import ReadsText

LENGTH = 16
"""Default of the largest number of tokens in a draft, if the drafter sets none."""


@struct
class Copying(Struct):
    """State of `InputGuided`.

    Attributes:
        match: `i32[B, T]`, number of last tokens of the output that equal the input's tokens up to each place. `T` is
            the width of the encoder's source, or of the token buffer if there is none.
        at: `i32[B]`, place of the next token to copy, -1 if there is none.
    """

    match: Array
    at: Array


@dataclasses.dataclass(frozen=True)
class InputGuided(Draft):
    """Drafts the next tokens of the input, from the place that the output has reached (input-guided aggressive
    decoding).

    The input is the source of an encoder-decoder that reads text, and else the prompt. After a source, the tokens of
    the decoder's prompt after its first one, such as a forced beginning, count as output. The paper verifies the
    complete rest of the input at once; here `length` limits the window.

    Attributes:
        length: largest number of tokens in a draft.
        skip: number of tokens of the source or the prompt before the input, such as an instruction, the start of a
            template or the mark of a language.
        leave: number of tokens after the input.
        min_match: length of the shortest suffix after which the copy resumes.
        max_match: length of the longest suffix that is looked up, 3 in the authors' code; None: no limit.

    Raises:
        ValueError: a length or match below 1, `max_match` below `min_match`, or a negative number to skip or leave; or,
            before anything is traced, an encoder with an embedding table of its own, whose ids may be others.
    """

    length: Count = LENGTH
    skip: Whole = 0
    leave: Whole = 0
    min_match: Count = 1
    max_match: int | None = None
    free: ClassVar[bool] = True
    cache_needs: ClassVar[frozenset[Feature]] = CHAINS

    def __post_init__(self) -> None:
        check_options(type(self), vars(self))
        if self.max_match is not None and self.max_match < self.min_match:
            raise ValueError(f"max_match: got {self.max_match}, takes at least min_match, {self.min_match}")

    def check_fit(self, model: Any, cache: Any) -> None:
        super().check_fit(model, cache)
        if isinstance(model, ReadsText) and model.source_vocab is not None:
            raise ValueError("draft: got InputGuided for a model whose encoder has an embedding table of its own, and "
                             "so perhaps other token ids; takes one whose encoder and decoder share a table, so that "
                             "the source can be copied")

    def init(self, params: Params, s: State) -> Copying:
        text, size = _input(s)
        match, at = jnp.zeros(text.shape, jnp.int32), jnp.full(s.batch, self.skip, jnp.int32)
        if text is not s.tokens:
            match, at = jax.vmap(self._begun)(text, size, match, at, s.tokens, s.prompt_length)
        return Copying(match=match, at=at)

    def propose(self, params: Params, policy: Any, s: State, state: Any, drawn: Drawn) -> tuple[Proposal, Any]:
        text, size = _input(s)
        index = state.at[:, None] + jnp.arange(self.length, dtype=jnp.int32)
        tokens = take(text, jnp.clip(index, 0, text.shape[1] - 1))
        count = jnp.clip(size - self.leave - state.at, 0, self.length)
        return chain(tokens, jnp.where(state.at >= 0, count, 0).astype(jnp.int32)), state

    def observe(self, params: Params, s: State, window: Window, out: Out, decision: Decision | None, state: Any) -> Any:
        if decision is None:
            return state
        match, at = jax.vmap(self._follow)(*_input(s), state.match, state.at, decision.tokens, decision.count)
        return Copying(match=match, at=at)

    def _begun(self, text: Array, size: Array, match: Array, at: Array, prompt: Array,
               length: Array) -> tuple[Array, Array]:
        """Returns `match` and `at` of one row after the decoder's prompt, whose first token only starts the decoder."""
        step = lambda i, carry: self._step(text, size, carry[0], carry[1], prompt[i])
        return lax.fori_loop(1, length, step, (match, at))

    def _follow(self, text: Array, size: Array, match: Array, at: Array, tokens: Array,
                count: Array) -> tuple[Array, Array]:
        """Returns `match` and `at` of one row (see `Copying`) after its decided tokens, from the array with its input
        and the length of this (see `_input`)."""
        def step(carry: tuple[Array, Array], x: tuple[Array, Array]) -> tuple[tuple[Array, Array], None]:
            i, token = x
            moved = self._step(text, size, *carry, token)
            return jax.tree.map(lambda new, old: jnp.where(i < count, new, old), moved, carry), None

        index = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        return lax.scan(step, (match, at), (index, tokens))[0]

    def _step(self, text: Array, size: Array, match: Array, at: Array, token: Array) -> tuple[Array, Array]:
        """Returns `match` and `at` of one row after one more token of its output."""
        place, end = jnp.arange(text.shape[0], dtype=jnp.int32), size - self.leave
        given = (place >= self.skip) & (place < end)
        longer = jnp.where(given & (text == token), jnp.pad(match, (1, 0))[:-1] + 1, 0)
        # `at` may be beyond the end of the array, where indexing would give its last token
        copied = (at >= 0) & (at < end) & (text[jnp.maximum(at, 0)] == token)
        # some suffix occurs once exactly if the longest match does
        if self.max_match is not None:
            longer = jnp.minimum(longer, self.max_match)
        best = longer.max()
        unique = (best >= self.min_match) & ((longer == best).sum() == 1)
        found = jnp.where(unique, jnp.argmax(longer).astype(jnp.int32) + 1, -1)
        return longer, jnp.where(copied, at + 1, found)


def _input(s: State) -> tuple[Array, Array]:
    """Returns the arrays `i32[B, T]` that begin with each row's input, and the lengths of these, `i32[B]`: the
    encoder's sources, or if there are none the prompts."""
    memory = s.cache.inputs
    if isinstance(memory, EncoderMemory) and memory.source is not None:
        return memory.source.tokens, memory.source.length
    return s.tokens, s.prompt_length


@ALGORITHMS.register("aggressive-decoding", "Lossless Acceleration for Seq2seq Generation with Aggressive Decoding",
                     "Ge, Xia, Sun, Chen, Wei 2022", family="speculative-linear", guarantee="seed-exact")
def aggressive_decoding(length: Count | None = None, max_match: Count | None = None, beta: Count | None = None,
                        tau: NonNegative | None = None, drafter: Source | None = None,
                        verify: Verifier | None = None, skip: Whole = 0, leave: Whole = 0) -> Speculative:
    """Drafts the input itself, from the place that the output has reached. With `beta` or `tau` the output is
    approximate.

    For outputs that copy most of the input, such as corrected sentences (input-guided aggressive decoding). The input
    is the source of an encoder-decoder, and else the prompt. With `drafter` this is generalized aggressive decoding
    (GAD), for any output; `beta` and `tau` accept drafts as in GAD++.

    Args:
        length: largest number of tokens in a draft; None: the largest that `drafter` takes, 16 if that has no limit or
            the input is copied.
        max_match: length of the longest suffix of the output that is looked up to resume the copy; None: no limit.
        beta: largest rank of an accepted draft, 3 if only `tau` is given. None: exact verification.
        tau: largest distance of a draft's log-probability from that of the most likely token, 1 if only `beta` is
            given.
        drafter: GAD's drafter of blocks, such as `dx.drafts.NonAutoregressive(model, mask=id)`; None: the input is
            copied.
        verify: the rule that accepts drafts, not possible with `beta` or `tau`; None: `SeedExact`.
        skip: number of tokens before the input that are not copied, such as the start of a chat template or a mark of
            the language.
        leave: number of tokens after the input that are not copied.

    Raises:
        ValueError: `verify` beside `beta` or `tau`, or an option of copies beside `drafter`.
    """
    shape = None
    if drafter is None:
        draft: Draft | Source = InputGuided(length or LENGTH, skip, leave, max_match=max_match)
    else:
        if (given := dict(max_match=max_match, skip=skip, leave=leave)) != dict(max_match=None, skip=0, leave=0):
            raise ValueError(f"drafter: got {drafter} beside {given}, which are for copies of the input")
        longest = drafter.longest
        draft, shape = drafter, Chain(min(length or longest or LENGTH, longest or length or LENGTH))
    if beta is None and tau is None:
        return Speculative(draft, verify or SeedExact(), shape)
    if verify is not None:
        raise ValueError(f"verify: got {verify} beside beta={beta} and tau={tau}, which are a verifier of their own")
    return Speculative(draft, SpecVerification(3 if beta is None else beta, 1.0 if tau is None else tau), shape)
