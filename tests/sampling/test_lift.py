"""Every node of a window has the distribution of the text that leads to it, along chains and trees."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax.core.types import Out
from decodax.core.window import Window
from decodax.pallas_kernels.vocabulary import nodes as by_nodes_module
from decodax.sampling import Context, Custom, Policy, build
from tests.matrix import often
from tests.sampling.lifted import (
    BATCH,
    CHAIN,
    DEPTH,
    PROMPTS,
    ROOM,
    TREE,
    VOCAB,
    Decoding,
    log_probs,
    out_of,
    start,
    window_and_logits,
)


def double_the_last(ctx: Context, logits: jax.Array) -> jax.Array:
    return logits.at[ctx.tokens[ctx.length - 1]].multiply(2)


POLICIES: dict[str, dict[str, Any]] = {
    "repetition": dict(repetition_penalty=1.4),
    "repetition of the last": dict(repetition_penalty=1.4, penalty_last_n=3),
    "encoder repetition": dict(encoder_repetition_penalty=1.4),
    "presence and frequency": dict(presence_penalty=0.4, frequency_penalty=0.3),
    "last n": dict(presence_penalty=0.4, frequency_penalty=0.3, penalty_last_n=4),
    "DRY": dict(dry_multiplier=0.7, dry_allowed_length=1, dry_sequence_breakers=[[4], [5, 1]]),
    "n-grams": dict(no_repeat_ngram_size=2),
    "prompt n-grams": dict(encoder_no_repeat_ngram_size=2),
    "bad words": dict(bad_words_ids=[[3], [1, 2], [2, 3, 4], [7, 8]]),
    "sequence bias": dict(sequence_bias=[[[1, 2], 1.5], [[2, 3, 1], -2.0], [[9], 0.5]]),
    "lengths": dict(min_new_tokens=3, min_length=8, exponential_decay_length_penalty=(1, 1.3),
                    begin_suppress_tokens=[2], forced_eos_token_id=0, max_length=12),
    "xtc": dict(temperature=1.0, xtc_probability=0.5, xtc_threshold=0.05),
    "mirostat": dict(temperature=0.9, mirostat_tau=1.5, mirostat_eta=0.4),
    "mirostat behind penalties": dict(temperature=0.9, repetition_penalty=1.3, top_k=8, mirostat_tau=1.5,
                                      mirostat_eta=0.4),
    "dynamic temperature": dict(temperature=0.9, dynatemp_range=0.5, top_p=0.9),
    "left hash": dict(watermarking_config=dict(bias=1.0)),
    "self hash": dict(watermarking_config=dict(bias=1.0, seeding_scheme="selfhash", context_width=3)),
    "custom": dict(transforms=(Custom(double_the_last),)),
}


@jax.jit
@jax.vmap
def linear(transforms: Any, text: jax.Array, prompt: jax.Array, key: jax.Array, logits: jax.Array) -> jax.Array:
    """The rule itself: a chain run token by token along `text`, with `logits` `f32[n, V]` after the prompt."""
    def step(states: Any, x: Any) -> tuple[Any, jax.Array]:
        i, out = x
        ctx = Context(jnp.where(jnp.arange(text.shape[0]) < prompt + i, text, -1), prompt + i, prompt, key)
        for t, s in zip(transforms, states, strict=True):
            out = t.logits(s, ctx, out)
        log_p, token = jax.nn.log_softmax(out), text[prompt + i]
        return tuple(t.advance(s, token, log_p[token]) for t, s in zip(transforms, states, strict=True)), log_p

    states = tuple(t.init(Context(text, prompt, prompt, key)) for t in transforms)
    return jax.lax.scan(step, states, (jnp.arange(len(logits)), logits))[1]


@jax.jit
def warm_log_probs(policy: Policy, s: Decoding, window: Window, logits: jax.Array) -> jax.Array:
    return policy.over(s, window, out_of(logits)).warm.log_probs()


def path(parents: list[int], node: int) -> list[int]:
    return [*path(parents, parents[node]), node] if node >= 0 else []


ALONG = [*((name, TREE) for name in POLICIES),
         *((name, CHAIN) for name in ("repetition", "DRY", "mirostat behind penalties"))]


@pytest.mark.parametrize(("name", "parents"), often(ALONG[:-2], ALONG),
    ids=lambda x: x if isinstance(x, str) else {7: "tree", 4: "chain"}[len(x)])
def test_each_node_has_the_distribution_of_its_own_text(name: str, parents: list[int]) -> None:
    policy = build(BATCH, eos=[0], vocab_size=VOCAB, **POLICIES[name])
    # temperature 0 would make one-hot what the rules have done
    policy = policy.replace(transforms=tuple(t for t in policy.transforms if "temperature" in POLICIES[name]
                                             or type(t).__name__ != "Temperature"))
    window, logits = window_and_logits(parents, seed=len(name))
    s = start(policy)
    ours = np.asarray(log_probs(policy, s, window, logits))
    width = len(parents)
    texts = np.zeros((BATCH * width, ROOM), np.int32)
    along = np.zeros((BATCH * width, DEPTH, VOCAB), np.float32)
    for b in range(BATCH):
        for node in range(width):
            nodes = path(parents, node)
            text = PROMPTS[b] + [int(window.tokens[b, i]) for i in nodes[1:]]
            texts[b * width + node, :len(text)] = text
            along[b * width + node, :len(nodes)] = logits[b, nodes]
    rows = jnp.repeat(jnp.arange(BATCH), width)
    depth = np.array([len(path(parents, node)) - 1 for node in range(width)])
    theirs = np.asarray(linear(policy.select(rows).transforms, jnp.asarray(texts), s.length[rows], s.key[rows], along))
    theirs = theirs.reshape(BATCH, width, DEPTH, VOCAB)[:, np.arange(width), depth]
    np.testing.assert_array_equal(np.isneginf(ours), np.isneginf(theirs))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    untouched = np.isclose(theirs, np.asarray(jax.nn.log_softmax(logits)), atol=1e-3).all(-1)
    assert (~untouched).sum() >= 2


@pytest.mark.wide(but=("mirostat",))
@pytest.mark.parametrize("name", ["mirostat", "mirostat behind penalties"])
def test_a_state_goes_on_where_the_accepted_node_left_it(name: str) -> None:
    policy = build(BATCH, **POLICIES[name])
    window, logits = window_and_logits(TREE, seed=5)
    s = start(policy)
    node, token = jnp.array([4, 2]), jnp.array([3, 4])
    advance = jax.jit(lambda *x: policy.over(s, window, out_of(logits)).advance(*x))
    moved = np.asarray(jax.tree.leaves(advance(node, token))[0])
    log_p = np.asarray(log_probs(policy, s, window, logits))
    for b in range(BATCH):
        nodes = path(TREE, int(node[b]))
        tokens = [*(int(window.tokens[b, i]) for i in nodes[1:]), int(token[b])]
        mu = 2 * 1.5
        for i, t in zip(nodes, tokens, strict=True):
            mu -= 0.4 * (-log_p[b, i, t] / np.log(2) - 1.5)
        np.testing.assert_allclose(moved[b], mu, rtol=1e-4)


@pytest.mark.wide
def test_selected_nodes_and_rows_are_those_of_the_whole() -> None:
    policy = build(BATCH, temperature=[0.7, 1.2], repetition_penalty=[1.2, 1.5], top_p=0.9)
    window, logits = window_and_logits(TREE, seed=5)
    s = start(policy)
    whole = np.asarray(log_probs(policy, s, window, logits))
    nodes = jnp.array([[6, 0], [3, 5]])
    some = np.asarray(log_probs(policy, s, window, logits, nodes))
    for b in range(BATCH):
        np.testing.assert_allclose(some[b], whole[b, np.asarray(nodes)[b]], rtol=1e-6)
    rows = jnp.array([1, 1, 0])
    pick = lambda tree: jax.tree.map(lambda x: x[rows], tree)
    wide = window.replace(tokens=window.tokens[rows], positions=window.positions[rows], live=window.live[rows])
    again = log_probs(policy.select(rows), pick(s), wide, logits[np.asarray(rows)])
    np.testing.assert_allclose(np.asarray(again), whole[np.asarray(rows)], rtol=1e-6)


def test_a_canvas_takes_bags_and_refuses_sequences() -> None:
    window, logits = window_and_logits([-1, 0, 1, 2], seed=1)
    known = window.tokens > 1
    bag = build(BATCH, do_sample=True, repetition_penalty=2.0, presence_penalty=0.5)
    s = start(bag)
    canvas = lambda s, x: bag.over(s, window, out_of(x)).on_canvas(known, window.positions).processed()
    ours = jax.jit(canvas)(s, logits)
    for b in range(BATCH):
        seen = {t for t, k in zip(np.asarray(window.tokens)[b].tolist(), np.asarray(known)[b], strict=True) if k}
        early = set(PROMPTS[b][:-1]) if not bool(known[b, 0]) else set(PROMPTS[b])
        moved = np.flatnonzero(np.abs(np.asarray(ours)[b, 3] - logits[b, 3]) > 1e-6)
        assert set(moved.tolist()) >= (seen & early)
    for name, settings in (("NoRepeatNgram", dict(no_repeat_ngram_size=2)), ("BadWords", dict(bad_words_ids=[[1, 2]])),
                           ("Mirostat2", dict(temperature=1, mirostat_tau=3.0))):
        policy = build(BATCH, **settings)
        with pytest.raises(ValueError, match=f"{name}: reads the text from left to right"):
            policy.over(start(policy), window, out_of(logits)).on_canvas(known, window.positions)


@pytest.mark.wide
def test_a_distribution_crosses_an_inner_jit_and_a_branch() -> None:
    """Its head closes over weights that are traced outside, anew in each trace."""
    policy = build(BATCH, temperature=[0.8, 0.0], repetition_penalty=1.3, top_p=0.9, vocab_size=VOCAB)
    window, logits = window_and_logits(TREE, seed=6)
    s = start(policy)
    told = jax.jit(lambda dist: (dist.log_probs(), dist.draw()))

    @jax.jit
    def round_of(weights: jax.Array, inside: jax.Array) -> Any:
        dist = policy.over(s, window, Out(hidden=jnp.asarray(logits), entries=(), head=lambda x: x @ weights))
        plain = dist.log_probs(), dist.draw()
        return told(dist), jax.lax.cond(inside, lambda d: (d.log_probs(), d.draw()), lambda _: plain, dist), plain

    rng = np.random.default_rng(0)
    for size in (VOCAB, VOCAB, VOCAB - 3):       # the last traces again
        weights = jnp.asarray(rng.normal(size=(VOCAB, size)), jnp.float32)
        jitted, branched, plain = round_of(weights, jnp.array(True))
        for (log_p, token), name in ((jitted, "jit"), (branched, "cond")):
            np.testing.assert_allclose(log_p, plain[0], rtol=1e-5, err_msg=name)
            assert np.array_equal(token, plain[1]), name
        raw = logits @ np.asarray(weights)
        one = build(BATCH, do_sample=True)
        bare = log_probs(one, start(one), window, raw)
        assert plain[0].shape == bare.shape and not np.allclose(plain[0], bare)


@pytest.mark.wide
def test_a_warm_distribution_has_the_probabilities_of_greedy_rows_too() -> None:
    settings = dict(repetition_penalty=1.4, top_k=5, vocab_size=VOCAB)
    window, logits = window_and_logits(TREE, seed=7)

    def told(temperature: list[float], warm: bool, **more: Any) -> np.ndarray:
        policy = build(BATCH, temperature=temperature, **settings, **more)
        return np.asarray((warm_log_probs if warm else log_probs)(policy, start(policy), window, logits))

    for more in ({}, dict(mirostat_tau=3.0)):       # with a state as well
        mixed, wanted = told([0.0, 0.7], True, **more), told([1.0, 0.7], False, **more)
        np.testing.assert_allclose(mixed, wanted, rtol=1e-5)
        assert (np.isfinite(mixed).sum(-1) > 1).any(1).all()
        assert (np.isfinite(told([0.0, 0.7], False, **more)[0]).sum(-1) == 1).all()


@pytest.mark.wide
@pytest.mark.parametrize(("most", "expected"), [(2, [2, 2, 1]), (1, [1])], ids=["parts", "a loop"])
@pytest.mark.parametrize("nodes", [pytest.param(None, marks=pytest.mark.full), [6, 0, 3, 3, 1]],
                         ids=["all nodes", "some"])
def test_draws_from_a_few_nodes_at_a_time_are_those_from_all_at_once(nodes: list[int] | None, most: int,
                                                                     expected: list[int],
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    policy = build(BATCH, temperature=[0.8, 0.0], top_p=0.9, presence_penalty=0.4, no_repeat_ngram_size=2)
    window, logits = window_and_logits(TREE, seed=6)
    dist = policy.over(start(policy), window, out_of(logits))
    chosen = None if nodes is None else jnp.broadcast_to(jnp.asarray(nodes, jnp.int32), (BATCH, len(nodes)))
    want = dist.draw(chosen)
    widths: list[int] = []
    drawn = type(dist).draw_from
    monkeypatch.setattr(type(dist), "draw_from",
                        lambda self, x, *more: widths.append(x.shape[1]) or drawn(self, x, *more))
    monkeypatch.setattr(by_nodes_module, "platform", lambda: "tpu")
    monkeypatch.setattr(by_nodes_module, "FAST", most * BATCH * VOCAB * 4)
    np.testing.assert_array_equal(dist.draw(chosen), want)
    assert widths == (expected if nodes or most == 1 else [2, 2, 2, 1])
