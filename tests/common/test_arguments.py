"""Every argument of `generate` with values of the wrong kind: an error that names the argument and says what it takes,
or a value that is legal there. Nothing runs."""

import inspect
import math
import re
import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.engine.names import ELSEWHERE, NAMED, SLOT_OF, WITHOUT, by_name, takes
from decodax.engine.request import Request
from decodax.front.infill import infill
from decodax.front.options import SamplingOptions
from decodax.sampling.build import COMPANIONS
from decodax.sampling.parts import SAMPLING

ARGUMENTS = sorted({*takes("generate"), *NAMED} - {"progress", "search", "select", "sampling", "draft"})
TOOLS = [{"name": "f", "parameters": {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"],
                                      "additionalProperties": False}}]
BEAMS = {"num_beams": 2}
BESIDE: dict[str, dict[str, Any]] = {
    **{name: {needs: 0.5} for name, needs in COMPANIONS.items()}, "constraint_after": {"choices": ["a"]},
    "tool_choice": {"tools": TOOLS}, "tool_tags": {"tools": TOOLS}, "negative_prompts": {"guidance_scale": 2.0},
    **dict.fromkeys(("length_penalty", "early_stopping", "patience", "num_beam_groups", "diversity_penalty"), BEAMS)}
"""What an argument has no effect without."""


def wrong() -> list[Any]:
    class Thing:
        pass

    return [object(), Thing, Thing(), "\ud800", ["\ud800"], [["\ud800"]], "", b"x", [b"x"], bytearray(b"x"), 1j,
            math.nan, math.inf, -math.inf, -1, -2.5, 10 ** 30, 1e39, True, False, np.bool_(True), {}, {"a": 1},
            {"a": "\ud800"}, {"function": 3}, {1}, [], [[]], [None], [3], [True], [[["x"]]], (1, 2), range(3),
            iter([1.5]), lambda x: x, float, np.array(None), np.array("x"), np.array([1, 2]), np.array([1.5, 2.5]),
            np.zeros((2, 2, 2)), [np.array([1, 2])], np.datetime64("2020"), jnp.zeros((2, 2)), jnp.array([1.5, 2.5]),
            np.float32(0.7), jnp.float32(0.7), np.int64(5), jnp.int32(5), np.array(1.0), [{"type": "function"}]]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_value_of_the_wrong_kind_is_named(lm: dx.LM, name: str) -> None:
    beside = dict(BESIDE.get(name, {}))
    if {name, *beside} & set(SAMPLING):
        beside["temperature"] = 1.0
    errors = []
    for value in wrong():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", DeprecationWarning)
                Request.read(lm, "ab", **by_name({**beside, name: value}))
        except (TypeError, ValueError) as error:
            errors.append((repr(value), error))
    assert len(errors) >= 10
    for said, error in errors:
        text = str(error)
        assert re.match(rf"{name}\b", text), f"{said}: {text}"      # "eos" says eos_token_id
        assert "\n" not in text and len(text.encode()) < 2000, said


NUMBERS = {"temperature": 0.7, "top_p": 0.7, "top_k": 5, "min_p": 0.25, "repetition_penalty": 1.5,
           "length_penalty": 0.5, "diversity_penalty": 0.5, "penalty_alpha": 0.5, "guidance_scale": 1.5,
           "max_time": 1.5, "num_beams": 2, "max_new_tokens": 5, "seed": 5, "num_samples": 2, "logprobs": 2, "chunk": 8,
           "mirostat_tau": 2.5}


@pytest.mark.parametrize(("name", "value"), NUMBERS.items())
def test_numbers_of_numpy_and_jax_are_numbers(lm: dx.LM, name: str, value: float) -> None:
    beside = {**BESIDE.get(name, {}), **({"temperature": 1.0} if name in SAMPLING and name != "temperature" else {})}
    whole = isinstance(value, int)
    forms = [np.int32(value), np.uint8(value), jnp.int32(value), np.array(value)] if whole else \
        [np.float32(value), np.float64(value), np.float16(value), jnp.float32(value), np.array(value)]
    plain = Request.read(lm, "ab", **by_name({**beside, name: value}))
    for form in forms:
        read = Request.read(lm, "ab", **by_name({**beside, name: form}))
        assert read.algorithm == plain.algorithm or name == "max_time", form
        assert read.max_time == pytest.approx(plain.max_time) if plain.max_time else read.max_time is None
        for a, b in zip(map(np.asarray, read.policy.transforms and [read.max_new, read.seeds]),
                        [plain.max_new, plain.seeds], strict=True):
            assert np.array_equal(a, b)
        assert read.samples == plain.samples and read.logprobs == plain.logprobs and read.chunk == plain.chunk


def test_flags_of_numpy_and_jax_are_flags(lm: dx.LM) -> None:
    for name in ("include_stop", "skip_special_tokens"):
        for form in (np.bool_(True), np.array(True), jnp.array(True)):
            assert getattr(Request.read(lm, "ab", **{name: form}), name) is True
    assert Request.read(lm, "ab",
                        **by_name(dict(num_beams=2, early_stopping=np.bool_(True)))).algorithm.early_stopping is True


def test_an_unknown_argument_lists_the_near_ones_and_then_all_of_generate(lm: dx.LM) -> None:
    for front, where in ((dx.generate, "generate"), (dx.stream, "stream")):
        with pytest.raises(TypeError) as error:
            front(lm, "ab", temprature=0.5)
        near, known = re.fullmatch(rf"temprature: unknown argument; did you mean (.*?)\? {where} takes (.*)",
                                   str(error.value)).groups()
        assert near.startswith("temperature")
        assert {"stop", "seed", "constraint", "logprobs", "top_p"} <= set(known.split(", "))
        assert not {"vocab_size", "stops", "eos", "batch", "where", "behind"} & set(known.split(", "))
        assert ("num_samples" in known.split(", ")) == (where == "generate")
    with pytest.raises(TypeError, match=r"^callback: unknown argument; generate takes adapter, "):
        dx.generate(lm, "ab", callback=print)


def test_the_list_holds_the_signature_of_generate() -> None:
    named = lambda front: {p.name for p in inspect.signature(front).parameters.values() if p.kind is p.KEYWORD_ONLY}
    assert len(named(dx.generate)) + 2 <= 20
    assert named(dx.generate) | SamplingOptions.__annotations__.keys() == takes("generate") | {"eos"}
    assert named(infill) <= takes("infill")
    assert WITHOUT.keys() == {"generate", "stream", "watch", "infill"}


@pytest.mark.parametrize("name", [*ELSEWHERE, *SLOT_OF, "where"])
def test_names_from_below_and_from_elsewhere_are_unknown(lm: dx.LM, name: str) -> None:
    with pytest.raises(TypeError, match=f"^{name}: unknown argument; "):
        dx.generate(lm, "ab", **{name: 5})
