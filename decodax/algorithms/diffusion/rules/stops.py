"""Stop rules that several samplers share: they end a row at an end of sequence, or a window after a number of steps."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.diffusion.policies import Memory, Stepped, Stop
from decodax.algorithms.diffusion.view import Seen, View


def ends(view: View, tokens: Array) -> Array:
    """Returns whether each of `tokens` (`i32[R, W]`) would end the text at its position in the window: `bool[R, W]`. It
    has to be an end token, at an editable position, after the minimum number of new tokens."""
    eos = (tokens[:, :, None] == view.eos[:, None, :]).any(-1) & (tokens >= 0)
    return eos & view.editable & view.inside & (view.positions - view.prompt_length[:, None] >= view.min_new[:, None])


@dataclasses.dataclass(frozen=True)
class EndOfText(Stop):
    """Stop rule that ends the text after its first decided end-of-sequence token, as soon as all positions before it
    are decided. That token is kept; those after it are dropped."""

    def end(self, before: View, seen: Seen, after: View, memory: Memory) -> Array:
        clean = jnp.cumprod(~after.open | ~after.inside, 1).astype(bool)
        return behind(after, ends(after, after.tokens) & ~after.open & clean)


@dataclasses.dataclass(frozen=True)
class FirstEnd(Stop):
    """Ends the text after the first decided end of sequence, even if positions before it are open.

    Attributes:
        filled: True if the canvas keeps its length: open positions before the end then attend to copies of the end of
            sequence after it (d3LLM).
        once: True if the canvas is cut only once (Elastic-Cache's loop). If an end of sequence is decided later at an
            earlier position, the positions between the two are still filled in, and the returned text ends at the
            earlier one. The memory is True for rows that have been cut, `bool[B]`.
    """

    filled: bool = False
    once: bool = False

    @property
    def remembers(self) -> bool:
        return self.once

    def init(self, view: View) -> Memory:
        return jnp.zeros(view.start.shape, bool) if self.once else None

    def learn(self, before: View, seen: Seen, after: View, memory: Memory) -> Memory:
        return memory | (after.end < before.end) if self.once else None

    def end(self, before: View, seen: Seen, after: View, memory: Memory) -> Array:
        end = behind(after, ends(after, after.tokens) & ~after.open)
        return jnp.where(memory, after.end, end) if self.once else end


def behind(view: View, hit: Array) -> Array:
    """Returns the end of a text that is cut after its first marked token: the absolute position after the first True of
    `hit` (`bool[R, W]`), or the old end in rows without one; `i32[R]`."""
    return jnp.where(hit.any(1), view.start + jnp.argmax(hit, 1).astype(jnp.int32) + 1, view.end)


@dataclasses.dataclass(frozen=True)
class Steps(Stepped, Stop):
    """Stop rule that allows at most `steps` denoising steps for each window: the last of them unmasks all positions
    that are still undecided, with the likeliest tokens if `likeliest`, else with the drawn candidates."""

    steps: int
    likeliest: bool = False

    def early_stop(self, view: View, seen: Seen, memory: Memory) -> Array:
        return view.step + 1 >= self.steps
