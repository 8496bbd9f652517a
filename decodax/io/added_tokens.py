"""Adds tokens to a tokenizer that tokenizer.json lacks, but other files of the directory have, as transformers does.

These tokens are listed in `added_tokens_decoder` of tokenizer_config.json, with their ids and matching rules. Older
directories without that entry have special_tokens_map.json and added_tokens.json instead. A special token of which only
the name is given ("eos_token": "<|im_end|>") is added as well, after the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from decodax.io.files import read_object

CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"

LISTS = ("extra_special_tokens", "additional_special_tokens")
"""Keys for special tokens without a name of their own: the current key and the former one."""

MATCHING = ("lstrip", "rstrip", "normalized", "single_word")


def special_tokens(path: Path, config: Mapping[str, Any]) -> dict[str, AddedToken]:
    """Returns the special tokens that the files name, such as "bos_token" and "eos_token", by their key.

    Args:
        path: the directory.
        config: the content of tokenizer_config.json.

    Raises:
        ValueError: an entry is not a token; the message names the file.
    """
    entries = _entries(path, config)
    inner = entries.get(LISTS[0])
    found = {}
    for name, value in {**entries, **(inner if isinstance(inner, dict) else {})}.items():
        if not name.endswith("_token") and not (isinstance(inner, dict) and name in inner):
            continue
        token = _token(value)
        if token is not None:
            found[name] = token
        elif name in ("bos_token", "eos_token", "pad_token", "unk_token"):     # add_bos_token and others are switches
            raise ValueError(f"{path}: {name}: got {value!r} in {CONFIG} or {MAP}, takes a text")
    return found


def add_tokens(backend: tokenizers.Tokenizer, path: Path, config: Mapping[str, Any],
               special: Mapping[str, AddedToken]) -> None:
    """Adds to a tokenizer the tokens that tokenizer.json lacks. tokenizer_config.json determines how its tokens match.

    Args:
        backend: the tokenizer.
        path: the directory.
        config: the content of tokenizer_config.json.
        special: the result of `special_tokens`.

    Raises:
        ValueError: a token is described wrongly, or has an id that the tokenizer cannot give it; the message names the
            file.
    """
    split = config.get("split_special_tokens") or False
    if not isinstance(split, bool):
        raise ValueError(f"{path / CONFIG}: split_special_tokens: got {split!r}, takes true or false")
    backend.encode_special_tokens = split
    extra = _extra(path, config)
    described = _described(path, config, {token.content for token in (*special.values(), *extra)})
    have = backend.get_added_tokens_decoder().values()
    same, known = {repr(token) for token in have}, {token.content for token in have}
    for index, token in described:
        older = "added_tokens_decoder" not in config        # then tokenizer.json determines how its tokens match
        if not token.content or repr(token) in same or (older and token.content in known):
            continue
        new = backend.token_to_id(token.content) is None
        backend.add_tokens([token])
        known.add(token.content)
        if new and index != (free := backend.token_to_id(token.content)):
            raise ValueError(f"{path / (ADDED if older else CONFIG)}: token "
                             f"{token.content!r}: has id {index}, but the next free one in tokenizer.json is {free}")
    for token in (*special.values(), *extra):
        if token.content and token.content not in known:
            backend.add_tokens([token])
            known.add(token.content)


def _entries(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the merged entries of tokenizer_config.json and special_tokens_map.json.

    If tokenizer_config.json describes its added tokens, its entries take precedence; in older directories those of
    special_tokens_map.json do.
    """
    given, mapped = ({name: value for name, value in source.items() if value is not None}
                     for source in (config, read_object(path / MAP)))
    return {**mapped, **given} if "added_tokens_decoder" in config else {**given, **mapped}


def _extra(path: Path, config: Mapping[str, Any]) -> list[AddedToken]:
    entries = _entries(path, config)
    values = next((value for name in LISTS if isinstance(value := entries.get(name), list) and value), [])
    found = [token for value in values if (token := _token(value)) is not None]
    if len(found) < len(values):
        raise ValueError(f"{path}: {' or '.join(LISTS)}: got {values!r} in {CONFIG} or {MAP}, takes texts")
    return found


def _token(value: Any) -> AddedToken | None:
    """Returns the special token of an entry, which is its text or an object with its text and matching rules; None for
    other entries."""
    if isinstance(value, str):
        return AddedToken(value, special=True)
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        return None
    return AddedToken(value["content"], special=True, **{name: bool(value[name]) for name in MATCHING if name in value})


def _described(path: Path, config: Mapping[str, Any], special: set[str]) -> list[tuple[int, AddedToken]]:
    """Returns the tokens of `added_tokens_decoder` or added_tokens.json with their ids, in order of the ids; tokens
    whose text is in `special` are special."""
    given = config.get("added_tokens_decoder")
    if "added_tokens_decoder" in config:
        try:
            found = [(int(index), AddedToken(entry["content"], **{name: entry[name] for name in entry
                                                                  if name in (*MATCHING, "special")}))
                     for index, entry in (given or {}).items()]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path / CONFIG}: added_tokens_decoder: takes an object of ids and added tokens "
                             f"({error})") from None
        for _, token in found:
            token.special = token.special or token.content in special
    else:
        older = read_object(path / ADDED)
        if not all(isinstance(index, int) for index in older.values()):
            raise ValueError(f"{path / ADDED}: takes an object of tokens and their ids")
        found = [(index, AddedToken(text, special=text in special, normalized=text not in special))
                 for text, index in older.items()]
    return sorted(found, key=lambda pair: pair[0])
