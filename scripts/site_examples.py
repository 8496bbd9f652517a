"""Examples of the pages that `scripts/site.py` makes: calls that run on the shipped models."""

from __future__ import annotations

import inspect
from typing import Any

GIVEN = {
    "awrs": "check=lambda tokens: 0 not in tokens", "dynamic-beam-allocation": 'phrases=["return"]',
    "grid-beam-search": 'phrases=["return"]', "knn-ssd": "domains=[samples[:1], samples[1:]]",
    "seal": 'corpus=[lm.tokenizer.encode("def fib(n):\\n    return n")]'}
"""What examples give beside models, for systems that cannot do without."""

TRAINED = {"apd": ("pycode-full", "--block 0"), "sbd": ("pycode-sbd", "--attention causal-prefix --block 16")}
"""Systems for models that are not shipped: the directory in runs/, and how `pycode` becomes one."""


def example(e: Any) -> str:
    """A call that runs on the shipped models, or on one that the first line trains."""
    fills = "diffusion" in e.needs
    model, prompt = ("pycode-diffusion", '"def area(r):"') if fills else ("pycode", '"def fib(n):"')
    lines = ["import decodax as dx", ""]
    if e.name in TRAINED:
        name, how = TRAINED[e.name]
        model = f"runs/{name}/model"
        lines.append(f"# python scripts/train.py diffusion --preset pycode-diffusion {how} --output runs/{name}")
    elif e.name == "cascade":
        model, prompt = "numerals", '"1207="'
    lines.append(f'lm = dx.load("{model}")')
    given = ["lm"] if e.needs not in ("nothing", "a draft model") else []
    if e.takes_draft:
        lines.append('draft = dx.load("pycode-draft")')
        given.append("draft=draft")
    if "samples" in e.needs:
        lines.append('samples = [lm.tokenizer.encode(text) for text in ("def area(r):", "import os", "class Node:")]')
    own = GIVEN.get(e.name, "samples=samples" if "samples" in e.needs else "")
    given += [own] if own else []
    name = f'"{e.name}"' if not given else f'dx.algorithms.make("{e.name}", {", ".join(given)})'
    return "\n".join([*lines, f"out = dx.generate(lm, {prompt}, max_new_tokens=32, algorithm={name})",
                      "print(out.text[0], out.stats.tokens_per_forward)"])


STANDINS = {
    "reward": ("between 0 and 1", "lambda prompt, texts: [1 / (1 + len(text)) for text in texts]"),
    "potential": ("a log weight", "lambda prompt, texts: [-0.1 * len(text) for text in texts]"),
    "quality": ("an estimate of quality", "lambda prompt, texts: [1 / (1 + len(text)) for text in texts]"),
    "compare": ("above 0 where a is better", "lambda prompt, a, b: len(b) - len(a)"),
    "act": ("what the call in the text gives", 'lambda prompt, text: " # found\\n"'),
    "redundant": ("a small verifier", "lambda prompt, thoughts: len(thoughts) > 2"),
    "fork": ("a token that the model was tuned to write", "4094"), "child": ("", "4095"),
    "retrieve": ("what is found for the question that ends the text", 'lambda prompt, text: "# found: os.path\\n"'),
    "evidence": ("texts in another language", "dx.select.Sampled(lm, n=4, sampling=SAMPLING)"),
    "references": ("samples of the reference policy", "dx.select.Sampled(lm, n=4, sampling=SAMPLING)"),
    "guidance": ("", '"\\n# so\\n"'), "rule": ("", "dx.select.mbr()")}
"""What examples put for options without a default."""


def search_example(slot: str, e: Any) -> str:
    """A call that runs on a shipped model."""
    from decodax.search import CanvasExplorer

    fills = slot == "search" and issubclass(e.make, CanvasExplorer)
    needed = [name for name, option in e.options.items() if not option.optional]
    given = [(name, *STANDINS.get(name, ("", ""))) for name in needed]
    values = [value for _, _, value in given]
    lines = ["import decodax as dx", "", f'lm = dx.load("{"pycode-diffusion" if fills else "pycode"}")']
    if "SAMPLING" in "".join(values):
        lines.append("SAMPLING = dict(temperature=1.0, max_new_tokens=16)")
    for name, said, value in given:
        lines += [*([f"# yours: {said}"] if said else []), *([f"{name} = {value}"] if value else [])]
    asks = ["lm"] if "lm" in inspect.signature(e.make).parameters else []
    options = asks + [f"{name}={name}" for name in needed]
    options += ["n=2", "simulations=4", "every=4"] if fills else \
        ['until="\\n"', "step_tokens=12"] if slot == "search" else []
    lines.append(f"{slot} = dx.{slot}.{e.identifier}({', '.join(options)})")
    how = ("num_samples=4, temperature=0.8, max_new_tokens=16" if slot == "select" else
           'algorithm="llada:block_length=8", temperature=0.8, max_new_tokens=16' if fills else
           "temperature=0.8, max_new_tokens=24")
    return "\n".join([*lines, f'out = dx.generate(lm, "def area(", {slot}={slot}, {how})', "print(out.text[0])"])
