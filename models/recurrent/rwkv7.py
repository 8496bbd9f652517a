"""RWKV-7 ("RWKV-7 'Goose' with Expressive Dynamic State Evolution", Peng et al., 2025).

A layer consists of time mixing and channel mixing, each after a layer norm. Both see the previous token beside the
current one: `shift(x, mu) = x + mu (x_before - x)`, with a separate `mu` for every use. Time mixing computes from it
for each head a receptance `r`, a key `k`, a value `v`, a decay `w`, a rate `a` and a gate `g`. The last three, and the
share of the first layer's values, use two small matrices each. The state `S`, one matrix `[N, N]` per head, is updated
by

    S <- S diag(w) - (S k^) (a k^)^T + v k'^T        y = S r + (r . (u k')) v        out = O (g norm(y))

where `k^ = normed(xi k)` is removed before `k' = k (1 + (a - 1) alpha)` is added; `u`, `xi` and `alpha` are vectors
over channels, and the norm is over a head. The transition is a matrix and differs from token to token, so windows and
prompts process their nodes one after the other; each node of a draft window has a state. Channel mixing is `V relu(K
shift(x))^2`.

Files written by `scripts/convert.py rwkv` from a published `.pth` file are loaded; they keep the tensors' names.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.cache import Recurrent
from decodax.common.arguments import check_counts
from decodax.core.cache import Cache
from decodax.core.types import Out, no_inputs
from decodax.core.window import Window, take
from decodax.models.packed import embedded, multiply
from decodax.models.recurrent.state_space import RecurrentNetwork
from decodax.models.transformer import Weights
from decodax.models.weight_source import WeightSource, kernel, plain

DECAY = -math.exp(-0.5)
"""The logarithm of the smallest decay of a channel."""

EPS = 1e-5
"""Epsilon of the layer norms; the norm over a head has 64 times as much."""

MIXES = ("r", "w", "k", "v", "a", "g")
"""The inputs of time mixing, each with its own shares of the token and the one before it."""


@dataclasses.dataclass(frozen=True)
class Rwkv7Config:
    """The shape of an RWKV-7.

    Attributes:
        vocab: vocabulary size `V`.
        width: model width `D`.
        layers: number of layers `L`.
        head_dim: width `N` of a head, a divisor of `D`.
        inner: number of channels of channel mixing.
        decay: rank of the small matrices of the decays `w`.
        rate: rank of the small matrices of the rates `a`.
        value: rank of the small matrices of the shares of the first layer's values.
        gate: rank of the small matrices of the gates `g`.
    """

    vocab: int
    width: int
    layers: int
    head_dim: int = 64
    inner: int = 0
    decay: int = 64
    rate: int = 64
    value: int = 32
    gate: int = 128

    def __post_init__(self) -> None:
        if not self.inner:
            object.__setattr__(self, "inner", 4 * self.width)
        check_counts(self, "vocab", "width", "layers", "head_dim", "inner", "decay", "rate", "value", "gate")
        if self.width % self.head_dim:
            raise ValueError(f"width: got {self.width}, takes a multiple of the {self.head_dim} channels of a head")

    @property
    def heads(self) -> int:
        """Number of heads `H`."""
        return self.width // self.head_dim

    @property
    def tied(self) -> bool:
        """False: the output head has weights of its own in all models of this kind."""
        return False


@dataclasses.dataclass(frozen=True)
class Rwkv7(RecurrentNetwork):
    """An RWKV-7. It is compared by value and static under jit.

    Attributes:
        config: its shape.
        dtype: dtype of activations, as a name. States are float32.
    """

    config: Rwkv7Config
    dtype: str = "float32"

    def init_cache(self, batch: int, capacity: int, *, params: Any = None, inputs: Any = None) -> Cache:
        no_inputs(self, inputs)
        c = self.config
        last = lambda: jnp.zeros((batch, c.width), self.dtype)
        state = lambda: jnp.zeros((batch, c.heads, c.head_dim, c.head_dim), jnp.float32)
        return Recurrent(states=tuple(make() for _ in range(c.layers) for make in (last, state, last)),
                         length=jnp.zeros(batch, jnp.int32), size=capacity)

    def apply(self, params: Weights, window: Window, cache: Cache) -> Out:
        x, first, entries, layers = self.read(params, window), None, [], []
        for i in range(self.config.layers):
            x, first, own = self.block(params["layers"][str(i)], 3 * i, x, first, window, cache)
            entries += own
            layers.append(x)
        return self.scored(params, x, entries, layers)

    def read(self, params: Weights, window: Window) -> Array:
        """Returns the residual stream `f[B, W, D]` before the first layer: the embeddings of the window's tokens, or
        the vectors that the window gives in their place, after a layer norm."""
        x = embedded(params["embed"], window.tokens, jnp.dtype(self.dtype))
        if window.embeddings is not None and window.embedded is not None:
            x = jnp.where(window.embedded[..., None], window.embeddings.astype(x.dtype), x)
        return layer_norm(x, params["first_norm"])

    def block(self, p: Weights, place: int, x: Array, first: Array | None, window: Window,
              cache: Any) -> tuple[Array, Array, list[Any]]:
        """Runs a layer. Returns the residual stream after it, the first layer's values, which later layers mix with
        their own, and the three entries of the layer, what a commit writes to the cache.

        Args:
            p: the layer's weights.
            place: index of the first of these places.
            x: the residual stream.
            first: the first layer's values; None in the first layer.
            window: the window.
            cache: the cache.
        """
        y, own, value = self.mix_time(p["time"], place, layer_norm(x, p["time_norm"]), first, window, cache)
        x = x + y
        y, after = self.mix_channels(p["channels"], place + 2, layer_norm(x, p["channel_norm"]), window, cache)
        return x + y, value if first is None else first, [*own, after]

    def scored(self, params: Weights, x: Array, entries: list[Any], layers: list[Array]) -> Out:
        """Returns the output of a forward pass, whose hidden states are the norm of `x`, the residual stream after the
        last layer. `entries` are those to be committed to the cache, `layers` the outputs `f[B, W, D]` of each layer.
        """
        last = lambda x: layer_norm(x, params["norm"])
        return Out(hidden=last(x), entries=tuple(entries), layers=tuple(layers), norm=last,
                   head=lambda hidden: multiply(hidden, params["lm_head"]["kernel"], jnp.float32))

    def mix_time(self, p: Weights, place: int, x: Array, first: Array | None, window: Window,
                 cache: Any) -> tuple[Array, tuple[Any, Any], Array]:
        """Runs a layer's time mixing, its recurrence over tokens, on the normed stream `f[B, W, D]`. Returns its
        output, its two entries (what a commit writes to the cache), and its values.

        Args:
            p: the weights.
            place: index of the first entry in the cache.
            x: the normed stream.
            first: the values of the first layer; None in the first layer.
            window: the window.
            cache: the cache.
        """
        c, wide = self.config, lambda a: a.astype(jnp.float32)
        before, shifted = earlier(place, x, window, cache)
        of = {name: x + (before - x) * p["mix"][name].astype(x.dtype) for name in MIXES}
        low = lambda name, x, act=lambda x: x: multiply(act(multiply(x, p[name]["down"]["kernel"])),
                                                        p[name]["up"]["kernel"])
        biased = lambda name, x: low(name, x) + p[name]["bias"].astype(x.dtype)
        by_head = lambda a: wide(a).reshape(*a.shape[:-1], c.heads, c.head_dim)
        r, k, v = (multiply(of[name], p[name]["kernel"]) for name in ("r", "k", "v"))
        decay = wide(p["decay"]["bias"]) + wide(low("decay", of["w"], jnp.tanh))
        rate = jax.nn.sigmoid(biased("rate", of["a"]))
        gate = low("gate", of["g"], jax.nn.sigmoid)
        own = v
        if first is not None:
            v = v + (first - v) * jax.nn.sigmoid(biased("value", of["v"]))
        taken = by_head(k * p["taken"].astype(k.dtype))
        taken = taken / jnp.maximum(jnp.linalg.norm(taken, axis=-1, keepdims=True), 1e-12)
        k = k * (1 + (rate - 1) * p["kept"].astype(k.dtype))
        inputs = dict(r=by_head(r), w=by_head(jnp.exp(DECAY * jax.nn.sigmoid(decay))), k=by_head(k), v=by_head(v),
                      out=taken, rate=by_head(rate))

        def step(state: Array, node: dict[str, Array]) -> tuple[Array, Array]:
            found = jnp.einsum("bhvk,bhk->bhv", state, node["out"])
            state = (state * node["w"][:, :, None] - found[..., None] * (node["out"] * node["rate"])[:, :, None]
                     + node["v"][..., None] * node["k"][:, :, None])
            return state, jnp.einsum("bhvk,bhk->bhv", state, node["r"])

        y, states = cache.walk(place + 1, step, inputs, window)
        y = y - y.mean(-1, keepdims=True)
        y = y * lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + 64 * EPS)
        y = y.reshape(*x.shape) * wide(p["head_norm"]["scale"]) + wide(p["head_norm"]["bias"])
        now = (inputs["r"] * inputs["k"] * wide(p["now"])).sum(-1, keepdims=True) * inputs["v"]
        y = (y + now.reshape(x.shape)).astype(x.dtype)
        return multiply(y * gate, p["o"]["kernel"]), (shifted, states), own

    def mix_channels(self, p: Weights, place: int, x: Array, window: Window, cache: Any) -> tuple[Array, Any]:
        """Runs a layer's channel mixing, its feed-forward network, on the normed stream `x`, `f[B, W, D]`. Returns its
        output, `f[B, W, D]`, and its entry, what a commit writes to the cache at index `place`."""
        before, shifted = earlier(place, x, window, cache)
        k = multiply(x + (before - x) * p["mix"].astype(x.dtype), p["k"]["kernel"])
        return multiply(jnp.square(jax.nn.relu(k)), p["v"]["kernel"]), shifted

    def sources(self) -> dict[str, WeightSource]:
        return sources(self.config)

    def first(self, name: str, shape: tuple[int, ...]) -> Array | None:
        """Returns the initial value of a weight of a given name and shape: decay biases from -6 to 1 over the channels,
        0.5 for the shares of mixing, ones for the factors `taken` and `kept`, zeros for other biases; None for other
        weights, which are random."""
        if name.endswith("decay.bias"):
            return jnp.linspace(-6.0, 1.0, shape[-1]).reshape(shape)
        if ".mix" in name or name.endswith("now"):
            return jnp.full(shape, 0.5)
        if name.endswith(("taken", "kept")):
            return jnp.ones(shape)
        return jnp.zeros(shape) if name.endswith("bias") else None


def earlier(place: int, x: Array, window: Window, cache: Any) -> tuple[Array, Any]:
    """Returns for each node of a window the vector of `x`, `f[B, W, D]`, at the token before it: `f[B, W, D]`, zeros
    before the text; and what is to be committed at index `place` of the cache, which keeps the last vector."""
    def along(last: Array, x: Array, live: Array) -> tuple[Array, Array]:
        index = jnp.where(live, jnp.arange(x.shape[1], dtype=jnp.int32), -1)
        latest = lax.cummax(index, axis=1)
        before = jnp.pad(latest, ((0, 0), (1, 0)), constant_values=-1)
        found = jnp.where((before >= 0)[..., None], take(x, jnp.maximum(before, 0)), last[:, None])
        return found[:, -1], found[:, :-1]

    return cache.walk(place, lambda last, x: (x, last), x, window, along)


def layer_norm(x: Array, p: Weights) -> Array:
    """Returns the layer norm of `x`, `f[..., D]`, over its last axis, with the weights "scale" and "bias" of `p`."""
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(-1, keepdims=True)
    wide = wide * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + EPS)
    return (wide * p["scale"].astype(jnp.float32) + p["bias"].astype(jnp.float32)).astype(x.dtype)


def sources(c: Rwkv7Config, present: Collection[str] = ()) -> dict[str, WeightSource]:
    """Returns the shape of every weight and the tensor that holds it in a file, by the weight's dotted path."""
    D, row = c.width, lambda tensor: WeightSource((tensor,), False, None, (1, 1, D))
    flat = lambda tensor, into, out: WeightSource((tensor,), False, None, (into, out))
    normed = lambda path, tensor: {f"{path}.scale": plain(f"{tensor}.weight", D),
                                   f"{path}.bias": plain(f"{tensor}.bias", D)}
    found = {"embed": plain("emb.weight", c.vocab, D), **normed("first_norm", "blocks.0.ln0")}
    ranks = {"decay": ("w", c.decay), "rate": ("a", c.rate), "value": ("v", c.value), "gate": ("g", c.gate)}
    for i in range(c.layers):
        path, block = f"layers.{i}", f"blocks.{i}"
        time, own = f"{path}.time", f"{block}.att"
        found |= normed(f"{path}.time_norm", f"{block}.ln1")
        found |= {f"{time}.mix.{name}": row(f"{own}.x_{name}") for name in MIXES}
        for name, (letter, rank) in ranks.items():
            if name == "value" and i == 0:
                continue
            found |= {f"{time}.{name}.down.kernel": flat(f"{own}.{letter}1", D, rank),
                      f"{time}.{name}.up.kernel": flat(f"{own}.{letter}2", rank, D)}
            if name != "gate":
                found[f"{time}.{name}.bias"] = row(f"{own}.{letter}0")
        found |= {f"{time}.taken": row(f"{own}.k_k"), f"{time}.kept": row(f"{own}.k_a"),
                  f"{time}.now": plain(f"{own}.r_k", c.heads, c.head_dim),
                  **{f"{time}.{name}.kernel": kernel(f"{own}.{module}", D, D) for name, module in (
                      ("r", "receptance"), ("k", "key"), ("v", "value"), ("o", "output"))},
                  **normed(f"{time}.head_norm", f"{own}.ln_x"), **normed(f"{path}.channel_norm", f"{block}.ln2"),
                  f"{path}.channels.mix": row(f"{block}.ffn.x_k"),
                  f"{path}.channels.k.kernel": kernel(f"{block}.ffn.key", c.inner, D),
                  f"{path}.channels.v.kernel": kernel(f"{block}.ffn.value", D, c.inner)}
    return {**found, **normed("norm", "ln_out"), "lm_head.kernel": kernel("head", c.vocab, D)}


