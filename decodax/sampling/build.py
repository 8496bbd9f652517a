"""Builds a policy from keyword arguments named as in Hugging Face's GenerationConfig, llama.cpp and vLLM.

Processors are applied in transformers' order. Those that transformers does not have are placed as in llama.cpp: biases
and count penalties first, samplers that adapt to the distribution's shape after truncation, Mirostat last.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from decodax.common.arguments import (
    unknown_argument,
    whole,
)
from decodax.common.table import ARGUMENTS
from decodax.sampling.base import Temperature, Transform
from decodax.sampling.distribution import Policy
from decodax.sampling.parts import Arguments, against_ngrams, bans, biases, ends, own, penalties, samplers, watermark

COMPANIONS = {name: own.needs for name, own in ARGUMENTS.items() if own.needs is not None}
"""Arguments that have no effect without another argument, and the name of that argument."""


def build(batch: int, *, do_sample: Any = None, temperature: Any = None, top_k: Any = None, top_p: Any = None,
          min_p: Any = None, typical_p: Any = None, epsilon_cutoff: Any = None, eta_cutoff: Any = None,
          top_h: Any = None, repetition_penalty: Any = None, encoder_repetition_penalty: Any = None,
          no_repeat_ngram_size: Any = None, encoder_no_repeat_ngram_size: Any = None, bad_words_ids: Any = None,
          sequence_bias: Any = None, suppress_tokens: Any = None, begin_suppress_tokens: Any = None,
          forced_bos_token_id: Any = None, forced_eos_token_id: Any = None, max_length: Any = None,
          max_new_tokens: Any = None, min_length: Any = None, min_new_tokens: Any = None,
          exponential_decay_length_penalty: Any = None, watermarking_config: Any = None,
          presence_penalty: Any = None, frequency_penalty: Any = None, penalty_last_n: Any = None,
          logit_bias: Any = None, allowed_token_ids: Any = None, dry_multiplier: Any = None, dry_base: Any = 1.75,
          dry_allowed_length: Any = 2, dry_penalty_last_n: Any = -1, dry_sequence_breakers: Any = None,
          xtc_probability: Any = None, xtc_threshold: Any = 0.1, top_n_sigma: Any = None, mirostat_tau: Any = None,
          mirostat_eta: Any = 0.1, dynatemp_range: Any = None, dynatemp_exponent: Any = 1.0,
          bregman_lambda: Any = None, bregman_alpha: Any = 1.5, bregman_dual: Any = False, fsd_alpha: Any = None,
          fsd_beta: Any = 0.9, fsd_k: Any = 3, fsd_n: Any = 3, fsd_stop_words: Any = None, fsd_stop_weight: Any = 0.0,
          nmst_epsilon: Any = None, min_tokens_to_keep: int = 1, transforms: tuple[Transform, ...] = (),
          eos: Any = None, eos_token_id: Any = None, vocab_size: int | None = None, stops: Any = None,
          **unknown: Any) -> Policy:
    """Builds a sampling policy for `batch` rows.

    A number holds for all rows; a list has one number for each row (None in the list is neutral). In the same way,
    token lists hold for all rows or are lists of lists. A neutral number (top_p=1) adds no transform. Other values of
    the same arguments never recompile; adding or removing an argument does. A temperature is always part of the chain.

    Args:
        batch: number of rows.
        do_sample: False: greedy decoding, the default unless there is a temperature; then the temperature must be None,
            0 or 1. True without a temperature: temperature 1.
        temperature: 0: greedy decoding.
        top_k: 0 or -1 keeps all.
        top_p, min_p, typical_p, epsilon_cutoff, eta_cutoff, top_h: the truncations of transformers (`TopP`, `MinP`,
            `Typical`, `Epsilon`, `Eta`, `TopH`).
        repetition_penalty: for all tokens of the text, as in transformers, or for its last `penalty_last_n` tokens
            (llama.cpp).
        presence_penalty, frequency_penalty: amounts subtracted from logits of tokens that have been generated, once and
            for each occurrence (OpenAI, vLLM).
        penalty_last_n: number of last tokens, including the prompt, to which these three penalties apply (llama.cpp);
            -1: all tokens of the text.
        encoder_repetition_penalty, encoder_no_repeat_ngram_size: rules for tokens and n-grams of the prompt
            (`EncoderRepetition`, `EncoderNoRepeatNgram`).
        bad_words_ids: token sequences; a single end-of-sequence token among them is ignored, as in transformers.
        sequence_bias: `{(id, ...): bias}` or `[[[id, ...], bias], ...]`.
        logit_bias: `{id: bias}`.
        forced_eos_token_id: forced as the last token that `max_length` (prompt included) or `max_new_tokens` allows.
        min_length, min_new_tokens: minimum length with and without the prompt; `eos` is forbidden in shorter texts.
        exponential_decay_length_penalty: `(start, factor)`, `start` in new tokens.
        watermarking_config: a dictionary with greenlist_ratio, bias, hashing_key, seeding_scheme, context_width.
        dry_sequence_breakers: token sequences.
        dynatemp_range: makes the temperature dynamic (`DynamicTemperature`), in `temperature` plus or minus this
            number. It is then applied after the truncations, as in llama.cpp.
        bregman_lambda, bregman_alpha, bregman_dual: Bregman top-k (`BregmanTopK`): the cost of each kept token, the
            kind of divergence, and whether its dual is used. fsd_alpha, fsd_beta, fsd_k, fsd_n, fsd_stop_words,
            fsd_stop_weight: frustratingly simple decoding (`FSD`), for greedy rows: the weight of the n-gram model, its
            smoothing, the number of candidates, the longest n-gram, and ids of tokens with a smaller weight. `fsd_k`
            and `fsd_n` are static.
        nmst_epsilon: sets a lower bound on the probability of the end token, which rises to 1 (`NonMonotonicEnd`).
        min_tokens_to_keep: static; smallest number of tokens that a truncation keeps, for those with this option in
            transformers.
        transforms: further transforms with `[B, ...]` fields, placed by their `stage` (see `Transform`), in the given
            order.
        eos, eos_token_id: tokens that end a row: an id, a list, or a list for each row.
        vocab_size: number of the model's logits. Ids are checked against it, logits of a draft model are cut or padded
            to it, and the watermark requires it.
        stops: the automaton of stop strings, or None.

    Raises:
        TypeError: an unknown argument; the message lists the nearest known ones.
        ValueError: a value that is not allowed or that would have no effect: an argument without the one it needs, or
            sampling arguments without a temperature or with `do_sample=False`. Neutral values
            (`decodax.sampling.neutral`) are always accepted.

    >>> [type(t).__name__ for t in build(2, temperature=[0.7, 0.0], top_p=0.9, top_k=0).transforms]
    ['Temperature', 'TopP']
    """
    given = {name: value for name, value in locals().items() if name not in ("batch", "unknown")}
    return jax.tree.map(jnp.asarray, assemble(batch, {**given, **unknown}))


def assemble(batch: int, arguments: Mapping[str, Any], samples: int = 1) -> Policy:
    """Builds the policy of `build` as host arrays, for rows that are `samples` adjacent samples of each prompt.

    Args:
        batch: number of rows, prompts times samples.
        arguments: arguments of `build`. Those with one value per row may also have one value per prompt.
        samples: number of samples of each prompt.

    Raises:
        TypeError, ValueError: the errors of `build`.
    """
    if unknown := sorted(arguments.keys() - DEFAULTS.keys()):
        raise unknown_argument(unknown[0], "build", DEFAULTS)
    given = {**DEFAULTS, **{name: value for name, value in arguments.items() if value is not None}}
    batch = whole("batch", batch, 1)
    if given["vocab_size"] is not None:
        given["vocab_size"] = whole("vocab_size", given["vocab_size"], 1)
    a = Arguments(batch, given, samples)
    if given["eos"] is not None and given["eos_token_id"] is not None:
        raise ValueError("eos and eos_token_id: got both, takes one of them")
    eos = a.ids("eos" if given["eos_token_id"] is None else "eos_token_id")
    given["eos"] = eos
    # transformers applies the watermark last. A greedy row has only one token left there, so it is marked before the
    # temperature.
    extra = own(a)
    shaping = samplers(a, extra["probabilities"])
    cold = next(t.temperature == 0 for t in shaping if isinstance(t, Temperature))
    chain = [*biases(a), *penalties(a), *bans(a), *ends(a), *extra["logits"], *watermark(a, cold),
             *against_ngrams(a, cold), *shaping, *watermark(a, ~cold), *extra["last"]]
    for name, needs in COMPANIONS.items():      # last: an invalid value is reported before one without effect
        if given[needs] is None and not _is_default(given[name], DEFAULTS[name]):
            raise ValueError(f"{name}: got {given[name]!r} without {needs}")
    return Policy(transforms=tuple(chain), eos=eos, stops=given["stops"], vocab_size=given["vocab_size"])


def _is_default(value: Any, default: Any) -> bool:
    """True if an argument has its default value in each row; an empty list counts as None."""
    if isinstance(value, (list, tuple)):
        return all(v is None or _is_default(v, default) for v in value)
    return value is default or (np.ndim(value) == 0 and bool(value == default))


DEFAULTS = {p.name: p.default for p in inspect.signature(build).parameters.values()
            if p.name not in ("batch", "unknown")}
"""The arguments of `build`, except `batch`, with their defaults."""
