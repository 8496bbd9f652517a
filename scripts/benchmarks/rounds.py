"""Speed of the round against transformers and against itself, side by side in one run.

A 125M Llama shape (width 768, 12 layers, 12/4 heads, MLP 2,048, vocabulary 32,000) has one set of random weights for
both sides, in float32. The sides of a comparison run in turn; the table gives medians, and medians of the ratios of
neighbouring runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from decodax.algorithms.plain import Autoregressive
from decodax.algorithms.speculative import NOTHING, Adaptive, Automatic, Speculative, drafts, measure, trees
from decodax.algorithms.speculative.drafts import PromptLookup
from decodax.algorithms.speculative.heads.source import HeadWeights, TrainedHead
from decodax.bench.figures import show_table
from decodax.bench.rounds import PROMPT, Rounds, Timed, read_speed
from decodax.bench.timing import Times, in_turn, median, ratio, seconds
from decodax.core import drivers
from decodax.core.types import Params
from decodax.io.load import load
from decodax.models.config import llama
from decodax.models.transformer import Transformer
from decodax.train.drafting.systems import SYSTEMS

SHAPE = dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=4,
             intermediate_size=2048, vocab_size=32000, max_position_embeddings=8192, tie_word_embeddings=False)


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
            head = (source := self.random_head(name)).head
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
        return TrainedHead(head, HeadWeights(head.init_params(jax.random.key(0)), ids))

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
