"""Options and presets of the training recipes. Imports no JAX, so that `train.py --help` is fast."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipes.problems import CANVAS, TASKS


@dataclass(frozen=True)
class Preset:
    """Settings of one model: option values, and what no option changes.

    Attributes:
        options: default values of `Options`, by name.
        shape: keywords of `decodax.models.llama` without the vocabulary; empty: the shape of `init`.
        vocab: size of a tokenizer that is trained. text: whether diffusion trains on text instead of problems.
        spread: factor of the standard deviation of fresh kernels.
        schedule: further arguments of `decodax.train.loop.Schedule`.
        rows: rows of the smallest step, which have to divide among the devices, where `batch` does not say it.
    """

    options: dict[str, Any]
    shape: dict[str, Any] = field(default_factory=dict)
    vocab: int = 512
    text: bool = False
    spread: float = 1.0
    schedule: dict[str, Any] = field(default_factory=dict)
    rows: int = 0


_TINY = {"width": 32, "layers": 1, "heads": 2, "kv_heads": 1, "mlp": 64}
_SHORT = dict(batch=16, peak=1e-2, warmup=5, minutes=0.2)

PRESETS: dict[str, dict[str, Preset]] = {
    "lm": {
        "pycode": Preset(dict(batch=8, length=256, peak=2e-3, warmup=200, minutes=75.0), vocab=4096, shape={
            "width": 256, "layers": 4, "heads": 4, "kv_heads": 2, "mlp": 640, "context": 512}),
        "pycode-draft": Preset(dict(batch=8, length=256, peak=5e-3, warmup=150, minutes=13.0), vocab=4096, shape={
            "width": 64, "layers": 2, "heads": 2, "kv_heads": 1, "mlp": 192, "context": 512}),
        "tiny": Preset({**_SHORT, "length": 16}, {**_TINY, "context": 32}),
    },
    "diffusion": {
        # Faster rotary turns, larger kernels and Muon together: copying alone came to 0.15 nats a masked token in 250
        # steps of 32 problems; with theta 10,000, usual kernels and AdamW, at the better of two rates, to 0.45.
        "tasks-diffusion": Preset(
            dict(batch=64, peak=3e-3, warmup=100, minutes=80.0, optimizer="muon",
                 weights=("pick=3", "add=2", "sort=2", "brackets=1.5", "sudoku=1.5")), spread=2.0,
            shape={"width": 128, "layers": 4, "heads": 4, "kv_heads": 4, "mlp": 384, "context": 64, "theta": 100.0}),
        "pycode-diffusion": Preset(
            dict(batch=8, length=256, peak=1e-3, warmup=100, minutes=40.0, init="pycode", block=8), text=True),
        "tiny": Preset(_SHORT, {**_TINY, "context": 64}),
        "tiny-text": Preset({**_SHORT, "length": 16, "block": 4}, {**_TINY, "context": 32}, text=True),
    },
    "recall": {"recall": Preset(
        dict(steps=4200, peak=3e-3, warmup=200, weight_decay=0.05, problems=100, longest=2048),
        schedule=dict(decay_from=2500, horizon=5000, cooldown=400), rows=2)},
    "sums": {"sums": Preset(dict(steps=900, peak=3e-3, warmup=200, weight_decay=0.05, problems=300, devices=1),
                            schedule=dict(decay_from=2500, cooldown=400))},
    "numerals": {"numerals": Preset(
        dict(steps=1500, peak=3e-3, warmup=200, weight_decay=0.05, problems=200, devices=1))},
}

STAGES: dict[str, dict[str, Any]] = {
    "certainty": dict(peak=3e-4, warmup=50, minutes=15.0),
    "filter": dict(peak=3e-3, warmup=20, minutes=2.0, batch=256),
}
"""Settings of the stages that follow the training of a diffusion model, in place of the preset's."""

ANSWERS: dict[bool, dict[str, Any]] = {False: dict(answers=8192, span=CANVAS), True: dict(answers=1024, length=64)}
"""Number and size of the model's own answers for a stage, by whether it is a model of text. Text is read in windows of
`length` tokens, of which the model writes the second half; `span` is then the block of the model, or that half."""


