"""The drafts, the source and the rule of docs/extending/examples/drafts.py against plain Python."""

import collections
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

import decodax as dx
from decodax.common.registry import ALGORITHMS
from decodax.core.types import Params
from tests.algorithms.diffusion.network import Network
from tests.algorithms.speculative.drafting import paths, propose, rows
from tests.extending.pages import run_page
from tests.laws.cases import MASK, POLICIES, decode, model, prompts, start, texts
from tests.matrix import often

pytestmark = pytest.mark.wide      # the guide runs as it stands

Path = tuple[int, ...]


@pytest.fixture(scope="module")
def page() -> Iterator[dict[str, Any]]:
    """The names of the page; its systems leave the table with the module."""
    known = set(ALGORITHMS)
    yield run_page("drafts")
    for name in ALGORITHMS.keys() - known:
        del ALGORITHMS[name]


# REST

def rest_by_hand(documents: list[list[int]], context: list[int], longest: int, matches: int, length: int,
                 nodes: int) -> list[Path]:
    """The draft tree of REST as a list of paths, the most frequent first, then the shorter, then the earlier one."""
    text = [token for document in documents for token in [*document, -1]]
    order = sorted(range(len(text)), key=lambda i: text[i:])
    for size in range(min(longest, len(context)), 1, -1):
        suffix = context[-size:]
        begin = [i + size for i in order if text[i:i + size] == suffix and text[i + size] >= 0][:matches]
        if begin:
            break
    else:
        return []
    count: collections.Counter[Path] = collections.Counter()
    for i in begin:
        document = text[i:text.index(-1, i)][:length]
        count.update(tuple(document[:n]) for n in range(1, len(document) + 1))
    # a counter keeps the order in which its keys came, here that of the continuations
    return sorted(count, key=lambda path: (-count[path], len(path)))[:nodes]


@pytest.mark.parametrize(("matches", "nodes", "cut"), often([], [(16, 40, False), (3, 6, True)]))
def test_rest_drafts_the_tree_of_a_search_by_hand(page: dict[str, Any], matches: int, nodes: int, cut: bool) -> None:
    draw = np.random.default_rng(0)
    documents = [draw.integers(0, 4, size).tolist() for size in (60, 1, 25, 2)]
    sizes = dict(longest=5, matches=matches, length=4, nodes=nodes)
    contexts = [draw.integers(0, 4, size).tolist() for size in (1, 2, 3, 9, 14, 20)]
    contexts += [[3, *documents[2][4:12]], documents[0][-5:], [1, 9, 9]]
    params = Params(None, page["datastore"](documents))
    drafted = propose(page["Rest"](**sizes), rows(*contexts), params=params)
    expected = [rest_by_hand(documents, context, **sizes) for context in contexts]
    assert [paths(drafted, i) for i in range(len(contexts))] == expected
    assert not expected[0] and not expected[-1] and (max(map(len, expected)) == nodes) == cut


def test_another_datastore_is_data(page: dict[str, Any]) -> None:
    lm, given, store = page["lm"], page["prompts"], page["store"]
    first = dx.generate(lm, given, max_new_tokens=24, algorithm=page["rest"])
    reverse = page["datastore"]([store["text"][::-1][1:].tolist(), []])
    other = page["Rest"]({name: x[:len(store["text"])] for name, x in reverse.items()})
    with jax.no_tracing():
        again = dx.generate(lm, given, max_new_tokens=24, algorithm=dx.Speculative(other))
    assert again.tokens.tolist() == first.tokens.tolist()
    assert again.stats.accepted.sum() < first.stats.accepted.sum()


@pytest.mark.parametrize("name", ["rest", "cacheback"])
def test_the_tokens_are_those_of_plain_decoding_under_every_policy(page: dict[str, Any], name: str) -> None:
    ids, policy = prompts(6), POLICIES["together"] | dict(temperature=[0.0, 0.7] * 3)
    plain = decode(dx.Autoregressive(), "llama", ids, policy, new=24, eos=[1])
    alg = {"rest": dx.Speculative(page["Rest"](page["datastore"]([p + t for p, t in zip(ids, texts(plain),
                                                                                         strict=True)]))),
           "cacheback": page["cacheback"]}[name]
    s = decode(alg.bare(), "llama", ids, policy, new=24, eos=[1], draft=alg.weights)
    assert texts(s) == texts(plain) and s.status.tolist() == plain.status.tolist()
    assert int(s.stats.accepted.sum()) > 0


# Cacheback

class Lru(collections.OrderedDict[Path, Any]):
    """A dictionary of at most `most` entries, which forgets the one that was put in least recently."""

    def __init__(self, most: int):
        super().__init__()
        self.most, self.evicted = most, 0

    def put(self, key: Path, value: Any) -> None:
        self[key] = value
        self.move_to_end(key)
        if len(self) > self.most:
            self.popitem(last=False)
            self.evicted += 1


