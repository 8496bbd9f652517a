"""Linear attention: layers whose keys and values are summed in a state of constant size ("Transformers are RNNs",
Katharopoulos et al., 2020), and the cache of such states.

A query gives a key the weight `phi(q) phi(k)`, so its output over a whole text is `phi(q) S` with the sum `S = sum
phi(k)^T v`. Attention among the nodes of a window, a chain or a tree, is computed from their keys and values under the
window's mask, as matrix products; nodes have no states of their own. The entry of a node is its key and value, and
`commit` adds those of the accepted nodes to the state.

A prompt is processed in blocks by the same functions, so time is linear in its length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.cache.entry import own_entry
from decodax.cache.tree_buffer import TreeBuffer
from decodax.common.struct import Struct, static, struct
from decodax.core.cache import Entries, Feature, PyTree, Sized
from decodax.core.capabilities import Draftable, DraftBase

BLOCK = 64
"""Number of nodes of a prompt that are processed at a time."""

Features = Literal["identity", "elu", "taylor"]
"""`phi`: `x`; `elu(x) + 1` (Katharopoulos et al., 2020); or the terms up to the second order of `exp(q k / sqrt(d))`,
`(1, x / d^(1/4), x x^T / sqrt(2 d))` (Based: Arora et al., 2024)."""


@dataclasses.dataclass(frozen=True)
class LinearRule:
    """Options of a layer of linear attention.

    Attributes:
        features: name of the feature map `phi`.
        normalise: whether the sum of weighted values is divided by the sum of weights.
        group: number of positions of a group. A query gives the keys of its own group the weight `max(0, q k)^2`, and
            those of earlier groups the weight `phi(q) phi(k)` (FLASH: Hua et al., 2022). 0: there are no groups.
        taps: width of a causal convolution of the values, whose result is added to the output, with factors for each
            query head (`LinearTerms.taps`). 0: no convolution.
        unit: whether queries and keys are normalised to length 1.
        factor: whether the weights `phi(q) phi(k)` have a learned factor (`LinearTerms.factor`).
        width: number of channels of queries and keys; None: that of the decoder's other heads.
        prefix: whether the state begins with the keys and values of an encoder (`encoded`).
    """

    features: Features = "elu"
    normalise: bool = True
    group: int = 0
    taps: int = 0
    unit: bool = False
    factor: bool = False
    width: int | None = None
    prefix: bool = False

    def __post_init__(self) -> None:
        if self.features not in get_args(Features):
            raise ValueError(f"features: got {self.features!r}, takes one of {', '.join(get_args(Features))}")
        for name in ("group", "taps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: got {getattr(self, name)}, takes 0 or more")
        if self.width is not None and self.width < 1:
            raise ValueError(f"width: got {self.width}, takes 1 or more, or None")

    @property
    def recent(self) -> int:
        """Number of latest tokens whose keys and values are stored beside the state, for an incomplete group and the
        convolution."""
        return max(self.group - 1, self.taps - 1, 0)

    def size(self, width: int) -> int:
        """Returns the number of features `r` of a vector with `width` channels."""
        return 1 + width + width * width if self.features == "taylor" else width

    def phi(self, x: Array) -> Array:
        """Maps `f[..., d]` to features, `f32[..., r]`."""
        x = x.astype(jnp.float32)
        if self.features == "identity":
            return x
        if self.features == "elu":
            return jax.nn.elu(x) + 1
        d = x.shape[-1]
        one, square = jnp.ones((*x.shape[:-1], 1), jnp.float32), (x[..., :, None] * x[..., None, :])
        return jnp.concatenate([one, x * d ** -0.25, square.reshape(*x.shape[:-1], d * d) * (2 * d) ** -0.5], -1)


@struct
class LinearTerms(Struct):
    """Arguments of `attend` for a layer of linear attention, beside queries, keys and values.

    Attributes:
        rule: static; options of the layer.
        factor: `f[1]`, factor of the weights `phi(q) phi(k)`; None: 1.
        taps: `f[H, taps]`, factors of the values at the distances 0, 1, .. for each query head; None: none.
        encoder: keys and values of the same nodes from the layer's encoder, `f[B, T, G, d]` and `f[B, T, G, e]`. Only
            used when a prefix is encoded.
    """

    rule: LinearRule = static()
    factor: Array | None = None
    taps: Array | None = None
    encoder: tuple[Array, Array] | None = None


@struct
class LinearState(Struct):
    """The state of a layer of linear attention after a text: a sum over its tokens of the outer product of `phi(k)`,
    the features of the key, and the value.

    Attributes:
        sums: `f32[B, G, r, e]`, this sum for `r` features; with `LinearRule.normalise`, one more column holds the sum
            of `phi(k)`. With groups, only complete groups are summed.
        recent: `f[B, G, R, d + e]`, the key and value of the token at position `p` in slot `p % R`, for the last `R`
            tokens.
    """

    sums: Array
    recent: Array

    @classmethod
    def empty(cls, rule: LinearRule, batch: int, heads: int, width: int, values: int,
              dtype: jax.typing.DTypeLike) -> LinearState:
        """Returns the state after no token.

        Args:
            rule: options of the linear attention.
            batch: number of rows.
            heads: number of key/value heads `G`.
            width, values: widths `d` of keys and `e` of values.
            dtype: dtype of `recent`.
        """
        return cls(sums=jnp.zeros((batch, heads, rule.size(width), values + rule.normalise), jnp.float32),
                   recent=jnp.zeros((batch, heads, rule.recent, width + values), dtype))

    def held(self, length: Array) -> Array:
        """Returns the position of the token in each slot after a text of `length` (`i32[B]`), `i32[B, R]`; -1: none."""
        R, last = self.recent.shape[2], length[:, None] - 1
        at = last - (last - jnp.arange(R, dtype=jnp.int32)) % max(R, 1)
        return jnp.where(at >= 0, at, -1)

    def pairs(self, width: int) -> tuple[Array, Array]:
        """Returns the keys `f[B, R, G, d]` and the values `f[B, R, G, e]` of the slots. `width` is the width `d` of
        keys."""
        both = self.recent.swapaxes(1, 2)
        return both[..., :width], both[..., width:]


def mix(terms: LinearTerms, state: LinearState, length: Array, q: Array, k: Array, v: Array, seen: Array, at: Array,
        keys_at: Array) -> Array:
    """Computes linear attention of a window's queries to the text before it, by its state, and to the keys of the
    window.

    Args:
        terms: rule and weights of the layer.
        state: state of the layer after the text.
        length: `i32[B]`, number of tokens of the text.
        q: `f[B, W, H, d]`, queries.
        k, v: `f[B, K, G, d]` and `f[B, K, G, e]`, keys and values of the window.
        seen: `bool[B, W, K]`, True if a query attends to a key of the window.
        at, keys_at: positions of queries and keys, `i32[B, W]` and `i32[B, K]`.

    Returns:
        `f[B, W, H, e]`.
    """
    rule, (B, W, H, d), G = terms.rule, q.shape, k.shape[2]
    queries = q.astype(jnp.float32).reshape(B, W, G, H // G, d)
    scale = 1.0 if terms.factor is None else terms.factor.astype(jnp.float32)[0]
    phi = rule.phi(queries)
    sums = scale * jnp.einsum("bwgmr,bgre->bwgme", phi, state.sums)
    if rule.recent:
        held, (old_k, old_v) = state.held(length), state.pairs(d)
        k, v = jnp.concatenate([old_k.astype(k.dtype), k], 1), jnp.concatenate([old_v.astype(v.dtype), v], 1)
        keys_at = jnp.concatenate([held, keys_at], 1)
        seen = jnp.concatenate([jnp.broadcast_to((held >= 0)[:, None], (B, W, held.shape[1])), seen], 2)
    seen = seen[:, :, None, None]                       # [B, W, 1, 1, K]
    far = (at[:, :, None] - keys_at[:, None])[:, :, None, None]
    k, v = k.astype(jnp.float32), v.astype(jnp.float32)
    scores = jnp.einsum("bwgmd,bkgd->bwgmk", queries, k)
    if rule.features == "taylor":
        through = 1 + scores * d ** -0.5 + jnp.square(scores) / (2 * d)
    elif rule.features == "identity":
        through = scores
    else:
        through = jnp.einsum("bwgmr,bkgr->bwgmk", phi, rule.phi(k))
    if rule.group:
        own, theirs = (x // rule.group for x in (at[:, :, None], keys_at[:, None]))
        # the sums hold the complete groups; a group that ends within the window is weighted by phi, too
        apart = (theirs < own) & (theirs >= (length // rule.group)[:, None, None])
        near, apart = (theirs == own)[:, :, None, None], apart[:, :, None, None]
        weights = jnp.where(near, jnp.square(jax.nn.relu(scores)), jnp.where(apart, scale * through, 0))
    else:
        weights = scale * through
        if rule.recent:                                 # the sums hold all tokens of the text
            weights = jnp.where((keys_at >= length[:, None])[:, None, None, None], weights, 0)
    weights = jnp.where(seen, weights, 0)
    out = sums + jnp.einsum("bwgmk,bkge->bwgme", weights, _with_ones(rule, v))
    if rule.normalise:
        out = out[..., :-1] / (out[..., -1:] + 1e-12)
    if rule.taps and terms.taps is not None:
        taps = terms.taps.astype(jnp.float32).T[jnp.clip(far[:, :, 0, 0], 0, rule.taps - 1)]      # [B, W, K, H]
        taps = taps.swapaxes(2, 3).reshape(B, W, G, H // G, -1)
        taps = jnp.where(seen & (far >= 0) & (far < rule.taps), taps, 0)
        out = out + jnp.einsum("bwgmk,bkge->bwgme", taps, v)
    return out.reshape(B, W, H, -1).astype(q.dtype)


def taken_in(rule: LinearRule, state: LinearState, length: Array, k: Array, v: Array, slots: Array) -> LinearState:
    """Returns the state after further tokens of the text.

    Args:
        rule: options of the layer.
        state: the state before these tokens.
        length: `i32[B]`, number of tokens before.
        k, v: `f[B, W, G, d]` and `f[B, W, G, e]`, keys and values of the tokens.
        slots: `i32[B, W]`, positions of the tokens, which continue the text; -1: not added.
    """
    after, d = jnp.maximum(length, slots.max(1) + 1), k.shape[-1]
    new_k, new_v, at = k, v, slots
    if rule.group:          # a group is added to the sum when it is complete
        old_k, old_v = state.pairs(d)
        new_k, new_v = (jnp.concatenate([old.astype(new.dtype), new], 1) for old, new in ((old_k, k), (old_v, v)))
        at = jnp.concatenate([state.held(length), slots], 1)
        begun, over = length // rule.group * rule.group, after // rule.group * rule.group
        joins = (at >= begun[:, None]) & (at < over[:, None])
    else:
        joins = at >= 0
    phi = jnp.where(joins[:, :, None, None], rule.phi(new_k), 0)
    # values of other tokens may be NaN and must not reach the sum
    values = jnp.where(joins[:, :, None, None], _with_ones(rule, new_v.astype(jnp.float32)), 0)
    state = state.replace(sums=state.sums + jnp.einsum("bkgr,bkge->bgre", phi, values))
    if R := rule.recent:
        stays = (slots >= 0) & (slots >= (after - R)[:, None])
        to = jnp.where(stays, slots % R, R)
        both = jnp.concatenate([k, v], -1).swapaxes(1, 2).astype(state.recent.dtype)
        put = jax.vmap(lambda row, new, to: row.at[:, to].set(new, mode="drop"))
        state = state.replace(recent=put(state.recent, both, to))
    return state


def along(terms: LinearTerms, state: LinearState, length: Array, q: Array, k: Array, v: Array, live: Array, at: Array
          ) -> Array:
    """Computes linear attention of a chain of nodes to the text before it and to each other, in blocks of nodes. A node
    attends to itself and the live nodes before it.

    Args:
        terms, state, length: see `mix`.
        q, k, v: `f[B, W, H, d]`, `f[B, W, G, d]` and `f[B, W, G, e]`, queries, keys and values.
        live: `bool[B, W]`, nodes that others attend to.
        at: `i32[B, W]`, positions.

    Returns:
        `f[B, W, H, e]`.
    """
    W = q.shape[1]

    def visit(carry: tuple[LinearState, Array], block: tuple[Array, ...]) -> tuple[Any, Array]:
        (state, length), (q, k, v, live, at) = carry, block
        n = q.shape[1]
        seen = (jnp.tril(jnp.ones((n, n), bool)) & live[:, None]) | jnp.eye(n, dtype=bool)
        out = mix(terms, state, length, q, k, v, seen, at, at)
        slots = jnp.where(live, at, -1)
        state = taken_in(terms.rule, state, length, k, v, slots)
        return (state, jnp.maximum(length, slots.max(1) + 1)), out

    _, out = lax.scan(visit, (state, length), tuple(map(_blocks, (q, k, v, live, at))))
    return out.swapaxes(0, 1).reshape(q.shape[0], -1, *out.shape[3:])[:, :W]


def over_text(terms: LinearTerms, q: Array, k: Array, v: Array, mask: Array | None, at: Array,
              prefix: Array | None = None) -> tuple[Array, Array]:
    """Computes linear attention among the nodes of a whole text, without a cache, for training and for encoders.

    Args:
        terms, q, k, v, at: see `mix`.
        mask: `bool[B or 1, W, W]`, True if a node attends to another; None: a chain.
        prefix: `i32[B]`, number of first positions whose encoder keys and values all nodes attend to; None: none.

    Returns:
        `f[B, W, H, e]`, and the sum over the encoder's keys and values, `f32[B, G, r, e + 1]` (`e` without
        `LinearRule.normalise`).
    """
    rule, (B, W, _, d), G = terms.rule, q.shape, k.shape[2]
    state = LinearState.empty(rule, B, G, d, v.shape[-1], v.dtype)
    zero = jnp.zeros(B, jnp.int32)
    if prefix is not None and terms.encoder is not None:
        state = encoded(rule, state, *terms.encoder, at < prefix[:, None])
    if mask is None:
        return along(terms, state, zero, q, k, v, jnp.ones((B, W), bool), at), state.sums
    return mix(terms, state, zero, q, k, v, jnp.broadcast_to(mask, (B, W, W)), at, at), state.sums


def encoded(rule: LinearRule, state: LinearState, k: Array, v: Array, live: Array) -> LinearState:
    """Adds the encoder's keys and values at live nodes to the sums of an empty state; see `over_text`."""
    live = live[:, :, None, None]
    phi, values = jnp.where(live, rule.phi(k), 0), jnp.where(live, _with_ones(rule, v.astype(jnp.float32)), 0)
    return state.replace(sums=state.sums + jnp.einsum("bkgr,bkge->bgre", phi, values))


