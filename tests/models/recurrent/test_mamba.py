"""Mamba, the first version, against transformers."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.core.window import causal
from decodax.io.files import CheckpointError
from decodax.models import Mamba, MambaConfig
from tests.models.networks.mamba2 import VOCABULARY, with_random_weights
from tests.models.small import NEW, PROMPTS, tokens_of

CASES: dict[str, dict[str, Any]] = {
    "plain": {}, "untied-biases": dict(use_bias=True, use_conv_bias=False, tie_word_embeddings=False, conv_kernel=3,
                                       time_step_rank=5)}


@functools.cache
def written(case: str) -> tuple[Any, Path]:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.MambaForCausalLM(transformers.MambaConfig(**{**dict(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=6, pad_token_id=0, bos_token_id=1,
        eos_token_id=2), **CASES[case]})).eval()
    return with_random_weights(model)


@functools.cache
def loaded(case: str = "plain") -> Any:
    return dx.load(written(case)[1])


@pytest.mark.wide(but=("untied-biases",))
@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens_equal_transformers(case: str) -> None:
    import torch

    reference, lm = written(case)[0], loaded(case)
    assert isinstance(lm.model, Mamba)
    text = np.random.default_rng(0).integers(3, VOCABULARY, (2, 21))
    with torch.no_grad():
        want = reference(torch.tensor(text), use_cache=False).logits.numpy()
    np.testing.assert_allclose(jax.jit(lm.model.forward)(lm.params, text), want, atol=1e-4)
    window = causal(jnp.asarray(text), jnp.zeros(2, jnp.int32))       # as drafts: a state each
    apply = jax.jit(lambda params, window, cache: lm.model.apply(params, window, cache).logits())
    np.testing.assert_allclose(apply(lm.params, window, lm.model.init_cache(2, 32)), want, atol=1e-4)
    reference.generation_config.eos_token_id = None
    new = [reference.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, pad_token_id=0)[0]
           for prompt in PROMPTS]
    assert tokens_of(lm) == [row.tolist()[len(prompt):] for row, prompt in zip(new, PROMPTS, strict=True)]


def test_fresh_weights_and_refusals(tmp_path: Path) -> None:
    net = Mamba(MambaConfig(vocab=16, width=8, layers=1, inner=16, state=4))
    assert jnp.isfinite(net.forward(net.init_params(jax.random.key(0)), jnp.array([[1, 2, 3]]))).all()
    with pytest.raises(ValueError, match="inner: got 0, takes 1 or more"):
        MambaConfig(vocab=16, width=8, layers=1, inner=0)
    with pytest.raises(ValueError, match=r"cache: got .*, but Mamba has a cache of its own"):
        tokens_of(loaded(), cache="knorm")
    text = (written("plain")[1] / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"silu"', '"gelu"'))
    with pytest.raises(CheckpointError, match="hidden_act: got 'gelu', supported is 'silu'"):
        dx.load(tmp_path)
