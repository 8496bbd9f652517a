"""Speed of the round against transformers and against itself, side by side in one run.

A 125M Llama shape (width 768, 12 layers, 12/4 heads, MLP 2,048, vocabulary 32,000) has one set of random weights for
both sides, in float32. The sides of a comparison run in turn; the table gives medians, and medians of the ratios of
neighbouring runs.
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
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.algorithms.plain import Autoregressive
from decodax.algorithms.speculative import NOTHING, Adaptive, Automatic, Speculative, drafts, measure, trees
from decodax.algorithms.speculative.drafts import PromptLookup
from decodax.algorithms.speculative.heads.source import HeadWeights, TrainedHead
from decodax.bench.figures import show_table
from decodax.bench.timing import Times, in_turn, median, ratio, seconds
from decodax.core import drivers
from decodax.core.types import Params, embeddings, logits_of
from decodax.core.window import causal
from decodax.io.load import load
from decodax.models.config import llama
from decodax.models.transformer import Transformer
from decodax.sampling import build
from decodax.sampling.draw import first_argmax
from decodax.train.drafting.systems import SYSTEMS

SHAPE = dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=4,
             intermediate_size=2048, vocab_size=32000, max_position_embeddings=8192, tie_word_embeddings=False)
PROMPT = 32
Timed = Callable[[], float]
size_of = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))


def read_speed(megabytes: int = 512) -> float:
    """Returns the GB/s at which all cores of this machine read memory."""
    parts = np.array_split(_ones(megabytes), os.cpu_count() or 1)
    with ThreadPoolExecutor(len(parts)) as pool:
        list(pool.map(len, parts))      # starts the threads
        return megabytes * 2**20 / seconds(lambda: list(pool.map(lambda part: np.dot(part, part), parts)))() / 1e9


@functools.cache
def _ones(megabytes: int) -> np.ndarray:
    return np.ones(megabytes << 18, np.float32)


class Rounds:
    """Decoding of a model, timed without its prefill, in milliseconds.

    Attributes:
        new: number of new tokens. lowest: lowest token id of the prompts. tokens: of the last run, `i32[B, new]`.
    """

    def __init__(self, model: Transformer, params: Params, new: int, lowest: int = 0):
        self.model, self.params, self.new, self.lowest = model, params, new, lowest
        self.vocab = model.config.vocab
        self.tokens = np.zeros((0, new), np.int32)

    def prompts(self, batch: int) -> np.ndarray:
        """Returns random prompts `i32[batch, PROMPT]`."""
        return np.random.default_rng(0).integers(self.lowest, self.vocab, (batch, PROMPT)).astype(np.int32)

    def begin(self, alg: Any, batch: int, size: int, new: int, **policy: Any) -> Any:
        """Returns the sampling chain and the state after the prefill."""
        tokens = np.zeros((batch, size), np.int32)
        tokens[:, :PROMPT] = self.prompts(batch)
        chain = build(batch, vocab_size=self.vocab, **policy)
        s = drivers.begin(alg, self.model, self.params, chain, tokens, np.full(batch, PROMPT, np.int32),
                          size=size, max_new=np.int32(new), seed=np.uint32(0))
        return chain, drivers.prefill(alg, self.model, self.params, s, width=32)

    def decode(self, batch: int, size: int = 256, alg: Any = None, by: str = "round", **policy: Any) -> Timed:
        """Returns a timer of the decode loop: of a "round", or of a "token" of a row."""
        alg = alg or Autoregressive()

        def timed() -> float:
            chain, s = jax.block_until_ready(self.begin(alg, batch, size, self.new, **policy))
            clock = time.perf_counter()
            s = jax.block_until_ready(drivers.advance(alg, self.model, self.params, chain, s, jnp.int32(10**6)))
            spent = time.perf_counter() - clock
            self.tokens = np.asarray(s.tokens)[:, PROMPT:PROMPT + self.new]
            return 1e3 * spent / (int(s.stats.rounds.max()) if by == "round" else self.new)

        return timed

    def bare(self, batch: int, width: int = 1, size: int = 256) -> Timed:
        """Returns a timer of a loop that only scores a window, takes an argmax and commits one entry."""
        def timed() -> float:
            _, s = self.begin(Autoregressive(), batch, size, self.new)
            args = (self.params.target, s.newest, s.length - 1, s.cache, jnp.int32(self.new))
            jax.block_until_ready(args)
            return seconds(lambda: jax.block_until_ready(_bare(self.model, width, *args)))() / self.new * 1e3

        return timed

    def bare_head(self, head: Any, batch: int, width: int, size: int = 256) -> Timed:
        """Returns a timer of a loop that runs a trained head on `width` pairs, takes an argmax and commits them."""
        def timed() -> float:
            _, s = self.begin(Autoregressive(), batch, size, self.new)
            cache = head.init_cache(batch, size, jnp.float32)
            args = (self.params, s.newest, s.length - 1, cache, jnp.int32(self.new))
            jax.block_until_ready(args)
            return seconds(lambda: jax.block_until_ready(_bare_head(self.model, head, width, *args)))() / self.new * 1e3

        return timed

    def bandwidth(self, spent: Times, side: str, batch: int = 1) -> tuple[float, str]:
        """Returns the share of the machine's read bandwidth that a side reaches, and both bandwidths as text.

        A round has to read the weights, an embedding table only if it is also the head, and the live share of the slots
        of the cache. `spent` has milliseconds a round of the side, and under "read" results of `read_speed` that were
        taken in turn with them.
        """
        weights, cache = self.params.target, self.begin(Autoregressive(), batch, 256, self.new)[1].cache
        table = size_of(weights["embed"]) if "lm_head" in weights else 0
        read = int(size_of(weights) - table + (PROMPT + self.new / 2) / 256 * size_of(cache))
        own, machine = read / min(spent[side]) / 1e6, max(spent["read"])
        return own / machine, f"{own:.1f} of {machine:.1f} GB/s"


@functools.partial(jax.jit, static_argnums=(0, 1))
def _bare(model: Transformer, width: int, params: Any, token: Array, length: Array, cache: Any, rounds: Array) -> Any:
    def body(carry: Any) -> Any:
        i, token, length, cache = carry
        out = model.apply(params, causal(jnp.repeat(token[:, None], width, 1), length), cache)
        token = first_argmax(out.logits()[:, 0])
        slots = jnp.where((token >= 0)[:, None] & (jnp.arange(width) == 0), length[:, None], -1)
        return i + 1, token, length + 1, cache.commit(out.entries, slots)

    return lax.while_loop(lambda c: c[0] < rounds, body, (jnp.int32(0), token, length, cache))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _bare_head(model: Transformer, head: Any, width: int, params: Params, token: Array, length: Array, cache: Any,
               rounds: Array) -> Any:
    weights, taps = params.draft.head, max(len(head.taps), 1)

    def body(carry: Any) -> Any:
        i, token, length, cache, state = carry
        pairs = causal(jnp.repeat(token[:, None], width, 1), length)
        if width > 1:               # verified tokens, whose states come from the target's features
            features = jnp.broadcast_to(state[:, :1, :1], (*pairs.tokens.shape, taps * head.target_width))
            state = head.enter(weights, features)
        step = head.step(weights, pairs.tokens, lambda x: embeddings(model, params.target, x), state, pairs.positions,
                         0, lambda layer, q, k, v, **options: cache.attend(layer, q, k, v, pairs, **options))
        logits = head.logits(weights, step.hidden[:, -1:], 0, lambda x: logits_of(model, params.target, x))
        return (i + 1, first_argmax(logits[:, 0]), length + 1, cache.commit(step.entries, pairs.positions),
                step.state[:, :width])

    state = jnp.zeros((len(token), width, head.state_width))
    return lax.while_loop(lambda c: c[0] < rounds, body, (jnp.int32(0), token, length, cache, state))


class Bench(Rounds):
    """The model in both libraries, with the same weights; each method is a comparison and returns rows of the table."""

    def __init__(self, repeats: int, new: int):
        import torch
        import transformers
        self.repeats, self.torch = repeats, torch
        torch.set_num_threads(2)
        torch.manual_seed(0)
        self.reference = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).eval()
        self.reference.generation_config.eos_token_id = None
        with tempfile.TemporaryDirectory() as folder:
            self.reference.save_pretrained(folder)
            lm = load(folder)
        super().__init__(lm.model, Params(lm.params), new)

    def times(self, **sides: Timed) -> Times:
        """Times sides in turn."""
        return in_turn({name.replace("_", " "): side for name, side in sides.items()}, self.repeats)

    def generate(self, batch: int) -> Timed:
        """Returns a timer of the whole call, prefill included, a new token."""
        def run() -> None:
            chain, s = self.begin(Autoregressive(), batch, 256, self.new)
            s = drivers.advance(Autoregressive(), self.model, self.params, chain, s, jnp.int32(10**6))
            self.tokens = np.asarray(s.tokens)[:, PROMPT:PROMPT + self.new]

        return lambda: seconds(run)() / self.new * 1e3

    def transformers(self, batch: int) -> Timed:
        """Returns a timer of `generate` of transformers, a new token."""
        ids = self.torch.tensor(self.prompts(batch).astype(np.int64))

        def run() -> None:
            with self.torch.inference_mode():
                out = self.reference.generate(ids, attention_mask=self.torch.ones_like(ids), do_sample=False,
                                              max_new_tokens=self.new, min_new_tokens=self.new)
            self.expected = out[:, PROMPT:].numpy()

        return lambda: seconds(run)() / self.new * 1e3

    def batch(self) -> list[dict[str, Any]]:
        rows = []
        for batch in (1, 8):
            times = self.times(decodax=self.generate(batch), transformers=self.transformers(batch))
            same = float((self.tokens == self.expected).mean())
            rows.append(row(f"greedy, batch {batch}: decodax against transformers `generate` ({same:.1%} of tokens "
                            "equal)", times, "transformers", "decodax", "at least 1.00", "ms a step"))
            times = self.times(decode=self.decode(batch), read=read_speed)
            share, figure = self.bandwidth(times, "decode", batch)
            rows.append(dict(what=f"decode, batch {batch}: what it reads against what the machine reads at best",
                             figure=figure, ratio=share, bar="none", times=times))
        return rows

    def capacity(self) -> list[dict[str, Any]]:
        return [row(f"capacity 4,096 against 256 at one live length, batch {batch}",
                    self.times(large=self.decode(batch, 4096), small=self.decode(batch, 256)), "large", "small",
                    "at most 1.10", "ms a step") for batch in (1, 8)]

    def window(self) -> list[dict[str, Any]]:
        return [row("a window of 8 tokens against 1, batch 1", self.times(eight=self.bare(1, 8), one=self.bare(1, 1)),
                    "eight", "one", "at most 1.70")]

    def overhead(self) -> list[dict[str, Any]]:
        sides = lambda batch: self.times(greedy=self.decode(batch), bare=self.bare(batch),
                                         sampled=self.decode(batch, temperature=0.8))
        return [row(f"a {side} round against the bare forward + commit, batch {batch}", times, side, "bare",
                    "at most 1.03") for batch in (1, 8) for times in [sides(batch)] for side in ("greedy", "sampled")]

    def lookup(self) -> list[dict[str, Any]]:
        """Sources that draft from text and tables: a round against the bare forward of a window as wide."""
        sources = {"prompt-lookup": PromptLookup(length=7), "sam-decoding": drafts.SuffixAutomaton(length=7),
                   "ngram": drafts.NGram(length=7),
                   "token-recycling": drafts.TokenRecycling(tree=trees.Fixed.balanced(3, 1, 1)),
                   "jacobi": drafts.Jacobi(length=7)}
        widths = {name: 10 if name == "token-recycling" else 8 for name in sources}
        sides = {name: self.decode(1, alg=Speculative(source)) for name, source in sources.items()}
        times = in_turn({**sides, **{f"bare {w}": self.bare(1, w) for w in sorted(set(widths.values()))}}, self.repeats)
        return [row(f"a {name} round against the bare window of {width} + commit, batch 1", times, name,
                    f"bare {width}", "at most 1.05") for name, width in widths.items()]

    def draft(self) -> list[dict[str, Any]]:
        """A draft model's round against its forwards and the verifying forward, each bare."""
        small = Transformer(llama(vocab=self.vocab, width=256, layers=4, heads=4, kv_heads=2, mlp=688, context=8192))
        weights, K, rows = small.init_params(jax.random.key(0)), 4, []
        both = Rounds(self.model, self.params.replace(draft=weights), self.new)
        alg = Speculative(drafts.DraftModel(small), shape=trees.Chain(K))
        for batch in (1, 8):
            times = self.times(round=both.decode(batch, alg=alg), verify=self.bare(batch, K + 1),
                               draft=Rounds(small, Params(weights), self.new).bare(batch))
            times["parts"] = (np.array(times["verify"]) + K * np.array(times["draft"])).tolist()
            rows.append(row(f"a round of {K} drafts by a small model against its {K} forwards and the verifying one, "
                            f"batch {batch}", times, "round", "parts", "at most 1.10"))
        return rows

    def heads(self) -> list[dict[str, Any]]:
        """A round with a trained head against its forwards and the verifying forward, each bare. The weights of the
        heads are random; EAGLE-3's has logits for a quarter of the tokens."""
        rows = []
        for name, drafted in (("eagle-3", 4), ("mtp", 3)):
            source = self.random_head(name)
            head = source.head
            both = Rounds(self.model, self.params.replace(draft=source.weights), self.new)
            alg = Speculative(source, shape=trees.Chain(drafted))
            for batch in (1, 8):
                times = self.times(round=both.decode(batch, alg=alg), verify=self.bare(batch, drafted + 1),
                                   pairs=both.bare_head(head, batch, drafted + 1), draft=both.bare_head(head, batch, 1))
                times["parts"] = (np.array(times["verify"]) + np.array(times["pairs"])
                                  + (drafted - 1) * np.array(times["draft"])).tolist()
                rows.append(row(f"a round of {drafted} drafts by the head of {name} against its forwards, one for the "
                                f"verified tokens and {drafted - 1} for drafts, and the verifying one, batch {batch}",
                                times, "round", "parts", "at most 1.15"))
        return rows

    def random_head(self, name: str) -> Any:
        """Returns a trained head's source with random weights."""
        ids = jnp.arange(0, self.vocab, 4) if name == "eagle-3" else None
        head: Any = SYSTEMS["fastmtp" if name == "mtp" else name].head(
            self.model.config, self.vocab if ids is None else ids.size)
        return TrainedHead(self.model, head, HeadWeights(head.init_params(jax.random.key(0)), ids))

    def automatic(self) -> list[dict[str, Any]]:
        """The automatic draft length where no drafts pay: nothing can be looked up in the text, and the head is one
        with random weights."""
        rows = []
        for name, source in (("lookup", PromptLookup(length=7)), ("eagle-3", self.random_head("eagle-3"))):
            arms = (NOTHING, *(Speculative(source, shape=trees.Chain(k)) for k in (2, 4, 7)))
            for batch in (1, 8, 32):
                costs = measure(self.model, self.params.target, arms, batch=batch, vocab_size=self.vocab)
                alg = Adaptive(arms, Automatic(costs))
                both = Rounds(self.model, self.params.replace(draft=alg.weights), self.new)
                times = self.times(plain=self.decode(batch, by="token", temperature=1.0),
                                   automatic=both.decode(batch, alg=alg.bare(), by="token", temperature=1.0))
                rows.append(row(f"automatic draft length with {name} against plain, sampled text, batch {batch}", times,
                                "plain", "automatic", "at least 0.97", "ms a token"))
        return rows


