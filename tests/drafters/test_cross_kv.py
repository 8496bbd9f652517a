"""Heads on the target's keys and values draft what training computes and the papers' formulas say, and change no
output."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.algorithms.plain import Autoregressive
from decodax.algorithms.speculative import Speculative
from decodax.algorithms.speculative.heads import HeadWeights
from decodax.algorithms.speculative.heads.cross_kv import CrossKVDraft
from decodax.algorithms.speculative.heads.mixture_of_attentions import MixtureDraft
from decodax.algorithms.speculative.trees import CaPE, Chain, Fixed
from decodax.core import drivers
from decodax.core.types import logits_of
from decodax.io.drafters import TrainedDrafter, load_drafter, save_drafter
from decodax.models.drafters.cross_kv import CrossKVHead
from decodax.models.names import flatten
from decodax.models.transformer import Transformer
from decodax.train.drafting.cross_kv import DelayedKeys, above, delayed, target_keys
from decodax.train.drafting.systems import first_weights, objective_of
from tests.algorithms.speculative.uneven import UNEVEN
from tests.drafters.drafting import drafted_logits
from tests.laws.cases import VOCABULARY, decode, lm, model, prompts, start, texts
from tests.matrix import often

CONFIG = model("llama")[0].config
ONE = dataclasses.replace(CONFIG, layers=CONFIG.layers[:1])
WINDOW = 5
SLIDING = dataclasses.replace(ONE, layers=(dataclasses.replace(ONE.layers[0], sliding=WINDOW),), qkv_bias=True)
HEADS = {"glide": CrossKVHead((), VOCABULARY, config=ONE, layer=1),
         "longspec": CrossKVHead((), VOCABULARY, config=SLIDING, layer=1, cross_norm=True, final_norm=False),
         "mixture": objective_of("mixture-of-attentions", lm("llama")).head}
HEADS["mixture-above"] = dataclasses.replace(HEADS["mixture"], above=1)
MIXED = dict(temperature=[0.0, 0.9, 1.3, 0.8, 0.0])
SHAPES = {"chain": Chain(4), "tree": Fixed.of(UNEVEN), "cape": CaPE(3)}


@functools.cache
def drafter(name):
    """A head with weights large enough that its guesses differ, and its source."""
    head = HEADS[name]
    weights = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(jax.random.key(x.size), x.shape),
                           head.init_params(jax.random.key(0)))
    return (MixtureDraft if name.startswith("mixture") else CrossKVDraft)(head).for_target(
        model("llama")[0]), HeadWeights(weights)


@pytest.mark.wide
@pytest.mark.parametrize(("name", "shape"), often([("longspec", "tree")], itertools.product(HEADS, SHAPES)))
def test_with_seed_exact_the_output_is_plain_decodings(name, shape):
    """Greedy and sampled rows in one ragged batch; the text outgrows the window."""
    source, weights = drafter(name)
    s = decode(Speculative(source, shape=SHAPES[shape]), "llama", prompts(5), MIXED, eos=[1], draft=weights)
    assert texts(s) == texts(decode(Autoregressive(), "llama", prompts(5), MIXED, eos=[1]))
    assert np.asarray(s.stats.accepted).sum() > 0


def norm(x, scale):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + CONFIG.norm.eps) * scale


def heads_of(x, w, name, d, at=None):
    """Projections, split into heads and rotated by the positions `at`."""
    y = (x @ w[f"{name}.kernel"] + w.get(f"{name}.bias", 0)).reshape(len(x), -1, d)
    if at is None:
        return y
    angle = at[:, None, None] * CONFIG.layers[0].rope.theta ** (-np.arange(d // 2) * 2 / d)
    a, b = np.split(y, 2, -1)
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)


def attention(q, k, v, seen):
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], 1) for x in (k, v))
    weights = np.where(seen[:, None], np.exp(np.einsum("qhd,khd->qhk", q, k) / np.sqrt(q.shape[2])), 0)
    weights = weights / np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    return np.einsum("qhk,khd->qhd", weights, v).reshape(len(q), -1)


def mlp_half(x, w, layer):
    y = norm(x, w[f"{layer}.mlp_in.scale"])
    gate, up = y @ w[f"{layer}.mlp.gate.kernel"], y @ w[f"{layer}.mlp.up.kernel"]
    return x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{layer}.mlp.down.kernel"]


def keys(x, w, layer, d, at):
    y = norm(x, w[f"{layer}.attn_in.scale"])
    return heads_of(y, w, f"{layer}.attn.k", d, at), heads_of(y, w, f"{layer}.attn.v", d)


def attention_half(x, w, layer, d, at, kv, seen):
    q = heads_of(norm(x, w[f"{layer}.attn_in.scale"]), w, f"{layer}.attn.q", d, at)
    return x + attention(q, *kv, seen) @ w[f"{layer}.attn.o.kernel"]


def by_hand(name, tokens, known):
    """Logits `f64[V]` after a text by the papers' formulas in NumPy, if the target's cache has its first `known`
    tokens."""
    h, d, at = HEADS[name], CONFIG.head_dim, np.arange(len(tokens))
    own, target = ({k: np.asarray(x, np.float64) for k, x in flatten(w).items()}
                   for w in (drafter(name)[1].head, model("llama")[1]))
    before, theirs, first = at[:, None] - at, [], None
    x = embedded = target["embed"][list(tokens)]
    for layer in ("layers.0", "layers.1"):
        theirs.append(keys(x, target, layer, d, at))
        x = mlp_half(attention_half(x, target, layer, d, at, theirs[-1], before >= 0), target, layer)
        first = x if layer == "layers.0" else first
    window = (before >= 0) & (before < (h.config.layers[0].sliding or len(tokens)))
    x = attention_half(embedded, own, "layers.0", d, at, keys(embedded, own, "layers.0", d, at), window)
    seen = np.broadcast_to(at < known, window.shape)
    if name.startswith("mixture"):
        x, vectors, wide, all_layers = mlp_half(x, own, "layers.0"), [], h.summary.head_dim, np.arange(2)
        for t in at:
            y = np.stack([np.concatenate([k[t], v[t]], -1).reshape(-1) for k, v in theirs])
            y = attention_half(y, own, "summary", wide, all_layers, keys(y, own, "summary", wide, all_layers),
                               np.ones((2, 2), bool))
            vectors.append(mlp_half(y, own, "summary").mean(0))
        read = keys(np.stack(vectors) @ own["project.kernel"] + own["project.bias"], own, "layers.1", d, at)
        x = mlp_half(attention_half(x, own, "layers.1", d, at, read, seen), own, "layers.1")
        if h.above:         # the target's last layer on its own states of the text, and on the head's of the drafts
            x = np.where(at[:, None] < known, first, x)
            x = attention_half(x, target, "layers.1", d, at, keys(x, target, "layers.1", d, at), before >= 0)
            x = norm(mlp_half(x, target, "layers.1"), target["norm.scale"])
        return x[-1] @ target["lm_head.kernel"]
    y = norm(x, own["cross_norm.scale"]) if h.cross_norm else x
    x = x + attention(heads_of(y, own, "cross.q", d, at), *theirs[1], seen) @ own["cross.o.kernel"]
    x = mlp_half(x, own, "layers.0")[-1]
    return (norm(x, own["norm.scale"]) if h.final_norm else x) @ target["lm_head.kernel"]


@pytest.mark.wide(but=("longspec",))
@pytest.mark.parametrize("name", HEADS)
def test_drafting_training_and_the_formulas_agree(name):
    """After prompts of other lengths, read in chunks; one of them is a single token, so that the target's cache is
    empty."""
    source, weights = drafter(name)
    network, target = model("llama")
    whole = jnp.asarray(np.random.default_rng(3).integers(0, VOCABULARY, (3, 20)), jnp.int32)
    at = jnp.broadcast_to(jnp.arange(20, dtype=jnp.int32), whole.shape)
    _, _, read, layers = target_keys(network, target, whole, at, "float32")
    trained = [delayed(network, source.head, weights.head, target, whole, at, read, jnp.full_like(at, 1 + j))[0]
               for j in range(4)]
    given = [1, 11, 16]
    if name == "mixture-above":         # what a draft sees of those before it depends on their own depth
        delays = jnp.maximum(at - jnp.asarray(given)[:, None] + 2, 1)
        own = delayed(network, source.head, weights.head, target, whole, at, read, delays)[1]
        trained = [logits_of(network, target, above(network, source.head, target, layers[0], own, at, delays))] * 4
    _, params, _, s = start(Speculative(source, shape=Chain(4)), "llama",
                            [row[:n].tolist() for row, n in zip(np.asarray(whole), given, strict=True)], {},
                            draft=weights, width=4)
    following = jnp.stack([row[n:n + 3] for row, n in zip(whole, given, strict=True)])
    drafted, _ = jax.jit(functools.partial(drafted_logits, source))(params, s, following)
    for row, n in enumerate(given):
        np.testing.assert_allclose(drafted[row], np.stack([x[row, n - 1 + j] for j, x in enumerate(trained)]),
                                   atol=2e-5, rtol=1e-5)
        for j in (0, 3):
            np.testing.assert_allclose(drafted[row, j], by_hand(name, np.asarray(whole)[row, :n + j], n - 1), atol=5e-5,
                                       rtol=1e-4)


@pytest.mark.wide
@pytest.mark.parametrize("name", often(["longspec"], HEADS))
def test_after_any_rounds_the_cache_is_that_of_the_text(name):
    """Rounds that accept and reject leave what a head holds that has read the text as a prompt, in other chunks; with a
    window, that of the latest tokens alone."""
    source, weights = drafter(name)
    alg = Speculative(source, shape=Fixed.of(UNEVEN))
    network, params, chain, s = start(alg, "llama", prompts(5), MIXED, new=30, draft=weights)
    s = drivers.advance(alg, network, params, chain, s, jnp.int32(6))
    rows = [row[:n].tolist() for row, n in zip(np.asarray(s.tokens), np.asarray(s.length), strict=True)]
    assert np.asarray(s.running).all() and np.asarray(s.stats.accepted).any()
    held, fresh = (x.algo[0].cache for x in (s, start(alg, "llama", rows, {}, draft=weights, width=7)[3]))
    np.testing.assert_array_equal(held.length, s.length - 1)
    if name == "longspec":
        assert held.kv[0].shape[2] == WINDOW
        np.testing.assert_array_equal(held.positions[0], fresh.positions[0])
    for row, n in enumerate(np.asarray(s.length)):
        slots = min(n - 1, held.kv[0].shape[2])
        for one, other in zip(held.kv, fresh.kv, strict=True):
            np.testing.assert_allclose(one[row, :, :slots], other[row, :, :slots], atol=2e-5, rtol=1e-5)


def test_the_loss_delays_keys_as_drafting_does_and_training_lowers_it():
    target = lm("llama")
    objective = objective_of("glide", target, drafts=3)
    weights = first_weights(objective, target, jax.random.key(0))
    last = target.params["layers"]["1"]["attn"]
    np.testing.assert_array_equal(weights["cross"]["q"]["kernel"], last["q"]["kernel"])
    np.testing.assert_array_equal(weights["layers"]["0"]["attn"]["k"]["kernel"], last["k"]["kernel"])
    batch = jnp.asarray(np.resize([3, 1, 4, 1, 5, 9, 2, 6], (4, 25)), jnp.int32)
    step = jax.jit(jax.value_and_grad(lambda w: objective(w, batch, target.params), has_aux=True))
    (loss, scalars), slope = step(weights)
    tokens, at = batch[:, :-1], jnp.broadcast_to(jnp.arange(24, dtype=jnp.int32), (4, 24))
    read = target_keys(target.model, target.params, tokens, at, "float32")[2]
    logits, _ = delayed(target.model, objective.head, weights, target.params, tokens, at, read, at % 3 + 1)
    wanted = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch[:, 1:, None], 2).mean()
    assert float(loss) == pytest.approx(float(wanted), rel=1e-5) and set(scalars) == {
        "loss", "accepted_1", "accepted_2", "accepted_3"}
    for _ in range(6):
        weights = jax.tree.map(lambda x, dx: x - 0.05 * dx, weights, slope)
        (after, _), slope = step(weights)
    assert float(after) < 0.9 * float(loss)


@pytest.mark.wide
def test_longspec_moves_texts_far_back_and_draws_delays():
    target = lm("llama")
    objective = objective_of("longspec", target)
    assert objective == DelayedKeys(target.model, objective.head, 4, drawn=True, reach=256)
    assert objective.head.config.layers[0].sliding == 512 and objective.head.config.qkv_bias
    weights = first_weights(objective, target, jax.random.key(0))
    batch = jnp.asarray(np.random.default_rng(0).integers(0, VOCABULARY, (4, 25)), jnp.int32)
    near = dataclasses.replace(objective, reach=0)
    both = [jax.jit(x)(weights, batch, target.params)[0] for x in (objective, near)]
    assert np.isfinite(both).all() and both[0] != both[1]


@pytest.mark.wide
def test_the_mixture_also_learns_the_targets_hidden_states():
    target = lm("llama")
    objective = objective_of("mixture-of-attentions", target)
    weights = first_weights(objective, target, jax.random.key(0))
    batch = jnp.asarray(np.random.default_rng(0).integers(0, VOCABULARY, (4, 25)), jnp.int32)
    losses = [jax.jit(dataclasses.replace(objective, features=x))(weights, batch, target.params)[0] for x in (0.0, 1.0)]
    at = jnp.broadcast_to(jnp.arange(24, dtype=jnp.int32), (4, 24))
    _, hidden, read, _ = target_keys(target.model, target.params, batch[:, :-1], at, "float32")
    own = delayed(target.model, objective.head, weights, target.params, batch[:, :-1], at, read,
                  at % objective.steps + 1)[1]
    far = np.abs(np.asarray(own - hidden))
    assert float(losses[1] - losses[0]) == pytest.approx(np.where(far < 1, far ** 2 / 2, far - 0.5).mean(), rel=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("cache", ["kivi:bits=8", "streaming-llm:start_size=2,recent_size=8"])
def test_drafts_attend_to_whatever_the_targets_cache_keeps(cache):
    """The output is that of plain decoding with the same cache."""
    made = TrainedDrafter("glide", HEADS["glide"], drafter("glide")[1].head)
    out = [dx.generate(lm("llama"), prompts(4), max_new_tokens=16, temperature=[0.0, 0.9, 0.0, 0.7], cache=cache,
                       algorithm=algorithm) for algorithm in (None, dx.algorithms.make("glide", lm("llama"), made))]
    np.testing.assert_array_equal(out[0].tokens, out[1].tokens)


def test_a_head_for_another_target_is_refused(tmp_path):
    head, weights = HEADS["longspec"], drafter("longspec")[1].head
    save_drafter(tmp_path, TrainedDrafter("longspec", head, weights), "float32")
    assert load_drafter(tmp_path, lm("llama")).head == head
    other = dataclasses.replace(CONFIG, kv_heads=4)
    with pytest.raises(ValueError, match="draft: the head reads 2 keys and values of width 4 for a token, and layer 1"):
        CrossKVDraft(head).for_target(Transformer(other))
    with pytest.raises(ValueError, match="reads the keys and values of layer 7 of its target"):
        CrossKVDraft(dataclasses.replace(head, layer=7)).for_target(Transformer(CONFIG))
    with pytest.raises(ValueError, match="model: got Toy, takes a Transformer"):
        CrossKVDraft(head).for_target(model("toy")[0])
    with pytest.raises(ValueError, match="config: takes one layer"):
        dataclasses.replace(head, config=CONFIG)
    medusa = TrainedDrafter("glide", objective_of("medusa", lm("llama")).head, {})
    with pytest.raises(ValueError, match="got one with a MedusaHead, 'glide' takes one with a CrossKVHead"):
        dx.algorithms.make("glide", lm("llama"), medusa)
