"""What LAQ and KVzip ask the model for, and where they refuse."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import decodax as dx
from decodax.io.load import LM
from decodax.job import Job
from decodax.kvcache import kv
from decodax.kvcache.evicting import Eviction
from decodax.kvcache.lookahead import Lookahead
from decodax.kvcache.query_scores import WindowAttention
from decodax.kvcache.reconstruction import Reconstruction
from decodax.kvcache.selection import AcrossLayers, Top
from decodax.models import Transformer
from decodax.request import Request
from tests.kvcache.test_policies import PROMPTS, SMALL


def cache_behind(kind: Any, new: int, lm: LM = SMALL) -> Any:
    job = Job.begin(Request.read(lm, PROMPTS[:2], cache=kind, max_new_tokens=max(new, 1)))
    if new:
        job.advance(None)
    return job.state.cache


def test_lookahead_chooses_by_the_queries_of_what_plain_decoding_would_write() -> None:
    ahead, window, first, budget = 3, 2, 6, 14
    # SnapKV's cache, which remembers its latest queries, behind the tokens ahead and the newest of the prompt
    small = cache_behind(Eviction(Top(WindowAttention(first, 7, "max")), budget, every=50), ahead + 1)
    dense = cache_behind(None, 0)
    chosen = cache_behind(kv("laq", budget=budget, tokens=ahead, window=window, first=first), 0)
    for row, prompt in enumerate(PROMPTS[:2]):
        length = len(prompt) - 1
        at = np.arange(length - window, length + ahead + 1)[1:]         # the newest is one of the prompt's latest
        asks = np.asarray(small.queries[0][row])[:, at % first]         # [H, n, d], scaled
        keys = np.asarray(dense.kv[0][row, :, :length, :dense.widths[0]])
        for head in range(2):
            scores = np.einsum("hnd,sd->hns", asks[2 * head:2 * head + 2], keys[head])
            scores = np.where(np.arange(length) <= at[:, None], scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            paid = (weights / weights.sum(-1, keepdims=True)).mean(1)
            paid[:, length - window:] = 0
            around = np.pad(paid, ((0, 0), (3, 3)))
            worth = np.stack([around[:, i:i + length] for i in range(7)]).max(0).mean(0)
            worth[length - window:] = np.inf
            found = np.asarray(chosen.positions[0][row, head])
            found = found[found >= 0]
            assert len(set(found.tolist())) == budget
            # neighbours share a maximum, so a set of tokens may be as good as another
            assert worth[found].min() >= np.delete(worth, found).max() - 1e-6


def test_sentences_are_written_by_the_tokenizer(tiny_model: Path) -> None:
    lm = dx.load(tiny_model)
    score = Reconstruction().of_model(lm)
    spell = lambda text: tuple(lm.tokenizer.encode(text, add_special_tokens=False))
    assert score.ask == spell("\n\nRepeat the previous context exactly.")
    assert score.answer == spell("\n<assistant>")
    again = dx.generate(lm, "def area(width): return width", cache="kvzip:budget=0.4", max_new_tokens=4)
    assert again.lengths.tolist() == [4]


def test_a_text_that_leaves_no_positions_to_repeat_it_is_refused() -> None:
    assert isinstance(SMALL.model, Transformer)
    config = dataclasses.replace(SMALL.model.config, learned_positions=64, layers=tuple(
        dataclasses.replace(layer, rope=None) for layer in SMALL.model.config.layers))
    model = Transformer(config)
    lm = LM(model=model, params=model.init_params(jax.random.key(0)), vocab_size=16)
    options = dict(ask=(1,), go_on=(1,), answer=(1,))
    assert dx.generate(lm, PROMPTS[2], cache=kv("kvzip", chunk=8, **options), max_new_tokens=4).lengths.tolist() == [4]
    with pytest.raises(ValueError, match=r"^cache: prompt and what the policy reads behind it are 92"):
        dx.generate(lm, PROMPTS[0], cache=kv("kvzip", **options), max_new_tokens=4)


@pytest.mark.parametrize(("kind", "message"), [
    (lambda: kv("kvzip", chunk=7), "chunk: got 7, takes 8 or more"),
    (lambda: kv("kvzip", layers="some"), "layers: got 'some', takes together or each"),
    (lambda: kv("laq", first=10), "first: got a window of 10, takes one of the 8 tokens ahead and the 8 before them"),
    (lambda: Eviction(Top(Lookahead()), 64, every=4), "every: got 4; eviction chooses once, behind the prompt"),
    (lambda: dx.generate(SMALL, PROMPTS, cache="kvzip"), "ask: got a text, but this model has no tokenizer"),
    (lambda: dx.generate(dataclasses.replace(SMALL, model=SMALL.model.with_cache(Eviction(
        AcrossLayers(Reconstruction()), 20))), PROMPTS), "ask: got a text; a model without a tokenizer")])
def test_what_cannot_be_asked_is_refused(kind: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        kind()
