"""Rows that share a prefix: the tokens of a dense cache, with nothing copied."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.cache.paged import PagedCache
from decodax.cache.shared_prefix import SharedPrefixCache
from decodax.core import drivers
from decodax.engine.batch import Job
from decodax.engine.request import Request
from tests.caches.small import DEEP, LOOKUP, PROMPTS, TREE
from tests.matrix import often

BEGINNING = np.random.default_rng(3).integers(0, 16, 100).tolist()
SHARED = [BEGINNING + prompt for prompt in PROMPTS] + [BEGINNING]
SAMPLED: dict[str, Any] = dict(max_new_tokens=16, temperature=0.9, seed=5)


@pytest.mark.wide
@pytest.mark.parametrize("algorithm", often([LOOKUP], [None, LOOKUP, TREE]))
@pytest.mark.parametrize(("prompts", "samples"), often([(SHARED, 2)], [(PROMPTS, 3), (SHARED, 2)]))
def test_rows_that_share_give_the_tokens_of_a_dense_cache(prompts: Any, samples: int, algorithm: Any) -> None:
    dense, shared = (dx.generate(DEEP, prompts, cache=cache, algorithm=algorithm, num_samples=samples, **SAMPLED)
                     for cache in (None, "hydragen"))
    assert shared.tokens.tolist() == dense.tokens.tolist()
    assert shared.stats.accepted.tolist() == dense.stats.accepted.tolist()


def begun(prompts: Any, **more: Any) -> Job:
    return Job.begin(Request.read(DEEP, prompts, cache="hydragen", **{**SAMPLED, **more}))


@pytest.mark.full
def test_a_common_beginning_of_prompts_is_kept_once() -> None:
    cache = begun(SHARED).state.cache
    assert isinstance(cache, SharedPrefixCache) and cache.fixed.tolist() == [99]    # the last token opens a window
    assert [x.shape for x in cache.prefixes] == [(1, 2, 256, 8)] * 2
    assert {x.shape[2] for x in cache.kv} == {64 + 16}      # the longest rest and the new tokens, as powers of two
    few = begun([BEGINNING[:40] + prompt for prompt in PROMPTS]).state.cache
    assert isinstance(few, SharedPrefixCache) and len(few.fixed) == few.length.shape[0]      # not worth it


@pytest.mark.wide
def test_forks_copy_no_prefix() -> None:
    """32 samples of a prompt read the arrays that the prompt was read into."""
    job = begun(PROMPTS[:1], num_samples=32)
    assert isinstance(job.state.cache, SharedPrefixCache) and job.state.cache.length.shape == (32,)
    prompt = begun(PROMPTS[:1])
    count = jnp.zeros(32, jnp.int32)
    where = [x.unsafe_buffer_pointer() for x in prompt.state.cache.prefixes]
    forked = drivers.fan_out(prompt.state, job.batch.policy, count, count == 0, np.zeros((32, 2), np.uint32),
                             count.astype(jnp.uint32), count.astype(jnp.uint32))
    assert [x.unsafe_buffer_pointer() for x in forked.cache.prefixes] == where
    assert forked.cache.length.tolist() == [40] * 32


@pytest.mark.wide
def test_forks_copy_only_the_page_that_is_being_filled() -> None:
    """32 samples of a prompt of 41 tokens, 40 of them in ten pages of four and none in an eleventh; or of one more."""
    for prompt, used in ((PROMPTS[0], 10), ([*PROMPTS[0], 1], 10 + 32)):
        request = Request.read(DEEP, [prompt], cache="paged:pages=64,page=4", num_samples=32, **SAMPLED)
        cache = Job.begin(request).state.cache
        assert isinstance(cache, PagedCache)
        assert cache.length.tolist() == [len(prompt) - 1] * 32 and int(cache.free()[1]) == 64 - used
    few = dx.generate(DEEP, PROMPTS, cache="paged:pages=20,page=4", max_new_tokens=16)
    assert {status.name for status in few.status} == {"CAPACITY"}
    assert few.lengths.sum() + sum(map(len, PROMPTS)) > 20 * 4 - 3 * 4


@pytest.mark.full
def test_a_prefix_may_have_more_rows_than_others() -> None:
    """As after beams have died: then it takes more passes than one."""
    cache = begun(PROMPTS).state.cache
    rows = jnp.array([1, 0, 1, 1, 1, 2, 1, 1])
    q, k, v = (jax.random.normal(jax.random.key(i), (8, 2, heads, 4)) for i, heads in enumerate((4, 2, 2)))
    window = dx.core.window.causal(jnp.zeros((8, 2), jnp.int32), cache.length[rows])
    out, _ = cache.select(rows).attend(0, q, k, v, window, scale=0.5)
    alone = [cache.select(rows[i:i + 1].repeat(8)).attend(0, q, k, v, window, scale=0.5)[0][i] for i in range(8)]
    np.testing.assert_allclose(out, np.stack(alone), atol=1e-5)
