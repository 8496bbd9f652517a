"""Answers as they finish."""

import asyncio
import dataclasses
import itertools
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import decodax as dx
from decodax import jobs
from decodax.engine.batch import BatchShape
from decodax.engine.request import Request
from decodax.engine.slots import Slots
from decodax.front.serve import Served
from tests.caches.small import SMALL
from tests.jobs.slots import PROMPTS


def test_answers_come_as_they_finish_with_options_of_their_own() -> None:
    items: list[Any] = [{"prompt": PROMPTS[0], "id": "slow", "max_new_tokens": 60}, PROMPTS[1],
                        {"prompt": PROMPTS[2], "temperature": 0.9, "max_new_tokens": 5}, PROMPTS[3]]
    found = list(dx.serve(SMALL, items, slots=2, max_new_tokens=4, temperature=0.0))
    assert [one.index for one in found][-1] == 0 and found[-1].id == "slow"
    by_index = {one.index: one.result for one in found}
    assert by_index[2] is not None and by_index[0] is not None
    alone = dx.generate(SMALL, PROMPTS[2], temperature=0.9, max_new_tokens=5, request_ids=[2])
    assert by_index[2].tokens.tolist() == alone.tokens.tolist()
    alone = dx.generate(SMALL, PROMPTS[0], max_new_tokens=60, request_ids=[jobs.address("slow")])
    assert by_index[0].tokens.tolist() == alone.tokens.tolist()


def test_a_source_without_an_end_is_served() -> None:
    answers = dx.serve(SMALL, (PROMPTS[i % 12] for i in itertools.count()), slots=2, ahead=2, max_new_tokens=3)
    assert len({one.index for one in itertools.islice(answers, 20)}) == 20


def test_answers_can_be_awaited_with_asyncio() -> None:
    async def served(prompts: list[Any]) -> AsyncIterator[Served]:
        answers: Iterator[Served] = dx.serve(SMALL, prompts, slots=2, max_new_tokens=3)
        while (one := await asyncio.to_thread(next, answers, None)) is not None:
            yield one

    async def main() -> list[int]:
        return [one.index async for one in served(PROMPTS[:5])]

    assert sorted(asyncio.run(main())) == list(range(5))


@pytest.mark.parametrize(("options", "message"), [
    (dict(slots=0), "slots: got 0, takes"), (dict(batch_size=2), "batch_size: serve takes no such argument"),
    (dict(guidance_scale=2.0), "guidance_scale: serve takes no such argument; decodax.generate guides"),
    (dict(cache="paged"), "cache: rows of this kind share memory"), (dict(on_error="skip"), "on_error: got 'skip'"),
    (dict(temperature=-1.0), "temperature: got -1"), (dict(ahead=0), "ahead: got 0"), (dict(use=3), "use: got 3")])
def test_bad_requests_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        list(dx.serve(SMALL, PROMPTS[:2], **options))


@pytest.mark.wide
def test_searches_that_options_name_run_as_under_generate() -> None:
    """`num_beams` and `penalty_alpha` choose the method, for all prompts or for one of them."""
    beams: dict[str, Any] = dict(algorithm=dx.algorithms.beam_search(2), max_new_tokens=4)
    texts = dx.generate(SMALL, PROMPTS[:2], **beams).tokens.tolist()
    assert [tokens(one) for one in sorted(dx.serve(SMALL, PROMPTS[:2], **beams), key=lambda one: one.index)] == texts
    one, = dx.serve(SMALL, [{"prompt": PROMPTS[0], **beams}])
    assert tokens(one) == texts[0]


def test_an_error_names_the_prompt_once() -> None:
    one, = dx.serve(SMALL, [None])
    assert str(one.error).startswith("prompts[0]: got None")


def tokens(one: Served) -> list[int]:
    assert one.result is not None
    return one.result.row(0).tolist()


def alone(i: int, **options: Any) -> list[int]:
    return dx.generate(SMALL, PROMPTS[i], request_ids=[i], **options).row(0).tolist()


WAIT = 60.0
"""Seconds after which a source that was to be left waiting goes on, and the test fails."""


@pytest.mark.parametrize("batches", [[1, 2, 1], [5, 3], [2, 1, 1, 1]])
def test_a_source_that_blocks_stalls_no_rows(batches: list[int]) -> None:
    """It gives prompts and blocks until all of them have been answered, again and again; more and fewer than slots."""
    received, late = threading.Semaphore(0), []

    def source() -> Iterator[list[int]]:
        given = 0
        for batch in batches:
            yield from PROMPTS[given:given + batch]
            given += batch
            for _ in range(batch):
                if not received.acquire(timeout=WAIT):
                    late.append(given)

    found = {}
    for one in dx.serve(SMALL, source(), slots=4, temperature=0.9, max_new_tokens=5):
        found[one.index] = tokens(one)
        received.release()
    assert late == []
    assert found == {i: alone(i, temperature=0.9, max_new_tokens=5) for i in range(sum(batches))}


