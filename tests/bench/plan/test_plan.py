"""Plans against arithmetic by hand, and against what XLA's TPU compiler says."""

import dataclasses
import functools
import importlib.util
import json
import math
import warnings

import jax
import numpy as np
import pytest

from decodax.bench.comparison import PLAIN, Comparison, Row
from decodax.bench.plan import DEVICES, PRESETS, SLICES, Slice, abstract, meshes, plan, slice_of
from decodax.bench.plan import front as front_module
from decodax.bench.plan.aot import devices, skipped
from decodax.bench.plan.count import blocks_of_experts, count, kv_reads, setup
from decodax.bench.plan.predict import Trained, predict, share
from decodax.bench.report import parse
from decodax.cli import main
from tests.extending.pages import DOCS
from tests.matrix import often
from tests.models.families.tiny_qwen4 import QWEN4
from tests.models.tiny import COMMON

compiler = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="takes libtpu (the extra tpu-aot)")

PARAMETERS = {"llama-3-8b": 8.03, "llama-3-70b": 70.55, "qwen3-8b": 8.19, "qwen3-32b": 32.76, "qwen3-30b-a3b": 30.53,
              "qwen3-next-80b-a3b": 79.67, "qwen3.5-9b": 8.95, "qwen3.5-35b-a3b": 34.66,
              "gemma-3-27b": 27.01, "gpt-oss-20b": 20.91, "gpt-oss-120b": 116.83, "llada-8b": 8.02,
              "deepseek-v3": 671.026, "kimi-k2": 1026.408, "glm-4.7-flash": 29.943, "smollm2-135m": 0.1345,
              "phi-4": 14.66, "mistral-small-3.2-24b": 23.57, "smollm3-3b": 3.075, "seed-oss-36b": 36.15,
              "glm-4.5-air": 106, "glm-4.6": 352.8, "minimax-m2": 229, "hy3-295b-a21b": 295, "ernie-4.5-21b-a3b": 21,
              "mimo-v2-flash": 309, "laguna-xs-2": 33, "muse-glimmer-30b": 27.855, "deepseek-v4-flash": 284,
              "llama-4-scout": 108, "ministral-3-14b": 13.5, "deepseek-v3.2": 671.9,
              "llada2-mini": 16.256, "llada2-flash": 102.890, "lfm2-1.2b": 1.170, "lfm2-8b-a1b": 8.340,
              "nemotron-3-nano-30b-a3b": 31.58, "granite-4.0-h-tiny": 6.94, "falcon-h1-0.5b": 0.521,
              "jamba-v0.1": 51.57, "kimi-linear-48b-a3b": 49.12, "mistral-large-4": 1050.118, "ling-3.0-flash": 124.414,
              "glm-5.3-flash": 313.327, "minimax-m3": 426.17, "longcat-flash": 560, "step-3.5-flash": 196,
              "hy4": 769.907, "hy4-preview": 58.278,
              "gemma-4-e2b": 4.63, "gemma-4-31b": 30.7,
              "gemma-4-26b-a4b": 25.2}
"""Billions, as on the models' cards; of Gemma, Qwen3.5, MiniMax-M3 (428 with its tower) and Muse Glimmer the text
model, and without layers for further tokens (GLM-4.6: 357 with one). Of GLM-5.3 Flash what its class in transformers
has, with the buffers."""


@pytest.mark.wide(but=("llama-3-8b", "llada-8b"))
@pytest.mark.parametrize("name", often(
    ["llama-3-8b", "llada-8b", "gpt-oss-20b", "gemma-4-e2b", "falcon-h1-0.5b", "jamba-v0.1", "llada2-mini"], PRESETS))
def test_presets_have_the_published_number_of_weights(name):
    lm = abstract(name)
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(lm.params))
    told = str(PARAMETERS[name])     # a card's number is rounded, or cut, at its last digit
    digits = len(told.partition(".")[2])
    assert count / 1e9 == pytest.approx(PARAMETERS[name], abs=max(6e-3, 1.05 * 10 ** -digits) if digits < 2 else 6e-3)
    assert (lm.diffusion is not None) == name.startswith("llada")


def test_the_page_names_every_preset():
    page = (DOCS / "usage" / "planning.md").read_text()
    assert [name for name in PRESETS if f"`{name}`" not in page] == []


