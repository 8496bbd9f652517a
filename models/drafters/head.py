"""The contract of a trained drafter's network, a head: it reads the target's hidden states and predicts tokens.

Letters: B batch, W window, F width of the features, D width of the target's embeddings, d width of the head's state, h
width of its hidden states, V vocabulary.

A *pair* is the feature of a position and the embedding of the token after it. A head turns pairs into hidden states;
the hidden state of the pair at position `p` predicts the token at `p + 2`. While drafting, the feature of the pair
after it is not known, and the head's own state takes its place.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from decodax.cache import KVLayer, cache_of, dense
from decodax.common.struct import Struct, struct
from decodax.core.cache import Cache
from decodax.models.blocks.attention import Attend
from decodax.models.config import DecoderConfig

Weights = dict[str, Any]
Embed = Callable[[Array], Array]
"""Maps tokens `i32[B, W]` to their embeddings `f[B, W, D]`."""
Depth = Array | int
"""The depth of nodes, `i32[B, W]`, or one number for all."""


@struct
class HeadStep(Struct):
    """The output of a drafter head for `W` pairs (a target feature and the embedding of the token after it).

    Attributes:
        hidden: `f[B, W, h]`, input of `DraftHead.logits`.
        state: `f[B, W, d]`, the state in place of the next pair's feature.
        entries: values for the head's cache, one for each of its layers; empty without a cache.
    """

    hidden: Array
    state: Array
    entries: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True)
class DraftHead(abc.ABC):
    """Base class of heads. Derive a frozen dataclass from it: it is compared by value and static under jit, and the
    weights are arguments.

    Attributes:
        taps: indices of the target's layers, from 0, whose outputs are concatenated to a feature; the number of layers
            stands for all residual streams after the last one (hyper-connections). Empty: the feature is the hidden
            state after the final norm.
        vocab: number of logits of the head.
        own_head: True if the head has a vocabulary matrix, False if it uses the target's.
    """

    taps: tuple[int, ...]
    vocab: int

    if TYPE_CHECKING:       # each head has its own default

        @property
        def own_head(self) -> bool: ...

    @property
    @abc.abstractmethod
    def target_width(self) -> int:
        """Width `D` of the target's hidden states."""

    @property
    def tap_width(self) -> int:
        """Width of each of the target's states that are concatenated to a feature."""
        return self.target_width

    @property
    @abc.abstractmethod
    def state_width(self) -> int:
        """Width `d` of the head's state: the vector that stands for the target's feature in a pair."""

    @property
    def longest(self) -> int | None:
        """Largest number of tokens that the head can draft after one another; None: no limit."""
        return None

    @property
    def parallel(self) -> bool:
        """True if the logits that follow a draft-tree node depend on the depth of the node alone, not on the tokens
        drafted up to it, so that all depths can be computed at once."""
        return False

    @property
    def tokens_before(self) -> int:
        """Number of tokens, ending with the one at the feature's position, whose embeddings the head reads in addition
        to that of the pair's own token, which is the next one. 0: none."""
        return 0

    @property
    def carries_state(self) -> bool:
        """True if the input of a verified pair also depends on the head's own state after the pair before it, so that
        `follow` reads its argument `before`."""
        return False

    @property
    def drafts_attend(self) -> bool:
        """True if the head also runs attention for drafted tokens, which then have keys and values. False if it does so
        for verified tokens alone; `step` gets `attend=None` for drafted ones."""
        return True

    @property
    def kv_layers(self) -> tuple[KVLayer, ...]:
        """Shape of the keys and values of each layer; empty: the head needs no cache."""
        return ()

    def init_cache(self, batch: int, capacity: int, dtype: jax.typing.DTypeLike) -> Cache | None:
        """Returns an empty cache for the head's keys and values; None if it needs none."""
        return cache_of(dense, self.kv_layers, batch, capacity, jnp.dtype(dtype), None) if self.kv_layers else None

    def check_target(self, config: DecoderConfig) -> None:
        """Checks that a target with the configuration `config` has the keys and values that the head reads, for heads
        that attend to those of the target.

        Raises:
            ValueError: it cannot.
        """
        return

    def features(self, hidden: Array, layers: tuple[Array, ...] | None) -> Array:
        """Returns the features `f[B, W, F]` in a target's output.

        Args:
            hidden: `f[B, W, D]`, the hidden states after the final norm.
            layers: `f[B, W, D]`, the output of each layer, and perhaps the residual streams; see `Out.states`.

        Raises:
            ValueError: the target does not return the outputs of its layers, or has too few.
        """
        if not self.taps:
            return hidden
        if layers is None or max(self.taps) >= len(layers):
            have = "does not return the outputs of its layers" if layers is None else f"has {len(layers)} layers"
            raise ValueError(f"draft: the head reads the outputs of the layers {self.taps} of its target, which {have}")
        return jnp.concatenate([layers[i] for i in self.taps], -1)

    @abc.abstractmethod
    def enter(self, weights: Weights, features: Array) -> Array:
        """Returns the states `f[B, W, d]` that the head computes from the target's features `f[B, W, F]`, as the first
        half of its pairs. For a head with `n = tokens_before > 0`, the input is `f[B, W, F + n D]`: after each feature
        come the embeddings of these tokens, the oldest first."""

    def follow(self, entered: Array, before: Array) -> Array:
        """Returns the states `f[B, W, d]` with which `step` reads `W` consecutive verified pairs. By default these are
        `entered`; a head with `carries_state` combines them with the states of the pairs before.

        Args:
            entered: the results of `enter` for them.
            before: `f[B, d]`, `HeadStep.state` of the pair before the first, which few heads read; zeros if there is
                none.
        """
        return entered

    @abc.abstractmethod
    def step(self, weights: Weights, tokens: Array, embed: Embed, state: Array, positions: Array, depth: Depth,
             attend: Attend | None) -> HeadStep:
        """Runs the head on `W` pairs: for each a state, which is or stands for the target's feature at a position, and
        the token after that position.

        Args:
            weights: the head's weights.
            tokens: `i32[B, W]`, the token of each pair.
            embed: the target's embedding table.
            state: `f[B, W, d]`, a result of `enter`, or `HeadStep.state` of the pairs before these.
            positions: `i32[B, W]`, positions of the features.
            depth: `i32[B, W]`, number of drafted tokens up to the token of each pair: 0 for verified ones. A number if
                it is the same for all.
            attend: attention to the head's cache and to the pairs, see `Cache.attend`; None for a head without one,
                and for drafted tokens if not `drafts_attend`.
        """

    @abc.abstractmethod
    def logits(self, weights: Weights, hidden: Array, depth: Depth, head: Callable[[Array], Array]) -> Array:
        """Returns the logits `f32[B, W, vocab]` for the token after each pair.

        Args:
            weights: the head's weights.
            hidden: `f[B, W, h]`, see `HeadStep`.
            depth: see `step`.
            head: the target's map from hidden states to logits.
        """


