"""The contract of verifiers: the rules that accept drafts keep the guarantee that they state.

Distribution-exact ones draw from the target's distribution. A greedy row has one result by every rule, and a broken
distribution ends the row with a status where it is reached.

50,000 rows of one prompt, each a request of its own; the joint distribution of the first three new tokens against its
enumeration. Pearson's chi-square, bins with an expectation below 5 pooled; the false-alarm rate of a test is 1e-6.
"""

import dataclasses
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax.algorithms.plain import Autoregressive
from decodax.algorithms.speculative import Proposal, SeedExact, Speculative, verify
from decodax.algorithms.speculative.drafts import SJD, NGramModel, PromptLookup, Stand
from decodax.algorithms.speculative.source import Draft
from decodax.algorithms.speculative.trees import Chain, Fixed
from decodax.algorithms.speculative.verify import (
    BlockVerification,
    Distance,
    Greedy,
    KSeq,
    MultiRound,
    Rejection,
    SpecVerification,
    TopKAcceptance,
    TypicalAcceptance,
)
from decodax.core.types import DEAD_END, INVALID
from tests.algorithms.speculative import judging
from tests.algorithms.speculative.judging import SMALL, V, drafts, judge, simplex
from tests.contracts.verifying import ALARM, FLOORED, POLICIES, PROMPT, chi_square, joint
from tests.laws.cases import VOCABULARY, Sampled, Table, decode
from tests.matrix import often

ROWS = 50_000

CASES = {
    "plain": Autoregressive(),
    "lookup-seed-exact": Speculative(PromptLookup(length=3)),
    "lookup-rejection": Speculative(PromptLookup(length=3), Rejection()),
    "sampled-seed-exact": Speculative(Sampled(2)),
    "sampled-rejection": Speculative(Sampled(2), Rejection()),
    "sampled-rejection-one": Speculative(Sampled(1), Rejection()),
}
TREE = Fixed.of([[0], [1], [2], [0, 0], [0, 1]])


@dataclasses.dataclass(frozen=True)
class Likeliest(Draft):
    """A tree of the likeliest tokens after each node: drafts that are certain."""

    length: int = 2

    def propose(self, params, policy, s, state, drawn):
        tokens = [s.newest]
        for path, up in zip(TREE.order, TREE.parents, strict=True):
            logits = Table().extend(params, s, state, SimpleNamespace(tokens=tokens[up]))[1].logits
            tokens.append(jax.lax.top_k(logits, 3)[1][:, path[-1]].astype(jnp.int32))
        drafts = jnp.stack(tokens[1:], 1)
        return Proposal(tokens=drafts, live=jnp.ones(drafts.shape, bool), parents=TREE.parents[None]), state


TREES = {
    "tree-seed-exact": Speculative(Table(), shape=TREE),
    "chain-rejection": Speculative(Table(), Rejection(), Chain(2)),
    "tree-multi-round": Speculative(Table(), MultiRound(), TREE),
    "tree-multi-round-replacement": Speculative(Table(), MultiRound(replacement=True), TREE),
    "tree-k-seq": Speculative(Table(), KSeq(), TREE),
    "chain-multi-round": Speculative(Table(), MultiRound(), Chain(2)),
    "chain-k-seq": Speculative(Table(), KSeq(), Chain(2)),
    "chain-block": Speculative(Table(), BlockVerification(), Chain(2)),
    "lookup-multi-round": Speculative(PromptLookup(length=3), MultiRound()),
    "lookup-k-seq": Speculative(PromptLookup(length=3), KSeq()),
    "lookup-block": Speculative(PromptLookup(length=3), BlockVerification()),
    "certain-tree-multi-round": Speculative(Likeliest(), MultiRound()),
    "certain-tree-k-seq": Speculative(Likeliest(), KSeq()),
}
# distributions that change from round to round, with the text and with what the target said before
SOURCES = {
    "stand-multi-round": Speculative(Stand(VOCABULARY, order=2, k=6), MultiRound(), TREE),
    "ngram-model-multi-round": Speculative(NGramModel(VOCABULARY, order=3), MultiRound(), TREE),
    "ngram-model-rejection": Speculative(NGramModel(VOCABULARY, order=3), Rejection(), Chain(2)),
    "sjd-rejection": Speculative(SJD(VOCABULARY, length=3, top=6), Rejection()),
}


# what `full` adds follows from other laws: seed-exact rows are plain decoding's, rules for trees are
# rejection on a chain, and tests/algorithms/speculative/test_verify.py enumerates drafts with replacement and certain
# ones
OFTEN = [("plain", "truncated"), *((c, "floored") for c in ("chain-rejection", "tree-multi-round"))]


@pytest.mark.wide(but=("plain-truncated",))
@pytest.mark.parametrize(("case", "policy"), often(OFTEN, [
    *itertools.product(CASES, POLICIES), *itertools.product(TREES, FLOORED), ("tree-multi-round", "truncated"),
    *itertools.product(SOURCES, ("temperature", "floored"))]))
