"""Rounds whose drafts are chosen as they go: the choice pays, costs next to nothing where it does not, and is exact."""

import jax.numpy as jnp
import numpy as np
import pytest

from decodax.autoregressive import Autoregressive
from decodax.speculative import NOTHING, Adaptive, Automatic, Speculative, drafts, shapes
from decodax.speculative.adaptive import Seen
from tests.laws.cases import decode, prompts, texts

COSTS = (1.0, 1.4, 1.8)


def lookups(*lengths):
    return (NOTHING, *(Speculative(drafts.PromptLookup(max(lengths)), shape=shapes.Chain(k)) for k in lengths))


def of(controller, costly=False):
    """The same arms, whose drafts may be tried on paper or not."""
    source = drafts.Jacobi(4) if costly else drafts.PromptLookup(4)
    return Adaptive((NOTHING, *(Speculative(source, shape=shapes.Chain(k)) for k in (2, 4))), controller)


def seen(arm, tried, held):
    vector = lambda n: (jnp.arange(4) < n).astype(jnp.float32)
    return Seen(arm=jnp.int32(arm), rows=jnp.float32(1), tokens=jnp.float32(1), most=jnp.int32(held),
                tried=vector(tried), held=vector(held))


def test_free_drafts_wait_until_they_hold_on_paper():
    rule = Automatic(COSTS)
    alg = of(rule)
    state = rule.init(alg)
    assert rule.choose(alg, state, None) == 0
    for _ in range(3):
        state = rule.note(alg, state, seen(2, 4, 4))
    assert rule.choose(alg, state, None) == 2
    for _ in range(40):
        state = rule.note(alg, state, seen(2, 1, 0))
    assert rule.choose(alg, state, None) == 0


def test_costly_drafts_that_fail_are_probed_within_their_share():
    rule = Automatic(COSTS, probing=0.02, patience=10**6)
    alg = of(rule, costly=True)
    state, spent, probes, rounds = rule.init(alg), 0.0, 0, 2000
    assert rule.choose(alg, state, None) > 0            # nothing else can show whether they hold
    for i in range(rounds):
        arm = int(rule.choose(alg, state, None))
        if arm and i > 10:
            spent, probes = spent + COSTS[arm] - 1, probes + 1
        state = rule.update(alg, state, seen(arm, bool(arm), 0))
    assert 1 <= probes
    assert spent / rounds <= 0.02


@pytest.mark.parametrize("policy", [dict(temperature=0.0), dict(temperature=1.0)])
def test_copies_are_drafted_and_the_output_is_plain_decodings(policy):
    # each prompt repeats itself, and so does a greedy toy model sooner or later
    ids = [p * 2 for p in prompts(4, longest=6, seed=3)]
    alg = Adaptive(lookups(2, 4), Automatic(COSTS))
    s = decode(alg, "toy", ids, policy, new=48, eos=[])
    assert texts(s) == texts(decode(Autoregressive(), "toy", ids, policy, new=48, eos=[]))
    if policy["temperature"] == 0:
        new = np.asarray(s.length - s.prompt_length)
        assert np.asarray(s.stats.rounds).max() < 0.8 * new.max()
        assert np.asarray(s.stats.accepted).sum() > 0.2 * new.sum()


def test_unrepeating_text_is_decoded_plainly():
    ids = prompts(4, seed=3)
    s = decode(Adaptive(lookups(2, 4), Automatic(COSTS)), "toy", ids, dict(temperature=5.0), new=48, eos=[])
    assert np.asarray(s.stats.drafted).sum() <= 8       # against up to 4 x 48 x 4
