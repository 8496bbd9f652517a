"""Configs that are registry entries."""

import pytest

from decodax import caches
from decodax.caches.configs import PaperConfig
from decodax.common.registry import CACHES
from tests.caches.small import BUTLER

CHECKED = [name for name, entry in CACHES.items()
           if isinstance(entry.make, type) and issubclass(entry.make, PaperConfig)
           and not entry.options.keys() & {"books", "butler", "net"}]


@pytest.mark.parametrize("name", CHECKED)
def test_a_config_that_is_built_directly_is_checked_as_one_by_name(name: str) -> None:
    make, options = CACHES[name].make, CACHES[name].options
    option = next(option for option in ("budget", "block_size", "group_size") if option in options)
    for build in (make, lambda **given: caches.make(name, **given)):
        with pytest.raises(ValueError, match=f"^{option}: got -1, takes a whole number from 1"):
            build(**{option: -1})
    assert not [option for option in options if option.startswith("_")]


def test_configs_with_weights_are_compared_by_identity() -> None:
    one, other = (caches.make("token-butler", butler=BUTLER) for _ in range(2))
    assert one == one and one != other
