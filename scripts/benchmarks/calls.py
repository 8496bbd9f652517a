"""Benchmarks of calls of the library: caches, beams, constraints and batch jobs. The sides run in turn."""

from __future__ import annotations

import argparse
import functools
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import track

import decodax as dx
from decodax.algorithms.beams import BeamSearch
from decodax.algorithms.speculative import drafts
from decodax.bench.figures import show_table
from decodax.bench.timing import Times, in_turn, median, ratio, seconds
from decodax.constraints import TokenDfa
from decodax.constraints.schema import json_schema
from decodax.constraints.tokens import TokenTrie
from decodax.engine.batch import Job
from decodax.engine.request import Request
from decodax.engine.slots import Use
from decodax.front.generate import through_batches, through_slots
from decodax.models import Transformer, llama

BEGINNINGS = ("def area(", "import ", "x = [", "class A:")
TEXT = {"type": "string"}
SCHEMAS: dict[str, Any] = {
    "person": {"type": "object", "properties": {
        "name": TEXT, "age": {"type": "integer", "minimum": 0}, "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": TEXT}}, "required": ["name", "age"]},
    "order": {"type": "object", "properties": {
        **{f"field{i}": TEXT for i in range(12)},
        "items": {"type": "array", "items": {"type": "object", "properties": {
            "sku": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"}, "price": {"type": "number", "minimum": 0},
            "quantity": {"type": "integer"}}, "required": ["sku", "quantity"]}},
        "date": {"type": "string", "format": "date-time"}}, "required": ["field0"]}}


def steps(lm: Any, prompts: Sequence[str], ways: Mapping[str, dict[str, Any]], repeats: int, more: Any = (),
          **given: Any) -> Times:
    """Times calls of `dx.generate` with the keywords of each way, in milliseconds a forward; `more`: other timers."""
    def timed(way: dict[str, Any]) -> float:
        stats = dx.generate(lm, list(prompts), **given, **way).stats
        return stats.seconds / stats.forwards * 1e3

    return in_turn({**{name: functools.partial(timed, way) for name, way in ways.items()}, **dict(more)}, repeats)


