"""Drafts looked up in the text: each one's rule against a plain transcription or by hand."""

import dataclasses
import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax.algorithms.speculative import Speculative
from decodax.algorithms.speculative.drafts.model.callable import UserDraft
from decodax.algorithms.speculative.drafts.text.aggressive_decoding import InputGuided
from decodax.algorithms.speculative.drafts.text.history import best_places, matched, prefix_tree
from decodax.algorithms.speculative.drafts.text.ngram import NGram
from decodax.algorithms.speculative.drafts.text.pain_lookahead import NGramTrie
from decodax.algorithms.speculative.drafts.text.sam_decoding import SuffixAutomaton, suffix_array
from decodax.algorithms.speculative.drafts.text.suffix_decoding import SuffixTree
from decodax.core.types import Params
from tests.algorithms.speculative.drafting import CORPUS, chains, first, observe, paths, periodic, propose, rows
from tests.laws import cases
from tests.laws.cases import VOCABULARY, decode, texts
from tests.laws.toy import Toy

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
    draft = SuffixAutomaton(length=4, factor=9.0, len_bias=0, longest=6, corpus=corpus)
    given = [draw.integers(0, 4, n).tolist() for n in range(1, 13)]
    for text, drafted in zip(given, chains(propose(draft, rows(*given))), strict=True):
        own, after = longest(text)
        there, options = in_corpus(text, corpus, min(len(text), 6))
        assert drafted in ([after[:4]] if own >= there else [x[:4] for x in options])


@pytest.mark.wide
def test_the_texts_own_match_wins_unless_the_corpus_has_a_longer_one_by_the_bias():
    text = [1, 2, 3, 9, 2, 3]             # "2 3" in the text, "9 2 3" in the corpus
    corpus = ((5, 9, 2, 3, 4, 4),)
    assert chains(propose(SuffixAutomaton(corpus=corpus, len_bias=0), rows(text))) == [[4, 4]]
    assert chains(propose(SuffixAutomaton(corpus=corpus, len_bias=1), rows(text))) == [[9, 2, 3]]


@pytest.mark.wide
def test_a_corpus_is_the_same_as_data_and_as_constant():
    draft = SuffixAutomaton(corpus=CORPUS, len_bias=0)
    bare = draft.bare()
    assert bare.corpus == () and bare == SuffixAutomaton(len_bias=0)
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
    draft = NGramTrie(decoding_length=9, branch_length=3, suffix=4)
    given = [draw.integers(0, 3, n).tolist() for n in (1, 2, 5, 9, 14, 20, 26, 32)]
    tree = propose(draft, rows(*given))
    for i, text in enumerate(given):
        wanted, drafted = retrieve(text, 9, 3, 4), paths(tree, i)
        assert len(drafted) == min(9, len(wanted)) and set(drafted) <= set(wanted)
        weights = [wanted[path] for path in drafted]
        assert weights == sorted(wanted.values(), reverse=True)[:9]


def test_a_longer_suffix_with_too_few_nodes_yields_to_a_shorter():
    # "1 2" was followed by 5 alone at the text's end of a sample; "2" by more
    draft = NGramTrie(decoding_length=4, branch_length=3, corpus=((1, 2, 5), (8, 2, 6, 6), (2, 6, 3)))
    assert paths(propose(draft, rows([1, 2])))[0] == (6,)
    assert paths(propose(dataclasses.replace(draft, branch_length=1), rows([1, 2]))) == [(5,)]


# --- suffix tree --------------------------------------------------------------------------------------------------

def speculate(text, documents, alpha, pattern, nodes, branch):
    """SuffixDecoding in plain Python: for each pattern its score, D of all nodes, and how many a tree may have."""
    for p in range(1, min(pattern, len(text)) + 1):
        count = Counter()
        for doc in documents:
            for end in range(p, len(doc)):
                if doc[end - p:end] == text[-p:]:
                    count.update(tuple(doc[end:j]) for j in range(end + 1, min(end + branch, len(doc)) + 1))
        children = Counter()
        for path in count:
            children[path[:-1]] += count[path]
        D = {(): 1.0}
        for path in sorted(count, key=len):
            D[path] = D[path[:-1]] * count[path] / children[path[:-1]]
        del D[()]
        most = max(min(int(alpha * p), nodes), 1)
        yield sum(sorted(D.values(), reverse=True)[:most]), D, most


@pytest.mark.wide(but=("corpus0",))
@pytest.mark.parametrize("corpus", [(), ((0, 1, 2, 0, 2, 1, 1, 0, 2, 2), (2, 1, 0, 0, 1))])
def test_the_suffix_tree_drafts_the_likeliest_continuations_of_the_best_pattern(corpus):
    draw = np.random.default_rng(2)
    draft = SuffixTree(alpha=1.5, pattern=5, nodes=6, branch=4, places=40, corpus=corpus)
    given = [draw.integers(0, 3, n).tolist() for n in (1, 2, 5, 9, 14, 20, 26, 32)]
    tree = propose(draft, rows(*given))
    for i, text in enumerate(given):
        found = [x for docs in ([text], [list(doc) for doc in corpus]) for x in speculate(text, docs, 1.5, 5, 6, 4)]
        best, drafted = max(x[0] for x in found), paths(tree, i)
        score = lambda D, drafted=drafted: sum(D.get(path, -9) for path in drafted)
        assert any(np.isclose(score(D), best) and len(drafted) == min(most, len(D)) for _, D, most in found)


def test_a_suffix_trees_chances_are_frequencies_among_siblings():
    # after "1": 2, 2 and 3; after "1 2": 4, and once the text ends there
    draft = SuffixTree(alpha=4, pattern=1, nodes=4, branch=2, corpus=((1, 2, 4), (1, 2), (1, 3)))
    assert paths(propose(draft, rows([1]))) == [(2,), (2, 4), (3,)]       # 2/3, then 2/3 * 1, then 1/3


# --- input-guided -------------------------------------------------------------------------------------------------

def test_the_copy_resumes_after_a_unique_match():
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


@pytest.mark.wide
def test_an_output_that_copies_its_input_takes_one_round(monkeypatch):
    """The target counts up from its newest token: 5 6 7 8 9 again, then 10."""
    eye = jnp.eye(VOCABULARY)
    weights = dict(embed=eye, mix=0 * eye, place=jnp.zeros((64, VOCABULARY)), head=jnp.roll(eye, 1, 1) * 50)
    monkeypatch.setattr(cases, "model", lambda which: (Toy(VOCABULARY, VOCABULARY), weights))
    s = decode(Speculative(InputGuided(length=6, skip=1)), "counts up", [[0, 5, 6, 7, 8, 9, 4]], {}, new=6)
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


# --- arguments --------------------------------------------------------------------------------------------------------
