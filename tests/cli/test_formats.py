"""Formats of weights on the command line, with their options."""

import json
import re
from pathlib import Path

import pytest

from decodax.cli import main


@pytest.mark.wide
def test_a_model_is_packed_and_written(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "packed"
    quantize = ["quantize", str(tiny_model), str(out), "--weights"]
    assert main([*quantize, "int4:group=8"]) == 0
    assert re.search(r"packed: [\d.]+ MB in int4:group=8, [\d.]+ MB before\n$", capsys.readouterr().out)
    assert main(["generate", "--model", str(out), "--max-new-tokens", "3", "--quiet", "def f("]) == 0
    assert capsys.readouterr().out
    assert main([*quantize, "int8"]) == 2
    assert "is not empty; --force writes into it" in capsys.readouterr().err


@pytest.mark.parametrize(("weights", "message"), [
    ("int9", "weights: got 'int9', takes 'int8'"),
    ("int4:groups=8", "weights: 'int4' takes no option 'groups'; takes "),
    ("int4:group=1", "group: got 1, takes a whole number from 2"), ("int4:8", "int4:8: takes NAME:OPTION=VALUE")])
def test_a_wrong_format_is_wrong_usage(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                       weights: str, message: str) -> None:
    assert main(["quantize", str(tiny_model), str(tmp_path / "out"), "-w", weights]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()
    (tmp_path / "text").write_text("def f(x):")
    for command in (["generate", "def f("], ["score", str(tmp_path / "text")], ["compare", "prompt-lookup"]):
        assert main([*command, "--model", str(tiny_model), "--weights", weights]) == 2
        assert message in capsys.readouterr().err


def test_scores_depend_on_the_options_of_the_format(tiny_model: Path, tmp_path: Path,
                                                        capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("def f(x):")
    command = ["score", str(tmp_path / "text"), "--json", "--model", str(tiny_model)]
    found = []
    for weights in ("int4:group=16", "int4:group=32"):
        assert main([*command, "--weights", weights]) == 0
        found.append(json.loads(capsys.readouterr().out)["all"]["perplexity"])
    assert found[0] != found[1]


def test_a_format_of_drafters_needs_a_drafter(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "eagle-3", "--draft-weights", "int8"]) == 2
    assert "--draft-weights takes --draft with trained drafters" in capsys.readouterr().err
