"""Drafters for speculative decoding, trained beside a target that does not change.

The text is Python source, read with the target's tokenizer; the target's distribution at each position is what the
drafter learns, so the text need not be the target's own.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console
from tokenizers import Tokenizer

import decodax as dx
from decodax.algorithms.speculative import Speculative
from decodax.algorithms.speculative.heads import drafting_source
from decodax.algorithms.speculative.source import Shape
from decodax.algorithms.speculative.trees import Chain, ConfidenceTree
from decodax.io.drafters import TrainedDrafter, save_drafter
from decodax.models.drafters.units import UnitHead, frequent_units
from decodax.train import corpus, loop
from decodax.train.drafting.blocks import block_acceptances
from decodax.train.drafting.systems import SYSTEMS, first_weights, objective_of
from decodax.train.drafting.unrolled import Unrolled, acceptances, expected_tokens, frequent_tokens
from decodax.train.loop import TrainingRun
from recipes import next_block
from recipes.options import Options
from recipes.run import Recipe

EVAL_WINDOWS = 24
"""Held-out windows of an evaluation."""

NODES = 24
"""Drafts of the tree that the finished drafter is measured with, the most likely ones."""

PROMPTS, PROMPT, NEW = 16, 64, 96
"""Held-out prompts that the finished drafter is measured on, their tokens, and the tokens that are decoded."""

UNITS, LONGEST = 4096, 8
"""Words that a head of MuMo predicts, and the largest number of their tokens."""

ENTRIES = {"hass": "eagle", "fastmtp": "mtp"}
"""The registry entry that takes the drafter of a method, where it has another name."""

CARD = """---
license: apache-2.0
tags: [python, jax, decodax, speculative-decoding]
---
# {name}

A drafter of the method `{system}` for `{target}`: `dx.generate("{target}", prompt, algorithm="{entry}")`.

| | |
|---|---|
| parameters | {parameters:,} |
| training data | {data} |
| training tokens | {tokens:,} in {steps:,} steps |
| accepted by depth, held-out, temperature 1 | {accepted} |
| tokens a forward, chain of {drafts}, held-out code, greedy | {greedy} |
| tokens a forward, chain of {drafts}, held-out code, temperature 1 | {sampled} |
| tokens a forward, tree of {nodes}, held-out code, greedy | {tree} |
| hardware | {hardware} |
| training time | {minutes:.0f} minutes |

Tokens a forward are means over {prompts} prompts of {prompt} tokens from held-out files, with {new} new tokens each,
the target's own token included.

**Reproduce** from the root of the repository:

```
{command}
```
"""


def packed(lm: Any, documents: list[corpus.Document]) -> np.ndarray:
    """Returns the documents as one stream of the target's tokens, with its end of text between them."""
    if (Path(lm.directory or "") / "tokenizer.json").is_file():
        tokenizer = Tokenizer.from_file(str(Path(lm.directory) / "tokenizer.json"))
        if tokenizer.token_to_id(corpus.END_OF_TEXT) is not None:
            return corpus.pack(tokenizer, documents)
    end = lm.generation_config.get("eos_token_id", 0)
    end = end[0] if isinstance(end, (list, tuple)) else end
    pieces = [np.asarray([end, *lm.tokenizer.encode(d.text)], np.int32) for d in documents]
    return np.concatenate([*pieces, np.asarray([end], np.int32)])


def units_of(lm: Any, documents: list[corpus.Document], count: int) -> np.ndarray:
    """Returns the most frequent words of several tokens, `i32[U, L]`, padded with -1. A word has the space before
    it."""
    often = Counter(word for d in documents for word in re.findall(r"\s?\S+", d.text)).most_common(4 * count)
    pieces = ((tuple(lm.tokenizer.encode(word, add_special_tokens=False)), many) for word, many in often)
    return frequent_units((piece for piece, many in pieces for _ in range(many)), count, LONGEST)


