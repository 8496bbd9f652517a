"""Cards of models and drafters that are made from, or for, a target."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from decodax.bench.figures import markdown_table
from decodax.train.corpus import corpus_name
from decodax.train.tuning.python_docs import SOURCE
from recipes.options import KINDS, Options

CARD = """---
{license}tags: [jax, decodax{tags}]
base_model: {target}
---
# {name}

{introduction}

{table}

{note}**Reproduce** from the root of the repository:

```
{command}
```
"""


def files_of(options: Options) -> str:
    """Returns the names of the files of examples in Markdown, and the number of chats that the target wrote."""
    names = [corpus_name() if file == SOURCE else f"`{Path(file).name}`" for file in options.data]
    return ", ".join(names + ([f"{options.own_chats:,} chats of its own"] if options.own_chats else []))


def write_card(options: Options, directory: Path, facts: Mapping[str, Any], introduction: str, data: str,
               figures: Mapping[str, Any], note: str = "", tags: str = "", license: str = "") -> None:
    """Writes README.md.

    Args:
        options, directory, facts: the run, where its model or drafter is, and what `recipes.run.train` says of it.
        introduction, note: the paragraphs before and after the table.
        data, figures: the row "training data", and further rows by title.
        tags: further tags, with a comma before each.
        license: name of the license, if it is not that of the target.
    """
    rows = {"parameters": f"{facts['parameters']:,}", "training data": data,
            "training tokens": f"{facts['tokens']:,} in {facts['steps']:,} steps", **figures,
            "hardware": facts["hardware"], "training time": f"{60 * facts['hours']:.0f} minutes"}
    (directory / "README.md").write_text(CARD.format(
        license=license and f"license: {license}\n", tags=tags, target=options.target, introduction=introduction,
        name=f"{Path(options.target).stem}-{options.preset}", note=note and f"{note}\n\n", command=facts["command"],
        table=markdown_table(("", ""), [(k, str(v)) for k, v in rows.items()])))


def write_facts(options: Options, directory: Path, facts: Mapping[str, Any]) -> None:
    """Writes training.json: the facts, and what was trained on what."""
    own = {KINDS[options.recipe]: options.preset, "target": options.target, "data": list(options.data)}
    (directory / "training.json").write_text(json.dumps({**facts, **own}, indent=2) + "\n")


def changes(before: Mapping[str, float], after: Mapping[str, float]) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the facts of figures before and after the training, and their rows of the table."""
    rounded = [{name: round(x, 4) for name, x in figures.items()} for figures in (before, after)]
    return (dict(zip(("before", "after"), rounded, strict=True)),
            {name.replace("_", " "): f"{x} → {rounded[1][name]}" for name, x in rounded[0].items()})
