#!/usr/bin/env python
"""Writes docs/results/conformance.md: for every registry entry, how it compares with its authors' code.

    python scripts/conformance_report.py

The figures are those of the committed cases in tests/conformance, the words of tests/conformance/remarks.toml.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CASES = ROOT / "tests" / "conformance"
PAGE = ROOT / "docs" / "results" / "conformance.md"

RESULTS = ("equal", "deviates", "reference at fault", "not compared", "no public code")
"""What a remark may say of an entry. "equal" is for what other tests compare; of cases it is known from themselves."""

FAMILIES = {
    "ar-sampling": "Sampling", "search": "Search",
    "speculative-linear": "Speculation with chains", "speculative-tree": "Speculation with trees",
    "speculative-self": "Self-speculation", "speculative-theory": "Verification and draft lengths",
    "batching-scheduling": "Batches", "parallel-jacobi": "Jacobi and lookahead decoding",
    "blockwise-parallel": "Blockwise decoding", "masked-diffusion": "Masked diffusion",
    "diffusion-cache": "Caches of masked diffusion",
}

HEAD = """\
# Conformance: compared with the authors' code

Where the authors' code was at hand and runs on a CPU, it was run on tiny checkpoints with fixed weights. Its output is
committed as numbers under `tests/conformance`, with repository, commit and settings. The tests decode the same prompts
here and compare the tokens and the number of model calls; of draft trees, lookups and verifiers they compare proposals
and verdicts. Links lead to the commit. "forwards (7)" were compared in 7 cases; the others end with their budget inside
a block; most cases have three texts. Three cases are in the default suite; `pytest -m "" tests/conformance` runs all. A
line without counts has no cases: where it says "by reading", the code was read and not run.

- **equal**: the same tokens in every case, in as many forwards unless the line says otherwise.
- **deviates**: differs in the way that the line says, and why.
- **reference at fault**: the published code does not do what its paper says; the line says how.
- **not compared**: code is public, but no case could be made, or none is yet.
- **no public code**: none was found.

An entry that is another name of the same algorithm is listed with it. `scripts/conformance_report.py` writes this page.
"""


def page(root: Path = CASES) -> str:
    """The text of docs/results/conformance.md."""
    from decodax.common.registry import ALGORITHMS

    remarks = tomllib.loads((root / "remarks.toml").read_text())
    found = references(root)
    if strange := sorted((remarks.keys() | found.keys()) - ALGORITHMS.keys()):
        raise ValueError(f"tests/conformance: {', '.join(strange)}: no registry entry of this name")
    for name, remark in remarks.items():
        if unknown := remark.keys() - {"result", "text"}:
            raise ValueError(f"remarks.toml: {name}: unknown {', '.join(unknown)}")
        if remark.get("result", "equal") not in RESULTS:
            raise ValueError(f"remarks.toml: {name}: result: got {remark['result']!r}, takes {', '.join(RESULTS)}")
    rows = defaultdict(list)
    for name, entry in ALGORITHMS.items():
        if entry.alias_of:
            rows[entry.family].append((name, f"as `{entry.alias_of}`", ""))
        else:
            rows[entry.family].append((name, *line(name, found.get(name, []), remarks.get(name, {}))))
    counts = defaultdict(int)
    for lines in rows.values():
        for _, result, _ in lines:
            counts[result.split(":")[0].split(" (")[0]] += 1
    named = ", ".join(f"{result} {counts[result]}" for result in RESULTS if counts[result])
    compared = sum(not ALGORITHMS[name].alias_of for name in found)
    total = sum(not entry.alias_of for entry in ALGORITHMS.values())
    text = [HEAD, f"Of {total} systems: {named}. {compared} have committed cases.\n"]
    for family, title in FAMILIES.items():
        text += [f"## {title}\n", "| system | result | compared with, and what differs |", "|---|---|---|"]
        text += [f"| `{name}` | {result} | {what} |" for name, result, what in rows.pop(family, [])]
        text.append("")
    assert not rows, f"families without a title: {list(rows)}"
    return "\n".join(text)


def references(root: Path) -> dict[str, list[dict[str, Any]]]:
    """By registry entry, what was compared: `source`, `count` and `what` of it, and `notes`."""
    out = defaultdict(list)
    for folder, describe in {"cases": loops, "vocabularies": loops, "drafts": proposals, "trees": trees,
                             "verify": verdicts}.items():
        for file in sorted((root / folder).glob("*.json")):
            data = json.loads(file.read_text())
            count, notes = describe(data)
            out[data["system"]].append({"source": source(data["reference"]), "count": count, "notes": notes})
    return out


def loops(data: dict[str, Any]) -> tuple[str, list[str]]:
    """Whole runs: how much was compared, and what to note."""
    cases = data["cases"]
    counted = [case for case in cases if "forwards" in case]
    other: dict[str, int] = defaultdict(int)
    for case in cases:
        if "forwards_here" in case:
            other[case["why"]] += 1
    notes = [f"other forwards in {n} of {len(cases)}: {sentence(why)}" for why, n in other.items()]
    forwards = " and forwards" * bool(counted) + f" ({len(counted)})" * (0 < len(counted) < len(cases))
    return f"tokens{forwards}, {len(cases)} cases", notes


def proposals(data: dict[str, Any]) -> tuple[str, list[str]]:
    """Drafts for given texts."""
    if "copies" in data:
        return f"drafts, {len(data['outputs'])} texts", []
    total = len(data["histories"]) * len(data["groups"])
    other: dict[str, int] = defaultdict(int)
    for group in data["groups"]:
        if group.get("differs"):
            other[group["why"]] += len(group["differs"])
    notes = [f"{n} of {total} differ: {sentence(why)}" for why, n in other.items()]
    return f"drafts, {total} in {len(data['groups'])} settings", notes


def trees(data: dict[str, Any]) -> tuple[str, list[str]]:
    """Trees for given chances."""
    if "cases" in data:
        return f"trees, {len(data['cases'])} settings", []
    return f"trees, {sum(len(group['trees']) for group in data['groups'])} in {len(data['groups'])} settings", []


def verdicts(data: dict[str, Any]) -> tuple[str, list[str]]:
    """What holds of given drafts."""
    return f"verdicts, {sum(len(g['accepted']) for g in data['groups'])} in {len(data['groups'])} settings", []


def sentence(text: str) -> str:
    """The text as part of another sentence."""
    text = text.rstrip(".")
    return text[0].lower() + text[1:]


def source(reference: dict[str, Any]) -> str:
    """The repository as a link to the commit that was run."""
    name = reference["repository"].removeprefix("https://github.com/").strip("/")
    return f"[{name}](https://github.com/{name}/tree/{reference['commit']})"


def line(name: str, found: Iterable[dict[str, Any]], remark: dict[str, str]) -> tuple[str, str]:
    """The result of an entry, and what to say of it."""
    found = list(found)
    result = remark.get("result", "equal" if found else "")
    if not result:
        raise ValueError(f"remarks.toml: {name}: has no cases and no result, takes one of {', '.join(RESULTS)}")
    if found:
        result = f"{result}: {'; '.join(f['count'] for f in found)}"
    sources = list(dict.fromkeys(f["source"] for f in found))
    notes = list(dict.fromkeys(note for f in found for note in f["notes"]))
    said = [note[0].upper() + note[1:] for note in notes]
    return result, ". ".join(filter(None, [", ".join(sources), *said, remark.get("text", "").rstrip(".")]))


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PAGE.write_text(page())
    print(PAGE.relative_to(ROOT))


if __name__ == "__main__":
    main()
