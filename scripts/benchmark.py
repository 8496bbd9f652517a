"""Speed of the round against transformers and against itself, side by side in one run.

    python scripts/benchmark.py                       # everything, about ten minutes on two idle cores
    python scripts/benchmark.py --only batch capacity --repeats 3

Needs the test extra (torch, transformers). A 125M Llama shape (width 768, 12 layers, 12/4 heads, MLP 2,048, vocabulary
32,000) with one set of random weights for both sides, float32. What is compared is run in turn, again and again; the
table gives medians, and ratios of what ran next to each other (median of the ratios).
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from decodax.algorithms.speculative import trees
from decodax.core import drivers

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.algorithms.autoregressive import Autoregressive
from decodax.algorithms.speculative import NOTHING, Adaptive, Automatic, Speculative, drafts, measure
from decodax.algorithms.speculative.drafts import PromptLookup
from decodax.core.types import Params
from decodax.core.window import causal
from decodax.io.load import load
from decodax.models.config import llama
from decodax.models.transformer import Transformer
from decodax.sampling import build
from decodax.sampling.draw import first_argmax

SHAPE = dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=4,
             intermediate_size=2048, vocab_size=32000, max_position_embeddings=8192, tie_word_embeddings=False)
PROMPT = 32


def in_turn(sides: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Times of each side, taken in turn after one run of each that does not count."""
    for side in sides.values():
        side()
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            times[name].append(side())
    return times


def median(values: Any) -> float:
    return float(np.median(values))


def ratio(times: dict[str, list[float]], of: str, to: str) -> float:
    """The median of `of / to`, pair by pair."""
    return median(np.array(times[of]) / np.array(times[to]))


def read_speed(megabytes: int = 512) -> float:
    """GB/s that this machine reads from memory with all of its cores."""
    parts = np.array_split(_ones(megabytes), os.cpu_count() or 1)
    with ThreadPoolExecutor(len(parts)) as pool:
        list(pool.map(len, parts))      # starts the threads
        clock = time.perf_counter()
        list(pool.map(lambda part: np.dot(part, part), parts))
        return megabytes * 2**20 / (time.perf_counter() - clock) / 1e9


@functools.cache
def _ones(megabytes: int) -> np.ndarray:
    return np.ones(megabytes << 18, np.float32)


def must_read(weights: Any, cache: Any, live: float) -> int:
    """Bytes that a round of decoding has to read: the weights, of an embedding table nothing unless it is the head too,
    and the live part of a cache, a share of its slots."""
    size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))
    table = size(weights["embed"]) if "lm_head" in weights else 0
    return int(size(weights) - table + live * size(cache))


def of_machine(spent: dict[str, list[float]], side: str, read: int) -> tuple[float, str]:
    """The share of the machine's read bandwidth that a side takes, and both as text.

    Args:
        spent: milliseconds a round of the side, and "read": what `read_speed` gave in turn with it.
        read: see `must_read`.
    """
    own, machine = read / min(spent[side]) / 1e6, max(spent["read"])
    return own / machine, f"{own:.1f} of {machine:.1f} GB/s"


