"""SqueezeLLM: clusters, weights that stay whole, products with them, and the authors' checkpoints.

Figures called the authors' were made with their code, https://github.com/SqueezeAILab/SqueezeLLM at commit a5fd71f, and
scikit-learn 1.3.1, which they name.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.algorithms.plain import Autoregressive
from decodax.core import drivers
from decodax.core.types import Params
from decodax.io.load import LM
from decodax.models import Transformer, llama
from decodax.models.calibration import observe
from decodax.models.formats import Format, Scaled, SqueezeLLM, kernels, squeezellm
from decodax.models.formats.clusters import means, nearest
from decodax.models.formats.squeezellm import DenseSparse, Fisher, Lookup, read_tensors
from decodax.models.names import flatten
from decodax.models.packed import Packed, multiply
from decodax.sampling import build
from tests.matrix import often

TEXT = [path.read_text()[:4000] for path in sorted(Path(dx.models.__file__).parent.glob("*.py"))]


def heavy(*shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights with heavy tails and Fisher information."""
    r = np.random.RandomState(0)
    return r.standard_t(3, shape).astype(np.float32), (r.standard_normal(shape)**4).astype(np.float32)


def pack(K: int, N: int, *experts: int, **options: Any) -> tuple[Packed, np.ndarray]:
    """A packed kernel, and the weights `[..., N, K]` that it was made of."""
    w, fisher = heavy(*experts, N, K)
    kernel, seen = (jnp.asarray(np.swapaxes(a, -1, -2)) for a in (w, fisher))
    return SqueezeLLM(**options).pack(kernel, seen), w


def whole(packed: Packed) -> np.ndarray:
    return np.asarray(packed.values(jnp.float32), np.float64)


def error(w: np.ndarray, fisher: np.ndarray, table: np.ndarray) -> np.ndarray:
    found = np.take_along_axis(table.astype(np.float64), nearest(w, table), -1)
    return (fisher.astype(np.float64) * (w - found)**2).sum(-1)


def optimum(w: np.ndarray, fisher: np.ndarray, count: int) -> float:
    """The least weighted error of any `count` values, by dynamic programming over all intervals."""
    order = np.argsort(w)
    v, f = w[order].astype(np.float64), fisher[order].astype(np.float64)
    n, s, q = (np.concatenate([[0], np.cumsum(a)]) for a in (f, f * v, f * v * v))
    width = np.maximum(n - n[:, None], 1e-300)
    cost = np.where(np.tri(len(n)).T > 0, q - q[:, None] - (s - s[:, None])**2 / width, np.inf)
    best = cost[0]
    for _ in range(count - 1):
        best = (best[:, None] + cost).min(0)
    return float(best[-1])


@pytest.mark.parametrize(("K", "near"), [(100, 1 + 1e-6), (300, 1.001)])
@pytest.mark.parametrize("bits", [3, 4])
def test_clusters_are_the_best_of_short_rows_and_near_the_best_of_long_ones(bits: int, K: int, near: float) -> None:
    w, fisher = heavy(4, K)
    best = np.array([optimum(*row, 2**bits) for row in zip(w, fisher, strict=True)])
    assert (error(w, fisher, means(w, fisher, 2**bits)) <= near * best).all()


AUTHORS = {3: [33.2871, 56.0526, 66.8824, 53.1794, 87.5263, 60.1363, 41.6707, 47.7489],
           4: [4.99077, 9.2297, 10.6653, 7.54566, 11.6867, 5.4334, 8.35359, 9.248]}
"""The weighted errors of their clusters, of each output of `heavy(8, 300)`."""


@pytest.mark.parametrize("bits", [3, 4])
def test_no_output_has_a_larger_error_than_the_authors_clusters(bits: int) -> None:
    w, fisher = heavy(8, 300)
    found = error(w, fisher, means(w, fisher, 2**bits))
    assert (found <= np.array(AUTHORS[bits]) * (1 + 1e-5)).all() and found.sum() < 0.97 * sum(AUTHORS[bits])


def test_clusters_of_few_values_or_of_none_that_count() -> None:
    w = np.array([[0.0] * 40, [1.0] * 20 + [2.0] * 20, [*range(40)]], np.float32)
    fisher = np.ones_like(w)
    fisher[2, :39] = 0
    table = means(w, fisher, 8)
    np.testing.assert_array_equal(table[0], 0)
    assert {*table[1]} == {1.0, 2.0} and {*table[2]} == {39.0}
    # where no weight counts, all count the same
    made = SqueezeLLM(sensitive=0, outliers=0).pack(jnp.asarray(w.T), jnp.zeros((40, 3)))
    assert np.abs(whole(made) - w).max() <= 2.5


