"""The router of a sparse mixture of experts: which experts compute a token, and with which weights.

One function, `route`, has the options of all families (`Experts`). A score for each expert comes from the router's
logits; the best scores choose, after a learned correction that counts for the choice alone and a
choice of groups; the scores of the chosen are the weights, normalised and scaled.

| family | score | correction | groups | weights |
|---|---|---|---|---|
| Mixtral, Qwen 3 MoE, Granite MoE | softmax | no | no | divided by their sum |
| Qwen 2 MoE, OLMoE | softmax | no | no | as they are |
| ERNIE 4.5 MoE | softmax | yes | no | divided by their sum |
| MiniMax M2 and M3, Hy3, LFM2, Laguna, Step 3.5 and 3.7 | sigmoid | yes | no | divided by their sum, scaled |
| GLM-4.5, DeepSeek V3, Hy4 | sigmoid | yes | by the two best of each | divided by their sum, scaled |
| Llama 4 | sigmoid | no | no | factors of the expert's input |
| Phi-3.5-MoE | sparsemixer | no | no | as they are |
| GPT-OSS | logits | no | no | softmax of the chosen |
| DeepSeek V4 | sqrtsoftplus | yes, or a choice by token id (`hashed`) | no | divided by their sum, scaled |
| Gemma 4 | softmax | no | no | divided by their sum, times a learned number of each expert |
| LongCat-Flash | softmax | yes | no | as they are, scaled; some experts compute nothing (`zero`) |
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.common.arguments import check_counts

Score = Literal["softmax", "sigmoid", "sqrtsoftplus", "logits", "sparsemixer"]


@dataclasses.dataclass(frozen=True)
class ClippedSwiGLU:
    """The gated activation of GPT-OSS, MiniMax M3, DeepSeek V4 and Hy4: `(up + shift) * gate * sigmoid(alpha * gate)`,
    with both projections clipped. That of Step 3.5 and 3.7 clips the gate after its activation.

    Attributes:
        alpha: factor of the gate inside the sigmoid.
        limit: the gate is at most this; the other projection is within `[-limit, limit]`.
        shift: added to the other projection.
        after: True: `gate * sigmoid(alpha * gate)` is at most `limit`, in place of the gate.
    """

    alpha: float = 1.702
    limit: float = 7.0
    shift: float = 1.0
    after: bool = False

    def __call__(self, gate: Array, up: Array) -> Array:
        gate, up = gate if self.after else jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        gate = gate * jax.nn.sigmoid(self.alpha * gate)
        return (up + self.shift) * (jnp.minimum(gate, self.limit) if self.after else gate)


@dataclasses.dataclass(frozen=True)
class Experts:
    """A sparse mixture of gated MLPs in place of one MLP (Shazeer et al., 2017). See `decodax.models.experts`.

    Attributes:
        count: number of experts `E`.
        chosen: number of experts that are chosen for each token.
        width: number of inner channels of each expert.
        normalise: True divides the weights of the chosen experts by their sum (of a score "logits": takes their
            softmax); False keeps their scores.
        score: an expert's score from its logit: its share of the softmax over all experts; its sigmoid; the square root
            of its softplus; the logit itself; or "sparsemixer" (Liu et al., 2024), which chooses two experts one after
            the other, each with its share of a softmax over those that are near to it (`jitter`).
        correction: True adds a learned number to each score, for the choice only.
        groups: number of groups of experts; the best `kept_groups` of them are kept before experts are chosen.
        kept_groups: number of groups that are kept.
        group_score: "top2": a group counts by the sum of its two best scores; "max": by its best score.
        scale: factor of the weights, after `normalise`.
        where: "output": weights multiply the experts' outputs; "input": their inputs.
        shared: number of inner channels of a gated MLP that computes every token beside the chosen experts; 0: none.
        shared_gate: True multiplies that MLP's output by a learned sigmoid of the token.
        bias: True adds biases to the router and to the experts' projections.
        glu: the gated activation of the experts; None: the model's activation of the gate, times the other projection.
        logit_scale: factor of the router's logits.
        softcap: bound of the router's logits `x`, which become `softcap * tanh(x / softcap)`; 0: no bound.
        expert_scale: True multiplies the weight of an expert, after `normalise`, by a learned number of that expert.
        branch_norms: True: the router, the chosen experts and the shared MLP each read the residual stream through a
            norm of their own, in place of one norm for all, and the experts' sum and the shared MLP's output each pass
            another norm before they are added.
        eps: added to the sum by which weights are divided.
        latent: number of channels of the tokens that experts compute, which a projection makes of the model's channels
            and another one turns back; 0: the model's channels. The shared MLP has these in any case.
        hashed: number of tokens of a table, with the chosen experts of each token, that takes the place of a choice by
            scores (hash layers; Roller et al., 2021); 0: the scores choose.
        jitter: of "sparsemixer": experts whose logit is relatively more than twice this below the best do not count.
        zero: number of further experts, after the others, whose output is their input (zero-computation experts:
            "LongCat-Flash Technical Report", Meituan, 2025). They have no weights and cost nothing.
    """

    count: int
    chosen: int
    width: int
    normalise: bool = True
    score: Score = "softmax"
    correction: bool = False
    groups: int = 1
    kept_groups: int = 1
    group_score: Literal["top2", "max"] = "top2"
    scale: float = 1.0
    where: Literal["output", "input"] = "output"
    shared: int = 0
    shared_gate: bool = False
    bias: bool = False
    glu: ClippedSwiGLU | None = None
    eps: float = 0.0
    latent: int = 0
    jitter: float = 0.01
    logit_scale: float = 1.0
    softcap: float = 0.0
    expert_scale: bool = False
    branch_norms: bool = False
    hashed: int = 0
    zero: int = 0

    def __post_init__(self) -> None:
        check_counts(self, "count", "chosen", "width", "groups", "kept_groups")
        if self.chosen > self.outputs:
            raise ValueError(f"chosen: got {self.chosen}, takes at most the number of experts, {self.outputs}")
        if self.zero < 0 or (self.zero and (self.groups > 1 or self.score == "sparsemixer" or self.where == "input"
                                            or self.bias or self.latent or self.hashed or self.expert_scale
                                            or self.branch_norms)):
            raise ValueError(f"zero: got {self.zero}, takes 0 or more, and one group, weights of outputs, experts as "
                             "wide as the model, and no sparsemixer, bias, hashed, expert_scale or branch_norms")
        if self.count % self.groups or self.kept_groups > self.groups:
            raise ValueError(f"groups: got {self.groups} with kept_groups = {self.kept_groups}, takes a divisor of the "
                             f"number of experts, {self.count}, and at most as many kept")
        size = self.count // self.groups
        if self.groups > 1 and (self.kept_groups * size < self.chosen or (self.group_score == "top2" and size < 2)):
            raise ValueError(f"groups: got {self.groups} of {size} experts, of which {self.kept_groups} are kept; "
                             f"takes at least the {self.chosen} chosen experts in those, and two in each")
        if self.score == "sparsemixer" and (self.chosen != 2 or self.normalise or self.groups > 1 or self.correction):
            raise ValueError("score: sparsemixer takes two chosen experts, without normalise, groups or a correction")
        if self.hashed and (self.correction or self.groups > 1 or self.score == "sparsemixer"):
            raise ValueError("hashed: takes no correction, no groups and another score than sparsemixer, since scores "
                             "choose no experts")
        if self.shared_gate and not self.shared:
            raise ValueError("shared_gate: got True without a shared expert")
        if self.branch_norms and (not self.shared or self.shared_gate or self.where == "input"):
            raise ValueError("branch_norms: takes a shared expert without a gate, and weights of outputs")

    @property
    def outputs(self) -> int:
        """Number of experts that the router chooses from."""
        return self.count + self.zero


def route(logits: Array, e: Experts, correction: Array | None = None, which: Array | None = None
          ) -> tuple[Array, Array]:
    """Returns the experts of each token and their weights.

    Args:
        logits: `f32[n, E]`, the router's logits.
        e: the mixture.
        correction: `f32[E]`, added to the scores for the choice; None: nothing.
        which: `i32[n, k]`, the experts of each token, of which the weights alone are computed; None: the scores choose.

    Returns:
        `i32[n, k]`, the best score first and of equal ones the lower index, and `f32[n, k]`.

    >>> which, weights = route(jnp.log(jnp.array([[0.1, 0.6, 0.3]])), Experts(count=3, chosen=2, width=1))
    >>> which.tolist(), [round(float(w), 3) for w in weights[0]]
    ([[1, 2]], [0.667, 0.333])
    """
    logits = logits.astype(jnp.float32)
    if e.softcap:
        logits = e.softcap * jnp.tanh(logits / e.softcap)
    if e.score == "sparsemixer":
        return _sparsemixer(logits, e)
    scores = _scores(logits, e.score)
    if which is None:
        choice = scores if correction is None else scores + correction.astype(jnp.float32)
        which = lax.top_k(_kept(choice, e) if e.groups > 1 else choice, e.chosen)[1]
    weights = jnp.take_along_axis(scores, which, -1)
    if e.normalise:
        # The least divisor keeps sigmoids that are all zero from becoming NaN.
        weights = jax.nn.softmax(weights) if e.score == "logits" else (
            weights / (jnp.maximum(weights.sum(-1, keepdims=True), 1e-20) + e.eps))
    return which, weights if e.scale == 1.0 else weights * e.scale


def _scores(logits: Array, score: str) -> Array:
    match score:
        case "softmax":
            return jax.nn.softmax(logits)
        case "sigmoid":
            return jax.nn.sigmoid(logits)
        case "sqrtsoftplus":
            return jnp.sqrt(jax.nn.softplus(logits))
    return logits


def _kept(choice: Array, e: Experts) -> Array:
    """Returns the scores with minus infinity for experts outside of the kept groups."""
    grouped = choice.reshape(choice.shape[0], e.groups, -1)
    of_group = grouped.max(-1) if e.group_score == "max" else lax.top_k(grouped, 2)[0].sum(-1)
    best = lax.top_k(of_group, e.kept_groups)[1]
    kept = (best[:, :, None] == jnp.arange(e.groups)).any(1)
    return jnp.where(kept[..., None], grouped, -jnp.inf).reshape(choice.shape)


def _sparsemixer(logits: Array, e: Experts) -> tuple[Array, Array]:
    """Returns the best expert with its share among those near to it, and the same for the best of the others."""
    which, weights, left = [], [], logits
    for _ in range(2):
        best = left.max(-1, keepdims=True)
        at = left.argmax(-1)
        far = (best - logits) / jnp.maximum(jnp.abs(logits), best) > 2 * e.jitter
        share = jax.nn.softmax(jnp.where(far, -jnp.inf, left))
        which.append(at.astype(jnp.int32))
        weights.append(jnp.take_along_axis(share, at[:, None], -1)[:, 0])
        left = jnp.where(jnp.arange(e.count) == at[:, None], -jnp.inf, left)
    return jnp.stack(which, -1), jnp.stack(weights, -1) * e.scale
