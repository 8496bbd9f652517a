"""Packed weights: what a format keeps of a kernel, products with it, and models loaded in it."""

import dataclasses
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import decodax as dx
from decodax.algorithms.plain import Autoregressive
from decodax.core import drivers
from decodax.core.types import Params
from decodax.core.window import causal
from decodax.io.checkpoint import load_encoder_decoder, load_model
from decodax.models import Transformer, formats, llama
from decodax.models.config import NormConfig
from decodax.models.formats import Float8, Int4, Scaled, pack
from decodax.models.formats.integers import Integers, nibbles
from decodax.models.packed import Packed, multiply
from decodax.sampling import build
from tests.extending.pages import DOCS, run_file
from tests.matrix import often
from tests.models.formats.compiled_packed import PUBLISHED
from tests.models.tiny import saved

FORMATS = {name: one for name, one in formats.FORMATS.items() if one.statistic is None}

STEPS = {"int8": 1 / 127, "int4": 1 / 7, "fp8": 2**-3, "bfloat16": 2**-7, "float16": 2**-10, "float32": 1e-9}
"""Formats that round weights to the nearest code and leave activations as they are: the distance of two neighbouring
codes, over the largest weight that has the same scale."""


def kernel(K: int, N: int, *experts: int) -> jax.Array:
    return jax.random.normal(jax.random.key(K + N), (*experts, K, N))


def whole(packed: Packed) -> np.ndarray:
    return np.asarray(packed.values(jnp.float32), np.float64)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("K", [30, 33, 256])
def test_a_weight_is_rounded_to_the_nearest_code(name: str, K: int) -> None:
    w = kernel(K, 7)
    error = np.abs(whole(FORMATS[name].pack(w)) - np.asarray(w).T)
    assert (error <= 0.5001 * STEPS[name] * np.abs(np.asarray(w)).max(0)[:, None]).all()
    assert (error.max() > 0) == (name != "float32")


@pytest.mark.wide(but=("fp8", "bfloat16", "float16", "float32"))
@pytest.mark.parametrize("name", STEPS)
def test_the_largest_weight_of_a_scale_is_kept_and_zeros_stay(name: str) -> None:
    w = jnp.zeros((256, 3)).at[5, 0].set(-3.5).at[200, 1].set(1.75)
    np.testing.assert_allclose(whole(FORMATS[name].pack(w)), np.asarray(w).T, rtol=1e-6)


def test_packed_weights_become_arrays_with_the_same_products() -> None:
    model = Transformer(llama(vocab=48, width=32, layers=1, heads=2, kv_heads=1, mlp=64, context=32, tied=True))
    params, tokens = model.init_params(jax.random.key(0)), jnp.arange(8)[None]
    packed = pack(params, "int8")
    arrays = formats.unpacked(packed)
    assert jax.tree.map(jnp.shape, arrays) == jax.tree.map(jnp.shape, params)
    np.testing.assert_allclose(model.forward(arrays, tokens), model.forward(packed, tokens), atol=2e-5)
    experts = {"up": FORMATS["int8"].pack(kernel(32, 7, 3)), "bias": jnp.ones(7)}
    found = formats.unpacked(experts)
    assert found["up"].shape == (3, 32, 7) and found["bias"] is experts["bias"]
    np.testing.assert_allclose(found["up"], whole(experts["up"]).swapaxes(1, 2), rtol=1e-6)


def test_groups_have_scales_of_their_own() -> None:
    w = jnp.concatenate([kernel(64, 5), 1000 * kernel(64, 5)])
    error = np.abs(whole(Int4(group=64).pack(w)) - np.asarray(w).T)
    assert error[:, :64].max() < 0.5 and error[:, 64:].max() > 10
    assert Int4(group=64).pack(w).scales.shape == (5, 2)
    assert Int4(group=128).pack(kernel(96, 5)).scales.shape == (5, 6)       # 16 divide the half of 96


def test_each_code_of_8_bit_floats_is_its_value() -> None:
    codes = lax.bitcast_convert_type(jnp.arange(256, dtype=jnp.uint8), jnp.float8_e4m3fn)
    np.testing.assert_array_equal(whole(Scaled(codes=codes[None]))[0], np.asarray(codes, np.float64))
    assert np.isnan(whole(Scaled(codes=codes[None]))[0]).sum() == 2


CASES = [(name, rows, *sizes) for name in STEPS for rows in (1, 2, 8, 9, 40)
         for sizes in ((96, 50), (33, 7), (4500, 3), (768, 800), (64, 1))]


@pytest.mark.wide(but=("bfloat16-9-64-1", "int8-1-4500-3", "int4-1-33-7"))
@pytest.mark.parametrize(("name", "rows", "K", "N"), often(
    [("int8", 1, 4500, 3), ("int8", 9, 768, 800), ("int4", 2, 96, 50), ("int4", 9, 96, 50), ("int4", 1, 33, 7),
     ("fp8", 2, 96, 50), ("bfloat16", 9, 64, 1), ("float16", 8, 33, 7)], CASES))
