"""Caches for which deep layers run on a part of the prompt: from one layer on, only chosen tokens are propagated.

The first layers run on the whole prompt. After one of them, some tokens are chosen by attention. Only their hidden
states go through the later layers, at their true positions, and attend to each other. Prefill takes less time, and deep
layers store only these tokens. FastKV and PromptDistill are built on this.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.cache.key_values import KVLayer, no_key_values, refuse_latents
from decodax.cache.wrapper import Wrapper
from decodax.caches.evict.compaction import held_of
from decodax.caches.evict.evicting import Evicting, Eviction
from decodax.caches.evict.scores import TokenScore
from decodax.caches.evict.selection import Budget, Top, best, kept
from decodax.common.struct import static, struct
from decodax.core.cache import Cache, CacheConfig, Entries, PyTree
from decodax.core.capabilities import ReadPrompt
from decodax.core.window import Window
from decodax.models.transformer import Transformer
from decodax.pallas_kernels.window_attention import window_attention


@dataclasses.dataclass(frozen=True)
class Decoupled(Top):
    """Keeps the best tokens of each head. If the budget is a share, it is a share of the whole text even in layers that
    run on a part of it (FastKV).

    Attributes:
        score: score of the tokens.
        window: number of latest tokens that are always kept.
        layer: the last layer that runs on all tokens.
        passed: number or share of tokens that it passes on.
    """

    score: TokenScore
    window: int = 8
    layer: int = 0
    passed: Budget = 0.2

    def table(self, budget: Budget, longest: int, layer: int, depth: int) -> np.ndarray:
        if layer <= self.layer or isinstance(budget, int):
            return at_least(kept(budget, longest), self.window)
        on = at_least(kept(self.passed, longest), self.window)
        if isinstance(self.passed, int):
            rest = kept(budget, longest)
        else:       # a share of the tokens that go on, rounded as the authors do
            share = float(budget) / float(self.passed)
            rest = np.array([int(n * share) for n in on.tolist()], np.int32)
        return at_least(np.minimum(rest, on), self.window)


def at_least(table: np.ndarray, window: int) -> np.ndarray:
    """Returns `table`, the number of tokens to keep of each text of 0 to `n` tokens (`i32[n + 1]`), with each number
    raised to at least `window` or, for shorter texts, all tokens."""
    return np.maximum(table, np.minimum(np.arange(len(table)), window)).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Propagation(CacheConfig):
    """Configuration of a cache for which deep layers run on a part of the prompt.

    Attributes:
        eviction: the rule by which each layer keeps some of the tokens that it runs on. It evicts once.
        chooser: score of the tokens that are passed on.
        passed: number of tokens that are passed on; below 1, their share of the prompt.
        layer: the last layer that runs on all tokens, from 0. None: `int(depth * default) - 1` for a model of `depth`
            layers.
        default: see `layer`.
        same: whether the first layers keep exactly the tokens that are passed on.
        width: number of channels of the residual stream, set by `of_model`.
    """

    eviction: Eviction
    chooser: TokenScore
    passed: Budget
    layer: int | None = None
    default: float = 0.5
    same: bool = False
    width: int | None = None

    def __post_init__(self) -> None:
        self.eviction._check(self.passed)

    @property
    def name(self) -> str:
        return self.eviction.name

    def with_length(self, new: int) -> Propagation:
        return dataclasses.replace(self, eviction=self.eviction.with_length(new))

    def beyond(self, longest: int) -> int:
        return self.eviction.beyond(longest)

    def of_model(self, lm: Any) -> Propagation:
        if not isinstance(lm.model, Transformer):
            raise ValueError(f"cache: {self.name} stops a prompt at a layer, which takes a Transformer, got a "
                             f"{type(lm.model).__name__}")
        return dataclasses.replace(self, eviction=self.eviction.of_model(lm), width=lm.model.config.width)

    def at(self, depth: int) -> int:
        """Returns the last layer that runs on all tokens, in a model of `depth` layers."""
        layer = max(int(depth * self.default) - 1, 0) if self.layer is None else self.layer
        if not 0 <= layer < depth - 1:
            raise ValueError(f"layer: got {layer}, takes 0 to {depth - 2} of a model of {depth} layers")
        return layer

    def numbers(self, size: int) -> np.ndarray:
        """Returns the number of tokens that layer `layer` passes on to later layers, for each prompt of 0 to `size`
        tokens, `i32[size + 1]`."""
        return at_least(kept(self.passed, size), self.chooser.always)

    def placed(self, depth: int) -> Eviction:
        """Returns the eviction rule for a model of `depth` layers, with the number of the layer that passes tokens on
        filled in."""
        chosen = self.eviction.selection
        if isinstance(chosen, Decoupled):
            chosen = dataclasses.replace(chosen, layer=self.at(depth), passed=self.passed)
        return dataclasses.replace(self.eviction, selection=chosen)

    def __call__(self, layers: Sequence[tuple[Any, ...]], batch: int, capacity: int, dtype: jax.typing.DTypeLike,
                 inputs: PyTree = None) -> Cache:
        if not capacity:
            return no_key_values(batch, inputs)
        refuse_latents(self.name, layers)
        shapes = tuple(KVLayer(*layer) for layer in layers)
        kind = self.placed(len(shapes))
        return Propagated(base=kind.empty(shapes, batch, capacity, dtype, inputs), kind=self)


@struct
class Propagated(Wrapper):
    """The cache of a `Propagation` while decoding, with the kept tokens in `base`."""

    base: Evicting
    kind: Propagation = static()

    def prefill_cache(self) -> Cache:      # type: ignore[override]
        base, kind = self.base, self.kind
        if not base.kv:
            return self
        if kind.width is None:
            raise ValueError(f"cache: {kind.name} does not know the width of the model; takes a cache that was given "
                             "to generate")
        batch, dtype = base.length.shape[0], base.kv[0].dtype
        first = Eviction(Top(kind.chooser), kind.eviction.budget)
        whole = first.empty(base.shapes[:kind.at(len(base.shapes)) + 1], batch, base.size, dtype, base.given, True)
        return ReadInPart(base=whole, stream=jnp.zeros((batch, base.size, kind.width), dtype), shapes=base.shapes,
                          kind=kind)


@struct
class ReadInPart(Wrapper):
    """The cache of a `Propagation` during prefill. `finish_prefill` runs the deep layers on the chosen tokens.

    Attributes:
        base: keys and values of the first layers, for all tokens of the prompt.
        stream: `f[B, S, D]`, the residual stream after these layers.
        shapes: static; the `KVLayer` of each layer of the model.
        kind: static; the configuration.
    """

    base: Evicting
    stream: Array
    shapes: tuple[KVLayer, ...] = static()
    kind: Propagation = static()

    @property
    def layers_read(self) -> int | None:
        return len(self.base.shapes)

    def refuse_whole(self) -> None:
        raise ValueError(f"cache: {self.kind.name} has prompts stop after {self.layers_read} layers, and this model "
                         "goes on with them; takes a model that stops, with no other cache beside this one")

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, **options: Any) -> tuple[Array, PyTree]:
        if layer >= len(self.base.shapes):
            self.refuse_whole()
        return self.base.attend(layer, q, k, v, window, **options)

    def commit(self, entries: Entries, slots: Array) -> ReadInPart:
        *own, stream = entries
        put = jax.vmap(lambda row, new, at: row.at[at].set(new.astype(row.dtype), mode="drop"))
        to = jnp.where(slots >= 0, slots, self.stream.shape[1])
        return self.replace(base=self.base.commit(own, slots), stream=put(self.stream, stream, to))

    def finish_prefill(self, prompt: ReadPrompt) -> Cache:     # type: ignore[override]
        base, kind = self.base, self.kind
        first, length = len(base.shapes), base.length
        numbers = kind.numbers(base.size)
        number = jnp.asarray(numbers)[length]
        slots = jnp.arange(int(numbers.max()), dtype=jnp.int32)
        part = functools.partial(held_of, base.kind.selection.score, first - 1, first, base.shapes[-1], None)
        row = (base.kv[-1], base.positions[-1], base.starts[-1], base.count[-1], base.queries[-1], base.gathered[-1])

        def choose(row: tuple[Any, ...]) -> Array:
            held = part(row)
            return best(kind.chooser(held)[:1], held.valid[:1], row[-1])[0]

        stays = lax.map(choose, (row, length, length, length, number))
        at = jnp.argsort(~stays, axis=-1, stable=True)[:, :len(slots)].astype(jnp.int32)     # [B, K], in order
        live = slots < number[:, None]
        read = self._go_on(prompt, at, live, first)
        whole = kind.placed(len(self.shapes)).empty(self.shapes, len(length), base.size, base.kv[0].dtype, base.given,
                                                    whole=True)
        kv, positions, count, queries = list(base.kv), list(base.positions), list(base.count), list(base.queries)
        if kind.same:
            move = lambda x: jnp.take_along_axis(x, at.reshape(len(at), 1, -1, *[1] * (x.ndim - 3)), 2)
            kv = [move(x) for x in kv]
            positions = [jnp.where(live[:, None], move(x), -1) for x in positions]
            count = [jnp.broadcast_to(number[:, None], x.shape) for x in count]
        for (k, v, q), shape in zip(read, self.shapes[first:], strict=True):
            kv.append(jnp.concatenate([k, v], -1).swapaxes(1, 2).astype(kv[0].dtype))
            heads = (len(at), shape.heads)
            positions.append(jnp.broadcast_to(jnp.where(live, at, -1)[:, None], (*heads, len(slots))))
            count.append(jnp.broadcast_to(number[:, None], heads))
            queries.append(_ring(q, number, length, base.queries[-1].shape[2]).astype(queries[0].dtype))
        whole = whole.replace(kv=tuple(kv), positions=tuple(positions), count=tuple(count), queries=tuple(queries),
                              length=length)
        return Propagated(base=whole.finish_prefill(prompt), kind=kind)

    def _go_on(self, prompt: ReadPrompt, at: Array, live: Array, first: int) -> list[Any]:
        """Returns the keys, values and scaled queries of the layers from `first` on, for the tokens at positions `at`
        (`i32[B, K]`)."""
        K = at.shape[1]
        tokens = jnp.take_along_axis(prompt.tokens, jnp.minimum(at, prompt.tokens.shape[1] - 1), 1)
        window = Window(tokens=tokens, positions=at, mask=jnp.tril(jnp.ones((1, K, K), bool)), live=live)
        within = Among(made=[], given=self.base.given)
        _, run = prompt.model.walk(prompt.params, window, within)
        x = jnp.take_along_axis(self.stream, at[..., None], 1)
        for layer in range(first, len(self.shapes)):
            x = run(layer, x)
        return within.made


class Among:
    """Replaces the cache while the model runs on chosen tokens of a prompt, which attend only to each other. The tuple
    of keys, values and scaled queries of each layer is appended to the list `made`. `given` are the rows' inputs
    (`Cache.inputs`)."""

    def __init__(self, made: list[Any], given: PyTree):
        self.made, self.inputs = made, given

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               **options: Any) -> tuple[Array, PyTree]:
        self.made.append((k, v, q * scale))
        return window_attention(q, k, v, window.visible(), window.positions, scale=scale, **options), ()


def _ring(q: Array, number: Array, length: Array, latest: int) -> Array:
    """Returns the latest `latest` queries of each row as a ring `f[B, H, latest, d]`: that of position `p` at `p %
    latest`.

    Args:
        q: `f[B, K, H, d]`, the queries of a row's chosen tokens.
        number: `i32[B]`, number of these tokens.
        length: `i32[B]`, number of tokens of the text, whose end the latest queries are taken for.
    """
    back = (jnp.arange(latest) - (length[:, None] - latest)) % max(latest, 1)
    node = jnp.clip(number[:, None] - latest + back, 0, q.shape[1] - 1)
    return jnp.take_along_axis(q, node[:, :, None, None], 1).swapaxes(1, 2)
