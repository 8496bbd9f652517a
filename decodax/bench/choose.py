"""Choices of settings for one machine, measured now or predicted from earlier measurements.

`tune` measures settings of `generate` side by side. Which setting is best differs between devices, and no rule of thumb
finds it ("The Impact of Hyperparameters on Large Language Model Inference Performance: An Evaluation of vLLM and
HuggingFace Pipelines", 2024). `Selector` learns from the logs of `decodax compare --json` which system is likely the
fastest for a workload (after MetaInf: "Meta-Learning for Speeding Up Large Model Inference in Decentralized
Environments"; it averages over similar logged runs where MetaInf trains regressors). `Runtime` fits the time that a
prompt and its answer take on an otherwise idle machine ("Cheaply Evaluating Inference Efficiency Metrics for
Autoregressive Transformer APIs", Narayanan et al., 2023).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from decodax.bench.comparison import PLAIN
from decodax.front.generate import generate
from decodax.io.load import LM


@dataclasses.dataclass(frozen=True)
class Tried:
    """The measurement of one setting.

    Attributes:
        options: the options of this setting.
        tokens_per_second: the median over the repeats.
        seconds: the duration of each repeat.
        error: the error with which the setting failed, or None.
    """

    options: dict[str, Any]
    tokens_per_second: float = 0.0
    seconds: tuple[float, ...] = ()
    error: str | None = None


def tune(lm: LM, prompts: Sequence[Any], space: Mapping[str, Sequence[Any]], repeats: int = 3,
         run: Callable[..., Any] = generate, **options: Any) -> list[Tried]:
    """Measures all combinations of option values and returns them from the fastest to the slowest.

    Each setting runs once to compile. Then all settings run in turn, so that a temporary slowdown of the machine
    affects all of them. Settings that fail come last, with their errors.

    Args:
        lm: the model.
        prompts: the prompts of the workload.
        space: options of `generate` with the values to try for each, such as `dict(batch_size=[8, 16, 32],
            algorithm=[None, "prompt-lookup:length=4", "prompt-lookup:length=8"])`.
        repeats: the number of timed runs of each setting.
        run: the function to time, which is called like `generate`.
        options: options of `generate` that are the same for all settings.

    Raises:
        ValueError: `space` is empty, an option has no values, or an option occurs in both `space` and `options`.
    """
    if not space or not all(space.values()):
        raise ValueError(f"space: got {dict(space)}, takes options with values for each")
    if twice := space.keys() & options.keys():
        raise ValueError(f"space: {min(twice)!r} is also given as an option of all settings")
    settings = [dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())]
    errors: dict[int, str] = {}
    speeds: list[list[float]] = [[] for _ in settings]
    seconds: list[list[float]] = [[] for _ in settings]
    for turn, (i, setting) in itertools.product(range(repeats + 1), enumerate(settings)):
        if i in errors:
            continue
        begin = time.perf_counter()
        try:
            tokens = int(np.sum(run(lm, prompts, **setting, **options).lengths))
        except Exception as error:      # a setting that the model or the machine cannot take
            errors[i] = f"{type(error).__name__}: {error}"
            continue
        if turn:
            seconds[i].append(time.perf_counter() - begin)
            speeds[i].append(tokens / max(seconds[i][-1], 1e-9))
    tried = [Tried(s, error=errors[i]) if i in errors else Tried(s, statistics.median(speeds[i]), tuple(seconds[i]))
             for i, s in enumerate(settings)]
    return sorted(tried, key=lambda t: (t.error is not None, -t.tokens_per_second))


@dataclasses.dataclass(frozen=True)
class Workload:
    """The properties of a workload by which `Selector` chooses a decoding method.

    Attributes:
        batch: the number of prompts that are decoded together.
        copied: the share of new tokens that are copied from the prompt (`decodax.bench.tasks.copied`).
        repeated: the share of new tokens that repeat earlier output.
        model: the model's name.
        device: the device's name.
    """

    batch: int
    copied: float
    repeated: float
    model: str = ""
    device: str = ""

    def distance(self, other: Workload) -> float:
        """Returns the distance to another workload, for the weights in `Selector.predict`.

        A factor of two in the batch size adds 1, as does a difference of 0.1 in `copied` or in `repeated`. Another
        model or device adds 2.
        """
        return (abs(math.log2(self.batch / other.batch)) + 10 * abs(self.copied - other.copied)
                + 10 * abs(self.repeated - other.repeated)
                + 2 * (self.model != other.model) + 2 * (self.device != other.device))


@dataclasses.dataclass(frozen=True)
class Selector:
    """Chooses a decoding method by the speedups that methods had on similar workloads.

    Attributes:
        runs: the workload, the name of the method and the speedup of each logged run.
    """

    runs: tuple[tuple[Workload, str, float], ...]

    @classmethod
    def fit(cls, logs: Iterable[Mapping[str, Any]]) -> Selector:
        """Returns a selector that uses the runs of some logs.

        Args:
            logs: contents of files that `decodax compare --json FILE` wrote, or results of `Comparison.json()`.

        Raises:
            ValueError: none of the runs has a speedup.
        """
        runs = []
        for log in logs:
            plain = {(row["task"], row["batch"]): row for row in log["rows"] if row["system"] == PLAIN}
            for row in log["rows"]:
                text = plain.get((row["task"], row["batch"]), row)
                if row["speedup"] is not None and text["copied"] is not None and text["repeated"] is not None:
                    where = Workload(row["batch"], text["copied"], text["repeated"], str(log["model"]),
                                     str(log["device"]))
                    runs.append((where, row["system"], float(row["speedup"])))
        if not runs:
            raise ValueError("logs: got none with a speedup, takes those of decodax compare --json")
        return cls(tuple(runs))

    def predict(self, workload: Workload) -> dict[str, float]:
        """Returns the expected speedup of each method by name, the largest first.

        It is the weighted geometric mean of the logged speedups. The weight of a run is `2 ** -distance` of its
        workload. A speedup of 1, that of plain decoding, enters each mean with the weight of a run at distance 4.
        """
        found = {PLAIN: 1.0}
        for system in dict.fromkeys(name for _, name, _ in self.runs if name != PLAIN):
            near = [(2.0 ** -workload.distance(where), math.log(speedup)) for where, name, speedup in self.runs
                    if name == system]
            found[system] = math.exp(sum(w * x for w, x in near) / (sum(w for w, _ in near) + 2.0 ** -4))
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def choose(self, workload: Workload, least: float = 1.1) -> str:
        """Returns the name of the method with the largest expected speedup, or "plain" if no method is expected to
        reach a speedup of `least`."""
        best, speedup = next(iter(self.predict(workload).items()))
        return best if speedup >= least else PLAIN


@dataclasses.dataclass(frozen=True)
class Runtime:
    """A model of the duration of a request on fixed hardware and software, without other load.

    For `p` prompt tokens and `o` new tokens the duration is `start + per_prompt_token p + per_prompt_pair p^2 +
    per_new_token o` seconds.

    >>> fit = Runtime.fit([(p, o, 0.5 + 0.001 * p + 0.02 * o) for p in (64, 128, 256) for o in (1, 16, 64)])
    >>> round(fit(100, 50), 3), round(fit.per_new_token, 3)
    (1.6, 0.02)
    """

    start: float
    per_prompt_token: float
    per_prompt_pair: float
    per_new_token: float

    def __call__(self, prompt: int, new: int) -> float:
        return self.start + (self.per_prompt_token + self.per_prompt_pair * prompt) * prompt + self.per_new_token * new

    def cost(self, prompt: int, new: int, price: float, devices: int = 1) -> float:
        """Returns the cost of one request.

        Args:
            prompt: the number of prompt tokens.
            new: the number of new tokens.
            price: the price of one device for one second.
            devices: the number of devices.
        """
        return self(prompt, new) * price * devices

    @classmethod
    def fit(cls, runs: Sequence[tuple[int, int, float]]) -> Runtime:
        """Fits a runtime to measured runs by least squares.

        Args:
            runs: the number of prompt tokens, the number of new tokens and the seconds of each run.

        Raises:
            ValueError: the runs do not determine the four coefficients.
        """
        prompt, new, seconds = (np.array(x, float) for x in zip(*runs, strict=True)) if runs else (np.zeros(0),) * 3
        # Scale the columns to similar sizes.
        most, longest = max(prompt.max(initial=1), 1), max(new.max(initial=1), 1)
        columns = np.stack([np.ones_like(prompt), prompt / most, (prompt / most) ** 2, new / longest], 1)
        if np.linalg.matrix_rank(columns) < 4:
            raise ValueError(f"runs: got {len(runs)}, takes at least three prompt lengths and two answer lengths")
        found = np.linalg.lstsq(columns, seconds, rcond=None)[0]
        return cls(*(float(x) for x in found / np.array([1, most, most**2, longest])))

    @classmethod
    def measure(cls, lm: LM, prompts: Sequence[int] = (32, 128, 256), new: Sequence[int] = (1, 16, 64),
                repeats: int = 3, **options: Any) -> Runtime:
        """Measures the runtime of a model on this machine and fits it.

        The fastest of the repeats counts, because other load on the machine only adds time.

        Args:
            lm: the model.
            prompts: prompt lengths to measure, in tokens.
            new: numbers of new tokens to measure.
            repeats: the number of timed runs of each pair of lengths.
            options: options of `generate`.
        """
        runs = []
        for p, o in itertools.product(prompts, new):
            ids = [[3 + i % max(lm.vocab_size - 3, 1) for i in range(p)]]
            times = []
            for _ in range(repeats + 1):
                begin = time.perf_counter()
                made = generate(lm, ids, max_new_tokens=o, min_new_tokens=o, **options)
                times.append((int(made.lengths[0]), time.perf_counter() - begin))
            runs.append((p, times[0][0], min(seconds for _, seconds in times[1:])))
        return cls.fit(runs)
