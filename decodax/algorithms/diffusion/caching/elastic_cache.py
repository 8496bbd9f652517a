"""Elastic-Cache: recomputes entries when attention changes, from the layer on where it changes ("Attention Is All You
Need for KV Cache in Diffusion LLMs", Nguyen-Tri, Ranjan, Shen, 2025).

A forward pass computes a few nodes only: tokens that were just decided, the first masked positions, and *tracked*
tokens: for each layer the decided token that masked positions attended to most. They attend to the cache for all other
positions. If the attention of the tracked tokens is no longer similar to that in the forward pass before, the layers
above are computed for the whole text, from the residual stream that was cached below the first of them. When an end of
sequence is decided, the masks after it are not decided any more; they stay in the canvas and are still attended to, as
in the authors' loop.

The model is run layer by layer, through `Transformer.pieces`: `Tracking` is a model that wraps the model. The rule is
that of the authors' code for LLaDA: similarity is the cosine over heads, averaged over tracked tokens and keys (the
paper defines it as the cosine of attention rows). The cache is approximate.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.algorithms.diffusion.adapter import Adapter, Nodes
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.caching.dllm_cache import dense_cache
from decodax.algorithms.diffusion.caching.rewriting import Rewriting
from decodax.algorithms.diffusion.policies import Memory
from decodax.algorithms.diffusion.rules.stops import FirstEnd
from decodax.algorithms.diffusion.rules.unmasking import Threshold
from decodax.algorithms.diffusion.rules.windows import Whole
from decodax.algorithms.diffusion.stats import cosine
from decodax.algorithms.diffusion.view import Seen, View
from decodax.cache import AttentionView, Dense, Wrapper
from decodax.common.options import Count, Range, Share
from decodax.common.registry import ALGORITHMS
from decodax.common.struct import Struct, struct
from decodax.core.cache import Cache, Entries
from decodax.core.types import LayeredModel, Model, Out
from decodax.core.window import Window, take


@struct
class TextEnd(Struct):
    """A hint (`Window.hints`) for the model `Tracking`: where each row's text ends.

    Attributes:
        end: `i32[B]`, the position after the last token; attention to later positions is not tracked.
    """

    end: Array


@struct
class Tracked(Struct):
    """Features that a forward pass of `Tracking` returns for its cache.

    Attributes:
        entries: keys and values of the nodes, for each layer.
        streams: for each layer `f[B, W, D]`, the residual stream of the nodes before the layer.
        queries: for each layer `f[B, W, H, d]`, queries of the nodes.
        text: for each layer keys, values, residual stream and queries of all slots; None if the nodes are the text.
        renewed: for each layer `bool[B]`, rows for which `text` was computed.
        track: `i32[B, L]`, the tracked position of each layer.
        masked: `bool[B, S]`, masked positions.
        renewals: `i32[B]`, number of layers that were computed for the whole text.
    """

    entries: Entries
    streams: tuple[Array, ...]
    queries: tuple[Array, ...]
    text: tuple[tuple[Array, ...], ...] | None
    renewed: tuple[Array, ...] | None
    track: Array
    masked: Array
    renewals: Array


@struct
class TrackingCache(Wrapper):
    """A cache of keys and values, of residual streams and of queries. The slot of a token is its position.

    Attributes:
        base: the cache of keys and values.
        streams: for each layer `f[B, S, D]`, the residual stream before it.
        queries: for each layer `f[B, S, H, d]`.
        track: `i32[B, L]`, the tracked position of each layer.
        masked: `bool[B, S]`, masked positions in the last forward pass.
        renewals: `i32[B]`, number of layers that were computed for the whole text, without the first forward pass.
    """

    base: Dense
    streams: tuple[Array, ...]
    queries: tuple[Array, ...]
    track: Array
    masked: Array
    renewals: Array

    def commit(self, entries: Any, slots: Array) -> TrackingCache:
        # wait for the attention that reads the cache: otherwise the write would copy it
        slots = jnp.where((entries.track >= 0).all(1, keepdims=True), slots, -1)
        at, ran = jnp.where(slots >= 0, slots, self.capacity), (slots >= 0).any(1)
        put = jax.vmap(lambda row, new, at: row.at[at].set(new.astype(row.dtype), mode="drop"))
        both = lambda caches, news: tuple(put(x, new, at) for x, new in zip(caches, news, strict=True))
        rows = lambda new, old: jnp.where(ran.reshape(-1, *[1] * (old.ndim - 1)), new, old)
        new = self.replace(base=self.base.commit(entries.entries, slots), streams=both(self.streams, entries.streams),
                           queries=both(self.queries, entries.queries), track=rows(entries.track, self.track),
                           masked=rows(entries.masked, self.masked),
                           renewals=rows(self.renewals + entries.renewals, self.renewals))
        if entries.text is None:
            return new
        layers = [_renew((new.base.kv[i], new.streams[i], new.queries[i]), text, renewed & ran)
                  for i, (text, renewed) in enumerate(zip(entries.text, entries.renewed, strict=True))]
        kv, streams, queries = zip(*layers, strict=True)
        return new.replace(base=new.base.replace(kv=kv), streams=streams, queries=queries)


def _scores(q: Array, keys: Array) -> Array:
    """Returns the products of queries `f[B, n, H, d]` and keys `f[B, G, S, d]`, `f32[B, H, n, S]`."""
    (B, n, H, d), G = q.shape, keys.shape[1]
    grouped = q.reshape(B, n, G, H // G, d).transpose(0, 2, 3, 1, 4).reshape(B, G, -1, d)
    scores = jnp.einsum("bgqd,bgsd->bgqs", grouped, keys, preferred_element_type=jnp.float32)
    return scores.reshape(B, H, n, -1)


def _renew(caches: tuple[Array, ...], text: tuple[Array, ...], rows: Array) -> tuple[Array, ...]:
    """Returns a layer's caches, with those of `text` (`[B, S, ...]`) in the given rows. It is a loop of at most one
    iteration, since XLA copies the caches that a conditional writes to."""
    def write(carry: Any) -> Any:
        kv, *rest = carry[1]
        k, v, *more = text
        heads = [(kv, jnp.concatenate([k, v], -1).swapaxes(1, 2)), *zip(rest, more, strict=True)]
        return jnp.zeros((), bool), tuple(jnp.where(rows.reshape(-1, *[1] * (old.ndim - 1)), new.astype(old.dtype), old)
                                          for old, new in heads)

    return lax.while_loop(lambda carry: carry[0], write, (rows.any(), caches))[1]


class Held:
    """Calls a cache's `attend` for one window, and keeps the queries and the scale of the last call in its attributes
    `queries` (`f[B, W, H, d]`) and `scale`."""

    queries: Array
    scale: float

    def __init__(self, cache: Any, window: Any):
        self.cache, self.window = cache, window

    def __call__(self, layer: int, q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Any]:
        self.queries, self.scale = q, options["scale"]
        return self.cache.attend(layer, q, k, v, self.window, **options)


@dataclasses.dataclass(frozen=True)
class Tracking(Model):
    """A model that computes layers for the whole text if attention has changed below them.

    Attributes:
        model: a `Transformer` with a dense cache.
        gamma: minimum similarity of attention; if it is smaller, the layers above are computed for the whole text.
        mask: id of the mask token.
        window: number of first masked positions of the text whose attention counts.
        whole: True if the nodes are the text, and there is no earlier attention to compare with.
    """

    model: Any
    gamma: float
    mask: int
    window: int
    whole: bool

    def init_cache(self, batch: int, capacity: int, *, params: Any = None, inputs: Any = None) -> Cache:
        if not isinstance(self.model, LayeredModel):
            raise ValueError(f"model: got {type(self.model).__name__}, takes a Transformer, whose layers can be run "
                             "one by one")
        base, c = dense_cache(self.model, batch, capacity, params, inputs), self.model.config
        zeros = lambda *shape: tuple(jnp.zeros((batch, capacity, *shape), base.kv[0].dtype) for _ in c.layers)
        return TrackingCache(
            base=base, streams=zeros(c.width), queries=zeros(c.heads, c.head_dim),
            track=jnp.zeros((batch, len(c.layers)), jnp.int32), masked=jnp.zeros((batch, capacity), bool),
            renewals=jnp.zeros(batch, jnp.int32))

    def apply(self, params: Any, window: Window, cache: Any) -> Out:
        net, places, S = self.model.pieces(params), window.positions, cache.capacity
        B = places.shape[0]
        at = jnp.where(window.live & (places < S), places, S)
        put = jax.vmap(lambda row, at, new: row.at[at].set(new.astype(row.dtype), mode="drop"))
        masked = put(cache.masked, at, window.tokens == self.mask)
        text = put(jnp.zeros((B, S), bool), at, window.live)
        text = text if self.whole else text | window.cached
        text_end = window.hint(TextEnd)
        assert text_end is not None
        ahead = jnp.arange(S) < text_end.end[:, None]       # slots before the end of the text
        masked = masked & ahead
        asks = window.live & (window.tokens == self.mask) & take(ahead, jnp.minimum(places, S - 1))
        asks = asks & (jnp.cumsum(asks, 1) <= self.window)
        asking = jnp.argsort(~asks, axis=1, stable=True)[:, :self.window]
        asked = take(asks, asking)

        x, whole = net.embed(window, cache), jnp.zeros((B, S, net.network.c.width))
        # rows whose layer runs for the whole text, and rows of which the layer below did
        full = going = jnp.zeros(B, bool)
        renewals = jnp.zeros(B, jnp.int32)
        all_places = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, S))
        beside = AttentionView(positions=all_places, key_positions=all_places,
                               seen=jnp.broadcast_to(text[:, None], (B, S, S)), cached=jnp.zeros((B, 0), bool))
        entries, streams, queries, texts, renewed, track = [], [], [], [], [], []
        for layer in range(net.layers):
            before, held = x, Held(cache, window)
            added, entry = net.attention(layer, x, places, held)
            k = entry.keys
            x = x + added
            x = x + net.mlp(layer, x)
            q, scale = held.queries, held.scale
            node = lambda q, k=k, layer=layer, scale=scale: self._rows(q, k, at, cache, layer, text, scale)
            if self.whole:
                weights = self._weights(take(q, asking), k.swapaxes(1, 2), window.live, scale)[..., :S]
            else:
                weights = node(take(q, asking))
                def run(layer: int = layer, before: Array = before, whole: Array = whole,
                        going: Array = going) -> tuple[Array, ...]:
                    entering = put(cache.streams[layer], at, before)
                    starts, held = jnp.where(going[:, None, None], whole, entering), Held(cache, beside)
                    added, own = net.attention(layer, starts, all_places, held)
                    y = starts + added
                    return y + net.mlp(layer, y), own.keys, own.values, starts, held.queries

                none = lambda run=run: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(run))
                after, *fresh = lax.cond(full.any(), run, none)
                texts.append(tuple(fresh))
                renewed.append(full)
                asks_at = jnp.minimum(take(places, asking), S - 1)
                again = self._weights(take(fresh[3], asks_at), fresh[0].swapaxes(1, 2), text, scale)
                weights = jnp.where(full[:, None, None, None], again, weights)
                x = jnp.where(full[:, None, None], take(after, jnp.minimum(places, S - 1)), x)
                renewals = renewals + full
                drifts = ~full & (self._likeness(cache, layer, q, places, node, text, scale) < self.gamma)
                whole, going, full = after, full, full | drifts
            column = jnp.where(asked[:, None, :, None], weights, 0).sum((1, 2))
            track.append(jnp.argmax(jnp.where(masked | ~text, -1, column), 1).astype(jnp.int32))
            entries.append(entry)
            streams.append(before)
            queries.append(q)
        return net.out(x, Tracked(
            entries=tuple(entries), streams=tuple(streams), queries=tuple(queries), text=None if self.whole else
            tuple(texts), renewed=None if self.whole else tuple(renewed), track=jnp.stack(track, 1), masked=masked,
            renewals=renewals))

    def _weights(self, q: Array, keys: Array, text: Array, scale: float) -> Array:
        """Returns attention weights `f32[B, H, n, S]` of queries `f[B, n, H, d]` to keys `f[B, G, S, d]`."""
        return self._softmax(_scores(q, keys), text, scale)

    def _rows(self, q: Array, k: Array, at: Array, cache: Any, layer: int, text: Array, scale: float) -> Array:
        """Returns attention weights `f32[B, H, n, S]` for the cached keys, in which `k` (`f[B, W, G, d]`) replaces
        those of the nodes."""
        old = _scores(q, cache.base.keys(layer))
        new = _scores(q, k.swapaxes(1, 2))
        joined = jax.vmap(lambda row, at, new: row.at[..., at].set(new, mode="drop"))(old, at, new)
        return self._softmax(joined, text, scale)

    def _softmax(self, scores: Array, text: Array, scale: float) -> Array:
        return jax.nn.softmax(jnp.where(text[:, None, None], scores * scale, -1e30), -1)

    def _likeness(self, cache: Any, layer: int, q: Array, places: Array, node: Any, text: Array, scale: float) -> Array:
        """Returns the similarity of the tracked tokens' attention to that in the forward pass before, `f32[B]`."""
        tracked = cache.track
        index = jnp.argmax(places[:, None, :] == tracked[:, :, None], 2)
        now = node(take(q, index))
        then = self._weights(take(cache.queries[layer], tracked), cache.base.keys(layer), text, scale)
        alike = cosine(now, then, 1)         # [B, L, S]
        first = jnp.argmax(tracked[:, :, None] == tracked[:, None, :], 2) == jnp.arange(tracked.shape[1])
        count = first[:, :, None] & text[:, None, :]
        return jnp.where(count, alike, 0).sum((1, 2)) / count.sum((1, 2))


