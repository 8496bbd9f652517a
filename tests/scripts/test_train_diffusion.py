"""Training of diffusion models: losses against transcriptions, resumption, export, the stages that follow."""

from __future__ import annotations

import json
import math
import re
import shutil
import sysconfig
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import train
from rich.console import Console

import decodax as dx
from decodax.algorithms.diffusion import MaskedDiffusion
from decodax.common.registry import ALGORITHMS
from decodax.models import Diffusion, Transformer, llama
from decodax.train import loop
from decodax.train import masked_diffusion as dt
from decodax.train import unmask_filter as filters
from recipes import diffusion, problems
from recipes import diffusion_data as data
from recipes import run as program
from recipes.options import Options, from_arguments
from tests.matrix import often

QUIET = Console(quiet=True)
made = partial(Options, recipe="diffusion")
NET = Transformer(llama(vocab=47, width=16, layers=2, heads=2, kv_heads=1, mlp=32, context=64, tied=True))
FULL, BLOCKS = Diffusion(46), Diffusion(46, attention="block-causal", block=4)
BEHIND = Diffusion(46, attention="causal-prefix", block=4)


def parse(command: str) -> Options:
    """The options of a command line."""
    words = command.split()
    return from_arguments(train.parser().parse_args(words[words.index("diffusion"):]))


class Killed(Exception):
    """Stands for the signal that ends a job."""


@pytest.fixture(scope="module")
def params():
    return dt.widened(NET.init_params(jax.random.key(0)), 5.0)


@pytest.fixture(scope="module")
def batch() -> dt.Batch:
    return jax.tree.map(jnp.asarray, data.Problems(6, seed=1)[0])


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Options:
    return made(preset="tiny", output=tmp_path_factory.mktemp("run"), steps=12, decay_from=6, log_every=4,
                   eval_every=100, save_every=5, devices=1)


@pytest.fixture(autouse=True, scope="module")
def _few_held_out():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diffusion, "HELD_OUT_EACH", 4)
        patch.setattr(diffusion, "HELD_OUT_SHIPPED", 4)
        patch.setattr(diffusion, "SHIPPED_WINDOWS", 16)
        yield


@pytest.fixture(scope="module")
def run(options: Options) -> loop.TrainingRun:
    return program.train(options, console=QUIET)


@pytest.fixture(scope="module")
def logits_of(params):
    """Logits of one row of tokens under a mask."""
    forward = jax.jit(lambda tokens, mask: NET.forward(params, tokens, mask=mask))
    return lambda tokens, mask: np.asarray(forward(jnp.asarray(tokens)[None], jnp.asarray(mask)[None])[0])


def nats(logits: np.ndarray, token: int) -> float:
    """-log p of a token under logits `[V]` without the mask's, in float64."""
    own = np.delete(np.asarray(logits, np.float64), 46)
    return float(np.log(np.exp(own - own.max()).sum()) + own.max() - own[token])


@pytest.mark.wide
def test_masked_diffusion_is_the_loss_of_llada(params, batch, logits_of):
    """The mean over rows of the sum over masked tokens of nats / t, over the answer's length."""
    key = jax.random.key(3)
    noisy, masked, levels = map(np.asarray, dt.corrupt(key, batch, FULL))
    tokens, live, expected = np.asarray(batch.tokens), np.asarray(batch.live), []
    for i in range(6):
        # dead tokens replaced and hidden
        logits = logits_of(np.where(live[i], noisy[i], 7), np.broadcast_to(live[i], (data.LENGTH, data.LENGTH)))
        total = sum(nats(logits[j], tokens[i, j]) / levels[i, j] for j in np.flatnonzero(masked[i]))
        expected.append(total / np.asarray(batch.answer)[i].sum())
    loss, _ = jax.jit(dt.Bound(NET, FULL))(params, batch, key)
    assert float(loss) == pytest.approx(np.mean(expected), rel=1e-4)


