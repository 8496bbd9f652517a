"""The gated delta rule on a mesh. It imports no torch, beside which collectives on CPU crash."""

import jax
import numpy as np
import pytest

import decodax as dx
from decodax.io.load import LM
from decodax.models import Transformer
from decodax.models.families import read_config
from tests.caches.small import PROMPTS
from tests.meshes import mesh_of, spread
from tests.models.recurrent.test_gated_delta import ENTRIES

pytestmark = pytest.mark.mesh


@pytest.mark.wide
@pytest.mark.parametrize("family", ["qwen3_next", "olmo_hybrid"])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_the_same_tokens(family: str, kind: str) -> None:
    """Rows over one axis and heads over the other, with drafts."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    model = Transformer(read_config({"model_type": family, **ENTRIES, **heads}))
    params = jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, model.init_params(jax.random.key(0)))
    alone = LM(model=model, params=params, vocab_size=16)
    parted = spread(alone, mesh_of(kind, data=4, model=2))
    delta = parted.params["layers"]["0"]["attn"]
    assert [delta[name]["kernel"].sharding.spec[1] for name in ("in_q", "in_v", "in_a")] == ["model"] * 3
    prompts = [*PROMPTS, PROMPTS[0][:30]]
    want, got = (dx.generate(each, prompts, max_new_tokens=16, algorithm="prompt-lookup").tokens
                 for each in (alone, parted))
    np.testing.assert_array_equal(got, want)
