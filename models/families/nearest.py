"""The family here that reads the most of a `config.json` whose own family is unknown, and what it would not read."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from decodax.models.blocks.options import Layer
from decodax.models.compressed.options import Pooling
from decodax.models.config import DecoderConfig
from decodax.models.families.flags import HARMLESS
from decodax.models.reading import Json

Reader = Callable[[Json], DecoderConfig]


STANDARD = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 4}
"""Stands for what a `config.json` lacks, since another family may have other names for it."""

PARTS: dict[str, tuple[re.Pattern[str], Callable[[Layer], bool]]] = {
    "experts": (re.compile("expert|moe_"), lambda layer: layer.mixture is not None),
    "latents": (re.compile("kv_lora_rank"), lambda layer: layer.latent is not None),
    "states": (re.compile("mamba|ssm_|linear_|lru_|conv_|kda_"),
               lambda layer: layer.recurrent is not None and not isinstance(layer.recurrent, Pooling)),
    "an index": (re.compile("index_|indexer_"),
                 lambda layer: layer.index is not None or layer.shared_key is not None or (
                     layer.latent is not None and layer.latent.indexer is not None)),
}
"""Entries that ask for a part of layers, and whether a layer has it. A part that is not asked for, or is missing,
counts as much as four entries."""


def nearest(c: Json, readers: Mapping[str, Reader]) -> tuple[str, list[str]]:
    """Returns the family that takes the most entries of a `config.json`, and the entries that it does not take, flags
    that are off aside.

    An entry is taken if the decoder differs, or cannot be read, if the entry is removed or has an invalid value. An
    entry that the family refuses counts against it. So does, half as much, one that it requires and the file lacks,
    and each option of the decoder that is not a default. Parts of layers (`PARTS`) count most, and a name like the
    `model_type` as much as an entry.

    Args:
        c: the `config.json`.
        readers: the reader of each family, by name.
    """
    kind, best, result = str(c.get("model_type")), -math.inf, ("llama", list[str]())
    entries = [key for key, value in c.items() if value is not None and key != "model_type"
               and not HARMLESS.search(key)]
    for name in sorted(readers, key=lambda name: name != "llama"):     # of equals, llama
        if (found := _read(c, name, readers[name])) is None:
            continue
        decoder, given = found
        taken = {key for key in entries if key in given and _takes(readers[name], given, key, decoder)}
        lacks, refused = len(given.keys() - c.keys()), len(set(entries) - given.keys())
        alike = difflib.SequenceMatcher(None, kind, name).ratio()
        score = 2 * len(taken) - 2 * refused - lacks - _options(decoder) + 2 * alike * (alike >= 0.5)
        score -= 8 * sum(any(map(asks.search, entries)) != any(map(has, decoder.layers))
                         for asks, has in PARTS.values())
        if score > best:
            best, result = score, (name, [key for key in entries if key not in taken and c[key] is not False])
    return result


def _read(c: Json, name: str, reader: Reader) -> tuple[DecoderConfig, Json] | None:
    """Returns the decoder, and the entries without those that the family refuses and with those that the file lacks;
    None if the family needs others."""
    given = {**c, "model_type": name}
    while True:         # each turn takes an entry away or adds one
        try:
            return reader(given), given
        except KeyError as error:
            if (key := error.args[0]) not in STANDARD or key in c:
                return None
            given[key] = STANDARD[key]
        except ValueError as error:
            names = str(error).partition(":")[0].split(", ")
            refused = next((key for key, value in given.items() if key in c and (key in names or (
                isinstance(value, Mapping) and not value.keys().isdisjoint(names)))), None)
            if refused is None or refused == "model_type":
                return None
            del given[refused]
        except Exception:       # what readers do with entries of another family is not foreseen
            if None not in given.values():
                return None
            given = {key: value for key, value in given.items() if value is not None}


def _takes(reader: Reader, given: Json, key: str, decoder: DecoderConfig) -> bool:
    """Returns True if the decoder depends on an entry."""
    for other in ({**given, key: object()}, {k: v for k, v in given.items() if k != key}):
        try:
            if reader(other) != decoder:
                return True
        except Exception:
            return True
    return False


def _options(decoder: DecoderConfig) -> int:
    """Returns the number of fields of a decoder and of its layers that differ from their defaults."""
    return len(_changed([decoder])) + len(_changed(decoder.layers))


def _changed(parts: Iterable[Any]) -> set[str]:
    return {field.name for part in parts for field in dataclasses.fields(part)
            if field.default is not dataclasses.MISSING and getattr(part, field.name) != field.default}
