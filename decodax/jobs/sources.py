"""Sources in the lines of jobs: what the encoder of an encoder-decoder reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from decodax.common.arguments import is_whole, shown
from decodax.io.load import LM
from decodax.jobs.lines import Fields, Line
from decodax.jobs.openai import LineError
from decodax.models.inputs import EncoderText, read_texts, reads_text

TAKES = "a text, token ids, or an object with a text and its language"


def fields_for(lm: LM, fields: Fields) -> Fields:
    """Returns the fields of lines for a model: if its encoder reads text and they do not name the field with the
    source, it is `source`.

    Raises:
        ValueError: they name it, or its language, and the model has no encoder that reads text.
    """
    if reads_text(lm.model):
        return dataclasses.replace(fields, source=fields.source or "source")
    for name, given in (("source", fields.source), ("language", fields.language)):
        if given is not None:
            raise ValueError(f"{name}: got {given!r}, and {lm.name!r} has no encoder that reads text; a model with a "
                             "decoder alone takes its text in the prompt")
    return fields


def with_source(lm: LM, fields: Fields, line: Line, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the options of a line, with its source as inputs of the model.

    Args:
        lm: the model.
        fields: a result of `fields_for`.
        line: the line.
        options: options of all lines.

    Raises:
        LineError: the line has no source and its model requires one, or it is no source.
    """
    if fields.source is None or (line.source is None and "inputs" in {**options, **line.options}):
        return line.options
    if line.source is not None and "inputs" in line.options:
        raise LineError(f"{fields.source}: got a source beside options.inputs, takes one of them")
    if line.source is None:
        raise LineError(f"has no {fields.source!r}, which the model's encoder reads; takes {TAKES}")
    return {**line.options, "inputs": _read(lm, fields, line.source)}


def _read(lm: LM, fields: Fields, source: Any) -> EncoderText:
    name, language = fields.source or "", fields.language
    if isinstance(source, Mapping):
        if set(source) != {"text", "language"} or not all(isinstance(x, str) for x in source.values()):
            raise LineError(f"{name}: got {shown(dict(source))}, takes {TAKES}")
        source, language = source["text"], source["language"]
    if isinstance(source, str):
        return read_texts(lm, source, language, name)
    if not isinstance(source, list) or not source or not all(map(is_whole, source)):
        raise LineError(f"{name}: got {shown(source)}, takes {TAKES}")
    return EncoderText.of([source])
