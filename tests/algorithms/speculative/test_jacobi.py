"""Jacobi, SJD, FastCoT and lookahead decoding: exact, and the papers' iterations step by step."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax.algorithms.plain import Autoregressive
from decodax.algorithms.speculative import Cut, Rejection, Speculative
from decodax.algorithms.speculative.drafts.jacobi.fastcot import FastCoT
from decodax.algorithms.speculative.drafts.jacobi.jacobi import PGJ, Jacobi
from decodax.algorithms.speculative.drafts.jacobi.lookahead import Lookahead, guesses, insert, layout
from decodax.algorithms.speculative.drafts.jacobi.sjd import SJD
from decodax.algorithms.speculative.drafts.jacobi.tr_jacobi import TRJacobi
from decodax.algorithms.speculative.fixed_trees import Fixed
from decodax.algorithms.speculative.tree import tree, window
from decodax.core import drivers
from decodax.core.types import Decision
from decodax.core.window import Window, causal
from tests.contracts.verifying import POLICIES as LAW_POLICIES
from tests.contracts.verifying import PROMPT, chi_square, joint
from tests.laws.cases import POLICIES, VOCABULARY, decode, model, prompts, start, texts
from tests.matrix import often

NEW = 12
IDS = prompts(5, seed=3)
PAD = 0


@functools.cache
def plain(which: str, policy: str) -> list[list[int]]:
    return texts(decode(Autoregressive(), which, IDS, POLICIES[policy], new=NEW, eos=[1]))


@functools.cache
def drawer(policy: str, which: str = "toy"):
    """What plain decoding draws after every token of a text, given all tokens before: by a full forward, no cache."""
    network, _, chain, s = start(Autoregressive(), which, IDS, POLICIES[policy], new=NEW)
    weights = model(which)[1]

    @jax.jit
    def draws(row, tokens):
        one = jax.tree.map(lambda x: x[row][None], s.replace(cache=None, tokens=s.tokens * 0, length=s.length * 0))
        mine = jax.tree.map(lambda x: x[row][None], chain)
        window = causal(tokens[None], jnp.zeros(1, jnp.int32))
        return mine.over(one, window, network.apply(weights, window, network.init_cache(1, 0))).draw()[0]

    def padded(row, tokens):
        full = np.zeros(64, np.int32)
        full[:len(tokens)] = tokens
        return np.asarray(draws(row, full))[:len(tokens)]
    return padded


def transcription(policy: str, row: int, blocks: list[int]) -> tuple[list[int], int]:
    """PJ and PGJ as in the paper: each block from PAD until an iteration changes none of its inputs.

    Returns the text and the number of iterations.
    """
    text, iterations = list(IDS[row]), 0
    for size in blocks:
        guesses = [PAD] * (size - 1)
        for _ in range(size):
            drawn = drawer(policy)(row, text + guesses)[len(text) - 1:]
            iterations += 1
            settled = guesses == drawn[:-1].tolist()
            guesses = drawn[:-1].tolist()
            if settled:
                break
        text += drawn.tolist()
    return text[len(IDS[row]):], iterations


@pytest.mark.wide
@pytest.mark.parametrize(("draft", "blocks", "policy"), [
    (PGJ(NEW, fill=PAD), [NEW], "greedy"), (PGJ(NEW, fill=PAD), [NEW], "sampled"),
    pytest.param(PGJ(4, fill=PAD), [4, 4, 4], "greedy", marks=pytest.mark.full),
    (PGJ(4, fill=PAD), [4, 4, 4], "penalised"), (PGJ(4, PAD, 6), [4, 2, *[1] * 6], "sampled")])
def test_blocks_take_the_papers_iterations(draft, blocks, policy):
    s = decode(Speculative(draft), "toy", IDS, POLICIES[policy], new=NEW)
    wanted = [transcription(policy, row, blocks) for row in range(len(IDS))]
    assert texts(s) == [text for text, _ in wanted]
    assert s.stats.rounds.tolist() == [iterations for _, iterations in wanted]
    assert max(s.stats.rounds.tolist()) <= NEW and min(s.stats.rounds.tolist()) < NEW


DRAFTS = [(Jacobi(5, fill="text"), "toy", "stateful"), (FastCoT(((0, 2), (3, 5), (8, 0))), "toy", "stateful"),
          (SJD(VOCABULARY, 4, top=5), "toy", "together"), (Lookahead(3, 3, 2, buckets=8), "llama", "together"),
          (TRJacobi(Fixed.balanced(3, 2, 1), 4, 2), "llama", "together")]


@pytest.mark.wide
@pytest.mark.parametrize(("draft", "which", "policy"), often(DRAFTS[:1], DRAFTS))
def test_drafts_equal_plain_decoding(draft, which, policy):
    s = decode(Speculative(draft), which, IDS, POLICIES[policy], new=NEW, eos=[1])
    assert texts(s) == plain(which, policy)
    assert 0 < s.stats.accepted.sum() < s.stats.drafted.sum()


def agreed(text: list[int], most: int) -> tuple[int, int]:
    """Returns the length of the longest n-gram at the end that occurs earlier too, at most `most`, and its place."""
    for size in range(most, 0, -1):
        for at in range(size - 1, len(text) - 1):
            if text[at + 1 - size:at + 1] == text[-size:]:
                return size, at
    return 0, 0


@pytest.mark.wide
def test_tr_jacobi_guesses_after_rejected_nodes_and_retrieves_beside_them():
    """Each round against a full forward over the text, the accepted tokens and the rejected nodes after them."""
    draft = TRJacobi(Fixed.of([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]), retrieved=3, ngram=2)
    alg, order = Speculative(draft), draft.form.order
    network, params, chain, s = start(alg, "llama", IDS, {}, new=NEW)
    propose = jax.jit(lambda s: draft.propose(params, chain, s, s.algo[0], "coupled")[0])
    forward = jax.jit(lambda tokens: network.apply(
        params.target, causal(tokens[None], jnp.zeros(1, jnp.int32)), network.init_cache(1, 0)).logits()[0])
    checked = 0
    for _ in range(6):
        drafts, held, old = propose(s), np.array(s.algo[0]), texts(s)
        s = drivers.advance(alg, network, params, chain, s, jnp.int32(1))
        for row in np.flatnonzero(s.running):
            text, got = IDS[row] + old[row], texts(s)[row][len(old[row]):]
            node = {path: int(token) for path, token, live in zip(
                order, drafts.tokens[row], drafts.live[row], strict=True) if live}
            assert all(node[path] == held[row, len(path) - 1, path[-1]] for path in node
                       if path[0] < 3 and held[row, len(path) - 1, path[-1]] >= 0)
            size, at = agreed(text, 2)
            after = text[at + 1:at + 4] if size else []
            assert [node[path] for i in range(3) if (path := (3, *[0] * i)) in node] == after
            end = next(path for path in [(), *node]
                       if [node[path[:i + 1]] for i in range(len(path))] == got[:-1])
            after = [path for i in range(3) if (path := (*end, *[0] * (i + 1))) in node]
            whole = [*text, *got[:-1], *map(node.get, after)]
            found = np.asarray(forward(jnp.asarray(np.resize([*whole, *[0] * 64], 64), jnp.int32)))
            wanted = [np.argsort(-found[len(text) + len(got) - 1 + i], stable=True)[:3].tolist()
                      for i in range(len(after))]
            assert np.asarray(s.algo[0])[row].tolist() == wanted + [[-1] * 3] * (3 - len(after))
            checked += len(after)
    assert checked > 20


def test_a_schedule_sets_the_window_by_position():
    made = jnp.array([0, 1, 2, 5, 9])
    s = SimpleNamespace(length=7 + made, prompt_length=jnp.full(5, 7))
    assert FastCoT(((0, 2), (2, 3), (5, 0))).width(s).tolist() == [2, 2, 3, 0, 0]


@pytest.mark.wide
def test_a_rationale_is_cut_where_it_is_and_the_answer_follows_the_trigger():
    """Exact up to the cut, then what the window held, the trigger, and plain decoding of the text as it stands."""
    alg = Speculative(FastCoT(((0, 4),), cut=3, trigger=(7, 8)), Cut(3))
    network, params, chain, s = start(alg, "toy", IDS, POLICIES["sampled"], new=20)
    s = drivers.advance(alg, network, params, chain, s, jnp.int32(3))
    exact, held, length = texts(s), np.asarray(s.algo[0].tokens), np.asarray(s.length)
    s = drivers.advance(alg, network, params, chain, s, jnp.int32(100))
    assert alg.traits.guarantee == "approximate" and set(np.asarray(s.length - s.prompt_length)) == {20}
    cuts, long = [], texts(decode(Autoregressive(), "toy", IDS, POLICIES["sampled"], new=20))
    for row, text in enumerate(texts(s)):
        assert exact[row] == long[row][:len(exact[row])]
        known = [x for x in held[row] if x >= 0]
        cuts.append([*IDS[row], *exact[row], *known, 7, 8])
        assert text[:len(cuts[-1]) - len(IDS[row])] == cuts[-1][len(IDS[row]):]
    assert any(len(c) > n + 2 for c, n in zip(cuts, length, strict=True))
    again = texts(decode(Autoregressive(), "toy", cuts, POLICIES["sampled"], new=8))
    for row, text in enumerate(texts(s)):
        left = text[len(cuts[row]) - len(IDS[row]):]
        assert left[:8] == again[row][:len(left)]


@dataclasses.dataclass(frozen=True)
class Wrong(SJD):
    """Reports a distribution a third warmer than the one that it draws from."""

    def propose(self, *args):
        proposal, state = super().propose(*args)
        return proposal.replace(log_q=jax.nn.log_softmax(proposal.log_q / 1.33, -1)), state


@pytest.mark.full
@pytest.mark.parametrize("kind", [SJD, Wrong])
def test_sjd_with_rejection_draws_from_the_target_and_a_wrong_q_shows(kind):
    """False-alarm rate 1e-3, with a fixed seed; the laws' 50,000 rows see smaller errors."""
    rows = 20_000
    s = decode(Speculative(kind(VOCABULARY, 3, top=5), Rejection()), "toy", [PROMPT] * rows,
               LAW_POLICIES["temperature"], new=3, size=16)
    made = np.asarray(s.tokens)[:, len(PROMPT):len(PROMPT) + 3]
    counts = np.bincount(made @ [VOCABULARY**2, VOCABULARY, 1], minlength=VOCABULARY**3)
    assert (chi_square(counts, joint("temperature") * rows) > 1e-3) == (kind is SJD)
    assert 0 < s.stats.accepted.sum() < s.stats.drafted.sum()


