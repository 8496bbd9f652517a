"""Progress bars of long calls, on standard error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def bar(show: bool, doing: str, total: int) -> Iterator[Callable[[float], None]]:
    """A progress bar, or nothing. What it gives is called with how much of `total` is done."""
    if not show:
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task(doing, total=total)
        yield lambda done: progress.update(task, completed=done)