def test_the_plan_of_llama_3_8b_is_the_one_computed_by_hand():
    """Llama 3 8B on 8 chips: 16.06 GB of weights, 131,072 bytes a token of cache."""
    found = {p.mesh: p for p in plan("llama-3-8b", "v5e:2x4", batch=64, capacity=8192, compile=False)}
    assert set(found) == {(1, 8), (2, 4), (4, 2), (8, 1)}
    one = found[1, 8]
    assert one.counts.weights == pytest.approx(2 * 8.03e9 / 8, rel=0.03)
    assert one.counts.cache == pytest.approx(64 * 8192 * 131_072 / 8, rel=0.03)
    # all weights but the table of embeddings, and all of the cache
    moved = (2 * (8.03e9 - 128_256 * 4096) + 64 * 8192 * 131_072) / 8
    assert one.memory == pytest.approx(moved / 819e9, rel=0.03)
    assert one.arithmetic == pytest.approx(64 * (2 * 7.5e9 + 32 * 4 * 32 * 128 * 8192) / 8 / 197e12, rel=0.03)
    # two all-reduces a layer and one behind, of 64 rows of 4096 in 16 bits, by a ring both ways
    sent = 65 * 2 * 7 / 8 * 64 * 4096 * 2 / 2
    assert one.network == pytest.approx(sent / 45e9 + 65 * 14 * 1e-6)
    assert one.tokens_per_second == pytest.approx(64 / (one.memory + one.network))
    # a prompt has logits of its last token alone, and each token attends to those in front of it
    products = 8192 * 2 * (8.03e9 - 2 * 128_256 * 4096) + 32 * 4 * 32 * 128 * 8192 ** 2 / 2
    assert one.prompt == pytest.approx(products / 8 / 197e12, rel=0.01) and one.swap is None
    gpu, = plan("llama-3-8b", "h100", batch=4, capacity=16384, live=8192, compile=False)
    assert gpu.prompt == pytest.approx(products / 989e12, rel=0.01)
    assert gpu.swap == pytest.approx(8192 * 131_072 / 64e9, rel=0.01)
    few, = plan("llama-3-8b", "h100", batch=4, live=2, compile=False)
    assert few.prompt == pytest.approx(2 * (8.03e9 - 128_256 * 4096) / 3350e9, rel=0.03)    # the weights, once
    assert one.fits and not found[8, 1].fits and found[8, 1].largest == 0
    rows = (15.75 * 2 ** 30 * 0.98 - one.counts.weights) / (one.counts.cache / 64)
    assert one.largest == pytest.approx(rows, rel=0.03)
    # replicas read all weights each, and cost more
    order = [p.mesh for p in plan("llama-3-8b", "v5e:2x4", batch=64, capacity=8192, compile=False)]
    assert order == [(1, 8), (2, 4), (4, 2), (8, 1)]


@pytest.mark.wide
def test_byte_counts_of_every_change():
    base = dict(batch=8, capacity=4096, mesh=[(1, 1)], compile=False)
    one = lambda name="llama-3-8b", **more: plan(name, "v5p", **{**base, **more})[0]
    plain = one()
    assert one(weights="int8").counts.weights == pytest.approx(plain.counts.weights / 2 + 128_256 * 4096, rel=0.03)
    assert one(cache="snapkv:budget=512").counts.cache < 0.3 * plain.counts.cache
    assert one(live=1024).counts.cache_read == plain.counts.cache_read / 4
    window = one(algorithm="prompt-lookup:length=4")
    assert window.width == 5 and window.arithmetic == pytest.approx(5 * plain.arithmetic)
    assert window.counts.cache_read == plain.counts.cache_read
    drafts = one(algorithm="speculative-sampling:length=3", draft="llama-3-8b")
    assert drafts.counts.draft == plain.counts.weights and drafts.width == 4
    # 5 of 6 layers of Gemma 3 see 1,024 positions
    far, near = (one("gemma-3-27b", live=n, capacity=8192) for n in (8192, 1024))
    full = sum(layer.sliding is None for layer in abstract("gemma-3-27b").model.config.layers)
    assert full == 10 and far.counts.cache_read / near.counts.cache_read == pytest.approx((52 + 10 * 8) / 62)
    # a token is multiplied with 3.3 of 30.5 billion weights, and few tokens read few experts
    few, many = (one("qwen3-30b-a3b", batch=n) for n in (1, 512))
    assert few.arithmetic * 459e12 == pytest.approx(2 * 3.04e9 + 48 * 4 * 32 * 128 * 4096, rel=0.03)
    assert few.counts.weights_read < 0.12 * many.counts.weights_read
    canvas = one("llada-8b", capacity=1024)
    assert canvas.counts.cache == 0 and canvas.width >= 1024 and canvas.arithmetic > canvas.memory


