"""The shipped models: their cards, their size, and that they are as good as the cards say."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer

import decodax as dx
import decodax.models
from decodax.algorithms.speculative.heads import drafting_source
from decodax.bench.problems.puzzles import TASKS
from decodax.io.checkpoint import load_diffusion, load_model
from decodax.io.drafters import shipped_drafter
from decodax.io.kinds import is_drafter
from decodax.train import corpus as data
from decodax.train import language_model as lm
from decodax.train import masked_diffusion as dt
from recipes import diffusion, recall

ZOO = Path(next(iter(decodax.models.__path__))) / "zoo"
DRAFTERS = sorted(p.name for p in ZOO.iterdir() if is_drafter(p))
NAMES = sorted(p.name for p in ZOO.iterdir() if p.is_dir() and p.name not in DRAFTERS)
TEXT = [name for name in NAMES if name.startswith("pycode")]
AUTOREGRESSIVE = [name for name in TEXT if load_diffusion(ZOO / name) is None]


@pytest.fixture(scope="module")
def kept() -> list[data.Document]:
    """Held-out files under the running interpreter that any build of CPython has, shortened."""
    documents = data.load_corpus()[1]
    found = [data.Document(d.path, d.text[:20_000]) for d in documents if "test" not in d.path.split("/")]
    return found[:6]


def test_target_draft_and_diffusion_models_are_shipped():
    assert {"numerals", "pycode", "pycode-draft", "pycode-diffusion", "pycode-layerskip", "pycode-sbd", "recall",
            "sums", "tasks-diffusion"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_card_names_data_licence_figures_and_command(name):
    card = (ZOO / name / "README.md").read_text()
    facts = json.loads((ZOO / name / "training.json").read_text())
    needed = ["CPython 3.", f"{facts['steps']:,} steps", f"{facts['parameters']:,}"]
    needed += [facts["command"], facts["hardware"]]
    needed += ["PSF-2.0"] if name in TEXT else []
    if name in AUTOREGRESSIVE:
        needed += [f"| held-out bits per byte | {facts['held_out_bits_per_byte']:.4f} |", "SHA-256"]
    elif name == "recall":
        needed += [f"| {task} | " + " | ".join(f"{share:.0%}" for share in shares.values()) + " |"
                   for task, shares in facts["accuracy"].items()]
    elif name == "numerals":
        shares = facts["orders"] | {"greedy": facts["greedy"]}
        needed += [f"| {order} | {share:.1%} |" for order, share in shares.items()]
    elif name == "sums":
        needed += [f"{facts['step']:.1%} of steps are right, and {facts['whole']:.0%} of sums"]
    elif name in TEXT:
        needed += [f"| held-out bits per byte, upper bound | {facts['held_out']['bits_per_byte']:.4f} |"]
    else:
        needed += [f"| {TASKS[task].summary} | {share:.1%} |" for task, share in facts["held_out"].items()]
    for words in needed:
        assert words in card, words


@pytest.mark.parametrize("name", NAMES)
def test_a_directory_has_what_hugging_face_tools_read(name):
    files = {p.name for p in (ZOO / name).iterdir()}
    needed = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert needed <= files
    config = json.loads((ZOO / name / "config.json").read_text())
    shape = "Qwen2" if name == "recall" else "Llama"
    assert config["architectures"] == [f"{shape}ForCausalLM"] and config["dtype"] == "bfloat16"
    _, weights = load_model(ZOO / name)
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(weights))
    facts = json.loads((ZOO / name / "training.json").read_text())
    assert sum(x.size for x in jax.tree.leaves(weights)) == facts["parameters"]


def test_draft_and_target_speak_one_vocabulary():
    first, *rest = [(ZOO / name / "tokenizer.json").read_text() for name in ("pycode", "pycode-draft")]
    assert all(other == first for other in rest)


@pytest.mark.wide
@pytest.mark.parametrize("name", AUTOREGRESSIVE)
def test_held_out_bits_per_byte_are_near_the_card(name, kept):
    """On six held-out files; other versions of Python have other files, hence the wide margin."""
    tokenizer = Tokenizer.from_file(str(ZOO / name / "tokenizer.json"))
    model, weights = load_model(ZOO / name, dtype="float32")
    stream = data.pack(tokenizer, kept)
    bits = lm.bits_per_byte(lambda w: np.asarray(lm.token_losses(model, weights, w)), stream, lm.token_bytes(tokenizer),
                            length=256, batch=8, limit=24)
    facts = json.loads((ZOO / name / "training.json").read_text())
    assert bits == pytest.approx(facts["held_out_bits_per_byte"], abs=0.3)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in TEXT if name not in AUTOREGRESSIVE])
def test_a_bound_on_bits_per_byte_is_near_the_card(name, kept):
    lm_ = dx.load(ZOO / name)
    assert lm_.diffusion is not None and lm_.tokenizer is not None
    objective = dt.Bound(lm_.model, lm_.diffusion)  # type: ignore[arg-type]
    stream = data.pack(lm_.tokenizer.backend, kept)
    bits = dt.bound_per_byte(objective, lm_.params, stream, lm.token_bytes(lm_.tokenizer.backend), 256, 4, 12, draws=2)
    facts = json.loads((ZOO / name / "training.json").read_text())
    assert bits == pytest.approx(facts["held_out"]["bits_per_byte"], abs=0.4)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in NAMES if name not in (*TEXT, "numerals", "recall", "sums")])
def test_right_answers_are_near_the_card(name):
    """Twelve problems a task, one token a forward: three standard deviations, and one problem."""
    lm_ = dx.load(ZOO / name)
    assert lm_.diffusion is not None
    found = diffusion.accuracy(lm_.model, lm_.diffusion, lm_.params, 12)  # type: ignore[arg-type]
    for task, share in json.loads((ZOO / name / "training.json").read_text())["held_out"].items():
        assert abs(found[task] - share) <= 3 * (share * (1 - share) / 12) ** 0.5 + 1 / 12, task


@pytest.mark.parametrize("task", ["recall", "needle", "track", "copy"])
def test_answers_on_long_texts_are_near_the_card(task):
    """Eight problems with texts of 512 words: three standard deviations, and one problem."""
    model, weights = load_model(ZOO / "recall", dtype="float32")
    share = json.loads((ZOO / "recall" / "training.json").read_text())["accuracy"][task]["512"]
    found = recall.accuracy(model, weights, task, 8, 512, seed=2)
    assert abs(found - share) <= 3 * (share * (1 - share) / 8) ** 0.5 + 1 / 8


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_card_of_a_drafter_names_its_target_data_figures_and_command(name):
    card = (ZOO / name / "README.md").read_text()
    facts = json.loads((ZOO / name / "config.json").read_text())["training"]
    assert name == f"{Path(facts['target']).stem}-{facts['system']}"
    assert shipped_drafter(facts["system"], facts["target"]) == ZOO / name
    for words in (f"# {name}", facts["command"], facts["hardware"], "CPython 3.", "PSF-2.0",
                  f"{facts['steps']:,} steps", f"{facts['parameters']:,}", ", ".join(map(str, facts["accepted"])),
                  f"greedy | {facts['greedy']} |", f"temperature 1 | {facts['sampled']} |",
                  f"greedy | {facts['tree']} |"):
        assert words in card, words


@pytest.mark.wide
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_shipped_drafter_drafts_for_its_target_by_the_name_of_its_method(name, kept):
    """Greedy in a chain on held-out code: plain decoding's tokens, in about as few forwards as the card says."""
    facts = json.loads((ZOO / name / "config.json").read_text())["training"]
    target = dx.load(facts["target"])
    prompts = [target.tokenizer.encode(document.text)[:64] for document in kept]
    options = dict(max_new_tokens=64, temperature=0.0, eos_token_id=[])
    source = drafting_source(target, dx.load_drafter(name, target))
    chain = dx.Speculative(source, shape=dx.trees.Chain(facts["drafts"]))
    plain, out, named = (dx.generate(target, prompts, algorithm=algorithm, **options)
                         for algorithm in (None, chain, {"hass": "eagle", "fastmtp": "mtp"}.get(
                             facts["system"], facts["system"])))
    assert np.array_equal(out.tokens, plain.tokens) and np.array_equal(named.tokens, plain.tokens)
    assert out.stats.tokens.sum() / out.stats.rounds.sum() == pytest.approx(facts["greedy"], rel=0.25)


