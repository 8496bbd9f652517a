"""The published drafters that can be trained: for each the network that it has for a target, and its loss.

Networks have one layer by default, or two of a block head, of P-EAGLE and of Clover-2, whatever the paper's size;
`DrafterSize` gives others. Losses are the papers', except that Medusa, Hydra and Clover learn the target's distribution
in place of labels, so that the text need not be the target's own. The noise on the inputs of EAGLE is left out.
Blockwise parallel decoding sums the losses of all heads, of which its authors draw one for each batch. Targets do not
change; `decodax.train.drafting.joint` trains them, too.

The heads of Medusa, Hydra, Chimera and the MLP speculator use the target's vocabulary matrix, as in Medusa's older
trainer, unless the size has `own_head`, as published heads have: such matrices begin as the target's, but those of the
MLP speculator, which begin random as its authors' do.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.models.blocks.options import Layer
from decodax.models.config import DecoderConfig
from decodax.models.drafters.block import BlockHead
from decodax.models.drafters.chimera import ChimeraHead
from decodax.models.drafters.clover import CloverHead
from decodax.models.drafters.corrections import CandidateSelector, Markov, PrefixGRU, Refiner
from decodax.models.drafters.cross_kv import CrossKVHead
from decodax.models.drafters.falcon import FalconHead
from decodax.models.drafters.head import DraftHead, Weights
from decodax.models.drafters.hydra import HydraHead
from decodax.models.drafters.local_convolution import LocalConvolution
from decodax.models.drafters.mixture import MixtureHead
from decodax.models.drafters.parallel import ParallelHead
from decodax.models.drafters.prefixed import plain_layers
from decodax.models.drafters.prompt_tokens import HiddenTransferHead, LookAheadHead, PromptTokensHead, middle
from decodax.models.drafters.recurrent import RecurrentHead
from decodax.models.drafters.stack import BlockwiseHead, MedusaHead, MLPSpeculatorHead
from decodax.models.drafters.units import UnitHead
from decodax.models.formats import unpacked
from decodax.models.names import flatten
from decodax.models.rope import Rope
from decodax.models.weight_source import kernel_of, nested
from decodax.train.drafting.blocks import AnchoredBlocks
from decodax.train.drafting.cross_kv import DelayedKeys
from decodax.train.drafting.falcon import Glanced
from decodax.train.drafting.losses import loss_of
from decodax.train.drafting.masked import MaskedPairs
from decodax.train.drafting.prompt_tokens import InsertedPrompts
from decodax.train.drafting.sizes import DrafterSize
from decodax.train.drafting.units import NextUnit
from decodax.train.drafting.unrolled import Unrolled, mean_square, smooth_l1


@dataclasses.dataclass(frozen=True)
class DrafterSystem:
    """How a published kind of drafter is built and trained.

    Attributes:
        head: makes its network for a target of a configuration and a number of logits.
        drafts: number of tokens that training unrolls.
        loss: name of the loss of a token, see `decodax.train.drafting.losses`.
        decay: the `j`-th token has the weight `decay ** j`.
        features: weight of the distance to the target's hidden states; None: the loss has no such term.
        share: part of the target's vocabulary that it predicts by default.
        distance: that distance, for heads that are unrolled.
    """

    head: Callable[[DecoderConfig, int], DraftHead]
    drafts: int
    loss: str = "kl"
    decay: float = 0.8
    features: float | None = None
    share: float = 1.0
    distance: Callable[[Array, Array], Array] = smooth_l1


def tapped(layers: int) -> tuple[int, ...]:
    """Returns the three layers that EAGLE-3 reads: an early, a middle and a late one, counted from 0.

    >>> tapped(32), tapped(4)
    ((1, 15, 28), (0, 1, 3))
    """
    chosen = 1, max(0, layers // 2 - 1), max(0, layers - 4)
    return chosen if len(set(chosen)) == 3 and layers > 5 else tuple(sorted({0, (layers - 1) // 2, layers - 1}))


def upper(layers: int) -> tuple[int, ...]:
    """Returns three layers from the middle on, of whose output hidden transfer makes its states, counted from 0.

    >>> upper(32), upper(4)
    ((15, 16, 17), (1, 2, 2))
    """
    return tuple(max(0, min(layers // 2 - 1 + i, layers - 2)) for i in range(3))


def _eagle(c: DecoderConfig, vocab: int) -> DraftHead:
    return RecurrentHead((), vocab, config=plain_layers(c, vocab), fuse="fc", bias=True, first_norm=False,
                         final_norm=False)


def _eagle3(c: DecoderConfig, vocab: int) -> DraftHead:
    return RecurrentHead(tapped(len(c.layers)), vocab, config=plain_layers(c, vocab), project=True, own_head=True,
                         feeds_back="before norm")


def _p_eagle(c: DecoderConfig, vocab: int) -> DraftHead:
    return ParallelHead(tapped(len(c.layers)), vocab, config=plain_layers(c, vocab, 2), project=True, own_head=True,
                        mask=0)


def _mtp(c: DecoderConfig, vocab: int) -> DraftHead:
    return RecurrentHead((), vocab, config=plain_layers(c, vocab), fuse="norms")


def _block(**settings: Any) -> Callable[[DecoderConfig, int], DraftHead]:
    """Returns a function that makes a block head of two layers and eight slots, with a learned mask."""
    return lambda c, vocab: BlockHead(tapped(len(c.layers)), vocab, config=plain_layers(c, vocab, 2), block=8,
                                      target_vocab=c.vocab, **settings)


def _cross(window: int | None = None, **settings: Any) -> Callable[[DecoderConfig, int], DraftHead]:
    """Returns a function that makes a head that reads the keys and values of the target's last layer with attention;
    `window` is that of its self-attention."""
    def make(c: DecoderConfig, vocab: int) -> DraftHead:
        own = plain_layers(c, vocab)
        own = dataclasses.replace(own, layers=(dataclasses.replace(own.layers[0], sliding=window),),
                                  qkv_bias=own.qkv_bias or window is not None)
        head = CrossKVHead((), vocab, config=own, layer=c.attending[-1] if c.attending else 0, **settings)
        head.check_target(c)
        return head

    return make


def _mixture(c: DecoderConfig, vocab: int) -> DraftHead:
    wide, own = 2 * c.kv_heads * c.head_dim, plain_layers(c, vocab)
    theta = 10_000.0 if own.layers[0].rope is None else own.layers[0].rope.theta
    # One head for each of the target's, of a width that divides; the MLP is as much wider as in the target.
    heads = next(n for n in range(min(c.heads, wide // 2), 0, -1) if wide % (2 * n) == 0)
    summary = dataclasses.replace(own, width=wide, heads=heads, kv_heads=heads, head_dim=wide // heads,
                                  mlp=-(-c.mlp * wide // c.width), layers=(Layer(rope=Rope(wide // heads, theta)),))
    head = MixtureHead((), vocab, config=own, layer=len(c.layers) - 1, summary=summary, final_norm=False)
    head.check_target(c)
    return head


Objective = Unrolled | AnchoredBlocks | InsertedPrompts | Glanced | DelayedKeys | MaskedPairs | NextUnit
"""The losses of drafters."""

BLOCK_LOSS = "0.9*tv+0.1*hard"

SYSTEMS = {
    "eagle-3": DrafterSystem(_eagle3, 7, share=0.25),
    "p-eagle": DrafterSystem(_p_eagle, 8, share=0.25),
    "eagle": DrafterSystem(_eagle, 1, "soft", features=10.0),
    "hass": DrafterSystem(_eagle, 3, "soft+top-k", decay=1.0, features=10.0),
    "fastmtp": DrafterSystem(_mtp, 3, "hard", decay=0.6),
    "medusa": DrafterSystem(lambda c, vocab: MedusaHead((), vocab, width=c.width, heads=4, own_head=False), 4),
    "hydra": DrafterSystem(lambda c, vocab: HydraHead((), vocab, width=c.width, heads=4, own_head=False), 4),
    "hydra-plus-plus": DrafterSystem(lambda c, vocab: HydraHead(
        (), vocab, width=c.width, blocks=4, own_head=False, prefix=plain_layers(c, vocab)), 4, "soft", decay=1.0),
    "clover": DrafterSystem(lambda c, vocab: CloverHead((), vocab, width=c.width, prefix=plain_layers(c, vocab)), 5),
    "clover-2": DrafterSystem(lambda c, vocab: CloverHead(
        (), vocab, width=c.width, prefix=plain_layers(c, vocab, 2), tokens_first=True), 5, "soft", 0.7, features=10.0),
    "chimera": DrafterSystem(lambda c, vocab: ChimeraHead(
        (), vocab, config=plain_layers(c, vocab), own_head=False), 5, decay=1.0, features=1.0, distance=mean_square),
    "mlp-speculator": DrafterSystem(lambda c, vocab: MLPSpeculatorHead(
        (), vocab, width=c.width, heads=4, inner=c.width, own_head=False), 4, "hard", decay=1.0),
    "blockwise-parallel": DrafterSystem(lambda c, vocab: BlockwiseHead(
        (), vocab, width=c.width, heads=4, inner=c.width), 4, "hard", decay=1.0),
    "mumo": DrafterSystem(lambda c, vocab: UnitHead((), vocab, width=c.width, heads=1, inner=c.width), 1, "hard"),
    "ppd": DrafterSystem(lambda c, vocab: PromptTokensHead((), vocab, width=c.width), 3),
    "pass": DrafterSystem(lambda c, vocab: LookAheadHead((), vocab, width=c.width), 4, "hard", decay=1.0),
    "s3d": DrafterSystem(lambda c, vocab: LookAheadHead(
        (), vocab, width=c.width, skip=middle(len(c.layers))), 4, "hard", decay=1.0),
    "hidden-transfer": DrafterSystem(lambda c, vocab: HiddenTransferHead(
        upper(len(c.layers)), vocab, width=c.width), 3, features=0.0),
    "falcon": DrafterSystem(lambda c, vocab: FalconHead((), vocab, config=plain_layers(c, vocab)), 2,
                            "0.9*kl+0.1*hard", features=10.0),
    "dflash": DrafterSystem(_block(), 7, "hard"),
    "dspark": DrafterSystem(_block(first_predicts=True, correction=Markov(32), confidence="token"), 8, BLOCK_LOSS),
    "domino": DrafterSystem(_block(first_predicts=True, correction=PrefixGRU(128, 64)), 8, "hard"),
    "dflash2": DrafterSystem(_block(correction=CandidateSelector(32), convolution=LocalConvolution(2, 8)), 7, "hard"),
    "xpress": DrafterSystem(_block(correction=Refiner(32)), 7, BLOCK_LOSS),
    "jetspec": DrafterSystem(_block(causal=True), 7, BLOCK_LOSS),
    "glide": DrafterSystem(_cross(), 5, "hard"),
    "mixture-of-attentions": DrafterSystem(_mixture, 6, "0.1*soft", features=1.0),
    "longspec": DrafterSystem(_cross(512, cross_norm=True, final_norm=False), 4, "hard"),
}
"""The drafters that can be trained, by the name of their method."""

ENTRIES = {"hass": "eagle", "fastmtp": "mtp"}
"""The registry entry that takes the drafter of a method, where it has another name."""

KEEPS = Unrolled, AnchoredBlocks, Glanced, NextUnit
"""Losses of drafters that read the target's hidden states alone, which can be computed once (`KeptFeatures`)."""


