"""Values that ask for nothing are accepted wherever they stand; values that ask for what would be ignored are not."""

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.cli import main
from decodax.common.table import ARGUMENTS
from decodax.core.algorithm import name_of
from decodax.engine.names import NAMED, by_name
from decodax.engine.request import Request
from decodax.sampling import build, from_generation_config
from decodax.sampling.build import COMPANIONS, DEFAULTS
from decodax.sampling.neutral import NEUTRAL, asks_nothing
from decodax.sampling.parts import SAMPLING

ONE = [(name, value) for name, values in NEUTRAL.items() for value in (None, *values)]
GREEDY = ["Temperature"]


def names(policy: Any) -> list[str]:
    return [type(t).__name__ for t in policy.transforms]


@pytest.mark.parametrize(("name", "value"), [(n, x) for n, x in ONE if n in DEFAULTS])
def test_a_neutral_value_needs_no_temperature(name: str, value: Any) -> None:
    for form in (value, *([] if value is None else [np.float32(value), np.int64(value), jnp.int32(value)])):
        for beside in ({}, {"do_sample": False}, {"temperature": 0.0}, {"temperature": None}):
            assert names(build(2, eos=[1], vocab_size=50, **{name: form}, **beside)) == GREEDY, (form, beside)
    build(2, eos=[1], **{name: [value, None]})


@pytest.mark.parametrize("value", [50, 99, [50, 0], [None, 70], np.array([0, 50])])
def test_a_top_k_of_the_whole_vocabulary_needs_no_temperature(value: Any) -> None:
    assert build(2, top_k=value, vocab_size=50).greedy.all()
    with pytest.raises(ValueError, match="top_k: got 49 without temperature"):
        build(2, top_k=49, vocab_size=50)


@pytest.mark.parametrize(("name", "needs"), COMPANIONS.items())
def test_a_default_needs_no_companion(name: str, needs: str) -> None:
    assert names(build(1, **{name: DEFAULTS[name]})) == names(build(1, **{name: None})) == GREEDY
    if isinstance(DEFAULTS[name], float):
        assert names(build(1, **{name: float(repr(DEFAULTS[name]))})) == GREEDY
        with pytest.raises(ValueError, match=f"^{name}: got .* without {needs}"):
            build(1, **{name: DEFAULTS[name] + 0.05})


@pytest.mark.parametrize("name", SAMPLING)
def test_sampling_arguments_are_an_error_where_nothing_is_drawn(name: str) -> None:
    value = 0.5 if name != "top_k" else 3
    with pytest.raises(ValueError, match=f"^{name}: got {value} without temperature.* give temperature"):
        build(2, **{name: value})
    with pytest.raises(ValueError, match=f"^{name}: got {value} with do_sample=False.* takes do_sample=True"):
        build(2, do_sample=False, **{name: value})
    with pytest.raises(ValueError, match=f"^{name}: got .{value}, None. with do_sample=False"):
        build(2, do_sample=[False, False], **{name: [value, None]})
    build(2, do_sample=[True, False], **{name: value})
    build(2, temperature=0.0, **{name: value})      # a temperature of 0 says so itself


def test_a_temperature_is_refused_where_do_sample_is_off() -> None:
    for temperature in (0.7, [0.7, 1.0], np.float32(0.7)):
        with pytest.raises(ValueError, match=r"^temperature: got .* with do_sample=False, which is greedy"):
            build(2, temperature=temperature, do_sample=False)
    for temperature in (None, 0, 0.0, 1, 1.0, [0, 1]):
        assert build(2, temperature=temperature, do_sample=False).greedy.all()
    assert build(2, temperature=0.7, do_sample=[True, False]).greedy.tolist() == [False, True]


def test_a_value_out_of_its_range_is_named_before_one_without_effect(lm: dx.LM) -> None:
    for given, message in (
            (dict(top_p=3), r"^top_p: got 3, takes a number in \[0, 1\]"),
            (dict(min_p="x", do_sample=False), "^min_p: got 'x', takes a number"),
            (dict(xtc_threshold=7), "^xtc_threshold: got 7, takes"), (dict(dry_base=0.5), "^dry_base: got 0.5, takes"),
            (dict(fsd_k=0), "^fsd_k: got 0, takes"),
            (dict(bregman_dual=3), "^bregman_dual: got 3, takes True or False"),
            (dict(num_beam_groups="x"), "^num_beam_groups: got 'x', takes"),
            (dict(length_penalty="x"), "^length_penalty: got 'x', takes a number"),
            (dict(tool_choice=3), "^tool_choice: got 3, takes 'auto'"),
            (dict(tool_tags="ab"), "^tool_tags: got 'ab', takes two texts")):
        with pytest.raises(ValueError, match=message):
            Request.read(lm, [[40]], **by_name(given))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("name", "value"), ONE)
