"""Drafts from text and tables: each one's rule against a plain transcription or by hand, and exact with policies."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter, defaultdict
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax.autoregressive import Autoregressive
from decodax.cache import causal
from decodax.core import drivers
from decodax.core.types import Decision, Out, Params
from decodax.speculative import MultiRound, Proposal, Rejection, Speculative
from decodax.speculative.drafts.aded import ADED
from decodax.speculative.drafts.callable import UserDraft
from decodax.speculative.drafts.input_guided import InputGuided
from decodax.speculative.drafts.ngram import NGram, NGramModel
from decodax.speculative.drafts.recycling import SMALL_TREE, TREE, TokenRecycling, template
from decodax.speculative.drafts.stand import Stand
from decodax.speculative.drafts.suffix import SuffixAutomaton, suffix_array
from decodax.speculative.drafts.text import best_places, matched, prefix_tree
from decodax.speculative.drafts.trie import Trie
from decodax.speculative.shapes import Chain, Fixed
from tests.laws import cases
from tests.laws.cases import POLICIES, VOCABULARY, decode, prompts, start, texts
from tests.laws.toy import Toy

NONE = Params(None)


def periodic(tokens, length):
    """Drafts what stood four tokens before the end."""
    index = jnp.maximum(length[:, None] - 4 + jnp.arange(3), 0)
    return jnp.take_along_axis(tokens, index, 1), jnp.minimum(length - 1, 3)


CORPUS = ((3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5), (8, 9, 7, 9, 3, 2, 3, 8, 4, 6))
DRAFTS = {
    "recycling": Speculative(TokenRecycling(SMALL_TREE, rows=16)),
    "suffix": Speculative(SuffixAutomaton(length=6, corpus=CORPUS, bias=1)),
    "trie": Speculative(Trie(nodes=12, branch=4, corpus=CORPUS)),
    "input": Speculative(InputGuided(length=6, skip=1)),
    "user": Speculative(UserDraft(periodic, 3)),
    "ngram": Speculative(NGram(length=4, corpus=CORPUS)),
    "ngram-model": Speculative(NGramModel(VOCABULARY, order=3), shape=Fixed.balanced(2, 2)),
    "stand": Speculative(Stand(VOCABULARY, k=6), shape=Fixed.balanced(2, 2)),
    "aded": Speculative(ADED(nodes=8, depth=3, rows=64)),
}


@dataclasses.dataclass(frozen=True)
class SideBySide:
    """All drafts under one newest token: one program for all of them."""

    drafts: tuple
    weights = None

    @property
    def length(self):
        return max(d.length for d in self.drafts)

    def bare(self):
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

    def observe(self, s, window, out, decision, state):
        return tuple(d.observe(s, window, out, decision, x) for d, x in zip(self.drafts, state, strict=True))


def test_output_is_that_of_plain_sampling():
    ids, policy = prompts(6), POLICIES["together"]
    plain = decode(Autoregressive(), "llama", ids, policy, eos=[1])
    s = decode(Speculative(SideBySide(tuple(alg.drafter for alg in DRAFTS.values()))), "llama", ids, policy, eos=[1])
    assert texts(s) == texts(plain)
    assert (np.asarray(s.stats.accepted) > 0).all()


@pytest.mark.parametrize("alg", [Speculative(Stand(VOCABULARY, k=6), MultiRound(), Fixed.balanced(2, 2)),
                                 Speculative(NGramModel(VOCABULARY, order=3), Rejection(), Chain(3))])
def test_a_sources_q_goes_with_the_verifiers_that_need_it(alg):
    s = decode(alg, "toy", prompts(6), POLICIES["sampled"])
    assert [len(row) for row in texts(s)] == [12] * 6
    assert 0 < np.asarray(s.stats.accepted).sum() < np.asarray(s.stats.drafted).sum()


def rows(*given, size=40, prompt=None):
    """What drafts read of a state: rows of ids."""
    tokens = np.full((len(given), size), 7, np.int32)           # what stands behind a row is not read
    for row, ids in zip(tokens, given, strict=True):
        row[:len(ids)] = ids
    length = jnp.asarray([len(ids) for ids in given], jnp.int32)
    newest = jnp.asarray([ids[-1] for ids in given], jnp.int32)
    return SimpleNamespace(tokens=jnp.asarray(tokens), length=length, newest=newest, batch=len(given),
                           running=jnp.ones(len(given), bool),
                           prompt_length=length if prompt is None else jnp.asarray(prompt, jnp.int32))


@functools.partial(jax.jit, static_argnums=0)
def _propose(draft, params, s, state):
    s = SimpleNamespace(**s, batch=len(s["length"]))
    return draft.propose(params, None, s, draft.init(params, s) if state is None else state, "coupled")[0]


def propose(draft, s, state=None, params=NONE):
    """A draft's proposal from a state, by default its first."""
    return _propose(draft, params, {k: v for k, v in vars(s).items() if k != "batch"}, state)