def test_a_product_is_that_of_the_values(name: str, rows: int, K: int, N: int) -> None:
    packed, x = FORMATS[name].pack(kernel(K, N)), jax.random.normal(jax.random.key(1), (rows, K))
    expected = np.asarray(x, np.float64) @ whole(packed).T
    found = jax.jit(multiply)(x, packed)
    np.testing.assert_allclose(found, expected, atol=2e-6 * K**0.5 * np.abs(whole(packed)).max())
    half = jax.jit(multiply)(x.astype(jnp.bfloat16), packed)
    assert half.dtype == jnp.bfloat16 and jax.jit(lambda x, w: multiply(x, w, jnp.float32))(
        x.astype(jnp.bfloat16), packed).dtype == jnp.float32
    np.testing.assert_allclose(half.astype(jnp.float32), expected, atol=2e-2 * K**0.5 * np.abs(whole(packed)).max())


@pytest.mark.parametrize("rows", [1, 8, 9])
@pytest.mark.parametrize("kind", ["scaled", "integers"])
def test_a_group_may_have_inputs_of_both_halves(kind: str, rows: int) -> None:
    """Three groups of 128: the second has inputs whose codes lie in low and in high bits."""
    codes = np.random.default_rng(0).integers(-8, 8, (20, 384))
    steps = np.array([[1, 8, 3]], np.float32).repeat(20, 0)
    x = np.random.default_rng(1).integers(-127, 128, (rows, 384)).astype(np.float32)
    kernel: Packed = (Scaled(codes=nibbles(codes, 0), scales=jnp.asarray(steps)) if kind == "scaled" else
                      Integers(codes=nibbles(codes, 8), steps=jnp.asarray(steps, jnp.float16)))
    expected = x.astype(np.float64) @ (codes * steps.repeat(128, 1)).T
    np.testing.assert_allclose(jax.jit(multiply)(x, kernel), expected, rtol=1e-6, atol=0.1)


@pytest.mark.wide(but=("bfloat16", "float32", "int8"))
@pytest.mark.parametrize("name", STEPS)
def test_a_broken_weight_or_activation_makes_no_number(name: str) -> None:
    x = jnp.ones((3, 96)).at[1, 4].set(jnp.nan)
    found = np.asarray(multiply(x, FORMATS[name].pack(kernel(96, 5))))
    assert np.isnan(found[1]).all() and np.isfinite(found[[0, 2]]).all()
    first = np.asarray(multiply(x.at[0, 0].set(jnp.nan), FORMATS[name].pack(kernel(96, 5))))
    assert np.isnan(first[:2]).all() and np.isfinite(first[2]).all()
    broken = np.asarray(multiply(jnp.ones((1, 96)), FORMATS[name].pack(kernel(96, 5).at[3, 2].set(jnp.nan))))[0]
    assert np.isnan(broken[2]) and np.isfinite(np.delete(broken, 2)).all()


@functools.cache
def as_shipped(*names: str) -> list[str]:
    """What `compiled_packed` prints, where XLA optimises as it does for users."""
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    command = [sys.executable, "-m", "tests.models.formats.compiled_packed", *names]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True,
                          cwd=Path(__file__).parents[3])
    return done.stdout.splitlines()


COMPILED = ("int8", "int4", "int4:group=16", "fp8", "bfloat16", "float16", "qserve")


def test_compiled_products_convert_in_vectors_and_write_no_kernel() -> None:
    """One row and 8 of each format. The two controls are what XLA makes of a plain product."""
    lines = as_shipped(*COMPILED)
    assert lines[:-2] == [f"{name} {rows} fine" for name in COMPILED for rows in (1, 8)]
    assert lines[-2].startswith("plain 1 ['converts within a product") and "writes a kernel" in lines[-1]


@pytest.mark.wide
def test_compiled_products_of_published_kernels_write_none_whole() -> None:
    """One row, 8, and mixtures of experts, of each kernel as checkpoints and GGUF files have them."""
    lines = as_shipped(*PUBLISHED)
    assert lines[:-2] == [f"{name} {rows} fine" for name in PUBLISHED for rows in (1, 8, "experts")]
    assert "writes a kernel" in lines[-1]


