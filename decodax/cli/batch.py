"""The command `decodax batch`: answers prompts from a file and writes the answers to a directory. Imports JAX only when
it runs."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from decodax.cli import generation
from decodax.cli.common import UsageError, keep_programs, mesh_shape, naming_the_argument
from decodax.common.progress import compiling

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax.sharding import Mesh

    from decodax.jobs import JobProgress

EXAMPLES = """\
examples:
  decodax batch --input prompts.jsonl --output out/
  decodax batch --input openai.jsonl --output out/ --model path/to/chat-model --batch-size 64
  decodax batch --input questions.parquet --prompt-field question --chat --keep label --format parquet --output out/ \\
      --model path/to/chat-model --algorithm prompt-lookup --temperature 0.7 --num-samples 4

A line is an object with a prompt (`prompt`, `text`, or `messages`) and if you like an `id` and `options` of its own; a
text alone; or a request to OpenAI's API with its `custom_id`. For an encoder-decoder it has a `source`, and the prompt
is what the answer begins with, by default nothing. Results go to part-000-00000.jsonl and so on, lines that failed to
_errors-000.jsonl. While the command runs, the results of the part at hand stand in a hidden file, .part-000-00000.log,
one line of JSON each as soon as it is there; it gets its name when the part is full or the command ends. Interrupted or
killed, the same command goes on where it was.
"""

EXIT = """\
exit codes: 0 all lines are answered; 1 some failed, or the job did (a full disk, a model that cannot be loaded, ...); 2
wrong usage; 130 interrupted. What is finished is kept in any case.
"""

EVERY = 30
"""Seconds between two lines of progress if standard error is not a terminal."""


def add(commands: Any, common: argparse.ArgumentParser, exit_codes: str) -> None:
    """Adds the command to the subparsers `commands`. `common` has the arguments of all commands; `exit_codes` is text
    for the help."""
    p = commands.add_parser("batch", parents=[common], help="answer every line of a file, and go on if killed",
                            formatter_class=argparse.RawDescriptionHelpFormatter, epilog=EXAMPLES + "\n" + EXIT,
                            description="Answers the prompts of a file, and keeps the answers in a directory.")
    p.set_defaults(command=run)
    p.add_argument("-i", "--input", required=True, metavar="PATH",
                   help="JSON lines, a Parquet file or a directory of them, a dataset's directory (datasets."
                        "save_to_disk); - is standard input")
    p.add_argument("-o", "--output", required=True, metavar="DIR", help="where results go; made if it is not there")
    generation.add_model(p)
    p.add_argument("--batch-size", type=int, default=16, metavar="N", help="prompts at once (default: 16)")
    p.add_argument("--mesh", metavar="DATAxMODEL",
                   help="lay model and prompts over devices of this process: DATA replicas of MODEL devices each; "
                        "DATAxMODELxEXPERT also divides whole experts of a mixture")
    p.add_argument("--memory", metavar="SIZE",
                   help="bytes for caches, drafts and logits, such as 8GB: fewer prompts at once if they take more")
    p.add_argument("--token-budget", type=int, metavar="N",
                   help="tokens of a round: prompts are read in the rounds of others, as far as it goes")
    p.add_argument("--format", choices=["jsonl", "parquet"], default="jsonl", help="of results (default: jsonl)")
    p.add_argument("--part-lines", type=int, default=10_000, metavar="N", help="results of a file (default: 10000)")
    p.add_argument("--tokens", action="store_true", help="results have token ids, too")
    p.add_argument("--quiet", action="store_true", help="no progress")

    g = p.add_argument_group("fields of a line")
    g.add_argument("--prompt-field", metavar="NAME", help="of the prompt (default: messages, prompt or text)")
    g.add_argument("--id-field", default="id", metavar="NAME",
                   help="of the id, which addresses the randomness (default: id; without one its number)")
    g.add_argument("--keep", nargs="+", default=[], metavar="NAME", help="fields that go into results unchanged")
    g.add_argument("--chat", action="store_true", help="a prompt is a user's message; use the model's chat template")
    g.add_argument("--system", metavar="TEXT", help="a system message for --chat")
    g.add_argument("--source-field", metavar="NAME",
                   help="of the source of an encoder-decoder, beside which a prompt may be missing (default: source)")
    generation.add_language(g)

    g = p.add_argument_group("several processes", "Each answers its share, into files of its own in the directory.")
    g.add_argument("--process", type=int, default=None, metavar="I", help="this is process I, from 0")
    g.add_argument("--processes", type=int, default=None, metavar="N", help="of so many")
    g.add_argument("--distributed", nargs="?", const="", metavar="HOST:PORT",
                   help="ask jax.distributed for both, on a TPU slice or a cluster that it knows; with an address, "
                        "meet the other --processes there")
    generation.add(p)


def run(args: argparse.Namespace) -> None:
    """Runs the job, with progress on standard error."""
    if args.system is not None and not args.chat:
        raise UsageError("--system goes with --chat")
    if (args.process is None) != (args.processes is None):
        raise UsageError("--process and --processes go together")
    if args.distributed is not None and bool(args.distributed) != (args.process is not None):
        raise UsageError("--distributed goes with --process and --processes if it names an address, and only then")
    options = generation.sampling(args)
    keep_programs()
    import jax

    from decodax import jobs
    from decodax.jobs import lines

    process, processes = args.process or 0, 1 if args.processes is None else args.processes
    if args.distributed is not None:
        jax.distributed.initialize(args.distributed or None, args.processes, args.process)
        process, processes = jax.process_index(), jax.process_count()
    with naming_the_argument():
        total = lines.count(args.input)
    lm, algorithm = generation.load(args, None if args.mesh is None else _mesh(mesh_shape(args.mesh)))
    options |= {"algorithm": algorithm, "cache": args.cache, "seed": args.seed, "stop": args.stop,
                "max_new_tokens": args.max_new_tokens, "min_new_tokens": args.min_new_tokens,
                "num_samples": args.num_samples, "logprobs": args.logprobs,
                "include_stop": args.include_stop or None,
                "skip_special_tokens": False if args.special_tokens else None}
    names = {"algorithm": args.algorithm, "draft": args.draft if args.algorithm else None, "dtype": args.dtype,
             "weights": args.weights, "adapter": args.adapter}
    fields = jobs.Fields(args.prompt_field, args.id_field, tuple(args.keep), args.chat, args.system, args.source_field,
                         args.source_language)
    if not args.quiet:
        print(f"[results stand in {args.output}/.part-{process:03d}-*.log as they finish, and in {args.output}/part-"
              f"{process:03d}-*.{args.format} when {args.part_lines:,} are there or the job ends]", file=sys.stderr)
    with _progress(None if args.quiet else total, args.quiet) as report, naming_the_argument():
        found = jobs.run(lm, args.input, args.output, slots=args.batch_size, fields=fields, form=args.format,
                         part=args.part_lines, tokens=args.tokens, process=process, processes=processes,
                         memory=args.memory, token_budget=args.token_budget, max_time=args.max_time, names=names,
                         report=report, **options)
    if not args.quiet:
        print(_summary(found), file=sys.stderr)
    if found.failed:
        raise RuntimeError(f"{found.failed} line{'s' * (found.failed > 1)} failed: see {args.output}/_errors-"
                           f"{process:03d}.jsonl")


def _mesh(shape: tuple[int, ...]) -> Mesh:
    """Returns a mesh of the first devices of this process.

    Raises:
        UsageError: the process has fewer devices.
    """
    import jax

    from decodax.common.axes import by_axes

    devices, count = jax.local_devices(), math.prod(shape)
    if count > len(devices):
        raise UsageError(f"--mesh: got {by_axes(shape)}, which takes {count} devices; this process has "
                         f"{len(devices)}")
    return jax.make_mesh(shape, ("data", "model", "expert")[:len(shape)], devices=devices[:count])


def _summary(found: JobProgress) -> str:
    before = f", {found.before:,} before" if found.before else ""
    left = ", stopped before the end" if found.stopped else ""
    return (f"[{found.finished:,} finished{before}, {found.failed:,} failed{left}: {found.tokens:,} tokens in "
            f"{found.seconds:.1f} s, {found.tokens_per_second:,.1f} tokens/s, goodput {found.use.goodput:.0%}]")


@contextlib.contextmanager
def _progress(total: int | None, quiet: bool) -> Iterator[Callable[[JobProgress], None] | None]:
    """Yields a function that shows progress: on a terminal as a bar, else as a line from time to time. Both show when a
    program is being compiled, and how long that took."""
    if quiet:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console, last, done, text = Console(stderr=True), float("-inf"), 0, ""
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)

        def show(compiles: bool) -> None:
            nonlocal last
            said = ", ".join(filter(None, (text, "compiling" if compiles else "")))
            bar.update(task, completed=done, description=said)
            if not console.is_terminal and time.monotonic() > last + EVERY:
                last = time.monotonic()
                print(f"{done:,}{'' if total is None else f' of {total:,}'}, {said}", file=sys.stderr, flush=True)

        def report(found: Any) -> None:
            nonlocal done, text
            text = f"{found.tokens_per_second:,.0f} tokens/s, goodput {found.use.goodput:.0%}"
            if programs.seconds >= 1:
                text += f", {programs.seconds:,.0f} of {found.seconds:,.0f} s spent compiling"
            if found.failed:
                text += f", {found.failed:,} failed"
            done = found.finished + found.failed + found.before
            show(compiles=False)

        with compiling(lambda programs: show(programs.now) if programs.now else None) as programs:
            yield report
