"""Arguments of drafts, shapes and verifiers that make no sense are refused by name, when they are made or before they
run. Errors that need the set-up of a module are in that module."""

from collections.abc import Callable

import pytest

import decodax as dx
from decodax.algorithms.speculative import Cut, LongestBranch, Rejection, Speculative, fit_skipped_layers
from decodax.algorithms.speculative.drafts import (
    ADED,
    PGJ,
    SJD,
    CLaSp,
    DraftExit,
    DraftModel,
    DynamicExit,
    FastCoT,
    InputGuided,
    Jacobi,
    LayerSkip,
    Lookahead,
    Merged,
    NGram,
    NGramModel,
    NGramTrie,
    PromptLookup,
    SpecBranch,
    Staged,
    Stand,
    SuffixAutomaton,
    SuffixTree,
    TargetRooted,
)
from decodax.algorithms.speculative.drafts.self.knn_ssd import fit_anchors
from decodax.algorithms.speculative.heads.adaeagle import SurePrediction
from decodax.algorithms.speculative.trees import (
    CaPE,
    Chain,
    ConfidenceChain,
    DySpec,
    Fixed,
    OptTree,
    Sliced,
    from_acceptance,
    sequoia_tree,
)
from decodax.algorithms.speculative.verify import (
    Distance,
    KSeq,
    MultiRound,
    SpecVerification,
    TopKAcceptance,
    TypicalAcceptance,
)
from tests.laws.cases import Table, decode, lm, model

NETWORK, (TOY, WEIGHTS) = model("llama")[0], model("toy")


def merged(rule: object) -> object:
    return dx.generate(lm("llama"), [[1, 2]], algorithm=Speculative(Merged((Table(), Table()), Chain(2)), rule),
                       max_new_tokens=2)


def run(alg: Speculative, weights: object = None) -> object:
    return decode(alg, "toy", [[3, 4, 5, 6]], dict(temperature=0.9), draft=weights)


