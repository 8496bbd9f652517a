"""Masked diffusion models: `tasks-diffusion` on problems, `pycode-diffusion` on text, and two stages after training.

A model may start from an autoregressive one (`--init`), which gets a mask token, as Dream and SDAR did. The stages use
a model's own answers, to problems or as continuations of texts: certainty forcing, which makes it surer, and a filter
for Learn2PD's decoding. `--attention causal-prefix` trains for set block decoding, and with `--shift` for SDLM.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from tokenizers import Tokenizer

from decodax.bench.figures import markdown_table
from decodax.bench.problems import puzzles as problems
from decodax.bench.problems.puzzles import problem_batch, rows_of
from decodax.io.checkpoint import load_diffusion, load_model
from decodax.io.load import ZOO, find
from decodax.models import Diffusion, Transformer, llama
from decodax.train import corpus
from decodax.train import masked_diffusion as md
from decodax.train import unmask_filter as filters
from decodax.train.export import publish
from decodax.train.language_model import token_bytes
from decodax.train.loop import TrainingRun
from decodax.train.own_answers import beginnings, chosen, fill
from decodax.train.sdlm import NextSequence
from recipes.options import Options
from recipes.run import Recipe

HELD_OUT_EACH, HELD_OUT_SHIPPED = 32, 500
EVAL_WINDOWS, SHIPPED_WINDOWS = 48, 512
"""Held-out problems of each task, and windows of text, in an evaluation on the way and for the finished model."""

PROBLEMS = f"""A small masked diffusion model for problems with checkable answers. It is made to show what decoding
several tokens at once costs, on any CPU and in seconds: with one token a forward it is right on most problems, with
more it errs where answer tokens depend on one another. A prompt is a text such as `sort DACB=`; the answer has room in
a canvas of {problems.CANVAS} tokens and is followed by `{problems.END}`."""

TEXT = """A diffusion language model for Python source, {made}. It is made for
demonstrations, tests and comparisons of decoding methods; it writes plausible Python, not correct programs."""

LAYOUT = """

