"""What `a2ats`, `act-qkv`, `quest` and `retro-attention` lose of held-out text: nats a token with a dense cache, with
what they read of it, and with as many of the first and the latest tokens.

    python scripts/measure_reading.py

Measures codebooks on modules of Python's standard library, and scores others, both cut into texts of 512 tokens, with
the shipped `pycode`: 128 tokens behind 384 that are read as a prompt, one at a time.
"""

from __future__ import annotations

import argparse
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from measure_less import TEST, TRAIN, texts

import decodax as dx
from decodax.caches import make
from decodax.core.cache import ReadPrompt
from decodax.core.window import causal
from decodax.train import fit_key_books


@functools.partial(jax.jit, static_argnums=(0, 3))
def forced(model: Any, params: Any, tokens: Any, prompt: int) -> Any:
    """`f32[B]`: nats of each row's tokens behind the first `prompt` of them."""
    B, n = tokens.shape
    before, cache = jnp.full(B, prompt - 1, jnp.int32), model.init_cache(B, n, params=params).for_prompt()
    if cache.reads == 0:
        cache = cache.replace(length=before)
    else:
        window = causal(tokens[:, :prompt - 1], jnp.zeros(B, jnp.int32)).replace(certain=True)
        cache = cache.commit(model.apply(params, window, cache).entries, window.positions)
    cache = cache.settled(ReadPrompt(model, params, tokens))

    def step(cache: Any, at: Any) -> tuple[Any, Any]:
        window = causal(jax.lax.dynamic_slice_in_dim(tokens, at, 1, 1), jnp.broadcast_to(at, (B,)))
        out = model.apply(params, window, cache)
        logp = jax.nn.log_softmax(out.logits()[:, 0], -1)
        next_one = jax.lax.dynamic_slice_in_dim(tokens, at + 1, 1, 1)
        return cache.commit(out.entries, window.positions), -jnp.take_along_axis(logp, next_one, 1)[:, 0]

    return jax.lax.scan(step, cache, jnp.arange(prompt - 1, n - 1, dtype=jnp.int32))[1].mean(0)


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in dict(size=512, prompt=384, each=1, tested=4, count=256, loops=20, taken=8, recent=32,
                              sinks=4, distance=128).items():
        parse.add_argument(f"--{name}", type=int, default=default)
    parse.add_argument("--model", default="pycode")
    given = parse.parse_args()
    lm = dx.load(given.model)
    seen, new = texts(lm, TRAIN, given.size, given.each), texts(lm, TEST, given.size, given.tested)
    start = time.perf_counter()
    books = fit_key_books(lm, seen, given.count, given.distance, given.loops)
    print(f"{len(seen)} texts, {given.count} centroids: {time.perf_counter() - start:.0f} s; {len(new)} are scored")
    group = lm.model.config.heads // lm.model.config.kv_heads
    own = dict(budget=given.taken, sinks=given.sinks, recent=given.recent, distance=given.distance)
    some = given.sinks + given.recent + given.taken * group
    blocks = dict(sinks=given.sinks, recent=given.recent, block_size=4, window_size=given.recent, samples=32, least=1,
                  room=1, budget=some)
    kinds = {"dense": None, f"sink-window:budget={some}": make("sink-window", budget=some, sinks=given.sinks),
             "a2ats": make("a2ats", books=books, **own), "act-qkv": make("act-qkv", **blocks)}
    pages = dict(budget=some - given.recent, page_size=4, recent=given.recent, skip=())
    kinds |= {"quest": make("quest", **pages)} | {
        f"retro-attention:window={n}": make("retro-attention", window=n, **pages) for n in (2, 4, 8)}
    dense: np.ndarray | None = None
    for name, kind in kinds.items():
        scored = lm if kind is None else kind.put_on(lm)
        found = np.array(forced(scored.model.fit(given.size), scored.params, jnp.array(new, jnp.int32), given.prompt))
        dense = found if dense is None else dense
        lost = found - dense
        print(f"{name:30} {found.mean():.4f} nats a token, {lost.mean():.4f} ± {lost.std() / len(lost) ** 0.5:.4f} "
              "more than dense", flush=True)


if __name__ == "__main__":
    main()