class CachebackByHand:
    """The two levels of Cacheback, fed with a text that grows."""

    def __init__(self, leader: int, follower: int, leaders: int, followers: int, levels: int):
        self.leader, self.follower, self.followers, self.levels = leader, follower, followers, levels
        self.table, self.taken, self.evicted = Lru(leaders), 0, 0

    def draft(self, text: list[int]) -> set[Path]:
        size = self.leader + self.follower
        for i in range(self.taken, len(text) - size + 1):
            key = tuple(text[i:i + self.leader])
            entry = self.table.get(key, Lru(self.followers))
            full = len(entry)
            entry.put(tuple(text[i + self.leader:i + size]), None)
            self.evicted += full == self.followers and entry.evicted > 0
            self.table.put(key, entry)
            self.taken = i + 1
        ends, found = [tuple(text)], set()
        for _ in range(self.levels):
            ends = [end + more for end in ends for more in self.table.get(end[-self.leader:], ())]
            drafts = [end[len(text):] for end in ends]
            found |= {path[:n] for path in drafts for n in range(1, len(path) + 1)}
        return found


@pytest.mark.full
@pytest.mark.parametrize("sizes", [
    dict(leader=1, follower=2, leaders=5, followers=2, levels=2),
    pytest.param(dict(leader=2, follower=1, leaders=9, followers=1, levels=3), marks=pytest.mark.full)])
def test_cacheback_drafts_round_by_round_what_ordered_dictionaries_do(page: dict[str, Any],
                                                                      sizes: dict[str, int]) -> None:
    alg, ids = dx.Speculative(page["Cacheback"](**sizes)), prompts(4)
    network, params, chain, s = start(alg, "llama", ids, dict(temperature=[0.4, 0.8, 0.0, 0.2]), new=30)

    @jax.jit
    def step(s: dx.State) -> tuple[Any, dx.State]:
        return alg.drafter.propose(params, chain, s, s.algo[0], "coupled")[0], dx.step(alg, network, params, chain, s)

    hands, drafted = [CachebackByHand(**sizes) for _ in ids], 0
    while bool(s.running.any()):
        proposal, after = step(s)
        for i, hand in enumerate(hands):
            if s.status[i] == dx.Status.RUNNING:
                expected = hand.draft(s.tokens[i, :s.length[i]].tolist())
                found = paths(proposal, i)
                assert len(found) == len(set(found)) and set(found) == expected
                drafted += len(found)
        s = after
    assert int(s.stats.accepted.sum()) > 0 and drafted > 50
    # both levels have forgotten something
    assert sum(hand.table.evicted for hand in hands) > 5 and sum(hand.evicted for hand in hands) > 0


# Masked diffusion

def falling_margin_by_hand(prompt: list[int], new: int, block: int, high: float, decay: float) -> tuple[list[int], int]:
    """New tokens, and forwards."""
    network, place, forwards = Network(), np.arange(len(prompt) + new), 0
    x = np.array(prompt + [MASK] * new)
    for begin in range(len(prompt), len(x), block):
        step = 0
        inside = (place >= begin) & (place < begin + block)
        while (open := inside & (x == MASK)).any():
            log_p = network.forward(x, place)
            first, second = np.exp(np.sort(log_p)[:, :-3:-1].T)
            chosen = open & (first - second >= high * decay ** step)
            if not chosen.any():
                chosen = place == np.argmax(np.where(open, first, -1))
            x[chosen] = log_p[chosen].argmax(-1)
            step, forwards = step + 1, forwards + 1
    return x[len(prompt):].tolist(), forwards


def test_the_falling_margin_is_that_of_a_loop_by_hand(page: dict[str, Any]) -> None:
    ids, numbers = prompts(5), dict(high=0.3, decay=0.5)
    rule = page["FallingMargin"](**numbers)
    alg = dx.MaskedDiffusion(dx.algorithms.diffusion.Adapter(MASK), dx.algorithms.diffusion.Blocks(8), unmask=rule)
    s = decode(alg, "llama", ids, {}, new=16)
    by_hand = [falling_margin_by_hand(prompt, 16, 8, **numbers) for prompt in ids]
    assert texts(s) == [text for text, _ in by_hand]
    assert s.stats.rounds.tolist() == [rounds for _, rounds in by_hand]
    assert max(rounds for _, rounds in by_hand) < 16


# the page

def test_the_page_runs_and_enters_its_systems(page: dict[str, Any]) -> None:
    rest = dx.algorithms.make("rest", documents=[[1, 2, 3]])
    assert ALGORITHMS["rest"].guarantee == rest.traits.guarantee == "seed-exact"
    assert dx.algorithms.make("cacheback", leaders=7).draft == page["Cacheback"](leaders=7)
    assert list(ALGORITHMS["falling-margin"].options) == ["block", "high", "decay"]
    network, _ = model("llama")
    assert page["network"] == network