def _with_ones(rule: LinearRule, v: Array) -> Array:
    """Appends a 1 to each value if the rule normalises, so that the sum of weights is computed with that of values."""
    return jnp.concatenate([v, jnp.ones((*v.shape[:-1], 1), v.dtype)], -1) if rule.normalise else v


def _blocks(x: Array) -> Array:
    """Cuts `[B, W, ...]` into `[n, B, BLOCK, ...]`, padded with zeros."""
    more = -x.shape[1] % BLOCK
    x = jnp.pad(x, ((0, 0), (0, more), *[(0, 0)] * (x.ndim - 2)))
    return x.reshape(x.shape[0], -1, BLOCK, *x.shape[2:]).swapaxes(0, 1)


@struct
class LinearStates(Sized, DraftBase):
    """The state of each layer of linear attention after the verified text. An entry is a pair of a key and a value.

    Attributes:
        states: the `LinearState` of each layer.
        length: `i32[B]`, number of tokens of the verified text.
        given: inputs of each row beside its tokens; see `Cache.inputs`.
        rules: static; the `LinearRule` of each layer.
        size: static; maximum number of tokens of a text.
    """

    supports: ClassVar[frozenset[Feature]] = frozenset(("trees",))

    states: tuple[LinearState, ...]
    length: Array
    given: PyTree
    rules: tuple[LinearRule, ...] = static()
    size: int = static()

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *,       # type: ignore[override]
               linear: LinearTerms) -> tuple[Array, PyTree]:
        """Computes linear attention; see `Cache.attend`. `linear` has the options and weights of the layer."""
        state = self.states[layer]
        if window.is_prefill and q.shape[1] > BLOCK:
            out = along(linear, state, self.length, q, k, v, window.live, window.positions)
        else:
            out = mix(linear, state, self.length, q, k, v, window.visible(), window.positions, window.key_positions)
        return out, own_entry(q, k, v)

    def commit(self, entries: Entries, slots: Array) -> LinearStates:
        if not self.size:
            return self
        states = tuple(_committed(rule, state, self.length, entry.keys, entry.values, slots)
                       for rule, state, entry in zip(self.rules, self.states, entries, strict=True))
        return self.replace(states=states, length=jnp.maximum(self.length, slots.max(1) + 1))

    def tree_buffer(self, entries: Entries, room: int) -> Draftable:
        return TreeBuffer.empty(self, entries, room)


