"""The table of published samplers, and helpers that its entries share.

`ENTRIES` is data: `decodax.systems` makes registry entries of it. A maker takes the loaded model first (its `diffusion`
says how it reads a canvas) and returns a `MaskedDiffusion`; its other arguments are the system's options.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from decodax.diffusion.adapter import Adapter, BlockCausal
from decodax.diffusion.algorithm import MaskedDiffusion
from decodax.diffusion.caching.blocks import BlockCache, NoCache
from decodax.diffusion.policies import Caching
from decodax.diffusion.rules.windows import Blocks

MASKED, CACHE = "masked-diffusion", "diffusion-cache"


@dataclasses.dataclass(frozen=True)
class Entry:
    """A published system: the paper's title, authors and year, its family, a one-line summary, and its maker.

    `guarantee`: "seed-exact" if the output equals that of the sampler that it speeds up, token for token. `draft`:
    whether the maker takes a second model after the first.
    """

    title: str
    authors: str
    summary: str
    make: Callable[..., MaskedDiffusion]
    family: str = MASKED
    guarantee: Literal["seed-exact", "approximate"] = "approximate"
    draft: bool = False


ENTRIES: dict[str, Entry] = {}
"""All of them, by name."""


def entry(name: str, title: str, authors: str, summary: str, family: str = MASKED,
          **more: Any) -> Callable[[Callable[..., MaskedDiffusion]], Callable[..., MaskedDiffusion]]:
    """Registers the maker that it decorates."""
    def add(make: Callable[..., MaskedDiffusion]) -> Callable[..., MaskedDiffusion]:
        assert name not in ENTRIES
        ENTRIES[name] = Entry(title, authors, summary, make, family, **more)
        return make

    return add


def blocks(adapter: Adapter, block: int | None, default: int = 32) -> tuple[Blocks, Caching]:
    """Block windows and the exact cache that the model's attention allows. `block` may be chosen for models with
    attention in both directions or causal attention; block-causal models have their own."""
    attention = adapter.attention
    if isinstance(attention, BlockCausal):
        if block not in (None, attention.block):
            raise ValueError(f"block: got {block}, the model was trained with blocks of {attention.block}")
        return Blocks(attention.block, aligned=True), BlockCache()
    return Blocks(block or default), BlockCache() if attention.causal else NoCache()


def default(lm: Any) -> MaskedDiffusion:
    """LLaDA's sampler: one position a step, the surest first, in blocks that suit the model."""
    adapter = Adapter.of(lm)
    windows, caching = blocks(adapter, None)
    return MaskedDiffusion(adapter, windows, caching=caching)
