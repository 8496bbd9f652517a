"""What cache policies lose: right answers on long texts against the bytes that are kept.

    python scripts/evaluate.py --caches                     # every policy that needs no training or other model
    python scripts/evaluate.py --caches snapkv knorm:skip_layers=() --length 2048 --plot caches.png

    python scripts/evaluate.py --caches --drafts                            # drafts on smaller caches: what is accepted

The questions are those of `scripts/recall.py`, which the shipped `recall` answers. A policy sees the question when it
chooses (aware), or chooses from the text alone, as where several questions are asked of one text (agnostic: `context=`
of `decodax.generate`). Its budget is a share of the text, or what of it each query reads; codecs have a size of their
own. Evictions choose once, behind the text. What policies need to know of heads, layers, channels or keys is measured
on other texts, but for what takes long training. Bytes are those of what is held behind the question, codes, steps and
positions included, over a dense cache's.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

MODES = ("aware", "agnostic")
REMOVED = (0.25, 0.5, 0.8)
BETWEEN = ("clusterkv", "attention-predictor", "subgen", "tim", "leank")
"""Policies whose `every` is not the tokens between two evictions."""
SIZED_BY = {"streaming-llm": "recent", "less": "recent", "freqkv": "size", "quick-prefill": "keep"}
"""The option that says how much of a text is kept, where it is not `budget`."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """A policy at one size on one task.

    Attributes:
        policy: as it was asked for. removed: share of the text that goes, or None for a size of its own.
        mode: "aware" or "agnostic". task: of the questions. seed: of the problems.
        right: share of right answers. kept: bytes over a dense cache's.
    """

    policy: str
    removed: float | None
    mode: str
    task: str
    seed: int
    right: float
    kept: float


def sized(policy: str, removed: float, length: int, **measured: Any) -> Any:
    """A policy that removes a share of texts of so many tokens; None: its size is its own.

    Args:
        measured: what was measured for it, by option (`fitted`). Of `layers` a function, which gives what each layer
            keeps where all keep a share together.

    Raises:
        ValueError: as `decodax.kv`.
    """
    from decodax.caches import find, make
    from decodax.common.registry import parse_options

    entry = find(policy.partition(":")[0])
    given = {**measured, **parse_options(policy, entry.options)}
    if "every" in entry.options and entry.name not in BETWEEN:
        given.setdefault("every", None)
    left = 1 - removed
    if entry.name in SIZED_BY:
        sinks = given.get("sinks", 4) if SIZED_BY[entry.name] == "recent" else 0
        own = left if SIZED_BY[entry.name] == "keep" else int(left * length) - sinks
        return make(entry.name, **{SIZED_BY[entry.name]: own, **given})
    if callable(given.get("layers")):
        return make(entry.name, **{**given, "layers": given["layers"](left)})
    if "budget" not in entry.options:
        return None
    if "ask" in entry.options:      # the model has no words for it, but repeats what it is shown
        given = {"ask": (), "go_on": (), "answer": (), **given}
    return make(entry.name, **{"budget": int(left * length), **given})


def fitted(policy: str, lm: Any, texts: Sequence[Sequence[int]], probes: Sequence[Any]) -> dict[str, Any]:
    """What a policy takes that is measured, by option, from texts that are not asked about later and answers that stand
    in them (`needles`). What takes long training is not."""
    from decodax.caches import find
    from decodax.common.registry import parse_options
    from decodax.train import (
        fit_channels,
        fit_codebooks,
        fit_features,
        fit_heads,
        fit_key_books,
        fit_layers,
        fit_order,
        fit_predictors,
    )

    entry = find(policy.partition(":")[0])
    given = {**{k: v.default for k, v in entry.options.items()}, **parse_options(policy, entry.options)}
    fits: dict[str, Callable[[], Any]] = {
        "codebooks": lambda: fit_codebooks(lm, texts), "features": lambda: fit_features(lm, texts),
        "order": lambda: fit_order(lm, texts, given["heads"]), "predictors": lambda: fit_predictors(lm, texts),
        "books": lambda: fit_key_books(lm, texts, count=1024), "heads": lambda: fit_heads(lm, probes),
        "layers": lambda: lambda left: fit_layers(lm, texts, left), "draft": lambda: lm,     # no draft is better
        "channels": lambda: fit_channels(lm, probes, align=8, steps=(400, 40), sinks=given["sinks"],
                                         recent=given["recent"])}
    if "budget" not in entry.options:       # these are other heads than those of HeadKV
        del fits["heads"]
    left_open = (name for name in fits if name in entry.options and given[name] in (None, ()))
    return {name: fits[name]() for name in left_open}


def needles(length: int, count: int = 16) -> list[Any]:
    """Texts with a question each, and where its answer stands in them."""
    import recall

    from decodax.train import Probe

    probes = []
    for problem in recall.problems("needle", count, length, seed=1000):
        words = problem.context.split()
        start = words.index(problem.question.split()[1]) + 1
        probes.append(Probe([recall.ID[word] for word in problem.prompt.split()], start, start + 4))
    return probes


def sizes(lm: Any, policies: Sequence[str], removed: Sequence[float], length: int,
          left_out: list[str] | None) -> list[tuple[str, float | None, Any]]:
    """Each policy at each size, as a kind of cache; a dense one first. Arguments as in `run`."""
    from decodax.caches import find, make
    from decodax.common.registry import parse_options

    probes = needles(length)
    texts = [probe.tokens for probe in probes[:8]]
    cases: list[tuple[str, float | None, Any]] = [("dense", None, None)]
    for policy in policies:
        entry = find(policy.partition(":")[0])
        found: dict[str, Any] | None = None
        for share in removed:
            try:
                found = fitted(policy, lm, texts, probes) if found is None else found
                kind = sized(policy, share, length, **found)
                if kind is None:
                    cases.append((policy, None, make(entry.name, **{**found, **parse_options(policy, entry.options)})))
                    break
                cases.append((policy, share, kind))
            except ValueError as error:
                if left_out is None:
                    raise
                left_out.append(f"{policy} with {share:.0%} removed: {error}")
    return cases


def run(lm: Any, policies: Sequence[str], *, removed: Sequence[float] = REMOVED, modes: Sequence[str] = MODES,
        tasks: Sequence[str] | None = None, problems: int = 20, length: int = 1024, seeds: Sequence[int] = (0, 1, 2),
        report: Callable[[int, int, str], None] | None = None, known: Sequence[Measured] = (),
        save: Callable[[list[Measured]], None] | None = None, left_out: list[str] | None = None) -> list[Measured]:
    """Asks every policy every question, and a dense cache too.

    Args:
        lm: what `dx.load` gave, with the vocabulary of `recall.py`.
        removed: shares of the text that go. problems: of each task and seed. length: words of the texts.
        report: told before each run: runs done, runs in all, what runs now.
        known: what was measured before, which is not measured again. save: given all there is after each run.
        left_out: a list that is given why a policy or one of its sizes cannot be had here; None: that is an error.

    Raises:
        ValueError: an unknown policy or task.
    """
    import recall
    from cache_bytes import held

    from decodax.engine.batch import Job
    from decodax.engine.request import Request

    tasks = list(recall.ANSWERED if tasks is None else tasks)
    cases = sizes(lm, policies, removed, length, left_out)
    out: list[Measured] = []
    before = {(row.policy, row.removed, row.mode, row.seed, row.task): row for row in known}
    done, total = 0, len(cases) * len(modes) * len(seeds)
    for mode in modes:
        for seed in seeds:
            asked = [problem for task in tasks for problem in recall.problems(task, problems, length, seed)]
            if mode == "aware":
                texts: dict[str, Any] = dict(prompts=[problem.prompt for problem in asked])
            else:
                texts = dict(prompts=[problem.question for problem in asked],
                             context=[problem.context for problem in asked])
            dense = None
            found = [[before.get((policy, share, mode, seed, task)) for task in tasks] for policy, share, _ in cases]
            for (policy, share, kind), rows in zip(cases, found, strict=True):
                # the others' bytes are relative to the dense cache's
                if all(rows) and (policy != "dense" or all(map(all, found))):
                    out += filter(None, rows)
                    done += 1
                    continue
                if report is not None:
                    report(done, total, f"{policy} {'' if share is None else f'{share:.0%} removed '}{mode}")
                prompts = texts["prompts"]
                job = Job.begin(Request.read(lm, prompts, cache=kind, context=texts.get("context"), max_new_tokens=24))
                bytes_held = held(job.state.cache)
                dense = dense or bytes_held
                job.advance(None)
                answers = job.result().text
                assert answers is not None
                right = [problem.correct(text) for problem, text in zip(asked, answers, strict=True)]
                for i, task in enumerate(tasks):
                    own = right[i * problems:(i + 1) * problems]
                    out.append(Measured(policy, share, mode, task, seed, sum(own) / len(own), bytes_held / dense))
                done += 1
                if save is not None:
                    save(out)
    return out


def means(rows: Sequence[Measured]) -> dict[tuple[str, float | None, str], tuple[float, float, float]]:
    """Of each policy, size and mode: the mean of right answers over tasks, its standard deviation over seeds, and the
    bytes."""
    groups: dict[tuple[str, float | None, str], list[Measured]] = {}
    for row in rows:
        groups.setdefault((row.policy, row.removed, row.mode), []).append(row)
    out = {}
    for key, own in groups.items():
        by_seed = [statistics.mean(r.right for r in own if r.seed == seed) for seed in sorted({r.seed for r in own})]
        spread = statistics.stdev(by_seed) if len(by_seed) > 1 else 0.0
        out[key] = statistics.mean(by_seed), spread, statistics.mean(r.kept for r in own)
    return out


def best(rows: Sequence[Measured], mode: str, removed: float, count: int = 3) -> list[str]:
    """The policies with most right answers at a size, of those that hold no more than that and 5 percent of a dense
    cache: some keep whole layers, or everything and read a part."""
    found = {policy: mean for (policy, share, how), (mean, _, kept) in means(rows).items()
             if how == mode and share == removed and kept <= 1.05 - removed}
    return sorted(found, key=lambda policy: -found[policy])[:count]


def tables(rows: Sequence[Measured]) -> list[tuple[str, list[str], list[list[str]]]]:
    """What is printed: title, head and lines of each table."""
    found, out = means(rows), []
    for mode in dict.fromkeys(row.mode for row in rows):
        shares = sorted({share for _, share, _ in found if share is not None})
        cell = lambda key: (f"{100 * found[key][0]:.1f} ± {100 * found[key][1]:.1f} ({found[key][2]:.2f})"
                            if key in found else "")
        lines = [[policy, cell((policy, None, mode)), *(cell((policy, share, mode)) for share in shares)]
                 for policy in dict.fromkeys(row.policy for row in rows)]
        for share in shares:
            title = f"best at {share:.0%} removed"
            lines.append([title, *[""] * (1 + shares.index(share)), ", ".join(best(rows, mode, share)),
                          *[""] * (len(shares) - 1 - shares.index(share))])
        out.append((f"{mode}: right answers in percent (bytes kept)",
                    ["policy", "its own size", *(f"{share:.0%} removed" for share in shares)], lines))
    return out


def plot(rows: Sequence[Measured], path: Path, title: str = "") -> None:
    """Draws right answers against bytes kept, a panel for each mode, a line for each policy."""
    from matplotlib.figure import Figure

    found, modes = means(rows), list(dict.fromkeys(row.mode for row in rows))
    names = list(dict.fromkeys(row.policy for row in rows))
    figure = Figure(figsize=(5.4 * len(modes), 5.4), layout="constrained")
    panels: list[Any] = list(figure.subplots(1, len(modes), squeeze=False, sharey=True).flat)
    for panel, mode in zip(panels, modes, strict=True):
        for i, name in enumerate(names):
            points = sorted((kept, mean) for (policy, _, how), (mean, _, kept) in found.items()
                            if policy == name and how == mode)
            style = dict(color=f"C{i % 10}", marker="osv^D"[i // 10 % 5], markersize=4)
            panel.plot([100 * x for x, _ in points], [100 * y for _, y in points], label=name,
                       linestyle="-" if len(points) > 1 else "", **style)
        panel.set(title=f"question seen by the policy: {'yes' if mode == 'aware' else 'no'}", xlabel="bytes kept, %")
        panel.grid(color="0.92")
        panel.set_axisbelow(True)
    panels[0].set_ylabel("right answers, %")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize="small")
    figure.suptitle(title, fontsize="small", color="0.4")
    figure.savefig(path, dpi=130)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    import recall

    p = argparse.ArgumentParser(prog="evaluate.py --caches", description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("policies", nargs="*", metavar="NAME[:OPTION=VALUE,...]",
                   help="of `decodax list caches` (default: all that are not exact)")
    p.add_argument("-m", "--model", default="recall", metavar="NAME_OR_DIR", help="default: recall")
    p.add_argument("--removed", nargs="+", type=float, default=REMOVED, metavar="X", help="shares (default: .25 .5 .8)")
    p.add_argument("--mode", nargs="+", choices=MODES, default=MODES, help="default: both")
    p.add_argument("--task", nargs="+", choices=recall.TASKS, default=recall.ANSWERED, metavar="TASK",
                   help=f"of {', '.join(recall.TASKS)} (default: all but values, which `recall` has not learned)")
    p.add_argument("--problems", type=int, default=20, metavar="N", help="of each task and seed (default: 20)")
    p.add_argument("--length", type=int, default=1024, metavar="N", help="words of the texts (default: 1024)")
    p.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="N", help="of the texts (default: 0 1 2)")
    p.add_argument("--plot", type=Path, metavar="FILE", help="draw right answers against bytes, as PNG, SVG or PDF")
    p.add_argument("--json", type=Path, metavar="FILE",
                   help="write every figure, run by run; what such a file holds is not measured again")
    p.add_argument("--figures", type=Path, nargs="+", metavar="FILE",
                   help="print and draw what --json wrote before, instead of measuring")
    p.add_argument("--drafts", action="store_true", help="measure drafts on smaller caches instead of answers")
    p.add_argument("--markdown", action="store_true", help="print the tables in Markdown, with the command")
    return p


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    import cache_drafts
    import jax
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    import decodax as dx
    from decodax.common.registry import CACHES

    policies = args.policies or [name for name, entry in CACHES.items() if entry.guarantee != "exact"]
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        for path in filter(None, (args.plot, args.json)):
            if not path.absolute().parent.is_dir():
                raise ValueError(f"{path}: there is no such directory")
        if args.figures:
            facts = [json.loads(path.read_text()) for path in args.figures]
            return _show(args, [Measured(**row) for fact in facts for row in fact["rows"]],
                         facts[0]["setting"], "; ".join(fact["command"] for fact in facts))
        lm = dx.load(args.model)
        if args.drafts:
            return cache_drafts.show(lm, problems=args.problems, length=args.length, seed=args.seeds[0])
        setting = (f"{lm.name}, texts of {args.length} words, {args.problems} problems each of {', '.join(args.task)}, "
                   f"seeds {', '.join(map(str, args.seeds))}, greedy; {jax.devices()[0].device_kind}, {os.cpu_count()} "
                   f"cores; JAX {jax.__version__}")
        command = shlex.join(["python", "scripts/evaluate.py", "--caches", *argv])
        known = _known(args.json, setting)
        left_out: list[str] | None = None if args.policies else []      # what was asked for by name is not left out
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            bar = progress.add_task("", total=None)

            def report(done: int, total: int, what: str) -> None:
                progress.update(bar, completed=done, total=total, description=what)
                if not console.is_terminal:
                    print(f"{done}/{total} {what}", file=sys.stderr, flush=True)

            rows = run(lm, policies, removed=args.removed, modes=args.mode, tasks=args.task, problems=args.problems,
                       length=args.length, seeds=args.seeds, report=report, known=known, left_out=left_out,
                       save=lambda rows: _write(args.json, rows, setting, command))
    except (ValueError, FileNotFoundError) as error:
        print(f"evaluate: {error}", file=sys.stderr)
        return 2
    for line in dict.fromkeys(left_out or []):
        print(f"left out: {line}", file=sys.stderr)
    return _show(args, rows, setting, command)


def _known(path: Path | None, setting: str) -> list[Measured]:
    """What a file holds of measurements before.

    Raises:
        ValueError: the file is of another setting, or no such file at all.
    """
    if path is None or not path.exists():
        return []
    try:
        facts = json.loads(path.read_text())
        rows, before = [Measured(**row) for row in facts["rows"]], facts["setting"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: is there, and was not written by --json; takes another name") from error
    if before != setting:
        raise ValueError(f"{path}: holds figures of another setting ({before}); takes another name")
    return rows


def _write(path: Path | None, rows: Sequence[Measured], setting: str, command: str) -> None:
    if path is None:
        return
    whole = path.with_name(path.name + ".part")
    whole.write_text(json.dumps({"command": command, "setting": setting,
                                 "rows": [dataclasses.asdict(row) for row in rows]}, indent=1) + "\n")
    whole.replace(path)


def _show(args: argparse.Namespace, rows: Sequence[Measured], setting: str, command: str) -> int:
    """Prints the tables, and writes and draws what is asked for."""
    from rich.console import Console
    from rich.table import Table

    if args.markdown:
        line = lambda cells: "| " + " | ".join(cells) + " |"
        print(f"    {command}\n\n{setting}.")
        for title, head, lines in tables(rows):
            print("\n".join(["", f"{title[0].upper()}{title[1:]}:", "", line(head), "|" + "---|" * len(head),
                             *map(line, lines)]))
    else:
        out = Console(highlight=False, width=None if sys.stdout.isatty() else 1000)
        for title, head, lines in tables(rows):
            table = Table(*head, box=None, pad_edge=False, title=title)
            for cells in lines:
                table.add_row(*cells)
            out.print(table)
        out.print(setting)
    _write(args.json, rows, setting, command)
    if args.plot:
        plot(rows, args.plot, setting)
    return 0
