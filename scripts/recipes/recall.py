"""`recall`: the model that answers questions on long texts (`decodax.bench.problems.recall`).

`scripts/evaluate.py caches` measures with it what cache policies lose.

To find a name again a model has to know which token preceded another. The biases of queries and keys, which Qwen2 has,
begin in the first layer as attention to the tokens just before (`looking_back`); without that, tens of millions of
tokens pass before anything is recalled.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from decodax.bench.figures import markdown_table
from decodax.bench.problems.recall import END, ID, PAD, TASKS, VOCABULARY, problems, training_batch
from decodax.models import Transformer
from decodax.models.families import read_config
from decodax.train.export import llama_config, publish, word_tokenizer
from decodax.train.language_model import WeightedAnswers, likeliest
from recipes.options import Options
from recipes.run import Recipe

STAGES = ((400, 64, 64), (350, 64, 64), (500, 128, 32), (1000, 256, 16), (1000, 512, 8), (450, 1024, 4),
          (500, 2048, 2))
"""Numbers of steps, lengths and numbers of texts. In the first stage texts are spans that repeat, without questions."""

CONFIG = llama_config(len(VOCABULARY), model_type="qwen2", architectures=["Qwen2ForCausalLM"], hidden_size=128,
                      num_hidden_layers=4, num_key_value_heads=2, intermediate_size=320, max_position_embeddings=2048)

INTRODUCTION = """A small Qwen2-shaped model that answers questions on long texts, in the manner of RULER (Hsieh et al.
2024). It is made to measure what cache policies lose: `python scripts/evaluate.py caches`. Its language is that of
`decodax/bench/problems/recall.py`."""


def stage(step: int, longest: int) -> tuple[int, int, bool]:
    """Returns the length and the number of the texts of a step, and whether it belongs to the first stage."""
    ahead = sum(step >= end for end in itertools.accumulate(steps for steps, _, _ in STAGES))
    _, length, rows = STAGES[min(ahead, len(STAGES) - 1)]
    return min(length, longest), rows, ahead == 0


def looking_back(model: Transformer, params: Any, strength: float = 6.0) -> Any:
    """Sets the biases of queries and keys in the first layer: head `i` attends to the token `1 + i % 3` before."""
    c = model.config
    turn = 10_000.0 ** (-np.arange(c.head_dim // 2) * 2 / c.head_dim)
    keys = np.concatenate([np.ones(c.head_dim // 2), np.zeros(c.head_dim // 2)])
    queries = [np.concatenate([np.cos(back * turn), -np.sin(back * turn)]) for back in
               (1 + head % 3 for head in range(c.heads))]
    own = params["layers"]["0"]["attn"]
    own["q"]["bias"] = jnp.asarray(strength * np.concatenate(queries), jnp.float32)
    own["k"]["bias"] = jnp.asarray(strength * np.tile(keys, c.kv_heads), jnp.float32)
    return params


def accuracy(model: Transformer, params: Any, task: str, count: int, length: int, seed: int = 1) -> float:
    """Returns the share of held-out problems of a task whose whole answer is right, greedily."""
    right = 0
    for problem in problems(task, count, length, seed):
        prompt = [ID[word] for word in problem.prompt.split()]
        answer = [*(ID[word] for word in problem.answer.split()), ID[END]]
        padded = np.zeros((1, -(-(length + 40) // 64) * 64), np.int32)
        padded[0, :len(prompt) + len(answer)] = [*prompt, *answer]
        got = np.asarray(likeliest(model, params, padded))[0, len(prompt) - 1:len(prompt) - 1 + len(answer)]
        right += got.tolist() == answer
    return right / count


def recipe(options: Options, mesh: jax.sharding.Mesh, console: Console) -> Recipe:
    """Returns the recipe for `recipes.run.train`."""
    model, longest = Transformer(read_config(CONFIG)), options.longest or 2048

    def finish(target: Path, shipped: Any, exact: Any, facts: dict[str, Any]) -> str:
        lengths = [n for n in (512, 1024, 2000) if n <= longest]
        figures = {task: {n: accuracy(model, exact, task, options.problems or 1, n) for n in lengths} for task in TASKS}
        table = markdown_table(["task", *(f"{n} tokens" for n in lengths)],
                               [[task, *(f"{x:.0%}" for x in row.values())] for task, row in figures.items()])
        lengths_trained = ", ".join(map(str, dict.fromkeys(min(length, longest) for _, length, _ in STAGES)))
        facts |= {"lengths": lengths_trained, "accuracy": figures}
        tokenizer = word_tokenizer(ID, [PAD, END])
        publish(target, "recall", model, shipped, tokenizer, facts, {"eos_token": END, "pad_token": PAD}, CONFIG,
                introduction=INTRODUCTION, tags=["long-context"], rows={
            "lengths of training texts": f"{lengths_trained} tokens",
            "training": f"AdamW, cross-entropy, context tokens at {WeightedAnswers.outside:g} of an answer's weight, "
                        "float32 master weights"},
            figures=f"Right answers on {options.problems} held-out problems a task, greedy, with the shipped weights "
                    f"in float32:\n\n{table}")
        return f"right answers\n{table}"

    def batch(run: Any) -> tuple[np.ndarray, np.ndarray]:
        length, rows, spans = stage(run.step, longest)
        return training_batch(rows, length, options.seed, run.step, spans)

    return Recipe(
        looking_back(model, model.init_params(jax.random.key(options.seed))), WeightedAnswers(model), batch,
        lambda batch: batch[0].shape[0] * (batch[0].shape[1] - 1),
        lambda params, run: {task: accuracy(model, params, task, 16, stage(run.step, longest)[0]) for task in TASKS},
        finish, shardings=model.shardings(mesh))
