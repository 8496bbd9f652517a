"""FreeDave, FreeDave++ and SSD against plain transcriptions, and against one step a forward."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax.algorithms.diffusion as d
from decodax.algorithms.diffusion.samplers.freedave import BranchExact, BranchLater
from decodax.algorithms.diffusion.samplers.ssd import BranchTree
from decodax.bench.report import parse
from decodax.core import drivers
from decodax.core.algorithm import most_rounds
from decodax.core.round import run
from decodax.core.types import Params
from decodax.core.window import bidirectional
from decodax.sampling import build
from tests.algorithms.diffusion.verifying import BLOCK, IDS, NETWORK, NEW, SIZE, weights
from tests.laws import compiled as programs
from tests.laws.cases import MASK, VOCABULARY, texts
from tests.matrix import often

A = d.Adapter(MASK)
SURE = d.Threshold(0.3)
SEEDS = (2, 3, 7, 9)     # of models, from unsure to sure


def decode(alg, params, temperature):
    tokens = np.zeros((3, SIZE), np.int32)
    tokens[:, :5] = IDS
    chain = build(3, vocab_size=VOCABULARY, eos_token_id=None, temperature=temperature)
    s = drivers.begin(alg, NETWORK, Params(params), chain, jnp.asarray(tokens), np.full(3, 5, np.int32), size=SIZE,
                      max_new=np.full(3, NEW, np.int32), seed=np.uint32(2))
    s = drivers.prefill(alg, NETWORK, Params(params), s, width=8)
    return drivers.advance(alg, NETWORK, Params(params), chain, s, jnp.int32(most_rounds(alg, NEW, 3)))


BLOCKS = dict(adapter=d.Adapter(MASK, shift=True, attention=d.BlockCausal(4)), windows=d.Blocks(4, aligned=True),
              caching=d.BlockCache())
FULL = dict(adapter=A, windows=d.Blocks(BLOCK))
RULES = {
    "freedave": dict(**FULL, verify=BranchExact(4)),
    "freedave++": dict(**FULL, verify=BranchLater(4)),
    "ssd": dict(**FULL, verify=BranchTree(3, 2)),
    "freedave-threshold": dict(**FULL, verify=BranchExact(4), unmask=SURE),
    "freedave-dual": dict(**FULL, verify=BranchExact(4), caching=d.DualCache()),
    "ssd-blocks": dict(**BLOCKS, verify=BranchTree(3, 2)),
    "freedave-random-order": dict(**FULL, verify=BranchExact(4), score=d.Random()),
}
OFTEN = ("freedave-dual",)      # SSD's loop decides below


@functools.cache
def outcome(name, seed, plain):
    rules = RULES[name] | (dict(verify=d.Sequential()) if plain else {})
    return decode(d.MaskedDiffusion(**rules), weights(seed), [0.0, 0.0, 0.2])


@pytest.mark.full
@pytest.mark.parametrize("name", often(OFTEN, RULES))
def test_several_steps_a_forward_are_those_steps(name):
    taken = 0
    for seed in SEEDS:      # one program, several models
        many, one = outcome(name, seed, False), outcome(name, seed, True)
        assert texts(many) == texts(one)
        assert (np.asarray(many.stats.rounds) <= np.asarray(one.stats.rounds)).all()
        steps = lambda s: np.asarray(s.algo.when)[:, 5:5 + NEW].tolist()
        assert steps(many) == steps(one)
        # each step of the sampler was a round's own or an accepted draft, some beyond the budget in a block across it;
        # the other rounds persist finished blocks
        taken_steps = lambda s: np.asarray(s.algo.when).max(1) + 1
        other = np.asarray(many.stats.rounds) + np.asarray(many.stats.accepted) - taken_steps(many)
        np.testing.assert_array_equal(other, np.asarray(one.stats.rounds) - taken_steps(one))
        taken += np.asarray(many.stats.accepted).sum()
    assert taken > 0


@functools.cache
def forward():
    return jax.jit(lambda params, x: NETWORK.apply(
        params, bidirectional(x[None], jnp.zeros(1, jnp.int32)), NETWORK.init_cache(1, 0)).logits()[0])


def candidates(params, x):
    """Tokens and probabilities, float64, without MASK."""
    logits = np.asarray(forward()(params, jnp.asarray(x)), np.float64)
    logits[:, MASK] = -np.inf
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return p.argmax(-1), p.max(-1)


def transfer(x, token, p, lo, threshold):
    """One step of the sampler in the block that begins at `lo`."""
    masked = [i for i in range(lo, lo + BLOCK) if x[i] == MASK]
    chosen = [i for i in masked if threshold is not None and p[i] >= threshold]
    chosen = chosen or sorted(masked, key=lambda i: -p[i])[:1]
    return [token[i] if i in chosen else x[i] for i in range(len(x))]


def speculative(params, prompt, orders, threshold, follows):
    """FreeDave's loop: `orders` says which of the surest candidates each draft has, `follows(draft, target)` whether it
    may come after a step's result."""
    x, forwards = prompt + [MASK] * NEW, 0
    for lo in range(len(prompt), len(x), BLOCK):
        drafts = [x]
        while MASK in x[lo:lo + BLOCK]:
            forwards += 1
            scored = [candidates(params, draft) for draft in drafts]
            targets = [transfer(draft, *own, lo, threshold) for draft, own in zip(drafts, scored, strict=True)]
            best, moved = 0, True
            while moved:
                later = [j for j in range(best + 1, len(drafts)) if follows(drafts[j], targets[best])]
                best, moved = (max(later), True) if later else (best, False)
            x, (token, p) = targets[best], scored[best]
            surest = sorted((i for i in range(lo, lo + BLOCK) if x[i] == MASK), key=lambda i: -p[i])
            taken = [[surest[r] for r in order if r < len(surest)] for order in orders]
            drafts = [x] + [[token[i] if i in own else x[i] for i in range(len(x))] for own in taken]
    return x[len(prompt):], forwards


