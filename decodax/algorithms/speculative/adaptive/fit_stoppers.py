"""Trains the networks that decide how many tokens are drafted (`stoppers`). Needs optax (`decodax[train]`)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.algorithms.speculative.adaptive.fit_lengths import minimized
from decodax.algorithms.speculative.adaptive.fit_trees import begun, continued
from decodax.algorithms.speculative.adaptive.stoppers import DraftLength, draft_length, scores
from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafts.model.draft_model import DraftModel
from decodax.algorithms.speculative.fixed_trees import Chain
from decodax.algorithms.speculative.source import Source
from decodax.algorithms.speculative.trees.layers import at_least
from decodax.algorithms.speculative.verifier import SeedExact, Verifier
from decodax.core import drivers
from decodax.core.window import causal

REJECTED, MIXED = 6.0, 0.15
"""Weight of a rejection and share of the target's tokens in the training of SpecDec++, the authors'."""

ROWS, PLACES = 4, 64
"""Numbers of texts whose hidden states, and of their tokens whose logits, are computed at once for an acceptance head.
With a vocabulary of 128,000 tokens an array of such logits takes 131 MB."""

WIDTHS = (256, 64)
"""Widths of the hidden layers of AdaEAGLE's network, which the paper leaves open."""


def fit_acceptance_head(lm: Any, draft: Any, samples: Sequence[Sequence[int]], *, rejected: float = REJECTED,
                        mixed: float = MIXED, temperature: float = 1.0, max_new_tokens: int = 64, steps: int = 300,
                        rate: float = 1e-3, seed: int = 0) -> dict[str, Array]:
    """Trains the acceptance head of SpecDec++ on a draft model's hidden states (Huang et al., 2024).

    The target continues the samples. At each new token `x` the draft model draws a token `y` of its own after the same
    text, which the target would accept with the probability `min(1, p(y) / q(y))`. The head then reads the draft
    model's hidden states on the `y`, of which a share is replaced by `x`, and is trained with the weighted
    cross-entropy against these probabilities. A head fits the temperature at which it was trained.

        head = dx.train.fit_acceptance_head(lm, small, samples)
        dx.generate(lm, prompts, algorithm=dx.algorithms.specdec_plus_plus(head=head), draft=small)

    Args:
        lm: the target, a result of `decodax.load`.
        draft: the draft model, another result.
        samples: token ids of prompts that are typical for later use. They are decoded in one batch.
        rejected: weight of a rejection; an acceptance has weight 1.
        mixed: share of the draft model's tokens that are replaced by the target's, in [0, 1).
        temperature: temperature of both models, above 0.
        max_new_tokens: number of tokens to decode for each sample.
        steps: number of steps of Adam, each on all examples.
        rate: learning rate.
        seed: random seed of decoding and training.

    Returns:
        The weights of the head, for `head=` of "specdec++".

    Raises:
        ValueError: no samples or an empty one, or a number out of range.
    """
    at_least(steps=steps)
    for name, value, good in (("rejected", rejected, rejected > 0), ("mixed", mixed, 0 <= mixed < 1),
                              ("temperature", temperature, temperature > 0)):
        if not good:
            raise ValueError(f"{name}: got {value}, takes {'0 to below 1' if name == 'mixed' else 'more than 0'}")
    hidden, chance = acceptance_examples(lm, draft, samples, mixed, temperature, max_new_tokens, seed)
    weight = jnp.array([rejected, 1.0])
    labels = jnp.stack([1 - chance, chance], -1) * weight

    def loss(head: Any, step: Array) -> Array:
        return -(labels * jax.nn.log_softmax(scores(head, hidden))).sum() / labels.sum()

    D, key = hidden.shape[-1], jax.random.key(seed)
    start = {"block": jax.random.normal(key, (D, D)) * 0.1 * D ** -0.5, "block_bias": jnp.zeros(D),
             "out": jnp.zeros((D, 2)), "out_bias": jnp.zeros(2)}
    return minimized(loss, start, steps, rate)


