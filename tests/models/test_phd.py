"""Models that read each token several times (PHD, PHD-SWA, PHD-CSWA: Wu et al., 2025)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax import caches
from decodax.io.load import LM
from decodax.models import Phd, Transformer, cla, llama, phd
from tests.by_hand import logits
from tests.caches import small as policies
from tests.caches.small import PROMPTS
from tests.matrix import often
from tests.small_models import random_lm

BASE = llama(vocab=16, width=16, layers=2, heads=4, kv_heads=2, mlp=24, context=256)
MODELS = {"phd-2": phd(BASE), "phd-3": phd(BASE, 3), "swa-3": phd(BASE, 3, 5), "cswa-2": phd(BASE, 2, 4, 6),
          "cswa-3": phd(BASE, 3, 6, 5)}
NEW = 16


def lm(name: str) -> LM:
    return random_lm(MODELS[name], 3)


def sees(model: Phd, query: tuple[int, int], key: tuple[int, int]) -> bool:
    """The paper's rule, of copy `j` of token `n` and copy `i` of token `m`, both from 1 on."""
    (n, j), (m, i), c = query, key, model.copies
    if (i == 1 and m < n) or (i <= j and m == n):
        return True
    if c.window is None or i == 1 or j == 1 or m > n or (c.chunk is not None and m // c.chunk != n // c.chunk):
        return False
    # hidden decoding tokens one behind the other, as they are read
    place = lambda token, copy: token * (c.count - 1) + copy
    return 0 < place(n, j) - place(m, i) <= c.window and m < n


def by_hand(model: Phd, params: Any, tokens: list[int]) -> np.ndarray:
    """Logits `f64[T, V]` of the last copies, with all copies in the order of the paper and its mask."""
    K = model.copies.count
    nodes = [(n, i + 1) for n in range(len(tokens)) for i in range(K)]
    seen = np.array([[sees(model, query, key) for key in nodes] for query in nodes])
    at = np.array([n for n, _ in nodes])
    return logits(model.config, params, np.asarray(tokens)[at], at, lambda layer, keys: seen)[K - 1::K]


def tokens(own: LM, **more: Any) -> list[list[int]]:
    return dx.generate(own, PROMPTS, max_new_tokens=NEW, seed=5, **more).tokens.tolist()


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_by_hand(name: str) -> None:
    own, want = lm(name), by_hand(MODELS[name], lm(name).params, PROMPTS[1])
    np.testing.assert_allclose(own.model.forward(own.params, jnp.asarray([PROMPTS[1]]))[0], want, rtol=1e-3, atol=1e-3)
    plain = Transformer(BASE).forward(own.params, jnp.asarray([PROMPTS[1]]))[0]
    assert np.abs(np.asarray(plain) - want).max() > 0.1


@pytest.mark.wide
@pytest.mark.parametrize("name", often(["phd-3", "cswa-3"], MODELS))
def test_decoding_is_the_full_forward(name: str) -> None:
    """Whatever the prompts' chunks, in a batch and alone, and scoring says the same."""
    own = lm(name)
    plain = tokens(own)
    for prompt, row in zip(PROMPTS, plain, strict=True):
        want = by_hand(MODELS[name], own.params, [*prompt, *row])
        assert want[len(prompt) - 1:-1].argmax(-1).tolist() == row
    assert tokens(own, chunk=3) == plain and tokens(own, batch_size=1) == plain
    text = [*PROMPTS[2], *plain[2]]
    want = by_hand(MODELS[name], own.params, text)[:-1]
    wanted = want[np.arange(len(text) - 1), text[1:]] - np.log(np.exp(want).sum(-1))
    np.testing.assert_allclose(dx.score(own, [text]).logprobs[0], wanted, atol=2e-3)


OPTIONS: dict[str, dict[str, Any]] = {
    "snapkv": dict(budget=14, window_size=4), "kivi": dict(group_size=4, residual_length=8),
    "streaming-llm": dict(start_size=2, recent_size=20),
    "h2o": dict(budget=16, every=4), "quest": dict(budget=24, page_size=4, recent=20, skip=()),
    "paged": dict(pages=64, page=4)}


@pytest.mark.wide
@pytest.mark.parametrize(("name", "cache"), [(name, cache) for name in ("phd-2", "cswa-3") for cache in OPTIONS])
def test_cache_policies_with_drafts_give_their_own_tokens(name: str, cache: str) -> None:
    own, kind = lm(name), caches.make(cache, **OPTIONS[cache])
    drafts = dx.Speculative(dx.drafts.PromptLookup(length=3))
    # with a window all copies of a chunk are read at once, and `quest` takes windows of at most its recent tokens
    assert tokens(own, cache=kind, algorithm=drafts, chunk=3) == tokens(own, cache=kind, chunk=3)


def refused(own: LM, kind: Any) -> str | None:
    try:
        tokens(own, cache=kind)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.full
@pytest.mark.parametrize("name", ["phd-2", "cswa-3"])
@pytest.mark.parametrize("cache", sorted(policies.OPTIONS))
def test_every_policy_of_the_table_gives_its_own_tokens_or_is_refused(name: str, cache: str) -> None:
    """With drafts, and whatever the chunks that prompts are read in. A refusal says what the policy takes."""
    base = policies.DEEP if cache in policies.DEEPER else policies.SMALL
    own = LM(model=Phd(base.model, MODELS[name].copies), params=base.params, vocab_size=16)     # type: ignore[arg-type]
    kind = caches.make(cache, **policies.OPTIONS[cache])
    if (reason := refused(own, kind)) is not None:
        assert "takes" in reason
        return
    plain = tokens(own, cache=kind)
    assert tokens(own, cache=kind, algorithm=policies.LOOKUP) == plain
    assert tokens(own, cache=kind, chunk=3) == plain


@pytest.mark.wide
def test_a_budget_of_everything_is_dense() -> None:
    for name in ("phd-3", "cswa-2"):
        assert tokens(lm(name), cache=caches.make("snapkv", budget=200, window_size=4)) == tokens(lm(name))


def test_the_cache_is_that_of_the_plain_model() -> None:
    size = lambda cache: sum(x.nbytes for x in jax.tree.leaves(cache))
    plain = size(Transformer(BASE).init_cache(2, 256))
    assert size(MODELS["phd-3"].init_cache(2, 256)) == plain
    local = phd(BASE, 3, 16, 32)
    # two hidden tokens of eight tokens, in each layer and row, and eight positions of a row
    assert size(local.init_cache(2, 256)) - plain == 2 * (2 * 8 * 2 * 2 * 8 * 4 + 8 * 4)


@pytest.mark.wide
def test_one_copy_is_the_plain_model_and_layers_may_share() -> None:
    own = lm("phd-2")
    once = LM(model=phd(BASE, 1), params=own.params, vocab_size=16)
    assert tokens(once) == tokens(LM(model=Transformer(BASE), params=own.params, vocab_size=16))
    shared = phd(cla(BASE), 3, 4)
    params = jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, shared.init_params(jax.random.key(3)))
    both = LM(model=shared, params=params, vocab_size=16)
    row = tokens(both, algorithm="prompt-lookup")[2]
    want = np.asarray(shared.forward(params, jnp.asarray([[*PROMPTS[2], *row]])))[0]
    assert want[len(PROMPTS[2]) - 1:-1].argmax(-1).tolist() == row


@pytest.mark.parametrize(("given", "message"), [
    (dict(copies=0), "count: got 0, takes 1 or more"), (dict(window=0), "window: got 0, takes 1 or more"),
    (dict(chunk=4), "chunk: got 4 without a window"), (dict(window=4, chunk=0), "chunk: got 0, takes 1 or more")])
def test_bad_arguments_are_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        phd(BASE, **given)


def test_a_cache_that_reads_some_layers_of_a_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="promptdistill stops a prompt at a layer, which takes a Transformer, got a"):
        tokens(lm("swa-3"), cache=caches.make("promptdistill", budget=16))
