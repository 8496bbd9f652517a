"""Builds transforms from the arguments of `build`, in one function for each theme.

Each function returns the transforms for its arguments, in the order in which they are applied. Neutral values add none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, get_args

import jax
import numpy as np

from decodax.common.arguments import (
    bias_rows,
    flag,
    id_rows,
    per_row,
    sequence_rows,
    shown,
    whole,
    wrong,
)
from decodax.core.checks import hashable
from decodax.sampling.adaptive import XTC, DynamicTemperature, Mirostat2, TopNSigma
from decodax.sampling.bans import AllowedTokens, BadWords, BeginSuppress, LogitBias, SequenceBias, SuppressTokens
from decodax.sampling.base import Reads, Stage, Temperature, Transform
from decodax.sampling.bregman import BregmanTopK
from decodax.sampling.degeneration import FSD, NonMonotonicEnd
from decodax.sampling.length import UNBOUNDED, ExponentialDecayLength, ForcedBOS, ForcedEOS, MinLength
from decodax.sampling.neutral import asks_nothing, is_neutral, is_zero
from decodax.sampling.penalties import EncoderRepetition, PresenceFrequency, Repetition
from decodax.sampling.repeats import Dry, EncoderNoRepeatNgram, NoRepeatNgram
from decodax.sampling.warpers import Epsilon, Eta, MinP, TopH, TopK, TopP, Typical
from decodax.sampling.watermark import SCHEMES, GreenList

LARGEST_SORTED_K = 128
"""Up to this `k`, `lax.top_k` finds the threshold of top-k faster than bisection."""

SAMPLING = ("top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h", "top_n_sigma",
            "xtc_probability", "mirostat_tau", "dynatemp_range", "bregman_lambda")
"""Arguments that only affect sampling: greedy decoding does not change with them."""


class Arguments:
    """The arguments of one call of `build`, by name. The methods check the argument that they are given by name, and
    return it as a host array with one entry for each of `B` rows."""

    def __init__(self, batch: int, given: dict[str, Any], samples: int):
        self.batch, self.given, self.samples = batch, given, samples

    def asks(self, name: str) -> bool:
        """Returns True if the argument `name` was given with a value that has an effect."""
        return not is_neutral(name, self.given[name])

    def number(self, name: str, low: float = -np.inf, high: float = np.inf, *, neutral: float = 0.0,
               open_low: bool = False, open_high: bool = False) -> Any:
        """Returns the argument `name` as `f32[B]`.

        Args:
            name: name of the argument.
            low, high: bounds of allowed values.
            neutral: value that replaces None.
            open_low, open_high: True if the bound itself is not allowed.
        """
        left, right = "(" if open_low or low == -np.inf else "[", ")" if open_high or high == np.inf else "]"
        inside = lambda x: ((x > low) if open_low else (x >= low)) & ((x < high) if open_high else (x <= high))
        value = neutral if self.given[name] is None else self.given[name]
        return per_row(name, value, self.batch, np.float32, neutral, f"a number in {left}{low:g}, {high:g}{right}",
                       inside, self.samples)

    def count(self, name: str, low: int = 0, *, neutral: int = 0) -> Any:
        """Returns the argument `name` as `i32[B]`, checked to be at least `low`; numbers above `UNBOUNDED` become
        `UNBOUNDED`."""
        value = neutral if self.given[name] is None else self.given[name]
        rows = per_row(name, value, self.batch, np.int64, neutral, f"a whole number from {low} on", lambda x: x >= low,
                       self.samples)
        return np.minimum(rows, UNBOUNDED).astype(np.int32)

    def ids(self, name: str, bounded: bool = True) -> Any:
        """Returns the token ids in the argument `name`, `i32[B, E]`, padded with -1. With `bounded`, ids must be below
        the vocabulary's size."""
        value = self.given[name]
        return id_rows(name, [] if value is None else value, self.batch, self.given["vocab_size"] if bounded else None,
                       self.samples)

    def sequences(self, name: str, *, front: bool = True) -> Any:
        """Returns the token sequences in the argument `name`, `i32[B, S, L]`, padded with -1 at the front or at the
        end."""
        return sequence_rows(name, self.given[name], self.batch, self.given["vocab_size"], front=front,
                             samples=self.samples)

    def eos(self, name: str) -> Any:
        """Returns the tokens that end a text, `i32[B, E]`, for the argument `name`, which needs them.

        Raises:
            ValueError: there are none.
        """
        if not (self.given["eos"] >= 0).any():
            raise ValueError(f"{name}: got {self.given[name]!r} without eos, the tokens that end a row")
        return self.given["eos"]


