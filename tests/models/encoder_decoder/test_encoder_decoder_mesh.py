"""Encoder-decoders on 8 devices. It imports no torch, beside which collectives on CPU crash."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import decodax as dx
from decodax.core.window import causal
from decodax.models import EncoderAudio, EncoderText
from decodax.models.encoder_decoder.names import LOGITS_BIAS, sources
from decodax.models.encoder_decoder.reading import read_encoder_decoder
from tests.matrix import often
from tests.meshes import mesh_of

pytestmark = pytest.mark.mesh

T5 = dict(vocab_size=64, d_model=24, d_kv=8, d_ff=32, num_layers=2, num_decoder_layers=2, num_heads=4,
          relative_attention_num_buckets=8, relative_attention_max_distance=12, decoder_start_token_id=0)
BART = dict(vocab_size=64, d_model=24, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=6, encoder_ffn_dim=32, decoder_ffn_dim=28, max_position_embeddings=48,
            pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2)
CASES: dict[str, dict[str, Any]] = {
    "t5": {**T5, "feed_forward_proj": "relu"}, "mt5": {**T5, "feed_forward_proj": "gated-gelu"}, "bart": BART,
    "m2m_100": BART, "marian": {**BART, "share_encoder_decoder_embeddings": False, "decoder_vocab_size": 56},
    "whisper": {**BART, "num_mel_bins": 16, "max_source_positions": 30, "max_target_positions": 40}}


def saved(family: str, directory: Path) -> None:
    """Writes a model with random weights as its family's files have them."""
    entries, draw = {"model_type": family, **CASES[family]}, np.random.default_rng(0)
    present = ("lm_head.weight",) if family == "mt5" else (LOGITS_BIAS,) if family in ("bart", "marian") else ()
    tensors = {}
    for path, source in sources(read_encoder_decoder(entries, present), present).items():
        one = path.endswith("scale")
        size = 0.1 if path.endswith("bias") else 1.0 if "embed" in path else source.full[-1] ** -0.5
        tensors[source.tensors[0]] = (one + (0.1 if one else size) * draw.normal(size=source.full)).astype(np.float32)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(entries))


def inputs(family: str) -> Any:
    draw = np.random.default_rng(1)
    if family == "whisper":
        return EncoderAudio(features=jnp.asarray(draw.normal(size=(4, 16, 60)), jnp.float32))
    return EncoderText(tokens=jnp.asarray(draw.integers(3, 50, (4, 12)), jnp.int32), length=jnp.array([12, 5, 9, 2]))


@pytest.mark.wide
@pytest.mark.parametrize("family", often(["t5", "bart", "whisper"], CASES))
@pytest.mark.parametrize("kind", often(["Auto"], ["Auto", "Explicit"]))
def test_eight_devices_give_the_tokens_of_one(family: str, kind: str, tmp_path: Path) -> None:
    """Decoding with drafts gives the tokens of one device, and weights are divided over the mesh."""
    saved(family, tmp_path)
    mesh = mesh_of(kind, data=4, model=2)
    alone, parted = dx.load(tmp_path), dx.load(tmp_path, mesh=mesh)
    layer = parted.params["decoder"]["layers"]["1"]
    for array in (layer["attn"]["q"]["kernel"], layer["cross"]["v"]["kernel"], layer["cross"]["o"]["kernel"],
                  layer["mlp"]["down"]["kernel"], parted.params["embed"]):
        assert array.addressable_shards[0].data.size * 2 == array.size
    # Each token once: tiny random models repeat themselves.
    options: dict[str, Any] = dict(inputs=inputs(family), max_new_tokens=9, eos_token_id=[], no_repeat_ngram_size=1)
    want = dx.generate(alone, [[2, 3]] * 4, **options).tokens
    got = dx.generate(parted, [[2, 3]] * 4, algorithm="prompt-lookup:length=3", **options).tokens
    assert len({tuple(row) for row in want}) > 1
    np.testing.assert_array_equal(got, want)


@pytest.mark.wide
def test_beams_take_the_encoder_along(tmp_path: Path) -> None:
    saved("bart", tmp_path)
    mesh = mesh_of(data=4, model=2)
    want, got = (dx.generate(dx.load(tmp_path, mesh=each), [[2, 3]] * 4, algorithm="beam-search:width=3",
                             inputs=inputs("bart"), max_new_tokens=9, eos_token_id=[]).tokens for each in (None, mesh))
    np.testing.assert_array_equal(got, want)


@pytest.mark.wide
@pytest.mark.parametrize("family", often(["m2m_100"], CASES))
def test_logits_and_memory(family: str, tmp_path: Path) -> None:
    saved(family, tmp_path)
    mesh = mesh_of(data=4, model=2)
    alone, parted = dx.load(tmp_path), dx.load(tmp_path, mesh=mesh)
    text = jnp.asarray(np.random.default_rng(2).integers(3, 50, (4, 8)), jnp.int32)

    def run(params: Any, text: Any, given: Any) -> Any:
        cache = alone.model.init_cache(4, 16, params=params, inputs=given)
        return alone.model.apply(params, causal(text, cache.length), cache).logits(), cache.inputs

    want, _ = jax.jit(run)(alone.params, text, inputs(family))
    with jax.set_mesh(mesh):
        rows = jax.device_put((text, inputs(family)), jax.NamedSharding(mesh, jax.P("data")))
        got, memory = jax.jit(run)(parted.params, *rows)
    np.testing.assert_allclose(got, want, atol=2e-5, rtol=1e-5)
    for array in (*memory.keys, *memory.values):
        assert array.addressable_shards[0].data.size * 8 == array.size


def test_heads_that_a_mesh_does_not_divide_stay_whole(tmp_path: Path) -> None:
    saved("bart", tmp_path)
    entries = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**entries, "decoder_attention_heads": 3}))
    mesh = mesh_of(data=4, model=2)
    params = dx.load(tmp_path, mesh=mesh).params
    assert params["decoder"]["layers"]["0"]["attn"]["q"]["kernel"].sharding.is_fully_replicated
    assert not params["encoder"]["layers"]["0"]["attn"]["q"]["kernel"].sharding.is_fully_replicated
