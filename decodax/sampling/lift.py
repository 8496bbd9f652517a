"""Applies a chain of transforms, written for one position, to all nodes of a window."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.common.struct import Struct, struct
from decodax.core.checks import array
from decodax.core.window import Window, take
from decodax.sampling.base import Context, PyTree, Temperature, Transform, WarmTemperature


@struct
class Texts(Struct):
    """The verified text of each row and the states of the transforms after it.

    Attributes:
        tokens: `i32[B, N]`, the text, prompt first.
        length: `i32[B]`, number of known tokens.
        prompt_length: `i32[B]`, number of prompt tokens.
        key: `key[B]`, the rows' random keys.
        states: one pytree per transform, with `[B, ...]` leaves.
    """

    tokens: Array
    length: Array
    prompt_length: Array
    key: Array
    states: PyTree


def bound_all(transforms: tuple[Transform, ...], tables: tuple[Any, ...]) -> tuple[Transform, ...]:
    """Returns the transforms, each with the arrays that it needs from `tables`, the arrays that all rows of a policy
    share."""
    return tuple(t.bound(tables) for t in transforms)


def apply_chain(transforms: tuple[Transform, ...], states: PyTree, ctx: Context, logits: Array) -> tuple[PyTree, Array]:
    """Applies transforms, one after the other, to the logits (`f32[V]`) of one position of one row.

    Args:
        transforms: the chain, without a batch axis.
        states: a state for each of them.
        ctx: the text so far.
        logits: the model's logits.

    Returns:
        The states after `Transform.note`, and the final logits, `f32[V]`.
    """
    cold, only, noted = None, logits, []
    for transform, state in zip(transforms, states, strict=True):
        noted.append(transform.note(state, ctx, logits))
        size, logits = logits.shape[0], transform.logits(state, ctx, logits)
        array(f"{type(transform).__name__}.logits", "logits", logits, "f[V]", {"V": size})
        if isinstance(transform, Temperature) and not isinstance(transform, WarmTemperature):
            zero = transform.temperature == 0
            cold, only = (zero, logits) if cold is None else (cold | zero, jnp.where(cold, only, logits))
    # A greedy row keeps its one token: `draw` takes it without computing the transforms after the temperature.
    return tuple(noted), logits if cold is None else jnp.where(cold, only, logits)


def advance_chain(transforms: tuple[Transform, ...], states: PyTree, token: Array, log_prob: Array) -> PyTree:
    """Returns the states of all transforms after `token` (`i32[]`), whose log-probability after the chain is `log_prob`
    (`f32[]`)."""
    return tuple(t.advance(s, token, log_prob) for t, s in zip(transforms, states, strict=True))


def contexts(texts: Texts, window: Window, known: Array, predicts: Array, nodes: Array, reads: bool) -> Context:
    """Returns the contexts of window nodes, `[B, W', ...]`: the verified text and the window tokens to which a node
    attends.

    Args:
        texts: the verified text.
        window: the window.
        known: `bool[B, W]`, nodes with a token; False for mask tokens.
        predicts: `i32[B, W]`, the index of the token that each node's logits predict.
        nodes: `i32[B, W']`, the nodes.
        reads: False: no transform needs tokens, so the contexts have none.
    """
    width = texts.tokens.shape[1]

    def row(tokens: Array, length: Array, prompt_length: Array, key: Array, seen: Array, placed: Array,
            written: Array, predicts: Array) -> Context:
        verified = jnp.where(jnp.arange(width) < length, tokens, -1)

        def node(seen: Array, predicts: Array) -> Context:
            if not reads:
                return Context(jnp.zeros(0, jnp.int32), predicts, prompt_length, key)
            # Nodes that this one does not see are written beyond the end, that is, dropped.
            history = verified.at[jnp.where(seen, placed, width)].set(written, mode="drop")
            return Context(history, predicts, prompt_length, key)

        return jax.vmap(node)(seen, predicts)

    seen = take(jnp.broadcast_to(window.visible(), (*window.tokens.shape, window.width)), nodes) & known[:, None, :]
    return jax.vmap(row)(texts.tokens, texts.length, texts.prompt_length, texts.key, seen, window.positions,
                         window.tokens, take(predicts, nodes))


def walk(transforms: tuple[Transform, ...], start: PyTree, contexts: Context, logits: Array, tokens: Array,
         parent: Array) -> tuple[PyTree, Array]:
    """Applies the chain to the nodes of one row's window in order, for transforms with a state. A node's parent comes
    before it.

    The state at a node is its parent's state, advanced by the node's token; the root has the state `start`.

    Args:
        transforms: the chain, without a batch axis.
        start: the states at the root.
        contexts: the context of each node, `[W, ...]`.
        logits: `f32[W, V]`, the model's logits.
        tokens: `i32[W]`, the nodes' tokens.
        parent: `i32[W]`, each node's parent; negative for the root.

    Returns:
        The states at the nodes, `[W, ...]`, and the processed logits, `f32[W, V]`.
    """
    def visit(carry: tuple[PyTree, Array], x: tuple[Any, ...]) -> tuple[Any, tuple[PyTree, Array]]:
        states, log_probs = carry       # [W, ...]; log_probs[i, j]: of token j after node i
        node, ctx, raw, up = x
        before = jax.tree.map(lambda s: s[up], states)
        moved = advance_chain(transforms, before, tokens[node], log_probs[up, node])
        state = jax.tree.map(lambda a, b: jnp.where(up < 0, a, b), start, moved)
        state, out = apply_chain(transforms, state, ctx, raw)
        states = jax.tree.map(lambda s, new: s.at[node].set(new), states, state)
        return (states, log_probs.at[node].set(jax.nn.log_softmax(out)[tokens])), (state, out)

    width = tokens.shape[0]
    empty = jax.tree.map(lambda x: jnp.broadcast_to(x, (width, *x.shape)), start)
    nodes = jnp.arange(width, dtype=jnp.int32)
    return lax.scan(visit, (empty, jnp.zeros((width, width))), (nodes, contexts, logits, parent))[1]
