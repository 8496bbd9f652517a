"""One call of a verification rule on drafts and logits that are given, and random distributions for it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from decodax.algorithms.speculative import Proposal
from decodax.algorithms.speculative.tree import tree, window
from decodax.algorithms.speculative.trees import Fixed
from decodax.common.struct import Struct, struct
from decodax.core import keys
from decodax.sampling import Policy, Temperature

ROWS = 50_000
SMALL = 64
LENGTH = 4
V = 5
TREE = Fixed.balanced(3, 2)


@struct
class Rows(Struct):
    """The fields of a `State` that verification reads."""

    tokens: Any
    length: Any
    prompt_length: Any
    key: Any
    policy: Any


@functools.partial(jax.jit, static_argnames=("rule", "shape"))
def judged(rule, shape, tokens, logits, log_q, live, temperature):
    B, N = tokens.shape[0], tokens.shape[1] - 1
    policy = Policy(transforms=(Temperature(temperature),), eos=jnp.full((B, 1), -1, jnp.int32))
    key = keys.row_keys(jnp.zeros(B, jnp.uint32), jnp.arange(B, dtype=jnp.uint32), jnp.zeros(B, jnp.uint32))
    length = jnp.full(B, LENGTH, jnp.int32)
    s = Rows(tokens=jnp.zeros((B, 16), jnp.int32), length=length, prompt_length=length, key=key, policy=(None,))
    chain = np.array_equal(shape.parents, np.arange(N))
    proposal = Proposal(tokens=tokens[:, 1:], live=live, parents=None if chain else shape.parents[None], log_q=log_q)
    t = tree(tokens[:, 0], proposal, shape.length)
    w = window(t, length - 1, jnp.ones(B, bool), None)
    return rule(policy.over_logits(s, w, logits), s, t)


def judge(rule, shape, tokens, logits, log_q=None, live=None, temperature=1.0):
    """Applies a rule of verification to drafts.

    Args:
        tokens: `[B, 1 + N]`, the newest token and the drafts.
        logits: `[B, 1 + N, V]`, of the target.

    Returns:
        The decided tokens `[B, length + 1]`, of which those after the model's own token repeat it; and the number of
        accepted drafts.
    """
    tokens = np.asarray(tokens, np.int32)
    live = np.ones((len(tokens), tokens.shape[1] - 1), bool) if live is None else np.asarray(live)
    rows = np.arange(max(len(tokens), SMALL)) % len(tokens)         # few batch sizes, few programs
    batch = lambda x, dtype: None if x is None else jnp.asarray(np.asarray(x)[rows], dtype)
    out = judged(rule, shape, batch(tokens, jnp.int32), batch(logits, jnp.float32), batch(log_q, jnp.float32),
                 batch(live, bool), jnp.full(len(rows), temperature, jnp.float32))
    path, accepted, own = (np.asarray(x)[:len(tokens)] for x in out)
    held = np.take_along_axis(tokens, np.concatenate([path[:, 1:], path[:, :1]], 1), 1)
    return np.where(np.arange(path.shape[1]) < accepted[:, None], held, own[:, None]), accepted


def simplex(draw, *shape, power=1.5):
    """Random distributions over the last axis."""
    x = np.exp(draw.normal(size=shape) * power)
    return x / x.sum(-1, keepdims=True)


def sample(draw, p):
    """A token from each of the distributions `p` `[..., V]`."""
    return (draw.random((*p.shape[:-1], 1)) > np.cumsum(p, -1)[..., :-1]).sum(-1)


def drafts(draw, Q, shape, rows, distinct):
    """Tokens `[rows, 1 + N]` of trees below token 0, children drawn from `Q[parent's token]`."""
    parents = shape.parents
    tokens = np.zeros((rows, 1 + len(parents)), np.int64)
    for i, up in enumerate(parents, 1):
        q = Q[tokens[:, up]].copy()
        for j in range(1, i):
            if distinct and parents[j - 1] == up:
                np.put_along_axis(q, tokens[:, j:j + 1], 0, 1)
        tokens[:, i] = sample(draw, q / q.sum(-1, keepdims=True))
    return tokens