@dataclasses.dataclass(frozen=True)
class Drift(Rewriting):
    """Elastic-Cache's rule: one forward pass over the text, then those of `Tracking`.

    Attributes:
        mask: id of the mask token.
        window: number of first masked positions that a forward pass computes; the sampler must not unmask others.
        gamma: minimum similarity of attention; above 1 every layer but the first is computed for the whole text.
    """

    mask: int
    window: int = 16
    gamma: float = 0.9
    phases = (True, False)
    beyond = True

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window: got {self.window}, takes 1 or more")

    def needs_refresh(self, view: View, memory: Memory) -> Array:
        return view.refreshed < 0

    def wrap_model(self, model: Any, phase: int) -> Tracking:
        return Tracking(model, self.gamma, self.mask, self.window, phase == 0)

    def hint(self, view: View, positions: Array, phase: int) -> TextEnd:
        return TextEnd(view.end)

    def nodes(self, view: View, left: int, memory: Memory) -> Nodes:
        assert view.text is not None
        if left:
            raise ValueError("caching: Drift takes models whose logits predict their own position")
        N = view.text.open.shape[1]
        place, track = jnp.arange(N, dtype=jnp.int32), view.text.cache.track
        open = view.text.open & (place >= view.start[:, None]) & (place < view.end[:, None])
        asked = open & (jnp.cumsum(open, 1) <= self.window)
        fresh = (view.text.when >= 0) & (view.text.when >= view.round[:, None] - 1)
        tracked = (place == track[:, :, None]).any(1)
        live = asked | fresh | tracked
        size = min(track.shape[1] + 2 * self.window, N)
        positions = jnp.argsort(~live, axis=1, stable=True)[:, :size].astype(jnp.int32)
        return Nodes(positions=positions, live=jnp.take_along_axis(live, positions, 1),
                     own=jnp.ones(positions.shape, bool))