@functools.partial(jax.jit, static_argnums=(0, 2))
def _first(draft, s, batch):
    return draft.init(NONE, SimpleNamespace(**s, batch=batch))


def first(draft, s):
    """A draft's first state."""
    return _first(draft, {k: v for k, v in vars(s).items() if k != "batch"}, s.batch)


@functools.partial(jax.jit, static_argnums=0)
def _observe(draft, s, state, tokens, count):
    return draft.observe(SimpleNamespace(**s), None, None, SimpleNamespace(tokens=tokens, count=count), state)


def observe(draft, s, state, tokens, count=None, most=4):
    """A draft's state after one row's decided tokens."""
    padded = np.resize(np.asarray(tokens, np.int32), most)[None]
    return _observe(draft, {k: v for k, v in vars(s).items() if k != "batch"}, state, padded,
                    np.array([len(tokens) if count is None else count], np.int32))


def chains(proposal):
    return [row[:n].tolist() for row, n in zip(np.asarray(proposal.tokens), np.asarray(proposal.count), strict=True)]


def paths(proposal, row=0):
    """The drafts of a row as paths of tokens, in window order."""
    found = {0: ()}
    parents = np.broadcast_to(proposal.parents, proposal.tokens.shape)[row]
    for i, (token, live, above) in enumerate(zip(proposal.tokens[row], proposal.live[row], parents, strict=True)):
        if live:
            assert above <= i
            found[i + 1] = (*found[int(above)], int(token))
    return list(found.values())[1:]


# --- text ---------------------------------------------------------------------------------------------------------

def test_places_are_ordered_by_match_then_by_recency():
    history = jnp.array([1, 2, 3, 9, 2, 3, 8, 3, 7, 1, 2, 3, -1])
    length = jax.jit(matched)(history, jnp.array([1, 2, 3]))
    assert length.tolist() == [0, 0, 3, 0, 0, 2, 0, 1, 0, 0, 0, 0, 0]
    places, match = best_places(length, 4)
    assert places.tolist()[:3] == [2, 5, 7] and match.tolist() == [3, 2, 1, 0]


def test_the_prefix_tree_holds_the_heaviest_prefixes():
    several = jnp.array([[[1, 2, 3], [1, 2, 4], [5, 6, -1], [1, 9, 9], [8, 8, 8]]])
    tree = jax.jit(prefix_tree, static_argnums=2)(several, jnp.array([[1, 1, 4, 1, 0]]), 6)
    assert paths(tree) == [(5,), (5, 6), (1,), (1, 2), (1, 9), (1, 2, 3)]


def test_a_prefix_tree_may_be_larger_than_its_paths():
    tree = jax.jit(prefix_tree, static_argnums=2)(jnp.array([[[1, 2], [1, -1]]]), jnp.ones((1, 2), jnp.int32), 7)
    assert paths(tree) == [(1,), (1, 2)] and tree.tokens.shape == (1, 7)


# --- Token Recycling ----------------------------------------------------------------------------------------------