def test_the_weights_that_stay_whole_are_the_authors() -> None:
    """Their thresholds, with a range of 1.8 and a sensitivity of 0.5%."""
    w, fisher = heavy(8, 300)
    rows, cols = np.nonzero(SqueezeLLM(sensitive=0.005, spread=1.8).whole(w, fisher))
    assert (len(rows), rows.sum(), cols.sum()) == (104, 354, 14996)
    assert np.bincount(rows).tolist() == [14, 15, 14, 11, 12, 11, 14, 13]
    packed, _ = pack(300, 8, sensitive=0.005, spread=1.8)
    np.testing.assert_allclose(whole(packed)[rows, cols], w[rows, cols], rtol=1e-6)
    assert isinstance(packed, DenseSparse) and packed.weights.size == 112       # 104, and up to a multiple of 16
    fisher[rows, cols] = 0      # what stays whole has no say in the tables
    theirs = [14.9849, 26.7073, 18.4, 28.8805, 20.6875, 12.6633, 13.8978, 25.8739]
    found = (fisher * (whole(packed) - w)**2).sum(-1)
    assert (found <= np.array(theirs) * (1 + 1e-3)).all()        # tables are rounded to 16 bits


def test_by_default_a_share_of_the_weights_stays_whole() -> None:
    w, fisher = heavy(100, 300)
    found = SqueezeLLM().whole(w, fisher)
    assert 0.0044 <= found.mean() <= 0.0045 and np.abs(w[found]).min() < np.abs(w[~found]).max()
    sizes = SqueezeLLM(sensitive=0, outliers=0.01).whole(w, fisher)
    assert sizes.sum() == 300 and np.abs(w[sizes]).min() >= np.abs(w[~sizes]).max()
    sensitive = SqueezeLLM(sensitive=0.01, outliers=0).whole(w, fisher)
    assert fisher[sensitive].min() > fisher[~sensitive].max()


CODES = {3: [[-1446488448, -396831327], [1189403852, 1451293700], [1490395642, -590566968], [-2130967320, -1577433372],
             [-861288362, 82335957], [-96017188, -933854980]],
         4: [[-360369664, -1374310839], [1872030289, -16768168], [2118925132, -360369664], [647833281, 1872030289],
             [2005445584, 2118925132], [1645066888, 647833281], [-417570087, 2005445584], [-154881084, 1645066888]]}
"""What their `QuantLinearLUT.pack2` makes of the codes below."""


@pytest.mark.parametrize("bits", [3, 4])
def test_a_kernel_of_the_authors_is_read(bits: int) -> None:
    i = np.arange(128).reshape(2, 64)
    codes, table = (i * i + 3 * i) // 5 % 2**bits, (np.arange(2**bits) - 2.5) * np.array([[1], [0.5]])
    expected = np.take_along_axis(table, codes, -1)
    tensors = {"qweight": np.array(CODES[bits], np.int32), "lookup_table": table.astype(np.float32)}
    dense = read_tensors(tensors)
    assert isinstance(dense, Lookup)
    np.testing.assert_array_equal(whole(dense), expected)
    # theirs of the outliers 9, -8 and 7.5, from which they take the value that is nearest to 0
    tensors |= {"rows": np.array([0, 2, 3], np.int32), "cols": np.array([3, 40, 63], np.int32),
                "vals": np.array([9.5, -7.5, 7.75], np.float32), "full_row_indices": np.array([1], np.int32),
                "full_rows": np.eye(64, 1, -5, dtype=np.float32)}
    expected[[0, 0, 1, 1], [3, 40, 63, 5]] += [9.5, -7.5, 7.75, 1]
    np.testing.assert_array_equal(whole(read_tensors(tensors)), expected)


def test_broken_tensors_of_the_authors_are_refused() -> None:
    good = {"qweight": np.zeros((6, 2), np.int32), "lookup_table": np.zeros((2, 8))}
    for name, value, message in (("lookup_table", np.zeros((2, 4)), r"lookup_table: got shape \(2, 4\)"),
                                 ("qweight", np.zeros((7, 2), np.int32), "qweight: got 7 words"),
                                 ("vals", np.zeros(3), r"rows, cols, vals: got shapes \(2,\)")):
        with pytest.raises(ValueError, match=f"^{message}"):
            read_tensors({"rows": np.zeros(2), "cols": np.zeros(3), **good, name: value})


