"""Constraints of a text to a formal language, for `decodax.generate(..., constraint=...)`.

There are regular expressions, choices, JSON Schema, grammars, tool calls and phrases.

>>> from decodax import constraints
>>> constraints.regex("[ab]{3}").after("Answer: ").key[0]
'after'
"""

from decodax.common.names import directory
from decodax.common.registry import CONSTRAINTS
from decodax.constraints.dfa import Dfa
from decodax.constraints.hosted import Hosted, Matcher
from decodax.constraints.keywords import Unsupported
from decodax.constraints.languages import Constraint, choices, grammar, json_schema, phrases, regex, tools
from decodax.constraints.tokens import TokenDfa
from decodax.constraints.transform import Constrained, TokenTable

__all__ = ["Constrained", "Constraint", "Dfa", "Hosted", "Matcher", "TokenDfa", "TokenTable", "Unsupported", "choices",
           "find", "grammar", "json_schema", "make", "names", "parse", "phrases", "regex", "register", "tools"]

__dir__ = directory(__all__)

find, make, names, parse, register = (CONSTRAINTS.find, CONSTRAINTS.make, CONSTRAINTS.names, CONSTRAINTS.parse,
                                      CONSTRAINTS.register)
