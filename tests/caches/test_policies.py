"""Laws that every cache policy of the table keeps, on the smallest model that can break them."""

from __future__ import annotations

import dataclasses
import functools
import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.algorithms.speculative.drafts import DraftModel, PromptLookup
from decodax.algorithms.speculative.trees import Fixed
from decodax.cache.packed_heads import SEGMENT, pack, segment_attention, segments_of, unpack
from decodax.caches import (
    AttentionNet,
    Codebooks,
    Constant,
    Evicting,
    KeyBooks,
    KVFeatures,
    KVMaps,
    LessKernels,
    Predictors,
    make,
)
from decodax.caches.bounded.less import LayerKernels
from decodax.caches.evict.evicting import Eviction
from decodax.caches.evict.heads.adakv import AdaptiveHeads
from decodax.caches.evict.knorm import KeyNorm
from decodax.caches.evict.lagkv import LagRelative
from decodax.caches.evict.selection import Top
from decodax.caches.evict.snapkv import WindowAttention
from decodax.caches.prefill.propagation import Decoupled
from decodax.common.registry import CACHES
from decodax.core.types import fit_cache
from decodax.engine.batch import Job
from decodax.engine.request import Request
from decodax.io.load import LM
from decodax.models import Transformer, llama
from decodax.train.token_butler import first_butler
from tests.extending.pages import DOCS
from tests.matrix import often


def network(layers: int) -> LM:
    model = Transformer(llama(vocab=16, width=16, layers=layers, heads=4, kv_heads=2, mlp=24, context=256))
    params = jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, model.init_params(jax.random.key(5)))
    return LM(model=model, params=params, vocab_size=16)


SMALL, DEEP = network(1), network(2)
MODEL, PARAMS = SMALL.model, SMALL.params
DEEPER = ("pyramidkv", "knorm", "headkv", "minicache", "prefixkv", "fastkv", "promptdistill", "critiprefill",
          "act-qkv", "minference", "hyper-attention", "aqua-kv", "kv-prediction", "token-butler", "retro-attention")
"""What tells layers apart."""
# one ends in the middle of what the rules look at, and one is shorter than any budget
PROMPTS = [np.random.default_rng(i).integers(0, 16, n).tolist() for i, n in enumerate((41, 26, 5))]
# what is measured on models, here of any numbers: for up to 2 layers of 2 heads of 4
ANY = np.random.default_rng(0).standard_normal((2, 2, 2, 4, 2)).astype(np.float32)
BOOKS = Codebooks(Constant(ANY), Constant(-ANY))
FEATURES = KVFeatures(*(Constant(np.linalg.qr(ANY.reshape(8, 8))[0][None, :, :6].repeat(2, 0)),) * 2)
GUESSES = LM(model=MODEL, params=jax.tree.map(lambda x: 0.9 * x, PARAMS), vocab_size=16)
MAPS = np.random.default_rng(1).standard_normal((2, 17, 8)) / 4
PAIRS = np.random.default_rng(2).standard_normal((256, 2))
PREDICTORS = Predictors(*(Constant(x.astype(np.float32)) for x in (MAPS[:, :9], MAPS, PAIRS[:16], PAIRS)))
# of two layers from one, and of each from itself as it is
GUESSED = KVMaps(*(tuple(np.vstack([np.eye(8), np.zeros((1, 8))]).astype(np.float32) + part for part in each)
                   for each in (MAPS[:, :9].astype(np.float32), MAPS[:, 8:].astype(np.float32))), layers=(0, 0))
ITSELF = GUESSED.replace(**{name: (np.eye(9, 8, dtype=np.float32),) * 2 for name in ("keys", "values")}, layers=(0, 1))
CHANNELS = Constant(np.array([[[1, 0, 1, 0], [0, 0, 0, 0]], [[0, 1, 0, 0], [1, 1, 1, 1]]], bool))
SIZES = dict(query_in=(4, 4, 6), query_out=(4, 6, 3), key_in=(2, 4, 6), key_out=(2, 6, 3), scale=(2, 3),
             mix=(2, 3, 3), mix_scale=(2, 3))
KERNELS = LessKernels.of([LayerKernels(**{name: np.random.default_rng(i).standard_normal(size) / 2
                                          for i, (name, size) in enumerate(SIZES.items())})])
