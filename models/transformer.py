"""`Transformer`: the decoder network as a `Model`, with its weights as a plain pytree that is passed in.

The network's structure is created once, abstractly, for each configuration; a call merges the caller's weights into it
during tracing. So the weights can be jitted, differentiated, optimized, sharded and saved as any nested dict of arrays.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding

from decodax.cache import Dense, KVEntry, LinearStates, LinearTerms, PerLayer, cache_of, dense, linear_states
from decodax.cache.linear import over_text
from decodax.common.axes import MODEL
from decodax.common.struct import short
from decodax.core.around import ReadsInPart
from decodax.core.cache import Cache
from decodax.core.capabilities import layers_read
from decodax.core.packing import PackedWindow, Packing
from decodax.core.types import CacheKind, LayeredModel, Out, PartialForward, RandomWeights
from decodax.core.window import Window
from decodax.models.blocks.attention import Attend
from decodax.models.blocks.layer import Keep
from decodax.models.config import DecoderConfig
from decodax.models.decoder import Decoder
from decodax.models.drafters.hidden_transfer import Transfer
from decodax.models.images import Images, check_cache, images_of, no_images, with_axes
from decodax.models.inputs import AdapterRows, Embeddings, EncoderText, ReadsText, check_tokens, named
from decodax.models.kv_shapes import kv_layers, places
from decodax.models.latent.attention import Expanding
from decodax.models.layers import optional
from decodax.models.packed import Adapted, embedded, whole
from decodax.models.recurrent.blocks import recurrent_states
from decodax.models.residual import conditioning
from decodax.models.rope import Dynamic, LongRope
from decodax.models.specs import weight_spec
from decodax.pallas_kernels.window_attention import window_attention, window_attention_lse

Weights = dict[str, Any]
"""A nested dict of arrays, keyed by the network's attribute names: `weights["layers"]["0"]["attn"]["q"]["kernel"]`."""


