"""Counts, from shapes, the memory, memory traffic and arithmetic of a round of decoding on one device; nothing is
allocated."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import itemsize_bits
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from decodax.algorithms.speculative import Speculative
from decodax.algorithms.speculative.heads import TrainedHead
from decodax.bench.plan.hardware import Device
from decodax.cache import KeyValues, KVLayer, LinearRecurrent, LinearStates, PerLayer, Recurrent
from decodax.common.axes import DATA, EXPERT, MODEL, by_axes, over, replicas
from decodax.core.algorithm import variants
from decodax.core.cache import Cache
from decodax.core.drivers import advance, commit_prompts
from decodax.core.fitting import fit_cache
from decodax.core.mesh import heads
from decodax.core.start import init_state
from decodax.core.types import Params
from decodax.engine.methods import chosen, with_cache
from decodax.io.load import LM
from decodax.io.packed import axes, layout
from decodax.io.row_order import by_row
from decodax.models.blocks.options import Layer
from decodax.models.drafters.specs import head_shardings
from decodax.models.experts import BLOCK
from decodax.models.formats import pack
from decodax.models.kv_shapes import kv_layers
from decodax.models.packed import Packed
from decodax.models.transformer import Transformer
from decodax.models.weight_source import is_table
from decodax.sampling import build

BEST = ("bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Setup:
    """A decoding program on a mesh: the arguments with which `decodax.core.drivers.advance` is lowered. Arrays are
    shapes with shardings.

    Attributes:
        lm: the model.
        algorithm: the algorithm.
        mesh: the mesh, with or without devices.
        params: shapes of the weights.
        policy: shapes of the sampling policy.
        state: shapes of the decoding state.
        width: number of tokens that a round scores for a row.
        rows: number of rows of a replica.
        live: number of cache entries of each row.
        capacity: number of cache slots of each row.
    """

    lm: LM
    algorithm: Any
    mesh: Any
    params: Params
    policy: Any
    state: Any
    width: int
    rows: int
    live: int
    capacity: int

    def lower(self) -> Any:
        with jax.set_mesh(self.mesh):
            return advance.lower(self.algorithm, self.lm.model, self.params, self.policy, self.state,
                                 jax.ShapeDtypeStruct((), jnp.int32))


@dataclasses.dataclass(frozen=True)
class DeviceCounts:
    """The share of a round that one device has. Sizes are in bytes.

    Attributes:
        weights: size of the model's weights.
        draft: size of other weights, such as those of a draft model.
        cache: size of the part of the cache in the device's memory.
        host: size of the part of the cache in the host's memory.
        weights_read: bytes of weights that a round has to read.
        cache_read: bytes of cache entries that a round has to read.
        cache_written: bytes of cache entries that a round has to write.
        prompt_flops: floating-point operations of the matrix products for one prompt of `live` tokens; 0 without a
            cache.
        row_cache: bytes of cache entries of that prompt; 0 without a cache.
        flops: floating-point operations of a round's matrix products.
        sent: bytes that the device sends in collectives.
        hops: number of sequential steps from neighbor to neighbor in those collectives.
    """

    weights: int
    draft: int
    cache: int
    host: int
    weights_read: float
    cache_read: float
    cache_written: float
    prompt_flops: float
    row_cache: float
    flops: float
    sent: float
    hops: int

    @property
    def moved(self) -> float:
        return self.weights_read + self.cache_read + self.cache_written

    def seconds(self, device: Device, moved: float | None = None) -> tuple[float, float, float]:
        """Returns the minimum seconds that memory, arithmetic and interconnect each take.

        Args:
            device: the device.
            moved: the bytes moved; default `self.moved`.
        """
        return ((self.moved if moved is None else moved) / device.bandwidth, self.flops / device.flops,
                self.sent / device.link + self.hops * device.hop)


def setup(lm: LM, devices: Any, mesh: tuple[int, ...], *, batch: int, capacity: int, live: int | None = None,
          new: int | None = None, algorithm: Any = None, cache: Any = None, weights: Any = None, sampling: Any = None
          ) -> Setup:
    """Returns the decoding program of a model on a mesh, with shapes in place of arrays.

    Args:
        lm: the model, whose weights may be shapes.
        devices: an array of devices, or None for a mesh without devices, which is enough to count.
        mesh: number of devices along the data axis, along the model axis, and optionally along the expert axis.
        batch: number of rows over all replicas.
        capacity: number of slots of a row.
        live: number of cache entries of each row. None: `capacity`.
        new: number of slots for new tokens, on which the size of some caches depends. None: a quarter of `capacity`, at
            most 256.
        algorithm: the algorithm, as in `decodax.generate`.
        cache: the cache, as in `decodax.generate`.
        weights: a format of `decodax.models.formats`, or None.
        sampling: arguments of `decodax.sampling.build`.

    Raises:
        ValueError: the batch is not divisible by the number of replicas.
    """
    names, kinds = (DATA, MODEL, EXPERT)[:len(mesh)], (AxisType.Auto,) * len(mesh)
    place = jax.sharding.AbstractMesh(mesh, names, axis_types=kinds) if devices is None else \
        Mesh(np.asarray(devices).reshape(mesh), names, axis_types=kinds)
    if batch % replicas(place):
        raise ValueError(f"batch: got {batch}, takes a multiple of the {replicas(place)} replicas of the mesh "
                         f"{by_axes(mesh)}")
    new = max(1, min(256, capacity // 4)) if new is None else new
    if cache is not None:
        lm = with_cache(lm, cache)
        lm = dataclasses.replace(lm, model=fit_cache(lm.model, new))
    plain = lm.params
    # Choose the method on unpacked, unsharded weights, because a method that splits weights reads their shapes.
    method = chosen(lm, algorithm, batch).with_length(new)
    lm = dataclasses.replace(lm, params=_laid_out(lm.model, plain, place, weights))
    params = Params(target=lm.params, draft=_drafter_laid_out(method, place))
    method = method.bare()
    row: Any = lambda dtype, *more: jax.ShapeDtypeStruct((batch, *more), dtype)
    policy = jax.eval_shape(lambda: build(batch, vocab_size=lm.vocab_size, eos_token_id=[1, 2], **(sampling or {})))

    def begin(params: Params, policy: Any, tokens: Any, length: Any) -> Any:
        return init_state(method, lm.model, params, policy, tokens, length, size=capacity, max_new=jnp.int32(1))

    with jax.sharding.use_abstract_mesh(place.abstract_mesh):       # whose platform decides on the padding of a cache
        state = jax.eval_shape(begin, params, policy, row(jnp.int32, capacity), row(jnp.int32))
    if cache is not None and method.traits.caches:     # take the cache in the form that it has after the prompts
        seen = jax.ShapeDtypeStruct((batch, capacity), jnp.int32)
        bare = state.replace(tokens=seen, cache=None, algo=None, policy=None, record=None, stats=None)
        with jax.sharding.use_abstract_mesh(place.abstract_mesh):
            held, _ = jax.eval_shape(lambda p, held, s: commit_prompts(
                None, lm.model, p, held, s, width=256, rows=batch), params, (there(state.cache, place), None), bare)
        state = state.replace(cache=held[0])
    shape = dict(zip(names, mesh, strict=True))

    def spread(tree: Any) -> Any:
        def spec(x: Any, wanted: PartitionSpec) -> Any:
            fits = over(wanted, x.shape, shape)
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(place, fits))
        return jax.tree.map(spec, tree, heads(tree))

    some = variants(method) or (method,)
    width = max(jax.eval_shape(lambda p, q, s, m=m: m.propose(p, q, s)[0].tokens, params, policy, state).shape[1]
                for m in some)
    state = spread(state)
    state = state.replace(cache=there(state.cache, place)) if method.traits.caches else state
    return Setup(lm, method, place, params, spread(policy), state, width, batch // replicas(place),
                 capacity if live is None else live, capacity)


def there(cache: Cache, mesh: Any) -> Cache:
    """Returns a cache, whose arrays are shapes, with shardings in the host's memory for the arrays that the cache keeps
    there; plain shapes do not tell this."""
    on_host = {id(x) for x in jax.tree.leaves(cache.layout.hosted)}

    def one(x: Any) -> Any:
        where = NamedSharding(mesh, PartitionSpec()) if x.sharding is None else x.sharding
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where.with_memory_kind("pinned_host"))

    return jax.tree.map(lambda x: one(x) if id(x) in on_host else x, cache)


def _laid_out(model: Any, weights: Any, mesh: Any, form: Any) -> Any:
    """Returns weights as shapes with their shardings on a mesh, packed in the format `form` if one is given."""
    shaped = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    def laid(path: Any, x: Any, sharding: NamedSharding) -> Any:
        if not isinstance(x, Packed):
            return shaped(x, sharding)
        table = is_table(".".join(part.key for part in path))
        x = x.placed(*axes(sharding, table))
        return jax.tree.map(lambda a, spec: shaped(a, NamedSharding(mesh, spec)), x,
                            layout(x, table, sharding.spec, dict(mesh.shape)))

    if form is not None and form not in BEST:
        weights = jax.eval_shape(functools.partial(pack, weights=form), weights)
    return by_row(model.config, jax.tree_util.tree_map_with_path(
        laid, weights, model.shardings(mesh), is_leaf=lambda x: isinstance(x, Packed)))


def _drafter_laid_out(method: Any, mesh: Any) -> Any:
    """Returns the weights of a decoding method as shapes with their shardings: those of a trained head as
    `decodax.load_drafter` places it, others replicated."""
    shaped = lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
    whole = lambda tree: jax.tree.map(lambda x: shaped(x, NamedSharding(mesh, PartitionSpec())), tree)
    draft = method.draft if isinstance(method, Speculative) else None
    if not isinstance(draft, TrainedHead):
        return whole(method.weights)
    head, own = draft.head, method.weights.head
    laid = jax.tree.map(lambda x, where: jax.tree.map(lambda a: shaped(a, where), x), own,
                        head_shardings(head, own, mesh), is_leaf=lambda x: isinstance(x, Packed))
    return whole(method.weights).replace(head=laid)


def local(tree: Any) -> int:
    """Returns the size in bytes of one device's part of all arrays in a pytree."""
    return sum(_bytes(x) for x in jax.tree.leaves(tree))


