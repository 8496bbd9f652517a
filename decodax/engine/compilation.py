"""Stores compiled programs for other processes, and drops them when they fill the memory maps of this process.

On CPU each compiled kernel takes three memory maps, a configuration of `generate` about 570, and Linux grants a process
65,530 (vm.max_map_count). Beyond them XLA fails or crashes, so old programs are dropped in time.
"""

from __future__ import annotations

import functools
import gc
import os
import warnings
from pathlib import Path
from typing import Any

LEAST_SECONDS = 0.2
"""Programs that compile faster than this are not written; JAX's own default is 1 s, and many programs of small models
take less."""


def cache_programs(directory: str | os.PathLike[str] | None = None) -> str:
    """Stores compiled programs in a directory, so that later processes need not compile them again.

    Call it once, at any time, best before the first `generate`; another call with the same directory has no effect. It
    turns on JAX's persistent compilation cache, for all programs of this process. On a 2-core CPU, the first `generate`
    of `pycode` in a new process then takes 2.6 s instead of 9.2 s.

    >>> import decodax as dx
    >>> dx.cache_programs()                                                       # doctest: +SKIP
    '/home/me/.cache/decodax/xla'

    Args:
        directory: path of the directory; also a remote one that JAX can write (`gs://...`). None: the directory that is
            already set in JAX (such as by its variable JAX_COMPILATION_CACHE_DIR), else decodax/xla in $XDG_CACHE_HOME
            or ~/.cache. JAX runs the programs in it, so other users should not be able to write to it.

    Returns:
        The directory.

    Raises:
        OSError: the directory cannot be created.
    """
    import jax

    settings: Any = jax.config
    now = settings.jax_compilation_cache_dir
    if directory is None:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        directory = now or root / "decodax" / "xla"
    path = os.fspath(directory)
    if "://" not in path:
        path = str(Path(path).expanduser().absolute())
        os.makedirs(path, exist_ok=True)
    if path != now:
        from jax.experimental.compilation_cache import compilation_cache

        settings.update("jax_compilation_cache_dir", path)
        compilation_cache.reset_cache()         # one that is in use already would stay where it is
    if settings.jax_persistent_cache_min_compile_time_secs == 1.0:     # nobody has set it
        settings.update("jax_persistent_cache_min_compile_time_secs", LEAST_SECONDS)
    return path


def drop_programs(share: float = 0.5) -> bool:
    """Drops all compiled programs of this process if they hold more than `share` of its memory maps.

    Returns:
        True if programs were dropped. Systems without a limit on memory maps never need it.
    """
    full = crowded(share)
    if full:
        import jax

        jax.clear_caches()
        gc.collect()
    return full


def crowded(share: float) -> bool:
    """True if the process uses more than `share` of the memory maps that Linux grants it."""
    try:
        limit = int(Path("/proc/sys/vm/max_map_count").read_text())
        return Path("/proc/self/maps").read_bytes().count(b"\n") > share * limit
    except OSError:
        return False


@functools.lru_cache(maxsize=1)     # the maps are read, 10 ms when there are many, only after something was compiled
def keep_room(compiled: int) -> None:
    """Drops all compiled programs, with a warning, if they hold half of the memory maps.

    Args:
        compiled: number of compiled programs; if it is the same as in the last call, nothing is checked.
    """
    if drop_programs():
        from decodax.common.arguments import outside

        warnings.warn("compiled programs held half of the memory maps that Linux grants a process (vm.max_map_count), "
                      "so all of JAX's in this process were dropped, and what is used again is compiled again. `sysctl "
                      "-w vm.max_map_count=1000000` makes room for more, and decodax.cache_programs() makes compiling "
                      "again short", RuntimeWarning, stacklevel=outside())
