"""The training program: data split, tokenizer, schedule, resumption, distillation, export."""

import json
import math
import re
import shlex
import shutil
import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import train
from tokenizers import Tokenizer

from decodax.io.checkpoint import load_model
from decodax.train import corpus as data
from decodax.train import language_model as lm
from decodax.train.loop import Schedule, TrainingRun
from recipes import run as program
from recipes.options import Options, from_arguments
from tests.scripts.killed import QUIET, metrics, resumed, same


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two packages of the standard library; asyncio/events.py is held out."""
    root = tmp_path_factory.mktemp("corpus")
    for package in ("asyncio", "json"):
        shutil.copytree(Path(sysconfig.get_path("stdlib")) / package, root / package)
    return root


@pytest.fixture(scope="module")
def options(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Options:
    return Options(recipe="lm", preset="tiny", corpus=corpus, output=tmp_path_factory.mktemp("run"), steps=24,
                   decay_from=15, log_every=4, eval_every=12, save_every=5, devices=1)


@pytest.fixture(scope="module")
def run(options: Options) -> TrainingRun:
    return program.train(options, console=QUIET)


@pytest.fixture(scope="module")
def tokenizer(run: TrainingRun, options: Options) -> Tokenizer:
    return Tokenizer.from_file(str(options.output / "tokenizer.json"))


@pytest.fixture(scope="module")
def documents(corpus: Path) -> tuple[list[data.Document], list[data.Document]]:
    return data.load_corpus(corpus)


def test_held_out_files_are_chosen_by_the_hash_of_their_path(documents):
    train, kept = documents
    assert [d.path for d in kept] == ["asyncio/events.py"]
    assert not {d.path for d in train} & {d.path for d in kept}
    assert all(data.held_out(d.path) for d in kept) and not any(data.held_out(d.path) for d in train)


def test_the_order_of_the_corpus_does_not_depend_on_the_machine(corpus, documents, tmp_path):
    shutil.copytree(corpus, tmp_path / "elsewhere")
    assert data.load_corpus(tmp_path / "elsewhere") == documents


def test_a_directory_without_source_is_an_error_that_names_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path))):
        data.load_corpus(tmp_path)


@pytest.mark.parametrize("text", ["", "def f(x):\n\n\n\treturn x\r\n", "  é\u0301 漢字 🎉🏽\x00\ufeff", "a\n \n  b   ",
                                  "\u2028_x1_000 .y\u00a0"])
def test_any_text_survives_the_tokenizer(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_random_unicode_survives_the_tokenizer(tokenizer):
    rng = np.random.default_rng(0)
    for _ in range(50):
        points = rng.integers(0, 0x110000, 40)
        text = "".join(chr(p) for p in points if not 0xD800 <= p < 0xE000)
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_token_bytes_add_up_to_the_text(tokenizer):
    text = "def f(é):\n        return 'ü'\n"
    assert lm.token_bytes(tokenizer)[tokenizer.encode(text).ids].sum() == len(text.encode())


def test_an_epoch_visits_every_window_once():
    batches = data.Batches(np.arange(1000, dtype=np.int32), batch=3, length=10, seed=1)
    assert batches.per_epoch == 98
    rows = np.concatenate([batches[i] for i in range(98)])
    assert rows.shape == (294, 11) and (np.diff(rows, axis=1) == 1).all()
    for epoch in np.split(rows[:, 0], 3):
        assert np.unique(epoch).size == 98 and np.unique(epoch % 10).size == 1
    assert np.array_equal(batches[57], batches[57])


def test_bits_per_byte_counts_every_token_once():
    seen: list[int] = []

    def losses(window: np.ndarray) -> np.ndarray:
        return 2.0 ** (window[:, 1:] % 7)

    for size in (5, 17, 64, 100):
        stream = np.arange(1, size + 1, dtype=np.int32)
        expected = (2.0 ** (stream[1:] % 7)).sum() / math.log(2) / (3 * (size - 1))
        seen.append(size)
        assert lm.bits_per_byte(losses, stream, np.full(size + 1, 3), length=16, batch=4) == pytest.approx(expected)


def test_training_lowers_the_loss(run, options):
    losses = [e["loss"] for e in metrics(options.output) if "loss" in e]
    assert losses[-1] < losses[0] - 0.3


def test_a_killed_run_resumes_to_the_same_weights(run, options, tmp_path):
    """Killed at step 18, its last checkpoint is of step 15; what it logged after that is dropped."""
    second, steps = resumed(options, tmp_path, 18)
    assert steps == list(range(16, 25)) and same(second.params, run.params) and same(second.opt, run.opt)
    again, whole = metrics(tmp_path), metrics(options.output)
    assert [(e["step"], e["tokens"]) for e in again] == [(e["step"], e["tokens"]) for e in whole]
    assert again[-1] == whole[-1]


def test_a_finished_run_is_only_exported_again(run, options):
    steps: list[int] = []
    again = program.train(options, on_step=steps.append, console=QUIET)
    assert steps == [] and same(again.params, run.params)


def test_a_run_is_not_resumed_with_other_options(run, options):
    with pytest.raises(ValueError, match=r"peak: 0.01 then, 0.02 now"):
        program.train(replace(options, peak=0.02), console=QUIET)


@pytest.mark.full
def test_the_command_in_the_card_repeats_a_run_with_a_time_budget(options, tmp_path):
    timed = replace(options, steps=None, decay_from=None, minutes=0.02, log_every=2, output=tmp_path / "timed")
    first = program.train(timed, console=QUIET)
    facts = json.loads((tmp_path / "timed" / "model" / "training.json").read_text())
    assert facts["steps"] == first.step == first.schedule.steps
    words = shlex.split(facts["command"])[2:]
    again = from_arguments(train.parser().parse_args([*words, "--output", str(tmp_path / "again"), "--devices", "1"]))
    assert same(program.train(again, console=QUIET).params, first.params)


@pytest.mark.wide
@pytest.mark.mesh
def test_a_mesh_trains_as_one_device_does(run, options, tmp_path):
    if jax.device_count() < 4:
        pytest.skip("needs 4 devices")
    one = replace(options, output=tmp_path / "one", steps=4, decay_from=3, warmup=2)
    mesh = replace(one, output=tmp_path / "mesh", devices=4, model_parallel=2)
    a, b = (program.train(o, console=QUIET) for o in (one, mesh))
    assert any("model" in x.sharding.spec for x in jax.tree.leaves(b.params))
    assert metrics(mesh.output)[0]["loss"] == pytest.approx(metrics(one.output)[0]["loss"], abs=1e-4)
    for x, y in zip(jax.tree.leaves(a.params), jax.tree.leaves(b.params), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-3)


@pytest.mark.full
def test_distillation_brings_the_student_nearer_to_the_teacher(run, tokenizer, options, tmp_path):
    teacher = options.output / "model"
    model, weights = load_model(teacher, dtype="float32")
    student = program.train(replace(options, output=tmp_path, teacher=str(teacher), mix=1.0, seed=1), console=QUIET)
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).to_str() == tokenizer.to_str()
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 512, (4, 32)), jnp.int32)
    assert load_model(tmp_path / "model")[0] == model
    forward = jax.jit(model.forward)
    guide = forward(weights, tokens)
    fresh = model.init_params(jax.random.key(1))
    trained = jax.device_get(student.params)
    near, far = (lm.divergence(guide, forward(p, tokens)).mean() for p in (trained, fresh))
    assert near < 0.5 * far
    facts, card = (tmp_path / "model" / f for f in ("training.json", "README.md"))
    assert "distilled from `model`" in card.read_text() and "drafts that `model` accepts" in card.read_text()
    assert json.loads(facts.read_text())["acceptance"] > lm.overlap(model, model, weights, fresh, tokens).mean()


def test_with_a_reference_the_divergence_counts_where_the_student_is_furthest_from_it():
    """AdaSPEC's rule, in NumPy."""
    logits = {name: jax.random.normal(jax.random.key(i), (2, 10, 7))
              for i, name in enumerate(("own", "teacher", "ref"))}

    @dataclass(frozen=True)
    class Table:
        name: str

        def forward(self, params, tokens):
            return logits[self.name] * params

    loss = lm.NextTokens(Table("own"), "float32", Table("teacher"), 0.8, Table("ref"), 0.4)
    batch = jnp.asarray(np.random.default_rng(0).integers(0, 7, (2, 11)), jnp.int32)
    found, scalars = loss(jnp.float32(1), batch, (jnp.float32(1), jnp.float32(1)))
    p, q, r = (np.asarray(jax.nn.log_softmax(logits[name]), np.float64) for name in ("teacher", "own", "ref"))
    own, ref = ((np.exp(p) * (p - x)).sum(-1).ravel() for x in (q, r))
    chosen = np.argsort(own - ref)[-8:]             # 0.4 of 20
    truth = -np.take_along_axis(q, np.asarray(batch)[:, 1:, None], 2).mean()
    assert float(found) == pytest.approx(0.8 * own[chosen].mean() + 0.2 * truth, rel=1e-5)
    assert float(scalars["cross_entropy"]) == pytest.approx(truth, rel=1e-5)