def feature_weight(system: str, given: float | None) -> float:
    """Returns the weight of the distance to the target's hidden states in the loss of a method, 0 if it has no such
    term: `given`, or that of the method for None.

    Raises:
        ValueError: a weight for a method whose loss has no such term, or a negative one.
    """
    own = SYSTEMS[system].features if system in SYSTEMS else None
    if given is not None and (own is None or not given >= 0):
        takes = "None, since its loss does not compare hidden states" if own is None else "a number of at least 0"
        raise ValueError(f"hidden_weight: got {given} for {system!r}, takes {takes}")
    return (own or 0.0) if given is None else given


def objective_of(system: str, lm: Any, ids: np.ndarray | None = None, drafts: int | None = None,
                 loss: str | None = None, dtype: str = "float32", size: DrafterSize = DrafterSize(),
                 hidden_weight: float | None = None) -> Objective:
    """Returns the objective of a drafter for a target; it holds the network (`Unrolled.head`).

    Args:
        system: name of the method, of `SYSTEMS`.
        lm: the target, a result of `decodax.load`.
        ids: `i32[Vd]`, the tokens that it predicts; None: all. For "mumo" the units, `i32[U, L]`, padded with -1.
        drafts: number of tokens that training unrolls, that a block predicts, or of stacked heads; None: the method's.
        loss: name of the loss; None: the method's.
        dtype: dtype of the computation.
        size: what is not the default in the size of the network.
        hidden_weight: weight of the distance to the target's hidden states; None: the method's.

    Raises:
        ValueError: an unknown method or loss, tokens for a method that uses the target's vocabulary matrix or reads
            tokens by a table of its own, a size that the network does not have, or a weight of a term that the loss
            does not have.
    """
    if system not in SYSTEMS:
        raise ValueError(f"system: got {system!r}, takes one of {', '.join(SYSTEMS)}")
    own = SYSTEMS[system]
    loss_of(loss or own.loss)
    features = feature_weight(system, hidden_weight)
    head = size.of(own.head(lm.model.config, lm.model.config.vocab if ids is None else len(ids)), system, drafts)
    if isinstance(head, UnitHead):
        if ids is None or np.ndim(ids) != 2:
            raise ValueError(f"ids: got {'none' if ids is None else np.shape(ids)}, {system!r} takes units [U, L]")
        if (drafts, loss) != (None, None):
            raise ValueError(f"drafts, loss: got {drafts} and {loss!r}, takes None: {system!r} drafts units, and has "
                             "one loss")
        head = dataclasses.replace(head, heads=ids.shape[1] - 1)
        return NextUnit(lm.model, head, tuple(map(tuple, np.asarray(ids).tolist())), dtype)
    if ids is not None and not head.own_head:
        raise ValueError(f"ids: got {len(ids)} tokens (--draft-vocab), takes None: {system!r} uses the target's "
                         "vocabulary matrix, so it predicts all tokens")
    if ids is not None and isinstance(head, MLPSpeculatorHead):
        raise ValueError(f"ids: got {len(ids)} tokens (--draft-vocab), takes None: {system!r} also reads tokens by a "
                         "table of its own, so it predicts all tokens")
    chosen = None if ids is None else tuple(map(int, ids))
    if isinstance(head, BlockHead):
        head = dataclasses.replace(head, block=(drafts or own.drafts) + head.offset)
        return AnchoredBlocks(lm.model, head, loss=loss or own.loss, base=float(system == "domino"), ids=chosen,
                              dtype=dtype)
    if isinstance(head, FalconHead):
        head = dataclasses.replace(head, block=drafts or own.drafts)
        return Glanced(lm.model, head, loss or own.loss, features, dtype=dtype)
    if isinstance(head, ParallelHead):
        # any token serves as the mask, since the learned feature marks such a pair
        head = dataclasses.replace(head, mask=lm.pad, drafts=drafts or own.drafts)
        return MaskedPairs(lm.model, head.drafts, loss or own.loss, ids=chosen, dtype=dtype, head=head)
    if isinstance(head, (PromptTokensHead, HiddenTransferHead)):
        # the newest token gives the first draft before look-ahead embeddings
        heads = (drafts or own.drafts) - isinstance(head, LookAheadHead)
        if heads < 1:
            raise ValueError(f"drafts: got {drafts}, {system!r} takes at least 2")
        head = dataclasses.replace(head, heads=heads)
        if isinstance(head, HiddenTransferHead) and not 0 <= head.taps[0] <= head.taps[-1] < lm.model.depth:
            raise ValueError(f"at: got {head.taps}, takes layers of {lm.name!r} from 0 to {lm.model.depth - 1}")
        if size.at is not None and len(size.at) > heads:
            raise ValueError(f"at: got {size.at}, takes at most {heads} layers, one for each draft")
        return InsertedPrompts(lm.model, head, loss=loss or own.loss, decay=own.decay, dtype=dtype, features=features)
    if isinstance(head, CrossKVHead):
        far = dict(drawn=True, reach=min(30_000, lm.model.config.context)) if system == "longspec" else {}
        head.check_target(lm.model.config)
        return DelayedKeys(lm.model, head, drafts or own.drafts, loss or own.loss, features, dtype=dtype, **far)
    longest = head.longest
    if longest is not None and (drafts or own.drafts) > longest:
        raise ValueError(f"drafts: got {drafts}, {system!r} drafts at most {longest} tokens")
    return Unrolled(lm.model, head, drafts or own.drafts, loss or own.loss, own.decay, features,
                    chosen, dtype, own.distance)


