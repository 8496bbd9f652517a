"""Target-initialised multi-candidate decoding: the whole method against a transcription, and its exact variant."""

import numpy as np
import pytest

from decodax.algorithms.plain import Autoregressive
from decodax.algorithms.speculative import LongestBranch, SeedExact, Speculative
from decodax.algorithms.speculative.drafts import TargetRooted
from decodax.algorithms.speculative.trees import Fixed, Sliced
from tests.algorithms.speculative.drafting import toys_logits
from tests.laws.cases import POLICIES, VOCABULARY, Table, decode, prompts, texts

TREE = Fixed.balanced(3, 2, 1)
LEAST = 0.3
ALGORITHM = Speculative(TargetRooted(Table()), LongestBranch(3), Sliced(TREE, LEAST))
LOGITS = np.asarray(Table().logits_after(np.arange(VOCABULARY)))


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def best(logits, count):
    return np.argsort(-logits, kind="stable")[:count].tolist()


def transcribed(text, new):
    """The method in plain Python for a greedy row: its text, and how many tokens each round gave."""
    text, wanted, given, known = list(text), len(text) + new, [], None
    while len(text) < wanted:
        root = LOGITS[text[-1]] if known is None else known
        # the tree, level by level, while the target is likely to get to the next one
        tree, chance, depth = {(): ()}, {(): 1.0}, 0
        for level in range(3):
            inner = [q for q in tree if len(q) == level]
            if level and sum(chance[q] for q in inner) < LEAST:
                break
            for q in inner:
                follows = LOGITS[tree[q][-1]] if q else root
                for rank, token in enumerate(best(follows, (3, 2, 1)[level])):
                    tree[(*q, rank)] = (*tree[q], token)
                    chance[(*q, rank)] = chance[q] * softmax(follows)[token]
            depth = level + 1
        # the longest branch whose first token is among the target's three, and whose others are its own
        paths = []
        for q in sorted(tree, key=lambda q: (len(q), q)):
            tokens = tree[q]
            if q and tokens[0] in best(toys_logits(text), 3) and all(
                    tokens[i] == np.argmax(toys_logits([*text, *tokens[:i]])) for i in range(1, len(q))):
                paths.append(tokens)
        longest = max(paths, key=len, default=None)
        made = [int(np.argmax(toys_logits(text)))] if longest is None else list(longest)
        known = None if longest is None else toys_logits([*text, *longest])
        if known is not None:       # what is carried of it
            kept = best(known, 16)
            known = np.where(np.isin(np.arange(VOCABULARY), kept), known, -np.inf)
        text += made
        given.append((len(made), depth))
    return text[:wanted], given


IDS = prompts(6, longest=10)


@pytest.mark.wide
def test_the_method_equals_a_plain_transcription():
    s = decode(ALGORITHM, "toy", IDS, {}, new=24)
    lengths, depths = set(), set()
    for i, (prompt, made) in enumerate(zip(IDS, texts(s), strict=True)):
        text, rounds = transcribed(prompt, 24)
        assert made == text[len(prompt):]
        assert int(s.stats.rounds[i]) == len(rounds)
        lengths |= {n for n, _ in rounds}
        depths |= {d for _, d in rounds}
    assert lengths >= {1, 2} and len(depths) > 1
    plain = texts(decode(Autoregressive(), "toy", IDS, {}, new=24))
    assert texts(s) != plain                # it is approximate, as its guarantee says


@pytest.mark.full
def test_an_exact_verifier_settles_the_first_token_and_keeps_plain_decodings():
    policy = POLICIES["penalised"]
    plain = texts(decode(Autoregressive(), "toy", IDS, policy))
    exact = Speculative(TargetRooted(Table()), SeedExact(), Sliced(TREE, LEAST))
    bare = Speculative(Table(), SeedExact(), Sliced(TREE, LEAST))
    s, other = decode(exact, "toy", IDS, policy), decode(bare, "toy", IDS, policy)
    assert texts(s) == texts(other) == plain
    assert np.array_equal(s.stats.rounds, other.stats.rounds)      # nothing is held back, the drafts are the source's


@pytest.mark.full
def test_a_sampled_row_leaves_its_seeds_text_only_at_first_tokens():
    """With one branch there is no choice: all that is left is plain sampling."""
    alone = Speculative(TargetRooted(Table()), LongestBranch(1), Sliced(Fixed.balanced(1, 2), 0.0))
    assert texts(decode(alone, "toy", IDS, {})) == texts(decode(Autoregressive(), "toy", IDS, {}))
    s = decode(ALGORITHM, "toy", IDS, POLICIES["truncated"])
    assert [len(row) for row in texts(s)] == [12] * 6
    assert 0 < np.asarray(s.stats.accepted).sum() < np.asarray(s.stats.drafted).sum()
