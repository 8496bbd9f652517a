"""Problems with checkable answers: seeds, splits, checkers, tokens."""

import doctest
import re

import pytest

from decodax.bench.problems import puzzles as problems
from decodax.bench.problems.puzzles import TASKS, Problem
from recipes.options import CANVAS, PROBLEMS

EACH = sorted(TASKS)


def test_examples_in_the_docstrings_hold():
    assert doctest.testmod(problems).failed == 0


def test_the_options_of_training_name_the_tasks():
    assert PROBLEMS == list(TASKS) and problems.CANVAS == CANVAS


@pytest.mark.parametrize("task", EACH)
def test_a_seed_decides_the_problems_and_more_begin_with_fewer(task):
    few, many = problems.problems(task, 5, seed=1), problems.problems(task, 12, seed=1)
    assert few == many[:5] and len({p.prompt for p in many}) == 12
    assert few != problems.problems(task, 5, seed=2)


@pytest.mark.parametrize("task", EACH)
def test_answers_are_right_and_fit(task):
    for problem in problems.problems(task, 40) + problems.problems(task, 40, held=False):
        assert problem.correct(problem.answer)
        assert not problem.correct("") and not problem.correct(problem.answer + problem.answer[-1])
        assert len(problems.encode(problem.prompt)) <= problems.LONGEST_PROMPT
        assert 1 <= len(problems.encode(problem.answer)) <= problems.CANVAS


@pytest.mark.parametrize("task", EACH)
def test_training_never_meets_a_held_out_prompt(task):
    assert all(problems.held_out(p.prompt) for p in problems.problems(task, 30))
    assert not any(problems.held_out(p.prompt) for p in problems.problems(task, 200, held=False))


@pytest.mark.parametrize(("prompt", "right", "wrong"), [
    ("copy BCA=", ["BCA"], ["BC", "BCB", "ACB"]),
    ("reverse BCA=", ["ACB"], ["BCA", "ACBA"]),
    ("sort BCAC=", ["ABCC"], ["ABC", "BACC", "ABBC"]),
    ("pick BCA:231=", ["CAB"], ["BCA", "CA", "ABC"]),
    ("replace BCB:BA=", ["ACA"], ["ACB", "BCB"]),
    ("shuffle BCA=", ["CBA", "ABC", "CAB"], ["BCA", "BCC", "BC", "BCAB"]),
    ("add 095+017=", ["0112"], ["0113", "112", "1112", "B"]),
    ("brackets (__}=", ["(){}"], ["(){)", "({)}", "({}", "((}}", "[]{}"]),
    ("brackets ____=", ["()()", "[{}]", "{}[]"], ["(()", "))((", "([)]", "()"]),
    ("sudoku 1___341____2_3_1=", [], ["1" * 16, "1234341221434321"[:15]]),
])  # fmt: skip
def test_checkers_take_right_answers_and_no_others(prompt, right, wrong):
    problem = Problem(prompt.split()[0], prompt, "")
    assert all(map(problem.correct, right))
    assert not any(map(problem.correct, wrong))


def test_a_sudoku_has_one_solution_which_keeps_its_clues():
    for problem in problems.problems("sudoku", 20):
        clues = problem.prompt.removeprefix("sudoku ").removesuffix("=")
        rows = [problem.answer[i:i + 4] for i in range(0, 16, 4)]
        boxes = [rows[r][c:c + 2] + rows[r + 1][c:c + 2] for r in (0, 2) for c in (0, 2)]
        for part in [*rows, *zip(*rows, strict=True), *boxes]:
            assert set(part) == set("1234")
        assert 6 <= clues.count("_") <= 10
        others = [g for g in problems.sudoku_grids() if all(c in ("_", x) for c, x in zip(clues, g, strict=True))]
        assert others == [problem.answer]
        swapped = problem.answer.translate(str.maketrans("12", "21"))
        assert not problem.correct(swapped)


def test_the_tokenizer_agrees_with_the_fast_encoding_and_refuses_other_texts():
    tokenizer = problems.tokenizer()
    assert tokenizer.get_vocab_size() == len(problems.vocabulary())
    for task in EACH:
        for problem in problems.problems(task, 10):
            for text in (problem.prompt, problem.answer):
                assert tokenizer.encode(text).ids == problems.encode(text)
            assert tokenizer.decode(problems.encode(problem.answer)) == problem.answer
    with pytest.raises(Exception, match="Missing"):
        tokenizer.encode("sort abc")


@pytest.mark.parametrize(("given", "message"), [(("nope", 1), "task: got 'nope'"), (("copy", 0), "count: got 0")])
def test_bad_arguments_are_refused_by_name(given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        problems.problems(*given)


def test_too_many_problems_are_refused() -> None:
    from decodax.bench.problems import numerals

    assert len(set(numerals.problems(58, digits=3))) == 58
    with pytest.raises(ValueError, match=r"^count: got 60, but there are only 58 such problems"):
        numerals.problems(60, digits=3)