def first_weights(objective: Objective, lm: Any, key: jax.Array) -> Weights:
    """Returns the weights with which training starts: random, but those that the target's last layer, final norm or
    vocabulary matrix have in the same place and shape are copied from it.

    Vocabulary matrices of the heads begin as the target's, times its factor of logits, so that a fresh Medusa head
    predicts what the target does, up to a soft cap; those of Chimera, which read two vectors, as that matrix twice.
    """
    head = objective.head
    own = flatten(head.init_params(key))        # type: ignore[attr-defined]
    target = flatten(lm.params)
    last = max((int(name.split(".")[1]) for name in target if name.startswith("layers.")), default=0)
    for name in own:
        own_name = name.removeprefix("prefix.").replace("layers.0.", f"layers.{last}.")
        theirs = target.get(own_name.replace("cross.", f"layers.{last}.attn."))
        if isinstance(theirs, jax.Array) and theirs.shape == own[name].shape:     # others are packed
            own[name] = jnp.asarray(theirs, jnp.float32)
    ours = [name for name in own if name == "lm_head.kernel" or re.fullmatch(r"heads\.\d+\.head\.(kernel|bias)", name)
            or (isinstance(head, ChimeraHead) and head.own_head and name.startswith("heads."))]
    if ours:
        kernel, bias = (x if objective.ids is None else x[..., np.asarray(objective.ids)] for x in vocabulary(lm))
        for name in ours:
            twice = own[name].shape[0] // kernel.shape[0] if name.endswith("kernel") else 1
            own[name] = jnp.concatenate([kernel] * twice) if name.endswith("kernel") else bias
    return nested(own)


def vocabulary(lm: Any) -> tuple[Array, Array]:
    """Returns the vocabulary matrix of a target, `f32[D, V]`, and its bias, `f32[V]`, times its factor of logits, as
    arrays also if they are packed."""
    own = "lm_head.kernel" in flatten(lm.params)
    params = flatten(unpacked({name: lm.params[name] for name in (("lm_head",) if own else ("embed",))}))
    kernel = params["lm_head.kernel"] if own else kernel_of("embed", params["embed"])
    bias, scale = params.get("lm_head.bias", jnp.zeros(kernel.shape[1])), lm.model.config.logit_scale
    return scale * jnp.asarray(kernel, jnp.float32), scale * jnp.asarray(bias, jnp.float32)
