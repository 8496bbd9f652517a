"""Answers as they finish."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import decodax as dx
from decodax import jobs
from tests.jobs.test_slots import PROMPTS
from tests.kvcache.test_policies import SMALL


def test_answers_come_as_they_finish_with_options_of_their_own() -> None:
    items: list[Any] = [{"prompt": PROMPTS[0], "id": "slow", "max_new_tokens": 60}, PROMPTS[1],
                        {"prompt": PROMPTS[2], "temperature": 0.9, "max_new_tokens": 5}, PROMPTS[3]]
    found = list(dx.serve(SMALL, items, slots=2, max_new_tokens=4, temperature=0.0))
    assert [one.index for one in found][-1] == 0 and found[-1].id == "slow"
    by_index = {one.index: one.result for one in found}
    alone = dx.generate(SMALL, PROMPTS[2], temperature=0.9, max_new_tokens=5, request_ids=[2])
    assert by_index[2].tokens.tolist() == alone.tokens.tolist()
    alone = dx.generate(SMALL, PROMPTS[0], max_new_tokens=60, request_ids=[jobs.address("slow")])
    assert by_index[0].tokens.tolist() == alone.tokens.tolist()


def test_a_source_without_an_end_is_served() -> None:
    answers = dx.serve(SMALL, (PROMPTS[i % 12] for i in itertools.count()), slots=2, ahead=2, max_new_tokens=3)
    assert len({one.index for one in itertools.islice(answers, 20)}) == 20


def test_it_goes_with_asyncio() -> None:
    async def served(prompts: list[Any]) -> AsyncIterator[dx.Served]:
        answers: Iterator[dx.Served] = dx.serve(SMALL, prompts, slots=2, max_new_tokens=3)
        while (one := await asyncio.to_thread(next, answers, None)) is not None:
            yield one

    async def main() -> list[int]:
        return [one.index async for one in served(PROMPTS[:5])]

    assert sorted(asyncio.run(main())) == list(range(5))


@pytest.mark.parametrize(("options", "message"), [
    (dict(slots=0), "slots: got 0, takes"), (dict(batch_size=2), "batch_size: serve takes no such argument"),
    (dict(guidance_scale=2.0), "guidance_scale: serve takes no such argument; decodax.generate guides"),
    (dict(cache="paged"), r"prompts\[0\]: cache: rows of this kind share memory"),
    (dict(temperature=-1.0), "temperature: got -1"), (dict(ahead=0), "ahead: got 0")])
def test_what_cannot_be_served_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        list(dx.serve(SMALL, PROMPTS[:2], **options))
