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
