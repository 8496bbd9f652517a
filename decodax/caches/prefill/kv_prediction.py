"""The cache of a prompt as what the cache of a smaller model says of it ("KV Prediction for Improved Time to First
Token", Horton et al., 2024).

An auxiliary model reads the prompt. Each layer of the model that answers has one layer of the auxiliary model from
which it is predicted: a linear map with a bias makes its keys of those keys, and another one its values of those
values, all heads together and keys before their rotation. The model that answers reads the newest token of the prompt
and what follows, and nothing before. `decodax.train.kv_prediction` finds the maps.

What is predicted is a function of the prompt alone and stays as it is, so that drafts and trees give the tokens of
plain decoding on the same cache.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.cache.dense import Dense, dense
from decodax.cache.key_values import KVLayer
from decodax.cache.wrapper import Wrapper
from decodax.caches.evict.drafted import CHUNK, Drafted, paired
from decodax.caches.prefill.unread import Unread
from decodax.caches.quantize.aqua_kv import affine
from decodax.caches.rotation import rotated, turned
from decodax.caches.shapes import layers_of
from decodax.common.struct import Struct, static, struct
from decodax.core.cache import Cache, CacheConfig, Feature, PyTree, ReadPrompt
from decodax.core.loaded import Loaded
from decodax.core.types import Model
from decodax.core.window import causal
from decodax.pallas_kernels.window_attention import BLOCK

KeysAndValues = Sequence[tuple[Array, Array]]
"""Of each layer keys `f[B, W, G, d]` and values `f[B, W, G, e]`."""


@struct
class KVMaps(Struct):
    """Maps from the cache of an auxiliary model to that of the model that answers.

    Attributes:
        keys: a tuple of one `f32[G' d' + 1, G d]` for each layer of the model that answers, from the keys of all heads
            of an auxiliary layer side by side, with the bias in the last row.
        values: the same of values, `f32[G' e' + 1, G e]`.
        layers: static; of which auxiliary layer each of them reads.
    """

    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    layers: tuple[int, ...] = static()

    def check(self, of: Sequence[KVLayer], to: Sequence[KVLayer]) -> None:
        """Raises ValueError unless these maps go from the layers `of` an auxiliary model `to` those of another one."""
        if not len(self.layers) == len(self.keys) == len(self.values) == len(to):
            raise ValueError(f"maps: got {len(self.keys)} of keys, {len(self.values)} of values and {len(self.layers)} "
                             f"layers to read, takes one for each of the {len(to)} layers")
        for i, (layer, shape) in enumerate(zip(self.layers, to, strict=True)):
            if not 0 <= layer < len(of):
                raise ValueError(f"maps: got layer {layer} of the auxiliary model for layer {i}, it has {len(of)}")
            aux = of[layer]
            for name, got, takes in (
                    ("keys", self.keys[i], (aux.heads * aux.width + 1, shape.heads * shape.width)),
                    ("values", self.values[i], (aux.heads * (aux.both - aux.width) + 1,
                                                shape.heads * (shape.both - shape.width)))):
                if got.shape != takes:
                    raise ValueError(f"maps: got {name} {list(got.shape)} for layer {i}, takes {list(takes)}")

    def predicted(self, of: Sequence[KVLayer], to: Sequence[KVLayer], entries: KeysAndValues,
                  positions: Array) -> list[tuple[Array, Array]]:
        """Keys, before their rotation, and values of the layers `to`, in float32.

        Args:
            entries: those of the auxiliary layers `of`, with keys rotated to `positions` (`i32[B, W]`).
        """
        found = []
        for layer, shape, *maps in zip(self.layers, to, self.keys, self.values, strict=True):
            k, v = (x.astype(jnp.float32) for x in entries[layer])
            both = [affine(x.reshape(*positions.shape, -1), each).reshape(*positions.shape, shape.heads, -1)
                    for x, each in zip((turned(of[layer], k, -positions), v), maps, strict=True)]
            found.append((both[0], both[1]))
        return found


def placed(to: Sequence[KVLayer], kv: KeysAndValues, positions: Array) -> list[tuple[Array, Array]]:
    """What `KVMaps.predicted` gave, as the layers have it in their cache: with keys rotated to `positions`."""
    return [(rotated(shape, k, positions), v) for shape, (k, v) in zip(to, kv, strict=True)]


@struct
class PredictedPrompt(Wrapper):
    """A dense cache in which the tokens of the prompt are predicted, and what follows is the model's own."""

    base: Dense
    shapes: tuple[KVLayer, ...] = static()
    kind: KVPrediction = static()

    @property
    def supports(self) -> frozenset[Feature]:       # type: ignore[override]
        return frozenset({"trees"})

    def for_prompt(self) -> Cache:      # type: ignore[override]
        if not self.base.kv:
            return self
        return Unread(length=jnp.zeros_like(self.base.length), into=self)

    def read(self, prompt: ReadPrompt, length: Array) -> PredictedPrompt:
        """With what is predicted of the first `length` tokens (`i32[B]`) of a prompt."""
        _, _, auxiliary, (weights, maps) = paired(prompt, self.kind.name)
        B, n = prompt.tokens.shape
        width = min(CHUNK, n)
        empty = auxiliary.init_cache(B, -(-n // BLOCK) * BLOCK, params=weights)     # a walk takes whole blocks
        if not isinstance(empty, Dense):
            raise ValueError(f"auxiliary: got one with a {type(empty).__name__} cache, takes one with a dense cache")

        def visit(i: Array, caches: tuple[Dense, Dense]) -> tuple[Dense, Dense]:
            cache, base = caches
            positions = jnp.broadcast_to(i * width + jnp.arange(width, dtype=jnp.int32), (B, width))
            live = positions < length[:, None]
            window = causal(jnp.take_along_axis(prompt.tokens, jnp.minimum(positions, n - 1), 1), positions[:, 0], live)
            out = auxiliary.apply(weights, window.replace(certain=True), cache)
            # the slots must depend on the forward, or XLA on CPU copies the cache to protect its readers
            slots = jnp.where(live & jnp.isfinite(out.hidden).all(-1), positions, -1)
            made = maps.predicted(self.kind.of, self.shapes, out.entries, positions)
            return cache.commit(out.entries, slots), base.commit(placed(self.shapes, made, positions), slots)

        _, base = lax.fori_loop(0, (length.max() + width - 1) // width, visit, (empty, self.base))
        return self.replace(base=base)


@dataclasses.dataclass(frozen=True)
class KVPrediction(CacheConfig):
    """A `PredictedPrompt` cache.

    Attributes:
        of: the layers of the auxiliary model. name: what errors call it.
    """

    of: tuple[KVLayer, ...]
    name: str = "kv-prediction"

    def __call__(self, layers: Sequence[tuple[Any, ...]], batch: int, capacity: int, dtype: jax.typing.DTypeLike,
                 inputs: PyTree = None) -> Cache:
        if inputs is not None:
            raise ValueError(f"inputs: got {type(inputs).__name__}; with {self.name} another model reads the prompt, "
                             "which takes tokens alone")
        shapes = tuple(KVLayer(*layer) for layer in layers) if capacity else ()
        return PredictedPrompt(base=dense(shapes, batch, capacity, dtype), shapes=shapes, kind=self)


@dataclasses.dataclass(frozen=True, eq=False)
class FromAuxiliary(Drafted):
    """A kind of cache that is predicted from that of an auxiliary model.

    Attributes:
        maps: what predicts it. They are data, beside the weights of the auxiliary model.
    """

    maps: KVMaps

    def put_on(self, lm: Any) -> Any:
        self.maps.check(*both_layers(lm, self.draft))
        made = super().put_on(lm)
        own, weights = made.params
        return dataclasses.replace(made, params=(own, (weights, self.maps)))


def both_layers(lm: Any, auxiliary: Any) -> tuple[tuple[KVLayer, ...], tuple[KVLayer, ...]]:
    """The layers of an auxiliary model and those of the model that answers, both as `decodax.load` gives them.

    Raises:
        ValueError: one of them is none, or has layers whose keys cannot be predicted, or their tokens differ.
    """
    found = []
    for name, each in (("auxiliary", auxiliary), ("lm", lm)):
        if not isinstance(each, Loaded):
            raise ValueError(f"{name}: got {'none' if each is None else type(each).__name__}, takes a model with its "
                             "weights, as decodax.load gives it")
        if each.diffusion is not None:
            raise ValueError(f"{name}: got {each.name!r}, which fills masks, takes one that reads from left to right")
        if getattr(getattr(each.model, "config", None), "shared", False):
            raise ValueError(f"{name}: got a model with layers that read the keys and values of others, takes one "
                             "whose layers have their own")
        layers = _layers(each.model)
        if any(shape.rope is not None and shape.rope.chunks is not None for shape in layers):
            raise ValueError(f"{name}: got a model with dual chunk attention, whose keys have no positions in the text "
                             "to be turned back from, takes one without")
        found.append(layers)
    ours, theirs = getattr(lm, "tokenizer", None), getattr(auxiliary, "tokenizer", None)
    if ours is not None and theirs is not None:
        if not _same_tokens(ours, theirs):
            raise ValueError(f"auxiliary: got {auxiliary.name!r}, whose tokens are not those of {lm.name!r}; takes a "
                             "model with the same tokenizer")
    elif auxiliary.vocab_size != lm.vocab_size:
        raise ValueError(f"auxiliary: got a model of {auxiliary.vocab_size} ids, the one that answers has "
                         f"{lm.vocab_size}; takes a model with the same tokenizer")
    return found[0], found[1]


@functools.lru_cache(maxsize=16)      # each call of generate asks for them
def _layers(model: Model) -> tuple[KVLayer, ...]:
    return tuple(layers_of(model))


@functools.lru_cache(maxsize=16)
def _same_tokens(ours: Any, theirs: Any) -> bool:
    return ours is theirs or ours.token_bytes(False) == theirs.token_bytes(False)
