"""Converts prompts in all accepted forms to token ids."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any

import numpy as np

from decodax.common.arguments import host, is_whole, shown, wrong
from decodax.io.appended import appended
from decodax.io.messages import ChatTemplateError

if TYPE_CHECKING:
    from decodax.io.load import LM

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""A text, token ids (a list or an array), a chat (messages with `role` and `content`), or the output of a transformers
tokenizer: `input_ids` and `attention_mask`."""

TAKES = "a text, token ids, a chat (messages with role and content), or input_ids with an attention_mask"

MOST = 1_000_000
"""Maximum number of entries of an iterator; a longer one is taken to be endless."""


def read_prompts(lm: LM, prompts: Any, name: str = "prompts") -> list[list[int]]:
    """Returns the token ids of one prompt or several; none of them is empty.

    A list of numbers is one prompt, and so is a one-dimensional array; a two-dimensional array has a prompt in each
    row, without padding. A list of messages is one chat. Ids that an `attention_mask` masks on the left or right are
    padding. An empty text, an empty chat and an empty list of ids become the model's BOS token.

    Args:
        lm: the model.
        prompts: the prompts.
        name: name of the argument, for errors.

    Raises:
        ValueError: an unknown form, a token id outside the vocabulary, a text with characters that the tokenizer cannot
            represent, or an empty prompt if the model has no BOS token; the message names the prompt.
        TypeError: an entry is not a prompt.
    """
    return [read_prompt(lm, row, where) for row, where in prompt_rows(prompts, name)]


def read_prompt(lm: LM, prompt: Any, name: str) -> list[int]:
    """Returns the token ids of one prompt, at least one; an empty prompt becomes the model's BOS token.

    Args:
        lm: the model.
        prompt: a text, a chat, token ids, or the output of a tokenizer with one row of `input_ids`.
        name: name of the argument, for errors.

    Raises:
        ValueError: several rows, an empty prompt for a model without BOS token, or a token that is not in the
            vocabulary.
    """
    if isinstance(prompt, Mapping) and "input_ids" in prompt:
        rows = _encoding(prompt, name)
        if len(rows) != 1:
            raise ValueError(f"{name}: got {len(rows)} rows of input_ids, takes one")
        ids = _ids(rows[0], name)
    elif isinstance(prompt, str) or _is_chat(prompt):
        ids = spell(lm, prompt, name)
    else:
        ids = _ids(prompt, name)
    origin = "got"
    if not ids and lm.bos is not None:
        ids, origin = [lm.bos], "is empty, and the model's BOS token is"
        if not is_whole(lm.bos):
            raise ValueError(f"{name}: {origin} {shown(lm.bos)}, which is not a token id")
    if not ids:
        raise ValueError(f"{name}: is empty, and the model has no BOS token to begin with; takes at least one token")
    return _known(lm, ids, f"{name}: {origin}")


def spell(lm: LM, text: str | Sequence[Mapping[str, Any]], name: str, special: bool = True,
          after: Sequence[int] = ()) -> list[int]:
    """Returns the token ids of a text or a chat; an empty list for an empty text.

    Args:
        lm: the model.
        text: the text or the messages.
        name: name of the argument, for errors.
        special: True lets the tokenizer add BOS and other special tokens to a text. It has no effect on a chat, whose
            template writes them, nor on a text for the decoder of an encoder-decoder, which gets its start token alone.
        after: tokens that the text continues (`decodax.io.appended`); no special tokens are added then.
    """
    if lm.tokenizer is None:
        raise ValueError(f"{name}: got text, but this model has no tokenizer; takes token ids")
    try:
        if isinstance(text, str) and lm.start is not None and not after:
            ids = lm.tokenizer.encode(text, False)
            ids = ids if ids[:1] == [lm.start] else [lm.start, *ids]
        elif isinstance(text, str):
            ids = appended(lm.tokenizer, after, text) if after else lm.tokenizer.encode(text, special)
        else:
            ids = lm.tokenizer.encode_chat(text)
    except ChatTemplateError as error:
        raise ChatTemplateError(f"{name}: {error}") from error
    except (ValueError, TypeError) as error:
        raise (TypeError if isinstance(error, TypeError) else ValueError)(f"{name}: {error}") from error
    return _known(lm, ids, f"{name}: the tokenizer gives")


def _known(lm: LM, ids: list[int], got: str) -> list[int]:
    if bad := [t for t in ids if not 0 <= t < lm.vocab_size]:
        raise ValueError(f"{got} token id {bad[0]}, which is outside the model's vocabulary of {lm.vocab_size}")
    return ids


def collected(values: Any, name: str, takes: str) -> list[Any]:
    """Returns the entries of a list, a tuple, an iterator or another collection as a list.

    Raises:
        TypeError: a text, a mapping, a set, or something that is not a collection.
        ValueError: an endless iterator.
    """
    if isinstance(values, (str, bytes, bytearray, memoryview, Mapping, set, frozenset)) \
            or not isinstance(values, Iterable):
        raise TypeError(f"{name}: got {shown(values)}, takes {takes}")
    if isinstance(values, Sequence):
        return list(values)
    entries = list(itertools.islice(values, MOST + 1))
    if len(entries) > MOST:
        raise ValueError(f"{name}: got an iterator of more than {MOST:,} entries, takes at most that many")
    return entries


