"""A prompt that takes the place of another gets the tokens that it gets alone."""

import functools
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

import decodax as dx
from decodax.algorithms.plain import Autoregressive
from decodax.core.algorithm import Concludes
from decodax.core.state import State, Status
from decodax.engine.batch import BatchShape
from decodax.engine.queue import Ticket, schedule, unstarted
from decodax.engine.request import Request
from decodax.engine.slots import Slots, Use, kin, possible
from decodax.front.generate import merge
from decodax.io.load import LM
from decodax.models.diffusion import Diffusion
from tests.caches.small import SMALL
from tests.jobs.slots import COUNT, NEW, OPTIONS, PROMPTS, RANDOM
from tests.matrix import often

FILLS = LM(model=SMALL.model, params=SMALL.params, vocab_size=16, diffusion=Diffusion(15))

CASES: dict[str, tuple[LM, dict[str, Any]]] = {
    "plain": (SMALL, {}),
    "drafts of unequal lengths": (SMALL, dict(algorithm="prompt-lookup:length=4")),
    "samples": (SMALL, dict(num_samples=2)),
    # rows choose anew at times of their own
    "choices while decoding": (SMALL, dict(cache="h2o:budget=14,every=5")),
    "choices behind prompts": (SMALL, dict(cache="snapkv:budget=14,window_size=4")),
    "codes": (SMALL, dict(cache="kivi:group_size=4,residual_length=8")),
    "contexts": (SMALL, dict(context=[PROMPTS[i % 2][:3] for i in range(COUNT)])),
    "a tree": (SMALL, dict(algorithm="token-recycling")),
    "masks": (FILLS, dict(algorithm="fast-dllm:block_length=4,threshold=0.15", temperature=0.0)),
    "plain masks": (FILLS, dict(temperature=0.0)),
}


@functools.cache
def whole(case: str) -> dx.Result:
    lm, options = CASES[case]
    return dx.generate(lm, PROMPTS, **{**OPTIONS, **options})


def through(case: str, order: list[int], seats: int = 4, **options: Any) -> dict[int, dx.Result]:
    lm, own = CASES[case]
    request = Request.read(lm, PROMPTS, **{**OPTIONS, **own})
    return dict(schedule((Ticket(request.select([i]), i) for i in order), seats, **options))


@pytest.mark.wide
@pytest.mark.parametrize("case", often(["plain", "drafts of unequal lengths", "samples", "choices while decoding",
                                        "masks"], CASES))
def test_a_prompt_gets_the_tokens_that_it_gets_in_a_batch(case: str) -> None:
    wanted, found = whole(case), through(case, list(range(COUNT)))
    assert sorted(found) == list(range(COUNT))
    each = len(wanted) // COUNT
    for i, result in found.items():
        for j in range(each):
            row = i * each + j
            assert result.row(j).tolist() == wanted.row(row).tolist()
            assert result.status[j] == wanted.status[row]
            assert result.logprobs is not None and wanted.logprobs is not None
            for name in ("raw", "processed", "top"):
                a, b = getattr(result.logprobs, name)[j], getattr(wanted.logprobs, name)[row]
                np.testing.assert_allclose(a, b[:len(a)], atol=1e-5)
            assert result.stats.tokens[j] == result.lengths[j]


@pytest.mark.wide
def test_neither_order_nor_number_of_places_changes_tokens() -> None:
    wanted = whole("plain")
    for order, seats in ((list(range(COUNT))[::-1], 4), ([*range(6, COUNT), *range(6)], 1), (list(range(COUNT)), 40)):
        found = through("plain", order, seats)
        assert all(found[i].row(0).tolist() == wanted.row(i).tolist() for i in range(COUNT))


def test_a_batch_size_gives_the_whole_result() -> None:
    lm, own = CASES["samples"]
    found, wanted = dx.generate(lm, PROMPTS, batch_size=4, **{**OPTIONS, **own}), whole("samples")
    np.testing.assert_array_equal(found.tokens, wanted.tokens)
    assert found.status == wanted.status
    assert found.logprobs is not None and wanted.logprobs is not None
    np.testing.assert_allclose(found.logprobs.top, wanted.logprobs.top, atol=1e-5)
    assert found.stats.rounds.tolist() == wanted.stats.rounds.tolist()
    assert 0 < found.stats.forwards < found.stats.rounds.sum() / 2


def test_places_are_in_use_nearly_always() -> None:
    """The longest first, as generate orders them: 72 prompts of up to 25 tokens in 8 places."""
    use = Use()
    through("plain", sorted([*range(COUNT)] * 6, key=lambda i: -NEW[i]), 8, use=use)
    assert use.row_rounds == 6 * sum(NEW) and use.goodput > 0.9
    assert use.prompt_tokens == 6 * sum(len(p) - 1 for p in PROMPTS) <= use.prefill_tokens


