"""Reads peft's adapter_config.json: which entries determine an adapter's tensors, and which are ignored or raise an
error.

- Supported: `r`, `lora_alpha`, `use_rslora`, `rank_pattern` and `alpha_pattern` (by peft's rule the first key that
  matches the end of a module's name counts), `target_modules`, `exclude_modules`, `layers_to_transform` and
  `layers_pattern` (which modules have tensors), and `init_lora_weights` where it leaves the model's own weights
  unchanged.
- Ignored: `TRAINING`, which have no effect on the result of an adapter and are accepted with any value.
- All others are accepted with a neutral value (null, false, 0, an empty text, list or object); another value raises an
  error that names the entry.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

TRAINING = frozenset({
    "auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "peft_version",
    "lora_dropout", "runtime_config", "megatron_core", "qalora_group_size", "ensure_weight_tying", "eva_config",
    "corda_config", "lora_ga_config", "loftq_config", "fan_in_fan_out", "bias"})
"""Entries about training, or about the origin of an adapter.

The groups of QA-LoRA, the configurations of initialisations and the tying of embeddings only act with other entries or
tensors that are refused. A trained `bias` is a tensor, and is refused as one. The layout of a kernel in the base model
(`fan_in_fan_out`) does not change the two factors.
"""

HONOURED = frozenset({
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules",
    "layers_to_transform", "layers_pattern", "init_lora_weights"})

PLAIN_STARTS = ("gaussian", "eva", "orthogonal", "mica")
"""Initialisations that leave the base model's weights unchanged. The others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA)
subtract the initial adapter from them, so the tensors are only meaningful with changed weights that no file holds."""

EMPTY_COUNTS = frozenset({"kasa_config", "monteclora_config"})
"""Entries for which an empty object enables a method with its defaults."""

DEFAULT = 8
"""Default of rank and alpha in peft."""


@dataclasses.dataclass(frozen=True)
class AdapterConfig:
    """The entries of an adapter_config.json, checked by `checked`. Modules are named as in the base model."""

    entries: Mapping[str, Any]

    def rank(self, module: str) -> int:
        return self._pattern("rank_pattern", module, self.entries.get("r", DEFAULT))

    def scale(self, module: str) -> float:
        """Returns the factor of a module's low-rank product, `alpha / rank` or `alpha / sqrt(rank)`."""
        alpha, rank = self._pattern("alpha_pattern", module, self.entries.get("lora_alpha", DEFAULT)), self.rank(module)
        return alpha / (math.sqrt(rank) if self.entries.get("use_rslora") else rank)

    def adapts(self, module: str) -> bool:
        """True if the entries select this module; peft ignores the tensors of other modules.

        If `target_modules` is missing, peft takes the modules that it knows for the architecture; this function takes
        every module.
        """
        excluded, targets = self.entries.get("exclude_modules"), self.entries.get("target_modules")
        if excluded and _chosen(excluded, module):
            return False
        if not targets or targets == "all-linear":
            return True
        return _chosen(targets, module) and (isinstance(targets, str) or module in targets or self._in_layers(module))

    def unmatched(self, modules: Iterable[str]) -> list[str]:
        """Returns keys of the patterns that match none of the modules, as "rank_pattern: key"."""
        named = list(modules)
        return [f"{name}: {key}" for name in ("rank_pattern", "alpha_pattern") for key in self.entries.get(name) or {}
                if not any(_matches(key, module) for module in named)]

    def _pattern(self, name: str, module: str, default: Any) -> Any:
        return next((value for key, value in (self.entries.get(name) or {}).items() if _matches(key, module)), default)

    def _in_layers(self, module: str) -> bool:
        layers, patterns = self.entries.get("layers_to_transform"), self.entries.get("layers_pattern")
        layers = [layers] if isinstance(layers, int) else layers
        if not layers:
            return True
        patterns = [patterns] if isinstance(patterns, str) and patterns else patterns or [r"[^.]*"]
        found = next(filter(None, (re.match(rf".*?\.{pattern}\.(\d+)\.", module) for pattern in patterns)), None)
        return found is not None and int(found[1]) in layers


def checked(entries: Mapping[str, Any]) -> AdapterConfig:
    """Returns the entries after checking that each is supported or neutral.

    Raises:
        ValueError: an entry is not supported or invalid; the message names it.
    """
    if entries.get("peft_type") != "LORA":
        raise ValueError(f"peft_type: got {entries.get('peft_type')!r}, takes 'LORA'")
    for name, value in entries.items():
        if (name in EMPTY_COUNTS and value is not None) or (name not in HONOURED | TRAINING and value):
            raise ValueError(f"{name}: got {value!r}, which is not supported; takes a plain LoRA")
    start = entries.get("init_lora_weights")
    if not (start is None or isinstance(start, bool) or str(start).lower() in PLAIN_STARTS):
        raise ValueError(f"init_lora_weights: got {start!r}: such an adapter belongs to weights that its training "
                         "changed; takes one that peft converted to the original weights (save_pretrained with "
                         f"path_initial_model_for_weight_conversion), or {', '.join(PLAIN_STARTS)}, true or false")
    if not _whole(rank := entries.get("r", DEFAULT)):
        raise ValueError(f"r: got {rank!r}, takes a whole number from 1")
    if not _number(alpha := entries.get("lora_alpha", DEFAULT)):
        raise ValueError(f"lora_alpha: got {alpha!r}, takes a number")
    for name, fits, what in (("rank_pattern", _whole, "whole numbers from 1"), ("alpha_pattern", _number, "numbers")):
        patterns = entries.get(name) or {}
        if not isinstance(patterns, Mapping) or not all(map(fits, patterns.values())):
            raise ValueError(f"{name}: got {patterns!r}, takes an object of modules and {what}")
        for key in patterns:
            _compiled(name, key)
    for name in ("target_modules", "exclude_modules", "layers_pattern"):
        given = entries.get(name) or ()
        if not (isinstance(given, str) or (isinstance(given, list | tuple) and all(isinstance(x, str) for x in given))):
            raise ValueError(f"{name}: got {given!r}, takes a regular expression or a list of names")
        if name == "layers_pattern" or isinstance(given, str):
            for key in [given] if isinstance(given, str) else given:
                _compiled(name, key)
    layers = entries.get("layers_to_transform")
    if layers is not None and not all(type(x) is int for x in (layers if isinstance(layers, list) else [layers])):
        raise ValueError(f"layers_to_transform: got {layers!r}, takes a layer's number or a list of them")
    return AdapterConfig(entries)


def _matches(key: str, module: str) -> bool:
    """True if a key of a pattern matches a module's name, or the end of it after a dot (peft's rule)."""
    return re.match(rf"(.*\.)?({key})$", module) is not None


def _chosen(given: str | Iterable[str], module: str) -> bool:
    """True if an expression matches a module's whole name, or if an entry of a list is the end of its name (peft's
    rule)."""
    if isinstance(given, str):
        return re.fullmatch(given, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in given)


def _compiled(name: str, key: str) -> None:
    try:
        re.compile(rf"(.*\.)?({key})$" if name.endswith("_pattern") else key)
    except re.error as error:
        raise ValueError(f"{name}: got {key!r}, which is no regular expression ({error})") from None


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
