"""Export of a trained model: weights, configuration, tokenizer, model card and figures in Hugging Face layout."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from decodax.io.saving import save_model
from decodax.models import Transformer

CARD = """---
license: apache-2.0
{language}tags: [{tags}]
---
# {name}

{introduction}

| | |
|---|---|
{rows}

{figures}

**Reproduce** with CPython {python}, from the root of the repository:

```
{command}
```

The figures on this page are also in `training.json`.
"""


def hardware(count: int) -> str:
    """Returns a description of `count` devices of the first one's kind, such as "4 x NVIDIA H200" or "2 CPU cores (AMD
    EPYC 9B14)"."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return f"{count} x {device.device_kind}"
    name, info = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if info.is_file():
        named = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        name = named[0].split(":", 1)[1].strip() if named else name
    return f"{count} CPU core{'' if count == 1 else 's'} ({name})"


def model_card(name: str, model: Transformer, facts: Mapping[str, Any], *, introduction: str, rows: Mapping[str, str],
               figures: str, tags: Sequence[str], language: str | None = None) -> str:
    """Returns the text of a model card.

    Args:
        name: the model's name.
        model: the model.
        facts: figures of the run: parameters, steps, tokens, hardware, hours and command.
        introduction: the paragraph after the heading.
        rows: further rows of the table, by title; the row "training" describes the method.
        figures: measurements on held-out data, as Markdown.
        tags: tags of the card.
        language: code of the natural language, if any.
    """
    c = model.config
    table = {"parameters": f"{facts['parameters']:,}",
             "shape": f"width {c.width}, {len(c.layers)} layers, {c.heads} query and {c.kv_heads} key/value heads, "
                      f"MLP {c.mlp}, tied embedding",
             "vocabulary": f"{c.vocab}", "context": f"{c.context} tokens", "weights": "bfloat16", **rows,
             "training tokens": f"{facts['tokens']:,} in {facts['steps']:,} steps", "hardware": facts["hardware"],
             "training time": f"{60 * facts['hours']:.0f} minutes"}
    return CARD.format(name=name, introduction=introduction, figures=figures, tags=", ".join([*tags, "jax", "decodax"]),
                       language=f"language: [{language}]\n" if language else "", python=platform.python_version(),
                       rows="\n".join(f"| {title} | {text} |" for title, text in table.items()),
                       command=facts["command"])


def export_model(directory: Path, model: Transformer, params: Any, tokenizer: Tokenizer, *, special: Mapping[str, str],
                 card: str, facts: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> None:
    """Writes the directory of a model that `decodax.load` and transformers can load, with README.md and training.json.

    Args:
        directory: path to write to; it is created if necessary. Files of an earlier export are replaced.
        model: the model.
        params: weights of any floating dtype; they are stored in bfloat16.
        tokenizer: the tokenizer.
        special: texts of the special tokens by name, such as `{"eos_token": "<|end|>"}`.
        card: the model card; see `model_card`.
        facts: figures of the run.
        config: further entries of config.json.
    """
    ids = {f"{name}_id": tokenizer.token_to_id(text) for name, text in special.items()}
    save_model(directory, model, params, config={**(config or {}), **ids}, dtype="bfloat16")
    tokenizer.save(str(directory / "tokenizer.json"))
    write = lambda name, entries: (directory / name).write_text(json.dumps(entries, indent=2) + "\n")
    write("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **special,
                                    "model_max_length": model.config.context, "clean_up_tokenization_spaces": False})
    write("generation_config.json", {**{k: v for k, v in ids.items() if k != "mask_token_id"}, "do_sample": False})
    write("training.json", dict(facts))
    (directory / "README.md").write_text(card)


def publish(target: Path, name: str, model: Transformer, shipped: Any, tokenizer: Tokenizer, facts: dict[str, Any],
            special: Mapping[str, str], config: Mapping[str, Any] | None = None, **card: Any) -> None:
    """Writes a model to the directory `target`, as `export_model` does, with the model card that `model_card` makes.
    `shipped` are the weights, `name` is the model's name, and `card` has the other arguments of `model_card`."""
    export_model(target, model, shipped, tokenizer, special=special, facts=facts, config=config,
                 card=model_card(name, model, facts, **card))


def llama_config(vocab: int, **changes: Any) -> dict[str, Any]:
    """Returns the config.json of a small Llama, with changes."""
    return {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": vocab, "hidden_size": 96,
            "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 256,
            "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
            "tie_word_embeddings": True, **changes}


def word_tokenizer(ids: Mapping[str, int], special: Sequence[str], pieces: str | None = None) -> Tokenizer:
    """Returns a tokenizer of whole words, the first of `special` for others; `pieces` is a regular expression of a
    word, and without it words have spaces between them."""
    found = Tokenizer(models.WordLevel(dict(ids), unk_token=special[0]))
    found.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if pieces is not None:
        found.pre_tokenizer = pre_tokenizers.Split(Regex(pieces), "isolated")
        found.decoder = decoders.Fuse()
    found.add_special_tokens(list(special))
    return found
