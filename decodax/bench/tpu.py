"""Environment variables with which libtpu compiles on a machine without a TPU. Imports no JAX."""

from __future__ import annotations

ACCELERATORS = {"v4": "v4-8", "v5e": "v5litepod-8", "v5p": "v5p-8", "v6e": "v6e-8"}
"""The accelerator type to give to libtpu, by the first part of a topology's name."""


def environment(topology: str) -> dict[str, str]:
    """Returns the environment variables with which libtpu compiles without a TPU. They have to be set before libtpu is
    loaded.

    Args:
        topology: the slice to compile for, such as "v5e:2x4".
    """
    kind = topology.partition(":")[0]
    return {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "TPU_ACCELERATOR_TYPE": ACCELERATORS.get(kind, f"{kind}-8")}