@pytest.mark.wide
def test_requests_of_different_kinds_take_turns() -> None:
    kinds: list[dict[str, Any]] = [{}, dict(algorithm="prompt-lookup:length=4"), dict(top_p=0.9, temperature=0.7),
                                   dict(num_samples=2, temperature=1.0)]
    requests = [Request.read(SMALL, PROMPTS[i], max_new_tokens=8, request_ids=[i], **kinds[i % 4]) for i in range(8)]
    assert len({str(kin(request)) for request in requests}) == 4
    found = dict(schedule([Ticket(request, i) for i, request in enumerate(requests)], 2))
    for i in range(8):
        alone = dx.generate(SMALL, PROMPTS[i], max_new_tokens=8, request_ids=[i], **kinds[i % 4])
        assert found[i].tokens.tolist() == alone.tokens.tolist()


@pytest.mark.wide
@pytest.mark.filterwarnings("ignore:max_new_tokens")
def test_a_prompt_that_is_too_long_for_the_places_gets_longer_ones() -> None:
    prompts = [[3, 4, 5], [6, 7], [2, 3] * 150, [8]]
    requests = [Request.read(SMALL, prompt, max_new_tokens=4, request_ids=[i]) for i, prompt in enumerate(prompts)]
    found = dict(schedule((Ticket(request, i) for i, request in enumerate(requests)), 2, ahead=2))
    for i, prompt in enumerate(prompts):
        assert found[i].tokens.tolist() == dx.generate(SMALL, prompt, max_new_tokens=4).tokens.tolist()


RIDES: dict[str, tuple[LM, dict[str, Any]]] = {
    "plain": (SMALL, {}), "samples": (SMALL, dict(num_samples=2)),
    "drafts of unequal lengths": (SMALL, dict(algorithm="prompt-lookup:length=4")),
    "a tree": (SMALL, dict(algorithm="token-recycling")),
    "lengths that adapt": (SMALL, dict(algorithm="bass", draft=SMALL)),
    "a rule for each token": (SMALL, dict(repetition_penalty=1.3, top_p=0.9)),
    "codes": (SMALL, dict(cache="kivi:group_size=4,residual_length=8"))}