def equal(draft, target):
    return draft == target


def subset(draft, target):
    return all(a in (b, MASK) for a, b in zip(draft, target, strict=True))


CHAIN = [(0,), (0, 1), (0, 1, 2)]
TREE = [(0,), (1,), (0, 1), (0, 2), (1, 2), (0, 1, 2)]


@pytest.mark.wide
@pytest.mark.parametrize(("name", "orders", "threshold", "follows"), [
    pytest.param("freedave", CHAIN, None, equal, marks=pytest.mark.full), ("ssd", TREE, None, equal),
    pytest.param("freedave++", CHAIN, 0.3, subset, marks=pytest.mark.full)])
def test_a_loop_is_the_published_one(name, orders, threshold, follows):
    verify = RULES[name]["verify"]
    assert list(verify.taken[1:]) == orders
    alg = d.MaskedDiffusion(A, d.Blocks(BLOCK), verify=verify, unmask=SURE if threshold else d.Quota())
    differ = 0
    for seed in SEEDS:
        s = decode(alg, weights(seed), 0.0)
        made = [speculative(weights(seed), ids, orders, threshold, follows) for ids in IDS]
        assert texts(s) == [text for text, _ in made]
        assert np.asarray(s.stats.rounds).tolist() == [forwards for _, forwards in made]
        if threshold:
            plain = [speculative(weights(seed), ids, [], threshold, follows) for ids in IDS]
            differ += plain != made
    assert not threshold or differ


@pytest.mark.full
def test_forwards_are_counted_for_rows_and_for_the_batch():
    """Rows whose blocks begin at different rounds wait for one another's wide forwards; the batch takes them all."""
    alg = d.MaskedDiffusion(**RULES["freedave-dual"] | dict(unmask=SURE))
    tokens = np.zeros((3, SIZE), np.int32)
    tokens[:, :5] = IDS
    params, chain = Params(weights(7)), build(3, vocab_size=VOCABULARY, eos_token_id=None, temperature=0.0)
    s = drivers.begin(alg, NETWORK, params, chain, jnp.asarray(tokens), np.full(3, 5, np.int32), size=SIZE,
                      max_new=np.full(3, NEW, np.int32))
    took = []

    def loop(unfinished, body, carry):
        body = jax.jit(body)
        while bool(unfinished(carry)):
            carry = body(carry)
            took.append(np.asarray(carry[1].stats.rounds).tolist())
        return carry

    s = run(alg, NETWORK, params, chain, s, 200, loop=loop)
    rounds, waited = np.asarray(s.stats.rounds), np.asarray(s.stats.waited)
    assert waited.any() and (rounds + waited).max() == len(took)
    alone = [decode(alg, weights(7), 0.0).stats.rounds[i] for i in range(3)]
    assert rounds.tolist() == [int(x) for x in alone]


@pytest.mark.full
def test_canvases_share_the_cache_and_cost_their_nodes():
    """Of the compiled rounds: nothing with the cache's slots is larger than the cache, which is not copied, and of the
    text only the window appears once for each canvas; the wide forward that begins a window has one canvas."""
    rows, block, branches = 3, 8, 3
    mask = programs.VOCABULARY - 1
    rules = dict(windows=d.Blocks(block), caching=d.DualCache(), verify=BranchExact(branches))
    program = parse(programs.compiled(d.MaskedDiffusion(d.Adapter(mask), **rules), rows).as_text())
    assert programs.copies_in_loops(program, rows * programs.ENTRIES) == []
    arrays = {b.dims for x in program.all() for b in x.result}
    assert max(math.prod(dims) for dims in arrays if programs.CAPACITY in dims) == rows * programs.ENTRIES
    # of the MLP, which is 48 wide and whose weights have 32 rows
    nodes = {math.prod(dims) // 48 for dims in arrays if dims[-1:] == (48,)}
    assert {n for n in nodes if n > 32} == {rows * branches * block, rows * (programs.CAPACITY + block)}
