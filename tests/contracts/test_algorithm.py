"""The contract of algorithms: every entry of the registry keeps the guarantee that it states.

Each is run on one ragged batch of greedy and sampled rows, and once more with the rows in the other order, prompts in
chunks, and rounds in bursts, as a stream makes them. Entries of masked diffusion: `test_diffusion_rule.py`.
"""

import itertools
import re

import jax
import numpy as np
import pytest

import decodax as dx
from decodax import algorithms
from decodax.common.registry import ALGORITHMS
from decodax.core.state import Status
from tests.caches.small import PROMPTS
from tests.contracts.decoding import BANNED, END, NEW, POLICY, ROWS, SAMPLES, decode, plain
from tests.drafters.fresh import NAMES as TRAINED
from tests.drafters.fresh import acceptance_head, draft_classifier, fresh, length_network
from tests.laws.cases import lm, prompts, texts
from tests.matrix import often
from tests.small_models import net

LAYERED = ("self-speculative", "layerskip", "clasp", "del", "knn-ssd", "magicdec", "triforce", "quantspec", "specache",
           "pard", "pard-2", "specdec", "specdec++", "space", "s3d")
"""Entries that run some of the target's layers, use another cache of it, or read a model's hidden states."""
# aliases are other names for these; those that search write by rules of their own, and are below; lud draws as on a
# canvas, without verification
NAMES = [n for n, e in ALGORITHMS.items()
         if "diffusion" not in e.needs and not e.alias_of and e.family != "search" and n != "lud"]


def pair(name, policy="few"):
    """The target and the draft model: by default the smallest that have what an entry needs."""
    layered = name in LAYERED or name in TRAINED
    return ("llama", "sliding") if layered or policy == "together" else ("toy", "toy-draft")


OPTIONS = {"awrs": dict(check=bool), "cascade": dict(barrier=0), "dynamic-beam-allocation": dict(phrases=[[3]]),
           "grid-beam-search": dict(phrases=[[3]]), "seal": dict(corpus=[list(range(1, 8)) * 6]),
           "magicdec": dict(budget=6), "quantspec": dict(group=8, weights=None),
           "specache": dict(top=4, group_size=8, residual_length=8),
           "triforce": dict(budget=8, chunk=2, length=4, sinks=2, recent=6),
           "automatic": dict(lengths=(3,)), "bass": dict(lengths=(1, 3)), "tetris": dict(capacity=9, length=3),
           "ucbspec": dict(lengths=(0, 2)), "exp3spec": dict(lengths=(0, 2)),
           "pard": dict(mask=5, length=3), "specdec": dict(mask=5, length=3),
           "pard-2": dict(mask=5, length=3, states=(-1, 1), projection={"weight": np.eye(16, 32, dtype=np.float32)}),
           "knn-ssd": dict(domains=SAMPLES), "reflective-verification": dict(probe=(5, 6)),
           "self-speculative": dict(skip_mlp=(1,), gamma=0.3),
           "disco": dict(predictor=draft_classifier()),
           "specdec++": dict(head=acceptance_head(lm("sliding"))),
           "adaeagle": dict(network=length_network(lm("llama")))}


def made(name: str, policy: str = "few", **options):
    target, draft = map(lm, pair(name, policy))
    draft = fresh(name, target) if name in TRAINED else draft if ALGORITHMS[name].takes_draft else None
    return algorithms.make(name, target, draft, **OPTIONS.get(name, {}) | options)


UNVERIFIED = ("autoregressive", "specache", "hamburger")
"""Whose guesses, if any, are never verified."""
BY_BATCH = ("automatic", "bass", "exp3spec", "tetris", "ucbspec")
"""These decide for a batch how many tokens a row drafts."""


ELSEWHERE = {"block-draft-refinement", "blockwise-parallel", "dspark", "hidden-transfer", "jetspec", "longspec", "mtp",
             "mumo", "p-eagle", "pass", "ppd", "s3d"}
"""Entries that the wider tests leave to those of `tests/drafters` that compare with plain decoding."""