The layout is that of a Llama, and `transformers` loads it as one, with causal attention{without}. What
decoding has to know is in config.json: `mask_token_id` and the entry `diffusion`."""

SEES = {
    "full": ("the bound on the likelihood of masked diffusion (LLaDA's loss)", "every token sees every token"),
    "block-causal": ("the bound on the likelihood of block diffusion", "by blocks of {block}, counted from the first "
                     "token: a token sees its block and those before it"),
    "causal-prefix": ("the bound on the likelihood of block diffusion and cross-entropy of next tokens (set block "
                      "decoding)", "causal; a block of {block} masks after the text sees it and itself"),
}
"""By attention: the loss, and who sees whom."""

NEXT_SEQUENCE = ("cross-entropy of the tokens of a block, predicted at once (SDLM)", "causal; a block of a copy of the "
                 "last token and masks, {block} positions, sees the text before it and itself")
"""The same for a causal prefix with shift."""


@dataclass(frozen=True)
class Source:
    """The model to train, its data, and how the run measures it. `kept` are held-out documents; None: problems."""

    options: Options
    model: Transformer
    kind: Diffusion
    params: Any
    tokenizer: Tokenizer
    documents: list[corpus.Document]
    kept: list[corpus.Document] | None

    @property
    def sequential(self) -> bool:
        """True for the training of SDLM."""
        return (self.kept is not None and self.options.stage is None and self.kind.attention == "causal-prefix"
                and self.kind.shift)

    @property
    def span(self) -> int:
        """Number of tokens of a block of an answer in a stage."""
        return self.options.span or min(self.kind.block or self.options.canvas, self.options.canvas)

    @property
    def bound(self) -> md.Bound:
        """The loss of the training."""
        made = NextSequence if self.sequential else md.Bound
        return made(self.model, self.kind, self.options.dtype, self.options.apart)

    def measure(self, params: Any, published: bool, at_once: bool = False) -> dict[str, float]:
        """Returns accuracy on held-out problems, or bits per byte of held-out text."""
        o = self.options
        if self.kept is None:
            count = HELD_OUT_SHIPPED if published else HELD_OUT_EACH
            span = o.span if o.stage else None
            found = accuracy(self.model, self.kind, params, count, span=span)
            more = accuracy(self.model, self.kind, params, count, at_once=True, span=span) if at_once else {}
            return {**found, **{f"{name}, all at once": x for name, x in more.items()}}
        usual = o.settings.options["length"]
        return {"bits_per_byte": md.bound_per_byte(
            self.bound, params, corpus.pack(self.tokenizer, self.kept), token_bytes(self.tokenizer),
            usual if o.stage else o.length or usual, o.batch or 1,
            SHIPPED_WINDOWS if published else EVAL_WINDOWS)}

    def own_answers(self, held: bool) -> md.Batch:
        """Returns the model's own right answers, made one token a forward, or texts that it has continued."""
        o, share = self.options, 8 if held else 1
        if self.kept is None:
            each = max(1, (o.answers or 1) // len(problems.TASKS) // share)
            found = [p for task in problems.TASKS for p in problems.problems(task, each, o.seed + 1, held)]
            batch = rows_of(found)
            filled = fill(self.model, self.kind, self.params, batch, span=self.span)
            right = np.asarray([p.correct(reply(row[answer]))
                                for p, row, answer in zip(found, filled, batch.answer, strict=True)])
            if not right.any():
                raise ValueError("init: the model answers no problem right; it takes a trained one")
            return md.Batch(filled[right], batch.answer[right], batch.live[right])
        if self.tokenizer.token_to_id(corpus.END_OF_TEXT) is None:
            raise ValueError(f"init: {o.init} has a tokenizer without {corpus.END_OF_TEXT}, which separates documents")
        count = max(1, (o.answers or 1) // share)
        stream = corpus.pack(self.tokenizer, self.kept if held else self.documents)
        batch = beginnings(stream, count, o.length or 2, o.canvas, o.seed + 1)
        return batch.replace(tokens=fill(self.model, self.kind, self.params, batch, min(count, 64), span=self.span))


def recipe(o: Options, mesh: jax.sharding.Mesh, console: Console) -> Recipe:
    """Returns the recipe for `recipes.run.train`."""
    source = source_of(o)
    model, kind, count = source.model, source.kind, o.batch or 1
    if not source.sequential:
        md.check(kind)
    made = Recipe(source.params, source.bound, lambda run: problem_batch(count, o.seed, run.step, o.weights or ()),
                  lambda batch: int(batch.live.sum()), lambda params, run: source.measure(params, False),
                  partial(write, source), lambda run: jax.random.fold_in(jax.random.key(o.seed), run.step))
    if o.stage is None and not o.settings.text:
        return made
    if o.stage is None:
        windows = corpus.Batches(corpus.pack(source.tokenizer, source.documents), count, o.length or 1, o.seed)

        def batch(run: TrainingRun) -> md.Batch:
            tokens = windows[run.step][:, :-1]
            return md.Batch(tokens, np.ones(tokens.shape, bool), np.ones(tokens.shape, bool))

        return dataclasses.replace(made, batch=batch)
    span = source.span
    if o.canvas % span:
        raise ValueError(f"span: got None and a model with blocks of {span}; it takes a divisor of the {o.canvas} "
                         "tokens of an answer")
    answers = source.own_answers(False)
    console.print(f"{o.init}: {len(answers.tokens):,} of {o.answers:,} answers of its own are used", soft_wrap=True)
    if o.stage == "certainty":
        return dataclasses.replace(made, objective=md.CertaintyForcing(model, kind, o.dtype, span),
                                   batch=lambda run: chosen(answers, count, o.seed, run.step),
                                   evaluate=lambda params, run: source.measure(params, False, at_once=True))
    examples, checked = (filters.collect(model, source.params, batch, kind, span)
                         for batch in (answers, source.own_answers(True)))

    def write_filter(target: Path, shipped: Any, exact: Any, facts: dict[str, Any]) -> str:
        facts |= facts_of(o, filters.figures(exact, checked))
        filters.save_filter(target / "filter.safetensors", shipped)
        (target / "filter.json").write_text(json.dumps(facts, indent=2) + "\n")
        return shown(facts["held_out"])

    return Recipe(filters.init_filter(jax.random.key(o.seed), span), filters.FilterLoss(),
                  lambda run: chosen(examples, count, o.seed, run.step), lambda batch: batch.final.size,
                  lambda params, run: filters.figures(params, checked), write_filter, made.extra, rounded=False)


def source_of(o: Options) -> Source:
    """Returns the model to train: with fresh weights, or those of `init`. A mask that is added gets the mean embedding;
    a stage follows the training of a diffusion model."""
    text, home = o.settings.text, find(o.init) if o.init is not None else None
    documents, kept = corpus.load_corpus(o.corpus) if text else ([], None)
    tokenizer = problems.tokenizer()
    if text:
        tokenizer = corpus.train_tokenizer(documents, o.settings.vocab) if home is None else \
            Tokenizer.from_file(str(home / "tokenizer.json"))
        if o.stage is None and tokenizer.token_to_id(problems.MASK) is None:
            tokenizer.add_special_tokens([problems.MASK])
    vocab = tokenizer.get_vocab_size()
    attention: Any = o.attention or ("full" if o.block is None else "block-causal")
    kind: Diffusion | None = Diffusion(vocab - 1, o.shift, attention, o.block)
    if home is None:
        model = Transformer(llama(vocab=vocab, tied=True, **o.settings.shape))
        params = md.widened(model.init_params(jax.random.key(o.seed)), o.settings.spread)
        return Source(o, model, kind, params, tokenizer, documents, kept)
    model, params = load_model(home, dtype="float32")
    if o.stage is not None:
        if (kind := load_diffusion(home)) is None:
            raise ValueError(f"init: {home} is autoregressive, it takes a diffusion model")
        return Source(o, model, kind, params, tokenizer, documents, kept)
    if model.config.vocab == vocab - 1 and model.config.tied:
        embed = params["embed"]
        params = {**params, "embed": jnp.concatenate([embed, embed.mean(0, keepdims=True)])}
        model = Transformer(dataclasses.replace(model.config, vocab=vocab))
    if model.config.vocab != vocab:
        raise ValueError(f"init: {o.init} has a vocabulary of {model.config.vocab}, it takes {vocab} entries, or "
                         f"{vocab - 1} and a tied embedding")
    return Source(o, model, kind, params, tokenizer, documents, kept)


def accuracy(model: Transformer, kind: Diffusion, params: Any, count: int, seed: int = 0, at_once: bool = False,
             span: int | None = None) -> dict[str, float]:
    """Returns the share of `count` held-out problems of each task that is right when one token is unmasked a forward,
    or all tokens of a block (of `span` tokens, or the model's) at once."""
    found = [p for task in problems.TASKS for p in problems.problems(task, count, seed)]
    batch = rows_of(found)
    filled = fill(model, kind, params, batch, min(len(found), 512), at_once, span)
    right = [p.correct(reply(row[answer])) for p, row, answer in zip(found, filled, batch.answer, strict=True)]
    return dict(zip(problems.TASKS, map(float, np.reshape(right, (-1, count)).mean(1)), strict=True))


def reply(canvas: np.ndarray) -> str:
    """Returns the text of a canvas `i32[n]` up to its first end token."""
    words = [problems.vocabulary()[i] for i in canvas]
    return "".join(words[:words.index(problems.END)] if problems.END in words else words)


def shown(held_out: Mapping[str, float]) -> str:
    """Returns figures in a line."""
    return ", ".join(f"{k} {v:.3f}" for k, v in held_out.items())


def facts_of(options: Options, held_out: Mapping[str, float]) -> dict[str, Any]:
    """Returns what training.json and filter.json say beside the facts of every run."""
    text = options.settings.text
    data = corpus.corpus_name() if options.corpus is None else f"the .py files of {options.corpus.name}"
    return {"stage": options.stage, "init": options.init and Path(options.init).name,
            "data": data if text else "problems made by decodax/bench/problems/puzzles.py",
            "held_out": {k: round(v, 4) for k, v in held_out.items()},
            "held_out_each": SHIPPED_WINDOWS if text else HELD_OUT_SHIPPED,
            "optimizer": {"muon": "Muon", "adamw": "AdamW"}[options.optimizer or "adamw"]}


def earlier_training(options: Options, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the facts that change if a run continues from a diffusion model that is not shipped: both runs count."""
    told = find(options.init) / "training.json" if options.init else None
    if told is None or told.parents[1] == ZOO or not told.is_file():
        return {}
    earlier = json.loads(told.read_text())
    if "init" not in earlier:                       # an autoregressive one
        return {}
    both = {name: facts[name] + earlier[name] for name in ("steps", "tokens")}
    return {**both, "init": earlier["init"], "hours": round(facts["hours"] + earlier["hours"], 3),
            "command": f"{earlier['command']}\n{facts['command']}"}


def write(source: Source, target: Path, shipped: Any, exact: Any, facts: dict[str, Any]) -> str:
    """Measures the finished model on more held-out data and writes its directory."""
    options, kind, text = source.options, source.kind, source.options.settings.text
    facts |= facts_of(options, source.measure(exact, True, at_once=options.stage == "certainty"))
    facts |= earlier_training(options, facts)
    loss, attention = NEXT_SEQUENCE if source.sequential else SEES[kind.attention]
    if options.stage == "certainty":
        loss = "certainty forcing on its own answers (dParallel)"
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), corpus.END_OF_TEXT if text else problems.END)
    special["mask_token"] = source.tokenizer.id_to_token(kind.mask)
    kinds = "" if options.init is None or load_diffusion(find(options.init)) else "the autoregressive "
    start = f"made from {kinds}`{facts['init']}`" if facts["init"] else "trained from scratch"
    rows = {"attention": attention.format(block=kind.block), "training data": facts["data"],
            "mask token": f"`{special['mask_token']}`, id {kind.mask}; logits at a position predict "
                          f"{'the next one' if kind.shift else 'that position'}",
            "starts from": f"`{facts['init']}`" if facts["init"] else "fresh weights",
            "training": f"{facts['optimizer']}, {loss}, float32 master weights"}
    own = {k: v for k, v in dataclasses.asdict(kind).items() if k != "mask"}
    publish(target, "-".join(filter(None, (options.preset, options.stage))), source.model, shipped, source.tokenizer,
            facts, special, {"diffusion": own}, introduction=TEXT.format(made=start) if text else PROBLEMS, rows=rows,
            tags=["diffusion"], language="code" if text else "en",
            figures=(text_figures if text else problem_figures)(facts) + LAYOUT.format(
                without="" if kind.attention == "causal-prefix" else ", which this model was not\ntrained with"))
    return shown(facts["held_out"])


def problem_figures(facts: Mapping[str, Any]) -> str:
    """Returns the accuracy on problems as Markdown."""
    table = markdown_table(("task", "", "right, one token a forward", "held-out problems"), [
        (task.name, task.summary, f"{facts['held_out'][task.name]:.1%}", str(facts["held_out_each"]))
        for task in problems.TASKS.values()])
    return f"""{table}

Right means the whole answer, greedily, the most confident token of the canvas a forward, by the shipped bfloat16
weights computed in float32. A problem is kept from training when the CRC-32 of its prompt is divisible by
{problems.HELD_OUT}; sudoku grids themselves, of which there are 288, are all seen in training, with other blanks."""


def text_figures(facts: Mapping[str, Any]) -> str:
    """Returns the bound on bits per byte as Markdown."""
    return f"""| | |
|---|---|
| held-out bits per byte, upper bound | {facts['held_out']['bits_per_byte']:.4f} |

The bound is that of the training loss, estimated with 4 noises a window on {facts['held_out_each']} windows, spread
evenly over the held-out files of `pycode`: their second halves, given the first."""