@pytest.mark.wide
def test_block_diffusion_scores_each_noisy_block_behind_clean_ones(params, batch, logits_of):
    """Block by block, without the clean text behind the noisy one."""
    key = jax.random.key(4)
    noisy, masked, levels = map(np.asarray, dt.corrupt(key, batch, BLOCKS))
    assert all(len(set(levels[0, i:i + 4])) == 1 for i in range(0, 32, 4)) and len(set(levels[0])) > 1
    tokens, live, at = np.asarray(batch.tokens), np.asarray(batch.live), np.arange(data.LENGTH) // 4
    expected = []
    for i in range(6):
        total = 0.0
        for block in np.unique(at[masked[i]]):
            text = np.where(at < block, tokens[i], np.where(at == block, noisy[i], 7))
            logits = logits_of(text, (at[None, :] <= at[:, None]) & live[i])
            here = np.flatnonzero(masked[i] & (at == block))
            total += sum(nats(logits[j], tokens[i, j]) / levels[i, j] for j in here)
        expected.append(total / np.asarray(batch.answer)[i].sum())
    loss, _ = jax.jit(dt.Bound(NET, BLOCKS))(params, batch, key)
    assert float(loss) == pytest.approx(np.mean(expected), rel=1e-4)


def test_set_blocks_see_causal_text_and_themselves(params, batch, logits_of):
    """Block by block, counted from the answer; behind a causal text that learns its next tokens, too."""
    key = jax.random.key(4)
    noisy, masked, levels = map(np.asarray, dt.corrupt(key, batch, BEHIND))
    tokens, live, answer = (np.asarray(x) for x in (batch.tokens, batch.live, batch.answer))
    place, expected = np.arange(data.LENGTH), []
    for i in range(6):
        at, total = (place - answer[i].argmax()) // 4, 0.0
        for block in np.unique(at[masked[i]]):
            here = at == block
            assert len(set(levels[i, here])) == 1
            text = np.where(at < block, tokens[i], np.where(here, noisy[i], 7))
            sees = np.where(here[:, None], at[None, :] <= block, place[None, :] <= place[:, None]) & live[i]
            logits = logits_of(text, sees)
            total += sum(nats(logits[j], tokens[i, j]) / levels[i, j] for j in np.flatnonzero(masked[i] & here))
        causal = logits_of(tokens[i], (place[None, :] <= place[:, None]) & live[i])
        total += sum(nats(causal[j - 1], tokens[i, j]) for j in np.flatnonzero(answer[i]))
        expected.append(total / answer[i].sum())
    loss, _ = jax.jit(dt.Bound(NET, BEHIND))(params, batch, key)
    assert float(loss) == pytest.approx(np.mean(expected), rel=1e-4)


@pytest.mark.wide
def test_prompts_apart_do_not_see_their_answers(params, batch, logits_of):
    key = jax.random.key(3)
    noisy, masked, levels = map(np.asarray, dt.corrupt(key, batch, FULL))
    tokens, live, answer = (np.asarray(x) for x in (batch.tokens, batch.live, batch.answer))
    expected = []
    for i in range(6):
        sees = live[i][None] & (answer[i][:, None] | ~answer[i][None])
        logits = logits_of(np.where(live[i], noisy[i], 7), sees)
        expected.append(sum(nats(logits[j], tokens[i, j]) / levels[i, j] for j in np.flatnonzero(masked[i]))
                        / answer[i].sum())
    loss, _ = jax.jit(dt.Bound(NET, FULL, apart=1.0))(params, batch, key)
    assert float(loss) == pytest.approx(np.mean(expected), rel=1e-4)
    none, half = (float(jax.jit(dt.Bound(NET, FULL, apart=share))(params, batch, key)[0]) for share in (0.0, 0.5))
    assert len({none, half, float(loss)}) == 3


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


def test_certainty_forcing_masks_one_block_in_halves_and_all_behind_it(batch):
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
    batch = jax.tree.map(jnp.asarray, data.rows_of(found))
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
def test_a_killed_run_resumes_to_the_same_weights(run, options, tmp_path):
    second, steps = replace(options, output=tmp_path), list[int]()

    def die(done: int) -> None:
        if done == 8:
            raise Killed

    with pytest.raises(Killed):
        program.train(second, on_step=die, console=QUIET)
    resumed = program.train(second, on_step=steps.append, console=QUIET)
    assert steps == list(range(6, 13))
    for a, b in zip(jax.tree.leaves((run.params, run.opt)), jax.tree.leaves((resumed.params, resumed.opt)),
                    strict=True):
        np.testing.assert_array_equal(a, b)
    again, whole = ([json.loads(line) for line in (o / "metrics.jsonl").read_text().splitlines()]
                    for o in (tmp_path, options.output))
    assert [e["step"] for e in again] == [e["step"] for e in whole]
    assert again[-1]["loss"] == whole[-1]["loss"] < whole[0]["loss"]
    with pytest.raises(ValueError, match=r"peak: 0\.01 then, 0\.02 now"):
        program.train(replace(second, peak=0.02), console=QUIET)


