"""The commands of the command line: `decodax generate` continues a prompt, `decodax list` lists everything that can be
chosen by name, `decodax compare` measures methods, and `decodax info` shows versions, devices and models.

JAX is imported only by the commands that need it, so that help and usage errors appear at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decodax import __version__
from decodax.cli import generation, planning
from decodax.cli.arguments import TASKS, parser
from decodax.cli.common import DRAFT, UsageError, keep_programs, naming_the_argument, table, weight_format
from decodax.cli.contenders import contender_of, drafts_named, parted, systems_of

if TYPE_CHECKING:
    from decodax.bench.comparison import Comparison
    from decodax.engine.result import Result

FAILURE, USAGE, INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code; see `decodax.cli.arguments.EXIT_CODES`."""
    args = parser(generate, compare, info).parse_args(argv)
    args.line = sys.argv[1:] if argv is None else list(argv)
    try:
        args.command(args)
        sys.stdout.flush()
        return 0
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # the interpreter flushes standard output once more as it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if args.debug:
            traceback.print_exc()
        for line in (str(error) or type(error).__name__).splitlines():
            print(f"decodax: error: {line}", file=sys.stderr)
        return USAGE if isinstance(error, UsageError) else FAILURE


def generate(args: argparse.Namespace) -> None:
    """Runs `decodax generate`: continues one prompt."""
    prompt = _prompt(args)
    options = generation.sampling(args)
    keep_programs()
    import decodax as dx
    from decodax.engine.names import by_name

    lm, algorithm = generation.load(args)
    options = by_name(options)
    if algorithm is not None:
        options["algorithm"] = algorithm
    given: Any = prompt
    if args.chat:
        system = [{"role": "system", "content": args.system}] if args.system is not None else []
        given = [*system, {"role": "user", "content": prompt}]
    if args.cache is not None:
        options["cache"] = args.cache
    if args.source is not None:
        from decodax.models.inputs import read_texts

        with naming_the_argument():
            options["inputs"] = read_texts(lm, args.source, args.source_language, "--source")
    if args.context is not None:
        options["context"] = Path(args.context).read_text(encoding="utf-8")
    options |= {"seed": args.seed, "stop": args.stop, "max_new_tokens": args.max_new_tokens,
                "min_new_tokens": args.min_new_tokens, "logprobs": args.logprobs, "max_time": args.max_time,
                "include_stop": args.include_stop, "skip_special_tokens": not args.special_tokens}
    samples = lm.generation_config.get("num_return_sequences") or 1 if args.num_samples is None else args.num_samples
    answered = {name: getattr(args, name) for name in ("search", "select") if getattr(args, name) is not None}
    with naming_the_argument():
        if args.json or samples != 1 or answered:
            result = dx.generate(lm, given, num_samples=args.num_samples, **answered, **options)
        else:
            result = _stream(dx.stream(lm, given, **options), prompt if args.echo else "")
    if args.json:
        print(json.dumps(_as_json(result, args, prompt)))
    elif answered:
        print((prompt if args.echo else "") + (result.text or [""])[0])
    elif len(result) > 1:
        for i, text in enumerate(result.text or ()):
            print(f"=== sample {i + 1}: {result.status[i].name.lower()} ===\n{prompt if args.echo else ''}{text}")
    if not args.quiet:
        print(_summary(result), file=sys.stderr)


