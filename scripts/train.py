"""Trains the shipped models, and trains some of them further.

    python scripts/train.py lm --preset pycode          # a language model of Python, 75 minutes
    python scripts/train.py lm --preset pycode-draft --teacher models/zoo/pycode
    python scripts/train.py diffusion --preset tasks-diffusion
    python scripts/train.py recall                      # also sums, numerals
    python scripts/train.py grpo --lora 8

A killed run continues where it stopped when the same command is given again. A finished one leaves a directory for
`decodax.load` with a model card, which has the command that repeats it. `train.py NAME --help` lists the options.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import sys
from pathlib import Path

from recipes.options import PRESETS, GrpoOptions, add_options, from_arguments, options_of

RECIPES = {
    "lm": "language models of Python, with distillation from a teacher",
    "diffusion": "masked diffusion models, certainty forcing and filters for Learn2PD",
    "recall": "the long-context model that cache policies are measured on",
    "sums": "the model that works out sums, which searches are measured on",
    "numerals": "the Markov transformer for cascaded decoding",
    "grpo": "policy gradients on `sums`, sampled by decodax",
    "linearize": "distillation of a model into linear attention",
    "selection": "training data: the best of many samples by a rule",
}


def parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = p.add_subparsers(dest="command", required=True, metavar="NAME")
    made = {name: commands.add_parser(name, help=text, description=f"Trains {text}." if name in PRESETS else
                                      f"{text[0].upper()}{text[1:]}.") for name, text in RECIPES.items()}
    for name in PRESETS:
        add_options(made[name], options_of(name), name)
    add_options(made["grpo"], dataclasses.fields(GrpoOptions))

    one = made["linearize"].add_argument
    one("--model", default="pycode", help="name or directory (default: pycode)")
    one("--layers", type=int, nargs="+", default=[0, 2], help="layers that get linear attention (default: 0 2)")
    for name, default, text in (("group", 64, "tokens of a block"), ("kernel", 63, "width of the convolution"),
                                ("size", 512, "tokens of a text"), ("batch", 4, "texts of a step"),
                                ("steps", 150, "number of steps"), ("texts", 64, "held-out texts"),
                                ("seed", 0, "seed of the order of texts")):
        one(f"--{name}", type=int, default=default, help=f"{text} (default: {default})")
    one("--rate", type=float, default=1e-3, help="highest learning rate (default: 0.001)")

    one = made["selection"].add_argument
    one("model", help="name or directory of the model that is trained, or of a teacher")
    one("prompts", type=Path, help='one a line, or JSON Lines with "prompt"')
    one("out", type=Path, help="JSON Lines with prompt, completion and score")
    one("--rule", default="mbr", help="rule of `decodax list searches` (default: mbr)")
    one("--n", type=int, default=32, help="samples of a prompt (default: 32)")
    one("--options", type=Path, metavar="FILE", help="Python file with a dictionary OPTIONS for the rule")
    one("--temperature", type=float, default=1.0, help="of the samples (default: 1)")
    one("--epsilon", type=float, default=0.02, help="tokens with less probability are left out (default: 0.02)")
    one("--max-new-tokens", type=int, default=64, help="tokens of an answer (default: 64)")
    one("--batch", type=int, default=16, help="prompts at a time (default: 16)")
    one("--seed", type=int, default=0, help="seed of the samples (default: 0)")
    return p


def main(argv: list[str] | None = None) -> int:
    """Runs a command line and returns the exit status."""
    args = parser().parse_args(argv)
    try:
        if args.command in PRESETS:
            options = from_arguments(args)
            importlib.import_module("recipes.run").main(options)
            return 0
        given = args
        if args.command == "grpo":
            given = GrpoOptions(**{k: v for k, v in vars(args).items() if k != "command"})
        importlib.import_module(f"recipes.{args.command}").main(given)
    except (ValueError, FileNotFoundError, FloatingPointError) as error:
        print(f"train.py {args.command}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
