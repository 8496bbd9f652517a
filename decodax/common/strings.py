"""Strings that describe an object, `NAME[:OPTION=VALUE,...]`, as in the command line and config files.

The annotation of an option determines how its value is parsed: as a number, a text without quotes, True, False or None
in any case, or a tuple in parentheses. The first value needs no name if its option has to be given (`regex:[0-9]+`).
"""

from __future__ import annotations

import ast
import difflib
import re
import types
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from decodax.common.options import InFile, Option

WORDS = {"true": True, "yes": True, "false": False, "no": False}
"""Words for True and False, in any case."""

ELSEWHERE = {"num_beams": "width", "top_k": "k", "num_assistant_tokens": "length", "num_speculative_tokens": "length",
             "prompt_lookup_num_tokens": "length", "num_draft_tokens": "length", "max_capacity_prompt": "budget"}
"""Options by the names that callers know from transformers, vLLM and the code of papers."""

NAMED = re.compile(r"\s*([A-Za-z_]\w*)\s*=(?!=)")
"""Beginning of a part that names its option."""

FILE = re.compile(r"[\w./\\~+-]+\.[A-Za-z]\w*")
"""A text that looks like the name of a file."""


def listed(options: Mapping[str, Option]) -> str:
    """Returns the options with their defaults as one text, for errors."""
    said = lambda default: getattr(default, "__name__", None) or repr(default)
    return ", ".join(f"{k}={said(v.default)}" if v.optional else k for k, v in options.items()) or "none"


def unknown_option(name: str, option: str, options: Mapping[str, Option], slot: str = "") -> str:
    """Returns the message about an option that an entry does not take: it names the entry, its options and similar
    ones.

    Args:
        name: name of the entry.
        option: the unknown option.
        options: options of the entry.
        slot: argument of `decodax.generate` that takes the entry.
    """
    close = _close(option, options)
    meant = f"; did you mean {' or '.join(close)}?" if close else ""
    return f"{slot}{': ' * bool(slot)}{name!r} takes no option {option!r}; takes {listed(options)}{meant}"


def near(name: str, known: Collection[str]) -> str:
    """Returns the part of a message about an unknown name that lists the similar names in `known`, or all of them."""
    name = str(name)
    close = difflib.get_close_matches(name, known, n=4, cutoff=0.5)
    close += [n for n in known if name.lower() in n and n not in close]
    return f"near ones: {', '.join(close)}" if close else f"takes one of {', '.join(known)}"


def parse_options(text: str, known: Mapping[str, Option], slot: str = "") -> dict[str, Any]:
    """Returns the options of `NAME[:OPTION=VALUE,...]`. A text needs no quotes.

    Args:
        text: the string.
        known: options of the entry.
        slot: argument of `decodax.generate` that takes the entry, for errors.

    >>> parse_options("magicdec:budget=512,keep=sink-window", {"budget": Option(0), "keep": Option("")})
    {'budget': 512, 'keep': 'sink-window'}
    >>> from typing import Annotated
    >>> from decodax.common.options import REQUIRED
    >>> parse_options("regex:[0-9]{1,3}", {"pattern": Option(REQUIRED, str)})
    {'pattern': '[0-9]{1,3}'}

    Raises:
        ValueError: an option that is not in `known` or that occurs twice, a value without a name, or a file that does
            not exist.
    """
    name, _, rest = text.partition(":")
    if not rest.strip():
        return {}
    first = next(iter(known), None)
    needed = first if first is not None and not known[first].optional else None
    # what has a single option takes the whole text, whatever commas it has
    parts = [rest] if len(known) == 1 and needed else split(rest)
    given: dict[str, Any] = {}
    for i, part in enumerate(parts):
        said = NAMED.match(part)
        option: str | None = said[1] if said else None
        if len(parts) == 1 and needed and option not in known and not _close(option or "", known):
            said, option = None, None       # "=" is part of the text
        if said is None and i == 0 and needed:
            option = needed
        if option is None:
            raise ValueError(f"{text}: takes NAME:OPTION=VALUE,...; got {part.strip()!r} without an option's name; "
                             f"takes {listed(known)}")
        if option not in known:
            raise ValueError(unknown_option(name, option, known, slot))
        if option in given:
            raise ValueError(f"{text}: got {option} twice")
        value = part[said.end():] if said else part
        given[option] = _value(option, value.strip(), known[option].hint)
    return given


