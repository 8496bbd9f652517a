"""Any-subset models: their training, and ASSD, which fills gaps as one token after another would."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chi2

import decodax as dx
from decodax.algorithms.diffusion import assd
from decodax.core.window import Window
from decodax.train.tuning import AnySubsetLoss
from tests.small_models import net

MASK = 23
TEXT = [1, MASK, 3, MASK, 7, MASK, 2]
GAPS = [1, 3, 5]


def after(texts: np.ndarray, known: list[int], position: int) -> np.ndarray:
    """The distribution of the token at a position after the given ones and the filled gaps `known`, `f64[B, V]`, by a
    window of these tokens alone and one mask token: gaps see the given tokens and the gaps to the left of them."""
    lm = net()
    given = [i for i in range(len(TEXT)) if i not in GAPS]
    at = [*given, *known, position]
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


@pytest.fixture(scope="module")
def joint() -> np.ndarray:
    """Probabilities of what fills the gaps, one after another, `f64[V, V, V]`."""
    texts, p = np.array([TEXT]), np.ones(1)
    for i, gap in enumerate(GAPS):
        p = (p[:, None] * after(texts, GAPS[:i], gap)).reshape(-1)
        texts = np.repeat(texts, 24, 0)
        texts[:, gap] = np.tile(np.arange(24), len(texts) // 24)
    return p.reshape(24, 24, 24)


def test_gaps_have_the_distribution_of_one_token_after_another(joint: np.ndarray) -> None:
    """3,000 draws by drafts of three tokens; chi-square over the likelier fillings, false alarm 1e-4."""
    n = 3000
    found = assd(net(), [TEXT] * n, MASK, length=3, seed=1)
    filled = np.array(found.tokens)
    assert np.array_equal(np.delete(filled, GAPS, 1), np.array([np.delete(TEXT, GAPS)] * n))
    counts = np.zeros((24, 24, 24))
    np.add.at(counts, tuple(filled[:, GAPS].T), 1)
    often = joint * n > 4
    rest = joint[~often].sum() * n
    statistic = ((counts - joint * n)[often] ** 2 / (joint * n)[often]).sum() + (
        counts[~often].sum() - rest) ** 2 / max(rest, 1)
    assert often.sum() > 10 and chi2.sf(statistic, often.sum()) > 1e-4
    # drafts are rejected, and accepted, or this would say nothing
    assert {1, 2} <= set(found.rounds.tolist()) <= {1, 2, 3}


@pytest.mark.wide
def test_a_text_does_not_depend_on_the_others_and_greedy_filling_is_that_of_one_at_a_time(joint: np.ndarray) -> None:
    first, second = ([TEXT, [5, MASK], TEXT], [TEXT, [6, MASK, MASK], [MASK, 9]])
    fill = lambda texts, temperature: assd(net(), texts, MASK, length=3, seed=4, temperature=temperature)
    found = fill(first, 1.0)
    assert found.tokens[0] == fill(second, 1.0).tokens[0] and [len(x) for x in found.tokens] == [7, 2, 7]
    greedy = fill(first, 0.0)
    text = np.array([TEXT])
    for i, gap in enumerate(GAPS):
        text[0, gap] = after(text, GAPS[:i], gap)[0].argmax()
    assert greedy.tokens[0] == text[0].tolist()
    with pytest.raises(ValueError, match="length, temperature: got 0"):
        dx.algorithms.diffusion.assd(net(), [TEXT], MASK, length=0)
    broken = net().with_params(jax.tree.map(lambda x: x * jnp.nan, net().params))
    with pytest.raises(FloatingPointError, match="NaN for text 0"):
        dx.algorithms.diffusion.assd(broken, [TEXT], MASK)


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
    wanted = [-np.log(after(text[:, :7], GAPS[:i], gap)[0, text[0, gap]]) for i, gap in enumerate(GAPS)]
    assert float(loss) == pytest.approx(np.mean(wanted), rel=1e-4)