FILLING = [name for name in NAMES if load_diffusion(ZOO / name) is not None]


@pytest.mark.parametrize("name", FILLING)
def test_a_shipped_diffusion_model_has_a_filter_of_its_own(name):
    """What `learn2pd` takes by default."""
    facts = json.loads((ZOO / name / "filter.json").read_text())
    made = dx.algorithms.make("learn2pd", dx.load(name))
    own = made.unmask.filter  # type: ignore[attr-defined]
    assert facts["preset"] == facts["init"] == name and f"--preset {name}" in facts["command"]
    assert sum(x.size for x in (own.hidden, own.hidden_bias, own.out, own.out_bias)) == facts["parameters"]
    assert own.block == (load_diffusion(ZOO / name).block or 16)  # type: ignore[union-attr]


@pytest.mark.wide
def test_set_block_decoding_writes_python_in_fewer_forwards():
    """An entropy budget of 0 gives one token a forward; one of 2 nats takes nine tenths of the forwards at most."""
    lm_ = dx.load("pycode-sbd")
    slow, fast = (dx.generate(lm_, ["def area(r):\n", "import os\n"], max_new_tokens=32, eos_token_id=[],
                              temperature=0.0, algorithm=f"sbd:gamma={gamma}") for gamma in (0, 2))
    assert slow.stats.rounds.min() >= 32 and fast.stats.rounds.sum() < 0.9 * slow.stats.rounds.sum()
    assert fast.lengths.tolist() == [32, 32] and lm_.diffusion.mask not in fast.tokens


@pytest.mark.wide
def test_the_first_layers_of_a_model_tuned_to_exit_early_draft_more_than_those_of_its_target(kept):
    shares = []
    for name in ("pycode", "pycode-layerskip"):
        lm_ = dx.load(name, dtype="float32")
        prompts = [lm_.tokenizer.encode(document.text)[:64] for document in kept]
        options = dict(max_new_tokens=48, temperature=0.0, eos_token_id=[])
        out, plain = (dx.generate(lm_, prompts, algorithm=algorithm, **options) for algorithm in ("layerskip", None))
        assert np.array_equal(out.tokens, plain.tokens)
        shares.append(out.stats.tokens_per_forward)
    assert shares[1] > 1.1 * shares[0]


@pytest.mark.wide
def test_learn2pd_writes_python():
    lm_ = dx.load("pycode-diffusion")
    out = dx.generate(lm_, ["def area(r):\n", "import os\n"], max_new_tokens=16, eos_token_id=[], algorithm="learn2pd")
    assert out.lengths.tolist() == [16, 16] and lm_.diffusion.mask not in out.tokens
    assert len(set(out.tokens.ravel().tolist())) > 4
