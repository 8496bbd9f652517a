"""QServe: codes and scales, exact products of integers, models in it, and its authors' checkpoints."""

import dataclasses
import hashlib
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.algorithms.plain import Autoregressive
from decodax.common.hadamard import hadamard
from decodax.core import drivers
from decodax.core.types import Params
from decodax.io.files import ONE
from decodax.io.saving import save_model
from decodax.models import Transformer, llama
from decodax.models.blocks.options import Layer
from decodax.models.config import NormConfig
from decodax.models.experts import mix
from decodax.models.formats import Int4, QServe, pack
from decodax.models.formats.qserve import W4A8, quantised, read_tensors, rotated
from decodax.models.packed import multiply
from decodax.models.routing import Experts
from decodax.sampling import build
from tests.matrix import often

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

FORMATS = [QServe(), QServe(zero="post-scale"), QServe(group=-1), QServe(group=-1, zero="post-scale")]
TEXT = "def mean(values):\n    \"\"\"The mean.\"\"\"\n    return sum(values) / len(values)\n\n\nclass A:\n    pass\n"


def kernel(K: int, N: int, *experts: int) -> jax.Array:
    return jax.random.normal(jax.random.key(K + N), (*experts, K, N))


def integers(packed: W4A8) -> np.ndarray:
    return np.asarray(packed.kernel.values(jnp.float32)).astype(np.int64)


def codes(packed: W4A8) -> np.ndarray:
    both = np.asarray(packed.kernel.codes)
    return np.concatenate([both & 15, both >> 4], -1)


# ---- the authors' code, on this kernel

def given() -> np.ndarray:
    """`f16[32, 384]`, outputs first: inputs of other sizes, an output without negative weights, and one of zeros."""
    w = np.random.default_rng(0).standard_normal((32, 384)).astype(np.float32) * 0.05
    w[:, 5] *= 4
    w[3] = np.abs(w[3]) + 0.02
    w[7] = 0
    return w.astype(np.float16)


def digest(a: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(a).tobytes()).hexdigest()[:16]


DEEPCOMPRESSOR = [
    ("0fb2139a440e0fb7", 89239, "46d095f08f8e5c3b", "79855efec114a26f", "facf973a3d874b41"),
    ("c52e814135533357", 88889, "df9a071e3bfd3d0a", "463850661f3f02c1", "514d57cba4213858"),
    ("7fe8c94082dfea07", 87239, "6973083b6ac6fe89", None, "2a3cbda0dbd3687f"),
    ("a1a06bf7da343ab8", 86762, "d84efec8f7bd5874", None, "836239b09d169ad2"),
]
"""What `QuantizerImpl.quantize` of mit-han-lab/deepcompressor (69f3473f5e1c1504bae35cc50c7858ef900a9b17), with the
settings of weights in qoq-g128.yaml and qoq-gchn.yaml and rounding to nearest, makes of `given()` for each of
`FORMATS`: digests of the codes (and their sum), of the scales, of the steps, and of the zeros as they are stored."""

OMNISERVE = [{"qweight": "d03bc9b6d5aaa1a6", "s1_scales": "46d095f08f8e5c3b", "s2_scales": "e47b3dbfeca28dcf",
              "s2_zeros": "7146b6f7ff946cef"}, None,
             {"qweight": "60e8b28c59580a16", "s1_scales": "6973083b6ac6fe89", "s1_szeros": "2a3cbda0dbd3687f"}]
"""Digests of the tensors that mit-han-lab/omniserve (02b2925aa6fa3b92b06316a1524b7f38922cd9c8),
`W4A8OF16LinearDynamicInputScale.from_linear`, writes of the first and the third."""


@pytest.mark.wide(but=("2", "1", "3"))
@pytest.mark.parametrize("i", range(4))
def test_codes_scales_and_zeros_are_those_of_deepcompressor(i: int) -> None:
    packed = FORMATS[i].pack(jnp.asarray(given()).T)
    own, scales = codes(packed), np.asarray(packed.scales)[:, 0].astype(np.float16)
    steps, zeros = packed.kernel.steps, packed.kernel.zeros
    if steps is not None and zeros is not None:     # 3 groups, each of whose halves has its own step here
        found = [digest(np.asarray(a)[:, ::2]) for a in (steps, zeros)]
        np.testing.assert_array_equal(np.asarray(steps)[:, ::2], np.asarray(steps)[:, 1::2])
    else:
        assert packed.zeros is not None
        found = [None, digest(np.asarray(packed.zeros)[:, 0].astype(np.float16) + np.float16(0))]
    assert (digest(own), int(own.sum()), digest(scales), *found) == DEEPCOMPRESSOR[i]


