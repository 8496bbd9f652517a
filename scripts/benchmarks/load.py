"""Time and memory of loading a large checkpoint against transformers, each load in a process of its own, in turn.

The checkpoint is a Llama in bfloat16 with random weights in several safetensors files, which have just been written, so
the system holds them in memory. Times begin after the imports. "Loaded" is the end of `dx.load` and of
`from_pretrained`, "first token" that of `generate` with a prompt of 16 tokens and one new token, which compiles
decodax's programs and reads the files that transformers has only mapped before. The memory is the largest of the
process until then (`ru_maxrss`), with its imports. The table gives medians, and medians of the ratios of neighbouring
runs to transformers with weights of the same size.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SIDES = {"transformers, bfloat16": ("transformers", "bfloat16"), 'dtype="bfloat16"': ("decodax", "bfloat16"),
         "transformers, float32": ("transformers", "float32"), 'dtype="float32"': ("decodax", "float32")}
"""The program and the dtype of each row."""

FIGURES = ("loaded", "cpu", "peak", "first", "first_peak")
VOCABULARY, SHARD = 32_000, 10**9


def write(root: Path, size: float, width: int) -> None:
    """Writes a Llama with an MLP of 4 widths and heads of 128, twice as many as those of keys.

    Args:
        root: an empty directory.
        size: gigabytes of its weights at most; it has at least one layer.
        width: its width.
    """
    import ml_dtypes
    import numpy as np
    from safetensors.numpy import save_file

    heads, mlp = max(width // 128, 2), 4 * width
    config = dict(model_type="llama", architectures=["LlamaForCausalLM"], vocab_size=VOCABULARY, hidden_size=width,
                  intermediate_size=mlp, num_attention_heads=heads, num_key_value_heads=heads // 2,
                  head_dim=width // heads, max_position_embeddings=4096, rms_norm_eps=1e-5, hidden_act="silu",
                  tie_word_embeddings=False, dtype="bfloat16", bos_token_id=1, eos_token_id=2)
    layer = {**{f"self_attn.{x}_proj": (width // (2 if x in "kv" else 1), width) for x in "qkv"},
             "self_attn.o_proj": (width, width), "mlp.gate_proj": (mlp, width), "mlp.up_proj": (mlp, width),
             "mlp.down_proj": (width, mlp), "input_layernorm": (width,), "post_attention_layernorm": (width,)}
    outer = {"model.embed_tokens": (VOCABULARY, width), "model.norm": (width,), "lm_head": (VOCABULARY, width)}
    count = lambda shapes: sum(int(np.prod(shape)) for shape in shapes.values())
    layers = max(int((size * 10**9 / 2 - count(outer)) // count(layer)), 1)
    shapes = {**outer, **{f"model.layers.{i}.{name}": shape for i in range(layers) for name, shape in layer.items()}}
    draw, files = np.random.default_rng(0), [{}]
    for name, shape in shapes.items():
        if 2 * (count(files[-1]) + int(np.prod(shape))) > SHARD:
            files.append({})
        files[-1][f"{name}.weight"] = shape
    places = {}
    for i, file in enumerate(files):
        name = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        tensors = {tensor: (draw.standard_normal(shape, np.float32) / 50 + (len(shape) == 1)).astype(ml_dtypes.bfloat16)
                   for tensor, shape in file.items()}
        save_file(tensors, root / name, {"format": "pt"})
        places |= dict.fromkeys(tensors, name)
    (root / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def measure(program: str, root: str, dtype: str) -> dict[str, float]:
    """Loads the checkpoint and generates a token. Returns seconds, and gigabytes of memory, by `FIGURES`."""
    prompt: list[int] = list(range(3, 19))
    usage = lambda: resource.getrusage(resource.RUSAGE_SELF)
    peak = lambda: usage().ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 10**9
    cpu = lambda: usage().ru_utime + usage().ru_stime
    if program == "transformers":
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        family = transformers.LlamaForCausalLM      # imported by the first use of its name
        load = lambda: family.from_pretrained(root, dtype=dtype)
        first: Any = lambda model: model.generate(torch.tensor([prompt]), max_new_tokens=1, do_sample=False)
    else:
        import jax

        from decodax import generate
        from decodax import load as decodax_load

        load = lambda: decodax_load(root, dtype=dtype)
        first = lambda lm: generate(lm, [prompt], max_new_tokens=1, temperature=0.0)
    clock, before = time.perf_counter(), cpu()
    model = load()
    if program == "decodax":
        jax.block_until_ready(model.params)
    found = {"loaded": time.perf_counter() - clock, "cpu": cpu() - before, "peak": peak()}
    first(model)
    return {**found, "first": time.perf_counter() - clock, "first_peak": peak()}


def main(args: argparse.Namespace) -> None:
    if args.size <= 0 or args.width % 2:
        raise ValueError(f"--size: got {args.size} and --width {args.width}, takes a positive number and an even width")
    from decodax.bench.figures import show_table
    from decodax.bench.timing import median, ratio

    with tempfile.TemporaryDirectory(dir=args.scratch) as root:
        run = lambda *words: subprocess.run([sys.executable, __file__, root, *words], check=True, text=True,
                                            stdout=subprocess.PIPE).stdout
        # Also written in another process: on Linux one begins with the peak of its parent.
        size = float(run("write", str(args.size), str(args.width)))
        found: dict[str, list[dict[str, float]]] = {name: [] for name in SIDES}
        for _ in range(args.repeats):       # nothing is compiled before, so each run counts
            for name, own in SIDES.items():
                found[name].append(json.loads(run("measure", *own).splitlines()[-1]))
                print(name, found[name][-1], file=sys.stderr)
    rows = []
    for name, (_, dtype) in SIDES.items():
        times = {key: {other: [run[key] for run in runs] for other, runs in found.items()} for key in FIGURES}
        own = {key: median(times[key][name]) for key in FIGURES}
        over = lambda key: f"{ratio(times[key], name, f'transformers, {dtype}'):.2f}"       # noqa: B023
        rows.append([name, f"{own['loaded']:.1f} s", over("loaded"), f"{own['cpu']:.1f} s", f"{own['peak']:.2f} GB",
                     over("peak"), f"{own['first']:.1f} s", over("first"), f"{own['first_peak']:.2f} GB",
                     over("first_peak")])
    show_table(["", "loaded", "ratio", "of CPUs", "peak", "ratio", "first token", "ratio", "peak", "ratio"], rows,
               f"{size / 10**9:.2f} GB of bfloat16, {args.repeats} runs", markdown=True)


if __name__ == "__main__":
    root, job, *words = sys.argv[1:]
    if job == "write":
        write(Path(root), float(words[0]), int(words[1]))
        print(sum(path.stat().st_size for path in Path(root).glob("*.safetensors")))
    else:
        print(json.dumps(measure(words[0], root, words[1])))
