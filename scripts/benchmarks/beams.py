"""Cost of beams: a step of beam search against as many independent samples, by cache, and against transformers; and the
number of forwards that drafts save."""

from __future__ import annotations

import argparse
from typing import Any

import decodax as dx
from decodax.algorithms.beams import BeamSearch
from decodax.algorithms.speculative import drafts
from decodax.bench.figures import show_table
from decodax.bench.timing import in_turn, median, seconds

PROMPTS = ["def area(", "import ", "x = [", "class A:"] * 2


def theirs(new: int, beams: int) -> Any:
    """Returns beam search of transformers on the same prompts, cut to one length."""
    import torch
    from transformers import AutoModelForCausalLM

    from decodax.io.load import find

    lm, home = dx.load("pycode"), find("pycode")
    assert lm.tokenizer is not None
    network = AutoModelForCausalLM.from_pretrained(home, dtype=torch.float32)
    rows = [lm.tokenizer.encode(text) for text in PROMPTS]
    ids = torch.tensor([(row * 4)[:4] for row in rows])
    return lambda: network.generate(ids, attention_mask=torch.ones_like(ids), num_beams=beams, max_new_tokens=new,
                                    do_sample=False, min_new_tokens=new, pad_token_id=0)


def main(args: argparse.Namespace) -> None:
    """Times the steps, counts the forwards and prints both."""
    lm, given = dx.load("pycode"), dict[str, Any](max_new_tokens=args.new, eos_token_id=[])
    ways: dict[str, dict[str, Any]] = {
        "samples": dict(num_samples=args.beams, temperature=1.0),
        "beams": dict(algorithm=dx.algorithms.beam_search(args.beams)),
        "beams, hydragen": dict(algorithm=dx.algorithms.beam_search(args.beams), cache="hydragen"),
        "beams, paged": dict(algorithm=dx.algorithms.beam_search(args.beams), cache="paged")}

    def step(way: dict[str, Any]) -> float:
        stats = dx.generate(lm, PROMPTS, **given, **way).stats
        return stats.seconds / stats.forwards * 1e3

    other = seconds(theirs(args.new, args.beams))
    times = in_turn({**{name: lambda way=way: step(way) for name, way in ways.items()},
                     "transformers, beams": lambda: other() / args.new * 1e3}, args.repeats)
    show_table(("", "ms a step"), [(name, f"{median(x):.2f}") for name, x in times.items()])

    draft, rows = drafts.DraftModel(dx.load("pycode-draft")), []
    for width in (1, 2, 4, 8):
        plain = dx.generate(lm, PROMPTS, algorithm=BeamSearch(width), **given)
        found = dx.generate(lm, PROMPTS, algorithm=BeamSearch(width, draft=draft), **given)
        assert found.text == plain.text
        rows.append((str(width), f"{plain.stats.rounds.mean():.1f}", f"{found.stats.rounds.mean():.1f}"))
    show_table(("beams", "forwards a prompt", "with drafts"), rows)
