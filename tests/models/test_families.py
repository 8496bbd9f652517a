"""Every family against transformers: logits under each padding, cached decoding, greedy tokens."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from decodax.core.window import Window, causal
from decodax.io.checkpoint import load_model
from decodax.models import Transformer
from tests.matrix import often
from tests.models.tiny import ALIKE, CASES, saved

T = 22                      # longer than every sliding window of the cases
LENGTHS = np.array([22, 13])
TOKENS = np.random.default_rng(0).integers(3, 97, (2, T)).astype(np.int32)
LIVE = np.arange(T) < LENGTHS[:, None]
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})     # compiles in half the time


@pytest.fixture(scope="module", params=often([name for name in CASES if name not in ALIKE], CASES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Transformer, Any]:
    """A transformers model, and what this library loads from its directory."""
    directory = tmp_path_factory.mktemp(request.param)
    reference = saved(request.param, directory)
    return reference, *load_model(directory, context=CASES[request.param][2])


def transformers_logits(reference: Any, tokens: np.ndarray, live: np.ndarray) -> np.ndarray:
    """Logits of a padded batch, with the positions that its `generate` gives it."""
    positions = np.maximum(np.cumsum(live, 1) - 1, 0)
    with torch.no_grad():
        return reference(input_ids=torch.tensor(tokens, dtype=torch.long), attention_mask=torch.tensor(live).long(),
                         position_ids=torch.tensor(positions), use_cache=False).logits.numpy()


def biased_convolution(config: Any) -> bool:
    """True if padding does not reach a convolution as zeros."""
    keys = {"lfm2": "conv_bias", "lfm3": "conv_bias", "jamba": "mamba_proj_bias", "nemotron_h": "use_bias"}
    key = keys.get(config.model_type)
    return key is not None and getattr(config, key)


@functools.lru_cache
def rollout(model: Transformer) -> Callable[..., Any]:
    """Scores a window and commits its live entries: jitted once a model."""
    @jit
    def step(params: Any, window: Window, cache: Any) -> Any:
        out = model.apply(params, window, cache)
        logits = out.logits()
        # slots that depend on the logits, as a decision's do
        slots = jnp.where(window.live & jnp.isfinite(logits[..., 0]), window.positions, -1)
        return logits, cache.commit(out.entries, slots)

    return step


@functools.lru_cache
def forward(model: Transformer) -> Callable[..., Any]:
    """Scores whole texts without a cache: jitted once a model."""
    return jit(model.forward)


def empty(model: Transformer) -> Any:
    """A cache for two rows of 32 tokens, put on a device as what `commit` returns is: else the next step compiles anew.
    """
    return jax.device_put(model.init_cache(2, 32), jax.devices()[0])


@pytest.mark.full     # by default in windows that are padded, whose longest row is not
def test_logits_equal_transformers_without_padding(case: Any) -> None:
    reference, model, params = case
    full = transformers_logits(reference, TOKENS, np.ones_like(LIVE))
    np.testing.assert_allclose(forward(model)(params, TOKENS), full, atol=1e-4)


@pytest.mark.wide(but=("cohere", "deepseek-v3", "falcon-40b", "gemma2", "gemma4", "gpt-neox", "lfm2", "llama3",
                       "nemotron-h", "phi3", "qwen2-sliding", "qwen3-next"))
def test_ragged_windows_equal_transformers_left_and_right_padded(case: Any) -> None:
    reference, model, params = case
    left_tokens = np.stack([np.roll(row, T - n) for row, n in zip(TOKENS, LENGTHS, strict=True)])
    left_live = LIVE[:, ::-1].copy()
    left = transformers_logits(reference, np.where(left_live, left_tokens, 0), left_live)
    right = transformers_logits(reference, np.where(LIVE, TOKENS, 0), LIVE)
    kind = reference.config.model_type
    if kind in ("deepseek_v4", "llama4_text", "minimax_m3_vl_text", "recurrent_gemma") or biased_convolution(
            reference.config):
        # Groups of DeepSeek V4, Llama 4's query scale, blocks of MiniMax M3 and convolutions after a bias count padding
        # in transformers 5.24.
        left[left_live] = right[LIVE]
    step = rollout(model)

    ours, cache = step(params, causal(TOKENS, jnp.zeros(2), LIVE), empty(model))
    np.testing.assert_allclose(np.asarray(ours)[LIVE], right[LIVE], atol=1e-4)
    np.testing.assert_allclose(np.asarray(ours)[LIVE], left[left_live], atol=1e-4)

    # the same rows with their dead nodes at the left
    positions = np.arange(T, dtype=np.int32) - (T - LENGTHS)[:, None]
    window = causal(left_tokens, jnp.zeros(2), left_live).replace(positions=jnp.asarray(positions, jnp.int32))
    ours, other = step(params, window, empty(model))
    np.testing.assert_allclose(np.asarray(ours)[left_live], left[left_live], atol=1e-4)
    assert other.length.tolist() == cache.length.tolist() == LENGTHS.tolist()


@pytest.mark.wide(but=("gemma2", "phi3-longrope-short", "qwen2-sliding"))
def test_cached_chunks_equal_the_full_forward(case: Any) -> None:
    _, model, params = case
    full = forward(model)(params, TOKENS)
    cache, step, parts = empty(model), rollout(model), []
    for start, end in [(0, 7), (7, 14), (14, 15), (15, 22)]:
        tokens = np.zeros((2, 7), np.int32)         # one program: what is shorter has dead nodes behind it
        tokens[:, :end - start] = TOKENS[:, start:end]
        live = np.tile(np.arange(7) < end - start, (2, 1))
        logits, cache = step(params, causal(tokens, jnp.full(2, start), live), cache)
        parts.append(logits[:, :end - start])
    # Gemma 3n's four streams add up to more rounding than one
    np.testing.assert_allclose(jnp.concatenate(parts, 1), full, atol=5e-5, rtol=5e-6)


@pytest.mark.wide(but=("qwen2-sliding",))
@pytest.mark.parametrize("case", often(["gpt2", "llama", "qwen2-sliding", "gemma3"], CASES), indirect=True)
def test_greedy_tokens_equal_transformers_generate(case: Any) -> None:
    reference, model, params = case
    # 16 tokens: transformers changes the frequencies of length-dependent scalings while a sequence outgrows the length
    # it was trained at, which leaves its cached keys at the old ones; below that length there is one truth
    model = dataclasses.replace(model, context=None)
    n, new = 9, 7
    reference.generation_config.eos_token_id = None
    expected = reference.generate(torch.tensor(TOKENS[:, :n], dtype=torch.long), max_new_tokens=new, do_sample=False,
                                  attention_mask=torch.ones(2, n, dtype=torch.long), pad_token_id=0).numpy()[:, n:]
    step = rollout(model)
    _, cache = step(params, causal(TOKENS[:, :7], jnp.zeros(2)), empty(model))
    tokens = list(TOKENS[:, :n].T)
    for position in range(7, n - 1 + new):
        logits, cache = step(params, causal(tokens[position][:, None], jnp.full(2, position)), cache)
        if position >= n - 1:
            tokens.append(np.asarray(logits[:, 0].argmax(-1)))
    assert np.stack(tokens[n:], 1).tolist() == expected.tolist()
