"""What a diffusion training run is told: named presets and the options of `scripts/train_diffusion.py`."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import problems

Stage = Literal["certainty", "filter"]


@dataclass(frozen=True)
class Preset:
    """A Llama shape with the training settings that suit it.

    Attributes:
        data: "problems" of `problems.py`, or "text", the Python standard library's source.
        shape: keywords of `decodax.models.llama`, less the vocabulary; empty: the shape of `init`.
        batch: rows a step. length: tokens in a row of text.
        peak: highest learning rate. warmup: steps of linear warm-up. minutes: default time budget.
        init: the model it starts from, a name or a directory. block: of block diffusion.
        spread: factor of the standard deviation of fresh kernels.
        optimizer: "adamw", or "muon" for kernels. weights: shares of tasks that are not 1.
    """

    data: Literal["problems", "text"]
    shape: dict[str, Any]
    batch: int
    peak: float
    warmup: int
    minutes: float
    length: int = 0
    init: str | None = None
    block: int | None = None
    spread: float = 1.0
    optimizer: Literal["adamw", "muon"] = "adamw"
    weights: tuple[str, ...] = ()


PRESETS = {
    # Faster rotary turns, larger kernels and Muon together: copying alone came to 0.15 nats a masked token in 250 steps
    # of 32 problems; with theta 10,000, usual kernels and AdamW, at the better of two rates, to 0.45.
    "tasks-diffusion": Preset(
        "problems", {"width": 128, "layers": 4, "heads": 4, "kv_heads": 4, "mlp": 384, "context": 64, "theta": 100.0},
        batch=64, peak=3e-3, warmup=100, minutes=80, spread=2.0, optimizer="muon",
        weights=("pick=3", "add=2", "sort=2", "brackets=1.5", "sudoku=1.5"),
    ),
    "pycode-diffusion": Preset(
        "text", {}, batch=8, length=256, peak=1e-3, warmup=100, minutes=40, init="pycode", block=8,
    ),
    "tiny": Preset(
        "problems", {"width": 32, "layers": 1, "heads": 2, "kv_heads": 1, "mlp": 64, "context": 64},
        batch=16, peak=1e-2, warmup=5, minutes=0.2,
    ),
    "tiny-text": Preset(
        "text", {"width": 32, "layers": 1, "heads": 2, "kv_heads": 1, "mlp": 64, "context": 32},
        batch=16, length=16, peak=1e-2, warmup=5, minutes=0.2, block=4,
    ),
}  # fmt: skip

STAGES: dict[str, dict[str, Any]] = {
    "certainty": {"optimizer": "adamw", "peak": 3e-4, "warmup": 50, "minutes": 15.0},
    "filter": {"optimizer": "adamw", "peak": 3e-3, "warmup": 20, "minutes": 2.0, "batch": 256},
}
"""Settings of the stages that follow, in place of the preset's; a stage starts from the preset's shipped model."""

ANSWERS: dict[str, dict[str, Any]] = {
    "problems": {"answers": 8192, "span": problems.CANVAS},
    "text": {"answers": 1024, "length": 64},
}
"""What the model writes for a stage, by the preset's data. Text is read in windows of `length` tokens, of which the
model writes the second half, so that long ones take long; the default span is the block of the model, or that half."""


@dataclass(frozen=True)
class Options:
    """One run. The fields marked `identity` decide the weights: a run is only resumed where they are equal.

    Attributes:
        apart: share of rows whose prompt does not see the answer, for models that read prompts from a cache.
        attention: of a model to be trained; None: "block-causal" with blocks and "full" without. "causal-prefix" is
            what set block decoding needs: causal text, and after it a block of masks that see one another.
        stage: None trains by the bound on the likelihood; "certainty" and "filter" follow it, on the model's answers.
        span: tokens of a block of answer in those stages.
        answers: problems that the model answers, or texts that it goes on with, for those stages.

    Raises:
        ValueError: a value that is none of what its field takes.
    """

    preset: str = field(default="tasks-diffusion", metadata={"identity": True})
    stage: Stage | None = field(default=None, metadata={"identity": True})
    output: Path = Path("runs/tasks-diffusion")
    export: Path | None = None
    minutes: float | None = None
    steps: int | None = field(default=None, metadata={"identity": True})
    decay_from: int | None = field(default=None, metadata={"identity": True})
    decay_share: float = 0.4
    batch: int | None = field(default=None, metadata={"identity": True})
    length: int | None = field(default=None, metadata={"identity": True})
    peak: float | None = field(default=None, metadata={"identity": True})
    warmup: int | None = field(default=None, metadata={"identity": True})
    weight_decay: float = field(default=0.1, metadata={"identity": True})
    seed: int = field(default=0, metadata={"identity": True})
    dtype: str = field(default="float32", metadata={"identity": True})
    optimizer: str | None = field(default=None, metadata={"identity": True})
    init: str | None = field(default=None, metadata={"identity": True})
    block: int | None = field(default=None, metadata={"identity": True})
    attention: str | None = field(default=None, metadata={"identity": True})
    shift: bool = field(default=False, metadata={"identity": True})
    weights: tuple[str, ...] | None = field(default=None, metadata={"identity": True})
    corpus: Path | None = field(default=None, metadata={"identity": True})
    apart: float = field(default=0.0, metadata={"identity": True})
    span: int | None = field(default=None, metadata={"identity": True})
    answers: int | None = field(default=None, metadata={"identity": True})
    devices: int | None = None
    log_every: int = 20
    eval_every: int = 250
    save_every: int = 250
    resume: bool = True

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise ValueError(f"preset: got {self.preset!r}; it takes one of {', '.join(PRESETS)}")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype: got {self.dtype!r}; it takes float32 or bfloat16")
        if self.decay_from is not None and (self.steps is None or self.decay_from >= self.steps):
            raise ValueError(f"decay_from: got {self.decay_from}, steps {self.steps}; it takes a step below `steps`")
        text = PRESETS[self.preset].data == "text"
        if not 0 <= self.apart <= 1 or (self.apart and (self.stage or self.block or text)):
            raise ValueError(f"apart: got {self.apart}, takes 0 to 1; 0 for text, with blocks and in a stage")
        if self.optimizer not in (None, "adamw", "muon"):
            raise ValueError(f"optimizer: got {self.optimizer!r}; it takes adamw or muon")
        for item in self.weights or ():
            task, equals, share = item.partition("=")
            if task not in problems.TASKS or not equals or not share.replace(".", "", 1).isdigit():
                raise ValueError(f"weights: got {item!r}; it takes TASK=SHARE, of {', '.join(problems.TASKS)}")
        preset = PRESETS[self.preset]
        defaults = {name: getattr(preset, name) for name in
                    ("batch", "length", "peak", "warmup", "optimizer", "init", "block", "weights")}
        if self.stage is not None:
            if self.stage not in STAGES:
                raise ValueError(f"stage: got {self.stage!r}; it takes one of {', '.join(STAGES)}")
            if self.attention is not None:
                raise ValueError(f"attention: got {self.attention!r} with a stage; it takes None, as the model has one")
            defaults |= {"init": self.preset, **ANSWERS[preset.data], **STAGES[self.stage]}
            defaults |= {"length": min(preset.length, defaults["length"])} if text else {}
        minutes = defaults.pop("minutes", preset.minutes)
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        if self.stage is not None and self.span is not None and (self.span < 1 or self.canvas % self.span):
            raise ValueError(f"span: got {self.span}; it takes a divisor of the {self.canvas} tokens of an answer")
        object.__setattr__(self, "block", self.block or None)
        takes = ("full",) if self.block is None else ("block-causal", "causal-prefix")
        if self.stage is None and self.attention not in (None, *takes):
            raise ValueError(f"attention: got {self.attention!r} with block {self.block}; it takes "
                             f"{' or '.join(takes)}")
        if self.minutes is None and self.steps is None:
            object.__setattr__(self, "minutes", minutes)

    @property
    def canvas(self) -> int:
        """The tokens of an answer in a stage."""
        return (self.length or 0) // 2 if PRESETS[self.preset].data == "text" else problems.CANVAS

    @property
    def shares(self) -> dict[str, float]:
        """The tasks' shares of a batch where they are not 1."""
        return {task: float(share) for task, _, share in (item.partition("=") for item in self.weights or ())}

    def identity(self) -> dict[str, Any]:
        """What decides the weights, as JSON values."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.metadata.get("identity")}
        plain = lambda v: str(v) if isinstance(v, Path) else list(v) if isinstance(v, tuple) else v
        return {k: plain(v) for k, v in values.items()}

    def command(self, steps: int, decay_from: int) -> str:
        """The command line that repeats the run step for step, whatever the speed of the machine."""
        words = [f"python scripts/train_diffusion.py --preset {self.preset} --steps {steps} --decay-from {decay_from}"]
        if self.stage is not None:
            words[0] += f" --stage {self.stage}"
        plain = Options(preset=self.preset, stage=self.stage).identity()
        for name, value in self.identity().items():
            if name in ("preset", "stage", "steps", "decay_from") or value == plain[name]:
                continue
            flag = f"--{name.replace('_', '-')}"
            words.append(flag if value is True else f"{flag} {' '.join(map(str, value))}" if isinstance(value, list)
                         else f"{flag} {0 if value is None else value}")
        # a run that goes on from another one's weights cannot lie in its directory
        if self.output != default_output(self.preset, self.stage) and not self.output.is_absolute():
            words.append(f"--output {self.output.as_posix()}")
        return " ".join(words)


def default_output(preset: str, stage: Stage | None = None) -> Path:
    """Where a run lies unless it is told."""
    return Path("runs") / "-".join(filter(None, (preset, stage)))


def parse(argv: list[str] | None = None) -> Options:
    """Options from a command line."""
    p = argparse.ArgumentParser(
        description="Trains a small masked diffusion model and exports it in Hugging Face layout. A killed run goes on "
        "where it stopped when the same command is given again.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("--preset", choices=list(PRESETS), default="tasks-diffusion", help="data, shape and settings")
    p.add_argument("--stage", choices=list(STAGES), help="what follows the training of a model: dParallel's certainty "
                   "forcing on its own answers, or Learn2PD's filter, which learns when a candidate is final")
    p.add_argument("--output", type=Path, help="checkpoints and metrics.jsonl (default: runs/PRESET or "
                   "runs/PRESET-STAGE)")
    p.add_argument("--export", type=Path, help="where the finished model goes (default: OUTPUT/model)")
    p.add_argument("--minutes", type=float, help="time budget; steps follow from the measured speed (default: preset)")
    p.add_argument("--steps", type=int, help="steps, instead of a time budget")
    p.add_argument("--decay-from", type=int, help="step where the cosine decay begins (default with --steps: warmup)")
    p.add_argument("--decay-share", type=float, default=0.4, help="share of a time budget spent in the decay")
    p.add_argument("--batch", type=int, help="rows in a batch (default: preset)")
    p.add_argument("--length", type=int, help="tokens in a row of text (default: preset; in a stage 64)")
    p.add_argument("--peak", type=float, help="highest learning rate (default: preset)")
    p.add_argument("--warmup", type=int, help="steps of linear warm-up (default: preset)")
    p.add_argument("--weight-decay", type=float, default=0.1, help="of AdamW, on matrices")
    p.add_argument("--seed", type=int, default=0, help="of the initial weights, the data and the noise")
    p.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32",
                   help="of the computation; master weights are float32")
    p.add_argument("--optimizer", choices=["adamw", "muon"], help="muon moves kernels by orthogonalised momentum, the "
                   "rest as adamw (default: preset)")
    p.add_argument("--init", metavar="NAME_OR_DIR", help="a model to start from, autoregressive ones get a mask token "
                   "(default: preset)")
    p.add_argument("--block", type=int, help="block diffusion with blocks of so many positions; 0: masked diffusion "
                   "over the whole sequence (default: preset)")
    p.add_argument("--attention", choices=["full", "block-causal", "causal-prefix"], help="who sees whom; "
                   "causal-prefix, for set block decoding: the text is causal, and a block of masks after it sees "
                   "it and itself (default: block-causal with blocks, full without)")
    p.add_argument("--shift", action="store_true", help="logits predict the next position, as of autoregressive models")
    p.add_argument("--weights", nargs="*", metavar="TASK=SHARE", help="shares of tasks in a batch that are not 1 "
                   "(default: preset)")
    p.add_argument("--apart", type=float, default=0.0, help="share of rows whose prompt does not see the answer, for "
                   "models that read prompts from a cache")
    p.add_argument("--corpus", type=Path, help="directory of .py files (default: this interpreter's standard library)")
    p.add_argument("--span", type=int, help="tokens of a block of answer in a stage (default: of problems the canvas; "
                   "of text the block of the model, or half of --length)")
    p.add_argument("--answers", type=int, help="for a stage, problems that the model answers (default: 8192), or texts "
                   "of --length tokens of which it writes the second half (default: 1024 of 64)")
    p.add_argument("--devices", type=int, help="how many to use (default: all; on CPU one for each core)")
    p.add_argument("--log-every", type=int, default=20, help="steps between lines of metrics.jsonl")
    p.add_argument("--eval-every", type=int, default=250, help="steps between held-out evaluations")
    p.add_argument("--save-every", type=int, default=250, help="steps between checkpoints")
    p.add_argument("--resume", action=argparse.BooleanOptionalAction, default=True, help="go on from a checkpoint")
    given = vars(p.parse_args(argv))
    given["output"] = given["output"] or default_output(given["preset"], given["stage"])
    given["weights"] = None if given["weights"] is None else tuple(given["weights"])
    try:
        return Options(**given)
    except ValueError as error:
        p.error(str(error))
