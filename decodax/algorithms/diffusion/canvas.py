"""The state of masked diffusion: the decided and undecided positions of the text, and statistics of each position."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.algorithms.diffusion.view import View, WholeText
from decodax.common.struct import Struct, struct
from decodax.core.state import State


@struct
class Canvas(Struct):
    """State of masked diffusion: the text of each row by absolute position, with its undecided ("open") positions.

    Attributes:
        tokens, open, editable, when, confidence: `[B, N]`, for the whole text what `View` has for the window.
        start, end, step, round, opened, full, kept, refreshed: `i32[B]`, see `View`.
        final: `i32[B]`; tokens before this position are final. It is larger than `start` while a forward pass that
            writes their final cache entries is still to come.
        valid: `bool[B, S]`, cache slots that have an entry.
        drafts: tokens and open positions of the window after further steps, `[B, K - 1, W]` each, or None.
        memory: the policies' memories, by name.
        record: log-probabilities by position at the time when the tokens were decided, or None.
        assistant: the state of a second model, or None.
        expected: `f32[B, W, D]`, expected embeddings under the last predictions for the window, 0 in its first step;
            None for models without self-conditioning.
    """

    tokens: Array
    open: Array
    editable: Array
    when: Array
    confidence: Array
    start: Array
    end: Array
    step: Array
    round: Array
    opened: Array
    full: Array
    kept: Array
    refreshed: Array
    final: Array
    valid: Array
    drafts: Any
    memory: Any
    record: Any
    assistant: Any = None
    expected: Array | None = None


def look(s: State, c: Canvas, width: int, eos: Array | None = None) -> View:
    """Returns the window of each row as a `View`: the `width` positions of the canvas `c` from `c.start` on. `eos`
    (`i32[B, E]`) are tokens that end a text; None: no such tokens."""
    window = lambda x: cut(x, c.start, width)
    return View(
        positions=c.start[:, None] + jnp.arange(width, dtype=jnp.int32), tokens=window(c.tokens), open=window(c.open),
        editable=window(c.editable), active=jnp.zeros((s.batch, width), bool), when=window(c.when),
        confidence=window(c.confidence), start=c.start, end=c.end, step=c.step, round=c.round, opened=c.opened,
        full=c.full, kept=c.kept, refreshed=c.refreshed, prompt_length=s.prompt_length, min_new=s.min_new, key=s.key,
        eos=jnp.zeros((s.batch, 0), jnp.int32) if eos is None else eos)


def survey(s: State, c: Canvas, width: int, eos: Array | None = None) -> View:
    """Returns the window of each row as `look` does, with the whole text and the model's cache added in `View.text`."""
    return look(s, c, width, eos).replace(text=WholeText(open=c.open, when=c.when, cache=s.cache))


def cut(x: Array, start: Array, width: int) -> Array:
    """Returns `x[b, start[b] : start[b] + width]` for each row `b`."""
    return jax.vmap(lambda row, start: lax.dynamic_slice_in_dim(row, start, width))(x, start)


def paste(x: Array, new: Array, start: Array) -> Array:
    """Returns `x` with `new[b]` at `start[b]` for each row `b`."""
    return jax.vmap(lambda row, new, start: lax.dynamic_update_slice_in_dim(row, new, start, 0))(
        x, new.astype(x.dtype), start)
