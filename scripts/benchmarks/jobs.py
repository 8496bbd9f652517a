"""Continuous batches against batches that wait for their last prompt, on requests of very unequal lengths.

Prompts and answers have log-normal lengths; answers end with their budgets. Both ways run in turn on the same requests,
in one process, and must give the same tokens. With `--header` all prompts begin with the same tokens. Goodput is the
share of the rows' rounds in which a row was running; for prompts, the share of tokens that are not padding.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np

import decodax as dx
from decodax.bench.figures import show_table
from decodax.bench.timing import in_turn, median, seconds
from decodax.engine.request import Request
from decodax.engine.slots import Use
from decodax.front.generate import through_batches, through_slots


def requests(lm: Any, count: int, longest: int, seed: int, header: int = 0,
             each: int | None = None) -> tuple[list[list[int]], list[int]]:
    """Returns prompts, pieces of decodax's own source, and the number of new tokens of each (`each`, if given)."""
    random = np.random.default_rng(seed)
    text = "".join(path.read_text() for path in sorted(Path(dx.__file__).parent.glob("*.py")))
    ids = lm.tokenizer.encode(text)
    lengths = np.clip(random.lognormal(4.0, 0.8, count), 4, longest // 2).astype(int)
    new = np.clip(random.lognormal(3.4, 1.0, count), 4, longest // 2).astype(int)
    if each is not None:
        new[:] = each
    starts = random.integers(0, len(ids) - longest, count)
    return [ids[:header] + ids[i:i + n] for i, n in zip(starts.tolist(), lengths.tolist(), strict=True)], new.tolist()


def main(args: argparse.Namespace) -> None:
    """Runs the requests both ways and prints a table."""
    lm = dx.load(args.model)
    prompts, new = requests(lm, args.requests, args.longest, args.seed, args.header, args.new)
    request = Request.read(lm, prompts, max_new_tokens=new, batch_size=args.batch_size, algorithm=args.algorithm,
                           min_new_tokens=new)
    rides = {} if args.token_budget is None else {"rides": functools.partial(
        through_slots, request, token_budget=args.token_budget)}
    ways: dict[str, Any] = {"slots": functools.partial(through_slots, request), **rides}
    goodput: dict[str, str] = {}
    wanted: list[Any] = []

    def batches() -> None:
        wanted[:] = [through_batches(request)]
        stats = wanted[0].stats
        goodput["batches"] = f"decoding {stats.rounds.sum() / (args.batch_size * stats.forwards):.1%}"

    def slots(name: str) -> None:
        use = Use()
        assert (ways[name](use=use).tokens == wanted[0].tokens).all()
        goodput[name] = (f"decoding {use.goodput:.1%}, prompts {use.prompt_tokens / use.prefill_tokens:.1%}; rows "
                         f"waited {use.stalled:.2f} s for the prompts of others")

    times = in_turn({"batches": seconds(batches), **{name: seconds(functools.partial(slots, name)) for name in ways}},
                    args.repeats)
    header = f" after {args.header} common tokens" if args.header else ""
    show_table(("", "s", "range", "tokens/s", "batches over it", "goodput"), [
        (name, f"{median(x):.2f}", f"{min(x):.2f} to {max(x):.2f}", f"{sum(new) / median(x):.0f}",
         f"{median(times['batches']) / median(x):.2f}", goodput[name]) for name, x in times.items()],
        f"{lm.name}, {args.requests} requests{header}, {sum(map(len, prompts))} prompt tokens, {sum(new)} new ones "
        f"(mean {np.mean(new):.0f}, most {max(new)}), {args.batch_size} at once; {jax.devices()[0].device_kind}; "
        f"medians of {args.repeats}")