@pytest.mark.wide(but=("autoregressive-few", "jacobi-few", "ngram-few", "token-recycling-few"))
@pytest.mark.parametrize(("name", "policy"), often([(name, "few") for name in NAMES if name not in ELSEWHERE],
                                                   itertools.product(NAMES, POLICY)))
def test_a_system_keeps_its_guarantee(name, policy):
    """With its default options; what others change is said by the algorithm that they make."""
    alg, (which, _) = made(name, policy), pair(name, policy)
    assert alg.traits.guarantee == ALGORITHMS[name].guarantee
    s, (wanted, status) = decode(alg, which, policy=policy), plain(which, policy=policy)
    same = [a == b for a, b in zip(texts(s), wanted, strict=True)]
    if alg.traits.guarantee == "seed-exact":
        assert all(same)
        assert np.array_equal(s.status, status)
    elif alg.traits.guarantee == "distribution-exact":
        assert all(same[::2])           # a greedy row has one result
    for row, ended in zip(texts(s), np.asarray(s.status), strict=True):
        assert BANNED not in row and END not in row[:-1] and len(row) <= NEW
        assert ended == (Status.EOS if row[-1] == END else Status.LENGTH)
        assert row[-1] == END or len(row) == NEW
    drafted, accepted = np.asarray(s.stats.drafted), np.asarray(s.stats.accepted)
    assert (accepted <= drafted).all()
    if name != "automatic":             # which drafts where it measured that drafts pay
        assert (drafted.sum() > 0) == (name not in UNVERIFIED)
    back = decode(alg, which, policy=policy, order=list(reversed(range(ROWS))), width=5, burst=3)
    assert texts(back) == texts(s)[::-1]
    if name not in BY_BATCH:
        for count in ("rounds", "drafted", "accepted"):
            assert getattr(back.stats, count)[::-1].tolist() == getattr(s.stats, count).tolist()


EXACT = dx.verify.SeedExact()
DEGENERATE = {
    "greedy-verification": dict(), "blockwise-top-k": dict(k=1), "blockwise-distance": dict(epsilon=0),
    "aggressive-decoding": dict(beta=1), "specdec": dict(beta=1),
    "typical-acceptance": dict(epsilon=1 - 1e-6, delta=1e6),
    "reflective-verification": dict(alpha=0.0), "improved-mcsd": dict(verify=EXACT),
    "blockwise-parallel": dict(verify=EXACT), "hamburger": dict(length=1),
    "quantspec": dict(group=64), "specache": dict(residual_length=64), "fastcot": dict(cut=500)}
"""Options with which an approximate rule comes to plain decoding, or of those in `LIKELIEST` to greedy decoding."""
LIKELIEST = ("greedy-verification", "blockwise-top-k", "blockwise-distance", "aggressive-decoding",
             "specdec", "typical-acceptance")


def test_every_approximate_system_has_a_degenerate_setting():
    relaxed = {"fastcot", "aggressive-decoding"}        # approximate by an option
    assert set(DEGENERATE) == relaxed | {n for n in NAMES if ALGORITHMS[n].guarantee == "approximate"}


@pytest.mark.wide
@pytest.mark.parametrize("name", list(DEGENERATE))
def test_an_approximate_rule_is_plain_decoding_at_its_degenerate_setting(name):
    alg, (which, _) = made(name, **DEGENERATE[name]), pair(name)
    wanted, status = plain(which, greedy=name in LIKELIEST)
    s = decode(alg, which)
    assert texts(s) == wanted and np.array_equal(s.status, status)
    assert (np.asarray(s.stats.accepted).sum() > 0) == (name not in UNVERIFIED)


RULES = {"seed-exact": EXACT, "distribution-exact": dx.verify.Rejection(), "approximate": dx.verify.TypicalAcceptance()}


@pytest.mark.parametrize("name", [n for n, e in ALGORITHMS.items() if "verify" in e.options and not e.alias_of])
def test_the_verifier_that_is_given_decides_the_guarantee(name):
    for guarantee, verify in RULES.items():
        assert made(name, verify=verify).traits.guarantee == guarantee


