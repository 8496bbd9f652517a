"""Loss of caches that read a part of the text (`a2ats`, `act-qkv`, `quest`, `retro-attention`) on held-out text.

They are compared with a dense cache and with as many of the first and the latest tokens. Codebooks are measured on
modules of Python's standard library, and others are scored, both cut into texts of 512 tokens: 128 tokens, one at a
time, after 384 that are read as a prompt.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track

import decodax as dx
from decodax.caches import make
from decodax.core.capabilities import ReadPrompt, layers_read
from decodax.core.window import causal
from decodax.train import fit_key_books
from evaluations.texts import TEST, TRAIN, module_texts, show_losses


@functools.partial(jax.jit, static_argnums=(0, 3))
def forced(model: Any, params: Any, tokens: Any, prompt: int) -> Any:
    """Returns the mean nats of each row's tokens after the first `prompt`, `f32[B]`, by teacher forcing."""
    B, n = tokens.shape
    before, cache = jnp.full(B, prompt - 1, jnp.int32), model.init_cache(B, n, params=params).prefill_cache()
    if layers_read(cache) == 0:
        cache = cache.replace(length=before)
    else:
        window = causal(tokens[:, :prompt - 1], jnp.zeros(B, jnp.int32)).replace(is_prefill=True)
        cache = cache.commit(model.apply(params, window, cache).entries, window.positions)
    cache = cache.finish_prefill(ReadPrompt(model, params, tokens))

    def step(cache: Any, at: Any) -> tuple[Any, Any]:
        window = causal(jax.lax.dynamic_slice_in_dim(tokens, at, 1, 1), jnp.broadcast_to(at, (B,)))
        out = model.apply(params, window, cache)
        logp = jax.nn.log_softmax(out.logits()[:, 0], -1)
        next_one = jax.lax.dynamic_slice_in_dim(tokens, at + 1, 1, 1)
        return cache.commit(out.entries, window.positions), -jnp.take_along_axis(logp, next_one, 1)[:, 0]

    return jax.lax.scan(step, cache, jnp.arange(prompt - 1, n - 1, dtype=jnp.int32))[1].mean(0)


def main(args: argparse.Namespace) -> None:
    """Measures the codebooks and prints the losses."""
    lm = dx.load(args.model)
    seen, new = module_texts(lm, TRAIN, args.size, args.each), module_texts(lm, TEST, args.size, args.tested)
    books = fit_key_books(lm, seen, args.count, args.distance, args.loops)
    group = lm.model.config.heads // lm.model.config.kv_heads
    own = dict(budget=args.taken, sinks=args.sinks, recent=args.recent, distance=args.distance)
    some = args.sinks + args.recent + args.taken * group
    blocks = dict(sinks=args.sinks, recent=args.recent, block_size=4, window_size=args.recent, samples=32,
                  least=1, room=1, budget=some)
    pages = dict(budget=some - args.recent, page_size=4, recent=args.recent, skip=())
    kinds = {"dense": None, f"sink-window:budget={some}": make("sink-window", budget=some, sinks=args.sinks),
             "a2ats": make("a2ats", books=books, **own), "act-qkv": make("act-qkv", **blocks),
             "quest": make("quest", **pages)}
    kinds |= {f"retro-attention:window={n}": make("retro-attention", window=n, **pages) for n in (2, 4, 8)}
    nats = {}
    for name, kind in track(kinds.items(), "scoring", console=Console(stderr=True)):
        scored = lm if kind is None else kind.put_on(lm)
        nats[name] = np.array(forced(scored.model.fit(args.size), scored.params, jnp.array(new, jnp.int32),
                                     args.prompt))
    show_losses(nats, f"{len(seen)} texts, {args.count} centroids; {len(new)} texts are scored")
