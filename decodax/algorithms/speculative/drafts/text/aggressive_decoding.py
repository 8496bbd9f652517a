"""Input-guided aggressive decoding (IAD): drafts copy the input ("Instantaneous Grammatical Error Correction with
Shallow Aggressive Decoding", Sun et al., 2021; "Lossless Acceleration for Seq2seq Generation with Aggressive Decoding",
Ge et al., 2022).

For outputs that repeat most of their input: corrections, edits, simplifications. Drafts are the input's tokens from its
beginning on. After the first token that differs, tokens are decoded one by one until some suffix of the output occurs
exactly once in the input; then drafts are the tokens after that place.
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


@struct
class Copying(Struct):
    """State of `InputGuided`.

    Attributes:
        match: `i32[B, N]`, number of last tokens of the output that equal the input's tokens up to each place.
        at: `i32[B]`, place of the next token to copy, -1 if there is none.
    """

    match: Array
    at: Array


@dataclasses.dataclass(frozen=True)
class InputGuided(Draft):
    """Drafts the next tokens of the input, from the place that the output has reached (input-guided aggressive
    decoding).

    The paper verifies the complete rest of the input at once; here `length` limits the window.

    Attributes:
        length: largest number of tokens in a draft.
        skip: number of prompt tokens before the input, such as an instruction or the start of a template.
        leave: number of prompt tokens after the input.
        min_match: length of the shortest suffix after which the copy resumes.
        max_match: length of the longest suffix that is looked up, 3 in the authors' code; None: no limit.

    Raises:
        ValueError: a length or match below 1, `max_match` below `min_match`, or a negative number to skip or leave.
    """

    length: Count = 16
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

    def init(self, params: Params, s: State) -> Copying:
        return Copying(match=jnp.zeros(s.tokens.shape, jnp.int32), at=jnp.full(s.batch, self.skip, jnp.int32))

    def propose(self, params: Params, policy: Any, s: State, state: Any, drawn: Drawn) -> tuple[Proposal, Any]:
        index = state.at[:, None] + jnp.arange(self.length, dtype=jnp.int32)
        tokens = take(s.tokens, jnp.clip(index, 0, s.tokens.shape[1] - 1))
        count = jnp.clip(s.prompt_length - self.leave - state.at, 0, self.length)
        return chain(tokens, jnp.where(state.at >= 0, count, 0).astype(jnp.int32)), state

    def observe(self, params: Params, s: State, window: Window, out: Out, decision: Decision | None, state: Any) -> Any:
        if decision is None:
            return state
        match, at = jax.vmap(self._follow)(s.tokens, s.prompt_length, state.match, state.at, decision.tokens,
                                           decision.count)
        return Copying(match=match, at=at)

    def _follow(self, text: Array, prompt_length: Array, match: Array, at: Array, tokens: Array,
                count: Array) -> tuple[Array, Array]:
        """Returns `match` and `at` of one row (see `Copying`) after its decided tokens."""
        place = jnp.arange(text.shape[0], dtype=jnp.int32)
        given = (place >= self.skip) & (place < prompt_length - self.leave)

        def step(carry: tuple[Array, Array], x: tuple[Array, Array]) -> tuple[tuple[Array, Array], None]:
            match, at = carry
            i, token = x
            longer = jnp.where(given & (text == token), jnp.pad(match, (1, 0))[:-1] + 1, 0)
            copied = (at >= 0) & given[jnp.maximum(at, 0)] & (text[jnp.maximum(at, 0)] == token)
            # some suffix occurs once exactly if the longest match does
            if self.max_match is not None:
                longer = jnp.minimum(longer, self.max_match)
            best = longer.max()
            unique = (best >= self.min_match) & ((longer == best).sum() == 1)
            found = jnp.where(unique, jnp.argmax(longer).astype(jnp.int32) + 1, -1)
            moved = (longer, jnp.where(copied, at + 1, found))
            return jax.tree.map(lambda new, old: jnp.where(i < count, new, old), moved, carry), None

        index = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        return lax.scan(step, (match, at), (index, tokens))[0]


@ALGORITHMS.register("aggressive-decoding", "Lossless Acceleration for Seq2seq Generation with Aggressive Decoding",
                     "Ge, Xia, Sun, Chen, Wei 2022", family="speculative-linear", guarantee="seed-exact")
def aggressive_decoding(length: Count = 16, max_match: Count | None = None, beta: Count | None = None,
                        tau: NonNegative | None = None, drafter: Source | None = None,
                        verify: Verifier | None = None) -> Speculative:
    """Drafts the input itself, from the place that the output has reached. With `beta` or `tau` the output is
    approximate.

    For outputs that copy most of the input, such as corrected sentences (input-guided aggressive decoding). With
    `drafter` this is generalized aggressive decoding (GAD), for any output; `beta` and `tau` accept drafts as in GAD++.

    Args:
        length: largest number of tokens in a draft.
        max_match: length of the longest suffix of the output that is looked up to resume the copy; None: no limit.
        beta: largest rank of an accepted draft, 3 if only `tau` is given. None: exact verification.
        tau: largest distance of a draft's log-probability from that of the most likely token, 1 if only `beta` is
            given.
        drafter: GAD's drafter of blocks, such as `dx.drafts.NonAutoregressive(model, mask=id)`; None: the input is
            copied.
        verify: the rule that accepts drafts, not possible with `beta` or `tau`; None: `SeedExact`.
    """
    draft = drafter or InputGuided(length, max_match=max_match)
    shape = None if drafter is None else Chain(min(length, drafter.longest or length))
    if beta is None and tau is None:
        return Speculative(draft, verify or SeedExact(), shape)
    if verify is not None:
        raise ValueError(f"verify: got {verify} beside beta={beta} and tau={tau}, which are a verifier of their own")
    return Speculative(draft, SpecVerification(3 if beta is None else beta, 1.0 if tau is None else tau), shape)
