"""Scoring of given texts: the log-probability of each token under the model.

A text is processed in chunks through the cache, as a prompt is, and the output head is applied to a few positions at a
time. So memory is bounded by the cache of a batch, and the logits of a whole chunk are never in memory at once. A few
programs serve texts of all lengths: one for each power of two up to the chunk, and one for longer texts.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.common.axes import constrain, replicas
from decodax.common.progress import bar
from decodax.common.struct import short
from decodax.core.cache import Cache
from decodax.core.mesh import auto_region, heads, on_mesh
from decodax.core.types import Model, Out
from decodax.core.window import causal
from decodax.engine.methods import model
from decodax.io.load import LM
from decodax.io.spans import Text, TextSpan, spans
from decodax.pallas_kernels.vocabulary import top_k
from decodax.sharding import place

ROWS = 8
"""Default number of texts in a batch."""

NARROWEST = 32
"""Width of the narrowest window: padding a shorter text to it costs less than another program."""

LONG = 1024
"""Number of slots of the smallest cache: from this size on, attention processes a cache in blocks of one size."""

LOGITS = 64 << 20
"""Maximum number of bytes of logits that exist at a time."""


@dataclasses.dataclass(frozen=True)
class Scores:
    """Log-probabilities of given texts in nats, with one entry for each text. For a prompt with a continuation, only
    the continuation is scored.

    Attributes:
        logprobs: a list of `f32[n]`, log-probability of each scored token given all tokens before it. NaN from the
            first position on at which the model's logits contain a NaN or +inf.
        tokens: a list of `i32[n]`, the ids of the scored tokens.
        greedy: a list of `bool[n]`, True where the token is the most likely one.
        top_ids: a list of `i32[n, k]`, the `k` most likely tokens at each position, most likely first; None without
            `top_logprobs`.
        top: a list of `f32[n, k]`, their log-probabilities; None without `top_logprobs`.
        bytes: `i64[B]`, number of UTF-8 bytes of the scored texts; None if the model has no tokenizer.
    """

    __repr__ = short

    logprobs: list[np.ndarray]
    tokens: list[np.ndarray]
    greedy: list[np.ndarray]
    top_ids: list[np.ndarray] | None
    top: list[np.ndarray] | None
    bytes: np.ndarray | None

    def __len__(self) -> int:
        return len(self.logprobs)

    @property
    def count(self) -> np.ndarray:
        """`i64[B]`, number of scored tokens."""
        return np.array([len(x) for x in self.logprobs])

    @property
    def sum(self) -> np.ndarray:
        """`f64[B]`, log-probability of each scored text."""
        return np.array([x.sum(dtype=np.float64) for x in self.logprobs])

    @property
    def mean(self) -> np.ndarray:
        """`f64[B]`, mean log-probability of a scored token; NaN for texts without scored tokens."""
        return self.sum / np.where(self.count > 0, self.count, np.nan)

    @property
    def perplexity(self) -> np.ndarray:
        """`f64[B]`, `exp(-mean)`. The perplexity of a collection of texts is `np.exp(-s.sum.sum() / s.count.sum())`."""
        return np.exp(-self.mean)

    @property
    def is_greedy(self) -> np.ndarray:
        """`bool[B]`, True if greedy decoding would generate the scored text."""
        return np.array([bool(x.all()) for x in self.greedy])

    @property
    def bits_per_byte(self) -> np.ndarray:
        """`f64[B]`, `-sum / ln 2` divided by the number of bytes. It can be compared between models with different
        tokenizers.

        Raises:
            ValueError: the model has no tokenizer.
        """
        if self.bytes is None:
            raise ValueError("bits_per_byte: the model has no tokenizer, so its tokens have no bytes")
        return -self.sum / math.log(2) / np.where(self.bytes > 0, self.bytes, np.nan)


def score(lm: LM | str | os.PathLike[str], texts: Text | Iterable[Text], *, top_logprobs: int | None = None,
          window: int | None = None, batch_size: int | None = None, chunk: int = 256, progress: bool = False) -> Scores:
    """Computes the log-probability of given texts under the model, without a sampling policy.

    The figures of a text depend only on its own tokens, `window`, `batch_size` and `chunk`, bit for bit, and not on the
    other texts or their order. Another `batch_size` or `chunk` changes them only by rounding.

    Args:
        lm: a result of `load`; or an argument of `load`, and then the model is loaded once and kept in memory.
        texts: one or several texts, lists of token ids, or chats; all their tokens after the first are scored. Of a
            tuple `(prompt, continuation)` only the continuation is scored; `decodax.io.spans.spans` describes its
            tokenization.
        top_logprobs: number of most likely tokens to return for each position; None: none.
        window: maximum number of tokens from which a token is predicted. A longer text is cut into pieces of this
            length, each scored given only the last token of the previous piece; the last piece begins earlier, so that
            it has the same length. This is the rolling log-likelihood of lm-evaluation-harness. None: each token is
            scored given all tokens before it.
        batch_size: number of texts in a batch; default 8, or the next power of two if there are fewer texts. With a
            mesh it is rounded up to a multiple of the number of replicas.
        chunk: number of tokens in a forward pass; a longer text is processed in several, through the cache.
        progress: True shows a progress bar.

    Raises:
        ValueError: an entry of `texts` that cannot be scored, a text longer than the model's positions, a masked
            diffusion model, or an argument out of its range; the message names it.

    >>> import decodax as dx
    >>> lm = dx.load("pycode")
    >>> s = dx.score(lm, ["import os, sys", ("for i in ", "range(10):"), ("for i in ", "zebras(10):")])
    >>> s.tokens[0].shape == s.logprobs[0].shape, bool(s.sum[1] > s.sum[2])
    (True, True)
    """
    lm = model(lm)
    if lm.diffusion is not None:
        raise ValueError(f"lm: got {lm.name!r}, which fills masks in any order and gives no probability of a token "
                         "given those before it; takes an autoregressive model")
    for name, value, low in (("window", window, 1), ("batch_size", batch_size, 1), ("chunk", chunk, 1),
                             ("top_logprobs", top_logprobs, 0)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < low):
            raise ValueError(f"{name}: got {value!r}, takes a whole number from {low}")
    top = top_logprobs or 0
    if top > lm.vocab_size:
        raise ValueError(f"top_logprobs: got {top}, the vocabulary has {lm.vocab_size} entries")
    found = spans(texts, lm.tokenizer, lm.bos, lm.vocab_size)
    pieces = [(i, piece) for i, span in enumerate(found) for piece in _pieces(i, span, window)]
    _check_positions(lm, pieces)

    rows = min(ROWS, _power(len(pieces))) if batch_size is None else int(batch_size)
    ways = replicas(lm.mesh)
    rows = -(-rows // ways) * ways
    slots = max(_power(max(len(s.ids) for _, s in pieces)), LONG)
    done: dict[int, list[np.ndarray]] = {}      # by piece
    with on_mesh(lm.mesh), bar(progress, "scoring", len(pieces)) as report:
        for width, several, batch in _batches([s for _, s in pieces], rows, int(chunk)):
            figures = _scored(lm, [pieces[i][1] for i in batch], rows, width, slots if several else 0, top)
            done |= {i: _row(*pieces[i], [x[row] for x in figures]) for row, i in enumerate(batch)}
            report(len(done))
    parts: list[list[list[np.ndarray]]] = [[] for _ in found]
    for k, (i, _) in enumerate(pieces):
        parts[i].append(done[k])
    joined = [[np.concatenate(each) for each in zip(*part, strict=True)] for part in parts]
    logprobs, greedy, ids, best = (list(each) for each in zip(*joined, strict=True))
    return Scores(logprobs=logprobs, greedy=greedy, tokens=[np.array(s.ids[s.start:], np.int32) for s in found],
                  top_ids=None if top_logprobs is None else ids, top=None if top_logprobs is None else best,
                  bytes=None if lm.tokenizer is None else np.array([s.bytes for s in found], np.int64))


def _pieces(index: int, span: TextSpan, window: int | None) -> list[TextSpan]:
    """Cuts a text into pieces of `window` scored tokens, each with one token before them. The last piece begins
    earlier, so that it has the same length."""
    read = len(span.ids) - 1
    if window is None or read <= window:
        return [span]
    if span.start > 1:
        raise ValueError(f"texts[{index}]: prompt and continuation have {read + 1} tokens, window={window} takes "
                         f"{window + 1} of them; only a text without a prompt is divided")
    starts = [min(begin, read - window) for begin in range(0, read, window)]
    return [TextSpan(span.ids[start:start + window + 1], 1 + begin - start, None)
            for start, begin in zip(starts, range(0, read, window), strict=True)]


def _check_positions(lm: LM, pieces: list[tuple[int, TextSpan]]) -> None:
    index, longest = max(pieces, key=lambda piece: len(piece[1].ids))
    # the last token is predicted and never read
    size, limit = len(longest.ids) - 1, lm.model.max_positions
    if limit is not None and size > limit:
        raise ValueError(f"texts[{index}]: has {size + 1} tokens, the model has {limit} positions; window={limit} "
                         "scores a long text in pieces")
    trained = lm.model.trained_positions or size
    if size > trained:
        warnings.warn(f"texts[{index}]: has {size + 1} tokens, the model was made for {trained}", stacklevel=3)


def _row(index: int, span: TextSpan, figures: list[np.ndarray]) -> list[np.ndarray]:
    """Returns the figures of one piece, cut out of those of its batch; `index` is the index of its text."""
    sound, logprobs, *rest = (x[:len(span.ids) - 1] for x in figures)
    # what follows such a position has seen it, or was to
    broken = np.logical_or.accumulate(~sound | np.isnan(logprobs))
    if broken.any():
        warnings.warn(f"texts[{index}]: the model's logits hold a NaN or +inf", stacklevel=3)
    return [x[span.start - 1:].copy() for x in (np.where(broken, np.float32(np.nan), logprobs), *rest)]


def _batches(found: list[TextSpan], rows: int, chunk: int) -> Iterator[tuple[int, bool, list[int]]]:
    """Yields batches: the width of the windows, True if a text needs several windows, and the indices of the texts,
    shortest first. Width and number of windows depend only on the length of a text."""
    kinds: dict[tuple[int, bool], list[int]] = {}
    for i, span in enumerate(found):
        read = len(span.ids) - 1
        width = min(max(_power(read), NARROWEST), chunk)
        kinds.setdefault((width, read > width), []).append(i)
    for (width, several), indices in sorted(kinds.items()):
        indices.sort(key=lambda i: len(found[i].ids))
        for begin in range(0, len(indices), rows):
            yield width, several, indices[begin:begin + rows]


def _scored(lm: LM, batch: list[TextSpan], rows: int, width: int, slots: int, top: int) -> list[np.ndarray]:
    """Returns the figures of a batch, `[rows, T]` each; see `_figures`. Rows beyond the texts are padding."""
    read = np.zeros(rows, np.int32)
    read[:len(batch)] = [len(s.ids) - 1 for s in batch]
    first = np.zeros(rows, np.int32)
    first[:len(batch)] = [s.start - 1 for s in batch]
    length = -(-max(int(read.max()), 1) // width) * width
    tokens = np.zeros((rows, length + 1), np.int32)
    for row, span in zip(tokens, batch, strict=False):
        # padded with what the row holds: a NaN in the embedding of some fixed id would spread
        row[:] = [*span.ids, *[span.ids[0]] * (length + 1 - len(span.ids))]
    at = lambda x: place(lm.mesh, jnp.asarray(x))
    read, first = at(read), at(first)
    cache = _empty(lm.model, read, slots) if slots else None
    parts = []
    for begin in range(0, length, width):
        window = at(tokens[:, begin:begin + width + 1])
        cache, figures = score_window(lm.model, lm.params, cache, window, np.int32(begin), first, read, top=top)
        parts.append(figures)
    return [np.concatenate([np.asarray(x) for x in each], 1) for each in zip(*parts, strict=True)]


@functools.partial(jax.jit, static_argnums=(0, 2))
def _empty(model: Model, read: Array, slots: int) -> Cache:
    """Returns an empty cache for as many rows as `read` has entries."""
    def build(read: Array) -> Cache:
        cache = model.init_cache(read.shape[0], slots)
        return constrain(cache, heads(cache))

    return auto_region(build, read)


@functools.partial(jax.jit, static_argnums=0, static_argnames="top", donate_argnums=2)
def score_window(model: Model, params: Any, cache: Cache | None, tokens: Array, begin: Array, first: Array,
                 read: Array, *, top: int) -> tuple[Cache | None, tuple[Array, ...]]:
    """Runs the model on a window, scores it, and commits it to the cache, if there is one.

    Args:
        model: the model.
        params: its weights.
        cache: the cache, or None for texts of one window.
        tokens: `i32[B, W + 1]`, the tokens of the window and the one after it, the last target.
        begin: `i32[]`, position of the first token of the window.
        first: `i32[B]`, first position whose next token is scored.
        read: `i32[B]`, number of positions of each text that are processed.
        top: number of most likely tokens to return.
    """
    def region(params: Any, cache: Cache | None, tokens: Array, begin: Array, first: Array, read: Array) -> Any:
        rows, at = tokens.shape[0], begin + jnp.arange(tokens.shape[1] - 1, dtype=jnp.int32)
        live = at < read[:, None]
        held = model.init_cache(rows, 0, params=params) if cache is None else cache
        out = model.apply(params, causal(tokens[:, :-1], jnp.broadcast_to(begin, (rows,)), live), held)
        figures = _figures(out, tokens[:, 1:], live & (at >= first[:, None]), top)
        sound = jnp.isfinite(out.hidden).all(-1)
        if cache is not None:
            # slots that depend on what the model returned: else XLA:CPU copies the whole cache to protect its readers
            cache = cache.commit(out.entries, jnp.where(live & sound, at, -1))
        return cache, (sound | ~live, *figures)

    return auto_region(region, params, cache, tokens, begin, first, read)


def _figures(out: Out, targets: Array, wanted: Array, top: int) -> tuple[Array, ...]:
    """Returns log-probabilities of `targets`, `f32[B, W]`; True where they are the most likely token, `bool[B, W]`; and
    the most likely tokens and their log-probabilities, `i32[B, W, top]` and `f32[B, W, top]`. The head is applied to a
    few positions at a time, and only to those in `wanted`."""
    B, W = targets.shape
    vocab = jax.eval_shape(out.head, out.hidden[:, :1]).shape[-1]
    size = max(d for d in range(1, W + 1) if W % d == 0 and (d == 1 or 4 * B * vocab * d <= LOGITS))

    def some(hidden: Array, targets: Array) -> tuple[Array, ...]:
        logits = out.head(hidden)
        total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        total = jnp.where(jnp.isfinite(total), total, jnp.nan)
        own = jnp.take_along_axis(logits, targets[..., None], -1)
        best, ids = top_k(logits, top) if top else (logits[..., :0], jnp.zeros((*targets.shape, 0), jnp.int32))
        return (own - total)[..., 0], jnp.argmax(logits, -1) == targets, ids, best - total

    def part(i: Array) -> tuple[Array, ...]:
        hidden, aim, asked = (lax.dynamic_slice_in_dim(x, i * size, size, 1) for x in (out.hidden, targets, wanted))
        none = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(some, hidden, aim))
        return lax.cond(asked.any(), some, lambda *_: none, hidden, aim)

    parts = lax.map(part, jnp.arange(W // size))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(B, W, *x.shape[3:]), parts)


def _power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
