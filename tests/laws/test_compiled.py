"""What the compiled programs must not do: copy the cache, keep logits, call the host, trace again, wait for other
replicas. Read from the programs' text; no array is computed unless a law says so."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import AxisType

import decodax as dx
from decodax.algorithms import diffusion
from decodax.algorithms.plain import Autoregressive
from decodax.algorithms.speculative import NOTHING, Adaptive, Automatic, Rejection, Speculative
from decodax.algorithms.speculative.drafts import (
    DraftModel,
    DynamicExit,
    LayerSkip,
    Lookahead,
    PromptLookup,
    TokenRecycling,
)
from decodax.algorithms.speculative.trees import Chain, Fixed
from decodax.bench.report import callbacks, collectives, parse
from decodax.core import drivers
from decodax.core.types import Params
from decodax.core.window import causal
from decodax.io.load import LM
from decodax.models.config import llama
from decodax.models.diffusion import Diffusion
from decodax.models.transformer import Transformer
from decodax.sampling import build
from decodax.sharding import lanes, place
from tests.laws import cases
from tests.laws.compiled import CAPACITY, ENTRIES, NETWORK, VOCABULARY, abstract, compiled, copies_in_loops
from tests.matrix import often

pytestmark = pytest.mark.xdist_group("compiled")      # its programs are compiled once


ALGORITHMS = {
    "autoregressive": Autoregressive(),
    "lookup": Speculative(PromptLookup(length=4)),
    "lookup-rejection": Speculative(PromptLookup(length=4), Rejection()),
    "llada": diffusion.MaskedDiffusion(diffusion.Adapter(VOCABULARY - 1), diffusion.Blocks(8)),
}
# drafts with caches, trees, probes and rounds of several shapes; the draft model's cache has the target's size
WIDER = {
    "draft-model": Speculative(DraftModel(NETWORK), shape=Chain(3)),
    "draft-tree": Speculative(DraftModel(NETWORK), shape=Fixed.balanced(2, 2)),
    "recycling": Speculative(TokenRecycling(Fixed.balanced(2, 2), k=2)),
    "lookahead": Speculative(Lookahead(3, 3, 2)),
    "layerskip": Speculative(LayerSkip(1), shape=Chain(3)),
    "del": Speculative(DynamicExit(length=3)),
    "dual-cache": diffusion.MaskedDiffusion(diffusion.Adapter(VOCABULARY - 1), diffusion.Blocks(8),
                                            caching=diffusion.DualCache()),
    "delayed-cache": diffusion.MaskedDiffusion(diffusion.Adapter(VOCABULARY - 1), diffusion.Blocks(8),
                                               caching=diffusion.DelayedTokens(1, 4, packed=(48,))),
    "feature-cache": diffusion.MaskedDiffusion(diffusion.Adapter(VOCABULARY - 1), diffusion.Blocks(8),
                                               caching=diffusion.Similarity(size=32)),
    "block-cache": diffusion.MaskedDiffusion(diffusion.Adapter(VOCABULARY - 1, attention=diffusion.BlockCausal(8)),
                                             diffusion.Blocks(8, aligned=True), caching=diffusion.BlockCache()),
    "adaptive": Adaptive((NOTHING, Speculative(PromptLookup(length=4), shape=Chain(2)),
                          Speculative(PromptLookup(length=4))), Automatic((1.0, 1.1, 1.2))),
}


PROGRAMS = [("autoregressive", "advance"), ("autoregressive", "prefill"),
            *((name, "advance") for name in ("lookup", *WIDER))]
# one of a kind: prefill, a draft model's own cache and a tree, a state that is no cache, a cache that is rewritten, and
# rounds of several shapes
OFTEN = [*PROGRAMS[:2], *((name, "advance") for name in ("draft-tree", "recycling", "dual-cache", "adaptive"))]


@pytest.mark.wide(but=("autoregressive-advance-8", "autoregressive-prefill-8", "recycling-advance-8"))
@pytest.mark.parametrize(("algorithm", "driver", "batch"), often(
    [(*p, 8) for p in OFTEN], [(*p, n) for p in PROGRAMS for n in (1, 8)]))
def test_no_round_copies_the_cache(algorithm, driver, batch):
    program = parse(compiled((ALGORITHMS | WIDER)[algorithm], batch, driver).as_text())
    assert program.loops()
    assert copies_in_loops(program, batch * ENTRIES) == []


@pytest.mark.full
def test_a_cache_that_renews_layers_copies_what_it_computed_and_nothing_that_it_held():
    """What it computes of a layer has the size of the cache, so the law above cannot tell them apart."""
    alg = diffusion.MaskedDiffusion(diffusion.Adapter(VOCABULARY - 1), diffusion.Leading(32, 8),
                                    unmask=diffusion.Threshold(), caching=diffusion.Drift(VOCABULARY - 1, 8))
    found = copies_in_loops(parse(compiled(alg, 8).as_text()), 8 * ENTRIES)
    streams = (8, CAPACITY, 32)     # of as many elements
    held = [x for x in found if x.opcode == "copy" and "(%get-tuple-element" in x.text]
    assert [x for x in held if x.result[0].dims != streams] == []


def test_a_write_that_does_not_wait_for_the_readers_is_seen_to_copy():
    """What the law above looks for does happen: without a decision between attention and commit XLA copies."""
    def body(carry):
        step, cache, total = carry
        window = causal(jnp.zeros((8, 1), jnp.int32), jnp.full(8, step))
        out = NETWORK.apply(weights, window, cache)
        return step + 1, cache.commit(out.entries, window.positions), total + out.hidden.sum()

    weights = NETWORK.abstract_params()
    cache = jax.eval_shape(lambda: NETWORK.init_cache(8, CAPACITY))

    def loop(given, cache):
        nonlocal weights
        weights = given
        return jax.lax.while_loop(lambda c: c[0] < 9, body, (jnp.int32(0), cache, jnp.float32(0)))

    program = parse(jax.jit(loop, donate_argnums=1).lower(weights, cache).compile().as_text())
    assert copies_in_loops(program, 8 * ENTRIES)


@pytest.mark.parametrize("driver", ["advance", "prefill"])
def test_the_whole_state_is_donated(driver):
    alg = ALGORITHMS["autoregressive"]
    program, state = compiled(alg, 8, driver), abstract(alg, 8)[2]
    leaves = len(jax.tree.leaves(state if driver == "advance" else state.cache))
    aliases = re.search(r"input_output_alias=\{(.*?)\}, entry", program.as_text().partition("\n")[0]).group(1)
    assert len(re.findall(r"(?:may|must)-alias", aliases)) == leaves
    memory = program.memory_analysis()
    # what is not aliased is the table of pointers to the results, and a prefill's new status
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes <= 8 * leaves + 64
    assert memory.alias_size_in_bytes >= 2 * 8 * ENTRIES * 4
    if driver == "advance":     # a prefill's activations are a whole chunk's
        assert memory.temp_size_in_bytes < 8 * ENTRIES * 4


def carries(jaxpr):
    """What the outermost loops of a program carry."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "while":
            yield [v.aval for v in eqn.outvars]
        else:
            for inner in jaxprs_in_params(eqn.params):
                yield from carries(inner)


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_no_round_hands_a_vocabulary_to_the_next(algorithm):
    chain = dict(repetition_penalty=1.2, presence_penalty=0.1, frequency_penalty=0.1, top_p=0.9)
    if algorithm != "llada":
        chain |= dict(no_repeat_ngram_size=3, bad_words_ids=[[3], [4, 5]], mirostat_tau=2.0, dry_multiplier=0.8)
    alg = ALGORITHMS[algorithm]
    run = lambda *arguments: drivers.advance(alg, NETWORK, *arguments, np.int32(5))
    carried = list(carries(jax.make_jaxpr(run)(*abstract(alg, 2, **chain)).jaxpr))
    assert len(carried) == 1 and len(carried[0]) > 10
    wide = [a for a in carried[0] if any(n and n % VOCABULARY == 0 for n in a.shape)]
    assert not wide


