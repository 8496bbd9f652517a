"""Speed of decoding by the format of the weights on CPU, against arrays of float32 and llama.cpp, in one run.

The 125M Llama shape of `rounds` has the same random weights on both sides, greedy, prompt 32. llama.cpp reads them as
f32, f16, q8_0 and q4_0; without the packages `xllamacpp` and `gguf` its columns are left out. The sides run in turn;
the table gives medians, and medians of the ratios of neighbouring runs. "Read" is the bytes of weights and cache over
the best time, and the best speed at which all cores read memory.

With `--file` the weights are those of a GGUF file, in its own format, against the same weights as float32 arrays and
llama.cpp on the file.

The bars, on JAX 0.12: int8 1.6 times arrays at batch 1, int4 1.3; 0.8 at batch 8 and for a window of 8. Of
SmolLM2-135M in Q4_1: 0.6 of llama.cpp's tokens a second at batch 1; batch 8 and a window of 8 no slower than arrays.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from decodax.bench.figures import show_table
from decodax.bench.rounds import PROMPT, Rounds, read_speed, size_of
from decodax.bench.timing import in_turn, median, ratio
from decodax.core.types import Params
from decodax.io.huge_pages import moved
from decodax.io.load import LM, load
from decodax.io.quantize import quantize
from decodax.models.config import llama
from decodax.models.formats import FORMATS
from decodax.models.transformer import Transformer

MODEL = Transformer(llama(vocab=32000, width=768, layers=12, heads=12, kv_heads=4, mlp=2048, context=8192))
PEERS = {"arrays": "F32", "float32": "F32", "float16": "F16", "int8": "Q8_0", "int4": "Q4_0"}
"""The format of llama.cpp with as many bits."""

TENSORS = {"attn_in.scale": "attn_norm", "mlp_in.scale": "ffn_norm", "attn.q.kernel": "attn_q",
           "attn.k.kernel": "attn_k", "attn.v.kernel": "attn_v", "attn.o.kernel": "attn_output",
           "mlp.gate.kernel": "ffn_gate", "mlp.up.kernel": "ffn_up", "mlp.down.kernel": "ffn_down"}


def write(path: Path, weights: Any, kind: str) -> None:
    """Writes the weights as a file for llama.cpp, with a vocabulary of made-up words."""
    import gguf

    c = MODEL.config
    file = gguf.GGUFWriter(str(path), "llama")
    for name, value in dict(
            context_length=512, embedding_length=c.width, block_count=len(c.layers), feed_forward_length=c.mlp,
            head_count=c.heads, head_count_kv=c.kv_heads, layer_norm_rms_eps=c.norm.eps, vocab_size=c.vocab,
            rope_dimension_count=c.head_dim, rope_freq_base=10000.0, bos_token_id=1, eos_token_id=2).items():
        getattr(file, f"add_{name}")(value)
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    words += [f"\u2581t{i}" for i in range(c.vocab - len(words))]
    file.add_tokenizer_model("llama")
    file.add_token_list([word.encode() for word in words])
    file.add_token_scores([0.0] * c.vocab)
    file.add_token_types([2, 3, 3] + [6] * 256 + [1] * (c.vocab - 259))
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
            value = functools.reduce(lambda tree, name: tree[name], place.split("."), weights["layers"][str(i)])
            heads = {"attn_q": c.heads, "attn_k": c.kv_heads}.get(tensor, 0)
            add(f"blk.{i}.{tensor}", value.T if place.endswith("kernel") else value, heads)
    for step in (file.write_header_to_file, file.write_kv_data_to_file, file.write_tensors_to_file, file.close):
        step()


def peer(path: Path, new: int, prompt: list[int], found: dict[str, Any]) -> Callable[[], float]:
    """Returns a timer of llama.cpp in milliseconds a token by its own count, prompt excluded; keeps the tokens."""
    import xllamacpp

    p = xllamacpp.CommonParams()
    p.model.path = str(path)
    p.n_ctx, p.n_parallel, p.warmup = 512, 1, True
    p.cpuparams.n_threads = p.cpuparams_batch.n_threads = os.cpu_count() or 1
    server = xllamacpp.Server(p)
    request = {"prompt": prompt, "n_predict": new, "temperature": 0, "ignore_eos": True,
               "cache_prompt": False}

    def timed() -> float:
        done = server.handle_completions(request)
        found["llama.cpp"] = [259 + int(word) for word in re.findall(r"t(\d+)", done["choices"][0]["text"])]
        return float(done["timings"]["predicted_per_token_ms"])

    return timed


def main(args: argparse.Namespace) -> None:
    """Times the formats and prints a line for each."""
    if args.file is not None:
        return of_file(args)
    weights = moved(MODEL.init_params(jax.random.key(0)))       # as `decodax.load` does
    formats = args.formats or [name for name, one in FORMATS.items() if one.statistic is None]
    lm = LM(model=MODEL, params=weights, vocab_size=MODEL.config.vocab)
    # random ids stand for data, because the speed does not depend on it
    prompts = np.random.default_rng(0).integers(300, lm.vocab_size, (4, PROMPT)).tolist()
    pack = lambda name: quantize(lm, name, FORMATS[name].statistic and prompts, length=PROMPT).params
    params = {"arrays": Params(weights), **{name: Params(pack(name)) for name in formats}}
    has_peer = all(importlib.util.find_spec(name) for name in ("xllamacpp", "gguf"))
    with tempfile.TemporaryDirectory() as folder:
        rows = [line(name, params, args, weights, Path(folder) if has_peer else None) for name in params]
    show_table(("format", "MB", "batch 1", "over arrays", "read", "share of the machine's", "llama.cpp",
                "over llama.cpp", "batch 8", "over arrays", "window of 8", "over arrays"), rows,
               f"JAX {jax.__version__}; ratios above 1 mean that the format is faster", markdown=True)


def of_file(args: argparse.Namespace) -> None:
    """Times a GGUF file and prints a line for each shape."""
    lm = load(args.file)
    arrays = load(args.file, weights="float32").params      # in huge pages, as users have them
    make = lambda weights, new: Rounds(lm.model, Params(weights), new, lowest=300)
    packed = make(lm.params, args.new)
    sides = {"packed": packed.decode(1), "arrays": make(arrays, args.new).decode(1)}
    if importlib.util.find_spec("xllamacpp"):
        sides["llama.cpp"] = peer(args.file, args.new, packed.prompts(1)[0].tolist(), {})
    times = {"batch 1": in_turn({**sides, "read": read_speed}, args.repeats, "batch 1")}
    for name, side in {"batch 8": lambda weights: make(weights, args.new // 2).decode(8),
                       "window of 8": lambda weights: make(weights, args.new // 2).bare(1, 8)}.items():
        times[name] = in_turn({"packed": side(lm.params), "arrays": side(arrays)}, args.repeats, name)
    cell = lambda found, of: f"{median(found[of]):.1f} ms ({ratio(found, of, 'packed'):.2f})" if of in found else ""
    show_table(("shape", "packed", "arrays", "llama.cpp"),
               [[name, f"{median(found['packed']):.1f} ms", cell(found, "arrays"), cell(found, "llama.cpp")]
                for name, found in times.items()],
               f"{args.file.name}, JAX {jax.__version__}; {packed.bandwidth(times['batch 1'], 'packed')[1]} read at "
               "batch 1; in brackets the time over that of the packed weights", markdown=True)


def line(name: str, params: dict[str, Params], args: argparse.Namespace, weights: Any,
         folder: Path | None) -> list[str]:
    """Returns the cells of a format; `folder`: for llama.cpp's files, None without it."""
    make = lambda key, new: Rounds(MODEL, params[key], new, lowest=300)
    own, found = make(name, args.new), dict[str, Any]()
    sides = {"arrays": make("arrays", args.new).decode(1), name: own.decode(1)}
    if folder is not None and name in PEERS:
        write(folder / f"{name}.gguf", weights, PEERS[name])
        sides["llama.cpp"] = peer(folder / f"{name}.gguf", args.new, own.prompts(1)[0].tolist(), found)
    one = in_turn({**sides, "read": read_speed}, args.repeats, name)
    if "llama.cpp" in one and PEERS[name] == "F32":
        same = float(np.mean(own.tokens[0] == np.array(found["llama.cpp"])))
        print(f"{name}: {same:.0%} of the tokens equal llama.cpp's", flush=True)
    share, read = own.bandwidth(one, name)
    many = in_turn({key: make(key, args.new // 2).decode(8) for key in ("arrays", name)}, args.repeats, name)
    wide = in_turn({key: make(key, args.new // 2).bare(1, 8) for key in ("arrays", name)}, args.repeats, name)
    cells = lambda times: [f"{median(times[name]):.1f} ms", f"{ratio(times, 'arrays', name):.2f}"]
    theirs = [f"{median(one['llama.cpp']):.1f} ms ({PEERS[name].lower()})", f"{ratio(one, 'llama.cpp', name):.2f}"] \
        if "llama.cpp" in one else ["", ""]
    size = f"{size_of(params[name].target) / 1e6:.0f}"
    return [name, size, *cells(one), read, f"{share:.2f}", *theirs, *cells(many), *cells(wide)]
