"""Neutral values: values of arguments of `generate` that have no effect.

None is neutral for every argument. Neutral values are always accepted, whatever other arguments are given.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

import numpy as np

NEUTRAL: dict[str, tuple[Any, ...]] = {
    # truncations and other samplers
    "top_k": (0, -1), "top_p": (1,), "min_p": (0,), "typical_p": (1,), "epsilon_cutoff": (0,), "eta_cutoff": (0,),
    "top_h": (), "top_n_sigma": (0,), "xtc_probability": (0,), "mirostat_tau": (), "dynatemp_range": (0,),
    "bregman_lambda": (0,),
    # penalties and lengths
    "repetition_penalty": (1,), "encoder_repetition_penalty": (1,), "presence_penalty": (0,), "frequency_penalty": (0,),
    "dry_multiplier": (0,), "no_repeat_ngram_size": (0,), "encoder_no_repeat_ngram_size": (0,), "fsd_alpha": (0,),
    "nmst_epsilon": (0,), "min_length": (0,), "min_new_tokens": (0,),
    # searches
    "num_beams": (1,), "num_beam_groups": (1,), "diversity_penalty": (0,), "patience": (1,), "length_penalty": (1,),
    "early_stopping": (False,), "renormalize_logits": (False,), "penalty_alpha": (0,), "dola_layers": (),
    "arithmetic_sampling": (False,),
    # number of texts, and how they are run
    "num_samples": (1,), "num_return_sequences": (1,), "guidance_scale": (1,), "negative_prompts": (),
    "batch_size": (), "progress": (False,), "request_ids": (),
    # only in transformers
    "constraints": (), "force_words_ids": (), "remove_invalid_values": (False,), "token_healing": (False,)}
"""Neutral values by argument, besides None. For arguments not listed, None and empty lists are neutral."""


def is_neutral(name: str, value: Any) -> bool:
    """True if an argument has no effect: None, a number that changes nothing, or an empty list if no number is neutral.

    A list with a number for each row is never neutral, so that other numbers do not recompile (see `asks_nothing`).

    >>> is_neutral("top_p", 1), is_neutral("top_p", True), is_neutral("top_p", [1.0]), is_neutral("bad_words_ids", [])
    (True, False, False, True)
    """
    if value is None:
        return True
    if not (known := NEUTRAL.get(name)):
        return isinstance(value, (list, tuple, set, frozenset, Mapping)) and not value
    if isinstance(value, (bool, np.bool_)):
        return any(isinstance(x, bool) and x == value for x in known)
    if not isinstance(value, numbers.Real) and getattr(value, "ndim", None) != 0:
        return False
    try:
        return any(not isinstance(x, bool) and bool(value == x) for x in known)
    except Exception:       # an array of something that is not a number, or one that is being traced
        return False


def is_zero(value: Any) -> bool:
    """Returns True if `value`, a number, a bool or a list or array of these (one for each row), is 0 or False
    everywhere."""
    rows = value.tolist() if hasattr(value, "tolist") else value
    return all(map(is_zero, rows)) if isinstance(rows, (list, tuple)) and rows else \
        isinstance(rows, numbers.Real) and not rows


def asks_nothing(name: str, value: Any, vocab_size: int | None = None) -> bool:
    """Returns True if `is_neutral` does, and also for a list of neutral entries and for a `top_k` of at least
    `vocab_size`.

    >>> asks_nothing("top_p", [1.0, None]), asks_nothing("top_k", 500, vocab_size=375)
    (True, True)
    """
    rows = value.tolist() if getattr(value, "ndim", None) == 1 else value
    if isinstance(rows, (list, tuple)) and rows:
        return all(asks_nothing(name, x, vocab_size) for x in rows)
    whole = name == "top_k" and vocab_size is not None and isinstance(value, numbers.Real)
    return is_neutral(name, value) or (whole and value >= vocab_size)
