"""Speed of decoding by the format of the weights on CPU, against arrays of float32 and llama.cpp, in one run.

    pip install xllamacpp gguf                        # llama.cpp, and the writer of its files
    python scripts/benchmark_weights.py               # about ten minutes on two idle cores
    python scripts/benchmark_weights.py --formats int8 --repeats 3

The 125M Llama shape of `benchmark.py` with random weights, the same on both sides, greedy, prompt 32. llama.cpp reads
them as f32, f16, q8_0 and q4_0. What is compared is run in turn, again and again; the table gives medians, and ratios
of what ran next to each other (median of the ratios). Without the two packages llama.cpp's columns are left out.
"Read" is the bytes of weights and cache over the best time, and the best speed at which all cores read memory, in turn.

The bars, on JAX 0.12: int8 1.6 times arrays at batch 1, int4 1.3; 0.8 at batch 8 and for a window of 8.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from decodax.core import drivers

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import time

import jax
import jax.numpy as jnp
import numpy as np
from benchmark import PROMPT, in_turn, median, must_read, of_machine, ratio, read_speed
from jax import Array, lax

from decodax.algorithms.autoregressive import Autoregressive
from decodax.core.types import Params
from decodax.core.window import causal
from decodax.io.huge_pages import moved
from decodax.io.load import LM
from decodax.io.quantize import quantize
from decodax.models.config import llama
from decodax.models.formats import FORMATS
from decodax.models.transformer import Transformer
from decodax.sampling import build
from decodax.sampling.draw import first_argmax

MODEL = Transformer(llama(vocab=32000, width=768, layers=12, heads=12, kv_heads=4, mlp=2048, context=8192))
PEERS = {"arrays": "F32", "float32": "F32", "float16": "F16", "int8": "Q8_0", "int4": "Q4_0"}
"""llama.cpp's own format of as many bits."""

TENSORS = {"attn_in.scale": "attn_norm", "mlp_in.scale": "ffn_norm", "attn.q.kernel": "attn_q",
           "attn.k.kernel": "attn_k", "attn.v.kernel": "attn_v", "attn.o.kernel": "attn_output",
           "mlp.gate.kernel": "ffn_gate", "mlp.up.kernel": "ffn_up", "mlp.down.kernel": "ffn_down"}


def prompts(batch: int) -> np.ndarray:
    return np.random.default_rng(0).integers(300, MODEL.config.vocab, (batch, PROMPT)).astype(np.int32)


def begin(params: Params, batch: int, new: int) -> tuple[Any, Any]:
    tokens = np.zeros((batch, 256), np.int32)
    tokens[:, :PROMPT] = prompts(batch)
    chain = build(batch, vocab_size=MODEL.config.vocab)
    s = drivers.begin(Autoregressive(), MODEL, params, chain, tokens, np.full(batch, PROMPT, np.int32), size=256,
                      max_new=np.int32(new), seed=np.uint32(0))
    return chain, drivers.prefill(Autoregressive(), MODEL, params, s, width=32)


def rounds(params: Params, batch: int, new: int, found: dict[str, Any] | None = None) -> Callable[[], float]:
    """Milliseconds a round of plain decoding, prefill excluded."""
    def timed() -> float:
        chain, s = begin(params, batch, new)
        jax.block_until_ready(s)
        clock = time.perf_counter()
        s = drivers.advance(Autoregressive(), MODEL, params, chain, s, jnp.int32(10**6))
        jax.block_until_ready(s)
        spent = (time.perf_counter() - clock) / int(s.stats.rounds.max()) * 1e3
        if found is not None:
            found["decodax"] = np.asarray(s.tokens)[0, PROMPT:PROMPT + new].tolist()
        return spent

    return timed


@jax.jit
def windows(params: Any, token: Array, length: Array, cache: Any, count: Array) -> Any:
    """Scores windows of 8 tokens, one after the other."""
    def body(carry: Any) -> Any:
        i, token, length, cache = carry
        out = MODEL.apply(params, causal(jnp.repeat(token[:, None], 8, 1), length), cache)
        slots = jnp.where(jnp.arange(8) == 0, length[:, None], -1)
        return i + 1, first_argmax(out.logits()[:, 0]), length + 1, cache.commit(out.entries, slots)

    return lax.while_loop(lambda c: c[0] < count, body, (jnp.int32(0), token, length, cache))


def window(params: Params, new: int) -> Callable[[], float]:
    """Milliseconds a window of 8 tokens of one row."""
    def timed() -> float:
        _, s = begin(params, 1, new)
        args = (params.target, s.newest, s.length - 1, s.cache, jnp.int32(new))
        jax.block_until_ready(args)
        clock = time.perf_counter()
        jax.block_until_ready(windows(*args))
        return (time.perf_counter() - clock) / new * 1e3

    return timed


