"""Lengths of texts: the number of new tokens of each prompt, the positions of the model, and the contexts before
prompts."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from decodax.cache.prefix import Prefix
from decodax.common.arguments import outside, whole, whole_rows
from decodax.engine.config import Config
from decodax.io.load import LM
from decodax.io.prompts import read_prompts, spell

NEW = 64
"""Default of the number of new tokens, if neither the call nor the model gives one."""


def new_tokens(lengths: np.ndarray, max_new: Any, max_length: Any, said: Config) -> tuple[np.ndarray, str]:
    """Returns the maximum number of new tokens of each prompt, `i64[B]`, and the name of the argument that determines
    it ("max_new_tokens" or "max_length").

    Args:
        lengths: `i64[B]`, number of tokens of each prompt.
        max_new, max_length: the arguments `max_new_tokens` and `max_length` of `generate`; at most one of them is
            given.
        said: the generation config of the model, used if neither is given.
    """
    if max_new is not None and max_length is not None:
        raise ValueError("max_length and max_new_tokens: got both, takes one of them")
    if max_length is not None:
        return _left_by(lengths, "max_length", max_length), "max_length"
    if max_new is not None:
        new = np.array(whole_rows("max_new_tokens", max_new, len(lengths), default=-1), np.int64)
        return (np.where(new < 0, new_tokens(lengths, None, None, said)[0], new) if (new < 0).any() else new,
                "max_new_tokens")
    own = said.or_given("max_new_tokens", None, whole)
    if own is None and said.entries.get("max_length") is not None:
        return said.or_given("max_length", None, lambda name, x: _left_by(lengths, name, whole(name, x))), "max_length"
    return np.full(len(lengths), NEW if own is None else own), "max_new_tokens"


def _left_by(lengths: np.ndarray, name: str, limit: Any) -> np.ndarray:
    """Returns the number of new tokens that a maximum length leaves after each prompt."""
    total = np.array(whole_rows(name, limit, len(lengths), 1, default=-1), np.int64)
    total = np.where(total < 0, lengths + NEW, total)
    if (short := np.flatnonzero(total < lengths)).size:
        raise ValueError(f"{name}: got {total[short[0]]} for a prompt of {lengths[short[0]]} tokens; it counts the "
                         "prompt, max_new_tokens does not")
    return total - lengths


def check_room(lm: LM, longest: int, name: str, what: str = "prompt and new tokens", hint: str = "") -> None:
    """Checks a length against the model's positions, and warns if it exceeds the trained length.

    Args:
        lm: the model.
        longest: the length in tokens.
        name: argument that determines it, for messages.
        what: what is that long, for messages.
        hint: end of the warning.

    Raises:
        ValueError: the model has fewer positions.
    """
    limit = lm.model.max_positions
    if limit is not None and longest > limit:
        raise ValueError(f"{name}: {what} are {longest}, the model has {limit} positions")
    trained = lm.model.trained_positions
    if trained is not None and longest > trained:
        warnings.warn(f"{name}: {what} are {longest}, the model was made for {trained}{hint}", stacklevel=outside())


def check_reach(lm: LM, lengths: np.ndarray, budget: np.ndarray, name: str) -> None:
    """Checks prompts and their new tokens with `check_room`; a prompt that is too long by itself is named in the
    message.

    Args:
        lm: the model.
        lengths: `i64[B]`, number of tokens of each prompt.
        budget: `i64[B]`, number of new tokens of each prompt.
        name: argument that determines the number of new tokens.
    """
    totals: Any = lengths + budget
    row, most = int(lengths.argmax()), int(totals.argmax())
    bounds = [x for x in (lm.model.max_positions, lm.model.trained_positions) if x is not None]
    if bounds and lengths[row] > min(bounds):
        check_room(lm, int(lengths[row]), f"prompts[{row}]", "the prompt's tokens")
    else:
        fit = min(bounds, default=0) - int(lengths[most])
        check_room(lm, int(totals[most]), name, hint="; later tokens are seldom of use. There is room for "
              f"{fit} new tokens, and progress=True shows how far a long call is")


def prefixes_of(lm: LM, context: Any, count: int) -> list[Prefix] | None:
    """Returns the `Prefix` (keys and values of the context) of each of `count` prompts, given as one for all or one for
    each. None if the contexts are texts, which are still to be prefilled."""
    rows = [context] if isinstance(context, Prefix) else context if isinstance(context, list | tuple) else []
    if not any(isinstance(row, Prefix) for row in rows):
        return None
    if not all(isinstance(row, Prefix) for row in rows) or len(rows) not in (1, count):
        raise ValueError(f"context: got {len(rows)} for {count} prompts, takes one prefix, or one for each; or texts")
    from decodax.caches.prefix.prefix import check_layers  # a call without a prefix need not import the caches
    for row in rows:
        check_layers(row, lm.model)
    return list(rows) * (count // len(rows))


def after_contexts(lm: LM, before: list[list[int]], ids: list[list[int]],
                   given: list[tuple[Any, str]]) -> list[list[int]]:
    """Returns the token ids of each context followed by its prompt.

    A prompt that is a text is tokenized as the continuation. Another one loses its first token if that is the BOS token
    with which the context begins, too.

    Args:
        lm: the model.
        before: token ids of each context.
        ids: token ids of each prompt by itself.
        given: each prompt as the caller passed it, and its name for errors.
    """
    # a tokenizer that begins chats with a token of its own has begun the context with it
    again = lambda a, b: b[0] == lm.bos == a[0] and len(b) > 1
    return [a + (spell(lm, row, name, after=a) if isinstance(row, str) and row else b[1:] if again(a, b) else b)
            for a, b, (row, name) in zip(before, ids, given, strict=True)]


def contexts_of(lm: LM, context: Any, count: int) -> list[list[int]]:
    """Returns the token ids of the context of each of `count` prompts. `context` is one text or list of ids for all
    prompts, or a list with one for each."""
    rows = read_prompts(lm, context, "context")
    if len(rows) not in (1, count):
        raise ValueError(f"context: got {len(rows)} for {count} prompts, takes one, or one for each")
    return rows * (count // len(rows))
