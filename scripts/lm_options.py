"""What a training run is told: named presets and the options of `scripts/train_lm.py`."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Preset:
    """A Llama shape with the training settings that suit it.

    Attributes:
        shape: keywords of `decodax.models.llama`, less the vocabulary.
        batch: windows in a batch during the plateau; the decay keeps the tokens of a batch the same.
        length: tokens in a window during the plateau; the decay uses the whole context.
        peak: highest learning rate. warmup: steps of linear warm-up.
        minutes: default time budget.
    """

    shape: dict[str, int]
    batch: int
    length: int
    peak: float
    warmup: int
    minutes: float
    vocab: int = 4096


PRESETS = {
    "pycode": Preset(
        {"width": 256, "layers": 4, "heads": 4, "kv_heads": 2, "mlp": 640, "context": 512},
        batch=8, length=256, peak=2e-3, warmup=200, minutes=75,
    ),
    "pycode-draft": Preset(
        {"width": 64, "layers": 2, "heads": 2, "kv_heads": 1, "mlp": 192, "context": 512},
        batch=8, length=256, peak=5e-3, warmup=150, minutes=13,
    ),
    "pycode-gpu": Preset(
        {"width": 512, "layers": 7, "heads": 8, "kv_heads": 4, "mlp": 1408, "context": 1024},
        batch=64, length=512, peak=2e-3, warmup=300, minutes=25,
    ),
    "tiny": Preset(
        {"width": 32, "layers": 1, "heads": 2, "kv_heads": 1, "mlp": 64, "context": 32},
        batch=16, length=16, peak=1e-2, warmup=5, minutes=0.2, vocab=512,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Options:
    """One run. The fields marked `identity` decide the weights: a run is only resumed where they are equal.

    Raises:
        ValueError: `preset`, `dtype` or `mix` is none of what it takes, or `decay_from` comes without `steps`.
    """

    preset: str = field(default="pycode", metadata={"identity": True})
    output: Path = Path("runs/pycode")
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
    teacher: Path | None = field(default=None, metadata={"identity": True})
    mix: float = field(default=0.7, metadata={"identity": True})
    corpus: Path | None = field(default=None, metadata={"identity": True})
    model_parallel: int = 1
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
        if not 0 <= self.mix <= 1:
            raise ValueError(f"mix: got {self.mix}; it takes the share of the teacher's KL in the loss, 0 to 1")
        if self.decay_from is not None and (self.steps is None or self.decay_from >= self.steps):
            raise ValueError(f"decay_from: got {self.decay_from}, steps {self.steps}; it takes a step below `steps`")
        preset = PRESETS[self.preset]
        for name in ("batch", "length", "peak", "warmup"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, getattr(preset, name))
        if self.minutes is None and self.steps is None:
            object.__setattr__(self, "minutes", preset.minutes)

    def identity(self) -> dict[str, Any]:
        """What decides the weights, as JSON values."""
        fields = [f for f in dataclasses.fields(self) if f.metadata.get("identity")]
        values = {f.name: getattr(self, f.name) for f in fields}
        return {k: str(v) if isinstance(v, Path) else v for k, v in values.items()}

    def command(self, steps: int, decay_from: int) -> str:
        """The command line that repeats the run step for step, whatever the speed of the machine."""
        words = [f"python scripts/train_lm.py --preset {self.preset} --steps {steps} --decay-from {decay_from}"]
        plain = Options(preset=self.preset)
        for name, value in self.identity().items():
            if name not in ("preset", "steps", "decay_from") and value != plain.identity()[name]:
                words.append(f"--{name.replace('_', '-')} {value}")
        return " ".join(words)


def parse(argv: list[str] | None = None) -> Options:
    """Options from a command line."""
    p = argparse.ArgumentParser(
        description="Trains a small Llama-shaped language model on the Python standard library's source and exports it "
        "in Hugging Face layout. A killed run goes on where it stopped when the same command is given again.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("--preset", choices=list(PRESETS), default="pycode", help="shape and settings of the model")
    p.add_argument("--output", type=Path, help="checkpoints, metrics.jsonl and loss.png (default: runs/PRESET)")
    p.add_argument("--export", type=Path, help="where the finished model goes (default: OUTPUT/model)")
    p.add_argument("--minutes", type=float, help="time budget; steps follow from the measured speed (default: preset)")
    p.add_argument("--steps", type=int, help="steps, instead of a time budget")
    p.add_argument("--decay-from", type=int, help="step where the cosine decay begins (default with --steps: warmup)")
    p.add_argument("--decay-share", type=float, default=0.4, help="share of a time budget spent in the decay")
    p.add_argument("--batch", type=int, help="windows in a batch (default: preset)")
    p.add_argument("--length", type=int, help="tokens in a window before the decay (default: preset)")
    p.add_argument("--peak", type=float, help="highest learning rate (default: preset)")
    p.add_argument("--warmup", type=int, help="steps of linear warm-up (default: preset)")
    p.add_argument("--weight-decay", type=float, default=0.1, help="of AdamW, on matrices")
    p.add_argument("--seed", type=int, default=0, help="of the initial weights and the order of the data")
    p.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32",
                   help="of the computation; master weights are float32")
    p.add_argument("--teacher", type=Path, help="a model directory to distil from; its tokenizer is used")
    p.add_argument("--mix", type=float, default=0.7, help="share of KL(teacher || model) in the loss, with --teacher")
    p.add_argument("--corpus", type=Path, help="directory of .py files (default: this interpreter's standard library)")
    p.add_argument("--model-parallel", type=int, default=1, help="ways to split matrices; the rest splits the batch")
    p.add_argument("--devices", type=int, help="how many to use (default: all; on CPU one for each core)")
    p.add_argument("--log-every", type=int, default=20, help="steps between lines of metrics.jsonl")
    p.add_argument("--eval-every", type=int, default=250, help="steps between held-out evaluations")
    p.add_argument("--save-every", type=int, default=250, help="steps between checkpoints")
    p.add_argument("--resume", action=argparse.BooleanOptionalAction, default=True, help="go on from a checkpoint")
    given = vars(p.parse_args(argv))
    given["output"] = given["output"] or Path("runs") / given["preset"]
    try:
        return Options(**given)
    except ValueError as error:
        p.error(str(error))
