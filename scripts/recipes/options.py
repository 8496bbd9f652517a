"""Options and presets of the training recipes. Imports no JAX, so that `train.py --help` is fast."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ZOO = Path(__file__).parents[2] / "models" / "zoo"
"""The directory of the shipped models."""

PROBLEMS, CANVAS = "copy reverse sort pick replace shuffle add brackets sudoku".split(), 16
"""The tasks of `decodax.bench.problems.puzzles`, which imports JAX, and the tokens of an answer to them."""


@dataclass(frozen=True)
class Preset:
    """Settings of one model: default values of `Options` by name, and what no option changes.

    `shape` are keywords of `decodax.models.llama` without the vocabulary, empty for the shape of `init`; `vocab` is the
    size of a tokenizer that is trained; `text` is True for diffusion on text instead of problems; `spread` is a factor
    of the standard deviation of fresh kernels; `schedule` are further arguments of `decodax.train.loop.Schedule`; and
    `rows` those of the smallest step, which have to divide among the devices, where `batch` does not say it.
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

DRAFTERS = """eagle-3 eagle hass fastmtp medusa hydra mlp-speculator blockwise-parallel hydra-plus-plus clover clover-2
chimera ppd pass s3d hidden-transfer falcon dflash dspark domino dflash2 xpress jetspec glide longspec
mixture-of-attentions p-eagle pard pard-2 mumo specdec""".split()

PEAKS = dict.fromkeys(("medusa", "hydra", "mlp-speculator", "blockwise-parallel"), 2e-3) | dict.fromkeys(
    ("ppd", "pass", "s3d"), 1e-2)
"""Learning rates of drafters, where not 1e-3."""

TUNED: dict[str, dict[str, Any]] = {
    "next-token": {}, "layerskip": {}, "soft": {}, "msn": {}, "cllm": dict(block=16, answers=256), "space": {},
    "lud": {}, "s3d": {}, "hamburger": {}, "apar": {}, "scheduled-sampling": dict(answers=256),
    "mbr": dict(answers=256), "nmst": {}, "autodeco": dict(peak=1e-3), "any-subset": {}, "sbd": dict(block=16),
    "sdlm": dict(block=4), "distillation": {},
    "dparallel": dict(answers=256, peak=3e-5), "learn2pd": dict(answers=256, peak=3e-3, batch=256, warmup=20)}
"""Options that each objective of fine-tuning sets beside the common ones."""

OWN_ANSWERS = ("dparallel", "learn2pd")
"""Objectives for diffusion models, which learn from their own answers."""

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
        "pycode-sbd": Preset(dict(batch=4, length=256, peak=5e-4, warmup=40, minutes=40.0, init="pycode-diffusion",
                                  block=8, attention="causal-prefix", optimizer="muon"), text=True),
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
    "drafter": {system: Preset(dict(batch=8, length=256, warmup=60, minutes=12.0, weight_decay=0.0,
                                    peak=PEAKS.get(system, 1e-3)))
                for system in DRAFTERS},
    "tune": {objective: Preset(dict(batch=8, length=256, peak=1e-4, warmup=50, steps=1000, weight_decay=0.0) | more)
             for objective, more in TUNED.items()},
}

KINDS = {"drafter": "system", "tune": "objective"}
"""The option that takes the place of a preset, by recipe."""

STAGES: dict[str, dict[str, Any]] = {
    "certainty": dict(peak=3e-4, warmup=50, minutes=15.0),
    "filter": dict(peak=3e-3, warmup=20, minutes=2.0, batch=256),
}
"""Settings of the stages that follow the training of a diffusion model, in place of the preset's."""

ANSWERS: dict[bool, dict[str, Any]] = {False: dict(answers=8192, span=CANVAS), True: dict(answers=1024, length=64)}
"""Number and size of the model's own answers for a stage, by whether it is a model of text. Text is read in windows of
`length` tokens, of which the model writes the second half; `span` is then the block of the model, or that half."""


