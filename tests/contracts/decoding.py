"""Models, data and helpers of `test_algorithm.py` that other tests use too."""

import functools

import jax.numpy as jnp
import numpy as np

import decodax as dx
from decodax.core import drivers
from decodax.core.types import Params
from decodax.sampling import build
from tests.laws.cases import POLICIES, VOCABULARY, model, padded, prompts, texts

ROWS = 6
# what reads a node's own text and what truncates, and a banned token; together: also a bias and XTC
BANNED = 2
POLICY = {"few": dict(repetition_penalty=1.3, min_p=0.05, bad_words_ids=[[BANNED]]), "together": POLICIES["together"]}
NEW, END = 24, 1

SAMPLES = [[[1, 2, 3, 4, 5], [2, 3, 4, 5, 6]], [[9, 9, 8, 8, 9], [8, 8, 9, 9]]]


def decode(alg, which, rows=ROWS, policy="few", order=None, greedy=False, width=16, burst=500):
    """`order`: which rows stand in which seats; each keeps its number, which addresses its draws. `width`: tokens of a
    prompt in a chunk. `burst`: rounds in a call."""
    order = list(range(rows)) if order is None else order
    network, weights = model(which)
    tokens, lengths = padded([prompts(rows)[i] for i in order], 64)
    params = Params(weights, getattr(alg, "weights", None))
    alg = alg.bare() if hasattr(alg, "bare") else alg
    temperature = [0.0 if greedy else (0.0, 0.7)[i % 2] for i in order] if rows > 1 else 0.7
    chain = build(rows, vocab_size=VOCABULARY, eos_token_id=[END], **POLICY[policy] | dict(temperature=temperature))
    s = drivers.begin(alg, network, params, chain, jnp.asarray(tokens), lengths, size=64,
                      max_new=np.full(rows, NEW, np.int32), seed=np.uint32(7), request=np.asarray(order, np.uint32))
    s = drivers.prefill(alg, network, params, s, width=width)
    while bool(s.running.any()):
        s = drivers.advance(alg, network, params, chain, s, jnp.int32(burst))
    return s


@functools.cache
def plain(which: str, rows: int = ROWS, policy: str = "few", greedy: bool = False):
    s = decode(dx.Autoregressive(), which, rows, policy, greedy=greedy)
    return texts(s), np.asarray(s.status)
