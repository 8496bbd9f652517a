"""Sampling policies from a Hugging Face `generation_config.json`. No key of the file is dropped silently.

Keys in `DRIVER` do not belong to a distribution; `decodax.generate` uses them.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from decodax.common.arguments import outside, shown
from decodax.common.ids import named as ids_of
from decodax.common.table import ARGUMENTS, named
from decodax.sampling.build import build
from decodax.sampling.distribution import Policy
from decodax.sampling.neutral import NEUTRAL, is_neutral, is_zero
from decodax.sampling.parts import SAMPLING

DECODING = frozenset(named("policy", config=True))
"""Keys that `build` takes under the same name."""

IDS = frozenset(name for name in DECODING if ARGUMENTS[name].ids)
"""Keys whose values are token ids; a negative number in a file means none."""

DRIVER = frozenset(named("front", config=True))
"""Keys that `generate` uses as `stop`, `num_samples` and `max_time`, unless the call sets them. It also uses
`max_length`, `max_new_tokens` and `guidance_scale`."""

IGNORED = DRIVER | frozenset({
    # about the file itself, memory and output formats
    "transformers_version", "_from_model_config", "_commit_hash", "use_cache", "cache_implementation", "cache_config",
    "max_cache_len", "return_legacy_cache", "low_memory", "compile_config", "disable_compile", "output_attentions",
    "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate", "prefill_chunk_size",
    "continuous_batching_config", "generation_kwargs",
    # for the tokenizer
    "pad_token_id", "bos_token_id", "decoder_start_token_id",
    # for the prompts and timestamps of transcribed speech
    "alignment_heads", "is_multilingual", "lang_to_id", "task_to_id", "language", "task", "no_timestamps_token_id",
    "max_initial_timestamp_index", "return_timestamps", "prev_sot_token_id", "forced_decoder_ids",
    # how drafts are made: by contract they do not change the distribution
    "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    "prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind",
    "target_lookbehind", "assistant_ensemble_weight", "speculation_type", "use_mtp",
    # without effect here: a policy's distribution is normalised, and the others concern beams alone
    "renormalize_logits", "length_penalty", "early_stopping"})
"""Keys without effect on the distribution."""

UNEXPRESSED = tuple(name for name in named("beams", "method", "transformers", config=True) if name not in IGNORED)
"""Decoding keys that a policy cannot express. A neutral value (`neutral.NEUTRAL`) passed as an argument overrides the
file's value."""


def nothing(name: str) -> Any:
    """Returns a value with which the argument `name` of `build` has no effect, such as 1 for `top_p`; None if it has no
    such value but None."""
    return next(iter(NEUTRAL[name]), None)