@pytest.mark.full
def test_a_reference_trains_the_student_too(run, options, tmp_path):
    teacher = str(options.output / "model")
    taught = replace(options, output=tmp_path / "first", teacher=teacher, mix=1.0, seed=1)
    program.train(taught, console=QUIET)
    again = replace(taught, output=tmp_path / "second", reference=str(tmp_path / "first" / "model"), seed=2)
    program.train(again, console=QUIET)
    losses = [e["loss"] for e in metrics(again.output) if "loss" in e]
    assert losses[-1] < losses[0]
    assert "on the 40% of the tokens that can be learned" in (again.output / "model" / "README.md").read_text()


@pytest.mark.full
def test_bfloat16_trains_too(options, tmp_path):
    half = program.train(replace(options, output=tmp_path, dtype="bfloat16"), console=QUIET)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(half.params))
    losses = [e["loss"] for e in metrics(tmp_path) if "loss" in e]
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.wide
def test_the_export_gives_the_same_logits_in_decodax_and_transformers(run, tokenizer, options):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    path = options.output / "model"
    oracle = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    theirs = transformers.AutoTokenizer.from_pretrained(path)
    text = "def f(self):\n    return self.x\n"
    ids = theirs(text)["input_ids"]
    assert ids == tokenizer.encode(text).ids and theirs.decode(ids) == text
    model, weights = load_model(path, dtype="float32")
    with torch.no_grad():
        expected = oracle(torch.tensor([ids])).logits.numpy()
    forward = jax.jit(model.forward)
    got = forward(weights, jnp.asarray([ids], jnp.int32))
    np.testing.assert_allclose(np.asarray(got), expected, atol=1e-4)
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), run.params)
    np.testing.assert_allclose(np.asarray(got), np.asarray(forward(rounded, jnp.asarray([ids], jnp.int32))), atol=1e-5)