def test_the_template_is_imbalanced_and_has_eighty_nodes():
    sizes = Counter(map(len, TREE.paths))
    assert len(TREE.paths) == 80 and sizes[1] == 8 and max(sizes) == 6
    children = Counter(path[:-1] for path in TREE.paths)
    assert children[(0,)] > children[(1,)] > children[(4,)]


def test_recycling_searches_the_matrix_breadth_first():
    draft = TokenRecycling(Fixed.of([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]), k=2, rows=10)
    s = rows([4])
    table = np.full((10, 3), -1, np.int32)
    for token, successors in {4: (5, 6), 5: (7, 4), 7: (4, 9)}.items():
        table[token] = token, *successors
    tree = propose(dataclasses.replace(draft, warm=table), s, params=Params(None, table))
    assert paths(tree) == [(5,), (6,), (5, 7), (5, 4), (5, 7, 4)]         # nothing is known of 6


def test_every_scored_node_overwrites_its_row_and_the_last_of_a_token_counts():
    draft = TokenRecycling(template(2, (0.6, 0.3)), k=2, rows=4)
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(1, 5, 9)), jnp.float32)
    window = SimpleNamespace(tokens=jnp.asarray([[3, 6, 3, 2, 8]]), live=jnp.asarray([[True, True, True, True, False]]))
    out = Out(hidden=logits, kv=(), head=lambda x: x)
    table = draft.observe(None, window, out, None, draft.init(NONE, rows([1])))
    likely = np.argsort(-np.asarray(logits[0]), -1)[:, :2].tolist()
    # 6 and 2 share row 2 of four; the node of token 8 is dead
    assert table[0].tolist() == [[-1] * 3, [-1] * 3, [2, *likely[3]], [3, *likely[2]]]


def test_recycling_equals_a_plain_transcription():
    """The matrix after a whole generation, and with it a warm start."""
    draft = TokenRecycling(SMALL_TREE, k=5, rows=VOCABULARY)
    alg, ids = Speculative(draft), [[3, 7, 3, 7, 2, 5]]
    network, params, policy, s = start(alg, "toy", ids, {}, new=10)

    @jax.jit
    def scored(padded):
        window = causal(padded[None], jnp.zeros(1, jnp.int32))
        return network.apply(params.target, window, network.init_cache(1, 0)).logits()[0]

    @functools.cache
    def known(text):
        return np.asarray(scored(np.pad(np.array(text, np.int32), (0, 32 - len(text)))))[len(text) - 1]

    def logits(text):
        return known(tuple(text))


    successors, text = {}, list(ids[0])
    note = lambda text: successors.update({text[-1]: np.argsort(-logits(text), kind="stable")[:5].tolist()})
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
        while (nxt := (*accepted, int(np.argmax(logits(text + list(accepted)))))) in tree.values():
            accepted = nxt
        text += [*accepted, int(np.argmax(logits(text + list(accepted))))]
    done = drivers.advance(alg, network, params, policy, s, jnp.int32(100))
    assert texts(done)[0] == text[len(ids[0]):][:10]
    assert int(done.stats.rounds[0]) == rounds < 10
    table = np.asarray(done.algo[0][0])
    assert {int(r[0]): r[1:].tolist() for r in table if r[0] >= 0} == successors

    warm = draft.init(Params(None, table), rows([4], [5]))
    assert warm.shape == (2, *table.shape) and (np.asarray(warm) == table).all()


def test_recycling_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="k: got 2, takes at least 8"):
        TokenRecycling(k=2)
    with pytest.raises(ValueError, match="rows: got 0"):
        TokenRecycling(rows=0)
    with pytest.raises(ValueError, match="warm: got an array of shape"):
        TokenRecycling(rows=8, warm=np.zeros((4, 9)))


# --- suffixes -----------------------------------------------------------------------------------------------------

def longest(text, corpus=()):
    """The longest suffix of `text` that occurs before, and what follows its first occurrence; likewise for a corpus."""
    for n in range(len(text) - 1, 0, -1):
        for i in range(len(text) - n):
            if text[i:i + n] == text[-n:]:
                return n, text[i + n:]
    return 0, []


