"""Loss of `less` on held-out text: a dense cache, a window alone, a wider window, and a window with a state.

The kernels are trained on modules of Python's standard library, and others are scored, both cut into texts of 512
tokens. Tokens count from 128 on, with a window of 64.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

import decodax as dx
from decodax.caches import LessKernels, make
from decodax.train import fit_less
from evaluations.texts import TEST, TRAIN, module_texts, show_losses


def held(kind: Any, lm: Any, size: int) -> int:
    """Returns the bytes of keys, values and states that a row keeps of a text of `size` tokens."""
    cache = lm.model.with_cache(kind).init_cache(1, size) if kind else lm.model.init_cache(1, size)
    used = size if kind is None else kind.start_size + kind.recent_size
    states = () if kind is None or not any(layer.any() for layer in kind.kernels.scale.value) else cache.states
    return sum(x[:, :, :used].nbytes for x in cache.kv) + sum(x.nbytes for x in states)


def main(args: argparse.Namespace) -> None:
    """Trains the kernels and prints the losses."""
    lm = dx.load(args.model)
    window = dict(sinks=args.sinks, recent=args.recent)
    seen, new = module_texts(lm, TRAIN, args.size, args.each), module_texts(lm, TEST, args.size, 4)
    kernels = fit_less(lm, seen, rank=args.rank, hidden=args.hidden, epochs=args.epochs, rate=args.rate,
                       dropout=args.dropout, progress=True, **window)
    if args.save:
        kernels.save(args.save)
    without = LessKernels.of([kernels.layer(i).replace(scale=jnp.zeros_like(kernels.layer(i).scale))
                              for i in range(lm.model.depth)])
    # a state of rank r takes the bytes of r / 2 tokens, so the authors compare with a window that is wider by these
    wider = make("less", kernels=without, sinks=args.sinks, recent=args.recent + args.rank // 2)
    kinds = {"dense": None, "window": make("less", kernels=without, **window), "wider": wider,
             "less": make("less", kernels=kernels, **window)}
    nats = {}
    for name, kind in kinds.items():
        scored = lm if kind is None else dataclasses.replace(lm, model=lm.model.with_cache(kind))
        nats[name] = -np.array([x[args.far - 1:].mean() for x in dx.score(scored, new).logprobs])
    show_losses(nats, f"{len(seen)} texts, {args.epochs} epochs; {len(new)} texts are scored",
                bytes={name: str(held(kind, lm, args.size)) for name, kind in kinds.items()})
