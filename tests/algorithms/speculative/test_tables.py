"""Drafts from tables of what the target thought or wrote: each one's rule against a plain transcription or by hand;
and all drafts from text and tables together, exact with policies."""

import dataclasses
import functools
import hashlib
from collections import Counter, defaultdict
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax import algorithms
from decodax.algorithms.plain import Autoregressive
from decodax.algorithms.speculative import MultiRound, Proposal, Rejection, Speculative
from decodax.algorithms.speculative.drafts.model.callable import UserDraft
from decodax.algorithms.speculative.drafts.text.aded import ADED
from decodax.algorithms.speculative.drafts.text.aggressive_decoding import InputGuided
from decodax.algorithms.speculative.drafts.text.ngram import NGram, NGramModel
from decodax.algorithms.speculative.drafts.text.pain_lookahead import NGramTrie
from decodax.algorithms.speculative.drafts.text.sam_decoding import SuffixAutomaton
from decodax.algorithms.speculative.drafts.text.stand import Stand
from decodax.algorithms.speculative.drafts.text.suffix_decoding import SuffixTree
from decodax.algorithms.speculative.drafts.text.token_recycling import SMALL_TREE, TokenRecycling, template
from decodax.algorithms.speculative.source import Draft
from decodax.algorithms.speculative.trees import RECYCLING_80, Chain, Fixed
from decodax.core import drivers
from decodax.core.types import Decision, Out, Params
from tests.algorithms.speculative.drafting import (
    CORPUS,
    NONE,
    first,
    observe,
    paths,
    periodic,
    propose,
    rows,
    toys_logits,
)
from tests.laws.cases import POLICIES, VOCABULARY, decode, prompts, start, texts
from tests.matrix import often

DRAFTS = (
    Speculative(TokenRecycling(SMALL_TREE, rows=16)),
    Speculative(SuffixAutomaton(length=6, corpus=CORPUS, len_bias=1)),
    Speculative(SuffixTree(nodes=8, branch=4, pattern=4, corpus=CORPUS)),
    Speculative(NGramTrie(decoding_length=12, branch_length=4, corpus=CORPUS)),
    Speculative(InputGuided(length=6, skip=1)),
    Speculative(UserDraft(periodic, 3)),
    Speculative(NGram(length=4, corpus=CORPUS)),
    Speculative(NGramModel(VOCABULARY, order=3), shape=Fixed.balanced(2, 2)),
    Speculative(Stand(VOCABULARY, k=6), shape=Fixed.balanced(2, 2)),
    Speculative(ADED(nodes=8, depth=3, rows=64)),
)


@dataclasses.dataclass(frozen=True)
class SideBySide(Draft):
    """All drafts under one newest token: one program for all of them."""

    drafts: tuple

    @property
    def length(self):
        return max(d.length for d in self.drafts)

    @property
    def prefill_observer(self):
        return self

    def init(self, params, s):
        return tuple(d.init(params, s) for d in self.drafts)

    def propose(self, params, policy, s, state, drawn):
        made, states = zip(*(d.propose(params, policy, s, x, drawn) for d, x in zip(self.drafts, state, strict=True)),
                           strict=True)
        parents, before = [], 0
        for p in made:
            n = p.tokens.shape[1]
            above = np.arange(n, dtype=np.int32)[None] if p.parents is None else p.parents
            parents.append(jnp.broadcast_to(jnp.where(above > 0, above + before, 0), p.tokens.shape))
            before += n
        joined = lambda x: jnp.concatenate(x, 1)
        return Proposal(tokens=joined([p.tokens for p in made]), live=joined([p.live for p in made]),
                        parents=joined(parents)), states

    def observe(self, params, s, window, out, decision, state):
        return tuple(d.observe(params, s, window, out, decision, x) for d, x in zip(self.drafts, state, strict=True))


