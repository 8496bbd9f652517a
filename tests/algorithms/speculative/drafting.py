"""What the tests of drafts share: states without a model, one draft asked by itself, and its answer as plain lists."""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from decodax.common.struct import Struct, struct
from decodax.core import keys
from decodax.core.types import Params
from decodax.core.window import causal
from tests.laws.cases import model

NONE = Params(None)
CORPUS = ((3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5), (8, 9, 7, 9, 3, 2, 3, 8, 4, 6))


def periodic(tokens, length):
    """Drafts what stood four tokens before the end."""
    index = jnp.maximum(length[:, None] - 4 + jnp.arange(3), 0)
    return jnp.take_along_axis(tokens, index, 1), jnp.minimum(length - 1, 3)


@struct
class Alone(Struct):
    """The cache of a model without inputs beside its tokens, as drafts see it."""

    inputs: Any = None


@struct
class Rows(Struct):
    """What drafts read of a state."""

    tokens: jax.Array
    length: jax.Array
    newest: jax.Array
    prompt_length: jax.Array
    running: jax.Array
    key: jax.Array
    cache: Alone = Alone()

    @property
    def batch(self):
        return self.tokens.shape[0]


def rows(*given, size=40, prompt=None):
    """A state of rows of ids."""
    tokens = np.full((len(given), size), 7, np.int32)           # what stands behind a row is not read
    for row, ids in zip(tokens, given, strict=True):
        row[:len(ids)] = ids
    length = jnp.asarray([len(ids) for ids in given], jnp.int32)
    return Rows(tokens=jnp.asarray(tokens), length=length, newest=jnp.asarray([ids[-1] for ids in given], jnp.int32),
                prompt_length=length if prompt is None else jnp.asarray(prompt, jnp.int32),
                running=jnp.ones(len(given), bool), key=keys.row_keys(*np.zeros((3, len(given)), np.uint32)))


@functools.partial(jax.jit, static_argnums=0)
def first(draft, s, params=NONE):
    """A draft's first state."""
    return draft.init(params, s)


@functools.partial(jax.jit, static_argnums=0)
def propose(draft, s, state=None, params=NONE):
    """A draft's proposal from a state, by default its first."""
    return draft.propose(params, None, s, draft.init(params, s) if state is None else state, "coupled")[0]


def observe(draft, s, state, tokens, count=None, most=4):
    """A draft's state after one row's decided tokens."""
    padded = np.resize(np.asarray(tokens, np.int32), most)[None]
    return _observe(draft, s, state, padded, np.array([len(tokens) if count is None else count], np.int32))


@functools.partial(jax.jit, static_argnums=0)
def _observe(draft, s, state, tokens, count):
    return draft.observe(NONE, s, None, None, SimpleNamespace(tokens=tokens, count=count), state)


def chains(proposal):
    """The drafts of each row of a chain."""
    return [row[:n].tolist() for row, n in zip(np.asarray(proposal.tokens), np.asarray(proposal.count), strict=True)]


def paths(proposal, row=0):
    """The drafts of a row as paths of tokens, in window order."""
    found = {0: ()}
    parents = np.arange(proposal.tokens.shape[1]) if proposal.parents is None else proposal.parents
    parents = np.broadcast_to(parents, proposal.tokens.shape)[row]
    for i, (token, live, above) in enumerate(zip(proposal.tokens[row], proposal.live[row], parents, strict=True)):
        if live:
            assert above <= i
            found[i + 1] = (*found[int(above)], int(token))
    return list(found.values())[1:]


def toys_logits(text):
    """What the toy model says follows a text: `f32[V]`."""
    return _toys_logits(tuple(int(t) for t in text))


@functools.cache
def _toys_logits(text):
    return np.asarray(_scored(np.pad(np.array(text, np.int32), (0, 64 - len(text)))))[len(text) - 1]


@jax.jit
def _scored(padded):
    network, weights = model("toy")
    return network.apply(weights, causal(padded[None], jnp.zeros(1, jnp.int32)), network.init_cache(1, 0)).logits()[0]