def recipe(options: Options, mesh: jax.sharding.Mesh, console: Console) -> Recipe:
    """Returns the recipe for `recipes.run.train`."""
    if options.system == "specdec":
        return next_block.recipe(options, mesh, console)
    lm = dx.load(options.target, dtype="float32")
    weights = jax.device_put(lm.params, NamedSharding(mesh, PartitionSpec()))
    documents, kept = corpus.load_corpus(options.corpus)
    stream, held = packed(lm, documents), packed(lm, kept)
    own = SYSTEMS[options.system]
    count = options.draft_vocab or (None if own.share == 1 else int(own.share * lm.model.config.vocab))
    ids = None if count is None else frequent_tokens(stream, count, lm.model.config.vocab)
    if options.system == "mumo":
        ids = units_of(lm, documents, options.draft_vocab or UNITS)
    objective = objective_of(options.system, lm, ids, options.drafts, options.loss, options.dtype)
    batches = corpus.Batches(stream, options.batch or 8, options.length or 256, options.seed)
    windows = corpus.Batches(held, EVAL_WINDOWS, options.length or 256)[0][:, :-1]
    table = None if ids is None else jnp.asarray(ids)

    def accepted(params: Any) -> np.ndarray:
        if not isinstance(objective, Unrolled):
            return np.asarray(block_acceptances(objective, weights, params, loop.place_batch(windows, mesh)))
        return np.asarray(acceptances(lm.model, objective.head, weights, params, loop.place_batch(windows, mesh),
                                      objective.steps, table))

    def evaluate(params: Any, run: TrainingRun) -> dict[str, float]:
        found = accepted(params)
        return {"expected_tokens": expected_tokens(found), **{f"held_out_{j + 1}": float(x) for j, x in
                                                               enumerate(found)}}

    def finish(target: Path, shipped: Any, exact: Any, facts: dict[str, Any]) -> str:
        one = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), exact)
        made = TrainedDrafter(options.system, objective.head, one, table, target.name)
        drafts = min(4, objective.head.longest or 4)
        measured = {"greedy": (Chain(drafts), 0.0), "sampled": (Chain(drafts), 1.0),
                    "tree": (ConfidenceTree(NODES, objective.head.longest or 6, 6), 0.0)}
        figures = {name: round(tokens_a_forward(lm, made, held, *how), 3) for name, how in measured.items()}
        by_depth = [round(float(x), 4) for x in accepted(exact)]
        data = corpus.corpus_name() if options.corpus is None else f"the .py files of {options.corpus.name}"
        facts |= {"system": options.system, "target": options.target, "accepted": by_depth, "drafts": drafts, **figures}
        save_drafter(target, made, facts={"training": facts})
        told = {**facts, "accepted": ", ".join(map(str, by_depth)),
                "entry": ENTRIES.get(options.system, options.system)}
        (target / "README.md").write_text(CARD.format(
            name=f"{Path(options.target).stem}-{options.system}", data=data, **told, minutes=60 * facts["hours"],
            prompts=PROMPTS, prompt=PROMPT, new=NEW, nodes=NODES))
        return f"{figures['greedy']} tokens a forward on held-out code, greedy, in a chain of {drafts}"

    return Recipe(first_weights(objective, lm, jax.random.key(options.seed)), objective,
                  lambda run: batches[run.step], lambda batch: batch.shape[0] * (batch.shape[1] - 1), evaluate, finish,
                  extra=lambda step: weights)


def tokens_a_forward(lm: Any, drafter: TrainedDrafter, held: np.ndarray, shape: Shape, temperature: float) -> float:
    """Returns the mean number of tokens of a round on held-out text, with drafts of a shape; units have their own."""
    starts = np.linspace(0, len(held) - PROMPT - 1, PROMPTS).astype(int)
    prompts = [held[start:start + PROMPT].tolist() for start in starts]
    algorithm = (dx.algorithms.make("mumo", lm, drafter) if isinstance(drafter.head, UnitHead) else
                 Speculative(drafting_source(lm, drafter), shape=shape))
    out = dx.generate(lm, prompts, max_new_tokens=NEW, temperature=temperature, eos_token_id=[], algorithm=algorithm)
    return float(np.sum(out.stats.tokens) / np.sum(out.stats.rounds))
