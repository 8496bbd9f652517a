"""The arguments of the command line and their help; `decodax.cli.commands` runs the commands. Imports no JAX."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from decodax import __version__
from decodax.cli import batch, evaluation, generation, listing, planning, quantize, score
from decodax.cli.common import DRAFT, MODEL, Parser

Command = Callable[[argparse.Namespace], None]

EXAMPLES = """\
examples:
  decodax generate "def fibonacci(n):"
  decodax generate "def fibonacci(n):" --temperature 0.8 --top-p 0.95 --seed 1 --num-samples 3
  decodax generate --file module.py --algorithm prompt-lookup --max-new-tokens 200
  git diff | decodax generate --model path/to/model --stop $'\\n\\n' --json | jq -r '.text[0]'
  decodax generate "What is a monad?" --chat --model path/to/chat-model

The text goes to standard output as it is made, figures and errors go to standard error.
"""

COMPARE_EXAMPLES = """\
examples:
  decodax compare prompt-lookup token-recycling
  decodax compare prompt-lookup:length=3 prompt-lookup:length=10 --task copy-edit --batch 1 8 32
  decodax compare prompt-lookup --on v5e:2x4 --as llama-3-8b
  decodax compare prompt-lookup eagle-3 --batch 1 --on v5e:2x4 --as llama-3-8b --at 1 64 256
  decodax compare all --model DIR --questions question.jsonl --batch 1 --prompts 80 --new-tokens 1024
  decodax compare all --model path/to/model --draft path/to/small-model --plot out.png --json out.json