def compare(args: argparse.Namespace) -> None:
    """Runs `decodax compare`: decoding methods and plain decoding side by side."""
    if args.plot:
        import importlib.util

        if importlib.util.find_spec("matplotlib") is None:
            raise UsageError("--plot takes matplotlib; install decodax[train]")
    if args.draft_weights and args.draft == [DRAFT]:
        raise UsageError("--draft-weights takes --draft with trained drafters")
    if args.questions and args.top_p is not None and not args.temperature:
        raise UsageError("--top-p takes --temperature with --questions, which are greedy without it")
    if args.at and not args.on:
        raise UsageError("--at takes --on, the slice to predict for")
    for path in (args.plot, args.json):
        if path and not Path(path).absolute().parent.is_dir():
            raise UsageError(f"{path}: there is no such directory")
    if args.resume and not args.json:
        raise UsageError("--resume takes --json, the file of the figures to go on from")
    keep_programs()
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    import decodax as dx
    from decodax.bench.compare import compare as run
    from decodax.bench.comparison import Comparison
    from decodax.bench.questions import questions
    from decodax.bench.tasks import Task, sampled
    from decodax.common.registry import ALGORITHMS

    with naming_the_argument():
        models, trained = parted(args.draft)
        sampling = {name: x for name in ("temperature", "top_p") if (x := getattr(args, name)) is not None}
        tasks: list[str | Task] = [] if args.questions is None else [*questions(args.questions, **sampling)]
        earlier = Comparison.read(args.json) if args.resume and Path(args.json).exists() else None
    lm = dx.load(args.model, weights=weight_format(args.weights))
    with naming_the_argument():
        drafters: dict[str, Any] = {}
        for one in (dx.load_drafter(path, lm, weights=args.draft_weights) for path in trained):
            if (other := drafters.setdefault(one.system, one)) is not one:
                raise ValueError(f"draft: got {other.name} and {one.name}, both of {one.system!r}; takes one of each "
                                 "method")
        chosen = systems_of(args.names, args.model, drafters)
    needed = any(ALGORITHMS[name].takes_draft for name, _ in chosen.values())
    draft = dx.load(models[0] if models else DRAFT) if needed or (models and args.draft != [DRAFT]) else None
    shown = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with naming_the_argument():
        contenders = {given: contender_of(name, options, lm, draft, drafters)
                      for given, (name, options) in chosen.items()}
        with Progress(*columns, console=shown, transient=True, disable=not shown.is_terminal) as bar:
            runs = bar.add_task("", total=None)
            report = lambda done, total, what: bar.update(runs, completed=done, total=total, description=what)
            names = TASKS if "all" in args.task else tuple(dict.fromkeys(args.task))
            tasks = tasks or [sampled(**sampling) if name == "sampled" else name for name in names]
            found = run(lm, contenders, tasks=tasks, batch=args.batch, prompts=args.prompts,
                        new_tokens=args.new_tokens, repeats=args.repeats, seed=args.seed,
                        draft=drafts_named(chosen, draft, drafters, lm.name), report=report, earlier=earlier,
                        keep=(lambda found: _write(found, args)) if args.json else None)
    predicted = lengths = None
    if args.on:
        from decodax.bench.plan.predict import Trained, predict, share
        made = {given: one(args.batch[0]) if callable(one) else one for given, one in contenders.items()}
    if args.at:
        from decodax.bench.figures import reporting
        from decodax.bench.plan.windows import windows
        with naming_the_argument(), reporting() as report:
            lengths = windows(found, {given: (chosen[given][0], one) for given, one in made.items()}, args.on,
                              args.as_model, batch=args.at, capacity=args.capacity, draft_share=share(lm, draft),
                              compile=False if args.no_compile else None, report=report)
    elif args.on:
        with naming_the_argument():
            beside = {given: cost for given, one in made.items() if (cost := Trained.of(lm, one))}
            predicted = predict(found, chosen, args.on, args.as_model, capacity=args.capacity,
                                draft_share=share(lm, draft), trained=beside)
    _show(found, args, predicted, lengths)