CASES = [(bits, rows, *sizes) for bits in (3, 4) for rows in (1, 2, 8, 40)
         for sizes in ((96, 50), (33, 7), (4500, 3), (768, 800), (64, 1))]


@pytest.mark.wide
@pytest.mark.parametrize(("bits", "rows", "K", "N"), often(
    [(3, 1, 33, 7), (3, 8, 96, 50), (4, 2, 768, 800), (4, 1, 4500, 3)], CASES))
def test_a_product_is_that_of_the_values(bits: int, rows: int, K: int, N: int) -> None:
    packed, x = pack(K, N, bits=bits)[0], jax.random.normal(jax.random.key(1), (rows, K))
    expected, most = np.asarray(x, np.float64) @ whole(packed).T, np.abs(whole(packed)).max()
    np.testing.assert_allclose(jax.jit(multiply)(x, packed), expected, atol=2e-6 * K**0.5 * most)
    half = jax.jit(multiply)(x.astype(jnp.bfloat16), packed)
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(half.astype(jnp.float32), expected, atol=2e-2 * K**0.5 * most)


@pytest.mark.full
def test_large_kernels_are_multiplied_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(squeezellm, "BLOCK", 100)
    packed, x = pack(96, 50)[0], jax.random.normal(jax.random.key(1), (5, 96))
    np.testing.assert_allclose(jax.jit(lambda x, w: w.times(x, jnp.float32))(x, packed), x @ whole(packed).T, atol=1e-3)
    part = packed.part(7, 20)
    np.testing.assert_array_equal(whole(part), whole(packed)[7:27])
    np.testing.assert_allclose(part.product(x, jnp.float32), x @ whole(packed)[7:27].T, atol=1e-3)
    np.testing.assert_array_equal(packed.rows(jnp.array([[3], [9]]), jnp.float32), whole(packed)[[[3], [9]]])


def test_other_platforms_hold_the_same_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, x = pack(33, 7)[0], jnp.ones((2, 33))
    monkeypatch.setattr(squeezellm, "platform", lambda: "tpu")
    other = packed.here()
    assert other.codes.dtype == jnp.uint4 and other.shape == packed.shape
    np.testing.assert_array_equal(whole(other), whole(packed))
    np.testing.assert_allclose(other.times(x, jnp.float32), x @ whole(packed).T, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(other.stored().codes, packed.codes)


@pytest.mark.parametrize("bits", [3, 4])
def test_codes_take_as_many_bits_as_they_say(bits: int) -> None:
    packed, _ = pack(768, 200, bits=bits)
    assert isinstance(packed, DenseSparse) and isinstance(packed.dense, Lookup)
    size = lambda tree: 8 * sum(a.nbytes for a in jax.tree.leaves(tree)) / (768 * 200)
    assert size(packed.dense.codes) == bits and packed.dense.table.dtype == jnp.float16
    assert size(packed) == pytest.approx(bits + 16 * 2**bits / 768 + 64 * 0.0045, abs=0.01)
    tiny = SqueezeLLM(bits=bits).pack(*(jnp.asarray(1e-7 * a.T) for a in heavy(20, 96)))
    assert tiny.dense.table.dtype == jnp.float32        # 16 bits would round them to nothing


def test_an_output_of_outliers_alone_loses_none() -> None:
    w, fisher = heavy(40, 256)
    w[7] *= 1000
    packed = SqueezeLLM(spread=1.8).pack(jnp.asarray(w.T), jnp.asarray(fisher.T))
    np.testing.assert_allclose(whole(packed)[7], w[7], rtol=1e-3, atol=4)     # all but a few near zero
    x = jnp.eye(256)[:9]
    np.testing.assert_allclose(multiply(x, packed), whole(packed).T[:9], rtol=1e-6)


@pytest.mark.full
def test_each_expert_is_packed_by_itself() -> None:
    packed, w = pack(40, 24, 3)
    fisher, x = heavy(3, 24, 40)[1], jax.random.normal(jax.random.key(1), (2, 40))
    one = SqueezeLLM().pack(jnp.asarray(w[2].T), jnp.asarray(fisher[2].T))
    np.testing.assert_array_equal(whole(packed)[2], whole(one))
    np.testing.assert_allclose(multiply(x, jax.tree.map(lambda a: a[2], packed)), x @ whole(one).T, atol=1e-4)


def test_a_broken_activation_breaks_its_row_alone() -> None:
    found = np.asarray(multiply(jnp.ones((3, 96)).at[1, 4].set(jnp.nan), pack(96, 5)[0]))
    assert np.isnan(found[1]).all() and np.isfinite(found[[0, 2]]).all()


def arrays(lm: LM) -> LM:
    """The model with arrays of the packed kernels' values."""
    plain = jax.tree.map(lambda w: jnp.swapaxes(w.values(jnp.float32), -1, -2) if isinstance(w, Packed) else w,
                         lm.params, is_leaf=lambda w: isinstance(w, Packed))
    return dataclasses.replace(lm, params=plain)


SMALL = llama(vocab=96, width=32, layers=1, heads=4, kv_heads=2, mlp=64, tied=True)


def small(seed: int = 0) -> LM:
    model = Transformer(SMALL)
    params = jax.tree.map(lambda w: 5 * w if w.ndim > 1 else w, model.init_params(jax.random.key(seed)))
    return LM(model=model, params=params, vocab_size=96)


IDS = [[i * i % 96 for i in range(64)]]


@pytest.mark.wide
def test_the_statistic_is_the_square_of_each_sequences_gradient() -> None:
    lm, path, tokens = small(), "layers.0.mlp.up.kernel", np.array(IDS, np.int32).reshape(2, 32)
    found = observe(lm.model, lm.params, tokens, Fisher(), [path])[path]

    def loss(kernel: jax.Array, row: jax.Array) -> jax.Array:
        up = lm.params["layers"]["0"]["mlp"] | {"up": {"kernel": kernel}}
        layers = lm.params["layers"] | {"0": lm.params["layers"]["0"] | {"mlp": up}}
        logits = lm.model.forward(lm.params | {"layers": layers}, row[None, :-1])[0]
        return -jax.nn.log_softmax(logits)[jnp.arange(31), row[1:]].mean()

    gradient = jax.jit(jax.grad(loss))
    expected = sum(gradient(flatten(lm.params)[path], jnp.asarray(row))**2 for row in tokens)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-9)