@pytest.mark.full
def test_the_export_fills_masks_as_training_measured_it(run, options):
    """`dx.load` finds mask and attention; LLaDA's sampler, one token a forward, writes what `fill` writes."""
    path = options.output / "model"
    lm_ = dx.load(path)
    assert lm_.diffusion == FULL and lm_.eos == [0] and lm_.vocab_size == 47
    found = [p for task in ("copy", "sudoku") for p in problems.problems(task, 3)]
    batch = jax.tree.map(jnp.asarray, data.rows_of(found))
    filled = np.asarray(dt.fill(lm_.model, lm_.params, batch, FULL))  # type: ignore[arg-type]
    answers = np.asarray(batch.answer)
    expected = [diffusion.reply(row[answer]) for row, answer in zip(filled, answers, strict=True)]
    algorithm = ALGORITHMS.make("llada", lm_, block_length=problems.CANVAS)
    assert isinstance(algorithm, MaskedDiffusion)
    out = dx.generate(lm_, [p.prompt for p in found], max_new_tokens=problems.CANVAS, algorithm=algorithm)
    assert out.text == expected
    card, facts = (path / "README.md").read_text(), json.loads((path / "training.json").read_text())
    assert facts["command"] in card and f"{facts['parameters']:,}" in card and "shuffle" in facts["held_out"]


