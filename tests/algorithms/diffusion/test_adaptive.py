"""Samplers whose pace follows what the model says, against plain transcriptions of their published loops."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import decodax.algorithms.diffusion as d
from decodax.common.registry import ALGORITHMS
from decodax.core import keys
from decodax.core.keys import Purpose
from tests.algorithms.diffusion.toy import MASK, PROMPTS, SPEAKS, VOCABULARY, forward, lm, raw, run
from tests.algorithms.diffusion.views import view_of

NEW = 16
DRAW = np.random.default_rng(1)
FILTER = d.Filter(DRAW.normal(size=(4, 6)), DRAW.normal(size=6), DRAW.normal(size=(6, 4)), DRAW.normal(size=4))


def made(name, speaks="full", **options):
    return ALGORITHMS[name].make(lm(speaks), **options)


def block_by_block(prompt, block, choose, shape=lambda memory, x, open, lp: lp):
    """Blocks from left to right; `choose(open, confidence, step)` gives the positions of the block to unmask."""
    x, rounds = np.array(prompt + [MASK] * NEW), 0
    for lo in range(len(prompt), len(x), block):
        here, memory, step = slice(lo, lo + block), {}, 0
        while (x[here] == MASK).any():
            open = x[here] == MASK
            lp = shape(memory, x, open, forward(x)[here])
            chosen = choose(open, np.where(open, lp.max(-1), -np.inf), step, lp) & open
            if not chosen.any():
                chosen[np.argmax(np.where(open, lp.max(-1), -np.inf))] = True
            x[here][chosen] = lp.argmax(-1)[chosen]
            rounds, step = rounds + 1, step + 1
    return x[len(prompt):].tolist(), rounds


def agrees(alg, transcription, **options):
    texts, rounds = run(alg, NEW, **options)
    expected = [transcription(p) for p in PROMPTS]
    assert texts == [t for t, _ in expected]
    assert rounds == [r for _, r in expected]
    return rounds


def localleap(open, confidence, step, lp):
    anchors = [i for i in np.flatnonzero(open) if confidence[i] >= math.log(0.5)]
    near = [i for i in range(len(open)) if any(abs(i - a) <= 2 for a in anchors) and confidence[i] >= math.log(0.25)]
    return np.isin(np.arange(len(open)), anchors + near)


@pytest.mark.wide
def test_localleap_relaxes_around_anchors():
    rounds = agrees(made("localleap", threshold=0.5, relaxed_threshold=0.25, radius=2, block_length=8),
                    lambda p: block_by_block(p, 8, localleap))
    assert max(rounds) < NEW
    assert sum(run(made("localleap", threshold=0.5, relaxed_threshold=0.25, radius=0, block_length=8))[1]) > sum(rounds)


def hierarchy(open, confidence, step, lp):
    chosen, i = confidence > math.log(0.6), 0
    while i < len(open):
        j = i
        while j < len(open) and open[j]:
            j += 1
        if j > i and confidence[i:j].max() > math.log(0.2):
            chosen |= (np.arange(len(open)) >= i) & (np.arange(len(open)) < j) & (confidence == confidence[i:j].max())
        i = max(j, i + 1)
    return chosen


@pytest.mark.wide
def test_the_hierarchy_takes_one_of_each_run():
    alg = made("dinfer-hierarchy", threshold=0.6, low_threshold=0.2, block_length=8)
    rounds = agrees(alg, lambda p: block_by_block(p, 8, hierarchy))
    assert max(rounds) < NEW


def credit(memory, x, open, lp):
    """The published matrix, as wide as the vocabulary."""
    m = memory.setdefault("m", np.zeros_like(lp)) * 0.8
    m[np.arange(len(lp)), lp.argmax(-1)] += np.where(open, np.exp(lp.max(-1)) ** 0.2, 0)
    memory["m"] = m
    fused = lp + 0.7 * np.log(m + 1)
    return fused - np.log(np.exp(fused).sum(-1, keepdims=True))


@pytest.mark.full
def test_credit_of_few_tokens_is_the_whole_matrix():
    choose = lambda open, confidence, step, lp: confidence >= math.log(0.5)
    rounds = agrees(made("dinfer-credit", threshold=0.5, block_length=8, kept=6),
                    lambda p: block_by_block(p, 8, choose, credit))
    plain = run(d.MaskedDiffusion(d.Adapter(MASK), d.Blocks(8), unmask=d.Threshold(0.5)))
    assert sum(rounds) < sum(plain[1])
    assert run(made("dinfer-credit", threshold=0.5, block_length=8, alpha=0.0)) == plain


def average(past, kept):
    def shape(memory, x, open, lp):
        p = np.exp(lp)
        mean = p + sum(memory.get("past", []))
        top = np.where(p >= np.sort(p, -1)[:, -min(kept, p.shape[-1] - 1)][:, None], p, 0)
        memory["past"] = [top, *memory.get("past", [])][:past]
        return np.log(np.maximum(mean, 1e-300) / mean.sum(-1, keepdims=True))

    return shape


@pytest.mark.wide
@pytest.mark.parametrize(("kept", "bound"), [(4, None), (VOCABULARY, 1.4)])
def test_ccd_may_decide_by_the_mean_over_steps(kept, bound):
    def choose(open, confidence, step, lp):
        entropy = -(np.exp(lp) * np.where(lp > -np.inf, lp, 0)).sum(-1)
        if bound is not None:
            least = np.argmin(np.where(open, entropy, np.inf))
            return (entropy <= bound) | (np.arange(len(open)) == least)
        order = np.argsort(np.where(open, entropy, np.inf), kind="stable")
        return np.isin(np.arange(len(open)), order[:2 + (step < 2)])

    agrees(made("ccd", rule="mean", past=2, kept=kept, steps=3, bound=bound, block_length=8),
           lambda p: block_by_block(p, 8, choose, average(2, kept)))


@pytest.mark.full      # a limit of what the loop above decides
def test_ccd_without_a_past_is_the_base():
    base = d.MaskedDiffusion(d.Adapter(MASK), d.Blocks(8), d.NegEntropy(), d.Quota(3))
    mean = functools.partial(made, "ccd", rule="mean", steps=3, block_length=8)
    assert run(mean(past=0)) == run(base) != run(mean(past=2))


def prophet(prompt, steps, block, answer, gaps):
    x = np.array(prompt + [MASK] * NEW)
    total, done = steps * NEW // block, 0
    for lo in range(len(prompt), len(x), block):
        for i in range(steps):
            done += 1
            logits = raw(x)
            logits[:, MASK] = -np.inf
            lp = forward(x)
            two = np.sort(logits, -1)
            where = np.arange(*answer) + len(prompt) if answer else np.arange(len(prompt), len(x))
            gap = (two[:, -1] - two[:, -2])[where[where < len(x)]].mean()
            bar = gaps[0] if done / total < 0.33 else gaps[1] if done / total < 0.67 else gaps[2]
            if gap >= bar:
                x = np.where(x == MASK, lp.argmax(-1), x)
                return x[len(prompt):].tolist(), done
            confidence = np.where(x == MASK, lp.max(-1), -np.inf)
            confidence[lo + block:] = -np.inf
            chosen = np.argsort(-confidence, kind="stable")[:block // steps + (i < block % steps)]
            x[chosen] = lp.argmax(-1)[chosen]
    return x[len(prompt):].tolist(), done


@pytest.mark.wide
@pytest.mark.parametrize(("answer", "gaps"), [
    ((9, 14), (1.6, 1.4, 0.9)), pytest.param(None, (0.49, 0.6, 0.55), marks=pytest.mark.full)])
def test_prophet_unmasks_everything_when_the_answer_is_sure(answer, gaps):
    given = None if answer is None else (answer[0], answer[1] - answer[0])
    rounds = agrees(made("prophet", block_length=8, steps=5, answer=given, gaps=gaps),
                    lambda p: prophet(p, 5, 8, answer, gaps))
    assert min(rounds) < 10 and len(set(rounds)) > 1         # some stop early, not all at once


@pytest.mark.full      # the loop above says so too
def test_prophet_that_never_stops_is_llada():
    never = made("prophet", block_length=8, steps=3, gaps=(1e9, 1e9, 1e9))
    assert run(never) == run(made("llada", block_length=8, steps=3))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def learn2pd(prompt, threshold, eos):
    """The authors' loop with end-of-text prediction; what is decided last in a text that was cut is its end."""
    x, n, rounds = np.array(prompt + [MASK] * NEW), FILTER.block, 0
    lo = len(prompt)
    while lo < len(x):
        while (x[lo:lo + n] == MASK).any():
            rounds += 1
            lp = forward(x)
            best, top = lp.argmax(-1), lp.max(-1)
            seen = np.zeros(n)
            seen[:len(x[lo:lo + n])] = np.exp(top[lo:lo + n])
            hidden = np.maximum(seen @ FILTER.hidden + FILTER.hidden_bias, 0)
            accepted = np.zeros(len(x), bool)
            accepted[lo:lo + n] = (sigmoid(hidden @ FILTER.out + FILTER.out_bias) > threshold)[:len(x[lo:lo + n])]
            accepted &= x == MASK
            confidence = np.where(x == MASK, top, -np.inf)
            ends = np.where((x == MASK) & (best == eos), top, -np.inf)
            confidence[lo + n:] = -np.inf
            cut = None
            if (accepted & (best == eos)).any():
                cut = int(np.argmax(accepted & (best == eos)))
            elif (ends > -np.inf).any():
                cut = int(ends.argmax())
            accepted[np.argmax(confidence)] = True
            short = len(x) < len(prompt) + NEW
            if short and accepted[-1]:
                best[-1] = eos
            x[accepted] = best[accepted]
            if cut is not None:
                x = x[:cut + 1]
        lo += n
    text = x[len(prompt):].tolist()
    return text[:text.index(eos) + 1] if eos in text else text, rounds


