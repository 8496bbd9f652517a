"""Numbers in words: what they are, what trains a Markov model of them, and cascades of the shipped one."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import decodax as dx
from decodax.bench.problems import numerals
from decodax.train.language_model import cross_entropy
from recipes import numerals as recipe
from recipes.options import Options
from recipes.run import train
from tests.matrix import often


def test_numbers_are_written_in_all_ways_and_held_out() -> None:
    assert sorted(numerals.variants(1107)) == sorted(
        f" {a} hundred {b}seven" for a in ("one thousand one", "eleven") for b in ("", "and "))
    assert numerals.variants(2_000_040) == [" two million forty", " two million and forty"]
    assert numerals.right(120, " one hundred twenty") and not numerals.right(120, " one hundred and")
    found = numerals.problems(30, seed=2)
    assert found == numerals.problems(30, seed=2) and len(set(found)) == 30
    assert all(numerals.held_out(n) and len(set(numerals.variants(n))) == len(numerals.variants(n)) for n in found)
    longest = max(len(numerals.words(text)) for text in numerals.variants(999_999_999))
    assert longest + 1 == numerals.ANSWER


def test_a_training_batch_has_barriers_in_place_of_tokens() -> None:
    tokens, blocks, targets, counts = numerals.training_batch(64, 5, 0, 1)
    for row, block, target, count in zip(tokens, blocks, targets, counts, strict=True):
        start = int(count.argmax())
        answer = target[count]
        assert answer[-1] == numerals.ID[numerals.END] and (row[:start] < numerals.ID["="] + 1).all()
        number = int("".join(numerals.VOCABULARY[t] for t in row[:start - 1]))
        assert numerals.right(number, "".join(numerals.VOCABULARY[t] for t in answer[:-1]))
        begins = np.diff(block[start - 1:start + len(answer)]) > 0
        bars = row[count] == numerals.ID[numerals.BARRIER]
        assert begins[0] and (begins == bars).all()
        assert (row[count][1:] == answer[:-1])[~bars[1:]].all()
        assert (block[:start] == 0).all() and max(np.bincount(block[count])) <= (len(answer) if bars.sum() == 1 else 5)


@pytest.mark.wide
def test_training_reads_what_a_cascade_reads() -> None:
    """The loss of a row with barriers is that of its blocks, each read behind the prompt by itself."""
    lm = dx.load("numerals")
    batch = numerals.training_batch(4, 5, 0, 2)
    loss = float(recipe.MarkovObjective(lm.model)(lm.params, batch, None)[0])      # type: ignore[arg-type]
    total = count = 0.0
    for tokens, blocks, targets, counts in zip(*batch, strict=True):
        for block in range(1, blocks[counts].max() + 1):
            places = np.flatnonzero((blocks == 0) | (blocks == block))
            logits = lm.model.forward(lm.params, jnp.array([tokens[places]]), jnp.array([places]))      # type: ignore[attr-defined]
            losses = cross_entropy(logits, jnp.array([targets[places]]))[0]
            total, count = total + float(losses[blocks[places] == block].sum()), count + (blocks == block).sum()
    np.testing.assert_allclose(loss, total / count, rtol=1e-4)


@pytest.mark.full
def test_a_run_leaves_a_model_that_cascades_run_on(tmp_path: Path) -> None:
    train(Options(recipe="numerals", steps=2, output=tmp_path, problems=2), console=Console(quiet=True))
    facts = json.loads((tmp_path / "model" / "training.json").read_text())
    assert facts["steps"] == 2 and "--steps 2" in (tmp_path / "model" / "README.md").read_text()
    out = dx.generate(dx.load(str(tmp_path / "model")), "12=", algorithm="cascade:orders=1,keep=4,longest=5",
                      max_new_tokens=5)
    assert out.stats.forwards == 2


@pytest.mark.wide
@pytest.mark.parametrize("order", often([2], [0, 1, 2, 4]))
def test_the_shipped_model_is_as_right_as_the_card_says(order: int) -> None:
    """24 numbers: three standard deviations, and one number."""
    told = recipe.accuracy(dx.load("numerals"), numerals.problems(24, seed=3), order)
    share = json.loads((Path(recipe.__file__).parents[2] / "models" / "zoo" / "numerals" / "training.json")
                       .read_text())["orders"][str(order)]
    assert abs(told - share) <= 3 * (share * (1 - share) / 24) ** 0.5 + 1 / 24