@pytest.mark.full
def test_a_model_generates_as_with_the_values_and_is_saved(tmp_path: Path) -> None:
    packed = dx.quantize(small(), "squeezellm", IDS, length=32)
    leaves = flatten(packed.params)
    assert not isinstance(leaves["embed"], Packed)
    assert all(isinstance(leaves[path], Packed) for path in kernels(packed.params) if path.startswith("layers."))
    prompts, options = [[3, 1, 4], [1, 5, 9, 2]], dict(max_new_tokens=12)
    out = dx.generate(packed, prompts, **options)
    np.testing.assert_array_equal(out.tokens, dx.generate(arrays(packed), prompts, **options).tokens)
    dx.save(packed, tmp_path)
    back = dx.load(tmp_path)
    assert jax.tree.structure(back.params) == jax.tree.structure(packed.params)
    jax.tree.map(np.testing.assert_array_equal, back.params, packed.params)


@dataclasses.dataclass(frozen=True)
class Rounded(Format):
    """Evenly spaced values between the least and the largest weight of each output."""

    bits: int

    def packs(self, path: str) -> bool:
        return path.startswith("layers.")

    def pack(self, kernel: jax.Array, seen: Any = None) -> Packed:
        w = kernel.T.astype(jnp.float32)
        low, high = w.min(-1, keepdims=True), w.max(-1, keepdims=True)
        step = (high - low) / (2**self.bits - 1)
        return Scaled(codes=low + jnp.round((w - low) / step) * step)


@pytest.mark.parametrize(("name", "bits", "share"), often(
    [], [("pycode-draft", 3, 0.8), ("pycode", 3, 0.7), ("pycode", 4, 0.3)]))
def test_a_trained_model_loses_less_than_by_rounding_to_3_bits(name: str, bits: int, share: float) -> None:
    lm, held = dx.load(name), [text[:1000] for text in TEXT[:6]]
    score = lambda lm: float(np.mean(dx.score(lm, held).bits_per_byte))
    packed = dx.quantize(lm, SqueezeLLM(bits=bits), TEXT[6:], length=128, sequences=8)
    best, rounded = score(lm), score(dx.quantize(lm, Rounded(3)))
    assert score(packed) - best < share * (rounded - best)


