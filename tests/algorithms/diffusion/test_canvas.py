"""Guidance by a prompt of masks, infilling, and watching a canvas, through the front door."""

import dataclasses

import numpy as np
import pytest

import decodax as dx
import decodax.algorithms.diffusion as d
from decodax.common.registry import ALGORITHMS
from decodax.io.text import Tokenizer
from tests.algorithms.diffusion.toy import MASK, PROMPTS, lm, normal, raw, run
from tests.matrix import often
from tests.small_tokenizers import of_words

WORDS = Tokenizer(of_words("a </s> b c d e f g h ab cd abc de gh fa ha", "</s>"))
LLADA = d.MaskedDiffusion(d.Adapter(MASK), d.Blocks(4), unmask=d.Quota(2))


def guided(prompt, new, block, steps, cfg):
    """LLaDA's loop with its `cfg_scale`."""
    x = np.array(prompt + [MASK] * new)
    for lo in range(len(prompt), len(x), block):
        for _ in range(steps):
            without = x.copy()
            without[:len(prompt)] = MASK
            u = raw(without)
            lp = normal(u + (cfg + 1) * (raw(x) - u))
            confidence = np.where(x == MASK, lp.max(-1), -np.inf)
            confidence[:lo] = confidence[lo + block:] = -np.inf
            chosen = np.argsort(-confidence, kind="stable")[:block // steps]
            x[chosen] = lp.argmax(-1)[chosen]
    return x[len(prompt):].tolist()


@pytest.mark.wide
def test_guidance_is_lladas():
    texts, _ = run(LLADA, 8, guidance_scale=2.5)
    assert texts == [guided(p, 8, 4, 2, 1.5) for p in PROMPTS] != run(LLADA, 8)[0]
    assert texts[0] == run(LLADA, 8, ids=PROMPTS[:1], guidance_scale=2.5)[0][0]
    masked = run(LLADA, 8, ids=[[MASK] * len(p) for p in PROMPTS])[0]
    assert run(LLADA, 8, guidance_scale=0.0)[0] == masked          # no prompt at all


@pytest.mark.full
@pytest.mark.parametrize("speaks", often(["canvas"], ["blocks", "canvas"]))
def test_a_guided_cache_is_exact(speaks):
    cached = ALGORITHMS["llada"].make(lm(speaks), **({} if speaks == "blocks" else {"block_length": 4}))
    assert cached.caching == d.BlockCache()
    plain = dataclasses.replace(cached, caching=d.NoCache())
    options = dict(speaks=speaks, guidance_scale=3.0)
    assert run(cached, 8, **options)[0] == run(plain, 8, **options)[0] != run(plain, 8, speaks)[0]


def test_guidance_of_a_canvas_knows_no_negative_prompt():
    with pytest.raises(ValueError, match="negative_prompts: a canvas is guided against masks"):
        run(LLADA, 4, guidance_scale=2.0, negative_prompts=PROMPTS)
    renoise = ALGORITHMS["diffusion-gemma"].make(lm("canvas"))
    none = dataclasses.replace(renoise, adapter=dataclasses.replace(renoise.adapter, mask=None))
    with pytest.raises(ValueError, match="guidance_scale: the model has no mask token"):
        run(none, 4, "canvas", guidance_scale=2.0)


def ids_of(out):
    """The ids of each row's gaps."""
    return out.findings["gap_tokens"].tolist()


@pytest.mark.wide
def test_infilling_keeps_the_pieces_and_fills_the_gaps():
    rows = [["ab", 3, "cd", 2, "a"], ["fa", 2, [4, 5]]]
    model = lm(tokenizer=WORDS)
    out = dx.infill(model, rows, algorithm=LLADA)
    for row, text, gaps, ids in zip(rows, out.text, out.findings["gaps"], ids_of(out), strict=True):
        given = [WORDS.decode(p) if isinstance(p, list) else p for p in row]
        fill = iter(gaps)
        assert text == "".join(next(fill) if isinstance(p, int) else p for p in given)
        assert [len(g) for g in ids] == [p for p in row if isinstance(p, int)]
        assert all(t not in (1, MASK) for g in ids for t in g)         # no end of sequence, no mask
    # the same from ids with the mask token in their gaps
    flat = [t for p in rows[0] for t in ([MASK] * p if isinstance(p, int) else WORDS.encode(p))]
    again = dx.infill(lm(), [[flat]], algorithm=LLADA)
    assert again.text is None and ids_of(again) == [ids_of(out)[0]] and len(again) == 1
    assert dx.infill(model, rows[0], algorithm=LLADA).text == out.text[:1]


@pytest.mark.wide
def test_infilling_sees_both_sides():
    left, right = [PROMPTS[0], 3, [2, 2, 2]], [PROMPTS[0], 3, [9, 9, 9]]
    out = dx.infill(lm(), [left, right], temperature=1.0, seed=[5, 5])
    same = dx.infill(lm(), [left, left], temperature=1.0, seed=[5, 5])
    assert ids_of(same)[0] == ids_of(out)[0]
    x = np.array([*PROMPTS[0], MASK, MASK, MASK, 2, 2, 2])
    first = normal(raw(x))[len(PROMPTS[0]):len(PROMPTS[0]) + 3]
    greedy = ids_of(dx.infill(lm(), left))[0][0]
    assert greedy[int(first.max(-1).argmax())] == first.argmax(-1)[first.max(-1).argmax()]


@pytest.mark.wide
def test_an_end_of_sequence_cuts_a_gap_only_if_it_may():
    out = ids_of(dx.infill(lm(), [PROMPTS[0], 5, [2]], algorithm=LLADA))[0][0]
    end = out[1]
    model = lm(eos=end, tokenizer=None)
    assert ids_of(dx.infill(model, [PROMPTS[0], 5, [2]], algorithm=LLADA, ends=True))[0][0] == out[:out.index(end) + 1]
    assert end not in ids_of(dx.infill(model, [PROMPTS[0], 5, [2]], algorithm=LLADA))[0][0]


@pytest.mark.wide
def test_an_infilling_takes_its_arguments_text_by_text():
    rows = [[PROMPTS[0], 4, [2]], [PROMPTS[1], 2, [3]]]
    options = dict(temperature=[0.0, 1.0], seed=[1, 2], suppress_tokens=[[5, 6], None])
    whole = dx.infill(lm(), rows, **options)
    assert ids_of(dx.infill(lm(), rows, batch_size=1, **options)) == ids_of(whole)
    free = ids_of(dx.infill(lm(), rows, ends=True))[0][0]
    cut = ids_of(dx.infill(lm(), rows, ends=True, eos_token_id=[free[1]]))[0][0]      # in place of the model's
    assert cut == free[:free.index(free[1]) + 1]
    assert free[1] not in ids_of(dx.infill(lm(), rows, eos_token_id=[free[1]]))[0][0]


def test_texts_without_gaps_and_wrong_models_are_refused_by_name():
    for model, pieces, message in ((lm(), [[[1, 2]]], r"pieces\[0\]: has no gap"), (lm(), [[[1], 0]], "got a gap of 0"),
                                   (lm(), [[3, [1]]], "begins with a gap"), (lm(), [], "pieces: got none"),
                                   (dataclasses.replace(lm(), diffusion=None), [[1], 2], "autoregressive")):
        with pytest.raises(ValueError, match=message):
            dx.infill(model, pieces)
    with pytest.raises(ValueError, match="algorithm: got Autoregressive"):
        dx.infill(lm(), [[1], 2], algorithm=dx.Autoregressive())


@pytest.mark.wide
def test_a_canvas_is_watched_round_by_round():
    model = lm(tokenizer=WORDS)
    options = dict(algorithm=LLADA, max_new_tokens=8, temperature=0.8)
    whole = dx.generate(model, PROMPTS[1], **options)
    frames = list(watch := dx.watch(model, PROMPTS[1], **options))
    assert [f.round for f in frames] == list(range(5))
    assert [int(f.open.sum()) for f in frames] == [8, 6, 4, 2, 0]
    assert frames[-1].tokens.tolist() == whole.row(0).tolist() == watch.result.row(0).tolist()
    for f in frames:
        assert np.array_equal(f.tokens == MASK, f.open)
        assert np.array_equal(f.tokens[~f.open], whole.row(0)[~f.open])
    assert frames[0].text() == "_" * 8 and frames[2].text("?").count("?") == 4
    assert frames[-1].text() == WORDS.decode(whole.row(0))
    few = list(dx.watch(model, PROMPTS[1], every=3, **options))
    assert [f.round for f in few] == [0, 3, 4] and np.array_equal(few[1].tokens, frames[3].tokens)


def test_watch_refuses_several_prompts_and_autoregressive_models():
    with pytest.raises(ValueError, match="every: got 0"):
        dx.watch(lm(), PROMPTS[0], every=0)
    with pytest.raises(ValueError, match="watch: takes one prompt, got 3"):
        dx.watch(lm(), PROMPTS)
    with pytest.raises(ValueError, match="autoregressive"):
        dx.watch(dataclasses.replace(lm(), diffusion=None), PROMPTS[0])
    frame = next(iter(dx.watch(lm(), PROMPTS[0], max_new_tokens=4)))
    with pytest.raises(ValueError, match="text: this model has no tokenizer"):
        frame.text()


@pytest.mark.full
def test_a_model_that_fills_masks_is_not_decoded_from_left_to_right():
    given = dict(max_new_tokens=6, seed=2)
    assert np.array_equal(dx.generate(lm(), PROMPTS, **given).tokens,
                          dx.generate(lm(), PROMPTS, algorithm=dx.algorithms.make("llada", lm()), **given).tokens)
    with pytest.raises(ValueError, match=r"got Autoregressive for .*, which fills masks.* takes a sampler of masked"):
        dx.generate(lm(), PROMPTS, algorithm=dx.Autoregressive(), **given)
