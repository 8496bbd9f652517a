"""Layers of linear attention: alone, beside softmax layers with any cache, grouped (Linearized-LLM), and with a prefix
(JRT-RNN)."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import decodax as dx
from decodax import caches
from decodax.bench.report import copies, parse
from decodax.cache import LinearRule, LinearTerms, PerLayer
from decodax.cache.linear import BLOCK, over_text
from decodax.core import drivers
from decodax.core.start import init_state
from decodax.core.types import Params
from decodax.core.window import causal
from decodax.io.load import LM
from decodax.io.saving import save_model
from decodax.models import (
    DecoderConfig,
    Embeddings,
    EncoderText,
    Layer,
    Transformer,
    jrt,
    linear,
    linear_weights,
    linearized,
    llama,
)
from decodax.models.blocks.attention import Attention
from decodax.models.linear import with_linear_attention
from decodax.models.recurrent.options import RgLru
from decodax.sampling import build
from decodax.train import (
    Probe,
    fit_channels,
    fit_codebooks,
    fit_heads,
    fit_kv_heads,
    fit_layers,
    fit_less,
    mean_kv_heads,
)
from tests.caches.small import PROMPTS
from tests.matrix import often
from tests.models.networks.linear import BASE, CONFIGS, lm
from tests.models.small import scored

POLICY: dict[str, Any] = dict(max_new_tokens=20, seed=5, temperature=[0.0, 0.9, 0.0])
SMALL = {"snapkv": dict(budget=14, window_size=4), "kivi": dict(group_size=4, residual_length=8),
         "streaming-llm": dict(start_size=2, recent_size=9)}


def inputs(name: str, prompts: list[list[int]]) -> EncoderText | None:
    return EncoderText.of(prompts) if name == "jrt" else None


def tokens(name: str, prompts: list[list[int]] = PROMPTS, **more: Any) -> list[list[int]]:
    return dx.generate(lm(name), prompts, inputs=inputs(name, prompts), **{**POLICY, **more}).tokens.tolist()


@functools.partial(jax.jit, static_argnums=0)
def forward(model: Any, params: Any, text: Any, prefix: Any) -> Any:
    return model.forward(params, text, prefix=prefix)


def whole(name: str, text: list[int], prefix: int = 0) -> np.ndarray:
    """Logits `[T, V]` of a text, without a cache; what stands behind it is seen by nobody that counts."""
    own, padded = lm(name), np.zeros((1, -(-len(text) // 64) * 64), np.int32)
    padded[0, :len(text)] = text
    return np.asarray(forward(own.model, own.params, padded, np.array([prefix], np.int32)))[0, :len(text)]


# The rules, against the authors' own code


def attention(config: DecoderConfig, **kernels: np.ndarray) -> Attention:
    layer = Attention(config, config.layers[0], nnx.Rngs(0))
    for name, kernel in kernels.items():
        getattr(layer, name).kernel.set_value(jnp.asarray(kernel))
    return layer


def output(layer: Attention, x: np.ndarray, prefix: int | None = None) -> np.ndarray:
    B, T, _ = x.shape
    at = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    first, rope = None if prefix is None else jnp.full(B, prefix), layer.layer.rope
    attend: Any = lambda i, q, k, v, linear: (over_text(linear, q, k, v, None, at, first)[0], ())
    return np.asarray(layer(0, jnp.asarray(x), {rope: rope.table(at, None)} if rope else {}, attend)[0])


@pytest.mark.wide
def test_the_layer_of_linearized_llm() -> None:
    """Expected is what `linear_forward_noflashattn` of GATECH-EIC/Linearized-LLM (experiments/llama_attn_replace.py,
    273274e) gives for the same weights, with USE_LINEAR, USE_LOCAL, USE_GLOBAL, GLOBAL_FACTOR, ADD_CONV and
    GROUP_SIZE=8, for a text of 29 positions and for its first 24."""
    r = np.random.default_rng(0)
    x = r.normal(size=(2, 29, 16)).astype(np.float32)
    kernels = {n: r.normal(size=s).astype(np.float32) * 0.4 for n, s in
               dict(q=(16, 16), k=(16, 8), v=(16, 8), o=(16, 16)).items()}
    taps = r.normal(size=(4, 9)).astype(np.float32)
    config = linearized(llama(vocab=16, width=16, layers=1, heads=4, kv_heads=2, mlp=24, context=64), group=8, kernel=9)
    layer = attention(config, **kernels)
    layer.factor.set_value(jnp.array([0.7]))
    layer.taps.set_value(jnp.asarray(taps[:, 4::-1]))        # the later half of their kernel is masked
    want = [[1.85008, 0.60921, -1.59826, -0.71459], [-3.06823, -3.04188, 2.3901, 8.13051],
            [0.88615, -11.88838, 7.85166, 1.74974], [-3.17738, -4.79056, 0.71748, -0.10283]]
    got = output(layer, x)
    np.testing.assert_allclose(got[1, [0, 8, 20, 28], :4], want, atol=3e-5)
    np.testing.assert_allclose(got.std(), 7.251989, rtol=1e-5)
    np.testing.assert_allclose(output(layer, x[:, :24]), got[:, :24], atol=3e-5)


def test_the_layer_of_jrt_rnn() -> None:
    """Expected is what `PrefixLinearAttention` of HazyResearch/prefix-linear-attention
    (based/models/mixers/prefix_linear_attention.py, 7490f22) gives for the same weights, in parallel; its own
    recurrent form differs by 6e-7."""
    r = np.random.default_rng(1)
    x = r.normal(size=(2, 23, 16)).astype(np.float32)
    k = {n: r.normal(size=s).astype(np.float32) * 0.4 for n, s in
         dict(q=(16, 12), k=(16, 12), v=(16, 16), encoder_k=(16, 12), encoder_v=(16, 16), o=(16, 16)).items()}
    config = jrt(llama(vocab=16, width=16, layers=1, heads=4, mlp=24, context=64), (0,), width=3)
    want = [[-0.30802, -0.19347, -0.2312, -1.18930], [-0.62748, 0.31199, -0.17878, -0.24499],
            [-1.19183, 0.27459, 0.39491, -0.18227], [0.08454, -1.01282, -0.52045, -1.37862]]
    np.testing.assert_allclose(output(attention(config, **k), x, 9)[1, [0, 8, 15, 22], :4], want, atol=1e-5)


def test_normalised_sums_are_those_of_a_recurrent_network() -> None:
    """Katharopoulos et al., 2020, token by token in float64; a text longer than a block."""
    T, H, G, d = BLOCK + 9, 4, 2, 3
    r = np.random.default_rng(2)
    q, k, v = (r.normal(size=(1, T, n, d)) for n in (H, G, G))
    phi = lambda x: np.where(x > 0, x + 1, np.exp(x))
    S, z, want = np.zeros((G, d, d)), np.zeros((G, d)), []
    for i in range(T):
        S = S + phi(k[0, i])[:, :, None] * v[0, i][:, None]
        z = z + phi(k[0, i])
        read = phi(q[0, i]).reshape(G, H // G, d)
        want.append((np.einsum("gmd,gde->gme", read, S) / np.einsum("gmd,gd->gm", read, z)[..., None]).reshape(H, d))
    given = (jnp.asarray(x, jnp.float32) for x in (q, k, v))
    got, _ = over_text(LinearTerms(rule=LinearRule()), *given, None, jnp.arange(T, dtype=jnp.int32)[None])
    np.testing.assert_allclose(got[0], want, rtol=2e-5, atol=2e-5)


# Windows


def read(name: str, text: list[int], width: int, live: int | None = None) -> Any:
    """A cache with a text in it, read in chunks as a prompt is; dead nodes stand before the last ones."""
    own = lm(name)
    cache = own.model.init_cache(1, 256, params=own.params, inputs=inputs(name, [text]))
    for start in range(0, len(text), width):
        begin = max(0, min(start, len(text) - width))
        part = text[begin:begin + width]
        at = begin + np.arange(len(part))
        window = causal(jnp.array([part]), jnp.array([begin]), jnp.asarray(at >= start)[None]).replace(is_prefill=True)
        _, entries = scored(own.model, own.params, window, cache)
        cache = cache.commit(entries, jnp.where(window.live, window.positions, -1))
    return cache


@pytest.mark.wide
@pytest.mark.parametrize("name", often(["linearized"], CONFIGS))
def test_chunks_of_any_width_leave_the_same_state(name: str) -> None:
    text = np.random.default_rng(7).integers(0, 16, BLOCK + 37).tolist()
    one, *others = (read(name, text, width) for width in (len(text), 30, 7))
    follows = causal(jnp.array([[3, 1, 4]]), jnp.array([len(text)]))
    own, want = lm(name), whole(name, [*text, 3, 1, 4], len(text))[-3:]
    for cache in (one, *others):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4), cache, one)
        np.testing.assert_allclose(scored(own.model, own.params, follows, cache)[0][0], want, rtol=2e-3, atol=2e-3)


# Decoding


@pytest.mark.wide
def test_the_tokens_of_a_prefix_model() -> None:
    plain = tokens("jrt")
    logits = whole("jrt", [*PROMPTS[0], *plain[0]], len(PROMPTS[0]))
    assert logits[len(PROMPTS[0]) - 1:-1].argmax(-1).tolist() == plain[0]
    assert tokens("jrt", chunk=4, algorithm="prompt-lookup") == plain
    # the encoder reads what it is given, and not the prompt
    other = dx.generate(lm("jrt"), PROMPTS, inputs=EncoderText.of([row[::-1] for row in PROMPTS]), **POLICY)
    assert other.tokens.tolist() != plain


@pytest.mark.wide
@pytest.mark.parametrize("cache", SMALL)
def test_softmax_layers_have_any_cache(cache: str) -> None:
    name, kind = "linearized beside softmax", caches.make(cache, **SMALL[cache])
    plain = tokens(name, cache=kind)
    if cache != "kivi":     # two bits of one layer of three leave these tokens
        assert plain != tokens(name)
    assert tokens(name, cache=kind, algorithm="prompt-lookup") == plain
    assert tokens(name, cache=kind, chunk=4) == plain
    full = caches.make("streaming-llm", start_size=2, recent_size=200)
    assert tokens(name, cache=full) == tokens(name)


@pytest.mark.wide
def test_samples_and_beams_take_their_states_along() -> None:
    name = "linearized beside softmax"
    alone = [tokens(name, [row], num_samples=2, temperature=1.0, request_ids=[i]) for i, row in enumerate(PROMPTS)]
    assert tokens(name, num_samples=2, temperature=1.0) == [row for rows in alone for row in rows]
    beams = dx.algorithms.make("beam-search", lm(name), width=3)
    assert tokens(name, algorithm=beams, temperature=0.0)[1:] == tokens(name, PROMPTS[1:], algorithm=beams,
                                                                        temperature=0.0)


def test_the_state_does_not_grow_with_the_text() -> None:
    """16 tokens of a group and of the convolution, and sums."""
    sizes = lambda name, S: [x.shape for x in jax.tree.leaves(jax.eval_shape(
        lambda: lm(name).model.init_cache(2, S)).states)]
    for name in ("elu", "linearized"):
        assert sizes(name, 64) == sizes(name, 4096)
    assert sizes("linearized", 64) == [(2, 2, 4, 4), (2, 2, 7, 8)] * 3
    cache = lm("linearized beside softmax").model.init_cache(2, 64)
    assert isinstance(cache, PerLayer) and len(cache.base.kv) == 1 and len(cache.linear.states) == 2


def test_no_round_copies_keys_and_values() -> None:
    """Of the layer that has some, in a loop whose other layers have states."""
    own, B, S = lm("linearized beside softmax"), 8, 1024
    policy, params = build(B, vocab_size=16, temperature=0.8), Params(own.model.abstract_params())
    algorithm = dx.Speculative(dx.drafts.PromptLookup(length=4))
    begin = functools.partial(init_state, algorithm, own.model, size=S, max_new=np.int32(30))
    s = jax.eval_shape(begin, params, policy, jax.ShapeDtypeStruct((B, 64), jnp.int32),
                       jax.ShapeDtypeStruct((B,), jnp.int32))
    program = parse(drivers.advance.lower(algorithm, own.model, params, policy, s, np.int32(5)).compile().as_text())
    assert program.loops()
    assert [x for loop in program.loops() for x in copies(program, B * 2 * S * 8, loop.attribute("body"))] == []


@pytest.mark.wide
def test_gradients_reach_every_weight() -> None:
    for name in ("linearized", "jrt"):
        one = Transformer(dataclasses.replace(CONFIGS[name], layers=CONFIGS[name].layers[:1]))
        params = {**lm(name).params, "layers": {"0": lm(name).params["layers"]["0"]}}
        loss = lambda params, one=one: forward(one, params, np.array(PROMPTS[:1]), np.array([9])).std()
        assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(jax.grad(loss)(params)))


def test_a_loaded_model_is_linearized() -> None:
    """With zeros, and in one group, it sees keys by the square of their scores alone."""
    dense = LM(model=Transformer(BASE), params=Transformer(BASE).init_params(jax.random.key(0)), vocab_size=16)
    own = with_linear_attention(dense, (0, 2), group=8, kernel=9)
    assert own.model == Transformer(linearized(BASE, (0, 2), group=8, kernel=9))
    new = own.model.init_params(jax.random.key(0))
    assert jax.tree.map(jnp.shape, own.params) == jax.tree.map(jnp.shape, new)
    assert not np.asarray(own.params["layers"]["0"]["attn"]["taps"]).any()
    assert own.params["layers"]["1"] is dense.params["layers"]["1"]
    with pytest.raises(ValueError, match="linear attention takes a Transformer that reads from left to right"):
        with_linear_attention(dx.load("tasks-diffusion"))


# What is refused


def test_methods_that_a_recurrent_state_cannot_serve_are_refused_by_name(tmp_path: Any) -> None:
    name = "linearized beside softmax"
    with pytest.raises(ValueError, match=r"cache: Speculative\(CLaSp\) needs one that supports truncation"):
        tokens(name, algorithm=dx.Speculative(dx.drafts.CLaSp(skips=1).for_target(Transformer(BASE))))
    with pytest.raises(ValueError, match="no layer of the model caches keys and values"):
        tokens("elu", cache="snapkv:budget=14,window_size=4")
    with pytest.raises(ValueError, match="runs the model once more for its choice"):
        tokens(name, cache="laq:budget=40")
    with pytest.raises(ValueError, match=r"^config: as a llama configuration it describes another model"):
        save_model(tmp_path, lm(name).model, lm(name).params)


def griffin() -> LM:
    """A model with two recurrent blocks before a layer of attention."""
    blocks = (Layer(recurrent=RgLru(16, 4)),) * 2
    model = Transformer(dataclasses.replace(BASE, layers=(*blocks, BASE.layers[2])))
    return LM(model=model, params=model.init_params(jax.random.key(0)), vocab_size=16)


@pytest.mark.parametrize("make", [functools.partial(lm, "linearized beside softmax"), griffin],
                         ids=["linear attention", "recurrent block"])
def test_methods_that_need_keys_and_values_of_all_layers_are_refused_by_name(make: Callable[[], LM]) -> None:
    model = make()
    with pytest.raises(ValueError, match=r"^layers: some have linear attention or a recurrent block, so they cannot"):
        model.model.pieces(model.params)
    probes, texts = [Probe([*range(1, 9)], 2, 4)], [[*range(1, 41)]] * 2
    for fit, data in ((functools.partial(fit_kv_heads, kv_heads=1), PROMPTS), (fit_codebooks, PROMPTS),
                      (fit_heads, probes), (fit_layers, texts), (fit_channels, probes),
                      (functools.partial(fit_less, start_size=1, recent_size=4), texts)):
        with pytest.raises(ValueError, match=r"some of its layers have linear attention"):
            fit(model, data)
    with pytest.raises(ValueError, match=r"some of its layers have linear attention"):
        mean_kv_heads(model, 1)


def test_wrong_configurations_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^layers: got \(0, 3\), takes numbers below 3"):
        linear(BASE, layers=(0, 3))
    with pytest.raises(ValueError, match=r"^group, kernel: got 8 and 4"):
        linearized(BASE, group=8, kernel=4)
    with pytest.raises(ValueError, match=r"^features: got 'exp', takes one of identity, elu, taylor"):
        LinearRule(features="exp")      # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^linear: cannot be combined with a soft cap"):
        linear(dataclasses.replace(BASE, attention_softcap=30.0))
    with pytest.raises(ValueError, match=r"^linear: cannot be combined with a sliding window"):
        dataclasses.replace(CONFIGS["elu"].layers[0], sliding=4)
    own = lm("jrt")
    with pytest.raises(ValueError, match=r"^inputs: got None, takes an EncoderText for a Transformer"):
        dx.generate(own, PROMPTS, **POLICY)
    soft = Embeddings(values=np.zeros((3, 2, 16), np.float32), given=np.ones((3, 2), bool))
    with pytest.raises(ValueError, match=r"^inputs: got a Embeddings, takes an EncoderText"):
        dx.generate(own, PROMPTS, inputs=soft, **POLICY)
    assert linear_weights(BASE, own.params) == own.params
