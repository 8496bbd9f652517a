"""Progress bars of long calls, printed to standard error."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

LOWERED, COMPILED = "/jax/core/compile/jaxpr_to_mlir_module_duration", "/jax/core/compile/backend_compile_duration"
"""Events of JAX: the first right before a program is compiled, the second right after."""


@dataclasses.dataclass
class Compiling:
    """The state of JAX's compiler.

    Attributes:
        now: True while a program is being compiled.
        seconds: total time spent on compiling so far.
    """

    now: bool = False
    seconds: float = 0.0


@contextlib.contextmanager
def compiling(changed: Callable[[Compiling], None]) -> Iterator[Compiling]:
    """Calls `changed` whenever JAX begins or ends to compile a program, within the context. Progress displays use it to
    explain a wait."""
    import jax

    found = Compiling()

    def heard(event: str, duration_secs: float, **more: str | int) -> None:
        if event in (LOWERED, COMPILED):
            found.now = event == LOWERED
            found.seconds += duration_secs
            changed(found)

    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(heard)


@contextlib.contextmanager
def bar(show: bool, doing: str, total: int) -> Iterator[Callable[[float], None]]:
    """Shows a progress bar with the text `doing` within the context, if `show` is True; the text also says when a
    program is being compiled. Yields a function that takes the finished part of `total`."""
    if not show:
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task(doing, total=total)
        say = lambda found: progress.update(task, description=f"{doing}, compiling" if found.now else doing)
        with compiling(say):
            yield lambda done: progress.update(task, completed=done)