def write(path: Path, weights: Any, kind: str) -> None:
    """Writes the weights as llama.cpp reads them, with a vocabulary of made-up words."""
    import gguf

    c = MODEL.config
    file = gguf.GGUFWriter(str(path), "llama")
    file.add_context_length(512)
    file.add_embedding_length(c.width)
    file.add_block_count(len(c.layers))
    file.add_feed_forward_length(c.mlp)
    file.add_head_count(c.heads)
    file.add_head_count_kv(c.kv_heads)
    file.add_layer_norm_rms_eps(c.norm.eps)
    file.add_rope_dimension_count(c.head_dim)
    file.add_rope_freq_base(10000.0)
    file.add_vocab_size(c.vocab)
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    words += [f"\u2581t{i}" for i in range(c.vocab - len(words))]
    file.add_tokenizer_model("llama")
    file.add_token_list([word.encode() for word in words])
    file.add_token_scores([0.0] * c.vocab)
    file.add_token_types([2, 3, 3] + [6] * 256 + [1] * (c.vocab - 259))
    file.add_bos_token_id(1)
    file.add_eos_token_id(2)
    own = gguf.GGMLQuantizationType[kind]

    def add(name: str, value: Any, heads: int = 0) -> None:
        array = np.ascontiguousarray(np.asarray(value, np.float32))
        if heads:       # its rotations pair neighbours, ours halves
            array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        if array.ndim == 1 or kind == "F32":
            file.add_tensor(f"{name}.weight", array)
        elif kind == "F16":
            file.add_tensor(f"{name}.weight", array.astype(np.float16))
        else:
            file.add_tensor(f"{name}.weight", gguf.quants.quantize(array, own), raw_dtype=own)

    add("token_embd", weights["embed"])
    add("output", weights["lm_head"]["kernel"].T)
    add("output_norm", weights["norm"]["scale"])
    for i in range(len(c.layers)):
        for place, tensor in TENSORS.items():
            value = weights["layers"][str(i)]
            for name in place.split("."):
                value = value[name]
            heads = {"attn_q": c.heads, "attn_k": c.kv_heads}.get(tensor, 0)
            add(f"blk.{i}.{tensor}", value.T if place.endswith("kernel") else value, heads)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


def peer(path: Path, new: int, threads: int, found: dict[str, Any]) -> Callable[[], float]:
    """Milliseconds a token of llama.cpp by its own count, prompt excluded."""
    import xllamacpp

    p = xllamacpp.CommonParams()
    p.model.path = str(path)
    p.n_ctx, p.n_parallel, p.warmup = 512, 1, True
    p.cpuparams.n_threads = p.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(p)
    request = {"prompt": prompts(1)[0].tolist(), "n_predict": new, "temperature": 0, "ignore_eos": True,
               "cache_prompt": False}

    def timed() -> float:
        done = server.handle_completions(request)
        found["llama.cpp"] = [259 + int(word) for word in re.findall(r"t(\d+)", done["choices"][0]["text"])]
        return float(done["timings"]["predicted_per_token_ms"])

    return timed


def packed(weights: Any, name: str) -> Any:
    """The weights in a format; one that goes by data sees a few random ids, on which its speed does not depend."""
    lm = LM(model=MODEL, params=weights, vocab_size=MODEL.config.vocab)
    return quantize(lm, name, None if FORMATS[name].statistic is None else prompts(4).tolist(), length=PROMPT).params


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [name for name, one in FORMATS.items() if one.statistic is None]
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=names, metavar="FORMAT",
                        help=f"of {', '.join(FORMATS)} (default: those that take no data)")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each side (default: 5)")
    parser.add_argument("--new", type=int, default=128, help="new tokens a run (default: 128)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of llama.cpp (default: all)")
    args = parser.parse_args()
    weights = moved(MODEL.init_params(jax.random.key(0)))       # as `decodax.load` does
    params = {"arrays": Params(weights), **{name: Params(packed(weights, name)) for name in args.formats}}
    size = lambda p: sum(x.nbytes for x in jax.tree.leaves(p.target)) / 1e6
    has_peer = all(importlib.util.find_spec(name) for name in ("xllamacpp", "gguf"))
    print(f"JAX {jax.__version__}\n\n| format | MB | batch 1 | over arrays | read | share of the machine's | llama.cpp "
          "| over llama.cpp | batch 8 | over arrays | window of 8 | over arrays |\n|" + "---|" * 12)
    with tempfile.TemporaryDirectory() as folder:
        for name in params:
            found: dict[str, Any] = {}
            sides = {"arrays": rounds(params["arrays"], 1, args.new), name: rounds(params[name], 1, args.new, found)}
            if has_peer and name in PEERS:
                path = Path(folder) / f"{name}.gguf"
                write(path, weights, PEERS[name])
                sides["llama.cpp"] = peer(path, args.new, args.threads, found)
            sides["read"] = read_speed
            one = in_turn(sides, args.repeats)
            cache = begin(params[name], 1, args.new)[1].cache
            share, read = of_machine(one, name, must_read(params[name].target, cache, (PROMPT + args.new / 2) / 256))
            many = in_turn({key: rounds(params[key], 8, args.new // 2) for key in ("arrays", name)}, args.repeats)
            wide = in_turn({key: window(params[key], args.new // 2) for key in ("arrays", name)}, args.repeats)
            speedup = lambda times, name=name: f"{ratio(times, 'arrays', name):.2f}"
            theirs = "llama.cpp" in one
            print(f"| {name} | {size(params[name]):.0f} | {median(one[name]):.1f} ms | {speedup(one)} | {read} | "
                  f"{share:.2f} | "
                  + (f"{median(one['llama.cpp']):.1f} ms ({PEERS[name].lower()}) | {ratio(one, 'llama.cpp', name):.2f}"
                     if theirs else "| ")
                  + f" | {median(many[name]):.1f} ms | {speedup(many)} | {median(wide[name]):.1f} ms | "
                  f"{speedup(wide)} |", flush=True)
            if theirs and PEERS[name] == "F32":
                same = float(np.mean(np.array(found["decodax"]) == np.array(found["llama.cpp"])))
                print(f"{name}: {same:.0%} of the tokens are llama.cpp's", flush=True)
    print("\nRatios above 1 are decodax ahead: medians of the ratios of neighbouring runs.")


if __name__ == "__main__":
    main()
