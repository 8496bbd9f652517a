"""The tokenizer of RWKV in GGUF files: each token is the longest one with which the rest of the text begins.

Tokens are bytes, which files spell like a Python literal. Here they are spelled in the characters of a byte-level BPE,
and one regular expression, with a group for each common beginning, splits a text into the longest tokens.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from decodax.io.pieces import byte_of_char

WORLD = "rwkv-world"
"""Value of `tokenizer.chat_template` in files of RWKV, which names a template and does not hold it."""

TEMPLATE = """{%- for m in messages -%}
{%- if m.role == 'system' -%}{{ 'System: ' + m.content | trim + '\\n\\n' }}
{%- elif m.role == 'user' -%}{{ 'User: ' + m.content | trim + '\\n\\n' }}{% if loop.last %}{{ 'Assistant:' }}{% endif %}
{%- elif m.role == 'assistant' -%}{{ 'Assistant: ' + m.content | trim + '\\n\\n' }}
{%- endif -%}
{%- endfor -%}"""
"""The chat template that llama.cpp applies for `WORLD`."""

ESCAPE = re.compile(rb"\\(?:x([0-9a-f]{2})|(.))", re.DOTALL)


def spelled(token: str) -> str:
    r"""Returns the text of a token in the characters of a byte-level BPE.

    >>> spelled(r"\n he"), spelled(r"\xe8\xaa"), spelled(r"\'")
    ('ĊĠhe', 'èª', "'")
    """
    named = {b"t": b"\t", b"n": b"\n", b"r": b"\r"}
    own = ESCAPE.sub(lambda found: bytes([int(found[1], 16)]) if found[1] else named.get(found[2], found[2]),
                     token.encode())
    return "".join(map(_char_of_byte().__getitem__, own))


@functools.cache
def _char_of_byte() -> dict[int, str]:
    """Returns the character of each byte in GPT-2's byte alphabet."""
    return {byte: char for char, byte in byte_of_char().items()}


def longest_match(ids: dict[str, int], pieces: Iterable[str]) -> tokenizers.Tokenizer:
    """Returns a tokenizer that splits a text into the longest pieces, from its beginning on.

    Args:
        ids: the ids of tokens by their texts in the characters of a byte-level BPE.
        pieces: those that texts are split into.
    """
    made = tokenizers.Tokenizer(models.WordLevel(ids, ""))
    made.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        pre_tokenizers.Split(Regex(_pattern(pieces)), "isolated")])
    made.decoder = decoders.ByteLevel()
    return made


def _pattern(pieces: Iterable[str]) -> str:
    """Returns a regular expression that matches the longest piece at a place."""
    tree: dict[str, Any] = {}
    for piece in pieces:
        node = tree
        for char in piece:
            node = node.setdefault(char, {})
        node[""] = {}
    return _branches(tree)


def _branches(node: dict[str, Any]) -> str:
    """Returns a regular expression for what may follow at a node of the tree of pieces: the longest that is there."""
    ends = "".join(re.escape(char) for char, below in node.items() if char and list(below) == [""])
    parts = [re.escape(char) + _branches(below) for char, below in node.items() if char and list(below) != [""]]
    parts += [f"[{ends}]"] if ends else []
    whole = f"(?:{'|'.join(parts)})" if parts else ""
    return f"{whole}?" if whole and "" in node else whole