def split(text: str) -> list[str]:
    """Splits a text at commas that are outside of brackets and quotes. An empty part at the end is dropped.

    >>> split("a=(1,2),b='x,y',c=don't")
    ['a=(1,2)', "b='x,y'", "c=don't"]
    """
    parts, begin, depth, quote, before = [], 0, 0, "", ","
    for i, c in enumerate(text):
        if quote:
            quote = "" if c == quote and text[i - 1] != "\\" else quote
        elif c in "'\"" and before in ",=([{:":      # an apostrophe within a text is no quote
            quote = c
        elif c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
        elif c == "," and not depth:
            parts.append(text[begin:i])
            begin = i + 1
        before = before if c.isspace() else c
    return [*parts, text[begin:]] if text[begin:].strip() else parts


def _value(name: str, text: str, hint: Any) -> Any:
    """Parses the value of an option by its annotation. A list, such as one of a single item, needs no parentheses."""
    kinds = _alternatives(hint)
    if text[:1] in ("'", '"') and isinstance(quoted := _literal(text), str):
        return quoted
    if text in (choices := [part for kind in kinds if get_origin(kind) is Literal for part in get_args(kind)]):
        return text
    word = text.lower()
    unsaid = not kinds or Any in kinds
    if word == "none" and (unsaid or type(None) in kinds):
        return None
    if word in WORDS and (bool in kinds or (unsaid and word in ("true", "false"))):
        return WORDS[word]
    if any(isinstance(part, InFile) for part in get_args(hint)[1:]):
        return _content(name, text)
    lists = [kind for kind in kinds if kind in (tuple, list) or get_origin(kind) in (tuple, list, Sequence)]
    plain = [kind for kind in kinds if kind not in lists and kind is not type(None)]
    enclosed = len(text) > 1 and text[0] + text[-1] in ("()", "[]") and len(split(text)) == 1
    if lists and (enclosed or not plain):
        inner = get_args(lists[0])
        each = inner[0] if inner and (len(inner) == 1 or inner[1:] == (...,)) else None
        parts = split(text[1:-1] if enclosed else text)
        hints = inner if each is None and len(inner) == len(parts) else [each] * len(parts)
        found = [_value(name, part.strip(), one) for part, one in zip(parts, hints, strict=True)]
        return found if text[0] == "[" else tuple(found)
    if plain and all(kind is str for kind in plain) and not choices:
        return text
    if (said := _literal(text)) is not None:
        return said
    if enclosed:
        found = [_value(name, part.strip(), None) for part in split(text[1:-1])]
        return found if text[0] == "[" else tuple(found)
    return text


def _literal(text: str) -> Any:
    """Returns the value of a Python literal; None if the text is not a literal."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _alternatives(hint: Any) -> list[Any]:
    """Returns the types of which a value may have one, without the metadata of `Annotated`."""
    if hint is None:
        return []
    if get_origin(hint) is Annotated:
        return _alternatives(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return [kind for part in get_args(hint) for kind in _alternatives(part)]
    return [hint]


def _content(name: str, text: str) -> str:
    """Returns the content of a file, or the text itself if it is not the name of a file.

    Raises:
        ValueError: the text looks like a file name and there is no such file, or the file is not UTF-8.
    """
    try:
        if (file := Path(text).expanduser()).is_file():
            return file.read_text(encoding="utf-8")
    except (OSError, ValueError, RuntimeError) as error:
        if FILE.fullmatch(text):
            raise ValueError(f"{name}: got {text!r}, takes a file of UTF-8 ({error})") from error
        return text
    if FILE.fullmatch(text):
        raise ValueError(f"{name}: got {text!r}, and there is no such file")
    return text


def _close(name: str, known: Collection[str]) -> list[str]:
    if (meant := ELSEWHERE.get(name)) in known:
        return [str(meant)]
    found = difflib.get_close_matches(name, known, n=3, cutoff=0.55)
    shares_word = lambda option: len(option) > 2 and (option in name.split("_") or name in option.split("_"))
    return found + [option for option in known if option not in found and shares_word(option)]
