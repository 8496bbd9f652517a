"""Configs that are registry entries."""

from __future__ import annotations

import pytest

from decodax import caches
from decodax.caches.configs import PaperConfig
from decodax.common.registry import CACHES
from tests.caches.test_policies import BUTLER


@pytest.mark.parametrize("name", [name for name in CACHES if isinstance(CACHES[name].make, type)
                                  and issubclass(CACHES[name].make, PaperConfig)])
def test_a_config_that_is_built_directly_is_checked_as_one_by_name(name: str) -> None:
    make = CACHES[name].make
    option = next(option for option in ("budget", "block_size", "group_size", "segment_size") if option in
                  CACHES[name].options)
    with pytest.raises(ValueError) as direct:
        make(**{option: -1})
    with pytest.raises(ValueError) as by_name:
        caches.make(name, **{option: -1})
    assert str(direct.value) == str(by_name.value)
    assert not [option for option in CACHES[name].options if option.startswith("_")]


def test_configs_with_weights_are_compared_by_identity() -> None:
    one, other = (caches.make("token-butler", butler=BUTLER) for _ in range(2))
    assert one == one and one != other
