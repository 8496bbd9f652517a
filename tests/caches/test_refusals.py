"""Arguments of caches that do not fit each other, the model or the method are refused by name, before anything runs.

What the annotations of options declare is refused by `tests/contracts/test_options.py`. Errors that need the set-up of
a module are in that module.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.cache import KVLayer
from decodax.caches import Constant, KeyBooks, make
from decodax.caches.evict.evicting import Eviction
from decodax.caches.evict.heads.adakv import AdaptiveHeads
from decodax.caches.evict.heads.kvzip import AcrossLayers, Reconstruction
from decodax.caches.evict.knorm import KeyNorm
from decodax.caches.evict.lagkv import LagRelative
from decodax.caches.evict.laq import LookaheadQueries
from decodax.caches.evict.selection import Top
from decodax.caches.evict.snapkv import WindowAttention
from decodax.caches.quantize.aqua_kv import Predictors
from decodax.caches.quantize.kivi import KIVICodec
from decodax.caches.quantize.quantized import QuantizedConfig
from decodax.common.registry import CACHES
from decodax.core.fitting import fit_cache
from decodax.io.load import LM
from decodax.models import Transformer, cla, llama
from decodax.train import (
    Probe,
    fit_attention_predictor,
    fit_channels,
    fit_key_books,
    fit_less,
    fit_token_butler,
)
from tests.caches.small import (
    BUTLER,
    CHANNELS,
    DEEP,
    DEEPER,
    GUESSES,
    KERNELS,
    KEY_BOOKS,
    LOOKUP,
    MODEL,
    NET,
    OPTIONS,
    PROMPTS,
    SMALL,
    TREE,
)

ZEROS = Constant(np.zeros((2, 9, 8), np.float32))
WIDE = KeyBooks(Constant(np.zeros((1, 2, 3, 6))), Constant(np.zeros((1, 2, 6, 6))))
SHARED = Transformer(cla(llama(vocab=16, width=16, layers=2, heads=4, kv_heads=2, mlp=24), share=2))
PLPHP: dict[str, Any] = dict(image=(3, 9), rate=0.5, change=0.25, attentive=0.6, indifferent=0.3)
TEXTS = [np.random.default_rng(i).integers(0, 16, 24).tolist() for i in range(4)]

# name, options, message: bounds that go beyond the annotations
MADE: list[tuple[str, dict[str, Any], str]] = [
    ("freqkv", dict(size=4), "size: got 4, takes more than the 4 first"),
    ("less", {}, "kernels: got none, takes what decodax.train.less trains"),
    ("speckv", {}, "draft: got none, takes a smaller model"),
    ("speckv", dict(draft=GUESSES, kernel_size=4), "kernel_size: got 4, takes a whole number from 1, odd"),
    ("kvcrush", dict(budget=446), "budget: got 446, takes a number of tokens from 447"),
    ("kvcrush", dict(budget=0.5), "budget: got 0.5, takes a number of tokens"),
    ("laq", dict(lookahead_window_size=10), "lookahead_window_size: got 10, takes the 8 tokens ahead and the 8"),
    ("plphp", PLPHP | dict(image=(9, 3)), r"image: got \(9, 3\), takes the first and the last id"),
    ("plphp", PLPHP | dict(rate=None), "rate, change, attentive, indifferent: got None, 0.25"),
    ("plphp", PLPHP | dict(change=0.6), "rate, change: got 0.5 and 0.6, takes shares from 0 to 1"),
    ("plphp", PLPHP | dict(indifferent=0.7), "indifferent, attentive: got 0.7 and 0.6"),
    ("shotkv", dict(separator="x"), "separator: got 'x', takes token ids"),
    ("shotkv", dict(pool=32), "pool: got 32, takes more than the 32 latest"),
    ("tim", dict(close=3), r"open: got \(\), takes the ids of a mark"),
    ("critiprefill", dict(block_size=24), "block_size: got 24, takes a divisor of the segment of 512"),
    ("hyper-attention", dict(block_size=300), "min_seq_len: got 4096, takes a multiple of the block of 300"),
    ("minference", dict(heads=[{}, {3: ("block_sparse", 100, 1, 0.9)}]),
     "heads: got the pattern 'block_sparse' for head 3 of layer 1, takes 'vertical_and_slash'"),
    ("minference", dict(heads=[{}, {3: ("vertical_and_slash", 100)}]),
     r"heads: got the sizes \[100\] for head 3 of layer 1, takes numbers from 1"),
    ("minference", dict(block_size=48), "block_size: got 48, takes a divisor of the segment of 32768"),
    ("fastkv", dict(tsp_length=1.5), "tsp_length: got 1.5"),
    ("promptdistill", dict(budget=0.5), "budget: got 0.5, takes a number of tokens"),
    ("quick-prefill", dict(keep=0.1, group_size=8), "keep: got 0.1, which leaves no token of a group of 8"),
    ("specpc", {}, "draft: got none, takes a smaller model"),
    ("specpc", dict(draft=GUESSES, budget=8), "budget: got 8, takes the 64 latest tokens or more"),
    ("aqua-kv", {}, "predictors: got none, takes what decodax.train.fit_predictors measures"),
    ("aqua-kv", dict(predictors=Predictors(ZEROS, ZEROS, ZEROS, ZEROS), group_size=24),
     "group_size, sinks: got 24 and 4"),
    ("leank", {}, "channels: got none, takes what decodax.train.fit_channels measures"),
    ("qaq", dict(bits=(0, 4)), "bits: got"), ("qaq", dict(bits=(4, 3)), "bits: got"),
    ("qaq", dict(bits=(1, 9)), "bits: got"),
    ("qaq", dict(bits=(2, 4), mean_bits=1.5), "mean_bits: got 1.5, takes at least the fewest bits, 2"),
    ("qaq", dict(target_quantization_error=(0.0, 1.0)), "target_quantization_error: got"),
    ("a2ats", {}, "books: got none, takes what decodax.train.fit_key_books measures"),
    ("a2ats", dict(books=WIDE, budget=1.5), "budget: got 1.5, takes a number"),
    ("act-qkv", dict(budget=700),
     "budget: got 700, 3 blocks of 32 beside the 64 first tokens and the 512 latest, takes 32"),
    ("act-qkv", dict(window_size=600), "room, window_size: got 64 and 600"),
    ("attention-predictor", {}, "net: got none, takes what decodax.train.attention_predictor"),
    ("attention-predictor", dict(net=NET, sinks=3), "sinks, recent: got 3 and 64, takes whole blocks of 16"),
    ("attention-predictor", dict(net=NET, budget=150),
     "budget: got 150, takes a number of tokens with room for two blocks of 16 beside"),
    ("clusterkv", dict(budget=16), "budget: got 16, takes more than the 16 first tokens"),
    ("sentence-kv", dict(budget=64), "budget: got 64, takes more than the 64 first and latest"),
    ("sentence-kv", dict(ends=("a",)), r"ends: got \('a',\), takes a tuple of token ids"),
    ("token-butler", {}, "butler: got none, takes what decodax.train.token_butler"),
    ("token-butler", dict(butler=BUTLER, budget=1.5), "budget: got 1.5, takes a number of tokens"),
    ("snapkv", dict(windw=3), "cache: 'snapkv' takes no option 'windw'; takes budget=2048"),
    ("snapkv", dict(budget=0), "budget: got 0, takes a number of tokens from 1, a share"),
    ("knorm", dict(budget=1.0), "budget: got 1.0, takes"),
    ("snapkv", dict(budget="1XB"), "budget: got '1XB', takes a number of tokens .* or bytes as"),
    ("headkv", dict(heads=((1.0,),), budget="1MB"), "budget: got '1MB', takes a whole number from 1"),
    ("quest", dict(budget="1MB"), "budget: got '1MB', takes a whole number from 1"),
    ("snapkv", dict(budget=32), "budget: got 32, takes more than the 32 tokens that snapkv keeps"),
]


@pytest.mark.parametrize(("name", "given", "message"), MADE)
def test_options_that_do_not_fit_each_other_are_refused_by_name(name: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        make(name, **given)


def capped(lm: LM) -> LM:
    return dataclasses.replace(lm, model=Transformer(dataclasses.replace(lm.model.config, attention_softcap=5.0)))


def run(cache: Any, lm: LM = SMALL, **options: Any) -> object:
    return dx.generate(lm, PROMPTS, cache=cache, max_new_tokens=4, **options)


def beside(name: str) -> object:
    """Runs drafts on a cache of their own."""
    lm = DEEP if name in DEEPER else SMALL
    kind = make(name, **OPTIONS[name])
    return dx.generate(lm, PROMPTS, max_new_tokens=8, algorithm=dx.Speculative(dx.drafts.OwnCache(kind)))


# the model, its size, the windows and the texts that a cache is given: message, call
USED: list[tuple[str, Callable[[], object]]] = [
    ("kernels: got those of 1 layers with 4 heads of queries and 2 of keys, 4 wide; the model has 1 layers with 4 and "
     "2, 8 wide", lambda: make("less", kernels=KERNELS)([KVLayer(2, 8, queries=4)], 1, 8, jnp.float32)),
    ("texts: got none", lambda: fit_less(SMALL, [])),
    ("texts: got one of 5 tokens, takes more than the 11 that are kept",
     lambda: fit_less(SMALL, PROMPTS, start_size=2, recent_size=9)),
    ("cache: speckv asks a draft model, so it takes the model that answers", lambda: beside("speckv")),
    ("every: got 4; eviction chooses once, after the prompt", lambda: Eviction(Top(LookaheadQueries()), 64, every=4)),
    ("ask: got a text, but this model has no tokenizer", lambda: run("kvzip")),
    ("ask: got a text; a model without a tokenizer", lambda: dx.generate(dataclasses.replace(
        SMALL, model=MODEL.with_cache(Eviction(AcrossLayers(Reconstruction()), 20))), PROMPTS)),
    ("separator: got None; a model without a tokenizer", lambda: run(make("shotkv", budget=40))),
    ("heads: got head 4 of layer 1, which has 4",
     lambda: run(make("minference", heads=[{}, {4: ("vertical_and_slash", 1, 1, 1)}]), DEEP)),
    ("heads: got 3 layers, the model has 2", lambda: run(make("minference", heads=[{}, {}, {}]), DEEP)),
    ("cache: minference scores columns and diagonals by queries and keys; takes",
     lambda: run(make("minference", **OPTIONS["minference"]), capped(SMALL))),
    ("cache: minference reads a prompt when it is in, and this model reads it", lambda: beside("minference")),
    ("cache: hyper-attention takes a model without soft caps of its",
     lambda: run(make("hyper-attention", **OPTIONS["hyper-attention"]), capped(DEEP))),
    ("cache: hyper-attention reads a prompt when it is in, and this model reads", lambda: beside("hyper-attention")),
    ("layer: got 1, takes 0 to 0 of a model of 2 layers", lambda: run("fastkv:layer=1", DEEP)),
    ("cache: fastkv does not know the width",
     lambda: DEEP.model.with_cache(make("fastkv")).init_cache(1, 64).prefill_cache()),
    ("cache: promptdistill has prompts stop after 1 layers", lambda: beside("promptdistill")),
    ("cache: fastkv stops a prompt", lambda: make("fastkv").of_model(LM(model=object(), params=None, vocab_size=2))),
    (r"predictors: got values Constant\(float32\[2, 9, 8\]\), takes f32\[L, 17, 8\]", lambda: MODEL.with_cache(
        make("aqua-kv", predictors=Predictors(ZEROS, ZEROS, ZEROS, ZEROS))).init_cache(1, 8)),
    ("probes: got none", lambda: fit_channels(DEEP, [])),
    ("ratio, align: got 1 and 32", lambda: fit_channels(DEEP, [Probe(PROMPTS[0], 1, 3)], ratio=1)),
    (r"channels: got Constant\(bool\[1, 2, 8\]\), takes bool\[L, 2, 4\]", lambda: DEEP.model.with_cache(
        make("leank", channels=Constant(np.ones((1, 2, 8), bool)))).init_cache(1, 8)),
    ("recent: got -1, takes a whole number from 0", lambda: dx.caches.leank(CHANNELS, recent=-1)),
    ("key_bits: got 3", lambda: KIVICodec(3)), ("value_bits: got 1", lambda: KIVICodec(2, 1)),
    ("residual_length: got 100, takes a multiple of the group size of 32", lambda: QuantizedConfig(KIVICodec(), 100)),
    ("width: got heads of 6, takes a multiple of 4",
     lambda: QuantizedConfig(KIVICodec())([(2, 6)], 1, 64, "float32")),
    ("books: got those of 1 layers of 2 heads of 6, layer 0 of the model has 2 heads of 4",
     lambda: MODEL.with_cache(make("a2ats", books=WIDE)).init_cache(1, 8)),
    ("books: got centroids", lambda: KeyBooks(WIDE.centroids, WIDE.centroids)),
    ("texts: got none or an empty one", lambda: fit_key_books(SMALL, [[]])),
    ("count, loops, distance: got 0", lambda: fit_key_books(SMALL, TEXTS, 0)),
    ("cache: act-qkv reads a prompt when it is in", lambda: beside("act-qkv")),
    ("cache: attention-predictor takes a model without soft caps of its",
     lambda: run(make("attention-predictor", net=NET, budget=10, sinks=2, recent=4, block_size=2), capped(SMALL))),
    ("texts: got none", lambda: fit_attention_predictor(SMALL, [])),
    ("texts: got one of 5 tokens, takes more than 176", lambda: fit_attention_predictor(SMALL, PROMPTS)),
    ("steps, batch, history, block, recent, rate: got 0",
     lambda: fit_attention_predictor(SMALL, [list(range(16)) * 12], steps=0)),
    (r"cache: got \w+, which cannot be combined with another cache", lambda: run(
        make("retro-attention", **OPTIONS["retro-attention"]), algorithm=dx.algorithms.make("magicdec", SMALL,
                                                                                           budget=14))),
    ("lm: got a Transformer, and retro-attention takes a model each of whose", lambda: make(
        "retro-attention").wrap_model(dataclasses.replace(DEEP, model=dataclasses.replace(
            DEEP.model, config=cla(DEEP.model.config))))),
    ("ends: got None; a model without a tokenizer", lambda: run("sentence-kv")),
    ("guidance_scale: cannot be combined with SpecPVCache, which reads its text again",
     lambda: run(make("specpv", **OPTIONS["specpv"]), guidance_scale=2.0)),
    ("lm: got a model of one layer", lambda: run(make("token-butler", butler=BUTLER))),
    ("lm: got a Transformer, takes a model that runs layer by layer",
     lambda: run(make("token-butler", butler=BUTLER), LM(SHARED, None, 16))),
    ("reduce: got 3, takes a divisor of the width 16", lambda: fit_token_butler(DEEP, TEXTS, reduce=3)),
    (r"texts: got lengths \[5, 26, 41\], takes texts of one length", lambda: fit_token_butler(DEEP, PROMPTS)),
    ("steps, batch, rate, clip: got 0", lambda: fit_token_butler(DEEP, TEXTS, steps=0)),
    ("cache: unknown name 'snapvk'; near ones: snapkv", lambda: run("snapvk")),
    ("cache: 'snapkv' takes no option 'windw'; takes budget=2048", lambda: run("snapkv:windw=3")),
    ("budget: got 300B, 2 tokens of this model, takes more than the 4", lambda: fit_cache(
        DEEP.model.with_cache(make("snapkv", budget="300B", window_size=4)), 20).init_cache(3, 256)),
    ("budget: got one for each of 3 layers, the model has 2", lambda: fit_cache(
        DEEP.model.with_cache(Eviction(Top(KeyNorm()), (8, 8, 8))), 20).init_cache(3, 256)),
    ("offload: got 'off', takes True or False", lambda: CACHES.read("quest:offload=off").build()),
    ("every: got 4; eviction chooses once", lambda: Eviction(Top(KeyNorm()), 8, 4, close_up=True)),
    ("window_size: got 0", lambda: WindowAttention(0)), ("kernel_size: got 4", lambda: WindowAttention(8, 4)),
    ("floor_alpha: got 2", lambda: AdaptiveHeads(KeyNorm(), 2)), ("lag_size: got 1", lambda: LagRelative(4, 1)),
]
# these run a prompt before they see a window
WINDOWS: list[tuple[str, Callable[[], object]]] = [
    ("cache: a2ats takes windows of at most its 4 recent tokens, got one of 11",
     lambda: run(make("a2ats", books=KEY_BOOKS, recent=4), algorithm=TREE)),
    ("cache: act-qkv takes windows of at most room=4 nodes, got one of 11",
     lambda: run(make("act-qkv", **{**OPTIONS["act-qkv"], "room": 4}), DEEP, algorithm=TREE)),
    ("cache: quest takes windows of at most its 4 recent tokens, got one of 11",
     lambda: run("quest:budget=6,page_size=2,recent=4,skip=()", algorithm=TREE)),
    ("cache: retro-attention reads windows of 8 nodes with at least 9 recent tokens, got recent=5", lambda: run(
        make("retro-attention", **{**OPTIONS["retro-attention"], "recent": 5}), DEEP,
        algorithm=dx.Speculative(dx.drafts.PromptLookup(length=7)))),
    ("cache: sentence-kv takes windows of at most its 3 recent tokens, got one of 5",
     lambda: run(make("sentence-kv", ends=(3,), budget=8, sinks=1, recent=3, window_size=4), algorithm=LOOKUP)),
]


@pytest.mark.parametrize(("message", "call"), [
    *USED, *(pytest.param(*case, marks=pytest.mark.wide) for case in WINDOWS)], ids=[x for x, _ in [*USED, *WINDOWS]])
def test_a_model_or_a_method_that_a_cache_cannot_serve_is_refused_by_name(message: str,
                                                                          call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        call()
