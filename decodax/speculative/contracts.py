"""What drafts, sources and verifiers of a user's own must return, checked while they are traced."""

from __future__ import annotations

from typing import Any

from decodax.core.contracts import array, instance, kind, pair
from decodax.speculative.tree import Proposal

CHAIN = "a Proposal (decodax.speculative.tree.chain makes one of tokens and how many of them count) and the state"


def proposed(draft: Any, given: Any, batch: int) -> tuple[Proposal, Any]:
    """What a draft's `propose` returned.

    Raises:
        TypeError: it is no pair of a `Proposal` and a state, or an array in it has another dtype or shape.
    """
    who, sizes = f"{type(draft).__name__}.propose", {"B": batch}
    proposal, state = pair(who, given, CHAIN)
    instance(who, proposal, Proposal, f"a pair, {CHAIN}")
    array(who, "tokens", proposal.tokens, "i[B, N]", sizes)
    array(who, "live", proposal.live, "b[B, N]", sizes)
    if proposal.parents is not None:
        array(who, "parents", proposal.parents, "i[B or 1, N]", sizes)
    if proposal.log_q is not None:
        array(who, "log_q", proposal.log_q, "f[B, J, V]", sizes)
    return proposal, state


def verified(verifier: Any, given: Any, batch: int, longest: int) -> Any:
    """What a verifier returned.

    Raises:
        TypeError: it is no triple of a path, how many drafts of it hold, and the target's own token.
    """
    who, sizes = type(verifier).__name__, {"B": batch, "D": longest + 1}
    if not isinstance(given, tuple) or len(given) != 3:
        raise TypeError(f"{who}: returned {kind(given)}, takes a triple, path i[B, D], accepted i[B] and own i[B]")
    for name, x, form in zip(("path", "accepted", "own"), given, ("i[B, D]", "i[B]", "i[B]"), strict=True):
        array(who, name, x, form, sizes)
    return given
