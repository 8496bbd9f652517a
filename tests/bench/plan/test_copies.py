"""A call of many rounds on a TPU copies neither caches, whatever the width of their entries, nor experts."""

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.bench.plan import SLICES, plan
from decodax.bench.plan.front import abstract
from decodax.bench.plan.presets import PRESETS
from decodax.bench.report import copies, parse
from decodax.io import row_order
from decodax.models import Transformer
from decodax.models.families import read_config
from tests.matrix import often
from tests.small_models import random_lm

compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None or jax.__version_info__ < (0, 11),
    reason="takes libtpu (the extra tpu-aot), and JAX 0.10 cannot read these programs of it")

SMALL = {"vocab_size": 4096, "hidden_size": 1024, "intermediate_size": 1024, "n_routed_experts": 8,
         "num_local_experts": 8, "moe_intermediate_size": 256}


def compiled(name: str, cache: Any = None, layers: int = 1, **more: Any) -> Any:
    """A round of the first layers of a preset, smaller in all but the widths of entries."""
    where, mesh = SLICES[name]
    lm = abstract({**PRESETS[name], **SMALL, "num_hidden_layers": layers, **more})
    return plan(lm, where, mesh=[mesh], batch=16, capacity=2048, cache=cache, compile=True)[0]


@compiler
@pytest.mark.wide
@pytest.mark.parametrize(("name", "width", "paged"), [
    ("glm-4.7-flash", 640, False), ("glm-4.7-flash", 640, True), ("mimo-v2-flash", 384, False)])
def test_caches_with_partial_tiles_are_not_copied(name: str, width: int, paged: bool) -> None:
    own = {"first_k_dense_replace": 0} if name == "glm-4.7-flash" else {}
    p = compiled(name, dx.caches.make("paged", pages=256, page=128) if paged else None, **own)
    assert p.compiled is not None and p.compiled.fits
    rows = 16 // p.mesh[0]
    heads = 4 if name == "mimo-v2-flash" else 1         # as many on each device: 8 devices do not divide them
    elements = heads * width * (256 * 128 if paged else rows * 2048)
    assert f",{width}]" in p.compiled.text and not copies(parse(p.compiled.text), elements)
    assert p.compiled.temporaries < 0.25 * p.counts.cache


@compiler
@pytest.mark.wide
def test_128_experts_are_not_copied() -> None:
    p = compiled("gpt-oss-120b", hidden_size=2880, intermediate_size=2880, num_local_experts=128)
    assert p.compiled is not None and p.compiled.fits
    program = parse(p.compiled.text)
    for elements in (128 * 2880 * 360, 128 * 2880, 4096 // 8 * 2880):
        assert not copies(program, elements)
    assert p.compiled.temporaries < 0.05 * p.counts.weights and p.padded < 1.03


SIZES = {"vocab_size": 61, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False}
MIXTURES = {
    "gpt_oss": ("mlp", {"head_dim": 8, "num_experts_per_tok": 2, "num_local_experts": 128, "sliding_window": 8}),
    "longcat_flash": ("shortcut", {
        "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 8, "n_routed_experts": 128, "zero_expert_num": 3, "moe_topk": 4, "expert_ffn_hidden_size": 20})}


@pytest.mark.wide
@pytest.mark.parametrize("family", often(["gpt_oss"], MIXTURES))
def test_weights_by_row_are_the_same(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU, too, takes arrays in another order of axes."""
    part, own = MIXTURES[family]
    config = read_config({"model_type": family, **SIZES, **own})
    lm = random_lm(Transformer(config))
    params = jax.tree.map(lambda x: jax.device_put(x, jax.devices()[0]), lm.params)
    monkeypatch.setattr(row_order, "_on_tpus", lambda sharding: True)
    placed = row_order.by_row(config, params)
    gate = placed["layers"]["0"][part]["gate"]["kernel"]
    assert gate.shape == (128, 24, 20) and gate.format.layout.major_to_minor == row_order.row_order(gate.shape)
    jax.tree.map(np.testing.assert_array_equal, placed, lm.params)
    tokens = jnp.asarray([[3, 5, 7, 9]])
    np.testing.assert_array_equal(*(jax.jit(lm.model.forward)(p, tokens) for p in (placed, lm.params)))