@pytest.mark.parametrize(("name", "options"), [("fastcot", dict(cut=3)), ("fastcot", dict(cut=3, trigger=(4, 5))),
                                               ("aggressive-decoding", dict(beta=3)),
                                               ("aggressive-decoding", dict(tau=0.5))])
def test_options_that_relax_a_system_make_it_approximate(name, options):
    assert ALGORITHMS[name].guarantee == made(name).traits.guarantee == "seed-exact"
    assert made(name, **options).traits.guarantee == "approximate"
    assert "approximate" in ALGORITHMS[name].summary


@pytest.mark.full
@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("name", [n for n, e in ALGORITHMS.items() if e.guarantee == "seed-exact" and n in NAMES])
def test_batches_of_any_size_equal_plain_decoding(name, rows):
    alg = made(name, "together")
    assert texts(decode(alg, "llama", rows, "together")) == plain("llama", rows, "together")[0]


def test_two_names_for_one_object_are_declared():
    """Of the entries that build equal algorithms with their defaults all but one are aliases of it."""
    slow = "automatic", "knn-ssd"       # these run the model to be made
    algorithms = {n: made(n) for n in ALGORITHMS if "diffusion" not in ALGORITHMS[n].needs and n not in slow}
    for name, alg in algorithms.items():
        equal = {n for n, other in algorithms.items() if other == alg}
        assert {ALGORITHMS[n].alias_of or n for n in equal} == {ALGORITHMS[name].alias_of or name}, equal
    for entry in ALGORITHMS.values():
        if entry.alias_of:
            target = ALGORITHMS[entry.alias_of]
            assert target.alias_of is None and target.title != entry.title
            assert (entry.guarantee, entry.needs, entry.make) == (target.guarantee, target.needs, target.make)
    assert ALGORITHMS["eqspec"].alias_of == "seed-exact"


def test_a_system_with_a_fitted_part_asks_for_it():
    for name, what in (("disco", "predictor=, from decodax.train.fit_predictor"),
                       ("specdec++", "head=, from decodax.train.fit_acceptance_head"),
                       ("adaeagle", "network=, from decodax.train.fit_draft_length")):
        draft = fresh(name, lm("llama")) if name in TRAINED else lm("sliding")
        with pytest.raises(ValueError, match=re.escape(f"{name!r} needs {what}, or")):
            algorithms.make(name, lm("llama"), draft)


def test_an_unknown_name_lists_near_ones():
    with pytest.raises(ValueError, match="unknown name 'token-recyling'; near ones: token-recycling"):
        algorithms.make("token-recyling")


def test_missing_models_and_unknown_options_are_named():
    with pytest.raises(ValueError, match="'staged' needs a draft model; give draft="):
        algorithms.make("staged")
    with pytest.raises(ValueError, match=r"'uag' needs a model and a draft model; give lm=.* and draft="):
        algorithms.make("uag")
    with pytest.raises(ValueError, match="'prompt-lookup' takes no option 'k'; takes length=10, max_ngram=3"):
        algorithms.make("prompt-lookup", k=3)


@pytest.mark.full
def test_several_samples_of_a_prompt_with_arms():
    ids, options = prompts(3), dict(num_samples=2, max_new_tokens=12, temperature=0.8, seed=3, eos_token_id=[1])
    plain = dx.generate(lm("toy"), ids, **options)
    arms = dx.generate(lm("toy"), ids, algorithm=algorithms.make("ucbspec", lengths=(0, 2)), **options)
    assert np.array_equal(arms.tokens, plain.tokens)
    assert arms.stats.drafted.sum() > 0


@pytest.mark.full
def test_arms_of_any_drafts_equal_plain_decoding():
    """A table of the target's distributions, probes, a draft model's tree: each draft is told of every round."""
    tree = dx.Speculative(dx.drafts.DraftModel(lm("toy-draft")), shape=dx.trees.Fixed.balanced(2, 2))
    s = decode(algorithms.make("ucbspec", lm("toy"), lm("toy-draft"), arms=("stand", "lookahead", tree)), "toy")
    assert texts(s) == plain("toy")[0]
    assert (np.asarray(s.algo[0].count[0]) > 0).all()
    with pytest.raises(ValueError, match="arms: got Adaptive, takes Speculative"):
        algorithms.make("ucbspec", arms=("exp3spec",))


