"""Sources of an encoder: as texts, and grouped by their lengths."""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import decodax as dx
from decodax import jobs
from decodax.core import drivers
from decodax.front.generate import _filled
from decodax.models import EncoderText
from tests.models.encoder_decoder.tiny import loaded
from tests.models.encoder_decoder.test_encoder_decoder import translator
from tests.models.small import tokens_of

LENGTHS = (3, 20, 14, 40, 2, 9, 33, 16, 5, 25, 47, 11)
SAMPLED: dict[str, Any] = dict(temperature=1.0, seed=3)


def rows_of(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    r = np.random.default_rng(seed)
    return [[*r.integers(3, 56, n - 1).tolist(), 2] for n in lengths]


def run(name: str, rows: list[list[int]], **options: Any) -> list[list[int]]:
    return tokens_of(loaded(name), [[]] * len(rows), inputs=EncoderText.of(rows), **{
        "algorithm": dx.Autoregressive(), "max_new_tokens": 6, "eos_token_id": [], "no_repeat_ngram_size": 1,
        "forced_bos_token_id": -1, "forced_eos_token_id": [], **options})


def test_the_widths_of_few_rows_are_raised_to_the_next() -> None:
    given = np.array([16, 128, 16, 32, 16, 64, 64])
    assert _filled(given, 2).tolist() == [16, 128, 16, 64, 16, 64, 64]
    assert _filled(given, 1).tolist() == given.tolist() and set(_filled(given, 9).tolist()) == {128}
    assert EncoderText.of(rows_of((3, 40))).widths.tolist() == [16, 64]
    wide = EncoderText(tokens=np.ones((2, 40), np.int32), length=np.array([40, 17], np.int32))
    assert wide.widths.tolist() == [40, 32] and wide.cut(32).tokens.shape == (2, 32)


@pytest.mark.wide
@pytest.mark.parametrize("options", [{}, SAMPLED, dict(SAMPLED, num_samples=2)], ids=["greedy", "sampled", "samples"])
def test_rows_grouped_by_their_sources_are_as_alone(options: dict[str, Any]) -> None:
    """In rows that are refilled, and with beams, whose batches run to their ends."""
    rows = rows_of(LENGTHS)
    alone = [row for i, one in enumerate(rows) for row in run("t5-1.1", [one], request_ids=[i], **options)]
    assert len(set(map(tuple, alone))) > 4
    assert run("t5-1.1", rows, batch_size=3, **options) == alone
    if not options:
        beams = dict(algorithm=dx.algorithms.beam_search(2), no_repeat_ngram_size=0, eos_token_id=[2])
        alone = [row for one in rows[:6] for row in run("t5-1.1", [one], **beams)]
        assert run("t5-1.1", rows[:6], batch_size=2, **beams) == alone


@pytest.mark.wide
def test_a_stream_of_lengths_compiles_few_programs() -> None:
    """As many for each width of sources (16, 32, 64) as for one."""
    run("t5-1.0", rows_of((9,) * 12), batch_size=4)
    first = drivers.compiled()
    run("t5-1.0", rows_of((17,) * 12), batch_size=4)
    each = drivers.compiled() - first
    run("t5-1.0", rows_of((48,) * 12), batch_size=4)
    assert drivers.compiled() == first + 2 * each and each <= 8
    for seed in range(3):
        lengths = np.random.default_rng(seed).permutation(np.repeat([2, 18, 34], 4) + np.arange(12))
        run("t5-1.0", rows_of(tuple(lengths.tolist()), seed), batch_size=4)
    assert drivers.compiled() == first + 2 * each


@pytest.mark.wide
def test_served_sources_are_as_alone() -> None:
    rows = rows_of(LENGTHS[:6])
    options: dict[str, Any] = dict(max_new_tokens=6, eos_token_id=[], no_repeat_ngram_size=1, forced_bos_token_id=-1,
                                   forced_eos_token_id=[], algorithm=dx.Autoregressive())
    whole = EncoderText.of(rows)
    items = [{"prompt": [], "inputs": EncoderText(tokens=whole.tokens[i:i + 1], length=whole.length[i:i + 1])}
             for i in range(len(rows))]
    found = {one.index: one.result for one in dx.serve(loaded("t5-1.1"), items, slots=2, **options)}
    assert [found[i].row(0).tolist() for i in range(len(rows))] == run("t5-1.1", rows)
