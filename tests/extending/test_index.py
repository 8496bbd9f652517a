"""The index of the extension points runs, and leads somewhere."""

from __future__ import annotations

import re

from tests.extending.pages import DOCS, run_file


def test_the_first_example_runs() -> None:
    names = run_file(DOCS / "extending.md")
    assert names["fast"].tokens.tolist() == names["plain"].tokens.tolist()
    assert names["fast"].stats.accepted.sum() > 0


def test_its_links_to_sections_are_there() -> None:
    links = re.findall(r"\]\(extending/(drafts|search)\.md(?:#([a-z-]+))?\)", (DOCS / "extending.md").read_text())
    assert {page for page, _ in links} == {"drafts", "search"} and len({section for _, section in links}) > 4
    for page, section in links:
        titles = re.findall(r"^#+ (.*)$", (DOCS / "extending" / f"{page}.md").read_text(), re.MULTILINE)
        assert not section or section in {re.sub(r"[^a-z -]", "", title.lower()).replace(" ", "-") for title in titles}
