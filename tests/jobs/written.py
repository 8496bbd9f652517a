"""Models, data and helpers of `test_batch.py` that other tests use too."""

import json
from pathlib import Path
from typing import Any


def written(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def results(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(directory.glob("part-*.jsonl")) for line in path.open()]