def acceptance_examples(lm: Any, draft: Any, samples: Sequence[Sequence[int]], mixed: float, temperature: float,
                        max_new_tokens: int, seed: int = 0) -> tuple[Array, Array]:
    """Returns training examples for a head that predicts acceptance: the draft model's hidden states at the tokens that
    it drafts, `f32[n, D]`, and the probability with which the target accepts each of them, `f32[n]`."""
    texts = continued(lm, Speculative(DraftModel(draft), SeedExact(), Chain(1)), samples, max_new_tokens, seed,
                      temperature=temperature)
    source = DraftModel(draft).for_vocabulary(lm.vocab_size)
    apply = lambda model, weights, tokens: model.apply(
        weights, causal(tokens, jnp.zeros(tokens.shape[0], jnp.int32)), model.init_cache(tokens.shape[0], 0))
    most = int(texts.length.max())
    rows, width = min(ROWS, len(samples)), min(PLACES, most - 1)

    @jax.jit
    def measured(target: Any, own: Any, row: Array, key: Array) -> tuple[Array, Array]:
        """Returns hidden states `f32[R, T - 1, D]` and probabilities `f32[R, T - 1]`, -1 at tokens that are no
        examples, for the texts `row`, `i32[R]`."""
        tokens = texts.tokens[row, :most]
        keys = jax.vmap(jax.random.split)(jax.vmap(functools.partial(jax.random.fold_in, key))(row))
        outs = apply(source.fitted, own, tokens), apply(lm.model, target, tokens)

        def judged(start: Array) -> tuple[Array, Array]:
            place = jnp.broadcast_to(jnp.minimum(start + jnp.arange(width), most - 2), (len(row), width))
            log_q, log_p = (jax.nn.log_softmax(out.logits(place) / temperature) for out in outs)
            # by text and place, so that the draws do not depend on what is computed at once
            each = jax.vmap(lambda key, places: jax.vmap(functools.partial(jax.random.fold_in, key))(places))
            drawn = jax.vmap(jax.vmap(jax.random.categorical))(each(keys[:, 0], place), log_q).astype(jnp.int32)
            of = lambda log: jnp.take_along_axis(log, drawn[..., None], -1)[..., 0]
            return drawn, jnp.exp(jnp.minimum(of(log_p) - of(log_q), 0))

        whole = lambda x: x.swapaxes(0, 1).reshape(len(row), -1)[:, :most - 1]
        drawn, chance = jax.tree.map(whole, lax.map(judged, jnp.arange(0, most - 1, width)))
        own_token = jax.vmap(lambda key: jax.random.uniform(key, (most - 1,)))(keys[:, 1]) >= mixed
        position = jnp.arange(1, most)
        new = (position >= texts.prompt_length[row, None]) & (position < texts.length[row, None])
        read = jnp.concatenate([tokens[:, :1], jnp.where(own_token & new, drawn, tokens[:, 1:])], 1)
        hidden = apply(source.fitted, own, read).hidden[:, 1:]
        return hidden.astype(jnp.float32), jnp.where(own_token & new, chance, -1)

    states, chances = [], []
    for first in range(0, len(samples), rows):
        row = np.arange(first, first + rows) % len(samples)         # the last group is filled up with other texts
        hidden, chance = map(np.asarray, measured(lm.params, source.weights, row, jax.random.key(seed)))
        found = (chance >= 0) & (np.arange(first, first + rows) < len(samples))[:, None]
        states.append(hidden[found])
        chances.append(chance[found])
    return jnp.asarray(np.concatenate(states)), jnp.asarray(np.concatenate(chances))


