"""mypy accepts right calls of the front ends and refuses wrong ones. An editor completes their arguments for the same
reason: they are typed."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

CALLS = {
    "generate": ('dx.generate("pycode", "x", top_p=0.9, temperature=[0.5, None])',
                 'dx.generate("pycode", "x", top_pp=1)'),
    "stream": ('dx.stream("pycode", "x", top_p=0.9, algorithm="prompt-lookup")', 'dx.stream("pycode", "x", top_pp=1)'),
    "one row": ('dx.stream("pycode", "x", max_time=2.0)', 'dx.stream("pycode", "x", num_samples=2)'),
    "watch": ('dx.watch("tasks-diffusion", "x", top_k=3)', 'dx.watch("tasks-diffusion", "x", top_kk=3)'),
    "infill": ('dx.infill("tasks-diffusion", ["x", 3], min_p=0.1, chunk=8)',
               'dx.infill("tasks-diffusion", ["x", 3], max_length=9)'),
    "serve": ('dx.serve("pycode", ["x"], max_new_tokens=3, num_samples=2)', 'dx.serve("pycode", ["x"], top_pp=1)'),
    "transcribe": ('transcribe("whisper", [0.0], batch_size=2)', 'transcribe("whisper", [0.0], inputs=None)'),
    "values": ('dx.stream("pycode", "x", top_k=[3, 4])', 'dx.stream("pycode", "x", top_k="3")'),
    "bind": ('dx.bind("pycode", "prompt-lookup", draft="pycode")', 'dx.bind("pycode", 3)'),
}
"""For each name a call that is right, and one with an argument that does not exist or has the wrong type."""


@pytest.mark.wide
def test_a_type_checker_refuses_arguments_that_do_not_exist(tmp_path: Path) -> None:
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not installed")
    package = tmp_path / "decodax"        # mypy does not follow an editable installation
    package.mkdir()
    for path in [*(ROOT / "decodax").iterdir(), ROOT / "models", ROOT / "pallas_kernels"]:
        (package / path.name).symlink_to(path)
    lines = ["import decodax as dx", "from decodax.front.transcribe import transcribe",
             *(call for calls in CALLS.values() for call in calls)]
    (tmp_path / "calls.py").write_text("\n".join(lines) + "\n")
    said = subprocess.run([sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml", "--cache-dir",
                           tmp_path / "cache", "--follow-imports=silent", "calls.py"],
                          cwd=tmp_path, text=True, capture_output=True).stdout
    refused = {int(line.split(":")[1]) for line in said.splitlines()
               if line.startswith("calls.py:") and "error:" in line}
    wrong = {i for i, line in enumerate(lines, 1) if line in {calls[1] for calls in CALLS.values()}}
    assert refused == wrong, said