NET = AttentionNet.of([np.random.default_rng(4).standard_normal(size) / 2 for size in (
    (3, 1, 3, 3), (3,), (4, 3, 3, 3), (4,), (4,), ())])
BUTLER = first_butler(DEEP, reduce=2, inner=6, width=2, seed=3)
KEY_BOOKS = KeyBooks(Constant(ANY.reshape(2, 2, 4, 4)), Constant(np.tril(ANY.reshape(2, 2, 4, 4)) + 2 * np.eye(4)))
# in texts of 26 to 60 tokens, so that something goes in the prompts and while decoding
OPTIONS: dict[str, dict[str, Any]] = {
    "knorm": dict(budget=14, every=6, skip_layers=(0,)), "snapkv": dict(budget=14, window_size=4),
    "tova": dict(budget=14, every=3),
    "h2o": dict(budget=14, every=5), "observed-attention": dict(budget=0.4), "sink-window": dict(budget=14, every=2),
    "streaming-llm": dict(start_size=2, recent_size=12), "lagkv": dict(budget=0.6, every=7, lag_size=6),
    "keydiff": dict(budget=14, every=8), "cur": dict(budget=0.4),
    "expected-attention": dict(budget=14, every=9), "pyramidkv": dict(budget=14, window_size=4),
    "graphkv": dict(budget=14, window_size=4, neighbours=2, every=7),
    "chunkkv": dict(budget=14, window_size=4, chunk_length=4, every=8),
    "adakv": dict(budget=14, window_size=4, every=6),
    "adaptive-expected-attention": dict(budget=0.4), "criticalkv": dict(budget=14, window_size=4, floor_alpha=0.2),
    "capkv": dict(budget=0.4, every=10), "kivi": dict(bits=2, group_size=4, residual_length=8),
    "kv-adaquant": dict(key_bits=4, value_bits=2, group_size=4, residual_length=8),
    "gear": dict(bits=2, group_size=4, buffer=8, outliers=0.25, rank=1),
    "mustafar": dict(residual_length=8), "hydragen": {},
    "scope": dict(budget=14, decoding_window_size=6, decoding_recent_size=3, scheme="discontinuous", delta=4,
                  window_size=4),
    "minicache": dict(start_layer=0),
    "laq": dict(budget=14, max_lookahead_size=3, stage2_window_size=2, lookahead_window_size=6),
    "kvzip": dict(budget=0.4, chunk_size=17, n_sink=2, ask=(3, 1), go_on=(3, 2, 1), answer=(4,)),
    "paged": dict(pages=100, page=4), "context-parallel": dict(block=8),
    "recycled-attention": dict(budget=6, stride=5),
    "quantized-pruning": dict(budget=14, bits=4, group_size=4, residual_length=8, window_size=4),
    "prefixkv": dict(layers=(0.4, 0.3), start_size=2),
    "headkv": dict(heads=((0.1, 0.4), (0.3, 0.2)), budget=14, window_size=4),
    "kvcrush": dict(budget=14, every=5, block_size=2, kvcrush_budget=2, start_size=1, recent_size=3),
    "speckv": dict(draft=GUESSES, budget=14, lookahead_tokens=4, window_size=4),
    "less": dict(kernels=KERNELS, start_size=2, recent_size=9),
    "fastkv": dict(budget=0.3, tsp_length=0.5, window_size=4), "promptdistill": dict(budget=13),
    "shadowkv": dict(budget=8, chunk_size=4, rank=5, outlier_chunk=1, local_chunk=1),
    "quest": dict(budget=6, page_size=2, recent=12, skip=()),
    "retro-attention": dict(budget=6, window=3, page_size=2, recent=12, skip=()),
    "specpc": dict(draft=GUESSES, budget=14, lookahead_tokens=3, window_size=4, kernel_size=4, neighbours=3, first=0),
    "critiprefill": dict(budget=4, segment_size=4, block_size=2, threshold_len=8, skip=0),
    "minference": dict(vertical_size=2, slash_size=3, segment_size=16, last_q=4, first=1, near=2,
                       block_size=2, threshold=20),
    "quick-prefill": dict(keep=0.5, group_size=6, recent=3),
    "hyper-attention": dict(block_size=4, sample_size=3, min_seq_len=8, lsh_num_projs=3),
    "freqkv": dict(size=17, sinks=2),
    "subgen": dict(radius=2.0, clusters=5, keys=2, values=9, recent=7, every=4),
    "aqua-kv": dict(predictors=PREDICTORS, residual_length=8, sinks=2),
    "leank": dict(channels=CHANNELS, sinks=2, recent=5, every=3),
    "clusterkv": dict(budget=8, cluster_size=4, sinks=2, every=6, new_clusters=2, skip=()),
    "louiskv": dict(budget=8, tau=0.1, cluster_size=4, sinks=2, buffer=6, iterations=3),
    "zipcache": dict(stream_gap=8, probe_ratio=0.3),
    "qaq": dict(target_quantization_error=(0.05, 0.3), q_norm=10.0, last_n_attentions=3, outliers_ratio=0.2,
                mean_bits=3.5),
    "squat": dict(bits=2, group_size=4, residual_length=8, quant_group_size=2, subspace_dim=2),
    "cq": dict(codebooks=BOOKS, residual_length=8),
    "rotatekv": dict(order=Constant(np.arange(8, dtype=np.int32)[None, ::-1].repeat(2, 0)), sinks=3, residual_length=8),
    "cskv": dict(features=FEATURES, residual_length=8),
    "kv-prediction": dict(auxiliary=GUESSES, maps=GUESSED), "token-butler": dict(butler=BUTLER, budget=0.2, sinks=2),
    "attention-predictor": dict(net=NET, budget=10, sinks=2, recent=4, every=3, block_size=2, history=6, full=4),
    "specpv": dict(budget=8, sinks=1, window=1, block_size=4, buffer=5),
    "sentence-kv": dict(ends=(3, 7, 12), budget=18, factor=1.5, sinks=1, recent=12, window_size=4),
    "shotkv": dict(budget=14, pool=6, every=4, window_size=3, separator=(3, (7, 1))),
    "act-qkv": dict(budget=21, sinks=2, recent=13, block_size=2, window_size=8, representatives=2, samples=3, least=1,
                    room=11),
    "plphp": dict(image=(3, 9), rate=0.4, change=0.3, attentive=0.5, indifferent=0.4),
    "a2ats": dict(books=KEY_BOOKS, budget=0.2, sinks=2, recent=11),
    "tim": dict(open=0, close=8, depth=1, every=5)}