def biases(a: Arguments) -> list[Transform]:
    """Returns the transforms for the arguments `sequence_bias` and `logit_bias`."""
    chain: list[Transform] = []
    if a.asks("sequence_bias"):
        rows = bias_rows("sequence_bias", a.given["sequence_bias"], a.batch, a.samples)
        chain.append(SequenceBias(*_by_row(rows, a.batch, lambda rows: sequence_rows(
            "sequence_bias", [[s for s, _ in row] or None for row in rows], len(rows), a.given["vocab_size"]))))
    if a.asks("logit_bias"):
        rows = bias_rows("logit_bias", a.given["logit_bias"], a.batch, a.samples)
        if any(len(s) != 1 for row in rows for s, _ in row):
            raise wrong("logit_bias", a.given["logit_bias"], "single tokens; biases on sequences go into sequence_bias")
        chain.append(LogitBias(*_by_row(rows, a.batch, lambda rows: id_rows(
            "logit_bias", [[s[0] for s, _ in row] for row in rows], len(rows), a.given["vocab_size"]))))
    return chain


def _by_row(rows: list[Any], batch: int, read: Callable[[list[Any]], np.ndarray]) -> tuple[Any, Any]:
    """Returns the tokens of biases, converted by `read`, and their values, with one entry for each of `batch` rows."""
    if all(row is rows[0] for row in rows):     # the same for all rows
        rows = rows[:1]
    tokens = read(rows)
    values: np.ndarray = np.zeros(tokens.shape[:2], np.float32)
    for i, row in enumerate(rows):
        values[i, :len(row)] = [bias for _, bias in row]
    return np.broadcast_to(tokens, (batch, *tokens.shape[1:])), np.broadcast_to(values, (batch, values.shape[1]))


def penalties(a: Arguments) -> list[Transform]:
    chain: list[Transform] = []
    last_n = a.count("penalty_last_n", -1, neutral=-1)
    if a.asks("encoder_repetition_penalty"):
        chain.append(EncoderRepetition(a.number("encoder_repetition_penalty", 0, open_low=True, neutral=1)))
    if a.asks("repetition_penalty"):
        penalty = a.number("repetition_penalty", 0, open_low=True, neutral=1)
        chain.append(Repetition(penalty, _array(np.zeros(a.batch, np.int32)), last_n))
    presence, frequency = a.number("presence_penalty"), a.number("frequency_penalty")
    if a.asks("presence_penalty") or a.asks("frequency_penalty"):
        chain.append(PresenceFrequency(presence, frequency, last_n,
                                       _array(np.full(a.batch, a.given["penalty_last_n"] is not None))))
    if a.given["dry_sequence_breakers"] is None:
        a.given["dry_sequence_breakers"] = []
    dry = (a.number("dry_base", 1, neutral=1.75), a.count("dry_allowed_length", neutral=2),
           a.count("dry_penalty_last_n", -1, neutral=-1), a.sequences("dry_sequence_breakers", front=False))
    if a.asks("dry_multiplier"):
        chain.append(Dry(a.number("dry_multiplier", 0), *dry))
    if a.asks("no_repeat_ngram_size"):
        chain.append(NoRepeatNgram(a.count("no_repeat_ngram_size")))
    if a.asks("encoder_no_repeat_ngram_size"):
        chain.append(EncoderNoRepeatNgram(a.count("encoder_no_repeat_ngram_size")))
    return chain