@pytest.mark.full
def test_no_kernel_is_chosen_in_front_of_the_loop() -> None:
    """Else the loop reads whole weights, which take the memory that packed ones were to save."""
    model = Transformer(llama(vocab=640, width=96, layers=1, heads=4, kv_heads=2, mlp=320, tied=True))
    lm = LM(model=model, params=model.init_params(jax.random.key(0)), vocab_size=640)
    params = Params(dx.quantize(lm, "squeezellm", IDS).params)
    alg, tokens, chain = Autoregressive(), np.zeros((2, 64), np.int32), build(2, vocab_size=640)
    state = jax.eval_shape(lambda p: drivers.begin(alg, model, p, chain, tokens, np.full(2, 4, np.int32), size=64,
                                                   max_new=np.full(2, 8, np.int32), seed=np.uint32(0)), params)
    text = drivers.advance.lower(alg, model, params, chain, state, jnp.int32(9)).compile().as_text()
    assert " while(" in text and not re.search(r"f32\[(320,96|96,320|96,96)\]", text)


def test_parameters_and_data_out_of_range_are_refused() -> None:
    for name, value in (("bits", 5), ("sensitive", -0.1), ("outliers", 0.5), ("spread", 0)):
        with pytest.raises(ValueError, match=f"^{name}: got {value}"):
            SqueezeLLM(**{name: value})
    with pytest.raises(ValueError, match=r"^seen: got None"):
        SqueezeLLM().pack(jnp.ones((8, 8)))
    with pytest.raises(ValueError, match=r"^kernel: got numbers that are not finite"):
        SqueezeLLM().pack(jnp.full((8, 8), jnp.nan), jnp.ones((8, 8)))
    with pytest.raises(ValueError, match=r"^weights: 'squeezellm' needs calibration data"):
        dx.load("pycode-draft", weights="squeezellm")


@pytest.mark.full
def test_a_checkpoint_of_the_authors_is_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "scripts")
    from scripts.convert import packed as convert
    from tests.models.tiny import build as tiny

    r, state = np.random.RandomState(0), {}
    model = tiny("llama", intermediate_size=64)
    model.save_pretrained(tmp_path / "model")
    for name, weight in [*model.named_parameters()]:
        module = name.removesuffix(".weight")
        if "_proj" not in name:
            if "embed" not in name:         # the oldest checkpoints lack some: the model's own is taken
                state[name] = weight.detach().half()
            continue
        N, K = weight.shape
        codes, table = r.randint(0, 8, (N, K)), np.sort(r.standard_normal((N, 8)) / 8).astype(np.float32)
        bits = np.unpackbits(codes.astype(np.uint8)[..., None], axis=-1, count=3, bitorder="little")
        words = np.packbits(bits.reshape(N, -1), axis=-1, bitorder="little").view("<i4").T.copy()
        state |= {f"{module}.{key}": torch.from_numpy(value) for key, value in {
            "qweight": words, "lookup_table": table, "rows": np.arange(N + 1, dtype=np.int32),
            "cols": np.full(N, 5, np.int32), "vals": np.full(N, 0.3, np.float32)}.items()}
        state[f"sparse_threshold.{module}"] = N
        own = np.take_along_axis(table, codes, -1)
        own[:, 5] += 0.3
        with torch.no_grad():
            weight.copy_(torch.from_numpy(own))
    torch.save(state, tmp_path / "sq.pt")
    dx.save(convert(tmp_path / "model", tmp_path / "sq.pt"), tmp_path / "out")
    leaves = flatten(dx.load(tmp_path / "out").params)
    for path, module in (("attn.k", "self_attn.k_proj"), ("mlp.gate", "mlp.gate_proj"), ("mlp.down", "mlp.down_proj")):
        kernel = leaves[f"layers.1.{path}.kernel"]
        assert isinstance(kernel, DenseSparse)
        np.testing.assert_array_equal(whole(kernel), model.get_parameter(f"model.layers.1.{module}.weight").detach())
    np.testing.assert_array_equal(leaves["embed"], model.get_parameter("model.embed_tokens.weight").detach())
    np.testing.assert_array_equal(leaves["norm.scale"], state["model.norm.weight"].float())
    state["model.layers.7.mlp.up_proj.qweight"] = torch.from_numpy(words)
    torch.save(state, tmp_path / "sq.pt")
    with pytest.raises(ValueError, match=r"^checkpoint: holds model.layers.7.mlp.up_proj, which .*config.json has no"):
        convert(tmp_path / "model", tmp_path / "sq.pt")