AT_ONCE = {"zipcache", "qaq", "minicache", "kv-prediction", "observed-attention", "lagkv", "cur", "capkv", "kvzip",
           "adaptive-expected-attention", "prefixkv", "token-butler", "plphp"}
"""What rounds from the first token on, or drops a share of any prompt; the others keep 8 tokens as they are."""
IN_PARTS = {"streaming-llm", "adakv", "adaptive-expected-attention", "criticalkv", "headkv", "minicache", "fastkv",
            "recycled-attention", "promptdistill", "shadowkv", "quest", "retro-attention", "specpc", "critiprefill",
            "minference", "hyper-attention", "freqkv", "less", "clusterkv", "louiskv", "kv-prediction", "token-butler",
            "attention-predictor", "specpv", "act-qkv", "a2ats"}
"""What keeps or reads a text in parts of its own, whose sums are added in another order than those of a dense cache."""
EXACT = {name for name in OPTIONS if CACHES[name].guarantee == "exact"}
LOOKUP = dx.Speculative(dx.drafts.PromptLookup(length=4))


@dataclasses.dataclass(frozen=True)
class FirstRows(dx.Speculative):
    """Drafts for the first three rows alone, so that one program decodes with drafts and without."""

    def propose(self, params: Any, policy: Any, s: Any) -> tuple[Any, Any]:
        window, (state, tree) = super().propose(params, policy, s)
        kept = (jnp.arange(s.batch) < 3)[:, None] | (jnp.arange(window.width) == 0)
        return window.replace(live=window.live & kept), (state, dataclasses.replace(tree, live=tree.live & kept))