def bans(a: Arguments) -> list[Transform]:
    """Returns the transforms for the arguments `bad_words_ids` and `allowed_token_ids`."""
    chain: list[Transform] = []
    if a.asks("bad_words_ids"):
        sequences = np.array(a.sequences("bad_words_ids"))
        alone = (sequences[:, :, -2] < 0) & (sequences[:, :, -1:] == a.given["eos"][:, None]).any(-1)
        sequences[alone] = -1
        chain.append(BadWords(_array(sequences)))
    if a.asks("allowed_token_ids"):
        chain.append(AllowedTokens(a.ids("allowed_token_ids")))
    return chain


def ends(a: Arguments) -> list[Transform]:
    chain: list[Transform] = []
    least = {name: a.count(name) for name in ("min_length", "min_new_tokens")}
    asked = [name for name, rows in least.items() if (rows > 0).any()]
    if asked:
        chain.append(MinLength(a.eos(asked[0]), *least.values()))
    if a.given["forced_bos_token_id"] is not None:
        first = a.count("forced_bos_token_id", -1, neutral=-1)
        if a.given["vocab_size"] is not None and (first >= a.given["vocab_size"]).any():
            raise wrong("forced_bos_token_id", a.given["forced_bos_token_id"],
                        f"ids below the vocabulary's size, {a.given['vocab_size']}")
        chain.append(ForcedBOS(first))
    if a.asks("forced_eos_token_id"):
        if a.given["max_length"] is None and a.given["max_new_tokens"] is None:
            raise ValueError("forced_eos_token_id: got no max_length and no max_new_tokens, takes one of them")
        chain.append(ForcedEOS(a.ids("forced_eos_token_id"), a.count("max_length", 1, neutral=UNBOUNDED),
                               a.count("max_new_tokens", 1, neutral=UNBOUNDED)))
    if a.given["exponential_decay_length_penalty"] is not None:
        pair = a.given["exponential_decay_length_penalty"]
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise wrong("exponential_decay_length_penalty", pair, "(start, factor)")
        parts = Arguments(a.batch, {"exponential_decay_length_penalty[0]": pair[0],
                                     "exponential_decay_length_penalty[1]": pair[1]}, a.samples)
        chain.append(ExponentialDecayLength(a.eos("exponential_decay_length_penalty"),
                                            parts.count("exponential_decay_length_penalty[0]"),
                                            parts.number("exponential_decay_length_penalty[1]", 0, open_low=True)))
    if a.asks("nmst_epsilon"):
        chain.append(NonMonotonicEnd(a.eos("nmst_epsilon"), a.number("nmst_epsilon", 0, 1, open_high=True)))
    if a.asks("suppress_tokens"):
        chain.append(SuppressTokens(a.ids("suppress_tokens", bounded=False)))
    if a.asks("begin_suppress_tokens"):
        chain.append(BeginSuppress(a.ids("begin_suppress_tokens", bounded=False),
                                   _array(np.full(a.batch, a.given["forced_bos_token_id"] is not None))))
    return chain


def against_ngrams(a: Arguments, cold: Any) -> list[Transform]:
    """Returns the transform of frustratingly simple decoding (`fsd_alpha` and further arguments), if it was requested.
    It takes greedy rows only; `cold` (`bool[B]`) are the rows with temperature 0."""
    alpha, rest = a.number("fsd_alpha", 0, 1), (
        a.number("fsd_beta", 0, 1, neutral=0.9), a.number("fsd_stop_weight", 0, neutral=0), a.ids("fsd_stop_words"),
        whole("fsd_k", a.given["fsd_k"], 1), whole("fsd_n", a.given["fsd_n"], 1, 16))
    if not a.asks("fsd_alpha"):
        return []
    if ((alpha > 0) & ~cold).any():
        raise ValueError(f"fsd_alpha: got {a.given['fsd_alpha']!r} with a temperature; takes greedy rows")
    return [FSD(alpha, *rest)]


