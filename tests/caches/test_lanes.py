"""Entries in whole tiles, as TPUs store them: everything that is decoded is the same."""

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

import decodax as dx
from decodax.cache import KVLayer, dense, lanes
from decodax.cache.paged import PagedConfig
from decodax.caches import read_prefix
from decodax.models import Transformer
from decodax.models.families import read_config
from tests.caches.small import LOOKUP
from tests.models.latent.test_latent import CONFIG
from tests.small_models import random_lm

PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8, 5], [9, 10, 11], [1, 2]]
MIMO = {"model_type": "mimo_v2_flash", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16, "v_head_dim": 12,
        "sliding_window": 5, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "max_position_embeddings": 64,
        "partial_rotary_factor": 0.5}
CONFIGS = {"latents": CONFIG, "values narrower than keys": MIMO}


def on_tpu(make: Any, *args: Any) -> Any:
    """Returns what a function makes if the platform is a TPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lanes, "platform", lambda: "tpu")
        return make(*args)


padded_dense = functools.partial(on_tpu, dense)


@dataclasses.dataclass(frozen=True)
class PaddedPages(PagedConfig):
    def empty(self, *args: Any) -> Any:
        return on_tpu(super().empty, *args)


@functools.cache
def lm(name: str) -> Any:
    return random_lm(Transformer(read_config(CONFIGS[name])), 0, 6)


def close(one: Any, other: Any) -> None:
    assert one.tokens.tolist() == other.tokens.tolist()
    np.testing.assert_allclose(one.logprobs.raw, other.logprobs.raw, atol=2e-4)


@pytest.mark.parametrize("kind", [padded_dense, PaddedPages(pages=32, page=4)], ids=["dense", "paged"])
@pytest.mark.parametrize("name", CONFIGS)
def test_entries_have_zeros_behind_them_on_tpus_alone(name: str, kind: Any) -> None:
    model = lm(name).model
    cache, plain = (model.with_cache(k).init_cache(2, 64) for k in (kind, dense))
    for layer, (kv, own) in enumerate(zip(cache.kv, plain.kv, strict=True)):
        assert kv.shape[3] == 128 and 0 < cache.padded(layer) == 128 - own.shape[3]
        assert cache.keys(layer).shape[3] == plain.keys(layer).shape[3]
        assert cache.values(layer).shape[3] == plain.values(layer).shape[3]
    assert not any(plain.padding)


def test_entries_whose_end_is_read_and_those_of_whole_tiles_have_none() -> None:
    shapes = [KVLayer(8, 64), KVLayer(1, 576, 0), KVLayer(4, 192, 128), KVLayer(1, 704, 0, bias=True, chooses=True)]
    assert on_tpu(lanes.paddings, shapes) == (0, 64, 64, 0) and lanes.paddings(shapes) == (0, 0, 0, 0)


@pytest.mark.wide(but=("latents-plain-dense",))
@pytest.mark.parametrize("kind", [padded_dense, PaddedPages(pages=64, page=4)], ids=["dense", "paged"])
@pytest.mark.parametrize("algorithm", [None, LOOKUP, "beam-search:width=3"], ids=["plain", "drafts", "beams"])
@pytest.mark.parametrize("name", CONFIGS)
def test_texts_are_the_same(name: str, algorithm: Any, kind: Any) -> None:
    options: dict[str, Any] = dict(max_new_tokens=10, eos_token_id=[], seed=3, logprobs=0, algorithm=algorithm)
    close(dx.generate(lm(name), PROMPTS, cache=kind, **options), dx.generate(lm(name), PROMPTS, **options))


@pytest.mark.wide
def test_a_prefix_has_the_entries_alone_and_a_cache_takes_them() -> None:
    plain = lm("values narrower than keys")
    padded = dataclasses.replace(plain, model=plain.model.with_cache(padded_dense))
    one, other = (read_prefix(own, PROMPTS[0]) for own in (padded, plain))
    assert [kv.shape for kv in one.kv] == [kv.shape for kv in other.kv]
    options: dict[str, Any] = dict(max_new_tokens=8, eos_token_id=[], logprobs=0, context=one)
    close(*(dx.generate(own, PROMPTS, **options) for own in (padded, plain)))
