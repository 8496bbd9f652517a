"""Quamba2: its scales, codes and steps against the authors' code, and what it does to a model.

Expected numbers are those of enyac-group/Quamba (c474646a922d176f0c6bca0d54cf0fcda8cf9c65) on the arrays that are made
here. "sets" to "state_codes": `group_wise_sort_indices`, `CrossHeadMinmaxObserver`, `PerSSDGroupObserver`,
`CachedStatesCrossHeadMinmaxObserver`, `quantize_tensor_head_channel_grouping` and
`quantize_states_head_channel_grouping`, in the order of the channels before; in the first of them the profiles of heads
were rearranged with the heads before their channels are clustered, which the code leaves out. "w8" to "w4a16_one":
`quantize_tensor_per_tensor_absmax`, `get_w4a8_quantize_weights` and `get_w4a16_quantize_weights`. "update" and "scan":
its Triton kernels `quamba2_sscan_update_triton` and `_quamba2_mamba_chunk_scan_combined_fwd` in Triton 3.5.1's
interpreter, without their checks for a GPU, with `rint` and `softplus` written out.
"""

import dataclasses
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.common.hadamard import rotation
from decodax.core.window import causal
from decodax.models import Mamba2, Mamba2Config, Transformer, llama
from decodax.models.formats import Quamba2, quamba2, quamba2_scales, rounded_mamba2
from decodax.models.formats.integers import codes_of, quarter, rotate
from decodax.models.names import flatten
from decodax.models.recurrent.mamba2 import divided, mixed
from decodax.models.weight_source import nested
from tests.matrix import often

EXPECTED = json.loads((Path(__file__).parent / "quamba2.json").read_text())
CONFIG = Mamba2Config(vocab=97, width=32, layers=2, heads=8, head_dim=8, groups=2, state=8, chunk=8)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8], [1, 5], [7, 7, 7, 7], [60]]
POLICY: dict[str, Any] = dict(temperature=[0.0, 0.0, 1.0, 1.0], top_p=0.95, seed=[5, 6, 7, 8])
TEXTS = [np.random.default_rng(i).integers(0, 97, 24).tolist() for i in range(4)]
KINDS = {"w8a8": Quamba2(heads=2), "w4a8": Quamba2(4, 8), "w4a16": Quamba2(4, 16)}


