"""Block heads draft what training computes, keep only what they know of the target's features, and change no output."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax import algorithms
from decodax.algorithms.plain import Autoregressive
from decodax.algorithms.speculative import MultiRound, Rejection, Speculative
from decodax.algorithms.speculative.heads.block import BlockDraft
from decodax.algorithms.speculative.heads.dspark import LoadAwareChains, SurvivalChain
from decodax.algorithms.speculative.heads.source import HeadWeights
from decodax.algorithms.speculative.trees import Chain, ConfidenceTree, Fixed, OptTree
from decodax.core import drivers
from decodax.core.types import embeddings, logits_of
from decodax.io.drafters import TrainedDrafter, load_drafter, save_drafter
from decodax.models.drafters.block import BlockHead
from decodax.models.drafters.block_training import blocks_at
from decodax.models.drafters.corrections import CandidateSelector, Markov, PrefixGRU, Refiner, walk
from decodax.models.drafters.local_convolution import LocalConvolution
from decodax.models.drafters.stack import MedusaHead
from decodax.train.drafting.blocks import AnchoredBlocks, Scheduled
from decodax.train.drafting.confidence import RANGE, fit_confidence, fitted_temperature
from decodax.train.drafting.features import target_outputs
from decodax.train.drafting.systems import objective_of
from tests.algorithms.speculative.uneven import UNEVEN
from tests.contracts.verifying import ALARM, PROMPT, chi_square, joint
from tests.contracts.verifying import POLICIES as LAW_POLICIES
from tests.drafters.drafting import drafted_logits
from tests.drafters.fresh import fresh
from tests.laws.cases import MASK, VOCABULARY, decode, lm, model, prompts, start, texts
from tests.matrix import often

CONFIG = model("llama")[0].config
SLIDING = dataclasses.replace(CONFIG, layers=(dataclasses.replace(CONFIG.layers[0], sliding=4), CONFIG.layers[1]))
block = functools.partial(BlockHead, (0, 1), VOCABULARY, config=CONFIG, block=5, mask=MASK)
HEADS = {
    "dflash": block(),
    "dflash-one-layer": block(config=dataclasses.replace(CONFIG, qk_norm="head", layers=CONFIG.layers[:1])),
    "jetspec": block(causal=True, own_head=True),
    "sliding": block(config=SLIDING, causal_sliding=True),
    "sliding-newest": block(config=SLIDING, window_from="newest", causal_sliding=False),
    "dspark": block(first_predicts=True, correction=Markov(6), confidence="token", own_head=True, own_table=True),
    "dspark-gated": block(first_predicts=True, correction=Markov(6, "gated"), confidence="hidden"),
    "dspark-rnn": block(correction=Markov(6, "rnn")),
    "domino": block(first_predicts=True, correction=PrefixGRU(8, 6)),
    "domino-silent": block(correction=PrefixGRU(8, 6, first=0)),
    "dflash2": block(correction=CandidateSelector(6, 5), convolution=LocalConvolution(2, 4)),
    "xpress": block(correction=Refiner(6)),
}
SHOWN = ("dflash", "sliding-newest", "dspark", "domino", "dflash2", "xpress")
MIXED = dict(temperature=[0.0, 0.9, 1.3, 0.8, 0.0], top_p=[1, 1, 0.9, 1, 1], repetition_penalty=[1, 1, 1, 1.4, 1.6])
SHAPES = {"chain": None, "tree": Fixed.of(UNEVEN), "confident": ConfidenceTree(12, 4, 3), "opt": OptTree(10, 0.0, 4)}


def weighted(head, spread=0.3):
    """Weights large enough that guesses differ."""
    return jax.tree.map(lambda x: x + spread * jax.random.normal(jax.random.key(x.size), x.shape),
                        head.init_params(jax.random.key(0)))


@functools.cache
def drafter(name):
    head = HEADS[name]
    return BlockDraft(head).for_target(model("llama")[0]), HeadWeights(weighted(head))


@functools.cache
def plain():
    return texts(decode(Autoregressive(), "llama", prompts(5), MIXED, eos=[1]))


@pytest.mark.wide(but=("dspark-tree",))
@pytest.mark.parametrize(("name", "shape"), often(
    [("dspark", "tree"), ("dspark", "confident"), ("jetspec", "opt"), *((name, "chain") for name in SHOWN)],
    [(name, shape) for name in HEADS for shape in SHAPES
     if shape in ("chain", "tree") or name in ("jetspec", "dspark")]))
def test_with_seed_exact_the_output_is_plain_decodings(name, shape):
    """Greedy, sampled, truncated and penalised rows in one batch."""
    source, weights = drafter(name)
    s = decode(Speculative(source, shape=SHAPES[shape]), "llama", prompts(5), MIXED, eos=[1], draft=weights)
    assert texts(s) == plain()
    assert np.asarray(s.stats.drafted).sum() > 0


@pytest.mark.wide
@pytest.mark.parametrize("name", often(SHOWN, HEADS))
def test_drafting_computes_the_logits_of_training(name):
    source, weights = drafter(name)
    network, target = model("llama")
    whole = jnp.asarray(np.random.default_rng(3).integers(0, VOCABULARY, (3, 20)), jnp.int32)
    _, features = target_outputs(network, source.head, target, whole, "float32")
    given = [2, 11, 15]
    trained = blocks_at(source.head, weights.head, features, whole, jnp.asarray(given)[:, None] - 1,
                        lambda x: embeddings(network, target, x), lambda x: logits_of(network, target, x))
    _, params, _, s = start(Speculative(source), "llama",
                            [row[:n].tolist() for row, n in zip(np.asarray(whole), given, strict=True)], {},
                            draft=weights, width=4)
    longest = source.head.longest
    following = jnp.stack([row[n:n + longest - 1] for row, n in zip(whole, given, strict=True)])
    logits, chance = jax.jit(functools.partial(drafted_logits, source))(params, s, following)
    np.testing.assert_allclose(logits, trained.logits[:, 0], atol=2e-5, rtol=1e-5)
    assert trained.positions[:, 0, 0].tolist() == given
    if chance is not None:
        np.testing.assert_allclose(chance, jax.nn.sigmoid(trained.chance[:, 0]), atol=1e-5)


@pytest.mark.wide
@pytest.mark.parametrize("name", often(SHOWN, HEADS))
def test_after_any_rounds_the_cache_is_that_of_the_text(name):
    """Rounds that accept and reject leave the cache of a head that has read the text as a prompt, in other chunks."""
    source, weights = drafter(name)
    alg = Speculative(source, shape=Fixed.of(UNEVEN))
    network, params, chain, s = start(alg, "llama", prompts(5), MIXED, new=30, draft=weights)
    s = drivers.advance(alg, network, params, chain, s, jnp.int32(6))
    rows = [row[:n].tolist() for row, n in zip(np.asarray(s.tokens), np.asarray(s.length), strict=True)]
    assert np.asarray(s.running).all() and np.asarray(s.stats.accepted).any()
    np.testing.assert_array_equal(s.algo[0].cache.length, s.length - 1)
    for width in (5, 64):
        fresh = start(alg, "llama", rows, {}, size=64, draft=weights, width=width)[3]
        for row, n in enumerate(np.asarray(s.length)):
            for held, new in zip(s.algo[0].cache.kv, fresh.algo[0].cache.kv, strict=True):
                np.testing.assert_allclose(held[row, :, :n - 1], new[row, :, :n - 1], atol=2e-5, rtol=1e-5)


TREES = 25_000


LAWS = [("dflash", Chain(3), Rejection(), None), ("dspark", SurvivalChain(3, 0.25), Rejection(), None),
        ("domino", Fixed.balanced(2, 2), MultiRound(), None), ("dflash2", Chain(3), Rejection(), None),
        ("dflash", Chain(3), Rejection(), tuple(range(5, 12))), ("dspark", ConfidenceTree(5, 3, 2), MultiRound(), None),
        ("dspark", LoadAwareChains(((25_000, 1.0), (100_000, 2.5)), 3), Rejection(), None)]


@pytest.mark.wide
@pytest.mark.parametrize(("name", "shape", "verify", "ids"), often(LAWS[1:5:3] + LAWS[2:3], LAWS))
def test_drafts_of_a_head_keep_the_targets_distribution(name, shape, verify, ids):
    """Also those that are cut by confidence, and of a head that knows only some of the tokens."""
    vocab = VOCABULARY if ids is None else len(ids)
    head = dataclasses.replace(HEADS[name], taps=(), vocab=vocab, config=dataclasses.replace(CONFIG, vocab=vocab),
                               feature_width=8, target_vocab=VOCABULARY, own_head=True, own_table=True)
    own = HeadWeights(weighted(head, 0.5), None if ids is None else jnp.asarray(ids, jnp.int32))
    alg = Speculative(BlockDraft(head, vocab_size=VOCABULARY), verify, shape)
    s = decode(alg, "toy", [PROMPT] * TREES, LAW_POLICIES["temperature"], new=3, size=16, draft=own)
    made, wanted = np.asarray(s.tokens)[:, len(PROMPT):len(PROMPT) + 3], joint("temperature")
    for n in (1, 2, 3):
        counts = np.bincount(made[:, :n] @ VOCABULARY ** np.arange(n)[::-1], minlength=VOCABULARY**n)
        assert chi_square(counts, wanted.reshape(VOCABULARY**n, -1).sum(1) * TREES) > ALARM
    assert 0 < np.asarray(s.stats.accepted).sum() < np.asarray(s.stats.drafted).sum()
    if isinstance(shape, (SurvivalChain, LoadAwareChains)):        # some chains are cut
        assert np.asarray(s.stats.drafted).sum() < 3 * np.asarray(s.stats.rounds).sum()


@pytest.mark.wide
@pytest.mark.parametrize("name", ["dflash", "dspark", "domino", "dflash2", "xpress", "jetspec"])
def test_an_entry_of_the_registry_takes_a_trained_drafter(name):
    head = HEADS[name]
    draft = TrainedDrafter(name, head, weighted(head))
    alg = algorithms.make(name, lm("llama"), draft)
    s = decode(alg.bare(), "llama", prompts(5), MIXED, eos=[1], draft=alg.weights)
    assert texts(s) == plain() and alg.traits.guarantee == "seed-exact"
    with pytest.raises(ValueError, match=f"length: got 9, the head predicts {head.longest} tokens"):
        algorithms.make(name, lm("llama"), draft, length=9)
    other = TrainedDrafter(name, MedusaHead((), VOCABULARY, width=16), {})
    with pytest.raises(ValueError, match=f"draft: got one with a MedusaHead, '{name}' takes one with a block head"):
        algorithms.make(name, lm("llama"), other)


@pytest.mark.wide
@pytest.mark.parametrize("name", ["dflash", "dspark", "domino", "dflash2", "xpress"])
def test_training_lowers_the_loss(name):
    network, target = model("llama")
    objective = AnchoredBlocks(network, HEADS[name], anchors=6)
    batch = jnp.asarray(np.random.default_rng(0).integers(0, VOCABULARY, (4, 25)), jnp.int32)
    step = jax.jit(jax.value_and_grad(lambda w: objective(w, batch, target), has_aux=True))
    weights = HEADS[name].init_params(jax.random.key(0))
    losses = []
    for _ in range(12):
        (loss, scalars), grads = step(weights)
        losses.append(float(loss))
        weights = jax.tree.map(lambda w, g: w - 0.1 * jnp.sign(g) * 0.05, weights, grads)
    assert losses[-1] < losses[0] - 0.01 and set(scalars) == {"loss", *(f"accepted_{k + 1}" for k in range(
        HEADS[name].longest))}


@pytest.mark.wide
def test_dflash2s_selector_learns_among_candidates_with_the_texts_token():
    """As in the public trainers (`selector_training_candidates` and `compute_selector_loss` of vllm-project/speculators
    0.9.0): cross-entropy over the likeliest tokens, the last of which gives way to a token of the text that is not
    among them."""
    network, target = model("llama")
    head, draw = HEADS["dflash2"], np.random.default_rng(0)
    batch, weights = jnp.asarray(draw.integers(0, VOCABULARY, (4, 25)), jnp.int32), weighted(head)
    alone, whole = (AnchoredBlocks(network, head, anchors=6, selector=share) for share in (0.0, 1.0))
    blocks, _, live, _, labels = jax.jit(whole.blocks)(weights, batch, target)
    base, found = np.asarray(blocks.base), np.asarray(blocks.learned)
    ids = np.argsort(-base, -1, kind="stable")[..., :5]
    missing = ~(ids == np.asarray(labels)[..., None]).any(-1)
    assert 0.2 < missing[np.asarray(live)].mean() < 0.95
    ids[..., -1] = np.where(missing, labels, ids[..., -1])
    assert (np.sort(ids, -1) == np.nonzero(np.isfinite(found))[-1].reshape(ids.shape)).all()
    assert (np.isfinite(blocks.logits).sum(-1) == 5).all()                     # drafting has the likeliest alone
    same = np.isfinite(found) & np.isfinite(blocks.logits)
    np.testing.assert_allclose(found[same], np.asarray(blocks.logits)[same], rtol=1e-6)
    each = -np.take_along_axis(np.asarray(jax.nn.log_softmax(found)), np.asarray(labels)[..., None], -1)[..., 0]
    each = each * np.exp(-np.arange(each.shape[-1]) / 4)
    expected = each[np.asarray(live)].sum() / np.asarray(live).sum()
    losses = [float(jax.jit(lambda w: x(w, batch, target)[0])(weights)) for x in (alone, whole)]        # noqa: B023
    assert losses[1] - losses[0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.wide
def test_dominos_loss_moves_from_the_logits_before_the_correction_to_those_after_it():
    """lambda falls linearly from 1 to 0; at the beginning the correction is not trained."""
    objective = objective_of("domino", lm("llama"))
    assert objective.base == 1
    network, target = model("llama")
    objective = AnchoredBlocks(network, HEADS["domino"], anchors=6, loss="hard", base=1.0)
    batch = jnp.asarray(np.random.default_rng(0).integers(0, VOCABULARY, (4, 25)), jnp.int32)
    weights = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape),
                           HEADS["domino"].init_params(jax.random.key(0)))
    run = jax.jit(jax.value_and_grad(lambda w, share: objective(w, batch, Scheduled(target, share))[0]))
    (first, slope), (half, _), (last, _) = (run(weights, jnp.float32(share)) for share in (0, 0.5, 1))
    assert float(half) == pytest.approx((float(first) + float(last)) / 2, rel=1e-5)
    assert abs(float(first - last)) > 1e-4 and float(last) == pytest.approx(float(jax.jit(
        lambda w: objective(w, batch, target)[0])(weights)), rel=1e-5)
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(slope["correction"]))


@pytest.mark.wide
def test_dominos_correction_is_that_of_a_torch_gru():
    """SpecForge's formulas: the GRU reads the tokens before, and the first draft stays as it is."""
    torch = pytest.importorskip("torch")
    head = HEADS["domino"]
    weights, draw = weighted(head), np.random.default_rng(0)
    hidden, table = (draw.standard_normal(shape).astype(np.float32) for shape in ((2, 5, 16), (VOCABULARY, 16)))
    base, tokens = draw.standard_normal((2, 5, VOCABULARY)).astype(np.float32), draw.integers(0, VOCABULARY, (2, 5))
    got = walk(head.network(weights).correction, jnp.asarray(base), jnp.asarray(hidden), jnp.asarray(tokens),
               lambda x: jnp.asarray(table)[x], jnp.zeros((2, 1, head.memory)), 0)
    own = {name: torch.tensor(np.asarray(x["kernel"]).T.copy()) for name, x in weights["correction"].items()}
    gru = torch.nn.GRU(16, 8, bias=False, batch_first=True)
    gru.load_state_dict({"weight_ih_l0": own["into"], "weight_hh_l0": own["again"]})
    with torch.no_grad():
        states = gru(torch.tensor(table[tokens]))[0]
        inner = torch.nn.functional.silu(torch.cat([torch.tensor(hidden), states], -1) @ own["down"].T)
        wanted = torch.tensor(base) + (inner @ own["up"].T) * (torch.arange(5) > 0)[:, None]
    np.testing.assert_allclose(got, wanted.numpy(), atol=1e-5, rtol=1e-5)