def test_prices_and_slices():
    assert slice_of("v5e:4x4").count == 16 and slice_of("h100:8").count == 8 and slice_of("v5p").count == 1
    cheap, dear = plan("llama-3-8b", ["v5e:2x4", "v5p:2x2x2"], batch=8, mesh=[(1, 8)], compile=False,
                       price={"v5e": 1.0, "v5p": 100.0})
    assert cheap.slice.name == "v5e:2x4" and cheap.cost is not None and dear.cost is not None and dear.cost > cheap.cost
    # without prices by the time of devices
    quick, _ = plan("llama-3-8b", ["v5e:2x4", "v5p:2x2x2"], batch=8, mesh=[(1, 8)], compile=False)
    assert quick.slice.name == "v5p:2x2x2"
    assert meshes(6, 2) == [(1, 6), (2, 3)]
    for name, device in DEVICES.items():
        assert device.name == name and device.memory > 1e10 and device.flops8 >= device.flops > 1e13


def test_every_device_has_the_latents():
    """Multi-head latent attention: 576 numbers a token and layer, and each device has some of the 128 heads."""
    lm = abstract({**PRESETS["deepseek-v3"], "num_hidden_layers": 4})
    one, = plan(lm, "v5p:2x2x1", mesh=[(1, 4)], batch=8, capacity=4096, compile=False)
    assert one.counts.cache == pytest.approx(8 * 4096 * 4 * 576 * 2, rel=0.01)


@compiler
def test_entries_of_a_cache_count_with_the_zeros_behind_them():
    lm = abstract({**PRESETS["deepseek-v3"], "num_hidden_layers": 4})
    s = setup(lm, np.asarray(devices("v5e:2x2")), (1, 4), batch=8, capacity=4096)
    assert [read.entry for read in kv_reads(s)] == [8 * 640 * 2] * 4        # 576 channels in five tiles of 128 lanes
    counts = count(s)
    assert counts.cache_read == pytest.approx(counts.cache, rel=1e-4) and counts.cache_written == 4 * 8 * 640 * 2


def test_a_token_reads_few_rows_of_the_tables_of_n_grams():
    own = {"model_type": "qwen4_exp_text", **COMMON, **QWEN4}
    small, large = (count(setup(abstract({**own, "ngram_vocab_size_base": n}), None, (1, 1), batch=2, capacity=64))
                    for n in (50, 5000))
    assert large.weights > 2.5 * small.weights
    assert (large.weights_read, large.flops, large.prompt_flops) == (
        small.weights_read, small.flops, small.prompt_flops)


@pytest.mark.wide
def test_recurrent_layers_have_states_in_place_of_keys_and_values():
    """One layer of ten attends; the others have states of 48 heads and the last 3 inputs of their convolution."""
    lm = abstract({**PRESETS["granite-4.0-h-tiny"], "num_hidden_layers": 10})
    one = lambda live: plan(lm, "v5e:2x4", mesh=[(2, 4)], batch=16, live=live, compile=False)[0].counts
    states = 9 * 8 * (12 * 128 * 64 * 4 + 3 * (12 * 64 + 2 * 128) * 2)
    entry = 8 * 2 * 128 * 2
    assert one(8192).cache == pytest.approx(states + 8192 * entry, rel=1e-4)
    assert one(1024).cache_read == pytest.approx(states + 1024 * entry, rel=1e-4)
    assert one(1024).cache_written == pytest.approx(states + entry, rel=1e-4)


