"""Names of the arguments of the front ends: which exist, which function takes them, and messages about others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from decodax.common.arguments import unknown_argument
from decodax.constraints import languages as constraints
from decodax.engine.searches import ARGUMENTS as SEARCHES
from decodax.sampling.build import DEFAULTS
from decodax.sampling.config import UNEXPRESSED
from decodax.sampling.neutral import asks_nothing

SLOTS = ("algorithm", "draft", "cache", "constraint", "search", "select", "sampling")
"""Arguments that take an object or the string of one."""

OWN = (*SLOTS, "max_new_tokens", "max_length", "min_new_tokens", "seed", "num_samples", "stop", "include_stop",
       "logprobs", "request_ids", "guidance_scale", "negative_prompts", "skip_special_tokens", "max_time", "chunk",
       "batch_size", "inputs", "context", "adapter", "progress", "every", "ends")
"""Arguments of front ends that are not sampling options."""

NAMED = ("dola_layers", *SEARCHES, *constraints.ARGUMENTS)
"""Names in generation configs, lines of jobs, items of `serve` and flags, for options that belong to a slot in Python.
"""

ELSEWHERE = {
    "batch": "batch_size= splits prompts into batches", "vocab_size": "it is the model's own",
    "stops": "stop= takes the strings",
    "n": "it is num_samples= here", "max_tokens": "it is max_new_tokens= here", "stop_strings": "it is stop= here",
    "stop_token_ids": "it is eos_token_id= here", "streamer": "decodax.stream gives pieces of text as they come",
    "assistant_model": "algorithm=decodax.algorithms.make('seed-exact', draft=decodax.load(...)) drafts with a model",
    "prompt_lookup_num_tokens": "algorithm='prompt-lookup:length=10' drafts from the text",
    "logits_processor": "transforms= takes decodax.sampling.Transform objects",
    "stopping_criteria": "stop=, eos_token_id=, max_time= and max_new_tokens= end a text",
    "generation_config": "give its entries as arguments", "attention_mask": "give prompts with input_ids and "
    "attention_mask", "input_ids": "prompts take ids", "pad_token_id":
    "the model's own fills the tokens of shorter rows", "return_dict_in_generate": "a Result has all there is",
    "output_scores": "logprobs= records log-probabilities"}
"""Arguments of other libraries or of internal functions, with the message that says what to use instead."""



_CONSTRAINT = "constraint=decodax.constraints."
_BEAMS = "algorithm=decodax.algorithms.beam_search(4, ...) searches with beams"
SLOT_OF = {
    **{name: f"{_CONSTRAINT}{name}(...) holds texts to it" for name in constraints.NAMES},
    "tool_choice": f"{_CONSTRAINT}tools(functions, choice) takes it",
    "tool_tags": f"{_CONSTRAINT}tools(..., tags=) takes it",
    "required_phrases": f"{_CONSTRAINT}phrases(required) takes them",
    "banned_phrases": f"{_CONSTRAINT}phrases(banned=...) takes them",
    "constraint_after": "a constraint has .after(text)", **dict.fromkeys(SEARCHES, _BEAMS),
    "penalty_alpha": "algorithm=decodax.algorithms.contrastive_search(...) is contrastive search",
    "dola_layers": "decodax.algorithms.contrastive.dola(lm, layers) is the model that decodes so"}
"""For each name in `NAMED`, the slot that replaces it in Python."""

ONE_ROW = ("num_samples", "num_return_sequences", "batch_size", "progress")
WITHOUT = {"generate": ("every", "ends"), "stream": (*ONE_ROW, "every", "ends"), "watch": (*ONE_ROW, "ends"),
           "infill": ("max_new_tokens", "max_length", "min_new_tokens", "num_samples", "num_return_sequences", "stop",
                      "include_stop", "negative_prompts", "inputs", "cache", "context", "adapter", "progress", "every")}
"""For each front end, the arguments that it does not take."""


def by_name(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options with those in `NAMED` moved to a dictionary under the key `named`, as `Request.read` takes
    them."""
    named = {name: options[name] for name in NAMED if options.get(name) is not None}
    rest = {name: value for name, value in options.items() if name not in NAMED}
    return {**rest, "named": named} if named else rest


OTHERS = ("num_return_sequences", "arithmetic_sampling")
"""Arguments that belong neither to the sampling options nor to the engine."""


def check_names(where: str, sampling: Mapping[str, Any]) -> None:
    """Checks the names of sampling options.

    Raises:
        TypeError: an unknown name, or an argument of another function; the message suggests names.
    """
    for name in sampling:
        if name in ELSEWHERE or name in SLOT_OF:
            raise TypeError(f"{name}: unknown argument; {ELSEWHERE.get(name) or SLOT_OF[name]}")
        if name in OWN:
            raise TypeError(f"{name}: {where} takes no such argument")
        if name not in DEFAULTS and name not in UNEXPRESSED and name not in OTHERS:
            raise unknown_argument(name, where, takes(where))


def takes(where: str) -> set[str]:
    """Returns the names of the arguments that a function of the library takes. `where` is its name, a key of `WITHOUT`,
    such as "generate"."""
    return {*OWN, *DEFAULTS, *OTHERS} - {*WITHOUT[where], *ELSEWHERE, "eos"}


def without(where: str, given: Mapping[str, Any], refused: Mapping[str, str]) -> dict[str, Any]:
    """Returns the arguments without those that a front end does not take; these are allowed if they have neutral
    values.

    Args:
        where: name of the front end.
        given: the arguments.
        refused: for each argument that it does not take, what to use instead, for the error.

    Raises:
        TypeError: one of them has another value.
    """
    for name, why in refused.items():
        if not asks_nothing(name, given.get(name)):
            raise TypeError(f"{name}: {where} takes no such argument; {why}")
    return {name: value for name, value in given.items() if name not in refused}


