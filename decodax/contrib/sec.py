"""SEC, a controller that stops or exits ("When Neural Code Completion Models Size up the Situation: Attaining Cheaper
and Faster Completion through Dynamic Model Inference", Sun et al., 2024).

After some layers a small classifier reads the hidden state of a token and takes one of three actions: *continue* with
the next layers; *exit*, so that the next token is predicted from here by the model's own norm and head; or *stop* the
completion, since the model will not get the token right. The first action other than "continue" holds.

>>> controller = fit_controller(lm, texts, exits=(4, 8))                                       # doctest: +SKIP
>>> quick = with_controller(lm, controller, exits=(4, 8), exit_above=0.9)                      # doctest: +SKIP
>>> dx.generate(quick, prompts)                                                                # doctest: +SKIP

Models that were tuned for early exits can do without a controller: `ConfidenceExit` exits where the likeliest token has
a large probability, the early exit of SoFT ("Sorted LLaMA", Kavehzadeh et al., 2024).

>>> quick = with_exits(lm, (4, 8), ConfidenceExit(0.9))                                        # doctest: +SKIP

The result is a model of its own, which every algorithm and cache takes: a token's action depends on its own hidden
states alone. It is approximate. Prompts are read with all layers. The layers after an exit add nothing to the hidden
state, but compute keys and values from it, for later tokens; their MLPs are skipped once all rows have exited. Stopping
makes the end of the text the only next token.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.common.options import Share, check_options
from decodax.common.struct import Struct, short, struct
from decodax.core.cache import Cache
from decodax.core.types import CacheKind, Model, Out
from decodax.core.window import Window, causal
from decodax.io.load import LM
from decodax.models import Transformer
from decodax.train.fitting import padded, train

CONTINUE, EXIT, STOP = range(3)
"""The actions, in the order of the classifier's outputs."""


@struct
class StopExitController(Struct):
    """The weights of linear classifiers after `E` of a network's layers, which choose between continuing, exiting with
    the token predicted there, and ending the text. They read the hidden state after the final norm.

    Attributes:
        kernel: `f32[E, D, 3]`.
        bias: `f32[E, 3]`.
    """

    kernel: Array
    bias: Array

    def actions(self, exit: int, hidden: Array, exit_above: float, stop_above: float) -> Array:
        """Returns the action (`CONTINUE`, `EXIT` or `STOP`) for each hidden state, `i32[...]`.

        Args:
            exit: index of the classifier, 0 to `E - 1`.
            hidden: `f[..., D]`, the hidden states after its layer and the final norm.
            exit_above: probability above which the action is `EXIT`.
            stop_above: probability above which it is `STOP`, if it is not `EXIT`.
        """
        chance = jax.nn.softmax(hidden.astype(jnp.float32) @ self.kernel[exit] + self.bias[exit])
        return jnp.where(chance[..., EXIT] > exit_above, EXIT, jnp.where(chance[..., STOP] > stop_above, STOP,
                                                                         CONTINUE))


class ActionRule(Protocol):
    """A rule that chooses actions after some layers. It is static under jit: an instance of a frozen dataclass."""

    def actions(self, controller: Any, exit: int, out: Out) -> Array:
        """Returns the action (`CONTINUE`, `EXIT` or `STOP`) for each node, `i32[B, W]`; `STOP` takes a model with a
        token that ends texts.

        Args:
            controller: the rule's weights, those of the model under "controller"; None if it has none.
            exit: index of the exit among those of the model.
            out: the output that the network would have if it ended here.
        """
        ...


@dataclasses.dataclass(frozen=True)
class ByController:
    """The rule of SEC: the actions of a `StopExitController`.

    Attributes:
        exit_above, stop_above: probabilities above which it exits or stops.
    """

    exit_above: float = 0.5
    stop_above: float = 0.5

    def actions(self, controller: StopExitController, exit: int, out: Out) -> Array:
        return controller.actions(exit, out.hidden, self.exit_above, self.stop_above)