def test_a_prompt_that_comes_while_another_runs_need_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, given, advance = threading.Event(), threading.Event(), Slots.advance

    def source() -> Iterator[dict[str, Any]]:
        yield {"prompt": PROMPTS[0], "id": "long", "max_new_tokens": 200}
        begun.wait(WAIT)
        yield {"prompt": PROMPTS[1], "id": "short", "max_new_tokens": 2}
        given.set()

    def watched(self: Slots, *args: Any) -> None:
        if begun.is_set():
            given.wait(WAIT)
        advance(self, *args)
        begun.set()

    monkeypatch.setattr(Slots, "advance", watched)
    answers = dx.serve(SMALL, source(), slots=2, eos_token_id=[])
    assert [one.id for one in answers] == ["short", "long"] and given.is_set()


def test_the_source_is_never_far_ahead_of_the_work() -> None:
    taken = []

    def source() -> Iterator[list[int]]:
        for i in range(12):
            taken.append(i)
            yield PROMPTS[i]

    answers = dx.serve(SMALL, source(), slots=2, ahead=2, max_new_tokens=3)
    next(answers)
    time.sleep(0.1)
    assert len(taken) <= 7      # two run, two wait, and those that have ended and were replaced
    assert len(list(answers)) == 11


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "decodax source"]


def test_closing_ends_the_thread() -> None:
    answers = dx.serve(SMALL, (PROMPTS[i % 12] for i in itertools.count()), slots=2, max_new_tokens=3)
    next(answers)
    assert threads()
    answers.close()
    for thread in threads():
        thread.join(5)
    assert threads() == []


BAD: dict[str, tuple[Any, str]] = {
    "value": ({"prompt": [3], "temperature": -3}, "temperature: got -3"),
    "name": ({"prompt": [3], "temprature": 1}, "temprature: unknown argument"),
    "kind": (3.5, "prompt"), "nothing": (None, "prompt"), "mapping": ({"text": "x"}, "prompt: got {'text': 'x'}"),
    "token": ([3, 10 ** 6], "prompt"), "of many": ({"prompt": [3], "batch_size": 2}, "batch_size: serve takes no"),
    "length": ({"prompt": [3], "max_new_tokens": 10 ** 12}, "max_new_tokens: got 1000000000000"),
    "error of its own": ({"prompt": [3], "id": type("", (), {"__str__": lambda self: 1 / 0})()}, "division by zero")}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_prompt_is_answered_with_its_error_and_loses_no_others(case: str) -> None:
    bad, message = BAD[case]
    prompts: list[Any] = [*PROMPTS[:3], bad, *PROMPTS[4:6]]
    found = {one.index: one for one in dx.serve(SMALL, prompts, slots=2, max_new_tokens=4)}
    assert sorted(found) == [0, 1, 2, 3, 4, 5]
    assert found[3].result is None and message in str(found[3].error)
    for i in (0, 1, 2, 4, 5):
        assert found[i].error is None and tokens(found[i]) == alone(i, max_new_tokens=4)


def test_an_error_of_a_prompt_or_of_the_source_comes_after_all_that_was_read() -> None:
    def source(fails: bool) -> Iterator[Any]:
        yield from PROMPTS[:3]
        if fails:
            raise KeyError("no more")
        yield {"prompt": PROMPTS[3], "temperature": -3}
        yield from PROMPTS[4:]

    for answers, error, message in ((dx.serve(SMALL, source(True), slots=2, max_new_tokens=4), KeyError, "no more"),
                                    (dx.serve(SMALL, list(source(False)), on_error="raise", slots=2, max_new_tokens=4),
                                     ValueError, r"^prompts\[3\]: temperature: got -3")):
        found: list[int] = []
        with pytest.raises(error, match=message):
            found.extend(one.index for one in answers)
        assert sorted(found) == [0, 1, 2]


def three_rows() -> str:
    """The memory of three rows of a short prompt."""
    request = Request.read(SMALL, PROMPTS[0], max_new_tokens=4)
    return f"{3 * BatchShape.of(request, request.longest, request.more).row_bytes(request) / 1000}kB"


def test_a_prompt_beyond_the_memory_is_the_only_one_that_fails() -> None:
    items: list[Any] = [*PROMPTS[:3], {"prompt": PROMPTS[3], "max_new_tokens": 4000}, PROMPTS[4]]
    with pytest.warns(UserWarning, match="max_new_tokens"):
        found = {one.index: one for one in dx.serve(SMALL, items, slots=2, max_new_tokens=4, memory=three_rows())}
    assert "prompts[3]: memory: got" in str(found.pop(3).error)
    assert {i: tokens(one) for i, one in found.items()} == {i: alone(i, max_new_tokens=4) for i in (0, 1, 2, 4)}


