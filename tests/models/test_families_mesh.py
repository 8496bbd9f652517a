"""Every family on a mesh of 8 devices: logits, and tokens with drafts and without, are those of one device.

A dimension that the mesh does not divide is replicated: most cases have 2 key/value heads for a model axis of 4, and
some an odd number of heads, experts or channels.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.io.load import LM
from decodax.io.saving import save_model
from decodax.models import Transformer
from decodax.models.diffusion import read_diffusion
from decodax.models.families import read_config
from tests.matrix import often
from tests.meshes import mesh_of, spread
from tests.models.tiny import CASES, COMMON, GEMMA4
from tests.models.tiny_diffusion import CASES as DIFFUSION

pytestmark = pytest.mark.mesh

WIDE = ["bloom-six-heads", "mimo-v2-flash"]
PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8, 5], [9, 10, 11], [1, 2], [3, 4, 5, 6, 7]]
TEXT = np.random.default_rng(0).integers(3, 96, (4, 22)).astype(np.int32)      # longer than the windows of the cases


def drawn(config: dict[str, Any]) -> tuple[Transformer, Any]:
    """A model with weights with which a wrong norm, scale or share shows in the logits."""
    model, draw = Transformer(read_config(config)), np.random.default_rng(0)
    return model, jax.tree.map(lambda x: jnp.asarray(draw.normal(x.ndim == 1, 0.2, x.shape), jnp.float32),
                               model.abstract_params())


@pytest.mark.wide
@pytest.mark.parametrize("family", often(WIDE, CASES))
def test_eight_devices_give_the_logits_and_tokens_of_one(family: str, tmp_path: Path) -> None:
    kind, options, context = CASES[family]
    # 96 is divided over the axis, the 97 of the cases are not
    config = {"model_type": kind, **COMMON, **options, "vocab_size": 96}
    save_model(tmp_path, *drawn(config), config=config)
    mesh = mesh_of(data=2, model=4)
    alone, parted = (dx.load(tmp_path, context=context, mesh=each) for each in (None, mesh))
    leaves = jax.tree.leaves(parted.params)
    cut = [x.size for x in leaves if x.addressable_shards[0].data.size * 4 == x.size]
    assert sum(cut) > sum(x.size for x in leaves) / 2

    forward = jax.jit(alone.model.forward)
    want = forward(alone.params, TEXT)
    with jax.set_mesh(mesh):
        got = forward(parted.params, jax.device_put(TEXT, jax.NamedSharding(mesh, jax.P("data"))))
    np.testing.assert_allclose(got, want, atol=1e-4)
    want = dx.generate(alone, PROMPTS, max_new_tokens=9, eos_token_id=[]).tokens
    for algorithm in (None, "prompt-lookup:length=3"):
        made = dx.generate(parted, PROMPTS, max_new_tokens=9, algorithm=algorithm, eos_token_id=[])
        np.testing.assert_array_equal(made.tokens, want)


DIFFUSING = {**{name: entries for name, (entries, _) in DIFFUSION.items()}, "diffusion-gemma": {
    "model_type": "diffusion_gemma", "canvas_length": 8, "text_config": {
        **COMMON, **GEMMA4, "num_global_key_value_heads": 1, "num_experts": 4, "top_k_experts": 2,
        "moe_intermediate_size": 24}}}


@pytest.mark.wide
@pytest.mark.parametrize("family", often(["llada-moe"], DIFFUSING))
def test_eight_devices_fill_the_masks_as_one_does(family: str) -> None:
    config = DIFFUSING[family]
    model, params = drawn(config)
    vocabulary, diffusion = model.config.vocab, read_diffusion(config)
    alone = LM(model=model, params=params, vocab_size=vocabulary, diffusion=diffusion)
    parted = spread(alone, mesh_of(data=2, model=4))
    # DiffusionGemma decides a whole canvas again in each step, from its own last prediction. With random weights that
    # is chaotic: weights that differ in the last bits give another text after 16 steps on one device, too.
    algorithm = "diffusion-gemma:steps=4" if family == "diffusion-gemma" else None
    want, got = (dx.generate(lm, PROMPTS, max_new_tokens=8, algorithm=algorithm, eos_token_id=[]).tokens
                 for lm in (alone, parted))
    np.testing.assert_array_equal(got, want)