@pytest.mark.wide
@pytest.mark.parametrize("name", ["jetspec", "dflash2", "dspark", "xpress"])
def test_a_shorter_chain_has_a_shorter_block(name, monkeypatch):
    """The head computes as many slots as there are drafts; a causal head's are equal to those of a whole block."""
    source, weights = drafter(name)
    _, params, _, s = start(Speculative(source), "llama", prompts(3), {}, draft=weights)
    widths, step = [], BlockHead.step
    monkeypatch.setattr(BlockHead, "step", lambda self, weights, tokens, *rest: widths.append(tokens.shape[1]) or step(
        self, weights, tokens, *rest))
    long, short = (source.start(params, s, s.algo[0], room)[0].logits for room in (source.head.longest - 1, 1))
    assert widths == [source.head.block, 2 + source.head.offset] and short.shape[1] == 2
    if source.head.causal:
        np.testing.assert_allclose(short, long[:, :2], atol=1e-5)


def test_the_scheduler_adds_drafts_while_they_raise_the_speed():
    """DSpark's rule, over all drafts of a batch in the order of their survival."""
    times = ((4, 1.0), (8, 1.2), (16, 2.6), (28, 5.0))
    survival = np.sort(np.random.default_rng(0).uniform(0, 1, 24).astype(np.float32))[::-1]
    shape, rows = LoadAwareChains(times, 6), 3
    count = int(shape.count(jnp.log(jnp.asarray(survival)), jnp.int32(rows)))
    speed = [(rows + survival[:n].sum()) / np.interp(rows + n, *zip(*times, strict=True)) for n in range(25)]
    assert 0 < count < 24
    assert all(after >= before for before, after in itertools.pairwise(speed[:count + 1]))
    assert speed[count + 1] < speed[count]
    with pytest.raises(ValueError, match=r"times: got .*takes ascending numbers"):
        LoadAwareChains(((8, 1.0), (4, 1.0)))


