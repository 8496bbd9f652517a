"""What to run on this machine: by measuring, or from what was measured before.

`tune` measures settings of `generate` side by side: which is best changes from device to device, with peaks that no
rule of thumb tells ("The Impact of Hyperparameters on Large Language Model Inference Performance: An Evaluation of vLLM
and HuggingFace Pipelines", 2024). `Selector` learns from the logs of `decodax compare --json` which system to take for
a workload (after MetaInf: "Meta-Learning for Speeding Up Large Model Inference in Decentralized Environments"; here by
neighbours among the logged runs in place of its trained regressors). `Runtime` fits how long a prompt and an answer
take when nothing disturbs ("Cheaply Evaluating Inference Efficiency Metrics for Autoregressive Transformer APIs",
Narayanan et al., 2023).
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

from decodax.bench.compare import PLAIN
from decodax.front.generate import generate
from decodax.io.load import LM


@dataclasses.dataclass(frozen=True)
class Tried:
    """A setting that was measured: its options, tokens a second (the median of the repeats), and each repeat's seconds;
    or the error that it ended with."""

    options: dict[str, Any]
    tokens_per_second: float = 0.0
    seconds: tuple[float, ...] = ()
    error: str | None = None


def tune(lm: LM, prompts: Sequence[Any], space: Mapping[str, Sequence[Any]], repeats: int = 3,
         run: Callable[..., Any] = generate, **options: Any) -> list[Tried]:
    """Measures all settings of a space, the fastest first.

    A setting runs once to be compiled, and then in turn with the others, so that what slows the machine down for a
    while slows all of them. Settings that fail come last, with the reason.

    Args:
        prompts: of the workload. space: options of `generate` and the values of each, such as
            `dict(batch_size=[8, 16, 32], algorithm=[None, "prompt-lookup:length=4", "prompt-lookup:length=8"])`.
        run: what is timed. options: of `generate`, the same for all.

    Raises:
        ValueError: an empty space, or an option that stands twice.
    """
    if not space or not all(space.values()):
        raise ValueError(f"space: got {dict(space)}, takes options with values for each")
    if twice := space.keys() & options.keys():
        raise ValueError(f"space: {min(twice)!r} stands among the options of all settings, too")
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
    """What a choice goes by: prompts at once, the share of new tokens that are copied from the prompt and that repeat
    the answer (`decodax.bench.tasks.copied`), and the names of model and device."""

    batch: int
    copied: float
    repeated: float
    model: str = ""
    device: str = ""

    def distance(self, other: Workload) -> float:
        """Of one doubling of the batch 1, of a tenth of the tokens 1, of another model or device 2."""
        return (abs(math.log2(self.batch / other.batch)) + 10 * abs(self.copied - other.copied)
                + 10 * abs(self.repeated - other.repeated)
                + 2 * (self.model != other.model) + 2 * (self.device != other.device))


@dataclasses.dataclass(frozen=True)
class Selector:
    """Chooses among systems by the speedups that they had on workloads like one.

    Attributes:
        runs: workload, system and speedup of each logged run.
    """

    runs: tuple[tuple[Workload, str, float], ...]

    @classmethod
    def fit(cls, logs: Iterable[Mapping[str, Any]]) -> Selector:
        """From what `decodax compare --json FILE` wrote, or `Comparison.json()`.

        Raises:
            ValueError: no run among them has a speedup.
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
        """The speedup expected of each system, the largest first: a mean of logarithms, with weights that halve with
        each unit of distance, and plain decoding's 1 with the weight of a run at distance 4."""
        found = {PLAIN: 1.0}
        for system in dict.fromkeys(name for _, name, _ in self.runs if name != PLAIN):
            near = [(2.0 ** -workload.distance(where), math.log(speedup)) for where, name, speedup in self.runs
                    if name == system]
            found[system] = math.exp(sum(w * x for w, x in near) / (sum(w for w, _ in near) + 2.0 ** -4))
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def choose(self, workload: Workload, least: float = 1.1) -> str:
        """The system to run: a name that `decodax.system` takes, or "plain" where no speedup of `least` is expected."""
        best, speedup = next(iter(self.predict(workload).items()))
        return best if speedup >= least else PLAIN


@dataclasses.dataclass(frozen=True)
class Runtime:
    """The idealized runtime of a model on fixed hardware and software, without contention: for `p` prompt tokens and
    `o` new ones `start + per_prompt_token p + per_prompt_pair p^2 + per_new_token o` seconds.

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
        """What it costs on so many devices at a price of a device and second."""
        return self(prompt, new) * price * devices

    @classmethod
    def fit(cls, runs: Sequence[tuple[int, int, float]]) -> Runtime:
        """The least squares of runs, each prompt tokens, new tokens and seconds.

        Raises:
            ValueError: too few runs to tell the four figures apart.
        """
        prompt, new, seconds = (np.array(x, float) for x in zip(*runs, strict=True)) if runs else (np.zeros(0),) * 3
        # in units of the largest, so that the columns are of one size
        most, longest = max(prompt.max(initial=1), 1), max(new.max(initial=1), 1)
        columns = np.stack([np.ones_like(prompt), prompt / most, (prompt / most) ** 2, new / longest], 1)
        if np.linalg.matrix_rank(columns) < 4:
            raise ValueError(f"runs: got {len(runs)}, takes three lengths of prompts and two of answers at least")
        found = np.linalg.lstsq(columns, seconds, rcond=None)[0]
        return cls(*(float(x) for x in found / np.array([1, most, most**2, longest])))

    @classmethod
    def measure(cls, lm: LM, prompts: Sequence[int] = (32, 128, 256), new: Sequence[int] = (1, 16, 64),
                repeats: int = 3, **options: Any) -> Runtime:
        """Of this machine: the fastest of the repeats counts, since what else runs only adds. `options`: of
        `generate`."""
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