class Bench:
    """Both models with the same weights."""

    def __init__(self, repeats: int, new: int):
        import torch
        import transformers
        self.repeats, self.new, self.torch = repeats, new, torch
        torch.set_num_threads(2)
        torch.manual_seed(0)
        self.reference = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).eval()
        self.reference.generation_config.eos_token_id = None
        with tempfile.TemporaryDirectory() as folder:
            self.reference.save_pretrained(folder)
            lm = load(folder)
        self.model, self.params = lm.model, Params(lm.params)

    def prompts(self, batch: int) -> np.ndarray:
        return np.random.default_rng(0).integers(0, SHAPE["vocab_size"], (batch, PROMPT)).astype(np.int32)

    def begin(self, alg: Any, batch: int, size: int, new: int, prompts: np.ndarray | None = None, **policy: Any) -> Any:
        tokens = np.zeros((batch, size), np.int32)
        given = self.prompts(batch) if prompts is None else prompts
        tokens[:, :given.shape[1]] = given
        chain = build(batch, vocab_size=SHAPE["vocab_size"], **policy)
        s = drivers.begin(alg, self.model, self.params, chain, tokens, np.full(batch, given.shape[1], np.int32),
                          size=size, max_new=np.int32(new), seed=np.uint32(0))
        return chain, drivers.prefill(alg, self.model, self.params, s, width=32)

    def decode(self, batch: int, size: int = 256, alg: Any = None, **policy: Any) -> Callable[[], float]:
        """Milliseconds a round of the decode loop, prefill excluded."""
        alg = alg or Autoregressive()

        def timed() -> float:
            chain, s = self.begin(alg, batch, size, self.new, **policy)
            jax.block_until_ready(s)
            clock = time.perf_counter()
            s = drivers.advance(alg, self.model, self.params, chain, s, jnp.int32(10**6))
            jax.block_until_ready(s)
            return (time.perf_counter() - clock) / int(s.stats.rounds.max()) * 1e3

        return timed

    def generate(self, batch: int) -> Callable[[], float]:
        """Milliseconds a new token of the whole call, prefill included, as transformers' `generate` is timed."""
        def timed() -> float:
            clock = time.perf_counter()
            chain, s = self.begin(Autoregressive(), batch, 256, self.new)
            s = drivers.advance(Autoregressive(), self.model, self.params, chain, s, jnp.int32(10**6))
            self.tokens = np.asarray(s.tokens)[:, PROMPT:PROMPT + self.new]
            return (time.perf_counter() - clock) / self.new * 1e3

        return timed

    def transformers(self, batch: int) -> Callable[[], float]:
        ids = self.torch.tensor(self.prompts(batch).astype(np.int64))

        def timed() -> float:
            clock = time.perf_counter()
            with self.torch.inference_mode():
                out = self.reference.generate(ids, attention_mask=self.torch.ones_like(ids), do_sample=False,
                                              max_new_tokens=self.new, min_new_tokens=self.new)
            self.expected = out[:, PROMPT:].numpy()
            return (time.perf_counter() - clock) / self.new * 1e3

        return timed

    def bare(self, batch: int, width: int = 1, size: int = 256) -> Callable[[], float]:
        """Milliseconds of a loop that only scores a window, takes an argmax and commits one entry."""
        @jax.jit
        def loop(params: Any, token: Array, length: Array, cache: Any, rounds: Array) -> Any:
            def body(carry: Any) -> Any:
                i, token, length, cache = carry
                out = self.model.apply(params, causal(jnp.repeat(token[:, None], width, 1), length), cache)
                token = first_argmax(out.logits()[:, 0])
                slots = jnp.where((token >= 0)[:, None] & (jnp.arange(width) == 0), length[:, None], -1)
                return i + 1, token, length + 1, cache.commit(out.entries, slots)

            return lax.while_loop(lambda c: c[0] < rounds, body, (jnp.int32(0), token, length, cache))

        def timed() -> float:
            _, s = self.begin(Autoregressive(), batch, size, self.new)
            args = (self.params.target, s.newest, s.length - 1, s.cache, jnp.int32(self.new))
            jax.block_until_ready(args)
            clock = time.perf_counter()
            jax.block_until_ready(loop(*args))
            return (time.perf_counter() - clock) / self.new * 1e3

        return timed

    def batch(self) -> list[dict[str, Any]]:
        rows = []
        for batch, bar in ((1, 1.0), (8, 1.0)):
            times = in_turn({"decodax": self.generate(batch), "transformers": self.transformers(batch)}, self.repeats)
            same = float((self.tokens == self.expected).mean())
            rows.append(dict(what=f"greedy, batch {batch}: decodax against transformers `generate`",
                             figure=f"{median(times['decodax']):.1f} against {median(times['transformers']):.1f} "
                                    "ms a step",
                             ratio=ratio(times, "transformers", "decodax"), bar=f"at least {bar:.2f}",
                             note=f"{same:.1%} of tokens equal", times=times))
            times = in_turn({"decode": self.decode(batch), "read": read_speed}, self.repeats)
            cache = self.begin(Autoregressive(), batch, 256, self.new)[1].cache
            share, figure = of_machine(times, "decode", must_read(self.params.target, cache,
                                                                  (PROMPT + self.new / 2) / 256))
            rows.append(dict(what=f"decode, batch {batch}: what it reads against what the machine reads at best",
                             figure=figure, ratio=share, bar="none", times=times))
        return rows

    def capacity(self) -> list[dict[str, Any]]:
        rows = []
        for batch in (1, 8):
            times = in_turn({"4096": self.decode(batch, 4096), "256": self.decode(batch, 256)}, self.repeats)
            rows.append(dict(what=f"capacity 4,096 against 256 at one live length, batch {batch}",
                             figure=f"{median(times['4096']):.1f} against {median(times['256']):.1f} ms a step",
                             ratio=ratio(times, "4096", "256"), bar="at most 1.10", times=times))
        return rows

    def window(self) -> list[dict[str, Any]]:
        times = in_turn({"8": self.bare(1, 8), "1": self.bare(1, 1)}, self.repeats)
        return [dict(what="a window of 8 tokens against 1, batch 1", ratio=ratio(times, "8", "1"), bar="at most 1.70",
                     figure=f"{median(times['8']):.1f} against {median(times['1']):.1f} ms", times=times)]

    def overhead(self) -> list[dict[str, Any]]:
        rows = []
        for batch in (1, 8):
            sides = {"greedy": self.decode(batch), "bare": self.bare(batch),
                     "sampled": self.decode(batch, temperature=0.8)}
            times = in_turn(sides, self.repeats)
            for side in ("greedy", "sampled"):
                rows.append(dict(what=f"a {side} round against the bare forward + commit, batch {batch}",
                                 figure=f"{median(times[side]):.2f} against {median(times['bare']):.2f} ms",
                                 ratio=ratio(times, side, "bare"), bar="at most 1.03", times=times))
        return rows

    def lookup(self) -> list[dict[str, Any]]:
        """Sources that draft from text and tables: a round against the bare forward of a window as wide."""
        rows = []
        algorithms = {"prompt-lookup": Speculative(PromptLookup(length=7)),
                      "sam-decoding": Speculative(drafts.SuffixAutomaton(length=7)),
                      "ngram": Speculative(drafts.NGram(length=7)),
                      "token-recycling": Speculative(drafts.TokenRecycling(tree=trees.Fixed.balanced(3, 1, 1))),
                      "jacobi": Speculative(drafts.Jacobi(length=7))}
        sides = {name: self.decode(1, alg=alg) for name, alg in algorithms.items()}
        widths = {name: 10 if name == "token-recycling" else 8 for name in algorithms}
        bare = {f"bare {w}": self.bare(1, w) for w in sorted(set(widths.values()))}
        times = in_turn({**sides, **bare}, self.repeats)
        for name, width in widths.items():
            rows.append(dict(what=f"a {name} round against the bare window of {width} + commit, batch 1",
                             figure=f"{median(times[name]):.1f} against {median(times[f'bare {width}']):.1f} ms",
                             ratio=ratio(times, name, f"bare {width}"), bar="at most 1.05", times=times))
        return rows

    def draft(self) -> list[dict[str, Any]]:
        """A draft model's round against its forwards and the verifying forward, each bare."""
        small = Transformer(llama(vocab=SHAPE["vocab_size"], width=256, layers=4, heads=4, kv_heads=2, mlp=688,
                                  context=8192))
        weights, K, rows = small.init_params(jax.random.key(0)), 4, []
        target = self.params
        for batch in (1, 8):
            alg = Speculative(drafts.DraftModel(small), shape=trees.Chain(K))
            sides = {"round": self._with(self.model, target.replace(draft=weights), self.decode(batch, alg=alg)),
                     "verify": self.bare(batch, K + 1),
                     "draft": self._with(small, Params(weights), self.bare(batch))}
            times = in_turn(sides, self.repeats)
            parts = np.array(times["verify"]) + K * np.array(times["draft"])
            rows.append(dict(what=f"a round of {K} drafts by a small model against its {K} forwards and the verifying "
                                  f"one, batch {batch}", figure=f"{median(times['round']):.1f} against "
                                                                f"{median(parts):.1f} ms",
                             ratio=median(np.array(times["round"]) / parts), bar="at most 1.10", times=times))
        return rows

    def _with(self, model: Any, params: Params, timed: Callable[[], float]) -> Callable[[], float]:
        """`timed` with another model."""
        def run() -> float:
            before = self.model, self.params
            self.model, self.params = model, params
            try:
                return timed()
            finally:
                self.model, self.params = before

        return run

    def automatic(self) -> list[dict[str, Any]]:
        """The automatic draft length on text that nothing can be looked up in."""
        rows = []
        for batch in (1, 8, 32):
            arms = (NOTHING, *(Speculative(PromptLookup(length=7), shape=trees.Chain(k)) for k in (2, 4, 7)))
            costs = measure(self.model, self.params.target, arms, batch=batch, vocab_size=SHAPE["vocab_size"])
            alg = Adaptive(arms, Automatic(costs))
            times = in_turn({"plain": self.a_token(batch, Autoregressive()), "automatic": self.a_token(batch, alg)},
                            self.repeats)
            rows.append(dict(what=f"automatic draft length against plain, sampled text, batch {batch}",
                             figure=f"{median(times['plain']):.1f} against {median(times['automatic']):.1f} ms a token",
                             ratio=ratio(times, "plain", "automatic"), bar="at least 1.00", times=times))
        return rows

    def a_token(self, batch: int, alg: Any) -> Callable[[], float]:
        """Milliseconds of the decode loop for each token of a row, sampled."""
        def timed() -> float:
            chain, s = self.begin(alg, batch, 256, self.new, temperature=1.0)
            jax.block_until_ready(s)
            clock = time.perf_counter()
            jax.block_until_ready(drivers.advance(alg, self.model, self.params, chain, s, jnp.int32(10**6)))
            return (time.perf_counter() - clock) / self.new * 1e3

        return timed

    def retraces(self) -> list[dict[str, Any]]:
        alg = Autoregressive()
        self.decode(1, temperature=0.5)()
        programs: Any = (drivers.begin, drivers.commit_prompts, drivers.advance)
        before = sum(p._cache_size() for p in programs)
        for seed, temperature in enumerate((0.0, 0.7, 1.3)):
            prompts = np.random.default_rng(seed).integers(0, 32000, (1, 9 + seed)).astype(np.int32)
            chain, s = self.begin(alg, 1, 256, 5 + seed, prompts, temperature=temperature, eos=[seed])
            drivers.advance(alg, self.model, self.params, chain, s, jnp.int32(100))
        count = sum(p._cache_size() for p in programs) - before
        return [dict(what="programs traced again by other prompts, temperatures, EOS ids, budgets", figure=str(count),
                     ratio=float(count), bar="0", times={})]


