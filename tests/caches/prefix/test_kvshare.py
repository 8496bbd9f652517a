"""Texts that are put together by the score of KVShare, and computed anew while decoding."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.caches import KVShareConfig, Prefix, blended, read_prefix
from decodax.core.window import Window
from decodax.engine.batch import Job
from decodax.engine.request import Request
from tests.caches.small import LOOKUP, PROMPTS, TREE, network

LM, CHECK, D, NEW = network(3), 1, 4, 10
QUESTIONS = [[3], [5], [2]]


@functools.cache
def parts() -> list[Prefix]:
    return [read_prefix(LM, text) for text in PROMPTS[:2]]


@functools.cache
def contexts() -> list[Prefix]:
    """Two that were put together, one of them with new ids, and one that was read as it is."""
    one, other = parts()
    return [blended(LM, [one, other, [4, 4]], 0.1, score="kvshare"), blended(LM, [other, one], 0.1, score="kvshare"),
            one]


class ByHand:
    """What a model reads in a cache's place: all keys and values of a text in NumPy, among which those of a window take
    their places. Each node attends to what stands before it, and to itself.

    Attributes:
        kv: `f64[T, G, d + e]` of each layer. new: the same with the window's. weights: `f64[W, H, T]` of layer `CHECK`.
    """

    inputs = None

    def __init__(self, kv: list[np.ndarray]) -> None:
        self.kv, self.new = kv, list(kv)
        self.weights = np.zeros(0)

    def attend(self, layer: int, q: Any, k: Any, v: Any, window: Any, *, scale: float, **options: Any) -> Any:
        at, held = np.asarray(window.positions)[0], self.kv[layer]
        new = np.concatenate([held, np.zeros((max(0, at.max() + 1 - len(held)), *held.shape[1:]))])
        new[at] = np.concatenate([np.asarray(k)[0], np.asarray(v)[0]], -1)
        self.new[layer] = new
        q = np.asarray(q, np.float64)[0]
        out, weights = np.zeros(q.shape), np.zeros((*q.shape[:2], len(new)))
        for w, h in np.ndindex(*q.shape[:2]):
            own = new[:at[w] + 1, h // 2]
            x = np.exp(scale * own[:, :D] @ q[w, h])
            weights[w, h, :len(own)] = x / x.sum()
            out[w, h] = weights[w, h, :len(own)] @ own[:, D:]
        if layer == CHECK:
            self.weights = weights
        return jnp.asarray(out, jnp.float32)[None], ()

    def run(self, tokens: list[int], at: list[int]) -> np.ndarray:
        """Logits `f32[W, V]` of tokens that stand at some positions; their keys and values are kept."""
        window = Window(tokens=jnp.asarray([tokens], jnp.int32), positions=jnp.asarray([at], jnp.int32),
                        mask=jnp.ones((1, len(at), len(at)), bool), live=jnp.ones((1, len(at)), bool))
        logits = np.asarray(LM.model.apply(LM.params, window, self).logits())[0]     # type: ignore[arg-type]
        self.kv = list(self.new)
        return logits


def test_the_first_stage_goes_by_attention_times_change() -> None:
    """Against the rule in NumPy: of what was reused a tenth is computed anew, and the rest is as it was."""
    one, other = parts()
    text, own = [*one.tokens, *other.tokens, 4, 4], contexts()[0]
    n, known = len(text), len(text) - 2
    read = ByHand([np.zeros((0, 2, 8))] * 3)
    read.run(text, list(range(n)))
    stored = np.concatenate([part.kv[CHECK] for part in (one, other)], 1)[..., D:].swapaxes(0, 1)
    change = np.abs(read.kv[CHECK][:known, :, D:] - stored).sum((1, 2))
    attention = read.weights.mean(1).sum(0)
    chosen = set(np.argsort(-attention[:known] * change)[:int(known * 0.1)].tolist())
    assert chosen != set(np.argsort(-change)[:int(known * 0.1)].tolist())
    assert own.reuse is not None and blended(LM, parts(), 0.25).reuse is None
    np.testing.assert_allclose(own.reuse.attention, attention, atol=1e-4)
    wanted = np.array([0 if i >= known or i in chosen else change[i] for i in range(n)])
    np.testing.assert_allclose(own.reuse.change, wanted, atol=1e-4)
    old = np.concatenate([part.kv[2] for part in (one, other)], 1)[..., D:]
    changed = set(np.flatnonzero((np.abs(own.kv[2][:, :known, D:] - old) > 1e-6).any((0, 2))).tolist())
    assert changed <= chosen and len(changed) > len(chosen) / 2
    nothing = blended(LM, parts(), 0.0, score="kvshare")
    assert nothing.reuse is not None and (nothing.reuse.change[:len(one)] < 1e-4).all()
    np.testing.assert_array_equal(nothing.kv[2][..., D:], old)


@pytest.mark.wide
@pytest.mark.parametrize("past", [1.0, 0.0])
def test_the_second_stage_computes_anew_what_the_newest_token_calls_for(past: float) -> None:
    """Token by token in NumPy, in rows of one batch: the same tokens are chosen, and give the same."""
    out = dx.generate(LM, QUESTIONS, context=contexts(), cache=KVShareConfig(past=past), max_new_tokens=NEW, logprobs=0)
    job = Job.begin(Request.read(LM, QUESTIONS, context=contexts(), cache=KVShareConfig(past=past), max_new_tokens=NEW))
    job.advance(None)
    for b, context in enumerate(contexts()):
        own, n = ByHand([x.swapaxes(0, 1).astype(np.float64) for x in context.kv]), len(context)
        reuse = context.reuse
        attention, change = (np.zeros(n), np.zeros(n)) if reuse is None else (
            reuse.attention.astype(np.float64), reuse.change.copy())
        text = [*context.tokens, *QUESTIONS[b]]
        for i in range(NEW):
            logits = own.run(text[-1:], [len(text) - 1])[0]
            assert logits.argmax() == out.tokens[b, i]
            np.testing.assert_allclose(out.logprobs.raw[b, i], logits.max() - np.log(np.exp(logits).sum()), atol=1e-3)
            attention = past * attention + own.weights[0].mean(0)[:n]
            text.append(int(logits.argmax()))
            worth = np.where(change > 0, attention * change, -1)
            at = [int(j) for j in np.argsort(-worth, kind="stable")[:3] if worth[j] >= 0]
            if at and i < NEW - 1:      # behind the last token nothing is read
                own.run([text[j] for j in at], at)
                change[at] = 0
        held = job.state.cache
        np.testing.assert_array_equal(np.asarray(held.change)[b, :n] > 0, change > 0)
        for layer in range(3):
            np.testing.assert_allclose(np.asarray(held.kv[layer])[b, :, :n], own.kv[layer][:n].swapaxes(0, 1),
                                       atol=2e-3)
    left = [0 if x.reuse is None else int((x.reuse.change > 0).sum()) for x in contexts()]
    assert left[2] == 0 and min(left[:2]) < 3 * (NEW - 1) < max(left[:2])


@pytest.mark.wide
def test_computing_all_of_it_anew_is_the_text_read_as_a_whole() -> None:
    """Behind the first token; and other contexts are read as from a dense cache."""
    job = Job.begin(Request.read(LM, QUESTIONS, context=contexts(), cache=KVShareConfig(tokens=100), max_new_tokens=3))
    job.advance(None)
    for b, context in enumerate(contexts()):
        whole = read_prefix(LM, context.tokens)
        assert b == 2 or not np.allclose(context.kv[2], whole.kv[2], atol=1e-3)
        for held, wanted in zip(job.state.cache.kv, whole.kv, strict=True):
            np.testing.assert_allclose(np.asarray(held)[b, :, :len(context)], wanted, atol=1e-3)
    plain, same = (dx.generate(LM, PROMPTS, cache=cache, max_new_tokens=NEW, logprobs=0)
                   for cache in (None, KVShareConfig()))
    assert plain.tokens.tolist() == same.tokens.tolist()
    np.testing.assert_allclose(plain.logprobs.raw, same.logprobs.raw, atol=1e-4)


@pytest.mark.wide
@pytest.mark.parametrize("algorithm", [LOOKUP, TREE], ids=["chain", "tree"])
def test_drafts_and_batch_mates_change_nothing(algorithm: Any) -> None:
    sampled: dict[str, Any] = dict(temperature=[0.0, 0.9, 0.0], seed=5, max_new_tokens=20, logprobs=0)
    asked = [[3, 1, 4], [5], [2, 6]]        # a question that is read behind the context chooses, too
    plain, drafted = (dx.generate(LM, asked, context=contexts(), cache=KVShareConfig(), algorithm=each, **sampled)
                      for each in (None, algorithm))
    assert drafted.tokens.tolist() == plain.tokens.tolist() and drafted.stats.accepted.sum() > 0
    np.testing.assert_allclose(drafted.logprobs.raw, plain.logprobs.raw, atol=1e-3)
    alone = dx.generate(LM, asked[1:2], context=contexts()[1:2], cache=KVShareConfig(), request_ids=[1],
                        **{**sampled, "temperature": 0.9})
    assert alone.tokens.tolist() == plain.tokens[1:2].tolist()
    reused = dx.generate(LM, asked, context=contexts(), **sampled)
    assert not np.allclose(reused.logprobs.raw[:2], plain.logprobs.raw[:2], atol=1e-3)


def test_bad_arguments_are_refused_by_name() -> None:
    deep: Any = KVShareConfig(check=3)
    for expected, wrong in (
            (r"^score: got 'v2', takes cacheblend or kvshare", lambda: blended(LM, parts(), score="v2")),  # type: ignore[arg-type]
            (r"^tokens, check: got 0 and 1, takes 1", lambda: KVShareConfig(tokens=0)),
            (r"^past: got 2, takes 0 to 1", lambda: KVShareConfig(past=2)),
            (r"^check: got 3, takes one of 3 layers", lambda: dx.generate(LM, QUESTIONS, cache=deep))):
        with pytest.raises(ValueError, match=expected):
            wrong()
