"""What a training run leaves behind: the model directory with its card, and the plot of the loss."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import matplotlib
import pycode_data as data
from tokenizers import Tokenizer

from decodax.io.checkpoint import load_model, save_model
from decodax.models import Transformer

CARD = """---
license: apache-2.0
language: [code]
tags: [python, jax, decodax]
---
# {name}

A Llama-shaped language model for Python source, small enough to ship with decodax and to run on any CPU. It is made for
demonstrations, tests and comparisons of decoding methods; it writes plausible Python, not correct programs.

| | |
|---|---|
| parameters | {parameters:,} |
| shape | width {width}, {layers} layers, {heads} query and {kv_heads} key/value heads, MLP {mlp}, tied embedding |
| vocabulary | {vocab} |
| context | {context} tokens |
| weights | bfloat16 |
| training data | {data} |
| training tokens | {tokens:,} in {steps:,} steps |
| training | AdamW, {distilled}, float32 master weights |
| held-out bits per byte | {held_out_bits_per_byte:.4f} |
{distillation}| hardware | {hardware} |
| training time | {minutes:.0f} minutes |

**Held-out files.** A source file is kept from the training of the weights and of the tokenizer when the SHA-256 of its
path inside the standard library directory (with `/` separators), read as a number, is divisible by {modulus}. The bits
per byte are those of the shipped bfloat16 weights, computed in float32 over all held-out files: the summed negative
log2-probability of the tokens, end-of-text included, over the UTF-8 bytes of text, in half-overlapping windows of the
whole context. Generated tables, bundled packages and deliberately broken test files are not part of the data
(`scripts/pycode_data.py`).

**Tokenizer.** Byte-level BPE of {vocab} tokens trained on the training files. Any text round-trips. `<|endoftext|>`
separates files and serves as BOS, EOS and padding; it is not added to a prompt. A line break and the indentation after
it are one token, so a prompt should end before the line break (`def f(n):`) or after the indentation, not between them.

**Reproduce** with CPython {python}, from the root of the repository:

```
{command}
```

The figures on this page are also in `training.json`.
"""


def load(directory: Path) -> tuple[Transformer, Any]:
    """A teacher: the model of a directory and its weights in float32."""
    return load_model(directory, dtype="float32")


def hardware(count: int) -> str:
    """`count` devices of this process in words."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return f"{count} x {device.device_kind}"
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        named = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        name = named[0].split(":", 1)[1].strip() if named else name
    return f"{count} CPU cores ({name})"


def export(target: Path, model: Transformer, params: Any, tokenizer: Tokenizer, facts: Mapping[str, Any]) -> None:
    """Writes the model directory: bfloat16 safetensors, config, tokenizer, generation config, card and training.json.

    Args:
        target: made if it is not there; files of an earlier export are replaced.
        params: weights, of any floating dtype.
        facts: the figures of the run, as `train_lm.finish` gathers them.
    """
    c = model.config
    end = tokenizer.token_to_id(data.END_OF_TEXT)
    ends = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    save_model(target, model, params, config=ends, dtype="bfloat16")
    data.save_tokenizer(tokenizer, target, c.context)
    teacher = facts["teacher"]
    distilled, distillation = "cross-entropy", ""
    if teacher:
        distilled = f"distilled from `{teacher}` (KL and cross-entropy)"
        distillation = f"| drafts that `{teacher}` accepts | {facts['acceptance']:.1%}, held-out, temperature 1 |\n"
    card = CARD.format(
        **facts, name=facts["preset"], minutes=facts["hours"] * 60, distilled=distilled, distillation=distillation,
        python=platform.python_version(), modulus=data.HELD_OUT_MODULUS, width=c.width, layers=len(c.layers),
        heads=c.heads, kv_heads=c.kv_heads, mlp=c.mlp, vocab=c.vocab, context=c.context,
    )  # fmt: skip
    (target / "README.md").write_text(card)
    (target / "training.json").write_text(json.dumps(dict(facts), indent=2) + "\n")


def plot(metrics: Path, picture: Path) -> None:
    """Draws the cross-entropy and the held-out bits per byte of a metrics.jsonl against the tokens seen."""
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    entries = [json.loads(line) for line in metrics.read_text().splitlines()]
    figure, left = plt.subplots(figsize=(7, 4), layout="constrained")
    train = [e for e in entries if "cross_entropy" in e]
    held = [e for e in entries if "bits_per_byte" in e]
    left.plot([e["tokens"] for e in train], [e["cross_entropy"] for e in train], color="C0", linewidth=0.8)
    left.set(xlabel="training tokens", ylabel="training cross-entropy, nats per token")
    right = left.twinx()
    right.plot([e["tokens"] for e in held], [e["bits_per_byte"] for e in held], "o-", color="C1", markersize=3)
    right.set_ylabel("held-out bits per byte")
    figure.savefig(picture, dpi=150)
    plt.close(figure)