REFUSED: list[tuple[str, Callable[[], object]]] = [
    # drafts that skip layers
    ("source: PromptLookup makes its own trees", lambda: DraftExit(PromptLookup())),
    ("alpha: got 1.5, takes 0 to 1", lambda: DraftExit(LayerSkip(), alpha=1.5)),
    ("trials: got 0", lambda: fit_skipped_layers(lm("llama"), [[1]], trials=0)),
    (r"skip: got \(2,\), takes layers from 0 to 1", lambda: LayerSkip(skip=(2,)).for_target(NETWORK)),
    ("layer: got 0, takes 1 to 2", lambda: LayerSkip(0).for_target(NETWORK)),
    ("model: got Toy, takes a Transformer", lambda: LayerSkip().for_target(TOY)),
    ("skips: got 2, takes 1 to 1", lambda: CLaSp(skips=2).for_target(NETWORK)),
    (r"exits: got \(3,\), takes layers from 1 to 2", lambda: DynamicExit(exits=(3,)).for_target(NETWORK)),
    ("domains: got a prompt of 1 tokens, takes at least 2", lambda: fit_anchors(NETWORK, [[[1]]])),
    # Jacobi decoding and lookahead
    ("length: got 0", lambda: Jacobi(0)), ("fill: got 'pad'", lambda: Jacobi(fill="pad")), ("block", lambda: PGJ(1)),
    ("until", lambda: PGJ(4, until=0)), ("schedule", lambda: FastCoT(((1, 4),))),
    ("schedule", lambda: FastCoT(((0, 0),))),
    (r"trigger: got \(3,\) with cut=None", lambda: FastCoT(trigger=(3,))), ("rounds: got 0", lambda: Cut(0)),
    ("top: got 0", lambda: SJD(16, top=0)),
    ("ngram_size: got 1, takes a whole number from 2", lambda: Lookahead(ngram_size=1)),
    # drafts made of others
    ("sources: got 1, takes two or more", lambda: Merged((Table(),))),
    ("sources: PromptLookup makes its own trees", lambda: Merged((Table(), PromptLookup()))),
    ("verify: KSeq takes draws of one source", lambda: merged(KSeq())),
    ("verify: Merged takes MultiRound", lambda: merged(MultiRound())),
    ("nodes: got 5, takes at least the length, 6", lambda: Staged(DraftModel(TOY), NGram(), 6, 5)),
    ("inner: got SuffixAutomaton, which carries a state",
     lambda: run(Speculative(Staged(DraftModel(TOY), SuffixAutomaton())), (WEIGHTS, None))),
    ("verify: Staged drafts with the target's uniforms",
     lambda: run(Speculative(Staged(DraftModel(TOY), NGram()), Rejection()), (WEIGHTS, None))),
    ("k: got 0", lambda: LongestBranch(0)), ("keep: got 0", lambda: TargetRooted(Table(), 0)),
    ("source: PromptLookup makes its own trees", lambda: TargetRooted(PromptLookup())),
    ("keep: got 17, takes at most 16", lambda: run(Speculative(TargetRooted(Table(), 17)))),
    ("branches: got 0, takes a whole number from 1", lambda: SpecBranch(Table(), branches=0)),
    (r"threshold: got 1\.5, takes a number from 0 to 1", lambda: SpecBranch(Table(), threshold=1.5)),
    # tables and texts
    ("vocab: got 0", lambda: NGramModel(0)), ("k: got 5, takes at most 4", lambda: Stand(4, k=5)),
    ("explore: got -1.0", lambda: ADED(explore=-1.0)),
    ("length: got 0, takes a whole number from 1", lambda: SuffixAutomaton(length=0)),
    ("factor: got 0.0, takes a number above 0", lambda: SuffixAutomaton(factor=0.0)),
    ("corpus: got documents of one token", lambda: SuffixAutomaton(corpus=((1,),))),
    ("corpus: got document 0", lambda: NGramTrie(corpus=((1, -2),))),
    ("branch_length: got 0", lambda: NGramTrie(branch_length=0)),
    ("alpha: got 0, takes more than 0", lambda: SuffixTree(alpha=0)),
    ("order: got 1, takes a whole number from 2", lambda: NGram(order=1)),
    ("skip: got -1, takes a whole number from 0", lambda: InputGuided(skip=-1)),
    # shapes
    ("length: got 0, takes at least 1", lambda: ConfidenceChain(0)),
    ("threshold: got 2, takes 0 to 1", lambda: ConfidenceChain(threshold=2)),
    ("threshold: got 2, takes 0 to 1", lambda: SurePrediction(threshold=2)),
    ("delta: got -1", lambda: OptTree(delta=-1)), ("bins: got", lambda: CaPE(bins=((0.5, 2),))),
    ("nodes: got 4, takes at least the length, 5", lambda: CaPE(5, nodes=4)),
    ("nodes: got 0", lambda: DySpec(nodes=0)), ("acceptance: got", lambda: sequoia_tree([1.5], 2)),
    ("accepted: got", lambda: from_acceptance(Chain(2), [1], 1)),
    ("nodes: got 3, takes 1 to 2", lambda: from_acceptance(Chain(2), [1, 1], 3)),
    ("threshold: got -1, takes 0 to 1", lambda: Sliced(threshold=-1)), ("branching: got", lambda: Fixed.balanced()),
    ("verify: DySpec draws siblings without replacement",
     lambda: run(Speculative(Table(), KSeq(), DySpec(4)))),
    # verifiers
    ("rho: got 0.5, takes 'auto' or a number of at least 1", lambda: KSeq(rho=0.5)),
    ("epsilon: got 1, takes a number between 0 and 1", lambda: TypicalAcceptance(epsilon=1)),
    ("delta: got 0, takes a number above 0", lambda: TypicalAcceptance(delta=0)),
    ("k: got 0, takes at least 1", lambda: TopKAcceptance(0)),
    ("beta: got 0, takes at least 1", lambda: SpecVerification(beta=0)),
    ("tau: got -1, takes at least 0", lambda: SpecVerification(tau=-1)),
    ("epsilon: got -1, takes at least 0", lambda: Distance(-1)),
]


@pytest.mark.parametrize(("message", "call"), REFUSED, ids=[message for message, _ in REFUSED])
def test_bad_arguments_are_refused_by_name(message: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=message):
        call()