def _option(help: str, default: Any = None, only: str = "", decides: bool = True, **parse: Any) -> Any:
    """Returns a field that is an option: its help, default value, the recipes that have it (empty: all), whether it
    decides the weights, so that a run is only resumed if it is equal, and keywords of `add_argument`."""
    return field(default=default, metadata={"help": help, "decides": decides, "only": only.split(), "parse": parse})


@dataclass(frozen=True, kw_only=True)
class Options:
    """One training run. None stands for the preset's value."""

    recipe: str
    preset: str = _option("shape, data and settings of the model (default: the first)", "", "lm diffusion")
    system: str | None = _option("method that the drafter is for (default: eagle-3)", only="drafter",
                                 choices=tuple(PRESETS["drafter"]))
    objective: str | None = _option(
        "what is learned: the next tokens; to exit after any layer (layerskip) or after some (soft); to predict after "
        "wrong guesses, for Jacobi decoding (msn, cllm); several tokens at masks (space), also without the middle "
        "layers (s3d), or units at placeholders (lud); groups of tokens at one place (hamburger); to fork for details "
        "(apar); after the model's own tokens; the best of its samples (mbr); a sure end (nmst); heads that predict "
        "temperature and top-p (autodeco); tokens in gaps (any-subset), or in blocks of masks (sbd, sdlm); what a "
        "--teacher predicts (distillation); a diffusion model's answers to be surer of them (dparallel), or a filter "
        "that knows if it is right (learn2pd)",
        only="tune", choices=tuple(TUNED))
    data: tuple[str, ...] = _option('files of examples: .jsonl with {"prompt", "target"}, {"messages"}, {"messages", '
                                    '"text"}, {"text"} or, for specdec, {"source", "text"} in a line, or plain text; '
                                    "or python-docs, the topics of help(), or python-questions on them (default of "
                                    "drafter: --corpus)", (), "drafter tune", nargs="+", type=str, metavar="FILE")
    target: str = _option("name, directory or GGUF file of the model that is tuned, or that is drafted for", "pycode",
                          "drafter tune")
    own_chats: int | None = _option("chats that the target writes, beside --data", None, "drafter tune", metavar="N")
    widen: bool = _option("use arrays in place of the packed weights of the target, such as those of a GGUF file",
                          False, "drafter tune")
    keep_features: bool = _option("run the target once over the text and keep what the drafter reads of it in OUTPUT, "
                                  "for drafters that read its hidden states alone; the rows are then the same in every "
                                  "epoch", False, "drafter")
    layer_dropout: float = _option("layerskip: largest probability of leaving out a layer, that of the last", 0.1,
                                   "tune")
    exit_scale: float = _option("layerskip: weight of early exits relative to the last layer", 0.2, "tune")
    curriculum: str = _option("layerskip: which exits are learned at a step", "rotational", "tune",
                              choices=("rotational", "gradual"))
    every: int = _option("layerskip: distance of the exits of a step in the rotational curriculum", 8, "tune")
    depths: tuple[int, ...] | None = _option("soft: numbers of layers that are learned (default: eight equally spaced "
                                             "ones, or all)", None, "tune", nargs="+", type=int, metavar="N")
    span: int | None = _option(
        "tokens of a block of an answer in a stage (default: of problems the canvas; of text the block of the model, "
        "or half of --length); tune: inputs of a row that msn replaces, masks of space and lud, or drafts of s3d "
        "(default: 5), tokens of a group of hamburger (default: 4), or of a block of dparallel and learn2pd (default: "
        "the block of the model, or 32)", only="diffusion tune")
    mask: int | None = _option("id of the mask token of space, s3d, any-subset, sbd and sdlm (default: the padding "
                               "token, or one that the data does not have), or of lud, pard, pard-2 and specdec "
                               "(default: the padding token)", None, "drafter tune")
    distill: float = _option("hamburger: weight of the KL divergence from the model before the training; --joint: its "
                             "share of the target's loss", 0.0, "drafter tune")
    fork: str | None = _option("apar: name or id of the control token [Fork] (default: an unused one)", None, "tune")
    child: str | None = _option("apar: name or id of [Child] (default: an unused one)", None, "tune")
    skip: tuple[int, ...] | None = _option("s3d: layers, from 0, that do not draft (default: the middle half)", None,
                                           "tune", nargs="+", type=int, metavar="N")
    sure: float = _option("lud: probability above which a token may belong to a unit", 0.9, "tune")
    lora: int | None = _option("dparallel, --joint: train an adapter of this rank in place of all weights", None,
                               "drafter tune", metavar="RANK")
    replaced: float = _option("scheduled-sampling: share of a target's inputs that is the model's own in the end", 0.5,
                              "tune")
    correction: str | None = _option("scheduled-sampling: words after which the reference follows an answer of the "
                                     "model, in as many rows again (RAC)", None, "tune", metavar="TEXT")
    blocks: int = _option("cllm: blocks that are decoded after each prompt", 4, "tune")
    fixed_weight: float = _option("cllm: weight of the cross-entropy of fixed points", 10.0, "tune")
    select: str = _option("mbr: rule that selects a sample, as for select= of decodax.generate", "mbr", "tune")
    quality: str | None = _option("mbr: FILE.py:NAME of a function of a prompt and texts that returns their qualities; "
                                  "the best sample is then selected (QE fine-tuning)", None, "tune", metavar="FUNCTION")
    candidates: int = _option("mbr: samples of each prompt", 32, "tune")
    new_tokens: int = _option("mbr: largest number of tokens of a sample", 64, "tune")
    epsilon: float = _option("nmst: growth of the lower bound of the end's probability", 1e-4, "tune")
    drafts: int | None = _option("tokens that it is unrolled for (default: that of the method)", only="drafter")
    loss: str | None = _option("loss of a token, such as kl, hard, tv or 0.9*tv+0.1*hard (default: that of the method)",
                               only="drafter")
    draft: str | None = _option("pard, pard-2: name or directory of the draft model that is tuned (default: the first "
                                "quarter of the target's layers)", only="drafter")
    draft_vocab: int | None = _option("number of tokens that it predicts, the most frequent ones (default: all; "
                                      "eagle-3: a quarter), or of words (mumo: 4096)", only="drafter")
    layers: int | None = _option("its decoder layers, or residual blocks of medusa and hydra; pard: the first layers "
                                 "of the target (default: as the method)", only="drafter")
    encoder_layers: int | None = _option("specdec: its encoder layers (default: as the target)", only="drafter")
    mlp: int | None = _option("width of the MLPs of its layers, units of a head of blockwise-parallel and mumo, or "
                              "width of the state of mlp-speculator with --own-head", only="drafter")
    own_head: bool = _option("its own vocabulary matrices: medusa, hydra, chimera, mlp-speculator", False, "drafter")
    tied: bool = _option("mlp-speculator: the steps share all weights but the first projection", False, "drafter")
    scale_input: bool = _option("mlp-speculator: normalise the target's hidden state", False, "drafter")
    ensemble: int | None = _option("ppd: embeddings of each prompt token (default: 1)", only="drafter")
    at: tuple[int, ...] | None = _option("hidden-transfer: layers, from 0, after which its states begin (default: the "
                                         "middle)", None, "drafter", nargs="+", type=int, metavar="LAYER")
    hidden_weight: float | None = _option("weight of the distance to the target's hidden states in losses that have it "
                                          "(default: that of the method; hidden-transfer: 0)", only="drafter")
    start: str | None = _option("directory of a finished drafter of the same size, to train it further", only="drafter")
    above: int | None = _option("mixture-of-attentions: the target's last layers that run after it", only="drafter")
    joint: bool = _option("medusa, blockwise-parallel: train the target, too", False, "drafter")
    head_weight: float | None = _option("--joint: weight of the heads' losses (medusa 0.2, else 1)", only="drafter")
    target_rate: float | None = _option("--joint: learning rate of the target, relative to --peak (default: medusa "
                                        "0.25, else 1)", only="drafter")
    heads_alone: int | None = _option("--joint: first steps of the heads alone (medusa 200, else 0)", only="drafter")
    stage: str | None = _option("stage after the training of a model: dParallel's certainty forcing on its own "
                                "answers, or Learn2PD's filter, which predicts whether a candidate is final",
                                only="diffusion", choices=tuple(STAGES))
    steps: int | None = _option("number of steps, instead of a time budget")
    decay_from: int | None = _option("step at which the cosine decay begins (default with --steps: the warm-up)",
                                     only="lm diffusion drafter")
    batch: int | None = _option("rows in a batch", only="lm diffusion drafter tune")
    length: int | None = _option("tokens in a row of text; for lm before the decay, which uses the whole context",
                                 only="lm diffusion drafter tune")
    peak: float | None = _option("highest learning rate")
    warmup: int | None = _option("steps of linear warm-up")
    weight_decay: float | None = _option("weight decay of matrices")
    seed: int = _option("seed of weights, data and noise", 0)
    dtype: str = _option("type of the computation; master weights are float32", "float32",
                         "lm diffusion drafter tune", choices=("float32", "bfloat16"))
    teacher: str | None = _option("directory (distillation: or name, or GGUF file) of a model to distil from; its "
                                  "tokenizer is used", only="lm tune")
    mix: float | None = _option("share of KL(teacher || model), 0 to 1 (0.7; 1 with --reference)", only="lm tune")
    reference: str | None = _option("directory of a model of the same size that was distilled before; the KL then "
                                    "counts only where the model can still learn (AdaSPEC)", only="lm tune")
    keep: float = _option("share of the tokens that counts with --reference", 0.4, "lm tune")
    corpus: Path | None = _option("directory of .py files (default: this interpreter's standard library)",
                                  only="lm diffusion drafter")
    optimizer: str | None = _option("muon moves kernels by orthogonalised momentum", only="diffusion",
                                    choices=("adamw", "muon"))
    init: str | None = _option("name or directory of a model to start from; an autoregressive one gets a mask token",
                               only="diffusion")
    block: int | None = _option("tokens of a block of block diffusion (0: masked diffusion over the whole sequence), "
                                "of Jacobi decoding for cllm, or of sbd and sdlm", only="diffusion tune")
    attention: str | None = _option(
        "attention mask; causal-prefix is for set block decoding, with --shift for SDLM: causal text, followed by a "
        "block of masks (default: block-causal with blocks, full without)", only="diffusion",
        choices=("full", "block-causal", "causal-prefix"))
    shift: bool = _option("logits predict the next position, as in autoregressive models", False, "diffusion")
    weights: tuple[str, ...] | None = _option("shares of tasks in a batch, where not 1", only="diffusion", nargs="*",
                                              type=str, metavar="TASK=SHARE")
    apart: float = _option("share of rows whose prompt does not see the answer, for models that read prompts from a "
                           "cache", 0.0, "diffusion")
    answers: int | None = _option("number of the model's own answers for a stage (default: 8192 to problems; of text "
                                  "1024, with 64 tokens each), or in tune (default: 256)", only="diffusion tune")
    longest: int | None = _option("tokens of the longest texts", only="recall")
    problems: int | None = _option("held-out problems that the finished model is measured on", None,
                                   "recall sums numerals", False)
    output: Path | None = _option("directory of checkpoints and metrics.jsonl (default: runs/PRESET[-STAGE])",
                                  decides=False)
    export: Path | None = _option("directory of the finished model (default: OUTPUT/model)", decides=False)
    plot: Path | None = _option("file of a plot of loss, acceptance and held-out figures by step (PNG, SVG or PDF)",
                                decides=False)
    minutes: float | None = _option("time budget; the number of steps follows from the measured speed", None,
                                    "lm diffusion drafter", False)
    decay_share: float = _option("share of a time budget that the decay takes", 0.4, "lm diffusion drafter", False)
    model_parallel: int = _option("devices that matrices are split over; the rest split the batch", 1, "lm tune",
                                 False)
    devices: int | None = _option("number of devices (default: all; on a CPU one for each core)", decides=False)
    log_every: int = _option("steps between lines of metrics.jsonl", 20, decides=False)
    eval_every: int = _option("steps between held-out evaluations", 250, decides=False)
    save_every: int = _option("steps between checkpoints", 250, decides=False)
    resume: bool = _option("continue from a checkpoint (default: yes)", True, decides=False,
                           action=argparse.BooleanOptionalAction)

    def __post_init__(self) -> None:
        known = PRESETS[self.recipe]
        preset = self.preset or self.system or self.objective or next(iter(known))
        if preset not in known:
            raise ValueError(f"preset: got {preset!r}; it takes one of {', '.join(known)}")
        if self.mix is not None and not 0 <= self.mix <= 1:
            raise ValueError(f"mix: got {self.mix}; it takes the share of the teacher's KL in the loss, 0 to 1")
        if self.reference is not None and self.teacher is None:
            raise ValueError(f"reference: got {self.reference!r} without a teacher; it takes None")
        if not 0 < self.keep <= 1:
            raise ValueError(f"keep: got {self.keep}; it takes a share of the tokens, above 0 and at most 1")
        if self.decay_from is not None and (self.steps is None or self.decay_from >= self.steps):
            raise ValueError(f"decay_from: got {self.decay_from}, steps {self.steps}; it takes a step below `steps`")
        joint = {n: getattr(self, n) for n in ("head_weight", "target_rate", "heads_alone")}
        if self.recipe == "drafter" and not self.joint and (
                wrong := [n for n, x in {**joint, "lora": self.lora, "distill": self.distill or None}.items()
                          if x is not None]):
            raise ValueError(f"{wrong[0]}: got {getattr(self, wrong[0])!r} without --joint, takes the default")
        if self.joint and (not 0 <= self.distill <= 1 or (self.lora or 1) < 1):
            raise ValueError(f"distill, lora: got {self.distill} and {self.lora} with --joint; it takes a share, 0 to "
                             "1, and a rank of at least 1")
        if self.joint and self.keep_features:
            raise ValueError("keep_features: got True with --joint, which changes the target; takes False")
        if self.joint and self.weight_decay:
            raise ValueError(f"weight_decay: got {self.weight_decay} with --joint, whose first steps leave the target "
                             "as it is; takes 0")
        made = known[preset]
        given = {"weight_decay": 0.1, "optimizer": "adamw", **made.options}
        if self.stage in STAGES:
            # a model that is not shipped has been trained here before
            start = preset if (ZOO / preset).is_dir() else str(Path("runs") / preset / "model")
            given |= {**ANSWERS[made.text], **STAGES[self.stage], "optimizer": "adamw", "init": start,
                      "attention": None}
            given |= {"length": min(made.options["length"], given["length"])} if made.text else {}
        minutes = given.pop("minutes", None)
        values = {"preset": preset, **{name: x for name, x in given.items() if getattr(self, name) is None}}
        if self.minutes is None and self.steps is None:
            values["minutes"] = minutes
        if (kind := KINDS.get(self.recipe)) is not None:
            values[kind] = preset
        own = (preset, self.stage) if kind is None else (Path(self.target).stem, preset)
        values["output"] = self.output or Path("runs") / "-".join(filter(None, own))
        values["block"] = (given.get("block") if self.block is None else self.block) or None
        for name, value in values.items():
            object.__setattr__(self, name, value)
        if self.recipe == "diffusion":
            self._check_diffusion()
        for name, takes in ((f.name, f.metadata.get("parse", {}).get("choices")) for f in dataclasses.fields(self)):
            if takes and (value := getattr(self, name)) is not None and value not in takes:
                raise ValueError(f"{name}: got {value!r}; it takes {' or '.join(takes)}")

    def _check_diffusion(self) -> None:
        if not 0 <= self.apart <= 1 or (self.apart and (self.stage or self.block or self.settings.text)):
            raise ValueError(f"apart: got {self.apart}, takes 0 to 1; 0 for text, with blocks and in a stage")
        for item in self.weights or ():
            task, equals, share = item.partition("=")
            if task not in PROBLEMS or not equals or not share.replace(".", "", 1).isdigit():
                raise ValueError(f"weights: got {item!r}; it takes TASK=SHARE, of {', '.join(PROBLEMS)}")
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
        return {k: str(v) if isinstance(v, Path) else list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    def command(self, steps: int, decay_from: int | None) -> str:
        """Returns the command that repeats the run step for step, whatever the speed of the machine."""
        timed = "minutes" in {f.name for f in options_of(self.recipe)}
        kind = KINDS.get(self.recipe, "preset")
        always = {kind: self.preset, "steps": steps, "decay_from": decay_from or 0} if timed else (
            {kind: self.preset} if kind != "preset" else {})
        plain = Options(recipe=self.recipe, stage=self.stage, **{kind: self.preset})
        default = plain.identity()
        changed = {k: v for k, v in self.identity().items() if k not in always and v != default[k]}
        changed = {**({"stage": self.stage} if self.stage else {}), **changed}
        # a run that continues another one's weights cannot lie in its directory
        if timed and (self.init or self.start) and self.output != plain.output and not self.output.is_absolute():
            changed["output"] = self.output.as_posix()
        words = ["python", "scripts/train.py", self.recipe]
        for name, value in {**always, **changed}.items():
            words.append(f"--{name.replace('_', '-')}")
            if value is not True:
                words += map(str, value) if isinstance(value, list) else [str(0 if value is None else value)]
        return shlex.join(words)


def options_of(recipe: str) -> list[Any]:
    """Returns the fields of `Options` that are options of a recipe."""
    return [f for f in dataclasses.fields(Options) if f.metadata and recipe in (f.metadata["only"] or PRESETS)]


@dataclass(frozen=True, kw_only=True)
class GrpoOptions:
    """One run of `recipes/grpo.py`."""

    steps: int = _option("number of steps", 80)
    problems: int = _option("sums of a step", 64)
    group: int = _option("texts for each sum", 16)
    updates: int = _option("optimizer updates of a step", 2)
    numbers: int = _option("count of numbers of a sum", 3)
    rate: float = _option("learning rate of Adam; an adapter's is ten times as high", 1e-4)
    clip: float = _option("largest distance of a likelihood ratio from 1", 0.2)
    kl: float = _option("weight of the distance to the first model", 0.0)
    transform: float | None = _option("calibrate rewards by the first model's, transform them: above 0 for best-of-N")
    lora: int | None = _option("train an adapter of this rank")
    mesh: str | None = _option("devices along the axes, such as 2x4", metavar="DATAxMODEL")
    seed: int = _option("seed of problems and draws", 0)
    held_out: int = _option("held-out sums that are measured", 400)
    export: Path | None = _option("directory of the finished model or adapter")


def from_arguments(args: argparse.Namespace) -> Options:
    """Returns the options of parsed arguments; `args.command` names the recipe."""
    given = ((f.name, getattr(args, f.name)) for f in options_of(args.command))
    return Options(recipe=args.command, **{k: tuple(v) if isinstance(v, list) else v for k, v in given})