@pytest.mark.wide
def test_learn2pd_is_the_authors_loop():
    ids = [[t for t in p if t != 5] or [1] for p in PROMPTS]
    for eos in (None, 5):
        texts, rounds = run(made("learn2pd", filter=FILTER, threshold=0.55), NEW, ids=ids, eos=eos)
        expected = [learn2pd(p, 0.55, -1 if eos is None else eos) for p in ids]
        assert texts == [t for t, _ in expected] and rounds == [r for _, r in expected]
    assert any(len(t) < NEW for t in texts) and max(rounds) < NEW


def test_a_filter_is_read_from_its_file_and_checked(tmp_path):
    layers = dict(zip(("hidden.kernel", "hidden.bias", "out.kernel", "out.bias"),
                      (getattr(FILTER, f.name) for f in dataclasses.fields(FILTER)), strict=True))
    save_file(layers, tmp_path / "filter.safetensors")
    read = d.Filter.load(tmp_path / "filter.safetensors")
    assert read == FILTER and hash(read) == hash(FILTER) and read != dataclasses.replace(FILTER, out_bias=np.ones(4))
    x = DRAW.uniform(size=4)
    own = np.maximum(x @ FILTER.hidden + FILTER.hidden_bias, 0) @ FILTER.out + FILTER.out_bias
    assert np.allclose(read(jnp.asarray(x)), own, atol=1e-5)
    with pytest.raises(ValueError, match=r"filter: got None, and no filter\.safetensors lies in a directory"):
        made("learn2pd")
    beside = dataclasses.replace(lm(), directory=tmp_path)
    assert ALGORITHMS["learn2pd"].make(beside) == made("learn2pd", filter=FILTER)
    with pytest.raises(ValueError, match=r"lies in .*none; train one with .* tune --objective learn2pd"):
        ALGORITHMS["learn2pd"].make(dataclasses.replace(lm(), directory=tmp_path / "none"))
    with pytest.raises(ValueError, match=r"filter: got shapes .*takes \(n, h\)"):
        d.Filter(np.zeros((4, 6)), np.zeros(6), np.zeros((6, 5)), np.zeros(4))