def test_arms_that_programs_cannot_tell_apart_are_refused():
    ngrams = lambda **options: dx.Speculative(dx.drafts.NGram(**options))
    corpus = ((1, 2, 3),)
    for other in (ngrams(corpus=((4, 5),)), ngrams()):
        with pytest.raises(ValueError, match="arms: got two NGram that differ in their weights alone"):
            algorithms.make("ucbspec", arms=(ngrams(corpus=corpus), other))
    assert algorithms.make("ucbspec", arms=(ngrams(corpus=corpus), ngrams(corpus=((4, 5),), order=3),
                                            ngrams(corpus=corpus)))
    draft = lm("sliding")
    same = lambda weights: dx.Speculative(dx.drafts.DraftModel(draft.model, weights))
    with pytest.raises(ValueError, match="arms: got two DraftModel"):
        algorithms.make("ucbspec", arms=(same(draft.params), same(jax.tree.map(lambda x: x * 2, draft.params))))
    assert algorithms.make("ucbspec", arms=(same(draft.params), same(draft.params)))


FEW = ["lookahead"]


@pytest.mark.wide
@pytest.mark.parametrize("name", often(FEW, NAMES))
def test_a_second_call_traces_nothing(name):
    alg = made(name)
    call = lambda ids, **options: dx.generate(lm(pair(name)[0]), ids, algorithm=alg, top_p=0.9, **options)
    call([[1, 2, 3, 4, 5, 6], [7, 8, 7, 8]], temperature=0.7, seed=1, eos_token_id=[0], max_new_tokens=17)
    # caches have room for a power of two of new tokens
    with jax.no_tracing(True):
        call([[3, 4, 3, 4, 3, 4, 3], [9, 2, 9, 2, 9]], temperature=1.2, seed=[5, 6], eos_token_id=[6],
             max_new_tokens=[20, 9])


SEARCHING = [name for name, entry in ALGORITHMS.items() if entry.family == "search"]
SOUGHT = {"awrs": dict(check=lambda ids: ids[-1] != 3), "cascade": dict(barrier=0, keep=4, orders=2, longest=10),
          "dynamic-beam-allocation": dict(phrases=[[3, 5], [7]]),
          "grid-beam-search": dict(phrases=[[3, 5], [7]], beams=2),
          "seal": dict(corpus=[[3, 5, 7, 3, 1, 3, 5, 1, 7] * 2])}
"""Options with which these find a text of ten tokens."""


@pytest.mark.wide
@pytest.mark.parametrize("name", often(["beam-search", "awrs", "contrastive-search"], SEARCHING))
def test_a_search_for_one_prompt_does_not_depend_on_the_others(name):
    options = SOUGHT.get(name, {})
    alg = dx.algorithms.make(name, net(), **options)
    assert alg.traits.guarantee == ALGORITHMS[name].guarantee == "approximate"
    penalty = {} if name in ("cascade", "group-think") else dict(repetition_penalty=1.2)     # they take none
    given = dict(algorithm=alg, max_new_tokens=10, **penalty)
    together = dx.generate(net(), PROMPTS, **given)
    count = len(together) // len(PROMPTS)
    for i, prompt in enumerate(PROMPTS):
        alone = dx.generate(net(), prompt, request_ids=[i], **given)
        for j in range(count):
            assert alone.row(j).tolist() == together.row(i * count + j).tolist()
    assert all(status != dx.Status.RUNNING for status in together.status)
    back = dx.generate(net(), PROMPTS[::-1], request_ids=[2, 1, 0], chunk=5, **given)
    for i in range(len(PROMPTS)):
        for j in range(count):
            assert back.row((len(PROMPTS) - 1 - i) * count + j).tolist() == together.row(i * count + j).tolist()
    if not options:
        text = dx.generate(net(), PROMPTS, algorithm=name, max_new_tokens=10, **penalty)
        assert np.array_equal(text.tokens, together.tokens)