def in_corpus(text, corpus, most):
    found = [(n, doc[i + n:]) for doc in map(list, corpus) for n in range(1, most + 1) for i in range(len(doc) - n)
             if doc[i:i + n] == text[-n:]]
    best = max((n for n, _ in found), default=0)
    return best, [after for n, after in found if n == best]


def test_the_suffix_match_is_the_longest_of_any_length_after_each_token():
    draw = np.random.default_rng(3)
    draft = SuffixAutomaton(length=5, factor=2.0)
    text = draw.integers(0, 3, 9).tolist()
    state = first(draft, rows(text))
    for _ in range(9):
        n, after = longest(text)
        assert chains(propose(draft, rows(text), state)) == [after[:min(5, 2 * n)]]
        new = draw.integers(0, 3, int(draw.integers(1, 5))).tolist()
        state = observe(draft, rows(text), state, new)
        text += new
        again = first(draft, rows(text))[0, :len(text) - 1]
        assert state[0, :len(text) - 1].tolist() == again.tolist()


def test_the_corpus_search_finds_the_longest_match():
    draw = np.random.default_rng(5)
    corpus = tuple(tuple(draw.integers(0, 4, n).tolist()) for n in (30, 2, 17, 1))
    draft = SuffixAutomaton(length=4, factor=9.0, bias=0, longest=6, corpus=corpus)
    given = [draw.integers(0, 4, n).tolist() for n in range(1, 13)]
    for text, drafted in zip(given, chains(propose(draft, rows(*given))), strict=True):
        own, after = longest(text)
        there, options = in_corpus(text, corpus, min(len(text), 6))
        assert drafted in ([after[:4]] if own >= there else [x[:4] for x in options])


def test_the_texts_own_match_wins_unless_the_corpus_has_a_longer_one_by_the_bias():
    text = [1, 2, 3, 9, 2, 3]             # "2 3" in the text, "9 2 3" in the corpus
    corpus = ((5, 9, 2, 3, 4, 4),)
    assert chains(propose(SuffixAutomaton(corpus=corpus, bias=0), rows(text))) == [[4, 4]]
    assert chains(propose(SuffixAutomaton(corpus=corpus, bias=1), rows(text))) == [[9, 2, 3]]


def test_a_corpus_is_the_same_as_data_and_as_constant():
    draft = SuffixAutomaton(corpus=CORPUS, bias=0)
    bare = draft.bare()
    assert bare.corpus == () and bare == SuffixAutomaton(bias=0)
    s = rows([8, 9, 7])
    params = Params(None, draft.weights)
    assert chains(propose(bare, s, params=params)) == chains(propose(draft, s)) == [[9, 3, 2, 3, 8, 4, 6]]
    assert chains(propose(bare, s)) == [[]]


def test_a_suffix_array_sorts_the_suffixes():
    text = np.random.default_rng(0).integers(0, 3, 60)
    assert suffix_array(text).tolist() == sorted(range(60), key=lambda i: text[i:].tolist())


# --- trie ---------------------------------------------------------------------------------------------------------

def retrieve(text, nodes, branch, most):
    """PAIN: a trie of all n-grams, descended from the last tokens, the longest suffix first."""
    found = {}
    for n in range(min(most, len(text) - 1), 0, -1):
        count = Counter()
        for end in range(n, len(text)):
            if text[end - n:end] == text[-n:]:
                count.update(tuple(text[end:j]) for j in range(end + 1, min(end + branch, len(text)) + 1))
        found = count or found
        if len(count) >= branch:
            break
    return found