@pytest.mark.wide
def test_what_a_compiled_round_does_not_run_is_not_counted():
    """Blocks of rows of experts that no token chose, and blocks of the cache before a sliding window."""
    lm = abstract({**PRESETS["gpt-oss-20b"], "num_hidden_layers": 2})
    s = setup(lm, None, (1, 8), batch=16, capacity=8192)
    assert blocks_of_experts(s) == {64 // 8 + 32: 28}       # 32 (1 - (7/8) ** 16) experts, hardly any with 9 rows
    calls = lambda n: "\n".join(("ENTRY %main (x: f32[2]) -> f32[2] {", *(
        f"  %cache_attention.{i} = f32[2]{{0}} custom-call()" for i in range(n)), "}"))
    lm = abstract({**PRESETS["gemma-3-27b"], "num_hidden_layers": 6})
    s = setup(lm, None, (1, 8), batch=16, capacity=8192)
    entry = 16 * 2 * 2 * 128 * 2
    assert skipped(s, parse(calls(6))) == 5 * entry * (8192 - 2048)      # 5 windows of 1,024 in blocks of 2,048
    assert skipped(s, parse(calls(5))) == 0


@pytest.mark.wide
@pytest.mark.parametrize("name", often(["smollm2-135m", "lfm2-1.2b", "phi-4"], SLICES))
def test_presets_fit_their_slices(name):
    assert set(SLICES) == set(PRESETS)
    where, mesh = SLICES[name]
    p, = plan(name, where, mesh=[mesh], compile=False)
    assert p.fits and math.prod(mesh) == p.slice.count


def test_errors_name_what_is_wrong():
    for given, message in (
            (dict(model="llama-3-8"), "model: got 'llama-3-8', .*near ones: llama-3-8b"),
            (dict(topology="v5x:2x4"), "topology: got 'v5x:2x4', takes v4, .* or here; did you mean v5"),
            (dict(topology="zz:2x2"), "topology: got 'zz:2x2', takes v4, .* l4 or here$"),
            (dict(topology="v5e:2by4"), "takes a device and its topology"),
            (dict(mesh=[(4, 4)]), "mesh: got 4x4, takes at most the 8 devices of v5e:2x4"),
            (dict(batch=3, mesh=[(2, 4)]), "batch: got 3, takes a multiple of the 2 replicas"),
            (dict(live=9000), "live: got 9000, takes at most the capacity 8192"),
            (dict(batch=0), "batch: got 0"), (dict(tokens_per_round=0), "tokens_per_round: got 0"),
            (dict(algorithm="prompt-lokup"), "near ones: prompt-lookup"), (dict(weights="int3"), "int3"),
            (dict(draft="llama-3-8b"), "draft: can only be given with an algorithm by name")):
        with pytest.raises(ValueError, match=message):
            plan(**{"model": "llama-3-8b", "topology": "v5e:2x4", "compile": False, **given})


@pytest.mark.wide
@compiler
@pytest.mark.parametrize(("name", "topology", "mesh", "options"), often([("llama-3-8b", "v5e:2x4", (2, 4), {})], [
    ("llama-3-8b", "v5e:2x4", (2, 4), {}), ("llama-3-8b", "v5e:2x4", (1, 8), {"algorithm": "prompt-lookup:length=4"}),
    ("qwen3-30b-a3b", "v5e:4x4", (4, 4), {}), ("gemma-3-27b", "v6e:2x4", (1, 8), {}),
    ("llada-8b", "v5p:2x2x1", (1, 4), {"capacity": 512}), ("llama-3-8b", "v5e:2x4", (1, 8), {"weights": "int8"})]))
def test_the_compiler_agrees(name, topology, mesh, options):
    """Weights and cache are the compiled program's arguments, and the bytes of a round those that it moves."""
    lm = abstract({**PRESETS[name], "num_hidden_layers": 6, "n_layers": 6} if name != "llada-8b" else
                  {**PRESETS[name], "n_layers": 6})
    p = plan(lm, topology, mesh=[mesh], batch=16, **{"capacity": 2048, **options})[0]
    assert p.compiled is not None and p.compiled.fits and p.padded == pytest.approx(1, abs=0.01)
    if name not in ("qwen3-30b-a3b", "llada-8b"):
        assert p.compiled.moved / p.counts.moved == pytest.approx(1, abs=0.1)
        assert p.compiled.collectives >= 12


@pytest.mark.wide
@compiler
def test_along_an_axis_of_experts_no_cache_and_no_attention_is_repeated(monkeypatch):
    monkeypatch.setitem(PRESETS, "mixture", PRESETS["qwen3-30b-a3b"] | {
        "num_hidden_layers": 2, "num_experts": 32, "num_experts_per_tok": 4, "hidden_size": 1024, "vocab_size": 32_000})
    p, = plan("mixture", "v5e:2x2", batch=16, capacity=4096, mesh=[(1, 1, 4)])
    dense, = plan("mixture", "v5e:2x2", batch=16, capacity=4096, mesh=[(4, 1)], compile=False)
    assert p.counts.cache == dense.counts.cache and p.counts.cache_read == dense.counts.cache_read
    assert dense.counts.weights - p.counts.weights == 2 * 24 * 3 * 1024 * 768 * 2      # 24 of 32 experts are elsewhere
    assert p.compiled is not None and p.compiled.fits and p.padded == pytest.approx(1, abs=0.01)
    text = p.compiled.text
    assert "bf16[4,4,4096,256]" in text and "bf16[16,4,4096,256]" not in text       # keys and values of 4 of 16 rows
    assert p.compiled.moved < 1.1 * p.counts.moved


@pytest.mark.full
@compiler
def test_the_largest_batch_is_one_that_fits():
    lm = abstract({**PRESETS["llama-3-8b"], "num_hidden_layers": 2})
    ask = lambda batch: plan(lm, "v5e:1x1", batch=batch, capacity=8192)[0]
    largest = ask(16).largest
    assert ask(largest).fits and not ask(math.ceil(1.05 * largest)).fits


@pytest.mark.wide
def test_packed_weights_that_are_planned_as_arrays_are_named(tmp_path):
    config = {**PRESETS["gpt-oss-20b"], "num_hidden_layers": 1, "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    at = functools.partial(plan, tmp_path, "v5e:2x2", batch=4, capacity=64, mesh=[(1, 4)], compile=False)
    with pytest.warns(UserWarning, match=r"are packed \(mxfp4\), and planned as bfloat16; weights= names"):
        arrays, = at()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        packed, = at(weights="mxfp4")
    assert packed.counts.weights < 0.7 * arrays.counts.weights


def test_this_machine(monkeypatch):
    here = slice_of("here")
    assert here.count == jax.local_device_count() and 1e8 < here.device.bandwidth < 1e13 and here.device.flops > 1e8
    monkeypatch.setattr(front_module, "slice_of", lambda name: here)
    assert plan("pycode", "here", batch=here.count, capacity=256)[0].tokens_per_second > 1


def test_speeds_are_predicted_from_tokens_per_forward():
    rows = [Row("completion", 8, PLAIN, None, 8, tokens_per_forward=1.0),
            *(Row("completion", 8, name, None, 8, tokens_per_forward=2.0)
              for name in ("prompt-lookup:length=4", "speculative-sampling:length=4", "layerskip")),
            Row("completion", 8, "lookahead", None, 8, error="broke")]
    from decodax import algorithms
    chosen = {row.system: algorithms.parse(row.system) for row in rows[1:]}
    found, said = predict(Comparison(rows, {"model": "pycode"}), chosen, "v5e:2x4", "llama-3-8b", draft_share=0.1)
    lookup, drafts, layers, broken = found
    plain, window = (plan("llama-3-8b", "v5e:2x4", batch=8, capacity=4096, mesh=[(1, 8)], compile=False, **more)[0]
                     for more in ({}, {"algorithm": "prompt-lookup:length=4"}))
    assert lookup.speedup == pytest.approx(2 * plain.seconds / window.seconds)
    assert drafts.speedup == pytest.approx(2 * plain.seconds / (window.seconds + 4 * 0.1 * plain.seconds))
    assert layers.speedup is None and "the cost of its drafts" in layers.reason and broken.reason == "broke"
    assert any("mesh 1x8" in line for line in said) and len(lookup.cells()) == len(layers.cells())
    head, _ = predict(Comparison([rows[0], dataclasses.replace(rows[1], system="eagle-3")], {}), {"eagle-3": (
        "eagle-3", {})}, "v5e:2x4", "llama-3-8b", trained={"eagle-3": Trained(0.05, 3, 5)})
    assert head[0].speedup == pytest.approx(2 * plain.seconds / (window.seconds + 3 * 0.05 * plain.seconds))
    few = dataclasses.replace(abstract("llama-3-8b"), params={"a": jax.ShapeDtypeStruct((10,), "float32")})
    assert share(abstract("llama-3-8b"), few) == pytest.approx(40 / 16.06e9, rel=1e-3) and share(few, None) is None


def test_the_command_line(capsys):
    assert main(["plan", "--model", "llama-3-8b", "--topology", "v5e:2x4", "--batch", "8", "--no-compile", "--json",
                 "--price", "v5e=1.5"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert next(p["mesh"] for p in found if p["fits"]) == [1, 8] and found[0]["cost"] > 0
    assert main(["plan", "--model", "llama-3-8b", "--topology", "v5e:2x4", "--batch", "8", "--no-compile"]) == 0
    told = capsys.readouterr()
    assert "does not fit" in told.out and "~" in told.out and "assumed: v5e: 819 GB/s" in told.err
    assert "prompts: v5e:2x4 1x8: " in told.err and "ms for 8,192 tokens of one row\n" in told.err
    for arguments, message in ((["--mesh", "8"], "--mesh: takes DATAxMODEL"), (["--price", "v5e"], "--price: takes"),
                               (["--batch", "0"], "batch: got 0")):
        assert main(["plan", "--model", "llama-3-8b", "--topology", "v5e:2x4", "--no-compile", *arguments]) == 2
        assert message in capsys.readouterr().err


def test_a_slice_is_whole():
    with pytest.raises(ValueError, match="topology"):
        slice_of("v5e:0x4")
    assert isinstance(slice_of("l4:2"), Slice)
