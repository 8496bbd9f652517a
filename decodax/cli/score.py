"""The command `decodax score`: computes the log-probability of given texts. Imports JAX only when it runs."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

from decodax.cli.common import MODEL, UsageError, keep_programs, table, weight_format

EXAMPLES = """\
examples:
  decodax score *.py
  git show HEAD:module.py | decodax score - --model path/to/model
  decodax score sentences.txt --lines --json | jq '.texts[].perplexity'

Figures go to standard output. A text longer than the window is scored in pieces of that many tokens. Bits per byte
compare models with different tokenizers, perplexities do not.
"""


def add(commands: Any, common: argparse.ArgumentParser, exit_codes: str) -> None:
    """Adds the command to the subparsers `commands`. `common` has the arguments of all commands; `exit_codes` is text
    for the help."""
    p = commands.add_parser("score", parents=[common], help="log-probabilities of given texts",
                            formatter_class=argparse.RawDescriptionHelpFormatter, epilog=EXAMPLES + "\n" + exit_codes,
                            description="Scores texts: each file is one, or each line of it with --lines.")
    p.set_defaults(command=run)
    p.add_argument("files", nargs="+", metavar="FILE", help="UTF-8 text; - is standard input")
    p.add_argument("-m", "--model", default="pycode", metavar="NAME_OR_PATH", help=f"{MODEL} (default: pycode)")
    p.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="of activations, cache and weights")
    p.add_argument("--weights", metavar="FORMAT[:OPTION=VALUE,...]",
                   help="how the weights are kept and read, such as int8 or int4:group=32 (default: as --dtype, or as "
                        "a GGUF file has them)")
    p.add_argument("--lines", action="store_true", help="each line that is not blank is a text")
    p.add_argument("--window", type=int, metavar="N",
                   help="tokens that a prediction sees at most (default: as many as the model was made for)")
    p.add_argument("--batch-size", type=int, metavar="N", help="texts a batch (default: 8)")


def run(args: argparse.Namespace) -> None:
    """Prints the log-probability, perplexity and bits per byte of each text and of all texts together."""
    named = [text for file in args.files for text in _read(file, args.lines)]
    if not named:
        raise UsageError("FILE: there is no text in it")
    keep_programs()
    import decodax as dx

    lm = dx.load(args.model, dtype=args.dtype, weights=weight_format(args.weights))
    window = lm.model.trained_positions if args.window is None else args.window
    # a BOS token before the text lets its first token count
    texts: list[Any] = [text if lm.bos is None else ("", text) for _, text in named]
    try:
        found = dx.score(lm, texts, window=window, batch_size=args.batch_size, progress=sys.stderr.isatty())
    except ValueError as error:
        raise UsageError(re.sub(r"texts\[(\d+)\]", lambda found: named[int(found[1])][0], str(error))) from error
    assert found.bytes is not None
    rows = [{"name": name, **_figures(*figures)} for (name, _), *figures in
            zip(named, found.count.tolist(), found.sum.tolist(), found.bytes.tolist(), strict=True)]
    total = _figures(int(found.count.sum()), float(found.sum.sum()), int(found.bytes.sum()))
    if args.json:
        print(json.dumps({"model": args.model, "window": window, "texts": rows, "all": total}))
        return
    columns = {"tokens": "{:,}", "bytes": "{:,}", "logprob": "{:,.2f}", "perplexity": "{:,.3f}",
               "bits_per_byte": "{:.4f}"}
    cells = [[row["name"], *("" if row[key] is None else form.format(row[key]) for key, form in columns.items())]
             for row in [*rows, {"name": "all", **total}]]
    table(("text", "tokens", "bytes", "log-probability", "perplexity", "bits/byte"), cells, right=range(1, 6))


def _read(file: str, lines: bool) -> list[tuple[str, str]]:
    """Returns the texts in a file with their names: the whole file, or each line with `lines`."""
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8 text ({error})") from error
    if not lines:
        return [(file, text)] if text else []
    return [(f"{file}:{i}", line) for i, line in enumerate(text.splitlines(), 1) if line.strip()]


def _figures(tokens: int, logprob: float, size: int) -> dict[str, Any]:
    """Returns the figures of a text; None where a figure is not defined.

    Args:
        tokens: number of scored tokens.
        logprob: their log-probability, in nats.
        size: number of bytes.
    """
    sound = math.isfinite(logprob)
    return {"tokens": tokens, "bytes": size, "logprob": logprob if sound else None,
            "perplexity": math.exp(-logprob / tokens) if sound and tokens else None,
            "bits_per_byte": -logprob / math.log(2) / size if sound and size else None}
