"""The table of slow tests."""

from pathlib import Path

from tests.conftest import slow_tests

HERE = Path(__file__).parent


def test_each_slow_test_is_there() -> None:
    for tier, test in slow_tests():
        path, _, name = test.partition("::")
        assert tier in ("wide", "full")
        assert f"def {name.partition('[')[0]}(" in (HERE / path).read_text(), test
    names = [test for _, test in slow_tests()]
    assert names == sorted(set(names))
