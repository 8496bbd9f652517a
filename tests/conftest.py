"""Before JAX is imported: the CPU alone, as 8 devices."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from decodax.io.load import LM

# with libtpu installed JAX would look for a TPU; tests marked gpu are run with JAX_PLATFORMS=cuda
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# programs here run once on small shapes, so what counts is how fast they compile: without LLVM's optimisation in three
# fifths of the time, and with the older emitters' kernels in one LLVM module in half of that (measured with jaxlib
# 0.10.2; another XLA may not know these flags, and stops). TEST_AS_SHIPPED=1, which test.sh --all sets, compiles as for
# users
FLAGS = "--xla_force_host_platform_device_count=8"
if os.environ.get("TEST_AS_SHIPPED") != "1":
    FLAGS += " --xla_backend_optimization_level=0"
    if metadata.version("jaxlib").startswith("0.10."):
        FLAGS += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()
# no persistent compilation cache unless asked for: a clone starts without one, and programs for 8 devices are large
os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


HERE = Path(__file__).parent

SPREAD = ("contracts/test_verifier.py", "contracts/test_algorithm.py", "laws/test_families.py",
          "contracts/test_diffusion_rule.py",
          "conformance/test_conformance.py", "test_malformed.py")
"""Modules whose tests share no programs."""


@pytest.hookimpl(tryfirst=True)      # pytest-xdist reads the groups in this hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sends the tests of a module to one process, where they share what is compiled.

    It is marked here rather than asked for with `--dist loadfile`, so that the modules above can be spread. Each test
    gets its mark of `tiers.txt`, and has one tier afterwards.
    """
    tiers = {test: tier for tier, test in slow_tests()}
    for item in items:
        if tier := tiers.get(f"{item.path.relative_to(HERE).as_posix()}::{item.name}"):
            item.add_marker(tier)
    keep_one_tier(items)
    for item in items:
        if not item.path.as_posix().endswith(SPREAD) and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


def keep_one_tier(items: list[pytest.Item]) -> None:
    """Takes the mark `wide` off tests that are marked `full`, and off the parameters that `wide(but=...)` names."""
    wide = {}
    for item in items:
        case = item.name.partition("[")[2].removesuffix("]")
        wide[item] = item.get_closest_marker("full") is None and any(
            case not in mark.kwargs.get("but", ()) for mark in item.iter_markers("wide"))
    for node in {node for item in items for node in item.listchain()}:      # a module may be marked
        node.own_markers = [mark for mark in node.own_markers if mark.name != "wide"]
    for item in items:
        if wide[item]:
            item.add_marker("wide")


def slow_tests() -> list[list[str]]:
    """Mark and name of each test of `tiers.txt`."""
    return [line.split(" ", 1) for line in (HERE / "tiers.txt").read_text().splitlines() if line[:1] != "#"]


def pytest_collection_finish() -> None:
    """Leaves what the imports have made out of garbage collection, which traverses a million objects otherwise."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


ROOM = 3 << 30
"""Bytes by which a process may grow before it drops its programs: several of them share a machine."""
held = [0]


@pytest.fixture(autouse=True)
def room_for_programs() -> Iterator[None]:
    """Drops compiled programs before the process runs out of memory maps (`decodax.engine.compilation`) or memory."""
    from decodax.engine.compilation import drop_programs

    yield
    # 0.45: before the library's own guard, which warns
    if drop_programs(0 if resident() - held[0] > ROOM else 0.45):
        return_memory()
        held[0] = resident()


def return_memory() -> None:
    """Gives what was freed back to the system, which the C library keeps otherwise."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def resident() -> int:
    """Bytes of memory that the process holds; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in Hugging Face layout: a random one-layer Llama with a byte-level tokenizer and a chat template."""
    import jax

    from decodax.io.saving import save_model
    from decodax.models import Transformer, llama
    from tests.small_tokenizers import byte_level, save

    tokenizer = byte_level()
    size = tokenizer.get_vocab_size()
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
    path = save(tokenizer, tmp_path_factory.mktemp("models") / "tiny", generation_config={"eos_token_id": 0},
                tokenizer_config={"eos_token": "<|endoftext|>", "chat_template": template})
    model = Transformer(llama(vocab=size, width=32, layers=1, heads=4, kv_heads=2, mlp=64, context=512))
    save_model(path, model, model.init_params(jax.random.key(1)), config={"eos_token_id": 0})
    return path


@pytest.fixture(scope="session")
def lm(tiny_model: Path) -> LM:
    """The model of `tiny_model`, loaded."""
    from decodax.io.load import load

    return load(tiny_model)
