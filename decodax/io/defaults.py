"""Default options of a model from its files: generation_config.json, and the entries of config.json that concern
generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from decodax.common.table import named
from decodax.io.files import CheckpointError, read_json
from decodax.models.encoder_decoder.reading import ENCODER_DECODERS
from decodax.models.fields import checked

SPECIAL = ("eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id")


def read_defaults(path: Path) -> dict[str, Any]:
    """Returns the entries of generation_config.json, and the special token ids of config.json that it lacks.

    Older encoder-decoders have no generation_config.json, and options such as `num_beams` in config.json, from which
    transformers reads them, too.

    Raises:
        CheckpointError: a token id is none.
    """
    found: dict[str, Any] = {}
    for file in (path / "config.json", path / "generation_config.json"):
        given = read_json(file) if file.is_file() else {}
        try:
            ids = checked({key: _inner(given, key) for key in SPECIAL})
        except ValueError as e:
            raise CheckpointError(f"{file}: {e}") from None
        if file.name == "generation_config.json":
            rest = given
        elif given.get("model_type") in ENCODER_DECODERS and not (path / "generation_config.json").is_file():
            rest = {key: given[key] for key in named("policy", "beams", config=True) if given.get(key) is not None}
        else:
            rest = {}
        found |= {key: value for key, value in rest.items() if key not in SPECIAL}
        found |= ids
    return found


def _inner(config: dict[str, Any], key: str) -> Any:
    """Returns an entry of a config.json, or of its part `text_config` if the outer entry is missing."""
    inside = config.get("text_config")
    return config[key] if config.get(key) is not None else inside.get(key) if isinstance(inside, dict) else None
