"""TokenButler: each query attends to the tokens that a small predictor rates as important ("TokenButler: Token
Importance Is Predictable", Akhauri et al., 2025).

The input of the predictor is the input of the model's first layer; it has one small causal attention and one small MLP.
For each token it computes a query and a key of few channels for each head of every layer but the first. Their products
estimate the attention logits of that head, and a query attends to the tokens with the highest estimates. No token is
ever evicted. `decodax.train.token_butler` trains a predictor for a model.

The predictor runs before the model (`Butlered`). Its own keys and values are in the cache as one more layer, and its
queries and keys for the model's layers are passed to the cache together with those of the layers. So the tokens that a
query attends to depend on the tokens before it alone, and a node of a draft tree chooses among the committed tokens and
its own ancestors, as in plain decoding.

The loss of `fit_token_butler` includes all pairs of a query and a key, masked ones too, as in the authors' code. The
input is normalised by a norm of the predictor's own, while in their code it is taken after the model's norm.

The predictor is that of the authors' code (d74798d), without its second network. Its code rotates the predictor's
keys anew at each step with a cache; here they are rotated once.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.cache.dense import write
from decodax.cache.entry import KVEntry, own_entry
from decodax.cache.key_values import KVLayer
from decodax.cache.wrapper import Wrapper
from decodax.caches.configs import taken
from decodax.caches.shapes import layers_of
from decodax.caches.sparse.reading import SparseCache, SparseConfig, attention_to
from decodax.common.options import Whole
from decodax.common.registry import CACHES
from decodax.common.struct import Struct, fields, static, struct
from decodax.core.around import PairedReadout
from decodax.core.cache import Cache, Entries, PyTree
from decodax.core.loaded import Loaded
from decodax.core.packing import Packing
from decodax.core.types import LayeredModel, Model, Out
from decodax.core.window import Window, each_node
from decodax.models.rope import Llama3, Rope, rotate
from decodax.pallas_kernels.window_attention import Bias, with_sinks


@struct
class Butler(Struct):
    """The predictor of TokenButler, for a model of width `D` with `L` layers of `H` heads.

    `R`, a multiple of `H`, is its inner width, `I` the inner width of each projection, and `m` the number of channels
    of the queries and keys that it computes.

    Attributes:
        norm: `f32[D]`, scale of a root mean square norm of the input.
        reduce: `f32[D, R]`, projection of the normed input.
        query, key, value: `f32[R, R]`, projections of its attention.
        scale, shift: `f32[R]`, of the layer norm after the attention.
        up, up_bias, down, down_bias: `f32[R, 2 R]`, `f32[2 R]`, `f32[2 R, D]` and `f32[D]`, its MLP, whose output is
            added to the normed input.
        query_in, key_in: `f32[D, I]`, first layers of the projections to queries and keys.
        query_out, key_out: `f32[I, H, L - 1, m]`, second layers of these projections.
        theta: static; base of its rotary embeddings, which have Llama 3's scaling by 32 as in the authors' code.
    """

    norm: Array
    reduce: Array
    query: Array
    key: Array
    value: Array
    scale: Array
    shift: Array
    up: Array
    up_bias: Array
    down: Array
    down_bias: Array
    query_in: Array
    query_out: Array
    key_in: Array
    key_out: Array
    theta: float = static(default=10_000.0)

    @property
    def heads(self) -> int:
        """Number of query heads of the model, `H`."""
        return self.query_out.shape[1]

    @property
    def width(self) -> int:
        """Number of channels of the computed queries and keys, `m`."""
        return self.query_out.shape[3]

    @property
    def layer(self) -> KVLayer:
        """The shape of the keys and values of the predictor's own attention."""
        return KVLayer(self.heads, self.reduce.shape[1] // self.heads, queries=self.heads)

    def __call__(self, x: Array, positions: Array, attend: Callable[..., tuple[Array, PyTree]]
                 ) -> tuple[Array, Array, PyTree]:
        """Returns queries and keys for the model's layers, both `f32[B, W, H, L - 1, m]`, and the entry of its own
        attention.

        Args:
            x: `f[B, W, D]`, the residual stream before the first layer.
            positions: `i32[B, W]`.
            attend: computes the attention of the predictor from queries, keys and values, as `Cache.attend` of one
                layer.
        """
        B, W, _ = x.shape
        x = x.astype(jnp.float32)
        x = x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * self.norm
        small = x @ self.reduce
        q, k, v = ((small @ each).reshape(B, W, self.heads, -1) for each in (self.query, self.key, self.value))
        q, k = self._rotated(q, positions), self._rotated(k, positions)
        out, entry = attend(q, k, v, scale=q.shape[-1] ** -0.5)
        out = out.reshape(B, W, -1)
        out = (out - out.mean(-1, keepdims=True)) * lax.rsqrt(out.var(-1, keepdims=True) + 1e-5)
        out = jax.nn.gelu((out * self.scale + self.shift) @ self.up + self.up_bias, approximate=False)
        x = x + out @ self.down + self.down_bias
        made = [self._rotated(jnp.einsum("bwi,ihlm->bwhlm", jax.nn.silu(x @ first), second), positions)
                for first, second in ((self.query_in, self.query_out), (self.key_in, self.key_out))]
        return made[0], made[1], entry

    def _rotated(self, x: Array, positions: Array) -> Array:
        """Rotates `f32[B, W, H, ..., m]` to positions `i32[B, W]`."""
        flat = x.reshape(*x.shape[:2], -1, x.shape[-1])
        rope = Rope(x.shape[-1], self.theta, Llama3(factor=32.0, low=1.0, high=4.0, trained=8192))
        return rotate(flat, *rope.table(positions)).reshape(x.shape)

    def check(self, shapes: Sequence[KVLayer], width: int) -> None:
        """Raises ValueError if the predictor was trained for a model of another shape."""
        found = self.query_out.shape[2] + 1, self.heads, self.norm.shape[0]
        takes = len(shapes), shapes[0].queries, width
        if found != takes:
            raise ValueError("butler: got that of a model with {} layers of {} heads, {} wide, takes one for {} layers "
                             "of {}, {} wide".format(*found, *takes))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the arrays to a file `.npz`, by their names."""
        arrays: dict[str, Any] = {field.name: np.asarray(getattr(self, field.name)) for field in fields(self)}
        np.savez(path, **arrays)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Butler:
        """Reads a file that `save` wrote.

        Raises:
            ValueError: the file lacks one of the arrays.
        """
        names = [field.name for field in fields(cls)]
        with np.load(path, allow_pickle=False) as found:
            if lacking := [name for name in names if name not in found]:
                raise ValueError(f"butler: {os.fspath(path)} has no {' and no '.join(lacking)}, takes a file that "
                                 "Butler.save wrote")
            arrays = {name: jnp.asarray(found[name]) for name in names if name != "theta"}
            return cls(**arrays, theta=float(found["theta"]))


@struct
class Marking(Wrapper):
    """Replaces the cache `base` during one call of the model, and appends the predictor's queries and keys to the
    channels of each layer's own (from layer 1 on).

    Attributes:
        base: the cache that stores and uses them.
        queries, keys: `f32[B, W, H, L - 1, m]`, computed by the predictor.
    """

    base: Any
    queries: Array
    keys: Array

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, **options: Any) -> tuple[Array, PyTree]:
        if layer:
            marks = self.keys[:, :, :, layer - 1].reshape(*k.shape[:3], -1)
            q = jnp.concatenate([q, self.queries[:, :, :, layer - 1].astype(q.dtype)], -1)
            k = jnp.concatenate([k, marks.astype(k.dtype)], -1)
        return self.base.attend(layer, q, k, v, window, **options)


@dataclasses.dataclass(frozen=True)
class Butlered(PairedReadout):
    """The model `base` with a predictor that runs before it. Its weights are the pair of the weights of both."""

    base: LayeredModel

    def apply(self, params: Any, window: Window, cache: Cache) -> Out:
        own, butler = params
        # the predictor needs the nodes that a packed call would leave out
        window = window.replace(hints=tuple(hint for hint in window.hints if not isinstance(hint, Packing)))
        x, _ = self.base.walk(own, window, cache)
        attend = lambda q, k, v, **options: cache.attend(self.base.depth, q, k, v, window, **options)
        queries, keys, entry = butler(x, window.positions, attend)
        out = self.base.apply(own, window, Marking(base=cache, queries=queries, keys=keys))
        return dataclasses.replace(out, entries=(*out.entries, entry))


@struct
class TokenButlerCache(SparseCache):
    """All tokens, with the predictor's keys of each token.

    Attributes:
        marks: for each layer `f[B, G, S, H / G m]`, the predictor's keys; None: the layer attends to all tokens.
        kv, shapes: keys and values, and shapes, of the model's layers and last of the predictor.
        length, given, kind: see `SparseCache`.
    """

    marks: tuple[Array | None, ...]

    if TYPE_CHECKING:
        kind: PredictedReading

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               sliding: int | None = None, softcap: float | None = None,
               bias: Bias | None = None, sinks: Array | None = None) -> tuple[Array, PyTree]:
        entry, d, marks = own_entry(q, k, v), self.widths[layer], self.marks[layer]
        if window.is_prefill or marks is None or self.kind.count(self.capacity) >= self.capacity:
            return self.attend_all(layer, q[..., :d], k[..., :d], v, window, scale=scale, sliding=sliding,
                                   softcap=softcap, bias=bias, sinks=sinks), entry
        seen = jnp.broadcast_to(window.visible(), (*q.shape[:2], k.shape[1]))
        each = jax.vmap(lambda row, node: self._read(d, row, node))
        row = self.kv[layer], marks, self.length, k, v, window.key_positions
        nodes = q.at[..., :d].multiply(scale), seen, window.positions
        found = each_node(functools.partial(each, row), nodes)
        return (found if sinks is None else with_sinks(found, sinks))[0].astype(v.dtype), entry

    def _read(self, d: int, row: tuple[Array, ...], node: tuple[Array, ...]) -> tuple[Array, Array]:
        """Returns attention of one query `f[H, d + m]` of one row to the tokens that its heads choose, `f32[H, e]`, and
        the logarithms of the softmax sums."""
        (kv, marks, length, k, v, keys_at), (q, seen, at) = row, node
        (G, S, _), m, kind = kv.shape, q.shape[-1] - d, self.kind
        q = q.astype(jnp.float32).reshape(G, -1, d + m)
        own = jnp.concatenate([k[..., :d], v], -1).swapaxes(0, 1)
        split = lambda x: x.astype(jnp.float32).reshape(*x.shape[:2], -1, m)
        marks = jnp.concatenate([split(marks), split(k[..., d:].swapaxes(0, 1))], 1)
        there = jnp.concatenate([jnp.arange(S) < length, seen])
        worth = jnp.where(there, jnp.einsum("grm,gsrm->grs", q[..., d:], marks), -jnp.inf)
        table = jnp.asarray(kind.table(S))
        most = min(kind.count(S), worth.shape[-1])
        last = lax.top_k(worth, most)[0][..., jnp.clip(table[jnp.clip(at + 1, 0, S)], 1, most) - 1]
        where = jnp.concatenate([jnp.arange(S, dtype=jnp.int32), keys_at])
        worth = jnp.where(there & (where < kind.sinks), jnp.inf, jnp.where(worth >= last[..., None], worth, -jnp.inf))
        found, slots = lax.top_k(worth, min(most + kind.sinks, worth.shape[-1]))
        of = lambda x, slots: jax.vmap(lambda own, slots: own[jnp.clip(slots, 0, x.shape[1] - 1)])(x, slots)
        some = jnp.where((slots < S)[..., None], of(kv, slots), of(own.astype(kv.dtype), slots - S))
        n = slots.shape[-1]
        return attention_to(q[..., :d].reshape(-1, 1, d), some.astype(jnp.float32).reshape(-1, n, some.shape[-1]),
                            (found > -jnp.inf).reshape(-1, n), d)

    def commit(self, entries: Entries, slots: Array) -> Self:
        if not self.kv:
            return self
        pairs = list(zip(self.marks, self.widths, entries, strict=True))
        marks = tuple(None if old is None else write(old, entry.keys[..., d:], slots) for old, d, entry in pairs)
        return super().commit([KVEntry(entry.keys[..., :d], entry.values) for _, d, entry in pairs],
                                slots).replace(marks=marks)


@dataclasses.dataclass(frozen=True)
class PredictedReading(SparseConfig):
    """The cache config that `TokenButlerConfig.wrap_model` gives to the model: the options without the weights of the
    predictor.

    Attributes:
        budget: number or share of tokens that a query attends to; see `TokenButlerConfig`.
        sinks: number of first tokens that are always attended to.
        layer: shape of the keys and values of the predictor's own attention.
        width: number of channels `m` of the queries and keys that the predictor computes for the model's layers.
    """

    budget: int | float
    sinks: int
    layer: KVLayer
    width: int

    name: ClassVar[str] = "token-butler"
    alone: ClassVar[bool] = True

    def table(self, size: int) -> np.ndarray:
        """Returns a table of the number of tokens attended to, for each length of the text up to `size`, `i32[size +
        1]`."""
        length = np.arange(size + 1)
        if isinstance(self.budget, int):
            return np.minimum(length, self.budget).astype(np.int32)
        return np.ceil(length.astype(np.float32) * np.float32(self.budget)).astype(np.int32)

    def count(self, size: int) -> int:
        """Returns the maximum number of tokens attended to, in texts of up to `size` tokens."""
        return int(self.table(size).max())

    def empty(self, shapes: tuple[KVLayer, ...], batch: int, size: int, dtype: Any, inputs: PyTree) -> Cache:
        shapes = (*shapes, self.layer)
        marks: list[Array | None] = []
        for i, shape in enumerate(shapes):
            whole = i in (0, len(shapes) - 1) or self.keeps_dense(i, shape)
            marks.append(None if whole else jnp.zeros((batch, shape.heads, size, self.layer.heads // shape.heads
                                                       * self.width), dtype))
        return TokenButlerCache(marks=tuple(marks), **self.parts(shapes, batch, size, dtype, inputs))


@CACHES.register("token-butler", "TokenButler: Token Importance Is Predictable", "Akhauri et al. 2025", family="sparse")
@dataclasses.dataclass(frozen=True, eq=False)
class TokenButlerConfig(SparseConfig):
    """Keeps all tokens; each head of a query attends to the tokens that a trained predictor rates as important for it.

    The predictor is trained once for a model: `butler = decodax.train.fit_token_butler(lm, texts)`. Its arrays are
    passed with the weights of the model. The cache saves the time of attention to long texts, not memory. Example:
    `cache=caches.token_butler(butler, budget=0.3)`.

    Attributes:
        butler: the predictor, or the path of a file that `Butler.save` wrote.
        budget: number of tokens that a query attends to; below 1, their share of the text so far, rounded up.
        sinks: number of first tokens that are attended to beside these.
    """

    butler: Butler = None       # type: ignore[assignment]
    budget: int | float = 0.5
    sinks: Whole = 4

    name: ClassVar[str] = "token-butler"

    def __post_init__(self) -> None:
        if isinstance(self.butler, str):
            object.__setattr__(self, "butler", Butler.load(self.butler))
        taken("butler", self.butler, Butler, "what decodax.train.token_butler trains, or a file of it")
        super().__post_init__()
        tokens = isinstance(self.budget, int) and self.budget >= 1
        if not (tokens or (isinstance(self.budget, float) and 0 < self.budget < 1)):
            raise ValueError(f"budget: got {self.budget!r}, takes a number of tokens from 1 or a share below 1")

    def wrap_model(self, lm: Loaded) -> tuple[Model, PyTree]:
        model = layered(lm.model)
        self.butler.check(layers_of(model), model.config.width)
        kind = PredictedReading(self.budget, self.sinks, self.butler.layer, self.butler.width)
        return Butlered(cast(LayeredModel, model.with_cache(kind))), (lm.params, self.butler)

    def empty(self, shapes: tuple[KVLayer, ...], batch: int, size: int, dtype: Any, inputs: PyTree) -> Cache:
        raise ValueError("cache: token-butler runs a predictor before the model, so it takes the model that answers: "
                         "generate(..., cache=...)")


def layered(model: Any) -> LayeredModel:
    """Returns the model, if a predictor can be trained for it and run before it.

    Raises:
        ValueError: the model does not run layer by layer, or has fewer than two layers or layers with different heads.
    """
    if not isinstance(model, LayeredModel) or model.config.shared:
        raise ValueError(f"lm: got a {type(model).__name__}, takes a model that runs layer by layer, each with keys "
                         "and values of its own")
    if len({(shape.heads, shape.queries) for shape in layers_of(model)}) > 1 or len(layers_of(model)) < 2:
        raise ValueError("lm: got a model of one layer, or whose layers have different heads; takes two or more layers "
                         "with the same")
    return model
