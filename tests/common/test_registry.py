"""One table of methods, which anybody fills at any time."""

import inspect
import pydoc
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

import decodax as dx
from decodax import cli
from decodax.common.order import COMMON
from decodax.common.registry import ALGORITHMS, SHELVES
from decodax.io.load import LM
from tests.algorithms.diffusion import toy
from tests.laws.cases import VOCABULARY, model, prompts


@pytest.fixture(autouse=True)
def table() -> Iterator[None]:
    """Leaves the table as it was."""
    before = dict(ALGORITHMS)
    yield
    for name in [*ALGORITHMS]:
        del ALGORITHMS[name]
    ALGORITHMS.update(before)
    ALGORITHMS._waiting.clear()


def add(name: str, length: int) -> None:
    @ALGORITHMS.register(name, "My drafts", "me 2026", "what I copy", family="speculative-linear",
                         guarantee="seed-exact")
    def maker(length: int = length) -> dx.Speculative:
        return dx.Speculative(dx.drafts.PromptLookup(length))


def lm(which: str = "toy") -> LM:
    return LM(*model(which), VOCABULARY)


def test_a_users_entry_is_found_by_name_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    shipped = list(ALGORITHMS)
    add("mine", 3)
    assert dx.algorithms.make("mine", length=2) == dx.Speculative(dx.drafts.PromptLookup(2))
    assert ALGORITHMS.parse("mine:length=5") == ("mine", {"length": 5})
    assert list(ALGORITHMS) == [*shipped, "mine"]
    ids, options = prompts(4), dict(max_new_tokens=8, temperature=0.8)
    plain, named = (dx.generate(lm(), ids, algorithm=a, **options) for a in (None, "mine:length=4"))
    assert np.array_equal(plain.tokens, named.tokens) and named.stats.drafted.sum() > 0
    assert cli.main(["list", "algorithms", "--family", "speculative-linear"]) == 0
    assert "what I copy" in capsys.readouterr().out


