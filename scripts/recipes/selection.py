"""Training data from an expensive way to decode: answers that a rule selects among samples, one JSON object a line.

    python scripts/train.py selection pycode prompts.txt data.jsonl --rule mbr --n 32

A model that is fine-tuned on them decodes greedily nearly as well (MBR and QE finetuning: Finkelstein and Freitag,
2023). For a rule that needs options, such as best-of-n by an estimate of quality, `--options` names a Python file that
has a dictionary `OPTIONS`.
"""

from __future__ import annotations

import argparse
import json
import runpy
from pathlib import Path

from rich.console import Console
from rich.progress import track

import decodax as dx


def read(path: Path) -> list[str]:
    """Returns prompts: one a line, or in JSON Lines under "prompt"."""
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    return [json.loads(line)["prompt"] for line in lines] if path.suffix == ".jsonl" else lines


def main(args: argparse.Namespace) -> None:
    """Writes prompt, completion and score of every prompt."""
    options = runpy.run_path(str(args.options))["OPTIONS"] if args.options else {}
    lm, prompts = dx.load(args.model), read(args.prompts)
    with args.out.open("w") as file:
        for start in track(range(0, len(prompts), args.batch), "selecting", console=Console(stderr=True)):
            part = prompts[start:start + args.batch]
            out = dx.select.choose(lm, part, args.rule, n=args.n, options=options, temperature=args.temperature,
                            epsilon_cutoff=args.epsilon, max_new_tokens=args.max_new_tokens, seed=args.seed,
                            request_ids=list(range(start, start + len(part))))
            for prompt, text, choice in zip(part, out.text, out.choices, strict=True):
                score = float(choice.scores[choice.index])
                file.write(json.dumps({"prompt": prompt, "completion": text, "score": score}) + "\n")
