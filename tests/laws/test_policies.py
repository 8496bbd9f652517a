"""Law 2, transform by transform: each is exact at every draft position, so speculation samples as plain decoding."""

import numpy as np
import pytest

from decodax.autoregressive import Autoregressive
from decodax.speculative import Speculative
from decodax.speculative.drafts import PromptLookup
from tests.laws.cases import decode, prompts, texts
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