@dataclasses.dataclass(frozen=True)
class Leading(Whole):
    """Windows rule of Elastic-Cache: the whole text is one window, and only its first `window` undecided positions may
    be unmasked. All decided positions before the first undecided one are final."""

    window: int = 16

    @property
    def least(self) -> int:
        return 1

    def active(self, view: View, seen: Seen, memory: Memory) -> Array:
        return view.masked & (jnp.cumsum(view.masked, 1) <= self.window)

    def finished(self, view: View, memory: Memory) -> Array:
        return jnp.cumprod(~view.open & view.inside, 1).sum(1).astype(jnp.int32)


@ALGORITHMS.register("elastic-cache", "Attention Is All You Need for KV Cache in Diffusion LLMs",
                     "Nguyen-Tri, Ranjan, Shen 2025", family="diffusion-cache", needs="a diffusion model")
def elastic_cache(lm: Any, window_size: Count = 16, threshold: Share = 0.9, gamma: Annotated[float, Range(-1, 1)] = 0.9,
                  size: Count | None = None) -> MaskedDiffusion:
    """Unmasks the confident ones among the first masks, and recomputes entries where attention has changed.

    For models with a mask token whose logits predict their own position, such as LLaDA.

    Args:
        window_size: number of masked positions that a forward pass computes.
        threshold: minimum probability of a candidate that is unmasked.
        gamma: minimum similarity of attention to that in the forward pass before; if it is smaller, the layers above
            are recomputed.
        size: maximum number of new tokens of a text. None: the budget of the call.
    """
    adapter = Adapter.of(lm)
    if adapter.mask is None or adapter.shift:
        raise ValueError(f"lm: got {adapter}, takes a model with a mask token whose logits predict their own position")
    return MaskedDiffusion(adapter, Leading(size, window_size), unmask=Threshold(threshold),
                           caching=Drift(adapter.mask, window_size, gamma), stops=(FirstEnd(once=True),))