def row(what: str, times: Mapping[str, list[float]], of: str, to: str, bar: str, unit: str = "ms") -> dict[str, Any]:
    """Returns a row of the table for the ratio `of / to`."""
    return dict(what=what, figure=f"{median(times[of]):.2f} against {median(times[to]):.2f} {unit}",
                ratio=ratio(dict(times), of, to), bar=bar, times=times)


def cold_start(repeats: int) -> list[dict[str, Any]]:
    """Seconds from the start of Python to the first piece of text of the shipped model, nothing cached."""
    program = ("import decodax as dx; lm = dx.load('pycode'); "
               "s = dx.stream(lm, 'def fib(n):', max_new_tokens=8); next(s)")
    start = seconds(lambda: subprocess.run([sys.executable, "-c", program], check=True,
                                           env={**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"}))
    times = [start() for _ in range(repeats)]
    return [dict(what="cold start of `pycode` to its first text, no compilation cache", figure=f"{median(times):.1f} s",
                 ratio=median(times), bar="under 10 s", times={"cold": times})]


def main(args: argparse.Namespace) -> None:
    """Runs the comparisons and prints a table after each."""
    bench = Bench(args.repeats, args.new) if set(args.only) - {"cold"} else None
    rows: list[dict[str, Any]] = []
    for part in args.only:
        found = cold_start(args.repeats) if part == "cold" else getattr(bench, part)()
        rows += found
        for one in found:
            print(f"{one['what']}: {one['figure']}, {one['ratio']:.2f}", file=sys.stderr, flush=True)
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores; JAX {jax.__version__}; "
          f"{args.repeats} repeats, prompt {PROMPT}, {args.new} new tokens, float32\n")
    show_table(("comparison", "median", "ratio", "bar"),
               [(r["what"], r["figure"], f"{r['ratio']:.2f}", r["bar"]) for r in rows], markdown=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
