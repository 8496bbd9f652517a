"""Small models, prompts, options of every cache and one way to run them: the cases of the tests of caches."""

import dataclasses
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import decodax as dx
from decodax.algorithms.speculative.drafts import DraftModel, PromptLookup
from decodax.algorithms.speculative.trees import Fixed
from decodax.caches import (
    AttentionNet,
    Codebooks,
    Constant,
    KeyBooks,
    KVFeatures,
    KVMaps,
    LessKernels,
    Predictors,
    make,
)
from decodax.caches.bounded.less import LayerKernels
from decodax.common.registry import CACHES
from decodax.io.load import LM
from decodax.models import Transformer, llama
from decodax.train.token_butler import first_butler
from tests.small_models import random_lm


def network(layers: int) -> LM:
    return random_lm(Transformer(llama(vocab=16, width=16, layers=layers, heads=4, kv_heads=2, mlp=24, context=256)), 5)


SMALL, DEEP = network(1), network(2)
MODEL, PARAMS = SMALL.model, SMALL.params
DEEPER = ("pyramidkv", "knorm", "headkv", "minicache", "prefixkv", "fastkv", "promptdistill", "critiprefill",
          "act-qkv", "minference", "hyper-attention", "aqua-kv", "kv-prediction", "token-butler", "retro-attention")
"""Caches whose rule tells layers apart: these run on the deeper model."""
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
"""Caches that round every token, or drop a share of any prompt. The others keep 8 tokens unchanged."""
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


def asked(name: str, algorithm: Any = None, rows: tuple[int, ...] = (0, 1, 2), chunk: int = 512,
          **more: Any) -> tuple[LM, list[list[int]], dict[str, Any]]:
    """Returns model, prompts and options of a call of `generate` with the cache of a name, "dense" or "dense, deep"."""
    lm, name = (DEEP if name in DEEPER or name == "dense, deep" else SMALL), name.removesuffix(", deep")
    cache = None if name == "dense" else make(name, **{**OPTIONS[name], **more})
    return lm, [PROMPTS[i] for i in rows], dict(
        cache=cache, request_ids=rows, algorithm=algorithm, seed=5, max_new_tokens=20,
        temperature=[[0.0, 0.9, 0.0][i] for i in rows], logprobs=0, chunk=chunk)


@functools.cache
def run(name: str, algorithm: Any = None, rows: tuple[int, ...] = (0, 1, 2), chunk: int = 512, **more: Any) -> Any:
    lm, prompts, options = asked(name, algorithm, rows, chunk, **more)
    return dx.generate(lm, prompts, **options)


def half(out: Any, which: Any) -> Any:
    return types.SimpleNamespace(tokens=out.tokens[which], logprobs=types.SimpleNamespace(raw=out.logprobs.raw[which]))


def dense(name: str) -> str:
    return "dense, deep" if name in DEEPER else "dense"


def same(one: Any, other: Any, atol: float = 1e-4) -> bool:
    return one.tokens.tolist() == other.tokens.tolist() and np.allclose(one.logprobs.raw, other.logprobs.raw, atol=atol)


def with_sinks_in(lm: LM, sinks: tuple[float, ...] = (1.0, -1.0, 3.0, 0.5)) -> LM:
    """Returns a model whose query heads have these attention sinks in each layer."""
    config = lm.model.config
    layers = tuple(dataclasses.replace(layer, sinks=True) for layer in config.layers)
    return dataclasses.replace(
        lm, model=dataclasses.replace(lm.model, config=dataclasses.replace(config, layers=layers)),
        params=lm.params | {"layers": {i: layer | {"attn": layer["attn"] | {"sinks": jnp.array(sinks)}}
                                       for i, layer in lm.params["layers"].items()}})
