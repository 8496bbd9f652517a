"""The table of slow tests."""

from pathlib import Path

import pytest

from tests.conftest import keep_one_tier, slow_tests

HERE = Path(__file__).parent


def test_each_slow_test_is_there() -> None:
    for tier, test in slow_tests():
        path, _, name = test.partition("::")
        assert tier in ("wide", "full")
        assert f"def {name.partition('[')[0]}(" in (HERE / path).read_text(), test
    names = [test for _, test in slow_tests()]
    assert names == sorted(set(names))


@pytest.mark.parametrize(("marks", "kept"), [
    ([], set()), (["wide"], {"wide"}), (["full"], {"full"}), (["wide", "full"], {"full"}),
    (["full", "wide"], {"full"})])
def test_a_full_test_is_not_wide_too(request: pytest.FixtureRequest, marks: list[str], kept: set[str]) -> None:
    for mark in marks:
        request.node.add_marker(mark)
    keep_one_tier([request.node])
    assert {mark.name for mark in request.node.iter_markers()} & {"wide", "full"} == kept


def test_parameters_that_a_wide_test_leaves_out_run_by_default(request: pytest.FixtureRequest,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    request.node.add_marker(pytest.mark.wide(but=("a",)))
    monkeypatch.setattr(request.node, "name", "test_of_something[a]")
    keep_one_tier([request.node])
    assert request.node.get_closest_marker("wide") is None
