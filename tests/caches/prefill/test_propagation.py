"""Prompts of which deep layers read a part."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax import caches
from decodax.core.capabilities import prefill_cache
from decodax.core.window import Window, causal
from decodax.engine.batch import Job
from decodax.engine.request import Request
from decodax.io.load import LM
from decodax.pallas_kernels.window_attention import window_attention
from tests.caches.evict.pressed import MODEL, TEXTS, weights

pytestmark = pytest.mark.wide

PARAMS = weights()
THREE = LM(model=MODEL, params=PARAMS, vocab_size=320)


def read(kind: Any, chunk: int = 512) -> Any:
    prompts = [[*text, 7] for text in TEXTS]
    return Job.begin(Request.read(THREE, prompts, cache=kind, max_new_tokens=1, chunk=chunk)).state.cache.base


@pytest.mark.parametrize("chunk", [512, 100])
def test_the_tokens_of_fastkv_are_kept(chunk: int) -> None:
    """By the authors' rule in each layer, where the third read what the second passed on; the texts are rows of one
    batch."""
    wanted = json.loads((Path(__file__).parents[1] / "expected" / "fastkv.json").read_text())["kept"]
    cache = read(caches.make("fastkv", budget=0.3, tsp_length=0.5, layer=1), chunk)
    for row, text in enumerate(TEXTS):
        for layer, head in np.ndindex(3, 2):
            found = np.asarray(cache.heads(layer)[1][row, head])
            kept = np.unpackbits(np.frombuffer(bytes.fromhex(wanted[row][layer][head]), np.uint8))[:len(text)]
            np.testing.assert_array_equal(found[found >= 0], np.flatnonzero(kept))


class Plain:
    """Attention among a window's own tokens, which notes keys and queries."""

    inputs = None

    def attend(self, layer: int, q: Any, k: Any, v: Any, window: Any, *, scale: float, **_: Any) -> tuple[Any, Any]:
        self.q, self.k = q, k
        return window_attention(q, k, v, window.visible(), window.positions, scale=scale), ()


def test_prompt_distill_keeps_what_its_layer_looks_for_in_all_layers() -> None:
    """The authors' rule, written out: raw scores of the newest query, averaged over heads and pooled over five."""
    cache = read(caches.make("promptdistill", budget=40, layer=0))
    for row, text in enumerate(TEXTS):
        T, plain = len(text), Plain()
        window = causal(jnp.asarray([text]), jnp.zeros(1, jnp.int32), jnp.ones((1, T), bool))
        x, run = MODEL.walk(PARAMS, window, plain)      # type: ignore[arg-type]
        x = run(0, x)
        keys = np.repeat(np.asarray(plain.k[0]), 2, 1)
        scores = np.append(np.einsum("hd,shd->hs", plain.q[0, -1], keys).mean(0)[:-1], 0)
        pooled = np.convolve(scores, np.ones(5) / 5, "same")[:-1]
        kept = np.sort(np.append(np.argsort(-pooled)[:40], T - 1))
        for layer in range(3):
            found = np.asarray(cache.heads(layer)[1][row])
            assert found[0][found[0] >= 0].tolist() == found[1][found[1] >= 0].tolist() == kept.tolist()
        # what the layers behind hold is that of the chosen tokens, at their own positions
        part = Window(tokens=jnp.asarray([text])[:, kept], positions=jnp.asarray(kept, jnp.int32)[None],
                      mask=jnp.tril(jnp.ones((1, 41, 41), bool)), live=jnp.ones((1, 41), bool))
        _, run = MODEL.walk(PARAMS, part, plain)        # type: ignore[arg-type]
        x = x[:, kept]
        for layer in (1, 2):
            x = run(layer, x)
            np.testing.assert_allclose(cache.heads(layer)[0][row, :, :41, :8], plain.k[0].swapaxes(0, 1), atol=1e-4)


def test_later_layers_do_not_run_for_tokens_that_were_dropped() -> None:
    """A third of the layers of three, so that is what a chunk of a prompt costs, but for embeddings."""
    window = causal(jnp.zeros((1, 64), jnp.int32), jnp.zeros(1, jnp.int32), jnp.ones((1, 64), bool))
    costs = []
    for name in (None, "fastkv:layer=0"):
        kind = None if name is None else Request.read(THREE, [[1, 2]], cache=name).lm.model.cache
        model = MODEL if kind is None else MODEL.with_cache(kind)
        cache = prefill_cache(model.init_cache(1, 128, params=PARAMS))
        one = lambda params, window, cache, model=model: model.apply(params, window.replace(is_prefill=True), cache)
        lowered = jax.jit(lambda *a, one=one: (lambda out: (out.hidden, out.entries))(one(*a)))
        costs.append(lowered.lower(PARAMS, window, cache).compile().cost_analysis()["flops"])
    assert costs[1] < 0.45 * costs[0]