IGNORED = re.compile(r"^(rwkv\.)?blocks\.0\.att\.v[012]$")
"""Tensors of published files that the network does not use."""


def read_rwkv7(c: Mapping[str, Any]) -> Rwkv7Config:
    """Returns the RWKV-7 that a `config.json` describes.

    Raises:
        ValueError: an entry is missing.
    """
    try:
        return Rwkv7Config(vocab=c["vocab_size"], width=c["hidden_size"], layers=c["num_hidden_layers"],
                           head_dim=c.get("head_dim", 64), inner=c.get("intermediate_size") or 0,
                           decay=c["decay_low_rank_dim"], rate=c["a_low_rank_dim"], value=c["v_low_rank_dim"],
                           gate=c["gate_low_rank_dim"])
    except KeyError as e:
        raise ValueError(f"config.json of an rwkv7 model lacks {e}") from None


def describe_rwkv7(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Returns the `config.json` of a published file, from its tensors' shapes.

    Raises:
        ValueError: it is not an RWKV-7.
    """
    try:
        layers = 1 + max((int(name.split(".")[1]) for name in shapes if name.startswith("blocks.")), default=-1)
        (vocab, width), rank = shapes["emb.weight"], lambda name, layer=0: shapes[f"blocks.{layer}.att.{name}1"][1]
        return {"model_type": "rwkv7", "vocab_size": vocab, "hidden_size": width, "num_hidden_layers": layers,
                "head_dim": shapes["blocks.0.att.r_k"][1], "intermediate_size": shapes["blocks.0.ffn.key.weight"][0],
                "decay_low_rank_dim": rank("w"), "a_low_rank_dim": rank("a"),
                "v_low_rank_dim": rank("v", min(1, layers - 1)), "gate_low_rank_dim": rank("g"),
                "tie_word_embeddings": False}
    except (KeyError, ValueError) as e:
        raise ValueError(f"checkpoint: got tensors without {e}, takes those of an RWKV-7") from None
