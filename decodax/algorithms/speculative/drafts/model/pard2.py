"""PARD-2: PARD's draft model that also reads the target's hidden states ("PARD-2: Target-Aligned Parallel Draft Model
for Dual-Mode Speculative Decoding", An et al., 2026).

To the embedding of each token a projection of the target's hidden states at the token before is added, and to that of
each mask the projection for the newest token. The hidden states of verified tokens are kept until the next round, so a
round still has one pass of the draft model. Without the projection the model drafts as PARD's does, for any target:
`MaskedDrafts`. Training: `decodax.train.drafting.masked.AlignedDraftModel`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Self

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from safetensors.numpy import load_file

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafts.model.pard import MaskedDrafts, config_of, mask_of
from decodax.algorithms.speculative.fixed_trees import Chain
from decodax.algorithms.speculative.source import Answer, Shape
from decodax.algorithms.speculative.verifier import SeedExact, Verifier
from decodax.common.options import Count, Whole
from decodax.common.registry import ALGORITHMS
from decodax.common.struct import Struct, short, struct
from decodax.core.cache import Cache
from decodax.core.capabilities import truncate
from decodax.core.checks import draft_weights
from decodax.core.composed import data
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params, embeddings
from decodax.core.window import Window, causal, take
from decodax.io.drafters.pickled import read_pickled


@struct
class Aligned(Struct):
    """State of `AlignedDrafts`.

    Attributes:
        cache: the draft model's cache of verified tokens.
        features: `f[B, 1 + K, F]`, the target's hidden states at the last verified tokens.
        first: `i32[B]`, position of the first of them.
        hidden: within a round, `f[B, K, D]`, the draft model's hidden states at the newest token and at the masks.
    """

    cache: Cache
    features: Array
    first: Array
    hidden: Array | None = None


@dataclasses.dataclass(frozen=True)
class AlignedDrafts(MaskedDrafts):
    """Drafts with one pass over mask tokens of a draft model that reads the target's hidden states (An et al., 2026).

    Attributes:
        projection: its weights, a dictionary with "weight" `f[D, F]` and perhaps "bias" `f[D]`; they become a part of
            `weights`, a pair of the draft model's and these.
        states: the target's hidden states that it reads, as transformers counts them: 0 the embeddings, `i` the output
            of layer `i - 1`, the last one after the final norm; negative numbers count from the end.
        scale: factor of the projection.

    The others are those of `MaskedDrafts`.

    Raises:
        ValueError: as in `MaskedDrafts`, no states; or, while it is traced, states that the target does not have.
    """

    __repr__ = short

    projection: Any = data()
    states: tuple[int, ...] = (-1,)
    scale: float = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.states:
            raise ValueError("states: got none, takes one or more")
        if self.projection is not None:
            object.__setattr__(self, "weights", (self.weights, self.projection))
            object.__setattr__(self, "projection", None)

    @property
    def prefill_observer(self) -> Self:
        return self

    def init(self, params: Params, s: State) -> Any:
        draft_weights(params.draft, self)
        weights, projection = params.draft
        cache = super().init(params.replace(draft=weights), s).cache
        kernel = projection["weight"]
        return Aligned(cache=cache, features=jnp.zeros((s.batch, 1 + self.drafts, kernel.shape[1]), kernel.dtype),
                       first=jnp.zeros(s.batch, jnp.int32))

    def start(self, params: Params, s: State, state: Any, room: int) -> tuple[Any, Answer]:
        K = min(self.drafts, room + 1)
        newest = K + 1          # as many tokens as a round of this length may have made
        # a row that goes on after its end keeps nothing of tokens that were cut
        state = state.replace(cache=truncate(state.cache, s.length))
        cache = self._read(params, s, state, s.length - newest, s.running).cache
        positions = s.length[:, None] - newest + jnp.arange(newest + K - 1, dtype=jnp.int32)
        behind = jnp.arange(newest + K - 1) >= newest
        live = ((positions >= cache.length[:, None]) & (positions >= 0) | behind) & s.running[:, None]
        tokens = jnp.where(behind, self.mask, _text(s, positions))
        features = _before(state, jnp.minimum(positions, s.length[:, None] - 1))
        out = self._forward(params, tokens, features, s.length - newest, live, cache)
        # the slots must depend on the forward, or XLA on CPU copies the cache to protect its readers
        kept = live & ~behind & jnp.isfinite(out.hidden).all(-1)
        cache = cache.commit(out.entries, jnp.where(kept, positions, -1))
        hidden = out.hidden[:, newest - 1:]
        return (state.replace(cache=cache, hidden=hidden),
                Answer(self._logits(params, hidden[:, :1]), hidden[:, :1]))

    def observe(self, params: Params, s: State, window: Window, out: Out, decision: Decision | None,
                state: Any) -> Any:
        features = hidden_states(out, self.states).astype(state.features.dtype)
        if decision is None:                # a chunk of the prompt
            live, first = window.live, window.positions[:, 0]
            state = self._read(params, s, state, first, live.any(1))
            given = jnp.concatenate([_before(state, first[:, None]), features[:, :-1]], 1)
            own = self._forward(params, window.tokens, given, first, live, state.cache)
            kept = live & jnp.isfinite(own.hidden).all(-1)
            cache = state.cache.commit(own.entries, jnp.where(kept, window.positions, -1))
            last = live.sum(1, dtype=jnp.int32) - 1
            known = jnp.pad(take(features, jnp.maximum(last, 0)[:, None]), ((0, 0), (0, self.drafts), (0, 0)))
            return Aligned(cache=cache, first=jnp.where(last >= 0, first + last, state.first),
                           features=jnp.where((last >= 0)[:, None, None], known, state.features))
        if decision.source.shape[1] > 1 + self.drafts:
            raise ValueError(f"drafts: got {self.drafts}, and a round of another draft beside this one emits up to "
                             f"{decision.source.shape[1]} tokens; takes at least one less than that")
        # a round in which another draft was chosen did not read the tokens of the round before
        state = self._read(params, s, state, s.length, s.running)
        known = take(features, decision.source)
        known = jnp.pad(known, ((0, 0), (0, 1 + self.drafts - known.shape[1]), (0, 0)))
        return Aligned(cache=state.cache, first=jnp.where(s.running, s.length - 1, state.first),
                       features=jnp.where(s.running[:, None, None], known, state.features))

    def _read(self, params: Params, s: State, state: Any, end: Array, rows: Array) -> Any:
        """Returns the state after the draft model has read the verified tokens of `rows` (`bool[B]`) at positions below
        `end` (`i32[B]`) that it has not read. In most rounds there are none."""
        def once(carry: Any) -> Any:
            cache = carry[1]
            positions = cache.length[:, None] + jnp.arange(1 + self.drafts, dtype=jnp.int32)
            live = (positions < end[:, None]) & rows[:, None]
            out = self._forward(params, _text(s, positions), _before(state, positions), cache.length, live, cache)
            kept = live & jnp.isfinite(out.hidden).all(-1)
            return jnp.zeros((), bool), cache.commit(out.entries, jnp.where(kept, positions, -1))

        lacks = (rows & (state.cache.length < end)).any()
        # a loop of at most one trip, since XLA copies the caches that a conditional writes to
        return state.replace(cache=lax.while_loop(lambda carry: carry[0], once, (lacks, state.cache))[1])

    def _forward(self, params: Params, tokens: Array, features: Array, start: Array, live: Array, cache: Any) -> Out:
        weights, projection = params.draft
        known = tokens if self.reads is None else jnp.minimum(tokens, self.reads - 1)
        added = projected(projection, features)
        x = embeddings(self.model, weights, known)
        window = causal(tokens, start, live).replace(embeddings=x + (self.scale * added).astype(x.dtype),
                                                     embedded=jnp.ones(tokens.shape, bool))
        return self.fitted.apply(weights, window, cache)

    def _logits(self, params: Params, hidden: Array) -> Array:
        return super()._logits(params.replace(draft=params.draft[0]), hidden)


def hidden_states(out: Out, states: tuple[int, ...]) -> Array:
    """Returns the target's hidden states numbered `states` (`i`: the output of layer `i - 1`, the last one after the
    final norm; negative numbers count from the end), concatenated along the last axis: `f[B, W, F]`.

    Raises:
        ValueError: the target does not return one of them.
    """
    layers = out.layers or ()
    at = [i + len(layers) + 1 if i < 0 else i for i in states]
    if not all(0 < i <= len(layers) for i in at):
        raise ValueError(f"states: got {states}, takes 1 to {len(layers)}, the number of layers whose outputs the "
                         "target returns, or the same counted from the end")
    return jnp.concatenate([out.hidden if i == len(layers) else layers[i - 1] for i in at], -1)


def projected(projection: Any, features: Array) -> Array:
    """Returns the linear projection of `features` (`f[B, W, F]`) to the draft model's width, `f[B, W, D]`. `projection`
    has the entries "weight", `f[D, F]`, and perhaps "bias", `f[D]`."""
    return features @ projection["weight"].T + projection.get("bias", 0)


def _text(s: State, positions: Array) -> Array:
    return jnp.take_along_axis(s.tokens, jnp.clip(positions, 0, s.tokens.shape[1] - 1), 1)


def _before(state: Aligned, positions: Array) -> Array:
    """Returns the features at the tokens before `positions` (`i32[B, W]`), zeros before the first."""
    found = take(state.features, jnp.clip(positions - 1 - state.first[:, None], 0, state.features.shape[1] - 1))
    return jnp.where((positions > 0)[..., None], found, 0)


def aligned(draft: Any, drafts: int = 8, mask: int | None = None, projection: Any = None,
            states: tuple[int, ...] | None = None) -> AlignedDrafts:
    """Returns the drafts of a model that was tuned for PARD-2.

    Args:
        draft: the draft model, a result of `decodax.load`.
        drafts: largest number of drafts on a path.
        mask: the mask token's id; None: `pard_token` in the model's `config.json`.
        projection: see `AlignedDrafts`; None: that in the model's directory.
        states: see `AlignedDrafts`; None: `pard2_target_layers` in the model's `config.json`.

    Raises:
        ValueError: the directory has no projection, or its `config.json` no `pard2_target_layers`.
    """
    config, mask = config_of(draft), mask_of(draft, mask, "pard_token")
    if states is None and (states := config.get("pard2_target_layers")) is None:
        raise ValueError("draft: its config.json has no pard2_target_layers, the target's hidden states that it reads; "
                         "takes a model that was tuned for PARD-2; 'pard' takes others")
    projection = read_projection(draft.directory) if projection is None else projection
    return AlignedDrafts(draft, drafts=drafts, mask=mask, scale=float(config.get("pard2_scale", 0.02)),
                         projection={name: jnp.asarray(x, jnp.float32) for name, x in projection.items()},
                         states=tuple(map(int, states)))


NAME = "target_proj."


def read_projection(folder: Path) -> dict[str, np.ndarray]:
    """Returns the projection in the directory of a draft model, from the authors' `warp_model.bin`, or from
    `pard_warp_model/model.safetensors`, which their training writes, too.

    Raises:
        ValueError: there is neither.
    """
    safe, pickled = folder / "pard_warp_model" / "model.safetensors", folder / "warp_model.bin"
    if not safe.is_file() and not pickled.is_file():
        raise ValueError(f"draft: {folder} has neither warp_model.bin nor pard_warp_model/model.safetensors, the "
                         "projection of the target's hidden states")
    found = load_file(safe) if safe.is_file() else read_pickled(pickled)
    return {name.removeprefix(NAME): x for name, x in found.items() if name.startswith(NAME)}


@ALGORITHMS.register("pard-2", "PARD-2: Target-Aligned Parallel Draft Model for Dual-Mode Speculative Decoding",
                     "An et al. 2026", family="speculative-linear", needs="a tuned draft model", guarantee="seed-exact")
def pard_2(draft: Any, length: Count = 8, mask: Whole | None = None, projection: Any = None,
           states: tuple[int, ...] | None = None, shape: Shape | None = None,
           verify: Verifier | None = None) -> Speculative:
    """Drafts a chain in one pass of a draft model that was tuned to predict several tokens, at mask tokens, and that
    reads the target's hidden states.

    A model is tuned for one target; for others the same model drafts as PARD's does, with `pard`.

    Args:
        draft: the draft model, from a directory with the authors' files.
        length: number of drafts in a round.
        mask: id of the mask token; None: `pard_token` in the model's `config.json`.
        projection: weights "weight" and perhaps "bias" of the projection of the hidden states; None: those in the
            model's directory.
        states: which hidden states, counted as in transformers; None: `pard2_target_layers` in the model's
            `config.json`.
        shape: shape of the draft tree; None: a chain.
        verify: the rule that accepts drafts; None: seed-exact.
    """
    return Speculative(aligned(draft, length, mask, projection, states), verify or SeedExact(), shape or Chain(length))


__all__ = ["AlignedDrafts", "aligned", "read_projection"]
