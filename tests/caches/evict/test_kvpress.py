"""The tokens that kvpress keeps, by the same weights and texts, and those that it then writes.

`kvpress.json` holds what its presses do with this model, saved in Hugging Face's layout and read by transformers: for
each text, layer and head a bit for each token that is kept, in hexadecimal; and greedy tokens behind the texts. kvpress
reads whole texts one by one and keeps a share of them; here the two are rows of one batch, read in chunks.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import decodax as dx
from decodax.algorithms.plain import Autoregressive
from decodax.caches.evict.capkv import Capacity
from decodax.caches.evict.chunkkv import TokenChunks
from decodax.caches.evict.cur import Leverage
from decodax.caches.evict.evicting import Evicting, Eviction
from decodax.caches.evict.expected_attention import ExpectedAttention
from decodax.caches.evict.h2o import Accumulated
from decodax.caches.evict.heads.adakv import AdaptiveHeads
from decodax.caches.evict.heads.criticalkv import TwoStages
from decodax.caches.evict.heads.kvzip import AcrossLayers, Reconstruction
from decodax.caches.evict.heads.lu_kv import HeadShares
from decodax.caches.evict.heads.pyramidkv import Pyramid
from decodax.caches.evict.keydiff import KeyDifference
from decodax.caches.evict.knorm import KeyNorm
from decodax.caches.evict.lagkv import LagRelative
from decodax.caches.evict.q_filters import Direction
from decodax.caches.evict.selection import Selection, Top
from decodax.caches.evict.sink_window import SinksAndRecent
from decodax.caches.evict.snapkv import WindowAttention
from decodax.core import drivers
from decodax.core.types import Params
from decodax.io.load import LM
from decodax.sampling import build
from tests.caches.evict.pressed import MODEL, TEXTS, keeps, weights
from tests.laws.cases import padded
from tests.matrix import often

WANTED = json.loads((Path(__file__).parents[1] / "expected" / "kvpress.json").read_text())
FILTERS = np.random.RandomState(5).standard_normal((3, 2, 8)).astype(np.float32).round(3)
SHARES = ((0.3, 0.55), (0.45, 0.62), (0.21, 0.8))


SNAP = WindowAttention(16, 5)
KEPT: dict[str, tuple[Selection, float]] = {
    "knorm": (Top(KeyNorm()), 1 - 0.4), "snapkv": (Top(SNAP), 1 - 0.4),
    "tova": (Top(WindowAttention(1, 1, over="heads")), 1 - 0.4),
    "observed-attention": (Top(Accumulated(mean=True)), 1 - 0.4), "streaming-llm": (Top(SinksAndRecent(4)), 1 - 0.4),
    "lagkv": (Top(LagRelative(4, 32)), 1 - 0.4), "lagkv-cross": (Top(LagRelative(4, 32, cross_scoring=True)), 1 - 0.4),
    "keydiff": (Top(KeyDifference()), 1 - 0.4), "expected-attention": (Top(ExpectedAttention()), 1 - 0.4),
    "expected-attention-mean": (Top(ExpectedAttention(use_covariance=False, use_vnorm=False)), 1 - 0.4),
    "expected-attention-eps": (Top(ExpectedAttention(epsilon=1e-2, n_future_positions=64)), 1 - 0.6),
    "pyramidkv": (Pyramid(SNAP), 1 - 0.4), "chunkkv": (TokenChunks(SNAP, 10), 1 - 0.4),
    "chunkkv-knorm": (TokenChunks(KeyNorm(), 20), 1 - 0.4), "adakv": (AdaptiveHeads(SNAP), 1 - 0.4),
    "adakv-expected": (AdaptiveHeads(ExpectedAttention(epsilon=1e-2)), 1 - 0.5),
    "adakv-knorm": (AdaptiveHeads(KeyNorm(), 0.5), 1 - 0.4), "cur": (Top(Leverage()), 1 - 0.4),
    "cur-key": (Top(Leverage(leverage_type="key", local_window_size=0)), 1 - 0.4),
    "cur-average": (Top(Leverage(leverage_type="kv_avg")), 1 - 0.4),
    "critical": (TwoStages(SNAP), 1 - 0.4),
    "critical-knorm": (TwoStages(KeyNorm()), 1 - 0.4),
    "critical-adakv": (TwoStages(SNAP, floor_alpha=0.2), 1 - 0.4),
    "critical-adakv-knorm": (TwoStages(KeyNorm(), 0.3, 0.5), 1 - 0.4),
    "cap": (Top(Capacity()), 1 - 0.4), "cap-short": (Top(Capacity(tau=2.0, n_future_positions=64)), 1 - 0.4),
    "q-filter": (Top(Direction(tuple(tuple(map(tuple, x)) for x in FILTERS.tolist()))), 1 - 0.4),
    "lu-kv": (HeadShares(ExpectedAttention(epsilon=2e-2), SHARES), 1 - 0.4)}
VARIANTS = {"lagkv-cross", "expected-attention-mean", "expected-attention-eps", "chunkkv-knorm", "adakv-expected",
            "adakv-knorm", "cur-key", "cur-average", "critical", "critical-knorm", "critical-adakv-knorm", "cap-short",
            "tova", "streaming-llm", "q-filter", "cur", "cap", "lu-kv", "critical-adakv", "chunkkv"}
"""Presses with other options or fewer parts than in another case, and some that cost more."""


def test_every_case_of_kvpress_is_here() -> None:
    assert KEPT.keys() == WANTED["kept"].keys() and REPEATED.keys() == WANTED["repeated"].keys()
    assert WRITTEN.keys() == WANTED["tokens"].keys()


def held(kind: Eviction, texts: list[list[int]]) -> Evicting:
    """The cache behind the texts. The newest token of a prompt is not in it yet."""
    model, longest = MODEL.with_cache(kind.with_length(8)), max(map(len, texts)) + 1
    tokens, lengths = padded(texts, longest)
    alg, chain, params = Autoregressive(), build(2, vocab_size=320), Params(weights())
    s = drivers.begin(alg, model, params, chain, tokens, lengths + 1, size=longest + 8,
                      max_new=np.int32(8), seed=np.uint32(0))
    cache: Any = drivers.prefill(alg, model, params, s, width=64).cache
    return cache


@pytest.mark.wide(but=("snapkv", "keydiff"))
@pytest.mark.parametrize("name", often(set(KEPT) - VARIANTS, KEPT))
def test_the_tokens_of_kvpress_are_kept(name: str) -> None:
    keeps(held(Eviction(*KEPT[name]), TEXTS), WANTED["kept"][name])


ASKED = Reconstruction(2048, 4, (300, 301, 302, 303, 304), (300, 301, 305, 306, 301, 302, 303, 307, 308, 309), (5, 6))
"""As a tokenizer wrote KVzipPress's sentences, whose chat template puts four tokens before the text."""

