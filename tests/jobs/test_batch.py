"""Batch jobs: what goes in, what comes out, and that nothing is lost or done twice."""

import errno
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import decodax as dx
from decodax import jobs
from decodax.cli import main
from decodax.io.load import LM
from decodax.jobs import store
from decodax.jobs.lines import rows
from tests.jobs.written import results, written
from tests.matrix import often

TEXTS = ["def area(", "import ", "for i in", "return x", "class A", "x = 1", "if a:", "print("]
LINES: list[Any] = [{"id": f"q-{i}", "prompt": text, "options": {"max_new_tokens": 3 + i}, "label": i * i}
                    for i, text in enumerate(TEXTS)]


def errors(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(directory.glob("_errors-*.jsonl")) for line in path.open()]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return written(tmp_path / "in.jsonl", LINES)


def test_each_line_gets_what_generate_gives_its_prompt(lm: LM, source: Path, tmp_path: Path) -> None:
    found = jobs.run(lm, source, tmp_path / "out", slots=2, fields=jobs.Fields(keep=["label"]), tokens=True,
                     temperature=0.8, seed=4, part=3)
    assert (found.finished, found.failed, found.before) == (8, 0, 0) and found.tokens == sum(range(3, 11))
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "_manifest.json", "part-000-00000.jsonl", "part-000-00001.jsonl", "part-000-00002.jsonl"]
    by_id = {row["id"]: row for row in results(tmp_path / "out")}
    for i, text in enumerate(TEXTS):
        alone = dx.generate(lm, text, max_new_tokens=3 + i, temperature=0.8, seed=4,
                            request_ids=[jobs.address(f"q-{i}")])
        assert alone.text is not None
        assert by_id[f"q-{i}"] == {
            "id": f"q-{i}", "label": i * i, "text": alone.text[0], "status": alone.status[0].name.lower(),
            "prompt_tokens": len(lm.tokenizer.encode(text)) if lm.tokenizer else 0, "new_tokens": 3 + i,
            "tokens": alone.row(0).tolist()}


