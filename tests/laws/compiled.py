"""Models, data and helpers of `test_compiled.py` that other tests use too."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from decodax.algorithms.speculative.drafts import (
    DraftModel,
)
from decodax.bench.report import copies
from decodax.core import drivers
from decodax.core.algorithm import prefill_observer
from decodax.core.start import init_state
from decodax.core.types import Params
from decodax.models.config import llama
from decodax.models.transformer import Transformer
from decodax.sampling import build

VOCABULARY = 251        # a prime that no other dimension is a multiple of
CAPACITY = 1024         # several blocks of the walk over the cache
NETWORK = Transformer(llama(vocab=VOCABULARY, width=32, layers=2, heads=4, kv_heads=2, mlp=48, context=CAPACITY))
ENTRIES = 2 * CAPACITY * (8 + 8)       # elements of one row's keys and values of one layer


def abstract(alg, batch, **policy):
    """The arguments of a driver as shapes, after the static ones."""
    chain = build(batch, vocab_size=VOCABULARY, eos_token_id=[1], **{"temperature": 0.8, **policy})
    own = NETWORK.abstract_params() if isinstance(getattr(alg, "draft", None), DraftModel) else None
    params = Params(NETWORK.abstract_params(), own)
    begin = functools.partial(init_state, alg, NETWORK, size=CAPACITY, max_new=np.int32(30))
    tokens = jax.ShapeDtypeStruct((batch, 64), jnp.int32)
    return params, chain, jax.eval_shape(begin, params, chain, tokens, jax.ShapeDtypeStruct((batch,), jnp.int32))


@functools.cache
def compiled(alg, batch, driver="advance"):
    params, chain, s = abstract(alg, batch)
    if driver == "prefill":
        seen = s.replace(cache=None, algo=None, policy=None, stats=None)
        return drivers.commit_prompts.lower(prefill_observer(alg), NETWORK, params, (s.cache, None), seen, width=32,
                                            rows=min(batch, 4)).compile()
    return drivers.advance.lower(alg, NETWORK, params, chain, s, np.int32(5)).compile()


def copies_in_loops(program, elements):
    return [x for loop in program.loops() for x in copies(program, elements, loop.attribute("body"))]
