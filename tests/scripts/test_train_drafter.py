"""The recipe of drafters: training lowers the loss, a killed run resumes, a mesh trains as one device, and what is
exported drafts."""

from __future__ import annotations

import functools
import json
import shutil
import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import decodax as dx
from decodax.io.saving import save_encoder_decoder
from decodax.io.text import Tokenizer
from decodax.jobs.own_chats import question_prompt, write_chats
from decodax.models import EncoderDecoder, EncoderText
from decodax.models.encoder_decoder.reading import read_encoder_decoder
from decodax.train import corpus
from decodax.train.drafting.systems import SYSTEMS
from decodax.train.drafting.texts import examples
from decodax.train.export import word_tokenizer
from decodax.train.tuning.examples import read_pairs
from recipes import run as program
from recipes.options import PRESETS, Options
from tests.matrix import often
from tests.scripts.killed import QUIET, metrics, resumed, same
from tests.small_tokenizers import save


@pytest.fixture(scope="module")
def options(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Options:
    root = tmp_path_factory.mktemp("corpus")
    for package in ("asyncio", "json"):
        shutil.copytree(Path(sysconfig.get_path("stdlib")) / package, root / package)
    return Options(recipe="drafter", system="medusa", target=str(tiny_model), corpus=root, steps=12, warmup=2,
                   decay_from=8, batch=4, length=32, peak=1e-2, loss="hard", log_every=2, eval_every=6, save_every=5,
                   devices=1, output=tmp_path_factory.mktemp("run"))


def test_every_method_that_can_be_trained_is_an_option() -> None:
    assert PRESETS["drafter"].keys() == SYSTEMS.keys() | {"pard", "pard-2", "specdec"}


def test_a_killed_run_resumes_to_the_same_weights_and_what_it_exports_drafts(options: Options, tmp_path: Path) -> None:
    whole = program.train(options, console=QUIET)
    losses = [e["loss"] for e in metrics(options.output) if "loss" in e]
    assert losses[-1] < losses[0]
    run, steps = resumed(options, tmp_path, 8)
    assert steps == list(range(6, 13)) and same(run.params, whole.params) and same(run.opt, whole.opt)
    again, first = metrics(tmp_path), metrics(options.output)      # means of a killed run miss the steps before
    assert [e["step"] for e in again] == [e["step"] for e in first] and again[-1] == first[-1]

    facts = json.loads((tmp_path / "model" / "config.json").read_text())["training"]
    assert facts["system"] == "medusa" and len(facts["accepted"]) == 4 and 1 <= facts["greedy"] <= 5
    lm = dx.load(options.target, dtype="float32")
    plain, out = (dx.generate(lm, "def f(self):", max_new_tokens=12, eos_token_id=[], **more)
                  for more in ({}, {"algorithm": "medusa", "draft": dx.load_drafter(tmp_path / "model", lm)}))
    assert np.array_equal(out.tokens, plain.tokens)


def test_topics_of_pythons_help_are_texts_and_questions_on_them_are_chats(options: Options) -> None:
    lm = dx.load(options.target)
    texts = read_pairs([Path("python-docs")], lm)
    assert len(texts) > 50 and all(prompt is None for prompt, _ in texts) and "assert" in texts[0][1]
    kept, held = ([document.text for document in part] for part in corpus.load_corpus())
    source = read_pairs([Path("python-source")], lm)
    assert source == [(None, text) for text in kept] and not {text for _, text in source} & set(held)
    asked = read_pairs([Path("python-questions")], lm)
    assert len(asked) > 100 and len({str(prompt) for prompt, _ in asked}) == len(asked)
    messages, answer = asked[0]
    assert messages == [{"role": "user", "content": 'What does the Python documentation say about "The assert '
                                                    'statement"?'}] and answer.startswith("Assert statements")
    bare = replace(lm, tokenizer=Tokenizer.from_dir(options.target))
    assert bare.tokenizer is not None
    bare.tokenizer.chat_templates.clear()
    assert read_pairs([Path("python-questions")], bare)[0] == (f"{messages[0]['content']}\n\n", answer)


@pytest.mark.wide
@pytest.mark.parametrize(("system", "lora"), often([("medusa", None)], [
    ("medusa", None), ("medusa", 2), ("blockwise-parallel", None)]))
def test_a_target_and_its_heads_train_together_and_load_from_one_directory(
        options: Options, system: str, lora: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decodax.train.drafting.measured.NEW", 8)
    own = replace(options, system=system, preset=system, joint=True, lora=lora, heads_alone=3, distill=0.5, loss=None,
                  output=tmp_path / "whole", plot=tmp_path / "curves.png")
    whole = program.train(own, console=QUIET)
    run, steps = resumed(own, tmp_path / "killed", 8)
    assert steps == list(range(6, 13)) and same(run.params, whole.params) and same(run.opt, whole.opt)
    losses = [e["loss"] for e in metrics(own.output) if "loss" in e]
    assert losses[-1] < losses[0] and (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")

    folder, start = own.output / "model", dx.load(options.target, dtype="float32")
    lm = dx.load(folder, dtype="float32")
    kernel = "layers", "0", "attn", "q", "kernel"
    before, after = (functools.reduce(lambda x, name: x[name], kernel, x.params) for x in (start, lm))
    assert not np.array_equal(before, after)
    drafter = dx.load_drafter(folder, lm)
    assert drafter.system == system and same(drafter.params, whole.params[1])       # the target is stored in float32
    prompts = ["def f(self):", "import os"]
    plain, given, found = (dx.generate(lm, prompts, max_new_tokens=12, temperature=0.0, eos_token_id=[], **more)
                           for more in ({}, {"algorithm": system, "draft": drafter}, {"algorithm": system}))
    assert np.array_equal(given.tokens, plain.tokens) and np.array_equal(found.tokens, plain.tokens)
    assert json.loads((folder / "heads" / "config.json").read_text())["training"]["target_cross_entropy"][1] > 0
    assert "trained together from" in (folder / "README.md").read_text()


def test_options_that_need_a_target_that_changes_are_refused_without_one() -> None:
    for name, value in (("lora", 4), ("head_weight", 0.1), ("heads_alone", 0), ("target_rate", 1.0)):
        with pytest.raises(ValueError, match=rf"^{name}: got {value} without --joint"):
            Options(recipe="drafter", system="medusa", **{name: value})
    with pytest.raises(ValueError, match=r"^keep_features: got True with --joint"):
        Options(recipe="drafter", system="medusa", joint=True, keep_features=True)


@pytest.mark.wide
def test_features_that_are_kept_train_as_those_that_are_computed(options: Options, tmp_path: Path,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    kept = replace(options, keep_features=True, steps=4, decay_from=3, output=tmp_path / "kept")
    with pytest.raises(ValueError, match=r"^keep_features: got True for 'glide', which reads more of the target"):
        program.train(replace(kept, system="glide", preset="glide", output=tmp_path / "other"), console=QUIET)
    run = program.train(kept, console=QUIET)
    monkeypatch.setattr("recipes.drafter.kept_features", lambda options, objective, batches, *more: batches)
    computed = program.train(replace(kept, output=tmp_path / "computed"), console=QUIET)
    for x, y in zip(jax.tree.leaves(run.params), jax.tree.leaves(computed.params), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


def test_a_chat_and_what_the_target_answered_are_an_example(options: Options, tmp_path: Path) -> None:
    lm, ask = dx.load(options.target), [{"role": "user", "content": "Which?"}]
    chats = [{"messages": [*ask, {"role": "assistant", "content": f"This, {i}."}]} for i in range(19)]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    (tmp_path / "answers.jsonl").write_text(json.dumps({"id": 7, "text": "That.", "status": "eos", "messages": ask}))
    text = examples(lm, [str(tmp_path / "chats.jsonl"), str(tmp_path / "answers.jsonl")])
    prompt, end = lm.tokenizer.encode_chat(ask), lm.eos[0]
    assert text.prompts == [prompt] and text.stops
    assert text.held.tolist() == [*prompt, *lm.tokenizer.encode("That.", add_special_tokens=False), end]
    assert text.train[:len(prompt)].tolist() == prompt and np.sum(text.train == end) == 19


def test_a_target_writes_chats_and_goes_on_after_a_kill(lm: dx.LM, tmp_path: Path) -> None:
    prompt = question_prompt(lm)
    assert lm.tokenizer is not None and lm.tokenizer.decode(prompt).endswith("user>")
    both = [tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"]
    size: dict[str, Any] = dict(question=24, answer=4)     # random weights end one text in 375 tokens
    write_chats(lm, both[0], 128, **size)
    write_chats(lm, both[1], 64, **size)
    write_chats(lm, both[1], 128, **size)
    whole, killed = (path.read_text().splitlines() for path in both)
    assert whole == killed and 0 < len(whole) < 128
    asked = [json.loads(line)["messages"][0]["content"] for line in whole]
    assert len(set(asked)) == len(asked) and examples(lm, [str(both[0])]).prompts


@pytest.mark.wide
@pytest.mark.parametrize("system", often(["eagle-3", "dspark"], [
    "eagle-3", "dspark", "chimera", "falcon", "p-eagle", "s3d"]))
def test_recurrent_and_block_heads_learn(options: Options, system: str, tmp_path: Path) -> None:
    own = Options(recipe="drafter", system=system, target=options.target, corpus=options.corpus, steps=10, warmup=2,
                  decay_from=8, batch=4, length=32, peak=3e-3, loss="hard", log_every=1, eval_every=50,
                  save_every=50, devices=1, drafts=3, output=tmp_path)
    program.train(own, console=QUIET)
    losses = [e["loss"] for e in metrics(tmp_path) if "loss" in e]
    assert losses[-1] < losses[0]
    lm = dx.load(options.target, dtype="float32")
    drafter = dx.load_drafter(tmp_path / "model", lm)
    assert drafter.system == system and drafter.head.longest in (None, 3, 5)
    assert f"method `{system}`" in (tmp_path / "model" / "README.md").read_text()


@pytest.mark.wide
def test_heads_with_their_own_matrices_are_trained_further_with_the_target_and_after_a_kill(
        options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decodax.train.drafting.measured.NEW", 8)
    monkeypatch.setattr("decodax.train.drafting.texts.PROMPTS", 2)
    first = replace(options, own_head=True, drafts=2, steps=3, decay_from=2, output=tmp_path / "first")
    program.train(first, console=QUIET)
    lm = dx.load(options.target, dtype="float32")
    heads = dx.load_drafter(first.output / "model", lm)
    assert heads.head.own_head and heads.head.heads == 2
    second = replace(first, joint=True, heads_alone=1, peak=1e-30, start=str(first.output / "model"), steps=12,
                     decay_from=8, output=tmp_path / "second")
    run = program.train(second, console=QUIET)
    for x, y in zip(jax.tree.leaves(run.params[1]), jax.tree.leaves(heads.params), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)         # with hardly any steps they are what they began as
    command = second.command(12, 8)
    assert f"--own-head --start {second.start}" in command and "--joint" in command
    both = dx.load(second.output / "model", dtype="float32")
    plain, out = (dx.generate(both, "def f(self):", max_new_tokens=12, eos_token_id=[], **more)
                  for more in ({}, {"algorithm": "medusa"}))
    assert np.array_equal(out.tokens, plain.tokens)
    whole = program.train(replace(second, joint=False, heads_alone=None, peak=1e-2, output=tmp_path / "third"),
                          console=QUIET)
    again, steps = resumed(replace(second, joint=False, heads_alone=None, peak=1e-2), tmp_path / "killed", 8)
    assert steps == list(range(6, 13)) and same(again.params, whole.params)     # the checkpoint, not the start
    with pytest.raises(ValueError, match=r"^start: got '.*' with heads 2, takes one with 4, as the options say"):
        program.train(replace(second, joint=False, heads_alone=None, drafts=4, output=tmp_path / "other"),
                      console=QUIET)


def encoder_decoder(directory: Path, words: list[str]) -> Path:
    """A directory with a T5 of 2 and 3 layers with random weights, whose tokens are words."""
    special = ["<pad>", "</s>"]
    tokenizer = word_tokenizer({w: i for i, w in enumerate([*special, *words])}, special)
    config = dict(model_type="t5", vocab_size=2 + len(words), d_model=16, d_kv=8, d_ff=24, num_layers=2,
                  num_decoder_layers=3, num_heads=2, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)
    network = EncoderDecoder(read_encoder_decoder(config, ()))
    target = save(tokenizer, directory, tokenizer_config={"eos_token": "</s>", "pad_token": "<pad>"},
                  generation_config={"eos_token_id": 1, "pad_token_id": 0, "decoder_start_token_id": 0})
    save_encoder_decoder(target, network, network.init_params(jax.random.key(0)), config)
    return target


@pytest.mark.full
def test_a_non_autoregressive_drafter_learns_from_pairs(options: Options, tmp_path: Path) -> None:
    words = [f"w{i}" for i in range(20)]
    target = encoder_decoder(tmp_path / "target", words)
    draw = np.random.default_rng(0).integers(0, 20, (24, 6))
    lines = [json.dumps({"prompt": " ".join(words[i] for i in row), "target": " ".join(words[i] for i in row[::-1])})
             for row in draw]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    own = Options(recipe="drafter", system="specdec", target=str(target), data=(str(tmp_path / "pairs.jsonl"),),
                  length=16, drafts=3, steps=20, warmup=2, batch=4, peak=1e-2, log_every=2, eval_every=50,
                  save_every=50, devices=1, output=tmp_path / "run")
    program.train(own, console=QUIET)
    losses = [e["loss"] for e in metrics(tmp_path / "run") if "loss" in e]
    assert losses[-1] < losses[0]
    drafter = dx.load(tmp_path / "run" / "model")
    assert (drafter.model.config.encoder.layers, drafter.model.config.decoder.layers) == (2, 2)
    lm = dx.load(target)
    inputs = EncoderText.read(lm, ["w1 w2", "w3 w4 w5"])
    plain, out = (dx.generate(lm, [[], []], inputs=inputs, max_new_tokens=8, temperature=0.0, **more)
                  for more in ({}, {"algorithm": "specdec:beta=1,length=3", "draft": drafter}))
    assert np.array_equal(out.tokens, plain.tokens)
    with pytest.raises(ValueError, match=r"^target: got .* takes an encoder-decoder of text"):
        program.train(replace(own, target=options.target, output=tmp_path / "other"), console=QUIET)


@pytest.mark.wide
def test_a_deep_encoder_and_a_shallow_decoder_learn_from_answers_of_the_target_and_further(tmp_path: Path) -> None:
    words = [f"w{i}" for i in range(20)]
    target = encoder_decoder(tmp_path / "target", words)
    lines = [json.dumps({"id": i, "source": f"w{i} w{i + 1}", "text": f"w{i + 1} w{i}", "status": "eos"})
             for i in range(16)]
    (tmp_path / "answers.jsonl").write_text("\n".join(lines))
    own = Options(recipe="drafter", system="specdec", target=str(target), data=(str(tmp_path / "answers.jsonl"),),
                  length=8, drafts=2, steps=3, warmup=1, batch=4, layers=1, encoder_layers=4, mask=3, peak=1e-3,
                  eval_every=50, save_every=50, devices=1, output=tmp_path / "run")
    run = program.train(own, console=QUIET)
    made = dx.load(tmp_path / "run" / "model", dtype="float32")
    assert (made.model.config.encoder.layers, made.model.config.decoder.layers) == (4, 1)
    again = program.train(replace(own, start=str(tmp_path / "run" / "model"), mask=None, peak=1e-30,
                                  output=tmp_path / "again"), console=QUIET)
    for x, y in zip(jax.tree.leaves(again.params), jax.tree.leaves(run.params), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-2, atol=1e-3)      # stored in bfloat16
    facts = json.loads((tmp_path / "again" / "model" / "config.json").read_text())
    assert facts["mask_token_id"] == 3
    for more, words_of in (({"mask": 4}, "mask: got 4, and '.*' was trained with 3"),
                           ({"layers": 2, "mask": None}, "start: got '.*', a model of another shape; takes an "),
                           ({"mlp": 8}, "mlp: got 8, 'specdec' takes none")):
        with pytest.raises(ValueError, match=f"^{words_of}"):
            program.train(replace(own, start=str(tmp_path / "run" / "model"), output=tmp_path / "other", **more),
                          console=QUIET)


def test_a_source_is_a_prompt_for_an_encoder_decoder_and_a_note_for_a_decoder(lm: dx.LM, tmp_path: Path) -> None:
    target = dx.load(encoder_decoder(tmp_path / "target", ["w0", "w1", "w2"]))
    (tmp_path / "answers.jsonl").write_text(json.dumps({"id": 0, "source": "w0 w1", "text": "w2"}))
    assert read_pairs([tmp_path / "answers.jsonl"], target) == [("w0 w1", "w2")]
    assert read_pairs([tmp_path / "answers.jsonl"], lm) == [(None, "w2")]
    (tmp_path / "answers.jsonl").write_text(json.dumps({"source": "w0 w1"}))
    with pytest.raises(ValueError, match='for an encoder-decoder with "source" and "text"'):
        read_pairs([tmp_path / "answers.jsonl"], target)


@pytest.mark.wide
@pytest.mark.mesh
def test_a_mesh_trains_as_one_device_does(options: Options, tmp_path: Path) -> None:
    if jax.device_count() < 4:
        pytest.skip("needs 4 devices")
    one = replace(options, output=tmp_path / "one", steps=3, decay_from=2, warmup=1, peak=1e-3)
    mesh = replace(one, output=tmp_path / "mesh", devices=4)
    a, b = (program.train(o, console=QUIET) for o in (one, mesh))
    assert metrics(mesh.output)[0]["loss"] == pytest.approx(metrics(one.output)[0]["loss"], abs=1e-4)
    for x, y in zip(jax.tree.leaves(a.params), jax.tree.leaves(b.params), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-3)


@pytest.mark.full
@pytest.mark.parametrize("system", ["pard", "pard-2"])
def test_pard_tunes_the_first_layers_of_the_target_to_a_draft_model(system: str, options: Options, tmp_path: Path,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decodax.train.drafting.measured.NEW", 8)
    monkeypatch.setattr("decodax.train.drafting.texts.PROMPTS", 2)
    own = replace(options, system=system, preset=system, drafts=3, mask=3, output=tmp_path, loss=None)
    program.train(own, console=QUIET)
    losses = [e["loss"] for e in metrics(tmp_path) if "loss" in e]
    assert losses[-1] < losses[0]
    lm, draft = dx.load(options.target, dtype="float32"), dx.load(tmp_path / "model", dtype="float32")
    assert draft.model.depth == max(lm.model.depth // 4, 1) and draft.config_entries["pard_token"] == 3
    plain, out = (dx.generate(lm, "def f(self):", max_new_tokens=12, eos_token_id=[], **more)
                  for more in ({}, {"algorithm": f"{system}:length=3", "draft": draft}))
    assert np.array_equal(out.tokens, plain.tokens)
    with pytest.raises(ValueError, match="draft, mask: got None and 3 for 'medusa', which tunes no draft model"):
        program.train(replace(own, system="medusa", preset="medusa"), console=QUIET)