@pytest.mark.full      # the authors' loop above says so too
def test_a_filter_that_accepts_nothing_is_llada():
    none = d.Filter(np.zeros((8, 1)), np.zeros(1), np.zeros((1, 8)), np.full(8, -99))
    assert run(made("learn2pd", filter=none, steps=3, end_of_text=False)) == run(made("llada", block_length=8, steps=3))


def adablock(prompt, delimiters, bar, block, threshold):
    x, lo, rounds = np.array(prompt + [MASK] * NEW), len(prompt), 0
    while lo < len(x):
        hi = None
        while hi is None or (x[lo:hi] == MASK).any():
            rounds += 1
            lp = forward(x)
            if hi is None:
                window = range(lo, lo + min(NEW // 4, len(x) - lo))
                found = [i for i in window if lp[i].argmax() in delimiters]
                best = max(found, key=lambda i: lp[i].max(), default=None)
                sure = best is not None and math.exp(lp[best].max()) >= bar
                hi = best + 1 if sure else min(lo + block, len(x))
            confidence = np.where(x == MASK, lp.max(-1), -np.inf)[lo:hi]
            chosen = confidence >= math.log(threshold)
            chosen[confidence.argmax()] = True
            x[lo:hi][chosen] = lp.argmax(-1)[lo:hi][chosen]
        lo = hi
    return x[len(prompt):].tolist(), rounds


@pytest.mark.full
def test_adablock_ends_a_block_at_the_surest_delimiter():
    alg = made("adablock", delimiters=(5, 11), delimiter_threshold=0.3, block_length=6, threshold=0.5)
    agrees(alg, lambda p: adablock(p, (5, 11), 0.3, 6, 0.5))
    fixed = d.MaskedDiffusion(d.Adapter(MASK), d.Blocks(6), unmask=d.Threshold(0.5))
    never = made("adablock", delimiters=(5, 11), delimiter_threshold=1.1, block_length=6, threshold=0.5)
    assert run(alg) != run(fixed) == run(never)


def gemma(prompt, request, canvas, steps, bound, entropy):
    """DiffusionGemma's loop (transformers' generate) at temperature 0; what is drawn are the random tokens, by their
    address."""
    key = keys.row_keys(jnp.zeros(1, jnp.uint32), jnp.full(1, request, jnp.uint32), jnp.zeros(1, jnp.uint32))

    def noise(lo, round):
        place = jnp.arange(lo, lo + canvas, dtype=jnp.int32)[None]
        u = keys.uniforms(key, place, Purpose.NOISE, None if round is None else jnp.full(1, round, jnp.int32))
        return np.minimum((np.asarray(u)[0, :, 0] * VOCABULARY).astype(int), VOCABULARY - 1)

    x, round, rounds = np.array(prompt), 0, 0
    for lo in range(len(prompt), len(prompt) + NEW, canvas):
        own, last = noise(lo, None), None
        for i in range(steps):
            # the model's temperature, then the argmax
            logits = raw(np.concatenate([x, own]))[lo:] / (0.4 + 0.4 * (1 - i / steps))
            logits[:, MASK] = -np.inf
            lp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            h = -(np.exp(lp) * np.where(lp > -np.inf, lp, 0)).sum(-1)
            order = np.argsort(h, kind="stable")
            accepted = np.zeros(canvas, bool)
            accepted[order] = np.cumsum(h[order]) - h[order] <= bound
            best = lp.argmax(-1)
            stop = last is not None and (best == last).all() and h.mean() < entropy
            last = best
            own = best if stop or i == steps - 1 else np.where(accepted, best, noise(lo, round + 1))
            round, rounds = round + 1, rounds + 1
            if stop:
                break
        x = np.concatenate([x, own])
        rounds += 1         # the forward that writes its entries
    return x[len(prompt):].tolist(), rounds


@pytest.mark.full       # transformers' own loop decides by default, in tests/conformance
def test_diffusion_gemma_renoises_until_the_canvas_is_stable():
    alg = made("diffusion-gemma", "canvas", entropy_bound=2.0, steps=7, confidence_threshold=1.0)
    texts, rounds = run(alg, NEW, "canvas")
    expected = [gemma(p, i, SPEAKS["canvas"].block, 7, 2.0, 1.0) for i, p in enumerate(PROMPTS)]
    assert texts == [t for t, _ in expected] and rounds == [r for _, r in expected]
    assert min(rounds) < 4 * 8          # a canvas stood still before its steps were over


def test_numbers_out_of_range_are_refused_by_name():
    for make, message in ((lambda: d.Delimited(()), "delimiters: got none"),
                          (lambda: d.LocalLeap(0.5, 0.7), "relaxed: got 0.7"),
                          (lambda: d.Anneal(0.4, 0.8), "last: got 0.8"), (lambda: d.Credit(kept=1), "kept: got 1"),
                          (lambda: d.Average(past=-1), "past: got -1"), (lambda: d.Ancestral(0), "steps: got 0"),
                          (lambda: d.ReMDM(on=0.2, off=0.3), "on, off: got 0.2 and 0.3"),
                          (lambda: d.ReMDM(kind="loop", eta=0.5), "held: got 0.9"),
                          (lambda: d.Gap(4, 4, (0, 0)), r"answer: got \(0, 0\)"),
                          (lambda: made("adablock"), "delimiters: got None")):
        with pytest.raises(ValueError, match=message):
            make()


def test_no_carry_is_as_wide_as_the_vocabulary():
    for alg in (made("ccd", rule="mean"), made("dinfer-credit")):
        view = view_of(2, 32)
        memory = jax.eval_shape(lambda alg=alg, view=view: alg.shaper.init(view))
        assert all(x.shape[-1] == 8 * (3 if isinstance(alg.shaper, d.Average) else 1) for x in jax.tree.leaves(memory))
