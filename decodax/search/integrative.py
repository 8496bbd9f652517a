"""Integrative decoding: rows with different answers in their prompts generate one text together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from decodax.common.arguments import whole
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
    """Each `group` of adjacent rows generates the same tokens, chosen by the mean of their logits.

    The mean replaces the logits of the first row of a group. The policy and the random key of that row choose the
    token, and the other rows append it, too. Rows of a group have different prompts and end together.

    Attributes:
        group: number of rows that generate together. The rows that remain at the end of the batch form a smaller group.
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
        # Rows that have ended do not count; those of a group end together, except for their budgets.
        says = s.running[:, None]
        total = jax.ops.segment_sum(jnp.where(says, logits, 0), first, s.batch)
        count = jax.ops.segment_sum(says.astype(logits.dtype), first, s.batch)
        mean = (total / jnp.maximum(count, 1))[first]
        token = dist.policy.over_logits(s, window, mean[:, None]).draw()[first]
        return Decision(tokens=token, count=jnp.ones(s.batch, jnp.int32), source=jnp.zeros_like(token), algo=algo,
                        slots=jnp.where(token >= 0, window.positions, -1))


def behind_answer(prompt: Any, answer: str) -> str:
    """Returns a prompt that shows a sampled answer and asks the question again."""
    return f"{prompt}\n{answer.strip()}\nAnswer the question again: {prompt}\n"


@dataclasses.dataclass(frozen=True)
class Integrated:
    """The result of `integrate`.

    Attributes:
        text: the text of each prompt.
        samples: the sampled answers, `[P][num_samples]`.
    """

    text: list[str]
    samples: list[list[str]]


@FUNCTIONS.register("search.integrate", "Integrative Decoding: Improve Factuality via Implicit Self-consistency",
                    "Cheng et al. 2024", "one answer by the mean of rows, each with another sampled answer in front")
def integrate(lm: LM | Any, prompts: Any, num_samples: int = 8, *, template: Callable[[Any, str], Any] = behind_answer,
              samples: list[list[str]] | None = None, max_new_tokens: int = 64, temperature: float = 0.7,
              stop: Any = None, seed: int = 0, **options: Any) -> Integrated:
    """Integrative decoding (Cheng et al., 2024): answers a prompt with several sampled answers in view, by averaged
    logits.

    The model first samples `num_samples` answers to each prompt. Then the prompt is asked again after each answer, and
    these rows generate one text together: each token has the largest mean of the rows' logits. Statements on which the
    answers agree are likely in all rows.

    Args:
        lm: the model.
        prompts: one or several.
        num_samples: number of sampled answers.
        template: makes the second prompt from a prompt and an answer.
        samples: known answers, `[P][num_samples]`; None: they are sampled.
        max_new_tokens: maximum number of tokens of an answer.
        temperature: temperature of the sampled answers; the final answer is greedy.
        stop: strings that end an answer.
        seed: seed of the sampled answers.
        options: further options of `generate`, for the sampled and the final answers.

    Raises:
        ValueError: as in `generate`.
    """
    lm = text_model(lm, "answers are put in front of prompts as texts")
    given = [prompts] if isinstance(prompts, str) else list(prompts)
    n = whole("num_samples", num_samples, 1)
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