BOTH = FirstRows(PromptLookup(length=4))
TREE = dx.Speculative(DraftModel(GUESSES), shape=Fixed.balanced(2, 2, 1))
TREES = FirstRows(DraftModel(GUESSES), shape=Fixed.balanced(2, 2, 1))


def test_every_policy_of_the_table_is_here() -> None:
    assert OPTIONS.keys() == CACHES.keys()


@functools.cache
def run(name: str, algorithm: Any = None, rows: tuple[int, ...] = (0, 1, 2), chunk: int = 512, **more: Any) -> Any:
    lm, name = (DEEP if name in DEEPER or name == "dense, deep" else SMALL), name.removesuffix(", deep")
    cache = None if name == "dense" else make(name, **{**OPTIONS[name], **more})
    return dx.generate(lm, [PROMPTS[i] for i in rows], cache=cache, request_ids=rows, algorithm=algorithm, seed=5,
                       max_new_tokens=20, temperature=[[0.0, 0.9, 0.0][i] for i in rows], logprobs=0, chunk=chunk)


def half(out: Any, which: Any) -> Any:
    return types.SimpleNamespace(tokens=out.tokens[which],
                                 logprobs=types.SimpleNamespace(raw=out.logprobs.raw[which]))


def dense(name: str) -> str:
    return "dense, deep" if name in DEEPER else "dense"


def same(one: Any, other: Any, atol: float = 1e-4) -> bool:
    return one.tokens.tolist() == other.tokens.tolist() and np.allclose(one.logprobs.raw, other.logprobs.raw, atol=atol)


def drafts_give_the_tokens_of_no_drafts(name: str, algorithm: Any) -> Any:
    out = run(name, algorithm, (0, 1, 2, 0, 1, 2))
    drafted = half(out, slice(0, 3))
    assert same(drafted, half(out, slice(3, 6)))
    assert out.stats.accepted[:3].sum() > 0 == out.stats.drafted[3:].sum()
    return drafted


@pytest.mark.wide(but=(
    "streaming-llm", "h2o", "adakv", "kivi", "paged", "sentence-kv", "recycled-attention", "expected-attention"))
@pytest.mark.parametrize("name", OPTIONS)
def test_drafts_give_the_tokens_of_no_drafts_whoever_is_in_the_batch(name: str) -> None:
    drafted = drafts_give_the_tokens_of_no_drafts(name, BOTH)
    others = run(name, BOTH, (2, 0, 0, 2, 1, 1))        # the same program; row 4 is without drafts
    for row, request in ((0, 2), (1, 0), (4, 1)):
        assert same(half(others, slice(row, row + 1)), half(drafted, slice(request, request + 1)))
    # a policy that changed nothing would pass: log-probabilities tell, tokens may agree by chance
    plain = half(run(dense(name), BOTH, (0, 1, 2, 0, 1, 2)), slice(0, 3))
    assert same(drafted, plain) == (name in EXACT)
    # while it holds everything it is the dense cache: the third prompt has 5 tokens
    assert same(half(drafted, np.s_[2:, :3]), half(plain, np.s_[2:, :3])) == (name in EXACT or name not in AT_ONCE)


@pytest.mark.wide(but=("recycled-attention",))
@pytest.mark.parametrize("name", OPTIONS)
def test_so_do_trees(name: str) -> None:
    drafts_give_the_tokens_of_no_drafts(name, TREES)


@pytest.mark.wide
@pytest.mark.parametrize("name", ["recycled-attention", "h2o", "sentence-kv", "louiskv", "gear"])
def test_so_do_drafts_on_another_cache(name: str) -> None:
    """What a policy asks of an entry beyond keys and values goes along beside the cache that drafts read."""
    drafted = run(name, dx.algorithms.make("magicdec", SMALL, budget=14))
    assert same(drafted, run(name)) and drafted.stats.accepted.sum() > 0


@pytest.mark.wide
@pytest.mark.parametrize(("name", "algorithm"), often(
    [("h2o", LOOKUP), ("gear", LOOKUP), ("adakv", TREE)], [(name, alg) for name in OPTIONS for alg in (LOOKUP, TREE)]))
def test_drafts_give_the_tokens_of_another_program_with_the_same_cache(name: str, algorithm: Any) -> None:
    drafted = run(name, algorithm)
    assert same(drafted, run(name)) and drafted.stats.accepted.sum() > 0


