"""Language models of Python: `pycode`, and `pycode-draft`, which is distilled from it.

A Llama-shaped decoder on the source of the standard library. The plateau uses short windows and the decay the whole
context; a teacher gives a draft model the distribution that speculative decoding compares it with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from tokenizers import Tokenizer

from decodax.io.checkpoint import load_model
from decodax.models import Transformer, llama
from decodax.train import corpus
from decodax.train.export import publish
from decodax.train.language_model import NextTokens, bits_per_byte, overlap, token_bytes, token_losses
from decodax.train.loop import TrainingRun, place_batch
from recipes.options import Options
from recipes.run import Recipe

EVAL_WINDOWS = 96
"""Held-out windows of an evaluation on the way."""

INTRODUCTION = """A Llama-shaped language model for Python source, small enough to ship with decodax and to run on any
CPU. It is made for demonstrations, tests and comparisons of decoding methods; it writes plausible Python, not correct
programs."""

FIGURES = """**Held-out files.** A source file is kept from the training of the weights and of the tokenizer when the
SHA-256 of its path inside the standard library directory (with `/` separators), read as a number, is divisible by
{modulus}. The bits per byte are those of the shipped bfloat16 weights, computed in float32 over all held-out files: the
summed negative log2-probability of the tokens, end-of-text included, over the UTF-8 bytes of text, in half-overlapping
windows of the whole context. Generated tables, bundled packages and deliberately broken test files are not part of the
data (`decodax/train/corpus.py`).

**Tokenizer.** Byte-level BPE of {vocab} tokens trained on the training files. Any text round-trips. `<|endoftext|>`
separates files and serves as BOS, EOS and padding; it is not added to a prompt. A line break and the indentation after
it are one token, so a prompt should end before the line break (`def f(n):`) or after the indentation, not between them.
"""


def batch_shape(options: Options, context: int, decaying: bool) -> tuple[int, int]:
    """Returns (windows, tokens of a window) of a step: the decay uses the whole context, with as many tokens."""
    batch, length = options.batch or 1, min(options.length or context, context)
    return (max(1, batch * length // context), context) if decaying else (batch, length)


def tokenizer_of(options: Options, documents: list[corpus.Document]) -> Tokenizer:
    """Returns the teacher's tokenizer, that of the run to resume, or a new one, and saves it with the run."""
    kept = options.output / "tokenizer.json"
    if options.teacher is None and options.resume and kept.is_file():
        return Tokenizer.from_file(str(kept))
    tokenizer = corpus.train_tokenizer(documents, options.settings.vocab) if options.teacher is None else \
        Tokenizer.from_file(str(Path(options.teacher) / "tokenizer.json"))
    tokenizer.save(str(kept))
    return tokenizer


def recipe(options: Options, mesh: jax.sharding.Mesh, console: Console) -> Recipe:
    """Returns the recipe for `recipes.run.train`."""
    documents, kept = corpus.load_corpus(options.corpus)
    tokenizer = tokenizer_of(options, documents)
    stream, held = corpus.pack(tokenizer, documents), corpus.pack(tokenizer, kept)
    model = Transformer(llama(vocab=tokenizer.get_vocab_size(), tied=True, **options.settings.shape))
    context, ways, shardings = model.config.context, mesh.shape["data"], model.shardings(mesh)
    if any(batch_shape(options, context, decaying)[0] % ways for decaying in (False, True)):
        raise ValueError(f"batch: got {options.batch}, which gives steps that do not divide among the {ways} devices")
    def frozen(path: str | None) -> tuple[Transformer | None, Any]:
        if path is None:
            return None, None
        network, weights = load_model(path, dtype="float32")
        return network, jax.device_put(weights, network.shardings(mesh))

    (teacher, guide), (reference, learned) = frozen(options.teacher), frozen(options.reference)

    def batch(run: TrainingRun) -> np.ndarray:
        # the decay reads the data from the start again, in another order
        seed, since = (options.seed + 1, run.schedule.decay_from or 0) if run.decaying else (options.seed, 0)
        return corpus.Batches(stream, *batch_shape(options, context, run.decaying), seed)[run.step - since]

    def measure(params: Any, length: int, limit: int | None) -> float:
        losses = lambda window: np.asarray(token_losses(model, params, place_batch(window, mesh)))
        return bits_per_byte(losses, held, token_bytes(tokenizer), length, 8 * ways, limit)

    loss = NextTokens(model, options.dtype, teacher, options.mix, reference, options.keep)
    # positions beyond the plateau's windows are untrained until the decay
    evaluate = lambda params, run: {
        "bits_per_byte": measure(params, batch_shape(options, context, run.decaying)[1], EVAL_WINDOWS)}

    def finish(target: Path, shipped: Any, exact: Any, facts: dict[str, Any]) -> str:
        bits = measure(exact, context, None)
        data = corpus.corpus_name() if options.corpus is None else f"the .py files of {options.corpus.name}"
        name = Path(options.teacher).name if options.teacher else None
        facts |= {"data": data, "held_out_bits_per_byte": round(bits, 4), "teacher": name}
        rows = {"training data": data, "training": "AdamW, cross-entropy, float32 master weights",
                "held-out bits per byte": f"{bits:.4f}"}
        if teacher is not None:
            window = place_batch(corpus.Batches(held, 8 * ways, context)[0], mesh)
            facts["acceptance"] = round(float(overlap(teacher, model, guide, exact, window).mean()), 4)
            where = "" if options.reference is None else f" on the {options.keep:.0%} of the tokens that can be learned"
            far = "KL" if loss.share == 1 else "KL and cross-entropy"
            rows["training"] = f"AdamW, distilled from `{name}` ({far}){where}, float32 master weights"
            rows[f"drafts that `{name}` accepts"] = f"{facts['acceptance']:.1%}, held-out, temperature 1"
        publish(target, options.preset, model, shipped, tokenizer, facts,
                dict.fromkeys(("bos_token", "eos_token", "pad_token"), corpus.END_OF_TEXT), introduction=INTRODUCTION,
                rows=rows, tags=["python"], language="code",
                figures=FIGURES.format(modulus=corpus.HELD_OUT_MODULUS, vocab=model.config.vocab))
        return f"{bits:.4f} held-out bits per byte"

    # windows of the whole context take about a fifth longer for the same number of tokens
    return Recipe(
        model.init_params(jax.random.key(options.seed)), loss, batch, lambda batch: batch[:, 1:].size, evaluate, finish,
        extra=lambda run: (guide, learned), shardings=shardings, decay_pace=1.2)
