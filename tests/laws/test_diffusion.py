"""Law 8 for LLaDA's rule, and the rule itself against a plain NumPy transcription of the published loop."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from decodax.cache import bidirectional
from decodax.core import drivers
from decodax.diffusion import Adapter, MaskedDiffusion
from tests.laws.cases import MASK, VOCABULARY, decode, model, prompts, start, texts


def published(which, prompt, new, block, steps, shift):
    """LLaDA's sampler at temperature 0: semi-autoregressive blocks, low-confidence remasking."""
    network, weights = model(which)
    count = -(-new // block)
    x = np.array(prompt + [MASK] * (count * block))
    for b in range(count):
        lo, hi = len(prompt) + b * block, len(prompt) + (b + 1) * block
        quota = [block // steps + (i < block % steps) for i in range(steps)]
        for i in range(steps):
            out = network.apply(weights, bidirectional(jnp.asarray(x[None]), jnp.zeros(1, jnp.int32)),
                                network.init_cache(1, 0))
            logits = np.asarray(out.logits()[0], np.float64)
            if shift:
                logits = np.concatenate([logits[:1], logits[:-1]])
            p = np.exp(logits - logits.max(-1, keepdims=True))
            p /= p.sum(-1, keepdims=True)
            allowed = np.where(np.arange(VOCABULARY) == MASK, -np.inf, logits)
            guess = allowed.argmax(-1)
            confidence = np.where(x == MASK, p[np.arange(len(x)), guess], -np.inf)
            confidence[:lo] = confidence[hi:] = -np.inf
            chosen = np.argsort(-confidence, kind="stable")[:quota[i]]
            x[chosen] = guess[chosen]
    return x[len(prompt):][:new].tolist()


@pytest.mark.parametrize(("block", "steps", "shift"), [(8, 8, False), (8, 3, False), (4, 2, True), (16, 5, False)])
def test_the_sampler_is_lladas(block, steps, shift):
    ids = prompts(3, longest=9)
    alg = MaskedDiffusion(Adapter(MASK, shift), block=block, steps=steps)
    s = decode(alg, "llama", ids, {}, new=16)
    assert texts(s) == [published("llama", p, 16, block, steps, shift) for p in ids]
    assert np.asarray(s.stats.rounds).tolist() == [16 // block * steps] * 3


@dataclasses.dataclass(frozen=True)
class Stubborn:
    """A model that wants nothing but MASK."""

    base: object

    def init_cache(self, batch, capacity):
        return self.base.init_cache(batch, capacity)

    def apply(self, params, window, cache):
        out = self.base.apply(params, window, cache)
        return dataclasses.replace(out, head=lambda h: out.head(h).at[..., MASK].add(1e4))


def test_every_round_makes_progress_even_if_the_model_predicts_mask():
    alg = MaskedDiffusion(Adapter(MASK), block=4)
    _, params, chain, s = start(alg, "llama", prompts(2), {}, new=8)
    s = drivers.advance(alg, Stubborn(model("llama")[0]), params, chain, s, jnp.int32(100))
    assert np.asarray(s.stats.rounds).tolist() == [8, 8]
    assert all(len(row) == 8 and MASK not in row for row in texts(s))


def test_a_prompt_never_changes():
    ids = prompts(4)
    s = decode(MaskedDiffusion(Adapter(MASK), block=4), "llama", ids, dict(temperature=1.0))
    assert [np.asarray(s.tokens)[i, :len(p)].tolist() for i, p in enumerate(ids)] == ids


def test_log_probabilities_are_those_of_the_round_that_committed():
    alg = MaskedDiffusion(Adapter(MASK), block=8, steps=4)
    s = decode(alg, "llama", prompts(2), dict(temperature=1.0), new=8, top_logprobs=2)
    raw, done = np.asarray(s.record.raw), np.asarray(s.length)
    for i, end in enumerate(done):
        assert (raw[i, end - 8:end] < 0).all() and (raw[i, end - 8:end] > -20).all()


def test_a_policy_that_reads_left_to_right_is_refused():
    with pytest.raises(ValueError, match=r"NoRepeatNgram.*left to right"):
        decode(MaskedDiffusion(Adapter(MASK), block=4), "llama", prompts(2), dict(no_repeat_ngram_size=2))


def test_unusable_numbers_are_named():
    with pytest.raises(ValueError, match="steps: got 9, takes 1 to the block of 8"):
        MaskedDiffusion(Adapter(MASK), block=8, steps=9)