@pytest.mark.wide
@pytest.mark.parametrize("name", often(["mixtral"], ["llama", "gpt2", "qwen3", "gemma2", "phi3", "mixtral"]))
@pytest.mark.parametrize("weights", often(["int8"], STEPS))
def test_a_model_loads_packed(name: str, weights: str, tmp_path: Path) -> None:
    saved(name, tmp_path)
    model, params = load_model(tmp_path, dtype="float32")
    same, packed = load_model(tmp_path, dtype="float32", weights=weights)
    size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))
    assert same == model and (size(packed) < size(params) or weights == "float32")
    jax.tree.map(np.testing.assert_array_equal, packed, pack(params, weights))
    is_packed = lambda x: isinstance(x, Packed)
    leaves = jax.tree.leaves(packed, is_leaf=is_packed)
    assert sum(map(is_packed, leaves)) == len(formats.kernels(params)) > 0
    # the model of the rounded weights is that of arrays with their values
    plain = jax.tree.map(lambda x, w: jnp.swapaxes(x.values(jnp.float32), -1, -2) if is_packed(x) else x, packed,
                         params, is_leaf=is_packed)
    if isinstance(packed["embed"], Packed):
        plain["embed"] = plain["embed"].T
    tokens = jnp.arange(24).reshape(2, 12) % model.config.vocab
    np.testing.assert_allclose(model.forward(packed, tokens), model.forward(plain, tokens), atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("positions", [0, 16])
def test_a_network_without_scales_of_norms_has_activations_of_its_own_dtype(positions: int) -> None:
    """Its table is packed as the head, as in nanochat's and OPT's configurations without scales."""
    config = dataclasses.replace(llama(vocab=16, width=32, layers=1, heads=4, mlp=48, tied=True),
                                 norm=NormConfig(scaled=False), learned_positions=positions)
    model, tokens = Transformer(config, dtype="bfloat16"), jnp.arange(8)[None]
    params = model.init_params(jax.random.key(0), "bfloat16")
    packed = pack(params, "int8")
    found, wanted = (model.features(own, tokens)[0] for own in (packed, params))
    assert found.dtype == wanted.dtype == model.embeddings(packed, tokens).dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(jnp.float32), wanted.astype(jnp.float32), atol=0.1)


@pytest.mark.full
def test_a_t5_loads_packed(tmp_path: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    transformers.T5ForConditionalGeneration(transformers.T5Config(
        vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
    ).save_pretrained(tmp_path)
    lm, packed = dx.load(tmp_path), dx.load(tmp_path, weights="int8")
    assert isinstance(packed.params["embed"], Packed) and load_encoder_decoder(tmp_path, weights="fp8")[0] == lm.model
    inputs = dx.models.EncoderText(jnp.arange(12).reshape(2, 6) + 3, jnp.array([6, 4]))
    window = causal(jnp.array([[0, 5, 9, 7], [0, 8, 3, 3]]), jnp.zeros(2, jnp.int32))
    one, other = (each.model.apply(each.params, window, each.model.init_cache(2, 8, params=each.params, inputs=inputs)
                                   ).logits() for each in (lm, packed))
    assert 0 < np.abs(one - other).max() < 0.05 * np.abs(one).max()


@pytest.mark.wide
@pytest.mark.parametrize("weights", often(["int8"], [name for name in STEPS if name != "float32"]))
def test_no_kernel_is_converted_in_front_of_the_loop(weights: str) -> None:
    """Else the loop reads whole weights, which take the memory that packed ones were to save."""
    model = Transformer(llama(vocab=704, width=96, layers=1, heads=4, kv_heads=2, mlp=320, tied=True))
    params = Params(jax.eval_shape(lambda: pack(model.init_params(jax.random.key(0)), weights)))
    alg, tokens = Autoregressive(), np.zeros((2, 64), np.int32)
    chain = build(2, vocab_size=704)
    state = jax.eval_shape(lambda p: drivers.begin(alg, model, p, chain, tokens, np.full(2, 4, np.int32), size=64,
                                                   max_new=np.full(2, 8, np.int32), seed=np.uint32(0)), params)
    text = drivers.advance.lower(alg, model, params, chain, state, jnp.int32(9)).compile().as_text()
    carried = [line for line in text.splitlines() if " while(" in line]
    assert carried and not any(re.search(r"f32\[(320,96|96,320|704,96|96,704)\]", line) for line in carried)
    assert not re.search(r"f32\[(320,96|96,320|704,96|96,704)\]\S* fusion\(", text)     # nor written in it


@pytest.mark.full
def test_half_precision_on_a_cpu_is_read_as_it_lies(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    lm = dx.load(tmp_path, dtype="bfloat16")
    kernel = lm.params["layers"]["0"]["mlp"]["up"]["kernel"]
    assert isinstance(kernel, Scaled) and kernel.codes.dtype == jnp.bfloat16 == lm.params["embed"].dtype
    out = lm.model.apply(lm.params, causal(jnp.ones((1, 1), jnp.int32), jnp.zeros(1, jnp.int32)),
                         lm.model.init_cache(1, 8))
    assert out.hidden.dtype == jnp.bfloat16


def test_a_format_may_be_given_as_an_object(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    _, params = load_model(tmp_path, weights=Int4(group=4))
    assert params["layers"]["0"]["mlp"]["up"]["kernel"].scales.shape[-1] > 2
    assert isinstance(load_model(tmp_path, weights=Float8())[1]["layers"]["0"]["mlp"]["up"]["kernel"], Scaled)


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    with pytest.raises(ValueError, match=r"^weights: got 'int_8', takes 'int8', .*did you mean 'int8'\?$"):
        dx.load(tmp_path, weights="int_8")
    with pytest.raises(ValueError, match=r"^group: got 1"):
        Int4(group=1)


@pytest.mark.full
def test_the_page_on_weights_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names = run_file(DOCS / "choose" / "weights.md")
    assert isinstance(names["lm"].params["embed"], Packed)      # pycode's head is its embedding table
    bits = [float(line.split()[-1].strip("[]")) for line in capsys.readouterr().out.splitlines()[-3:]]
    assert bits[0] != bits[1] and max(bits) < 1.5 * min(bits)
