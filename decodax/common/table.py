"""The table of the arguments of decoding: what calls of `generate`, generation configs and the command line share.

`decodax.sampling.build` documents what each one does, and `decodax.front.options` has their types.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

Where = Literal["policy", "beams", "method", "front", "transformers"]


class Argument(NamedTuple):
    """A row of the table.

    Attributes:
        where: what reads the argument: the sampling "policy" (`build`), "beams" (beam search), another decoding
            "method", the "front" ends themselves, or only "transformers", where it has another value than a neutral
            one.
        neutral: values without effect, besides None: `()` if there are none. None: `decodax.sampling.neutral` does not
            list the argument.
        config: True: generation configs have an entry of this name that is used here.
        ids: True: the value is one or several token ids; a negative number in a generation config means none.
        needs: the argument without which this one has no effect; None: it stands alone.
        flag: type and help text of the flag on the command line; None: it is given by `--set`.
    """

    where: Where
    neutral: tuple[Any, ...] | None = None
    config: bool = False
    ids: bool = False
    needs: str | None = None
    flag: tuple[type, str] | None = None


def _policy(*neutral: Any, **more: Any) -> Argument:
    """Returns a row for an argument of `build` that transformers has, too."""
    return Argument("policy", neutral or None, True, **more)


def _ours(*neutral: Any, **more: Any) -> Argument:
    """Returns a row for an argument of `build` that transformers does not have."""
    return Argument("policy", neutral or None, **more)


def _with(needs: str) -> Argument:
    return Argument("policy", needs=needs)


ARGUMENTS: dict[str, Argument] = {
    # truncations and other samplers
    "do_sample": _policy(),
    "temperature": _policy(flag=(float, "divides the logits; 0 is greedy")),
    "top_k": _policy(0, -1, flag=(int, "keep the K most likely tokens")),
    "top_p": _policy(1, flag=(float, "keep the smallest set of tokens with this much probability")),
    "min_p": _policy(0, flag=(float, "keep tokens at least this likely relative to the best one")),
    "typical_p": _policy(1, flag=(float, "locally typical sampling with this much probability")),
    "epsilon_cutoff": _policy(0),
    "eta_cutoff": _policy(0),
    "top_h": Argument("policy", (), True),
    "top_n_sigma": _ours(0),
    "xtc_probability": _ours(0),
    "xtc_threshold": _with("xtc_probability"),
    "mirostat_tau": Argument("policy", ()),
    "mirostat_eta": _with("mirostat_tau"),
    "dynatemp_range": _ours(0),
    "dynatemp_exponent": _with("dynatemp_range"),
    "bregman_lambda": _ours(0),
    "bregman_alpha": _with("bregman_lambda"),
    "bregman_dual": _with("bregman_lambda"),
    # penalties
    "repetition_penalty": _policy(1, flag=(float, "divides positive and multiplies negative logits of tokens already "
                                                  "there")),
    "encoder_repetition_penalty": _policy(1),
    "presence_penalty": _ours(0, flag=(float, "subtracted from the logits of generated tokens")),
    "frequency_penalty": _ours(0, flag=(float, "the same, times their count")),
    "penalty_last_n": _ours(),
    "no_repeat_ngram_size": _policy(0, flag=(int, "no n-gram of this size comes twice")),
    "encoder_no_repeat_ngram_size": _policy(0),
    "dry_multiplier": _ours(0),
    **dict.fromkeys(("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
                    _with("dry_multiplier")),
    "fsd_alpha": _ours(0),
    **dict.fromkeys(("fsd_beta", "fsd_k", "fsd_n", "fsd_stop_words", "fsd_stop_weight"), _with("fsd_alpha")),
    # tokens that are banned, forced or favoured
    "bad_words_ids": _policy(),
    "sequence_bias": _policy(),
    "logit_bias": _ours(),
    "allowed_token_ids": _ours(),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id",
                     "eos_token_id"), _policy(ids=True)),
    "watermarking_config": _policy(),
    # lengths and the end
    "max_length": _policy(),
    "max_new_tokens": _policy(),
    "min_length": _policy(0),
    "min_new_tokens": _policy(0),
    "exponential_decay_length_penalty": _policy(),
    "nmst_epsilon": _policy(0),
    # searches
    "num_beams": Argument("beams", (1,), True),
    "num_beam_groups": Argument("beams", (1,), True),
    "diversity_penalty": Argument("beams", (0,), True),
    "length_penalty": Argument("beams", (1,), True),
    "early_stopping": Argument("beams", (False,), True),
    "patience": Argument("beams", (1,)),
    "renormalize_logits": Argument("beams", (False,), True),
    "penalty_alpha": Argument("method", (0,), True),
    "dola_layers": Argument("method", (), True),
    "guidance_scale": Argument("method", (1,), True),
    "negative_prompts": Argument("method", ()),
    "arithmetic_sampling": Argument("method", (False,)),
    # number of texts, and how they are run
    "num_samples": Argument("front", (1,)),
    "num_return_sequences": Argument("front", (1,), True),
    "stop_strings": Argument("front", None, True),
    "max_time": Argument("front", None, True),
    "batch_size": Argument("front", ()),
    "progress": Argument("front", (False,)),
    "request_ids": Argument("front", ()),
    # only in transformers
    "constraints": Argument("transformers", (), True),
    "force_words_ids": Argument("transformers", (), True),
    "remove_invalid_values": Argument("transformers", (False,), True),
    "token_healing": Argument("transformers", (False,), True)}
"""The arguments by name."""


def named(*where: Where, config: bool | None = None) -> tuple[str, ...]:
    """Returns the names of the arguments that are read in one of the places `where`, in the order of the table; with
    `config`, those alone that generation configs have (True) or do not have (False).

    >>> named("beams", config=False)
    ('patience',)
    """
    return tuple(name for name, own in ARGUMENTS.items()
                 if own.where in where and config in (None, own.config))