def _show(found: Comparison, args: argparse.Namespace, predicted: tuple[list[Any], list[str]] | None,
          lengths: tuple[list[Any], list[str]] | None) -> None:
    """Prints a comparison and writes it to files; also one that was interrupted."""
    from decodax.bench.comparison import COLUMNS

    if args.markdown:
        print(f"    decodax {shlex.join(args.line)}\n\n{found.markdown()}", end="")
    else:
        for (task, batch), rows in found.cells.items():
            print(found.title(task, batch))
            table(COLUMNS, [row.cells() for row in rows], right=range(1, len(COLUMNS)))
            print()
        print(found.setting())
    if predicted is not None:
        _show_predicted(*predicted, args)
    if lengths is not None:
        planning.show_lengths(*lengths, args)
    if args.json:
        more = {} if predicted is None else {"predicted": [
            {**dataclasses.asdict(one), "speedup": one.speedup} for one in predicted[0]], "assumed": predicted[1]}
        if lengths is not None:
            more = {"lengths": [one.json() for one in lengths[0]], "assumed": lengths[1]}
        _write(found, args, more)
    if args.plot and lengths is not None:
        planning.draw_lengths(args.plot, lengths[0], f"{args.as_model} on {args.on}")
    elif args.plot:
        found.plot(args.plot)
    for row in found.unequal:
        print(f"decodax: {row.system} is seed-exact but differs from plain decoding on {row.task}, batch {row.batch}; "
              "two nearly equal logits may have changed places", file=sys.stderr)
    for row in found.rows:
        if row.error:
            print(f"decodax: {row.system} failed on {row.task}, batch {row.batch}: {row.error}", file=sys.stderr)
    if found.interrupted:
        raise KeyboardInterrupt
    if any(row.error for row in found.rows):
        raise RuntimeError("some systems failed")


def _write(found: Comparison, args: argparse.Namespace, more: Mapping[str, Any] = {}) -> None:
    """Writes a comparison to the file of `--json`, in place of what it held."""
    path = Path(args.json)
    new = path.with_name(f".{path.name}")
    new.write_text(json.dumps({"command": ["decodax", *args.line], **found.json(), **more}, indent=1) + "\n")
    os.replace(new, path)


def _show_predicted(predicted: list[Any], assumed: list[str], args: argparse.Namespace) -> None:
    """Prints the predicted figures for another slice of devices."""
    from decodax.bench.plan.predict import COLUMNS

    for task, batch in dict.fromkeys((one.task, one.batch) for one in predicted):
        print(f"\n{task}, batch {batch}: predicted for {args.as_model} on {args.on}")
        table(COLUMNS, [one.cells() for one in predicted if (one.task, one.batch) == (task, batch)],
              right=range(2, len(COLUMNS)))
    print("\n".join(["", *(f"assumed: {line}" for line in assumed)]))


def info(args: argparse.Namespace) -> None:
    """Runs `decodax info`: prints versions, devices, shipped models and cache directories."""
    programs = keep_programs()
    import importlib.metadata

    import jax

    from decodax.io.load import ZOO, zoo

    models = []
    for name in zoo():
        card = ZOO / name / "training.json"
        facts = json.loads(card.read_text()) if card.is_file() else {}
        size = sum(f.stat().st_size for f in (ZOO / name).iterdir() if f.is_file())
        keys = ("parameters", "held_out_bits_per_byte", "held_out", "tokens", "data")
        models.append({"name": name, "path": str(ZOO / name), "megabytes": round(size / 1e6, 1),
                       **{k: facts[k] for k in keys if k in facts}})
    report: dict[str, Any] = {
        "versions": {"decodax": __version__, "python": sys.version.split()[0],
                     **{p: importlib.metadata.version(p) for p in ("jax", "jaxlib", "flax", "numpy", "tokenizers")}},
        "backend": jax.default_backend(),
        "devices": [{"id": d.id, "platform": d.platform, "kind": d.device_kind} for d in jax.devices()],
        "models": models,
        "cache": {"compiled_programs": programs},
    }
    if args.json:
        print(json.dumps(report, indent=2))
        return
    from rich.console import Console
    from rich.table import Column, Table

    console = Console(highlight=False, soft_wrap=True)
    console.print("  ".join(f"{k} {v}" for k, v in report["versions"].items()))
    console.print(f"backend {report['backend']}: " + ", ".join(f"{d['kind']} {d['id']}" for d in report["devices"]))
    console.print(f"compiled programs are kept in {programs}")
    table = Table("model", "parameters", "MB", Column("held out", no_wrap=True), "training data", box=None,
                  pad_edge=False)
    for m in models:
        table.add_row(m["name"], f"{m['parameters']:,}" if "parameters" in m else "", str(m["megabytes"]),
                      _held_out(m), m.get("data", ""))
    console.print(table if models else "no models are shipped with this installation")


