"""D2F's and d3LLM's pipelines and APD against plain transcriptions of their authors' loops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax.algorithms.diffusion as d
from decodax.algorithms.diffusion.rules.judged import Agreed
from decodax.algorithms.diffusion.samplers.apd import LimitedLookahead, Product, Trailing
from decodax.algorithms.diffusion.samplers.d2f import BlockPipeline, Pipelined
from decodax.algorithms.diffusion.samplers.d3llm import Delayed, InTurn, WithBest
from decodax.core import drivers, keys
from decodax.core.algorithm import most_rounds
from decodax.core.keys import Purpose
from decodax.core.types import Params
from decodax.sampling import build
from decodax.sampling.draw import exponentials
from tests.algorithms.diffusion.verifying import IDS, NETWORK, NEW, SIZE, weights
from tests.laws.cases import MASK, VOCABULARY, texts
from tests.matrix import often

A, BLOCK, START = d.Adapter(MASK), 4, 5
END = START + NEW
SEEDS = (3, 7)


def decode(alg, params, temperature=0.0, draft=None, eos=None, seed=2):
    tokens = np.zeros((3, SIZE), np.int32)
    tokens[:, :START] = IDS
    chain = build(3, vocab_size=VOCABULARY, eos_token_id=eos, temperature=temperature)
    params = Params(params, draft)
    s = drivers.begin(alg, NETWORK, params, chain, jnp.asarray(tokens), np.full(3, START, np.int32), size=SIZE,
                      max_new=np.full(3, NEW, np.int32), seed=np.uint32(seed))
    s = drivers.prefill(alg, NETWORK, params, s, width=8)
    return drivers.advance(alg, NETWORK, params, chain, s, jnp.int32(most_rounds(alg, NEW, 3)))


@functools.cache
def forward(causal=False):
    """The network over all positions, where those that are `old` have given keys and values, and who sees whom is
    `seen`: with its own softmax over everything, so it shares no cache with the library."""
    @jax.jit
    def run(params, x, old, seen, stored):
        net = NETWORK.pieces(params).network

        def attend(layer, q, k, v, scale, **_):
            was_k, was_v = stored[layer]
            k, v = (jnp.where(old[None, :, None, None], was, new) for was, new in ((was_k, k), (was_v, v)))
            kept.append((k, v))
            k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
            allowed = jnp.tril(jnp.ones((END, END), bool)) if causal else seen
            scores = jnp.where(allowed, jnp.einsum("bqhd,bkhd->bhqk", q, k) * scale, -jnp.inf)
            return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v), ()

        kept, places = [], jnp.arange(END)[None]
        hidden = net(net.embedded(x[None], places), places, attend)[0]
        return net.logits(hidden)[0], kept

    return run


NOTHING = [[np.zeros((1, END, 2, 4), np.float32)] * 2] * 2


def scored(params, x, old=0, seen=END, stored=NOTHING, causal=False):
    """Logits, float64, and keys and values; `old`: so many positions are `stored`; `seen`: so many positions are seen,
    or who sees whom."""
    place = np.arange(END)
    seen = seen if isinstance(seen, np.ndarray) else np.broadcast_to(place < seen, (END, END))
    logits, kept = forward(causal)(params, jnp.asarray(x), place < old, seen, stored)
    return np.asarray(logits, np.float64), kept


def candidates(logits):
    """Tokens, probabilities and entropies, without MASK."""
    logits = np.where(np.arange(VOCABULARY) == MASK, -np.inf, logits)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return p.argmax(-1), p.max(-1), -np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0).sum(-1)


class Blocks:
    """The bookkeeping that D2F and d3LLM share."""

    def __init__(self, prompt, add, full):
        self.x, self.add, self.full = [*prompt] + [MASK] * NEW, add, full
        self.spans, self.active = [(START, START + BLOCK)], [True]

    def masked(self, j):
        return [i for i in range(*self.spans[j]) if self.x[i] == MASK]

    def progress(self, j):
        return (BLOCK - len(self.masked(j))) / BLOCK

    @property
    def done(self):
        return MASK not in self.x

    def grow(self):
        for j in range(1, len(self.spans)):
            self.active[j] = self.active[j] or self.progress(j - 1) >= self.full
        if (begin := self.spans[-1][1]) < END and self.progress(-1) >= self.add:
            self.spans.append((begin, begin + BLOCK))
            self.active.append(self.progress(-2) >= self.full)


def d2f(params, prompt, add, full, threshold):
    """The prompt is one block of a block-causal text."""
    b, forwards = Blocks(prompt, add, full), 0
    number = np.maximum((np.arange(END) - START) // BLOCK, -1)
    while not b.done:
        b.grow()
        forwards += 1
        token, p, _ = candidates(scored(params, b.x, seen=number <= number[:, None])[0])
        for j in range(len(b.spans)):
            masked = b.masked(j)
            chosen = [i for i in masked if p[i] > threshold]
            if not chosen and b.active[j]:
                chosen = sorted(masked, key=lambda i: -p[i])[:1]
            for i in chosen:
                b.x[i] = token[i]
    return b.x[START:], forwards


def d3llm(params, prompt, add, full, threshold, delay, refresh, kind="llada"):
    """With `delay` None without a cache. The loop for LLaDA spares the lowest entropy of all from the threshold, and
    looks at one waiting block at a time."""
    b, forwards, cached, stored = Blocks(prompt, add, full), 0, 0, None
    completed, kept = {0: 0}, set()         # block 0 is the prompt
    while not b.done:
        forwards += 1
        b.grow()
        spans = [(0, START), *b.spans]
        store = cached
        for j, (_, end) in enumerate(spans if delay is not None else []):
            if j and b.masked(j - 1):
                break
            if forwards - completed.setdefault(j, forwards) >= delay:
                kept.add(j)
                store = end
            elif kind == "llada":
                break
        waits = any(j not in kept and not (j and b.masked(j - 1)) for j in completed)
        if store > cached or (stored is not None and not waits and forwards % refresh):
            logits, now = scored(params, b.x, cached, stored=stored or NOTHING)
            stored = now if store > cached else stored
        else:
            logits, now = scored(params, b.x)
            stored = now if stored is not None else None
        cached = store
        token, _, entropy = candidates(logits)
        masked = [i for j in range(len(b.spans)) for i in b.masked(j)]
        chosen = [i for i in masked if entropy[i] < threshold]
        if kind == "llada":
            chosen = list({*chosen, min(masked, key=lambda i: entropy[i])})
        first = next(j for j in range(len(b.spans)) if b.active[j] and b.masked(j))
        if not set(chosen) & set(b.masked(first)):
            chosen.append(min(b.masked(first), key=lambda i: entropy[i]))
        for i in chosen:
            b.x[i] = token[i]
    return b.x[START:], forwards


def matches(alg, loop, seeds=SEEDS, **options):
    out = []
    for seed in seeds:
        s = decode(alg, weights(seed), **options)
        made = [loop(weights(seed), ids) for ids in IDS]
        assert texts(s) == [text for text, _ in made]
        # a fused cache writes the last entries in a forward of its own
        assert np.asarray(s.stats.rounds).tolist() == [n + alg.caching.fused for _, n in made]
        out.append(made)
    return out


# the authors' own loops decide by default, in tests/conformance
@pytest.mark.full
@pytest.mark.parametrize("full", [0.5, 1.0])
def test_the_pipeline_is_d2fs(full):
    pipe = BlockPipeline(BLOCK, add=0.25, full=full, most=4)
    alg = d.MaskedDiffusion(d.Adapter(MASK, attention=d.PromptBlocks(BLOCK)), pipe, caching=d.FusedCache(),
                            unmask=Pipelined(d.Threshold(0.3, strict=True), pipe))
    made = matches(alg, lambda params, ids: d2f(params, ids, 0.25, full, 0.3))
    assert made != [[d2f(weights(seed), ids, 1.0, 1.0, 0.3) for ids in IDS] for seed in SEEDS]
    assert made != [[d2f(weights(seed), ids, 0.25, full, 1.0) for ids in IDS] for seed in SEEDS]


@pytest.mark.full
@pytest.mark.parametrize(("delay", "refresh", "kind"), [
    (2, None, "llada"), (2, 3, "llada"), (1, None, "dream"), (2, 3, "dream"), (None, None, "llada")])
def test_the_pipeline_is_d3llms(delay, refresh, kind):
    pipe = BlockPipeline(BLOCK, add=0.5, full=0.75, most=4)
    sure, caching = d.Threshold(1.8, "entropy", strict=True), d.NoCache()
    if delay is not None:
        caching = InTurn(delay, refresh, NEW, block=BLOCK) if kind == "llada" else Delayed(delay, refresh, suffix=NEW)
    sure = WithBest(sure) if kind == "llada" else sure
    alg = d.MaskedDiffusion(A, pipe, d.NegEntropy(), Pipelined(sure, pipe, "first"), caching=caching)
    loop = functools.partial(d3llm, add=0.5, full=0.75, threshold=1.8, refresh=refresh or 10000, kind=kind)
    made = matches(alg, functools.partial(loop, delay=delay))
    # a cache shows in the output, so a wrong one would
    assert delay is None or made != [[loop(weights(s), ids, delay=None) for ids in IDS] for s in SEEDS]


PIPE = BlockPipeline(BLOCK, True, 0.25, 0.5, 3)
CAUSAL = dict(adapter=d.Adapter(MASK, attention=d.BlockCausal(BLOCK)), windows=PIPE,
              unmask=Pipelined(d.Threshold(0.5), PIPE))
FIXED = dict(adapter=A, windows=d.Blocks(BLOCK), unmask=d.Threshold(0.3))
AGREE = {
    "pipeline-1-1": (FIXED | dict(windows=BlockPipeline(BLOCK, add=1, full=1, most=3)), FIXED),
    "delayed-0-1": (dict(**FIXED, caching=Delayed(0, 1)), FIXED),
    # of block-causal models the entries of finished blocks are exact
    "fused": (dict(**CAUSAL, caching=d.FusedCache()), CAUSAL),
    "delayed": (dict(**CAUSAL, caching=Delayed(1)), CAUSAL),
    "block-cache": (dict(**CAUSAL, caching=d.BlockCache()), CAUSAL),
}


@pytest.mark.full
@pytest.mark.parametrize("case", often(["fused"], AGREE))
def test_two_ways_of_saying_the_same_agree(case):
    left, right = (d.MaskedDiffusion(**rules) for rules in AGREE[case])
    for seed in SEEDS:
        assert texts(decode(left, weights(seed))) == texts(decode(right, weights(seed)))


AR = weights(8)


@functools.cache
def noise(seed, row, position, salt):
    key = keys.row_keys(jnp.uint32([seed]), jnp.uint32([row]), jnp.uint32([0]))[0]
    return -np.log(np.asarray(exponentials(keys.address(keys.at(key, position, Purpose.CANVAS, salt)), VOCABULARY)))


def apd(params, prompt, row, weight, lookahead, window, temperature, shift, seed=2):
    x, at, forwards, accepted, stored = [*prompt] + [MASK] * NEW, START, 0, 0, NOTHING
    while at < END:
        right = min(at + lookahead, END)
        left = 0 if not forwards or window is None else max(at - window - accepted + 1, 0)
        logits, stored = scored(params, x, left, right, stored)
        logits = np.concatenate([logits[:1], logits[:-1]]) if shift else logits
        logits[:, MASK] = -np.inf
        scale = temperature or 1.0
        g = np.array([noise(seed, row, i, forwards) for i in range(at, right)]) if temperature else 0
        draft = (logits[at:right] / scale + g).argmax(-1)
        read = x[:at] + draft.tolist() + x[right:]
        ar = scored(AR, read, causal=True)[0][at - 1:right - 1]
        target = ((weight * logits[at:right] + (1 - weight) * ar) / scale + g).argmax(-1)
        agreed = draft == target
        agreed[0] = True
        accepted = int(np.cumprod(agreed).sum())
        x[at:at + accepted] = draft[:accepted]
        at, forwards = at + accepted, forwards + 1
    return x[START:], forwards


def product(weight, lookahead, window, shift=True):
    return d.MaskedDiffusion(
        d.Adapter(MASK, shift=shift, attention=LimitedLookahead()), d.Sliding(lookahead), d.Position(), Agreed(),
        caching=d.NoCache() if window is None else Trailing(window), verify=Product(NETWORK, weight))


@pytest.mark.wide
@pytest.mark.parametrize(("window", "temperature", "shift"), [
    (2, 0.7, True), pytest.param(None, 0.0, False, marks=pytest.mark.full)])
def test_the_product_is_apds(window, temperature, shift):
    made = []
    for seed in SEEDS:
        s = decode(product(0.6, 6, window, shift), weights(seed), temperature, AR)
        one = [apd(weights(seed), ids, row, 0.6, 6, window, temperature, shift) for row, ids in enumerate(IDS)]
        assert texts(s) == [text for text, _ in one]
        assert np.asarray(s.stats.rounds).tolist() == [forwards for _, forwards in one]
        made += one
    # some candidates are accepted, and some are not
    assert NEW / 6 < np.mean([forwards for _, forwards in made]) < NEW
    if window is not None:
        exact = [apd(weights(seed), ids, row, 0.6, 6, None, temperature, shift) for seed in SEEDS
                 for row, ids in enumerate(IDS)]
        assert exact != made


@pytest.mark.full
def test_a_product_that_is_the_diffusion_models_own_takes_everything():
    s = decode(product(1.0, 6, None), weights(7), 0.7, AR)
    assert np.asarray(s.stats.rounds).tolist() == [3, 3, 3]
    wide = decode(product(0.6, 6, 64), weights(7), 0.7, AR)
    assert texts(wide) == texts(decode(product(0.6, 6, None), weights(7), 0.7, AR))


@pytest.mark.full
def test_an_early_end_cuts_the_pipeline():
    """d3LLM: what lies behind the first end of sequence that is decided is never filled in, what lies before it is."""
    pipe = BlockPipeline(BLOCK, add=0.25, full=0.5, most=4)
    alg = d.MaskedDiffusion(A, pipe, unmask=Pipelined(d.Threshold(0.3), pipe, "first"), stops=(d.FirstEnd(),))
    whole = decode(alg, weights(9))
    # a token that is decided before one to the left of it
    when, rows = np.asarray(whole.algo.when)[:, START:END], np.array(texts(whole))
    i, j = next((i, j) for i in range(3) for j in range(1, NEW)
                if when[i, j] < when[i, :j].max() and rows[i, j] not in rows[i, :j])
    s = decode(alg, weights(9), eos=[[int(rows[i, j])] if i == r else [MASK] for r in range(3)])
    text = texts(s)[i]
    assert text[-1] == rows[i, j] and len(text) <= j + 1 and MASK not in text
    assert np.asarray(s.stats.rounds)[i] < np.asarray(whole.stats.rounds)[i]
    assert (np.asarray(s.algo.when)[i, START + len(text):] == -1).any()


def test_parts_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"add: got 0, takes more than 0 up to 1"):
        BlockPipeline(4, add=0)
    with pytest.raises(ValueError, match=r"delay: got -1, takes 0 or more"):
        Delayed(-1)
    with pytest.raises(ValueError, match=r"weight: got 1.5, takes 0 to 1"):
        Product(NETWORK, 1.5)
    with pytest.raises(ValueError, match=r"params: Product needs its model's weights in Params.draft"):
        decode(product(0.5, 4, None), weights(7))
    with pytest.raises(ValueError, match=r"verify: got BranchExact.*with rules that remember"):
        decode(d.MaskedDiffusion(A, d.Blocks(4), caching=Delayed(1), verify=d.BranchExact(2)), weights(7))