The table goes to standard output, progress to standard error. Ctrl-C ends it with the table of what was measured.
"""

EXIT_CODES = """\
exit codes: 0 done; 1 failed (a model that cannot be loaded, a file that cannot be read, ...); 2 wrong usage (an unknown
flag, a value out of its range); 130 interrupted. A reader that closes the pipe early ends the command quietly, with 0.
"""

TASKS = ("copy-edit", "completion", "sampled")


def parser(generate: Command, compare: Command, info: Command) -> argparse.ArgumentParser:
    """Returns the argument parser of the `decodax` command. The arguments are the functions that run the subcommands
    `generate`, `compare` and `info`; those of the other subcommands are imported."""
    debug = Parser(add_help=False)
    debug.add_argument("--debug", action="store_true", help="show the traceback of an error")
    common = Parser(add_help=False, parents=[debug])
    common.add_argument("--json", action="store_true", help="print one JSON object")

    manual: Any = {"epilog": EXAMPLES + "\n" + EXIT_CODES, "formatter_class": argparse.RawDescriptionHelpFormatter}

    top = Parser(prog="decodax", description="Decoding for JAX.", **manual)
    top.add_argument("--version", action="version", version=f"decodax {__version__}")
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")

    p = commands.add_parser("generate", parents=[common], help="continue a prompt", **manual,
                            usage="decodax generate [OPTION ...] [PROMPT]",
                            description="Continues a prompt: an argument, a file, or standard input.")
    p.set_defaults(command=generate)
    p.add_argument("prompt", nargs="?", metavar="PROMPT", help="the text; without it --file or standard input")
    p.add_argument("-f", "--file", metavar="PATH", help="read the prompt from a file, - is standard input")
    p.add_argument("--source", metavar="TEXT",
                   help="what an encoder-decoder reads; PROMPT is what its answer begins with, by default nothing")
    generation.add_language(p)
    generation.add_model(p)
    p.add_argument("--chat", action="store_true", help="the prompt is a user's message; use the model's chat template")
    p.add_argument("--system", metavar="TEXT", help="a system message for --chat")
    p.add_argument("--echo", action="store_true", help="print the prompt before its continuation")
    p.add_argument("--quiet", action="store_true", help="no line with figures")

    generation.add(p)
    p.add_argument("--search", metavar="NAME[:OPTION=VALUE,...]", help="a search of `decodax list searches`")
    p.add_argument("--select", metavar="NAME[:OPTION=VALUE,...]",
                   help="the rule that takes one of --num-samples texts, from `decodax list selects`")
    p.add_argument("--context", metavar="PATH",
                   help="a file with the text in front of the prompt, from which the policy chooses before it sees the "
                        "prompt")

    listing.add(commands, [common], listing.run, EXIT_CODES)

    p = commands.add_parser("compare", parents=[debug], help="systems against plain decoding, side by side",
                            formatter_class=argparse.RawDescriptionHelpFormatter,
                            epilog=COMPARE_EXAMPLES + "\n" + EXIT_CODES,
                            description="Runs decoding systems and plain decoding in turn on the same prompts.")
    p.set_defaults(command=compare)
    p.add_argument("names", nargs="+", metavar="NAME[:OPTION=VALUE,...]",
                   help="methods, see decodax list algorithms; all: every one that needs no samples")
    p.add_argument("-m", "--model", default="pycode", metavar="NAME_OR_PATH", help=f"{MODEL} (default: pycode)")
    p.add_argument("--draft", nargs="+", default=[DRAFT], metavar="NAME_OR_PATH",
                   help=f"the smaller model, for systems that need one: {MODEL} (default: {DRAFT}); and any number of "
                   "trained drafters, each for the system that it was trained for (default: the shipped ones)")
    p.add_argument("--weights", metavar="FORMAT",
                   help="how the model's weights are kept and read, such as int8 (default: as its files)")
    p.add_argument("--draft-weights", metavar="FORMAT", help="the same of trained drafters (default: arrays)")
    asked = p.add_mutually_exclusive_group()
    asked.add_argument("--task", nargs="+", choices=[*TASKS, "all"], default=["all"],
                       help="copy-edit: a function, then its first half again, greedy; completion: held-out functions, "
                            "greedy; sampled: the same, sampled (default: all)")
    asked.add_argument("--questions", metavar="FILE",
                       help="instead: questions of Spec-Bench's or SPEED-Bench's form, as question.jsonl; a task for "
                            "each category")
    p.add_argument("--temperature", type=float, metavar="T",
                   help="of the task sampled (default: 0.8) and of questions (default: 0, greedy)")
    p.add_argument("--top-p", type=float, metavar="P",
                   help="of the task sampled (default: 0.95) and of questions (default: all tokens)")
    p.add_argument("--batch", nargs="+", type=int, default=[1, 8], metavar="N", help="batch sizes (default: 1 8)")
    p.add_argument("--prompts", type=int, default=8, metavar="N",
                   help="prompts for each batch size, in whole batches (default: 8)")
    p.add_argument("-n", "--new-tokens", type=int, default=128, metavar="N", help="for each prompt (default: 128)")
    p.add_argument("--repeats", type=int, default=5, metavar="N", help="timed runs of each (default: 5)")
    p.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and sampling (default: 0)")
    p.add_argument("--on", metavar="SLICE", help="also predict speedups on this slice, such as v5e:2x4 (see plan)")
    p.add_argument("--as", dest="as_model", metavar="PRESET_OR_PATH", default="llama-3-8b",
                   help="the model that --on predicts for (default: llama-3-8b)")
    p.add_argument("--capacity", type=int, default=4096, metavar="N", help="tokens of a row there (default: 4096)")
    p.add_argument("--at", nargs="+", type=int, metavar="N",
                   help="instead: predict on SLICE which draft length pays at these batch sizes, if any, by the costs "
                        "that XLA's compiler for TPUs reports; --plot draws that")
    p.add_argument("--no-compile", action="store_true", help="with --at: count the costs from shapes, in seconds")
    p.add_argument("--plot", metavar="FILE", help="draw speedup and mean accepted length, as PNG, SVG or PDF")
    p.add_argument("--json", metavar="FILE",
                   help="write every figure and time, after each task and batch size")
    p.add_argument("--resume", action="store_true",
                   help="go on from --json FILE: measure the tasks and batch sizes that it lacks")
    p.add_argument("--markdown", action="store_true", help="print tables in Markdown, with the command")

    p = commands.add_parser("info", parents=[common], help="versions, devices, models, caches", epilog=EXIT_CODES,
                            description="Says what this installation has to work with.")
    p.set_defaults(command=info)

    batch.add(commands, debug, EXIT_CODES)
    score.add(commands, common, EXIT_CODES)
    evaluation.add(commands, common, EXIT_CODES)
    planning.add(commands, common, EXIT_CODES)
    quantize.add(commands, common, EXIT_CODES)
    return top