def _held_out(model: Mapping[str, Any]) -> str:
    """Returns the quality of a shipped model on held-out data as text, from the figures of its model card."""
    if "held_out_bits_per_byte" in model:
        return f"{model['held_out_bits_per_byte']:.2f} bits/byte"
    each = model.get("held_out", {})
    if "bits_per_byte" in each:
        return f"at most {each['bits_per_byte']:.2f} bits/byte"
    return f"{sum(each.values()) / len(each):.0%} right" if each else ""


def _prompt(args: argparse.Namespace) -> str:
    """Returns the prompt: from the argument, a file, or standard input."""
    if args.prompt is not None and args.file is not None:
        raise UsageError("got a prompt and --file; give one of them")
    if args.system is not None and not args.chat:
        raise UsageError("--system goes with --chat")
    if args.logprobs is not None and not args.json:
        raise UsageError("--logprobs goes with --json")
    if args.source is None and args.source_language is not None:
        raise UsageError("--source-language goes with --source")
    if args.prompt is not None:
        return args.prompt
    if args.source is not None and args.file is None:
        return ""
    if args.file is None and sys.stdin.isatty():
        raise UsageError("no prompt: give one as an argument, with --file, or on standard input")
    try:
        return sys.stdin.read() if args.file in (None, "-") else Path(args.file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"the prompt is not UTF-8 text: {error}") from error


def _stream(pieces: Any, prefix: str) -> Result:
    """Prints `prefix` and the pieces of a stream as they arrive, and returns the result."""
    last = prefix
    sys.stdout.write(prefix)
    sys.stdout.flush()
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
        last = piece
    if not last.endswith("\n"):
        print(flush=True)
    return pieces.result


def _as_json(result: Result, args: argparse.Namespace, prompt: str) -> dict[str, Any]:
    """Returns the result as data for JSON; lists have one entry for each sample."""
    from decodax.engine.result import json_ready

    stats = result.stats
    report: dict[str, Any] = {
        "model": args.model, "algorithm": args.algorithm, "seed": args.seed,
        **({} if args.source is None else {"source": args.source}), "prompt": prompt, "text": result.text,
        "tokens": [result.row(i).tolist() for i in range(len(result))],
        "status": [s.name.lower() for s in result.status],
        "stats": {
            "new_tokens": stats.tokens.tolist(), "rounds": stats.rounds.tolist(), "forwards": stats.forwards,
            "prefill_forwards": stats.prefill_forwards, "tokens_per_forward": stats.tokens_per_forward,
            "mean_accepted_length": stats.mean_accepted_length, "drafted": stats.drafted.tolist(),
            "accepted": stats.accepted.tolist(), "tokens_per_second": stats.tokens_per_second,
            "seconds": stats.seconds, "prefill_seconds": stats.prefill_seconds,
        },
    }
    if result.findings:
        report["findings"] = json_ready(result.findings)
    if result.logprobs is not None:
        noted, lengths = result.logprobs, result.lengths
        report["logprobs"] = {name: [x[:n].tolist() for x, n in zip(getattr(noted, name), lengths, strict=True)]
                              for name in ("raw", "processed", "top_ids", "top")}
    return report


def _summary(result: Result) -> str:
    """Returns the figures of a result as one line."""
    stats = result.stats
    ends = ", ".join(dict.fromkeys(s.name.lower() for s in result.status))
    return (f"[{int(stats.tokens.sum())} tokens in {stats.seconds:.2f} s: {stats.tokens_per_second:.1f} tokens/s, "
            f"{stats.tokens_per_forward:.2f} tokens per forward; "
            f"prefill and compilation {stats.prefill_seconds:.2f} s; ended by {ends}]")