def test_every_front_end_takes_a_neutral_value(lm: dx.LM, name: str, value: Any) -> None:
    if name not in ("progress", "request_ids", "batch_size", "negative_prompts"):
        said = dataclasses.replace(lm, generation_config={**lm.generation_config, name: value})
        assert names(Request.read(said, [[40]]).policy) == GREEDY
    if name != "progress":
        assert names(Request.read(lm, [[40]], **by_name({name: value})).policy) == GREEDY
    assert list(dx.serve(lm, [], **{name: value})) == []
    with dx.stream(lm, [40], max_new_tokens=1, **by_name({name: value})) as one:
        assert "".join(one) == one.result.text[0] and len(one.result.text) == 1


def test_a_file_that_is_silent_about_a_key_says_nothing_of_it(recwarn: pytest.WarningsRecorder) -> None:
    assert names(from_generation_config({"some_new_key": None, "num_beams": 1, "top_k": 50}, 1)) == GREEDY
    assert not recwarn.list


def test_do_sample_false_goes_on_without_what_a_file_says_of_sampling() -> None:
    file = {"do_sample": True, "temperature": 0.6, "top_p": 0.9}
    assert names(from_generation_config(file, 1, do_sample=False)) == GREEDY
    with pytest.raises(ValueError, match=r"^top_p: got 0\.8 with do_sample=False"):
        from_generation_config(file, 1, do_sample=False, top_p=0.8)


def test_beams_take_neutral_values_and_refuse_others(lm: dx.LM) -> None:
    neutral = {name: value for name, value in ONE if name in NAMED and value is not None and name != "num_beams"
               and name != "num_return_sequences"}
    beams = Request.read(lm, [[40]], top_p=1.0, top_k=0, **by_name({"num_beams": 2, **neutral}))
    assert name_of(beams.algorithm) == "BeamSearch(2)"
    assert Request.read(lm, [[40]], algorithm=dx.Autoregressive(), **by_name({"num_beams": 1, **neutral})).samples == 1
    for name, value in (("length_penalty", 0), ("diversity_penalty", 1), ("num_beam_groups", 2), ("patience", 2),
                        ("early_stopping", True)):
        with pytest.raises(ValueError, match=f"^{name}: got {value} with one beam; takes num_beams=2 or more"):
            Request.read(lm, [[40]], **by_name({name: value}))


def test_the_command_line_takes_neutral_values(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["generate", "def", "--model", str(tiny_model), "-n", "2", "--quiet"]
    assert main([*args, "--top-p", "1.0", "--top-k", "0", "--min-p", "0", "--num-beams", "1", "--length-penalty", "1",
                 "--early-stopping", "false", "--set", "do_sample=false", "--set", "penalty_alpha=0.0"]) == 0
    assert main([*args, "--top-p", "3"]) == 2
    assert "top_p: got 3.0, takes a number in [0, 1]" in capsys.readouterr().err


def test_a_list_asks_for_nothing_where_none_of_its_entries_does() -> None:
    assert asks_nothing("top_p", [1.0, None]) and not asks_nothing("top_p", [1.0, 0.5])
    assert not asks_nothing("top_p", True) and not asks_nothing("repetition_penalty", np.True_)
    assert asks_nothing("adapter", [None, None]) and not asks_nothing("adapter", ["a", None])


def test_the_table_has_every_argument_of_the_policy() -> None:
    """`ARGUMENTS` is what generation configs, neutral values and flags are read from."""
    inner = {"transforms", "min_tokens_to_keep", "eos", "vocab_size", "stops"}
    assert {name for name, own in ARGUMENTS.items() if own.where == "policy"} == set(DEFAULTS) - inner
    assert {own.needs for own in ARGUMENTS.values()} - {None} <= set(ARGUMENTS)