@pytest.mark.wide
@pytest.mark.parametrize("name", often(["snapkv", "pyramidkv", "adakv", "kivi"], [
    name for name in OPTIONS if name not in EXACT | {"zipcache", "qaq"}]))
def test_a_budget_that_holds_everything_is_the_dense_cache(name: str) -> None:
    wide = {"streaming-llm": {"recent_size": 200}, "gear": {"buffer": 200}, "minicache": {"retained": 1.0},
            "hyper-attention": {"min_seq_len": 200}, "quick-prefill": {"keep": 1.0}, "less": {"recent_size": 200},
            "freqkv": {"size": 200}, "leank": {"recent": 200}, "subgen": {"recent": 200},
            "shadowkv": {"budget": 200, "rank": 64}, "fastkv": {"budget": 200, "tsp_length": 200},
            "minference": {"vertical_size": 200}, "kv-prediction": {"auxiliary": DEEP, "maps": ITSELF},
            "quantized-pruning": {"budget": 200, "residual_length": 200},
            "shotkv": {"budget": 200, "pool": 200}, "tim": {"depth": 200}, "louiskv": {"budget": 200, "buffer": 200},
            "scope": {"budget": 200, "decoding_window_size": 400, "decoding_recent_size": 200},
            "prefixkv": {"layers": (1.0, 1.0)},
            "plphp": {"rate": 1.0, "change": 0.0},
            **{codec: {"residual": 200} for codec in (
                "kivi", "kv-adaquant", "mustafar", "squat", "cq", "rotatekv", "cskv", "aqua-kv")}}.get(
        name, {"budget": 200})
    everything = make(name, **{**OPTIONS[name], **wide})
    out, drafted = (dx.generate(DEEP if name in DEEPER else SMALL, PROMPTS, cache=everything, algorithm=algorithm,
                                seed=5, temperature=[0.0, 0.9, 0.0], max_new_tokens=20, logprobs=0)
                    for algorithm in (None, LOOKUP))
    want = run(dense(name))
    assert same(drafted, run(dense(name), LOOKUP))
    if name in IN_PARTS:
        assert same(out, want, atol=2e-6)
    else:
        assert out.tokens.tolist() == want.tokens.tolist() and np.array_equal(out.logprobs.raw, want.logprobs.raw)


@pytest.mark.wide
@pytest.mark.parametrize("name", often(["adakv", "snapkv", "lagkv"], OPTIONS))
def test_a_row_does_not_depend_on_its_batch_mates_or_on_chunks(name: str) -> None:
    alone, all_of_them = run(name, rows=(1,), chunk=7), run(name)
    assert alone.tokens.tolist() == all_of_them.tokens[1:2].tolist()
    np.testing.assert_allclose(alone.logprobs.raw, all_of_them.logprobs.raw[1:2], atol=1e-4)


def arrays(kind: Eviction, new: int = 20) -> Evicting:
    made = fit_cache(DEEP.model.with_cache(kind), new).init_cache(3, 256)
    assert isinstance(made, Evicting)
    return made


@pytest.mark.parametrize("name", [name for name, given in OPTIONS.items()
                                  if isinstance(given.get("budget"), int) and isinstance(make(name, **given),
                                                                                         Eviction)])
def test_memory_is_that_of_the_budget(name: str) -> None:
    """And of the tokens to come, or of those between two choices; whatever the length of the prompt."""
    kind = make(name, **OPTIONS[name])
    assert isinstance(kind, Eviction)
    slots = [x.shape[1] * x.shape[2] / 2 for i, x in enumerate(arrays(kind).kv) if i not in kind.skip]
    packed = SEGMENT - 1 if name in ("adakv", "criticalkv", "headkv") else 0
    more = {"pyramidkv": 10, "chunkkv": 4, "scope": 3 + 3, "shotkv": 6}.get(name, packed)
    assert max(slots) <= 14 + more + (kind.every or 20)
    assert np.mean(slots) <= 14 + (5 if name == "pyramidkv" else more) + (kind.every or 20)