@pytest.mark.wide
def test_sjd_drafts_from_the_last_conditionals():
    """A draft's q is the target's distribution in the last round, behind the draft that was rejected."""
    draft = SJD(VOCABULARY, 3, top=4)
    network, params, chain, s = start(Speculative(draft, Rejection()), "toy", IDS, POLICIES["sampled"])
    accepted = jnp.array([0, 1, 2, 3, 0])

    @jax.jit
    def twice(params, chain, s):
        proposal, state = draft.propose(params, chain, s, s.algo[0], "independent")
        seen = window(tree(s.newest, proposal, 3), s.length - 1, s.running, None)
        out = network.apply(params.target, seen, s.cache)
        path = jnp.broadcast_to(jnp.arange(4), (5, 4))
        d = Decision(tokens=path, count=accepted + 1, slots=path, source=path, algo=None, accepted=accepted)
        state = draft.observe(params, s, seen, out, d, state)
        later, _ = draft.propose(params, chain, s.replace(length=s.length + d.count), state, "independent")
        return chain.over(s, seen, out).log_probs(), later

    log_p, later = twice(params, chain, s)
    p, q = np.exp(np.asarray(log_p)), np.exp(np.asarray(later.log_q))
    assert np.allclose(q.sum(-1), 1, atol=1e-5)
    for row, a in enumerate(accepted.tolist()):
        for i in range(3):
            if a + 1 + i > 3:                       # a fresh token is certain
                assert q[row, i].max() == 1 and q[row, i].argmax() == later.tokens[row, i]
                continue
            kept = np.sort(p[row, a + 1 + i])[-4]
            wanted = np.where(p[row, a + 1 + i] >= kept, p[row, a + 1 + i], 0)
            assert np.allclose(q[row, i], wanted / wanted.sum(), atol=1e-5)
            assert wanted[later.tokens[row, i]] > 0