def test_the_trie_retrieves_the_most_frequent_branches_of_the_first_suffix_with_enough():
    draw = np.random.default_rng(1)
    draft = Trie(nodes=9, branch=3, suffix=4)
    given = [draw.integers(0, 3, n).tolist() for n in (1, 2, 5, 9, 14, 20, 26, 32)]
    tree = propose(draft, rows(*given))
    for i, text in enumerate(given):
        wanted, drafted = retrieve(text, 9, 3, 4), paths(tree, i)
        assert len(drafted) == min(9, len(wanted)) and set(drafted) <= set(wanted)
        weights = [wanted[path] for path in drafted]
        assert weights == sorted(wanted.values(), reverse=True)[:9]


def test_a_longer_suffix_with_too_few_nodes_yields_to_a_shorter():
    # "1 2" was followed by 5 alone at the text's end of a sample; "2" by more
    draft = Trie(nodes=4, branch=2, corpus=((1, 2, 5), (8, 2, 6, 6), (2, 6, 3)))
    assert paths(propose(draft, rows([1, 2])))[0] == (6,)
    assert paths(propose(dataclasses.replace(draft, branch=1), rows([1, 2]))) == [(5,)]


# --- input-guided -------------------------------------------------------------------------------------------------

def test_the_copy_resumes_behind_a_unique_match():
    draft = InputGuided(length=3)
    prompt = [1, 2, 3, 1, 2, 4, 5, 6]
    s = rows(prompt)
    state = first(draft, s)
    copies = []
    for token in [1, 2, 9, 2, 4, 1, 2, 3, 5]:
        copies.append(chains(propose(draft, s, state))[0])
        state = observe(draft, s, state, [token])
    copies.append(chains(propose(draft, s, state))[0])
    assert copies == [
        [1, 2, 3], [2, 3, 1], [3, 1, 2],      # from the beginning
        [],                                   # 9 is not in the input
        [],                                   # 2 stands there twice
        [5, 6],                               # 2 4 once
        [],                                   # 1 instead of 5; twice there
        [],                                   # 1 2: still twice
        [1, 2, 4],                            # 1 2 3 once
        [6],                                  # 5 instead of 1, and there is one 5
    ]


def test_an_output_that_copies_its_input_takes_one_round(monkeypatch):
    """The target counts up from its newest token: 5 6 7 8 9 again, then 10."""
    eye = jnp.eye(VOCABULARY)
    weights = dict(embed=eye, mix=0 * eye, place=jnp.zeros((64, VOCABULARY)), head=jnp.roll(eye, 1, 1) * 50)
    monkeypatch.setattr(cases, "model", lambda which: (Toy(VOCABULARY, VOCABULARY), weights))
    s = decode(DRAFTS["input"], "counts up", [[0, 5, 6, 7, 8, 9, 4]], {}, new=6)
    assert texts(s) == [[5, 6, 7, 8, 9, 10]] and s.stats.rounds.tolist() == [1] and s.stats.accepted.tolist() == [5]


def test_a_copy_stays_inside_the_input_and_several_tokens_count_as_one_after_another():
    draft = InputGuided(length=4, skip=2, leave=1)
    s = rows([8, 8, 1, 2, 3, 9])
    state = first(draft, s)
    assert chains(propose(draft, s, state)) == [[1, 2, 3]]
    one = observe(draft, s, state, [1, 5, 2])
    assert chains(propose(draft, s, one)) == [[3]]
    each = state
    for token in (1, 5, 2):
        each = observe(draft, s, each, [token])
    assert (one.match == each.match).all() and one.at == each.at
    assert chains(propose(draft, s, observe(draft, s, state, [1, 2, 3, 8]))) == [[]]


# --- a user's function --------------------------------------------------------------------------------------------

def test_a_users_function_drafts():
    fn = lambda tokens, length: (jnp.stack([tokens[:, 0], tokens[:, 1], length * 0 - 1], 1), length)
    assert chains(propose(UserDraft(fn, 3), rows([4, 5, 6], [7]))) == [[4, 5], [7]]


