"""500 malformed calls: each gives a result, or an error that names the argument or file. None hangs, none is silent."""

import dataclasses
import re
import shutil
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

import decodax as dx
from decodax.io import sandbox
from decodax.models.diffusion import Diffusion
from tests.malformed import FIXED, IDS, Case, World, cases, command_line, rows, stripped

CASES = cases()


@pytest.fixture(scope="module")
def made(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    directory = shutil.copytree(tiny_model, tmp_path_factory.mktemp("broken") / "model")
    stripped(directory)
    lm = dx.load(tiny_model)
    return World(lm=lm, filling=dataclasses.replace(lm, diffusion=Diffusion(3)), directory=directory,
                 reference=rows(dx.generate(lm, IDS, **FIXED)), cli=lambda args: (0, ""))


@pytest.fixture
def world(made: World, tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(sandbox, "SECONDS", 1.0)
    return dataclasses.replace(made, cli=command_line(tiny_model, capsys))


def test_there_are_500_and_they_are_of_many_kinds():
    assert len(CASES) == 500
    assert len({case.what for case in CASES}) > 300
    assert sum(case.check is not None for case in CASES) > 80


# without addresses: every worker must collect the same names
@pytest.mark.parametrize("case", CASES, ids=[f"{i}-{re.sub('0x[0-9a-f]+', '', c.what)}" for i, c in enumerate(CASES)])
def test_a_malformed_call_gives_a_result_or_an_error_that_names_it(world: World, case: Case):
    begin = time.monotonic()
    out, refused = run(case, world)
    assert time.monotonic() - begin < 60
    if refused is not None:
        assert case.check is None or case.either, f"{case.what} was refused: {refused}"
        assert any(name in refused for name in case.names), refused
        assert len(refused) < 1500, len(refused)
    else:
        assert case.check is not None, f"{case.what} gave a result"
        assert case.check(world, out), f"{case.what} became something else"


def run(case: Case, world: World) -> tuple[Any, str | None]:
    """What came of it: a result, or the text of an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return case.run(world), None
        except (ValueError, TypeError, OSError) as error:
            return None, str(error)
