"""A worker of a fleet answers what `generate` answers, however often and wherever a batch is run."""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import decodax as dx
from decodax import jobs
from decodax.io.load import LM

TEXTS = ["def area(", "import ", "for i in", "return x", "class A", "x = 1", "if a:", "print("]
COUNT = 40


def test_a_batch_of_columns_gets_what_generate_gives(lm: LM) -> None:
    options: dict[str, Any] = dict(temperature=0.8, max_new_tokens=6)
    worker = jobs.Worker(lm, slots=3, fields=jobs.Fields(keep=["label"]), tokens=True, **options)
    batch = {"id": np.arange(8), "prompt": np.array(TEXTS, object), "label": np.arange(8) / 8}
    found = worker(batch).to_pylist()
    wanted = dx.generate(lm, TEXTS, request_ids=[jobs.address(str(i)) for i in range(8)], **options)
    assert wanted.text is not None
    for i, row in enumerate(found):
        assert row == {"id": i, "label": i / 8, "text": wanted.text[i], "status": "length", "new_tokens": 6,
                       "prompt_tokens": row["prompt_tokens"], "tokens": wanted.row(i).tolist(), "error": None}
    # of another division, in another order
    again = worker({name: column[[5, 2]] for name, column in batch.items()}).to_pylist()
    assert again == [found[5], found[2]]


def test_rows_that_cannot_be_answered_say_why(lm: LM) -> None:
    worker = jobs.Worker(lm, max_new_tokens=3, num_samples=2)
    ids = np.array([np.arange(3), None, np.array([5, 6])], object)
    found = worker({"id": ["a", "b", None], "prompt": ids}).to_pylist()
    assert found[0]["status"] == ["length"] * 2 and found[1]["status"] is None
    assert found[0]["error"] is None and found[1]["error"].startswith("has no 'messages' or 'prompt' or 'text'")
    assert found[2]["error"] == "has no 'id', which addresses its randomness" and found[2]["id"] is None
    with pytest.raises(ValueError, match="temperature: got -1"):
        jobs.Worker(lm, temperature=-1)


def test_the_time_of_a_row_that_is_out_before_it_begins_ends_its_text(lm: LM) -> None:
    late, = jobs.Worker(lm, max_new_tokens=3)({"id": [7], "prompt": ["x"], "options": [
        {"max_time": 1e-9, "regex": "[a-z]+"}]}).to_pylist()
    assert (late["status"], late["new_tokens"], late["text"], late["error"]) == ("time", 0, "", None)


def test_a_block_in_which_all_rows_fail_has_the_columns_of_any_other(lm: LM) -> None:
    worker = jobs.Worker(lm, fields=jobs.Fields(keep=["label"]), max_new_tokens=2, logprobs=1)
    api = lambda prompt: {"custom_id": ["a"], "body": [{"prompt": prompt, "max_tokens": 2}], "url": ["/v1/completions"]}
    plain = [worker({"id": [7], "label": [0.5], "prompt": [prompt]}) for prompt in ("x", {"a": 1})]
    body = [jobs.Worker(lm, max_new_tokens=2)(api(prompt)) for prompt in ("x", {"a": 1})]
    for good, failed in (plain, body):
        assert good.schema == failed.schema
        assert good["error"].to_pylist() == [None] and failed["error"].to_pylist()[0].startswith("prompt: got {'a': 1}")
    assert plain[1]["id"].to_pylist() == [7]


def test_options_in_filled_columns_of_numpy_arrays(lm: LM) -> None:
    options = [{"max_new_tokens": 2.0, "temperature": None, "banned_phrases": np.array(["q"], object)},
               {"max_new_tokens": float("nan"), "temperature": 0.5, "banned_phrases": None}]
    found = jobs.Worker(lm, max_new_tokens=4)({"id": np.arange(2), "prompt": np.array(["x", "y"], object),
                                               "options": np.array(options, object)}).to_pylist()
    assert [(row["id"], row["new_tokens"], row["error"]) for row in found] == [(0, 2, None), (1, 4, None)]


class Mortal(jobs.Worker):
    """A worker that is killed in its second batch, once."""

    def __init__(self, marks: str, **options: Any):
        super().__init__(**options)
        self.marks, self.batches = Path(marks), 0

    def __call__(self, batch: Any) -> Any:
        self.batches += 1
        found = super().__call__(batch)
        with (self.marks / "calls").open("a") as file:
            file.write(f"{len(found)}\n")
        if self.batches == 2:
            try:
                (self.marks / "killed").touch(exist_ok=False)
            except FileExistsError:
                return found
            os.kill(os.getpid(), signal.SIGKILL)
        return found


@pytest.mark.full
def test_ray_writes_each_row_once_though_a_worker_is_killed(tiny_model: Path, tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")
    lines = [{"id": f"q{i}", "prompt": f"def f{i}("} for i in range(COUNT)]
    environment = {"env_vars": {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.getcwd()}}
    ray.init(num_cpus=2, include_dashboard=False, runtime_env=environment, log_to_driver=False)
    try:
        data = ray.data.from_items(lines, override_num_blocks=8)
        options = dict(marks=str(tmp_path), lm=str(tiny_model), temperature=0.8, max_new_tokens=5)
        data.map_batches(Mortal, batch_size=5, concurrency=2, fn_constructor_kwargs=options).write_parquet(
            str(tmp_path / "out"))
    finally:
        ray.shutdown()
    import pyarrow.parquet as pq
    found = {row["id"]: row["text"] for row in pq.read_table(tmp_path / "out").to_pylist()}
    assert (tmp_path / "killed").exists()
    assert sum(map(int, (tmp_path / "calls").read_text().split())) > COUNT      # some were run twice
    assert pq.read_table(tmp_path / "out").num_rows == len(found) == COUNT
    wanted = dx.generate(str(tiny_model), [line["prompt"] for line in lines], temperature=0.8, max_new_tokens=5,
                         request_ids=[jobs.address(line["id"]) for line in lines])
    assert wanted.text == [found[line["id"]] for line in lines]
