"""Rounds whose drafts are chosen as they go: the choice pays, costs next to nothing where it does not, and is exact."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax.algorithms.plain import Autoregressive
from decodax.algorithms.speculative import NOTHING, Adaptive, Automatic, Bandit, Bass, Speculative, drafts, trees
from decodax.algorithms.speculative.adaptive.controllers import Controller, RoundOutcome
from decodax.algorithms.speculative.source import Grower, Growth
from decodax.core import keys
from decodax.core.keys import Purpose
from decodax.engine.request import Request
from decodax.engine.slots import Slots
from decodax.io.load import LM
from tests.laws.cases import VOCABULARY, decode, model, prompts, texts

COSTS = (1.0, 1.4, 1.8)


def lookups(*lengths):
    return (NOTHING, *(Speculative(drafts.PromptLookup(max(lengths)), shape=trees.Chain(k)) for k in lengths))


def of(controller, costly=False):
    """The same arms, whose drafts may be tried on paper or not."""
    source = drafts.Jacobi(4) if costly else drafts.PromptLookup(4)
    return Adaptive((NOTHING, *(Speculative(source, shape=trees.Chain(k)) for k in (2, 4))), controller).known


def seen(arm, tried, held):
    """A round of rows of which each tried some depths and found some to hold."""
    tried, held = jnp.atleast_1d(jnp.array(tried)), jnp.atleast_1d(jnp.array(held))
    to = lambda n: jnp.arange(4) < n[:, None]
    return RoundOutcome(arm=arm, running=jnp.ones(tried.shape, bool), tokens=held + 1, accepted=held,
                        tried=to(tried), held=to(held))


def rows(*left):
    """What a controller reads of a state: rows with so many tokens to write."""
    left = np.array(left)
    return SimpleNamespace(running=left > 0, max_length=left + 10, length=np.full(left.shape, 10))


def test_free_drafts_wait_until_they_hold_on_paper():
    rule = Automatic(COSTS)
    alg = of(rule)
    state, note = rule.init(alg, 1), jax.jit(lambda state, outcome: rule.note(alg, state, outcome))
    assert rule.choose(alg, state, rows(50)) == 0
    for _ in range(3):
        state = note(state, seen(2, 4, 4))
    assert rule.choose(alg, state, rows(50)) == 2
    for _ in range(40):
        state = note(state, seen(2, 1, 0))
    assert rule.choose(alg, state, rows(50)) == 0


def test_drafts_of_some_rows_do_not_hold_up_the_row_that_lasts_longest():
    rule = Automatic(COSTS)
    alg = of(rule)
    state, note = rule.init(alg, 2), jax.jit(lambda state, outcome: rule.note(alg, state, outcome))
    for _ in range(30):                                 # row 0 copies, row 1 writes anew
        state = note(state, seen(2, [4, 1], [4, 0]))
    assert rule.choose(alg, state, rows(50, 50)) == 0   # 4 tokens a round of row 0 would not end the batch sooner
    assert rule.choose(alg, state, rows(200, 50)) == 2  # row 0 lasts longest
    assert rule.choose(alg, state, rows(50, 0)) == 2    # row 1 has ended


def test_costly_drafts_that_fail_are_probed_within_their_share():
    rule = Automatic(COSTS, probing=0.02, patience=10**6)
    alg = of(rule, costly=True)
    choose = jax.jit(lambda state: rule.choose(alg, state, rows(50)))
    update = jax.jit(lambda state, outcome: rule.update(alg, state, outcome))
    outcomes = [seen(arm, bool(arm), 0) for arm in range(len(COSTS))]
    state, spent, probes, rounds = rule.init(alg, 1), 0.0, 0, 1000
    assert rule.choose(alg, state, rows(50)) > 0            # nothing else can show whether they hold
    for i in range(rounds):
        arm = int(choose(state))
        if arm and i > 10:
            spent, probes = spent + COSTS[arm] - 1, probes + 1
        state = update(state, outcomes[arm])
    assert 1 <= probes
    assert spent / rounds <= 0.02


RULES = {"ucb": Bandit(), "exp3": Bandit("exp3"), "bass": Bass(start=4), "automatic": Automatic(COSTS)}
SHARED = {"ucb": ("count", "reward", "round"), "exp3": ("weight", "round"), "bass": ("length", "cut", "round"),
          "automatic": ("clocks",)}


def told(name, rows, rounds, state=None):
    """What a rule remembers of a batch behind some rounds, in which the arms took turns and few drafts held."""
    rule, alg = RULES[name], of(RULES[name], costly=True)
    update = jax.jit(lambda state, outcome: rule.update(alg, state, outcome))
    state = rule.init(alg, rows) if state is None else state
    for i in range(rounds):
        state = update(state, seen(1 + i % 2, [2] * rows, [int(i % 3 == 0)] * rows))
    return state


def put(state, seat, fresh):
    """With a fresh row in a seat, as slots bring it."""
    return jax.tree.map(lambda x, new: x.at[seat].set(new[0]), state, fresh)


@pytest.mark.wide(but=("exp3", "automatic", "bass"))
@pytest.mark.parametrize("name", RULES)
def test_a_batchs_memory_outlasts_the_rows_that_leave_it(name):
    """In whichever seat a row begins anew, it neither resets what the batch has learnt nor keeps anything of its own
    from before; and when all rows are new, so is the memory."""
    rule, alg = RULES[name], of(RULES[name], costly=True)
    old, fresh = told(name, 3, 7), rule.init(alg, 1)
    memory = lambda state, at: [np.asarray(getattr(state, field))[at].tolist() for field in SHARED[name]]
    assert memory(old, 0) != memory(fresh, 0)
    after = told(name, 3, 1, old)
    for seats in ((0,), (1,), (2,), (0, 1), (1, 2)):
        state = old
        for seat in seats:
            state = put(state, seat, fresh)
        if name != "automatic":         # whose choice goes by the rates of each row, too
            assert rule.choose(alg, state, rows_of(3)) == rule.choose(alg, old, rows_of(3))
        state = told(name, 3, 1, state)
        assert [memory(state, row) for row in range(3)] == [memory(after, 0)] * 3
    state = old
    for seat in range(3):
        state = put(state, seat, fresh)
    assert memory(told(name, 3, 2, state), 1) == memory(told(name, 3, 2), 1)


def rows_of(count):
    s = rows(*[50] * count)
    s.key = keys.row_keys(*np.zeros((3, count), np.uint32))
    return s


@pytest.mark.wide
def test_slots_bring_rows_that_do_not_reset_a_bandit():
    """Seat 0 ends first, and a prompt that comes later takes it while the others go on."""
    network, weights = model("toy")
    lm = LM(model=network, params=weights, vocab_size=VOCABULARY)
    alg = Adaptive(lookups(2, 4), Bandit())
    given = dict(algorithm=alg, eos_token_id=[], temperature=0.0)
    first = Request.read(lm, prompts(3), max_new_tokens=[3, 30, 30], **given)
    slots = Slots(first.select([0]), 3, first.longest + 30, first.more)
    slots.admit([first.select([i]) for i in range(3)], range(3))
    while not (done := slots.finished()):
        slots.advance(seconds=1e-9)        # a round
    assert [tag for tag, _ in done] == [0]
    before = jax.device_get(slots._batch.state.algo[0])
    slots.admit([Request.read(lm, prompts(1, seed=9), max_new_tokens=30, **given)], ["late"])
    held = jax.device_get(slots._batch.state.algo[0])
    assert held.round[0] == 0 < before.round.max() == held.round.max()
    slots.advance(seconds=1e-9)        # a round
    after = jax.device_get(slots._batch.state.algo[0])
    assert (after.round == before.round.max() + 1).all()
    assert after.count.sum(1).tolist() == [float(before.count[1].sum()) + 1] * slots.rows


@pytest.mark.wide
@pytest.mark.parametrize("policy", [dict(temperature=0.0), dict(temperature=1.0)])
def test_copies_are_drafted_and_the_output_is_plain_decodings(policy):
    # each prompt repeats itself, and so does a greedy toy model sooner or later
    ids = [p * 2 for p in prompts(4, longest=6, seed=3)]
    alg = Adaptive(lookups(2, 4), Automatic((1.0, 1.1, 1.2)))
    s = decode(alg, "toy", ids, policy, new=48, eos=[])
    assert texts(s) == texts(decode(Autoregressive(), "toy", ids, policy, new=48, eos=[]))
    if policy["temperature"] == 0:
        new = np.asarray(s.length - s.prompt_length)
        assert np.asarray(s.stats.rounds).max() < 0.8 * new.max()
        assert np.asarray(s.stats.accepted).sum() > 0.2 * new.sum()


@dataclasses.dataclass(frozen=True)
class Counting(Controller):
    """Always the same arm; its state is how often each depth was tried and how often it held, `i32[B, 2, K]`."""

    arm: int

    def init(self, of, batch):
        return jnp.zeros((batch, 2, of.longest), jnp.int32)

    def choose(self, of, state, s):
        return jnp.int32(self.arm)

    def update(self, of, state, seen):
        return state + jnp.stack([seen.tried, seen.held], 1)


@pytest.mark.wide
def test_a_round_tries_no_depth_beyond_its_arm():
    ids = [p * 2 for p in prompts(4, longest=6, seed=3)]
    s = decode(Adaptive(lookups(2, 4), Counting(1)), "toy", ids, dict(temperature=0.0), new=48, eos=[])
    tried, held = np.moveaxis(np.asarray(s.algo[0]), 1, 0)
    assert held[:, 1].sum() > 0 and held[:, :2].sum() == np.asarray(s.stats.accepted).sum()
    assert (tried[:, 0] == np.asarray(s.stats.rounds)).all() and (tried[:, 1] == held[:, 0]).all()
    assert not tried[:, 2:].any() and not held[:, 2:].any()


@pytest.mark.wide
def test_unrepeating_text_is_decoded_plainly():
    ids = prompts(4, seed=3)
    s = decode(Adaptive(lookups(2, 4), Automatic(COSTS)), "toy", ids, dict(temperature=5.0), new=48, eos=[])
    assert np.asarray(s.stats.drafted).sum() <= 8       # against up to 4 x 48 x 4


@pytest.mark.wide
def test_arms_of_any_size_never_share_noise():
    """`BlockVerification` drops drafts whose values decided what came before them: a position that is drafted again in
    another round, at another depth and by another arm, must get other noise."""
    told, key = {}, keys.row_keys(*np.zeros((3, 4), np.uint32))
    lengths = np.arange(10, 14)                             # a row's rounds begin at different lengths
    for room, children, stream in ((3, 1, 0), (7, 1, 0), (6, 2, 0), (6, 2, 1)):
        def draws(length, room=room, children=children, stream=stream):
            sees = jnp.broadcast_to(jnp.tri(1 + room, dtype=bool), (4, 1 + room, 1 + room))         # a chain
            g = Growth(tokens=jnp.zeros((4, 1 + room), jnp.int32), sees=sees, filled=room, source=None, states=())
            grower = Grower(None, None, None, SimpleNamespace(batch=4, length=length, key=key), "distinct", stream)
            return grower.uniforms_for(g, jnp.tile(jnp.arange(1 + room), (4, 1)), children, Purpose.DRAFT)

        for (row, node, child), noise in np.ndenumerate(np.asarray(jax.jit(draws)(lengths))[..., 0]):
            draw = lengths[row], node, child, stream
            assert told.setdefault((lengths[row] + node, noise), draw) == draw