@pytest.mark.wide
def test_a_users_sampler_of_masked_diffusion_is_found_by_name() -> None:
    @ALGORITHMS.register("two-a-step", needs="a diffusion model")
    def two_a_step(lm: LM, block: int = 4) -> dx.MaskedDiffusion:
        d = dx.algorithms.diffusion
        return dx.MaskedDiffusion(d.Adapter.of(lm), d.Blocks(block), unmask=d.Quota(block // 2))

    filler = toy.lm()
    named, made = (dx.generate(filler, toy.PROMPTS, algorithm=a, max_new_tokens=8)
                   for a in ("two-a-step", dx.algorithms.make("two-a-step", filler)))
    assert np.array_equal(named.tokens, made.tokens)
    assert named.stats.forwards < dx.generate(filler, toy.PROMPTS, max_new_tokens=8).stats.forwards
    with pytest.raises(ValueError, match="'two-a-step' needs a diffusion model; give lm="):
        dx.algorithms.make("two-a-step")


@pytest.mark.full
def test_an_entry_that_takes_the_place_of_another_is_the_one_that_runs() -> None:
    options = dict(algorithm="mine", max_new_tokens=8)
    add("mine", 2)
    network, ids = lm(), [[1, 2, 3, 1, 2, 3, 1, 2]]
    first = dx.generate(network, ids, **options).stats.drafted.sum()
    del ALGORITHMS["mine"]
    add("mine", 6)
    assert dx.generate(network, ids, **options).stats.drafted.sum() > first


def test_a_name_that_is_taken_names_both_owners() -> None:
    add("mine", 2)
    ours = r"tests\.common\.test_registry\.add\.<locals>\.maker"
    with pytest.raises(ValueError, match=f"'mine' of {ours} is taken by {ours}; .*registry.ALGORITHMS"):
        add("mine", 3)
    with pytest.raises(ValueError, match=rf"'llada' of {ours} is taken by decodax\.algorithms\.diffusion\.\S*llada;"):
        add("llada", 3)
    with pytest.raises(ValueError, match=rf"'mine' of an alias in tests.common.test_registry is taken by {ours};"):
        ALGORITHMS.alias("mine", "llada", "", "", "", family="")
    with pytest.raises(ValueError, match=r"'eqspec' of .* is taken by an alias in decodax\.\S*speculative_decoding;"):
        add("eqspec", 3)
    with pytest.raises(ValueError, match=r"got the name 'a:b' by .*, takes a name without ':'"):
        add("a:b", 3)


@pytest.mark.parametrize(("argument", "given"), [("needs", "a drafter"), ("guarantee", "sure")])
def test_an_unknown_kind_is_refused(argument: str, given: str) -> None:
    wrong = f"register 'mine': {argument}: got '{given}', takes one of ('nothing'|'seed-exact'), "
    with pytest.raises(ValueError, match=wrong):
        ALGORITHMS.register("mine", **{argument: given})  # type: ignore[arg-type]
    assert "mine" not in ALGORITHMS


def test_an_alias_may_come_before_its_entry() -> None:
    ALGORITHMS.alias("other", "again", "A second paper", "them 2026", "the same", family="speculative-linear")
    ALGORITHMS.alias("again", "mine", "A paper", "we 2026", "the same", family="speculative-linear")
    assert "again" not in ALGORITHMS
    with pytest.raises(ValueError, match=r"'again', an alias in tests\.common\.test_registry, is another name for "
                                         "'mine', which is not registered"):
        dx.algorithms.make("again")
    with pytest.raises(ValueError, match=r"'again' of .* is taken by an alias in tests\.common\.test_registry"):
        add("again", 3)
    add("mine", 3)
    assert dx.algorithms.make("again", length=2) == dx.algorithms.make("other", length=2) == dx.algorithms.make("mine",
                                                                                                                length=2)
    assert ALGORITHMS["again"].alias_of == ALGORITHMS["other"].alias_of == "mine"
    assert ALGORITHMS["again"].title == "A paper"


def test_the_order_of_the_table_does_not_depend_on_what_was_imported_first() -> None:
    code = """if True:
        from decodax.common.registry import ALGORITHMS, SHELVES
        ALGORITHMS.register("early")(lambda: None)
        import decodax.algorithms.diffusion
        print(*ALGORITHMS)
        """
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert told == [*ALGORITHMS, "early"]


def test_names_begin_with_the_most_used_of_each_family() -> None:
    known = {*dx.zoo(), *(name for shelf in SHELVES.values() for name in shelf)}
    assert set(COMMON) <= known
    assert dx.caches.names("evict")[:2] == ["snapkv", "h2o"] and dx.caches.names()[0] == "snapkv"
    assert dx.algorithms.names()[:3] == ["autoregressive", "prompt-lookup", "speculative-decoding"]
    for shelf in SHELVES.values():
        assert sorted(shelf.names()) == sorted(shelf)
        for family in {entry.family for entry in shelf.values()}:
            common = [name in COMMON for name in shelf.names(family)]
            assert common == sorted(common, reverse=True)


def test_the_package_shows_its_api_alone() -> None:
    assert set(dir(dx)) == set(dx.__all__) and len(dx.__all__) <= 52
    assert all(getattr(dx, name) is not None for name in dx.__all__)


@pytest.mark.parametrize(("shelf", "name"), [("algorithms", "specinfer"), ("caches", "snapkv")])
def test_an_entry_is_a_function_whose_help_says_what_it_is(shelf: str, name: str) -> None:
    function = getattr(getattr(dx, shelf), name)
    text = function.__doc__
    assert "Paper: S" in text and "Guarantee: " in text and "; default " in text
    assert "lm" not in inspect.signature(function).parameters


@pytest.mark.wide
def test_an_entry_that_looks_at_the_target_is_made_when_it_is_known() -> None:
    small, ids = lm("toy-draft"), prompts(2)
    by_object = dx.generate(lm(), ids, algorithm=dx.algorithms.speculative_decoding(2, draft=small), max_new_tokens=6)
    by_name = dx.generate(lm(), ids, algorithm="speculative-decoding:length=2", draft=small, max_new_tokens=6)
    assert np.array_equal(by_object.tokens, by_name.tokens) and by_name.stats.drafted.sum() > 0
    with pytest.raises(ValueError, match=r"draft: got .*, and 'prompt-lookup' takes no draft model"):
        dx.generate(lm(), ids, algorithm="prompt-lookup", draft=small)


@pytest.mark.parametrize("shelf", ["algorithms", "caches", "search", "select", "constraints"])
def test_help_says_what_an_entry_does_its_options_its_paper_and_a_call(shelf: str) -> None:
    for entry in SHELVES[shelf].values():
        text = entry.description
        assert len(text.split("Options:")[0].split()) > 4 and f"Guarantee: {entry.guarantee}" in text, entry.name
        assert all(f"    {name}: " in text for name in entry.options), entry.name
        assert f"=dx.{shelf}.{entry.identifier}(" in text, entry.name
        assert " at 0x" not in text, entry.name
        assert " at 0x" not in pydoc.render_doc(getattr(getattr(dx, shelf), entry.identifier)), entry.name


@pytest.mark.wide
@pytest.mark.parametrize(("shelf", "name"), [
    ("algorithms", "sequoia"), ("algorithms", "fast-dllm"), ("algorithms", "beam-search"), ("caches", "snapkv"),
    ("caches", "kivi"), ("select", "mbr"), ("search", "treepo")])
def test_the_call_that_help_shows_runs(shelf: str, name: str) -> None:
    call = SHELVES[shelf][name].example
    assert eval(call[:-1] + ", max_new_tokens=4)", {"dx": dx}).text