def _bytes(x: Any) -> int:
    return math.prod(x.sharding.shard_shape(x.shape)) * itemsize_bits(x.dtype) // 8


def count(s: Setup) -> DeviceCounts:
    """Counts the memory, memory traffic and arithmetic of a round of the setup on each device."""
    model: Any = s.lm.model
    c = model.config
    across, parts = s.mesh.shape[MODEL], s.mesh.shape.get(EXPERT, 1)
    tokens = s.rows * s.width
    weights, beside = local(s.params.target), local(s.params.draft)
    table = sum(local(own) for own in _tables(model, s.params.target))
    item = jnp.dtype(model.dtype).itemsize
    # Experts that no token chose are not read.
    experts, share, mixtures = 0, 0.0, 0
    for i, layer in _layers(model):
        if (e := layer.mixture) is not None:
            own = sum(_bytes(x) for x in _experts(s.params.target, i, e.count))
            experts += own
            share += own * (1 - (1 - e.chosen / e.outputs) ** (tokens * parts))
            mixtures += 1
    rows = c.width * (not c.tied) + (len(c.layers) * c.layer_inputs.width if c.layer_inputs is not None else 0) + sum(
        layer.ngrams.width for layer in c.layers if layer.ngrams is not None)
    read = weights - table - experts + share + tokens * rows * item

    cached = local(s.state.cache) if s.algorithm.traits.caches else 0
    host = local(s.state.cache.layout.hosted) if s.algorithm.traits.caches else 0
    # Recurrent layers have states in place of keys and values, or beside them: all is read and written in each round.
    states = local(_states(s.state.cache)) if s.algorithm.traits.caches else 0
    reads = kv_reads(s)
    own = sum(read.entry for read in reads if read.own)
    # A cache of another kind than dense is counted by its own size.
    cache_read = 0.0 if not cached else states + (
        sum(read.entry * read.held for read in reads) if cached - states >= 0.95 * own * s.capacity and not host else
        (cached - states - host) * min(1.0, s.live / s.capacity))
    written = float(states + own * s.width) if cached else 0.0

    per_token = 2 * _active(model)
    # In the absorbed form of latent attention, both products have the width of a latent.
    heads = lambda read: c.query_heads(c.layers[read.layer])
    attended = sum(4 * heads(read) * read.shape.width * (read.held if cached else s.width) for read in reads)
    flops = tokens * (per_token + attended) / across
    # A token of the prompt attends to the tokens before it; only the last token needs logits.
    seen = sum((w * (w + 1) // 2 + (s.live - w) * w) * heads(read) * c.key_width(c.layers[read.layer])
               for read in reads for w in (read.held,))
    prompt = s.live * (per_token - 2 * c.width * c.vocab) + 2 * c.width * c.vocab + 4 * seen
    reductions = sum(1 if layer.half else 2 for layer in c.layers) + 1
    sent = 0.0 if across == 1 else reductions * 2 * (across - 1) / across * tokens * c.width * item / 2
    # Over an axis "expert", each mixture gathers the tokens of all devices, and scatters their sums.
    sent += mixtures * 2 * (parts - 1) * tokens * c.width * item
    return DeviceCounts(weights, beside, cached - host, host, read, cache_read, written,
                        prompt / across if cached else 0.0, cache_read / s.rows, flops, sent,
                        (reductions * 2 * (across - 1) if across > 1 else 0) + mixtures * 2 * (parts - 1))


@dataclasses.dataclass(frozen=True)
class KVRead:
    """The keys and values that a layer reads in a round on one device.

    Attributes:
        layer: index of the layer.
        shape: their shape.
        own: False if they are those of another layer, which are read again, but not stored or written.
        heads: number of key/value heads that the device has.
        width: number of channels of one entry, with the zeros that caches on TPUs store after it
            (`decodax.cache.lanes`).
        entry: bytes of one entry of all rows, with these zeros.
        held: number of entries of each row that the layer attends to.
    """

    layer: int
    shape: KVLayer
    own: bool
    heads: int
    width: int
    entry: int
    held: int


def kv_reads(s: Setup) -> list[KVRead]:
    """Returns one `KVRead` for each layer with softmax attention: the keys and values that it reads from a dense cache
    in a round."""
    model: Any = s.lm.model
    c, across, item = model.config, s.mesh.shape[MODEL], jnp.dtype(model.dtype).itemsize
    shapes, cache = kv_layers(c, None), s.state.cache.base if isinstance(s.state.cache, PerLayer) else s.state.cache
    zeros = [cache.padded(i) if isinstance(cache, KeyValues) else 0 for i in range(len(shapes))]
    stored = dict(zip(c.attending, zip(shapes, zeros, strict=True), strict=True))
    found = []
    for i, layer in _layers(model):
        # The values of layers that repeat the attention of another one are in its entries.
        own = stored.get(i if layer.reads is None else layer.reads)
        if own is not None:
            shape, behind = own
            heads, width = shape.heads // (1 if shape.heads % across else across), shape.both + behind
            size, held = width * item * s.rows * heads, min(s.live, layer.sliding or s.live)
            found.append(KVRead(i, shape, layer.reads is None, heads, width, size, held))
    return found


def _states(cache: Any) -> Any:
    """Returns the states of a cache's recurrent layers."""
    return cache.linear if isinstance(cache, PerLayer) else (
        cache if isinstance(cache, LinearStates | LinearRecurrent | Recurrent) else None)


def blocks_of_experts(s: Setup) -> dict[int, int]:
    """Returns a dict from the number of iterations of a mixture's loop over blocks of tokens, which is the most that
    can be needed, to the number of blocks that one device is expected to compute in a round if tokens choose experts at
    random."""
    found, parts, tokens = {}, s.mesh.shape.get(EXPERT, 1), s.rows * s.width
    for layer in s.lm.model.config.layers:      # type: ignore[attr-defined]
        if (e := layer.mixture) is not None:
            held, n = (e.count // parts, tokens * parts) if e.count % parts == 0 else (e.count, tokens)
            p = e.chosen / e.outputs
            odds = [math.comb(n, k) * p ** k * (1 - p) ** (n - k) for k in range(n + 1)] if n <= 1000 else []
            likely = held * sum(-(-k // BLOCK) * odd for k, odd in enumerate(odds)) if odds else (
                held + n * p * held / BLOCK)
            found[n * e.chosen // BLOCK + min(held, n * e.chosen)] = max(1, round(likely))
    return found


def _layers(model: Transformer) -> Iterator[tuple[int, Layer]]:
    yield from enumerate(model.config.layers)


def _experts(weights: Any, i: int, count: int) -> list[Any]:
    """Returns the weights of a layer whose first axis has one entry for each expert."""
    layer = weights["layers"][str(i)]
    layer = layer.get("shortcut", layer["mlp"])
    return [x for x in jax.tree.leaves(layer) if x.ndim >= 2 and x.shape[0] == count]


def _tables(model: Transformer, weights: Any) -> list[Any]:
    """Returns the weights of which a token reads a few rows: the embedding tables, without one that is the output head,
    too, and the tables of n-grams."""
    c = model.config
    return [*(() if c.tied else (weights["embed"],)), *(() if c.layer_inputs is None else (
        weights["layer_inputs"]["table"],)), *(weights["layers"][str(i)]["ngrams"]["table"]
                                               for i, layer in _layers(model) if layer.ngrams is not None)]


@functools.lru_cache(maxsize=32)
def _active(model: Transformer) -> int:
    """Returns the number of weights with which each token is multiplied; of experts only those that are chosen."""
    shapes = model.abstract_params()
    tables = sum(math.prod(x.shape) for x in _tables(model, shapes))
    whole = sum(math.prod(x.shape) for x in jax.tree.leaves(shapes)) - tables
    for i, layer in _layers(model):
        if (e := layer.mixture) is not None:
            size = sum(math.prod(x.shape) for x in _experts(shapes, i, e.count))
            whole -= round(size * (1 - e.chosen / e.outputs))
    return whole