@dataclasses.dataclass(frozen=True)
class ConfidenceExit:
    """The rule that exits where the model is confident: where the largest probability of the next token, by the model's
    own norm and head at the exit and at temperature 1, is above `tau`. Each exit costs a pass of the head.

    Attributes:
        tau: the probability; 1: it never exits.

    Raises:
        ValueError: `tau` is outside [0, 1].
    """

    tau: Share

    def __post_init__(self) -> None:
        check_options(type(self), vars(self))

    def actions(self, controller: None, exit: int, out: Out) -> Array:
        logits = out.logits().astype(jnp.float32)
        # the largest probability, without an array of all of them
        return jnp.where(jnp.exp(logits.max(-1) - jax.nn.logsumexp(logits, -1)) > self.tau, EXIT, CONTINUE)


@dataclasses.dataclass(frozen=True)
class StopExitModel(Model):
    """A network that exits and stops by a rule. Its weights are `{"network": ..., "controller": ...}`, the latter those
    of the rule, such as a `StopExitController`.

    Attributes:
        network: the network.
        exits: numbers of layers after which the rule acts.
        end: id of the token that a stop predicts.
        rule: chooses the actions.
    """

    __repr__ = short

    network: Any
    exits: tuple[int, ...]
    end: int
    rule: ActionRule = ByController()

    @property
    def max_positions(self) -> int | None:
        return self.network.max_positions

    @property
    def trained_positions(self) -> int | None:
        return self.network.trained_positions

    @property
    def cache_kind(self) -> CacheKind | None:
        return self.network.cache_kind

    def with_cache(self, kind: CacheKind) -> StopExitModel:
        return dataclasses.replace(self, network=self.network.with_cache(kind))

    def init_cache(self, batch: int, capacity: int, *, params: Any = None, inputs: Any = None) -> Cache:
        own = None if params is None else params["network"]
        return self.network.init_cache(batch, capacity, params=own, inputs=inputs)

    def apply(self, params: Any, window: Window, cache: Cache) -> Out:
        done = stopped = jnp.zeros(window.live.shape, bool)
        if window.is_prefill:
            out = self.network.apply(params["network"], window, cache)
        else:
            out, stopped = self._controlled(params, window, cache, done | ~window.live)

        def head(hidden: Array) -> Array:
            logits = out.head(hidden[..., :-1])
            forced = jnp.where(jnp.arange(logits.shape[-1]) == self.end, 0.0, -jnp.inf)
            return jnp.where(hidden[..., -1:] > 0, forced, logits)

        # the head reads hidden states alone, so one more number says which tokens are followed by the end
        hidden = jnp.concatenate([out.hidden, stopped[..., None].astype(out.hidden.dtype)], -1)
        return Out(hidden=hidden, entries=out.entries, head=head)

    def _controlled(self, params: Any, window: Window, cache: Cache, done: Array) -> tuple[Out, Array]:
        """Returns the network's output with the actions of the rule, and the nodes that stop, `bool[B, W]`."""
        pieces, entries, stopped = self.network.pieces(params["network"]), [], jnp.zeros(done.shape, bool)
        attend = lambda layer, q, k, v, **options: cache.attend(layer, q, k, v, window, **options)
        x = pieces.embed(window, cache)
        for i in range(pieces.layers):
            branch, entry = pieces.attention(i, x, window.positions, attend)
            entries.append(entry)
            x = jnp.where(done[..., None], x, x + branch)
            branch = lax.cond(done.all(), jnp.zeros_like, lambda x, i=i: pieces.mlp(i, x), x)
            x = jnp.where(done[..., None], x, x + branch)
            if i + 1 in self.exits:
                action = self._action(params["controller"], i + 1, pieces.out(x, ()), done)
                stopped = stopped | (~done & (action == STOP))
                done = done | (action != CONTINUE)
        return pieces.out(x, tuple(entries)), stopped

    def _action(self, controller: Any, layers: int, out: Out, done: Array) -> Array:
        """Returns the actions of the rule after `layers` layers, `i32[B, W]`, with the output there. Once all nodes are
        done it is not asked, since it may compute logits."""
        ask = lambda: self.rule.actions(controller, self.exits.index(layers), out).astype(jnp.int32)
        return lax.cond(done.all(), lambda: jnp.full(done.shape, EXIT, jnp.int32), ask)


