"""dLLM-Cache: reuses features of earlier forward passes token by token inside each layer ("dLLM-Cache: Accelerating
Diffusion Large Language Models with Adaptive Caching", Liu et al., 2025).

Between refreshes, the features of most tokens hardly change, and the change of their values shows for which tokens they
do. Each layer computes the values of all nodes of the response and compares them with the cached ones. It computes
queries, keys, attention and MLP only for the share of nodes with the smallest cosine similarity. For all others, the
outputs of attention and MLP, which are added to the residual stream, come from the cache. The prompt's entries are
refreshed rarely, the response's more often. The cache is approximate.

The model is run layer by layer, through `Transformer.pieces`: `Reusing` is a model that wraps the model.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.algorithms.diffusion.adapter import Adapter, Nodes
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.caching.rewriting import Rewriting
from decodax.algorithms.diffusion.policies import BudgetSized, Memory
from decodax.algorithms.diffusion.rules.unmasking import Quota
from decodax.algorithms.diffusion.rules.windows import Blocks
from decodax.algorithms.diffusion.stats import cosine, rank
from decodax.algorithms.diffusion.view import View
from decodax.cache import AttentionView, Dense, Wrapper
from decodax.cache.dense import dense, unpadded
from decodax.cache.entry import KVEntry
from decodax.common.options import Count, Range
from decodax.common.registry import ALGORITHMS
from decodax.common.struct import Struct, struct
from decodax.core.cache import Cache, Entries
from decodax.core.types import LayeredModel, Model, Out
from decodax.core.window import Window, take

EVERYTHING, RESPONSE, PART, PROMPT = range(4)
"""Kinds of rounds, which compute the whole text, the response, a part of it, or the prompt and a part of the
response."""


@struct
class ReusedNodes(Struct):
    """A hint (`Window.hints`) for the model `Reusing`: which nodes may take their features from the cache.

    Attributes:
        nodes: `bool[B, W]`, True for window positions whose attention and MLP outputs need not be computed.
    """

    nodes: Array


@struct
class Features(Struct):
    """Features that the layers of a forward pass computed.

    Attributes:
        entries: entries of the cache.
        attention, mlp: for each layer `f[B, W, D]`, outputs of attention and MLP.
    """

    entries: Entries
    attention: tuple[Array, ...]
    mlp: tuple[Array, ...]


@struct
class FeatureCache(Wrapper):
    """A cache of keys and values, and of the outputs of attention and MLP of each layer.

    Attributes:
        base: the cache of keys and values.
        attention, mlp: for each layer `f[B, S, D]`; the slot of a token is its position.
    """

    base: Dense
    attention: tuple[Array, ...]
    mlp: tuple[Array, ...]

    def commit(self, entries: Any, slots: Array) -> FeatureCache:
        at = jnp.where(slots >= 0, slots, self.capacity)
        put = lambda cache, new: jax.vmap(lambda row, new, at: row.at[at].set(new, mode="drop"))(
            cache, new.astype(cache.dtype), at)
        both = lambda caches, news: tuple(map(put, caches, news))
        return FeatureCache(base=self.base.commit(entries.entries, slots),
                            attention=both(self.attention, entries.attention), mlp=both(self.mlp, entries.mlp))

    def at(self, layer: int, slots: Array) -> tuple[Array, ...]:
        """Returns what layer `layer` (from 0) has cached at `slots` (`i32[B, W]`): keys and values, `f[B, W, G, d]`
        each, and outputs of attention and of the MLP, `f[B, W, D]` each."""
        entry = lambda x: jax.vmap(lambda row, at: row[:, at].swapaxes(0, 1))(x, slots)
        return (entry(self.base.keys(layer)), entry(self.base.values(layer)), take(self.attention[layer], slots),
                take(self.mlp[layer], slots))


def dense_cache(model: Model, batch: int, capacity: int, params: Any, inputs: Any) -> Dense:
    """Returns an empty cache of the model, without zeros after entries (`decodax.cache.lanes`).

    Raises:
        ValueError: the cache is not dense.
    """
    own = model.with_cache(unpadded) if model.cache_kind is dense else model
    cache = own.init_cache(batch, capacity, params=params, inputs=inputs)
    if not isinstance(cache, Dense):
        raise ValueError(f"cache: got {type(cache).__name__}, takes a dense cache")
    return cache


@dataclasses.dataclass(frozen=True)
class Reusing(Model):
    """A model that recomputes, of the nodes in the hint `ReusedNodes`, only those whose values changed most.

    The first layer recomputes all of them, as in the authors' hooks, since its input is a new embedding.

    Attributes:
        model: a `Transformer` with a dense cache.
        ratio: share of those nodes that each layer recomputes, rounded down.
        gather: True: only the chosen nodes are computed. False: all nodes are computed, and the results of the others
            are dropped; for windows in which many nodes are computed anyway.
    """

    model: Any
    ratio: float
    gather: bool

    def init_cache(self, batch: int, capacity: int, *, params: Any = None, inputs: Any = None) -> Cache:
        if not isinstance(self.model, LayeredModel):
            raise ValueError(f"model: got {type(self.model).__name__}, takes a Transformer, whose layers can be run "
                             "one by one")
        base = dense_cache(self.model, batch, capacity, params, inputs)
        width, dtype = self.model.config.width, base.kv[0].dtype
        zeros = lambda: tuple(jnp.zeros((batch, capacity, width), dtype) for _ in base.kv)
        return FeatureCache(base=base, attention=zeros(), mlp=zeros())

    def apply(self, params: Any, window: Window, cache: Any) -> Out:
        net, places = self.model.pieces(params), window.positions
        hint = window.hint(ReusedNodes)
        reuse = None if hint is None else hint.nodes
        x = net.embed(window, cache)
        slots = jnp.minimum(places, cache.capacity - 1)
        entries, attention, mlp = [], [], []
        for layer in range(net.layers):
            if reuse is None or layer == 0:
                added, entry = net.attention(layer, x, places, self._attend(cache, window))
                x = x + added
                more = net.mlp(layer, x)
            else:
                old_k, old_v, old_added, old_more = cache.at(layer, slots)
                v = net.values(layer, x)
                pick, put = self._choice(v, old_v, reuse, window.live)
                visible = jnp.broadcast_to(window.visible(), (*places.shape, places.shape[1]))
                seen = AttentionView(positions=pick(places), key_positions=places, seen=pick(visible),
                                     cached=window.cached)
                attend = self._attend(cache, seen, functools.partial(put, old_k), v)
                added, own = net.attention(layer, pick(x), seen.positions, attend)
                entry, added = KVEntry(put(old_k, own.keys), v), put(old_added, added)
                x = x + added
                more = put(old_more, net.mlp(layer, pick(x)))
            x = x + more
            entries.append(entry)
            attention.append(added)
            mlp.append(more)
        return net.out(x, Features(entries=tuple(entries), attention=tuple(attention), mlp=tuple(mlp)))

    def _attend(self, cache: Any, window: Any, keys: Callable[[Array], Array] = lambda k: k,
                values: Array | None = None) -> Callable[..., tuple[Array, Any]]:
        def attend(layer: int, q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Any]:
            out, _ = cache.base.attend(layer, q, keys(k), v if values is None else values, window, **options)
            return out, KVEntry(k, v)

        return attend

    def _choice(self, v: Array, old: Array, reuse: Array, live: Array) -> tuple[Callable[[Array], Array], Any]:
        """Returns two functions: the first takes the nodes to recompute out of a window's nodes, the second replaces
        their old features by new ones."""
        flat = lambda x: x.reshape(*x.shape[:2], -1).astype(jnp.float32)
        similarity = cosine(flat(v), flat(old))
        among = reuse & live
        counts = [int(n * self.ratio) for n in range(among.shape[1] + 1)]       # rounded as Python does
        count = jnp.array(counts, jnp.int32)[among.sum(1)]
        chosen = ~reuse | (among & (rank(-similarity, among) < count[:, None]))
        widen = lambda rows, x: rows.reshape(*rows.shape, *[1] * (x.ndim - 2))
        if not self.gather:
            return (lambda x: x), (lambda old, new: jnp.where(widen(chosen, new), new, old))
        index = jnp.argsort(~chosen, axis=1, stable=True)[:, :max(int(v.shape[1] * self.ratio), 1)]
        target = jnp.where(take(chosen, index), index, v.shape[1])
        put = jax.vmap(lambda row, at, new: row.at[at].set(new.astype(row.dtype), mode="drop"))
        return (lambda x: take(x, index)), (lambda old, new: put(old, target, new))


@dataclasses.dataclass(frozen=True)
class Similarity(BudgetSized, Rewriting):
    """dLLM-Cache's schedule: the prompt is computed every `prompt` rounds of a row, the response every `response`
    rounds.

    In all other rounds a share of the response's nodes is computed, layer by layer. The rule is that of the authors'
    hooks for LLaDA. If logits predict the next position, the prompt's last position, which predicts the first new
    token, counts as part of the response (in the authors' hooks for Dream, its logits are refreshed with the prompt
    only).

    Attributes:
        prompt, response: the intervals in rounds; with 1 and 1 all positions are always computed.
        ratio: share of the response's nodes, above 0, at most 1.
        size: maximum number of new tokens of a text; longer texts are computed without a cache. None: set by
            `with_length`.
    """

    prompt: int = 50
    response: int = 7
    ratio: float = 0.25
    size: int | None = None
    phases = (True, False, False, True)

    def __post_init__(self) -> None:
        if min(self.prompt, self.response) < 1:
            raise ValueError(f"prompt, response: got {self.prompt}, {self.response}, take 1 or more")
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio: got {self.ratio}, takes above 0 to 1")

    def phase(self, view: View, memory: Memory) -> Array:
        prompt, response = view.round % self.prompt == 0, view.round % self.response == 0
        whole = (prompt & response) | (view.refreshed < 0) | (view.end - view.prompt_length > self.known_size)
        return jnp.where(whole, EVERYTHING, jnp.where(response, RESPONSE, jnp.where(prompt, PROMPT, PART)))

    def wrap_model(self, model: Any, phase: int) -> Reusing:
        return Reusing(model, self.ratio, phase == PART)

    def nodes(self, view: View, left: int, memory: Memory) -> Nodes:
        positions = view.prompt_length[:, None] - left + jnp.arange(self.known_size + left, dtype=jnp.int32)
        return Nodes(positions=positions, live=(positions >= 0) & (positions < view.end[:, None]),
                     own=jnp.ones(positions.shape, bool))

    def hint(self, view: View, positions: Array, phase: int) -> ReusedNodes | None:
        if phase in (EVERYTHING, RESPONSE):
            return None
        every = jnp.ones(positions.shape, bool)
        return ReusedNodes(every if phase == PART else positions >= view.prompt_length[:, None])


@ALGORITHMS.register("dllm-cache", "dLLM-Cache: Accelerating Diffusion Large Language Models with Adaptive Caching",
                     "Liu et al. 2025", family="diffusion-cache", needs="a diffusion model")
def dllm_cache(lm: Any, block_length: Count = 32, steps: Count | None = None, prompt_interval_steps: Count = 50,
               gen_interval_steps: Count = 7, transfer_ratio: Annotated[float, Range(0, 1, above=True)] = 0.25,
               size: Count | None = None) -> MaskedDiffusion:
    """LLaDA's sampler that recomputes, layer by layer, the tokens whose values changed most.

    For long prompts and models of the `Transformer` family.

    Args:
        block_length: number of positions of a block.
        steps: number of steps of a block. None: one position per step.
        prompt_interval_steps: number of rounds after which the prompt's entries are refreshed.
        gen_interval_steps: number of rounds after which the response's entries are refreshed.
        transfer_ratio: share of the response's tokens that are recomputed in the other rounds.
        size: maximum number of new tokens of a text. None: the budget of the call.
    """
    return MaskedDiffusion(Adapter.of(lm), Blocks(block_length), unmask=Quota(steps),
                           caching=Similarity(prompt_interval_steps, gen_interval_steps, transfer_ratio, size))
