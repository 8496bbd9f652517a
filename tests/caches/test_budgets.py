"""Laws that every cache policy of the table keeps, on the smallest model that can break them."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.cache.packed_heads import SEGMENT, pack, segment_attention, segments_of, unpack
from decodax.caches import Evicting, make
from decodax.caches.evict.evicting import Eviction
from decodax.caches.evict.snapkv import WindowAttention
from decodax.caches.prefill.propagation import Decoupled
from decodax.common.registry import CACHES
from decodax.core.fitting import fit_cache
from decodax.engine.batch import Job
from decodax.engine.request import Request
from decodax.models import Transformer
from tests.caches.small import DEEP, MODEL, OPTIONS, PROMPTS, SMALL
from tests.extending.pages import DOCS
from tests.matrix import often


def arrays(kind: Eviction, new: int = 20) -> Evicting:
    made = fit_cache(DEEP.model.with_cache(kind), new).init_cache(3, 256)
    assert isinstance(made, Evicting)
    return made


@pytest.mark.parametrize("name", [name for name, given in OPTIONS.items()
                                  if isinstance(given.get("budget"), int) and isinstance(make(name, **given),
                                                                                         Eviction)])
def test_memory_is_that_of_the_budget(name: str) -> None:
    """And of the tokens to come, or of those between two choices; whatever the length of the prompt."""
    kind = make(name, **OPTIONS[name])
    assert isinstance(kind, Eviction)
    slots = [x.shape[1] * x.shape[2] / 2 for i, x in enumerate(arrays(kind).kv) if i not in kind.skip]
    packed = SEGMENT - 1 if name in ("adakv", "criticalkv", "headkv") else 0
    more = {"pyramidkv": 10, "chunkkv": 4, "scope": 3 + 3, "shotkv": 6}.get(name, packed)
    assert max(slots) <= 14 + more + (kind.every or 20)
    assert np.mean(slots) <= 14 + (5 if name == "pyramidkv" else more) + (kind.every or 20)


@pytest.mark.wide
def test_heads_of_any_lengths_share_memory_and_are_attended_to() -> None:
    """One keeps everything, one nothing, and each has room for what is to come; against a softmax written out."""
    size, later, r = 90, 9, np.random.default_rng(0)
    kv, q = r.standard_normal((2, 3, size, 12)), r.standard_normal((2, 2, 6, 8))
    number = jnp.array([[size, 0, 33], [20, 41, 1]])
    segments = segments_of(size + 33, 3, later, size)
    starts, head, source = jax.vmap(lambda n: pack(jnp.broadcast_to(jnp.arange(size)[::-1], (3, size)), n, later, size,
                                                   segments))(number)
    ends = np.append(np.asarray(starts)[:, 1:], [[segments]] * 2, 1)
    assert ((ends - starts) * SEGMENT >= np.minimum(np.asarray(number) + later, size)).all()
    packed = jnp.stack([jnp.asarray(kv)[b, head[b], source[b]].reshape(segments, SEGMENT, 12) for b in range(2)])
    out, lse = segment_attention(jnp.asarray(q), packed, (source >= 0).reshape(2, segments, SEGMENT), starts, scale=0.4)
    for b, h, w in np.ndindex(2, 6, 2):
        own = kv[b, h // 2, ::-1][:int(number[b, h // 2])]
        np.testing.assert_allclose(unpack(packed[b], starts[b], number[b], size)[h // 2, :len(own)], own, atol=1e-6)
        if len(own):
            scores = 0.4 * own[:, :8] @ q[b, w, h]
            np.testing.assert_allclose(out[b, w, h], jax.nn.softmax(scores) @ own[:, 8:], atol=1e-5)
            np.testing.assert_allclose(lse[b, w, h], jax.nn.logsumexp(scores), atol=1e-5)
        else:
            assert lse[b, w, h] < -1e29 and not out[b, w, h].any()


SIZED = [name for name, policy in CACHES.items() if "budget" in policy.options]
LENGTH, LEFT = 40, 12       # of a prompt, and how many tokens of it are to stay
BYTES = LEFT * sum(2 * (4 * 8 + 4) for _ in range(2))       # of two layers of two heads
READING = ("a2ats", "token-butler")     # all tokens stay, and each query reads so many
UNEVEN = ("pyramidkv",)     # the paper divides tokens among layers as its authors do, and shares as kvpress does


def sized(name: str, budget: Any) -> Any:
    """A policy whose layers all evict."""
    every = {skip: () for skip in ("skip", "skip_layers") if skip in CACHES[name].options and name != "critiprefill"}
    return make(name, **OPTIONS[name] | every | {"budget": budget})


def refusal(name: str, budget: Any) -> str | None:
    """What a policy says of a form of budget that it does not take."""
    try:
        sized(name, budget)
    except ValueError as error:
        return str(error)
    return None


FORMS = (LEFT / LENGTH, f"{BYTES}B")
EVICTING = [name for name in SIZED if name not in READING and not any(refusal(name, form) for form in FORMS)]


def kept_of(name: str, budget: Any) -> list[list[int]]:
    """The positions that each layer keeps of a prompt, those of all heads together."""
    prompt = np.random.default_rng(7).integers(0, 16, LENGTH + 1).tolist()      # the newest token is not cached yet
    job = Job.begin(Request.read(DEEP, [prompt], cache=sized(name, budget), max_new_tokens=4))
    cache = job.state.cache
    while not hasattr(cache, "positions"):
        cache = cache.base
    return [sorted(at for at in np.asarray(x)[0].ravel().tolist() if at >= 0) for x in cache.positions]


@pytest.mark.parametrize("name", SIZED)
def test_a_policy_takes_a_form_of_budget_or_names_what_it_takes(name: str) -> None:
    assert refusal(name, 24) is None
    for form in FORMS:
        assert (refusal(name, form) or "budget").startswith("budget")


@pytest.mark.wide
@pytest.mark.parametrize("name", often(["snapkv", "pyramidkv", "adakv", "h2o", "fastkv"], EVICTING))
def test_a_share_or_bytes_keep_what_as_many_tokens_keep(name: str) -> None:
    """The parts of a policy that are counted in tokens survive, whatever the budget is counted in."""
    tokens, share, size = (kept_of(name, budget) for budget in (LEFT, *FORMS))
    assert sum(map(len, tokens)) > 0
    for other in (share, size):
        if name in UNEVEN:
            assert sum(map(len, other)) == sum(map(len, tokens))
        else:
            assert other == tokens


def test_a_share_of_a_prompt_of_which_a_number_of_tokens_goes_on_is_as_many_tokens() -> None:
    """FastKV's deep layers, which see so many tokens of it."""
    rule = Decoupled(WindowAttention(4), 4, layer=0, passed=20)
    for layer in (0, 1):
        share, tokens = (rule.table(budget, LENGTH, layer, 2)[LENGTH] for budget in (LEFT / LENGTH, LEFT))
        assert share == tokens == LEFT


