"""Random keys by address: each draw has a key made of (seed, request, sample, position, purpose).

So the output of a row does not depend on the other rows of its batch, its order, padding, chunking, streaming or
sharding, and two draws for different purposes at one position are independent.
"""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp
from jax import Array


class Purpose(enum.IntEnum):
    """Purpose of a random draw, part of its key. Never reuse a number: results of existing seeds would change."""

    TOKEN = 0          # the target's own token at a position
    DRAFT = 1          # a draft source's token
    ACCEPT = 2         # the uniform of an acceptance test
    RESIDUAL = 3       # the token drawn after a rejection
    CANVAS = 4         # a diffusion candidate (salted with the step)
    ORDER = 5          # a diffusion order or random score (salted with the step)
    TRANSFORM = 6      # a transform's own coin (XTC)
    ARM = 7            # which kind of round comes next
    NOISE = 8          # a random token in place of an unknown one (salted with the step)
    REMASK = 9         # whether a diffusion token is taken back (salted with the step)


def row_keys(seed: Array, request: Array, sample: Array) -> Array:
    """Returns the keys of rows, `key[B]`, from `seed`, `request` and `sample`, each `u32[B]`.

    A seed of 64 bits is a row of `u32[B, 2]`, high word first; if the high word is 0, the key equals that of the low
    word alone. The generator is always threefry, since the results of `rbg` under `vmap` depend on the batch.
    """
    seed = jnp.asarray(seed)
    words = seed if seed.ndim == 2 else jnp.stack([jnp.zeros_like(seed), seed], -1)

    def one(words: Array, request: Array, sample: Array) -> Array:
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        return jax.random.fold_in(jax.random.fold_in(key, request), sample)

    return jax.vmap(one)(words, request, sample)


def at(key: Array, position: Array, purpose: Purpose, salt: Array | None = None) -> Array:
    """Returns the key of one random draw: the row's key `key` folded with a token position, the purpose of the draw,
    and `salt`, which distinguishes several draws at one position (None: not folded)."""
    key = jax.random.fold_in(jax.random.fold_in(key, position), int(purpose))
    return key if salt is None else jax.random.fold_in(key, salt)


def uniforms(keys: Array, positions: Array, purpose: Purpose, salt: Array | None = None) -> Array:
    """Draws two independent uniform numbers in [0, 1) for each position of each row, `f32[B, W, 2]`.

    Args:
        keys: `key[B]`, the rows' keys.
        positions: `i32[B, W]`, token positions.
        purpose: purpose of the draw.
        salt: `i32[B]`, distinguishes draws for one position in several rounds. None: 0.
    """
    salt = jnp.zeros(keys.shape, jnp.int32) if salt is None else salt
    one = lambda key, position, salt: jax.random.uniform(at(key, position, purpose, salt), (2,), jnp.float32)
    return jax.vmap(jax.vmap(one, (None, 0, None)))(keys, positions, salt)


def addresses(keys: Array, positions: Array, purpose: Purpose, salt: Array | None = None) -> Array:
    """Returns two words for each position of each row, `u32[B, W, 2]`, from which `decodax.sampling.draw` makes the
    noise of every token of the vocabulary.

    Args:
        keys: `key[B]`, the rows' keys.
        positions: `i32[B, W]`, token positions.
        purpose: purpose of the draw.
        salt: `i32[B]`, distinguishes draws for one position in several rounds. None: 0.
    """
    salt = jnp.zeros(keys.shape, jnp.int32) if salt is None else salt
    one = lambda key, position, salt: address(at(key, position, purpose, salt))
    return jax.vmap(jax.vmap(one, (None, 0, None)))(keys, positions, salt)


def address(key: Array) -> Array:
    """Returns the two words of a threefry key, `u32[2]`, from which further noise is made."""
    return jax.random.key_data(key)