@pytest.mark.wide(but=("40-plain",))
@pytest.mark.parametrize("case", often(["plain", "drafts of unequal lengths"], RIDES))
@pytest.mark.parametrize("budget", often([40], [40, 200]))
def test_a_prompt_that_is_read_in_the_rounds_of_others_gets_its_tokens(case: str, budget: int,
                                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """With prompts that take several rounds, and those that end in the middle of one."""
    lm, own = RIDES[case]
    method = own.get("algorithm")
    if (draft := own.get("draft")) is not None:
        own = {key: x for key, x in own.items() if key != "draft"} | {"algorithm": dx.algorithms.make(method,
                                                                                                      draft=draft)}
    prompts = [p * 4 for p in PROMPTS]
    request = Request.read(lm, prompts, **{**OPTIONS, **own})
    wanted = dx.generate(lm, prompts, **{**OPTIONS, **own})
    use, beside = Use(), []       # forwards for prompts that came while others were being continued
    admit = Slots.admit

    def counted(self: Slots, *args: Any, **named: Any) -> None:
        before, others = use.prefill_forwards, len(self.free) < len(self.seats)
        admit(self, *args, **named)
        if others:
            beside.append(use.prefill_forwards - before)

    monkeypatch.setattr(Slots, "admit", counted)
    tickets = [Ticket(request.select([i]), i) for i in range(COUNT)]
    found = dict(schedule(tickets, 4, token_budget=budget, use=use))
    # not where several rows or a table read a prompt, nor where codes are made of it as a whole
    rides = case not in ("samples", "a tree", "codes")
    assert beside and all((n == 0) == rides for n in beside)
    assert use.prompt_tokens == sum(len(p) - 1 for p in prompts)
    each = request.samples
    for i, result in found.items():
        for j in range(each):
            assert result.row(j).tolist() == wanted.row(i * each + j).tolist()
            assert result.status[j] == wanted.status[i * each + j]
            assert result.logprobs is not None and wanted.logprobs is not None
            a, b = result.logprobs.raw[j], wanted.logprobs.raw[i * each + j]
            np.testing.assert_allclose(a, b[:len(a)], atol=1e-5)


def test_a_budget_that_rows_use_up_is_refused() -> None:
    request = Request.read(SMALL, PROMPTS, **OPTIONS, algorithm="prompt-lookup:length=4")
    with pytest.raises(ValueError, match=r"^token_budget: got 40; 8 rows with windows of 5 take 40, and prompts one m"):
        list(schedule([Ticket(request.select([i]), i) for i in range(COUNT)], 8, token_budget=40))


def test_tickets_are_taken_when_there_is_room() -> None:
    request, taken = Request.read(SMALL, PROMPTS, **OPTIONS), []

    def source() -> Iterator[Ticket]:
        for i in range(COUNT):
            taken.append(i)
            yield Ticket(request.select([i]), i)

    answers = schedule(source(), 2, ahead=2)
    next(answers)
    assert len(taken) <= 7      # two run, two wait, and those that have ended and were replaced
    assert len(list(answers)) == COUNT - 1


@pytest.mark.filterwarnings("ignore:max_new_tokens")
def test_when_the_time_is_out_everything_ends() -> None:
    found = through("plain", list(range(COUNT)), end=time.monotonic() - 1)
    assert len(found) == COUNT and all(result.status == [Status.TIME] for result in found.values())
    assert dx.generate(SMALL, PROMPTS, batch_size=4, max_time=1e-3, max_new_tokens=500).status.count(Status.TIME) > 0


class Measured(Autoregressive, Concludes):
    """Plain decoding that says how long its texts are."""

    def findings(self, s: State) -> dict[str, jax.Array]:
        return {"length": s.length}


@pytest.mark.wide
def test_findings_of_a_method_are_in_the_order_of_the_prompts() -> None:
    """Also where some prompts never began, for which it found nothing."""
    found = dx.generate(SMALL, PROMPTS, algorithm=Measured(), batch_size=4, **OPTIONS)
    assert found.findings["length"].tolist() == [len(p) + n for p, n in zip(PROMPTS, found.lengths, strict=True)]
    request = Request.read(SMALL, PROMPTS, algorithm=Measured(), **OPTIONS)
    ended = next(result for _, result in schedule([Ticket(request.select([1]), 1)], 1))
    both = merge([unstarted(request.select([0])), ended], [1, 0], 1, 0)
    assert both.findings["length"].tolist() == [found.findings["length"][1], 0]
    assert both.status == [found.status[1], Status.TIME]


@pytest.mark.wide
def test_rows_that_share_memory_go_through_batches() -> None:
    request = Request.read(SMALL, PROMPTS, cache="paged", **OPTIONS)
    assert not possible(request)
    found = dx.generate(SMALL, PROMPTS, cache="paged", batch_size=4, **OPTIONS)
    assert found.tokens.tolist() == whole("plain").tokens.tolist()


@pytest.mark.wide
def test_a_common_beginning_is_read_once() -> None:
    """Of two headers, each in front of several prompts, and prompts without one."""
    headers = [RANDOM.integers(2, 15, 80).tolist() for _ in range(2)]
    prompts = [[*(headers[i % 3] if i % 3 < 2 else []), *PROMPTS[i]] for i in range(COUNT)]
    request = Request.read(SMALL, prompts, **OPTIONS)
    use = Use()
    found = dict(schedule([Ticket(request.select([i]), i) for i in range(COUNT)], 4, use=use))
    wanted = dx.generate(SMALL, prompts, **OPTIONS)
    assert all(found[i].row(0).tolist() == wanted.row(i).tolist() for i in range(COUNT))
    # of 8 prompts with 80 tokens in front
    assert use.prefix_tokens == 6 * 80
    # also where what follows it is read in the rounds of others
    rides = dict(schedule([Ticket(request.select([i]), i) for i in range(COUNT)], 4, token_budget=40, use=use))
    assert all(rides[i].row(0).tolist() == wanted.row(i).tolist() for i in range(COUNT))
    assert use.prefix_tokens == 2 * 6 * 80


@pytest.mark.wide
def test_places_are_as_many_as_the_memory_holds() -> None:
    request = Request.read(SMALL, PROMPTS, **OPTIONS)
    row = BatchShape.of(request, request.longest, request.more).row_bytes(request)
    cache = sum(x.nbytes for x in jax.tree.leaves(SMALL.model.init_cache(1, 256)))
    assert cache < row < cache + 256 * 64
    slots = Slots(request.select([0]), 64, request.longest, request.more, memory=5 * row + 7)
    assert len(slots.seats) == slots.rows == 5
    found = dict(schedule((Ticket(request.select([i]), i) for i in range(COUNT)), 64, memory=5 * row))
    assert all(found[i].row(0).tolist() == whole("plain").row(i).tolist() for i in range(COUNT))
    with pytest.raises(ValueError, match=r"^memory: got 10 bytes; a prompt of up to .* tokens takes"):
        Slots(request.select([0]), 64, request.longest, request.more, memory=10)
