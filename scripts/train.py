"""Trains the shipped models, and trains some of them further.

    python scripts/train.py lm --preset pycode          # a language model of Python, 75 minutes
    python scripts/train.py lm --preset pycode-draft --teacher models/zoo/pycode
    python scripts/train.py diffusion --preset tasks-diffusion
    python scripts/train.py recall                      # also sums, numerals
    python scripts/train.py drafter --system eagle-3 --target pycode
    python scripts/train.py tune --target path/to/model --data pairs.jsonl --objective layerskip
    python scripts/train.py grpo --lora 8

A killed run continues where it stopped when the same command is given again. A finished one leaves a directory for
`decodax.load` with a model card, which has the command that repeats it. `train.py NAME --help` lists the options.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib

import commands
from commands import Command, field_options
from recipes.options import PRESETS, GrpoOptions, from_arguments, options_of

TEXTS = {
    "lm": "language models of Python, with distillation from a teacher",
    "diffusion": "masked diffusion models, certainty forcing and filters for Learn2PD",
    "drafter": "drafters for speculative decoding: Medusa, Hydra, EAGLE and others, beside the target or with it",
    "tune": "any model further, on your texts: for next tokens, early exits or parallel decoding, or heads beside it",
    "recall": "the long-context model that cache policies are measured on",
    "sums": "the model that works out sums, which searches are measured on",
    "numerals": "the Markov transformer for cascaded decoding",
}
RECIPES = {name: Command(text, **field_options(options_of(name))) for name, text in TEXTS.items()}
for name in ("lm", "diffusion"):
    RECIPES[name].options["preset"]["choices"] = tuple(PRESETS[name])
RECIPES["grpo"] = Command("`sums` by policy gradients, sampled by decodax",
                          **field_options(dataclasses.fields(GrpoOptions)))


def parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    return commands.parser(__doc__, RECIPES, {}, "Trains")


def call(args: argparse.Namespace) -> None:
    """Runs a recipe with the arguments of the command line."""
    if args.command in PRESETS:
        importlib.import_module("recipes.run").main(from_arguments(args))
    else:
        given = {k: v for k, v in vars(args).items() if k != "command"}
        importlib.import_module("recipes.grpo").train(GrpoOptions(**given))


def main(argv: list[str] | None = None) -> int:
    """Runs a command line and returns the exit status."""
    return commands.run("train.py", parser().parse_args(argv), call)


if __name__ == "__main__":
    raise SystemExit(main())
