"""What results say of lines: ids, log-probabilities, and answers in the form of OpenAI's API."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

import decodax as dx
from decodax import jobs
from decodax.io.load import LM
from decodax.jobs import store
from decodax.jobs.batch import spelled
from tests.jobs.written import results, written


@pytest.mark.parametrize("form", store.FORMATS)
def test_answers_to_openais_api_are_there_when_it_is_called_again(lm: LM, tmp_path: Path, form: str) -> None:
    source = written(tmp_path / "in.jsonl", [{"custom_id": f"r{i}", "url": "/v1/completions", "body": {
        "prompt": "x", "max_tokens": 2, "logprobs": 1}} for i in range(5)])
    first = jobs.run(lm, source, tmp_path / "out", form=form, part=2)
    again = jobs.run(lm, source, tmp_path / "out", form=form, part=2)
    assert (first.finished, again.before, again.finished) == (5, 5, 0)
    if form == "parquet":
        found = pq.read_table(tmp_path / "out").to_pylist()
        assert sorted(row["custom_id"] for row in found) == [f"r{i}" for i in range(5)]
        noted = found[0]["response"]["body"]["choices"][0]["logprobs"]
        assert len(noted["tokens"]) == 2 and noted["top_logprobs"][0][0][1] <= 0


def test_ids_keep_their_types(lm: LM, tmp_path: Path) -> None:
    """Also as Parquet; the randomness is that of the id as text."""
    source = written(tmp_path / "in.jsonl", [{"id": i, "prompt": "x"} for i in (7, 8)])
    jobs.run(lm, source, tmp_path / "out", max_new_tokens=2, temperature=0.8)
    jobs.run(lm, source, tmp_path / "parquet", form="parquet", max_new_tokens=2, temperature=0.8)
    wanted = dx.generate(lm, ["x"] * 2, request_ids=[jobs.address("7"), jobs.address("8")], max_new_tokens=2,
                         temperature=0.8)
    for found in (results(tmp_path / "out"), pq.read_table(tmp_path / "parquet").to_pylist()):
        assert {row["id"]: row["text"] for row in found} == dict(zip((7, 8), wanted.text or [], strict=True))
    again = jobs.run(lm, source, tmp_path / "parquet", form="parquet", max_new_tokens=2, temperature=0.8)
    assert (again.before, again.finished) == (2, 0)


def test_bytes_of_tokens_that_are_parts_of_characters(lm: LM) -> None:
    """Together they are the bytes of the text, and no two tokens have one name."""
    assert lm.tokenizer is not None
    written = [spelled(lm, token) for token in lm.tokenizer.encode("é漢 a", add_special_tokens=False)]
    assert bytes(byte for _, data in written for byte in data).decode() == "é漢 a"
    assert "bytes:\\xe6" in {text for text, _ in written}
    assert len({text for text, _ in written}) == len({tuple(data) for _, data in written})
