"""Worth of a context to a decoder as tokens, as the vectors of an ARC-Encoder, and not at all, in nats a token.

Trains an encoder for the shipped `pycode` on Python's standard library, which `pycode` was trained on, and scores the
files that both have not seen: 128 tokens after a context of as many.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import decodax as dx
from decodax.contrib import arc
from decodax.models import Embeddings
from decodax.train.corpus import load_corpus
from evaluations.texts import show_losses


def costs(lm: Any, front: Any, text: np.ndarray) -> np.ndarray:
    """Returns nats a token `f32[N]` of texts `i32[N, T]` without their first tokens, after `front`: token ids
    `i32[N, M]` or embeddings `f32[N, M, D]`."""
    front = jnp.asarray(front)
    M = front.shape[1]
    given = None
    if front.ndim == 3:
        width = M + text.shape[1]
        given = Embeddings(values=jnp.pad(front, ((0, 0), (0, text.shape[1]), (0, 0))),
                           given=jnp.broadcast_to(jnp.arange(width) < M, (len(text), width)))
        front = jnp.zeros(front.shape[:2], jnp.int32)
    hidden, head = lm.model.features(lm.params, jnp.concatenate([front, text], 1), inputs=given)
    logits = jax.nn.log_softmax(head(hidden[:, M:-1]))
    return -np.asarray(jnp.take_along_axis(logits, jnp.asarray(text)[:, 1:, None], -1)[..., 0].mean(-1))


def main(args: argparse.Namespace) -> None:
    """Trains the encoder and prints the losses."""
    lm = dx.load(args.model)
    seen, new = ([lm.tokenizer.encode(document.text) for document in part] for part in load_corpus())
    size = args.size
    pieces = [text[at:at + 2 * size] for text in new for at in range(0, len(text) - 2 * size + 1, 2 * size)]
    chosen = np.array(pieces, np.int32)[np.random.default_rng(1).permutation(len(pieces))[:args.texts]]
    first, second = chosen[:, :size], chosen[:, size:]
    encoder = arc.fit(arc.begin(lm, layers=args.layers, pool=args.pool, hidden=args.hidden), lm, seen, size=size,
                      steps=args.steps, batch=args.batch, rate=args.rate, seed=args.seed, warmup=args.steps // 10,
                      bridge_rate=args.bridge_rate, continuation=args.continuation, progress=True)
    if args.save:
        encoder.save(args.save)
    vectors = np.stack(encoder.vectors(list(first)))
    few = vectors.shape[1]
    again = np.stack(encoder.vectors(list(first), end="rec"))
    show_losses({"tokens": costs(lm, first, second), f"{few} vectors": costs(lm, vectors, second),
                 f"the last {few} tokens": costs(lm, first[:, -few:], second),
                 "vectors of another text": costs(lm, np.roll(vectors, 1, 0), second),
                 "none": costs(lm, first[:, :0], second), "itself again, after its vectors": costs(lm, again, first),
                 "itself, after nothing": costs(lm, first[:, :0], first)},
                f"{args.steps} steps of {args.batch} texts; {len(chosen)} texts are scored")