def _committed(rule: LinearRule, state: LinearState, length: Array, k: Array, v: Array, slots: Array) -> LinearState:
    if slots.shape[1] <= BLOCK:
        return taken_in(rule, state, length, k, v, slots)

    def visit(carry: tuple[LinearState, Array], block: tuple[Array, ...]) -> tuple[Any, None]:
        (state, length), (k, v, slots) = carry, block
        state = taken_in(rule, state, length, k, v, slots - 1)
        return (state, jnp.maximum(length, slots.max(1))), None

    # slots plus one, so that the padding of zeros means none
    return lax.scan(visit, (state, length), tuple(map(_blocks, (k, v, slots + 1))))[0][0]


def linear_states(rules: Sequence[LinearRule], shapes: Sequence[tuple[int, int, int]], batch: int, capacity: int,
                  dtype: jax.typing.DTypeLike, inputs: PyTree = None) -> LinearStates:
    """Returns empty states.

    Args:
        rules: the `LinearRule` of each layer.
        shapes: for each layer the number of key/value heads `G`, and the widths `d` and `e` of keys and values.
        batch: number of rows.
        capacity: maximum number of tokens of a text; 0: the cache stores nothing.
        dtype: dtype of the stored latest tokens; sums are float32.
        inputs: inputs of each row beside its tokens; see `Cache.inputs`.
    """
    states = tuple(LinearState.empty(rule, batch, *shape, dtype) for rule, shape in zip(rules, shapes, strict=True))
    return LinearStates(states=states, length=jnp.zeros(batch, jnp.int32), given=inputs, rules=tuple(rules),
                        size=capacity)