def test_the_lookahead_branch_has_the_published_layout():
    for W, N, drafts in ((4, 4, 0), (3, 5, 2), (5, 2, 3)):
        cells = [(level, column) for level in range(N - 1) for column in range(W)]
        offset, sees = layout(W, N, drafts)
        assert offset.tolist() == [level + column for level, column in cells[1:]]
        for (level, column), row in zip(cells[1:], sees, strict=True):
            assert not row[1:1 + drafts].any()
            wanted = [(a == 0 and b <= column) or (1 <= a <= level and b == column) for a, b in cells]
            assert np.delete(row, np.s_[1:1 + drafts]).tolist() == wanted


def test_the_pool_offers_live_ngrams_of_the_newest_token_as_a_tree():
    pool = jnp.full((1, 4, 3, 3), -1, jnp.int32)
    add = jax.jit(insert)
    offer = jax.jit(guesses)
    live = lambda pool, token: [tuple(x) for x in np.stack(offer(pool[0], jnp.int32(token)), -1).tolist()]
    assert not any(alive for _, alive, _ in live(pool, 0))
    grams = jnp.array([[[1, 2, 3], [5, 2, 3], [1, 2, 4], [1, 9, 9], [1, 2, 3]]], jnp.int32)
    pool = add(pool, grams, jnp.array([[True, True, True, False, True]]))
    # 5 shares the bucket of 1; the invalid one is out; 1 2 3 moved up and is the newest
    assert pool[0, 1].tolist() == [[5, 2, 3], [1, 2, 4], [1, 2, 3]]
    assert live(pool, 1) == [(2, 1, 0), (3, 1, 1), (2, 0, 0), (4, 1, 1), (2, 0, 0), (3, 0, 1)]
    assert sum(alive for _, alive, _ in live(pool, 5)) == 2
    assert not any(alive for _, alive, _ in live(pool, 9))
    pool = add(pool, jnp.array([[[1, 7, 7]]], jnp.int32), jnp.array([[True]]))       # the oldest goes
    assert pool[0, 1].tolist() == [[1, 2, 4], [1, 2, 3], [1, 7, 7]]


