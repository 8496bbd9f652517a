"""Group Think: every token is what the model says of all threads' earlier tokens."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.algorithms.parallel.group_think import GroupThink, split
from decodax.core.window import Window
from tests.matrix import often
from tests.small_models import PROMPTS, net

pytestmark = pytest.mark.wide


def whole(prompt: list[int], threads: list[list[int]], bound: int, together: bool) -> np.ndarray:
    """`f64[n, L + 1, V]`: log-probabilities behind the first tokens of each thread, by one forward over everything."""
    lm, n, P = net(), len(threads), len(prompt)
    nodes = [(i, t) for i, thread in enumerate(threads) for t in range(len(thread))]
    tokens = [*prompt, *(threads[i][t] for i, t in nodes)]
    positions = [*range(P), *(P + i * bound + t for i, t in nodes)]
    mask = np.zeros((len(tokens),) * 2, bool)
    for a, (i, t) in enumerate(nodes):
        mask[P + a, :P] = True
        for b, (j, u) in enumerate(nodes):
            mask[P + a, P + b] = u < t or (u == t and (together or i == j))
    mask[:P, :P] = np.tril(np.ones((P, P), bool))
    window = Window(tokens=jnp.asarray([tokens], jnp.int32), positions=jnp.asarray([positions], jnp.int32),
                    mask=jnp.asarray(mask[None]), live=jnp.ones((1, len(tokens)), bool))
    log_p = np.asarray(jax.nn.log_softmax(lm.model.apply(lm.params, window, lm.model.init_cache(1, 16)).logits()[0]))
    out = np.full((n, bound + 1, log_p.shape[-1]), np.nan)
    out[:, 0] = log_p[P - 1]
    for a, (i, t) in enumerate(nodes):
        out[i, t + 1] = log_p[P + a]
    return out


@pytest.mark.parametrize(("threads", "together"), often([(3, True)], [(3, True), (4, False), (2, True)]))
def test_tokens_are_those_of_one_forward_over_all_threads(threads: int, together: bool) -> None:
    starts, bound = tuple((5 + i, 9) for i in range(threads)), 8
    out = dx.generate(net(), PROMPTS, algorithm=GroupThink(threads, starts, together), logprobs=0,
                      max_new_tokens=threads * bound + 1)
    ended = 0
    for b, prompt in enumerate(PROMPTS):
        texts = split(out.row(b), out.findings["thread_lengths"][b])
        log_p = whole(list(prompt), texts, bound, together)
        said = iter(out.logprobs.raw[b])
        for i, text in enumerate(texts):
            assert text[:2] == list(starts[i]) and len(text) <= bound and 4 not in text
            for t, token in enumerate(text):
                assert t < 2 or log_p[i, t].argmax() == token
                np.testing.assert_allclose(next(said), log_p[i, t, token], atol=2e-4)
            ended += len(text) < bound
            assert len(text) == bound or log_p[i, len(text)].argmax() == 4
        assert out.status[b] == (dx.Status.EOS if all(len(t) < bound for t in texts) else dx.Status.LENGTH)
        assert out.stats.rounds[b] <= bound + 1
    assert len({tuple(split(out.row(b), out.findings["thread_lengths"][b])[0]) for b in range(len(PROMPTS))}) > 1


def test_one_thread_is_plain_decoding() -> None:
    options: dict[str, Any] = dict(max_new_tokens=10, temperature=1.0, seed=3)
    plain = dx.generate(net(), PROMPTS, **options)
    one = dx.generate(net(), PROMPTS, algorithm="group-think:threads=1", **options)
    for b in range(len(PROMPTS)):
        row = plain.row(b).tolist()
        assert one.row(b).tolist() == (row[:-1] if plain.status[b] == dx.Status.EOS else row)
    # threads draw for themselves, whoever stands beside the row
    some = dx.generate(net(), PROMPTS, algorithm="group-think:threads=3", **options)
    alone = dx.generate(net(), [PROMPTS[1]], algorithm="group-think:threads=3", request_ids=[1], **options)
    assert alone.row(0).tolist() == some.row(1).tolist()
    parts = split(some.row(1), some.findings["thread_lengths"][1])
    assert len(parts) == 3 and len({tuple(part) for part in parts}) == 3


def test_bad_arguments_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="starts: got 1 for 2 threads"):
        GroupThink(2, ((1,),))
    with pytest.raises(ValueError, match="reads the text, and there are several"):
        dx.generate(net(), PROMPTS, algorithm=GroupThink(2), no_repeat_ngram_size=2, max_new_tokens=4)
    with pytest.raises(ValueError, match="reads the text"):
        dx.generate(net(), PROMPTS, algorithm=GroupThink(2), repetition_penalty=1.5, max_new_tokens=4)