def _option(help: str, default: Any = None, decides: bool = True, only: str = "", **parse: Any) -> Any:
    """A field that is also a command-line option.

    Args:
        decides: whether it decides the weights, so that a run is only resumed if it is equal.
        only: recipes that have it, by their names; empty: all.
    """
    return field(default=default, metadata={"help": help, "decides": decides, "only": only.split(), "parse": parse})


@dataclass(frozen=True, kw_only=True)
class Options:
    """One training run. None stands for the preset's value.

    Raises:
        ValueError: a value that its option does not take, by name.
    """

    recipe: str
    preset: str = _option("shape, data and settings of the model (default: the first)", "", only="lm diffusion")
    stage: str | None = _option("stage after the training of a model: dParallel's certainty forcing on its own "
                                "answers, or Learn2PD's filter, which predicts whether a candidate is final",
                                only="diffusion", choices=list(STAGES))
    steps: int | None = _option("number of steps, instead of a time budget", type=int)
    decay_from: int | None = _option("step at which the cosine decay begins (default with --steps: the warm-up)",
                                     only="lm diffusion", type=int)
    batch: int | None = _option("rows in a batch", only="lm diffusion", type=int)
    length: int | None = _option("tokens in a row of text; for lm before the decay, which uses the whole context",
                                 only="lm diffusion", type=int)
    peak: float | None = _option("highest learning rate", type=float)
    warmup: int | None = _option("steps of linear warm-up", type=int)
    weight_decay: float | None = _option("weight decay of matrices", type=float)
    seed: int = _option("seed of weights, data and noise (default: 0)", 0, type=int)
    dtype: str = _option("type of the computation; master weights are float32 (default: float32)", "float32",
                         only="lm diffusion", choices=["float32", "bfloat16"])
    teacher: str | None = _option("directory of a model to distil from; its tokenizer is used", only="lm")
    mix: float = _option("share of KL(teacher || model) in the loss, 0 to 1 (default: 0.7)", 0.7, only="lm", type=float)
    corpus: Path | None = _option("directory of .py files (default: this interpreter's standard library)",
                                  only="lm diffusion", type=Path)
    optimizer: str | None = _option("muon moves kernels by orthogonalised momentum", only="diffusion",
                                    choices=["adamw", "muon"])
    init: str | None = _option("name or directory of a model to start from; an autoregressive one gets a mask token",
                               only="diffusion")
    block: int | None = _option("positions of a block of block diffusion; 0: masked diffusion over the whole sequence",
                                only="diffusion", type=int)
    attention: str | None = _option("attention mask; causal-prefix is for set block decoding: causal text, followed by "
                                    "a block of masks (default: block-causal with blocks, full without)",
                                    only="diffusion", choices=["full", "block-causal", "causal-prefix"])
    shift: bool = _option("logits predict the next position, as in autoregressive models", False, only="diffusion",
                          action="store_true")
    weights: tuple[str, ...] | None = _option("shares of tasks in a batch, where not 1", only="diffusion", nargs="*",
                                              metavar="TASK=SHARE")
    apart: float = _option("share of rows whose prompt does not see the answer, for models that read prompts from a "
                           "cache (default: 0)", 0.0, only="diffusion", type=float)
    span: int | None = _option("tokens of a block of an answer in a stage (default: of problems the canvas; of text "
                               "the block of the model, or half of --length)", only="diffusion", type=int)
    answers: int | None = _option("number of the model's own answers for a stage (default: 8192 to problems; of text "
                                  "1024, with 64 tokens each)", only="diffusion", type=int)
    longest: int | None = _option("tokens of the longest texts", only="recall", type=int)
    problems: int | None = _option("held-out problems that the finished model is measured on", decides=False,
                                   only="recall sums numerals", type=int)
    output: Path | None = _option("directory of checkpoints and metrics.jsonl (default: runs/PRESET[-STAGE])",
                                  decides=False, type=Path)
    export: Path | None = _option("directory of the finished model (default: OUTPUT/model)", decides=False, type=Path)
    minutes: float | None = _option("time budget; the number of steps follows from the measured speed", decides=False,
                                    only="lm diffusion", type=float)
    decay_share: float = _option("share of a time budget that the decay takes (default: 0.4)", 0.4, decides=False,
                                 only="lm diffusion", type=float)
    model_parallel: int = _option("devices that matrices are split over; the rest split the batch (default: 1)", 1,
                                  decides=False, only="lm", type=int)
    devices: int | None = _option("number of devices (default: all; on a CPU one for each core)", decides=False,
                                  type=int)
    log_every: int = _option("steps between lines of metrics.jsonl (default: 20)", 20, decides=False, type=int)
    eval_every: int = _option("steps between held-out evaluations (default: 250)", 250, decides=False, type=int)
    save_every: int = _option("steps between checkpoints (default: 250)", 250, decides=False, type=int)
    resume: bool = _option("continue from a checkpoint (default: yes)", True, decides=False,
                           action=argparse.BooleanOptionalAction)

    def __post_init__(self) -> None:
        known = PRESETS[self.recipe]
        preset = self.preset or next(iter(known))
        if preset not in known:
            raise ValueError(f"preset: got {preset!r}; it takes one of {', '.join(known)}")
        if self.stage not in (None, *STAGES):
            raise ValueError(f"stage: got {self.stage!r}; it takes one of {', '.join(STAGES)}")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype: got {self.dtype!r}; it takes float32 or bfloat16")
        if not 0 <= self.mix <= 1:
            raise ValueError(f"mix: got {self.mix}; it takes the share of the teacher's KL in the loss, 0 to 1")
        if self.decay_from is not None and (self.steps is None or self.decay_from >= self.steps):
            raise ValueError(f"decay_from: got {self.decay_from}, steps {self.steps}; it takes a step below `steps`")
        made = known[preset]
        given = {"weight_decay": 0.1, "optimizer": "adamw", **made.options}
        if self.stage is not None:
            given |= {**ANSWERS[made.text], **STAGES[self.stage], "optimizer": "adamw", "init": preset}
            given |= {"length": min(made.options["length"], given["length"])} if made.text else {}
        minutes = given.pop("minutes", None)
        values = {"preset": preset, **{name: x for name, x in given.items() if getattr(self, name) is None}}
        if self.minutes is None and self.steps is None:
            values["minutes"] = minutes
        values["output"] = self.output or Path("runs") / "-".join(filter(None, (preset, self.stage)))
        values["block"] = (given.get("block") if self.block is None else self.block) or None
        for name, value in values.items():
            object.__setattr__(self, name, value)
        if self.recipe == "diffusion":
            self._check_diffusion()

    def _check_diffusion(self) -> None:
        if not 0 <= self.apart <= 1 or (self.apart and (self.stage or self.block or self.settings.text)):
            raise ValueError(f"apart: got {self.apart}, takes 0 to 1; 0 for text, with blocks and in a stage")
        if self.optimizer not in ("adamw", "muon"):
            raise ValueError(f"optimizer: got {self.optimizer!r}; it takes adamw or muon")
        for item in self.weights or ():
            task, equals, share = item.partition("=")
            if task not in TASKS or not equals or not share.replace(".", "", 1).isdigit():
                raise ValueError(f"weights: got {item!r}; it takes TASK=SHARE, of {', '.join(TASKS)}")
        if self.stage is not None and self.attention is not None:
            raise ValueError(f"attention: got {self.attention!r} with a stage; it takes None, as the model has one")
        if self.stage is not None and self.span is not None and (self.span < 1 or self.canvas % self.span):
            raise ValueError(f"span: got {self.span}; it takes a divisor of the {self.canvas} tokens of an answer")
        takes = ("full",) if self.block is None else ("block-causal", "causal-prefix")
        if self.stage is None and self.attention not in (None, *takes):
            raise ValueError(f"attention: got {self.attention!r} with block {self.block}; it takes "
                             f"{' or '.join(takes)}")

    @property
    def settings(self) -> Preset:
        """The preset."""
        return PRESETS[self.recipe][self.preset]

    @property
    def canvas(self) -> int:
        """Number of tokens of an answer in a stage."""
        return (self.length or 0) // 2 if self.settings.text else CANVAS

    def identity(self) -> dict[str, Any]:
        """Returns the options that decide the weights, as JSON values."""
        values = {f.name: getattr(self, f.name) for f in options_of(self.recipe) if f.metadata["decides"]}
        plain = lambda v: str(v) if isinstance(v, Path) else list(v) if isinstance(v, tuple) else v
        return {k: plain(v) for k, v in values.items()}

    def command(self, steps: int, decay_from: int | None) -> str:
        """Returns the command that repeats the run step for step, whatever the speed of the machine."""
        timed = "minutes" in {f.name for f in options_of(self.recipe)}
        always = {"preset": self.preset, "steps": steps, "decay_from": decay_from or 0} if timed else {}
        plain = Options(recipe=self.recipe, preset=self.preset, stage=self.stage).identity()
        changed = {k: v for k, v in self.identity().items() if k not in always and v != plain[k]}
        changed = {**({"stage": self.stage} if self.stage else {}), **changed}
        # a run that continues another one's weights cannot lie in its directory
        default = Options(recipe=self.recipe, preset=self.preset, stage=self.stage).output
        if timed and self.init and self.output != default and not self.output.is_absolute():
            changed["output"] = self.output.as_posix()
        words = ["python", "scripts/train.py", self.recipe]
        for name, value in {**always, **changed}.items():
            words.append(f"--{name.replace('_', '-')}")
            if value is not True:
                words += map(str, value) if isinstance(value, list) else [str(0 if value is None else value)]
        return shlex.join(words)


