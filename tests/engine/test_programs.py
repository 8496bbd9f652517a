"""Keeping compiled programs: another process takes them from the directory."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import decodax as dx
from decodax.engine import compilation
from decodax.engine.compilation import drop_programs, keep_room

PROGRAM = """
import sys, jax, jax.numpy as jnp
import decodax as dx
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name) if name.endswith("cache_hits") else None)
f = lambda n: jax.jit(lambda x: jnp.linalg.svd(x @ x.T + n)[1])(jnp.ones((60, 60))).block_until_ready()
f(1.0)                                   # something has been compiled already, as in a notebook
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
path = dx.cache_programs(*sys.argv[1:])
assert dx.cache_programs(*sys.argv[1:]) == path == jax.config.jax_compilation_cache_dir
f(2.0)
print(path, len(hits))
"""


def start(home: Path, *args: str, **env: str) -> list[str]:
    """A process of its own: the directory, and what it found there."""
    env = {**{k: v for k, v in os.environ.items() if not k.startswith("JAX_")}, "JAX_PLATFORMS": "cpu",
           "XDG_CACHE_HOME": str(home), **env}
    return subprocess.run([sys.executable, "-c", PROGRAM, *args], env=env, check=True, capture_output=True,
                          text=True).stdout.split()


def test_the_next_process_finds_the_programs(tmp_path):
    path, hits = start(tmp_path)
    assert Path(path) == tmp_path / "decodax" / "xla" and any(Path(path).iterdir()) and int(hits) == 0
    path, hits = start(tmp_path)
    assert int(hits) > 0


@pytest.mark.full
def test_programs_are_dropped_before_they_fill_the_process(monkeypatch):
    f = jax.jit(lambda x: x + 1)
    f(1)
    keep_room.cache_clear()
    keep_room(1)
    assert not drop_programs() and f._cache_size() == 1
    monkeypatch.setattr(compilation, "crowded", lambda share: True)
    keep_room(1)                                    # nothing was compiled since, so nobody looks
    assert f._cache_size() == 1
    with pytest.warns(RuntimeWarning, match="vm.max_map_count"):
        keep_room(2)
    assert f._cache_size() == 0
    keep_room.cache_clear()


def test_a_system_that_counts_no_maps_is_never_crowded(monkeypatch):
    monkeypatch.setattr(compilation, "Path", lambda path: Path("/nowhere") / path.strip("/"))
    assert not compilation.crowded(0.0)


@pytest.mark.skipif(not Path("/proc/sys/vm/max_map_count").exists(), reason="the system counts no memory maps")
def test_crowded_counts_the_maps_of_this_process():
    assert compilation.crowded(0.0) and not compilation.crowded(1.0)


def test_a_given_directory_and_jaxs_own_come_first(monkeypatch, tmp_path):
    before = {name: getattr(jax.config, name) for name in ("jax_compilation_cache_dir",
                                                           "jax_persistent_cache_min_compile_time_secs")}
    try:
        assert dx.cache_programs(tmp_path / "mine") == str(tmp_path / "mine")
        assert (tmp_path / "mine").is_dir()
        assert dx.cache_programs() == str(tmp_path / "mine")          # JAX's own, now
        assert dx.cache_programs("gs://bucket/programs") == "gs://bucket/programs"
        (tmp_path / "file").write_text("")
        with pytest.raises(OSError, match="file"):
            dx.cache_programs(tmp_path / "file" / "below")
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
