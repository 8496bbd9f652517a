"""Drafters for speculative decoding, trained beside a target that does not change.

The text is Python source, examples (`--data`), or chats that the target writes itself (`--own-chats`). The
target's distribution at each position is what the drafter learns, so the text need not be the target's own.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console
from rich.progress import track

import decodax as dx
from decodax.algorithms.speculative import Speculative
from decodax.algorithms.speculative.heads import drafting_source
from decodax.algorithms.speculative.source import Shape, Source
from decodax.algorithms.speculative.trees import Chain, ConfidenceTree
from decodax.io.drafters import TrainedDrafter, save_drafter
from decodax.jobs.own_chats import write_chats
from decodax.models.drafters.block import BlockHead
from decodax.models.drafters.prompt_tokens import LookAheadHead
from decodax.models.drafters.units import UnitHead
from decodax.train import corpus, loop
from decodax.train.drafting.blocks import AnchoredBlocks, Scheduled, block_acceptances
from decodax.train.drafting.confidence import fit_confidence
from decodax.train.drafting.falcon import Glanced
from decodax.train.drafting.features import KeptFeatures
from decodax.train.drafting.systems import SYSTEMS, first_weights, objective_of
from decodax.train.drafting.texts import UNITS, Text, examples, source_code, units_of
from decodax.train.drafting.units import NextUnit
from decodax.train.drafting.unrolled import Unrolled, acceptances, expected_tokens, frequent_tokens
from decodax.train.loop import TrainingRun
from recipes import next_block
from recipes.cards import write_card
from recipes.masked_draft import SYSTEMS as MASKED
from recipes.masked_draft import masked_draft
from recipes.options import Options
from recipes.run import Recipe, target_of

EVAL_WINDOWS, TOGETHER = 24, 8
"""Held-out windows of an evaluation, and those that are evaluated together: the logits of a large vocabulary take
gigabytes."""

NODES, NEW = 24, 96
"""Drafts of the tree that the finished drafter is measured with, the most likely ones, and tokens that are decoded."""

KEEPS = (Unrolled, AnchoredBlocks, Glanced, NextUnit)
"""Losses of drafters that read the target's hidden states alone, which `--keep-features` keeps."""

ENTRIES = {"hass": "eagle", "fastmtp": "mtp"}
"""The registry entry that takes the drafter of a method, where it has another name."""


