"""Texts that are held to a language: regular expressions, choices, JSON Schema, grammars, tools, phrases."""

from decodax.constraints.dfa import Dfa
from decodax.constraints.ebnf import ebnf
from decodax.constraints.hosted import Hosted, Matcher
from decodax.constraints.phrases import after, phrases, tools
from decodax.constraints.regex import regex
from decodax.constraints.schema import Unsupported, json_schema
from decodax.constraints.tokens import TokenDfa
from decodax.constraints.transform import Constrained, TokenTable

__all__ = ["Constrained", "Dfa", "Hosted", "Matcher", "TokenDfa", "TokenTable", "Unsupported", "after", "ebnf",
           "json_schema", "phrases", "regex", "tools"]
