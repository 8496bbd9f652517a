"""Texts of Python's standard library for the evaluations of single methods, and a table of losses on them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from decodax.bench.figures import show_table

TRAIN = ("ast", "asyncio.base_events", "calendar", "cgitb", "codecs", "collections", "configparser", "csv", "datetime",
         "decimal", "difflib", "doctest", "email.message", "enum", "fractions", "ftplib", "functools", "gettext",
         "heapq", "http.client", "http.server", "imaplib", "inspect", "ipaddress", "json.decoder", "logging",
         "logging.config", "mailbox", "mimetypes", "multiprocessing.pool", "optparse", "os", "pathlib", "pdb",
         "pickle", "platform", "plistlib", "pprint", "random", "sched", "smtplib", "socket", "statistics", "string",
         "subprocess", "tempfile", "textwrap", "threading", "tokenize", "trace", "traceback", "turtle", "typing",
         "unittest.case", "unittest.mock", "urllib.parse", "urllib.request", "uuid", "warnings", "weakref",
         "xml.dom.minidom", "xmlrpc.client")
TEST = ("argparse", "tarfile", "zipfile", "shutil", "gzip", "locale", "netrc", "shlex")
"""Modules to train on, and to measure with."""


def module_texts(lm: Any, names: Sequence[str], size: int, each: int) -> list[list[int]]:
    """Returns up to `each` texts of `size` tokens of each of the modules that exist in this Python."""
    found = []
    for name in names:
        try:
            ids = lm.tokenizer.encode(inspect.getsource(importlib.import_module(name)))
        except (ImportError, OSError):
            continue
        found += [ids[i:i + size] for i in range(0, len(ids) - size + 1, size)][:each]
    return found


def show_losses(nats: Mapping[str, np.ndarray], title: str, **columns: Mapping[str, str]) -> None:
    """Prints the mean nats a token of each method, and the difference to the first with its standard error over texts.

    Args:
        nats: one figure for each text, by method. columns: further cells, by title and method.
    """
    first, rows = next(iter(nats.values())), []
    for name, each in nats.items():
        more = each - first
        rows.append((name, f"{each.mean():.4f}", f"{more.mean():+.4f} ± {more.std(ddof=1) / len(more) ** 0.5:.4f}",
                     *(column.get(name, "") for column in columns.values())))
    show_table(("", "nats a token", "above the first", *(c.replace("_", " ") for c in columns)), rows, title)
