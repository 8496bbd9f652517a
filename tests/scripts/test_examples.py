"""The examples in the help of the programs in scripts/ are valid command lines."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

import commands

SCRIPTS = Path(__file__).parents[2] / "scripts"
EXAMPLE = re.compile(r"^ +(python scripts/(\w+)\.py\b.*)$", re.MULTILINE)
EXAMPLES = [found for path in sorted(SCRIPTS.glob("*.py")) for found in EXAMPLE.findall(path.read_text())]


@pytest.mark.parametrize(("line", "program"), [(line, name) for line, name in EXAMPLES if "import commands" in (
    SCRIPTS / f"{name}.py").read_text()])
def test_an_example_is_parsed_by_its_program(line: str, program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[argparse.Namespace] = []

    def run(name: str, args: argparse.Namespace, call: Any) -> int:
        read.append(args)
        return 0

    monkeypatch.setattr(commands, "run", run)
    words = shlex.split(line, comments=True)[2:]
    assert importlib.import_module(program).main(words) == 0
    assert read[0].command == words[0]


def test_a_shell_takes_each_example() -> None:
    assert len(EXAMPLES) > 20
    for line, _ in EXAMPLES:
        subprocess.run(["bash", "-n", "-c", line], check=True, capture_output=True)