def test_the_distribution_of_three_tokens_is_the_targets(case, policy):
    s = decode((CASES | TREES | SOURCES)[case], "toy", [PROMPT] * ROWS, (POLICIES | FLOORED)[policy], new=3, size=16)
    made = np.asarray(s.tokens)[:, len(PROMPT):len(PROMPT) + 3]
    counts = np.bincount(made @ [VOCABULARY**2, VOCABULARY, 1], minlength=VOCABULARY**3)
    p = chi_square(counts, joint(policy) * ROWS)
    print(f"p = {p:.3f}")
    assert p > ALARM
    if case != "plain":
        assert 0 < np.asarray(s.stats.accepted).sum() < np.asarray(s.stats.drafted).sum()


def test_this_test_would_see_a_wrong_distribution():
    exact = joint("temperature")
    warm = exact ** 0.94          # a temperature six per cent too high
    draws = np.random.default_rng(0).multinomial(ROWS, exact)
    assert chi_square(draws, exact * ROWS) > ALARM
    assert chi_square(draws, warm / warm.sum() * ROWS) < ALARM


READS_Q = (MultiRound, KSeq, Rejection, BlockVerification)
EXACT = [SeedExact(), MultiRound(), KSeq()]
RULES = [*EXACT, Rejection(), BlockVerification(), Greedy(), TypicalAcceptance(), SpecVerification(beta=2, tau=1.0),
         TopKAcceptance(2), Distance(1), verify.MinimumBlock(Greedy(), 2)]
OTHERS = {verify.Cut, verify.LongestBranch}
"""`Cut` and `LongestBranch` judge drafts of one method each, in whose modules they are tested."""


def test_every_verifier_is_here():
    every = {x for x in map(vars(verify).get, verify.__all__) if isinstance(x, type) and issubclass(x, verify.Verifier)}
    assert every - {verify.Verifier} == {type(rule) for rule in RULES} | OTHERS


@pytest.mark.full
def test_greedy_rows_have_one_result_by_every_rule():
    draw = np.random.default_rng(9)
    for shape, rules in ((judging.TREE, [SeedExact(), MultiRound(), KSeq(), Greedy()]),
                         (Chain(2), [*EXACT, BlockVerification(), Rejection(), Greedy(), SpecVerification(beta=1),
                                     TopKAcceptance(1), Distance(0), TypicalAcceptance()])):
        tokens = drafts(draw, np.full((V, V), 0.1) + 0.5 * (np.arange(V) == 1), shape, SMALL, True)
        logits = draw.normal(size=(*tokens.shape, V)) + 2 * (np.arange(V) == 1)
        q = np.log(simplex(draw, SMALL, 1 + shape.parents.max(), V))
        first, depth = judge(rules[0], shape, tokens, logits, temperature=0.0)
        assert set(depth) == {0, 1, 2}
        for rule in rules[1:]:
            for log_q in (None, q) if type(rule) in READS_Q else (None,):
                made, accepted = judge(rule, shape, tokens, logits, log_q, temperature=0.0)
                assert (made == first).all() and (accepted == depth).all(), rule


@pytest.mark.wide(but=("TypicalAcceptance", "Distance", "SpecVerification", "TopKAcceptance", "Greedy"))
@pytest.mark.parametrize("rule", RULES, ids=lambda r: type(r).__name__)
def test_a_broken_distribution_is_a_status_where_the_row_gets_to_it(rule):
    sure, none = [50.0, 0, 0, 0, 0], [-np.inf] * V
    nan, one, huge = [np.nan] * V, [50.0, np.nan, 0, 0, 0], [0, np.inf, 0, 0, 0]
    rows = [[nan, sure, sure], [sure, nan, sure], [sure, one, sure], [sure, sure, nan], [none, sure, sure],
            [sure, none, sure], [sure, sure, none], [sure, sure, huge], [sure, sure, sure]]
    wanted = [[INVALID], [0, INVALID], [0, INVALID], [0, 0, INVALID], [DEAD_END], [0, DEAD_END], [0, 0, DEAD_END],
              [0, 0, INVALID], [0, 0, 0]]
    q = np.full((len(rows), 2, V), -np.log(V))
    for log_q, temperature in itertools.product((None, q) if isinstance(rule, READS_Q) else (None,), (1.0, 0.0)):
        made, accepted = judge(rule, Chain(2), np.zeros((len(rows), 3)), rows, log_q, temperature=temperature)
        assert [row[:n + 1].tolist() for row, n in zip(made, accepted, strict=True)] == wanted


@pytest.mark.parametrize("rule", [MultiRound(), KSeq()])
def test_a_broken_draft_leaves_the_targets_distribution(rule):
    p = np.log([[0.5, 0.2, 0.1, 0.1, 0.1]] * 3)
    made, accepted = judge(rule, Chain(2), [[0, 0, 0]] * SMALL, [p] * SMALL, np.full((SMALL, 2, V), np.nan))
    assert not accepted.any() and set(made[:, 0]) == set(range(V))


def test_every_rule_states_its_guarantee():
    exact = {type(r) for r in EXACT[1:]} | {BlockVerification, Rejection}
    assert {r.guarantee for r in exact} == {"distribution-exact"} and SeedExact.guarantee == "seed-exact"
    approximate = Greedy, TypicalAcceptance, SpecVerification, TopKAcceptance, Distance
    assert {r.guarantee for r in approximate} == {"approximate"}
