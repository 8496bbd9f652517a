"""500 malformed calls from a seed, and what may come of each: a result, or an error that names the argument or file.

A value is drawn from those that callers do give by mistake: of the wrong type, out of range, too many, nested, not
finite, endless. For each the generator knows whether it is legal, and what a result then has to hold: a float that is
cut to a whole number, or an argument that is dropped, is no result.
"""

import random

from tests.malformed.case import FIXED, IDS, Case, World, rows
from tests.malformed.files import command_line, command_lines, files, stripped
from tests.malformed.numbers import numbers
from tests.malformed.others import others
from tests.malformed.prompts import prompts
from tests.malformed.tokens import tokens
from tests.malformed.wholes import wholes

__all__ = ["FIXED", "IDS", "Case", "World", "cases", "command_line", "rows", "stripped"]


def cases(seed: int = 0, count: int = 500) -> list[Case]:
    """The cases of a seed."""
    rng = random.Random(seed)
    shares = ((prompts, 0.22), (numbers, 0.22), (wholes, 0.18), (tokens, 0.14), (others, 0.12), (files, 0.08),
              (command_lines, 0.04))
    made = [make(rng) for make, share in shares for _ in range(round(share * count))]
    rng.shuffle(made)
    return made
