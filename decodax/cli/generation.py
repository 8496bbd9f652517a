"""The arguments of the commands that generate text. Imports no JAX."""

from __future__ import annotations

import argparse
import json
import pathlib
import reprlib
from typing import TYPE_CHECKING, Any

from decodax.cli.common import DRAFT, MODEL, UsageError, naming_the_argument, weight_format
from decodax.common.table import ARGUMENTS

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from decodax.common.registry import Entry
    from decodax.core.algorithm import Algorithm
    from decodax.io.load import LM

# name of the GenerationConfig field, its type, what it does
SAMPLING = [(name, *own.flag) for name, own in ARGUMENTS.items() if own.flag is not None]
"""Name, type and help text of the sampling options that have flags of their own."""


def add_model(p: argparse.ArgumentParser) -> None:
    """Adds the arguments that choose the model, its dtype and its weight format."""
    p.add_argument("-m", "--model", default="pycode", metavar="NAME_OR_PATH", help=f"{MODEL} (default: pycode)")
    p.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="of activations, cache and weights")
    p.add_argument("--adapter", metavar="DIR", help="an adapter in peft's layout")
    p.add_argument("--weights", metavar="FORMAT[:OPTION=VALUE,...]",
                   help="how the weights are kept and read, such as int8 or int4:group=32 (default: as --dtype, or as "
                        "a GGUF file has them)")


def add(p: argparse.ArgumentParser) -> None:
    """Adds the arguments for the length of texts, their sampling and the decoding method."""
    g = p.add_argument_group("length and number")
    g.add_argument("-n", "--max-new-tokens", type=int, metavar="N", help="default: the model's own, or 64")
    g.add_argument("--min-new-tokens", type=int, metavar="N",
                   help="no end of text or stop string before it; default: the model's own, or 0")
    g.add_argument("--max-time", type=float, metavar="SECONDS", help="end after about this many seconds")
    g.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be given several times")
    g.add_argument("--include-stop", action="store_true", help="let the text end after the stop string, not before it")
    g.add_argument("--special-tokens", action="store_true", help="show special tokens, such as the end of text")
    g.add_argument("--num-samples", type=int, metavar="N",
                   help="continuations of the prompt; default: the model's own, or 1")
    g.add_argument("--seed", type=int, default=0, metavar="N",
                   help="addresses every draw, from 0 to 2**64 - 1 (default: 0)")
    g.add_argument("--logprobs", type=int, metavar="N", help="log-probabilities, with the top N; generate takes --json")

    g = p.add_argument_group("sampling", "Named as in Hugging Face's GenerationConfig. Without any of them: the\n"
                             "model's generation_config.json, or greedy.")
    for name, kind, text in SAMPLING:
        g.add_argument(flag(name), type=kind, metavar="N" if kind is int else "X", help=text)
    g.add_argument("--set", action="append", default=[], metavar="NAME=VALUE",
                   help="any other argument of decodax.generate, as JSON; may be given several times")

    g = p.add_argument_group("beams")
    g.add_argument("--num-beams", type=int, metavar="N", help="beam search with so many beams; default: 1, none")
    g.add_argument("--length-penalty", type=float, metavar="X",
                   help="power of the length by which a text's log-probability is divided (default: 1)")
    g.add_argument("--early-stopping", choices=["true", "false", "never"],
                   help="when the search is over: with as many texts as beams, once no beam is better now, or once\n"
                        "none can be better at any length (default: false)")

    g = p.add_argument_group("constraints", "The text is held to a language; one of them.")
    g.add_argument("--constraint", metavar="NAME:VALUE",
                   help="a constraint of `decodax list constraints`, such as regex:[0-9]+, choices:yes,no or\n"
                        "json-schema:schema.json")
    g.add_argument("--regex", metavar="PATTERN", help="a regular expression that the whole text matches")
    g.add_argument("--json-schema", metavar="FILE_OR_JSON", help="a JSON Schema under which the text is valid")
    g.add_argument("--grammar", metavar="FILE_OR_TEXT", help="a grammar in the notation of Lark, with a rule start")
    g.add_argument("--choice", action="append", metavar="TEXT", help="one of these; may be given several times")

    g = p.add_argument_group("algorithm")
    g.add_argument("-a", "--algorithm", metavar="NAME[:OPTION=VALUE,...]",
                   help="a method of `decodax list`, such as prompt-lookup:length=5; default: plain decoding, or a "
                        "position a round where the model fills masks")
    g.add_argument("--draft", default=DRAFT, metavar="NAME_OR_PATH",
                   help=f"the draft model, for systems that need one: {MODEL} (default: {DRAFT});\n"
                        "or the directory of a trained drafter (default: the shipped one)")
    g.add_argument("--cache", metavar="NAME[:OPTION=VALUE,...]",
                   help="what the cache keeps, a policy of `decodax list caches` such as snapkv:budget=512; default: "
                        "everything")