@pytest.mark.wide
def test_heads_of_any_lengths_share_memory_and_are_attended_to() -> None:
    """One keeps everything, one nothing, and each has room for what is to come; against a softmax written out."""
    size, later, r = 90, 9, np.random.default_rng(0)
    kv, q = r.standard_normal((2, 3, size, 12)), r.standard_normal((2, 2, 6, 8))
    number = jnp.array([[size, 0, 33], [20, 41, 1]])
    segments = segments_of(size + 33, 3, later, size)
    starts, head, source = jax.vmap(lambda n: pack(jnp.broadcast_to(jnp.arange(size)[::-1], (3, size)), n, later, size,
                                                   segments))(number)
    ends = np.append(np.asarray(starts)[:, 1:], [[segments]] * 2, 1)
    assert ((ends - starts) * SEGMENT >= np.minimum(np.asarray(number) + later, size)).all()
    packed = jnp.stack([jnp.asarray(kv)[b, head[b], source[b]].reshape(segments, SEGMENT, 12) for b in range(2)])
    out, lse = segment_attention(jnp.asarray(q), packed, (source >= 0).reshape(2, segments, SEGMENT), starts, scale=0.4)
    for b, h, w in np.ndindex(2, 6, 2):
        own = kv[b, h // 2, ::-1][:int(number[b, h // 2])]
        np.testing.assert_allclose(unpack(packed[b], starts[b], number[b], size)[h // 2, :len(own)], own, atol=1e-6)
        if len(own):
            scores = 0.4 * own[:, :8] @ q[b, w, h]
            np.testing.assert_allclose(out[b, w, h], jax.nn.softmax(scores) @ own[:, 8:], atol=1e-5)
            np.testing.assert_allclose(lse[b, w, h], jax.nn.logsumexp(scores), atol=1e-5)
        else:
            assert lse[b, w, h] < -1e29 and not out[b, w, h].any()


SIZED = [name for name, policy in CACHES.items() if "budget" in policy.options]
LENGTH, LEFT = 40, 12       # of a prompt, and how many tokens of it are to stay
BYTES = LEFT * sum(2 * (4 * 8 + 4) for _ in range(2))       # of two layers of two heads
READING = ("a2ats", "token-butler")     # all tokens stay, and each query reads so many
UNEVEN = ("pyramidkv",)     # the paper divides tokens among layers as its authors do, and shares as kvpress does


def sized(name: str, budget: Any) -> Any:
    """A policy whose layers all evict."""
    every = {skip: () for skip in ("skip", "skip_layers") if skip in CACHES[name].options and name != "critiprefill"}
    return make(name, **OPTIONS[name] | every | {"budget": budget})


def refusal(name: str, budget: Any) -> str | None:
    """What a policy says of a form of budget that it does not take."""
    try:
        sized(name, budget)
    except ValueError as error:
        return str(error)
    return None


FORMS = (LEFT / LENGTH, f"{BYTES}B")
EVICTING = [name for name in SIZED if name not in READING and not any(refusal(name, form) for form in FORMS)]


def kept_of(name: str, budget: Any) -> list[list[int]]:
    """The positions that each layer keeps of a prompt, those of all heads together."""
    prompt = np.random.default_rng(7).integers(0, 16, LENGTH + 1).tolist()      # the newest token is not cached yet
    job = Job.begin(Request.read(DEEP, [prompt], cache=sized(name, budget), max_new_tokens=4))
    cache = job.state.cache
    while not hasattr(cache, "positions"):
        cache = cache.base
    return [sorted(at for at in np.asarray(x)[0].ravel().tolist() if at >= 0) for x in cache.positions]


@pytest.mark.parametrize("name", SIZED)
def test_a_policy_takes_a_form_of_budget_or_names_what_it_takes(name: str) -> None:
    assert refusal(name, 24) is None
    for form in FORMS:
        assert (refusal(name, form) or "budget").startswith("budget")


@pytest.mark.wide
@pytest.mark.parametrize("name", EVICTING)
def test_a_share_or_bytes_keep_what_as_many_tokens_keep(name: str) -> None:
    """The parts of a policy that are counted in tokens survive, whatever the budget is counted in."""
    tokens, share, size = (kept_of(name, budget) for budget in (LEFT, *FORMS))
    assert sum(map(len, tokens)) > 0
    for other in (share, size):
        if name in UNEVEN:
            assert sum(map(len, other)) == sum(map(len, tokens))
        else:
            assert other == tokens


def test_a_share_of_a_prompt_of_which_a_number_of_tokens_goes_on_is_as_many_tokens() -> None:
    """FastKV's deep layers, which see so many tokens of it."""
    rule = Decoupled(WindowAttention(4), 4, layer=0, passed=20)
    for layer in (0, 1):
        share, tokens = (rule.table(budget, LENGTH, layer, 2)[LENGTH] for budget in (LEFT / LENGTH, LEFT))
        assert share == tokens == LEFT


@pytest.mark.parametrize("budget", [LEFT, *FORMS])
def test_half_of_what_h2o_keeps_are_the_latest_tokens(budget: Any) -> None:
    for layer in kept_of("h2o", budget):
        late = [at for at in layer if at >= LENGTH - LEFT // 2]
        assert len(late) == LEFT // 2 * 2 and len(layer) == LEFT * 2        # of two heads


@pytest.mark.wide
@pytest.mark.parametrize("name", ["snapkv", "adakv", "knorm"])
def test_a_budget_in_bytes_holds_for_a_row(name: str) -> None:
    given = {"adakv": dict(window_size=4, head_cap=1.0), "snapkv": dict(window_size=4),
             "knorm": dict(skip_layers=())}[name]
    job = Job.begin(Request.read(DEEP, PROMPTS[:2], cache=make(name, budget="1.5kB", **given), max_new_tokens=4))
    each = 4 * job.state.cache.kv[0].shape[-1] + 4
    held = sum(np.asarray(count) for count in job.state.cache.count).sum(-1)[:2] * each
    assert 1500 - 2 * 2 * each < held[0] <= 1500


@pytest.mark.wide
def test_long_texts_stay_within_the_budget() -> None:
    job = Job.begin(Request.read(SMALL, PROMPTS[:2], cache=make("h2o", budget=20, every=10), max_new_tokens=180))
    slots = [x.shape[1] for x in job.state.cache.kv]
    while job.running:
        job.advance(None, rounds=1)
        # of each head of a layer: what was chosen, and what came since, fewer than `every`
        most = max(int(np.asarray(count).max()) for count in job.state.cache.count)
        assert most <= 30
    assert np.asarray(job.state.length - job.state.prompt_length)[:2].tolist() == [180, 180]
    assert most >= 20 and [x.shape[1] for x in job.state.cache.kv] == slots and max(slots) < 64


@pytest.mark.wide
def test_samples_and_a_mixed_batch_go_their_own_ways() -> None:
    out = dx.generate(SMALL, PROMPTS, cache="snapkv:budget=14,window_size=4", num_samples=2, temperature=1.0,
                      max_new_tokens=12, seed=3)
    alone = dx.generate(SMALL, PROMPTS[1:2], cache="snapkv:budget=14,window_size=4", num_samples=2, temperature=1.0,
                        max_new_tokens=12, seed=3, request_ids=[1])
    assert out.tokens[2:4].tolist() == alone.tokens.tolist() != [out.tokens[2].tolist()] * 2


def test_what_cannot_be_had_is_refused_by_name() -> None:
    for expected, wrong in (
            (r"^cache: unknown name 'snapvk'; near ones: snapkv", lambda: run_with("snapvk")),
            (r"^cache: 'snapkv' takes no option 'windw'; takes budget=2048", lambda: make("snapkv", windw=3)),
            (r"^cache: 'snapkv' takes no option 'windw'; takes budget=2048", lambda: run_with("snapkv:windw=3")),
            (r"^budget: got 0, takes a number of tokens from 1, a share", lambda: make("snapkv", budget=0)),
            (r"^budget: got 1.0, takes", lambda: make("knorm", budget=1.0)),
            (r"^budget: got '1XB', takes a number of tokens .* or bytes as", lambda: make("snapkv", budget="1XB")),
            (r"^budget: got '1MB', takes a whole number from 1", lambda: make("headkv", heads=((1.0,),), budget="1MB")),
            (r"^budget: got '1MB', takes a whole number from 1", lambda: make("quest", budget="1MB")),
            (r"^budget: got 300B, 2 tokens of this model, takes more than the 4", lambda: arrays(
                make("snapkv", budget="300B", window_size=4))),        # type: ignore[arg-type]
            (r"^budget: got 32, takes more than the 32 tokens that snapkv keeps", lambda: make("snapkv", budget=32)),
            (r"^every: got 0, takes a whole number from 1 or None", lambda: make("h2o", every=0)),
            (r"^offload: got 'no', takes True or False", lambda: CACHES.read("quest:offload=no").build()),
            (r"^every: got 4; eviction chooses once", lambda: Eviction(Top(KeyNorm()), 8, 4, close_up=True)),
            (r"^budget: got one for each of 3 layers, the model has 2", lambda: arrays(
                Eviction(Top(KeyNorm()), (8, 8, 8)))),
            (r"^window_size: got 0", lambda: WindowAttention(0)),
            (r"^kernel_size: got 4", lambda: WindowAttention(8, 4)),
            (r"^floor_alpha: got 2", lambda: AdaptiveHeads(KeyNorm(), 2)),
            (r"^lag_size: got 1", lambda: LagRelative(4, 1)),
            (r"^register: the name 'h2o' of .* is taken by decodax.caches.evict.h2o",
             lambda: CACHES.register("h2o")(make)),
            (r"^register 'x': guarantee: got 'none'",
             lambda: CACHES.register("x", guarantee="none"))):      # type: ignore[arg-type]
        with pytest.raises(ValueError, match=expected):
            wrong()


@pytest.mark.parametrize("name", ["act-qkv", "token-butler"])
def test_what_stands_beside_no_other_cache_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=r"^cache: got \w+, which stands beside no other cache, and drafts read one"):
        dx.generate(DEEP, PROMPTS, cache=make(name, **OPTIONS[name]), algorithm=dx.algorithms.make("magicdec", DEEP,
                                                                                                   budget=14),
                    max_new_tokens=2)


def run_with(cache: str) -> Any:
    return dx.generate(SMALL, PROMPTS[:1], cache=cache, max_new_tokens=2)


@pytest.mark.wide
def test_scores_of_queries_refuse_a_soft_cap() -> None:
    """Else they would count other weights than attention has."""
    capped = dataclasses.replace(MODEL.config, attention_softcap=5.0)
    lm = dataclasses.replace(SMALL, model=Transformer(capped))
    with pytest.raises(ValueError, match=r"^cache: h2o takes a model without soft caps of its attention"):
        dx.generate(lm, PROMPTS[:1], cache=make("h2o", budget=20), max_new_tokens=2)
    assert dx.generate(lm, PROMPTS[:1], cache=make("knorm", budget=20, skip_layers=()),
                       max_new_tokens=2).lengths.tolist() == [2]


@pytest.mark.matrix
def test_two_thousand_tokens_stay_within_the_budget() -> None:
    long = dataclasses.replace(SMALL, model=Transformer(dataclasses.replace(MODEL.config, context=4096)))
    job = Job.begin(Request.read(long, PROMPTS[:2], max_new_tokens=2000, cache="h2o:budget=64,every=32"))
    held = [x.shape for x in jax.tree.leaves(job.state.cache.kv)]
    job.advance(None)
    assert [x.shape[2] for x in job.state.cache.kv] == [64 + 32] and held == [x.shape for x in job.state.cache.kv]
    assert job.state.length[:2].tolist() == [2041, 2026]
    assert int(np.max(job.state.cache.count[0])) <= 64 + 32


def test_the_guides_to_caches_name_every_policy() -> None:
    text = "".join(path.read_text() for path in (DOCS / "choose").glob("caches*.md"))
    assert not [name for name in CACHES if not re.search(rf"`{re.escape(name)}[`:]", text)]


def test_a_method_that_needs_more_of_a_cache_is_refused() -> None:
    model = dx.load("tasks-diffusion")
    with pytest.raises(ValueError, match=r"needs one that supports .*subsets.*, which Evicting does not"):
        dx.generate(model, "sort 3 1 2", cache="snapkv", algorithm=dx.algorithms.make("fast-dllm", model),
                    max_new_tokens=8)
