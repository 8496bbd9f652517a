"""Parts of a user's own that break their contract: an error names the class, what it returned and what is taken."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.algorithms.beams import BeamSearch
from decodax.algorithms.speculative.source import Draft, Shape, Source
from decodax.algorithms.speculative.tree import Proposal, chain
from decodax.algorithms.speculative.trees import Chain
from decodax.algorithms.speculative.verify import SeedExact, Verifier
from decodax.cache.dense import Dense, dense
from decodax.common.struct import fields, static, struct
from decodax.core.algorithm import OPTIONAL
from decodax.core.cache import Cache, CacheConfig
from decodax.core.composed import Composed
from decodax.core.types import Model, ShowsWeights
from decodax.sampling import Custom
from decodax.search.explorer import Explorer
from decodax.select.candidates import SelectionRule
from tests.caches.small import SMALL

IDS = [[3, 1, 4], [2, 7]]


@dataclasses.dataclass(frozen=True)
class Own(Draft):
    """A draft that returns what `makes` says."""

    makes: Any
    length: int = 2

    def propose(self, params: Any, policy: Any, s: Any, state: Any, drawn: Any) -> Any:
        return self.makes(s, state)


@dataclasses.dataclass(frozen=True)
class Field(Draft):
    table: Any
    length: int = 2

    def propose(self, params: Any, policy: Any, s: Any, state: Any, drawn: Any) -> Any:
        return chain(jnp.full((s.batch, 2), 3), jnp.full(s.batch, 2)), state


@dataclasses.dataclass
class Thawed(Draft):
    length: int = 2

    def propose(self, params: Any, policy: Any, s: Any, state: Any, drawn: Any) -> Any:
        return None


@dataclasses.dataclass(frozen=True)
class Keeping(Field):
    def init(self, params: Any, s: Any) -> Any:
        return jnp.zeros(s.batch, jnp.int32)

    def observe(self, params: Any, s: Any, window: Any, out: Any, decision: Any, state: Any) -> Any:
        return self.table(state)


def tokens(s: Any) -> Any:
    return jnp.full((s.batch, 2), 3)


TAKES = "takes a pair, a Proposal"


@pytest.mark.parametrize(("makes", "message"), [
    (lambda s, state: tokens(s), rf"^Own.propose: returned int32\[2, 2\], {TAKES}"),
    (lambda s, state: (tokens(s), state), rf"^Own.propose: returned int32\[2, 2\], {TAKES}"),
    (lambda s, state: chain(tokens(s), jnp.full(s.batch, 2)), rf"^Own.propose: returned a Proposal, {TAKES}"),
    (lambda s, state: None, rf"^Own.propose: returned None, {TAKES}"),
    (lambda s, state: (chain(tokens(s) * 1.0, jnp.full(s.batch, 2)), state),
     r"^chain: got tokens of float32\[2, 2\], takes i\[B, K\]"),
    (lambda s, state: (chain(tokens(s)[0], jnp.full(s.batch, 2)), state), r"^chain: got tokens of int32\[2\], takes"),
    (lambda s, state: (chain(tokens(s), 2), state), r"^chain: got count of an int, takes i\[B\] with B=2"),
    (lambda s, state: (chain(tokens(s)[:1], jnp.full(1, 2)), state),
     r"^Own.propose: got tokens of int32\[1, 2\], takes i\[B, N\] with B=2"),
    (lambda s, state: (Proposal(tokens(s), jnp.ones((s.batch, 2), jnp.int32)), state),
     r"^Own.propose: got live of int32\[2, 2\], takes b\[B, N\] with B=2, N=2"),
    (lambda s, state: (Proposal(tokens(s), jnp.ones((s.batch, 2), bool), parents=[0, 1]), state),
     r"^Own.propose: got parents of a list, takes i\[B or 1, N\]"),
    (lambda s, state: (Proposal(tokens(s), jnp.ones((s.batch, 2), bool), log_q=jnp.zeros((2, 2))), state),
     r"^Own.propose: got log_q of float32\[2, 2\], takes f\[B, J, V\]")])
def test_a_proposal_of_the_wrong_form_is_refused(makes: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        dx.generate(SMALL, IDS, max_new_tokens=4, algorithm=dx.Speculative(Own(makes)))


def test_a_truncated_proposal_of_the_wrong_form_is_refused() -> None:
    with pytest.raises(TypeError, match=rf"^Own.propose: returned int32\[2, 2\], {TAKES}"):
        dx.generate(SMALL, IDS, max_new_tokens=4, algorithm=dx.Speculative(Own(lambda s, state: tokens(s)),
                                                                          shape=Chain(1)))


@pytest.mark.parametrize(("draft", "message"), [
    (Field(np.zeros(3)), "^algorithm: Field.table is of type ndarray, which cannot be hashed; takes frozen"),
    (Field(jnp.zeros(3)), "^algorithm: Field.table is of type ArrayImpl, which cannot"),
    (Field([1]), "^algorithm: Field.table is of type list, which cannot"),
    (Field(({1},)), r"^algorithm: Field.table\[0\] is of type set, which cannot"),
    (Field(Field(np.zeros(3))), "^algorithm: Field.table is of type ndarray"),
    (Thawed(3), "^algorithm: Thawed is a dataclass without frozen=True")])
def test_parts_that_cannot_be_hashed_are_named(draft: Any, message: str) -> None:
    for algorithm in (dx.Speculative(draft), BeamSearch(2, draft=draft)):
        with pytest.raises(TypeError, match=message):
            dx.generate(SMALL, IDS, max_new_tokens=4, algorithm=algorithm)


@pytest.mark.parametrize(("moves", "message"), [
    (lambda state: state * 1.0, r"its state \(s.algo\)\[0\] was int32\[2\] before a round and is float32\[2\] after"),
    (lambda state: state[:, None], r"its state \(s.algo\)\[0\] was int32\[2\] before a round and is int32\[2, 1\]"),
    (lambda state: None, r"its state \(s.algo\)\[0\] was int32\[2\] before a round and is nothing after it")])
def test_a_state_that_changes_its_form_is_named(moves: Any, message: str) -> None:
    with pytest.raises(TypeError, match=rf"^Speculative\(Keeping\): {message}"):
        dx.generate(SMALL, IDS, max_new_tokens=4, algorithm=dx.Speculative(Keeping(moves)))


@pytest.mark.parametrize(("given", "message"), [
    (dict(draft="prompt-lookup"), "^draft: got 'prompt-lookup', takes a Draft or a Source"),
    (dict(draft=SMALL), "^draft: got <LM .*, takes a Draft or a Source"), (dict(draft=Field), "^draft: got <class"),
    (dict(verify=SeedExact), "^verify: got <class .*, takes a Verifier"),
    (dict(shape=3), "^shape: got 3, takes a Shape"), (dict(packed="yes"), "^packed: got 'yes', takes True or False")])
def test_a_part_of_another_kind_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        dx.Speculative(**{"draft": Field(3), **given})


@dataclasses.dataclass(frozen=True)
class Judge(Verifier):
    says: Any
    guarantee = "approximate"
    drawn: Any = "ranked"

    def __call__(self, dist: Any, s: Any, tree: Any) -> Any:
        return self.says(s, tree)


@dataclasses.dataclass(frozen=True)
class Single(Source):
    says: Any

    def start(self, params: Any, s: Any, state: Any, room: int) -> Any:
        return self.says(s, state)

    def extend(self, params: Any, s: Any, state: Any, level: Any) -> Any:
        return self.says(s, state)


@dataclasses.dataclass(frozen=True)
class Bent(Shape):
    length: int = 2

    def grow(self, grower: Any, state: Any) -> Any:
        return state


@dataclasses.dataclass(frozen=True)
class Method(dx.Algorithm):
    says: Any

    def init(self, params: Any, s: Any) -> Any:
        return None

    def propose(self, params: Any, policy: Any, s: Any) -> Any:
        if self.says is None:
            return s.newest
        return dx.Autoregressive().propose(params, policy, s)

    def decide(self, params: Any, dist: Any, s: Any, window: Any, out: Any, algo: Any) -> Any:
        return self.says(s)


@pytest.mark.parametrize(("algorithm", "message"), [
    (dx.Speculative(Field(3), Judge(lambda s, tree: s.newest)), r"^Judge: returned int32\[2\], takes a triple"),
    (dx.Speculative(Field(3), Judge(lambda s, tree: (s.newest, s.newest, s.newest))),
     r"^Judge: got path of int32\[2\], takes i\[B, D\] with B=2, D=3"),
    (dx.Speculative(Single(lambda s, state: s.newest)), r"^Single.start: returned int32\[2\], takes a pair, the"),
    (dx.Speculative(Single(lambda s, state: (state, s.newest))), r"^Single.start: returned \(None, int32\[2\]\)"),
    (dx.Speculative(Single(3), shape=Bent()), r"^Bent.grow: returned None, takes a triple, a Proposal"),
    (Method(None), r"^Method.propose: returned int32\[8\], takes a pair, a Window"),
    (Method(lambda s: s.newest), r"^Method.decide: returned int32\[8\], takes a Decision"),
    (Method(lambda s: dx.Decision(s.newest, s.newest, s.newest, s.newest, None)),
     r"^Method.decide: got tokens of int32\[8\], takes i\[B, M\] with B=8")])
def test_a_decision_of_the_wrong_form_is_refused(algorithm: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        dx.generate(SMALL, IDS, max_new_tokens=4, algorithm=algorithm)


@dataclasses.dataclass(frozen=True)
class Windows(Method):
    """A method whose window has other fields than it should: `says` gives them."""

    def propose(self, params: Any, policy: Any, s: Any) -> Any:
        window, algo = dx.Autoregressive().propose(params, policy, s)
        return window.replace(**self.says(s)), algo


@pytest.mark.parametrize(("fields", "message"), [
    (lambda s: dict(tokens=s.newest), r"got tokens of int32\[8\], takes i\[B, W\] with B=8"),
    (lambda s: dict(tokens=[1]), r"got tokens of a list, takes i\[B, W\]"),
    (lambda s: dict(mask=None), r"got mask of None, takes b\[B or 1, W, W\]"),
    (lambda s: dict(live=jnp.ones((8, 1), jnp.int32)), r"got live of int32\[8, 1\], takes b\[B, W\] with B=8, W=1"),
    (lambda s: dict(positions=jnp.ones((8, 2), jnp.int32)), r"got positions of int32\[8, 2\], takes i\[B, W\]")])
def test_the_arrays_of_a_window_are_checked(fields: Any, message: str) -> None:
    with pytest.raises(TypeError, match=rf"^Windows.propose: {message}"):
        dx.generate(SMALL, IDS, max_new_tokens=4, algorithm=Windows(fields))


@struct
class Held(Dense):
    """A cache with a static field."""

    table: Any = static(default=None)


def test_a_cache_with_an_array_as_a_static_field_is_refused() -> None:
    def kind(layers: Any, batch: int, capacity: int, dtype: Any, inputs: Any = None) -> Any:
        made = dense(layers, batch, capacity, dtype, inputs)
        return Held(**{f.name: getattr(made, f.name) for f in fields(made)}, table=np.zeros(3))

    with pytest.raises(TypeError, match=r"^cache: Held\.table, a static field, is of type ndarray, which"):
        dx.generate(SMALL, IDS, max_new_tokens=4, cache=kind)


@dataclasses.dataclass(frozen=True)
class Kind(CacheConfig):
    says: Any

    def __call__(self, layers: Any, batch: int, capacity: int, dtype: Any, inputs: Any = None) -> Any:
        return self.says


@pytest.mark.parametrize(("cache", "message"), [
    (Kind(3), "^cache: the kind that was given: returned an int, takes a Cache"),
    (lambda layers, batch, capacity, dtype, inputs=None: None, "^cache: the kind that was given: returned None, takes"),
    (Kind(np.zeros(3)), "^cache: Kind.says is of type ndarray, which cannot be hashed"),
    (Kind, "^cache: got <class .*, takes the name of a policy"),
    (lambda x: x, "^cache: got <function .*, takes the name"),
    (512, "^cache: got 512, takes the name of a policy, such as 'snapkv:budget=512'")])
def test_a_cache_of_the_wrong_form_is_refused(cache: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        dx.generate(SMALL, IDS, max_new_tokens=4, cache=cache)


@pytest.mark.parametrize(("fn", "message"), [
    (lambda ctx, logits: None, r"^Custom.logits: got logits of None, takes f\[V\] with V="),
    (lambda ctx, logits: logits[:3], r"^Custom.logits: got logits of float32\[3\], takes f\[V\] with V="),
    (lambda ctx, logits: logits.astype(int), r"^Custom.logits: got logits of int32\[.*, takes f\[V\] with V="),
    ([3], r"^transforms: Custom.fn is of type list, which cannot be hashed")])
def test_logits_of_the_wrong_form_are_refused(fn: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        dx.generate(SMALL, IDS, max_new_tokens=4, transforms=[Custom(fn, "nothing")])


@dataclasses.dataclass(frozen=True)
class Chooser(SelectionRule):
    def scores(self, candidates: Any) -> Any:
        raise NotImplementedError

    def choose(self, candidates: Any) -> Any:
        return 0


@dataclasses.dataclass(frozen=True)
class Search(Explorer):
    rows: int = 2

    def search(self, forks: Any, asked: Any) -> Any:
        return 0


@pytest.mark.wide
def test_choices_of_the_wrong_form_are_refused() -> None:
    with pytest.raises(TypeError, match=r"^Chooser.choose: returned an int, takes a Choice"):
        dx.select.choose("pycode", "x", Chooser(), num_samples=2, max_new_tokens=2)
    with pytest.raises(TypeError, match=r"^Search.search: returned an int, takes a Ranked"):
        dx.search.explore("pycode", "x", Search(), max_new_tokens=2)


def test_contracts_fit_on_a_page() -> None:
    """Public members, inherited ones included; what a user has to write of them is less."""
    members = lambda cls: {name for name in dir(cls) if not name.startswith("_")} - {"replace"}
    assert len(members(Cache) | {"length"}) <= 10
    assert len(members(Model)) <= 8
    assert len(members(dx.Algorithm)) <= 9
    for capability in (*Cache.__subclasses__(), *dx.Algorithm.__subclasses__(), ShowsWeights):
        base = next(cls for cls in (Cache, dx.Algorithm, Model) if issubclass(capability, cls))
        if capability.__module__.startswith("decodax.core"):
            assert len(members(capability) - members(base)) <= 3, capability


@pytest.mark.parametrize("member", sorted(OPTIONAL))
def test_a_member_of_a_derived_contract_asks_for_its_base(member: str) -> None:
    with pytest.raises(TypeError, match=rf"^Own.{member}: belongs to decodax.core.algorithm.{OPTIONAL[member]}"):
        type("Own", (dx.Algorithm,), {member: lambda self: None})


def test_a_field_that_is_data_stays_data_in_derived_classes() -> None:
    """A field that is declared again without `data` would become part of the compiled program."""
    below = [Composed]
    for own in below:
        below += own.__subclasses__()
    for own in filter(dataclasses.is_dataclass, below):
        declared = {field.name for field in dataclasses.fields(own) if "bare" in field.metadata}
        for base in filter(dataclasses.is_dataclass, own.__mro__[1:]):
            assert {field.name for field in dataclasses.fields(base) if "bare" in field.metadata} <= declared, own