@pytest.mark.wide
def test_lookahead_harvests_what_a_rerun_by_hand_harvests():
    W, N, G = 3, 4, 2
    alg = Speculative(Lookahead(W, N, G, buckets=VOCABULARY))
    network, params, chain, s = start(alg, "toy", IDS, {}, new=NEW)
    truth = texts(decode(Autoregressive(), "toy", IDS, {}, new=NEW + N))
    cells = [(level, column) for level in range(N - 1) for column in range(W)]

    @jax.jit
    def forward(tokens, positions, mask):
        seen = Window(tokens=tokens, positions=positions, mask=mask, live=jnp.ones(tokens.shape, bool))
        return network.apply(params.target, seen, network.init_cache(1, 0)).logits().argmax(-1)[0]

    def trajectory(text, levels, last):
        """The argmaxes of the last level in use: cells behind the text in a padded window without a cache."""
        T, at = len(text), {cell: 48 + i for i, cell in enumerate(cells[1:])} | {(0, 0): len(text) - 1}
        tokens, positions = np.zeros((1, 48 + len(at))), np.zeros((1, 48 + len(at)))
        mask = np.zeros((1, 48 + len(at), 48 + len(at)), bool)
        tokens[0, :T], positions[0, :T], mask[0, :T, :T] = text, range(T), np.tri(T, dtype=bool)
        for (level, column), i in at.items():
            if (level, column) != (0, 0):
                tokens[0, i], positions[0, i], mask[0, i, :T] = levels[level][column], T - 1 + level + column, True
            for column_ in range(column + 1):
                mask[0, i, at[0, column_]] = True
            for level_ in range(1, level + 1):
                mask[0, i, at[level_, column]] = True
        out = np.asarray(forward(tokens.astype(np.int32), positions.astype(np.int32), mask))
        return [int(out[at[last, column]]) for column in range(W)]

    def put(pool, gram):
        entry = pool.setdefault(gram[0], [])
        if gram in entry:
            entry.remove(gram)
        entry.append(gram)
        del entry[:-G]

    hand = [dict(text=list(ids), pool={}, filled=1, accepted=0) for ids in IDS]
    for row in hand:
        for i in range(len(row["text"]) - N + 1):
            put(row["pool"], row["text"][i:i + N])
    for _ in range(8):
        before = np.asarray(s.algo[0].levels)
        s = drivers.advance(alg, network, params, chain, s, jnp.int32(1))
        after, pools, filled = (np.asarray(x) for x in (s.algo[0].levels, s.algo[0].pool, s.algo[0].filled))
        for i, row in enumerate(hand):
            if s.status[i] != 0:
                continue
            text, pool = row["text"], row["pool"]
            levels = before[i].tolist()
            levels[0][0] = text[-1]
            new = trajectory(text, levels, row["filled"] - 1)
            follows = truth[i][len(text) - len(IDS[i]):]
            hits = [next((j for j in range(N - 1) if gram[1 + j] != follows[j]), N - 1)
                    for gram in pool.get(text[-1], [])]
            accepted = max(hits, default=0)
            row["accepted"] += accepted
            if row["filled"] == N - 1:
                for column in range(W):
                    put(pool, [level[column] for level in levels] + [new[column]])
                assert after[i].reshape(-1)[1:].tolist() == [x for level in [*levels[1:], new] for x in level][1:]
            else:
                for level, column in cells[1:]:
                    old = new if level == row["filled"] else levels[level]
                    if level <= row["filled"] and column + 1 < W:
                        assert after[i, level, column] == old[column + 1]
                    elif level <= row["filled"]:
                        assert after[i, level, column] in text      # a column opens with a token of the text
                row["filled"] += 1
            for token in follows[:accepted + 1]:
                text.append(token)
                if len(text) >= N:
                    put(pool, text[-N:])
            assert filled[i] == row["filled"]
            assert s.tokens[i, :s.length[i]].tolist() == text
            assert s.stats.accepted[i] == row["accepted"]
            for key in range(VOCABULARY):
                assert [x for x in pools[i, key].tolist() if x[0] >= 0] == pool.get(key, [])
    assert all(row["filled"] == N - 1 for row in hand) and sum(row["accepted"] for row in hand) > 0