@pytest.mark.wide
def test_lengths_by_the_load_of_the_batch_change_no_output():
    source, weights = drafter("dspark")
    alg = Speculative(source, shape=LoadAwareChains(((5, 1.0), (25, 6.0)), 4), packed=True)
    s = decode(alg, "llama", prompts(5), MIXED, eos=[1], draft=weights)
    assert texts(s) == plain()
    assert 0 < np.asarray(s.stats.drafted).sum() < 4 * np.asarray(s.stats.rounds).sum()
    with pytest.raises(ValueError, match="threshold: got None, takes a number for a head without a confidence head"):
        algorithms.make("dspark", lm("llama"), TrainedDrafter("dspark", HEADS["domino"], weights.head), threshold=None)


def test_a_temperature_is_found_again():
    logits = jax.random.normal(jax.random.key(0), (500,)) * 3
    live = jnp.arange(500) < 400
    for temperature in (0.5, 2.5):
        accepted = jnp.where(live, jax.nn.sigmoid(logits / temperature), 1.0)      # what does not count is wrong
        np.testing.assert_allclose(fitted_temperature(logits, accepted, live), temperature, rtol=1e-3)
    assert fitted_temperature(logits, jax.nn.sigmoid(logits / 100), live) == pytest.approx(RANGE[1], rel=1e-3)


