"""Learn2PD: a small trained network predicts for each candidate of a block whether it is final, and the text is cut at
the end that the model predicts ("Learning to Parallel: Accelerating Diffusion Large Language Models via Adaptive
Parallel Decoding", Bao et al., 2025).

As in the authors' code, a block's candidates are unmasked if the filter's probability is above a threshold, and the
most confident ones, up to the step's quota, in any case. End-of-text prediction uses the whole canvas. If the filter
accepts a candidate that is an end of sequence, the text ends after the first such candidate. Otherwise, if there is a
candidate that is an end of sequence, the text ends after the most confident of them. This token is not unmasked yet,
and later steps of the authors' code may decide another one there, which leaves a text without an end. Here the last
token of a cut text is always an end of sequence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.algorithms.diffusion.adapter import Adapter
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.policies import Memory, Stepped, Stop, Unmask
from decodax.algorithms.diffusion.rules.defaults import Keep
from decodax.algorithms.diffusion.rules.stops import EndOfText, behind, ends
from decodax.algorithms.diffusion.rules.unmasking import BlockQuota, current, number
from decodax.algorithms.diffusion.rules.windows import WholeBlocks
from decodax.algorithms.diffusion.view import Seen, View
from decodax.common.options import Count, Share
from decodax.common.registry import ALGORITHMS
from decodax.common.struct import short


@dataclasses.dataclass(frozen=True, eq=False)
class Filter:
    """A network of two layers that takes the confidences of a block's candidates. It is compared by its weights, a few
    thousand numbers that are compiled into the program.

    Attributes:
        hidden, hidden_bias: `f32[n, h]` and `f32[h]`, the first layer, for blocks of `n` positions.
        out, out_bias: `f32[h, n]` and `f32[n]`, the second layer.

    Raises:
        ValueError: the shapes of the weights do not fit each other.
    """

    __repr__ = short

    hidden: np.ndarray
    hidden_bias: np.ndarray
    out: np.ndarray
    out_bias: np.ndarray

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, np.array(getattr(self, field.name), np.float32))
        if self.hidden.ndim != 2 or self.hidden.shape[::-1] != self.out.shape or \
                (self.hidden.shape[1],) != self.hidden_bias.shape or (self.out.shape[1],) != self.out_bias.shape:
            shapes = [getattr(self, f.name).shape for f in dataclasses.fields(self)]
            raise ValueError(f"filter: got shapes {shapes}, takes (n, h), (h,), (h, n), (n,)")

    @classmethod
    def of(cls, weights: Mapping[str, Mapping[str, Any]]) -> Filter:
        """Returns a filter from `{"hidden": {"kernel", "bias"}, "out": {"kernel", "bias"}}`."""
        layer = lambda name: (weights[name]["kernel"], weights[name]["bias"])
        return cls(*layer("hidden"), *layer("out"))

    @classmethod
    def load(cls, path: str | Path) -> Filter:
        """Returns a filter from a safetensors file with "hidden.kernel", "hidden.bias", "out.kernel" and "out.bias"."""
        from safetensors.numpy import load_file
        flat = load_file(path)
        return cls.of({layer: {part: flat[f"{layer}.{part}"] for part in ("kernel", "bias")}
                       for layer in ("hidden", "out")})

    @property
    def block(self) -> int:
        """Number `n` of positions of a block, the width of the network's input and output."""
        return self.hidden.shape[0]

    def __call__(self, confidence: Array) -> Array:
        """Returns logits that the candidates are final, `f32[..., n]`, given their probabilities `f32[..., n]`."""
        return jax.nn.relu(confidence @ self.hidden + self.hidden_bias) @ self.out + self.out_bias

    def _key(self) -> tuple[Any, ...]:
        return tuple((x.shape, x.tobytes()) for x in (getattr(self, f.name) for f in dataclasses.fields(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Filter) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


@dataclasses.dataclass(frozen=True)
class Learned(Stepped, Unmask):
    """Unmasks the candidates that the filter accepts with a probability above `threshold`, and the step's quota.

    Attributes:
        filter: the network.
        threshold: probability above which it accepts a candidate.
        steps: number of steps of a block, for the quota; None: one position per step.
    """

    filter: Filter
    threshold: float = 0.96
    steps: int | None = None

    @property
    def quota(self) -> BlockQuota:
        return BlockQuota(self.filter.block, self.steps)

    def init(self, view: View) -> Memory:
        return self.quota.init(view)

    def learn(self, before: View, seen: Seen, after: View, memory: Memory) -> Memory:
        return self.quota.learn(before, seen, after, memory)

    def accepts(self, view: View, seen: Seen) -> Array:
        """Returns the positions, of the first block with undecided ones, whose candidates the filter network accepts
        with a probability above `threshold`: `bool[R, W]`."""
        n, W = self.filter.block, view.positions.shape[1]
        block = current(view, n)[:, None]
        place = block * n + jnp.arange(n, dtype=jnp.int32)
        known = jnp.pad(jnp.where(view.inside & seen.reached, seen.model.prob, 0), ((0, 0), (0, 1)))
        logits = self.filter(jnp.take_along_axis(known, jnp.minimum(place, W), 1))
        own = jnp.take_along_axis(logits, (view.positions - view.start[:, None]) % n, 1)
        return view.masked & (number(view, n) == block) & (jax.nn.sigmoid(own) > self.threshold)

    def __call__(self, view: View, seen: Seen, score: Array, memory: Memory) -> Array:
        return self.accepts(view, seen) | self.quota(view, seen, score, memory)


@dataclasses.dataclass(frozen=True)
class PredictedEnd(Stop):
    """Ends the text after the first candidate that is an end of sequence and that the filter accepts.

    If there is none, the text ends after the most confident candidate that is an end of sequence. That position may
    still be open, and is decided later.

    Attributes:
        learned: the sampler's unmasking rule.
    """

    learned: Learned

    def end(self, before: View, seen: Seen, after: View, memory: Memory) -> Array:
        candidates = before.masked & seen.reached & ends(before, seen.token)
        accepted = candidates & self.learned.accepts(before, seen)
        log_prob = jnp.where(candidates, seen.model.log_prob, -jnp.inf)
        surest = candidates & (jnp.argmax(log_prob, 1)[:, None] == jnp.arange(log_prob.shape[1]))
        return behind(after, jnp.where(accepted.any(1, keepdims=True), accepted, surest))


@dataclasses.dataclass(frozen=True)
class ClosingToken(Keep):
    """Remasking rule for texts that were cut at a predicted end: the last position of such a text gets an
    end-of-sequence token in place of its candidate.

    The rule's memory is the end of each row's text before any cut, `i32[B]`.
    """

    def init(self, view: View) -> Memory:
        return view.end

    def __call__(self, before: View, seen: Seen, after: View, memory: Memory) -> View:
        last = before.masked & ~after.open & (after.positions == after.end[:, None] - 1)
        last = last & (after.end < memory)[:, None] & (after.eos[:, :1] >= 0) & ~ends(after, after.tokens)
        return after.replace(tokens=jnp.where(last, after.eos[:, :1], after.tokens))


@ALGORITHMS.register("learn2pd", "Learning to Parallel: Accelerating Diffusion Large Language Models via Adaptive "
                     "Parallel Decoding", "Bao et al. 2025", family="masked-diffusion", needs="a diffusion model")
def learn2pd(lm: Any, filter: Filter | str | None = None, threshold: Share = 0.96, steps: Count | None = None,
             end_of_text: bool = True, size: Count | None = None) -> MaskedDiffusion:
    """Unmasks the candidates that a trained filter accepts, and cuts the canvas at the predicted end of the text.

    The shipped models have filters. For another model, of any attention, and prompts of the kind that it will answer,

        python scripts/train.py tune --objective learn2pd --target DIR --data prompts.jsonl --output runs/filter

    writes `runs/filter/model/filter.safetensors`.

    Args:
        filter: the filter, or the path of its file; its width is the number of positions of a block. None: the
            `filter.safetensors` in the model's directory.
        threshold: the filter's probability above which a candidate is unmasked.
        steps: number of steps of a block, for the quota. None: one position per step.
        end_of_text: whether the canvas is cut at the predicted end.
        size: maximum number of new tokens of a text. None: the budget of the call.

    Raises:
        ValueError: no filter given, and none in the model's directory.
    """
    own = filter if isinstance(filter, Filter) else Filter.load(filter or _beside(lm))
    learned = Learned(own, threshold, steps)
    return MaskedDiffusion(Adapter.of(lm), WholeBlocks(size, own.block), unmask=learned,
                           remask=ClosingToken() if end_of_text else Keep(),
                           stops=(PredictedEnd(learned) if end_of_text else EndOfText(),))


def _beside(lm: Any) -> Path:
    """Returns the path of the filter in a model's directory."""
    directory = lm.directory
    if directory is None or not (directory / "filter.safetensors").is_file():
        where = directory or "a directory of the model"
        raise ValueError(f"filter: got None, and no filter.safetensors lies in {where}; train one with "
                         "scripts/train.py tune --objective learn2pd --target DIR --data FILE, or give a Filter or "
                         "its file's path")
    return Path(directory) / "filter.safetensors"
