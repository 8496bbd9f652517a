"""Policies from a Hugging Face `generation_config.json`. No key of it is dropped silently."""

from __future__ import annotations

import json
import pathlib
import warnings
from collections.abc import Mapping
from typing import Any

from decodax.policy.base import Policy
from decodax.policy.build import SAMPLING, build

DECODING = frozenset({
    "do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h",
    "repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
    "bad_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id",
    "forced_eos_token_id", "max_length", "max_new_tokens", "min_length", "min_new_tokens",
    "exponential_decay_length_penalty", "watermarking_config", "eos_token_id"})
"""Keys that `build` takes under the same name."""

IGNORED = frozenset({
    # what a file says of itself, and of memory and output formats
    "transformers_version", "_from_model_config", "_commit_hash", "use_cache", "cache_implementation", "cache_config",
    "max_cache_len", "return_legacy_cache", "low_memory", "compile_config", "disable_compile", "output_attentions",
    "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate", "prefill_chunk_size",
    "continuous_batching_config", "generation_kwargs",
    # the tokenizer's and the driver's business
    "pad_token_id", "bos_token_id", "decoder_start_token_id", "stop_strings", "num_return_sequences", "max_time",
    # how drafts are made: by contract they do not change the distribution
    "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    "prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind",
    "target_lookbehind", "assistant_ensemble_weight", "speculation_type", "use_mtp",
    # without effect here: a policy's distribution is normalised, and these shape beams alone
    "renormalize_logits", "length_penalty", "early_stopping"})
"""Keys that are about other things than the distribution."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1), "num_beam_groups": (None, 1), "diversity_penalty": (None, 0.0),
    "penalty_alpha": (None, 0.0), "dola_layers": (None,), "constraints": (None,), "force_words_ids": (None,),
    "guidance_scale": (None, 1, 1.0), "remove_invalid_values": (None, False), "token_healing": (None, False)}
"""Keys of decoding that no policy expresses, with the values that ask for nothing."""


def generation_settings(source: str | pathlib.Path | Mapping[str, Any], *, strict: bool = True) -> dict[str, Any]:
    """The arguments of `build` that a `generation_config.json` (a path, its folder, or its content) asks for.

    A file that samples without naming `top_k` gets transformers' default of 50, since that is how its text is made
    there. Files that do not sample get none.

    Args:
        strict: raise for a key of decoding that a policy cannot express; otherwise warn. Unknown keys, which files
            of many models hold, are named in a warning.

    Raises:
        ValueError: such a key.
        FileNotFoundError: no such file.

    >>> generation_settings({"do_sample": True, "top_p": 0.9, "use_cache": True})
    {'do_sample': True, 'top_p': 0.9, 'top_k': 50}
    """
    if isinstance(source, Mapping):
        config, origin = dict(source), "generation config"
    else:
        path = pathlib.Path(source)
        path = path / "generation_config.json" if path.is_dir() else path
        config, origin = json.loads(path.read_text()), str(path)
    settings: dict[str, Any] = {}
    unmet: list[str] = []
    unknown: list[str] = []
    for name, value in config.items():
        if name in DECODING:
            if value is not None:
                settings[name] = value
        elif name in NEUTRAL:
            if value not in NEUTRAL[name]:
                unmet.append(f"{name}={value!r}")
        elif name not in IGNORED:
            unknown.append(f"{name}={value!r}")
    if unmet:
        message = f"{origin}: {', '.join(unmet)}: a policy does not express this"
        if strict:
            raise ValueError(message)
        warnings.warn(message, stacklevel=2)
    if unknown:
        warnings.warn(f"{origin}: {', '.join(unknown)}: unknown, and without effect", stacklevel=2)
    if settings.get("do_sample"):
        settings.setdefault("top_k", 50)
    return settings


def from_generation_config(source: str | pathlib.Path | Mapping[str, Any], batch: int, *, strict: bool = True,
                           **changes: Any) -> Policy:
    """A policy from a `generation_config.json`, with `changes` in place of what it says.

    A changed temperature decides on sampling by itself: 0 is greedy and anything else samples, whatever the file says.
    Where neither the file nor `changes` asks for sampling, decoding is greedy and the file's sampling keys do nothing.

    Raises:
        ValueError, TypeError, FileNotFoundError: as `generation_settings` and `build` do.
    """
    settings = generation_settings(source, strict=strict)
    samples = settings.pop("do_sample", False)
    if changes.get("temperature") is None and changes.get("do_sample") is None:
        if samples:
            settings["do_sample"] = True
        else:
            settings = {name: value for name, value in settings.items() if name not in (*SAMPLING, "temperature")}
    if "eos" in changes:
        settings.pop("eos_token_id", None)
    return build(batch, **{**settings, **changes})