@pytest.mark.parametrize(("fn", "message"), [
    (lambda tokens, length: tokens, "a pair"),
    (lambda tokens, length: (tokens[:, :3], length), r"drafts int32\[1, 3\], takes int32\[1, 2\]"),
    (lambda tokens, length: (tokens[:, :2] * 1.0, length), "drafts float32"),
    (lambda tokens, length: (tokens[:, :2], length[:, None]), r"count int32\[1, 1\], takes int32\[1\]"),
])
def test_a_users_function_of_the_wrong_form_is_named(fn, message):
    with pytest.raises(ValueError, match=f"fn: returned .*{message}"):
        propose(UserDraft(fn, 2), rows([1, 2]))


def test_a_user_draft_takes_a_hashable_function():
    for fn in (3, functools.partial(periodic, [])):
        if callable(fn):
            assert UserDraft(fn, 2)         # a partial object hashes by identity
        else:
            with pytest.raises(ValueError, match="fn: got int"):
                UserDraft(fn, 2)
    with pytest.raises(ValueError, match="length: got 0"):
        UserDraft(periodic, 0)


# --- n-grams ------------------------------------------------------------------------------------------------------

def test_ngrams_follow_the_longest_context_and_the_most_frequent_token():
    text = [1, 2, 5, 1, 2, 6, 1, 2, 5, 3, 2, 7, 1, 2]
    assert chains(propose(NGram(length=3, order=3), rows(text))) == [[5, 3, 2]]     # "1 2": 5 twice, 6 once; "2 5": 3
    assert chains(propose(NGram(length=1, order=2), rows(text))) == [[5]]
    assert chains(propose(NGram(length=2, order=3), rows([1, 2, 3]))) == [[]]


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


# --- STAND --------------------------------------------------------------------------------------------------------

@functools.partial(jax.jit, static_argnums=0)
def _first_logits(draft, s, state):
    return draft.start(NONE, SimpleNamespace(**s, batch=1), state, 0)[1][0, 0]


def first_logits(draft, s, state):
    """What a source says of the newest token of one row."""
    return _first_logits(draft, {k: v for k, v in vars(s).items() if k != "batch"}, state)


@functools.partial(jax.jit, static_argnums=0)
def _learn(draft, s, window, logits, decision):
    s = SimpleNamespace(**s)
    out = Out(hidden=logits, kv=(), head=lambda x: x)
    return draft.observe(s, SimpleNamespace(**window), out, decision, draft.init(NONE, s))


def learn(draft, s, window, logits, decision):
    """A draft's first state after a scored window with logits of its own making."""
    return _learn(draft, {k: v for k, v in vars(s).items() if k != "batch"}, vars(window), logits, decision)


def test_stand_averages_the_targets_distributions_behind_the_longest_ngram():
    V, text = 6, [1, 2, 3, 1, 2, 4, 2, 1, 2]
    draft = Stand(V, order=2, k=3)
    s = rows(text, size=16)
    logits = jnp.asarray(np.random.default_rng(2).normal(size=(1, 16, V)) * 2, jnp.float32)
    live = jnp.arange(16)[None] < len(text) - 1
    window = SimpleNamespace(positions=jnp.arange(16)[None], live=live)
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
    window = SimpleNamespace(positions=jnp.asarray([[1, 2, 2, 3]]), live=jnp.ones((1, 4), bool))
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


# --- all of them --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("make", "message"), [
    (lambda: SuffixAutomaton(length=0), "length: got 0, takes at least 1"),
    (lambda: SuffixAutomaton(factor=0.0), "factor: got 0.0, takes more than 0"),
    (lambda: SuffixAutomaton(corpus=((1,),)), "corpus: got documents of one token"),
    (lambda: Trie(corpus=((1, -2),)), "corpus: document 0"),
    (lambda: Trie(branch=0), "branch: got 0"),
    (lambda: NGram(order=1), "order: got 1, takes at least 2"),
    (lambda: NGramModel(0), "vocab: got 0"),
    (lambda: Stand(4, k=5), "k: got 5, takes at most 4"),
    (lambda: ADED(explore=-1.0), "explore: got -1.0"),
    (lambda: InputGuided(skip=-1), "skip: got -1, takes at least 0"),
])
def test_arguments_that_make_no_sense_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
