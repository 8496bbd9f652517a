"""What stands in the lines of jobs: names, options, and requests to OpenAI's API."""

import os
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from decodax.jobs import Fields
from decodax.jobs.columns import table
from decodax.jobs.lines import Filled, count, rows
from decodax.jobs.openai import LineError
from decodax.jobs.worker import plain

NOTHING: dict[str, list[Any]] = {
    "echo": [False], "best_of": [1, 1.0], "suffix": [""], "tools": [[]], "tool_choice": ["none", "auto"],
    "functions": [[]], "modalities": [["text"]], "parallel_tool_calls": [True, False], "stream": [False],
    "ignore_eos": [False], "use_beam_search": [False], "length_penalty": [1, 1.0], "stop_token_ids": [[]],
    "bad_words": [[]], "spaces_between_special_tokens": [True], "return_token_ids": [False],
    "return_tokens_as_token_ids": [False], "chat_template_kwargs": [{}], "add_generation_prompt": [True],
    "continue_final_message": [False], "logprobs": [False], "top_logprobs": [0], "logit_bias": [{}],
    "response_format": [{"type": "text"}], "structured_outputs": [{}, {"json": None, "disable_fallback": False}],
    "guided_choice": [[]], "user": ["someone"], "service_tier": ["auto"], "priority": [0], "metadata": [{"a": "b"}]}
"""Entries of bodies, with values that ask for nothing."""

SOMETHING: dict[str, list[Any]] = {
    "echo": [True], "best_of": [2, True], "suffix": ["x"], "tools": [[{"type": "function"}]], "ignore_eos": [True],
    "tool_choice": ["required"], "use_beam_search": [True], "length_penalty": [0.5, 0], "stop_token_ids": [[3]],
    "bad_words": [["x"]], "spaces_between_special_tokens": [False], "modalities": [["text", "audio"]],
    "add_generation_prompt": [False], "continue_final_message": [True], "unheard_of": [0, False, "", []],
    "web_search_options": [{}], "truncate_prompt_tokens": [5]}
"""The same with values that ask for something that is not here."""


