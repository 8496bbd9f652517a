"""What `less` loses of held-out text: nats a token with a dense cache, a window alone, and a window with a state.

    python scripts/measure_less.py

Trains the kernels on modules of Python's standard library and scores others, both cut into texts of 512 tokens, with
the shipped `pycode`. Tokens count from 128 on, behind a window of 64. Takes `decodax[train]`.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import time
from typing import Any

import jax.numpy as jnp
import numpy as np

import decodax as dx
from decodax.caches import LessKernels, make
from decodax.train import fit_less

TRAIN = ("ast", "asyncio.base_events", "calendar", "cgitb", "codecs", "collections", "configparser", "csv", "datetime",
         "decimal", "difflib", "doctest", "email.message", "enum", "fractions", "ftplib", "functools", "gettext",
         "heapq", "http.client", "http.server", "imaplib", "inspect", "ipaddress", "json.decoder", "logging",
         "logging.config", "mailbox", "mimetypes", "multiprocessing.pool", "optparse", "os", "pathlib", "pdb",
         "pickle", "platform", "plistlib", "pprint", "random", "sched", "smtplib", "socket", "statistics", "string",
         "subprocess", "tempfile", "textwrap", "threading", "tokenize", "trace", "traceback", "turtle", "typing",
         "unittest.case", "unittest.mock", "urllib.parse", "urllib.request", "uuid", "warnings", "weakref",
         "xml.dom.minidom", "xmlrpc.client")
TEST = ("argparse", "tarfile", "zipfile", "shutil", "gzip", "locale", "netrc", "shlex")


def texts(lm: Any, names: tuple[str, ...], size: int, each: int) -> list[list[int]]:
    """Up to `each` texts of `size` tokens of each of the modules that there are."""
    found = []
    for name in names:
        try:
            ids = lm.tokenizer.encode(inspect.getsource(importlib.import_module(name)))
        except (ImportError, OSError):
            continue
        found += [ids[i:i + size] for i in range(0, len(ids) - size + 1, size)][:each]
    return found


def held(kind: Any, lm: Any, size: int) -> int:
    """Bytes of keys, values and states that a row keeps of a text of `size` tokens."""
    cache = lm.model.with_cache(kind).init_cache(1, size) if kind else lm.model.init_cache(1, size)
    used = size if kind is None else kind.start_size + kind.recent_size
    states = () if kind is None or not any(layer.any() for layer in kind.kernels.scale.value) else cache.states
    return sum(x[:, :, :used].nbytes for x in cache.kv) + sum(x.nbytes for x in states)


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in dict(size=512, sinks=4, recent=64, far=128, each=2, rank=8, hidden=128, epochs=12).items():
        parse.add_argument(f"--{name}", type=int, default=default)
    parse.add_argument("--model", default="pycode")
    parse.add_argument("--rate", type=float, default=5e-3)
    parse.add_argument("--dropout", type=float, default=0.0)
    parse.add_argument("--save")
    given = parse.parse_args()
    lm = dx.load(given.model)
    window = dict(start_size=given.sinks, recent_size=given.recent)
    seen, new = texts(lm, TRAIN, given.size, given.each), texts(lm, TEST, given.size, 4)
    start = time.perf_counter()
    kernels = fit_less(lm, seen, rank=given.rank, hidden=given.hidden, epochs=given.epochs, rate=given.rate,
                       dropout=given.dropout, progress=True, **window)
    print(f"{len(seen)} texts, {given.epochs} epochs: {time.perf_counter() - start:.0f} s; {len(new)} texts are scored")
    if given.save:
        kernels.save(given.save)
    without = LessKernels.of([kernels.layer(i).replace(scale=jnp.zeros_like(kernels.layer(i).scale))
                              for i in range(lm.model.depth)])
    # a state of rank r takes the bytes of r / 2 tokens, so the authors compare with a window that has as many more
    wider = make("less", kernels=without, start_size=given.sinks, recent_size=given.recent + given.rank // 2)
    kinds = {"dense": None, "window": make("less", kernels=without, **window), "wider": wider,
             "less": make("less", kernels=kernels, **window)}
    dense: np.ndarray | None = None
    for name, kind in kinds.items():
        scored = lm if kind is None else dataclasses.replace(lm, model=lm.model.with_cache(kind))
        nats = -np.array([x[given.far - 1:].mean() for x in dx.score(scored, new).logprobs])
        dense = nats if dense is None else dense
        lost = nats - dense
        print(f"{name:8} {nats.mean():.4f} nats a token, {lost.mean():.4f} ± {lost.std() / len(lost) ** 0.5:.4f} more "
              f"than dense; {held(kind, lm, given.size)} bytes", flush=True)


if __name__ == "__main__":
    main()
