"""Draft lengths for a large model: the costs are those of `plan`, the acceptance that of the measurement."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import decodax as dx
from decodax.algorithms.speculative import Speculative
from decodax.algorithms.speculative.drafts import DraftModel, PromptLookup
from decodax.algorithms.speculative.trees import Chain
from decodax.bench.comparison import PLAIN, Comparison, Row
from decodax.bench.plan import PRESETS, abstract, plan
from decodax.bench.plan.aot import loops
from decodax.bench.plan.windows import LengthCosts, columns, windows
from decodax.bench.report import parse
from decodax.models.drafters.specs import head_shardings
from decodax.train.drafting.systems import objective_of

BY_DEPTH = (0.8, 0.6, 0.5, 0.4)


def test_the_length_that_pays_is_the_fastest_and_plain_where_none_is() -> None:
    one = LengthCosts("t", 8, "s", 1.0, (1, 2, 4), (1.8, 2.4, 3.3), (1.2, 1.4, 3.0))
    assert one.pays == (2, pytest.approx(2.4 / 1.4)) and one.json()["speedups"][2] == pytest.approx(1.1)
    none = LengthCosts("t", 64, "s", 1.0, (1, 2), (1.8, 2.4), (2.0, 3.0))
    assert none.pays == (0, 1.0) and none.cells((1, 2))[-1] == "plain, 1.00"
    assert len(columns((1, 2, 4))) == len(one.cells((1, 2, 4)))


@pytest.mark.parametrize(("devices", "parts"), [(8, 8), (16, 1)])
def test_a_head_lies_on_a_mesh_like_a_decoder(devices: int, parts: int) -> None:
    """The kernels whose outputs or inputs are divided, and what stays whole if the 8 heads of keys do not divide."""
    lm = abstract(PRESETS["llama-3-8b"])
    head: Any = objective_of("eagle-3", lm, None, None).head
    weights = head.abstract_params("bfloat16")
    mesh = jax.sharding.AbstractMesh((2, devices), ("data", "model"))
    where = head_shardings(head, weights, mesh)
    part = {jax.tree_util.keystr(path, simple=True, separator="."): s.shard_shape(x.shape) for (path, x), s in zip(
        jax.tree_util.tree_flatten_with_path(weights)[0], jax.tree.leaves(where), strict=True)}
    assert part["layers.0.attn.q.kernel"] == (8192, 4096 // parts) and part["norm.scale"] == (4096,)
    assert part["layers.0.attn.o.kernel"] == (4096 // parts, 4096)
    assert part["layers.0.mlp.up.kernel"] == (4096, 14_336 // devices)
    assert part["layers.0.mlp.down.kernel"] == (14_336 // devices, 4096)
    assert part["lm_head.kernel"] == (4096, 128_256 // devices) and part["taps.kernel"] == (12_288, 4096)


def test_a_drafters_loop_counts_as_often_as_it_runs_even_if_its_cache_has_the_targets_shape() -> None:
    bounded, blocks = ("%i = s32[] get-tuple-element(%c), index=0", "%n = s32[] constant(6)"), (
        "%i = s32[] get-tuple-element(%c), index=0", "%n = s32[] get-tuple-element(%c), index=1")
    lines = []
    for name, lower in (("drafts", bounded), ("blocks", blocks)):
        carry = "(s32[], s32[], f32[1,2,512,16])"
        lines += [f"%{name}.cond (c: {carry}) -> pred[] {{", f"  %c = {carry} parameter(0)", *(f"  {x}" for x in lower),
                  "  ROOT %lt = pred[] compare(%i, %n), direction=LT", "}",
                  f"%{name}.body (c: {carry}) -> {carry} {{", f"  ROOT %c = {carry} parameter(0)", "}"]
    whole = "(s32[], s32[], f32[1,2,512,16], f32[99,512])"
    lines += ["ENTRY %main (c: (s32[], s32[], f32[1,2,512,16])) -> s32[] {",
              f"  %c = {whole} parameter(0)",
              f"  %outer = {whole} while(%c), condition=%blocks.cond, body=%blocks.body",
              *(f"  %{x} = (s32[], s32[], f32[1,2,512,16]) while(%c), condition=%{x}.cond, body=%{x}.body"
                for x in ("drafts", "blocks")), "  ROOT %i = s32[] get-tuple-element(%c), index=0", "}"]
    program = parse("\n".join(lines))
    own = jax.device_put(jnp.zeros((1, 2, 512, 16)), jax.devices()[0])
    setup: Any = SimpleNamespace(state=SimpleNamespace(cache=[own]), capacity=512, live=256, rows=1, width=1,
                                 mesh=SimpleNamespace(shape={}),
                                 algorithm=SimpleNamespace(traits=SimpleNamespace(caches=True)),
                                 lm=SimpleNamespace(model=SimpleNamespace(config=SimpleNamespace(layers=()))))
    trips = loops(setup, program)[1]
    assert trips(program.computations["main"]["drafts"]) == 6
    assert trips(program.computations["main"]["blocks"]) == 1


@pytest.mark.wide
def test_predictions_take_rounds_from_shapes_and_drafters_of_the_large_model() -> None:
    pycode = dx.load("pycode")
    lm = abstract({**PRESETS["llama-3-8b"], "num_hidden_layers": 4})
    made = {"lookup": Speculative(PromptLookup(4)), "small": Speculative(DraftModel(dx.load("pycode-draft")),
                                                                         shape=Chain(4)),
            "head": dx.algorithms.make("eagle-3", pycode, None, length=4), "automatic": dx.Autoregressive()}
    rows = [Row("t", 1, PLAIN, None, 8, tokens_per_forward=1.0),
            *(Row("t", 1, name, None, 8, tokens_per_forward=3.0, accepted_by_depth=BY_DEPTH) for name in made)]
    names = {"lookup": "prompt-lookup", "small": "seed-exact", "head": "eagle-3", "automatic": "automatic"}
    found, said = windows(Comparison(rows, {"model": "pycode"}), {n: (names[n], x) for n, x in made.items()}, "v5e:2x4",
                          lm, batch=(1, 256), lengths=(2, 4), draft_share=0.1, compile=False)
    by = {(one.system, one.batch): one for one in found}
    base = plan(lm, "v5e:2x4", batch=256, capacity=2048, live=1024, compile=False)[0]
    window = plan(lm, "v5e:2x4", batch=256, capacity=2048, live=1024, mesh=[base.mesh], compile=False,
                  algorithm="prompt-lookup:length=4")[0]
    lookup, small, head = (by[name, 256] for name in ("lookup", "small", "head"))
    assert lookup.tokens == (pytest.approx(2.4), pytest.approx(3.3)) and lookup.plain == pytest.approx(base.seconds)
    assert lookup.seconds[1] == pytest.approx(window.seconds)
    assert small.seconds[1] == pytest.approx(window.seconds + 4 * 0.1 * base.seconds)
    # EAGLE-3 reads three layers of the large model, and has a quarter of its vocabulary
    width, mlp, heads, vocab = 4096, 14_336, 32 + 2 * 8, 128_256 // 4
    own = 3 * width * width + 2 * width * heads * 128 + width * width + 3 * width * mlp
    rows, across, taps = 256 // base.mesh[0], base.mesh[1], 3 * width * width     # all but the projection is divided
    own = taps + (own - taps) / across
    more = 2 * rows * (own * (5 + 3) + 4 * vocab * width / across) / base.slice.device.flops
    assert head.seconds[1] == pytest.approx(window.seconds + more, rel=0.02)
    assert by["lookup", 1].pays[0] == 4 and by["lookup", 1].speedups[1] > lookup.speedups[1]
    assert "another way" in (by["automatic", 1].reason or "") and any("counted from shapes" in line for line in said)