def line(body: dict[str, Any], chat: bool = True, **more: Any) -> Any:
    prompt = {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
    url = "/v1/chat/completions" if chat else "/v1/completions"
    return Fields().read(1, {"custom_id": "a", "method": "POST", "url": url, "body": {**prompt, **body}, **more})


@pytest.mark.parametrize("chat", [True, False])
def test_keys_with_neutral_values_are_let_through(chat: bool) -> None:
    for key, values in NOTHING.items():
        for value in [*values, None]:
            assert line({key: value}, chat).options == {}, (key, value)
    everything = {key: values[0] for key, values in NOTHING.items()}
    assert line({**everything, "n": 1, "max_tokens": 4}, chat).options == {"num_samples": 1, "max_new_tokens": 4}


@pytest.mark.parametrize("key", SOMETHING)
def test_keys_that_ask_for_unsupported_features_are_refused_by_name(key: str) -> None:
    for value in SOMETHING[key]:
        with pytest.raises(LineError, match=f"^body: asks for '{key}', which is not supported"):
            line({key: value})


def test_bodies_say_what_they_ask_for() -> None:
    body = {"skip_special_tokens": True, "include_stop_str_in_output": True, "min_tokens": 2, "stop": ["a"],
            "logprobs": True, "top_logprobs": 2, "max_completion_tokens": 3, "max_tokens": 3,
            "add_special_tokens": False}
    assert line(body).options == {"skip_special_tokens": True, "include_stop": True, "min_new_tokens": 2, "stop": ["a"],
                                  "logprobs": 2, "max_new_tokens": 3}
    assert line({"add_special_tokens": True, "best_of": 3, "n": 3}, chat=False).options == {"num_samples": 3}
    for wrong, message in (({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens: got 4 with another"),
                           ({"top_logprobs": 2}, "top_logprobs: got 2 without logprobs"),
                           ({"add_special_tokens": True}, "body: asks for 'add_special_tokens'"),
                           ({"prompt": "y"}, "body: asks for 'prompt'"),
                           ({"guided_json": {}, "response_format": {"type": "json_schema", "json_schema": {
                               "schema": {"type": "null"}}}}, "response_format: got {'type': 'null'} with another")):
        with pytest.raises(LineError, match=message):
            line(wrong)
    with pytest.raises(LineError, match=r"^options: got some with a body"):
        line({}, options={"temperature": 1})


def test_an_option_beside_the_prompt_is_not_dropped_in_silence() -> None:
    with pytest.warns(UserWarning, match="max_new_tokens: has no effect outside of a line"):
        Fields().read(1, {"prompt": "x", "max_new_tokens": 3})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Fields(keep=["top_p"]).read(1, {"prompt": "x", "context": "y", "top_p": 3, "options": {"top_k": 2}})


def test_a_named_pipe_is_lines_of_json(tmp_path: Path) -> None:
    """As a shell's `<(...)` is; it is not counted, since it can be read once."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert count(pipe) is None
    writer = threading.Thread(target=pipe.write_text, args=('{"id": 1}\n\n"x"\n',))
    writer.start()
    assert list(rows(pipe)) == [(1, {"id": 1}), (3, "x")]
    writer.join()


def test_every_line_has_one_name() -> None:
    fields = Fields(id="key")
    for row, name in (({"key": 7}, ("id", 7)), ({"key": "a"}, ("id", "a")), ({"key": 7.5, "prompt": {}}, ("id", 7.5)),
                      ({}, ("id", "line-3")), ({"key": None}, ("id", "line-3")), ({"key": []}, ("id", "line-3")),
                      ("text", ("id", "line-3")), (LineError("not JSON"), ("id", "line-3")), ([1], ("id", "line-3")),
                      ({"key": "\ud800"}, ("id", "line-3")), ({"custom_id": "b", "body": 3}, ("custom_id", "b")),
                      ({"custom_id": None, "body": None, "key": 7}, ("id", 7))):
        assert fields.name(3, row) == name


def test_padding_of_table_structs_is_not_passed_on(tmp_path: Path) -> None:
    lines = [{"id": 1, "prompt": "x", "messages": None,
              "options": {"temperature": 0.5, "json_schema": {"type": "object"}}},
             {"id": 2, "prompt": "y", "options": {"max_new_tokens": 2, "json_schema": {"enum": ["a"]}}},
             {"id": 3, "messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
                                    {"role": "user", "content": "z"}]}]
    pq.write_table(pa.Table.from_pylist(lines), tmp_path / "in.parquet")
    found = [Fields().read(number, row) for number, row in rows(tmp_path / "in.parquet")]
    assert [one.options for one in found] == [lines[0]["options"], lines[1]["options"], {}]
    assert found[2].prompt == lines[2]["messages"] and [one.id for one in found] == [1, 2, 3]


def test_columns_of_numpy_arrays_are_pythons_at_any_depth() -> None:
    arrays = [{"calls": np.array([{"args": np.array([1, 2]), "x": np.float32(0.5)}], object), "n": 2.0, "t": 1.0},
              {"calls": np.array([], object), "n": float("nan"), "t": np.float64(0.5)}, None]
    assert plain(arrays) == [{"calls": [{"args": [1, 2], "x": 0.5}], "n": 2, "t": 1.0},
                             {"calls": [], "n": None, "t": 0.5}, None]
    assert [type(row["t"]) for row in plain(arrays)[:2]] == [float, float]
    assert plain([np.array([[1, 2], [3, 4]]), (5, np.int64(6))]) == [[[1, 2], [3, 4]], [5, 6]]
    assert plain([1.0, float("nan")], restore=False) == [1.0, None]
    whole = plain([1.0, float("nan")])
    assert whole == [1, None] and isinstance(whole[0], int)
    row = Filled(id=1, prompt="x", options=plain([{"max_new_tokens": 2.0}, {"max_new_tokens": np.nan}])[0])
    assert Fields().read(1, row).options == {"max_new_tokens": 2}


def test_columns_have_types_whatever_they_hold() -> None:
    names = ["id", "text", "status", "new_tokens", "tokens", "logprobs", "error"]
    answered = table([{"id": 1, "text": "a", "status": "eos", "new_tokens": 1, "tokens": [3], "logprobs": [-1.5],
                       "error": None}], names)
    failed = table([{"id": 2, "error": "why"}, {"id": 3, "error": "why"}], names)
    assert answered.schema == failed.schema and pa.concat_tables([answered, failed]).num_rows == 3
    several = table([{"id": 1, "text": ["a", "b"], "new_tokens": [1, 2], "tokens": [[1], [2, 3]]}], names, many=True)
    assert several.schema == table([{"id": 2, "error": "why"}], names, many=True).schema
    odd = table([{"id": 7, "kept": {}}, {"id": "a", "kept": 2 ** 70}])
    assert odd.to_pylist() == [{"id": "7", "kept": "{}"}, {"id": "a", "kept": str(2 ** 70)}]
