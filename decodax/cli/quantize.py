"""The command `decodax quantize`: packs the weights of a model and writes it to a directory. Imports JAX only when it
runs."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from decodax.cli.common import MODEL, UsageError, naming_the_argument

EXAMPLES = """\
examples:
  decodax quantize pycode pycode-int8 --weights int8
  decodax quantize path/to/model out --weights int4:group=32
  decodax quantize model.gguf out --weights int8
  decodax generate --model out "def area(r):"

Texts that a format is to go by are of the kind that the model will see; one file is one text.
"""


def add(commands: Any, common: argparse.ArgumentParser, exit_codes: str) -> None:
    """Adds the command to the subparsers `commands`. `common` has the arguments of all commands; `exit_codes` is text
    for the help."""
    p = commands.add_parser("quantize", parents=[common], help="write a model with weights in fewer bits",
                            formatter_class=argparse.RawDescriptionHelpFormatter, epilog=EXAMPLES + "\n" + exit_codes,
                            description="Packs the kernels of a model and writes it for decodax.load, with tokenizer.")
    p.set_defaults(command=run)
    p.add_argument("model", metavar="NAME_OR_PATH", help=MODEL)
    p.add_argument("out", metavar="OUT", help="the directory to write")
    p.add_argument("-w", "--weights", required=True, metavar="FORMAT[:OPTION=VALUE,...]",
                   help="a format of decodax.models.formats.FORMATS, such as int8 or int4:group=32")
    p.add_argument("--data", nargs="+", metavar="FILE", help="UTF-8 texts, for formats that go by them")
    p.add_argument("--length", type=int, default=512, metavar="N", help="tokens of a sequence of them (default: 512)")
    p.add_argument("--sequences", type=int, default=128, metavar="N", help="sequences at most (default: 128)")
    p.add_argument("--dtype", choices=["float32", "bfloat16", "float16"],
                   help="of the weights that are not packed (default: as the model's files)")
    p.add_argument("--force", action="store_true", help="write into a directory that is not empty")


def run(args: argparse.Namespace) -> None:
    """Packs the weights, writes the directory, and prints sizes and time."""
    out = Path(args.out)
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not args.force)):
        raise UsageError(f"OUT: {out} is {'not empty' if out.is_dir() else 'no directory'}"
                         + ("; --force writes into it" if out.is_dir() else ""))
    try:
        data = None if args.data is None else [Path(file).read_text(encoding="utf-8") for file in args.data]
    except UnicodeDecodeError as error:
        raise ValueError(f"--data: not UTF-8 text ({error})") from error
    import decodax as dx
    from decodax.io.load import find
    from decodax.models.formats import read_format

    with naming_the_argument():
        own = read_format(args.weights)
    assert own is not None      # only None is read as None
    lm = dx.load(args.model, dtype="float32")
    with naming_the_argument():
        made = dx.quantize(lm, own, data, length=args.length, sequences=args.sequences, progress=sys.stderr.isatty())
    dx.save(made, out, dtype=args.dtype or _dtype(lm.directory))
    size = lambda path: sum(file.stat().st_size for file in ([path] if path.is_file() else path.glob("*.safetensors")))
    figures = {"out": str(out), "weights": args.weights, "bytes": size(out), "before": size(find(args.model))}
    if args.json:
        print(json.dumps(figures))
        return
    print(f"{out}: {figures['bytes'] / 1e6:,.1f} MB in {args.weights}, {figures['before'] / 1e6:,.1f} MB before")


def _dtype(directory: Path | None) -> str:
    """Returns the dtype of most tensors of a model directory."""
    from decodax.io.checkpoint import DTYPES
    from decodax.io.files import Files

    if directory is None:
        return "float32"
    files = Files(directory)
    kinds = [files.slice(name).get_dtype() for name in files.home]
    return DTYPES.get(max(set(kinds), key=kinds.count), "float32")
