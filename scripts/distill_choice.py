"""Training data from an expensive way to decode (MBR and QE finetuning: Finkelstein and Freitag, 2023): answers that a
rule has chosen among samples, one JSON object a line. A model that is fine-tuned on them decodes greedily nearly as
well.

    python scripts/distill_choice.py pycode prompts.txt data.jsonl --rule mbr --n 32

For another rule than one without options, such as best-of-n by an estimate of quality, `--options` names a Python file
that has a dictionary `OPTIONS`.
"""

from __future__ import annotations

import argparse
import json
import runpy
from pathlib import Path

import decodax as dx


def read(path: Path) -> list[str]:
    """Prompts: one a line, or in JSON Lines under "prompt"."""
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    return [json.loads(line)["prompt"] for line in lines] if path.suffix == ".jsonl" else lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model, or a teacher of the one that is trained")
    parser.add_argument("prompts", type=Path, help="one a line, or JSON Lines with \"prompt\"")
    parser.add_argument("out", type=Path, help="JSON Lines with prompt, completion and score")
    parser.add_argument("--rule", default="mbr", help="of decodax.select.SELECTS")
    parser.add_argument("--n", type=int, default=32, help="samples of a prompt")
    parser.add_argument("--options", type=Path, help="a Python file with OPTIONS, a dictionary, for the rule")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--epsilon", type=float, default=0.02, help="tokens that are less probable are left out")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16, help="prompts at once")
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()
    options = runpy.run_path(str(a.options))["OPTIONS"] if a.options else {}
    lm, prompts = dx.load(a.model), read(a.prompts)
    with a.out.open("w") as file:
        for start in range(0, len(prompts), a.batch):
            part = prompts[start:start + a.batch]
            out = dx.select.choose(lm, part, a.rule, n=a.n, options=options, temperature=a.temperature, seed=a.seed,
                            epsilon_cutoff=a.epsilon, max_new_tokens=a.max_new_tokens,
                            request_ids=list(range(start, start + len(part))))
            for prompt, text, choice in zip(part, out.text, out.choices, strict=True):
                score = float(choice.scores[choice.index])
                file.write(json.dumps({"prompt": prompt, "completion": text, "score": score}) + "\n")


if __name__ == "__main__":
    main()