def fit_draft_length(lm: Any, source: Source, samples: Sequence[Sequence[int]], *, length: int = 8,
                     verify: Verifier | None = None, max_new_tokens: int = 64, steps: int = 300, rate: float = 1e-3,
                     seed: int = 0, **sampling: Any) -> dict[str, Array]:
    """Trains the draft length predictor of AdaEAGLE on the target's hidden states (Zhang et al., 2024).

    The samples are continued with drafts of full length. Each round is an example: the target's hidden state before it,
    and the number of drafts that were accepted, to which the predictor is fitted by least squares.

        from decodax.algorithms.speculative.heads import drafting_source

        drafter = dx.load_drafter(DIRECTORY, lm)
        source = drafting_source(lm, drafter)
        network = dx.train.fit_draft_length(lm, source, samples)
        dx.generate(lm, prompts, algorithm=dx.algorithms.adaeagle(network=network), draft=drafter)

    Args:
        lm: the target, a result of `decodax.load`.
        source: what drafts.
        samples: token ids of prompts that are typical for later use. They are decoded in one batch.
        length: largest number of drafts in a round.
        verify: the verifier that you will use; None: `SeedExact`.
        max_new_tokens: number of tokens to decode for each sample.
        steps: number of steps of Adam, each on all examples.
        rate: learning rate.
        seed: random seed of decoding and training.
        sampling: sampling options of `decodax.generate`.

    Returns:
        The weights of the predictor, for `network=` of "adaeagle".

    Raises:
        ValueError: no samples or an empty one, or a number out of range.
    """
    at_least(length=length, steps=steps)
    features, accepted = length_examples(lm, source, samples, length, verify, max_new_tokens, seed, **sampling)
    x, y = jnp.asarray(features), jnp.asarray(accepted, jnp.float32)
    fixed = {"mean": x.mean(0), "scale": x.std(0) + 1e-3}
    sizes = (x.shape[1], *WIDTHS, 1)
    start = {}
    for i, name in enumerate(("first", "second", "third")):
        key = jax.random.fold_in(jax.random.key(seed), i)
        start[name] = jax.random.normal(key, sizes[i:i + 2]) * (2 / sizes[i]) ** 0.5
        start[name + "_bias"] = jnp.zeros(sizes[i + 1])
    start["third_bias"] = y.mean()[None]
    loss = lambda w, step: ((draft_length({**w, **fixed}, x) - y) ** 2).mean()
    return {**minimized(loss, start, steps, rate), **fixed}


def length_examples(lm: Any, source: Source, samples: Sequence[Sequence[int]], length: int, verify: Verifier | None,
                    max_new_tokens: int, seed: int = 0, **sampling: Any) -> tuple[np.ndarray, np.ndarray]:
    """Continues prompts by speculative decoding and returns an example for each round: the target's hidden state before
    it, `f32[n, D]`, and the number of accepted drafts, `i32[n]`. `samples` are the prompts' token ids, `length` is the
    number of drafts."""
    one = causal(jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32))
    width = jax.eval_shape(lambda w: lm.model.apply(w, one, lm.model.init_cache(1, 0)).hidden, lm.params).shape[-1]
    # the predictions are not used: the chain has a fixed length
    nothing = {name: jnp.zeros(shape) for name, shape in dict(
        mean=width, scale=width, first=(width, 1), first_bias=1, second=(1, 1), second_bias=1, third=(1, 1),
        third_bias=1).items()} | {"scale": jnp.ones(width)}
    alg = Speculative(DraftLength(source, nothing), verify or SeedExact(), Chain(length))
    bare, params, policy, s = begun(lm, alg, samples, max_new_tokens, seed, **sampling)
    found: list[tuple[np.ndarray, np.ndarray]] = []
    while bool(s.running.any()):
        tested, before = np.asarray(s.running), np.asarray(s.stats.accepted)
        feature = np.asarray(s.algo[0].feature)[tested]
        s = drivers.advance(bare, lm.model, params, policy, s, jnp.int32(1))
        found.append((feature, (np.asarray(s.stats.accepted) - before)[tested]))
    features, counts = zip(*found, strict=True)
    return np.concatenate(features), np.concatenate(counts)

