"""Fits the classifier that sets SpecBranch's draft lengths to a target and a draft: the training of H-RAD (Shen et al.,
2025)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.algorithms.speculative.adaptive.fit_trees import begun
from decodax.algorithms.speculative.adaptive.lengths import WIDTHS, Lengths, always, scores
from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafts.model.specbranch import SpecBranch
from decodax.core import drivers
from decodax.core.types import LayeredModel
from decodax.core.window import causal


def fit_lengths(lm: Any, draft: Any, samples: Sequence[Sequence[int]], *, gamma: int = 4, branches: int = 3,
                layers: int = 4, max_new_tokens: int = 64, epochs: int = 200, rate: float = 1e-3, seed: int = 0,
                **sampling: Any) -> Lengths:
    """Fits the classifier of H-RAD for `SpecBranch` to a target and a draft (Shen et al., 2025). Needs optax
    (`decodax[train]`).

    The samples are continued by SpecBranch with drafts of full length. Each draft that the target verifies is an
    example. The classifier is trained by Adam on all examples at once.

    Args:
        lm: the result of `decodax.load`; the model has to be a `LayeredModel`.
        draft: a `Source`, such as `drafts.DraftModel(small)`.
        samples: token ids of prompts that are typical for later use. They are decoded in one batch.
        gamma: the value for `SpecBranch` that you will use.
        branches: the value for `SpecBranch` that you will use.
        layers: number of last layers of the target whose outputs are features.
        max_new_tokens: number of tokens to decode for each sample.
        epochs: number of steps of Adam.
        rate: learning rate.
        seed: random seed of decoding and training.
        sampling: sampling options of `decodax.generate`.

    Raises:
        ValueError: no samples or an empty one, a model that is no `LayeredModel`, or no draft was verified.

        lengths = fit_lengths(lm, drafts.DraftModel(small), samples)
        out = generate(lm, prompts, algorithm=algorithms.make("specbranch", draft=small, lengths=lengths))
    """
    seen, token, kind = examples(lm, draft, samples, gamma, branches, layers, max_new_tokens, seed, **sampling)
    if not len(kind):
        raise ValueError(f"samples: in {max_new_tokens} tokens of {len(samples)} samples no draft was verified")
    weights = fitted_to(seen, token, kind, embeddings(lm), epochs, rate, seed)
    return Lengths(weights, layers)


def embeddings(lm: Any) -> Array:
    """Returns the target's input embedding of each token, `f32[V, D]`. `lm` is a result of `decodax.load`."""
    if not isinstance(lm.model, LayeredModel):
        raise ValueError(f"lm: got {type(lm.model).__name__}, takes a model whose layers run one by one")
    tokens = jnp.arange(lm.vocab_size, dtype=jnp.int32)[:, None]
    window = causal(tokens, jnp.zeros(lm.vocab_size, jnp.int32), jnp.ones(tokens.shape, bool))
    embed = lambda params: lm.model.walk(params, window, lm.model.init_cache(lm.vocab_size, 1, params=params))[0]
    return jax.jit(embed)(lm.params)[:, 0].astype(jnp.float32)