@pytest.mark.wide
@pytest.mark.parametrize("algorithm", often(["lookup", "llada"], ALGORITHMS))
def test_a_second_call_traces_nothing(algorithm):
    network, weights = cases.model("llama")
    lm = LM(model=network, params=weights, vocab_size=cases.VOCABULARY,
            diffusion=Diffusion(cases.MASK) if algorithm == "llada" else None)
    options = dict(algorithm=cases.ALGORITHMS[algorithm], top_p=0.9, repetition_penalty=1.1)
    dx.generate(lm, [[1, 2, 3, 4, 5, 6], [7, 8, 7, 8]], temperature=0.7, seed=1, eos_token_id=[0], max_new_tokens=12,
                **options)
    with jax.no_tracing(True):
        out = dx.generate(lm, [[3, 4, 3, 4, 3, 4, 3], [9, 2, 9, 2, 9]], temperature=1.2, seed=[5, 6], eos_token_id=[6],
                          max_new_tokens=[20, 9], **{**options, "top_p": 0.5, "repetition_penalty": [1.3, 0.9]})
    assert out.lengths.max() <= 20 and out.lengths[1] <= 9


@functools.cache
def sharded(driver, algorithm="autoregressive"):
    """The program of 8 devices, data 2 x model 4, as text."""
    if len(jax.devices()) < 8:
        pytest.skip("needs 8 devices: XLA_FLAGS=--xla_force_host_platform_device_count=8")
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    # four parts of a vocabulary of 1,000 are not whole blocks of a draw
    network = Transformer(llama(vocab=1000, width=32, layers=2, heads=8, kv_heads=4, mlp=64, context=256))
    params = Params(jax.device_put(network.init_params(jax.random.key(0)), network.shardings(mesh)))
    chain = place(mesh, build(8, vocab_size=1000, temperature=0.8, top_p=0.9))
    tokens, lengths = place(mesh, jnp.zeros((8, 64), jnp.int32)), place(mesh, jnp.full(8, 9, jnp.int32))
    alg = ALGORITHMS[algorithm]
    s = drivers.begin(alg, network, params, chain, tokens, lengths, size=256, max_new=np.int32(30))
    if driver == "lanes":
        run = jax.jit(lambda p, c, s: lanes(alg, network, p, c, s, jnp.int32(5), mesh), donate_argnums=2)
        return run.lower(params, chain, s).compile().as_text()
    return drivers.advance.lower(alg, network, params, chain, s, np.int32(5)).compile().as_text()


