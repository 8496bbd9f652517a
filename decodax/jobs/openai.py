"""Converts requests to OpenAI's API, as in the lines of its batches, with vLLM's extensions.

Clients often write complete bodies, in which many entries have no effect (`echo: false`, `n: 1`, `tools: []`, null).
Such neutral entries are accepted. An entry that asks for something unsupported raises an error that names it, since the
text would not be what was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

URLS = ("/v1/chat/completions", "/v1/completions")

RENAMED = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens", "n": "num_samples",
           "stop": "stop", "seed": "seed", "temperature": "temperature", "top_p": "top_p", "top_k": "top_k",
           "min_p": "min_p", "repetition_penalty": "repetition_penalty", "presence_penalty": "presence_penalty",
           "frequency_penalty": "frequency_penalty", "min_tokens": "min_new_tokens",
           "skip_special_tokens": "skip_special_tokens", "include_stop_str_in_output": "include_stop",
           "guided_regex": "regex", "guided_choice": "choices", "guided_json": "json_schema",
           "guided_grammar": "grammar"}
"""Entries of a request's body, by the names of OpenAI and vLLM, and the options here that they correspond to."""

READ = ("messages", "prompt", "logit_bias", "logprobs", "top_logprobs", "response_format", "structured_outputs")
"""Entries that are read separately."""

IGNORED = ("model", "user", "metadata", "store", "stream_options", "service_tier", "safety_identifier",
           "prompt_cache_key", "prompt_cache_retention", "cache_salt", "request_id", "priority")
"""Entries that do not affect the text: the user, storage, caching, and the order of requests."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    # OpenAI: completions, chats
    "echo": (False,), "suffix": ("",), "stream": (False,),
    "audio": ({},), "function_call": ("none", "auto"), "functions": ([],), "modalities": (["text"], []),
    "parallel_tool_calls": (True, False), "prediction": ({},), "reasoning_effort": ("none",),
    "tool_choice": ("none", "auto"), "tools": ([],), "verbosity": ("medium",), "web_search_options": (),
    # vLLM: sampling
    "use_beam_search": (False,), "length_penalty": (1,), "early_stopping": (False,), "stop_token_ids": ([],),
    "bad_words": ([],), "allowed_token_ids": ([],), "ignore_eos": (False,), "logits_processors": ([],),
    "vllm_xargs": ({},), "prompt_logprobs": (False,), "truncate_prompt_tokens": (), "detokenize": (True,),
    "thinking_token_budget": (), "repetition_detection": (),
    # vLLM: output
    "spaces_between_special_tokens": (True,), "return_tokens_as_token_ids": (False,), "return_token_ids": (False,),
    "include_reasoning": (True,), "logprob_token_ids": ([],),
    # vLLM: rendering of chats
    "add_generation_prompt": (True,), "continue_final_message": (False,), "chat_template": ("",),
    "chat_template_kwargs": ({},), "documents": ([],), "mm_processor_kwargs": ({},), "media_io_kwargs": ({},),
    # vLLM: constraints and transfer of caches
    "guided_regex": ("",), "guided_choice": ([],), "guided_grammar": ("",), "structural_tag": (),
    "guided_decoding_backend": (), "guided_whitespace_pattern": (), "kv_transfer_params": ({},)}
"""Other entries of a body, with their neutral values; null is always neutral."""

SPECIAL = {"/v1/chat/completions": False, "/v1/completions": True}
"""The value of vLLM's `add_special_tokens` that has no effect for each endpoint: a chat's template adds special tokens
itself."""

OUTPUTS = {"regex": "regex", "choice": "choices", "json": "json_schema", "grammar": "grammar"}
"""Keys of vLLM's `structured_outputs`, and the options here that they correspond to."""

OUTPUTS_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "json_object": (False,), "structural_tag": (), "disable_fallback": (False,), "disable_any_whitespace": (False,),
    "disable_additional_properties": (False,), "whitespace_pattern": ()}