def own(a: Arguments) -> dict[str, list[Transform]]:
    """Returns the transforms that the caller gave in `transforms`, by their stage ("logits", "probabilities" or
    "last"). Their arrays, which may have an entry for each row or for each prompt, get one for each row."""
    given = a.given["transforms"]
    if not isinstance(given, (list, tuple)) or not all(isinstance(t, Transform) for t in given):
        raise wrong("transforms", given, "decodax.sampling.Transform objects")
    for t in given:
        for name, said, known in (("stage", t.stage, Stage), ("needs", t.needs, Reads)):
            if said not in get_args(known):
                raise ValueError(f"transforms: {type(t).__name__} has {name}={said!r}, takes one of "
                                 f"{', '.join(map(repr, get_args(known)))}")
        for field in (field for field in dataclasses.fields(t) if field.metadata.get("static")):
            hashable("transforms", getattr(t, field.name), f"{type(t).__name__}.{field.name}")
    prompts = a.batch // a.samples
    for leaf in jax.tree.leaves(given):
        if not np.ndim(leaf) or leaf.shape[0] not in (a.batch, prompts):
            raise ValueError(f"transforms: got an array of shape {np.shape(leaf)} in one of them, takes arrays with an "
                             f"entry for each of the {a.batch} rows")
    each = lambda x: x if x.shape[0] == a.batch else x[np.repeat(np.arange(prompts), a.samples)]
    chain = jax.tree.map(each, tuple(given))
    return {stage: [t for t in chain if t.stage == stage] for stage in get_args(Stage)}


def _temperature(a: Arguments) -> np.ndarray:
    """Returns the temperatures `f32[B]`, 0 for greedy rows."""
    given, sample = a.given["temperature"], a.given["do_sample"]
    if given is None:
        a.given["temperature"] = 0.0 if sample is None else 1.0
    limits = np.finfo(np.float32)
    exact = per_row("temperature", a.given["temperature"], a.batch, np.float64, 1, "a number in [0, inf)",
                    lambda x: (x >= 0) & (x <= limits.max), a.samples)
    # A smaller number would become 0 as a float32, at least on some chips, and so greedy.
    temperature = np.where(exact > 0, np.maximum(exact, limits.tiny), 0).astype(np.float32)
    if sample is None:
        return temperature
    drawn = per_row("do_sample", sample, a.batch, np.bool_, True, "True or False", lambda x: (x == 0) | (x == 1),
                    a.samples)
    if ((temperature == 0) & drawn).any():
        raise wrong("temperature", given, "a number above 0 with do_sample=True")
    if not drawn.any() and ((temperature != 0) & (temperature != 1)).any():
        raise ValueError(f"temperature: got {shown(given)} with do_sample=False, which is greedy; takes one of them")
    return np.where(drawn, temperature, 0).astype(np.float32)


def _without_effect(a: Arguments, given: Any, cold: np.ndarray) -> None:
    """Raises ValueError for sampling arguments that have no effect because all rows are greedy. An explicit temperature
    of 0 allows them.

    Args:
        a: the arguments.
        given: the temperature argument, or None.
        cold: `bool[B]`, the greedy rows.
    """
    sample = a.given["do_sample"]
    if not cold.all() or (given is not None and (sample is None or is_zero(given))):
        return
    asked = [name for name in SAMPLING if not asks_nothing(name, a.given[name], a.given["vocab_size"])]
    if asked:
        why = "without temperature, and decoding is greedy without one; give temperature, or do_sample=True for a " \
            "temperature of 1" if sample is None else "with do_sample=False, which is greedy; takes do_sample=True"
        raise ValueError(f"{asked[0]}: got {shown(a.given[asked[0]])} {why}")


def _array(x: np.ndarray) -> Any:
    """Returns `x`; it only declares a host array as the type of a transform's field. `build` moves it to the device."""
    return x