def written(packed: W4A8) -> dict[str, np.ndarray]:
    """The tensors of a kernel in the order of OmniServe's: what each thread of a warp reads, byte by byte."""
    own, (N, K) = codes(packed), packed.shape
    qweight = np.zeros((N // 32, K // 32, 8, 4, 16), np.uint8)
    for lane in range(8):
        for quarter in range(4):
            for byte in range(16):
                column = byte // 8 * 16 + quarter * 4 + byte % 4
                row = byte // 4 % 2 * 8 + lane
                low, high = (own[start::32, column::32] for start in (row, row + 16))
                qweight[:, :, lane, quarter, byte] = low | high << 4
    made = {"qweight": qweight.reshape(N, K // 2).view(np.int8),
            "s1_scales": np.asarray(packed.scales)[:, 0].astype(np.float16)}
    if packed.zeros is not None:
        return made | {"s1_szeros": np.asarray(packed.zeros)[:, 0].astype(np.float16) + np.float16(0)}
    repeated = packed.kernel.steps.shape[-1] * 128 // K if packed.kernel.steps is not None else 1
    order = np.arange(N).reshape(-1, 4, 8).swapaxes(1, 2).reshape(-1)
    return made | {name: np.ascontiguousarray(np.asarray(a)[order, ::repeated].T) for name, a in
                   (("s2_scales", packed.kernel.steps), ("s2_zeros", packed.kernel.zeros))}


@pytest.mark.parametrize("i", [0, 2])
def test_tensors_of_omniserve_are_read(i: int) -> None:
    packed = FORMATS[i].pack(jnp.asarray(given()).T)
    tensors = written(packed)
    assert {name: digest(a) for name, a in tensors.items()} == OMNISERVE[i]
    found = read_tensors(tensors)
    assert jax.tree.structure(found) == jax.tree.structure(packed)
    jax.tree.map(np.testing.assert_array_equal, found, packed)


@pytest.mark.wide
def test_tensors_that_do_not_belong_together_are_refused() -> None:
    t = written(QServe().pack(kernel(256, 64)))
    s, form = t["s1_scales"], {"qweight": t["qweight"], "s1_scales": t["s1_scales"]}
    assert read_tensors(t).shape == (64, 256)
    for expected, wrong in ((r"^qweight: got a kernel of 33 outputs", t | {"qweight": t["qweight"][:33]}),
                            (r"^s1_scales: got shape \(63,\), takes \(64,\)", t | {"s1_scales": s[1:]}),
                            (r"^s1_szeros: cannot be combined with s2", t | {"s1_szeros": s}),
                            (r"^s1_szeros: got shape", form | {"s1_szeros": s[1:]}),
                            (r"^s2_scales, s2_zeros: got none", form),
                            (r"^s2_scales: got shape \(2, 63\)", t | {"s2_scales": t["s2_scales"][:, 1:]}),
                            (r"^s2_zeros: got shape \(1, 64\)", t | {"s2_zeros": t["s2_zeros"][:1]}),
                            (r"^s2_scales, s2_zeros: make integers from .* take 8 bits",
                             t | {"s2_zeros": t["s2_zeros"] + 100})):
        with pytest.raises(ValueError, match=expected):
            read_tensors(wrong)


# ---- laws

@pytest.mark.wide
@pytest.mark.parametrize("fmt", FORMATS[:2])
def test_codes_decoded_from_4_bits_fit_8(fmt: QServe) -> None:
    """Groups of every smallest and largest weight, the others between them; each output's largest is 1."""
    ends = np.linspace(-1, 1, 240)
    low, high = (a.ravel() for a in np.meshgrid(ends, ends))
    low, high = low[low <= high], high[low <= high]
    inside = np.linspace(0, 1, 14)[:, None] * (high - low) + low
    w = np.concatenate([inside, [low, high], np.ones((1, len(low))), np.zeros((15, len(low)))])
    packed = QServe(group=16, zero=fmt.zero).pack(jnp.asarray(w))
    found = integers(packed)
    assert found.min() >= -128 and found.max() <= 127 and np.abs(found).max() > 119
    np.testing.assert_array_equal(packed.kernel.values(jnp.int8), found)       # which wraps around in between


CASES = [(i, rows, *sizes) for i in range(4) for rows in (1, 2, 8, 9, 40)
         for sizes in ((96, 50), (4500, 3), (768, 800), (4096, 16), (640, 9), (64, 1))]


@pytest.mark.wide(but=("3-1-64-1",))
@pytest.mark.parametrize(("i", "rows", "K", "N"), often(
    [(0, 1, 4096, 16), (1, 40, 96, 50), (2, 8, 4500, 3), (3, 1, 64, 1)], CASES))
def test_products_of_integers_are_exact_and_then_scaled(i: int, rows: int, K: int, N: int) -> None:
    packed, x = FORMATS[i].pack(kernel(K, N)), jax.random.normal(jax.random.key(1), (rows, K))
    own, scales = (np.asarray(a, np.float64) for a in quantised(x))
    exact = own.astype(np.int64) @ integers(packed).T
    np.testing.assert_array_equal(jax.jit(lambda k, x: k.times(x, jnp.int32))(packed.kernel, quantised(x)[0]), exact)
    expected = own * scales @ np.asarray(packed.values(jnp.float32), np.float64).T
    if packed.zeros is not None:        # zeros are taken off with the sums of the rows as they are
        off = np.asarray(x, np.float64).sum(-1, keepdims=True) - (own * scales).sum(-1, keepdims=True)
        expected -= off * np.asarray(packed.zeros)[:, 0]
    size = np.abs(np.asarray(packed.values(jnp.float32))).max() * K**0.5
    np.testing.assert_allclose(jax.jit(multiply)(x, packed), expected, atol=2e-5 * size)
    half = jax.jit(multiply)(x.astype(jnp.bfloat16), packed)
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(half.astype(jnp.float32), expected, atol=3e-2 * size)


def test_rows_are_quantised_as_the_authors_kernel_does() -> None:
    """`invoke_quant` of their fused_kernels.cu: the row times 127 / its largest, to the nearest even integer."""
    x = np.random.default_rng(0).standard_normal((5, 300)).astype(np.float32)
    x[1], x[2], x[3, 7] = 0, x[2] * 1e-38, 1e30
    rows, scales = quantised(jnp.asarray(x))
    most = np.abs(x).max(-1, keepdims=True)
    expected = np.rint(x * (np.float32(127) / np.where(most < 1e-30, 1, most)))
    np.testing.assert_array_equal(rows, expected)
    np.testing.assert_allclose(np.abs(rows).max(-1), [127, 0, 0, 127, 127])
    assert (np.abs(np.asarray(rows) * np.asarray(scales) - x) <= 0.5001 * np.asarray(scales)).all()


@pytest.mark.full
@pytest.mark.parametrize("fmt", [QServe(), QServe(group=-1)])
def test_a_broken_weight_or_activation_makes_no_number(fmt: QServe) -> None:
    x = jnp.ones((3, 96)).at[1, 4].set(jnp.nan)
    found = np.asarray(multiply(x, fmt.pack(kernel(96, 5))))
    assert np.isnan(found[1]).all() and np.isfinite(found[[0, 2]]).all()
    broken = np.asarray(multiply(jnp.ones((1, 96)), fmt.pack(kernel(96, 5).at[3, 2].set(jnp.nan))))[0]
    assert np.isnan(broken[2]) and np.isfinite(np.delete(broken, 2)).all()


@pytest.mark.wide
def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    packed, x = QServe().pack(kernel(96, 50)), jax.random.normal(jax.random.key(1), (40, 96))
    many = jax.jit(multiply)(x, packed)     # exact, so the same by blocks and one by one
    np.testing.assert_array_equal(many[:8], jax.jit(multiply)(x[:8], packed))
    np.testing.assert_array_equal(many[:1], jax.jit(multiply)(x[:1], packed))


def test_wrong_formats_are_refused() -> None:
    for group in (0, 1, 7, 1026):
        with pytest.raises(ValueError, match=f"^group: got {group}, takes an even number from 2 to 1024, or -1"):
            QServe(group=group)
    with pytest.raises(ValueError, match=r"^zero: got 'post', takes 'pre-scale' or 'post-scale'$"):
        QServe(zero="post")     # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^kernel: got 33 inputs"):
        QServe().pack(kernel(33, 4))


# ---- models

SMALL = llama(vocab=640, width=96, layers=1, heads=4, kv_heads=2, mlp=320, tied=True)


@pytest.mark.full
def test_each_expert_is_packed_by_itself() -> None:
    w, e = [kernel(64, 32, 3), kernel(64, 32, 3) + 0.1, kernel(32, 64, 3)], Experts(count=3, chosen=1, width=32)
    pack = jax.jit(QServe().pack)
    gate, up, down = (pack(a) for a in w)
    x, which = jax.random.normal(jax.random.key(1), (6, 64)), jnp.array([[0], [2], [1], [2], [2], [0]])
    found = jax.jit(lambda *a: mix(*a, jax.nn.silu))(x, which, jnp.ones((6, 1)), gate, up, down)
    own = jax.jit(lambda x, a, b, c: multiply(jax.nn.silu(multiply(x, a)) * multiply(x, b), c))
    for i in range(e.count):
        one, other, last = (pack(a[i]) for a in w)
        alone = own(x, one, other, last)
        np.testing.assert_allclose(found[which[:, 0] == i], alone[which[:, 0] == i], rtol=1e-5, atol=1e-4)


@pytest.mark.wide
def test_embeddings_and_head_stay_as_they_are() -> None:
    params = Transformer(SMALL).init_params(jax.random.key(0))
    packed = pack(params, "qserve")
    assert isinstance(packed["embed"], jax.Array)
    assert isinstance(packed["layers"]["0"]["mlp"]["up"]["kernel"], W4A8)


def test_no_kernel_is_converted_in_front_of_the_loop() -> None:
    model = Transformer(SMALL)
    params = Params(jax.eval_shape(lambda: pack(model.init_params(jax.random.key(0)), "qserve")))
    alg, tokens, chain = Autoregressive(), np.zeros((2, 64), np.int32), build(2, vocab_size=640)
    state = jax.eval_shape(lambda p: drivers.begin(alg, model, p, chain, tokens, np.full(2, 4, np.int32), size=64,
                                                   max_new=np.full(2, 8, np.int32), seed=np.uint32(0)), params)
    text = drivers.advance.lower(alg, model, params, chain, state, jnp.int32(9)).compile().as_text()
    converted = r"f32\[(320,96|96,320|320,48|96,160)\]"
    carried = [line for line in text.splitlines() if " while(" in line]
    assert carried and not any(re.search(converted, line) for line in carried)
    assert not re.search(converted + r"\S* fusion\(", text)


@dataclasses.dataclass(frozen=True)
class Symmetric(Int4):
    """As many bits, of the same kernels, in symmetric codes, and activations as they are."""

    def packs(self, path: str) -> bool:
        return path.startswith("layers.")


@pytest.mark.full
def test_a_model_in_it_is_nearer_the_original_than_one_in_int4() -> None:
    lm = dx.load("pycode")
    bits = lambda lm: float(dx.score(lm, [TEXT]).bits_per_byte[0])
    whole = bits(lm)
    ours, theirs = (abs(bits(dx.quantize(lm, fmt)) - whole) for fmt in (QServe(), Symmetric()))
    assert 0 < ours < 0.9 * theirs < 0.1 * whole


@pytest.mark.wide(but=("fmt3",))
@pytest.mark.parametrize("fmt", often([FORMATS[0], FORMATS[3]], FORMATS))
def test_a_saved_model_is_the_same(fmt: QServe, tmp_path: Path) -> None:
    lm = dx.quantize(dx.load("pycode-draft"), fmt)
    dx.save(lm, tmp_path)
    again = dx.load(tmp_path)
    assert jax.tree.structure(again.params) == jax.tree.structure(lm.params)
    jax.tree.map(np.testing.assert_array_equal, again.params, lm.params)


@pytest.mark.parametrize("n", [1, 2, 4, 12, 20, 36, 64, 84, 224, 768])
def test_a_hadamard_matrix_is_orthogonal_and_of_one_size(n: int) -> None:
    h = hadamard(n)
    np.testing.assert_allclose(h @ h.T, np.eye(n), atol=1e-12)
    np.testing.assert_allclose(np.abs(h), n ** -0.5)


ROTATED: dict[str, dict[str, Any]] = {
    "llama": {}, "tied": {"tied": True, "norm": NormConfig(unit_offset=True)},
    "bias": {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "block": "parallel", "learned_positions": 64},
    "experts": {"layers": (Layer(experts=Experts(count=3, chosen=2, width=32)),) * 2}}


@pytest.mark.wide(but=("tied",))
@pytest.mark.parametrize("name", often(["tied", "bias"], ROTATED))
def test_a_rotated_model_has_the_same_logits(name: str) -> None:
    config = llama(vocab=96, width=48, layers=2, heads=4, kv_heads=2, mlp=64)
    model = Transformer(dataclasses.replace(config, **ROTATED[name]))
    params = model.init_params(jax.random.key(0))
    # norms and biases are not what they begin as
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    params = structure.unflatten(a + 0.2 * jax.random.normal(k, a.shape) for a, k in zip(leaves, keys, strict=True))
    own, turned = rotated(model, params)
    tokens = jnp.arange(24).reshape(2, 12)
    expected = jax.jit(model.forward)(params, tokens)
    np.testing.assert_allclose(jax.jit(own.forward)(turned, tokens), expected, atol=1e-4 * np.abs(expected).max())
    assert not own.config.tied and np.ptp(turned["layers"]["0"]["attn_in"]["scale"]) == 0


@pytest.mark.wide
def test_rotation_spreads_outliers() -> None:
    """So rows lose less by 8 bits."""
    model = Transformer(SMALL)
    params = model.init_params(jax.random.key(0))
    params["embed"] = params["embed"].at[:, 5].mul(100)
    off = lambda x: float(jnp.abs(jnp.multiply(*quantised(x)) - x).mean())
    assert off(rotated(model, params)[1]["embed"]) < 0.3 * off(params["embed"])


@pytest.mark.wide
def test_networks_that_cannot_be_rotated_are_refused() -> None:
    for expected, options in ((r"^model: got post blocks", {"block": "post"}),
                              (r"^model: got pre blocks with layer norms", {"norm": NormConfig(kind="layer")}),
                              (r"^width: got 18", {"width": 18})):
        model = Transformer(dataclasses.replace(SMALL, **options))
        with pytest.raises(ValueError, match=expected):
            rotated(model, model.init_params(jax.random.key(0)))
    model = Transformer(SMALL)
    with pytest.raises(ValueError, match=r"^params: got packed weights"):
        rotated(model, pack(model.init_params(jax.random.key(0)), "qserve"))


@pytest.mark.full
def test_a_checkpoint_of_theirs_becomes_a_model(tmp_path: Path) -> None:
    import torch

    from scripts.convert import packed as convert

    model = Transformer(llama(vocab=96, width=128, layers=1, heads=4, kv_heads=2, mlp=256))
    params = model.init_params(jax.random.key(0))
    half = lambda a: a.astype(jnp.float16).astype(jnp.float32)
    packed = jax.tree.map(lambda a: a if isinstance(a, W4A8) else half(a), pack(params, "qserve"),
                          is_leaf=lambda a: isinstance(a, W4A8))
    fp16 = lambda a: torch.from_numpy(np.array(a, np.float16))
    layer, source, target = packed["layers"]["0"], tmp_path / "theirs", tmp_path / "ours"
    save_model(source, model, params)       # writes the configuration
    tensors = {"model.embed_tokens.weight": fp16(packed["embed"]), "model.norm.weight": fp16(packed["norm"]["scale"]),
               "lm_head.weight": fp16(packed["lm_head"]["kernel"].T),
               "model.layers.0.input_layernorm.weight": fp16(layer["attn_in"]["scale"]),
               "model.layers.0.post_attention_layernorm.weight": fp16(layer["mlp_in"]["scale"])}
    for part, module in (("attn", "self_attn"), ("mlp", "mlp")):
        for name, own in layer[part].items():
            tensors |= {f"model.layers.0.{module}.{name}_proj.{field}": torch.from_numpy(np.array(a))
                        for field, a in written(own["kernel"]).items()}
    torch.save(tensors, source / "pytorch_model.bin")
    (source / ONE).unlink()
    dx.save(convert(source, source / "pytorch_model.bin"), target)
    lm = dx.load(target)
    assert isinstance(lm.model, Transformer) and lm.model.config == model.config
    assert jax.tree.structure(lm.params) == jax.tree.structure(packed)
    jax.tree.map(np.testing.assert_array_equal, lm.params, packed)

    del tensors["model.norm.weight"]
    torch.save(tensors, source / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"^checkpoint: lacks model.norm.weight, and so does .*theirs$"):
        convert(source, source / "pytorch_model.bin")
    tensors["model.layers.0.mlp.up_proj.s1_scales"] = torch.zeros(3)
    torch.save(tensors, source / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"^checkpoint: model.layers.0.mlp.up_proj: s1_scales: got shape \(3,\)"):
        convert(source, source / "pytorch_model.bin")


def test_groups_lie_whole_on_a_device() -> None:
    shape = jax.ShapeDtypeStruct((512, 4), jnp.float32)
    four, two = (jax.eval_shape(QServe(group=g).pack, shape).specs(None, "model", {"model": 2}).kernel
                 for g in (128, 256))
    assert tuple(four.codes) == tuple(four.steps) == tuple(four.zeros) == (None, "model")
    assert tuple(two.codes) == tuple(two.steps) == tuple(two.zeros) == (None, None)
