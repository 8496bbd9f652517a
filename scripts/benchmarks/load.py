"""Time and memory of loading a large checkpoint against transformers, each load in a process of its own, in turn.

The checkpoint is a Llama in bfloat16 with random weights in several safetensors files, or one of your own (`--model`).
"Of dx.save" is the same model as `dx.save` writes it, with tensors where JAX can use them in the file. All files are
read once before, so the system holds them in memory. Times begin after the imports. "Loaded" is the end of `dx.load`
and of `from_pretrained`; "first token" is that of a prompt of 16 tokens, for which decodax compiles a program, and both
read what they have only mapped before. The peak is the largest memory of the process until then (`ru_maxrss`). The
table gives medians, and medians of the ratios of neighbouring runs to transformers with weights of the same dtype.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SIDES = {"transformers, bfloat16": ("transformers", "bfloat16", False),
         'dtype="bfloat16"': ("decodax", "bfloat16", False),
         'dtype="bfloat16", of dx.save': ("decodax", "bfloat16", True),
         "transformers, float32": ("transformers", "float32", False),
         'dtype="float32"': ("decodax", "float32", False)}
"""The program and the dtype of each row, and whether it loads the directory that `dx.save` wrote."""

FIGURES = ("loaded", "cpu", "peak", "first", "first_cpu", "first_peak")
VOCABULARY = 32_000


def write(root: Path, size: float, width: int) -> None:
    """Writes a Llama of a width, with an MLP of 4 widths and heads of 128, twice as many as those of keys, and as many
    layers, at least one, as fit in `size` gigabytes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    heads, numbers = max(width // 128, 2), int(size * 10**9 / 2)
    # q, k, v and o have 3 squares of the width and the MLP 12; two norms; outside embedding, head and a norm
    layers = max((numbers - (2 * VOCABULARY + 1) * width) // (15 * width**2 + 2 * width), 1)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads // 2, head_dim=width // heads,
        max_position_embeddings=4096, dtype=torch.bfloat16)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    LlamaForCausalLM(config).save_pretrained(root, max_shard_size="1GB")


def measure(program: str, root: str, dtype: str) -> dict[str, float]:
    """Loads a checkpoint and runs it on a prompt. Returns seconds, and gigabytes of memory, by `FIGURES`."""
    prompt = [list(range(3, 19))]
    usage = lambda: resource.getrusage(resource.RUSAGE_SELF)
    peak = lambda: usage().ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 10**9
    cpu = lambda: usage().ru_utime + usage().ru_stime
    if program == "transformers":
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        architecture = json.loads((Path(root) / "config.json").read_text())["architectures"][0]
        family = getattr(transformers, architecture)        # imported here, by the first use of its name
        load = lambda: family.from_pretrained(root, dtype=dtype)
        run: Any = lambda model: model(torch.tensor(prompt)).logits[0, -1].argmax().item()
    else:
        import jax
        import jax.numpy as jnp

        from decodax.io.load import load as decodax_load

        load = lambda: decodax_load(root, dtype=dtype)
        run = lambda lm: jax.jit(lm.model.forward)(lm.params, jnp.array(prompt))[0, -1].argmax().item()
    clock, before = time.perf_counter(), cpu()
    model = load()
    if program == "decodax":
        jax.block_until_ready(model.params)
    found = {"loaded": time.perf_counter() - clock, "cpu": cpu() - before, "peak": peak()}
    with torch.no_grad() if program == "transformers" else contextlib.nullcontext():
        run(model)
    return {**found, "first": time.perf_counter() - clock, "first_cpu": cpu() - before, "first_peak": peak()}


def main(args: argparse.Namespace) -> None:
    if args.size <= 0 or args.width % 2:
        raise ValueError(f"--size: got {args.size} and --width {args.width}, takes a positive number and an even width")
    from decodax.bench.figures import show_table
    from decodax.bench.timing import median, ratio

    # Written in another process, too: on Linux one begins with the peak of its parent.
    call = lambda *words: subprocess.run([sys.executable, __file__, *words], check=True, text=True,
                                         stdout=subprocess.PIPE).stdout
    found: dict[str, list[dict[str, float]]] = {name: [] for name in SIDES}
    with tempfile.TemporaryDirectory(dir=args.scratch) as made, tempfile.TemporaryDirectory(dir=args.scratch) as saved:
        if args.model is None:
            call("write", made, str(args.size), str(args.width))
        root = args.model or made
        call("save", root, saved)
        size, _ = (sum(_read(path) for path in Path(place).glob("*.safetensors")) for place in (root, saved))
        for _ in range(args.repeats):
            for name, (program, dtype, own) in SIDES.items():
                found[name].append(json.loads(call("measure", saved if own else root, program, dtype).splitlines()[-1]))
                print(name, found[name][-1], file=sys.stderr, flush=True)
    rows = []
    for name, (_, dtype, _) in SIDES.items():
        times = {key: {other: [run[key] for run in runs] for other, runs in found.items()} for key in FIGURES}
        own = {key: median(times[key][name]) for key in FIGURES}
        over = lambda key: f"{ratio(times[key], name, f'transformers, {dtype}'):.2f}"       # noqa: B023
        rows.append([name, f"{own['loaded']:.1f} s", over("loaded"), f"{own['cpu']:.1f} s", f"{own['peak']:.2f} GB",
                     over("peak"), f"{own['first']:.1f} s", over("first"), f"{own['first_cpu']:.1f} s",
                     f"{own['first_peak']:.2f} GB", over("first_peak")])
    timed = ["ratio", "of CPUs", "peak", "ratio"]
    show_table(["", "loaded", *timed, "first token", *timed], rows,
               f"{size / 10**9:.2f} GB, {args.repeats} runs", markdown=True)


def _read(path: Path) -> int:
    """Reads a file and returns its size."""
    with path.open("rb", buffering=0) as file:
        return sum(iter(lambda: len(file.read(1 << 24)), 0))


if __name__ == "__main__":
    job, root, *words = sys.argv[1:]
    if job == "write":
        write(Path(root), float(words[0]), int(words[1]))
    elif job == "save":
        import decodax as dx

        dx.save(dx.load(root, dtype="bfloat16"), words[0])
    else:
        print(json.dumps(measure(words[0], root, words[1])))
