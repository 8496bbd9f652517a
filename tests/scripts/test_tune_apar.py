"""Tuning for APAR: a tuned model forks, its threads are joined to the answers of the data, and its directory says with
which tokens it forks."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

import decodax as dx
from decodax.io.saving import save_model
from decodax.models import Transformer, llama
from decodax.train.tuning import branching_examples, tokens_to_write
from decodax.train.tuning.examples import read_examples
from recipes import run as program
from recipes.options import Options
from tests.scripts.killed import QUIET
from tests.small_tokenizers import byte_level, save

THINGS = {"Red": "warm as the sun.", "Blue": "cold as the sea.", "Grey": "neither of them.", "Green": "as in a wood."}
PROSE = "It is warm as the sun."


def listed(names: tuple[str, ...]) -> str:
    return "They are:\n" + "\n".join(f"{i}. {name}: it is {THINGS[name]}" for i, name in enumerate(names, 1))


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Options:
    root = tmp_path_factory.mktemp("apar")
    tokenizer = byte_level()
    path = save(tokenizer, root / "target", generation_config={"eos_token_id": 0},
                tokenizer_config={"eos_token": "<|endoftext|>"})
    model = Transformer(llama(vocab=tokenizer.get_vocab_size(), width=64, layers=2, heads=4, kv_heads=2, mlp=128,
                              context=256))
    save_model(path, model, model.init_params(jax.random.key(1)), config={"eos_token_id": 0}, dtype="float32")
    pairs = [{"prompt": f"{' '.join(names)}?", "target": listed(names)} for names in itertools.permutations(THINGS, 3)]
    pairs += [{"prompt": f"{name}?", "target": f"It is {THINGS[name]}"} for name in THINGS]
    (root / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    return Options(recipe="tune", objective="apar", preset="apar", target=str(path), output=root / "run", steps=450,
                   warmup=20, data=(str(root / "pairs.jsonl"),), batch=8, length=160, peak=5e-3, log_every=50,
                   eval_every=250, save_every=500, devices=1)


def test_answers_with_lists_become_threads_and_others_stay(options: Options) -> None:
    lm, files = dx.load(options.target), [Path(file) for file in options.data]
    plain = read_examples(files, lm)
    fork, child = tokens_to_write(lm, plain, None, None)
    made = branching_examples(lm, files, fork, child)
    assert len(made) == 24 * 4 + 4 and made[24:28] == plain[-4:]
    main, (first, second) = made[0], made[28:30]
    text = lambda ids: lm.tokenizer.decode([i for i in ids if i not in (fork, child)])
    assert main.tokens.count(fork) == 3 and child not in main.tokens and main.prompt == plain[0].prompt
    assert text(main.tokens[main.prompt:]) == "They are:\n1. Red:\n2. Blue:\n3. Grey:"
    assert first.tokens[first.prompt - 2:first.prompt] == (fork, child) and first.tokens.count(fork) == 1
    assert text(second.tokens[second.prompt:]) == " it is cold as the sea." and second.tokens[-1] == 0
    assert text(second.tokens[:second.prompt]) == "Red Blue Grey?They are:\n1. Red:\n2. Blue:"
    assert tokens_to_write(lm, plain, str(fork), None) == (fork, child)
    assert tokens_to_write(lm, plain, None, str(fork)) == (child, fork)
    with pytest.raises(ValueError, match=r"^fork: got token \d+, which the data has; takes one that it does not have"):
        tokens_to_write(lm, plain, str(plain[0].tokens[0]), None)
    with pytest.raises(ValueError, match=r"^child: got 'two words', which is \d+ tokens"):
        tokens_to_write(lm, plain, None, "two words")
    (prose := files[0].parent / "prose.jsonl").write_text(json.dumps({"prompt": "Red?", "target": PROSE}))
    with pytest.raises(ValueError, match=r"^data: no answer has a list or paragraphs"):
        branching_examples(lm, [prose], fork, child)
    with pytest.raises(ValueError, match=r"^'apar' needs fork=, .*: its config\.json has no apar_fork_token"):
        dx.generate(lm, "Red?", search="apar", max_new_tokens=4)


@pytest.mark.full
def test_a_tuned_model_forks_and_writes_the_answers_of_the_data(options: Options) -> None:
    program.train(options, console=QUIET)
    directory = options.output / "model"
    facts = json.loads((directory / "training.json").read_text())
    assert facts["after"]["tokens_a_forward"] > 1.5 and 'search="apar"' in (directory / "README.md").read_text()
    lm = dx.load(directory)
    fork, child = (lm.config_entries[f"apar_{name}_token"] for name in ("fork", "child"))
    names = list(itertools.permutations(THINGS, 3))[:6]
    prompts = [f"{' '.join(three)}?" for three in names]
    out = dx.generate(lm, [*prompts, "Red?"], search="apar", max_new_tokens=160)
    assert out.text[-1] == PROSE
    right = [made == listed(three) for made, three in zip(out.text[:-1], names, strict=True)]
    assert sum(right) >= 4 and all(made.count(": it is ") == 3 for made in out.text[:-1])
    for tree in out.findings["details"][:-1]:
        assert [thread.parent for thread in tree] == [None, 0, 0, 0]
        assert tree[0].tokens.count(fork) == 3 and all(thread.path[-1] == child for thread in tree[1:])
    # a thread is what the tuned model writes after its path, so the search adds nothing of its own
    for thread in out.findings["details"][0]:
        alone = dx.generate(lm, [thread.path], max_new_tokens=160, bad_words_ids=[[child]])
        assert np.asarray(alone.row(0)).tolist() == thread.tokens
    given = dx.generate(lm, prompts, search=dx.search.apar(fork, child), max_new_tokens=160)
    assert given.text == out.text[:-1]


def test_control_tokens_of_the_options_are_written(options: Options, tmp_path: Path) -> None:
    own = replace(options, output=tmp_path, steps=2, warmup=1, eval_every=2, fork="300", child="301")
    program.train(own, console=QUIET)
    entries = dx.load(tmp_path / "model").config_entries
    assert entries["apar_fork_token"] == 300 and entries["apar_child_token"] == 301
