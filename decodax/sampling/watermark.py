"""The green-list watermark (Kirchenbauer et al., 2023) and its detector.

The tokens before a position determine, together with a secret key, a set of "green" tokens. Their logits get a bias,
and anybody who knows the key can count green tokens in a text. Here the set comes from a keyed Feistel permutation with
cycle walking: a token is green if its permuted index is below `size`. So exactly `size` tokens are green in each
context, and a single token can be tested without sorting or shuffling the vocabulary. The green tokens differ from
those of transformers, which uses torch's generator, so a text marked by one library is not detected by the other.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.common.struct import short, static, struct
from decodax.sampling.base import Context, PyTree, Transform

SCHEMES = ("lefthash", "selfhash")


@struct
class GreenList(Transform):
    """Adds `bias` to the logits of green tokens (the watermark of Kirchenbauer et al., 2023).

    Attributes:
        bias: `f32[B]`; 0 changes nothing.
        size: `i32[B]`, the number of green tokens.
        key: `u32[B]`, the secret key.
        context_width: static; number of tokens on which the green list depends with "selfhash": the candidate itself
            and the `context_width - 1` tokens before it, of which the smallest hash is the seed. "lefthash" uses only
            the last token before the candidate. Logits after a text shorter than `context_width` are not changed.
        seeding_scheme: static, "lefthash" or "selfhash". With "selfhash" all candidates are tested, while transformers
            tests the 40 most likely.
    """

    needs: ClassVar[Literal["nothing", "bag", "sequence"]] = "sequence"

    bias: Array
    size: Array
    key: Array
    context_width: int = static(default=1)
    seeding_scheme: str = static(default="lefthash")

    @property
    def window(self) -> int:
        """Number of tokens before a candidate that determine whether it is green."""
        return 1 if self.seeding_scheme == "lefthash" else self.context_width - 1

    def green(self, before: Array, token: Array, vocab_size: int) -> Array:
        """Returns whether each token of `token` (`i32[...]`) is on the green list that the tokens `before` it
        (`i32[..., window]`) determine: `bool[...]`."""
        return permute(self._seed(before, token), token.astype(jnp.uint32), vocab_size) < self.size.astype(jnp.uint32)

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        size = logits.shape[-1]
        index = ctx.length - self.window + jnp.arange(self.window)
        before = ctx.tokens[jnp.maximum(index, 0)]
        green = self.green(jnp.broadcast_to(before, (size, self.window)), jnp.arange(size), size)
        return logits + jnp.where(green & (ctx.length >= self.context_width), self.bias, 0)

    def _seed(self, before: Array, token: Array) -> Array:
        if self.seeding_scheme == "lefthash":
            return _mix(self.key ^ _mix(before[..., 0].astype(jnp.uint32) + 1))
        own = _mix(self.key ^ _mix(token.astype(jnp.uint32) + 1))
        with_itself = jnp.concatenate([before, token[..., None]], -1).astype(jnp.uint32)
        return _mix(own[..., None] ^ _mix(with_itself + jnp.uint32(0x9E3779B9))).min(-1)


def permute(seed: Array, x: Array, size: int) -> Array:
    """Applies a pseudo-random permutation of `0 .. size - 1` for each seed, elementwise: `u32[...]`.

    A Feistel network over pairs of digits is repeated until the result is in range (Black and Rogaway, 2002). The two
    digits have bases `a * b >= size` with at most `b` pairs too many, so a second pass is rare.

    >>> sorted(permute(jnp.uint32(7), jnp.arange(10, dtype=jnp.uint32), 10).tolist()) == list(range(10))
    True
    """
    b = math.isqrt(size - 1) + 1
    a = -(-size // b)

    def once(x: Array) -> Array:
        high, low = x // b, x % b
        for i in range(3):
            high = _add(high, _mix(low ^ _mix(seed + jnp.uint32(2 * i))), a)
            low = _add(low, _mix(high ^ _mix(seed + jnp.uint32(2 * i + 1))), b)
        return high * b + low

    walk = lambda x: jnp.where(x >= size, once(x), x)
    return lax.while_loop(lambda x: (x >= size).any(), walk, once(x))


def _add(digit: Array, noise: Array, base: int) -> Array:
    """Adds `noise`, whose upper half is scaled to the base, to `digit` modulo `base` (below 2^16)."""
    total = digit + ((noise >> 16) * jnp.uint32(base) >> 16)
    return jnp.where(total >= base, total - base, total)


def _mix(x: Array) -> Array:
    """The finalizer of MurmurHash3 (Appleby, 2008): `u32` to `u32`, every output bit depends on every input bit."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