@pytest.mark.full
def test_output_is_that_of_plain_sampling():
    ids, policy = prompts(6), POLICIES["penalised"]
    plain = decode(Autoregressive(), "toy", ids, policy, eos=[1])
    s = decode(Speculative(SideBySide(tuple(alg.drafter for alg in DRAFTS))), "toy", ids, policy, eos=[1])
    assert texts(s) == texts(plain)
    assert (np.asarray(s.stats.accepted) > 0).all()


NEED_Q = [Speculative(NGramModel(VOCABULARY, order=3), Rejection(), Chain(3)),
          Speculative(Stand(VOCABULARY, k=6), MultiRound(), Fixed.balanced(2, 2))]


@pytest.mark.wide
@pytest.mark.parametrize("alg", often(NEED_Q[:1], NEED_Q))
def test_a_sources_q_goes_with_the_verifiers_that_need_it(alg):
    s = decode(alg, "toy", prompts(6), POLICIES["sampled"])
    assert [len(row) for row in texts(s)] == [12] * 6
    assert 0 < np.asarray(s.stats.accepted).sum() < np.asarray(s.stats.drafted).sum()


# --- Token Recycling ----------------------------------------------------------------------------------------------

def test_the_tree_is_the_authors():
    sizes = Counter(map(len, RECYCLING_80.paths))
    assert [sizes[i] for i in range(1, 8)] == [8, 21, 25, 15, 8, 3, 0]
    # of the list in the authors' code, sorted
    assert hashlib.sha256(repr(sorted(RECYCLING_80.paths)).encode()).hexdigest()[:16] == "9a154c9c63b0822c"
    assert algorithms.make("token-recycling").draft.tree == TokenRecycling().tree == RECYCLING_80


def test_recycling_searches_the_matrix_breadth_first():
    draft = TokenRecycling(Fixed.of([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]), k=2, rows=10)
    s = rows([4])
    table = np.full((10, 3), -1, np.int32)
    for token, successors in {4: (5, 6), 5: (7, 4), 7: (4, 9)}.items():
        table[token] = token, *successors
    matrix = table.T.ravel()
    tree = propose(dataclasses.replace(draft, warm=matrix), s, params=Params(None, matrix))
    assert paths(tree) == [(5,), (6,), (5, 7), (5, 4), (5, 7, 4)]         # nothing is known of 6


def matrix_of(draft, table):
    """`i32[1 + k, rows]` of the array that holds it."""
    return np.asarray(table).ravel()[:draft.size].reshape(1 + draft.k, -1)


def test_every_scored_node_overwrites_its_row_and_the_last_of_a_token_counts():
    draft = TokenRecycling(template(2, (0.6, 0.3)), k=2, rows=4)
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(1, 5, 9)), jnp.float32)
    window = SimpleNamespace(tokens=jnp.asarray([[3, 6, 3, 2, 8]]), live=jnp.asarray([[True, True, True, True, False]]))
    out = Out(hidden=logits, entries=(), head=lambda x: x)
    table = draft.observe(NONE, None, window, out, None, draft.init(NONE, rows([1])))
    likely = np.argsort(-np.asarray(logits[0]), -1)[:, :2].tolist()
    # 6 and 2 share row 2 of four; the node of token 8 is dead
    assert matrix_of(draft, table[0]).T.tolist() == [[-1] * 3, [-1] * 3, [2, *likely[3]], [3, *likely[2]]]


