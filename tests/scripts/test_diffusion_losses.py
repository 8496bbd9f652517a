"""Losses of masked diffusion, certainty forcing and filters against transcriptions; the optimizer."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax.bench.problems import puzzles as problems
from decodax.models import Diffusion, Transformer, llama
from decodax.train import loop, own_answers
from decodax.train import masked_diffusion as dt
from decodax.train import unmask_filter as filters
from decodax.train.sdlm import NextSequence

NET = Transformer(llama(vocab=47, width=16, layers=2, heads=2, kv_heads=1, mlp=32, context=64, tied=True))
FULL, BLOCKS = Diffusion(46), Diffusion(46, attention="block-causal", block=4)
BEHIND = Diffusion(46, attention="causal-prefix", block=4)


@pytest.fixture(scope="module")
def params():
    return dt.widened(NET.init_params(jax.random.key(0)), 5.0)


@pytest.fixture(scope="module")
def batch() -> dt.Batch:
    return jax.tree.map(jnp.asarray, problems.problem_batch(6, 1, 0))


@pytest.fixture(scope="module")
def logits_of(params):
    """Logits of one row of tokens under a mask."""
    forward = jax.jit(lambda tokens, mask: NET.forward(params, tokens, mask=mask))
    return lambda tokens, mask: np.asarray(forward(jnp.asarray(tokens)[None], jnp.asarray(mask)[None])[0])


def nats(logits: np.ndarray, token: int) -> float:
    """-log p of a token under logits `[V]` without the mask's, in float64."""
    own = np.delete(np.asarray(logits, np.float64), 46)
    return float(np.log(np.exp(own - own.max()).sum()) + own.max() - own[token])


def views(kind, tokens, noisy, masked, live, answer):
    """Yields what masked positions of a row are scored by: the text, which tokens see which, and the positions."""
    hidden, place = np.where(live, noisy, 7), np.arange(problems.LENGTH)
    if kind in ("whole", "apart"):      # dead tokens are replaced and hidden
        sees = live[None] & ((answer[:, None] | ~answer[None]) if kind == "apart" else True)
        yield hidden, np.broadcast_to(sees, (problems.LENGTH,) * 2), masked
        return
    at = (place - (answer.argmax() if kind == "behind a causal text" else 0)) // 4
    for block in np.unique(at[masked]):
        here = at == block
        sees = at[None] <= at[:, None] if kind == "blocks" else np.where(
            here[:, None], at[None] <= block, place[None] <= place[:, None])
        yield np.where(at < block, tokens, np.where(here, noisy, 7)), sees & live, masked & here


@pytest.mark.wide(but=("behind a causal text",))
@pytest.mark.parametrize("kind", ["whole", "apart", "blocks", "behind a causal text"])
def test_the_loss_is_the_bound_of_its_paper(params, batch, logits_of, kind):
    """The mean over rows of the sum over masked tokens of nats / t, over the answer's length: LLaDA's, with prompts
    that do not see their answers, block by block without the clean text behind, and behind a text that learns its next
    tokens, too."""
    key, speaks = jax.random.key(4), {"blocks": BLOCKS, "behind a causal text": BEHIND}.get(kind, FULL)
    noisy, masked, levels = map(np.asarray, dt.corrupt(key, batch, speaks))
    tokens, live, answer = (np.asarray(x) for x in (batch.tokens, batch.live, batch.answer))
    expected, place = [], np.arange(problems.LENGTH)
    for i in range(6):
        total = 0.0
        for text, sees, here in views(kind, tokens[i], noisy[i], masked[i], live[i], answer[i]):
            logits = logits_of(text, sees)
            total += sum(nats(logits[j], tokens[i, j]) / levels[i, j] for j in np.flatnonzero(here))
            assert len(set(levels[i, here])) == 1
        if speaks is BEHIND:
            causal = logits_of(tokens[i], (place[None] <= place[:, None]) & live[i])
            total += sum(nats(causal[j - 1], tokens[i, j]) for j in np.flatnonzero(answer[i]))
        expected.append(total / answer[i].sum())
    bound = lambda share: float(jax.jit(dt.Bound(NET, speaks, apart=share))(params, batch, key)[0])
    assert bound(float(kind == "apart")) == pytest.approx(np.mean(expected), rel=1e-4)
    if kind == "apart":
        assert len({bound(0.0), bound(0.5), bound(1.0)}) == 3
    if kind == "blocks":
        assert len(set(levels[0])) > 1


