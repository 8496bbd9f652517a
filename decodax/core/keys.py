"""Randomness by address: each draw has the key (seed, request, position, purpose).

So a row's output does not depend on its batch mates, its order, padding, chunking, streaming or sharding, and two
draws of different purpose at one position never share noise.
"""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp
from jax import Array


class Purpose(enum.IntEnum):
    """What a draw is for. Never reuse a number: seeds in the field would change their meaning."""

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
    """Keys `key[B]` of requests: `seed`, `request` and `sample` are `u32[B]`; a seed of 64 bits is a row of
    `u32[B, 2]`, high word first, and the same key as its low word alone where the high one is 0.

    The generator is threefry whatever JAX's default is: `rbg` under `vmap` depends on the batch.
    """
    seed = jnp.asarray(seed)
    words = seed if seed.ndim == 2 else jnp.stack([jnp.zeros_like(seed), seed], -1)

    def one(words: Array, request: Array, sample: Array) -> Array:
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        return jax.random.fold_in(jax.random.fold_in(key, request), sample)

    return jax.vmap(one)(words, request, sample)


def at(key: Array, position: Array, purpose: Purpose, salt: Array | None = None) -> Array:
    """The key of one draw of one row."""
    key = jax.random.fold_in(jax.random.fold_in(key, position), int(purpose))
    return key if salt is None else jax.random.fold_in(key, salt)


def uniforms(keys: Array, positions: Array, purpose: Purpose, salt: Array | None = None) -> Array:
    """Two independent uniforms in [0, 1) for each position: `f32[B, W, 2]` from `key[B]` and `i32[B, W]`.

    `salt` (`i32[B]`) tells apart draws that one position takes in several rounds.
    """
    salt = jnp.zeros(keys.shape, jnp.int32) if salt is None else salt
    one = lambda key, position, salt: jax.random.uniform(at(key, position, purpose, salt), (2,), jnp.float32)
    return jax.vmap(jax.vmap(one, (None, 0, None)))(keys, positions, salt)


def addresses(keys: Array, positions: Array, purpose: Purpose, salt: Array | None = None) -> Array:
    """The two words that each position's draw from a vocabulary is addressed by: `u32[B, W, 2]`.

    Arguments as in `uniforms`. `decodax.sampling.draw` makes the noise of every token from them.
    """
    salt = jnp.zeros(keys.shape, jnp.int32) if salt is None else salt
    one = lambda key, position, salt: address(at(key, position, purpose, salt))
    return jax.vmap(jax.vmap(one, (None, 0, None)))(keys, positions, salt)


def address(key: Array) -> Array:
    """The two words of one key: `u32[2]`."""
    return jax.random.key_data(key)
