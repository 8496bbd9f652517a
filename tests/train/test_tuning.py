"""Objectives that tune a whole model, each against its paper's formula in NumPy, and the Jacobi trajectories that are
collected."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.algorithms.contrastive import nmst
from decodax.core.window import causal
from decodax.sampling.base import Context
from decodax.sampling.degeneration import NonMonotonicEnd
from decodax.train import loop, sub_model
from decodax.train.loop import adamw, update
from decodax.train.lora import AdapterLoss
from decodax.train.tuning import (
    ConsistencyLoss,
    EarlyExitLoss,
    Example,
    ExampleBatches,
    ExampleRows,
    LexicalUnitLoss,
    NoisyLoss,
    ScheduledSamplingLoss,
    SelfTerminatingLoss,
    SemiAutoregressiveLoss,
    SortedLoss,
    Trajectory,
    TrajectoryBatches,
    collect_trajectories,
    losses_by_layer,
    sure_tokens,
)
from decodax.train.tuning.msn import with_noise
from decodax.train.tuning.scheduled_sampling import corrections
from decodax.train.tuning.spans import random_spans
from tests.by_hand import logits
from tests.small_models import PROMPTS, net

lm = functools.partial(net, 4)
L = 4
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 24, (3, 9))
LEARNED = np.arange(9) >= np.array([[3], [1], [6]])
BATCH = jnp.asarray(TOKENS, jnp.int32), jnp.asarray(LEARNED)


def log_p(tokens, layers=range(L)):
    """Log-probabilities after each token, `f64[T, V]`, of a network of some of the layers."""
    config = dataclasses.replace(lm().model.config, layers=tuple(lm().model.config.layers[i] for i in layers))
    params = {**lm().params, "layers": {str(n): lm().params["layers"][str(i)] for n, i in enumerate(layers)}}
    x = logits(config, params, tokens)
    return x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True)


def loss_of(layers, inputs=TOKENS):
    """Mean cross-entropy of the learned tokens; `layers` are those that run in each row."""
    own = [log_p(row[:-1], some)[np.arange(8), true[1:]]
           for row, true, some in zip(inputs, TOKENS, layers, strict=True)]
    return -np.stack(own)[LEARNED[:, 1:]].mean()


def test_layerskip_adds_the_losses_of_exits_of_a_network_with_dropped_layers():
    """Rotational, R = 2 at step 3: the exits after the second and the last of four layers."""
    key = jax.random.key(5)
    objective = jax.jit(EarlyExitLoss(lm().model, 10, dropout=0.6, every=2))
    loss, scalars = objective(lm().params, BATCH, (key, jnp.int32(3)))
    rates = [0.6 * (2 ** (i / 3) - 1) for i in range(L)]
    keep = ~np.asarray(jax.random.bernoulli(key, jnp.asarray(rates), (3, L)))
    assert keep[:, 0].all() and not keep.all()
    after = lambda exit: loss_of([[i for i in range(exit) if keep[row, i]] for row in range(3)])
    second, last = 0.2 * 1, 3 + 0.2 * (0 + 1 + 2)
    wanted = (second * after(2) + last * after(4)) / (second + last)
    assert float(loss) == pytest.approx(wanted, rel=1e-5)
    assert float(scalars["last_layer"]) == pytest.approx(after(4), rel=1e-5)


def test_soft_takes_the_mean_over_sub_models():
    loss, _ = jax.jit(SortedLoss(lm().model, (1, 3, 4)))(lm().params, BATCH, None)
    each = [loss_of([range(n)] * 3) for n in (1, 3, 4)]
    assert float(loss) == pytest.approx(np.mean(each), rel=1e-5)
    np.testing.assert_allclose(losses_by_layer(lm().model, lm().params, BATCH)[np.array([0, 2, 3])], each, rtol=1e-5)


@pytest.mark.full
def test_a_sub_model_decodes_at_a_fixed_depth():
    three = sub_model(lm(), 3)
    out = dx.generate(three, [TOKENS[0].tolist()], max_new_tokens=3, eos_token_id=[])
    text = TOKENS[0].tolist()
    for _ in range(3):
        text.append(int(log_p(text, range(3))[-1].argmax()))
    assert out.tokens[0].tolist() == text[9:]


def test_msn_replaces_a_span_of_a_target_by_tokens_before_it():
    loss, _ = jax.jit(NoisyLoss(lm().model, 3))(lm().params, BATCH, jax.random.key(2))
    noise = jax.jit(with_noise, static_argnums=3)
    noisy = np.asarray(noise(jax.random.key(2), *BATCH, 3))
    assert float(loss) == pytest.approx(loss_of([range(L)] * 3, noisy), rel=1e-5) and (noisy != TOKENS).any()

    # tokens that occur once say where noise came from
    learned = jnp.broadcast_to((np.arange(12) >= 4) & (np.arange(12) < 10), (400, 12))
    made = np.asarray(noise(jax.random.key(1), jnp.broadcast_to(jnp.arange(12), (400, 12)), learned, 3))
    changed = made != np.arange(12)
    begins = changed.argmax(1)
    assert changed.sum(1).tolist() == [3] * 400 and set(begins) == {4, 5, 6, 7}
    assert all(row[begin:begin + 3].all() for row, begin in zip(changed, begins, strict=True))
    assert (made <= np.arange(12)).all() and set(made[begins == 4, 4]) == {0, 1, 2, 3}
    assert np.bincount(begins)[4:].min() > 60           # 100 are expected, with a deviation of 9
    short = np.asarray(noise(jax.random.key(0), BATCH[0], jnp.asarray(np.arange(9) == 8)[None].repeat(3, 0), 5))
    assert (short[:, :8] == TOKENS[:, :8]).all()


@pytest.mark.wide
def test_a_loss_of_an_adapter_is_that_of_the_weights_with_it():
    objective, key = NoisyLoss(lm().model, 3), jax.random.key(2)
    fresh = dx.adapters.init(lm().params, jax.random.key(0), 2)
    made = jax.tree.map(lambda x: x + 0.3, fresh)
    loss, slope = jax.jit(jax.value_and_grad(lambda a: AdapterLoss(objective)(a, BATCH, (key, lm().params))[0]))(made)
    merged = dx.adapters.merge(lm().params, made)
    assert float(loss) == pytest.approx(float(jax.jit(objective)(merged, BATCH, key)[0]), rel=1e-4)
    assert jax.tree.structure(slope) == jax.tree.structure(fresh) and all(map(np.any, jax.tree.leaves(slope)))


@pytest.mark.wide
def test_space_learns_ordinary_rows_and_masks_after_a_cut():
    key = jax.random.key(0)
    loss, _ = jax.jit(SemiAutoregressiveLoss(lm().model, 23, 3))(lm().params, BATCH, key)
    which, place = jax.random.split(key)
    plain = np.asarray(jax.random.bernoulli(which, 0.5, (3,)))
    start, end = map(np.asarray, random_spans(place, jnp.asarray(LEARNED & (np.arange(9) < 8)), 3))
    rows = []
    for i, row in enumerate(TOKENS):
        inputs, at = row[:-1].copy(), np.arange(start[i], end[i])
        assert LEARNED[i, at].all() and LEARNED[i, at + 1].all() and 1 <= len(at) <= 3
        if plain[i]:
            at = np.flatnonzero(LEARNED[i, 1:])
        else:
            inputs[at] = 23
        rows.append(-log_p(inputs)[at, row[at + 1]].mean())
    assert plain.any() and not plain.all()
    assert float(loss) == pytest.approx(np.mean(rows), rel=1e-5)


def test_lud_puts_placeholders_into_units_of_which_the_model_was_sure():
    sure = sure_tokens(lm(), ExampleRows(TOKENS, LEARNED), 0.04)
    for own, row in zip(sure, TOKENS, strict=True):
        probabilities = np.exp(log_p(row[:-1]))[np.arange(8), row[1:]]
        assert own.tolist() == [False, *(probabilities > 0.04)]
    sure = np.array([[1, 1, 1, 1, 1, 0, 1, 1, 1], [1] * 9, [0, 1, 1, 1, 1, 1, 1, 0, 1]], bool)
    free = {0: [[3], [6, 7]], 1: [[1, 2, 3, 4, 5, 6, 7]], 2: [[]]}      # places whose next token is of the same unit
    objective, batch, seen = LexicalUnitLoss(lm().model, 23, 3, plain=0.3), (*BATCH, jnp.asarray(sure)), set()
    spans = jax.jit(objective.spans)
    for seed in range(30):
        for i, (start, end) in enumerate(zip(*map(np.asarray, spans(jax.random.key(seed), batch)), strict=True)):
            unit = next((u for u in free[i] if start in u), [start])
            assert list(range(start, end)) == unit[unit.index(start):][:3] if free[i][0] else start == end
            seen.add((i, int(start)))
    assert len(seen) == 3 + 7 + 1
    key = jax.random.key(4)
    loss, _ = jax.jit(objective)(lm().params, batch, key)
    which, place = jax.random.split(key)
    plain, rows = np.asarray(jax.random.bernoulli(which, 0.3, (3,))), []
    for i, (row, start, end) in enumerate(zip(TOKENS, *map(np.asarray, spans(place, batch)), strict=True)):
        inputs, at = row[:-1].copy(), np.arange(start, end)
        if plain[i] or start == end:
            at = np.flatnonzero(LEARNED[i, 1:])
        else:
            inputs[at] = 23
        rows.append(-log_p(inputs)[at, row[at + 1]].mean())
    assert not plain[:2].all() and float(loss) == pytest.approx(np.mean(rows), rel=1e-5)


@pytest.mark.wide
def test_scheduled_sampling_replaces_a_rising_share_of_the_inputs_of_targets():
    own = RNG.integers(0, 24, TOKENS.shape)
    objective = jax.jit(ScheduledSamplingLoss(lm().model, 11, 0.8))
    batch = (*BATCH, jnp.asarray(own, jnp.int32))
    at = lambda step: objective(lm().params, batch, (jax.random.key(3), jnp.int32(step)))
    assert float(at(0)[0]) == pytest.approx(loss_of([range(L)] * 3), rel=1e-5)
    replaced = np.asarray(jax.random.bernoulli(jax.random.key(3), 0.4, TOKENS.shape)) & LEARNED
    assert float(at(5)[0]) == pytest.approx(loss_of([range(L)] * 3, np.where(replaced, own, TOKENS)), rel=1e-5)
    assert 0 < replaced.sum() < LEARNED.sum()
    (one,) = corrections(ExampleRows(TOKENS[:1], LEARNED[:1]), own[:1], [22, 23])
    assert list(one.tokens) == [*TOKENS[0, :3], *own[0, 3:], 22, 23, *TOKENS[0, 3:]] and one.prompt == 9


@pytest.mark.wide
def test_nmst_gives_the_end_what_its_head_and_the_bound_say():
    """`(1 - s) (1 - (1 - epsilon) ** t) + s`, and a softmax over the other tokens; in training and in decoding."""
    u, epsilon, end = RNG.normal(size=16).astype(np.float32), 0.05, 4
    tokens, _ = (np.where(TOKENS == 7, end, TOKENS), LEARNED)
    tokens[0, 5] = end
    objective = SelfTerminatingLoss(lm().model, (end,), epsilon)
    loss, _ = jax.jit(objective)((lm().params, jnp.asarray(u)), (jnp.asarray(tokens, jnp.int32), BATCH[1]), None)
    config, own = lm().model.config, []
    run = jax.jit(lambda x: lm().model.apply(lm().params, causal(x, jnp.zeros(3, jnp.int32)),
                                             lm().model.init_cache(3, 0)).hidden)
    hidden = np.asarray(run(jnp.asarray(tokens[:, :-1], jnp.int32)), np.float64)
    table = np.zeros((3, 8, 24))
    for row in range(3):
        p = np.exp(logits(config, lm().params, tokens[row, :-1]))
        p[:, end] = 0
        p /= p.sum(-1, keepdims=True)
        time = np.maximum(np.cumsum(LEARNED[row, 1:]), 1)
        s = 1 / (1 + np.exp(-hidden[row] @ u))
        alpha = (1 - s) * (1 - (1 - epsilon) ** time) + s
        table[row] = (1 - alpha)[:, None] * p
        table[row, :, end] = alpha
        own.append(table[row][np.arange(8), tokens[row, 1:]])
    assert (tokens[:, 1:] == end).any()
    assert float(loss) == pytest.approx(-np.log(np.stack(own))[LEARNED[:, 1:]].mean(), rel=1e-5)

    model, link = nmst(lm(), u, epsilon), NonMonotonicEnd(jnp.array([end]), jnp.float32(epsilon))
    run = jax.jit(lambda x: model.model.apply(model.params, causal(x, jnp.zeros(3, jnp.int32)),
                                              model.model.init_cache(3, 0)).logits())
    decoded = run(jnp.asarray(tokens[:, :-1], jnp.int32))
    assert model.generation_config["nmst_epsilon"] == epsilon
    for row, given in enumerate(LEARNED.argmax(1)):
        for t in (given, given + 2):        # the token at `t` is the new one of this number, from 1
            ctx = Context(jnp.zeros(9, jnp.int32), jnp.int32(t), jnp.int32(given), jax.random.key(0))
            q = np.asarray(jax.nn.softmax(link.logits(None, ctx, decoded[row, t - 1])))
            np.testing.assert_allclose(q, table[row, t - 1], atol=1e-6)
    with pytest.raises(ValueError, match=r"head: got shape \(3,\), takes \(16,\)"):
        nmst(lm(), u[:3])


@pytest.mark.wide
def test_later_rows_of_a_text_go_on_with_the_bound_of_nmst():
    rows = ExampleRows.of([Example(tuple(range(1, 12)), 0), Example((1, 2, 3, 4, 5, 6), 4)], 4)
    assert rows.before.tolist() == [0, 4, 8, 0] and rows[1:3].before.tolist() == [4, 8]
    assert ExampleRows(TOKENS, LEARNED).before.tolist() == [0, 0, 0]
    head, losses = jnp.zeros(16), jax.jit(SelfTerminatingLoss(lm().model, (4,), 0.2).losses)
    tokens, learned = jnp.asarray([[1, 2, 3, 4, 4, 4]], jnp.int32), jnp.ones((1, 6), bool).at[:, 0].set(False)
    found = [np.exp(-losses((lm().params, head), tokens, learned, before)[0, -1]) for before in (
        None, jnp.array([0]), jnp.array([7]))]
    wanted = [1 - 0.5 * 0.8 ** (5 + n) for n in (0, 0, 7)]          # a head of zeros adds half of the rest
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.fixture(scope="module")
def trajectories():
    return collect_trajectories(lm(), PROMPTS, block=4, blocks=2, end=(4,))


@pytest.mark.wide
def test_trajectories_are_jacobi_iterations_to_the_text_of_plain_decoding(trajectories):
    at = 0
    for prompt in PROMPTS:
        text = list(prompt)
        for _ in range(2):
            one, at = trajectories[at], at + 1
            assert one.prefix.tolist() == text
            states = [state[:3].tolist() for state in one.states]
            steps = [log_p([*text, *state]).argmax(-1)[len(text) - 1:].tolist() for state in states]
            assert [step[:3] for step in steps[:-1]] == states[1:] and steps[-1] == one.fixed.tolist()
            assert set(states[0]) <= set(text)
            text += one.fixed.tolist()
            if 4 in one.fixed:
                break
    assert at == len(trajectories)


def test_the_consistency_loss_compares_a_state_with_its_fixed_point():
    one = Trajectory(np.array([7, 1, 2]), np.array([[5, 6, 6, 8]]), np.array([5, 9, 4, 8]))
    fixed, state, learned = TrajectoryBatches([one], 1, 8, end=(4,))[0]
    assert fixed.tolist() == [[7, 1, 2, 5, 9, 4, 8, 0, 0]] and state.tolist() == [[7, 1, 2, 5, 6, 6, 8, 0, 0]]
    assert np.flatnonzero(learned[0]).tolist() == [3, 4, 5]     # up to the end of the text
    batch = tuple(map(jnp.asarray, (fixed, state, learned)))
    loss, scalars = jax.jit(ConsistencyLoss(lm().model, 2.0, 0.1))(lm().params, batch, None)
    right, guessed = log_p(fixed[0, :-1]), log_p(state[0, :-1])
    truth = -np.mean([0.9 * right[i, fixed[0, i + 1]] + 0.1 * right[i].mean() for i in (2, 3, 4)])
    apart = -np.mean([(np.exp(right[i]) * guessed[i]).sum() for i in (3, 4)])       # token 4 is the first that differs
    assert float(scalars["consistency"]) == pytest.approx(apart, rel=1e-5)
    assert float(loss) == pytest.approx(apart + 2 * truth, rel=1e-5)
    cut = TrajectoryBatches([one], 1, 5)[0]
    assert cut[0].tolist() == [[1, 2, 5, 9, 4, 8]]


@pytest.mark.wide
def test_after_consistency_tuning_jacobi_needs_fewer_iterations(trajectories):
    batches, objective = TrajectoryBatches(trajectories, 8, 16), ConsistencyLoss(lm().model, 1.0)
    params, tx = jax.tree.map(jnp.array, lm().params), adamw(0.0)
    opt = tx.init(params)
    for step in range(60):
        params, opt, _ = update(objective, tx, params, opt, tuple(map(jnp.asarray, batches[step])), None,
                                jnp.float32(3e-3))
    after = collect_trajectories(lm().with_params(params), PROMPTS, block=4, blocks=2, end=(4,))
    count = lambda found: np.mean([len(one.states) for one in found])
    assert count(after) < count(trajectories) - 0.5


def test_pairs_and_texts_become_rows_of_one_length():
    pair, text = Example((1, 2, 3, 4, 5, 6, 7), 4), Example(tuple(range(10, 19)), 0)
    rows = ExampleRows.of([pair, text], 4)
    assert rows.cut == 1 and rows.tokens.tolist() == [
        [3, 4, 5, 6, 7], [10, 11, 12, 13, 14], [14, 15, 16, 17, 18]]
    assert [np.flatnonzero(row).tolist() for row in rows.learned] == [[2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]]
    padded = ExampleRows.of([Example((1, 2, 3), 1)], 4)
    assert padded.tokens.tolist() == [[1, 2, 3, 0, 0]] and np.flatnonzero(padded.learned[0]).tolist() == [1, 2]
    batches = ExampleBatches(rows.arrays, 2, seed=3)
    epochs = np.concatenate([batches[step][0][:, 0] for step in range(3)]).reshape(2, 3)
    assert [sorted(epoch) for epoch in epochs.tolist()] == [[3, 10, 14]] * 2


@pytest.mark.parametrize(("message", "make"), [
    ("dropout: got 1.0", lambda: EarlyExitLoss(lm().model, 3, dropout=1.0)),
    ("curriculum: got 'all'", lambda: EarlyExitLoss(lm().model, 3, curriculum="all")),
    (r"depths: got \(2, 5\), takes numbers of layers from 1 to 4", lambda: SortedLoss(lm().model, (2, 5))),
    ("span: got 0", lambda: NoisyLoss(lm().model, 0)),
    ("trajectories: got 0", lambda: TrajectoryBatches([], 1, 8)),
    ("layers: got 5, takes 1 to 4", lambda: sub_model(lm(), 5)),
    ("data: got 1 examples, of which none", lambda: ExampleRows.of([Example((1,), 0)], 4)),
])
def test_wrong_input_is_named(message, make):
    with pytest.raises(ValueError, match=f"^{message}"):
        make()


def test_a_part_of_the_weights_may_learn_more_slowly():
    params = ({"a": jnp.ones(3)}, jnp.full(2, 2.0))
    loss = lambda params, batch, extra: ((params[0]["a"].sum() + params[1].sum()), {})
    steps = []
    for rates in ((1.0, 1.0), (0.5, 1.0)):
        tx = loop.scaled(loop.adamw(0.1), rates)
        assert tx is loop.scaled(loop.adamw(0.1), rates)
        new, _, _ = loop.update(loss, tx, jax.tree.map(jnp.copy, params), tx.init(params), (), (), jnp.float32(0.1))
        steps.append(jax.tree.map(lambda a, b: b - a, new, params))
    np.testing.assert_allclose(2 * steps[1][0]["a"], steps[0][0]["a"], rtol=1e-6)
    np.testing.assert_allclose(steps[1][1], steps[0][1], rtol=1e-6)
