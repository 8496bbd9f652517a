"""Fine-tuning: a killed run resumes, what is exported loads and decodes, and each objective gives what it promises."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import train

import decodax as dx
from decodax.io.saving import save_model
from decodax.models import Diffusion, Transformer, llama
from decodax.train.masked_diffusion import widened
from decodax.train.own_answers import fill, unanswered
from decodax.train.tuning import read_examples
from decodax.train.tuning.mbr import selected_answers
from decodax.train.tuning.tuned import checked
from recipes import own_answers
from recipes import run as program
from recipes.options import Options, from_arguments
from recipes.tune import rule_of
from tests.matrix import often
from tests.scripts.killed import QUIET, resumed, same
from tests.small_tokenizers import byte_level, save

CODE = "def f(self, x):\n    return self.x + x\n\n"


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Options:
    root = tmp_path_factory.mktemp("tune")
    tokenizer = byte_level()
    path = save(tokenizer, root / "target", generation_config={"eos_token_id": 0},
                tokenizer_config={"eos_token": "<|endoftext|>"})
    model = Transformer(llama(vocab=tokenizer.get_vocab_size(), width=32, layers=2, heads=4, kv_heads=2, mlp=64,
                              context=128))
    save_model(path, model, model.init_params(jax.random.key(1)), config={"eos_token_id": 0}, dtype="float32")
    (root / "text.py").write_text(CODE * 12)
    pairs = [json.dumps({"prompt": f"def f{i}(", "target": "self, x):\n    return self.x + x"}) for i in range(24)]
    (root / "pairs.jsonl").write_text("\n".join(pairs))
    return Options(recipe="tune", objective="layerskip", target=str(path), output=root / "run", steps=10, warmup=2,
                   data=(str(root / "pairs.jsonl"), str(root / "text.py")), batch=4, length=32, peak=1e-2, log_every=2,
                   eval_every=5, save_every=4, devices=1)


def facts_of(options: Options) -> dict[str, dict[str, float]]:
    return json.loads((options.output / "model" / "training.json").read_text())


def test_a_killed_run_resumes_to_the_same_weights_and_its_exits_learn(options: Options, tmp_path: Path) -> None:
    whole = program.train(options, console=QUIET)
    run, steps = resumed(options, tmp_path, 6)
    assert steps == list(range(5, 11)) and same(run.params, whole.params) and same(run.opt, whole.opt)

    facts = facts_of(options)
    assert facts["after"]["after_layer_1"] < facts["before"]["after_layer_1"] - 0.1
    assert same(dx.load(options.output / "model").params, whole.params)         # the target is stored in float32
    again = from_arguments(train.parser().parse_args(shlex.split(str(facts["command"]))[2:]))
    assert again.identity() == options.identity()
    assert "`--" not in (card := (options.output / "model" / "README.md").read_text()) and "layerskip" in card


@pytest.mark.wide
@pytest.mark.parametrize("objective", often(["space"], [
    "next-token", "soft", "msn", "cllm", "space", "lud", "s3d", "hamburger", "scheduled-sampling", "mbr", "nmst",
    "any-subset"]))
def test_every_objective_trains(options: Options, objective: str, tmp_path: Path) -> None:
    own = replace(options, objective=objective, preset=objective, output=tmp_path, answers=8, blocks=2,
                  candidates=4, new_tokens=8, epsilon=0.01,
                  block=8 if objective == "cllm" else None,
                  correction="# rather:" if objective == "scheduled-sampling" else None)
    run = program.train(own, console=QUIET)
    facts = facts_of(own)
    if objective in ("cllm", "msn", "space", "s3d"):
        assert facts["after"]["tokens_a_forward"] >= 0.5
    if objective != "cllm":
        assert facts["after"]["cross_entropy"] < facts["before"]["cross_entropy"] - 0.1
    lm = dx.load(tmp_path / "model")
    if objective == "nmst":
        lm = dx.algorithms.contrastive.nmst(lm, tmp_path / "model", 0.3)
        assert same(lm.params, run.params) and "nmst(dx.load(" in (tmp_path / "model" / "README.md").read_text()
    if objective in ("space", "s3d"):       # the padding token ends texts
        entries = {f"{objective}_mask_token": lm.vocab_size - 1} | ({"s3d_skip": [0]} if objective == "s3d" else {})
        assert entries.items() <= lm.config_entries.items()
        assert f'algorithm="{objective}:length=5")' in (tmp_path / "model" / "README.md").read_text()
    if objective == "any-subset":
        assert lm.diffusion == Diffusion(lm.vocab_size - 1, attention="any-subset")
        filled = dx.infill(lm, ["def f(", 3, "return", 2], algorithm="assd:k=4")
        assert [len(x) for x in filled.findings["gap_tokens"][0]] == [3, 2] and filled.stats.rounds[0] <= 5
    assert dx.generate(lm, "def f(", max_new_tokens=4).tokens.size


@pytest.fixture(scope="module")
def padded(options: Options) -> Options:
    """Options for a model with an output matrix of its own and 13 rows more than its tokenizer has tokens."""
    path, tokenizer = Path(options.target).with_name("padded"), byte_level()
    save(tokenizer, path, generation_config={"eos_token_id": 0}, tokenizer_config={"eos_token": "<|endoftext|>"})
    model = Transformer(llama(vocab=tokenizer.get_vocab_size() + 13, width=32, layers=2, heads=4, kv_heads=2, mlp=64,
                              context=128))
    assert not model.config.tied
    save_model(path, model, model.init_params(jax.random.key(1)), config={"eos_token_id": 0}, dtype="float32")
    return replace(options, target=str(path))


@pytest.mark.wide
@pytest.mark.parametrize("objective", ["sbd", "sdlm"])
def test_an_autoregressive_model_learns_to_fill_blocks_after_a_text(padded: Options, objective: str,
                                                                   tmp_path: Path) -> None:
    """With an unused row of its vocabulary as the mask. In the self-speculative mode SDLM writes what it writes one
    token a forward."""
    own = replace(padded, objective=objective, preset=objective, data=padded.data[:1], block=4, length=40, steps=100,
                  eval_every=1000, save_every=1000, output=tmp_path)
    program.train(own, console=QUIET)
    facts = facts_of(own)
    assert set(facts["after"]) == {"bound", "cross_entropy", "tokens_a_forward"} - ({"bound"} if objective == "sdlm"
                                                                                   else set())
    assert facts["after"]["cross_entropy"] < 0.5 and facts["after"]["tokens_a_forward"] > 1.1
    lm = dx.load(tmp_path / "model")
    assert lm.diffusion == Diffusion(lm.vocab_size - 1, objective == "sdlm", "causal-prefix", 4)
    write = lambda options: dx.generate(lm, "def f3(", max_new_tokens=12, algorithm=options, eos_token_id=[])
    out = write(objective)
    assert out.lengths.tolist() == [12] and lm.diffusion.mask not in out.tokens
    assert f'algorithm="{objective}")' in (tmp_path / "model" / "README.md").read_text()
    if objective == "sdlm":
        plain = write("sdlm:threshold=1.0")
        assert write("sdlm:self_speculative=true").row(0).tolist() == plain.row(0).tolist()
    else:
        assert out.stats.forwards < 10


def test_what_objectives_with_masks_do_not_take_is_named(padded: Options, tmp_path: Path) -> None:
    used = dx.load(padded.target).tokenizer.encode("def")[0]
    for given, message in (({"mask": used}, f"mask: got {used}, which the data has; takes an id that it"),
                           ({"mask": 999}, "mask: got 999, takes an id from 0 to"),
                           ({"block": 0}, "block: got 0, takes 1 or more"),
                           ({"block": 64}, "block: got 64; it takes less than half of the 128 positions")):
        own = replace(padded, objective="sbd", preset="sbd", output=tmp_path, **given)
        with pytest.raises(ValueError, match=f"^{message}"):
            program.train(own, console=QUIET)


@pytest.mark.wide
def test_chats_that_the_target_writes_are_data_beside_files(padded: Options, tmp_path: Path) -> None:
    path = tmp_path / "chats"
    shutil.copytree(padded.target, path)
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>", "chat_template": (
        "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' ' }}{% endfor %}")}))
    own = replace(padded, objective="next-token", preset="next-token", target=str(path), data=padded.data[:1],
                  output=tmp_path / "run", own_chats=8, steps=2, warmup=1)
    program.train(own, console=QUIET)
    assert (tmp_path / "run" / "chats.jsonl").is_file()
    assert "8 chats of its own" in (tmp_path / "run" / "model" / "README.md").read_text()
    with pytest.raises(ValueError, match="own_chats: got 3 with dparallel"):
        program.train(replace(own, objective="dparallel", preset="dparallel", own_chats=3), console=QUIET)


@pytest.fixture(scope="module")
def teacher(options: Options) -> Path:
    """A wider model with the tokenizer of the target."""
    known = dx.load(options.target)
    path = save(byte_level(), options.output.parent / "teacher", generation_config={"eos_token_id": 0},
                tokenizer_config={"eos_token": "<|endoftext|>"})
    model = Transformer(llama(vocab=known.vocab_size, width=48, layers=2, heads=4, kv_heads=2, mlp=64, context=128))
    save_model(path, model, model.init_params(jax.random.key(5)), config={"eos_token_id": 0}, dtype="float32")
    return path


@pytest.mark.wide
def test_a_draft_model_is_distilled_from_a_teacher_and_then_where_it_can_still_learn(
        options: Options, teacher: Path, tmp_path: Path) -> None:
    plain = replace(options, objective="distillation", preset="distillation", teacher=str(teacher), mix=1.0,
                    output=tmp_path / "plain")
    program.train(plain, console=QUIET)
    selective = replace(plain, reference=str(tmp_path / "plain" / "model"), output=tmp_path / "selective")
    whole = program.train(selective, console=QUIET)
    run, _ = resumed(selective, tmp_path / "killed", 6)
    assert same(run.params, whole.params)
    for own in (plain, selective):
        facts = facts_of(own)
        assert facts["after"]["divergence"] < facts["before"]["divergence"]
        assert facts["after"]["acceptance"] > facts["before"]["acceptance"]
        again = from_arguments(train.parser().parse_args(shlex.split(str(facts["command"]))[2:]))
        assert again.identity() == own.identity()
    target, draft = dx.load(teacher), dx.load(selective.output / "model")
    plainly, drafted = (dx.generate(target, "def f(", max_new_tokens=8, **more)
                        for more in ({}, {"algorithm": "seed-exact:length=2", "draft": draft}))
    assert np.array_equal(plainly.tokens, drafted.tokens)


@pytest.mark.wide
def test_a_gguf_file_with_packed_weights_teaches(options: Options, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from tests.io.gguf.writing import Type, mixed, network, write
    weights, noise = network("llama")[1], np.random.default_rng(0)
    write(tmp_path / "teacher.gguf", "llama", weights, mixed)
    write(tmp_path / "student.gguf", "llama", {name: x + 0.1 * noise.normal(size=x.shape).astype(np.float32)
                                               for name, x in weights.items()}, lambda tensor: Type.F32)
    own = replace(options, objective="distillation", preset="distillation", target=str(tmp_path / "student.gguf"),
                  widen=True, teacher=str(tmp_path / "teacher.gguf"), mix=1.0, output=tmp_path / "run")
    program.train(own, console=QUIET)
    facts = facts_of(own)
    assert facts["after"]["divergence"] < facts["before"]["divergence"]


def test_the_command_of_a_run_with_a_reference_says_a_share_of_the_divergence_that_was_given(options: Options) -> None:
    """By default it is 1 with a reference and 0.7 without one."""
    own = replace(options, objective="distillation", preset="distillation", teacher="pycode", reference="pycode-draft")
    for mix in (None, 0.7, 1.0):
        command = replace(own, mix=mix).command(3, None)
        again = from_arguments(train.parser().parse_args(shlex.split(command)[2:]))
        assert again.mix == mix and again.reference == own.reference


def test_a_teacher_that_does_not_fit_is_refused(options: Options) -> None:
    for objective, given in (("distillation", None), ("msn", "pycode")):
        own = replace(options, objective=objective, preset=objective, teacher=given)
        with pytest.raises(ValueError, match=rf"^teacher: got {given!r} with {objective}; distillation takes a model"):
            program.train(own, console=QUIET)
    own = replace(options, objective="distillation", preset="distillation", teacher="sums")
    with pytest.raises(ValueError, match=r"^teacher: got 'sums' with \d+ logits; takes a model with the \d+ of"):
        program.train(own, console=QUIET)


@pytest.mark.wide
def test_heads_of_autodeco_are_trained_beside_the_model_and_exported_as_the_authors_do(
        options: Options, tmp_path: Path) -> None:
    """The model's own weights stay as they are."""
    own = replace(options, objective="autodeco", preset="autodeco", output=tmp_path / "heads")
    run = program.train(own, console=QUIET)
    facts = facts_of(own)
    assert sum(facts["after"].values()) < sum(facts["before"].values()) - 0.001
    config = json.loads((tmp_path / "heads" / "model" / "config.json").read_text())
    assert config["model_type"] == "autodeco" and config["base_model_name_or_path"] == options.target
    lm = dx.load(options.target)
    deco = dx.algorithms.contrastive.autodeco(lm, tmp_path / "heads" / "model")
    assert same(deco.params[1], run.params) and deco.params[0] is lm.params


