"""One table of methods, which anybody fills at any time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

import decodax as dx
from decodax import cli
from decodax.common import registry
from decodax.common.registry import SYSTEMS, alias, parse
from decodax.io.load import LM
from tests.algorithms.diffusion import toy
from tests.laws.cases import VOCABULARY, model, prompts


@pytest.fixture(autouse=True)
def table() -> Iterator[None]:
    """Leaves the table as it was."""
    before = dict(SYSTEMS)
    yield
    SYSTEMS.clear()
    SYSTEMS.update(before)
    registry._WAITING.clear()


def add(name: str, length: int) -> None:
    @dx.entry(name, "My drafts", "me 2026", "speculative-linear", "what I copy")
    def maker(length: int = length) -> dx.Speculative:
        return dx.Speculative(dx.drafts.PromptLookup(length))


def lm(which: str = "toy") -> LM:
    return LM(*model(which), VOCABULARY)


def test_a_users_entry_is_found_by_name_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    shipped = list(SYSTEMS)
    add("mine", 3)
    assert dx.system("mine", length=2) == dx.Speculative(dx.drafts.PromptLookup(2))
    assert parse("mine:length=5") == ("mine", {"length": 5})
    assert list(SYSTEMS) == [*shipped, "mine"]
    ids, options = prompts(4), dict(max_new_tokens=8, temperature=0.8)
    plain, named = (dx.generate(lm(), ids, algorithm=a, **options) for a in (None, "mine:length=4"))
    assert np.array_equal(plain.tokens, named.tokens) and named.stats.drafted.sum() > 0
    assert cli.main(["systems", "--family", "speculative-linear"]) == 0
    assert "My drafts (me 2026)" in capsys.readouterr().out


@pytest.mark.wide
def test_a_users_sampler_of_masked_diffusion_is_found_by_name() -> None:
    @dx.entry("two-a-step", needs="a diffusion model", guarantee="approximate")
    def two_a_step(lm: LM, block: int = 4) -> dx.MaskedDiffusion:
        d = dx.diffusion
        return dx.MaskedDiffusion(d.Adapter.of(lm), d.Blocks(block), unmask=d.Quota(block // 2))

    filler = toy.lm()
    named, made = (dx.generate(filler, toy.PROMPTS, algorithm=a, max_new_tokens=8)
                   for a in ("two-a-step", dx.system("two-a-step", filler)))
    assert np.array_equal(named.tokens, made.tokens)
    assert named.stats.forwards < dx.generate(filler, toy.PROMPTS, max_new_tokens=8).stats.forwards
    with pytest.raises(ValueError, match="'two-a-step' needs a diffusion model; give lm="):
        dx.system("two-a-step")


@pytest.mark.matrix
def test_an_entry_that_takes_the_place_of_another_is_the_one_that_runs() -> None:
    options = dict(algorithm="mine", max_new_tokens=8)
    add("mine", 2)
    network, ids = lm(), [[1, 2, 3, 1, 2, 3, 1, 2]]
    first = dx.generate(network, ids, **options).stats.drafted.sum()
    del SYSTEMS["mine"]
    add("mine", 6)
    assert dx.generate(network, ids, **options).stats.drafted.sum() > first


def test_a_name_that_is_taken_names_both_owners() -> None:
    add("mine", 2)
    ours = r"tests\.common\.test_registry\.add\.<locals>\.maker"
    with pytest.raises(ValueError, match=f"'mine' of {ours} is taken by {ours}; .*registry.SYSTEMS"):
        add("mine", 3)
    with pytest.raises(ValueError, match=rf"'llada' of {ours} is taken by decodax\.diffusion\.\S*llada;"):
        add("llada", 3)
    with pytest.raises(ValueError, match=rf"'mine' of an alias in tests.common.test_registry is taken by {ours};"):
        alias("mine", "llada", "", "", "", "")
    with pytest.raises(ValueError, match=r"'eqspec' of .* is taken by an alias in decodax\.systems\.lengths;"):
        add("eqspec", 3)
    with pytest.raises(ValueError, match=r"got the name 'a:b' by .*, takes a name without ':'"):
        add("a:b", 3)


@pytest.mark.parametrize(("argument", "given"), [("needs", "a drafter"), ("guarantee", "exact")])
def test_an_unknown_kind_is_refused(argument: str, given: str) -> None:
    wrong = f"entry 'mine': {argument}: got '{given}', takes one of ('nothing'|'seed-exact'), "
    with pytest.raises(ValueError, match=wrong):
        dx.entry("mine", **{argument: given})  # type: ignore[arg-type]
    assert "mine" not in SYSTEMS


def test_an_alias_may_come_before_its_entry() -> None:
    alias("other", "again", "A second paper", "them 2026", "speculative-linear", "the same")
    alias("again", "mine", "A paper", "we 2026", "speculative-linear", "the same")
    assert "again" not in SYSTEMS
    with pytest.raises(ValueError, match=r"'again', an alias in tests\.common\.test_registry, is another name for "
                                         "'mine', which is not registered"):
        dx.system("again")
    with pytest.raises(ValueError, match=r"'again' of .* is taken by an alias in tests\.common\.test_registry"):
        add("again", 3)
    add("mine", 3)
    assert dx.system("again", length=2) == dx.system("other", length=2) == dx.system("mine", length=2)
    assert SYSTEMS["again"].alias_of == SYSTEMS["other"].alias_of == "mine"
    assert SYSTEMS["again"].title == "A paper"


def test_the_order_of_the_table_does_not_depend_on_what_was_imported_first() -> None:
    code = """if True:
        from decodax.common.registry import entry
        entry("early")(lambda: None)
        import decodax.algorithms.diffusion.systems
        from decodax.common.registry import SYSTEMS
        print(*SYSTEMS)
        """
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert told == [*SYSTEMS, "early"]
