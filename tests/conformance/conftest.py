"""The folder of the checkpoints that the conformance tests write."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("conformance")
