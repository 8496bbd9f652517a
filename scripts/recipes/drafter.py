"""Drafters for speculative decoding, trained beside a target that does not change.

The text is Python source, examples (`--data`), or chats that the target writes itself (`--own-chats`). The
target's distribution at each position is what the drafter learns, so the text need not be the target's own.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
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
from decodax.algorithms.speculative.drafts import MaskedDrafts
from decodax.algorithms.speculative.heads import drafting_source
from decodax.algorithms.speculative.source import Shape, Source
from decodax.algorithms.speculative.trees import Chain, ConfidenceTree
from decodax.io.drafters import TrainedDrafter, save_drafter
from decodax.jobs.own_chats import write_chats
from decodax.models.drafters.prompt_tokens import LookAheadHead
from decodax.models.drafters.units import UnitHead, frequent_units
from decodax.train import corpus, loop
from decodax.train.drafting.blocks import AnchoredBlocks, Scheduled, block_acceptances
from decodax.train.drafting.falcon import Glanced
from decodax.train.drafting.masked import TunedDraftModel
from decodax.train.drafting.systems import SYSTEMS, first_weights, objective_of
from decodax.train.drafting.unrolled import Unrolled, acceptances, expected_tokens, frequent_tokens
from decodax.train.loop import TrainingRun
from decodax.train.tuning import read_examples
from recipes import next_block
from recipes.options import Options
from recipes.run import Recipe, target_of
from recipes.tune import checked

EVAL_WINDOWS, TOGETHER = 24, 8
"""Held-out windows of an evaluation, and those that are evaluated together: the logits of a large vocabulary take
gigabytes."""

EVERY = 20
"""One of `EVERY` examples is held out."""

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
| tokens a forward, chain of {drafts}, greedy | {greedy} |
| tokens a forward, chain of {drafts}, temperature 1 | {sampled} |
| tokens a forward, tree of {nodes}, greedy | {tree} |
| hardware | {hardware} |
| training time | {minutes:.0f} minutes |

Tokens a forward are means over {prompts}, with {new} new tokens each at most, the target's own token included.

**Reproduce** from the root of the repository:

```
{command}
```
"""


@dataclass(frozen=True)
class Text:
    """The text that a drafter is trained and measured on.

    Attributes:
        train: `i32[N]`, the target's tokens.
        held: `i32[M]`, held-out tokens.
        prompts: held-out prompts, as token ids.
        data: what it is, for the card.
        where: what the prompts are, for the card.
        stops: False if decoding goes on behind tokens that end an answer, as it should in code.
    """

    train: np.ndarray
    held: np.ndarray
    prompts: list[list[int]]
    data: str
    where: str
    stops: bool = True


def source_code(lm: Any, root: Path | None) -> Text:
    """Returns the text of Python files, with the target's end of text between them."""
    train, held = (packed(lm, documents) for documents in corpus.load_corpus(root))
    starts = np.linspace(0, len(held) - PROMPT - 1, PROMPTS).astype(int)
    return Text(train, held, [held[start:start + PROMPT].tolist() for start in starts],
                corpus.corpus_name() if root is None else f"the .py files of {root.name}",
                f"{PROMPTS} prompts of {PROMPT} tokens from held-out files", stops=False)


def examples(lm: Any, files: Sequence[str]) -> Text:
    """Returns the text of all examples, concatenated."""
    found = read_examples([Path(file) for file in files], lm)
    held = found[EVERY - 1::EVERY] or found
    used = [x for i, x in enumerate(found) if i % EVERY != EVERY - 1] if len(found) >= EVERY else found
    joined = lambda some: np.concatenate([np.asarray(x.tokens, np.int32) for x in some])
    prompts = [list(x.tokens[:x.prompt or PROMPT]) for x in held][:PROMPTS]
    return Text(joined(used), joined(held), prompts,
                f"{len(used):,} examples of {', '.join(Path(file).name for file in files)}",
                f"the prompts of {len(prompts)} held-out examples")


def packed(lm: Any, documents: list[corpus.Document]) -> np.ndarray:
    """Returns the documents as one stream of the target's tokens, with its end of text between them."""
    if (Path(lm.directory or "") / "tokenizer.json").is_file():
        tokenizer = Tokenizer.from_file(str(Path(lm.directory) / "tokenizer.json"))
        if tokenizer.token_to_id(corpus.END_OF_TEXT) is not None:
            return corpus.pack(tokenizer, documents)
    end = lm.eos[0] if lm.eos else 0
    pieces = [np.asarray([end, *lm.tokenizer.encode(d.text)], np.int32) for d in documents]
    return np.concatenate([*pieces, np.asarray([end], np.int32)])