def cold_start(repeats: int) -> list[dict[str, Any]]:
    """Seconds from starting Python to the first piece of text of the shipped model, nothing cached."""
    program = ("import decodax as dx; lm = dx.load('pycode'); "
               "s = dx.stream(lm, 'def fib(n):', max_new_tokens=8); next(s)")
    times = []
    for _ in range(repeats):
        clock = time.perf_counter()
        subprocess.run([sys.executable, "-c", program], check=True,
                       env={**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"})
        times.append(time.perf_counter() - clock)
    return [dict(what="cold start of `pycode` to its first text, no compilation cache", figure=f"{median(times):.1f} s",
                 ratio=median(times), bar="under 10 s", times={"cold": times})]


def main() -> None:
    parts = ["batch", "capacity", "window", "overhead", "lookup", "draft", "automatic", "retraces", "cold"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=parts, default=parts, help="which comparisons to run")
    parser.add_argument("--repeats", type=int, default=5, help="times each side is taken (default 5)")
    parser.add_argument("--new", type=int, default=128, help="new tokens (default 128)")
    parser.add_argument("--json", type=Path, help="also write figures and all times here")
    args = parser.parse_args()

    bench = Bench(args.repeats, args.new) if set(args.only) - {"cold"} else None
    rows = []
    print(f"# {platform.processor() or platform.machine()}, {os.cpu_count()} cores; JAX {jax.__version__}; "
          f"{args.repeats} repeats, prompt {PROMPT}, {args.new} new tokens, float32\n")
    print("| comparison | median | ratio | bar |\n|---|---|---|---|")
    for part in args.only:
        for row in cold_start(args.repeats) if part == "cold" else getattr(bench, part)():
            rows.append(row)
            note = f" ({row['note']})" if "note" in row else ""
            print(f"| {row['what']}{note} | {row['figure']} | {row['ratio']:.2f} | {row['bar']} |", flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
