"""The size of a drafter that is trained, where it is not the method's default: layers, widths, and target layers that
run after it. Several sizes give the runs that the scaling law of drafters is fitted to (`decodax.train.scaling`)."""

from __future__ import annotations

import dataclasses
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
from decodax.models.drafters.recurrent import RecurrentHead
from decodax.models.drafters.stack import BlockwiseHead, MedusaHead, StackedHead
from decodax.models.drafters.units import UnitHead


@dataclasses.dataclass(frozen=True)
class DrafterSize:
    """The size of a drafter, where it differs from the default of its method. None: the default.

    Attributes:
        layers: number of decoder layers; for heads without any, of residual blocks of each head, which share weights as
            in the authors' code (Medusa, Hydra); for a draft model that is tuned (PARD), of the target's first layers.
        mlp: width of the MLPs of the decoder layers, or number of units of each head (blockwise parallel decoding,
            MuMo).
        above: number of the target's last layers that run on the output of the drafter (the target layer inference of
            Mixture of Attentions).

    Raises:
        ValueError: a number that is too small.
    """

    layers: int | None = None
    mlp: int | None = None
    above: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("layers", 1), ("mlp", 1), ("above", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name}: got {value}, takes at least {least}")

    def of_draft_model(self, system: str, other: bool) -> int | None:
        """Returns the number of layers of a draft model that is tuned. `other` is True if that is a model of its own.

        Raises:
            ValueError: a size that it does not have.
        """
        for name in ("layers", "mlp", "above") if other else ("mlp", "above"):
            if (value := getattr(self, name)) is not None:
                raise ValueError(f"{name}: got {value}, {system!r} takes none with this draft model")
        return self.layers

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
        for name in ("layers", "mlp", "above"):
            value = getattr(self, name)
            if value is not None:
                changed = {"layers": _with_layers, "mlp": _with_mlp, "above": _with_above}[name](head, value)
                if changed is None:
                    raise ValueError(f"{name}: got {value}, {system!r} takes none: its drafter has a fixed number")
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
    return None


def _with_above(head: DraftHead, count: int) -> DraftHead | None:
    return _changed(head, above=count) if isinstance(head, MixtureHead) else None


def _deeper(config: DecoderConfig, count: int) -> DecoderConfig:
    """Returns a configuration of `count` layers like its first one."""
    return dataclasses.replace(config, layers=(config.layers[0],) * count)


__all__ = ["DrafterSize"]
