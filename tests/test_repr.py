"""What a notebook shows of an object that holds arrays is a line: how large it is and of what, not its numbers."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.common.struct import short
from decodax.engine.batch import Job
from decodax.engine.request import Request
from decodax.front.serve import Served
from decodax.jobs.batch import in_words
from decodax.models import adapters
from decodax.sampling import Temperature

MOST = 500


@pytest.fixture(scope="module")
def job(lm: dx.LM) -> Job:
    return Job.begin(Request.read(lm, [[40, 41]] * 20, max_new_tokens=40, temperature=[0.5] * 20, num_samples=2))


def objects(lm: dx.LM, job: Job) -> dict[str, Any]:
    result, stream = job.result(), dx.stream(lm, [40], max_new_tokens=4)
    big = np.zeros((50, 50), np.float32)
    return {
        "lm": lm, "result": result, "statistics": result.stats, "request": job.request, "job": job, "state": job.state,
        "params": job.batch.params, "policy": job.batch.policy, "cache": job.state.cache, "stream": stream,
        "tokenizer": lm.tokenizer, "logprobs": dx.LogProbs(big, big, big, big), "served": Served(0, None, result),
        "scores": dx.score(lm, [[1, 2, 3]] * 30), "prefix": dx.caches.Prefix(tuple(range(900)), (big,) * 40),
        "adapter": lm.with_adapters({"a": adapters.init(lm.params, jax.random.key(0), rank=2)}),
        "draft": dx.drafts.DraftModel(lm), "speculative": dx.Speculative(dx.drafts.DraftModel(lm)),
        "temperature": Temperature(jnp.zeros(2000)), "model": lm.model,}


def test_every_object_is_a_line(lm: dx.LM, job: Job) -> None:
    for name, value in objects(lm, job).items():
        said = repr(value)
        assert len(said) <= MOST and "\n" not in said, f"{name}: {len(said)}"
        assert type(value).__name__ in said, name


def test_a_model_says_what_it_is(lm: dx.LM) -> None:
    count = sum(x.size for x in jax.tree.leaves(lm.params))
    assert repr(lm) == (f"<LM 'tiny': Transformer of {count:,} parameters, {4 * count / 1e6:,.1f} MB of float32, "
                        f"vocabulary {lm.vocab_size}, context 512, on {jax.devices()[0]}>")
    packed = repr(dx.load(lm.directory, weights="int4"))
    assert f"of {count:,} parameters" in packed and "uint8" in packed
    bare = repr(dataclasses.replace(lm, tokenizer=None))
    assert "no tokenizer" in bare


def test_arrays_are_shown_by_dtype_and_shape(job: Job) -> None:
    assert repr(job.result()).startswith("Result(tokens=int32[40, 0], lengths=int32[40], status=[")
    assert short(Temperature(jnp.zeros(3))) == "Temperature(temperature=float32[3])"


def test_a_jobs_identity_does_not_go_by_what_is_shown() -> None:
    """Two options that look alike are two options."""
    one, other = Temperature(jnp.zeros(300)), Temperature(jnp.zeros(300).at[150].set(1))
    assert repr(one) == repr(other) and in_words(one) != in_words(other)
    assert in_words(one) == in_words(Temperature(jnp.zeros(300)))
    for value in (dx.drafts.PromptLookup(5), dx.caches.make("knorm", skip_layers=(0,)), dx.verify.SeedExact()):
        assert in_words(value) == repr(value)
