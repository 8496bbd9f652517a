"""The predictions of a forward pass at the positions of the windows: candidates, their statistics, and constraints."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.algorithms.diffusion.canvas import Canvas
from decodax.algorithms.diffusion.policies import Stop
from decodax.algorithms.diffusion.rules.stops import EndOfText
from decodax.algorithms.diffusion.stats import statistics
from decodax.algorithms.diffusion.view import Seen, View
from decodax.common.struct import Struct, struct
from decodax.constraints.canvas import OUTSIDE, OnCanvas, Region, accepted
from decodax.core.keys import Purpose
from decodax.core.record import record
from decodax.core.state import State
from decodax.core.types import INVALID, Out, Params
from decodax.core.window import Window, take
from decodax.pallas_kernels.vocabulary import top_k
from decodax.sampling.distribution import Distribution
from decodax.sampling.draw import winner


@struct
class Decided(Struct):
    """Stands in for the decoding state when the policy's transforms are applied to a canvas: `tokens` (`i32[B, N]`) are
    the decided tokens, -1 elsewhere."""

    tokens: Array
    length: Array
    prompt_length: Array
    key: Array
    policy: Any


def predictions(of: Any, params: Params, dist: Any, s: State, c: Canvas, drafts: View, node: Array,
                out: Out) -> tuple[Seen, Any, Any, Array | None]:
    """Returns the model's predictions at the positions of the windows, the record of log-probabilities (or None), a
    second model's entries (or None), and the expected embeddings for a model with self-conditioning (or None).

    Args:
        of: the sampler, a `MaskedDiffusion`.
        params: weights.
        dist: the policy.
        s: state of the core.
        c: the canvas.
        drafts: the canvases of a round, with axes `[B, K, ...]`.
        node: `i32[B, W]`, number of the node whose logits predict a position; -1: none.
        out: result of the forward pass.
    """
    B, K, W = drafts.tokens.shape
    hidden = out.hidden.reshape(B, -1, out.hidden.shape[-1])
    first = hidden.shape[1] // K * jnp.arange(K, dtype=jnp.int32)
    nodes = (jnp.maximum(node, 0)[:, None] + first[:, None]).reshape(B, K * W)
    merge = lambda x: x.reshape(B, K * W)
    split = lambda tree: jax.tree.map(lambda x: x.reshape(B * K, W, *x.shape[2:]), tree)
    own = split(of.adapter.clean(out.head)(take(hidden, nodes)))
    flat = jax.tree.map(lambda x: x.reshape(B * K, *x.shape[2:]), drafts)
    logits = of.shaper(flat, own, c.memory["shaper"]).reshape(B, K * W, -1)

    # the transforms read the decided text: that outside the window, and draft by draft that inside it
    N = c.tokens.shape[1]
    place = jnp.arange(N, dtype=jnp.int32)
    unknown = c.open | (place >= c.end[:, None])
    inside = (place >= c.start[:, None]) & (place < c.start[:, None] + W)
    text = Decided(tokens=jnp.where(unknown | inside, -1, c.tokens), length=jnp.full(B, N, jnp.int32),
                prompt_length=s.prompt_length, key=s.key, policy=s.policy)
    known = merge(~drafts.open & (drafts.positions < drafts.end[..., None]))
    window = Window(tokens=merge(drafts.tokens), positions=merge(drafts.positions), live=known,
                    mask=side_by_side(jnp.ones((1, W, W), bool), K))

    def over(logits: Array) -> Distribution:
        return dist.policy.over_logits(text, window, logits).on_canvas(known, window.positions)

    here = over(logits)
    agreed = entries = None
    if of.verify.assists:
        last = take(c.tokens, jnp.maximum(c.start - 1, 0)[:, None])[:, 0]
        token, agreed, entries = of.verify.judge(params.draft, c.assistant, flat, last, logits,
                                                 lambda x: over(x).processed())
    else:
        draws = [here.draw(jnp.broadcast_to(k * W + jnp.arange(W, dtype=jnp.int32), (B, W)), Purpose.CANVAS,
                           salt=c.round + len(of.verify.taken[k])) for k in range(K)]
        token = jnp.concatenate(draws, 1)
    reached, best = merge(jnp.broadcast_to((node >= 0)[:, None], (B, K, W))), None
    early = jnp.zeros(first.shape[0] * B, bool)
    if any(stop.likeliest for stop in of.stops):
        best = winner(here.stages()[0])
        certain = split(Seen(token=best, reached=reached, model=statistics(logits, best), policy=None, best=best))
        for stop, own_memory in zip(of.stops, c.memory["stops"], strict=True):
            early = early | stop.early_stop(flat, certain, own_memory) if stop.likeliest else early
        token = jnp.where(merge(jnp.broadcast_to(early.reshape(B, K, 1), (B, K, W))), best, token)
    link = next((t for t in dist.policy.transforms if isinstance(t, OnCanvas)), None)
    if link is not None:
        token = _held(of, link, dist, s, c, here, flat, token, node, first.shape[0], early)
    rules = (of.windows, of.score, of.unmask, of.remask, *of.stops)
    second = None
    if any(rule.of == "policy" for rule in rules):
        second = statistics(here.warm.processed(), token)
    seen = split(Seen(token=token, reached=reached, model=statistics(logits, token), policy=second, agreed=agreed,
                      best=best))
    if reads := max(rule.reads for rule in (of.shaper, *rules)):
        top, ids = top_k(own, reads)
        seen = seen.replace(likeliest=(ids, top - jax.nn.logsumexp(own, -1, keepdims=True)))
    note = None if c.record is None else record(logits, here.log_probs(), token, c.record.count)
    note = note if note is None else jax.tree.map(lambda x: x.reshape(B, K, W, *x.shape[2:]), note)
    expected = None
    if of.adapter.conditioning:
        if out.expect is None:
            raise ValueError("lm: its settings say that the model reads its last predictions (conditioning), which it "
                             "does not")
        expected = out.expect(jax.nn.softmax(logits)).astype(jnp.float32)
    return seen, note, entries, expected


def _held(of: Any, link: OnCanvas, dist: Any, s: State, c: Canvas, here: Distribution, flat: View, token: Array,
          node: Array, count: int, early: Array) -> Array:
    """Returns candidates with which each canvas can be completed to a text of its row's constraint, `i32[B, K * W]`:
    the likeliest ones in rows that are greedy or in `early` (`bool[B * K]`)."""
    if of.verify.assists:
        raise ValueError("constraints: a second model decides what is unmasked; takes a sampler without one")
    # A rule that ends a window early is no danger, since the candidates of all positions are those of one text.
    if any(type(stop).end is not Stop.end and not isinstance(stop, EndOfText) for stop in of.stops):
        raise ValueError("constraints: a rule ends texts early, which may not be whole then; takes a sampler "
                         "without such a rule")
    (B, width), W = token.shape, flat.tokens.shape[1]
    split = lambda x: x.reshape(B * count, W, *x.shape[2:])
    each = lambda x: jnp.repeat(x, count, 0)
    before, after = map(split, here.stages())
    # tokens that a truncation has removed are taken only where the language needs them; greedy rows treat all alike
    cold = each(dist.policy.greedy) | early
    soft = jnp.where(after == -jnp.inf, jax.nn.log_softmax(before) - OUTSIDE, jax.nn.log_softmax(after))
    weights = jnp.where(cold[:, None, None], jax.nn.log_softmax(before), soft)
    weights = jnp.where(before == -jnp.inf, -jnp.inf, weights)
    # positions that this round has not looked at may hold anything that is not banned
    reached = each(node >= 0)[..., None]
    weights = jnp.where(reached, weights, jnp.where(before == -jnp.inf, -jnp.inf, 0.0))
    place = jnp.arange(c.tokens.shape[1], dtype=jnp.int32)
    region = Region(tokens=each(c.tokens), known=each(~c.open & (place < c.end[:, None])),
                    begin=each(s.prompt_length), end=flat.end, start=flat.start, given=flat.tokens,
                    open=flat.masked)
    link = link.replace(start=each(link.start), end=each(link.end))
    new = accepted(link, dist.policy.tables, each(dist.policy.eos), region, weights, cold,
                   flat.addresses(Purpose.CANVAS), split(token))
    # broken logits stay visible
    return jnp.where(split(token) == INVALID, INVALID, new).reshape(B, width)


def side_by_side(mask: Array, count: int) -> Array:
    """Returns the attention mask of `count` canvases in one window, `bool[B, count * n, count * n]`, from that of one
    canvas, `mask` (`bool[B, n, n]`). It is block-diagonal: no canvas attends to another."""
    apart = jnp.eye(count, dtype=bool)[:, None, :, None]
    return (apart & mask[:, None, :, None, :]).reshape(mask.shape[0], count * mask.shape[1], -1)
