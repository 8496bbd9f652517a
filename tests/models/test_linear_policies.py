"""Every cache policy of the table beside a layer of linear attention: drafts change no token, or it is refused."""

import dataclasses
import functools
from typing import Any

import jax
import pytest

import decodax as dx
from decodax import caches
from decodax.io.load import LM
from decodax.models import Transformer, linearized
from tests.caches.small import BOTH, DEEP, DEEPER, EXACT, OPTIONS, PROMPTS, SMALL, half, same
from tests.matrix import often

OWN_WAY = {"fastkv", "promptdistill", "critiprefill", "minference", "hyper-attention", "quick-prefill", "freqkv",
           "kv-prediction", "specpc", "act-qkv"}
"""They read a prompt otherwise than layer by layer, which a state has to see."""
ONCE_MORE = {"kvzip", "laq", "specpv", "tim"}
"""They run the model once more for their choice."""
OTHERWISE = {"speckv": "speckv asks a draft model", "rotatekv": "takes a model whose layers can be run one by one",
             "token-butler": "cannot run one by one"}


@functools.cache
def mixed(deep: bool) -> LM:
    """The models that the policies' own laws have, behind a layer of linear attention."""
    own = DEEP if deep else SMALL
    layers = own.model.config.layers
    config = linearized(dataclasses.replace(own.model.config, layers=(layers[0], *layers)), (0,), group=4, kernel=5)
    params = jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, Transformer(config).init_params(jax.random.key(6)))
    first = params["layers"]["0"]
    first["attn"]["factor"], first["attn"]["taps"] = first["attn"]["factor"] + 0.5, first["attn"]["taps"] + 0.3
    after = {str(i + 1): own.params["layers"][str(i)] for i in range(len(layers))}
    return dataclasses.replace(own, model=Transformer(config), params={**params, "layers": {"0": first, **after}})


@functools.cache
def decoded(name: str) -> Any:
    """Three prompts with drafts, and the same without."""
    rows = (0, 1, 2, 0, 1, 2)
    kind = None if name.startswith("dense") else caches.make(name, **OPTIONS[name])
    return dx.generate(mixed(name in DEEPER or name == "dense, deep"), [PROMPTS[i] for i in rows], cache=kind,
                       request_ids=rows, algorithm=BOTH, seed=5, max_new_tokens=20,
                       temperature=[[0.0, 0.9, 0.0][i] for i in rows], logprobs=0)


@pytest.mark.wide
@pytest.mark.parametrize("name", often(["h2o", "adakv", "cskv", "kivi", "paged", "quest", "less", "kvzip", "fastkv"],
                                       OPTIONS))
def test_drafts_give_the_tokens_of_no_drafts_with_the_same_cache(name: str) -> None:
    if refusal := (OTHERWISE.get(name) or (name in OWN_WAY and "in a way of its own")
                   or (name in ONCE_MORE and "runs the model once more")):
        with pytest.raises(ValueError, match=refusal):
            decoded(name)
        return
    out, dense = decoded(name), decoded("dense, deep" if name in DEEPER else "dense")
    drafted = half(out, slice(0, 3))
    assert same(drafted, half(out, slice(3, 6)))
    assert out.stats.accepted[:3].sum() > 0 == out.stats.drafted[3:].sum()
    assert same(drafted, half(dense, slice(0, 3))) == (name in EXACT)
