"""The contract of refusals: what a model, a cache, a method, a draft and a verifier declare is compared before anything
is traced, and the error names both sides and what to take instead."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import pytest

import decodax as dx
from decodax.algorithms.parallel.cascade import Cascade
from decodax.algorithms.parallel.group_think import GroupThink
from decodax.algorithms.speculative import Cut, Rejection
from decodax.algorithms.speculative.adaptive.arms import Adaptive
from decodax.algorithms.speculative.adaptive.automatic import Automatic
from decodax.algorithms.speculative.drafts import (
    DraftModel,
    Fallback,
    Forced,
    Lookahead,
    Merged,
    NGram,
    PromptLookup,
    Staged,
    SuffixAutomaton,
    SuffixTree,
)
from decodax.algorithms.speculative.reflective import Reflective
from decodax.algorithms.speculative.trees import Chain, DySpec, Fixed
from decodax.algorithms.speculative.trees.sparse_trees import SparseTree, SparseTrees
from decodax.algorithms.speculative.verifier import SeedExact
from decodax.algorithms.speculative.verify import BlockVerification, KSeq, MinimumBlock, MultiRound
from decodax.caches import make
from decodax.caches.prefix.prefix import read_prefix
from decodax.core import drivers
from decodax.io.load import LM
from decodax.models import Transformer
from decodax.models.diffusion import Diffusion
from tests.caches.small import DEEP, DEEPER, GUESSES, LOOKUP, OPTIONS, PROMPTS, SMALL, TREE
from tests.laws import cases
from tests.laws.cases import Table

LLAMA, PYCODE = cases.lm("llama"), dx.load("pycode")
FILLS = dataclasses.replace(SMALL, diffusion=Diffusion(15))
CHAINED = dx.Speculative(PromptLookup(length=7))


def cached(name: str, **more: Any) -> Any:
    return make(name, **{**OPTIONS[name], **more})


def run(algorithm: Any = None, cache: Any = None, lm: LM = SMALL, **options: Any) -> Callable[[], object]:
    return lambda: dx.generate(lm, PROMPTS, algorithm=algorithm, cache=cache, max_new_tokens=4, **options)


def bound(algorithm: Any = None, cache: Any = None, lm: LM = SMALL) -> Callable[[], object]:
    return lambda: dx.bind(lm, algorithm, cache=cache, capacity=256)


def drafting(name: str) -> Any:
    """A method whose draft model has the cache of a name."""
    lm = GUESSES if name not in DEEPER else dataclasses.replace(GUESSES, model=DEEP.model, params=DEEP.params)
    kind = cached(name)
    return dx.Speculative(DraftModel(dataclasses.replace(lm, model=lm.model.with_cache(kind))))


def beside(name: str) -> Callable[[], object]:
    """A call whose drafts read a cache of a name beside that of the text."""
    lm = DEEP if name in DEEPER else SMALL
    return run(dx.Speculative(dx.drafts.OwnCache(cached(name))), lm=lm)


def on_table(draft: Any, verify: Any = None, shape: Any = None) -> Callable[[], object]:
    return run(dx.Speculative(draft, *(() if verify is None else (verify,)), shape=shape), lm=LLAMA)


def capped(lm: LM) -> LM:
    return dataclasses.replace(lm, model=Transformer(dataclasses.replace(lm.model.config, attention_softcap=5.0)))


def streamed(algorithm: Any, cache: Any) -> Callable[[], object]:
    return lambda: list(dx.stream(dataclasses.replace(SMALL), PROMPTS[0], algorithm=algorithm, cache=cache,
                                  max_new_tokens=4))


WHOLE = ("snapkv", "kivi", "gear", "shadowkv", "clusterkv", "minicache", "zipcache", "qaq", "subgen", "act-qkv",
         "attention-predictor")
PAIRS: dict[str, tuple[str, Callable[[], object]]] = {
    # a method and a cache
    "features": ("cache: MaskedDiffusion needs one that supports rewrites and subsets, which Evicting does not",
                 run("fast-dllm", "knorm:budget=14", FILLS)),
    "window, quest": ("cache: quest takes windows of at most its 4 recent tokens, got one of 11 nodes; takes recent=11",
                      run(TREE, "quest:budget=6,page_size=2,recent=4,skip=()")),
    "window, bound": ("cache: quest takes windows of at most its 4 recent tokens, got one of 11 nodes; takes recent=11",
                      bound(TREE, "quest:budget=6,page_size=2,recent=4,skip=()")),
    "window, a2ats": ("cache: a2ats takes windows of at most its 4 recent tokens, got one of 8 nodes; takes recent=8",
                      run(CHAINED, cached("a2ats", recent=4))),
    "window, act-qkv": ("cache: act-qkv takes windows of at most room=4 nodes, got one of 8; takes room=8 or more",
                        run(CHAINED, cached("act-qkv", room=4), DEEP)),
    "window, sentence-kv": ("cache: sentence-kv takes windows of at most its 3 recent tokens, got one of 5 nodes; ta",
                            run(LOOKUP, make("sentence-kv", ends=(3,), budget=8, sinks=1, recent=3, window_size=4))),
    "window, retro-attention": ("cache: retro-attention reads windows of 8 nodes with at least 9 recent tokens",
                                run(CHAINED, cached("retro-attention", recent=5), DEEP)),
    "guidance": ("guidance_scale: cannot be combined with SpecPVCache.* takes another cache",
                 run(cache=cached("specpv"), guidance_scale=2.0)),
    # a draft model and its cache
    **{f"draft model, {name}": (f"cache: {name} needs the whole prompt at once, which a draft model does not get; "
                                "takes another cache for the draft model", run(drafting(name))) for name in WHOLE},
    **{f"draft model, {name}": (f"cache: {name} moves tokens to new positions, which a draft model does not follow; "
                                "takes another", run(drafting(name))) for name in ("freqkv",)},
    "draft model, bound": ("cache: snapkv needs the whole prompt at once", bound(drafting("snapkv"))),
    "draft model, retro-attention": ("cache: retro-attention reads the last tokens again .* takes a method that does "
                                     "not draft", run(drafting("retro-attention"))),
    # a cache and a model, or another cache
    "soft cap": ("cache: minference scores columns and diagonals by queries and keys; takes a model without a soft cap",
                 run(cache=cached("minference"), lm=capped(SMALL))),
    **{f"beside, {name}": (f"cache: {name} reads a prompt when it is in, and this model reads it before; takes a",
                           beside(name)) for name in ("minference", "critiprefill", "act-qkv")},
    "beside, promptdistill": ("cache: promptdistill has prompts stop after 1 layers, and this model goes on with them; "
                              "takes a model that stops", beside("promptdistill")),
    "tokenizer, kvzip": ("ask: got a text.* takes token ids", run(cache="kvzip")),
    "tokenizer, shotkv": ("separator: got None.* takes the token ids", run(cache=make("shotkv", budget=40))),
    "heads, headkv": ("heads: got 3 for layer 0, the model has 2",
                      run(cache=make("headkv", heads=((0.1, 0.4, 0.2), (0.3, 0.2, 0.2)), budget=14, window_size=4),
                          lm=DEEP)),
    "prefix": ("context: got keys and values that were computed before; Evicting has to see the text read, so it takes",
               lambda: dx.generate(SMALL, PROMPTS, context=PREFIX, cache="knorm:budget=14", max_new_tokens=4)),
    "draft of specpc": ("draft: got one with a Evicting cache, takes one with a dense cache", lambda: make(
        "specpc", draft=dataclasses.replace(GUESSES, model=GUESSES.model.with_cache(make("knorm", budget=14))))),
    "first of specpc": ("first: got 5, the draft model has 1 layers", lambda: cached("specpc", first=5)),
    # a draft and a verifier
    "chains, Rejection": ("verify: Rejection takes chains, and Table drafts trees here; MultiRound and SeedExact take",
                          on_table(Table(), Rejection(), Fixed.balanced(2, 2))),
    "chains, BlockVerification": ("verify: BlockVerification takes chains, and Table drafts trees here",
                                  on_table(Table(), BlockVerification(), Fixed.balanced(2, 2))),
    "chains, Cut": ("verify: Cut takes chains, and SuffixTree drafts trees here", on_table(SuffixTree(), Cut(2))),
    "chains, MinimumBlock": ("verify: MinimumBlock takes chains, and Lookahead drafts trees here",
                             on_table(Lookahead(), MinimumBlock(SeedExact(), 2))),
    "one source": ("verify: KSeq takes draws of one source, and Merged mixes those of several; takes MultiRound",
                   on_table(Merged((Table(), Table()), Chain(2)), KSeq())),
    "replacement, Merged": (r"verify: Merged takes MultiRound\(replacement=True\)",
                            on_table(Merged((Table(), Table()), Chain(2)), MultiRound())),
    "replacement, DySpec": (r"verify: DySpec draws siblings without replacement; takes SeedExact or MultiRound\(repl",
                            on_table(Table(), KSeq(), DySpec(4))),
    "draws, Staged": ("verify: Staged drafts with the target's uniforms and knows no q; takes SeedExact",
                      run(dx.Speculative(Staged(DraftModel(GUESSES), NGram()), Rejection()))),
    "draws, Forced": ("base: Table|base: Grown drafts more than one chain, or draws it; takes one that looks",
                      on_table(Forced(8, dx.Speculative(Table()).drafter), Rejection())),
    # a draft and another
    "inner state": ("inner: got SuffixAutomaton, which carries a state from round to round; takes a Draft",
                    run(dx.Speculative(Staged(DraftModel(GUESSES), SuffixAutomaton())))),
    "inner tree": ("inner: got SuffixTree, takes a Draft of deterministic chains",
                   run(dx.Speculative(Staged(DraftModel(GUESSES), SuffixTree())))),
    "matches": ("first: got NGram, takes a Draft of deterministic chains .* SuffixAutomaton or PromptLookup",
                on_table(Fallback(NGram(), Table()))),
    "probes": ("second: got Lookahead, which proposes probes; takes chains and trees",
               on_table(Fallback(PromptLookup(), Lookahead()))),
    "forced trees": ("base: SuffixTree drafts more than one chain, or draws it; takes one that looks its chains up",
                     on_table(Forced(64, SuffixTree()))),
    "cut trees": ("shape: SuffixTree proposes trees or probes, which a chain cannot cut",
                  on_table(SuffixTree(), shape=Chain(2))),
    "read again": ("draft: SuffixTree makes trees or has probes of its own; takes one that makes chains",
                   run(Reflective(SuffixTree(), probe=(1,)), lm=LLAMA)),
    "sparse trees": ("shape: SparseTrees takes the prompt tokens of 'ppd', got a Table",
                     on_table(Table(), shape=SparseTrees((SparseTree(((0,),), (1, 1)),)))),
    "arms": ("costs: got 1 for 2 arms", run(Adaptive((LOOKUP, CHAINED), Automatic((1.0,))))),
    # a method and what a request asks for
    "stop, group-think": ("stop: group-think writes several texts at once", lambda: dx.generate(
        PYCODE, "a", algorithm=GroupThink(2), stop="b", max_new_tokens=4)),
    "penalty, group-think": ("GroupThink: Repetition reads the text, and there are several texts; takes a policy that",
                             run(GroupThink(2), repetition_penalty=1.5)),
    "penalty, cascade": ("Cascade: Repetition reads the text, which is found at all positions at once; takes a policy",
                         run(Cascade(15, 1, 4, 4), repetition_penalty=1.5)),
    "stream": ("cache: quest takes windows of at most its 4 recent tokens, got one of 8 nodes; takes recent=8",
               streamed(CHAINED, "quest:budget=6,page_size=2,recent=4,skip=()")),
}
PREFIX = read_prefix(SMALL, PROMPTS[0][:8])


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes it an error to call the compiled programs of the drivers, or the network."""

    def called(*_: Any, **__: Any) -> Any:
        raise AssertionError("a program was traced")

    for name in ("begin", "commit_prompts", "advance", "_load_prefix", "_extend", "_fan_out"):
        monkeypatch.setattr(drivers, name, called)
    monkeypatch.setattr(Transformer, "apply", called)


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_that_does_not_fit_is_refused_before_anything_is_traced(name: str, untraced: None) -> None:
    message, call = PAIRS[name]
    compiled: list[str] = []
    listen = lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        with pytest.raises(ValueError, match=f"^(algorithm: )?{message}"):
            call()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not compiled
