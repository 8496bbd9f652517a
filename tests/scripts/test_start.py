"""Each program in scripts/ starts from the root of the repository, and takes the arguments that its docstring and the
guides write."""

import inspect
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import benchmark
import evaluate
import pytest
import train

from decodax.common.registry import ALGORITHMS
from recipes.options import from_arguments

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted(path.name for path in (ROOT / "scripts").glob("*.py") if "__main__" in path.read_text())
COMMANDS = [(name, command) for name, table in (("train", train.RECIPES), ("benchmark", benchmark.BENCHMARKS),
                                                ("evaluate", evaluate.EVALUATIONS),
                                                ("convert", {"packed": "", "rwkv": "", "hamburger": ""}))
            for command in table]

START = '''
import argparse, json, runpy, sys, traceback

class Parsed(BaseException):
    """Stands for what a program does once it knows its arguments."""

parse = argparse.ArgumentParser.parse_args

def stop(self, args=None, namespace=None):
    parse(self, args, namespace)
    raise Parsed

argparse.ArgumentParser.parse_args = stop
failed = {}
for command in json.load(sys.stdin):
    sys.argv, sys.path[0] = command, "scripts"
    try:
        runpy.run_path(command[0], run_name="__main__")
        failed[" ".join(command)] = "it reads no arguments"
    except Parsed:
        pass
    except SystemExit as error:
        if error.code:
            failed[" ".join(command)] = f"it exits with {error.code}"
    except Exception:
        failed[" ".join(command)] = traceback.format_exc()
print(json.dumps(failed))
'''
"""Runs programs one after the other, with sys.path as `python scripts/NAME.py` has it, as far as their arguments."""


def start(commands: list[list[str]]) -> dict[str, str]:
    """The commands that do not start, and why; all in one process."""
    done = subprocess.run([sys.executable, "-c", START], input=json.dumps(commands), capture_output=True, text=True,
                          cwd=ROOT, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def written(text: str) -> list[list[str]]:
    """The commands `python scripts/NAME.py ...` of a text: lines of their own, or between backticks."""
    text = text.replace("\\\n", " ")
    found = re.findall(r"^\s*(?:\S*/)?python (scripts/\w+\.py[^`\n]*)$", text, re.MULTILINE)
    found += re.findall(r"`(?:\S*/)?python\s+(scripts/\w+\.py[^`]*)`", text)
    return [shlex.split(command, comments=True) for command in found]


def test_every_program_and_subcommand_says_what_it_takes():
    assert PROGRAMS == ["benchmark.py", "conformance_report.py", "convert.py", "evaluate.py", "real_models.py",
                        "train.py"]
    commands = [[f"scripts/{name}.py", command, "--help"] for name, command in COMMANDS]
    assert start([*([f"scripts/{name}", "--help"] for name in PROGRAMS), *commands]) == {}


@pytest.mark.parametrize("name", ["benchmark", "evaluate", "train", "convert"])
def test_help_does_not_import_jax(name):
    program = f"import sys; sys.path.insert(0, 'scripts'); import {name}; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


@pytest.mark.parametrize(("words", "message"), [
    (["train.py", "lm", "--decay-from", "3"], "train.py lm: decay_from: got 3"),
    (["evaluate.py", "systems", "llada", "--task", "nope"], "evaluate.py systems: --task: got nope"),
    (["benchmark.py", "kernels", "--capacity", "200"], "benchmark.py kernels: --capacity: got 200"),
])
def test_bad_input_gives_one_line(words, message):
    done = subprocess.run([sys.executable, *words], cwd=ROOT / "scripts", capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith(message) and "Traceback" not in done.stderr


FIGURES = [*(ROOT / "models" / "zoo").glob("*/training.json"), *(ROOT / "models" / "zoo").glob("*/filter.json")]


@pytest.mark.parametrize("figures", sorted(FIGURES), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_the_command_of_a_shipped_model_is_one_that_repeats_itself(figures):
    facts = json.loads(figures.read_text())
    for line in facts["command"].splitlines():
        options = from_arguments(train.parser().parse_args(shlex.split(line)[2:]))
        assert options.command(options.steps, options.decay_from) == line


def test_every_written_command_is_one_that_its_program_takes():
    pages = [*(ROOT / "scripts").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    texts = [*(page.read_text() for page in pages), *(inspect.getdoc(e.make) or "" for e in ALGORITHMS.values())]
    commands = [command for text in texts for command in written(text)]
    assert {Path(command[0]).name for command in commands} == {*PROGRAMS}
    assert start(commands) == {}


def test_commands_are_found_where_they_are_written():
    text = "See `python scripts/a.py\n--x 1`.\n\n    python scripts/b.py 'c d' \\\n        --e  # fast\n"
    assert written(text) == [["scripts/b.py", "c d", "--e"], ["scripts/a.py", "--x", "1"]]