@dataclasses.dataclass(frozen=True)
class Transformer(LayeredModel, RandomWeights, ReadsInPart, ReadsText):
    """A decoder-only transformer. It is compared by value and static under jit.

    Attributes:
        config: shape and options of the network.
        dtype: dtype of the cache, as a name ("float32", "bfloat16"). Activations have the weights' dtype.
        context: the sequence length for which length-dependent rope scalings (`Dynamic`, `LongRope`) are set; None: the
            trained length. Models without such a scaling ignore it.
        cache: config of its cache.
    """

    __repr__ = short

    config: DecoderConfig
    dtype: str = "float32"
    context: int | None = None
    cache: CacheKind = dense

    @property
    def max_positions(self) -> int | None:
        """Number of positions beyond which the model would silently be wrong, or None: that of rows of the learned
        position embedding, or the length for which a length-dependent rope is set."""
        bounds = [self.config.learned_positions] if self.config.learned_positions else []
        for layer in self.config.layers:
            scaling = layer.rope.scaling if layer.rope is not None else None
            if layer.rope is not None and (chunks := layer.rope.chunks) is not None:
                # Within chunks no position is too large, but beyond `trained` a factor depends on the length.
                bounds += [max(self.context or 0, chunks.trained)] if chunks.trained else []
            elif isinstance(scaling, Dynamic):
                bounds.append(max(self.context or 0, scaling.trained))
            elif isinstance(scaling, LongRope) and (self.context or 0) <= scaling.trained:
                bounds.append(scaling.trained)
        return min(bounds, default=None)

    @property
    def trained_positions(self) -> int | None:
        found = [layer.rope.chunks for layer in self.config.layers if layer.rope is not None and layer.rope.chunks]
        # With positions that start again in each chunk, none exceeds those of the training.
        return None if found and found[0].trained is None else self.config.context

    @property
    def depth(self) -> int:
        return len(self.config.layers)

    def with_cache(self, kind: CacheKind) -> Transformer:
        return dataclasses.replace(self, cache=kind)

    @property
    def cache_kind(self) -> CacheKind:
        return self.cache

    def init_cache(self, batch: int, capacity: int, *, params: Any = None, inputs: Any = None) -> Cache:
        c, encodes = self.config, self.encodes
        if (encodes and params is not None) if inputs is None else (
                not isinstance(inputs, EncoderText if encodes else Embeddings | AdapterRows)):
            takes = "an EncoderText for a Transformer with prefix linear attention" if encodes else (
                "Embeddings or AdapterRows for a Transformer")
            raise ValueError(f"inputs: got {None if inputs is None else named(inputs)}, takes {takes}")
        if isinstance(inputs, Embeddings) and inputs.values.shape[2:] != (c.width,):
            raise ValueError(f"inputs: got embeddings of width {inputs.values.shape[-1]}, takes {c.width}")
        given, dtype = None if encodes else inputs, jnp.dtype(self.dtype)
        c = dataclasses.replace(c, layers=with_axes(c.layers, inputs))
        layers = kv_layers(c, self.context)
        made = functools.partial(cache_of, self.cache, layers, batch, capacity, dtype, given)
        if c.recurrent:
            return PerLayer(base=made(), where=places(c),
                            linear=recurrent_states(c, batch, capacity, dtype, given))
        if not c.summing:
            cache = made()
            if c.echoed and not isinstance(cache, Dense):
                raise ValueError(f"cache: got a {type(cache).__name__}, takes a dense cache, since layers repeat the "
                                 "attention of others")
            check_cache(cache, inputs)
            return cache
        rules = [rule for i in c.summing if (rule := c.layers[i].linear) is not None]
        shapes = [(c.kv_heads, c.key_width(c.layers[i]), c.head_dim) for i in c.summing]
        states = linear_states(rules, shapes, batch, capacity, dtype, given)
        if isinstance(inputs, EncoderText) and params is not None:
            states = self._encoded(params, states, inputs)
        if not layers:
            if self.cache is not dense:
                raise ValueError(f"cache: got {self.cache}, but no layer of the model caches keys and values")
            return states
        return PerLayer(base=made(), linear=states, where=places(c))

    @property
    def encodes(self) -> bool:
        """True if the model takes an `EncoderText`: a prefix that its linear attention processes in both directions
        before the text."""
        return any((rule := self.config.layers[i].linear) is not None and rule.prefix for i in self.config.summing)

    def _encoded(self, params: Weights, states: LinearStates, prefix: EncoderText) -> LinearStates:
        """Returns the recurrent states with the encoders' results for a prefix, in all layers."""
        sums: list[Array] = []
        self._over(params, prefix.tokens, None, None, prefix.length, sums)
        whose = [rule.prefix for rule in states.rules]
        made = iter(sums)
        return states.replace(states=tuple(state.replace(sums=next(made)) if own else state
                                           for state, own in zip(states.states, whose, strict=True)))

    def apply(self, params: Weights, window: Window, cache: Cache, keep: Keep | None = None) -> Out:
        """Runs the network on a window; see `Model.apply`. With hints of the window it continues after the layers of a
        `PartialForward`, or follows a `Transfer`. `keep` selects the layers, or halves of layers, that run."""
        c, begun, packing = self.config, window.hint(PartialForward), window.hint(Packing)
        params, by_row = _chosen(params, cache)
        network, images = _network(self.config, params, self.dtype), images_of(cache)
        window = window if images is None else images.seen(window)
        canvas, transfer = conditioning.of(window, network), window.hint(Transfer)
        x, inputs = _embedded(network, window, cache)
        if (first := layers_read(cache) if window.is_prefill else None) is not None:
            keep = [(i < first,) * 2 for i in range(self.depth)]

        def unpacked() -> tuple[Array, Any, tuple[Array, ...]]:
            attend: Attend = lambda layer, q, k, v, **options: cache.attend(
                layer, q, k, v, conditioning.reaching(window, canvas), **options)
            attend = (Expanding.of(cache, window) if c.latent and not c.indexed else None) or attend
            near = lambda q, k, v, **options: window_attention(q, k, v, window.visible(), window.positions, **options)
            own = begun if begun is not None and begun.model == self else None
            return network(x, window.positions, attend, self.context, keep, own, near, images, inputs, canvas, transfer)

        def packed(size: int) -> tuple[Array, Any, tuple[Array, ...]]:
            assert packing is not None
            nodes = PackedWindow.of(window, packing, size)
            hidden, entries, layers = network(nodes.pack(x), nodes.pack(window.positions), nodes.attend(cache),
                                              self.context, inputs=None if inputs is None else nodes.pack(inputs))
            return nodes.unpack(hidden), entries, tuple(map(nodes.unpack, layers))

        if packing is None or keep is not None or begun is not None or by_row or c.echoed or c.recurrent or (
                c.indexed or images is not None or canvas is not None or transfer is not None):
            hidden, entries, layers = unpacked()
        else:
            hidden, entries, layers = packing.run(window.live, packed, unpacked)
        layers, streams = layers[:len(c.layers)], (*layers[len(c.layers):], None)[0]
        if first is not None:
            entries = (*entries[:first], layers[first - 1])
        return Out(hidden=hidden, entries=entries, head=network.logits, layers=layers, norm=network.norm,
                   expect=network.expected if c.conditioned else None, streams=streams)

    def walk(self, params: Weights, window: Window, cache: Cache) -> tuple[Array, Callable[[int, Array], Array]]:
        self._apart()
        no_images(cache)
        network = _network(self.config, _chosen(params, cache)[0], self.dtype)
        x, inputs = _embedded(network, window, cache)
        tables = network.tables(window.positions, self.context, inputs)
        attend = lambda layer, q, k, v, **options: cache.attend(layer, q, k, v, window, **options)
        return x, lambda layer, x: network.layers[str(layer)](layer, x, tables, attend)[0]

    def _apart(self) -> None:
        c = self.config
        why = ("some read the keys and values of others, or their choice, or repeat their attention" if c.shared else
               "they have several residual streams" if c.streams is not None else
               "some add what the mixture of another computed" if c.shortcuts else
               "some have linear attention or a recurrent block" if c.stateful else None)
        if why is not None:
            raise ValueError(f"layers: {why}, so they cannot run one by one")

    def outputs(self, params: Weights, layer: int) -> Array:
        c, index = self.config, self.config.attending[layer]
        several = {"value_heads: got more than kv_heads": c.values_of_key > 1,
                   "layers: some repeat the attention of others": c.echoed,
                   "layers: some narrow the outputs of heads": any(own.shared_key for own in c.layers)}
        if why := [why for why, found in several.items() if found]:
            raise ValueError(f"{why[0]}, so several matrices project the values of a head")
        kernel = params["layers"][str(index)]["attn"]["o"]["kernel"]
        kernel = kernel.kernel if isinstance(kernel, Adapted) and kernel.a.ndim == 3 else kernel  # one for all rows
        return whole(kernel, jnp.float32).reshape(c.query_heads(c.layers[index]), -1, c.width)

    def embeddings(self, params: Weights, tokens: Array) -> Array:
        network = _network(self.config, params, self.dtype)
        return embedded(network.embed.get_value(), tokens, network.dtype)

    def logits(self, params: Weights, hidden: Array) -> Array:
        return _network(self.config, params, self.dtype).logits(hidden)

    def pieces(self, params: Weights) -> Pieces:
        self._apart()
        return Pieces(_network(self.config, params, self.dtype), self.context)

    def forward(self, params: Weights, tokens: Array, positions: Array | None = None,
                mask: Array | None = None, prefix: Array | None = None) -> Array:
        """Returns logits `f32[B, T, V]` of whole sequences without a cache, for training and scoring.

        Args:
            params: the weights.
            tokens: `i32[B, T]`.
            positions: `i32[B, T]`; by default 0 .. T-1.
            mask: `bool[B or 1, T, T]`, True where a token (row) attends to another (column); each token attends to at
                least one. The default is causal.
            prefix: `i32[B]`, number of first tokens that prefix linear attention processes in both directions; None:
                none.
        """
        hidden, head = self.features(params, tokens, positions, mask, prefix=prefix)
        return head(hidden)

    def features(self, params: Weights, tokens: Array, positions: Array | None = None, mask: Array | None = None,
                 keep: Keep | None = None, inputs: Embeddings | None = None, prefix: Array | None = None
                 ) -> tuple[Array, Any]:
        """Returns hidden states `f[B, T, D]` and the head that maps them to logits. The other arguments are those of
        `forward`.

        Args:
            keep: selects the layers that run; None: all.
            inputs: embeddings, with `T` positions, that replace those of tokens; or images.
        """
        return self._over(params, tokens, positions, mask, prefix, [], keep, inputs)

    def _over(self, params: Weights, tokens: Array, positions: Array | None, mask: Array | None, prefix: Array | None,
              sums: list[Array], keep: Keep | None = None, inputs: Embeddings | None = None) -> tuple[Array, Any]:
        """Does the work of `features`. Appends to `sums` the encoding of the prefix by each layer with prefix linear
        attention."""
        T = tokens.shape[1]
        where = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), tokens.shape) if positions is None else positions
        seen = jnp.tril(jnp.ones((1, T, T), bool)) if mask is None else mask
        network, images = _network(self.config, params, self.dtype), inputs if isinstance(inputs, Images) else None
        check_tokens(self.config.takes_tokens, inputs)
        values, given = (None, None) if inputs is None else (inputs.values, inputs.given) if images is None else (
            images.at(where))
        if images is not None and images.number is not None:
            seen = seen | images.together(where)
        near = lambda q, k, v, **options: window_attention(q, k, v, seen, where, **options)

        def attend(layer: int, q: Array, k: Any, v: Any, *, linear: LinearTerms | None = None,
                   walk: Any = None, **options: Any) -> tuple[Array, Any]:
            if walk is not None and mask is not None:
                raise ValueError("mask: got one, a network with recurrent blocks takes None, a causal text")
            if walk is not None:
                return walk.over_text(), ()
            if linear is None:
                return near(q, k, v, **options), KVEntry(k, v)
            out, encoded = over_text(linear, q, k, v, mask, where, prefix)
            if linear.rule.prefix:
                sums.append(encoded)
            return out, ()

        x = network.embedded(tokens, where, values, given)
        alone: Attend = attend if not self.config.latent or self.config.indexed or self.config.recurrent else Expanding(
            lambda q, k, v, scale: window_attention_lse(q, k, v, seen, where, scale=scale))
        return network(x, where, alone, self.context, keep, near=near, images=images,
                       inputs=network.inputs(tokens, x, given))[0], network.logits

    def init_params(self, key: Array, dtype: jax.typing.DTypeLike = jnp.float32) -> Weights:
        """Returns random weights: normal with standard deviation 0.02, norms at identity."""
        # Not under one jit: compiling a generator per weight takes longer than running one per shape.
        weights = nnx.to_pure_dict(nnx.state(Decoder(self.config, nnx.Rngs(params=key))))
        return jax.tree.map(lambda x: x.astype(dtype), weights)

    def abstract_params(self, dtype: jax.typing.DTypeLike = jnp.float32) -> Weights:
        """Returns the weights' shapes, as `jax.ShapeDtypeStruct`s."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), _split(self.config)[1])

    def shardings(self, mesh: Mesh, axis: str = MODEL) -> Weights:
        """Returns a `NamedSharding` for each weight.

        Heads, MLP and vocabulary are sharded over `axis` where it divides them, whole experts over the axis "expert" if
        the mesh has one; the rest is replicated.
        """
        return jax.tree.map(lambda axes: NamedSharding(mesh, weight_spec(self.config, axes, mesh, axis)),
                            _split(self.config)[2], is_leaf=lambda x: isinstance(x, tuple))


@dataclasses.dataclass(frozen=True)
class Pieces:
    """The parts of a network within a trace, which the caller runs one by one.

    `x` is the residual stream `f[B, W, D]` at any nodes; a layer computes `x + attention(...)`, then `x + mlp(...)`.
    """

    network: Decoder
    context: int | None

    def __post_init__(self) -> None:
        if self.network.c.block == "parallel":
            raise ValueError("config: got parallel blocks, whose halves cannot run one after the other; takes others")
        if self.network.c.layer_inputs is not None or self.network.c.layer_scale:
            raise ValueError("config: got layers with inputs of their own or a factor, which do more than adding the "
                             "outputs of attention and MLP; takes others")

    @property
    def layers(self) -> int:
        return len(self.network.c.layers)

    def embed(self, window: Window, cache: Cache) -> Array:
        no_images(cache)
        return _embedded(self.network, window, cache)[0]

    def attention(self, layer: int, x: Array, positions: Array, attend: Attend) -> tuple[Array, Any]:
        """Runs a layer's attention, with its norm, on the residual stream `x`. Returns the output, to be added to `x`,
        and what a commit writes to the cache. `attend` has the signature of `Cache.attend`."""
        tables = self.network.tables(positions, self.context)
        return self.network.layers[str(layer)].attention_half(layer, x, tables, attend)

    def values(self, layer: int, x: Array) -> Array:
        """Returns the values `f[B, W, G, d]` that a layer's attention computes from the residual stream `x`."""
        return self.network.layers[str(layer)].values(x)

    def mlp(self, layer: int, x: Array) -> Array:
        """Returns the output of a layer's MLP, with its norm, which is to be added to the residual stream `x`."""
        return self.network.layers[str(layer)].mlp_half(x)

    def out(self, x: Array, entries: Any) -> Out:
        """Returns the result of a model call from the residual stream after the last layer; `entries` are those for its
        cache."""
        return Out(hidden=optional(self.network.norm, x), entries=entries, head=self.network.logits)


