"""Loss of shared attention: nats a token before, after the conversion, and after distillation (`pycode`, layers 1, 2).

Distils on modules of Python's standard library and scores others.
"""

from __future__ import annotations

import argparse

import numpy as np

import decodax as dx
from decodax.train import attention_similarity, fit_echo_att
from evaluations.texts import TEST, TRAIN, module_texts, show_losses


def main(args: argparse.Namespace) -> None:
    """Converts and distils the model and prints the losses."""
    lm = dx.load("pycode")
    seen, new = module_texts(lm, TRAIN, args.size, args.each), module_texts(lm, TEST, args.size, 8)
    print("similarity of layers", attention_similarity(lm, seen[:8]).round(2).tolist(), flush=True)
    score = lambda lm: -np.asarray(dx.score(lm, new).mean)
    nats, held = {"original": score(lm)}, {}
    for steps, more in ((0, 0), (args.steps, args.more)):
        student = fit_echo_att(lm, seen, groups=((1, 2),), steps=steps, more=more, batch=args.batch, rate=args.rate)
        name = f"{steps} + {more} steps"
        nats[name] = score(student)
        held[name] = str(sum(x.nbytes for x in student.model.init_cache(1, args.size).kv) // args.size)
    show_losses(nats, f"{len(seen)} texts, {len(new)} are scored", bytes_a_token=held)
