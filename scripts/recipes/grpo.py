"""Trains the shipped `sums` further by group-relative policy gradients: generation inside a training loop.

    python scripts/train.py grpo                     # all weights; about 8 minutes on 2 cores
    python scripts/train.py grpo --lora 8            # an adapter alone
    python scripts/train.py grpo --mesh 2x4          # on 8 devices, sampled and trained where the weights lie
    python scripts/train.py grpo --transform 10 --kl 0.05      # for best-of-N (InfAlign-CTRL)

In each step the model works out `--problems` sums `--group` times, and the reward of a text is the share of its lines
that are right, one after the other. The advantage of a text is its reward minus the mean of its group, over the group's
standard deviation, and the likelihood ratio of each token is clipped (GRPO: Shao et al., 2024, "DeepSeekMath").

`decodax.generate` decodes with the trainer's own arrays (`LM.with_params`), so nothing is copied or compiled again, and
returns log-probabilities of the distribution that it drew from. "off by" is the largest |ratio - 1| before the first
update of a step: the difference of the trainer's forward from them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.progress import track

import decodax as dx
from decodax.bench.problems import sums
from decodax.train.grpo import GrpoBatch, advantages, align, update
from decodax.train.loop import place_batch
from recipes.options import GrpoOptions


class Step(NamedTuple):
    """Figures of a step. `off`: the largest |ratio - 1| before its first update; `sampling`, `training`: seconds."""

    reward: float
    right: float
    off: float
    sampling: float
    training: float
    tokens: int


class Trainer:
    """The weights in training and the model that samples from them. `trained` is the adapter, or all weights."""

    def __init__(self, options: GrpoOptions):
        self.options = options
        mesh = None if options.mesh is None else jax.make_mesh(
            tuple(map(int, options.mesh.split("x"))), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        self.lm = dx.load("sums", mesh=mesh)
        self.trained = self.frozen = self.lm.params
        self.lora = options.lora is not None
        if options.lora is not None:
            self.trained = dx.adapters.init(self.frozen, jax.random.key(options.seed), options.lora, dx.adapters.PARTS)
        self.tx = optax.chain(optax.clip_by_global_norm(1.0),
                              optax.adam(optax.constant_schedule(options.rate * (10 if self.lora else 1))))
        self.opt = self.tx.init(self.trained)

    @property
    def now(self) -> dx.LM:
        """The model with the present weights."""
        return self.lm.with_params(self.trained) if not self.lora else \
            dataclasses.replace(self.lm, params=dx.adapters.apply(self.frozen, self.trained))

    def step(self, number: int) -> Step:
        """Samples, rewards and updates."""
        o, begun = self.options, time.perf_counter()
        rng = random.Random(f"grpo {o.seed} {number}")
        drawn = [sums.draw_new(rng, o.numbers) for _ in range(o.problems)]
        asked = [problem for problem in drawn for _ in range(o.group)]
        answers = lambda lm, ids: dx.generate(lm, [p.prompt for p in drawn], num_samples=o.group, temperature=1.0,
                                              logprobs=0, seed=o.seed * 1_000_003 + number, request_ids=list(ids),
                                              max_new_tokens=9 * o.numbers)
        reward = lambda out: np.reshape([sums.right_steps(p, text)[0] / o.numbers for p, text in zip(
            asked, out.text, strict=True)], (-1, o.group))
        rewards = reward(out := answers(self.now, range(o.problems)))
        worth = rewards if o.transform is None else align(
            rewards, reward(answers(self.lm, range(10**6, 10**6 + o.problems))), o.transform)
        batch = self.batch(asked, out, advantages(worth).reshape(-1))
        sampled, offs = time.perf_counter(), []
        with jax.set_mesh(self.lm.mesh) if self.lm.mesh is not None else contextlib.nullcontext():
            for _ in range(o.updates):
                self.trained, self.opt, off = update(self.tx, self.lm.model, self.lora, self.trained, self.opt,
                                                     self.frozen if self.lora or o.kl else None, batch, o.clip, o.kl)
                offs.append(off)
        return Step(rewards.mean(), np.mean([p.answer == text for p, text in zip(asked, out.text, strict=True)]),
                    float(offs[0]), sampled - begun, time.perf_counter() - sampled, int(out.lengths.sum()))

    def batch(self, asked: list[sums.Sum], out: dx.Result, advantage: np.ndarray) -> GrpoBatch:
        """Returns rows of prompt and answer, `[R, T]`; `T` is the same in every step."""
        prompt = len(asked[0].prompt)
        tokens = np.zeros((len(out), prompt + 9 * self.options.numbers), np.int32)
        answers, old = (np.zeros((len(out), tokens.shape[1] - 1), np.float32) for _ in range(2))
        for i, problem in enumerate(asked):
            new = int(out.lengths[i])
            tokens[i, :prompt] = sums.encode(problem.prompt)
            tokens[i, prompt:prompt + new] = out.row(i)
            answers[i, prompt - 1:prompt - 1 + new] = 1
            old[i, prompt - 1:prompt - 1 + new] = out.logprobs.processed[i, :new]
        batch = GrpoBatch(*map(jnp.asarray, (tokens, answers, old, advantage)))
        return batch if self.lm.mesh is None else place_batch(batch, self.lm.mesh)

    def report(self) -> str:
        """Returns the accuracy on held-out sums in words."""
        o = self.options
        asked, shares = sums.problems(o.held_out, o.numbers, seed=2), []
        for temperature in (1.0, 0.0):
            out = dx.generate(self.now, [p.prompt for p in asked], temperature=temperature, seed=o.seed,
                              max_new_tokens=9 * o.numbers)
            shares.append(np.mean([text == p.answer for text, p in zip(out.text, asked, strict=True)]))
        out = dx.generate(self.now, [p.prompt for p in asked], temperature=1.0, seed=o.seed + 1, num_samples=4,
                          max_new_tokens=9 * o.numbers)
        best = np.mean([p.answer in out.text[4 * i:4 * i + 4] for i, p in enumerate(asked)])
        return (f"{shares[0]:.1%} of {o.held_out} held-out sums drawn right, {best:.1%} by the best of 4, "
                f"{shares[1]:.1%} by greedy decoding")


def train(options: GrpoOptions, console: Console | None = None) -> Trainer:
    """Trains to the end and prints the steps."""
    console = console or Console()
    trainer = Trainer(options)
    console.print(f"before: {trainer.report()}", highlight=False)
    for number in track(range(options.steps), "GRPO", console=console, transient=True):
        done = trainer.step(number)
        if number % max(options.steps // 12, 1) == 0 or number == options.steps - 1:
            console.print(f"step {number}: reward {done.reward:.3f}, right {done.right:.1%}, off by {done.off:.1e}; "
                          f"sampling {done.sampling:.2f} s ({done.tokens / done.sampling:,.0f} tokens/s), training "
                          f"{done.training:.2f} s", highlight=False)
    console.print(f"after: {trainer.report()}", highlight=False)
    if options.export is not None:
        if trainer.lora:
            dx.adapters.save(options.export, trainer.trained, trainer.lm.model, base="sums")
        else:
            dx.save(trainer.now, options.export)
        console.print(f"written to {options.export}")
    return trainer
