"""MuMo: units that begin with the newest token, ranked by the head, verified by the target."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import decodax as dx
from decodax.algorithms.speculative import Speculative
from decodax.algorithms.speculative.heads import HeadWeights, TrainedHead, drafting_source
from decodax.algorithms.speculative.heads.mumo import UnitCandidates
from decodax.io.drafters import TrainedDrafter, load_drafter, save_drafter
from decodax.models.drafters.units import UnitHead
from decodax.train.drafting.features import target_outputs
from decodax.train.drafting.systems import first_weights, objective_of
from tests.drafters.test_heads import MIXED, plain
from tests.laws.cases import VOCABULARY, decode, lm, prompts, start, texts


@functools.cache
def units():
    """Parts of what the target writes, of 2 to 4 tokens, and others, padded with -1."""
    found = dict.fromkeys(tuple(row[i:i + n]) for row in plain() for n in (2, 3, 4) for i in range(0, len(row) - n, n))
    draw = np.random.default_rng(0)
    found |= dict.fromkeys(tuple(draw.integers(0, VOCABULARY, 3).tolist()) for _ in range(20))
    return np.array([[*unit, -1, -1][:4] for unit in found], np.int32)


@functools.cache
def drafter():
    head = UnitHead((), len(units()), width=16, heads=3, inner=8)
    weights = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(jax.random.key(x.size), x.shape),
                           head.init_params(jax.random.key(0)))
    return TrainedDrafter("mumo", head, weights, jnp.asarray(units()))


@pytest.mark.wide
def test_the_output_is_plain_decodings_and_drafts_are_the_heads_best_units():
    made = drafter()
    draft = UnitCandidates(TrainedHead(made.head), 3)
    alg, weights = Speculative(draft), HeadWeights(made.params, made.ids)
    s = decode(alg, "llama", prompts(5), MIXED, eos=[1], draft=weights)
    assert texts(s) == plain()
    assert np.asarray(s.stats.accepted).sum() > 4
    network, params, chain, s = start(alg, "llama", prompts(5), MIXED, eos=[1], draft=weights)
    proposal, _ = jax.jit(lambda params, s: draft.propose(params, chain, s, s.algo[0], "coupled"))(params, s)
    silu = lambda x: x / (1 + np.exp(-x))
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), made.params)
    for row in range(5):
        text = s.tokens[row:row + 1, :int(s.length[row]) - 1]       # the newest token is not processed yet
        f = np.asarray(target_outputs(network, made.head, params.target, text, "float32")[1][0, -1], np.float64)
        f = f + silu(f @ p["up"]["kernel"] + p["up"]["bias"]) @ p["down"]["kernel"] + p["down"]["bias"]
        order = np.argsort(-(f @ p["head"]["kernel"]))
        wanted = [[int(x) for x in units()[i][1:] if x >= 0] for i in order if units()[i, 0] == int(s.newest[row])][:3]
        up, found = np.asarray(proposal.parents[row]), {0: []}
        for i in np.flatnonzero(np.asarray(proposal.live[row])):
            found[i + 1] = [*found[up[i]], int(proposal.tokens[row, i])]
        assert sorted(map(tuple, found.values())) == sorted({tuple(x[:n]) for x in wanted for n in range(len(x) + 1)} |
                                                            {()})


@pytest.mark.wide
def test_the_head_learns_the_longest_unit_and_is_saved_with_the_units(tmp_path):
    target, optimizer = lm("llama"), optax.adam(1e-2)
    objective = objective_of("mumo", target, units())
    batch = jnp.asarray(np.random.default_rng(0).integers(0, VOCABULARY, (4, 17)), jnp.int32)
    weights = first_weights(objective, target, jax.random.key(0))
    one = jax.jit(lambda w: objective(w, batch, target.params))
    loss, scalars = one(weights)
    logits = objective.head.logits(weights, target_outputs(target.model, objective.head, target.params, batch[:, :-1],
                                                           "float32")[1], 0, None)
    losses, right = [], []
    for row in range(4):
        text = np.asarray(batch[row]).tolist()
        for at in range(16):
            sizes = [(u >= 0).sum() for u in units()]
            fits = [i for i, u in enumerate(units()) if text[at + 1:at + 1 + sizes[i]] == u[:sizes[i]].tolist()]
            if fits:
                label = max(fits, key=lambda i: sizes[i])
                losses.append(-float(jax.nn.log_softmax(logits[row, at])[label]))
                same = [i for i, u in enumerate(units()) if u[0] == text[at + 1]]
                best = units()[max(same, key=lambda i: float(logits[row, at, i]))]
                right.append(at + 2 < 17 and int(best[1]) == text[at + 2])
    assert float(loss) == pytest.approx(np.mean(losses), rel=1e-4)
    assert float(scalars["accepted_1"]) == pytest.approx(np.mean(right), rel=1e-4)
    state = optimizer.init(weights)
    slope = jax.grad(lambda w: objective(w, batch, target.params)[0])
    step = jax.jit(lambda w, state: optimizer.update(slope(w), state))
    for _ in range(8):
        updates, state = step(weights, state)
        weights = optax.apply_updates(weights, updates)
    assert one(weights)[0] < 0.97 * loss
    save_drafter(tmp_path, TrainedDrafter("mumo", objective.head, weights, jnp.asarray(units())), dtype="float32")
    back = load_drafter(tmp_path, target)
    assert back.head == objective.head and np.array_equal(back.ids, units())
    assert isinstance(dx.algorithms.make("mumo", target, back).draft, UnitCandidates)


def test_a_drafter_of_units_is_for_mumo_alone():
    with pytest.raises(ValueError, match="which predicts units of several tokens; only 'mumo' takes it"):
        drafting_source(lm("llama"), drafter())
    with pytest.raises(ValueError, match=r"^ids: got none, 'mumo' takes units \[U, L\]"):
        objective_of("mumo", lm("llama"))
    with pytest.raises(ValueError, match=r"^candidates: got 0, takes at least 1"):
        UnitCandidates(TrainedHead(drafter().head), 0)