@pytest.mark.parametrize(("given", "message"), [
    ({"preset": "huge"}, "preset: got 'huge'"),
    ({"dtype": "float8"}, "dtype: got 'float8'"),
    ({"mix": 1.5}, "mix: got 1.5"),
    ({"decay_from": 3}, "decay_from: got 3"),
    ({"reference": "x"}, "reference: got 'x' without a teacher"),
    ({"keep": 0.0}, "keep: got 0.0"),
])
def test_wrong_options_are_named(given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Options(recipe="lm", **given)


def test_a_batch_that_does_not_divide_is_named(options, tmp_path):
    if jax.device_count() < 2:
        pytest.skip("needs 2 devices")
    with pytest.raises(ValueError, match="batch: got 3"):
        program.train(replace(options, batch=3, devices=2, output=tmp_path), console=QUIET)


def test_checkpoints_are_kept_to_the_latest_two(run, options):
    with ocp.CheckpointManager((options.output / "checkpoints").absolute()) as manager:
        assert sorted(manager.all_steps()) == [20, 24]


def test_the_schedule_of_a_time_budget_ends_in_a_decay(tmp_path):
    run = TrainingRun(tmp_path, {}, None, None, Schedule(1.0, 2), minutes=1.0, decay_share=0.5)
    run.pace, run.step, run.seconds = [(10, 10.0), (20, 20.0), (30, 31.0)], 30, 31.0
    run.settle()
    assert run.schedule.decay_from == 30 and run.schedule.steps == 30 + int(29 / 1.05)
