"""Before JAX is imported: the CPU alone, as 8 devices, with compiled programs kept between runs."""

from __future__ import annotations

import os
from pathlib import Path

# with libtpu installed JAX would look for a TPU; tests marked gpu are run with JAX_PLATFORMS=cuda
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
