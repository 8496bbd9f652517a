"""Accuracy of cache policies: right answers on long texts against the bytes that are kept.

The questions are those of `decodax.bench.problems.recall`, or for models of natural language those of
`decodax.bench.problems.prose` (the task "prose"). A policy sees the question when it chooses (aware), or
chooses from the text alone (agnostic: `context=` of `decodax.generate`), as when several questions are asked about one
text. Its budget is a share of the text, or of what each query reads; codecs have a size of their own. Evictions choose
once, after the text. What policies need to know of heads, layers, channels or keys is measured on other texts, unless
it takes long training. Bytes are those that are held after the question, with codes, steps and positions, over those of
a dense cache.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console
from rich.progress import track

from decodax import train
from decodax.algorithms.speculative import Speculative
from decodax.algorithms.speculative.drafts import OwnCache
from decodax.bench.problems import prose, recall
from decodax.cache import Wrapper, dense
from decodax.cache.tail import Tail
from decodax.caches import make
from decodax.caches.bounded.subgen import SubGenCache
from decodax.caches.evict.evicting import Evicting
from decodax.caches.prefill.quick_prefill import QuickPrefillCache
from decodax.caches.quantize.minicache import MiniCacheCache
from decodax.caches.quantize.qaq import QAQCache
from decodax.caches.quantize.quantized import QuantizedCache
from decodax.caches.quantize.zipcache import ZipCacheCache
from decodax.caches.sparse.shadowkv import ShadowKVCache
from decodax.common.registry import ALGORITHMS, CACHES
from decodax.engine.batch import Job
from decodax.engine.request import Request
from decodax.front.generate import generate

MODES = ("aware", "agnostic")

REMOVED = (0.25, 0.5, 0.8)

BETWEEN = ("clusterkv", "attention-predictor", "subgen", "tim", "leank")
"""Policies whose `every` is not the tokens between two evictions."""

SIZED_BY = {"streaming-llm": "recent_size", "less": "recent_size", "freqkv": "size", "quick-prefill": "keep"}
"""The option that says how much of a text is kept, where it is not `budget`."""


@dataclasses.dataclass(frozen=True)
class CacheFigures:
    """The result of one measurement: a cache policy (name with options), the share of the text's tokens that it removes
    (None: its size does not depend on a share), the mode, task and seed; the share of right answers, and the bytes of
    the cache relative to those of a dense one."""

    policy: str
    removed: float | None
    mode: str
    task: str
    seed: int
    right: float
    kept: float


def sized(policy: str, removed: float, length: int, **measured: Any) -> Any:
    """Returns the cache config of a policy that keeps the share `1 - removed` of a text of `length` tokens; None if the
    policy has no option for its size. `measured` are options from `fitted`; one called `layers` may be a function,
    called with the share to keep, that returns the shares of the layers."""
    name, options = CACHES.parse(policy)
    entry, given = CACHES[name], {**measured, **options}
    if "every" in entry.options and entry.name not in BETWEEN:
        given.setdefault("every", None)
    left = 1 - removed
    if entry.name in SIZED_BY:
        sinks = given.get("start_size", 4) if SIZED_BY[entry.name] == "recent_size" else 0
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
    """Returns those options of a policy that have to be measured on a model: on `texts` (token ids), or on `probes`,
    texts with marked answers from `needles`. Options that take long training are left out."""
    name, options = CACHES.parse(policy)
    entry = CACHES[name]
    given = {**{k: v.default for k, v in entry.options.items()}, **options}
    fits: dict[str, Callable[[], Any]] = {
        "codebooks": lambda: train.fit_codebooks(lm, texts), "features": lambda: train.fit_features(lm, texts),
        "order": lambda: train.fit_order(lm, texts, given["heads"]), "heads": lambda: train.fit_heads(lm, probes),
        "predictors": lambda: train.fit_predictors(lm, texts),
        "books": lambda: train.fit_key_books(lm, texts, count=1024),
        "layers": lambda: lambda left: train.fit_layers(lm, texts, left),
        "channels": lambda: train.fit_channels(lm, probes, align=8, steps=(400, 40), sinks=given["sinks"],
                                               recent=given["recent"])}
    if "budget" not in entry.options:       # these are other heads than those of HeadKV
        del fits["heads"]
    return {name: fit() for name, fit in fits.items() if name in entry.options and given[name] in (None, ())}


def problems_of(task: str, count: int, length: int, seed: int) -> Sequence[recall.RecallProblem]:
    """Returns `count` problems with texts of `length` words, of "prose" or a task of `recall`."""
    return prose.problems(count, length, seed) if task == "prose" else recall.problems(task, count, length, seed)


def needles(lm: Any, task: str, length: int, count: int = 16) -> list[Any]:
    """Returns `count` texts of a task, of about `length` words, that hide a fact and end with a question about it, as
    `decodax.train.Probe`s in tokens of the model, which mark the position of the fact."""
    probes = []
    for problem in problems_of(task, count, length, 1000):
        words = problem.context.split()
        at = words.index(f"{problem.answer}.") if task == "prose" else words.index(problem.question.split()[1]) + 1
        before = " ".join(words[:at])
        start, stop = (len(lm.tokenizer.encode(text)) for text in (before, f"{before} {problem.answer}"))
        probes.append(train.Probe(lm.tokenizer.encode(problem.prompt), start, stop))
    return probes


def sizes(lm: Any, policies: Sequence[str], removed: Sequence[float], length: int,
          left_out: list[str] | None, task: str = "needle") -> list[tuple[str, float | None, Any]]:
    """Returns what `run` measures, a dense cache first: for each policy and each share of `removed`, the policy's name,
    the share (None for a policy without a size) and the cache config. For `length` and `left_out` see `run`. Policies
    that measure something do so on texts of `task`, and budgets are shares of such a text, in tokens."""
    probes = needles(lm, task, length)
    length = round(statistics.mean(len(lm.tokenizer.encode(problem.context))
                                   for problem in problems_of(task, 16, length, 1000)))
    texts = [probe.tokens for probe in probes[:8]]
    cases: list[tuple[str, float | None, Any]] = [("dense", None, None)]
    for policy in policies:
        name, options = CACHES.parse(policy)
        found: dict[str, Any] | None = None
        for share in removed:
            try:
                found = fitted(policy, lm, texts, probes) if found is None else found
                kind = sized(policy, share, length, **found)
                if kind is None:
                    cases.append((policy, None, make(name, **{**found, **options})))
                    break
                cases.append((policy, share, kind))
            except ValueError as error:
                if left_out is None:
                    raise
                left_out.append(f"{policy} with {share:.0%} removed: {error}")
    return cases


def run(lm: Any, policies: Sequence[str], *, removed: Sequence[float] = REMOVED, modes: Sequence[str] = MODES,
        tasks: Sequence[str] | None = None, problems: int = 20, length: int = 1024, seeds: Sequence[int] = (0, 1, 2),
        report: Callable[[int, int, str], None] | None = None, known: Sequence[CacheFigures] = (),
        save: Callable[[list[CacheFigures]], None] | None = None, left_out: list[str] | None = None
        ) -> list[CacheFigures]:
    """Measures how many questions about long texts a model answers with each cache policy at each size, and with a
    dense cache. Arguments that are not described are those of the command line.

    `report` is called before each run with the runs done, the runs in all, and the name of this one, `save` after it
    with all rows. Rows in `known` are not measured again. `left_out` collects the reasons why a policy or a size is not
    possible here; None: that is an error.
    """
    tasks = list(recall.ANSWERED if tasks is None else tasks)
    if "prose" in tasks and len(tasks) > 1:
        raise ValueError(f"tasks: got {', '.join(tasks)}; takes \"prose\", whose texts are English, alone")
    cases = sizes(lm, policies, removed, length, left_out, "prose" if "prose" in tasks else "needle")
    before = {(row.policy, row.removed, row.mode, row.seed, row.task): row for row in known}
    out, done, total, dense = list[CacheFigures](), 0, len(cases) * len(modes) * len(seeds), 1.0
    for mode, seed in itertools.product(modes, seeds):
        asked = [problem for task in tasks for problem in problems_of(task, problems, length, seed)]
        aware = mode == "aware"
        prompts = [problem.prompt if aware else problem.question for problem in asked]
        context = None if aware else [problem.context for problem in asked]
        found = [[before.get((policy, share, mode, seed, task)) for task in tasks] for policy, share, _ in cases]
        for (policy, share, kind), rows in zip(cases, found, strict=True):
            done += 1
            # the others' bytes are relative to the dense cache's
            if all(rows) and (policy != "dense" or all(map(all, found))):
                out += filter(None, rows)
                continue
            if report is not None:
                report(done - 1, total, f"{policy} {'' if share is None else f'{share:.0%} removed '}{mode}")
            job = Job.begin(Request.read(lm, prompts, cache=kind, context=context, max_new_tokens=24))
            bytes_held = held(job.state.cache)
            dense = bytes_held if policy == "dense" else dense
            job.advance(None)
            answers = job.result().text
            assert answers is not None
            right = [problem.correct(text) for problem, text in zip(asked, answers, strict=True)]
            for i, task in enumerate(tasks):
                share_right = sum(right[i * problems:(i + 1) * problems]) / problems
                out.append(CacheFigures(policy, share, mode, task, seed, share_right, bytes_held / dense))
            if save is not None:
                save(out)
    return out


def means(rows: Sequence[CacheFigures]) -> dict[tuple[str, float | None, str], tuple[float, float, float]]:
    """Returns for each policy, size and mode the mean of right answers over tasks, its standard deviation over seeds,
    and the bytes."""
    groups: dict[tuple[str, float | None, str], list[CacheFigures]] = {}
    for row in rows:
        groups.setdefault((row.policy, row.removed, row.mode), []).append(row)
    out = {}
    for key, own in groups.items():
        by_seed = [statistics.mean(r.right for r in own if r.seed == seed) for seed in sorted({r.seed for r in own})]
        spread = statistics.stdev(by_seed) if len(by_seed) > 1 else 0.0
        out[key] = statistics.mean(by_seed), spread, statistics.mean(r.kept for r in own)
    return out


def best(rows: Sequence[CacheFigures], mode: str, removed: float, count: int = 3) -> list[str]:
    """Returns the names of the `count` policies with the most right answers at the size `removed` in a mode. A policy
    counts only if its cache has at most the share `1 - removed + 0.05` of a dense one's bytes, since some keep more
    than their size says."""
    found = {policy: mean for (policy, share, how), (mean, _, kept) in means(rows).items()
             if how == mode and share == removed and kept <= 1.05 - removed}
    return sorted(found, key=lambda policy: -found[policy])[:count]


DRAFTS = ("full", "magicdec:budget=128", "magicdec:budget=256", "magicdec:budget=512",
          "magicdec:budget=256,keep=sink-window", "quantspec:group=64,weights=None", "quantspec:group=64")


class Drafted(NamedTuple):
    """The result of drafting with a smaller cache: the name of the draft method ("full": with the whole cache), the
    share of its tokens that are accepted, the new tokens for each forward pass of the whole model, and the share of
    answers that equal those of plain decoding."""

    system: str
    accepted: float
    per_forward: float
    same: float


def run_drafts(lm: Any, systems: Sequence[str] = DRAFTS, *, problems: int = 20, length: int = 1024,
        seed: int = 0) -> list[Drafted]:
    """Answers questions of each task in `recall.ANSWERED` by speculative decoding with drafts on smaller caches, and
    returns a result for each draft method.

    Args:
        lm: the model.
        systems: the draft methods, as for `algorithm=`; "full": drafts on the whole cache.
        problems: number of questions of each task.
        length: number of words of a prompt's text.
        seed: seed of the questions.
    """
    prompts = [p.prompt for task in recall.ANSWERED for p in recall.problems(task, problems, length, seed)]
    out = []
    for text in track(systems, "drafting", console=Console(stderr=True)):
        method: Any = Speculative(OwnCache(dense)) if text == "full" else ALGORITHMS.object(text, lm)
        plain, drafted = (generate(lm, prompts, max_new_tokens=24, **given) for given in (
            dict(cache=method.draft.kind if method.draft.alone else None), dict(algorithm=method)))
        same = [plain.row(i).tolist() == drafted.row(i).tolist() for i in range(len(prompts))]
        stats = drafted.stats
        out.append(Drafted(text, float(stats.accepted.sum() / stats.drafted.sum()), stats.tokens_per_forward,
                           sum(same) / len(same)))
    return out


def held(cache: Any) -> float:
    """Returns the mean number of bytes of a row that a cache has stored, without the unused room in its arrays."""
    size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))
    if isinstance(cache, Evicting):         # a key, a value and a position for each token of each head
        return sum(float(np.sum(count)) * (kv.shape[-1] * kv.dtype.itemsize + 4)
                   for kv, count in zip(cache.kv, cache.count, strict=True))
    if isinstance(cache, Wrapper):
        return held(cache.base)
    # arrays, the tokens that they have room for, and the tokens of each row in them
    if isinstance(cache, QuantizedCache):
        parts: list[Any] = [(cache.codes, cache.slots, cache.held - cache.whole),
                            (cache.rest, cache.rest[0].shape[2], cache.whole)]
    elif isinstance(cache, Tail):
        codes: Any = (cache.grades if isinstance(cache, ZipCacheCache) else cache.pools if isinstance(cache, QAQCache)
                      else (cache.prompt, cache.pairs) if isinstance(cache, MiniCacheCache) else ())
        room = sum(x.keys.shape[2] for x in cache.grades[0]) if isinstance(cache, ZipCacheCache) else cache.size
        parts = [(codes, room, cache.start), (cache.kv, cache.kv[0].shape[2], cache.length - cache.start)]
    elif isinstance(cache, ShadowKVCache):
        parts = [(cache.shadows, cache.size, cache.began),
                 *((kv, kv.shape[2], cache.kept + cache.length - cache.began) for kv in cache.kv)]
    else:       # other arrays grow with the text as keys and values do, except sketches, which have a fixed size
        slots, counted = cache.kv[0].shape[2], cache.count if isinstance(cache, QuickPrefillCache) else cache.length
        sketched = isinstance(cache, SubGenCache)
        parts = [(cache.kv if sketched else cache, slots, np.minimum(counted, slots)),
                 *([(cache.sketches, 1, 1)] if sketched else [])]
    return sum(size(tree) / room * float(np.mean(np.asarray(count, float))) for tree, room, count in parts)
