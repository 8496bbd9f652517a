"""What beams cost: a step of beam search beside as many independent samples, by cache, and beside transformers; and how
many forwards drafts spare.

    python scripts/benchmark_beams.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import decodax as dx
from decodax.algorithms.beams import BeamSearch
from decodax.algorithms.speculative import drafts

PROMPTS = ["def area(", "import ", "x = [", "class A:"] * 2


def theirs(new: int, beams: int, repeats: int) -> list[float]:
    """Seconds of transformers for the same prompts, each of the same length."""
    import torch
    from transformers import AutoModelForCausalLM

    from decodax.io.load import find

    lm, home = dx.load("pycode"), find("pycode")
    assert lm.tokenizer is not None
    network = AutoModelForCausalLM.from_pretrained(home, dtype=torch.float32)
    rows = [lm.tokenizer.encode(text) for text in PROMPTS]
    ids = torch.tensor([(row * 4)[:4] for row in rows])
    seconds = []
    for _ in range(repeats + 1):
        clock = time.perf_counter()
        network.generate(ids, attention_mask=torch.ones_like(ids), algorithm=dx.algorithms.beam_search(beams),
                         max_new_tokens=new, do_sample=False,
                         min_new_tokens=new, pad_token_id=0)
        seconds.append(time.perf_counter() - clock)
    return seconds[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beams", type=int, default=4, help="of each of 8 prompts (default: 4)")
    parser.add_argument("--new", type=int, default=64, help="tokens of a text (default: 64)")
    parser.add_argument("--repeats", type=int, default=7, help="of each time (default: 7)")
    args = parser.parse_args()

    lm, given = dx.load("pycode"), dict[str, Any](max_new_tokens=args.new, eos_token_id=[])
    ways: dict[str, dict[str, Any]] = {
        "samples": dict(num_samples=args.beams,
                        temperature=1.0), "beams": dict(algorithm=dx.algorithms.beam_search(args.beams)),
        "beams, hydragen": dict(algorithm=dx.algorithms.beam_search(args.beams), cache="hydragen"),
        "beams, paged": dict(algorithm=dx.algorithms.beam_search(args.beams), cache="paged")}
    step: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.repeats + 1):       # the first compiles
        for name, way in ways.items():
            stats = dx.generate(lm, PROMPTS, **given, **way).stats
            step[name].append(stats.seconds / stats.forwards * 1e3)
    for name, times in step.items():
        print(f"{name}: {statistics.median(times[1:]):.2f} ms a step")
    other = [x / args.new * 1e3 for x in theirs(args.new, args.beams, args.repeats)]
    print(f"transformers, beams: {statistics.median(other):.2f} ms a step")

    draft = drafts.DraftModel(dx.load("pycode-draft"))
    for width in (1, 2, 4, 8):
        plain = dx.generate(lm, PROMPTS, algorithm=BeamSearch(width), **given)
        found = dx.generate(lm, PROMPTS, algorithm=BeamSearch(width, draft=draft), **given)
        assert found.text == plain.text
        forwards, drafted = plain.stats.rounds.mean(), found.stats.rounds.mean()
        print(f"{width} beams: {forwards:.1f} forwards a prompt, {drafted:.1f} with drafts")


if __name__ == "__main__":
    main()
