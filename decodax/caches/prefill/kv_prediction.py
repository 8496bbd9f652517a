"""KV Prediction: keys and values of a prompt are predicted from the cache of a smaller model ("KV Prediction for
Improved Time to First Token", Horton et al., 2024).

An auxiliary model prefills the prompt. The cache of each layer of the target model is predicted from one layer of the
auxiliary model by two linear maps with a bias, one for keys (before rotation) and one for values, over all heads
together. The target model runs on the newest token of the prompt and on later tokens only.
`decodax.train.kv_prediction` fits the maps.

The predicted entries depend on the prompt alone and never change. So drafts and trees give the same tokens as plain
decoding with this cache.

`fit_kv_prediction` finds the maps of least squared error, and with `steps` trains them with two of the paper's three
losses: the absolute error of keys and values, and the loss of the target model if it attends to predicted entries
alone. `train_kv_prediction` also trains the auxiliary model, with its own loss as the third.

The maps are those of the authors' code (apple/corenet, 7bbedac); with norms of keys theirs are applied before the
norm, here after it. The authors train both models on 140 billion tokens.
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
from decodax.cache.entry import KVEntry
from decodax.cache.key_values import KVLayer, no_key_values, refuse_latents
from decodax.cache.wrapper import Wrapper
from decodax.caches.configs import taken
from decodax.caches.evict.drafted import CHUNK, DraftedConfig, check_dense, paired
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
from decodax.models.phd import Phd
from decodax.models.transformer import Transformer
from decodax.pallas_kernels.window_attention import BLOCK


@struct
class KVMaps(Struct):
    """Linear maps that predict the keys and values of a target model from those of an auxiliary model, which has `G'`
    key heads with keys of width `d'` and values of width `e'`.

    Attributes:
        keys: for each layer of the target model `f32[G' d' + 1, G d]`, the map from the keys of all heads of an
            auxiliary layer, concatenated; the last row is the bias.
        values: the maps of values in the same form, `f32[G' e' + 1, G e]`.
        layers: static; for each target layer the index of the auxiliary layer from which it is predicted.
    """

    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    layers: tuple[int, ...] = static()

    def check(self, of: Sequence[KVLayer], to: Sequence[KVLayer]) -> None:
        """Raises ValueError unless the maps have the sizes to predict the layers `to` of a target model from the layers
        `of` of an auxiliary model."""
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

    def predicted(self, of: Sequence[KVLayer], to: Sequence[KVLayer], entries: Sequence[KVEntry],
                  positions: Array) -> list[KVEntry]:
        """Returns predicted keys `f32[B, W, G, d]`, not rotated yet, and values `f32[B, W, G, e]` for each layer of
        the target model.

        Args:
            of: shapes of the layers of the auxiliary model.
            to: shapes of the layers of the target model.
            entries: keys and values of the auxiliary layers; keys are rotated to `positions`.
            positions: `i32[B, W]`, positions of the tokens.
        """
        found = []
        for layer, shape, *maps in zip(self.layers, to, self.keys, self.values, strict=True):
            k, v = (x.astype(jnp.float32) for x in (entries[layer].keys, entries[layer].values))
            both = [affine(x.reshape(*positions.shape, -1), each).reshape(*positions.shape, shape.heads, -1)
                    for x, each in zip((turned(of[layer], k, -positions), v), maps, strict=True)]
            found.append(KVEntry(*both))
        return found


def placed(to: Sequence[KVLayer], kv: Sequence[KVEntry], positions: Array) -> list[KVEntry]:
    """Rotates the keys in `kv`, a result of `KVMaps.predicted`, to `positions` (`i32[B, W]`), and returns keys and
    values as the cache stores them."""
    return [KVEntry(rotated(shape, own.keys, positions), own.values) for shape, own in zip(to, kv, strict=True)]


@struct
class KVPredictionCache(ReadAtOnce, Wrapper):     # type: ignore[misc]
    """A dense cache with predicted entries for the tokens of the prompt, and computed ones for later tokens."""

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
        assert isinstance(empty, Dense)

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
    """Configuration of a `KVPredictionCache`, for a target model paired with an auxiliary model; `kv_prediction` makes
    it.

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
        if not capacity:
            return no_key_values(batch)
        refuse_latents(self.name, layers)
        shapes = tuple(KVLayer(*layer) for layer in layers)
        return KVPredictionCache(base=dense(shapes, batch, capacity, dtype), shapes=shapes, kind=self)


@dataclasses.dataclass(frozen=True, eq=False)
class FromAuxiliary(DraftedConfig):
    """Configuration that pairs a model with an auxiliary model, from which its cache is predicted.

    Attributes:
        maps: the maps of the prediction. They are arrays, passed with the weights of the auxiliary model.
    """

    maps: KVMaps

    def wrap_model(self, lm: Loaded) -> tuple[Model, PyTree]:
        self.maps.check(*both_layers(lm, self.draft))
        model, (own, weights) = super().wrap_model(lm)
        return model, (own, (weights, self.maps))


@CACHES.register("kv-prediction", "KV Prediction for Improved Time to First Token", "Horton et al. 2024",
                 family="prefill")
def kv_prediction(auxiliary: Any = None, maps: KVMaps | None = None) -> CacheConfig:
    """Keeps all tokens; keys and values of a prompt are predicted from those of a smaller model, and the target model
    runs on the newest token only.

    It shortens the time to the first token. The maps are fitted once for a pair of models: `maps =
    decodax.train.fit_kv_prediction(lm, auxiliary, texts)`. Example: `cache=caches.kv_prediction(auxiliary, maps)`.

    Args:
        auxiliary: a smaller model with the same tokenizer, from `decodax.load`.
        maps: the maps from its keys and values to those of the target model.
    """
    taken("auxiliary", auxiliary, Loaded, "a smaller model with the same tokenizer, as decodax.load gives it")
    maps = taken("maps", maps, KVMaps, "what decodax.train.kv_prediction measures on both models")
    return FromAuxiliary(KVPredictionConfig(tuple(layers_of(auxiliary.model))), auxiliary, "kv-prediction", maps)


def both_layers(lm: Any, auxiliary: Any) -> tuple[tuple[KVLayer, ...], tuple[KVLayer, ...]]:
    """Returns the layers of the auxiliary model and those of the target model, both from `decodax.load`.

    Raises:
        ValueError: one of them is not a model with weights, has layers whose keys cannot be predicted, or their
            tokenizers differ.
    """
    found = []
    for name, each in (("auxiliary", auxiliary), ("lm", lm)):
        taken(name, each, Loaded, "a model with its weights, as decodax.load gives it")
        if each.diffusion is not None:
            raise ValueError(f"{name}: got {each.name!r}, which fills masks, takes one that reads from left to right")
        if isinstance(each.model, Transformer | Phd) and each.model.config.shared:
            raise ValueError(f"{name}: got a model with layers that read the keys and values of others, takes one "
                             "whose layers have their own")
        layers = _layers(each.model)
        if any(shape.rope is not None and shape.rope.chunks is not None for shape in layers):
            raise ValueError(f"{name}: got a model with dual chunk attention, takes one without: its keys cannot be "
                             "turned back to position 0")
        found.append(layers)
    check_dense("auxiliary", auxiliary.model)
    ours, theirs = lm.tokenizer, auxiliary.tokenizer
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