def add_language(p: Any) -> None:
    """Adds the argument for the language of the sources of an encoder-decoder."""
    p.add_argument("--source-language", metavar="TOKEN",
                   help="token of the source's language, such as deu_Latn (default: as the tokenizer was saved)")


def sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the sampling options that were given, as arguments of `decodax.generate`."""
    named = [name for name, *_ in SAMPLING] + ["num_beams", "length_penalty", "regex"]
    options = {name: getattr(args, name) for name in named if getattr(args, name) is not None}
    if args.constraint is not None:
        options["constraint"] = args.constraint
    if args.early_stopping is not None:
        options["early_stopping"] = {"true": True, "false": False}.get(args.early_stopping, args.early_stopping)
    if args.choice is not None:
        options["choices"] = args.choice
    if args.json_schema is not None:
        options["json_schema"] = _schema(args.json_schema)
    if args.grammar is not None:
        options["grammar"] = _grammar(args.grammar)
    for item in args.set:
        name, equals, value = item.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f"--set: got {reprlib.repr(item)}, takes NAME=VALUE")
        own = "special_tokens" if name == "skip_special_tokens" else name
        if name in options or own in vars(args).keys() - {name for name, *_ in SAMPLING}:
            raise UsageError(f"--set: got {reprlib.repr(item)}; {flag(own)} is where that goes, once")
        try:
            options[name] = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"--set {name}: got {reprlib.repr(value)}, takes a JSON value ({error})") from error
    return options


def _schema(given: str) -> Any:
    """Returns the JSON schema in `given`, which is JSON or the name of a file."""
    try:
        text = given if given.lstrip().startswith("{") else pathlib.Path(given).read_text(encoding="utf-8")
        return json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"--json-schema: got {reprlib.repr(given)}, takes JSON or a file of it ({error})") from error


def _grammar(given: str) -> str:
    """Returns the grammar in `given`, which is its text or the name of a file."""
    if ":" in given and not pathlib.Path(given).is_file():
        return given
    try:
        return pathlib.Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"--grammar: got {reprlib.repr(given)}, takes a grammar or a file of one ({error})") from error


def load(args: argparse.Namespace, mesh: Mesh | None = None) -> tuple[LM, Algorithm | None]:
    """Loads the model, placed on `mesh` if there is one, and the algorithm that was chosen by name, or None."""
    import decodax as dx
    from decodax.common.registry import ALGORITHMS

    with naming_the_argument():
        named = ALGORITHMS.read(args.algorithm) if args.algorithm else None
    lm = dx.load(args.model, dtype=args.dtype, weights=weight_format(args.weights), adapter=args.adapter, mesh=mesh)
    if named is None:
        return lm, None
    with naming_the_argument():
        return lm, named.build(lm, draft_of(named.entry, args.draft, lm, mesh))


def draft_of(entry: Entry, given: str, lm: LM, mesh: Mesh | None = None) -> Any:
    """Returns what the method `entry` drafts with: a draft model or a trained drafter for `lm`, loaded from `given`,
    the argument of `--draft`. None if the method takes none, or if `given` is the default and the method uses its
    shipped drafter."""
    import decodax as dx
    from decodax.io.drafters import holds_drafter

    if (given == DRAFT and not entry.takes_draft) or not entry.may_draft:
        return None
    trained = entry.takes_drafter or holds_drafter(given)
    return dx.load_drafter(given, lm) if trained else dx.load(given, mesh=mesh)


def flag(name: str) -> str:
    """Returns the command-line flag of a sampling option."""
    return "--" + name.replace("_", "-")