def recipe(options: Options, mesh: jax.sharding.Mesh, console: Console) -> Recipe:
    """Returns the recipe for `recipes.run.train`."""
    if options.system == "specdec":
        return next_block.recipe(options, mesh, console)
    lm = target_of(options)
    if options.system not in MASKED and (options.draft, options.mask) != (None, None):
        raise ValueError(f"draft, mask: got {options.draft!r} and {options.mask} for {options.system!r}, which tunes "
                         "no draft model; takes None")
    draft = masked_draft(options, lm) if options.system in MASKED else None
    weights = jax.device_put(lm.params, NamedSharding(mesh, PartitionSpec()))
    files = list(options.data)
    if options.own_chats:
        files.append(str(options.output / "chats.jsonl"))
        write_chats(lm, Path(files[-1]), options.own_chats, seed=options.seed, report=lambda done: console.print(
            f"{done:,} of {options.own_chats:,} chats in {files[-1]}", soft_wrap=True))
    text = examples(lm, files) if files else source_code(lm, options.corpus)
    share = 1 if draft is not None else SYSTEMS[options.system].share
    count = options.draft_vocab or (None if share == 1 else int(share * lm.model.config.vocab))
    ids = None if count is None else frequent_tokens(text.train, count, lm.model.config.vocab)
    if options.system == "mumo":
        ids = units_of(lm, text.train, options.draft_vocab or UNITS)
    objective: Any = objective_of(options.system, lm, ids, options.drafts, options.loss, options.dtype
                                  ) if draft is None else draft.objective
    rows, length = options.batch or 8, options.length or 256
    batches: Any = corpus.Batches(text.train, rows, length, options.seed, options.keep_features)
    if options.keep_features:
        batches = kept_features(options, objective, batches, weights, console)
    windows = corpus.Batches(text.held, EVAL_WINDOWS, length)[0][:, :-1]
    table = None if ids is None else jnp.asarray(ids)

    def accepted(params: Any) -> np.ndarray:
        parts = [loop.place_batch(windows[at:at + TOGETHER], mesh) for at in range(0, EVAL_WINDOWS, TOGETHER)]
        if not isinstance(objective, Unrolled):
            return np.mean([block_acceptances(objective, weights, params, part) for part in parts], 0)
        return np.mean([acceptances(lm.model, objective.head, weights, params, part, objective.steps, table)
                        for part in parts], 0)

    def evaluate(params: Any, run: TrainingRun) -> dict[str, float]:
        found = accepted(params)
        return {"expected_tokens": expected_tokens(found), **{f"held_out_{j + 1}": float(x) for j, x in
                                                               enumerate(found)}}

    def finish(target: Path, shipped: Any, exact: Any, facts: dict[str, Any]) -> str:
        one = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), exact)
        if draft is None:
            made = TrainedDrafter(options.system, objective.head, one, table, target.name)
            if isinstance(objective.head, BlockHead) and objective.head.confidence is not None:
                made = fit_confidence(lm, made, windows)
            source, longest = made, objective.head.longest
        else:
            source, longest = draft.source(one), objective.steps
        drafts = min(4, longest or 4)
        measured = {"greedy": (Chain(drafts), 0.0), "sampled": (Chain(drafts), 1.0),
                    "tree": (ConfidenceTree(NODES, longest or 6, 6), 0.0)}
        figures = {name: round(tokens_a_forward(lm, source, text, *how), 3) for name, how in measured.items()}
        by_depth = [round(float(x), 4) for x in accepted(exact)]
        facts |= {"system": options.system, "target": options.target, "accepted": by_depth, "drafts": drafts, **figures}
        if draft is None:
            save_drafter(target, made, facts={"training": facts})
        else:
            draft.save(target, shipped, facts)
        entry, chain = ENTRIES.get(options.system, options.system), f"tokens a forward, chain of {drafts}"
        write_card(options, target, facts, f"A drafter of the method `{options.system}` for `{options.target}`: "
                   f'`dx.generate("{options.target}", prompt, algorithm="{entry}")`.', text.data,
                   {"accepted by depth, held-out, temperature 1": ", ".join(map(str, by_depth)),
                    f"{chain}, greedy": figures["greedy"], f"{chain}, temperature 1": figures["sampled"],
                    f"tokens a forward, tree of {NODES}, greedy": figures["tree"]},
                   f"Tokens a forward are means over {text.where}, with {NEW} new tokens each at most, the target's "
                   "own token included.", ", python, speculative-decoding", "apache-2.0")
        return f"{figures['greedy']} tokens a forward on held-out text, greedy, in a chain of {drafts}"

    first = first_weights(objective, lm, jax.random.key(options.seed)) if draft is None else draft.first
    changes = isinstance(objective, AnchoredBlocks | Glanced)
    return Recipe(first, objective, lambda run: batches[run.step],
                  lambda batch: rows * length, evaluate, finish,
                  extra=lambda run: Scheduled(weights, jnp.float32(run.share)) if changes else weights)


def kept_features(options: Options, objective: Any, batches: corpus.Batches, weights: Any,
                  console: Console) -> KeptFeatures:
    """Returns the batches with the target's states, from a file of the output directory.

    Raises:
        ValueError: a drafter that reads more of the target, or the disk has no room.
    """
    if not isinstance(objective, KEEPS):
        raise ValueError(f"keep_features: got True for {options.system!r}, which reads more of the target than hidden "
                         "states; takes False")
    decides = ("system", "target", "widen", "data", "own_chats", "corpus", "seed", "length", "dtype")
    own = hashlib.sha256(json.dumps([options.identity()[name] for name in decides]).encode()).hexdigest()[:16]
    return KeptFeatures(options.output / f"features-{own}.bin", batches, objective.target, objective.head, weights,
                        options.dtype, lambda steps, count: track(steps, "features", count, console=console))


def tokens_a_forward(lm: Any, drafter: TrainedDrafter | Source, text: Text, shape: Shape, temperature: float) -> float:
    """Returns the mean number of tokens of a forward pass of the target after held-out prompts, with drafts of a
    shape; units have their own. A pass that drafts counts by its share of the layers."""
    head = drafter.head if isinstance(drafter, TrainedDrafter) else None
    if isinstance(head, UnitHead):
        algorithm = dx.algorithms.make("mumo", lm, drafter)
    else:
        source = drafting_source(lm, drafter) if isinstance(drafter, TrainedDrafter) else drafter
        algorithm = Speculative(source, shape=shape)
    out = dx.generate(lm, text.prompts, max_new_tokens=NEW, temperature=temperature, algorithm=algorithm,
                      **({} if text.stops else {"eos_token_id": []}))
    passes = 2 - len(head.skip) / lm.model.depth if isinstance(head, LookAheadHead) else 1
    return out.stats.tokens_per_forward / passes