def given(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def digest(a: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(a).tobytes()).hexdigest()[:16]


# Against the authors' code


def test_clusters_scales_and_codes_of_activations_are_theirs() -> None:
    """24 heads of 8 channels in 2 groups with three profiles."""
    G, H, P, N = 2, 12, 8, 4
    profile = np.abs(given(G, 3, P, seed=1)) + 0.1
    mean = np.abs(profile[:, np.arange(H) % 3] * (1 + 0.05 * given(G, H, P, seed=2))).astype(np.float32)
    order, clusters = quamba2_scales.arranged(mean, 3, 4)
    place, number = order.reshape(-1), clusters.reshape(-1)
    assert sorted(sorted(place[number == i].tolist()) for i in range(number.max() + 1)) == EXPECTED["sets"]
    assert (np.diff(np.take_along_axis(mean.reshape(G * H, P)[place.reshape(-1, P)[:, 0] // P],
                                       place.reshape(-1, P) % P, 1)) >= 0).all()

    x, state = given(3, 20, G * H * P, seed=3) * mean.reshape(-1), given(3, G * H, P, N, seed=4)
    state, B = state * mean.reshape(G * H, P)[..., None], given(3, 20, G * N, seed=5)
    seen = {"x out": np.abs(x).max((0, 1))[place], "B out": np.abs(B).reshape(60, G, N).max((0, 2)),
            "C out": np.ones(G),
            "state": np.abs(state).reshape(3, -1, N).max(0)[place].reshape(G * H, P, N).swapaxes(1, 2),
            **dict.fromkeys(("in", "out", "z", "x", "B", "C", "dt"), np.float32(1))}
    shape = Mamba2Config(vocab=8, width=8, layers=1, heads=G * H, head_dim=P, groups=G, state=N)
    found = quamba2_scales.scales_of(shape, seen, clusters)
    back = np.argsort(place)
    conv, own = found["conv"][:G * H * P][back], found["state"].swapaxes(1, 2).reshape(-1, N)[back]
    assert (digest(conv), digest(own)) == (EXPECTED["x_scales"], EXPECTED["state_scales"])
    assert found["conv"][G * H * P:G * H * P + G * N:N].tolist() == EXPECTED["B_scales"]
    codes = [np.asarray(codes_of(jnp.asarray(a), jnp.asarray(s))).astype(np.int8)
             for a, s in ((x.reshape(60, -1), conv), (state.reshape(3, -1, N), own))]
    assert list(map(digest, codes)) == [EXPECTED["x_codes"], EXPECTED["state_codes"]]


def test_codes_and_scales_of_weights_are_theirs() -> None:
    w = given(40, 256, seed=6) * 0.3
    packed: Any = Quamba2().pack_kernel(w, np.float32(1))
    assert digest(packed.kernel.codes) == EXPECTED["w8"]
    np.testing.assert_array_equal(packed.scales, np.float32(EXPECTED["w8_scale"]))
    for inputs, inner, name in ((256, True, "w4a8"), (64, True, "w4a8_one"), (256, False, "w4a16"),
                                (64, False, "w4a16_one")):
        codes, scales, steps = quarter(w[:, :inputs], inner)
        found = [digest(codes.astype(np.int8))]
        found += [] if steps is None else [digest(steps.reshape(-1) if inputs == 64 else steps)]
        found += [digest(scales.reshape(-1))] if inner else []
        assert found == EXPECTED[name]
        own: Any = Quamba2(4, 8 if inner else 16).pack_kernel(w[:, :inputs], np.float32(1) if inner else None)
        bound = np.abs(w[:, :inputs]).max(-1, keepdims=True) * (1 / 15 + 1 / 127 if inputs == 256 else 1 / 14 + 1e-3)
        assert (np.abs(own.values(jnp.float32) - w[:, :inputs]) <= bound).all()


@pytest.mark.wide
def test_the_recurrence_is_theirs() -> None:
    """Three tokens of two rows, whose states are rounded behind each, and a prompt of 24 in chunks of 16."""
    G, H, P, N, rows = 2, 4, 32, 16, 2
    c = Mamba2Config(vocab=8, width=8, layers=1, heads=G * H, head_dim=P, groups=G, state=N, conv=1, chunk=16)
    r = np.random.default_rng(0)
    xs = np.repeat((0.01 + 0.02 * r.random((G, 4, 4))).astype(np.float32), 8, -1).reshape(-1)
    ss = np.repeat((0.005 + 0.01 * r.random((G, 4, 4, N))).astype(np.float32), 8, 2).reshape(G * H, P, N).swapaxes(1, 2)
    grid = np.concatenate([xs, np.repeat(np.float32([0.01, 0.02]), N), np.repeat(np.float32([0.015, 0.01]), N)])
    integers = lambda *shape: r.integers(-127, 128, shape).astype(np.float32)

    def nodes(T: int) -> tuple[Any, Any]:
        x, dt, B, C = (integers(rows, T, *more) for more in ((G * H, P), (G * H,), (G, N), (G, N)))
        whole = np.concatenate([a.reshape(rows, T, -1) for a in (x, B, C)], -1)
        return jnp.asarray(whole * grid), jnp.asarray(dt * np.float32(0.02))

    few = nodes(3)
    p = {"A_log": jnp.asarray(integers(G * H) * np.float32(0.02)), "D": jnp.asarray(integers(G * H) * np.float32(0.01)),
         "dt_bias": jnp.asarray(r.standard_normal(G * H).astype(np.float16), jnp.float32),
         "grid": {"into": jnp.asarray(grid), "state": jnp.asarray(ss)}}
    many = nodes(24)
    model = rounded_mamba2.QuantizedMamba2(c)

    def run(into: Any, dt: Any, certain: bool, cache: Any) -> tuple[np.ndarray, Any]:
        T = into.shape[1]
        window = causal(jnp.zeros((rows, T), jnp.int32), jnp.zeros(rows, jnp.int32)).replace(is_prefill=certain)
        y, entry = rounded_mamba2.scanned(c, p, 0, into, dt, lambda taps: divided(c, taps[:, :, -1]), window, cache)
        return np.asarray(y).mean(-1), cache.commit([entry], window.positions).states[0]["state"]

    y, state = run(*few, False, model.init_cache(rows, 8))
    np.testing.assert_allclose(y, EXPECTED["update"]["y"], atol=2e-3)           # theirs are float16
    assert state.dtype == jnp.int8 and digest(np.asarray(state).swapaxes(2, 3)) == EXPECTED["update"]["state"]
    cache: Any = model.init_cache(rows, 32)
    y, state = run(*many, True, cache.prefill_cache())
    np.testing.assert_allclose(y, EXPECTED["scan"]["y"], atol=0.02)             # their products are of float16
    assert state.dtype == jnp.float32
    near = np.asarray(codes_of(state, p["grid"]["state"])).sum((2, 3))
    np.testing.assert_allclose(near, EXPECTED["scan"]["state"], atol=10)         # of 512 codes


# A model


@functools.cache
def whole() -> Any:
    """A tiny model, some of whose channels are much louder than others, the same ones on every text."""
    net = Mamba2(CONFIG)
    params = net.init_params(jax.random.key(0))
    loud = 1 + 30 * (np.random.default_rng(9).random(CONFIG.inner) > 0.9)
    for i in range(CONFIG.layers):
        layer = params["layers"][str(i)]
        layer["conv"]["taps"] = layer["conv"]["taps"].at[..., :CONFIG.inner].multiply(loud)
        layer["out"]["kernel"] = layer["out"]["kernel"] / loud[:, None]
    return dx.LM(model=net, params=params, vocab_size=97)


@functools.cache
def packed(kind: str) -> Any:
    return dx.quantize(whole(), KINDS[kind], TEXTS, length=24)


def tokens_of(lm: Any, **options: Any) -> list[list[int]]:
    return dx.generate(lm, PROMPTS, **{"max_new_tokens": 9, "eos_token_id": [], **POLICY, **options}).tokens.tolist()


@functools.partial(jax.jit, static_argnums=0)
def forward(model: Any, params: Any, tokens: Any) -> Any:
    return model.forward(params, tokens)


def error(lm: Any) -> float:
    """The mean size of what quantising does to the logits of other texts, over theirs."""
    text = np.random.default_rng(7).integers(0, 97, (3, 24))
    want = forward(whole().model, whole().params, text)
    return float(jnp.abs(forward(lm.model, lm.params, text) - want).mean() / jnp.abs(want).mean())


@dataclasses.dataclass(frozen=True)
class Turned(Mamba2):
    """A model with rotated inputs of its output projections."""

    def mixer(self, p: Any, layer: int, x: Any, window: Any, cache: Any) -> tuple[Any, Any]:
        return mixed(self.config, p, layer, x, window, cache, out=rotate)


@pytest.mark.wide
def test_rotated_and_rearranged_it_is_the_same_network() -> None:
    c, rng = CONFIG, np.random.default_rng(3)
    leaves = {path: np.asarray(x, np.float64) for path, x in flatten(whole().params).items()}
    for path in leaves:         # scales of norms that count
        if path.endswith("norm"):
            leaves[path] = 1 + 0.3 * rng.standard_normal(leaves[path].shape)
    plain = nested({path: jnp.asarray(x, jnp.float32) for path, x in leaves.items()})
    turned = quamba2.fused(c, leaves)
    for i in range(c.layers):
        order, _ = quamba2_scales.arranged(rng.random((c.groups, 4, c.head_dim)), 2, 4)
        turned |= quamba2.reordered(c, turned, i, order)
    own = nested({path: jnp.asarray(x, jnp.float32) for path, x in turned.items()})
    np.testing.assert_allclose(forward(Turned(c), own, np.array(TEXTS)), forward(Mamba2(c), plain, np.array(TEXTS)),
                               atol=2e-4)
    assert np.abs(turned["embed"] - leaves["embed"]).max() > 0.1


@pytest.mark.parametrize("n", [1, 2, 8, 12, 24, 40])
def test_rotations_are_orthogonal_matrices(n: int) -> None:
    matrix, x = rotation(n), given(3, n, seed=n)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(n), atol=1e-12)
    np.testing.assert_allclose(rotate(jnp.asarray(x)), x @ matrix, atol=1e-5)


@pytest.mark.wide
def test_more_bits_and_more_clusters_lose_less() -> None:
    errors = {kind: error(packed(kind)) for kind in KINDS}
    assert errors["w8a8"] < 0.15 < errors["w4a8"] < 1
    assert errors["w4a16"] < 1
    one = dx.quantize(whole(), Quamba2(heads=1, channels=1), TEXTS, length=24)
    assert errors["w8a8"] < 0.8 * error(one)        # loud channels and others have one scale


@pytest.mark.wide
@pytest.mark.parametrize("kind", often(["w8a8"], KINDS))
def test_drafts_leave_the_tokens_as_they_are(kind: str) -> None:
    """Chains and trees, greedy and sampled, ragged; and prompts whole, in chunks and alone."""
    lm = packed(kind)
    plain = tokens_of(lm)
    assert tokens_of(lm, algorithm=dx.Speculative(dx.drafts.PromptLookup(length=4))) == plain
    if kind == "w4a16":         # a Mamba2 with packed kernels
        return
    tree = dx.Speculative(dx.drafts.DraftModel(whole()), shape=dx.trees.Fixed.balanced(2, 2))
    assert tokens_of(lm, algorithm=tree, chunk=4) == plain
    alone = dx.generate(lm, [PROMPTS[2]], max_new_tokens=9, eos_token_id=[], temperature=1.0, top_p=0.95, seed=7,
                        request_ids=[2])
    assert alone.tokens.tolist() == [plain[2]]


@pytest.mark.wide
def test_states_have_8_bits_between_tokens() -> None:
    """And are rounded as tokens come, not as the prompt is read."""
    lm = packed("w8a8")
    cache: Any = lm.model.init_cache(1, 32)
    assert {x.dtype.name for x in jax.tree.leaves(cache.states)} == {"int8"}
    assert {x.dtype.name for own in cache.prefill_cache().states for x in [own["state"]]} == {"float32"}
    text = jnp.array(TEXTS[:1])
    read = causal(text, jnp.zeros(1, jnp.int32))
    step = jax.jit(lambda window, cache: lm.model.apply(lm.params, window, cache).logits())
    prompt, tokens = step(read.replace(is_prefill=True), cache.prefill_cache()), step(read, cache)
    np.testing.assert_allclose(prompt[:, 0], tokens[:, 0], atol=1e-5)       # what is read of a state is not rounded
    assert 1e-4 < jnp.abs(prompt - tokens)[:, 1:].mean() < 0.1 * jnp.abs(prompt).mean()


@pytest.mark.parametrize("kind", KINDS)
def test_saved_it_is_loaded_as_it_was(kind: str, tmp_path: Path) -> None:
    lm = packed(kind)
    dx.save(lm, tmp_path)
    again = dx.load(tmp_path)
    assert again.model == lm.model
    for one, other in zip(jax.tree.leaves(lm.params), jax.tree.leaves(again.params), strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(ValueError, match=r"weights: got 'int8', but the weights of .* are packed"):
        dx.load(tmp_path, weights="int8")


def test_a_model_of_arrays_is_saved_as_transformers_reads_it(tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    dx.save(whole(), tmp_path)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        want = reference(torch.tensor(TEXTS), use_cache=False).logits.numpy()
    np.testing.assert_allclose(forward(whole().model, whole().params, np.array(TEXTS)), want, atol=1e-4)
    for one, other in zip(jax.tree.leaves(dx.load(tmp_path).params), jax.tree.leaves(whole().params), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_rotated_kernel_multiplies_as_its_values() -> None:
    kernel: Any = packed("w4a16").params["layers"]["0"]["out"]["kernel"]
    x = jnp.asarray(given(5, CONFIG.inner, seed=1))
    np.testing.assert_allclose(kernel.times(x, jnp.float32), x @ kernel.values(jnp.float32).T, atol=1e-4)


def test_unsupported_methods_and_files_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="weights, activations: got 8 and 16 bits, takes 8 and 8, 4 and 8, or 4"):
        Quamba2(8, 16)
    with pytest.raises(ValueError, match="heads: got 0, takes a whole number from 1"):
        Quamba2(heads=0)
    with pytest.raises(ValueError, match="data: got None, but 'quamba2' needs calibration data"):
        dx.quantize(whole(), "quamba2")
    network = Transformer(llama(vocab=97, width=8, layers=1, heads=2, mlp=8))
    llm = dx.LM(model=network, params=network.init_params(jax.random.key(0)), vocab_size=97)
    with pytest.raises(ValueError, match=r"lm: got a Transformer, Quamba2\(.*\) takes a Mamba2"):
        dx.quantize(llm, "quamba2", TEXTS)
    with pytest.raises(ValueError, match="lm: got 'model', a Mamba2; takes a decoder"):
        dx.quantize(whole(), "squeezellm", TEXTS)
    with pytest.raises(ValueError, match="with packed weights, takes arrays"):
        dx.quantize(packed("w8a8"), "quamba2", TEXTS)
    with pytest.raises(ValueError, match=r"weights: 'quamba2' changes a whole model: decodax\.quantize"):
        dx.load("pycode-draft", weights="quamba2")
    biased = Mamba2(dataclasses.replace(CONFIG, bias=True))
    with pytest.raises(ValueError, match="lm: got projections with biases, "):
        dx.quantize(dx.LM(model=biased, params=biased.init_params(jax.random.key(0)), vocab_size=97), "quamba2", TEXTS)