REPEATED: dict[str, Selection] = {
    "kvzip": AcrossLayers(ASKED), "kvzip-chunks": AcrossLayers(dataclasses.replace(ASKED, chunk_size=100)),
    "kvzip-layers": AdaptiveHeads(dataclasses.replace(ASKED, chunk_size=100), 0.0)}


@pytest.mark.wide
@pytest.mark.parametrize("name", often(["kvzip-chunks"], REPEATED))
def test_the_tokens_that_repeating_needs_are_kept(name: str) -> None:
    """KVzipPress's; of lengths whose share is a whole number, since it rounds the tokens of all layers together."""
    texts = [TEXTS[0], TEXTS[1][:165]]
    keeps(held(Eviction(REPEATED[name], 1 - 0.4), texts), WANTED["repeated"][name], texts)


WRITTEN = {
    # PrefillDecodingPress and DecodingPress: 60 tokens behind the prompt, and again each 8 or 5 tokens
    "decoding": Eviction(Top(KeyNorm()), 60, 8), "decoding-keydiff": Eviction(Top(KeyDifference()), 60, 5),
    # KeyRerotationPress, and PerLayerCompressionPress
    "rerotation": Eviction(Top(KeyNorm()), 1 - 0.4, close_up=True),
    "rerotation-streaming": Eviction(Top(SinksAndRecent(4)), 1 - 0.8, close_up=True),
    "per-layer": Eviction(Top(KeyNorm()), (1 - 0.2, 1 - 0.4, 1 - 0.6))}


@pytest.mark.wide
@pytest.mark.parametrize("name", often(["decoding", "rerotation", "per-layer"], WRITTEN))
def test_the_tokens_of_kvpress_are_written(name: str) -> None:
    lm = LM(model=MODEL, params=weights(), vocab_size=320)
    wanted = WANTED["tokens"][name]
    prompts = [[*text, row[0]] for text, row in zip(TEXTS, wanted, strict=True)]
    out = dx.generate(lm, prompts, cache=WRITTEN[name], max_new_tokens=len(wanted[0]) - 1)
    assert out.tokens.tolist() == [row[1:] for row in wanted]


def test_a_pyramid_of_tokens_has_the_authors_layers() -> None:
    """Of PyramidKV, whose code with max pooling said how many tokens each layer keeps of texts of these lengths."""
    for case in json.loads((Path(__file__).parents[1] / "expected" / "pyramidkv.json").read_text())["cases"]:
        rule = Pyramid(WindowAttention(case["window"]), case["beta"])
        tables = [rule.table(case["budget"], 500, layer, case["layers"]) for layer in range(case["layers"])]
        assert {n: [int(t[int(n)]) for t in tables] for n in case["kept"]} == case["kept"]