def read_config(source: str | pathlib.Path | Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Returns the content of a `generation_config.json` (a path, its folder, or the content), and its name for error
    messages.

    Raises:
        ValueError: the file does not contain a JSON object.
        FileNotFoundError: there is no such file.
    """
    if isinstance(source, Mapping):
        return dict(source), "generation config"
    path = pathlib.Path(source)
    path = path / "generation_config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path}: got {type(config).__name__}, takes a JSON object")
    return config, str(path)


def generation_settings(source: str | pathlib.Path | Mapping[str, Any], *, strict: bool = True) -> dict[str, Any]:
    """Returns the arguments of `build` that correspond to a generation config.

    If a file asks for sampling and has no `top_k`, `top_k` is 50, transformers' default. Keys in `DRIVER` are not
    arguments of `build`: `generate` uses them.

    Args:
        source: path of the file, path of its folder, or its content.
        strict: True: a decoding key that a policy cannot express raises an error. False: it is named in a warning.
            Unknown keys, which the files of many models have, are always named in a warning.

    Raises:
        ValueError: there is such a key, or the file does not contain a JSON object.
        FileNotFoundError: there is no such file.

    >>> generation_settings({"do_sample": True, "top_p": 0.9, "use_cache": True})
    {'do_sample': True, 'top_p': 0.9, 'top_k': 50}
    """
    return _settings(*read_config(source), strict)


def _settings(config: Mapping[str, Any], origin: str, strict: bool) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    unmet: list[str] = []
    unknown: list[str] = []
    for name, value in config.items():
        if name in DECODING:
            if (value := ids_of(value) if name in IDS else value) is not None:
                settings[name] = value
        elif name in UNEXPRESSED:
            if not is_neutral(name, value):
                unmet.append(name)
        elif name not in IGNORED and not is_neutral(name, value):
            unknown.append(f"{name}={value!r}")
    if unmet:
        message = (f"{origin}: {', '.join(f'{name}={config[name]!r}' for name in unmet)}: a policy cannot express "
                   f"this; pass {', '.join(f'{name}={nothing(name)!r}' for name in unmet)} to decode without it")
        if strict:
            raise ValueError(message)
        warnings.warn(message, stacklevel=outside())
    if unknown:
        warnings.warn(f"{origin}: {', '.join(unknown)}: unknown, ignored", stacklevel=outside())
    if settings.get("do_sample"):
        settings.setdefault("top_k", 50)
    return settings


def _greedy(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns a file's settings without those that only affect sampling."""
    return {name: value for name, value in settings.items() if name not in (*SAMPLING, "temperature")}


def merge(config: Mapping[str, Any], origin: str, changes: Mapping[str, Any], *, strict: bool = True
          ) -> dict[str, Any]:
    """Returns the arguments of `build` for a generation config, overridden by the call's arguments.

    Args:
        config: content of the file.
        origin: name of the file, for errors.
        changes: arguments of the call. A temperature or `do_sample` among them decides whether to sample.
        strict: see `generation_settings`.

    Raises:
        ValueError: the config or the changes contain a decoding key that a policy cannot express.
    """
    for name in [name for name in UNEXPRESSED if name in changes]:
        if not is_neutral(name, changes[name]):
            takes = " or ".join(map(repr, (None, *NEUTRAL[name])))
            raise ValueError(f"{name}: got {shown(changes[name])}, which a policy cannot express; takes {takes}")
    settings = _settings({k: v for k, v in config.items() if k not in changes or k not in UNEXPRESSED}, origin, strict)
    changes = {k: v for k, v in changes.items() if k not in UNEXPRESSED}
    samples = settings.pop("do_sample", False)
    if changes.get("temperature") is None and changes.get("do_sample") is None:
        if samples:
            settings["do_sample"] = samples
        else:
            settings = _greedy(settings)
    elif is_zero(changes.get("do_sample")):
        settings = _greedy(settings)
    if "eos" in changes:
        settings.pop("eos_token_id", None)
    return {**settings, **changes}


@contextlib.contextmanager
def blaming(origin: str, names: Collection[str]) -> Iterator[None]:
    """Returns a context manager that puts `origin`, such as a file name, before errors about the arguments `names`."""
    try:
        yield
    except (ValueError, TypeError) as error:
        found = re.match(r"\w+", str(error))
        if found is None or found[0] not in names:
            raise
        raise type(error)(f"{origin}: {error}") from None


def from_generation_config(source: str | pathlib.Path | Mapping[str, Any], batch: int, *, strict: bool = True,
                           **changes: Any) -> Policy:
    """Returns the policy of a `generation_config.json`; `changes` override its values.

    A temperature in `changes` alone decides whether to sample: 0 is greedy and any other one samples, whatever the file
    says. If neither the file nor `changes` asks for sampling, decoding is greedy and the file's sampling keys have no
    effect. To ignore a key that a policy cannot express, such as `num_beams`, pass its neutral value (`num_beams=1`).

    Args:
        source: path of the file, its folder, or its content.
        batch: number of rows.
        strict: True: a key that a policy cannot express raises an error. False: it is named in a warning.
        changes: arguments of `build`.

    Raises:
        ValueError, TypeError, FileNotFoundError: the errors of `generation_settings` and `build`.
    """
    config, origin = read_config(source)
    settings = merge(config, origin, changes, strict=strict)
    with blaming(origin, config.keys() - changes.keys()):
        return build(batch, **settings)