def prompt_rows(prompts: Any, name: str = "prompts") -> list[tuple[Any, str]]:
    """Returns a list of pairs, each prompt and its name for errors, such as "prompts[0]"."""
    if isinstance(prompts, str):
        return [(prompts, f"{name}[0]")]
    if isinstance(prompts, (bytes, bytearray, memoryview)):
        raise TypeError(f"{name}: got {shown(prompts)}, takes text; decode the bytes first")
    if isinstance(prompts, Mapping):
        if "input_ids" not in prompts:
            raise wrong(name, dict(prompts), f"{TAKES}; a chat is a list of messages")
        rows: list[Any] = _encoding(prompts, name)
    elif hasattr(prompts, "ndim"):
        array = host(name, prompts, TAKES)
        texts = array.dtype.kind in "UOT" and array.ndim == 1
        rows = array.tolist() if texts else _of_array(array, name, "iu")
    else:
        if isinstance(prompts, range) and len(prompts) > MOST:
            raise wrong(name, prompts, TAKES)
        rows = collected(prompts, name, f"{TAKES}, or a list of them")
        first = rows[0] if rows else None
        if _is_number(first) or (isinstance(first, Mapping) and "input_ids" not in first):
            rows = [rows]       # the ids of one prompt, or the messages of one chat
    if not rows:
        raise ValueError(f"{name}: got none, takes at least one")
    return [(row, f"{name}[{i}]") for i, row in enumerate(rows)]


def _of_array(array: np.ndarray, name: str, kinds: str) -> list[Any]:
    """Returns the rows of an array of token ids as lists; a one-dimensional array is one row."""
    if array.ndim not in (1, 2):
        raise ValueError(f"{name}: got an array of shape {array.shape}, takes one or two dimensions of token ids")
    if not array.size:
        return [[]] * len(array) if array.ndim == 2 else []
    if array.dtype.kind not in kinds:
        raise ValueError(f"{name}: got an array of {array.dtype}, takes whole numbers")
    return [array] if array.ndim == 1 else list(array)


def _encoding(given: Mapping[str, Any], name: str) -> list[Any]:
    """Returns the rows of `input_ids` of a tokenizer's output, without padding."""
    # token_type_ids tell two texts apart, for models with such types; there are none here.
    if other := sorted(set(map(str, given)) - {"input_ids", "attention_mask", "token_type_ids"}):
        raise ValueError(f"{name}: got {other[0]} beside input_ids, takes input_ids and attention_mask")
    ids, mask = _nested(given["input_ids"], f"{name}['input_ids']"), given.get("attention_mask")
    if mask is None:
        return ids
    masks = _nested(mask, f"{name}['attention_mask']", "biuf")
    if [len(row) for row in masks] != [len(row) for row in ids]:
        raise ValueError(f"{name}['attention_mask']: got another shape than that of input_ids")
    out = []
    for i, (row, seen) in enumerate(zip(ids, masks, strict=True)):
        where = f"{name}['attention_mask'][{i}]"
        values = host(where, list(seen), "0 and 1")
        if values.dtype.kind not in "iubf" or not np.isin(values, (0, 1)).all():
            raise wrong(where, seen, "0 and 1")
        places = np.flatnonzero(values)
        if len(places) and places[-1] - places[0] + 1 != len(places):
            raise ValueError(f"{where}: got zeros between ones, takes padding on the left or on the right only")
        out.append(row[places[0]:places[-1] + 1] if len(places) else [])
    return out


def _nested(value: Any, name: str, kinds: str = "iu") -> list[Any]:
    """Returns a list of rows of token ids, from one row or several."""
    if hasattr(value, "ndim"):
        return _of_array(host(name, value, "token ids"), name, kinds)
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Sequence):
        raise wrong(name, value, "token ids, or a list of them for each prompt")
    if not value or _is_number(value[0]):
        return [list(value)]
    if not all(isinstance(row, Sized) and not isinstance(row, (str, bytes, Mapping)) for row in value):
        raise wrong(name, value, "token ids, or a list of them for each prompt")
    return list(value)


def _is_number(value: Any) -> bool:
    """True for a single number; a list that contains one is a list of token ids."""
    if isinstance(value, (str, bytes)):     # NumPy's too
        return False
    return isinstance(value, (int, float, complex)) or getattr(value, "ndim", None) == 0


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _ids(values: Any, name: str) -> list[int]:
    """Returns token ids from a list or a one-dimensional array."""
    if isinstance(values, (str, bytes, bytearray, memoryview, Mapping, set, frozenset)) \
            or not (isinstance(values, Sequence) or hasattr(values, "ndim")):
        raise wrong(name, values, TAKES)
    if isinstance(values, range) and len(values) > 1 << 24:
        raise wrong(name, values, TAKES)
    takes = f"{TAKES}; ids are whole numbers"
    array = host(name, values, takes)
    if array.ndim == 1 and not array.size:
        return []
    truths = isinstance(values, (list, tuple)) and any(isinstance(v, bool) for v in values)
    if array.ndim != 1 or array.dtype.kind not in "iu" or truths:
        raise wrong(name, values, takes)
    return array.tolist()