def test_sdlm_learns_to_predict_the_tokens_of_blocks_after_a_causal_text(params, batch, logits_of):
    """Block by block, with the text before it: a copy of its first token and masks, each predicting the next token."""
    size, T = BEHIND.block, problems.LENGTH - 3
    cut = jax.tree.map(lambda x: x[:, :T], batch)
    cut = cut.replace(answer=cut.answer.at[0].set(cut.live[0]))         # and a text without a prompt
    objective, key = NextSequence(NET, replace(BEHIND, shift=True)), jax.random.key(3)
    starts = np.asarray(objective.noise(key, cut)[1])[:, 0]
    (loss, _), place, expected = jax.jit(objective)(params, cut, key), np.arange(T + 3), []
    for i in range(6):
        tokens, answer, total, places = *map(np.asarray, (cut.tokens[i], cut.answer[i])), 0.0, set()
        assert 0 <= max(int(answer.argmax()), 1) - 1 - starts[i] < size
        for begin in range(starts[i], T, size):
            if begin < 0 or not answer[begin + 1:begin + 1 + size].any():
                continue
            text = np.where(place == begin, np.pad(tokens, (0, 3))[begin], 46)
            text[:begin] = tokens[:begin]
            inside = (place >= begin) & (place < begin + size)
            sees = np.where(inside[:, None], (place < begin) | inside, place[None] <= place[:, None])
            logits = logits_of(text, sees)
            for j in range(begin, min(begin + size, T - 1)):
                if answer[j + 1]:
                    total += nats(logits[j], tokens[j + 1])
                    places.add(j + 1)
        assert i == 0 or places == set(np.flatnonzero(answer))
        expected.append(total / answer.sum())
    assert float(loss) == pytest.approx(np.mean(expected), rel=1e-4) and len(set(starts)) > 1
    with pytest.raises(ValueError, match="kind, apart: got"):
        NextSequence(NET, BEHIND)


@pytest.mark.wide
def test_only_answers_are_masked_and_levels_are_stratified(batch):
    levels = np.asarray(dt.noise_levels(jax.random.key(0), 8, 3))
    assert levels.shape == (8, 3) and levels.min() >= dt.LEAST and levels.max() <= 1
    assert all(len(set(np.floor(8 * (x - dt.LEAST) / (1 - dt.LEAST)).astype(int))) == 8 for x in levels.T)
    masks = [np.asarray(dt.corrupt(jax.random.key(k), batch, FULL)[1]) for k in range(60)]
    answer = np.asarray(batch.answer)
    assert not np.any([m & ~answer for m in masks])
    assert np.mean([m[answer].mean() for m in masks]) == pytest.approx(0.5, abs=0.04)


def test_logits_that_predict_the_next_token_are_shifted(params, batch):
    shifted, plain = jax.jit(lambda: [dt.predict(NET, params, batch.tokens, batch.live, replace(FULL, shift=shift))
                                      for shift in (True, False)])()
    np.testing.assert_array_equal(shifted[:, 1:], plain[:, :-1])


@pytest.mark.full
def test_certainty_forcing_is_cross_entropy_and_the_entropy_of_what_is_right(params, batch):
    objective, key = dt.CertaintyForcing(NET, FULL, span=8), jax.random.key(5)
    parts = objective.noise(key, batch)
    total = 0.0
    tokens = np.asarray(batch.tokens)
    predict = jax.jit(lambda noisy: dt.predict(NET, params, noisy, batch.live, FULL))
    for masked, noisy in parts:
        masked = np.asarray(masked)
        logits = np.asarray(predict(noisy), np.float64)
        cross, entropies = [], []
        for i, j in zip(*np.nonzero(masked), strict=True):
            cross.append(nats(logits[i, j], tokens[i, j]))
            own = np.delete(logits[i, j], 46)
            if own.argmax() == tokens[i, j]:
                p = np.exp(own / 0.5 - (own / 0.5).max())
                p /= p.sum()
                entropies.append(-(p * np.log(p)).sum())
        total += np.mean(cross) + 2 * (np.mean(entropies) if entropies else 0.0)
    (loss, _), grads = jax.jit(jax.value_and_grad(objective, has_aux=True))(params, batch, key)
    assert float(loss) == pytest.approx(total, rel=1e-4)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(grads))


def test_certainty_forcing_masks_one_block_in_halves_and_all_after_it(batch):
    objective = dt.CertaintyForcing(NET, FULL, span=4)
    (first, noisy), (second, other) = jax.tree.map(np.asarray, objective.noise(jax.random.key(6), batch))
    seen = set()
    for i in range(6):
        answer = np.flatnonzero(batch.answer[i])
        here = np.flatnonzero(first[i] | second[i])
        assert not (first[i] & second[i]).any() and len(here) == 4
        start = int(here[0] - answer[0])
        seen.add(start)
        assert start % 4 == 0 and list(here) == list(answer[start:start + 4])
        for text, masked in ((noisy, first), (other, second)):
            behind = np.isin(np.arange(len(text[i])), answer[start + 4:])
            np.testing.assert_array_equal(text[i] == 46, masked[i] | behind)
    assert len(seen) > 1


