"""Verification rules against the authors' code: what is accepted of given drafts, what the next token is drawn from.

Each file in `verify/` holds what one repository's code did, as numbers; see README.md. The distributions, drafts and
uniforms of both sides come from NumPy's `RandomState`, whose streams are frozen.
"""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax.algorithms.speculative import verify
from decodax.algorithms.speculative.trees import Chain, Fixed
from decodax.core import keys
from tests.algorithms.speculative.judging import LENGTH, judge

FILES = {f.stem: json.loads(f.read_text()) for f in sorted((Path(__file__).parent / "verify").glob("*.json"))}


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def siblings_drawn(seed: int, trials: int, vocabulary: int, children: int, power: float,
                   replacement: bool) -> tuple[np.ndarray, ...]:
    """p and q `f32[trials, V]`, children's tokens drawn from q and uniforms, `[trials, children]`."""
    draw = np.random.RandomState(seed)
    p, q = (softmax(power * draw.standard_normal((trials, vocabulary))).astype(np.float32) for _ in range(2))
    if replacement:
        at = draw.random_sample((trials, children, 1)) * q.sum(-1)[:, None, None]
        tokens = (at > np.cumsum(q, -1)[:, None, :-1]).sum(-1)
    else:
        tokens = np.argsort(-np.log(draw.random_sample(q.shape)) / q, -1)[:, :children]
    return p, q, tokens, draw.random_sample(tokens.shape).astype(np.float32)


def tree_drawn(seed: int, trials: int, vocabulary: int, branching: list[int],
               power: float) -> tuple[tuple[Any, ...], np.ndarray, np.ndarray]:
    """A tree's paths, tokens `[trials, 1 + N]`, siblings distinct, and logits `f32[trials, 1 + N, V]`."""
    draw, paths = np.random.RandomState(seed), Fixed.balanced(*branching).order
    tokens = np.zeros((trials, 1 + len(paths)), np.int64)
    logits = (power * draw.standard_normal((*tokens.shape, vocabulary))).astype(np.float32)
    for row in range(trials):
        ranked: dict[Any, np.ndarray] = {}
        for node, path in enumerate(paths, 1):
            order = ranked.setdefault(path[:-1], draw.permutation(vocabulary))
            tokens[row, node] = order[path[-1]]
    return paths, tokens, logits


def chain_drawn(seed: int, trials: int, vocabulary: int, length: int, power: float) -> tuple[np.ndarray, ...]:
    """Chains' tokens `[trials, 1 + K]`, the log of what they are drawn from `f32[trials, K, V]`, logits
    `f32[trials, 1 + K, V]`, and the uniforms that decodax has for them `f32[trials, K]`."""
    draw = np.random.RandomState(seed)
    logits = (power * draw.standard_normal((trials, 1 + length, vocabulary))).astype(np.float32)
    q = softmax(logits[:, :-1] + power * draw.standard_normal((trials, length, vocabulary))).astype(np.float32)
    at = draw.random_sample((trials, length, 1)) * q.sum(-1, keepdims=True)
    tokens = np.pad((at > np.cumsum(q, -1)[..., :-1]).sum(-1), ((0, 0), (1, 0)))
    row, none = np.arange(trials, dtype=np.uint32), np.zeros(trials, np.uint32)
    positions = np.broadcast_to(LENGTH + np.arange(length, dtype=np.int32), (trials, length))
    u = keys.uniforms(keys.row_keys(none, row, none), positions, keys.Purpose.ACCEPT)[..., 0]
    return tokens, np.log(q), logits, np.asarray(u)


def groups(kind: str) -> list[Any]:
    return [pytest.param(data["rule"], group, id=f"{name}-{i}", marks=[pytest.mark.full] if i else [])
            for name, data in FILES.items() for i, group in enumerate(data["groups"]) if kind in group]


@pytest.mark.parametrize(("rule", "group"), groups("left"))
def test_siblings_are_accepted_as_by_the_authors(rule: str, group: dict[str, Any]) -> None:
    p, q, tokens, u = map(jnp.asarray, siblings_drawn(**group["drawn"]))
    root = lambda x: jnp.pad(x, ((0, 0), (1, 0)))
    children = root(jnp.ones(tokens.shape, bool))
    judged = jax.jit(jax.vmap(getattr(verify, rule)(**group["options"]).siblings))
    child, accepted, left = judged(p, q, root(tokens), children, jnp.zeros_like(children), root(u))
    assert jnp.where(accepted, child - 1, -1).tolist() == group["accepted"]
    left = np.asarray(left)[~np.asarray(accepted)]
    np.testing.assert_allclose(left / left.sum(-1, keepdims=True), np.array(group["left"]), atol=2e-5)


@pytest.mark.parametrize(("rule", "group"), groups("tokens"))
def test_trees_are_accepted_as_by_the_authors(rule: str, group: dict[str, Any]) -> None:
    _, tokens, logits = tree_drawn(**group["drawn"])
    decided, accepted = judge(getattr(verify, rule)(**group["options"]), Fixed.balanced(*group["drawn"]["branching"]),
                              tokens, logits, temperature=group["temperature"])
    assert accepted.tolist() == group["accepted"]
    assert [row[:n + 1].tolist() for row, n in zip(decided, accepted, strict=True)] == group["tokens"]


@pytest.mark.wide
@pytest.mark.parametrize(("rule", "group"), groups("residual"))
def test_chains_are_accepted_as_by_the_authors(rule: str, group: dict[str, Any]) -> None:
    tokens, log_q, logits, _ = chain_drawn(**group["drawn"])
    verifier = getattr(verify, rule)(**group["options"])
    decided, accepted = judge(verifier, Chain(tokens.shape[1] - 1), tokens, logits, log_q)
    assert accepted.tolist() == group["accepted"]
    # the next token is drawn from what they draw it from: it has a chance there
    own = np.take_along_axis(decided, accepted[:, None], 1)
    assert (np.take_along_axis(np.array(group["residual"]), own, 1) > 0).all()
