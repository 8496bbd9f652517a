"""Any-subset speculative decoding, ASSD ("Reviving Any-Subset Autoregressive Models with Principled Parallel Sampling
and Speculative Decoding", Guo and Ermon, 2025): a model that gives the distribution of any token after any subset of
the others fills the gaps of a text. It drafts several tokens at once, as if they were independent, and then scores the
same tokens one after another in a single forward pass, which accepts or rejects them.

Such a model has two streams, as XLNet (Yang et al., 2019). A node of the first stands for a token, and sees the tokens
before it in the order of decoding. A node of the second has the mask token at the position of a token that is asked
for, sees the tokens before that one, and predicts it. Both are nodes of one window here, so any network that obeys the
window's mask can be tuned for it (`scripts/train.py tune --objective any-subset`). Given tokens come first and see each
other; gaps are filled from left to right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.common.registry import FUNCTIONS
from decodax.common.struct import Struct, struct
from decodax.core.cache import require
from decodax.core.loaded import Loaded
from decodax.core.window import Window


def two_stream(tokens: Array, ranks: Array, live: Array, asked: Array, limits: Array, mask: int) -> Window:
    """Returns the window of texts with nodes that ask for some of their tokens, which follow those of the texts.

    Args:
        tokens: `i32[B, N]`.
        ranks: `i32[B, N]`, place of each token in the order of decoding; 0 for given tokens, which see each other.
        live: `bool[B, N]`, the tokens that are known.
        asked: `i32[B, K]`, positions of the tokens that are asked for.
        limits: `i32[B, K]`; a node that asks sees the known tokens of lower ranks.
        mask: id of the mask token.
    """
    (B, N), K = tokens.shape, asked.shape[1]
    own = jnp.broadcast_to(jnp.eye(K, dtype=bool), (B, K, K))
    text = jnp.pad(ranks[:, None, :] <= ranks[:, :, None], ((0, 0), (0, 0), (0, K)))
    asking = jnp.concatenate([ranks[:, None, :] < limits[:, :, None], own], 2)
    here = jnp.broadcast_to(jnp.arange(N, dtype=jnp.int32), (B, N))
    return Window(tokens=jnp.pad(tokens, ((0, 0), (0, K)), constant_values=mask),
                  positions=jnp.concatenate([here, asked], 1), mask=jnp.concatenate([text, asking], 1),
                  live=jnp.pad(live, ((0, 0), (0, K)), constant_values=True))


@dataclass(frozen=True)
class AnySubsetResult:
    """Filled texts.

    Attributes:
        tokens: token ids of each text.
        rounds: `i32[B]`, number of rounds of each text, of two forward passes each.
    """

    tokens: list[list[int]]
    rounds: np.ndarray


@struct
class _Filling(Struct):
    """`tokens` `i32[B, N]`; `filled` and `rounds` `i32[B]`, numbers of filled gaps and of rounds; `sound` `bool[B]`,
    False for a text for which the model gave a NaN."""

    tokens: Array
    filled: Array
    rounds: Array
    sound: Array


@FUNCTIONS.register("algorithms.diffusion.assd", "Reviving Any-Subset Autoregressive Models with Principled Parallel "
                    "Sampling and Speculative Decoding", "Guo and Ermon 2025")
def assd(lm: Loaded, texts: Sequence[Sequence[int]], mask: int | None = None, *, length: int = 10,
         temperature: float = 1.0, seed: int = 0) -> AnySubsetResult:
    """Fills the gaps of texts by any-subset speculative decoding (Guo and Ermon, 2025).

    The result has the distribution of drawing one token after another, in no more forward passes than twice the number
    of tokens; the first draft of a round is always accepted.

    Args:
        lm: a model that was tuned with the objective `any-subset`.
        texts: token ids, with the mask token in gaps.
        mask: id of the mask token. None: the model's padding token, as in the tuning.
        length: number of drafts in a round.
        temperature: temperature; 0 takes the likeliest tokens.
        seed: random seed; each text draws by its index.

    Raises:
        ValueError: no texts, an empty one, ids or numbers out of range, or a recurrent model.
        FloatingPointError: the model's logits hold a NaN.
    """
    mask = int(lm.pad) if mask is None else mask        # type: ignore[attr-defined]
    if not texts or not all(map(len, texts)):
        raise ValueError(f"texts: got {len(texts)}, takes one or more, none empty")
    if length < 1 or not temperature >= 0:
        raise ValueError(f"length, temperature: got {length} and {temperature}, take at least 1, and at least 0")
    ids = np.full((len(texts), max(map(len, texts))), -1, np.int32)
    for row, text in zip(ids, texts, strict=True):
        row[:len(text)] = text
    if not 0 <= mask < lm.vocab_size or ids.max() >= lm.vocab_size or any(min(text) < 0 for text in texts):
        raise ValueError(f"texts, mask: got ids up to {ids.max()} and {mask}, take ids from 0 to {lm.vocab_size - 1}")
    most = lm.model.max_positions
    if most is not None and ids.shape[1] > most:
        raise ValueError(f"texts: got one of {ids.shape[1]} tokens, the model takes {most}")
    require(lm.model.init_cache(1, 1), frozenset(("trees",)), "assd")
    keys = jax.vmap(partial(jax.random.fold_in, jax.random.key(seed)))(np.arange(len(texts)))
    done = _fill(lm.model, mask, min(length, ids.shape[1]), lm.params, jnp.asarray(ids), keys, jnp.float32(temperature))
    if not (sound := np.asarray(done.sound)).all():
        raise FloatingPointError(f"texts: the model's logits hold a NaN for text {int(sound.argmin())}")
    rows = np.asarray(done.tokens)
    return AnySubsetResult([row[:len(text)].tolist() for row, text in zip(rows, texts, strict=True)],
                           np.asarray(done.rounds))


@partial(jax.jit, static_argnums=(0, 1, 2))
def _fill(model: Any, mask: int, length: int, params: Any, ids: Array, keys: Array, temperature: Array) -> _Filling:
    (B, N), rows = ids.shape, jnp.arange(ids.shape[0])[:, None]
    gaps = ids == mask
    count = gaps.sum(1)
    ranks = jnp.where(gaps, jnp.cumsum(gaps, 1), 0)
    place = jnp.argsort(~gaps, axis=1, stable=True).astype(jnp.int32)       # positions of gaps first, in order
    cache = model.init_cache(B, 0, params=params)

    def scores(tokens: Array, known: Array, asked: Array, limits: Array) -> Array:
        """Returns the probabilities of the asked tokens, `f32[B, K, V]`."""
        live = (ids >= 0) & (ranks <= known[:, None])
        out = model.apply(params, two_stream(jnp.maximum(tokens, 0), ranks, live, asked, limits, mask), cache)
        logits = out.logits(jnp.broadcast_to(jnp.arange(N, N + length, dtype=jnp.int32), asked.shape))
        logits = logits.astype(jnp.float32).at[..., mask].set(-jnp.inf)
        warm = jax.nn.softmax(logits / jnp.where(temperature > 0, temperature, 1))
        return jnp.where(temperature > 0, warm, jax.nn.one_hot(logits.argmax(-1), logits.shape[-1]))

    def one(s: _Filling) -> _Filling:
        index = jnp.arange(length, dtype=jnp.int32)
        number = s.filled[:, None] + index                      # from 0, of the asked gaps
        inside = number < count[:, None]
        asked = jnp.take_along_axis(place, jnp.minimum(number, N - 1), 1)
        draft, coin, other = jax.vmap(lambda k, n: tuple(jax.random.split(jax.random.fold_in(k, n), 3)))(
            keys, s.filled)
        q = scores(s.tokens, s.filled, asked, jnp.broadcast_to(s.filled[:, None] + 1, asked.shape))
        drawn = jax.vmap(jax.random.categorical)(draft, jnp.log(q)).astype(jnp.int32)
        tokens = s.tokens.at[rows, jnp.where(inside, asked, N)].set(drawn, mode="drop")
        p = scores(tokens, s.filled + length, asked, number + 1)
        of = lambda x: jnp.take_along_axis(x, drawn[..., None], 2)[..., 0]
        uniform = jax.vmap(lambda k: jax.random.uniform(k, (length,)))(coin)
        holds = (uniform * of(q) < of(p)) | (index == 0)        # the first one has the same distribution in both
        accepted = (holds & inside).astype(jnp.int32).cumprod(1).sum(1)
        at = jnp.minimum(accepted, length - 1)[:, None, None]
        left = jnp.maximum(jnp.take_along_axis(p - q, at, 1), 0)[:, 0]
        # nothing is left where rounding alone rejected
        left = jnp.where(left.sum(-1, keepdims=True) > 0, left, jnp.take_along_axis(p, at, 1)[:, 0])
        fresh = jax.vmap(jax.random.categorical)(other, jnp.log(left)).astype(jnp.int32)
        rejected = (accepted < length) & (s.filled + accepted < count)
        value = jnp.where(index == accepted[:, None], fresh[:, None], drawn)
        new = accepted + rejected
        kept = index < new[:, None]
        return _Filling(tokens=s.tokens.at[rows, jnp.where(kept, asked, N)].set(value, mode="drop"),
                        filled=s.filled + new, rounds=s.rounds + (s.filled < count),
                        sound=s.sound & ~jnp.isnan(q + p).any((1, 2)))

    zero = jnp.zeros(B, jnp.int32)
    return jax.lax.while_loop(lambda s: s.sound.all() & (s.filled < count).any(), one, _Filling(
        tokens=ids, filled=zero, rounds=zero, sound=jnp.ones(B, bool)))
