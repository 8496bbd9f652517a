"""Each transform is exact at every draft position, so that speculation samples as plain decoding does.

A constant that is added to all logits changes no distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax.algorithms.plain import Autoregressive
from decodax.algorithms.speculative import Speculative
from decodax.algorithms.speculative.drafts import PromptLookup
from decodax.sampling import build
from decodax.sampling.arithmetic import Arithmetic
from decodax.sampling.base import Context, ScoreTemperature, Transform, WarmTemperature
from decodax.sampling.custom import Custom
from decodax.sampling.length import ExponentialDecayLength
from decodax.sampling.penalties import EncoderRepetition, Repetition
from decodax.sampling.timestamps import Timestamps
from tests.laws.cases import POLICIES, VOCABULARY, decode, prompts, texts
from tests.matrix import often

ONE_BY_ONE = {
    "top-k": dict(top_k=3), "typical": dict(typical_p=0.6), "epsilon": dict(epsilon_cutoff=0.05),
    "eta": dict(eta_cutoff=0.05), "top-h": dict(top_h=0.5), "top-n-sigma": dict(top_n_sigma=1.0),
    "encoder-repetition": dict(encoder_repetition_penalty=1.5), "encoder-n-gram": dict(encoder_no_repeat_ngram_size=2),
    "dry": dict(dry_multiplier=1.0, dry_allowed_length=1, dry_sequence_breakers=[[3]]),
    "logit-bias": dict(logit_bias={2: 1.5, 4: -2.0}), "allowed": dict(allowed_token_ids=[1, 3, 5, 7, 9]),
    "begin-suppress": dict(begin_suppress_tokens=[1, 2, 3]), "forced-bos": dict(forced_bos_token_id=4),
    "forced-eos": dict(forced_eos_token_id=1, max_new_tokens=12), "min-new": dict(min_new_tokens=6),
    "length-decay": dict(exponential_decay_length_penalty=(3, 1.5)),
    "dynamic-temperature": dict(dynatemp_range=0.5), "xtc": dict(xtc_probability=0.7, xtc_threshold=0.05),
    "bregman": dict(bregman_lambda=0.02), "bregman-dual": dict(bregman_lambda=0.02, bregman_alpha=2, bregman_dual=True),
    "end-in-time": dict(nmst_epsilon=0.003, logit_bias={1: -30.0}),
    "watermark": dict(watermarking_config=dict(greenlist_ratio=0.5, bias=3.0)),
}


# what reads the text, its length or the draw's address; of those that read the logits alone, "top-h" stands for all
OFTEN = ["top-h", "encoder-repetition", "encoder-n-gram", "dry", "begin-suppress", "forced-eos", "min-new",
         "length-decay", "xtc", "watermark"]


@pytest.mark.wide(but=("begin-suppress", "encoder-repetition", "length-decay"))
@pytest.mark.parametrize("transform", often(OFTEN, ONE_BY_ONE))
def test_a_transform_is_exact_under_speculation(transform):
    ids = prompts(8, longest=16)
    policy = dict(temperature=1.1, **ONE_BY_ONE[transform])
    plain, drafted = (decode(alg, "toy", ids, policy, eos=[1], size=32)
                      for alg in (Autoregressive(), Speculative(PromptLookup(length=3))))
    assert texts(drafted) == texts(plain)
    assert np.asarray(drafted.stats.accepted).sum() > 0


BY_SIGN = {Repetition, EncoderRepetition, ExponentialDecayLength}
"""These go by the sign or the size of raw logits, by the definition of their papers and of the engines that have
them."""
MORE = {
    "min-p": dict(min_p=0.1, temperature=1.0), "fsd": dict(fsd_alpha=0.45), "suppress": dict(suppress_tokens=[2, 3]),
    "top-p": dict(top_p=0.8, temperature=1.0), "sequence": dict(sequence_bias={(6, 7): 3.0}), "bans": dict(
        bad_words_ids=[[3], [4, 5]]), "mirostat": dict(temperature=1.0, mirostat_tau=2.0, mirostat_eta=0.2),
    "presence": dict(presence_penalty=0.3, frequency_penalty=0.2), "n-gram": dict(no_repeat_ngram_size=2),
    "bound": dict(nmst_epsilon=0.05),
    "timestamps": dict(transforms=(Timestamps.of(1, VOCABULARY - 6, 1),)), "tempered": dict(temperature=0.3)}
CHAINS = POLICIES | {name: given if name in MORE else dict(temperature=1.1) | given
                     for name, given in (ONE_BY_ONE | MORE).items()}


TEXT = Context(jnp.asarray(np.resize([1, 3, 3, 7, 2, 4, 5, 6, 3, 3], 24), jnp.int32), jnp.int32(8), jnp.int32(4),
               jax.random.key(0))


def links(name):
    """The transforms of a chain for one row."""
    chain = build(1, vocab_size=VOCABULARY, eos_token_id=[1], **CHAINS[name])
    return [jax.tree.map(lambda x: x[0], link) for link in chain.transforms] + [WarmTemperature(jnp.float32(0.3))]


@pytest.mark.wide
@pytest.mark.parametrize("name", CHAINS)
def test_a_constant_added_to_all_logits_changes_no_distribution(name):
    """Logits are multiples of 1/64, so that the sums are exact, and so is what a threshold leaves."""
    logits = jnp.asarray(np.round(np.random.default_rng(1).normal(size=VOCABULARY) * 128) / 64, jnp.float32)
    for link in links(name):
        after = jax.jit(lambda x, link=link: jax.nn.softmax(link.logits(link.init(TEXT), TEXT, x)))
        gone = max(float(jnp.abs(after(logits + by) - after(logits)).max()) for by in (-9.0, 25.0))
        if type(link) in BY_SIGN:
            assert gone > 1e-3
        else:
            assert gone < 1e-4


def test_the_law_covers_the_transforms():
    known = lambda cls: {cls}.union(*(known(sub) for sub in cls.__subclasses__()))
    every = {cls for cls in known(Transform) if cls.__module__.startswith("decodax.sampling.")} - {Transform}
    seen = {type(link) for name in CHAINS for link in links(name)}
    # Custom is the user's, and Arithmetic is made by a call for all samples of a prompt; scores of beams are those of
    # texts, so a constant would count as often as a text has tokens
    assert every - seen == {Custom, Arithmetic, ScoreTemperature}
