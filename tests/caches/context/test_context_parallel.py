"""Where the positions of a divided cache lie, and which of keys and queries travel."""

import jax.numpy as jnp
import numpy as np
import pytest

from decodax.caches.context.context_parallel import SlotMap
from decodax.caches.context.ring import RingChoice


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("fixed", [0, 1, 13, 24, 37, 64])
def test_each_position_has_a_slot_of_its_own_and_parts_are_even(parts: int, fixed: int) -> None:
    layout = SlotMap(fixed=jnp.array([fixed], jnp.int32), parts=parts, piece=3)
    at = jnp.arange(64, dtype=jnp.int32)[None]
    part, slot = np.asarray(layout.part(at))[0], np.asarray(layout.slot(at))[0]
    assert len({*zip(part.tolist(), slot.tolist(), strict=True)}) == 64
    for end in range(64):       # no gaps behind the prompt, and after n tokens a device has n / N of them, or few more
        counts = np.bincount(part[:end], minlength=parts)
        if end >= fixed:
            assert all(sorted(slot[:end][part[:end] == i]) == list(range(n)) for i, n in enumerate(counts))
        assert counts.max() - counts.min() <= 2 * 3 + 1
    where = np.asarray(layout.position(jnp.asarray(part), jnp.asarray(slot)))[0]
    assert where.tolist() == list(range(64))
    assert part[fixed:].tolist() == [p % parts for p in range(fixed, 64)]      # in turn


def test_a_block_is_cut_into_twice_as_many_pieces_as_devices() -> None:
    layout = SlotMap(fixed=jnp.array([16], jnp.int32), parts=4, piece=2)
    assert layout.part(jnp.arange(16)[None])[0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 3, 3, 2, 2, 1, 1, 0, 0]


def cost(new: int, cached: int, parts: int, queries: int, heads: int, size: int,
         choice: RingChoice) -> tuple[float, float]:
    """Seconds that a ring keeps a device waiting, by counting bytes and operations of heads of width 1."""
    turns, total = parts - 1, new + cached
    work = 4 * queries * (new / parts) * (total / parts) / choice.flops
    keys = 2 * heads * total / parts * size / choice.bandwidth
    sent = queries * new / parts * size / choice.bandwidth
    return turns * max(keys - work, 0), turns * (max(sent - work, 0) + sent)


@pytest.mark.parametrize("heads", [1, 8, 16, 64])
@pytest.mark.parametrize("parts", [2, 8])
def test_the_form_is_the_one_that_waits_less(heads: int, parts: int) -> None:
    choice = RingChoice(flops=8e14, bandwidth=2.6e10)
    for new in (64, 1000, 10_000, 200_000):
        for cached in (0, 1000, 50_000, 1_000_000):
            kv, q = cost(new, cached, parts, 64, heads, 2, choice)
            taken = bool(choice.passes_kv(new, cached, parts, 64, heads, 2))
            if q - kv and not taken:
                # the paper counts that queries travel for free
                assert kv >= q - (parts - 1) * 64 * new / parts * 2 / choice.bandwidth
            if taken:
                assert kv <= q * (1 + 1e-6)
