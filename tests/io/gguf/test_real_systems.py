"""Decoding methods, constraints and tools on SmolLM2-135M-Instruct, packed as in its file."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import numpy as np
import pytest

import decodax as dx
from decodax.common.registry import ALGORITHMS
from decodax.models.transformer import Transformer
from tests.drafters.fresh import acceptance_head, draft_classifier, fresh, length_network
from tests.io.gguf.texts import loaded
from tests.matrix import often

pytestmark = [pytest.mark.real, pytest.mark.wide]

CHATS = ["Repeat this sentence three times: The cat sat on the mat and looked at the moon.",
         "Name three fruits and say why each of them is good.", "What is the capital of France?"]
LAYERS = 12
"""Layers of the draft model, the first of the target's."""
SYSTEMS = [name for name, e in ALGORITHMS.items() if e.guarantee == "seed-exact" and not e.alias_of
           and "diffusion" not in e.needs and name != "autoregressive"]
FEW = ("prompt-lookup",)


@functools.cache
def chats() -> list[list[int]]:
    return [loaded("smollm2").tokenizer.encode_chat([{"role": "user", "content": text}]) for text in CHATS]


@functools.cache
def small() -> dx.LM:
    lm = loaded("smollm2")
    config = dataclasses.replace(lm.model.config, layers=lm.model.config.layers[:LAYERS])
    params = {**lm.params, "layers": {str(i): lm.params["layers"][str(i)] for i in range(LAYERS)}}
    return dataclasses.replace(lm, model=Transformer(config), params=params)


def mixing() -> dict[str, np.ndarray]:
    """A random projection of two hidden states of the target to the draft model's width."""
    width = loaded("smollm2").model.config.width
    return {"weight": np.random.default_rng(0).normal(size=(width, 2 * width)) / width}


def decoded(algorithm: Any = None) -> Any:
    """Greedy rows, and one that samples."""
    return dx.generate(loaded("smollm2"), chats(), algorithm=algorithm, max_new_tokens=32, seed=5,
                       temperature=[0.0, 0.0, 0.8], top_p=0.95)


@functools.cache
def plain() -> Any:
    return decoded()


def options(name: str) -> dict[str, Any]:
    """Options of entries that measure or learn by default, so that they do not take minutes."""
    given: dict[str, dict[str, Any]] = {
        "adaeagle": dict(network=length_network(loaded("smollm2"))), "pard": dict(mask=0, length=3),
        "pard-2": dict(mask=0, length=3, states=(-1, 10), projection=mixing()), "automatic": dict(lengths=(3,)),
        "disco": dict(predictor=draft_classifier()),
        "specdec++": dict(head=acceptance_head(small())),
        "self-speculative": dict(skip_mlp=(4, 9), gamma=0.3),
        "knn-ssd": dict(domains=[[chats()[0][:40]], [chats()[1][:40]]])}
    return given.get(name, {})


@pytest.mark.parametrize("name", often(FEW, SYSTEMS))
def test_a_seed_exact_system_equals_plain_decoding(name: str) -> None:
    """Trained drafters have random weights: their drafts are refused nearly always."""
    lm, entry = loaded("smollm2"), ALGORITHMS[name]
    draft = fresh(name, lm) if entry.takes_drafter else small() if entry.takes_draft else None
    out = decoded(dx.algorithms.make(name, lm, draft, **options(name)))
    for b in range(len(CHATS)):
        assert out.row(b).tolist() == plain().row(b).tolist(), (name, b)
    assert np.array_equal(out.status, plain().status)


def test_lookup_takes_fewer_forwards_where_text_repeats() -> None:
    out = decoded("prompt-lookup:length=7")
    assert out.stats.rounds[0] < 0.7 * plain().stats.rounds[0]


SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
          "required": ["name", "age"], "additionalProperties": False}


@pytest.mark.parametrize("algorithm", often([None], [None, "prompt-lookup:length=4"]))
def test_json_by_a_schema(algorithm: str | None) -> None:
    ask = [{"role": "user", "content": "Describe a person as JSON with a name and an age."}]
    out = dx.generate(loaded("smollm2"), [ask] * 2, constraint=dx.constraints.json_schema(SCHEMA), max_new_tokens=64,
                      temperature=[0.0, 1.0], algorithm=algorithm)
    for text in out.text:
        found = json.loads(text)
        assert found.keys() == {"name", "age"} and isinstance(found["age"], int)


def test_a_tool_is_called_with_arguments_of_its_schema() -> None:
    tool = {"type": "function", "function": {"name": "weather", "description": "Returns the weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"enum": ["Paris", "London"]}},
                           "required": ["city"], "additionalProperties": False}}}
    ask = [{"role": "user", "content": "What is the weather in Paris? Use the tool."}]
    out = dx.generate(loaded("smollm2"), [ask], constraint=dx.constraints.tools([tool], "weather"), max_new_tokens=64)
    call = json.loads(out.text[0].removeprefix("<tool_call>").removesuffix("</tool_call>"))
    assert call["name"] == "weather" and call["arguments"]["city"] in ("Paris", "London")
