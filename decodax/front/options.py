"""The arguments of `generate` that shape a distribution or a text, by the names of transformers, and `Sampling`, which
holds them as an object."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict, TypeVar, Unpack

from decodax.common.struct import REPR
from decodax.engine.names import check_names
from decodax.sampling import Transform
from decodax.sampling.config import generation_settings

T = TypeVar("T")
Each = T | Sequence[T | None] | None
"""One value for all prompts, or one for each; None asks for nothing."""

Ids = Sequence[int] | Sequence[Sequence[int]] | None


class SamplingOptions(TypedDict, total=False):
    """What shapes the distribution that tokens are drawn from, and where texts end; see `decodax.sampling.build` for
    each of them. Numbers are one for all prompts or one for each."""

    do_sample: bool | None
    temperature: Each[float]
    top_k: Each[int]
    top_p: Each[float]
    min_p: Each[float]
    typical_p: Each[float]
    epsilon_cutoff: Each[float]
    eta_cutoff: Each[float]
    top_h: Each[float]
    top_n_sigma: Each[float]
    min_tokens_to_keep: int
    xtc_probability: Each[float]
    xtc_threshold: Each[float]
    mirostat_tau: Each[float]
    mirostat_eta: Each[float]
    dynatemp_range: Each[float]
    dynatemp_exponent: Each[float]
    bregman_lambda: Each[float]
    bregman_alpha: Each[float]
    bregman_dual: bool
    arithmetic_sampling: bool
    repetition_penalty: Each[float]
    presence_penalty: Each[float]
    frequency_penalty: Each[float]
    penalty_last_n: Each[int]
    encoder_repetition_penalty: Each[float]
    no_repeat_ngram_size: Each[int]
    encoder_no_repeat_ngram_size: Each[int]
    dry_multiplier: Each[float]
    dry_base: Each[float]
    dry_allowed_length: Each[int]
    dry_penalty_last_n: Each[int]
    dry_sequence_breakers: Any
    fsd_alpha: Each[float]
    fsd_beta: Each[float]
    fsd_k: int
    fsd_n: int
    fsd_stop_words: Any
    fsd_stop_weight: float
    nmst_epsilon: Each[float]
    logit_bias: Any
    sequence_bias: Any
    bad_words_ids: Any
    allowed_token_ids: Ids
    suppress_tokens: Ids
    begin_suppress_tokens: Ids
    forced_bos_token_id: Each[int]
    forced_eos_token_id: int | Ids
    eos_token_id: int | Ids
    eos: int | Ids
    max_length: Each[int]
    min_length: Each[int]
    min_new_tokens: Each[int]
    exponential_decay_length_penalty: Any
    watermarking_config: Any
    guidance_scale: Each[float]
    negative_prompts: Any
    transforms: tuple[Transform, ...]
    num_return_sequences: int | None
    include_stop: bool
    skip_special_tokens: bool
    request_ids: Sequence[int] | None
    chunk: int


class Sampling(Mapping[str, Any]):
    """Sampling options as an object, for `generate(..., sampling=Sampling(temperature=0.8, top_p=0.95))`.

    >>> Sampling(temperature=0.8, top_p=0.95)
    Sampling(temperature=0.8, top_p=0.95)

    Raises:
        TypeError: an unknown option; names near ones.
    """

    def __init__(self, **options: Unpack[SamplingOptions]):
        check_names("generate", {name: x for name, x in options.items() if name not in SamplingOptions.__annotations__})
        self._options: dict[str, Any] = {name: x for name, x in options.items() if x is not None}

    @classmethod
    def from_hf(cls, config: Any) -> Sampling:
        """Returns what a generation config says of sampling.

        Args:
            config: path of a `generation_config.json` or of its folder, its content as a dictionary, or an object of
                transformers with `to_dict`.

        Raises:
            ValueError: an entry that is not supported, by name.
        """
        content = config.to_dict() if hasattr(config, "to_dict") else config
        known = SamplingOptions.__annotations__
        return cls(**{name: x for name, x in generation_settings(content).items() if name in known})    # type: ignore[typeddict-item]

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
    """Returns the options of a `Sampling` and of keywords together.

    Raises:
        TypeError: no `Sampling`. ValueError: one is in both.
    """
    if sampling is None:
        return dict(options)
    if not isinstance(sampling, Mapping):
        raise TypeError(f"sampling: got {type(sampling).__name__}, takes a decodax.Sampling")
    if both := sorted(sampling.keys() & options.keys()):
        raise ValueError(f"{both[0]}: got it in sampling= and as an argument, takes one of them")
    return {**sampling, **options}

