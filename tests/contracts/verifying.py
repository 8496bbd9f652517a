"""Models, data and helpers of `test_verifier.py` that other tests use too."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from decodax.core.window import causal
from decodax.sampling import build
from tests.laws.cases import VOCABULARY, model

PROMPT = [3, 7, 3, 7, 3]        # a lookup drafts from it at once
ALARM = 1e-6
POLICIES = {"temperature": dict(temperature=1.0), "truncated": dict(temperature=1.2, top_p=0.9, repetition_penalty=1.3)}
# Penalties on this number of trees take minutes, so one case has them and the others have truncation alone.
FLOORED = {"floored": dict(temperature=1.2, min_p=0.1)}


class Rows:
    """The fields of a decoding state that the lift reads, for every prefix at once."""

    def __init__(self, texts, chain):
        self.tokens = jnp.pad(texts, ((0, 0), (0, 1)))
        self.length = jnp.full(len(texts), texts.shape[1], jnp.int32)
        self.prompt_length = jnp.full(len(texts), len(PROMPT), jnp.int32)
        self.key = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(0), i))(jnp.arange(len(texts)))
        self.policy = chain.init(self.tokens, self.length, self.prompt_length, self.key)


@functools.cache
def joint(policy: str) -> np.ndarray:
    """`f64[V, V, V]`: the probability of three new tokens, by scoring every prefix."""
    network, weights = model("toy")
    total = np.ones((1,))
    prefixes = np.array([PROMPT])

    @jax.jit
    def follows(prefixes, chain):
        rows = Rows(prefixes, chain)
        window = causal(prefixes, jnp.zeros(len(prefixes), jnp.int32))
        out = network.apply(weights, window, network.init_cache(len(prefixes), 0))
        return chain.over(rows, window, out).log_probs(jnp.full((len(prefixes), 1), prefixes.shape[1] - 1))[:, 0]

    for _ in range(3):
        chain = build(len(prefixes), vocab_size=VOCABULARY, **(POLICIES | FLOORED)[policy])
        p = np.exp(np.asarray(follows(jnp.asarray(prefixes, jnp.int32), chain), np.float64))
        total = (total[:, None] * p / p.sum(-1, keepdims=True)).reshape(-1)
        prefixes = np.concatenate([np.repeat(prefixes, VOCABULARY, 0),
                                   np.tile(np.arange(VOCABULARY), len(prefixes))[:, None]], 1)
    return total


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """The p-value of counts against expectations; rare bins are pooled."""
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    if wanted[-1] < 1e-9:
        assert observed[-1] == 0, "a token of probability 0 was drawn"
        observed, wanted = observed[:-1], wanted[:-1]
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    return float(jax.scipy.stats.chi2.sf(statistic, len(wanted) - 1))
