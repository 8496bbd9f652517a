"""The drafter of SpecDec and GAD: an encoder-decoder that predicts the next block at mask tokens, trained on pairs of a
source and what the target writes for it.

It begins as the target's encoder and the first two layers of its decoder, or `--encoder-layers` and `--layers`.
Finished, it is a model that `decodax.load` loads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

import decodax as dx
from decodax.models import EncoderDecoder, EncoderText
from decodax.train.drafting.next_block import NextBlock, as_model, load_shallow, pairs_of, shallow
from decodax.train.drafting.sizes import DrafterSize
from decodax.train.drafting.unrolled import expected_tokens
from decodax.train.tuning import ExampleBatches, read_examples
from recipes.cards import files_of, write_card, write_facts
from recipes.options import Options
from recipes.run import Recipe

BLOCK = 25
"""Tokens of a block, those of the papers."""

EVERY, MOST = 20, 24
"""One of `EVERY` pairs is held out, and at most `MOST` of these are measured."""

NEW = 64
"""Tokens that are decoded for the figure of the finished drafter."""


def recipe(options: Options, mesh: jax.sharding.Mesh, console: Console) -> Recipe:
    """Returns the recipe for `recipes.run.train`."""
    for name in ("own_chats", "keep_features", "widen", "loss", "draft", "draft_vocab", "corpus"):
        if value := getattr(options, name):
            raise ValueError(f"{name}: got {value!r} for 'specdec', which does not read it; takes the default")
    lm = dx.load(options.target, dtype="float32")
    if not isinstance(lm.model, EncoderDecoder) or lm.model.config.features is not None or lm.start is None:
        raise ValueError(f"target: got {lm.name!r}, a {type(lm.model).__name__}; takes an encoder-decoder of text")
    count, mask = options.drafts or BLOCK, options.mask
    pairs = pairs_of(read_examples([Path(file) for file in options.data], lm), lm.start, options.length or 256)
    out = np.arange(len(pairs[0])) % EVERY == EVERY - 1
    used = tuple(x[~out] for x in pairs)
    held = tuple(jnp.asarray(x[out if out.any() else ~out][:MOST]) for x in pairs)
    size = DrafterSize.read(options)
    size.check_only("specdec", "layers", "encoder_layers")
    network, first = shallow(lm.model, lm.params, size.layers, size.encoder_layers)
    if options.start:
        first, mask = load_shallow(options.start, network, options.mask)
    mask = lm.pad if mask is None else mask
    objective = NextBlock(network, count, mask, options.dtype)
    batches = ExampleBatches(used, options.batch or 8, options.seed)
    measure = jax.jit(objective)

    def accepted(params: Any) -> np.ndarray:
        scalars = measure(params, held, None)[1]
        return np.asarray([float(scalars[f"accepted_{k + 1}"]) for k in range(count)])

    def evaluate(params: Any, run: Any) -> dict[str, float]:
        found = accepted(params)
        return {"expected_tokens": expected_tokens(found),
                **{f"held_out_{k + 1}": float(x) for k, x in enumerate(found)}}

    def finish(target: Path, shipped: Any, exact: Any, facts: dict[str, Any]) -> str:
        made = as_model(lm, network, shipped, mask)
        dx.save(made, target)
        own = made.with_params(jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), exact))
        said = dx.generate(lm, [[]] * len(held[0]), inputs=EncoderText(tokens=held[0], length=held[1]),
                           algorithm=dx.algorithms.make("specdec", lm, own, length=count, beta=1, mask=mask),
                           max_new_tokens=NEW, temperature=0.0)
        greedy = round(said.stats.tokens_per_forward, 3)
        shares = [round(float(x), 4) for x in accepted(exact)]
        write_facts(options, target, facts | {"accepted": shares, "drafts": count, "greedy": greedy})
        where = "held-out" if out.any() else "training data"
        call = 'dx.generate(lm, prompts, inputs=inputs, algorithm="specdec", draft=...)'
        write_card(options, target, facts, f"A non-autoregressive drafter for `{options.target}`: `{call}`. The "
                   f"license is that of `{options.target}`.", f"{len(used[0]):,} pairs of {files_of(options)}",
                   {f"share of right tokens by mask, {where}": ", ".join(map(str, shares)),
                    f"tokens a forward with beta=1, {where}": greedy}, tags=", speculative-decoding")
        return f"{greedy} tokens a forward with beta=1 in blocks of {count}"

    return Recipe(first, objective, lambda run: batches[run.step], lambda batch: int(batch[3].sum()), evaluate, finish,
                  extra=lambda run: jnp.float32(run.share))
