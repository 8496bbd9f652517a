"""KV Prediction: keys and values of a prompt are predicted from the cache of a smaller model ("KV Prediction for
Improved Time to First Token", Horton et al., 2024).

An auxiliary model reads the prompt. Each layer of the model that answers is predicted from one layer of the auxiliary
model: a linear map with a bias takes keys to keys, and another one values to values, all heads together and keys before
their rotation. The model that answers reads the newest token of the prompt and what follows, and nothing before.
`decodax.train.kv_prediction` finds the maps.

What is predicted is a function of the prompt alone and never changes, so that drafts and trees give the tokens of plain
decoding on the same cache.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.cache.dense import Dense, dense
from decodax.cache.key_values import KVLayer
from decodax.cache.wrapper import Wrapper
from decodax.caches.configs import taken
from decodax.caches.evict.drafted import CHUNK, DraftedConfig, paired
from decodax.caches.prefill.whole_prompt import ReadAtOnce, slots_of
from decodax.caches.quantize.aqua_kv import affine
from decodax.caches.rotation import rotated, turned
from decodax.caches.shapes import layers_of
from decodax.common.registry import CACHES
from decodax.common.struct import Struct, static, struct
from decodax.core.cache import Cache, CacheConfig, Feature, PyTree
from decodax.core.capabilities import ReadPrompt
from decodax.core.loaded import Loaded
from decodax.core.types import Model
from decodax.core.window import causal
from decodax.pallas_kernels.window_attention import BLOCK

KeysAndValues = Sequence[tuple[Array, Array]]
"""Keys `f[B, W, G, d]` and values `f[B, W, G, e]` of each layer."""


@struct
class KVMaps(Struct):
    """Maps from the cache of an auxiliary model to that of the model that answers.

    Attributes:
        keys: a tuple of one `f32[G' d' + 1, G d]` for each layer of the model that answers, from the keys of all heads
            of an auxiliary layer side by side, with the bias in the last row.
        values: the same of values, `f32[G' e' + 1, G e]`.
        layers: static; the auxiliary layer from which each layer is predicted.
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
        """Returns keys, before their rotation, and values of the layers `to`, in float32.

        Args:
            entries: of the auxiliary layers `of`, with keys rotated to `positions` (`i32[B, W]`).
        """
        found = []
        for layer, shape, *maps in zip(self.layers, to, self.keys, self.values, strict=True):
            k, v = (x.astype(jnp.float32) for x in entries[layer])
            both = [affine(x.reshape(*positions.shape, -1), each).reshape(*positions.shape, shape.heads, -1)
                    for x, each in zip((turned(of[layer], k, -positions), v), maps, strict=True)]
            found.append((both[0], both[1]))
        return found


def placed(to: Sequence[KVLayer], kv: KeysAndValues, positions: Array) -> list[tuple[Array, Array]]:
    """Returns what `KVMaps.predicted` gave as layers have it in their cache: with keys rotated to `positions`."""
    return [(rotated(shape, k, positions), v) for shape, (k, v) in zip(to, kv, strict=True)]


@struct
class KVPredictionCache(ReadAtOnce, Wrapper):     # type: ignore[misc]
    """A dense cache in which the tokens of the prompt are predicted, and what follows is computed by the model."""

    base: Dense
    shapes: tuple[KVLayer, ...] = static()
    kind: KVPredictionConfig = static()

    @property
    def supports(self) -> frozenset[Feature]:       # type: ignore[override]
        return frozenset({"trees"})

    def read_prompt(self, prompt: ReadPrompt, length: Array) -> KVPredictionCache:
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
            out = auxiliary.apply(weights, window.replace(is_prefill=True), cache)
            slots = slots_of(window, out)
            made = maps.predicted(self.kind.of, self.shapes, out.entries, positions)
            return cache.commit(out.entries, slots), base.commit(placed(self.shapes, made, positions), slots)

        _, base = lax.fori_loop(0, (length.max() + width - 1) // width, visit, (empty, self.base))
        return self.replace(base=base)


@dataclasses.dataclass(frozen=True)
class KVPredictionConfig(CacheConfig):
    """A `KVPredictionCache`, for a model with an auxiliary model (`kv_prediction` makes one of both).

    Attributes:
        of: layers of the auxiliary model.
    """

    of: tuple[KVLayer, ...]

    name: ClassVar[str] = "kv-prediction"

    def __call__(self, layers: Sequence[tuple[Any, ...]], batch: int, capacity: int, dtype: jax.typing.DTypeLike,
                 inputs: PyTree = None) -> Cache:
        if inputs is not None:
            raise ValueError(f"inputs: got {type(inputs).__name__}; with {self.name} another model reads the prompt, "
                             "which takes tokens alone")
        shapes = tuple(KVLayer(*layer) for layer in layers) if capacity else ()
        return KVPredictionCache(base=dense(shapes, batch, capacity, dtype), shapes=shapes, kind=self)


@dataclasses.dataclass(frozen=True, eq=False)
class FromAuxiliary(DraftedConfig):
    """A kind of cache that is predicted from that of an auxiliary model.

    Attributes:
        maps: of the prediction. They are data, beside the weights of the auxiliary model.
    """

    maps: KVMaps

    def put_on(self, lm: Any) -> Any:
        self.maps.check(*both_layers(lm, self.draft))
        made = super().put_on(lm)
        own, weights = made.params
        return dataclasses.replace(made, params=(own, (weights, self.maps)))


@CACHES.register("kv-prediction", "KV Prediction for Improved Time to First Token", "Horton et al. 2024",
                 family="prefill")
def kv_prediction(auxiliary: Any = None, maps: KVMaps | None = None) -> CacheConfig:
    """Keeps everything; keys and values of a prompt are predicted from those of a smaller model, so that the model that
    answers reads the newest token alone.

    It shortens the time to the first token. The maps are measured once for a pair of models:
    `maps = decodax.train.fit_kv_prediction(lm, auxiliary, texts)`. Example:
    `cache=caches.kv_prediction(auxiliary, maps)`.

    Args:
        auxiliary: a smaller model with the same tokenizer, from `decodax.load`.
        maps: from its keys and values to those of the model that answers.
    """
    taken("auxiliary", auxiliary, Loaded, "a smaller model with the same tokenizer, as decodax.load gives it")
    maps = taken("maps", maps, KVMaps, "what decodax.train.kv_prediction measures on both models")
    return FromAuxiliary(KVPredictionConfig(tuple(layers_of(auxiliary.model))), auxiliary, "kv-prediction", maps)


def both_layers(lm: Any, auxiliary: Any) -> tuple[tuple[KVLayer, ...], tuple[KVLayer, ...]]:
    """Returns the layers of an auxiliary model and those of the model that answers, both from `decodax.load`.

    Raises:
        ValueError: one of them is no model with weights, or has layers whose keys cannot be predicted, or their tokens
            differ.
    """
    found = []
    for name, each in (("auxiliary", auxiliary), ("lm", lm)):
        taken(name, each, Loaded, "a model with its weights, as decodax.load gives it")
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
