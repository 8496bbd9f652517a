"""Texts that are held to a language: regular expressions, choices, JSON Schema."""

from decodax.constraints.dfa import Dfa
from decodax.constraints.regex import regex
from decodax.constraints.schema import Unsupported, json_schema
from decodax.constraints.tokens import TokenDfa
from decodax.constraints.transform import Constrained, TokenTable

__all__ = ["Constrained", "Dfa", "TokenDfa", "TokenTable", "Unsupported", "json_schema", "regex"]