@pytest.mark.wide
def test_recycling_equals_a_plain_transcription():
    """The matrix after a whole generation, and with it a warm start."""
    draft = TokenRecycling(SMALL_TREE, k=5, rows=VOCABULARY)
    alg, ids = Speculative(draft), [[3, 7, 3, 7, 2, 5]]
    network, params, policy, s = start(alg, "toy", ids, {}, new=10)
    successors, text = {}, list(ids[0])
    note = lambda text: successors.update({text[-1]: np.argsort(-toys_logits(text), kind="stable")[:5].tolist()})
    for i in range(1, len(text)):
        note(text[:i])
    rounds = 0
    while len(text) < len(ids[0]) + 10:
        rounds += 1
        tree = {(): ()}
        for path in SMALL_TREE.order:
            above = tree.get(path[:-1])
            of = None if above is None else successors.get((text + list(above))[-1])
            if of is not None:
                tree[path] = (*above, of[path[-1]])
        for nodes in list(tree.values()):
            note(text + list(nodes))
        accepted = ()
        while (nxt := (*accepted, int(np.argmax(toys_logits(text + list(accepted)))))) in tree.values():
            accepted = nxt
        text += [*accepted, int(np.argmax(toys_logits(text + list(accepted))))]
    done = drivers.advance(alg, network, params, policy, s, jnp.int32(100))
    assert texts(done)[0] == text[len(ids[0]):][:10]
    assert int(done.stats.rounds[0]) == rounds < 10
    table = np.asarray(done.algo[0][0])
    assert {int(r[0]): r[1:].tolist() for r in matrix_of(draft, table).T if r[0] >= 0} == successors

    warm = draft.init(Params(None, table.ravel()[:draft.size]), rows([4], [5]))
    assert warm.shape == (2, *table.shape) and all((matrix_of(draft, x) == matrix_of(draft, table)).all() for x in warm)


def test_recycling_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="k: got 2, takes at least 8"):
        TokenRecycling(k=2)
    with pytest.raises(ValueError, match="rows: got 0"):
        TokenRecycling(rows=0)
    with pytest.raises(ValueError, match="warm: got an array of shape"):
        TokenRecycling(rows=8, warm=np.zeros(9 * 4))


# --- distributions after n-grams -------------------------------------------------------------------------------------

@functools.partial(jax.jit, static_argnums=0)
def first_logits(draft, s, state):
    """What a source says of the newest token of one row."""
    return draft.start(NONE, s, state, 0)[1].logits[0, 0]


@functools.partial(jax.jit, static_argnums=0)
def learn(draft, s, window, logits, decision):
    """A draft's first state after a scored window with logits of its own making."""
    out = Out(hidden=logits, entries=(), head=lambda x: x)
    return draft.observe(NONE, s, SimpleNamespace(**window), out, decision, draft.init(NONE, s))


def test_the_ngram_model_is_witten_and_bells():
    text, corpus, V = [1, 2, 1, 3, 1, 2], ((2, 1, 0), (1, 2, 2)), 4
    draft = NGramModel(V, order=3, corpus=corpus)
    s = rows(text)
    logits = first_logits(draft, s, None)
    seen = defaultdict(Counter)
    for doc in (*corpus, text):
        for i in range(len(doc)):
            for n in range(3):
                if i >= n:
                    seen[tuple(doc[i - n:i])][doc[i]] += 1
    p = [1 / V] * V
    for context in [(), (2,), (1, 2)]:
        count = seen[context]
        p = [(count[w] + len(count) * p[w]) / (sum(count.values()) + len(count)) for w in range(V)]
    assert np.allclose(np.exp(logits), p, atol=1e-6) and np.isclose(sum(p), 1)


@pytest.mark.wide
def test_stand_averages_the_targets_distributions_after_the_longest_ngram():
    V, text = 6, [1, 2, 3, 1, 2, 4, 2, 1, 2]
    draft = Stand(V, order=2, k=3)
    s = rows(text, size=16)
    logits = jnp.asarray(np.random.default_rng(2).normal(size=(1, 16, V)) * 2, jnp.float32)
    live = jnp.arange(16)[None] < len(text) - 1
    window = dict(positions=jnp.arange(16)[None], live=live)
    state = learn(draft, s, window, logits, None)
    found = first_logits(draft, s, state)
    p = np.asarray(jax.nn.softmax(logits[0]))
    kept = np.where(p >= np.sort(p, -1)[:, -3, None], p, 0)
    assert np.allclose(np.exp(found), (kept[1] + kept[4]) / 2, atol=1e-6)       # "1 2" at places 1 and 4, not "2"
    unknown = rows([5], size=16)
    assert np.allclose(first_logits(draft, unknown, draft.init(NONE, unknown)), 0)