def draft_model(options: Options, lm: Any) -> Any:
    """Returns the draft model that PARD tunes.

    Raises:
        ValueError: it cannot be trained, or has another vocabulary than the target.
    """
    draft = checked(dx.train.sub_model(lm, max(lm.model.depth // 4, 1)) if options.draft is None else
                    dx.load(options.draft, dtype="float32"))
    if draft.vocab_size != lm.vocab_size:
        raise ValueError(f"draft: got {options.draft!r} with {draft.vocab_size} logits; takes a model with the "
                         f"{lm.vocab_size} of {lm.name!r}")
    return draft


def units_of(lm: Any, tokens: np.ndarray, count: int) -> np.ndarray:
    """Returns the most frequent words of several tokens in a text, `i32[U, L]`, padded with -1. A word has the space
    before it."""
    often = Counter(re.findall(r"\s?\S+", lm.tokenizer.decode(tokens.tolist()))).most_common(4 * count)
    pieces = ((tuple(lm.tokenizer.encode(word, add_special_tokens=False)), many) for word, many in often)
    return frequent_units((piece for piece, many in pieces for _ in range(many)), count, LONGEST)


def recipe(options: Options, mesh: jax.sharding.Mesh, console: Console) -> Recipe:
    """Returns the recipe for `recipes.run.train`."""
    if options.system == "specdec":
        return next_block.recipe(options, mesh, console)
    lm = target_of(options)
    if options.system != "pard" and (options.draft, options.mask) != (None, None):
        raise ValueError(f"draft, mask: got {options.draft!r} and {options.mask} for {options.system!r}, which tunes "
                         "no draft model; takes None")
    draft = draft_model(options, lm) if options.system == "pard" else None
    weights = jax.device_put(lm.params, NamedSharding(mesh, PartitionSpec()))
    files = list(options.data)
    if options.own_chats:
        assert options.output is not None
        files.append(str(options.output / "chats.jsonl"))
        write_chats(lm, Path(files[-1]), options.own_chats, seed=options.seed, report=lambda done: console.print(
            f"{done:,} of {options.own_chats:,} chats in {files[-1]}", soft_wrap=True))
    text = examples(lm, files) if files else source_code(lm, options.corpus)
    share = 1 if draft is not None else SYSTEMS[options.system].share
    count = options.draft_vocab or (None if share == 1 else int(share * lm.model.config.vocab))
    ids = None if count is None else frequent_tokens(text.train, count, lm.model.config.vocab)
    if options.system == "mumo":
        ids = units_of(lm, text.train, options.draft_vocab or UNITS)
    mask = lm.pad if options.mask is None else options.mask
    objective: Any = objective_of(options.system, lm, ids, options.drafts, options.loss, options.dtype
                                  ) if draft is None else TunedDraftModel(
        lm.model, options.drafts or 8, options.loss or "hard", dtype=options.dtype, draft=draft.model, mask=mask)
    batches = corpus.Batches(text.train, options.batch or 8, options.length or 256, options.seed)
    windows = corpus.Batches(text.held, EVAL_WINDOWS, options.length or 256)[0][:, :-1]
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
            source, longest = made, objective.head.longest
        else:
            source, longest = MaskedDrafts(draft.with_params(one), drafts=objective.steps, mask=mask), objective.steps
        drafts = min(4, longest or 4)
        measured = {"greedy": (Chain(drafts), 0.0), "sampled": (Chain(drafts), 1.0),
                    "tree": (ConfidenceTree(NODES, longest or 6, 6), 0.0)}
        figures = {name: round(tokens_a_forward(lm, source, text, *how), 3) for name, how in measured.items()}
        by_depth = [round(float(x), 4) for x in accepted(exact)]
        facts |= {"system": options.system, "target": options.target, "accepted": by_depth, "drafts": drafts, **figures}
        if draft is None:
            save_drafter(target, made, facts={"training": facts})
        else:
            dx.save(draft.with_params(jax.tree.map(np.asarray, shipped)), target)
            config = target / "config.json"
            entries = {"pard_token": mask, "spd_type": "pard", "training": facts}     # the authors' names
            config.write_text(json.dumps(json.loads(config.read_text()) | entries, indent=2) + "\n")
        told = {**facts, "accepted": ", ".join(map(str, by_depth)),
                "entry": ENTRIES.get(options.system, options.system)}
        (target / "README.md").write_text(CARD.format(
            name=f"{Path(options.target).stem}-{options.system}", data=text.data, **told, minutes=60 * facts["hours"],
            prompts=text.where, new=NEW, nodes=NODES))
        return f"{figures['greedy']} tokens a forward on held-out text, greedy, in a chain of {drafts}"

    first = first_weights(objective, lm, jax.random.key(options.seed)) if draft is None else draft.params
    changes = isinstance(objective, AnchoredBlocks | Glanced)
    return Recipe(first, objective, lambda run: batches[run.step],
                  lambda batch: batch.shape[0] * (batch.shape[1] - 1), evaluate, finish,
                  extra=lambda run: Scheduled(weights, jnp.float32(run.share)) if changes else weights)


def tokens_a_forward(lm: Any, drafter: TrainedDrafter | Source, text: Text, shape: Shape, temperature: float) -> float:
    """Returns the mean number of tokens of a forward pass of the target behind held-out prompts, with drafts of a
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
    return float(np.sum(out.stats.tokens) / np.sum(out.stats.rounds)) / passes
