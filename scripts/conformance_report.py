#!/usr/bin/env python
"""Rewrites the tables of docs/results/conformance.md: for every registry entry, how it compares with its authors' code.

    python scripts/conformance_report.py

The figures are those of the committed cases in tests/conformance, the words of tests/conformance/remarks.toml. The text
above the tables stays as it is.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CASES = ROOT / "tests" / "conformance"
PAGE = ROOT / "docs" / "results" / "conformance.md"

RESULTS = ("equal", "deviates", "reference at fault", "not compared", "no public code")
"""Results that a remark may have. "equal" is for what other tests compare; of cases it is known from themselves."""

FAMILIES = {
    "ar-sampling": "Sampling", "search": "Search",
    "speculative-linear": "Speculation with chains", "speculative-tree": "Speculation with trees",
    "speculative-self": "Self-speculation", "speculative-theory": "Verification and draft lengths",
    "batching-scheduling": "Batches", "parallel-jacobi": "Jacobi and lookahead decoding",
    "blockwise-parallel": "Blockwise decoding", "masked-diffusion": "Masked diffusion",
    "diffusion-cache": "Caches of masked diffusion",
}
"""Titles, here and on the pages of `scripts/site.py`."""


def page(root: Path = CASES) -> str:
    """Returns the text of docs/results/conformance.md."""
    from decodax.common.registry import ALGORITHMS

    remarks = tomllib.loads((root / "remarks.toml").read_text())
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for file in sorted(file for folder in COUNTS for file in (root / folder).glob("*.json")):
        data = json.loads(file.read_text())
        count, why = COUNTS[file.parent.name](data)
        found[data["system"]].append({"source": source(data["reference"]), "count": count, "notes": why})
    if strange := sorted((remarks.keys() | found.keys()) - ALGORITHMS.keys()):
        raise ValueError(f"tests/conformance: {', '.join(strange)}: no registry entry of this name")
    for name, remark in remarks.items():
        if unknown := remark.keys() - {"result", "text"}:
            raise ValueError(f"remarks.toml: {name}: unknown {', '.join(unknown)}")
        if remark.get("result", "equal") not in RESULTS:
            raise ValueError(f"remarks.toml: {name}: result: got {remark['result']!r}, takes {', '.join(RESULTS)}")
    rows, counts = defaultdict(list), Counter[str]()
    for name, entry in ALGORITHMS.items():
        result, text = (f"as `{entry.alias_of}`", "") if entry.alias_of else \
            line(name, found.get(name, []), remarks.get(name, {}))
        rows[entry.family].append(f"| `{name}` | {result} | {text} |")
        counts[result.split(":")[0]] += 1
    named = ", ".join(f"{result} {counts[result]}" for result in RESULTS if counts[result])
    compared = sum(not ALGORITHMS[name].alias_of for name in found)
    total = sum(not entry.alias_of for entry in ALGORITHMS.values())
    text = [PAGE.read_text().partition("\nOf ")[0], f"Of {total} systems: {named}. {compared} have committed cases.\n"]
    for family, title in FAMILIES.items():
        text += [f"## {title}\n", "| system | result | compared with, and what differs |", "|---|---|---|",
                 *rows.pop(family, []), ""]
    assert not rows, f"families without a title: {list(rows)}"
    return "\n".join(text)


def runs(data: dict[str, Any]) -> tuple[Counter[str], list[str]]:
    """Returns how many whole runs were compared, and notes."""
    cases = data["cases"]
    other = Counter(case["why"] for case in cases if "forwards_here" in case)
    return (Counter({"runs": len(cases), "forwards": sum("forwards" in case for case in cases)}),
            [f"other forwards in {n} of {len(cases)}: {sentence(why)}" for why, n in other.items()])


def proposals(data: dict[str, Any]) -> tuple[Counter[str], list[str]]:
    """Returns the same of drafts for given texts."""
    if "copies" in data:
        return Counter(drafts=len(data["outputs"])), []
    total, other = len(data["histories"]) * len(data["groups"]), Counter[str]()
    for group in data["groups"]:
        if group.get("differs"):
            other[group["why"]] += len(group["differs"])
    return Counter(drafts=total), [f"{n} of {total} differ: {sentence(why)}" for why, n in other.items()]


def groups(what: str, field: str, data: dict[str, Any]) -> tuple[Counter[str], list[str]]:
    """Returns the same of trees for given chances, or of verdicts on given drafts."""
    if "cases" in data:
        return Counter({what: len(data["cases"])}), []
    return Counter({what: sum(len(group[field]) for group in data["groups"])}), []


COUNTS = {"cases": runs, "vocabularies": runs, "drafts": proposals,
          "trees": lambda data: groups("trees", "trees", data),
          "verify": lambda data: groups("verdicts", "accepted", data)}
"""By the folder of the cases."""


def sentence(text: str) -> str:
    """Returns the text as part of another sentence."""
    text = text.rstrip(".")
    return text[0].lower() + text[1:]


def source(reference: dict[str, Any]) -> str:
    """Returns the repository as a link to the commit that was run."""
    name = reference["repository"].removeprefix("https://github.com/").strip("/")
    return f"[{name}](https://github.com/{name}/tree/{reference['commit']})"


def line(name: str, found: list[dict[str, Any]], remark: dict[str, str]) -> tuple[str, str]:
    """Returns the result of an entry, and the text about it."""
    result = remark.get("result", "equal" if found else "")
    if not result:
        raise ValueError(f"remarks.toml: {name}: has no cases and no result, takes one of {', '.join(RESULTS)}")
    if counts := sum((f["count"] for f in found), Counter[str]()):
        forwards = counts.pop("forwards", 0)
        whole = f" (forwards in {forwards})" * (forwards < counts["runs"])
        result += ": " + ", ".join(f"{n} {what}" + whole * (what == "runs") for what, n in counts.items() if n)
    said = [note[0].upper() + note[1:] for note in dict.fromkeys(note for f in found for note in f["notes"])]
    sources = ", ".join(dict.fromkeys(f["source"] for f in found))
    return result, ". ".join(filter(None, [sources, *said, remark.get("text", "").rstrip(".")]))


def main() -> None:
    """Writes the page."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PAGE.write_text(page())
    print(PAGE.relative_to(ROOT))


if __name__ == "__main__":
    main()