class Counting:
    """A network that predicts the number of masks of a row, and is surer of later positions."""

    def forward(self, params, tokens, positions=None, mask=None):
        left = (tokens == 46).sum(1)[:, None, None]
        return jnp.where(jnp.arange(47) == left, 1.0 + jnp.arange(tokens.shape[1])[:, None], params)


@pytest.mark.parametrize(("kind", "span", "at_once", "expected"), [
    (FULL, None, False, [1, 2, 3, 4, 5, 6, 7, 8]), (FULL, None, True, [8] * 8),
    (FULL, 4, False, [5, 6, 7, 8, 1, 2, 3, 4]), (FULL, 3, False, [6, 7, 8, 3, 4, 5, 1, 2]),
    (FULL, 4, True, [8, 8, 8, 8, 4, 4, 4, 4]), (replace(FULL, shift=True), 4, False, [5, 6, 7, 8, 1, 2, 3, 4]),
    (BLOCKS, 4, False, [5, 6, 7, 8, 1, 2, 3, 4]), (BEHIND, 2, False, [7, 8, 5, 6, 3, 4, 1, 2]),
])
def test_answers_are_filled_in_blocks_from_their_beginning(kind, span, at_once, expected):
    """A token is the number of masks that were left when it was filled; prompts have 3 and 5 tokens."""
    place, first = np.arange(14), np.array([[3], [5]])
    answer = (place >= first) & (place < first + 8)
    rows = dt.Batch(np.where(answer, 9, 40), answer, place < first + 8)
    for made in (dt.fill(Counting(), jnp.float32(0), jax.tree.map(jnp.asarray, rows), kind, at_once, span),
                 own_answers.fill(Counting(), kind, jnp.float32(0), rows, 1, at_once, span)):
        made = np.asarray(made)
        assert made[answer].tolist() == expected * 2 and (made[~answer] == 40).all()


def test_a_bound_per_byte_of_equal_chances_is_known():
    class Fair:
        def forward(self, params, tokens, positions=None, mask=None):
            return jnp.zeros((*tokens.shape, 9)) + params

    stream = np.arange(200, dtype=np.int32) % 8
    objective = dt.Bound(Fair(), Diffusion(8))  # type: ignore[arg-type]
    got = dt.bound_per_byte(objective, jnp.float32(0), stream, np.full(9, 2), 32, 8, draws=40)
    assert got == pytest.approx(math.log2(8) / 2, rel=0.05)


@pytest.mark.wide(but=("4",))
@pytest.mark.parametrize("span", [16, 4])
def test_extremely_greedy_rollouts_follow_their_loop(params, span):
    found = [p for task in ("copy", "add", "sudoku") for p in problems.problems(task, 2, held=False)]
    batch = jax.tree.map(jnp.asarray, problems.rows_of(found))
    goal = np.asarray(dt.fill(NET, params, batch, FULL))
    own = batch.replace(tokens=jnp.asarray(goal))
    got = jax.tree.map(np.asarray, filters.rollout(NET, params, own, FULL, span))
    see = jax.jit(lambda tokens: dt.predict(NET, params, tokens, own.live, FULL))
    state = np.where(own.answer, 46, goal)
    for i in range(len(found)):
        place, steps = np.flatnonzero(batch.answer[i]), []
        for block in place.reshape(-1, span):
            before = None
            while (state[i, block] == 46).any():
                logits = np.asarray(see(jnp.asarray(state)))[i]
                best = logits.argmax(-1)[block]
                chances = np.exp(logits[block] - logits[block].max(-1, keepdims=True))
                sure = 1 / chances.sum(-1)
                right = best == goal[i, block]
                steps.append((sure, right))
                stuck = before is not None and (best == before).all()
                state[i, block] = np.where(right | stuck, goal[i, block], state[i, block])
                before = best
        confidence, final, taken = (x[i] for x in got)
        assert taken.sum() == len(steps) >= 1 and taken[:len(steps)].all()
        np.testing.assert_allclose(confidence[:len(steps)], [s for s, _ in steps], atol=1e-5)
        np.testing.assert_array_equal(final[:len(steps)], [r for _, r in steps])


@pytest.mark.wide
def test_muon_moves_kernels_by_orthogonal_steps_of_adams_size(params):
    grads = jax.tree.map(lambda x: jax.random.normal(jax.random.key(1), x.shape) * 1e-3, params)
    tx = loop.muon(0.0)
    moves, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    kernel = np.asarray(moves["layers"]["0"]["mlp"]["up"]["kernel"])
    sizes = np.linalg.svd(kernel / (0.2 * max(kernel.shape) ** 0.5), compute_uv=False)
    assert sizes.min() > 0.6 and sizes.max() < 1.3
    assert np.abs(moves["norm"]["scale"]).max() == pytest.approx(1.0, abs=1e-3)
