"""What formats of weights lose: the perplexity of a text against that of the model's own weights.

The text is cut into pieces of `--window` tokens, each scored from its first token on, and the loss of a format is the
mean over pieces of their difference in nats a token, with the standard error of this mean. Differences are paired, so
that it is small against the spread of the pieces themselves.
"""

from __future__ import annotations

import argparse
import math

import jax
import numpy as np

import decodax as dx
from decodax.bench.figures import reporting, show_table


def nats(model: str, weights: str | None, text: str, window: int, pieces: int) -> np.ndarray:
    """Returns `f64[pieces]`, the mean negative log-probability of a token in each piece.

    Raises:
        ValueError: the text is shorter than the pieces.
    """
    lm = dx.load(model, weights=weights)
    if lm.tokenizer is None:
        raise ValueError(f"--model: {lm.name} has no tokenizer")
    ids = lm.tokenizer.encode(text)
    if len(ids) < pieces * window:
        raise ValueError(f"--text: got {len(ids)} tokens, takes {pieces} pieces of {window}")
    scores = dx.score(lm, [ids[i * window:(i + 1) * window] for i in range(pieces)])
    return -scores.mean


def main(args: argparse.Namespace) -> None:
    """Measures each format and prints a table."""
    if args.pieces < 2 or args.window < 2:
        raise ValueError(f"--pieces: got {args.pieces} of {args.window} tokens, takes at least 2 of at least 2")
    text = args.text.read_text(encoding="utf-8")
    measure = lambda weights: nats(args.model, weights, text, args.window, args.pieces)
    with reporting() as report:
        report(0, len(args.formats) + 1, "its own")
        whole = measure(None)
        rows = [("its own", f"{math.exp(whole.mean()):.2f}", "")]
        for i, weights in enumerate(args.formats, 1):
            report(i, len(args.formats) + 1, weights)
            loss = measure(weights) - whole
            spread = loss.std(ddof=1) / math.sqrt(args.pieces)
            rows.append((weights, f"{math.exp((whole + loss).mean()):.2f}", f"{loss.mean():+.4f} ± {spread:.4f}"))
    print(f"    {args.line}\n" if args.markdown else "")
    show_table(("weights", "perplexity", "nats a token"), rows, f"{args.pieces} pieces of {args.window} tokens; JAX "
               f"{jax.__version__}", args.markdown)