def with_controller(lm: LM, controller: StopExitController, exits: Sequence[int], exit_above: float = 0.5,
                    stop_above: float = 0.5) -> LM:
    """Returns a model that exits and stops by a controller.

    Args:
        lm: a result of `decodax.load`: an autoregressive `Transformer` with an end of text.
        controller: from `fit_controller`.
        exits: numbers of layers after which it acts, in order, as in `fit_controller`.
        exit_above: probability above which it exits; 1: it never does.
        stop_above: probability above which it stops; 1: it never does.

    Raises:
        ValueError: another model, one without an end of text, or other exits than those of the controller.
    """
    layers = checked(lm, exits)
    if len(layers) != len(controller.bias):
        raise ValueError(f"exits: got {layers}, the controller has {len(controller.bias)}")
    if not lm.eos:
        raise ValueError(f"lm: got {lm.name!r}, which has no token that ends a text; takes a model with one")
    return with_exits(lm, layers, ByController(exit_above, stop_above), controller)


def with_exits(lm: LM, exits: Sequence[int], rule: ActionRule, controller: Any = None) -> LM:
    """Returns a model that exits by a rule. For a trained controller see `with_controller`.

    Args:
        lm: a result of `decodax.load`: an autoregressive `Transformer`, best one that was tuned for early exits
            (`scripts/train.py tune`).
        exits: numbers of layers after which the rule acts, in order.
        rule: the rule, such as `ConfidenceExit(0.9)`.
        controller: weights of the rule; None: it has none.

    Raises:
        ValueError: another model, numbers of layers that it does not have, or no weights for `ByController`.
    """
    if isinstance(rule, ByController) and controller is None:
        raise ValueError("controller: got None, and the rule ByController takes one; see `with_controller`")
    model = StopExitModel(lm.model, checked(lm, exits), lm.eos[0] if lm.eos else -1, rule)
    return dataclasses.replace(lm, model=model, params={"network": lm.params, "controller": controller},
                               directory=None)


def checked(lm: LM, exits: Sequence[int]) -> tuple[int, ...]:
    """Checks that a model can have a controller after the given numbers of layers, and returns these as a tuple.

    Raises:
        ValueError: they cannot.
    """
    if not isinstance(lm.model, Transformer) or lm.diffusion is not None:
        raise ValueError(f"lm: got a {type(lm.model).__name__}; takes a Transformer that reads from left to right")
    layers = tuple(exits)
    if not layers or sorted(set(layers)) != list(layers) or not 1 <= layers[0] <= layers[-1] < lm.model.depth:
        raise ValueError(f"exits: got {layers}, takes rising numbers of layers from 1 to {lm.model.depth - 1}")
    return layers


@functools.partial(jax.jit, static_argnums=(0, 1))
def _predictions(network: Any, layers: tuple[int, ...], params: Any, tokens: Array) -> tuple[Array, Array]:
    """Returns the hidden states of texts after some layers, `f[E, B, T, D]`, and the tokens that are predicted from
    these and from the last layer, `i32[E + 1, B, T]`."""
    out = network.apply(params, causal(tokens, jnp.zeros(len(tokens), jnp.int32)), network.init_cache(len(tokens), 0))
    hidden = [*(out.normed(out.layers[n - 1]) for n in layers), out.hidden]
    return jnp.stack(hidden[:-1]), jnp.stack([out.head(h).argmax(-1) for h in hidden])


