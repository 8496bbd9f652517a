"""The authors' own loops on tiny checkpoints, against decodax: the same tokens, in the same number of forwards.

Each file in `cases/` holds what one repository's code gave, as numbers, with the repository, commit and settings; see
README.md there. Three cases run by default, the first one of the files in OFTEN with `-m wide`, the others with
`-m matrix`.
"""

import json
from pathlib import Path
from typing import Any

import pytest

import decodax as dx
from decodax.algorithms.diffusion import Filter
from tests.conformance.checkpoints import digest
from tests.conformance.loading import loaded

CASES = Path(__file__).parent / "cases"
# one of each kind of rule; for the caches and the rules that decide when a text is ready, tests/algorithms/diffusion
# has the authors' loops in NumPy
OFTEN = {
    "assisted-generation", "prompt-lookup", "token-recycling", "pearl", "pgj", "self-speculative",      # drafts
    "llada", "dream", "maskgit", "mdlm", "remdm",                   # as many as a schedule says, by rank or by chance
    "fast-dllm", "entropy-bounded", "prophet",                      # as many as are sure
    "fast-dllm-2", "sdar", "llada2.1", "sdlm", "sbd", "diffusion-gemma",        # models of blocks
    "d2f", "d3llm", "freedave",                                     # several blocks or steps at once
}


def cases() -> list[Any]:
    out = []
    for file in sorted(CASES.glob("*.json")):
        data = json.loads(file.read_text())
        for i, case in enumerate(data["cases"]):
            marks = [pytest.mark.full] if i or file.stem not in OFTEN else []
            out.append(pytest.param(data, case, id=f"{file.stem}-{i}", marks=marks))
    return out


@pytest.mark.wide(but=("prompt-lookup-0", "prophet-0", "llada-0"))
@pytest.mark.parametrize(("data", "case"), cases())
def test_tokens_and_forwards_are_the_authors(data: dict[str, Any], case: dict[str, Any], directory: Path) -> None:
    name = case.get("model", data["model"])
    assert digest(name) == case.get("digest", data["digest"]), "the checkpoint is not the one the case was made with"
    lm = loaded(name, directory)
    needs = [loaded(case.get("draft", data["draft"]), directory)] if "draft" in data or "draft" in case else []
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in case["options"].items()}
    if "filter" in data:
        options["filter"] = Filter.of(data["filter"])
    algorithm = dx.algorithms.make(data["system"], lm, *needs, **options)
    out = dx.generate(lm, case["prompts"], algorithm=algorithm, **case["generate"])
    assert [out.row(i).tolist() for i in range(len(out))] == case["tokens"]
    if (forwards := case.get("forwards_here", case.get("forwards"))) is not None:
        assert out.stats.rounds.tolist() == forwards