def test_a_second_call_does_what_is_missing(lm: LM, source: Path, tmp_path: Path) -> None:
    """And no order, selection or number of processes of the input changes an answer."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    jobs.run(lm, source, whole, slots=4, temperature=0.8)
    jobs.run(lm, written(tmp_path / "some.jsonl", LINES[5:2:-1]), parts, temperature=0.8)
    again = jobs.run(lm, source, parts, temperature=0.8, processes=2, process=1)
    other = jobs.run(lm, source, parts, temperature=0.8, processes=2)
    assert again.before + other.before == 3 and again.finished + other.finished == 5
    assert again.finished and other.finished
    key = lambda row: row["id"]
    assert sorted(results(parts), key=key) == sorted(results(whole), key=key)
    assert jobs.run(lm, source, parts, temperature=0.8).finished == 0


def test_bad_lines_go_to_a_file_and_the_job_goes_on(lm: LM, tmp_path: Path) -> None:
    source = written(tmp_path / "in.jsonl", [
        "{broken", LINES[0], "", LINES[0], {"id": "none"}, {"id": "deep", "prompt": {"a": 1}}, [1], "\"a text\"",
        {"id": "bad", "prompt": "x", "options": {"temperature": -1}}, {"id": 7, "prompt": "y", "options": 3},
        {"id": "typo", "prompt": "x", "options": {"temprature": 1}}, {"prompt": [1, 2, 3]}])
    found = jobs.run(lm, source, tmp_path / "out", max_new_tokens=2)
    assert {row["id"] for row in results(tmp_path / "out")} == {"q-0", "line-8", "line-12"}
    said = {row["line"]: row["error"] for row in errors(tmp_path / "out")}
    for line, message in ((1, "not JSON in UTF-8"), (4, "id 'q-0' occurs more than once"),
                          (5, "has no 'messages' or 'prompt' or 'text'"), (6, "prompt: got {'a': 1}, takes a text"),
                          (7, "got list, takes an object with a prompt, or a text"), (9, "temperature: got -1"),
                          (10, "options: got int, takes an object"), (11, "temprature: unknown argument")):
        assert said.pop(line).startswith(message), line
    assert not said and found.failed == 8
    # they are tried again, and what can be answered now is
    written(source, [LINES[0], {"id": "none", "prompt": "now"}])
    assert jobs.run(lm, source, tmp_path / "out", max_new_tokens=2).finished == 1
    assert errors(tmp_path / "out") == []


@pytest.mark.wide
def test_requests_to_openais_api_are_answered_in_its_form(lm: LM, tmp_path: Path) -> None:
    body = {"model": "gpt", "prompt": "def f(", "max_tokens": 4, "temperature": 0, "n": 2, "logprobs": 2, "stop": None}
    line = lambda name, body, url="/v1/completions": {"custom_id": name, "method": "POST", "url": url, "body": body}
    source = written(tmp_path / "in.jsonl", [
        line("a", body), line("b", {**body, "response_format": {}}), line("c", body, "/v1/embeddings"),
        line("d", {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 3, "logprobs": True,
                   "top_logprobs": 1}, "/v1/chat/completions"), line("e", {**body, "stream": True}),
        line("f", {**body, "n": 1, "logprobs": None, "max_tokens": 9, "response_format": {
            "type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "boolean"}}}}),
        line("g", {**body, "n": 1, "logprobs": None, "max_tokens": 9, "structured_outputs": {"choice": ["on", "off"]}}),
        line("h", {**body, "response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}})])
    jobs.run(lm, source, tmp_path / "out")
    by_id = {row["custom_id"]: row for row in results(tmp_path / "out")}
    response = by_id["a"]["response"]
    assert response["status_code"] == 200 and by_id["a"]["error"] is None
    alone = dx.generate(lm, "def f(", max_new_tokens=4, num_samples=2, logprobs=2, temperature=0)
    choices = response["body"]["choices"]
    assert [choice["text"] for choice in choices] == alone.text
    assert [choice["finish_reason"] for choice in choices] == ["length"] * 2
    assert alone.logprobs is not None
    assert choices[0]["logprobs"]["token_logprobs"] == pytest.approx(alone.logprobs.raw[0].tolist(), abs=1e-5)
    usage = response["body"]["usage"]
    assert usage["completion_tokens"] == 8 and usage["total_tokens"] == 8 + usage["prompt_tokens"]
    said = {row["id"]: row["error"] for row in errors(tmp_path / "out")}
    assert said["b"] == ("response_format: got {}, takes {'type': 'json_schema', 'json_schema': {'schema': ...}} or "
                         "{'type': 'text'}")
    assert "#/not: this keyword is not supported" in said["h"]
    text = lambda name: by_id[name]["response"]["body"]["choices"][0]["text"]
    assert text("f") in ("true", "false") and text("g") in ("on", "off")
    assert said["c"].startswith("url: got '/v1/embeddings', takes /v1/chat/completions or /v1/completions")
    assert said["e"].startswith("body: asks for a stream")
    chat = by_id["d"]["response"]["body"]
    assert chat["object"] == "chat.completion" and chat["choices"][0]["message"]["role"] == "assistant"
    noted = chat["choices"][0]["logprobs"]["content"]
    assert len(noted) == 3 == chat["usage"]["completion_tokens"] and len(noted[0]["top_logprobs"]) == 1
    with pytest.raises(ValueError, match="keep: got 'status', which is a field of results"):
        jobs.Fields(keep=["label", "status"])


def test_parquet_and_datasets_go_in_and_parquet_comes_out(lm: LM, tmp_path: Path) -> None:
    table = pa.Table.from_pylist([{"id": f"q-{i}", "question": text} for i, text in enumerate(TEXTS)])
    (tmp_path / "parquet").mkdir()
    pq.write_table(table.slice(0, 5), tmp_path / "parquet" / "a.parquet")
    pq.write_table(table.slice(5), tmp_path / "parquet" / "b.parquet")
    data = tmp_path / "dataset"
    data.mkdir()
    with pa.OSFile(str(data / "data-00000-of-00001.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as out:
        out.write_table(table)
    (data / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    assert list(rows(data)) == list(rows(tmp_path / "parquet"))
    found = jobs.run(lm, tmp_path / "parquet", tmp_path / "out", form="parquet", part=5, max_new_tokens=3,
                     fields=jobs.Fields(prompt="question"))
    assert found.finished == 8
    out = pq.read_table(tmp_path / "out")
    assert sorted(out["id"].to_pylist()) == sorted(f"q-{i}" for i in range(8)) and "text" in out.column_names
    assert jobs.run(lm, data, tmp_path / "out", form="parquet", part=5, max_new_tokens=3,
                    fields=jobs.Fields(prompt="question")).before == 8


def test_each_line_is_of_one_process(lm: LM, tmp_path: Path) -> None:
    """Good ones and bad ones, with an id and without."""
    bad: list[Any] = [{"prompt": {}}, {"id": "b", "prompt": {}}, {"id": [], "prompt": "x"}, "{broken", 3,
                      {"custom_id": "c", "body": {}}, {"prompt": "x", "options": {"temperature": -1}},
                      {"id": "\ud800", "prompt": "x"}, {"prompt": "\ud800"}]
    source = written(tmp_path / "in.jsonl", [*bad * 2, *({"prompt": "x"} for _ in range(6))])
    found = [jobs.run(lm, source, tmp_path / "out", max_new_tokens=2, process=i, processes=3) for i in range(3)]
    assert sorted(row["line"] for row in errors(tmp_path / "out")) == list(range(1, 19))
    assert sum(one.failed for one in found) == 18 and sum(one.finished for one in found) == 6
    assert sum(one.finished + one.failed > 0 for one in found) == 3


def test_the_time_of_a_line_ends_its_text(lm: LM, tmp_path: Path) -> None:
    """And an option of a line that is none is refused: neither its prompt nor its address is an option."""
    source = written(tmp_path / "in.jsonl", [
        {"id": "a", "prompt": "x", "options": {"max_time": 1e-6, "max_new_tokens": 90}}, {"id": "b", "prompt": "x"},
        {"id": "before", "prompt": "x", "options": {"max_time": 1e-9, "regex": "[a-z]+"}},
        {"id": "c", "prompt": "x", "options": {"prompt": "y"}}, {"id": "d", "prompt": "x", "options": {"id": "y"}},
        {"id": "e", "prompt": "x", "options": {"request_ids": [3]}},
        {"id": "f", "prompt": "x", "options": {"slots": 3}}])
    found = jobs.run(lm, source, tmp_path / "out", max_new_tokens=3)
    assert (found.finished, found.failed, found.stopped) == (3, 4, False)
    by_id = {row["id"]: row for row in results(tmp_path / "out")}
    assert by_id["a"]["status"] == "time" and by_id["a"]["new_tokens"] < 90 and by_id["b"]["new_tokens"] == 3
    assert by_id["before"]["status"] == "time" and by_id["before"]["new_tokens"] == 0
    said = {row["id"]: row["error"].partition(":")[0] for row in errors(tmp_path / "out")}
    assert said == {"c": "prompt", "d": "id", "e": "request_ids", "f": "slots"}


def test_a_file_in_the_place_of_the_results_is_an_error_that_names_it(lm: LM, source: Path) -> None:
    with pytest.raises(ValueError, match=f"^{source}: takes a directory for results"):
        jobs.run(lm, source, source)


def test_a_source_that_breaks_is_an_error_after_what_it_gave(lm: LM, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for name in "ab":
        pq.write_table(pa.Table.from_pylist([{"id": f"{name}{i}", "prompt": "x"} for i in range(3)]),
                       data / f"{name}.parquet")
    (data / "b.parquet").write_bytes(b"PAR1 and nothing else PAR1")
    with pytest.raises(Exception, match=r"[Pp]arquet"):
        jobs.run(lm, data, tmp_path / "out", max_new_tokens=2)
    assert sorted(row["id"] for row in results(tmp_path / "out")) == ["a0", "a1", "a2"]


def test_parquet_holds_lines_of_several_samples(lm: LM, tmp_path: Path) -> None:
    source = written(tmp_path / "in.jsonl", [LINES[0], {"id": "two", "prompt": "x", "options": {"num_samples": 2}}])
    jobs.run(lm, source, tmp_path / "out", form="parquet", max_new_tokens=2)
    by_id = {row["id"]: row for row in pq.read_table(tmp_path / "out").to_pylist()}
    assert json.loads(by_id["two"]["new_tokens"]) == [2, 2] and json.loads(by_id["q-0"]["new_tokens"]) == 3
    assert len(json.loads(by_id["two"]["text"])) == 2


def test_a_process_that_is_gone_leaves_its_results_to_the_first(lm: LM, source: Path, tmp_path: Path) -> None:
    """And each bad line is one process's to write down."""
    source.write_text(source.read_text() + '{"id": "bad", "prompt": {}}\n{broken\n')
    options: dict[str, Any] = dict(max_new_tokens=3, processes=2)
    jobs.run(lm, source, tmp_path / "out", process=1, **options)
    part = tmp_path / "out" / "part-001-00000.jsonl"
    part.rename(part.with_name(".part-001-00000.log"))      # as if it had been killed before the last step
    with (tmp_path / "out" / ".part-001-00000.log").open("ab") as file:
        file.write(b'{"id": "torn')
    jobs.run(lm, source, tmp_path / "out", **options)
    assert len(errors(tmp_path / "out")) == 2 and not part.exists()
    found = jobs.run(lm, source, tmp_path / "out", max_new_tokens=3)        # one process
    assert found.before == 8 and part.exists() and not list((tmp_path / "out").glob(".part*"))
    assert sorted(row["id"] for row in results(tmp_path / "out")) == sorted(f"q-{i}" for i in range(8))
    assert len(errors(tmp_path / "out")) == 2


