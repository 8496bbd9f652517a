"""Parses sizes of memory, such as "64MB"."""

from __future__ import annotations

import re

from decodax.common.arguments import shown

UNITS = {"B": 1, **{prefix + "B": 1000 ** (i + 1) for i, prefix in enumerate(("k", "M", "G", "T"))},
         **{prefix + "iB": 1024 ** (i + 1) for i, prefix in enumerate(("K", "M", "G", "T"))}}


def in_bytes(size: str, name: str = "budget", takes: str = "bytes as '64MB' or '1.5GiB'") -> int:
    """Returns the number of bytes that a text describes.

    Args:
        size: a number and a unit, with or without a space between them.
        name: name of the argument, for the error.
        takes: the values that it takes, for the error.

    Raises:
        ValueError: the text is not a number above 0 with a unit.

    >>> in_bytes("1.5MB"), in_bytes("2KiB")
    (1500000, 2048)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKMGT]?i?B)\s*", size) if isinstance(size, str) else None
    unit = found and found[2].replace("KB", "kB")
    if not found or unit not in UNITS or not float(found[1]):
        raise ValueError(f"{name}: got {shown(size)}, takes {takes}")
    return int(float(found[1]) * UNITS[unit])