def caches(args: argparse.Namespace) -> None:
    """Memory and time of cache policies against dense caches, on random weights of a 125M shape.

    The table gives the bytes of the live arrays after the prompts, their share of those of the dense cache, and the
    time of a decode round over that of a dense cache of prompts as long as the budget. With `--shared` all prompts have
    a common beginning and 16 tokens of their own, and the time to read them is printed, without compiling.
    """
    model = Transformer(llama(vocab=32000, width=768, layers=args.layers, heads=12, kv_heads=4, mlp=2048,
                              context=2 * args.prompt))
    lm, shared = dx.LM(model=model, params=model.init_params(jax.random.key(0)), vocab_size=32000), bool(args.shared)
    r = np.random.default_rng(0)
    text = lambda n: r.integers(0, 32000, n).tolist()
    if shared:
        beginning = text(args.shared)
        long, base = [beginning + text(16) for _ in range(args.batch)], "dense"
    else:
        long = [text(n) for n in np.linspace(args.prompt, args.prompt // 2, args.batch).astype(int)]
        base = f"dense, prompts of {args.held}"
    cases: dict[str, tuple[Any, Any]] = {"dense": (long, None), **{name: (long, name) for name in args.policies}}
    if not shared:
        cases[base] = [text(args.held)] * args.batch, None
    jobs: dict[str, Job] = {}
    for name in track(cases, "reading prompts", console=Console(stderr=True)):
        for _ in range(1 + shared):
            jobs.pop(name, None)
            jobs[name] = Job.begin(Request.read(lm, cases[name][0], max_new_tokens=args.new, cache=cases[name][1],
                                                chunk=512))
    reading, rounds = {name: job.prefill_seconds for name, job in jobs.items()}, min(8, args.new // (args.repeats + 1))
    advance = lambda job: lambda: seconds(lambda: job.advance(None, rounds))() * 1e3 / rounds
    times = in_turn({name: advance(job) for name, job in jobs.items()}, args.repeats, "decoding")
    live = {name: sum(x.nbytes for x in jax.tree.leaves(job.state.cache)) for name, job in jobs.items()}
    show_table(("cache", "live MB", "of dense", "ms a round", f"over {base}", *["s to read"] * shared),
               [(name, f"{live[name] / 1e6:.1f}", f"{live[name] / live['dense']:.3f}", f"{median(times[name]):.1f}",
                 f"{ratio(times, name, base):.2f}", *[f"{reading[name]:.1f}"] * shared) for name in jobs])


def beams(args: argparse.Namespace) -> None:
    """A step of beam search against as many independent samples, by cache, and against transformers; then the number of
    forwards that drafts save."""
    import torch
    from transformers import AutoModelForCausalLM

    from decodax.io.load import find

    lm, given, prompts = dx.load("pycode"), dict[str, Any](max_new_tokens=args.new, eos_token_id=[]), BEGINNINGS * 2
    network = AutoModelForCausalLM.from_pretrained(find("pycode"), dtype=torch.float32)
    ids = torch.tensor([(lm.tokenizer.encode(text) * 4)[:4] for text in prompts])
    other = seconds(lambda: network.generate(
        ids, attention_mask=torch.ones_like(ids), num_beams=args.beams, max_new_tokens=args.new, do_sample=False,
        min_new_tokens=args.new, pad_token_id=0))
    search = dict(algorithm=dx.algorithms.beam_search(args.beams))
    times = steps(lm, prompts, {
        "samples": dict(num_samples=args.beams, temperature=1.0), "beams": search,
        "beams, hydragen": dict(cache="hydragen", **search), "beams, paged": dict(cache="paged", **search)},
        args.repeats, {"transformers, beams": lambda: other() / args.new * 1e3}, **given)
    show_table(("", "ms a step"), [(name, f"{median(x):.2f}") for name, x in times.items()])

    draft, rows = drafts.DraftModel(dx.load("pycode-draft")), []
    for width in (1, 2, 4, 8):
        plain, found = (dx.generate(lm, list(prompts), algorithm=search, **given)
                        for search in (BeamSearch(width), BeamSearch(width, draft=draft)))
        assert found.text == plain.text
        rows.append((str(width), f"{plain.stats.rounds.mean():.1f}", f"{found.stats.rounds.mean():.1f}"))
    show_table(("beams", "forwards a prompt", "with drafts"), rows)


def constraints(args: argparse.Namespace) -> None:
    """Automata of constraints for a random vocabulary with lengths like a tokenizer's, and a round of decoding."""
    rng, letters = random.Random(0), b"etaoinshrdlucmfwypvbgkjqxzETAOIN0123456789_-\"{}:,."
    words: set[bytes] = set()
    while len(words) < args.size - 256:
        word = bytes(rng.choice(letters) for _ in range(rng.choice([1, 2, 3, 3, 4, 4, 5, 5, 6, 7, 8, 9, 11])))
        words.add(word if rng.random() < 0.4 else b" " + word)
    clock = time.perf_counter()
    trie = TokenTrie.build([bytes([i]) for i in range(256)] + sorted(words))
    rows = [(f"vocabulary of {args.size:,} tokens, once", "", "", "", f"{time.perf_counter() - clock:.2f}")]
    for name, schema in SCHEMAS.items():
        clock = time.perf_counter()
        language = json_schema(schema)
        middle = time.perf_counter()
        found = TokenDfa.build([language], trie, [0])
        rows.append((name, f"{len(language)}", f"{found.next.shape[1]}", f"{middle - clock:.2f}",
                     f"{time.perf_counter() - middle:.2f}"))
    show_table(("", "states", "classes", "s over bytes", "s over tokens"), rows)

    # the grammar accepts the same texts but needs a stack, so a matcher on the host is called in each round
    ways: dict[str, dict[str, Any]] = {
        "free": {}, "constrained": dict(constraint=dx.constraints.regex(r"(?s).*")),
        "by a matcher on the host": dict(constraint=dx.constraints.grammar('start: text\ntext: | /(?s:.)/ text'))}
    prompts = BEGINNINGS * (args.batch // 4 or 1)
    lm = dx.load(args.model)
    times = steps(lm, prompts, ways, args.repeats, max_new_tokens=128, min_new_tokens=128, temperature=1.0)
    show_table((f"a round of {lm.name}, {len(prompts)} rows", "ms", "over free"),
               [(name, f"{median(x):.2f}", f"{median(x) / median(times['free']):.3f}") for name, x in times.items()])


def jobs(args: argparse.Namespace) -> None:
    """Continuous batches against batches that wait for their last prompt, on requests of very unequal lengths.

    Prompts are pieces of decodax's own source; they and the answers have log-normal lengths, and answers end with their
    budgets. Both ways must give the same tokens. With `--header` all prompts begin with the same tokens. Goodput is the
    share of the rows' rounds in which a row was running; for prompts, the share of tokens that are not padding.
    """
    lm, r, count, longest = dx.load(args.model), np.random.default_rng(args.seed), args.requests, args.longest
    ids = lm.tokenizer.encode("".join(path.read_text() for path in sorted(Path(dx.__file__).parent.glob("*.py"))))
    lengths, new = (np.clip(r.lognormal(mean, spread, count), 4, longest // 2).astype(int)
                    for mean, spread in ((4.0, 0.8), (3.4, 1.0)))
    if args.new is not None:
        new[:] = args.new
    starts = r.integers(0, len(ids) - longest, count)
    prompts = [ids[:args.header] + ids[i:i + n] for i, n in zip(starts.tolist(), lengths.tolist(), strict=True)]
    request = Request.read(lm, prompts, max_new_tokens=new.tolist(), batch_size=args.batch_size,
                           algorithm=args.algorithm, min_new_tokens=new.tolist())
    ways: dict[str, Any] = {"slots": functools.partial(through_slots, request)}
    if args.token_budget is not None:
        ways["rides"] = functools.partial(through_slots, request, token_budget=args.token_budget)
    goodput: dict[str, str] = {}
    wanted: list[Any] = []

    def batches() -> None:
        wanted[:] = [through_batches(request)]
        stats = wanted[0].stats
        goodput["batches"] = f"decoding {stats.rounds.sum() / (args.batch_size * stats.forwards):.1%}"

    def slots(name: str) -> None:
        use = Use()
        assert (ways[name](use=use).tokens == wanted[0].tokens).all()
        goodput[name] = (f"decoding {use.goodput:.1%}, prompts {use.prompt_tokens / use.prefill_tokens:.1%}; rows "
                         f"waited {use.stalled:.2f} s for the prompts of others")

    times = in_turn({"batches": seconds(batches), **{name: seconds(functools.partial(slots, name)) for name in ways}},
                    args.repeats)
    header = f" after {args.header} common tokens" if args.header else ""
    show_table(("", "s", "range", "tokens/s", "batches over it", "goodput"), [
        (name, f"{median(x):.2f}", f"{min(x):.2f} to {max(x):.2f}", f"{sum(new) / median(x):.0f}",
         f"{median(times['batches']) / median(x):.2f}", goodput[name]) for name, x in times.items()],
        f"{lm.name}, {count} requests{header}, {sum(map(len, prompts))} prompt tokens, {sum(new)} new ones (mean "
        f"{np.mean(new):.0f}, most {max(new)}), {args.batch_size} at once; {jax.devices()[0].device_kind}; medians of "
        f"{args.repeats}")


def main(args: argparse.Namespace) -> None:
    """Runs the function that is named after the subcommand."""
    {"caches": caches, "beams": beams, "constraints": constraints, "jobs": jobs}[args.command](args)
