"""What a context is worth to a decoder as tokens, as the vectors of an ARC-Encoder, and not at all: nats a token.

    python scripts/measure_arc.py

Trains an encoder for the shipped `pycode` on Python's standard library, which `pycode` was trained on, and scores the
files that both have not seen: 128 tokens behind a context of as many. Takes `decodax[train]`.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from pycode_data import load_corpus

import decodax as dx
from decodax.contrib import arc
from decodax.models import Embeddings


def costs(lm: Any, front: Any, text: np.ndarray) -> np.ndarray:
    """`f32[N]`: nats a token of texts `i32[N, T]` but for their first tokens, behind `front`: token ids `i32[N, M]` or
    embeddings `f32[N, M, D]`."""
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


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in dict(size=128, pool=4, hidden=512, layers=4, steps=600, batch=8, texts=96, seed=0).items():
        parse.add_argument(f"--{name}", type=int, default=default)
    for name, value in dict(rate=1e-3, bridge_rate=2e-3, continuation=0.8).items():
        parse.add_argument(f"--{name.replace('_', '-')}", type=float, default=value)
    parse.add_argument("--model", default="pycode")
    parse.add_argument("--save")
    o = parse.parse_args()
    lm = dx.load(o.model)
    seen, new = ([lm.tokenizer.encode(document.text) for document in part] for part in load_corpus())
    pieces = [text[at:at + 2 * o.size] for text in new for at in range(0, len(text) - 2 * o.size + 1, 2 * o.size)]
    order = np.random.default_rng(1).permutation(len(pieces))[:o.texts]
    pieces = np.array([pieces[i] for i in order], np.int32)
    first, second = pieces[:, :o.size], pieces[:, o.size:]
    encoder = arc.begin(lm, layers=o.layers, pool=o.pool, hidden=o.hidden)
    start = time.perf_counter()
    encoder = arc.fit(encoder, lm, seen, size=o.size, steps=o.steps, batch=o.batch, rate=o.rate, seed=o.seed,
                      bridge_rate=o.bridge_rate, continuation=o.continuation, warmup=o.steps // 10, progress=True)
    print(f"{o.steps} steps of {o.batch} texts: {time.perf_counter() - start:.0f} s; {len(pieces)} texts are scored")
    if o.save:
        encoder.save(o.save)
    vectors = np.stack(encoder.vectors(list(first)))
    few = vectors.shape[1]
    whole = costs(lm, first, second)
    for name, found in {
        "tokens": whole, f"{few} vectors": costs(lm, vectors, second),
        f"the last {few} tokens": costs(lm, first[:, -few:], second),
        "vectors of another text": costs(lm, np.roll(vectors, 1, 0), second),
        "none": costs(lm, first[:, :0], second), "itself again, behind its vectors": costs(
            lm, np.stack(encoder.vectors(list(first), end="rec")), first),
        "itself, behind nothing": costs(lm, first[:, :0], first),
    }.items():
        lost = found - whole
        print(f"{name:34} {found.mean():.3f} nats a token, {lost.mean():+.3f} ± {lost.std() / len(lost) ** 0.5:.3f}",
              flush=True)


if __name__ == "__main__":
    main()
