"""Drafts from a function that the user writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.speculative.drafter import CHAINS
from decodax.algorithms.speculative.source import Draft, Drawn
from decodax.algorithms.speculative.tree import Proposal, chain
from decodax.core.cache import Feature
from decodax.core.state import State
from decodax.core.types import Params


@dataclasses.dataclass(frozen=True)
class UserDraft(Draft):
    """Drafts the tokens that a user's function returns. With `SeedExact` the output is that of plain decoding for any
    function. A draft ends at its first negative token.

    Attributes:
        fn: a pure JAX function `(tokens i32[B, N], length i32[B]) -> (drafts i32[B, K], count i32[B])`: it returns
            drafts of the tokens after the first `length` tokens of each row, and their number. Tokens beyond a row's
            length are undefined, and the result for a row must not depend on other rows. Use a function of a module
            instead of a new lambda for each call: it is compared by identity, and a new function compiles again.
        length: `K`, largest number of drafts.

    Raises:
        ValueError: `fn` is not callable or not hashable, or the length is below 1; or, while it is traced, results of
            another structure, shape or dtype.

    >>> UserDraft(lambda tokens, length: (tokens[:, :4], length * 0 + 4), length=4).length
    4
    """

    fn: Callable[[Array, Array], tuple[Array, Array]]
    length: int
    cache_needs: ClassVar[frozenset[Feature]] = CHAINS

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise ValueError(f"fn: got {type(self.fn).__name__}, takes a function")
        try:
            hash(self.fn)
        except TypeError:
            raise ValueError(f"fn: got {type(self.fn).__name__} without a hash, takes a hashable function") from None
        if self.length < 1:
            raise ValueError(f"length: got {self.length}, takes at least 1")

    def propose(self, params: Params, policy: Any, s: State, state: Any, drawn: Drawn) -> tuple[Proposal, Any]:
        result = self.fn(s.tokens, s.length)
        if not isinstance(result, tuple) or len(result) != 2:
            raise ValueError(f"fn: returned {type(result).__name__}, takes a pair of drafts and count")
        tokens, count = (jnp.asarray(x) for x in result)
        for name, x, shape in (("drafts", tokens, (s.batch, self.length)), ("count", count, (s.batch,))):
            if x.shape != shape or not jnp.issubdtype(x.dtype, jnp.integer):
                raise ValueError(f"fn: returned {name} {x.dtype}{list(x.shape)}, takes int32{list(shape)}")
        real = jnp.cumprod(tokens >= 0, 1).sum(1)
        return chain(jnp.maximum(tokens, 0).astype(jnp.int32), jnp.minimum(count, real).astype(jnp.int32)), state
