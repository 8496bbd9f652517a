"""Memory and time of cache policies against dense caches, on random weights of a 125M shape.

The table gives the bytes of the live arrays after the prompts, their share of those of the dense cache, and the time of
a decode round over that of a dense cache of prompts as long as the budget. All policies run in turn in one process.
With `--shared` all prompts have a common beginning and 16 tokens of their own, and the time to read them is printed,
without compiling.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import track

from decodax.bench.figures import show_table
from decodax.bench.timing import in_turn, median, ratio
from decodax.engine.batch import Job
from decodax.engine.request import Request
from decodax.io.load import LM
from decodax.models import Transformer, llama


def size(cache: Any) -> int:
    """Returns the bytes of the arrays."""
    return sum(x.nbytes for x in jax.tree.leaves(cache))


def main(args: argparse.Namespace) -> None:
    """Reads the prompts, times the rounds and prints the table."""
    model = Transformer(llama(vocab=32000, width=768, layers=args.layers, heads=12, kv_heads=4, mlp=2048,
                              context=2 * args.prompt))
    lm = LM(model=model, params=model.init_params(jax.random.key(0)), vocab_size=32000)
    r = np.random.default_rng(0)
    text = lambda n: r.integers(0, 32000, n).tolist()
    if args.shared:
        beginning = text(args.shared)
        long, base = [beginning + text(16) for _ in range(args.batch)], "dense"
    else:
        long = [text(n) for n in np.linspace(args.prompt, args.prompt // 2, args.batch).astype(int)]
        base = f"dense, prompts of {args.held}"
    cases: dict[str, tuple[Any, Any]] = {"dense": (long, None), **{name: (long, name) for name in args.policies}}
    if not args.shared:
        cases[base] = [text(args.held)] * args.batch, None
    console, jobs, reading = Console(stderr=True), {}, {}
    for name in track(cases, "reading prompts", console=console):
        prompts, kind = cases[name]
        for _ in range(1 + bool(args.shared)):
            jobs.pop(name, None)
            jobs[name] = Job.begin(Request.read(lm, prompts, max_new_tokens=args.new, cache=kind, chunk=512))
            reading[name] = jobs[name].prefill_seconds
    rounds = min(8, args.new // (args.repeats + 1))

    def advance(job: Job) -> Callable[[], float]:
        def timed() -> float:
            clock = time.perf_counter()
            job.advance(None, rounds)
            return 1e3 * (time.perf_counter() - clock) / rounds

        return timed

    times = in_turn({name: advance(job) for name, job in jobs.items()}, args.repeats, "decoding")
    dense, live = size(jobs["dense"].state.cache), {name: size(job.state.cache) for name, job in jobs.items()}
    show_table(("cache", "live MB", "of dense", "ms a round", f"over {base}", *["s to read"] * bool(args.shared)),
               [(name, f"{live[name] / 1e6:.1f}", f"{live[name] / dense:.3f}", f"{median(times[name]):.1f}",
                 f"{ratio(times, name, base):.2f}", *[f"{reading[name]:.1f}"] * bool(args.shared)) for name in jobs])
