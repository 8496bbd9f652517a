"""Drafters for speculative decoding, trained beside a target that does not change, or together with it (`--joint`).

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

from decodax.io.drafters import TrainedDrafter, save_drafter
from decodax.models.drafters.block import BlockHead
from decodax.train import corpus, loop
from decodax.train.drafting.blocks import AnchoredBlocks, Scheduled
from decodax.train.drafting.confidence import fit_confidence
from decodax.train.drafting.draft_model import SYSTEMS as MASKED
from decodax.train.drafting.draft_model import masked_draft
from decodax.train.drafting.falcon import Glanced
from decodax.train.drafting.features import KeptFeatures
from decodax.train.drafting.joint import JointTarget, joint_settings
from decodax.train.drafting.measured import NEW, NODES, accepted, figures
from decodax.train.drafting.sizes import DrafterSize
from decodax.train.drafting.start import load_start, started
from decodax.train.drafting.systems import ENTRIES, KEEPS, feature_weight, first_weights, objective_of
from decodax.train.drafting.texts import examples, predicted_tokens, source_code
from decodax.train.drafting.unrolled import expected_tokens
from decodax.train.language_model import token_losses
from decodax.train.loop import TrainingRun
from decodax.train.tuning.tuned import checked
from recipes import next_block
from recipes.cards import write_card
from recipes.options import Options
from recipes.run import Recipe, files_of_examples, target_of

EVAL_WINDOWS, TOGETHER = 24, 8
"""Held-out windows of an evaluation, and those that are evaluated together: the logits of a large vocabulary take
gigabytes."""


def recipe(options: Options, mesh: jax.sharding.Mesh, console: Console) -> Recipe:
    """Returns the recipe for `recipes.run.train`."""
    settings = joint_settings(options.system, options.head_weight, options.target_rate,
                              options.heads_alone) if options.joint else None
    size = DrafterSize.read(options)
    feature_weight(options.system, options.hidden_weight)
    if options.system == "specdec":
        return next_block.recipe(options, mesh, console)
    lm = target_of(options) if settings is None else checked(target_of(options))
    if options.system not in MASKED and (options.draft, options.mask) != (None, None):
        raise ValueError(f"draft, mask: got {options.draft!r} and {options.mask} for {options.system!r}, which tunes "
                         "no draft model; takes None")
    if options.system in MASKED and options.draft_vocab is not None:
        raise ValueError(f"draft_vocab: got {options.draft_vocab}, and the draft model of {options.system!r} predicts "
                         "all tokens; takes None")
    draft = masked_draft(lm, options.system, options.draft, options.drafts, options.mask, options.loss, options.seed,
                         options.dtype, size, options.start) if options.system in MASKED else None
    start = load_start(options.start, lm, options.draft_vocab) if options.start and draft is None else None
    everywhere = NamedSharding(mesh, PartitionSpec())
    frozen = jax.device_put(lm.params, everywhere)
    files = files_of_examples(options, lm, console)
    text = examples(lm, files) if files else source_code(lm, options.corpus)
    ids = predicted_tokens(options.system, lm, text, options.draft_vocab) if start is None else start.ids
    loss = options.loss or ("hard" if options.joint else None)      # heads learn the text's tokens, as in the papers
    objective: Any = objective_of(options.system, lm, ids, options.drafts, loss, options.dtype, size,
                                  options.hidden_weight) if draft is None else draft.objective
    key = jax.random.key(options.seed)
    first = first_weights(objective, lm, key) if draft is None else draft.first
    if start is not None:
        objective, first = started(objective, start)
    joint = None if settings is None else JointTarget.of(lm, objective, settings, options.distill, options.lora, key)
    rows, length = options.batch or 8, options.length or 256
    batches: Any = corpus.Batches(text.train, rows, length, options.seed, options.keep_features)
    if options.keep_features:
        batches = kept_features(options, objective, batches, frozen, console)
    windows = corpus.Batches(text.held, EVAL_WINDOWS, length)[0][:, :-1]
    table = None if ids is None else jnp.asarray(ids)

    parts = [loop.place_batch(windows[at:at + TOGETHER], mesh) for at in range(0, EVAL_WINDOWS, TOGETHER)]

    def measured(params: Any, shipped: Any = None) -> np.ndarray:
        weights = frozen
        if joint is not None:
            weights, params = shipped or joint.weights(params[0], frozen), params[1]
        return accepted(objective, weights, params, parts)

    def held_loss(weights: Any) -> float:
        return float(np.mean([token_losses(lm.model, weights, part) for part in parts]))

    def evaluate(params: Any, run: TrainingRun) -> dict[str, float]:
        found = measured(params)
        return {"expected_tokens": expected_tokens(found), **{f"held_out_{j + 1}": float(x) for j, x in
                                                               enumerate(found)},
                **({} if joint is None else {"target_cross_entropy": held_loss(joint.weights(params[0], frozen))})}

    def finish(target: Path, shipped: Any, exact: Any, facts: dict[str, Any]) -> str:
        one = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), exact)
        own, now = (one, lm) if joint is None else (one[1], joint.trained(one[0]))
        if draft is None:
            made = TrainedDrafter(options.system, objective.head, own, table, target.name)
            if isinstance(objective.head, BlockHead) and objective.head.confidence is not None:
                made = fit_confidence(lm, made, windows)
            source, longest = made, objective.head.longest
        else:
            source, longest = draft.source(own), objective.steps
        drafts, found = min(4, longest or 4), figures(now, source, text, longest)
        stored = None if joint is None else jax.device_put(now.params, everywhere)
        by_depth = [round(float(x), 4) for x in measured(exact, stored)]
        facts |= {"system": options.system, "target": options.target, "accepted": by_depth, "drafts": drafts, **found}
        told, call = {}, f'`{options.target}`: `dx.generate("{options.target}"'
        what = f"drafter of the method `{options.system}` for {call}"
        if joint is not None:
            before, after = held_loss(frozen), held_loss(stored)
            facts["target_cross_entropy"] = [round(before, 4), round(after, 4)]
            told = {"held-out cross-entropy of the target, before and after": f"{before:.4f} → {after:.4f}"}
            what = (f'target and drafter of the method `{options.system}`, trained together from `{options.target}`, '
                    'whose license is theirs: `dx.generate(dx.load("DIRECTORY")')
            joint.write(target, one[0], made, facts)
        elif draft is None:
            save_drafter(target, made, facts={"training": facts})
        else:
            draft.save(target, shipped, facts)
        entry, chain = ENTRIES.get(options.system, options.system), f"tokens a forward, chain of {drafts}"
        write_card(options, target, facts, f'A {what}, prompt, algorithm="{entry}")`.', text.data,
                   {"accepted by depth, held-out, temperature 1": ", ".join(map(str, by_depth)),
                    f"{chain}, greedy": found["greedy"], f"{chain}, temperature 1": found["sampled"],
                    f"tokens a forward, tree of {NODES}, greedy": found["tree"], **told},
                   f"Tokens a forward are means over {text.where}, with {NEW} new tokens each at most, the target's "
                   "own token included.", ", python, speculative-decoding", "" if joint else "apache-2.0")
        return f"{found['greedy']} tokens a forward on held-out text, greedy, in a chain of {drafts}"

    if joint is not None:
        return Recipe((joint.start, first), joint.loss, lambda run: batches[run.step], lambda batch: rows * length,
                      evaluate, finish, extra=lambda run: joint.inputs(frozen, run.step), rounded=joint.rounded,
                      rates=(joint.settings.rate, 1.0))
    changes = isinstance(objective, AnchoredBlocks | Glanced)
    return Recipe(first, objective, lambda run: batches[run.step],
                  lambda batch: rows * length, evaluate, finish,
                  extra=lambda run: Scheduled(frozen, jnp.float32(run.share)) if changes else frozen)


def kept_features(options: Options, objective: Any, batches: corpus.Batches, weights: Any,
                  console: Console) -> KeptFeatures:
    """Returns the batches with the target's states, from a file of the output directory.

    Raises:
        ValueError: a drafter that reads more of the target, or the disk has no room.
    """
    if not isinstance(objective, KEEPS):
        raise ValueError(f"keep_features: got True for {options.system!r}, which reads more of the target than hidden "
                         "states; takes False")
    decides = ("system", "target", "widen", "data", "own_chats", "corpus", "seed", "length", "dtype", "start")
    own = hashlib.sha256(json.dumps([options.identity()[name] for name in decides]).encode()).hexdigest()[:16]
    return KeptFeatures(options.output / f"features-{own}.bin", batches, objective.target, objective.head, weights,
                        options.dtype, lambda steps, count: track(steps, "features", count, console=console))
