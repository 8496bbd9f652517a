"""The table of cache policies by name, and how a name becomes a kind of cache."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, Literal, get_args

from decodax.common.options import built
from decodax.common.registry import near, options
from decodax.core.cache import CacheConfig

Effect = Literal["exact", "approximate"]
"""Whether a model with this cache computes what it does with a dense one."""


@dataclasses.dataclass(frozen=True)
class CachePolicy:
    """A cache policy of the table, most often a published one.

    Attributes:
        name: what it is chosen by. title: the paper's. authors: and year. summary: one line.
        effect: "exact" where nothing is lost, else "approximate".
        make: builds the kind of cache from the options that its signature names.
        module: the name of the module that registered it.
    """

    name: str
    title: str
    authors: str
    summary: str
    effect: Effect
    make: Callable[..., CacheConfig]
    module: str

    @property
    def options(self) -> dict[str, Any]:
        """What can be set, with defaults."""
        return {p.name: p.default for p in inspect.signature(self.make).parameters.values()}


POLICIES: dict[str, CachePolicy] = {}
"""All of them, by name."""


def cache_policy(name: str, title: str = "", authors: str = "", summary: str = "", effect: Effect = "approximate"
           ) -> Callable[[Callable[..., CacheConfig]], Callable[..., CacheConfig]]:
    """Registers the function below it as the maker of a cache policy; from then on `decodax.kv(name)` and
    `cache="name"` find it.

    Raises:
        ValueError: a name that is taken or has a ':', or another effect than there is.
    """
    if effect not in get_args(Effect):
        raise ValueError(f"policy {name!r}: effect: got {effect!r}, takes one of {', '.join(get_args(Effect))}")
    if not name or ":" in name:
        raise ValueError(f"policy: got the name {name!r}, takes a name without ':'")

    def add(make: Callable[..., CacheConfig]) -> Callable[..., CacheConfig]:
        if name in POLICIES:
            raise ValueError(f"policy: the name {name!r} is taken by {POLICIES[name].module}; takes another name")
        POLICIES[name] = CachePolicy(name, title, authors, summary, effect, make, make.__module__)
        return make

    return add


def kv(name: str, **given: Any) -> CacheConfig:
    """The kind of cache that stands in the table under a name.

    Args:
        name: one of `decodax.caches.POLICIES`, such as "snapkv".
        given: its options; `POLICIES[name].options` lists them with their defaults. Of most policies `budget` is how
            many tokens each head of a layer keeps, or (below 1) their share of the text.

    Raises:
        ValueError: an unknown name (near ones are listed), an option that it does not take, or one out of its range.

    >>> kv("snapkv", budget=512).budget
    512
    """
    found = find(name)
    if unknown := sorted(given.keys() - found.options.keys()):
        raise ValueError(f"kv: {name!r} takes no option {unknown[0]!r}; takes "
                         f"{', '.join(f'{k}={v!r}' for k, v in found.options.items())}")
    return built(found.make, given)


def find(name: str) -> CachePolicy:
    """The entry of this name.

    Raises:
        ValueError: an unknown name; near ones are listed.
    """
    if name not in POLICIES:
        raise ValueError(f"cache: unknown name {name!r}; {near(name, POLICIES)}")
    return POLICIES[name]


def read(text: str) -> CacheConfig:
    """The kind of cache of `NAME[:OPTION=VALUE,...]`.

    Raises:
        ValueError: as `kv`, or a value that is no number, text, or tuple of them.

    >>> read("snapkv:budget=64,window=16").budget
    64
    """
    name = text.partition(":")[0]
    return kv(name, **options(text, find(name).options))
