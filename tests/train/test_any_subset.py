"""Any-subset models: their training, and ASSD, which fills gaps and continues texts as one token at a time would."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chi2

import decodax as dx
from decodax.algorithms.diffusion.samplers.assd import Gaps, bigrams
from decodax.core.window import Window
from decodax.models import Diffusion
from decodax.train.tuning import AnySubsetLoss
from tests.small_models import PROMPTS, net

V = 24
MASK = V - 1
TEXT = [1, MASK, 3, MASK, 7, MASK, 2]
GAPS = [1, 3, 5]
CONTINUED = [5, 6, MASK, MASK]


def model() -> dx.LM:
    return replace(net(), diffusion=Diffusion(MASK, attention="any-subset"))


def fill(texts: Sequence[Sequence[int]], **options: Any) -> Any:
    return dx.infill(model(), [[text] for text in texts], **{"eos_token_id": None, **options})


def after(texts: np.ndarray, gaps: list[int], position: int) -> np.ndarray:
    """The distribution of the token at a gap after the given ones and the filled gaps before it, `f64[B, V]`, by a
    window of these tokens alone and one mask token: gaps see the given tokens and the gaps to the left of them."""
    lm = net()
    given = [i for i in range(texts.shape[1]) if i not in gaps]
    at = [*given, *gaps[:gaps.index(position)], position]
    tokens = np.concatenate([texts[:, at[:-1]], np.full((len(texts), 1), MASK)], 1)
    mask = np.tril(np.ones((len(at), len(at)), bool))
    mask[:, :len(given)] = True
    window = Window(tokens=jnp.asarray(tokens, jnp.int32), mask=jnp.asarray(mask)[None],
                    positions=jnp.broadcast_to(jnp.array(at, jnp.int32), tokens.shape),
                    live=jnp.ones(tokens.shape, bool))
    logits = jax.jit(lambda w: lm.model.apply(lm.params, w, lm.model.init_cache(len(texts), 0)).logits()[:, -1])(window)
    x = np.asarray(logits, np.float64)
    x[:, MASK] = -np.inf
    p = np.exp(x - x.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def joint(text: list[int]) -> np.ndarray:
    """Probabilities of what fills the gaps, one after another, `f64[V ** gaps]`."""
    gaps = [i for i, token in enumerate(text) if token == MASK]
    texts, p = np.array([text]), np.ones(1)
    for gap in gaps:
        p = (p[:, None] * after(texts, gaps, gap)).reshape(-1)
        texts = np.repeat(texts, V, 0)
        texts[:, gap] = np.tile(np.arange(V), len(texts) // V)
    return p


def test_each_row_has_the_distribution_of_one_token_after_another() -> None:
    """600 draws each for gaps between given tokens and a continuation, in one ragged batch; chi-square over 30 random
    sets of texts, false alarm 1e-4."""
    n = 600
    found = fill([TEXT, CONTINUED] * n, algorithm="assd:k=3", temperature=1.0, seed=1)
    for i, text in enumerate((TEXT, CONTINUED)):
        given = np.array(text) != MASK
        whole = np.array([[*text[:text.index(MASK)], *found.row(j).tolist()] for j in range(i, 2 * n, 2)])
        assert (whole[:, given] == np.array(text)[given]).all()
        p = joint(text)
        cells = np.ravel_multi_index(whole[:, ~given].T, (V,) * int((~given).sum()))
        bins = np.random.default_rng(0).integers(0, 30, len(p))
        wanted, counts = np.bincount(bins, p, 30) * n, np.bincount(bins[cells], minlength=30)
        assert wanted.min() > 5 and chi2.sf(((counts - wanted) ** 2 / wanted).sum(), 29) > 1e-4
        assert found.stats.rounds[i::2].max() <= (3, 2)[i]
    # drafts are rejected, and accepted, or this would say nothing
    assert 0 < found.stats.accepted.sum() < found.stats.drafted.sum()


@pytest.mark.wide
def test_texts_are_those_of_one_token_a_pass_in_no_more_passes_than_tokens() -> None:
    """The paper's theorem, with one seed, for greedy and sampled rows and for drafts of the model and of n-grams."""
    texts = [TEXT, [5, MASK], [9, *[MASK] * 9, 3, 3, 3, 3, MASK, 8], [6, 6, 7, 6, 7, MASK, 7, *[MASK] * 6]]
    gaps = np.array([text.count(MASK) for text in texts])
    prompt = dict(temperature=[0.0, 0.8, 0.0, 0.8], repetition_penalty=1.2, seed=4, logprobs=1)
    one = fill(texts, algorithm="assd:k=1", **prompt)
    assert one.stats.rounds.tolist() == gaps.tolist()       # as many as tokens
    for name in ("assd:k=2", "assd:k=4", "assd:k=4,draft_source=ngram"):
        some = fill(texts, algorithm=name, **prompt)
        assert [some.row(i).tolist() for i in range(4)] == [one.row(i).tolist() for i in range(4)]
        assert (some.stats.rounds <= gaps).all() and some.stats.rounds.sum() < gaps.sum()
        assert np.allclose(some.logprobs.raw[2], one.logprobs.raw[2], atol=1e-4)


