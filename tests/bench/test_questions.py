"""Questions of a file as tasks of a comparison."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import decodax as dx
from decodax.bench.questions import questions
from decodax.cli import main
from decodax.io.text import Tokenizer

ASKED: list[dict[str, Any]] = [
    {"question_id": 81, "category": "writing", "turns": ["write a text", "and now a short one"]},
    {"question_id": 91, "category": "roleplay", "turns": ["play a part"]},
    {"question_id": 161, "category": "translation", "turns": ["say it in French"]}]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "question.jsonl"
    path.write_text("".join(json.dumps(q) + "\n" for q in ASKED) + "\n")
    return path


def test_each_turn_is_a_prompt_after_the_answers_of_plain_decoding(file: Path, tiny_model: Path) -> None:
    lm = dx.load(tiny_model)
    assert lm.tokenizer is not None
    tasks = questions(file)
    assert [t.name for t in tasks] == ["mt_bench", "translation"]
    assert "2 questions of question.jsonl" in tasks[0].summary
    user: Any = lambda text: {"role": "user", "content": text}
    chat = lm.tokenizer.encode_chat
    first = chat([user("write a text")])
    answer: Any = dx.generate(lm, first, max_new_tokens=5, temperature=0.0).text
    second = chat([user("write a text"), {"role": "assistant", "content": answer[0]}, user("and now a short one")])
    wanted = [first, second, chat([user("play a part")])]
    for count in (1, 2, 3):     # more begin with fewer
        assert tasks[0].prompts(lm, count, 5, 0) == wanted[:count]
    plain: Any = dataclasses.replace(lm, tokenizer=Tokenizer(lm.tokenizer.backend))      # has no template
    both = "write a text\n\n{}\n\nand now a short one"
    assert tasks[0].prompts(plain, 3, 5, 0)[2] == plain.tokenizer.encode("play a part")
    answer = dx.generate(plain, "write a text", max_new_tokens=5, temperature=0.0).text
    assert tasks[0].prompts(plain, 2, 5, 0)[1] == plain.tokenizer.encode(both.format(answer[0]))
    for call, message in ((lambda: tasks[1].prompts(lm, 2, 5, 0), "prompts: got 2, takes at most 1 for translation"),
                          (lambda: tasks[1].prompts(lm, 1, 600, 0), r"question 161: has \d+ tokens and 600 new ones"),
                          (lambda: tasks[1].prompts(dataclasses.replace(lm, tokenizer=None), 1, 5, 0), "no tokenizer")):
        with pytest.raises(ValueError, match=message):
            call()


CATEGORIES = ("coding", "humanities", "math", "multilingual", "qa", "rag", "reasoning", "roleplay", "stem",
              "summarization", "writing")
"""The categories of SPEED-Bench. Rows in these tests have the fields that its card on Hugging Face lists
(nvidia/SPEED-Bench, README.md)."""


def row(category: str, *texts: str, **changes: Any) -> dict[str, Any]:
    """A row of SPEED-Bench, as it is published."""
    return {"question_id": f"{category:0<32}", "category": category, "sub_category": None, "turns": list(texts),
            "source": "somewhere", "src_id": "3", "difficulty": None, "multiturn": len(texts) > 1} | changes


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path


@pytest.mark.wide
def test_speed_benchs_categories_stay_apart(tmp_path: Path, tiny_model: Path) -> None:
    lm = dx.load(tiny_model)
    asked = [row(name, f"ask about {name}", *(["and again"] if name == "writing" else [])) for name in CATEGORIES]
    tasks = questions(lines(tmp_path / "qualitative.jsonl", asked))
    assert [task.name for task in tasks] == list(CATEGORIES)
    assert "greedy; 1 questions of qualitative.jsonl" in tasks[0].summary
    messages = lambda each: [{"role": "user", "content": text} for text in each["turns"]]
    prepared = [{key: x for key, x in each.items() if key != "turns"} | {"messages": messages(each)} for each in asked]
    again = questions(lines(tmp_path / "prepared.jsonl", prepared))
    import pyarrow
    import pyarrow.parquet
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(asked), tmp_path / "test.parquet")
    for other in (again, questions(tmp_path / "test.parquet")):
        assert [task.name for task in other] == list(CATEGORIES)
        for task, same in zip(tasks, other, strict=True):
            count = 2 if task.name == "writing" else 1
            assert task.prompts(lm, count, 3, 0) == same.prompts(lm, count, 3, 0)


def test_a_systems_message_comes_before_those_of_the_user(tmp_path: Path, tiny_model: Path) -> None:
    lm = dx.load(tiny_model)
    assert lm.tokenizer is not None
    said: list[dict[str, Any]] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is it"}]
    task, = questions(lines(tmp_path / "a.jsonl", [{"category": "qa", "messages": said}]))
    assert task.prompts(lm, 1, 3, 0) == [lm.tokenizer.encode_chat(said)]
    plain: Any = dataclasses.replace(lm, tokenizer=Tokenizer(lm.tokenizer.backend))
    assert task.prompts(plain, 1, 3, 0) == [plain.tokenizer.encode("be brief\n\nwhat is it")]


def test_questions_may_be_sampled(file: Path) -> None:
    assert questions(file)[0].sampling == {"temperature": 0.0}
    found = questions(file, temperature=0.7, top_p=0.9)[0]
    assert found.sampling == {"temperature": 0.7, "top_p": 0.9}
    assert found.summary == "temperature 0.7, top-p 0.9; 2 questions of question.jsonl"


@pytest.mark.parametrize(("changes", "message"), [
    (dict(turns=["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH\n\n{question}"]),
     "line 1: has a placeholder in place of a text"),
    (dict(messages=[{"role": "assistant", "content": "a"}]), "line 1: messages: got the roles assistant, takes those"),
    (dict(messages=[{"role": "system", "content": "a"}]), "line 1: messages: got the roles system, takes those"),
    (dict(messages=[{"role": "user", "content": ""}]), "or messages, a list of objects with role and content")])
def test_a_row_of_speed_bench_that_is_no_question_is_named(tmp_path: Path, changes: dict[str, Any],
                                                           message: str) -> None:
    with pytest.raises(ValueError, match=message):
        questions(lines(tmp_path / "a.jsonl", [row("qa", "what") | changes]))


@pytest.mark.parametrize(("text", "message"), [
    ("", "has no questions"), ('{"turns": ["a"]}\nnone\n', "line 2: Expecting value"),
    ('{"turns": []}\n', "line 1: takes an object with turns"), ('["a"]\n', "line 1: takes an object")])
def test_a_line_that_is_no_question_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "own.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        questions(tmp_path / "own.jsonl")


@pytest.mark.wide
def test_the_command_compares_them(file: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["compare", "prompt-lookup", "--model", str(tiny_model), "--batch", "1", "--prompts", "1", "--repeats", "1",
            "--new-tokens", "4"]
    assert main([*line, "--questions", str(file)]) == 0
    out = capsys.readouterr().out
    assert "mt_bench" in out and "translation" in out and "copy-edit" not in out and "prompt-lookup" in out
    with pytest.raises(SystemExit):
        main([*line, "--questions", str(file), "--task", "completion"])
    assert "not allowed with argument" in capsys.readouterr().err
    file.write_text("none")
    assert main([*line, "--questions", str(file)]) == 2 and "line 1: " in capsys.readouterr().err
    assert main([*line, "--questions", "nowhere.jsonl"]) != 0 and "nowhere.jsonl" in capsys.readouterr().err


def test_the_command_samples_them(file: Path, monkeypatch: pytest.MonkeyPatch, tiny_model: Path,
                                  capsys: pytest.CaptureFixture[str]) -> None:
    def named(lm: Any, contenders: Any, *, tasks: Any, **options: Any) -> None:
        raise ValueError("; ".join(f"{task.name} {dict(task.sampling)}" for task in tasks))

    monkeypatch.setattr("decodax.bench.compare.compare", named)
    line = ["compare", "prompt-lookup", "--model", str(tiny_model)]
    run = lambda *more: (main([*line, *more]), capsys.readouterr().err)[1]
    some = ["--temperature", "0.7", "--top-p", "0.9"]
    assert "mt_bench {'temperature': 0.7, 'top_p': 0.9}" in run("--questions", str(file), *some)
    assert "mt_bench {'temperature': 0.0}" in run("--questions", str(file))
    assert "sampled {'temperature': 0.7, 'top_p': 0.9}" in run("--task", "sampled", *some)
    assert "sampled {'temperature': 0.8, 'top_p': 0.95}" in run("--task", "sampled")
    assert "--top-p takes --temperature with --questions" in run("--questions", str(file), "--top-p", "0.9")
