"""Memory and time of cache policies, side by side with dense caches, on random weights.

    python scripts/benchmark_caches.py                          # the 125M shape, 8 prompts of up to 4096 tokens
    python scripts/benchmark_caches.py --policies snapkv:budget=1024 h2o:budget=1024 --layers 4
    python scripts/benchmark_caches.py --shared 1024 --batch 32 --policies hydragen

With `--shared` prompts have so many tokens in common and 16 of their own; it prints how long reading them takes, too,
each compiled beforehand.

For each policy it prints the bytes of its live arrays behind the prompts, their share of those of the dense cache, and
the time of a decode round, over that of a dense cache of prompts as long as the budget. All take turns in one process.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from decodax.engine.batch import Job
from decodax.engine.request import Request
from decodax.io.load import LM
from decodax.models import Transformer, llama

CACHES = ("snapkv:budget=512", "knorm:budget=512,skip_layers=()", "h2o:budget=512", "adakv:budget=512")


def size(cache: Any) -> int:
    """Bytes of the arrays."""
    return sum(x.nbytes for x in jax.tree.leaves(cache))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=CACHES, metavar="NAME[:OPTION=VALUE,...]")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="prompts (default: 8)")
    parser.add_argument("--prompt", type=int, default=4096, metavar="N", help="tokens of the longest (default: 4096)")
    parser.add_argument("--held", type=int, default=512, metavar="N",
                        help="tokens of the prompts of the dense cache that times are compared with (default: 512)")
    parser.add_argument("--shared", type=int, metavar="N", help="tokens that all prompts begin with")
    parser.add_argument("--new", type=int, default=128, metavar="N", help="new tokens (default: 128)")
    parser.add_argument("--layers", type=int, default=12, metavar="N", help="of a 125M shape with 12 (default: 12)")
    parser.add_argument("--repeats", type=int, default=12, metavar="N", help="of 8 rounds each (default: 12)")
    args = parser.parse_args()

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
    times: dict[str, list[float]] = {name: [] for name in jobs}
    rounds = min(8, args.new // (args.repeats + 1))
    for repeat in track(range(args.repeats + 1), "decoding", console=console):
        for name, job in jobs.items():
            clock = time.perf_counter()
            job.advance(None, rounds)
            if repeat:
                times[name].append((time.perf_counter() - clock) / rounds)
    dense = jobs["dense"]
    table = Table("cache", "live MB", "of dense", "ms a round", f"over {base}", *["s to read"] * bool(args.shared),
                  box=None)
    for name, job in jobs.items():
        live = size(job.state.cache)
        table.add_row(name, f"{live / 1e6:.1f}", f"{live / size(dense.state.cache):.3f}",
                      f"{1e3 * np.median(times[name]):.1f}",
                      f"{np.median(np.array(times[name]) / np.array(times[base])):.2f}",
                      *[f"{reading[name]:.1f}"] * bool(args.shared))
    Console().print(table)


if __name__ == "__main__":
    main()