class ModuleHead(DraftHead):
    """Base class of heads whose weights are those of a Flax module. A derived class defines `module`."""

    @abc.abstractmethod
    def module(self, rngs: nnx.Rngs) -> nnx.Module:
        """Returns the network with random weights."""

    def init_params(self, key: Array, dtype: jax.typing.DTypeLike = jnp.float32) -> Weights:
        """Returns random weights."""
        weights = nnx.to_pure_dict(nnx.state(self.module(nnx.Rngs(params=key))))
        return jax.tree.map(lambda x: x.astype(dtype), weights)

    def abstract_params(self, dtype: jax.typing.DTypeLike = jnp.float32) -> Weights:
        """Returns the weights' shapes, as `jax.ShapeDtypeStruct`s."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), _split(self)[1])

    def network(self, weights: Weights) -> Any:
        """Returns the Flax module with the given weights, to be called inside a traced function."""
        return nnx.merge(_split(self)[0], nnx.State(weights))


@functools.lru_cache(maxsize=64)
def _split(head: ModuleHead) -> tuple[Any, Weights]:
    """Returns the network without weights: its structure, and the weights' shapes."""
    graph, state = nnx.split(nnx.eval_shape(lambda: head.module(nnx.Rngs(0))))
    return graph, nnx.to_pure_dict(state)
