"""Names of the family and of what searches need."""

from decodax.common.registry import Needs

SEARCH = "search"
TARGET: Needs = "a model"