@pytest.mark.wide
def test_the_samples_that_a_rule_selects_are_learned(options: Options, tmp_path: Path) -> None:
    quality = tmp_path / "quality.py"
    quality.write_text("def short(prompt, texts):\n    return [-len(text) for text in texts]\n")
    rule = rule_of(replace(options, quality=f"{quality}:short"))
    lm, files = dx.load(options.target), [Path(file) for file in options.data]
    (example,) = read_examples(files[:1], lm)[:1]
    (chosen,) = selected_answers(lm, [example], rule, 4, 8, seed=3)
    given = list(example.tokens[:example.prompt])
    out = dx.generate(lm, [given], num_samples=4, temperature=1.0, max_new_tokens=8, seed=3)
    best = int(np.argmin([len(text) for text in out.text]))
    assert chosen.prompt == len(given) and list(chosen.tokens) == given + out.row(best).tolist()
    with pytest.raises(ValueError, match=r"quality: .* has no function 'long'"):
        rule_of(replace(options, quality=f"{quality}:long"))
    with pytest.raises(ValueError, match="data: example 0 has no prompt"):
        selected_answers(lm, read_examples(files[1:], lm), rule)


@pytest.mark.wide
@pytest.mark.mesh
def test_a_mesh_trains_as_one_device_does(options: Options, tmp_path: Path) -> None:
    if jax.device_count() < 4:
        pytest.skip("needs 4 devices")
    one = replace(options, output=tmp_path / "one", steps=3, warmup=1, peak=1e-3)
    mesh = replace(one, output=tmp_path / "mesh", devices=4, model_parallel=2)
    a, b = (program.train(o, console=QUIET) for o in (one, mesh))
    assert any("model" in x.sharding.spec for x in jax.tree.leaves(b.params))
    for x, y in zip(jax.tree.leaves(a.params), jax.tree.leaves(b.params), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-3)


