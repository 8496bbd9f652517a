"""Base class of methods and drafts that run the target's network themselves, beside the forward pass of the round."""

from __future__ import annotations

import dataclasses
from typing import Any, Self, TypeVar

from decodax.common.arguments import shown
from decodax.core.composed import Composed
from decodax.core.loaded import Loaded, network_of
from decodax.core.types import Model

Whole = TypeVar("Whole", bound=Composed)


def for_target(whole: Whole, model: Any) -> Whole:
    """Returns a method or a draft of which each part that runs the target's network (`RunsTarget`) has it. A wrapper
    cannot forget it: parts are found in its fields. Arguments and errors are those of `RunsTarget.for_target`."""
    if isinstance(whole, RunsTarget):
        return whole.for_target(model)
    return whole._with(lambda part: for_target(part, model))


@dataclasses.dataclass(frozen=True)
class RunsTarget(Composed):
    """A method or a draft that runs the target's network, or only its embeddings or output head, with the weights in
    `Params.target`. The user does not name the network: `for_target` sets it when decoding begins.

    Derive a frozen dataclass.

    Attributes:
        target: the target's network; None before `for_target`.

    Raises:
        TypeError: a model is given as the first argument.
    """

    target: Model | None = dataclasses.field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        name = next((field.name for field in dataclasses.fields(self) if not field.kw_only), None)
        if name is not None and isinstance(given := getattr(self, name), Loaded | Model):
            raise TypeError(f"{name}: got {shown(given)}; {type(self).__name__} takes no model, since it runs that of "
                            "generate")

    @property
    def model(self) -> Any:
        """The target's network.

        Raises:
            ValueError: `for_target` has not set it.
        """
        if self.target is None:
            raise ValueError(f"{type(self).__name__}: the target is not known yet; call for_target(model) first, as "
                             "generate and bind do")
        return self.target

    def for_target(self, model: Any) -> Self:
        """Returns this method, and its parts, with what they need of the target's network. What a part already has, it
        keeps.

        Args:
            model: the target: a `Model`, or the result of `decodax.load`.

        Raises:
            ValueError: the method cannot run on this target.
        """
        new = self._with(lambda part: for_target(part, model))
        return new if new.target is not None else dataclasses.replace(new, target=network_of(model)[0])
