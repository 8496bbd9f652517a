"""The command `decodax eval`: runs tasks of lm-evaluation-harness. Imports JAX only when it runs."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from decodax.cli.common import MODEL, UsageError, keep_programs, naming_the_argument

EXAMPLES = """\
examples:
  decodax eval --model path/to/model --tasks gsm8k arc_easy --limit 100
  decodax eval --model path/to/model --tasks gsm8k --algorithm prompt-lookup --cache snapkv:budget=512
  decodax eval --model path/to/llada --tasks humaneval --algorithm fast-dllm

Needs `pip install decodax[eval]`. Tasks' data come from where the harness finds them, most from the Hugging Face hub.
`decodax eval --tasks list` names the tasks.
"""


def add(commands: Any, common: argparse.ArgumentParser, exit_codes: str) -> None:
    """Adds the command to the subparsers `commands`. `common` has the arguments of all commands; `exit_codes` is text
    for the help."""
    p = commands.add_parser("eval", parents=[common], help="tasks of lm-evaluation-harness",
                            formatter_class=argparse.RawDescriptionHelpFormatter, epilog=EXAMPLES + "\n" + exit_codes,
                            description="Runs tasks of lm-evaluation-harness with any algorithm and cache.")
    p.set_defaults(command=run)
    p.add_argument("-m", "--model", default="pycode", metavar="NAME_OR_PATH", help=f"{MODEL} (default: pycode)")
    p.add_argument("-t", "--tasks", nargs="+", required=True, metavar="TASK", help="names of tasks, or list")
    p.add_argument("-a", "--algorithm", metavar="NAME[:OPTION=VALUE,...]", help="what writes answers (decodax list)")
    p.add_argument("--cache", metavar="NAME[:OPTION=VALUE,...]", help="what the cache keeps (decodax list)")
    p.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="of activations, cache and weights")
    p.add_argument("--weights", metavar="FORMAT", help="how the weights are kept and read, such as int8")
    p.add_argument("--adapter", metavar="DIR", help="an adapter in peft's layout, merged into the weights")
    p.add_argument("--batch-size", type=int, metavar="N", help="requests at once (default: 16)")
    p.add_argument("--max-length", type=int, metavar="N",
                   help="tokens of a context and its continuation (default: as many as the model was made for)")
    p.add_argument("--limit", type=float, metavar="N", help="requests a task, or below 1 the share of them")
    p.add_argument("--num-fewshot", type=int, metavar="N", help="worked examples in front of a question")
    p.add_argument("--apply-chat-template", action="store_true", help="ask as a chat")
    p.add_argument("--gen-kwargs", metavar="JSON", help="for all answers, as '{\"do_sample\": true}'")
    p.add_argument("--include-path", metavar="DIR", help="where more tasks are")
    p.add_argument("--use-cache", metavar="PATH", help="keep answers here: a run that was killed goes on")
    p.add_argument("--seed", type=int, default=0, metavar="N", help="of answers drawn at random (default: 0)")
    p.add_argument("--unsafe", action="store_true", help="run code that the model wrote, as tasks like humaneval do")
    p.add_argument("-o", "--output", metavar="FILE", help="write all figures and samples here, as JSON")


def run(args: argparse.Namespace) -> None:
    """Runs the tasks; prints the harness's table, and tokens, forward passes and time of the answers."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UsageError("eval takes lm-evaluation-harness; install decodax[eval]")
    if args.output and not Path(args.output).absolute().parent.is_dir():
        raise UsageError(f"--output: {args.output}: there is no such directory")
    if args.tasks == ["list"]:
        from lm_eval.tasks import TaskManager
        print("\n".join(TaskManager(include_path=args.include_path).all_tasks))
        return
    try:
        options = json.loads(args.gen_kwargs or "{}")
    except json.JSONDecodeError as error:
        raise UsageError(f"--gen-kwargs: not JSON ({error})") from error
    keep_programs()
    from lm_eval.utils import make_table

    import decodax as dx
    from decodax.bench import harness

    given = {name: value for name in ("dtype", "weights", "adapter") if (value := getattr(args, name)) is not None}
    lm = dx.load(args.model, **given)
    with naming_the_argument():
        model = harness.HarnessLM(lm, algorithm=args.algorithm, cache=args.cache, batch_size=args.batch_size,
                                  max_length=args.max_length, seed=args.seed, progress=sys.stderr.isatty())
        found = harness.evaluate(model, args.tasks, limit=args.limit, num_fewshot=args.num_fewshot,
                                 apply_chat_template=args.apply_chat_template, gen_kwargs=options,
                                 include_path=args.include_path, use_cache=args.use_cache,
                                 options={"confirm_run_unsafe_code": args.unsafe})
    if args.output:
        Path(args.output).write_text(json.dumps(found, default=str, indent=1), encoding="utf-8")
    if args.json:
        print(json.dumps({name: found[name] for name in ("results", "decodax")}, default=str))
        return
    print(make_table(found), end="")
    if found.get("groups"):
        print(make_table(found, "groups"), end="")
    took = found["decodax"]
    if took["texts"]:
        print(f"{took['texts']:,} answers, {took['tokens']:,} tokens, {took['tokens_per_forward']:.2f} a forward",
              file=sys.stderr)
