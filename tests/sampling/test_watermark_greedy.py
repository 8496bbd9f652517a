"""A watermark marks greedy rows too."""

import jax.numpy as jnp
import numpy as np
import pytest

from decodax.algorithms.plain import Autoregressive
from decodax.core import drivers
from decodax.core.types import Params
from decodax.sampling import build
from tests.laws.toy import Toy


@pytest.mark.wide
def test_greedy_rows_are_marked_as_sampled_ones_are():
    toy = Toy(spread=0.2)
    config = dict(greenlist_ratio=0.5, bias=8.0)

    def made(**watermark):
        chain = build(2, temperature=[0.0, 0.7], vocab_size=16, **watermark)
        params = Params(toy.init_params())
        tokens = jnp.ones((2, 64), jnp.int32)
        s = drivers.begin(Autoregressive(), toy, params, chain, tokens, np.int32([2, 2]), size=64, max_new=np.int32(20))
        s = drivers.prefill(Autoregressive(), toy, params, s, width=16)
        return np.asarray(drivers.advance(Autoregressive(), toy, params, chain, s, jnp.int32(50)).tokens)

    plain, marked = made(), made(watermarking_config=config)
    assert (plain[0] != marked[0]).any() and (plain[1] != marked[1]).any()