def test_stand_learns_what_was_decided_and_nothing_else():
    draft = Stand(4, order=1, k=2)
    s = rows([1, 2], size=8)
    logits = jnp.asarray(np.random.default_rng(4).normal(size=(1, 4, 4)), jnp.float32)
    window = dict(positions=jnp.asarray([[1, 2, 2, 3]]), live=jnp.ones((1, 4), bool))
    path = Decision(tokens=jnp.asarray([[3, 0, 0]]), count=jnp.asarray([2]), slots=None, algo=None,
                    source=jnp.asarray([[0, 2, 0]]))
    state = learn(draft, s, window, logits, path)
    best = np.argmax(np.asarray(logits[0]), -1)
    assert state.tokens[0, 1, 0] == best[0] and state.tokens[0, 2, 0] == best[2]
    assert (np.asarray(state.chances[0]).sum(-1) > 0).tolist() == [False, True, True] + [False] * 5


# --- ADED ---------------------------------------------------------------------------------------------------------

def test_trigrams_are_counted_and_the_least_counted_is_displaced():
    draft = ADED(k=2, rows=32)
    text = [1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2, 5, 1, 2]
    table = jax.tree.map(lambda x: x[0], first(draft, rows(text)))
    after = jax.jit(lambda table, a, b: table.after(a, b))
    tokens, p = after(table, 1, 2)
    assert dict(zip(tokens.tolist(), p.tolist(), strict=True)) == pytest.approx({3: 2 / 3, 5: 1 / 3})
    assert after(table, 9, 9)[1].tolist() == [0, 0]
    s = rows(text)
    more = observe(draft, s, first(draft, s), [3, 1])
    tokens, p = after(jax.tree.map(lambda x: x[0], more), 1, 2)
    assert dict(zip(tokens.tolist(), p.tolist(), strict=True)) == pytest.approx({3: 3 / 4, 5: 1 / 4})


def search(table, pair, nodes, depth, explore):
    """The tree search in plain Python: paths in the order in which they were added."""
    visits, value, made = defaultdict(int, {(): 1}), defaultdict(float), []
    reach = {(): 1.0}
    successors = lambda path: table.get((*pair, *path)[-2:], {}) if len(path) < depth else {}
    for _ in range(nodes):
        path = ()
        while successors(path):
            def score(token, path=path):
                child = (*path, token)
                q = value[child] / visits[child] if visits[child] else 0
                return q + explore * successors(path)[token] * np.sqrt(visits[path]) / (1 + visits[child])

            child = (*path, max(successors(path), key=score))
            if child not in reach:
                reach[child] = reach[path] * successors(path)[child[-1]]
                made.append(child)
                path = child
                break
            path = child
        for i in range(len(path) + 1):
            visits[path[:i]] += 1
            value[path[:i]] += reach[path]
    return made


@pytest.mark.wide
def test_the_tree_is_that_of_a_puct_search():
    draw = np.random.default_rng(7)
    text = draw.choice(4, 39, p=[0.5, 0.25, 0.15, 0.1]).tolist()
    draft = ADED(nodes=10, depth=3, k=4, rows=509)
    counts = defaultdict(Counter)
    for a, b, c in zip(text, text[1:], text[2:], strict=False):
        counts[a, b][c] += 1
    table = {pair: {t: n / sum(c.values()) for t, n in c.items()} for pair, c in counts.items()}
    drafted = paths(propose(draft, rows(text)))
    assert drafted == search(table, tuple(text[-2:]), 10, 3, draft.explore)
    assert max(map(len, drafted)) > 1 and len({path[0] for path in drafted}) > 1


# --- arguments --------------------------------------------------------------------------------------------------------