@pytest.mark.wide
def test_fitted_confidence_is_nearer_to_the_acceptance_and_is_saved(tmp_path):
    target = lm("llama")
    drafter = fresh("dspark", target)
    texts = np.random.default_rng(0).integers(0, target.vocab_size, (6, 40))
    fitted = fit_confidence(target, drafter, texts, anchors=8, rows=4)

    def entropy(head):
        blocks, y, live, _, _ = AnchoredBlocks(target.model, head, anchors=8).blocks(
            drafter.params, jnp.pad(jnp.asarray(texts[:4]), ((0, 0), (0, 1))), target.params)
        each = -y * jax.nn.log_sigmoid(blocks.chance) - (1 - y) * jax.nn.log_sigmoid(-blocks.chance)
        return float(jnp.where(live, each, 0).sum())

    assert len(fitted.head.temperatures) == fitted.head.longest and entropy(fitted.head) < entropy(drafter.head)
    save_drafter(tmp_path, fitted)
    assert load_drafter(tmp_path, target).head == fitted.head
    options = dict(max_new_tokens=12, eos_token_id=[])
    plain = dx.generate(target, [[1, 2, 3]], **options).tokens.tolist()
    assert dx.generate(target, [[1, 2, 3]], algorithm="dspark", draft=fitted, **options).tokens.tolist() == plain
    with pytest.raises(ValueError, match="got one of 'dflash' without a confidence head"):
        fit_confidence(target, fresh("dflash", target), texts)