@pytest.mark.filterwarnings("ignore:max_new_tokens")
def test_the_first_error_that_is_raised_names_its_prompt_and_ends_the_source() -> None:
    """Also one that is found after the prompt has been read: it does not fit into the memory."""
    def source() -> Iterator[Any]:
        for i in itertools.count():
            yield {"prompt": PROMPTS[i % 12], "max_new_tokens": 4000 if i == 3 else 4}

    found: list[int] = []
    answers = itertools.islice(dx.serve(SMALL, source(), slots=2, on_error="raise", memory=three_rows()), 100)
    with pytest.raises(ValueError, match=r"^prompts\[3\]: memory: got"):
        found.extend(one.index for one in answers)
    assert sorted(found)[:3] == [0, 1, 2]


@pytest.mark.parametrize("running", [False, True])
def test_prompts_that_the_model_cannot_read_lose_no_others(monkeypatch: pytest.MonkeyPatch, running: bool) -> None:
    """Such as those with inputs of another shape, which nothing but the model knows of; also while other rows run."""
    admit = Slots.admit

    def picky(self: Slots, requests: Any, *args: Any) -> None:
        if any(request.prompts[0] == PROMPTS[1] for request in requests):
            assert (len(self.free) < len(self.seats)) == running
            raise ValueError("inputs: got another shape")
        admit(self, requests, *args)

    monkeypatch.setattr(Slots, "admit", picky)
    bad = {"prompt": PROMPTS[1]} if running else {"prompt": PROMPTS[1], "logprobs": 3}      # of a kind of its own
    items: list[Any] = [{"prompt": PROMPTS[0], "max_new_tokens": 30}, *[PROMPTS[2]] * 7, bad, PROMPTS[3]]
    found = {one.index: one for one in dx.serve(SMALL, items, slots=8, ahead=8, max_new_tokens=4, eos_token_id=[])}
    assert str(found.pop(8).error) == "prompts[8]: inputs: got another shape"
    assert {i: len(tokens(one)) for i, one in found.items()} == {0: 30, **dict.fromkeys([*range(1, 8), 9], 4)}


@pytest.mark.wide
@pytest.mark.filterwarnings("ignore:max_new_tokens")
def test_the_time_of_one_prompt_ends_it_alone() -> None:
    items: list[Any] = [PROMPTS[0], {"prompt": PROMPTS[1], "max_time": 1e-6, "max_new_tokens": 400}, PROMPTS[2]]
    found = {one.index: one for one in dx.serve(SMALL, items, slots=4, max_new_tokens=30, eos_token_id=[])}
    assert found[1].result is not None
    assert found[1].result.status == [dx.Status.TIME] and found[1].result.lengths[0] < 400
    assert tokens(found[1]) == alone(1, max_new_tokens=400, eos_token_id=[])[:found[1].result.lengths[0]]
    for i in (0, 2):
        assert tokens(found[i]) == alone(i, max_new_tokens=30, eos_token_id=[])


@pytest.mark.filterwarnings("ignore:max_new_tokens")
def test_the_time_of_a_generation_config_is_each_prompts() -> None:
    hasty = dataclasses.replace(SMALL, generation_config={"max_time": 1e-6})
    for answers in (dx.serve(hasty, PROMPTS[:3], slots=2, max_new_tokens=400, eos_token_id=[]),
                    dx.serve(SMALL, PROMPTS[:3], slots=2, max_new_tokens=400, eos_token_id=[], max_time=1e-6)):
        assert [one.result.status for one in answers if one.result] == [[dx.Status.TIME]] * 3


def test_when_the_time_is_out_a_source_without_an_end_is_left() -> None:
    answers = dx.serve(SMALL, (PROMPTS[i % 12] for i in itertools.count()), slots=2, max_new_tokens=4, max_time=0.5)
    assert [one.result.status for one in answers if one.result][-1] == [dx.Status.TIME]


def test_when_the_time_is_out_a_source_that_blocks_is_not_waited_for() -> None:
    stuck = threading.Event()

    def source() -> Iterator[list[int]]:
        yield PROMPTS[0]
        stuck.wait(WAIT)
        yield PROMPTS[1]

    found = list(dx.serve(SMALL, source(), slots=2, max_new_tokens=4, max_time=1.0))
    assert not stuck.is_set() and [one.index for one in found] == [0]
    stuck.set()


def test_none_is_not_given() -> None:
    """It leaves what is said of all prompts as it is; `eos_token_id=None` says that there is no end, as to generate."""
    item = {"prompt": PROMPTS[1], "max_new_tokens": None, "temperature": None, "stop": None, "eos_token_id": None}
    one, = dx.serve(SMALL, [item], max_new_tokens=20, temperature=0.9)
    wanted = dx.generate(SMALL, PROMPTS[1], max_new_tokens=20, temperature=0.9, eos_token_id=None)
    assert tokens(one) == wanted.row(0).tolist() and len(tokens(one)) == 20
