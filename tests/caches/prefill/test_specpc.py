"""SpecPC: prompts that are cut to what a draft model attends to."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.caches import make
from decodax.caches.evict.drafted import DraftedConfig
from decodax.caches.prefill.specpc import SpecPCConfig
from tests.caches.evict.pairs import LARGE, SMALLER
from tests.caches.evict.pressed import MODEL, TEXTS


@pytest.mark.wide
@pytest.mark.parametrize("case", ["a", "b", "c"])
def test_prompts_are_cut_to_the_tokens_of_the_authors(case: str) -> None:
    """Of SpecPC; and what follows is what follows the shorter prompts."""
    wanted = json.loads((Path(__file__).parents[1] / "expected" / "specpc.json").read_text())["cases"][case]
    prompts = [[*text, 7] for text in TEXTS]
    kind = make("specpc", draft=SMALLER, budget=64, window_size=8, kernel_size=8, pooling="mean", neighbours=4,
                **wanted["options"])
    assert isinstance(kind, DraftedConfig) and isinstance(kind.kind, SpecPCConfig)
    ids = np.zeros((2, 320), np.int32)
    for row, prompt in enumerate(prompts):
        ids[row, :len(prompt)] = prompt
    length = jnp.array([len(prompt) for prompt in prompts])
    paid = jax.jit(lambda params: kind.kind.attention(MODEL, params, jnp.asarray(ids), length))(SMALLER.params)
    shorter = []
    for row, prompt in enumerate(prompts):
        stays = np.asarray(kind.kind.chosen(paid[row], length[row]))[:len(prompt)]
        bits = np.unpackbits(np.frombuffer(bytes.fromhex(wanted["kept"][row]), np.uint8))[:len(prompt)]
        np.testing.assert_array_equal(stays, bits.astype(bool))
        shorter.append(np.asarray(prompt)[stays].tolist())
    if case == "a":
        one, other = (dx.generate(LARGE, given, cache=cache, max_new_tokens=8, logprobs=0)
                      for given, cache in ((prompts, kind), (shorter, None)))
        assert one.tokens.tolist() == other.tokens.tolist()
        np.testing.assert_allclose(one.logprobs.raw, other.logprobs.raw, atol=1e-3)