def options_of(recipe: str) -> list[Any]:
    """Returns the fields of `Options` that are options of a recipe."""
    return [f for f in dataclasses.fields(Options) if f.metadata and (recipe in f.metadata["only"]
                                                                      or not f.metadata["only"])]


@dataclass(frozen=True, kw_only=True)
class GrpoOptions:
    """One run of `recipes/grpo.py`."""

    steps: int = _option("number of steps", 80, type=int)
    problems: int = _option("sums of a step", 64, type=int)
    group: int = _option("texts for each sum", 16, type=int)
    updates: int = _option("optimizer updates of a step", 2, type=int)
    numbers: int = _option("count of numbers of a sum", 3, type=int)
    rate: float = _option("learning rate of Adam; an adapter's is ten times as high", 1e-4, type=float)
    clip: float = _option("largest distance of a likelihood ratio from 1", 0.2, type=float)
    kl: float = _option("weight of the distance to the first model", 0.0, type=float)
    lora: int | None = _option("train an adapter of this rank", metavar="RANK", type=int)
    mesh: str | None = _option("devices along the axes, such as 2x4", metavar="DATAxMODEL")
    seed: int = _option("seed of problems and draws", 0, type=int)
    held_out: int = _option("held-out sums that are measured", 400, type=int)
    export: Path | None = _option("directory of the finished model or adapter", type=Path)


def add_options(parser: argparse.ArgumentParser, fields: Sequence[Any], recipe: str = "") -> None:
    """Adds the fields of an options class to a parser."""
    for option in fields:
        parse = dict(option.metadata["parse"])
        if option.name == "preset":
            parse["choices"] = list(PRESETS[recipe])
        parser.add_argument(f"--{option.name.replace('_', '-')}", default=option.default, help=option.metadata["help"],
                            **parse)


def from_arguments(args: argparse.Namespace) -> Options:
    """Returns the options of parsed arguments; `args.command` names the recipe."""
    given = {f.name: getattr(args, f.name) for f in options_of(args.command)}
    if given.get("weights") is not None:
        given["weights"] = tuple(given["weights"])
    return Options(recipe=args.command, **given)
