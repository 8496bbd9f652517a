"""The size of a drafter that is trained, where it is not the method's default: layers, widths, vocabulary matrices of
its own, and target layers that it reads or that run after it. Several sizes give the runs that the scaling law of
drafters is fitted to (`decodax.train.scaling`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from decodax.models.config import DecoderConfig
from decodax.models.drafters.block import BlockHead
from decodax.models.drafters.chimera import ChimeraHead
from decodax.models.drafters.cross_kv import CrossKVHead
from decodax.models.drafters.falcon import FalconHead
from decodax.models.drafters.head import DraftHead
from decodax.models.drafters.hydra import HydraHead
from decodax.models.drafters.mixture import MixtureHead
from decodax.models.drafters.parallel import ParallelHead
from decodax.models.drafters.prefixed import PrefixedHead
from decodax.models.drafters.prompt_tokens import HiddenTransferHead, LookAheadHead, PromptTokensHead
from decodax.models.drafters.recurrent import RecurrentHead
from decodax.models.drafters.stack import BlockwiseHead, MedusaHead, MLPSpeculatorHead, StackedHead
from decodax.models.drafters.units import UnitHead


@dataclasses.dataclass(frozen=True)
class DrafterSize:
    """The size of a drafter, where it differs from the default of its method. None and False: the default.

    Attributes:
        own_head: True gives each head a vocabulary matrix of its own, as published heads have (Medusa, Hydra, Hydra++,
            Chimera, the MLP speculator, which also gets embeddings of its own); False: all use the target's, if that is
            the default.
        layers: number of decoder layers; for heads without any, of residual blocks of each head, which share weights as
            in the authors' code (Medusa, Hydra); for a draft model that is tuned (PARD), of the target's first layers;
            for an encoder-decoder (SpecDec), of its decoder.
        encoder_layers: number of encoder layers (SpecDec).
        mlp: width of the MLPs of the decoder layers, or number of units of each head (blockwise parallel decoding,
            MuMo), or width of the state (the MLP speculator with `own_head`).
        above: number of the target's last layers that run on the output of the drafter (the target layer inference of
            Mixture of Attentions).
        ensemble: number of embeddings for each prompt token (PPD).
        at: layers of the target, counted from 0, after which each pseudo hidden state begins, ascending (hidden
            transfer).
        tied: True: all steps share their weights but the first projection (the MLP speculator).
        scale_input: True divides the target's hidden state by the root of its mean square (the MLP speculator).

    Raises:
        ValueError: a number that is too small.
    """

    own_head: bool = False
    layers: int | None = None
    encoder_layers: int | None = None
    mlp: int | None = None
    above: int | None = None
    ensemble: int | None = None
    at: tuple[int, ...] | None = None
    tied: bool = False
    scale_input: bool = False

    def __post_init__(self) -> None:
        for name, least in (("layers", 1), ("encoder_layers", 1), ("mlp", 1), ("above", 0), ("ensemble", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name}: got {value}, takes at least {least}")

    @classmethod
    def read(cls, options: Any) -> DrafterSize:
        """Returns the size that an object has in attributes of the same names, such as the options of a recipe."""
        return cls(**{field.name: getattr(options, field.name) for field in dataclasses.fields(cls)})

    @property
    def given(self) -> dict[str, Any]:
        """The values that differ from the default, by name, in the order in which they are applied."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if value is not None and value is not False}

    def check_only(self, system: str, *names: str) -> None:
        """Checks that nothing but `names` is given, for a draft model, which is no head.

        Raises:
            ValueError: a size that it does not have.
        """
        for name, value in self.given.items():
            if name not in names:
                raise ValueError(f"{name}: got {value}, {system!r} takes none with this draft model")

    def of(self, head: Any, system: str, drafts: int | None = None) -> Any:
        """Returns a head of this size.

        Args:
            head: the head by default.
            system: name of its method, for errors.
            drafts: number of tokens that are drafted, which is the number of stacked heads; None: as by default.

        Raises:
            ValueError: the head has nothing of the kind.
        """
        if drafts is not None and isinstance(head, StackedHead | ChimeraHead) and not isinstance(head, UnitHead):
            head = _changed(head, heads=drafts)
        for name, value in self.given.items():
            changed = CHANGES[name](head, value) if name in CHANGES else None
            if changed is None:
                raise ValueError(f"{name}: got {value}, {system!r} takes none: its drafter has {FIXED.get(name, _ONE)}")
            head = changed
        return head