REPLICAS = ({0, 1, 2, 3}, {4, 5, 6, 7})


@pytest.mark.wide
@pytest.mark.parametrize("algorithm", often(["lookup-rejection"], ALGORITHMS))
def test_lanes_never_wait_for_another_replica(algorithm):
    waits = collectives(parse(sharded("lanes", algorithm)))
    assert waits        # inside a replica the model's parts do
    assert [x.name for x, groups in waits if not all(any(set(g) <= r for r in REPLICAS) for g in groups)] == []
    # on CPU it waits for all devices, whatever its pairs say
    assert [x.name for x, _ in waits if x.opcode.startswith("collective-permute")] == []


@pytest.mark.wide
def test_one_loop_over_the_mesh_does_wait():
    """What lanes are for, and that the law above would see it."""
    groups = [g for _, groups in collectives(parse(sharded("advance"))) for g in groups]
    assert any(not any(set(g) <= r for r in REPLICAS) for g in groups)


@pytest.mark.parametrize("algorithm", ["autoregressive", "lookup"])
def test_no_program_calls_the_host(algorithm):
    assert callbacks(parse(compiled(ALGORITHMS[algorithm], 8).as_text())) == []


def test_the_lanes_program_calls_no_host():
    assert callbacks(parse(sharded("lanes"))) == []