@pytest.mark.wide(but=("12",))
@pytest.mark.parametrize("budget", [LEFT, *FORMS])
def test_half_of_what_h2o_keeps_are_the_latest_tokens(budget: Any) -> None:
    for layer in kept_of("h2o", budget):
        late = [at for at in layer if at >= LENGTH - LEFT // 2]
        assert len(late) == LEFT // 2 * 2 and len(layer) == LEFT * 2        # of two heads


@pytest.mark.wide
@pytest.mark.parametrize("name", ["snapkv", "adakv", "knorm"])
def test_a_budget_in_bytes_holds_for_a_row(name: str) -> None:
    given = {"adakv": dict(window_size=4, head_cap=1.0), "snapkv": dict(window_size=4),
             "knorm": dict(skip_layers=())}[name]
    job = Job.begin(Request.read(DEEP, PROMPTS[:2], cache=make(name, budget="1.5kB", **given), max_new_tokens=4))
    each = 4 * job.state.cache.kv[0].shape[-1] + 4
    held = sum(np.asarray(count) for count in job.state.cache.count).sum(-1)[:2] * each
    assert 1500 - 2 * 2 * each < held[0] <= 1500


@pytest.mark.wide
def test_long_texts_stay_within_the_budget() -> None:
    job = Job.begin(Request.read(SMALL, PROMPTS[:2], cache=make("h2o", budget=20, every=10), max_new_tokens=180))
    slots = [x.shape[1] for x in job.state.cache.kv]
    while job.running:
        job.advance(None, rounds=1)
        # of each head of a layer: what was chosen, and what came since, fewer than `every`
        most = max(int(np.asarray(count).max()) for count in job.state.cache.count)
        assert most <= 30
    assert np.asarray(job.state.length - job.state.prompt_length)[:2].tolist() == [180, 180]
    assert most >= 20 and [x.shape[1] for x in job.state.cache.kv] == slots and max(slots) < 64


@pytest.mark.wide
def test_samples_and_a_mixed_batch_go_their_own_ways() -> None:
    out = dx.generate(SMALL, PROMPTS, cache="snapkv:budget=14,window_size=4", num_samples=2, temperature=1.0,
                      max_new_tokens=12, seed=3)
    alone = dx.generate(SMALL, PROMPTS[1:2], cache="snapkv:budget=14,window_size=4", num_samples=2, temperature=1.0,
                        max_new_tokens=12, seed=3, request_ids=[1])
    assert out.tokens[2:4].tolist() == alone.tokens.tolist() != [out.tokens[2].tolist()] * 2


@pytest.mark.wide
def test_scores_of_queries_refuse_a_soft_cap() -> None:
    """Else they would count other weights than attention has."""
    capped = dataclasses.replace(MODEL.config, attention_softcap=5.0)
    lm = dataclasses.replace(SMALL, model=Transformer(capped))
    with pytest.raises(ValueError, match=r"^cache: h2o takes a model without soft caps of its attention"):
        dx.generate(lm, PROMPTS[:1], cache=make("h2o", budget=20), max_new_tokens=2)
    assert dx.generate(lm, PROMPTS[:1], cache=make("knorm", budget=20, skip_layers=()),
                       max_new_tokens=2).lengths.tolist() == [2]


@pytest.mark.full
def test_two_thousand_tokens_stay_within_the_budget() -> None:
    long = dataclasses.replace(SMALL, model=Transformer(dataclasses.replace(MODEL.config, context=4096)))
    job = Job.begin(Request.read(long, PROMPTS[:2], max_new_tokens=2000, cache="h2o:budget=64,every=32"))
    held = [x.shape for x in jax.tree.leaves(job.state.cache.kv)]
    job.advance(None)
    assert [x.shape[2] for x in job.state.cache.kv] == [64 + 32] and held == [x.shape for x in job.state.cache.kv]
    assert job.state.length[:2].tolist() == [2041, 2026]
    assert int(np.max(job.state.cache.count[0])) <= 64 + 32


def test_the_guides_to_caches_name_every_policy() -> None:
    text = "".join(path.read_text() for path in (DOCS / "choose").glob("caches*.md"))
    assert not [name for name in CACHES if not re.search(rf"`{re.escape(name)}[`:]", text)]


def test_a_method_that_needs_more_of_a_cache_is_refused() -> None:
    model = dx.load("tasks-diffusion")
    with pytest.raises(ValueError, match=r"needs one that supports .*subsets.*, which Evicting does not"):
        dx.generate(model, "sort 3 1 2", cache="snapkv", algorithm=dx.algorithms.make("fast-dllm", model),
                    max_new_tokens=8)