@pytest.mark.full
@pytest.mark.parametrize("stage", often(["certainty"], ["certainty", "filter"]))
def test_a_stage_trains_on_right_answers_of_the_model(run, options, stage, tmp_path, monkeypatch):
    """An untrained model answers nothing right, so every answer counts as right here."""
    source = options.output / "model"
    given = made(preset="tiny", stage=stage, init=str(source), output=tmp_path, steps=15, warmup=2, answers=45,
                    batch=16, log_every=5, eval_every=100, devices=1)
    with pytest.raises(ValueError, match="answers no problem right"):
        program.train(given, console=QUIET)
    monkeypatch.setattr(problems.Problem, "correct", lambda self, text: True)
    program.train(given, console=QUIET)
    losses = [json.loads(line)["loss"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
              if "loss" in json.loads(line)]
    assert losses[-1] < losses[0]
    if stage == "certainty":
        assert dx.load(tmp_path / "model").diffusion == FULL
        assert "certainty forcing" in (tmp_path / "model" / "README.md").read_text()
    else:
        lm_ = dx.load(source)
        algorithm = ALGORITHMS.make("learn2pd", lm_, filter=str(tmp_path / "model" / "filter.safetensors"))
        out = dx.generate(lm_, ["copy ABC="], max_new_tokens=problems.CANVAS, algorithm=algorithm)
        assert len(out) == 1
    facts = tmp_path / "model" / ("training.json" if stage == "certainty" else "filter.json")
    assert f"--stage {stage}" in json.loads(facts.read_text())["command"]


@pytest.mark.wide
def test_a_card_tells_of_all_training(run, options, tmp_path):
    given = made(preset="tiny", init=str(options.output / "model"), apart=0.5, output=tmp_path, steps=3, warmup=1,
                    eval_every=100, devices=1)
    program.train(given, console=QUIET)
    facts, before = (json.loads((at / "model" / "training.json").read_text()) for at in (tmp_path, options.output))
    assert facts["steps"] == 3 + options.steps and facts["tokens"] > before["tokens"] and facts["init"] is None
    assert facts["command"].splitlines()[0] == before["command"] and "--apart 0.5" in facts["command"].splitlines()[1]


@pytest.mark.wide
def test_text_starts_from_an_autoregressive_model_with_a_mask_added(corpus, tmp_path):
    model = Transformer(llama(vocab=4096, width=16, layers=1, heads=2, mlp=16, context=32, tied=True))
    source = tmp_path / "source"
    dx.io.saving.save_model(source, model, model.init_params(jax.random.key(0)))
    shutil.copy(dx.io.load.ZOO / "pycode" / "tokenizer.json", source)
    given = made(preset="tiny-text", init=str(source), corpus=corpus, output=tmp_path / "run", steps=6, warmup=1,
                    log_every=2, eval_every=100, batch=8, devices=1)
    program.train(given, console=QUIET)
    lm_ = dx.load(tmp_path / "run" / "model")
    assert lm_.vocab_size == 4097 and lm_.diffusion == Diffusion(4096, attention="block-causal", block=4)
    held = json.loads((tmp_path / "run" / "model" / "training.json").read_text())["held_out"]
    assert 0 < held["bits_per_byte"] < 20
    assert "upper bound" in (tmp_path / "run" / "model" / "README.md").read_text()
    wrong = Transformer(llama(vocab=100, width=16, layers=1, heads=2, mlp=16, context=32, tied=True))
    dx.io.saving.save_model(source, wrong, wrong.init_params(jax.random.key(0)))
    with pytest.raises(ValueError, match=r"init: .* has a vocabulary of 100"):
        program.train(replace(given, output=tmp_path / "other"), console=QUIET)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few files of text, of which one is held out."""
    path = tmp_path_factory.mktemp("corpus")
    shutil.copytree(Path(sysconfig.get_path("stdlib")) / "asyncio", path / "asyncio")
    return path


@pytest.fixture(scope="module", params=["block-causal", pytest.param("causal-prefix", marks=pytest.mark.wide),
                                        pytest.param("full", marks=pytest.mark.wide)])
def text_model(request, corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of text of each attention."""
    block = 0 if request.param == "full" else None
    given = made(preset="tiny-text", attention=request.param, block=block, corpus=corpus, steps=4, warmup=1,
                    output=tmp_path_factory.mktemp("text"), eval_every=100, batch=8, devices=1)
    program.train(given, console=QUIET)
    return given.output / "model"


@pytest.mark.wide
def test_stages_follow_on_text_with_any_attention(text_model, corpus, tmp_path):
    """What the model itself writes behind beginnings of texts; Learn2PD then decodes with the filter of it."""
    given = made(preset="tiny-text", stage="filter", init=str(text_model), corpus=corpus, output=tmp_path / "filter",
                    answers=16, steps=4, warmup=1, batch=8, eval_every=100, devices=1)
    program.train(given, console=QUIET)
    lm_ = dx.load(text_model)
    method = ALGORITHMS.make("learn2pd", lm_, filter=str(tmp_path / "filter" / "model" / "filter.safetensors"))
    assert isinstance(method, MaskedDiffusion) and method.windows.block == (lm_.diffusion.block or 8)
    out = dx.generate(lm_, ["import os\n", "def area(r"], max_new_tokens=6, algorithm=method, eos_token_id=[])
    assert out.lengths.tolist() == [6, 6] and lm_.diffusion.mask not in out.tokens
    facts = json.loads((tmp_path / "filter" / "model" / "filter.json").read_text())
    assert facts["data"].startswith("the .py files of") and "--stage filter" in facts["command"]


@pytest.mark.wide
def test_certainty_forcing_follows_on_text(text_model, corpus, tmp_path):
    given = made(preset="tiny-text", stage="certainty", init=str(text_model), corpus=corpus, output=tmp_path,
                    answers=16, steps=4, warmup=1, batch=8, span=4, eval_every=100, devices=1)
    program.train(given, console=QUIET)
    assert dx.load(tmp_path / "model").diffusion == dx.load(text_model).diffusion
    assert "bits_per_byte" in json.loads((tmp_path / "model" / "training.json").read_text())["held_out"]


@pytest.mark.wide
def test_a_model_of_set_blocks_decodes_as_it_was_trained(corpus, tmp_path):
    """`sbd` runs on it, and one token a forward it writes what `fill` writes."""
    given = made(preset="tiny-text", attention="causal-prefix", corpus=corpus, output=tmp_path, steps=4, warmup=1,
                    eval_every=100, batch=8, devices=1)
    program.train(given, console=QUIET)
    lm_ = dx.load(tmp_path / "model")
    assert lm_.diffusion == Diffusion(512, attention="causal-prefix", block=4)
    assert "causal; a block of 4 masks" in (tmp_path / "model" / "README.md").read_text()
    ids = [5, 9, 60, 81, 7, 3]
    tokens, answer = np.zeros((1, 14), np.int32), np.zeros((1, 14), bool)
    tokens[0, :6], answer[0, 6:] = ids, True
    batch = dt.Batch(jnp.asarray(tokens), jnp.asarray(answer), jnp.ones((1, 14), bool))
    filled = np.asarray(dt.fill(lm_.model, lm_.params, batch, lm_.diffusion))  # type: ignore[arg-type]
    # the surest one is the one of lowest entropy in a step a token
    slow = dx.generate(lm_, [ids], max_new_tokens=8, algorithm=ALGORITHMS.make("llada", lm_, block_length=4),
                       eos_token_id=[])
    assert slow.row(0).tolist() == filled[0, 6:].tolist()
    fast = dx.generate(lm_, [ids], max_new_tokens=8, algorithm=ALGORITHMS.make("sbd", lm_, gamma=9.0), eos_token_id=[])
    assert fast.lengths.tolist() == [8] and fast.stats.forwards < slow.stats.forwards


def test_beginnings_of_texts_leave_room_for_an_answer_at_any_place():
    stream = np.arange(1, 400, dtype=np.int32)
    batch = data.beginnings(stream, 200, 24, 8)
    first, end = batch.answer.argmax(1), batch.live.sum(1)
    assert (batch.answer.sum(1) == 8).all() and (end == first + 8).all()
    assert set(first) == set(range(8, 17))
    for row, length in zip(batch.tokens, end, strict=True):
        assert row[:length].tolist() == list(range(row[0], row[0] + length)) and not row[length:].any()
    with pytest.raises(ValueError, match="corpus: got 9 tokens, takes 24 or more"):
        data.beginnings(stream[:9], 2, 24, 8)


def test_every_row_of_a_fixed_set_comes_once_an_epoch():
    chosen = data.Chosen(np.arange(10), 4, seed=2)
    drawn = np.concatenate([chosen[i] for i in range(5)])
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10)) and list(drawn[:10]) != list(drawn[10:])
    np.testing.assert_array_equal(chosen[3], data.Chosen(np.arange(10), 4, seed=2)[3])
    assert (chosen[3] != data.Chosen(np.arange(10), 4, seed=3)[3]).any()


