"""What a diffusion training run leaves behind: the model directory with its card, or a filter in one."""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import problems
import pycode_data
from diffusion_filter import save_filter
from lm_export import hardware
from tokenizers import Tokenizer

from decodax.io.checkpoint import load_diffusion, save_model
from decodax.models import Diffusion, Transformer

__all__ = ["diffusion_of", "export", "export_filter", "hardware"]

CARD = """---
license: apache-2.0
language: [{language}]
tags: [diffusion, jax, decodax]
---
# {name}

{what}

| | |
|---|---|
| parameters | {parameters:,} |
| shape | width {width}, {layers} layers, {heads} query and {kv_heads} key/value heads, MLP {mlp}, tied embedding |
| attention | {attention} |
| mask token | `{mask}`, id {mask_id}; logits at a position predict {shift} |
| vocabulary | {vocab} |
| context | {context} tokens |
| weights | bfloat16 |
| training data | {data} |
| starts from | {start} |
| training tokens | {tokens:,} in {steps:,} steps |
| training | {optimizer}, {loss}, float32 master weights |
| hardware | {hardware} |
| training time | {minutes:.0f} minutes |

{figures}

The layout is that of a Llama, and `transformers` loads it as one, with the causal attention that this model was not
trained with. What decoding has to know is in config.json: `mask_token_id` and the entry `diffusion`.

**Reproduce** with CPython {python}, from the root of the repository:

```
{command}
```

The figures on this page are also in `training.json`.
"""

PROBLEMS = """A small masked diffusion model for problems with checkable answers. It is made to show what decoding
several tokens at once costs, on any CPU and in seconds: with one token a forward it is right on most problems, with
more it errs where answer tokens depend on one another. A prompt is a text such as `sort DACB=`; the answer has room in
a canvas of {canvas} tokens and is followed by `{end}`."""

TEXT = """A diffusion language model for Python source, {made}. It is made for
demonstrations, tests and comparisons of decoding methods; it writes plausible Python, not correct programs."""


SEES = {
    "full": ("the bound on the likelihood of masked diffusion (LLaDA's loss)", "every token sees every token"),
    "block-causal": ("the bound on the likelihood of block diffusion", "by blocks of {block}, counted from the first "
                     "token: a token sees its block and those before it"),
    "causal-prefix": ("the bound on the likelihood of block diffusion and cross-entropy of next tokens (set block "
                      "decoding)", "causal; a block of {block} masks after the text sees it and itself"),
}
"""By attention: the loss, and who sees whom."""


def diffusion_of(directory: Path) -> Diffusion:
    """How the model of a directory fills masks.

    Raises:
        ValueError: it is autoregressive.
    """
    found = load_diffusion(directory)
    if found is None:
        raise ValueError(f"init: {directory} is autoregressive, it takes a diffusion model")
    return found


def export(target: Path, model: Transformer, kind: Diffusion, params: Any, tokenizer: Tokenizer,
           facts: Mapping[str, Any]) -> None:
    """Writes the model directory; as `lm_export.export`.

    Args:
        facts: the figures of the run, as `train_diffusion.finish` gathers them.
    """
    c, text = model.config, facts["preset"].removeprefix("tiny-").startswith(("pycode", "text"))
    end = tokenizer.token_to_id(pycode_data.END_OF_TEXT if text else problems.END)
    own = {k: v for k, v in dataclasses.asdict(kind).items() if k != "mask"}
    config = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end, "mask_token_id": kind.mask,
              "diffusion": own}
    save_model(target, model, params, config=config, dtype="bfloat16")
    tokens = {name: tokenizer.id_to_token(i) for name, i in (("bos_token", end), ("eos_token", end),
                                                             ("pad_token", end), ("mask_token", kind.mask))}
    tokenizer.save(str(target / "tokenizer.json"))
    shown = {"tokenizer_class": "PreTrainedTokenizerFast", **tokens, "model_max_length": c.context,
             "clean_up_tokenization_spaces": False}
    (target / "tokenizer_config.json").write_text(json.dumps(shown, indent=2) + "\n")
    generation = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end, "do_sample": False}
    (target / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")

    loss, attention = SEES[kind.attention]
    if facts["stage"] == "certainty":
        loss = "certainty forcing on its own answers (dParallel)"
    made = f"made from the autoregressive `{facts['init']}`" if facts["init"] else "trained from scratch"
    what = TEXT.format(made=made) if text else PROBLEMS.format(canvas=problems.CANVAS, end=problems.END)
    card = CARD.format(
        **facts, name="-".join(filter(None, (facts["preset"], facts["stage"]))), language="code" if text else "en",
        what=what,
        width=c.width, layers=len(c.layers), heads=c.heads, kv_heads=c.kv_heads, mlp=c.mlp, vocab=c.vocab,
        context=c.context, attention=attention.format(block=kind.block),
        mask=tokens["mask_token"], mask_id=kind.mask, shift="the next one" if kind.shift else "that position",
        start=f"`{facts['init']}`" if facts["init"] else "fresh weights", loss=loss, minutes=facts["hours"] * 60,
        figures=(_text_figures if text else _problem_figures)(facts), python=platform.python_version(),
    )  # fmt: skip
    (target / "README.md").write_text(card)
    (target / "training.json").write_text(json.dumps(dict(facts), indent=2) + "\n")


def _problem_figures(facts: Mapping[str, Any]) -> str:
    lines = ["| task | | right, one token a forward | held-out problems |", "|---|---|---|---|"]
    lines += [f"| {task.name} | {task.summary} | {facts['held_out'][task.name]:.1%} | {facts['held_out_each']} |"
              for task in problems.TASKS.values()]
    return "\n".join(lines) + f"""

Right means the whole answer, greedily, the most confident token of the canvas a forward, by the shipped bfloat16
weights computed in float32. A problem is kept from training when the CRC-32 of its prompt is divisible by
{problems.HELD_OUT}; sudoku grids themselves, of which there are 288, are all seen in training, with other blanks."""


def _text_figures(facts: Mapping[str, Any]) -> str:
    return f"""| | |
|---|---|
| held-out bits per byte, upper bound | {facts['held_out']['bits_per_byte']:.4f} |

The bound is that of the training loss, estimated with 4 noises a window on {facts['held_out_each']} windows, spread
evenly over the held-out files of `pycode`: their second halves, given the first."""


def export_filter(target: Path, params: Any, facts: Mapping[str, Any]) -> None:
    """Writes filter.safetensors and filter.json into a model directory."""
    target.mkdir(parents=True, exist_ok=True)
    save_filter(target / "filter.safetensors", params)
    (target / "filter.json").write_text(json.dumps(dict(facts), indent=2) + "\n")