def examples(lm: Any, draft: Any, samples: Sequence[Sequence[int]], gamma: int, branches: int, layers: int,
             max_new_tokens: int, seed: int = 0, **sampling: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns an example for each draft that is verified while the samples are continued: the target's features before
    it, `f32[n, F]`; the token there, `i32[n]`; and the class (0: nothing of the draft was accepted, 1: a part, 2: all),
    `i32[n]`."""
    if not isinstance(lm.model, LayeredModel):
        raise ValueError(f"lm: got {type(lm.model).__name__}, takes a model whose layers run one by one")
    if not 1 <= layers <= lm.model.depth:
        raise ValueError(f"layers: got {layers}, takes 1 to {lm.model.depth}")
    whole = Lengths(always(2, layers * lm.model.config.width, lm.vocab_size), layers)
    alg = Speculative(SpecBranch(draft, gamma, branches, lengths=whole))
    bare, params, policy, s = begun(lm, alg, samples, max_new_tokens, seed, **sampling)
    found: list[tuple[np.ndarray, ...]] = []
    while bool(s.running.any()):
        ahead, before = s.algo[0], np.asarray(s.stats.accepted)
        tested = np.asarray(ahead.waits & s.running)
        noted = np.asarray(ahead.seen)[tested], np.asarray(s.newest)[tested]
        s = drivers.advance(bare, lm.model, params, policy, s, jnp.int32(1))
        accepted = (np.asarray(s.stats.accepted) - before)[tested]
        found.append((*noted, np.where(accepted == 0, 0, np.where(accepted == gamma - 1, 2, 1))))
    seen, token, kind = (np.concatenate(x) for x in zip(*found, strict=True))
    return seen, token, kind.astype(np.int32)


def fitted_to(seen: np.ndarray, token: np.ndarray, kind: np.ndarray, embedding: Array, epochs: int, rate: float,
              seed: int) -> dict[str, Array]:
    """Trains the classifier of draft lengths (`Lengths`) with Adam and returns its weights.

    Args:
        seen: `f32[n, F]`, the target's features of each example.
        token: `i32[n]`, the token before the drafts.
        kind: `i32[n]`, the class: 0 if no draft was accepted, 1 if a part, 2 if all.
        embedding: `f32[V, D]`, the target's embeddings.
        epochs: number of steps, each over all examples.
        rate: learning rate.
        seed: random seed.
    """
    x, tokens, kinds = jnp.asarray(seen), jnp.asarray(token, jnp.int32), jnp.asarray(kind, jnp.int32)
    norm = dict(mean=x.mean(0), scale=x.std(0) + 1e-3)
    table = lambda w: {**{k: v for k, v in w.items() if k != "embed"}, **norm, "table": embedding @ w["embed"]}

    def loss(w: dict[str, Array], step: Array) -> Array:
        log_p = jax.nn.log_softmax(scores(table(w), x, tokens, jax.random.fold_in(jax.random.key(seed), step)))
        return -jnp.take_along_axis(log_p, kinds[:, None], 1).mean()

    return table(minimized(loss, start(x.shape[1], embedding, jax.random.key(seed)), epochs, rate))


def minimized(loss: Callable[[Any, Array], Array], start: Any, steps: int, rate: float) -> Any:
    """Minimizes a loss with Adam and returns the weights.

    Args:
        loss: maps weights and the index of the step, `i32[]`, to the loss, `f32[]`.
        start: the initial weights, a pytree.
        steps: number of steps.
        rate: learning rate.
    """
    import optax  # only for those who train

    adam = optax.adam(rate)

    def visit(i: Array, carry: Any) -> Any:
        w, state = carry
        change, state = adam.update(jax.grad(loss)(w, i), state)
        return optax.apply_updates(w, change), state

    return jax.jit(lambda w: lax.fori_loop(0, steps, visit, (w, adam.init(w)))[0])(start)


def start(features: int, embedding: Array, key: Array) -> dict[str, Array]:
    """Returns random initial weights of the classifier of draft lengths, for `features` input features and the target's
    token embeddings `embedding` (`f32[V, D]`), of which a projection is learned ("embed")."""
    sizes = dict(hidden=(features, WIDTHS[0]), embed=(embedding.shape[1], WIDTHS[0]), second=WIDTHS,
                 third=(WIDTHS[1], 3))
    fan = dict(hidden=features + embedding.shape[1], embed=features + embedding.shape[1], second=WIDTHS[0],
               third=WIDTHS[1])
    draw = {name: jax.random.uniform(jax.random.fold_in(key, i), size, jnp.float32, -1, 1) * fan[name] ** -0.5
            for i, (name, size) in enumerate(sizes.items())}
    return draw | dict(first=jnp.zeros(WIDTHS[0]), second_bias=jnp.zeros(WIDTHS[1]), third_bias=jnp.zeros(3))
