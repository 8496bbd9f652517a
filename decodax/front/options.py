"""The sampling options of `generate`, by the names of transformers, and `Sampling`, which holds them as an object."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict, Unpack

import numpy as np
from jax import Array

from decodax.cache.prefix import Prefix
from decodax.common.registry import Configured
from decodax.common.struct import REPR, Struct
from decodax.constraints import Constraint
from decodax.core.algorithm import Algorithm
from decodax.core.types import CacheKind
from decodax.engine.names import check_names
from decodax.io.load import LM
from decodax.io.prompts import Prompt
from decodax.sampling import Transform
from decodax.sampling.config import generation_settings

Floats = float | Sequence[float | None] | None
Ints = int | Sequence[int | None] | None
"""One number for all prompts, or a list with one for each; None: not set."""

Ids = Sequence[int] | Sequence[Sequence[int]] | None


Inputs = Struct | Mapping[str, Any] | Sequence[Any] | Array | np.ndarray | None
"""Further inputs of a model, a pytree of arrays `[prompts, ...]`, such as a `decodax.models.EncoderText`; or the texts
for its encoder."""


class TokenOptions(TypedDict, total=False):
    """Options of the distribution from which each token is drawn, and of the tokens that end a text;
    `decodax.sampling.build` describes each of them. A numeric option is one number for all prompts, or a list with one
    for each."""

    do_sample: bool | None
    temperature: Floats
    top_k: Ints
    top_p: Floats
    min_p: Floats
    typical_p: Floats
    epsilon_cutoff: Floats
    eta_cutoff: Floats
    top_h: Floats
    top_n_sigma: Floats
    min_tokens_to_keep: int
    xtc_probability: Floats
    xtc_threshold: Floats
    mirostat_tau: Floats
    mirostat_eta: Floats
    dynatemp_range: Floats
    dynatemp_exponent: Floats
    bregman_lambda: Floats
    bregman_alpha: Floats
    bregman_dual: bool
    arithmetic_sampling: bool
    repetition_penalty: Floats
    presence_penalty: Floats
    frequency_penalty: Floats
    penalty_last_n: Ints
    encoder_repetition_penalty: Floats
    no_repeat_ngram_size: Ints
    encoder_no_repeat_ngram_size: Ints
    dry_multiplier: Floats
    dry_base: Floats
    dry_allowed_length: Ints
    dry_penalty_last_n: Ints
    dry_sequence_breakers: Any
    fsd_alpha: Floats
    fsd_beta: Floats
    fsd_k: int
    fsd_n: int
    fsd_stop_words: Any
    fsd_stop_weight: float
    nmst_epsilon: Floats
    logit_bias: Any
    sequence_bias: Any
    bad_words_ids: Any
    allowed_token_ids: Ids
    suppress_tokens: Ids
    begin_suppress_tokens: Ids
    forced_bos_token_id: Ints
    forced_eos_token_id: int | Ids
    eos_token_id: int | Ids
    eos: int | Ids
    min_length: Ints
    exponential_decay_length_penalty: Any
    watermarking_config: Any
    transforms: tuple[Transform, ...]


class SamplingOptions(TokenOptions, total=False):
    """The options of `generate` beside its slots: `TokenOptions`, and those of lengths, of guidance and of texts."""

    max_length: Ints
    min_new_tokens: Ints
    guidance_scale: Floats
    negative_prompts: Any
    num_return_sequences: int | None
    include_stop: bool
    skip_special_tokens: bool
    request_ids: Sequence[int] | None
    chunk: int


class TextOptions(SamplingOptions, total=False):
    """Arguments of `generate` that every function which continues texts takes."""

    max_new_tokens: int | Sequence[int] | None
    draft: LM | str | os.PathLike[str] | None
    cache: CacheKind | Configured | str | None
    constraint: Constraint | str | Sequence[Constraint | str | None] | None
    sampling: Sampling | None
    seed: int | Sequence[int]
    stop: str | Sequence[str] | None
    logprobs: int | None
    context: Prompt | Prefix | Sequence[Prompt | Prefix] | None
    adapter: str | Sequence[str | None] | None


class WatchOptions(TextOptions, total=False):
    """Arguments of `watch` beside those that it names."""

    inputs: Inputs
    max_time: float | None


class StreamOptions(WatchOptions, total=False):
    """Arguments of `stream`: those of `generate` for one row."""

    algorithm: Algorithm | Configured | str | None


class ServeOptions(TextOptions, total=False):
    """Arguments of `serve` that apply to each prompt."""

    algorithm: Algorithm | Configured | str | None
    inputs: Inputs
    num_samples: int | None


class TranscribeOptions(TextOptions, total=False):
    """Arguments of `generate` that `transcribe` takes."""

    algorithm: Algorithm | Configured | str | None
    batch_size: int | None
    max_time: float | None
    progress: bool


class Sampling(Mapping[str, Any]):
    """Sampling options as an object, for `generate(..., sampling=Sampling(temperature=0.8, top_p=0.95))`.

    >>> Sampling(temperature=0.8, top_p=0.95)
    Sampling(temperature=0.8, top_p=0.95)

    Raises:
        TypeError: an unknown option; the message lists similar names.
    """

    def __init__(self, **options: Unpack[SamplingOptions]):
        check_names("generate", {name: x for name, x in options.items() if name not in SamplingOptions.__annotations__})
        self._options: dict[str, Any] = {name: x for name, x in options.items() if x is not None}

    @classmethod
    def from_hf(cls, config: Any) -> Sampling:
        """Returns the sampling options of a Hugging Face generation config.

        Args:
            config: path of a `generation_config.json` or of its folder, its content as a dictionary, or an object of
                transformers with `to_dict`.

        Raises:
            ValueError: an entry that is not supported; the message names it.
        """
        content = config.to_dict() if hasattr(config, "to_dict") else config
        known = SamplingOptions.__annotations__
        return cls(**{name: x for name, x in generation_settings(content).items() if name in known})

    def __getitem__(self, name: str) -> Any:
        return self._options[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._options)

    def __len__(self) -> int:
        return len(self._options)

    def __repr__(self) -> str:
        said = f"Sampling({', '.join(f'{name}={x!r}' for name, x in self.items())})"
        return said if len(said) <= REPR else f"{said[:REPR - 4]}...)"


def merged(sampling: Mapping[str, Any] | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a `Sampling` object and of keyword arguments as one dictionary.

    Raises:
        TypeError: `sampling` is not a `Sampling`.
        ValueError: an option is in both.
    """
    if sampling is None:
        return dict(options)
    if not isinstance(sampling, Mapping):
        raise TypeError(f"sampling: got {type(sampling).__name__}, takes a decodax.Sampling")
    if both := sorted(sampling.keys() & options.keys()):
        raise ValueError(f"{both[0]}: got it in sampling= and as an argument, takes one of them")
    return {**sampling, **options}