@pytest.fixture(scope="module")
def fills(options: Options) -> Options:
    """Options for a diffusion model."""
    path = Path(options.target).with_name("fills")
    tokenizer = byte_level()
    size = tokenizer.get_vocab_size() + 1
    save(tokenizer, path, generation_config={"eos_token_id": 0})
    model = Transformer(llama(vocab=size, width=32, layers=2, heads=4, kv_heads=2, mlp=64, context=128))
    save_model(path, model, widened(model.init_params(jax.random.key(1)), 5.0), dtype="float32", config={
        "eos_token_id": 0, "mask_token_id": size - 1, "diffusion": {"attention": "full"}})
    return replace(options, target=str(path), objective="dparallel", preset="dparallel", length=16, steps=8, peak=3e-3,
                   answers=16)


@pytest.mark.wide
@pytest.mark.parametrize("rank", often([2], [None, 2]))
def test_a_diffusion_model_becomes_surer_of_its_own_answers(fills: Options, rank: int | None, tmp_path: Path) -> None:
    own = replace(fills, lora=rank, peak=fills.peak if rank is None else 3e-2, output=tmp_path)
    program.train(own, console=QUIET)
    losses = [json.loads(line)["loss"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
              if "loss" in json.loads(line)]
    assert losses[-1] < losses[0] and "own_tokens_all_at_once" in facts_of(own)["after"]
    tuned = dx.load(tmp_path / "model") if rank is None else dx.load(own.target, adapter=str(tmp_path / "model"))
    assert tuned.diffusion == dx.load(own.target).diffusion and not same(tuned.params, dx.load(own.target).params)


@pytest.mark.wide
def test_a_filter_is_trained_for_any_diffusion_model(fills: Options, tmp_path: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """On answers that the model wrote in the filter's blocks."""
    spans = []
    monkeypatch.setattr(own_answers, "fill", lambda *args, **more: (spans.append(more["span"]), fill(*args, **more))[1])
    own = replace(fills, objective="learn2pd", preset="learn2pd", output=tmp_path, span=4)
    program.train(own, console=QUIET)
    assert spans == [4, 4]
    assert facts_of(own)["after"]["filter_loss"] < facts_of(own)["before"]["filter_loss"]
    method = f"learn2pd:filter={tmp_path / 'model' / 'filter.safetensors'}"
    assert dx.generate(dx.load(own.target), "def f(", max_new_tokens=4, algorithm=method).tokens.size


def test_prompts_have_room_for_an_answer() -> None:
    batch = unanswered([[1, 2], [3, 4, 5, 6, 7]], 7, 4)
    assert batch.tokens.tolist() == [[1, 2, 0, 0, 0, 0, 0], [5, 6, 7, 0, 0, 0, 0]]
    assert [np.flatnonzero(row).tolist() for row in batch.answer] == [[2, 3, 4, 5], [3, 4, 5, 6]]
    assert batch.live.sum(1).tolist() == [6, 7]


def test_examples_are_read_with_their_prompts(options: Options) -> None:
    lm = dx.load(options.target)
    pair, *_, text = read_examples([Path(file) for file in options.data], lm)
    given = lm.tokenizer.encode("def f0(")
    assert pair.prompt == len(given) and list(pair.tokens) == [
        *given, *lm.tokenizer.encode("self, x):\n    return self.x + x", add_special_tokens=False), 0]
    assert text.prompt == 0 and list(text.tokens) == [*lm.tokenizer.encode(CODE * 12), 0]


@pytest.mark.parametrize("line", ['{"prompt": "a"}', "[1]", '{"text": 3}', "{"])
def test_a_line_that_is_no_example_is_named(options: Options, line: str, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"text": "a b"}\n\n' + line)
    with pytest.raises(ValueError, match=re.escape(f"data: {file}, line 3: ")):
        read_examples([file], dx.load(options.target))


def test_a_model_that_cannot_be_tuned_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^target: got 'tasks-diffusion', a Transformer that fills masks"):
        checked(dx.load("tasks-diffusion"))
    with pytest.raises(ValueError, match=r"^target: got 'sums' with packed weights"):
        checked(dx.load("sums", weights="int8"))
    with pytest.raises(ValueError, match=r"^target: got 'sums', which fills no masks"):
        checked(dx.load("sums"), fills=True)
