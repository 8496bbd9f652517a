"""Checks of the values that users' drafts, sources, shapes and verifiers return, made while they are traced."""

from __future__ import annotations

from typing import Any

from decodax.algorithms.speculative.nodes import Answer
from decodax.algorithms.speculative.tree import Drawn, Proposal
from decodax.core.checks import array, instance, kind, pair
from decodax.core.state import State
from decodax.core.types import Params

CHAIN = ("a Proposal (decodax.algorithms.speculative.tree.chain makes one of tokens and how many of them count) and "
         "the state")


def propose(draft: Any, params: Params, policy: Any, s: State, state: Any, drawn: Drawn) -> tuple[Proposal, Any]:
    """Calls `draft.propose(params, policy, s, state, drawn)`, checks the types and shapes of its result, and returns
    it: a `Proposal` of drafts, and the draft's new state.

    Raises:
        TypeError: the result is not a pair of a `Proposal` and a state, or an array in it has another dtype or shape.
    """
    who, sizes = f"{type(draft).__name__}.propose", {"B": s.batch}
    proposal, state = pair(who, draft.propose(params, policy, s, state, drawn), CHAIN)
    instance(who, proposal, Proposal, f"a pair, {CHAIN}")
    array(who, "tokens", proposal.tokens, "i[B, N]", sizes)
    array(who, "live", proposal.live, "b[B, N]", sizes)
    if proposal.parents is not None:
        array(who, "parents", proposal.parents, "i[B or 1, N]", sizes)
    if proposal.log_q is not None:
        array(who, "log_q", proposal.log_q, "f[B, J, V]", sizes)
    return proposal, state


def grow(shape: Any, grower: Any, state: Any) -> tuple[Proposal, Any, Any]:
    """Calls `shape.grow(grower, state)`, checks its result and returns it: a `Proposal` (the draft tree), the source's
    state, and the window indices of the expanded nodes.

    Raises:
        TypeError: the result is not a triple that begins with a `Proposal`.
    """
    who, given = f"{type(shape).__name__}.grow", shape.grow(grower, state)
    if not isinstance(given, tuple) or len(given) != 3:
        raise TypeError(f"{who}: returned {kind(given)}, takes a triple, a Proposal, the source's state and window "
                        "nodes i[B or 1, R]")
    instance(who, given[0], Proposal, "a Proposal first")
    return given


def answered(source: Any, method: str, given: Any, batch: int, width: int) -> tuple[Any, Any]:
    """Checks and returns the result of a source's method `start` or `extend`, for `width` nodes of each row.

    Raises:
        TypeError: it is no pair of a state and an `Answer`, or its logits have another dtype or shape.
    """
    who = f"{type(source).__name__}.{method}"
    answer = pair(who, given, "the source's state and an Answer")[1]
    if not isinstance(answer, Answer):
        raise TypeError(f"{who}: returned {kind(given)}, takes a pair, the source's state and an Answer")
    array(who, "logits", answer.logits, "f[B, w, V]", {"B": batch, "w": width})
    return given


def verified(verifier: Any, given: Any, batch: int, longest: int) -> Any:
    """Checks `given`, the result of a verifier for trees with paths of at most `longest` drafts, and returns it: the
    accepted path, `i32[B, longest + 1]`, the number of accepted drafts, `i32[B]`, and the target's next token,
    `i32[B]`.

    Raises:
        TypeError: it is not a triple, or an array in it has another dtype or shape.
    """
    who, sizes = type(verifier).__name__, {"B": batch, "D": longest + 1}
    if not isinstance(given, tuple) or len(given) != 3:
        raise TypeError(f"{who}: returned {kind(given)}, takes a triple, path i[B, D], accepted i[B] and own i[B]")
    for name, x, form in zip(("path", "accepted", "own"), given, ("i[B, D]", "i[B]", "i[B]"), strict=True):
        array(who, name, x, form, sizes)
    return given