def examples(lm: LM, texts: Sequence[Sequence[int]], exits: Sequence[int], size: int = 8
             ) -> tuple[np.ndarray, np.ndarray]:
    """Returns what a controller learns from: hidden states after each exit, `f32[E, N, D]`, and the right actions,
    `i32[E, N]`, for all tokens of texts that have a next one.

    It is right to exit where the token predicted from there is the text's, to continue where a later exit or the last
    layer predicts it, and else to stop.

    Args:
        lm: a result of `decodax.load`: an autoregressive `Transformer`.
        texts: token ids, of at least 2 tokens each.
        exits: numbers of layers after which the controller acts.
        size: number of texts of a forward pass. A pass takes memory for their logits; the results, on the host, take
            that of the hidden states.
    """
    layers = checked(lm, exits)
    tokens, lengths = padded(texts), np.asarray([len(text) - 1 for text in texts])
    parts: list[tuple[np.ndarray, np.ndarray]] = []
    for at in range(0, len(texts), size):
        own = tokens[at:at + size]
        rows = np.resize(own, (min(size, len(texts)), own.shape[1]))        # one program for all passes
        hidden, found = (np.asarray(x)[:, :len(own)] for x in _predictions(lm.model, layers, lm.params, rows))
        seen = np.arange(own.shape[1] - 1) < lengths[at:at + size, None]
        right = found[:, :, :-1] == own[:, 1:]
        later = np.flip(np.cumsum(np.flip(right[1:], 0), 0), 0) > 0
        actions = np.where(right[:-1], EXIT, np.where(later, CONTINUE, STOP))
        parts.append((hidden[:, :, :-1][:, seen].astype(np.float32), actions[:, seen].astype(np.int32)))
    hidden, actions = (np.concatenate(x, 1) for x in zip(*parts, strict=True))
    return hidden, actions


def fit_controller(lm: LM, texts: Sequence[Sequence[int]], exits: Sequence[int], steps: int = 300,
                   rate: float = 1e-2, size: int = 8, tokens: int = 1 << 16) -> StopExitController:
    """Trains a controller on texts, by the cross-entropy of the right actions; the model does not change. Needs optax
    (`decodax[train]`).

    Models that were tuned for early exits gain most (`scripts/train.py tune`).

    Args:
        lm: a result of `decodax.load`: an autoregressive `Transformer`.
        texts: token ids of texts of the kind that will be completed.
        exits: numbers of layers after which it acts.
        steps: number of training steps, each on all tokens.
        rate: learning rate of Adam.
        size: number of texts of a forward pass of the model.
        tokens: number of tokens whose hidden states are on the device together. With more, the gradients of a step are
            added up.

    Raises:
        ValueError: another model, no texts, exits that it does not have, or a `size` or `tokens` below 1.
    """
    if not texts or min(map(len, texts)) < 2:
        raise ValueError(f"texts: got {len(texts)}, the shortest of {min(map(len, texts), default=0)} tokens; takes "
                         "one or more, of at least 2")
    if size < 1 or tokens < 1:
        raise ValueError(f"size, tokens: got {size} and {tokens}, take 1 or more")
    import optax  # only for those who train

    hidden, actions = examples(lm, texts, exits, size)
    E, N, D = hidden.shape
    first = StopExitController(kernel=jnp.zeros((E, D, 3)), bias=jnp.zeros((E, 3)))
    parts: list[Any] = [(hidden[:, at:at + tokens], actions[:, at:at + tokens]) for at in range(0, N, tokens)]
    if len(parts) == 1:
        parts = [jax.device_put(parts[0])]

    def loss(own: StopExitController, hidden: Array, actions: Array) -> Array:
        logits = jnp.einsum("end,eda->ena", hidden, own.kernel) + own.bias[:, None]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, actions)
        return losses.sum() * (len(parts) / (E * N))       # the mean over parts is the mean over tokens

    optimizer = optax.MultiSteps(optax.adam(rate), len(parts)) if len(parts) > 1 else optax.adam(rate)
    return train(loss, first, itertools.cycle(parts), optimizer, steps * len(parts))[0]


__all__ = ["ActionRule", "ByController", "ConfidenceExit", "StopExitController", "StopExitModel", "fit_controller",
           "with_controller", "with_exits"]