@pytest.mark.wide
def test_greedy_filling_and_continuing_take_the_likeliest_tokens() -> None:
    text = np.array([TEXT])
    for gap in GAPS:
        text[0, gap] = after(text, GAPS, gap)[0].argmax()
    assert fill([TEXT], algorithm="assd:k=3").row(0).tolist() == text[0, 1:].tolist()
    out = dx.generate(model(), PROMPTS, max_new_tokens=6, eos_token_id=None, algorithm="assd:k=4")
    assert out.tokens.tolist() == dx.generate(model(), PROMPTS, max_new_tokens=6, eos_token_id=None).tokens.tolist()
    for i, prompt in enumerate(PROMPTS):
        text, gaps = np.array([prompt + [MASK] * 6]), [*range(len(prompt), len(prompt) + 6)]
        for gap in gaps:
            text[0, gap] = after(text, gaps, gap)[0].argmax()
        assert out.row(i).tolist() == text[0, len(prompt):].tolist()


def test_n_gram_drafts_follow_how_often_tokens_follow_each_other() -> None:
    """The shares are counted by hand: after 5 come 6 and 7, after 8, which nothing follows, all tokens by their
    number."""
    text = [5, 6, 5, 6, 5, 7, MASK, 8, MASK, MASK, 5, MASK]
    gaps = [6, 8, 9, 11]
    n = 4000
    rows = lambda x: jnp.broadcast_to(jnp.asarray(x), (n, *np.shape(x)))
    c = Gaps(tokens=rows(np.array(text, np.int32)), open=rows(np.array(text) == MASK), end=rows(np.int32(12)),
             order=rows(np.array([*gaps, *range(8)], np.int32)), count=rows(np.int32(4)), filled=rows(np.int32(1)),
             begun=rows(True), drafts=rows(np.zeros(3, np.int32)), drafted=rows(True), record=None)
    keys = jax.random.split(jax.random.key(3), n)
    found = np.asarray(jax.jit(lambda c, keys: bigrams(c, keys, 3, jnp.arange(n) < 1, V))(c, keys))
    share = lambda column, token: (column == token).mean()
    # the tokens: 5 four times, 6 twice, 7 and 8 once
    wanted = {5: 1 / 2, 6: 1 / 4, 7: 1 / 8, 8: 1 / 8}
    assert all(abs(share(found[:, 0], token) - p) < 0.03 for token, p in wanted.items())
    assert (found[found[:, 0] == 6, 1] == 5).all()
    five = found[found[:, 0] == 5, 1]
    assert abs(share(five, 6) - 2 / 3) < 0.04 and set(five.tolist()) == {6, 7}
    assert abs(share(found[:, 2], 6) - 2 / 3) < 0.03 and found[0].tolist() == [5, 6, 6]     # the first row is greedy


def test_what_any_subset_decoding_does_not_take_is_named() -> None:
    lm = model()
    with pytest.raises(ValueError, match=r"takes an any-subset model, as scripts/train\.py"):
        dx.generate(net(), [[1, 2]], algorithm="assd")
    with pytest.raises(ValueError, match="an any-subset model, which decodes with assd"):
        dx.generate(lm, [[1, 2]], algorithm="llada")
    with pytest.raises(ValueError, match=r"Autoregressive for .* which fills masks"):
        dx.generate(lm, [[1, 2]], algorithm="autoregressive")
    with pytest.raises(ValueError, match="guidance_scale: got one with assd, which takes none"):
        dx.generate(lm, [[1, 2]], max_new_tokens=2, guidance_scale=2.0)
    with pytest.raises(ValueError, match=r"NoRepeatNgram.*left to right"):
        dx.generate(lm, [[1, 2]], max_new_tokens=2, no_repeat_ngram_size=2)
    with pytest.raises(ValueError, match="block: got 4, takes None with any-subset attention"):
        Diffusion(MASK, attention="any-subset", block=4)


@pytest.mark.wide
def test_hidden_tokens_are_learned_after_the_known_and_the_earlier_ones() -> None:
    """By the key of a row that hides exactly the gaps."""
    text = np.array([[1, 8, 3, 9, 7, 4, 2, 0, 0]])
    learned = np.isin(np.arange(9), GAPS)[None] | (np.arange(9) == 6)
    objective = AnySubsetLoss(net().model, MASK)
    run = jax.jit(objective)
    hides = jax.jit(objective.hidden)
    key = next(k for i in range(200) if np.flatnonzero(np.asarray(hides(k := jax.random.key(i), jnp.asarray(learned)))
                                                       ).tolist() == GAPS)
    loss, _ = run(net().params, (jnp.asarray(text, jnp.int32), jnp.asarray(learned)), key)
    wanted = [-np.log(after(text[:, :7], GAPS, gap)[0, text[0, gap]]) for gap in GAPS]
    assert float(loss) == pytest.approx(np.mean(wanted), rel=1e-4)