@dataclasses.dataclass(frozen=True)
class Detection:
    """The detector's result for each text.

    Attributes:
        z: `f64[B]`, number of standard deviations by which green tokens exceed what is expected of unmarked text.
        p_value: `f64[B]`, probability of at least that many green tokens in unmarked text.
        green: `f64[B]`, share of green tokens.
        scored: `i64[B]`, number of tokens that were counted.
    """

    __repr__ = short

    z: np.ndarray
    p_value: np.ndarray
    green: np.ndarray
    scored: np.ndarray


def detect(mark: GreenList, texts: Sequence[Sequence[int]], vocab_size: int, *, skip: int | Sequence[int] = 0,
           unique: bool = True) -> Detection:
    """Tests texts for a watermark by counting green tokens.

    Args:
        mark: the watermark, with one row for all texts or one row for each text.
        texts: token ids, of any lengths.
        vocab_size: number of tokens in the vocabulary.
        skip: number of tokens at the beginning (the prompt) that are not counted; one number, or one for each text.
        unique: count each token with the same context only once, as the paper advises, since repeats are no new
            evidence.

    Raises:
        ValueError: `mark` has neither one row nor one for each text, or a text has no token to count.

    >>> mark = GreenList(jnp.array([2.0]), jnp.array([8]), jnp.array([7], jnp.uint32))
    >>> detect(mark, [[1, 2, 3, 4, 5, 6, 7, 8]], 16).scored.tolist()
    [7]
    """
    rows = mark.size.shape[0]
    if rows not in (1, len(texts)):
        raise ValueError(f"mark: got {rows} rows for {len(texts)} texts, takes one row, or one for each text")
    skips = [skip] * len(texts) if isinstance(skip, int) else list(skip)
    hits, scored, share = np.zeros(len(texts)), np.zeros(len(texts), np.int64), np.zeros(len(texts))
    at = lambda i: jax.tree.map(lambda x: x[i], mark)
    for i, text in enumerate(texts):
        start = max(skips[i], mark.context_width)
        grams = [tuple(text[t - mark.window:t + 1]) for t in range(start, len(text))]
        grams = list(dict.fromkeys(grams)) if unique else grams
        if not grams:
            raise ValueError(f"texts: got {len(text)} tokens in text {i}, of which none can be scored; takes more than "
                             f"{start}")
        row = at(i % rows)
        width = 1 << (len(grams) - 1).bit_length()      # few shapes for all lengths
        padded = np.zeros((width, mark.window + 1), np.int32)
        padded[:len(grams)] = grams
        hits[i] = np.asarray(green_hits(row, padded, vocab_size))[:len(grams)].sum()
        scored[i], share[i] = len(grams), float(row.size) / vocab_size
    z = (hits - share * scored) / np.sqrt(scored * share * (1 - share))
    p_value = np.array([0.5 * math.erfc(x / math.sqrt(2)) for x in z])
    return Detection(z=z, p_value=p_value, green=hits / scored, scored=scored)


@functools.partial(jax.jit, static_argnums=2)
def green_hits(mark: GreenList, grams: Array, vocab_size: int) -> Array:
    """Returns whether the last token of each of `N` n-grams (`grams`, `i32[N, n]`) is on the green list that the tokens
    before it determine, `bool[N]`. `mark` is the watermark without a batch axis."""
    return mark.green(grams[:, :-1], grams[:, -1], vocab_size)