@functools.lru_cache(maxsize=64)
def _split(config: DecoderConfig) -> tuple[Any, Weights, Weights]:
    """Returns the network without weights: its structure, the weights' shapes, and their logical axes."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))
    axes: Weights = {}
    for path, variable in nnx.to_flat_state(state):
        node = axes
        for name in path[:-1]:
            node = node.setdefault(str(name), {})
        node[str(path[-1])] = variable.get_metadata()["axes"]
    return graph, nnx.to_pure_dict(state), axes


def _chosen(params: Weights, cache: Cache) -> tuple[Weights, bool]:
    """Returns the weights with the adapter of each row selected, and True if rows have different adapters."""
    rows = cache.inputs
    if not isinstance(rows, AdapterRows):
        return params, False
    adapted = lambda x: isinstance(x, Adapted)
    return jax.tree.map(lambda x: x.chosen(rows.which) if adapted(x) else x, params, is_leaf=adapted), True


def _embedded(network: Decoder, window: Window, cache: Cache) -> tuple[Array, Array | None]:
    """Returns the residual stream before the first layer and the inputs of all layers, from tokens, the window's
    embeddings and the row's `Embeddings`."""
    values, which, given = window.embeddings, window.embedded, cache.inputs
    check_tokens(network.c.takes_tokens, given if values is None else values)
    if isinstance(given, Embeddings):
        own, here = given.at(window.positions)
        values, which = (own, here) if values is None or which is None else (
            jnp.where(here[..., None], own.astype(values.dtype), values), here | which)
    x = network.embedded(window.tokens, window.positions, values, which)
    if (canvas := conditioning.of(window, network)) is not None and network.conditioning is not None:
        x = network.conditioning(x, canvas)
    return x, network.inputs(window.tokens, x, which)


def _network(config: DecoderConfig, params: Weights, dtype: str = "float32") -> Decoder:
    return nnx.merge(_split(config)[0], nnx.State(params)).with_default_dtype(dtype)