def samplers(a: Arguments, own: list[Transform]) -> list[Transform]:
    """Returns the transforms that only affect sampling, in this order: temperature, truncations (top-k, top-p, ...),
    the given transforms `own`, XTC, dynamic temperature, Mirostat."""
    given = a.given["temperature"]
    temperature, keep = _temperature(a), whole("min_tokens_to_keep", a.given["min_tokens_to_keep"], 1)
    dynamic = a.asks("dynatemp_range")
    # A dynamic temperature acts after truncation; greedy rows are greedy from here on nevertheless.
    chain: list[Transform] = [Temperature(_array(np.where(temperature > 0, 1, 0).astype(np.float32) if dynamic
                                                 else temperature))]
    if a.asks("top_n_sigma"):
        chain.append(TopNSigma(a.number("top_n_sigma")))
    if a.given["top_h"] is not None:
        chain.append(TopH(a.number("top_h", 0, 1, open_low=True, neutral=2)))     # above 1 a row is left unchanged
    if a.asks("top_k"):
        k = a.count("top_k", -1)
        most = int(k.max())
        chain.append(TopK(k, LARGEST_SORTED_K if max(most, keep) <= LARGEST_SORTED_K else None, keep))
    if a.asks("top_p"):
        chain.append(TopP(a.number("top_p", 0, 1, neutral=1), keep))
    if a.asks("min_p"):
        chain.append(MinP(a.number("min_p", 0, 1), keep))
    if a.asks("typical_p"):
        chain.append(Typical(a.number("typical_p", 0, 1, open_low=True, neutral=1), keep))
    if a.asks("epsilon_cutoff"):
        chain.append(Epsilon(a.number("epsilon_cutoff", 0, 1, open_high=True), keep))
    if a.asks("eta_cutoff"):
        chain.append(Eta(a.number("eta_cutoff", 0, 1, open_high=True), keep))
    bregman, dual = a.number("bregman_alpha", 1, neutral=1.5), flag("bregman_dual", a.given["bregman_dual"])
    if a.asks("bregman_lambda"):
        chain.append(BregmanTopK(a.number("bregman_lambda", 0), bregman, dual))
    chain += own
    threshold = a.number("xtc_threshold", 0, 1, neutral=0.1)
    if a.asks("xtc_probability"):
        chain.append(XTC(a.number("xtc_probability", 0, 1), threshold))
    exponent, eta = a.number("dynatemp_exponent", 0, neutral=1), a.number("mirostat_eta", 0, neutral=0.1)
    if dynamic:
        chain.append(DynamicTemperature(_array(np.where(temperature > 0, temperature, 1).astype(np.float32)),
                                        a.number("dynatemp_range", 0), exponent))
    if a.given["mirostat_tau"] is not None:
        chain.append(Mirostat2(a.number("mirostat_tau", 0, open_low=True), eta))
    _without_effect(a, given, temperature == 0)
    return chain


def watermark(a: Arguments, rows: Any) -> list[Transform]:
    """Returns the watermark transform (none if it was not requested), with the bias for `rows` (`bool[B]`) and 0 for
    the others."""
    config = a.given["watermarking_config"]
    if config is None:
        return []
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    defaults = {"greenlist_ratio": 0.25, "bias": 2.0, "hashing_key": 15485863, "seeding_scheme": "lefthash",
                "context_width": 1}
    if not isinstance(config, Mapping) or set(config) - set(defaults):
        raise wrong("watermarking_config", config, f"a dictionary of {', '.join(defaults)}")
    size = a.given["vocab_size"]
    if size is None:
        raise ValueError("watermarking_config: got no vocab_size; takes one, since the green list is a share of it")
    parts = Arguments(a.batch, {**defaults, **config}, a.samples)
    if parts.given["seeding_scheme"] not in SCHEMES:
        raise wrong("watermarking_config: seeding_scheme", parts.given["seeding_scheme"], " or ".join(SCHEMES))
    width = whole("watermarking_config: context_width", parts.given["context_width"], 1)
    ratio = per_row("watermarking_config: greenlist_ratio", parts.given["greenlist_ratio"], a.batch, np.float64, 0.25,
                    "a number in (0, 1)", lambda x: (x > 0) & (x < 1), a.samples)
    key = per_row("watermarking_config: hashing_key", parts.given["hashing_key"], a.batch, np.int64, 0,
                  "a whole number from 0 on", lambda x: x >= 0, a.samples)
    bias = per_row("watermarking_config: bias", parts.given["bias"], a.batch, np.float32, 0, "a number", np.isfinite,
                   a.samples)
    return [GreenList(_array(np.where(rows, bias, np.float32(0))), _array((ratio * size).astype(np.int32)),
                      _array((key % (1 << 32)).astype(np.uint32)), width, parts.given["seeding_scheme"])]
