"""Continuous batches against batches that wait for their last prompt, on requests of very unequal lengths.

    python scripts/benchmark_jobs.py
    python scripts/benchmark_jobs.py --model path/to/model --requests 2000 --batch-size 64 --algorithm prompt-lookup
    python scripts/benchmark_jobs.py --requests 100 --header 300 --longest 300 --new 12

Prompts and answers have log-normal lengths; answers end where their budgets do. Both ways run in turn on the same
requests, in one process, and must give the same tokens. With `--header` all prompts begin with the same tokens.
Goodput is the share of the rows' rounds in which a row was running; of prompts, the share of the tokens that were read
and not there to fill up.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np


def requests(lm: Any, count: int, longest: int, seed: int, header: int = 0,
             each: int | None = None) -> tuple[list[list[int]], list[int]]:
    """Prompts, pieces of decodax's own source, and how many new tokens each is to have: `each`, if it is given."""
    import decodax

    random = np.random.default_rng(seed)
    text = "".join(path.read_text() for path in sorted(Path(decodax.__file__).parent.glob("*.py")))
    ids = lm.tokenizer.encode(text)
    lengths = np.clip(random.lognormal(4.0, 0.8, count), 4, longest // 2).astype(int)
    new = np.clip(random.lognormal(3.4, 1.0, count), 4, longest // 2).astype(int)
    if each is not None:
        new[:] = each
    starts = random.integers(0, len(ids) - longest, count)
    return [ids[:header] + ids[i:i + n] for i, n in zip(starts.tolist(), lengths.tolist(), strict=True)], new.tolist()


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("-m", "--model", default="pycode", metavar="NAME_OR_DIR", help="default: pycode")
    p.add_argument("--requests", type=int, default=500, metavar="N", help="default: 500")
    p.add_argument("--batch-size", type=int, default=16, metavar="N", help="prompts at once (default: 16)")
    p.add_argument("--longest", type=int, default=512, metavar="N", help="tokens of a row at most (default: 512)")
    p.add_argument("--header", type=int, default=0, metavar="N", help="tokens that all begin with (default: 0)")
    p.add_argument("--new", type=int, metavar="N", help="new tokens of each; default: log-normal")
    p.add_argument("--token-budget", type=int, metavar="N", help="also with prompts read in the rounds of others")
    p.add_argument("-a", "--algorithm", metavar="NAME[:OPTION=VALUE,...]", help="default: plain decoding")
    p.add_argument("--repeats", type=int, default=3, metavar="N", help="timed runs of each (default: 3)")
    p.add_argument("--seed", type=int, default=0, metavar="N", help="of the requests (default: 0)")
    args = p.parse_args()
    import jax

    import decodax as dx
    from decodax.engine.request import Request
    from decodax.engine.slots import Use
    from decodax.front.generate import through_batches, through_slots

    lm = dx.load(args.model)
    prompts, new = requests(lm, args.requests, args.longest, args.seed, args.header, args.new)
    request = Request.read(lm, prompts, max_new_tokens=new, batch_size=args.batch_size, algorithm=args.algorithm,
                           min_new_tokens=new)
    rides = {} if args.token_budget is None else {"rides": functools.partial(
        through_slots, request, token_budget=args.token_budget)}
    ways: dict[str, Any] = {"slots": functools.partial(through_slots, request), **rides}
    seconds: dict[str, list[float]] = {"batches": [], **{name: [] for name in ways}}
    goodput: dict[str, str] = {}
    for turn in range(args.repeats + 1):        # the first compiles
        clock = time.perf_counter()
        wanted = through_batches(request)
        if turn:
            seconds["batches"].append(time.perf_counter() - clock)
        rows = args.batch_size * wanted.stats.forwards
        goodput["batches"] = f"decoding {wanted.stats.rounds.sum() / rows:.1%}"
        for name, run in ways.items():
            use, clock = Use(), time.perf_counter()
            found = run(use=use)
            if turn:
                seconds[name].append(time.perf_counter() - clock)
            assert (found.tokens == wanted.tokens).all()
            goodput[name] = (f"decoding {use.goodput:.1%}, prompts {use.prompt_tokens / use.prefill_tokens:.1%}; rows "
                             f"waited {use.stalled:.2f} s for the prompts of others")
    behind = f" behind {args.header} tokens" if args.header else ""
    print(f"{lm.name}, {args.requests} requests{behind}, {sum(map(len, prompts))} prompt tokens, {sum(new)} new ones "
          f"(mean {np.mean(new):.0f}, most {max(new)}), {args.batch_size} at once; {jax.devices()[0].device_kind}; "
          f"medians of {args.repeats}")
    for name, times in seconds.items():
        middle = statistics.median(times)
        print(f"{name:8} {middle:7.2f} s ({min(times):.2f} to {max(times):.2f})  {sum(new) / middle:7.0f} tokens/s  "
              f"goodput: {goodput[name]}")
    for name in ways:
        print(f"ratio of {name} {statistics.median(seconds['batches']) / statistics.median(seconds[name]):.2f}")


if __name__ == "__main__":
    main()