class LineError(ValueError):
    """The reason why a line of a batch job cannot be answered, as an exception."""


def asks_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    """True if the value of an entry is null or one of its neutral values.

    >>> asks_nothing(1.0, (1,)), asks_nothing(True, (1,)), asks_nothing([], ([],)), asks_nothing(0, (False,))
    (True, False, True, False)
    """
    number = lambda x: isinstance(x, (int, float)) and not isinstance(x, bool)
    alike = lambda x: type(value) is type(x) or (number(value) and number(x))
    return value is None or any(alike(x) and value == x for x in neutral)


def read(url: str, body: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns the prompt in the body of a request, and its options as arguments of `decodax.generate`.

    Args:
        url: the endpoint, one of `URLS`.
        body: the body.

    Raises:
        LineError: the body has no prompt, or asks for something that is not supported.
    """
    chat = url == URLS[0]
    if (prompt := body.get("messages" if chat else "prompt")) is None:
        raise LineError(f"body: has no {'messages' if chat else 'prompt'!r}")
    neutral = {**NEUTRAL, "add_special_tokens": (SPECIAL[url],), "best_of": (1, body.get("n")),
               "prompt" if chat else "messages": ("", [])}
    asked = {key: value for key, value in body.items() if not asks_nothing(value, neutral.get(key, ()))}
    if "stream" in asked:
        raise LineError("body: asks for a stream, which batches do not support")
    known = {*RENAMED, *READ, *IGNORED} - {"prompt" if chat else "messages"}
    if unmet := [key for key in asked if key not in known]:
        raise LineError(f"body: asks for {', '.join(map(repr, unmet))}, which is not supported")
    options: dict[str, Any] = {}
    for key, name, value in [*((key, RENAMED[key], asked[key]) for key in asked if key in RENAMED), *_language(body)]:
        if name in options and options[name] != value:
            raise LineError(f"{key}: got {value!r:.80} with another {name}, {options[name]!r:.80}; takes one of them")
        options[name] = value
    if body.get("logit_bias"):
        try:
            options["logit_bias"] = {int(token): bias for token, bias in body["logit_bias"].items()}
        except (ValueError, AttributeError) as error:
            raise LineError(f"logit_bias: got {body['logit_bias']!r}, takes biases by token ids") from error
    wanted, top = body.get("logprobs"), body.get("top_logprobs")
    if wanted is not None and wanted is not False:
        options["logprobs"] = top or 0 if wanted is True else wanted
    elif not asks_nothing(top, (0,)):
        raise LineError(f"top_logprobs: got {top!r} without logprobs: true")
    return prompt, options


def _language(body: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    """Returns the constraints of the text as triples: the entry of the body, the option of `decodax.generate`, and its
    value.

    The constraints are in `response_format`, as in OpenAI's API, or in `structured_outputs`, as in vLLM.
    """
    form, wanted = body.get("response_format"), body.get("structured_outputs")
    found: list[tuple[str, str, Any]] = []
    if wanted is not None:
        takes = f"structured_outputs: got {wanted!r:.80}, takes {', '.join(OUTPUTS)}"
        if not isinstance(wanted, Mapping):
            raise LineError(takes)
        asked = {key: x for key, x in wanted.items() if not asks_nothing(x, OUTPUTS_NEUTRAL.get(key, ()))}
        if asked.keys() - OUTPUTS.keys():
            raise LineError(takes)
        found += [("structured_outputs", OUTPUTS[key], x) for key, x in asked.items()]
    if form is None or (isinstance(form, Mapping) and form.get("type") == "text"):
        return found
    inner = form.get("json_schema") if isinstance(form, Mapping) and form.get("type") == "json_schema" else None
    if not isinstance(inner, Mapping) or inner.get("schema") is None:
        raise LineError(f"response_format: got {form!r:.80}, takes {{'type': 'json_schema', 'json_schema': {{'schema': "
                        "...}} or {'type': 'text'}")
    return [*found, ("response_format", "json_schema", inner["schema"])]
