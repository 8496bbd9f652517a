"""What a model loses where layers share attention: nats a token before, after the conversion, and after distillation.

    python scripts/measure_echo_att.py

Distils on modules of Python's standard library and scores others, as `scripts/measure_less.py` does, with the shipped
`pycode`, whose layers 1 and 2 share. Takes `decodax[train]`.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from measure_less import TEST, TRAIN, texts

import decodax as dx
from decodax.train import attention_similarity, fit_echo_att


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in dict(size=256, each=8, steps=200, more=100, batch=4).items():
        parse.add_argument(f"--{name}", type=int, default=default)
    parse.add_argument("--rate", type=float, default=3e-4)
    given = parse.parse_args()
    lm = dx.load("pycode")
    seen, new = texts(lm, TRAIN, given.size, given.each), texts(lm, TEST, given.size, 8)
    print("similarity of layers", attention_similarity(lm, seen[:8]).round(2).tolist(), flush=True)
    score = lambda lm: -np.asarray(dx.score(lm, new).mean)
    before = score(lm)
    print(f"{len(seen)} texts, {len(new)} are scored; before: {before.mean():.3f}", flush=True)
    for steps, more in ((0, 0), (given.steps, given.more)):
        start = time.perf_counter()
        student = fit_echo_att(lm, seen, groups=((1, 2),), steps=steps, more=more, batch=given.batch, rate=given.rate)
        seconds, lost = time.perf_counter() - start, score(student) - before
        cache = student.model.init_cache(1, given.size)
        print(f"{steps} + {more} steps, {seconds:.0f} s: {before.mean() + lost.mean():.3f}, {lost.mean():+.3f} ± "
              f"{lost.std() / len(lost) ** 0.5:.3f}; {sum(x.nbytes for x in cache.kv) // given.size} bytes a token",
              flush=True)


if __name__ == "__main__":
    main()
