"""Each page of `docs/extending` holds on one screen, and its example runs as it stands, in a file of its own."""

import pytest

from decodax.common.registry import ALGORITHMS, CACHES, CONSTRAINTS, SEARCHES, SELECTS
from tests.extending.pages import DOCS, blocks_of, run_file

PAGES = sorted(path.stem for path in (DOCS / "extending").glob("*.md"))
EXPERIMENTS = ["cache", "codec", "diffusion", "draft", "model", "recurrent", "search", "shape", "sparse", "transform"]


@pytest.fixture(autouse=True)
def registries_that_forget():
    known = [(table, set(table)) for table in (ALGORITHMS, CACHES, CONSTRAINTS, SEARCHES, SELECTS)]
    yield
    for table, names in known:
        for name in set(table) - names:
            del table[name]


@pytest.mark.wide(but=("constraint",))
@pytest.mark.parametrize("name", PAGES)
def test_the_examples_of_a_page_run(name):
    names = run_file(DOCS / "extending" / f"{name}.md")
    if name == "index":
        assert names["fast"].tokens.tolist() == names["plain"].tokens.tolist()
        assert names["fast"].stats.accepted.sum() > 0


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_one_screen(name):
    assert len((DOCS / "extending" / f"{name}.md").read_text().splitlines()) <= 75


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_extension_is_one_file_of_at_most_60_lines(name):
    path = DOCS / "extending" / f"{name}.md"
    longest = max(len(source.splitlines()) for _, source in blocks_of(path))
    assert longest <= 60 and len(path.read_text().splitlines()) <= 95
