"""Training of diffusion models: resumption, export, the stages that follow."""

import json
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

import decodax as dx
from decodax.algorithms.diffusion import MaskedDiffusion
from decodax.bench.problems import puzzles as problems
from decodax.common.registry import ALGORITHMS
from decodax.models import Diffusion, Transformer, llama
from decodax.train import loop, own_answers
from decodax.train import masked_diffusion as dt
from recipes import diffusion
from recipes import run as program
from recipes.options import Options, from_arguments
from tests.matrix import often
from tests.scripts.killed import QUIET, metrics, resumed, same

FULL = Diffusion(46)
made = partial(Options, recipe="diffusion")


def parse(command: str) -> Options:
    """The options of a command line."""
    words = command.split()
    return from_arguments(train.parser().parse_args(words[words.index("diffusion"):]))


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


@pytest.mark.wide
def test_a_killed_run_resumes_to_the_same_weights(run, options, tmp_path):
    second, steps = resumed(options, tmp_path, 8)
    assert steps == list(range(6, 13)) and same((run.params, run.opt), (second.params, second.opt))
    again, whole = (metrics(output) for output in (tmp_path, options.output))
    assert [e["step"] for e in again] == [e["step"] for e in whole]
    assert again[-1]["loss"] == whole[-1]["loss"] < whole[0]["loss"]
    with pytest.raises(ValueError, match=r"peak: 0\.01 then, 0\.02 now"):
        program.train(replace(options, output=tmp_path, peak=0.02), console=QUIET)


@pytest.mark.full
def test_the_export_fills_masks_as_training_measured_it(run, options):
    """`dx.load` finds mask and attention; LLaDA's sampler, one token a forward, writes what `fill` writes."""
    path = options.output / "model"
    lm_ = dx.load(path)
    assert lm_.diffusion == FULL and lm_.eos == [0] and lm_.vocab_size == 47
    found = [p for task in ("copy", "sudoku") for p in problems.problems(task, 3)]
    batch = jax.tree.map(jnp.asarray, problems.rows_of(found))
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


@pytest.mark.wide
def test_a_model_of_next_sequences_verifies_its_own_masks(corpus, tmp_path):
    """`sdlm` runs on it; in the self-speculative mode it writes what it writes one token a forward."""
    given = made(preset="tiny-text", attention="causal-prefix", shift=True, corpus=corpus, output=tmp_path, steps=4,
                    warmup=1, eval_every=100, batch=8, devices=1)
    program.train(given, console=QUIET)
    lm_ = dx.load(tmp_path / "model")
    assert lm_.diffusion == Diffusion(512, shift=True, attention="causal-prefix", block=4)
    assert "(SDLM)" in (tmp_path / "model" / "README.md").read_text()
    decoded = [dx.generate(lm_, [[5, 9, 60, 81, 7, 3]], max_new_tokens=8, algorithm=f"sdlm:{options}", eos_token_id=[])
               for options in ("threshold=1.0", "self_speculative=true")]
    assert decoded[0].row(0).tolist() == decoded[1].row(0).tolist()
    for wrong in ({"stage": "filter", "init": str(tmp_path / "model")}, {"preset": "tiny", "block": 4}):
        with pytest.raises(ValueError, match="shift: got True with blocks"):
            program.train(replace(made(**{"preset": "tiny-text", "corpus": corpus, "answers": 16, "steps": 4, **wrong}),
                                  output=tmp_path / "wrong", attention=None if "stage" in wrong else "causal-prefix",
                                  shift="stage" not in wrong), console=QUIET)


def test_beginnings_of_texts_leave_room_for_an_answer_at_any_place():
    stream = np.arange(1, 400, dtype=np.int32)
    batch = own_answers.beginnings(stream, 200, 24, 8)
    first, end = batch.answer.argmax(1), batch.live.sum(1)
    assert (batch.answer.sum(1) == 8).all() and (end == first + 8).all()
    assert set(first) == set(range(8, 17))
    for row, length in zip(batch.tokens, end, strict=True):
        assert row[:length].tolist() == list(range(row[0], row[0] + length)) and not row[length:].any()
    with pytest.raises(ValueError, match="corpus: got 9 tokens, takes 24 or more"):
        own_answers.beginnings(stream[:9], 2, 24, 8)


def test_every_row_of_a_fixed_set_comes_once_an_epoch():
    chosen = lambda step, seed=2: own_answers.chosen(np.arange(10), 4, seed, step)
    drawn = np.concatenate([chosen(i) for i in range(5)])
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10)) and list(drawn[:10]) != list(drawn[10:])
    np.testing.assert_array_equal(chosen(3), chosen(3))
    assert (chosen(3) != chosen(3, seed=3)).any()


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
    {"preset": "pycode-sbd", "block": 16},
    {"preset": "pycode-sbd", "stage": "filter"},
])
def test_the_command_on_a_card_repeats_the_options(given):
    options = made(**given, steps=9, decay_from=4)
    again = parse(options.command(9, 4))
    assert again.identity() == options.identity()


def test_a_stage_starts_from_the_shipped_model_or_else_from_the_run_before():
    inits = {preset: made(preset=preset, stage="filter").init for preset in ("pycode-diffusion", "tiny-text")}
    assert inits == {"pycode-diffusion": "pycode-diffusion", "tiny-text": "runs/tiny-text/model"}


def test_the_command_of_a_run_that_goes_on_keeps_its_own_directory():
    options = parse("train.py diffusion --preset pycode-diffusion --init runs/pycode-diffusion/model --output runs/two")
    assert parse(options.command(9, 4)).output == options.output
    assert "--output" not in parse("train.py diffusion --preset pycode-diffusion").command(9, 4)