def _changed(head: Any, **fields: Any) -> Any:
    return dataclasses.replace(head, **fields)


def _with_layers(head: DraftHead, count: int) -> DraftHead | None:
    match head:
        case RecurrentHead() | BlockHead() | ParallelHead():
            return _changed(head, config=_deeper(head.config, count))
        case PrefixedHead(prefix=DecoderConfig() as prefix):
            return _changed(head, prefix=_deeper(prefix, count))
        case MedusaHead() | HydraHead():
            return _changed(head, blocks=count)
    return None


def _with_mlp(head: DraftHead, width: int) -> DraftHead | None:
    match head:
        case RecurrentHead() | BlockHead() | ParallelHead() | ChimeraHead() | FalconHead() | CrossKVHead():
            return _changed(head, config=dataclasses.replace(head.config, mlp=width))
        case PrefixedHead(prefix=DecoderConfig() as prefix):
            return _changed(head, prefix=dataclasses.replace(prefix, mlp=width))
        case BlockwiseHead() | UnitHead():
            return _changed(head, inner=width)
        case MLPSpeculatorHead(own_head=True):
            return _changed(head, inner=width)
        case MLPSpeculatorHead():
            raise ValueError(f"mlp: got {width} with the target's matrices, whose width is {head.width}; takes another "
                             "with own_head")
    return None


def _with_above(head: DraftHead, count: int) -> DraftHead | None:
    return _changed(head, above=count) if isinstance(head, MixtureHead) else None


def _with_own_head(head: DraftHead, own: bool) -> DraftHead | None:
    return _changed(head, own_head=own) if isinstance(
        head, MedusaHead | HydraHead | ChimeraHead | MLPSpeculatorHead) else None


def _with_ensemble(head: DraftHead, count: int) -> DraftHead | None:
    prompts = isinstance(head, PromptTokensHead) and not isinstance(head, LookAheadHead)
    return _changed(head, ensemble=count) if prompts else None


def _with_layers_read(head: DraftHead, layers: tuple[int, ...]) -> DraftHead | None:
    return _changed(head, taps=tuple(layers)) if isinstance(head, HiddenTransferHead) else None


def _speculator(name: str) -> Callable[[DraftHead, bool], DraftHead | None]:
    return lambda head, value: _changed(head, **{name: value}) if isinstance(head, MLPSpeculatorHead) else None


def _deeper(config: DecoderConfig, count: int) -> DecoderConfig:
    """Returns a configuration of `count` layers like its first one."""
    return dataclasses.replace(config, layers=(config.layers[0],) * count)


CHANGES: dict[str, Callable[[DraftHead, Any], DraftHead | None]] = {
    "own_head": _with_own_head, "layers": _with_layers, "mlp": _with_mlp, "above": _with_above,
    "ensemble": _with_ensemble, "at": _with_layers_read, "tied": _speculator("tied"),
    "scale_input": _speculator("scale_input")}
"""Functions that change a head, by the attribute of `DrafterSize`. They return None for a head that has nothing of the
kind."""

FIXED = {"own_head": "no choice of the vocabulary matrix", "at": "no states that begin at a layer",
         "tied": "no steps to tie", "scale_input": "no scale of its input", "encoder_layers": "no encoder"}
_ONE = "a fixed number"

__all__ = ["DrafterSize"]
