"""Compiles a round of each preset of `decodax plan` for a TPU slice that it fits, without a TPU.

A row has the bytes that the round moves in one device's memory, as XLA compiled it, beside those that it has to move,
as `decodax.bench.plan.count` counts them from shapes.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from decodax.bench.plan import PRESETS, SLICES, Plan, plan
from decodax.common.axes import by_axes
from decodax.common.strings import near

COLUMNS = ("preset", "slice", "mesh", "fits", "memory", "counted", "moved over counted", "collectives", "seconds")


def cells(name: str, p: Plan, seconds: float) -> tuple[str, ...]:
    """Returns the row of a plan, by `COLUMNS`."""
    done = p.compiled
    held = p.slice.device.memory - p.free
    return (name, p.slice.name, by_axes(p.mesh), "yes" if p.fits else "no", f"{held / 1e9:.2f} GB",
            f"{p.counts.moved / 1e9:.3f} GB",
            "" if done is None or done.moved is None else f"{done.moved / p.counts.moved:.3f}",
            "" if done is None or done.collectives is None else str(done.collectives), f"{seconds:.0f}")


def main(args: argparse.Namespace) -> None:
    """Compiles the presets and prints a line for each."""
    for name in args.names:
        if name not in SLICES:
            raise ValueError(f"names: got {name!r}, takes presets ({near(name, PRESETS)})")
    if not args.json:
        print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    for name in args.names or SLICES:
        where, mesh = SLICES[name]
        clock = time.perf_counter()
        p, = plan(name, where, batch=args.batch, capacity=args.capacity, mesh=[mesh], compile=not args.counted)
        seconds = time.perf_counter() - clock
        found: dict[str, Any] = {"preset": name, "took": seconds, **p.json()}
        print(json.dumps(found) if args.json else f"| {' | '.join(cells(name, p, seconds))} |", flush=True)
