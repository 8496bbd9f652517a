"""Fits a draft tree to samples: decodes them with a large tree, and keeps the positions that are accepted most
often."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.fixed_trees import Fixed
from decodax.algorithms.speculative.trees.acceptance import from_acceptance
from decodax.core import drivers
from decodax.core.algorithm import prefill_observer
from decodax.core.around import Around
from decodax.core.memory import bucket
from decodax.core.state import State
from decodax.core.target import for_target
from decodax.core.types import Decision, Out, Params
from decodax.core.window import Window
from decodax.sampling import build


@dataclasses.dataclass(frozen=True)
class Counted(Around):
    """Wraps the speculative method `of` and counts acceptances: its state is a pair of the method's state and `i32[B,
    N]`, how often each of the `N` nodes of the draft tree has been accepted in each row."""

    of: Speculative

    @property
    def inner(self) -> Speculative:
        return self.of

    def init(self, params: Params, s: State) -> Any:
        return self.of.init(params, s), jnp.zeros((s.batch, len(tree_of(self.of).paths)), jnp.int32)

    def propose(self, params: Params, policy: Any, s: State) -> tuple[Window, Any]:
        window, algo = self.of.propose(params, policy, s.replace(algo=s.algo[0]))
        return window, (algo, s.algo[1])

    def decide(self, params: Params, dist: Any, s: State, window: Window, out: Out, algo: Any) -> Decision:
        d = self.of.decide(params, dist, s, window, out, algo[0])
        assert d.accepted is not None
        index = jnp.arange(d.source.shape[1])
        on = s.running[:, None] & (index > 0) & (index <= d.accepted[:, None])
        hit = (d.source[:, :, None] == 1 + jnp.arange(algo[1].shape[1])) & on[:, :, None]
        return d.replace(algo=(d.algo, algo[1] + hit.sum(1, dtype=jnp.int32)))

    @property
    def prefill_observer(self) -> Counted | None:
        return None if prefill_observer(self.of) is None else self

    def observe(self, params: Params, s: State, window: Window, out: Out, algo: Any) -> Any:
        """Returns the state after a prefill chunk, which the wrapped method's draft reads; the counts do not change."""
        own = prefill_observer(self.of)
        assert own is not None
        return own.observe(params, s, window, out, algo[0]), algo[1]


def tree_of(algorithm: Speculative) -> Fixed:
    """Returns the draft tree of a speculative method, as a `Fixed`.

    Raises:
        ValueError: its tree is not the same in each round.
    """
    tree = algorithm.drafter.form
    if not isinstance(tree, Fixed):
        raise ValueError(f"algorithm: {type(algorithm.draft).__name__} with shape={algorithm.shape!r} does not draft a "
                         "Fixed tree")
    return tree


def fit_tree(lm: Any, algorithm: Speculative, samples: Sequence[Sequence[int]], nodes: int, *, max_new_tokens: int = 64,
             seed: int = 0, **sampling: Any) -> Fixed:
    """Fits a draft tree to sample prompts: returns the `nodes` positions of a large tree that are accepted most often.

    The algorithm decodes the samples with its large tree and counts how often the verifier accepts each position.
    `from_acceptance` then chooses the best connected subtree. This works for every draft with a fixed tree: a `Source`
    with a `Fixed` shape, or `TokenRecycling`. STAND (Song et al., 2025) fits its tree in this way.

    Args:
        lm: the result of `decodax.load`.
        algorithm: speculative decoding with the large tree, such as `Fixed.balanced(8, 4, 3, 2)`, and with the verifier
            that you will use.
        samples: token ids of prompts that are typical for later use. They are decoded in one batch.
        nodes: number of drafts in the returned tree.
        max_new_tokens: number of tokens to decode for each sample.
        seed: random seed of the decoding.
        sampling: sampling options of `decodax.generate`. Acceptance depends on the temperature.

    Raises:
        ValueError: an algorithm without a fixed tree, no samples or an empty one, or a number out of range.

        large = Speculative(drafts.Stand(lm.vocab_size), shape=trees.Fixed.balanced(8, 4, 3, 2))
        tree = fit_tree(lm, large, samples, nodes=16, temperature=0.8)
        out = generate(lm, prompts, algorithm=algorithms.make("stand", lm, shape=tree), temperature=0.8)
    """
    large = tree_of(algorithm)
    from_acceptance(large, [0] * len(large.paths), nodes)       # says what is wrong with nodes before anything runs
    s = continued(lm, Counted(algorithm), samples, max_new_tokens, seed, **sampling)
    return from_acceptance(large, np.asarray(s.algo[1]).sum(0).tolist(), nodes)


def continued(lm: Any, algorithm: Any, samples: Sequence[Sequence[int]], max_new_tokens: int, seed: int = 0,
              **sampling: Any) -> State:
    """Continues prompts (`samples`, lists of token ids) with the method `algorithm` in one batch, and returns the final
    decoding state.

    Raises:
        ValueError: no samples or an empty one, or `max_new_tokens` is below 1.
    """
    alg, params, policy, s = begun(lm, algorithm, samples, max_new_tokens, seed, **sampling)
    return drivers.advance(alg, lm.model, params, policy, s, jnp.int32(max_new_tokens))


def begun(lm: Any, algorithm: Any, samples: Sequence[Sequence[int]], max_new_tokens: int, seed: int = 0,
          **sampling: Any) -> tuple[Any, Params, Any, State]:
    """Prepares the decoding of samples (token ids) with an algorithm in one batch. Returns the algorithm without its
    weights, the weights, the policy, and the state after the prompts.

    Raises:
        ValueError: no samples or an empty one, or `max_new_tokens` is below 1.
    """
    if not samples or not all(map(len, samples)):
        raise ValueError(f"samples: got {len(samples)} prompts, the shortest of {min(map(len, samples), default=0)} "
                         "tokens, takes one or more, none empty")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: got {max_new_tokens}, takes 1 or more")
    B, lengths = len(samples), np.array([len(ids) for ids in samples], np.int32)
    size = bucket(int(lengths.max()) + max_new_tokens)
    tokens = np.zeros((B, size), np.int32)
    for row, given in zip(tokens, samples, strict=True):
        row[:len(given)] = given
    algorithm = for_target(algorithm, lm).with_length(max_new_tokens)
    alg, params = algorithm.bare(), Params(lm.params, algorithm.weights)
    policy = build(B, vocab_size=lm.vocab_size, **sampling)
    s = drivers.begin(alg, lm.model, params, policy, jnp.asarray(tokens), lengths, size=size, seed=np.uint32(seed),
                      max_new=np.full(B, max_new_tokens, np.int32))
    s = drivers.prefill(alg, lm.model, params, s, width=min(64, size))
    return alg, params, policy, s


__all__ = ["begun", "continued", "fit_tree"]
