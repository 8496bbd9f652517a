"""Integrative decoding: rows that see different answers write one text together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from decodax.common.registry import FUNCTIONS
from decodax.core.algorithm import Algorithm, Traits
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params
from decodax.core.window import Window, causal
from decodax.engine.batch import Job
from decodax.engine.methods import text_model
from decodax.engine.request import Request
from decodax.front.generate import generate
from decodax.io.load import LM


@dataclasses.dataclass(frozen=True)
class Together(Algorithm):
    """Each `group` rows that stand side by side write the same tokens, by the mean of their logits.

    The mean takes the place of the logits of a group's first row, with whose policy and address the token is chosen;
    the others take it over. Rows of a group have prompts of their own and end together.

    Attributes:
        group: rows that write together. A rest that does not fill a group writes for itself.
    """

    group: int

    @property
    def traits(self) -> Traits:
        return Traits(commits=1)

    def init(self, params: Params, s: State) -> Any:
        return None

    def propose(self, params: Params, policy: Any, s: State) -> tuple[Window, Any]:
        return causal(s.newest[:, None], s.length - 1, s.running[:, None]), None

    def decide(self, params: Params, dist: Any, s: State, window: Window, out: Out, algo: Any) -> Decision:
        first = jnp.arange(s.batch) // self.group * self.group
        logits = dist.logits()[:, 0]
        # rows that have ended have nothing to say; of a group all end at once, but for its budgets
        says = s.running[:, None]
        total = jax.ops.segment_sum(jnp.where(says, logits, 0), first, s.batch)
        count = jax.ops.segment_sum(says.astype(logits.dtype), first, s.batch)
        mean = (total / jnp.maximum(count, 1))[first]
        token = dist.policy.over_logits(s, window, mean[:, None]).draw()[first]
        return Decision(tokens=token, count=jnp.ones(s.batch, jnp.int32), source=jnp.zeros_like(token), algo=algo,
                        slots=jnp.where(token >= 0, window.positions, -1))


def behind_answer(prompt: Any, answer: str) -> str:
    """How a prompt looks behind one of its sampled answers."""
    return f"{prompt}\n{answer.strip()}\nAnswer the question again: {prompt}\n"


@dataclasses.dataclass(frozen=True)
class Integrated:
    """What came of `integrate`. Attributes: text of each prompt; samples: the answers that it goes by, `[P][n]`."""

    text: list[str]
    samples: list[list[str]]


@FUNCTIONS.register("search.integrate", "Integrative Decoding: Improve Factuality via Implicit Self-consistency",
                    "Cheng et al. 2024", "one answer by the mean of rows, each with another sampled answer in front")
def integrate(lm: LM | Any, prompts: Any, n: int = 8, *, template: Callable[[Any, str], Any] = behind_answer,
              samples: list[list[str]] | None = None, max_new_tokens: int = 64, temperature: float = 0.7,
              stop: Any = None, seed: int = 0, **options: Any) -> Integrated:
    """Integrative decoding (Cheng et al., 2024): the answer that a model gives with one of its own answers in front of
    it, on average over several of these.

    Each prompt is answered `n` times. With each answer in front the prompt is put again, and the `n` rows write one
    text in lock-step, by the largest mean of their logits. What the answers agree on is likely in all rows.

    Args:
        template: from a prompt and an answer the second prompt. samples: answers known already, `[P][n]`.
        temperature: of the first answers; the last one is greedy.
        options: further ones of `generate`, for both.

    Raises:
        ValueError: as `generate`.
    """
    lm = text_model(lm, "answers are put in front of prompts as texts")
    given = [prompts] if isinstance(prompts, str) else list(prompts)
    if n < 1:
        raise ValueError(f"n: got {n}, takes at least 1")
    common: dict[str, Any] = dict(max_new_tokens=max_new_tokens, stop=stop, **options)
    if samples is None:
        drawn = generate(lm, given, num_samples=n, temperature=temperature, seed=seed, **common)
        assert drawn.text is not None
        samples = [drawn.text[i * n:(i + 1) * n] for i in range(len(given))]
    if len(samples) != len(given) or any(len(row) != n for row in samples):
        raise ValueError(f"samples: takes {n} for each of the {len(given)} prompts")
    asked = [template(prompt, answer) for prompt, row in zip(given, samples, strict=True) for answer in row]
    job = Job.begin(Request.read(lm, asked, algorithm=Together(n), **{**common, "temperature": 0.0}))
    job.advance(None)
    text = job.result().text
    assert text is not None
    return Integrated(text[::n], samples)