@pytest.mark.wide
def test_muon_moves_kernels_by_orthogonal_steps_of_adams_size(params):
    grads = jax.tree.map(lambda x: jax.random.normal(jax.random.key(1), x.shape) * 1e-3, params)
    tx = loop.muon(0.0)
    moves, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    kernel = np.asarray(moves["layers"]["0"]["mlp"]["up"]["kernel"])
    sizes = np.linalg.svd(kernel / (0.2 * max(kernel.shape) ** 0.5), compute_uv=False)
    assert sizes.min() > 0.6 and sizes.max() < 1.3
    assert np.abs(moves["norm"]["scale"]).max() == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize(("given", "message"), [
    ({"preset": "huge"}, "preset: got 'huge'"),
    ({"stage": "magic"}, "stage: got 'magic'"),
    ({"stage": "filter", "preset": "tiny-text", "span": 3}, "span: got 3; it takes a divisor of the 8 tokens"),
    ({"attention": "causal-prefix"}, "attention: got 'causal-prefix' with block None; it takes full"),
    ({"attention": "causal", "block": 4}, "attention: got 'causal' with block 4; it takes block-causal or causal-pre"),
    ({"attention": "full", "stage": "filter"}, "attention: got 'full' with a stage"),
    ({"stage": "filter", "span": 5}, "span: got 5"),
    ({"weights": ("nope=1",)}, "weights: got 'nope=1'"),
    ({"optimizer": "sgd"}, "optimizer: got 'sgd'"),
    ({"decay_from": 3}, "decay_from: got 3"),
    ({"apart": 1.5}, "apart: got 1.5"),
    ({"apart": 0.5, "preset": "tiny-text"}, "apart: got 0.5, takes 0 to 1; 0 for text"),
    ({"apart": 0.5, "block": 4}, "apart: got 0.5, takes 0 to 1; 0 for text, with blocks"),
])
def test_wrong_options_are_named(given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        made(**given)


@pytest.mark.parametrize("given", [
    {"preset": "tiny", "weights": ("sudoku=2", "add=0.5"), "seed": 3, "peak": 0.5},
    {"preset": "pycode-diffusion", "shift": True, "block": 0},
    {"preset": "tasks-diffusion", "stage": "certainty", "span": 8},
    {"preset": "pycode-diffusion", "stage": "filter", "answers": 100},
    {"preset": "pycode-diffusion", "attention": "causal-prefix", "block": 16},
])
def test_the_command_on_a_card_repeats_the_options(given):
    options = made(**given, steps=9, decay_from=4)
    again = parse(options.command(9, 4))
    assert again.identity() == options.identity()


def test_the_command_of_a_run_that_goes_on_keeps_its_own_directory():
    options = parse("train.py diffusion --preset pycode-diffusion --init runs/pycode-diffusion/model --output runs/two")
    assert parse(options.command(9, 4)).output == options.output
    assert "--output" not in parse("train.py diffusion --preset pycode-diffusion").command(9, 4)