def test_results_of_another_job_are_left_alone(lm: LM, source: Path, tmp_path: Path) -> None:
    jobs.run(lm, source, tmp_path / "out", max_new_tokens=2)
    before = results(tmp_path / "out")
    other = LM(model=lm.model, params=lm.params, vocab_size=lm.vocab_size, tokenizer=lm.tokenizer, name="other")
    for call in (lambda: jobs.run(lm, source, tmp_path / "out", max_new_tokens=2, temperature=0.5),
                 lambda: jobs.run(other, source, tmp_path / "out", max_new_tokens=2),
                 lambda: jobs.run(lm, source, tmp_path / "out", max_new_tokens=2, form="parquet")):
        with pytest.raises(ValueError, match=r"out: holds results of another job \("):
            call()
    with pytest.raises(ValueError, match=r"holds 'in.jsonl' and no _manifest.json, so it is not a job's"):
        jobs.run(lm, source, tmp_path)
    assert results(tmp_path / "out") == before


@pytest.mark.parametrize("form", store.FORMATS)
def test_a_write_that_fails_or_is_torn_loses_and_doubles_nothing(lm: LM, source: Path, tmp_path: Path, form: str,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk in the middle of a line; and a process that ends before, between and behind the steps that give a
    part its name."""
    options: dict[str, Any] = dict(max_new_tokens=3, part=3, form=form)
    real, out = os.write, tmp_path / "out"
    budget = 150

    def full(file: int, data: bytes) -> int:
        nonlocal budget
        if budget < len(data):
            real(file, data[:budget])
            raise OSError(errno.ENOSPC, "No space left on device")
        budget -= len(data)
        return real(file, data)

    with monkeypatch.context() as patch:
        patch.setattr(store.os, "write", full)
        with pytest.raises(OSError, match="No space left"):
            jobs.run(lm, source, out, **options)

    class Killed(BaseException):
        pass

    def die(*args: Any, **kwargs: Any) -> None:
        raise Killed

    # as if the process had been killed at each of these calls
    for name in {"jsonl": ("write", "fsync", "replace"), "parquet": ("write", "fsync", "replace", "unlink")}[form]:
        with monkeypatch.context() as patch:
            patch.setattr(store.os if name != "unlink" else store.Path, name, die)
            with pytest.raises(Killed):
                jobs.run(lm, source, out, **options)
    if form == "jsonl":
        [log] = out.glob(".part-*.log")         # Parquet's last kill left a whole part and its log
        with log.open("ab") as file:
            file.write(b'{"id": "q-7", "te')
    jobs.run(lm, source, out, **options)
    ids = pq.read_table(out)["id"].to_pylist() if form == "parquet" else [row["id"] for row in results(out)]
    assert sorted(ids) == sorted(f"q-{i}" for i in range(8))
    assert not list(out.glob(".part-*"))


@pytest.mark.wide
@pytest.mark.parametrize("kills", often([1], [1, 20]))
def test_a_job_that_is_killed_goes_on(tiny_model: Path, tmp_path: Path, kills: int) -> None:
    lines = [{"id": f"q{i}", "prompt": f"def f{i}(", "options": {"max_new_tokens": 10 + i % 40}} for i in range(400)]
    source = written(tmp_path / "in.jsonl", lines)
    command = [sys.executable, "-m", "decodax", "batch", "-i", str(source), "-o", str(tmp_path / "out"),
               "-m", str(tiny_model), "--part-lines", "60", "--quiet", "--temperature", "0.9"]
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    chance = random.Random(0)
    for turn in range(kills):
        process = subprocess.Popen(command, **quiet)      # type: ignore[call-overload]
        # at first when some results are there, later at any moment
        end = time.monotonic() + 60
        while turn == 0 and process.poll() is None and time.monotonic() < end:
            if sum(path.stat().st_size for path in tmp_path.glob("out/.part*")) > 2000:
                break
            time.sleep(0.02)
        time.sleep(chance.random() * (0.3 if turn == 0 else 6))
        process.send_signal(signal.SIGKILL)
        ended = process.wait()
        if turn == 0:               # in the middle, with some results and not all
            held = sum(path.read_bytes().count(b"\n") for path in (tmp_path / "out").rglob("*") if path.is_file())
            assert ended == -signal.SIGKILL and 0 < held < 400
    assert main(command[3:]) == 0
    found = {row["id"]: row["text"] for row in results(tmp_path / "out")}
    assert len(results(tmp_path / "out")) == len(found) == 400
    request = dx.generate(str(tiny_model), [line["prompt"] for line in lines[:40]], temperature=0.9, max_new_tokens=[
        line["options"]["max_new_tokens"] for line in lines[:40]],      # type: ignore[index]
        request_ids=[jobs.address(line["id"]) for line in lines[:40]])
    assert request.text == [found[str(line["id"])] for line in lines[:40]]


def test_the_command_line(tiny_model: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["batch", "-i", str(source), "-o", str(tmp_path / "out"), "-m", str(tiny_model), "--keep", "label"]
    assert main(command) == 0
    assert "[8 finished, 0 failed: 48 tokens in" in capsys.readouterr().err
    source.write_text(source.read_text() + "{\n")
    assert main(command) == 1
    assert "1 line failed: see" in capsys.readouterr().err
    for more, message in (([*command, "--system", "x"], "--system goes with --chat"),
                          ([*command, "--process", "1"], "--process and --processes go together"),
                          ([*command, "--process", "2", "--processes", "2"], "process: got 2, takes"),
                          ([*command, "--top-p", "2"], "top_p: got 2"),
                          (["batch", "-i", "nowhere", "-o", "x"], "nowhere: there is no such file")):
        assert main(more) in (1, 2)
        assert message in capsys.readouterr().err


def test_a_job_says_what_it_compiles_where_results_stand_and_takes_a_mesh(
        tiny_model: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["batch", "-i", str(source), "-o", str(tmp_path / "out"), "-m", str(tiny_model), "--mesh"]
    assert main([*command, "2x1"]) == 0
    said = capsys.readouterr().err
    assert f"{tmp_path / 'out'}/.part-000-*.log as they finish" in said and "0 of 8, compiling" in said
    assert [row["id"] for row in sorted(results(tmp_path / "out"), key=lambda row: row["id"])] == [
        f"q-{i}" for i in range(8)]
    for mesh, message in (("9x1", "--mesh: got 9x1, which takes 9 devices; this process has 8"),
                          ("2", "--mesh: takes DATAxMODEL"), ("0x2", "--mesh: takes DATAxMODEL")):
        assert main([*command, mesh]) == 2
        assert message in capsys.readouterr().err


def test_time_that_is_out_leaves_the_rest_to_the_next_call(lm: LM, source: Path, tmp_path: Path) -> None:
    found = jobs.run(lm, source, tmp_path / "out", max_time=1e-6)
    assert found.stopped and found.finished == 0
    assert jobs.run(lm, source, tmp_path / "out").finished == 8


@pytest.mark.wide
def test_a_pipe_that_stays_open_is_read_line_by_line(tmp_path: Path) -> None:
    """What came is answered, and the process ends by itself although a thread still waits for the pipe."""
    code = ("import sys, decodax as dx; from decodax import jobs; from tests.caches.small import SMALL; "
            "jobs.run(SMALL, '-', sys.argv[1], slots=2, max_new_tokens=3, report=lambda found: sys.exit('answered'))")
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "out")], stdin=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stderr is not None
    process.stdin.write(json.dumps({"id": 7, "prompt": [3, 4]}) + "\n")
    process.stdin.flush()
    assert "answered" in process.stderr.read() and process.wait(60) == 1
    assert (tmp_path / "out" / "part-000-00000.jsonl").exists() or list((tmp_path / "out").glob(".part*"))
    process.stdin.close()


@pytest.mark.full
def test_two_processes_that_know_each_other_share_the_lines(tiny_model: Path, tmp_path: Path) -> None:
    source = written(tmp_path / "in.jsonl", [{"id": f"q{i}", "prompt": f"def f{i}("} for i in range(30)])
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "decodax", "batch", "-i", str(source), "-o", str(tmp_path / "out"), "-m",
               str(tiny_model), "-n", "5", "--distributed", address, "--processes", "2", "--process"]
    both = [subprocess.Popen([*command, str(i)], stderr=subprocess.PIPE, text=True) for i in range(2)]
    said = [process.communicate(timeout=120)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert sorted(row["id"] for row in results(tmp_path / "out")) == sorted(f"q{i}" for i in range(30))
    assert {path.name for path in (tmp_path / "out").glob("part-*")} == {"part-000-00000.jsonl", "part-001-00000.jsonl"}
