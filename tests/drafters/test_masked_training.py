"""Training at masks, PARD and P-EAGLE: its logits are those of drafting, and its loss is their mean."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax.core.window import causal
from decodax.train.drafting.masked import (
    AlignedDraftModel,
    MaskedPairs,
    TunedDraftModel,
    kept_masks,
    masked_nodes,
)
from tests.drafters.test_block_heads import weighted
from tests.drafters.test_p_eagle import HEAD, in_one_pass
from tests.laws.cases import VOCABULARY, model

T, K, MASK = 10, 4, 5


def test_the_drop_keeps_a_share_of_the_chains_at_each_depth_and_only_what_came_before():
    chain, depth = kept_masks(100, 6, 0.7, 0.2)
    at = [set(chain[depth == d]) for d in range(1, 6)]
    assert [len(x) for x in at] == [70, 48, 34, 24, 20]     # rounded down; 0.7 ** 5 is below 0.2
    assert all(deeper <= x for x, deeper in itertools.pairwise(at))


@pytest.mark.wide
@pytest.mark.parametrize("system", ["pard", "p-eagle"])
def test_masks_at_all_places_give_the_logits_of_drafting_and_the_loss_is_their_mean(system):
    network, target = model("llama")
    batch = jnp.asarray(np.random.default_rng(5).integers(0, VOCABULARY, (2, T + 1)), jnp.int32)
    tokens, head, parallel = batch[:, :-1], dataclasses.replace(HEAD, drafts=K), system == "p-eagle"
    weights = weighted(head) if parallel else model("sliding")[1]
    objective = MaskedPairs(network, K, "hard", 1.0, head=head) if parallel else TunedDraftModel(
        network, K, ratio=1.0, draft=model("sliding")[0], mask=MASK)
    A = T - parallel                        # the last token of a text has no pair
    order = np.random.default_rng(0).permuted(np.tile(np.arange(A), (2, 1)), axis=1)
    chain, depth = kept_masks(A, K, 1.0, 0.2)
    anchors, last = order[:, chain], 5

    @jax.jit
    def computed(weights, target):
        out = network.apply(target, causal(tokens, jnp.zeros(2, jnp.int32)), network.init_cache(2, 0))
        truth, own = objective.logits(weights, target, tokens, masked_nodes(T, jnp.asarray(order), chain, depth))
        if parallel:                        # after the newest pair, and after each mask
            features = head.features(out.hidden, out.layers)
            alone = jnp.stack([in_one_pass(head, weights, features[i:i + 1], tokens[i:i + 1, 1:], last)
                               for i in range(2)])
        else:
            text = jnp.concatenate([tokens[:, :last + 1], jnp.full((2, K - 1), MASK)], 1)
            alone = objective.draft.apply(weights, causal(text, jnp.zeros(2, jnp.int32)),
                                          objective.draft.init_cache(2, 0)).logits()[:, last:]
        return objective(weights, batch, target), truth, out.logits(), own, alone, jax.nn.log_softmax(own)

    (loss, scalars), truth, wanted, own, alone, log_q = jax.tree.map(np.asarray, computed(weights, target))
    np.testing.assert_allclose(truth, wanted, atol=1e-5)
    for row in range(2):
        nodes = [last, *(T + np.flatnonzero(anchors[row] == last))]
        np.testing.assert_allclose(own[row, nodes], alone[row], atol=2e-5, rtol=1e-5)
    each = []
    for row in range(2):
        for node, at in enumerate([*range(T), *(anchors[row] + depth)]):
            if at < A:                      # where the target predicts the same token
                each.append(-log_q[row, node, batch[row, at + 1 + parallel]])
    assert loss == pytest.approx(np.mean(each), rel=1e-5)
    p, q = np.exp(truth - np.logaddexp.reduce(truth, -1, keepdims=True)), np.exp(log_q[:, :T])
    overlap = np.minimum(p[:, parallel:], q[:, :A]).sum(-1).mean()
    assert scalars["accepted_1"] == pytest.approx(overlap, rel=1e-5) and len(scalars) == 1 + K


@pytest.mark.wide
def test_masks_that_read_the_target_have_its_states_and_count_by_the_tokens_before_them():
    """PARD-2: logits are those of drafting, and a mask weighs what the target gives the text from its anchor on."""
    network, target = model("llama")
    draft, own = model("sliding")
    params = {"draft": own, "projection": {"weight": jnp.asarray(
        np.random.default_rng(1).normal(size=(16, 16)), jnp.float32)}}
    objective = AlignedDraftModel(network, K, ratio=1.0, draft=draft, mask=MASK, scale=0.1, without=0.0)
    batch = jnp.asarray(np.random.default_rng(5).integers(0, VOCABULARY, (1, T + 1)), jnp.int32)
    tokens, last, zero = batch[:, :-1], 5, jnp.zeros(1, jnp.int32)
    chain, depth = kept_masks(T, K, 1.0, 0.2)
    nodes = masked_nodes(T, jnp.arange(T, dtype=jnp.int32)[None], chain, depth)
    truth, found = jax.jit(objective.logits)(params, target, tokens, nodes)
    out = network.apply(target, causal(tokens, zero), network.init_cache(1, 0))
    before = jnp.concatenate([jnp.zeros((1, 16)), out.hidden[0, :last], jnp.repeat(
        out.hidden[0, last - 1:last], K - 1, 0)])
    text = jnp.concatenate([tokens[:, :last + 1], jnp.full((1, K - 1), MASK)], 1)
    mixed = own["embed"][text] + 0.1 * before @ params["projection"]["weight"].T
    window = causal(text, zero).replace(embeddings=mixed, embedded=jnp.ones(text.shape, bool))
    alone = draft.apply(own, window, draft.init_cache(1, 0)).logits()[0, last:]
    at = [last, *(T + np.flatnonzero(chain == last))]
    np.testing.assert_allclose(found[0, np.array(at)], alone, atol=2e-5, rtol=1e-5)
    p = np.asarray(jax.nn.softmax(truth))[0, np.arange(T), np.asarray(batch)[0, 1:]]
    weights = objective.weights(truth, batch, nodes, np.concatenate([np.zeros(T, np.int64), depth]))
    np.testing.assert_allclose(weights[0, np.array(at)], [np.prod(p[last:last + d]) for d in range(K)], rtol=1e-5)
    loss, _ = objective(params, batch, target)
    assert np.isfinite(loss)
