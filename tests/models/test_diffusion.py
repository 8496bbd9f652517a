"""Masked-diffusion checkpoints in their released layouts, against transformers under masks that are built here."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import decodax as dx
from decodax.algorithms.diffusion import Adapter, MaskedDiffusion
from decodax.core.window import Window, bidirectional
from decodax.io.checkpoint import CheckpointError
from decodax.io.saving import save_model
from decodax.models.diffusion import Diffusion, read_diffusion
from decodax.models.families import read_config
from tests.conformance.checkpoints import write
from tests.matrix import often
from tests.models.tiny_diffusion import CASES, MASK, saved

T = 22
LENGTHS = np.array([22, 15])
TEXT = np.random.default_rng(0).integers(4, 97, (2, T)).astype(np.int32)


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dx.LM]:
    """A transformers model, and what this library loads from the directory that holds its weights."""
    directory = tmp_path_factory.mktemp(request.param)
    return saved(request.param, directory), dx.load(directory)


@functools.partial(jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})
def step(model: Any, params: Any, window: Window, cache: Any, below: Any) -> Any:
    """Logits of a window, and the cache with its live entries at positions under `below` (`i32[B]`)."""
    out = model.apply(params, window, cache)
    logits = out.logits()
    kept = window.live & (window.positions < below[:, None]) & jnp.isfinite(logits[..., 0])
    return logits, cache.commit(out.entries, jnp.where(kept, window.positions, -1))


def prefixes(d: Diffusion, lengths: np.ndarray) -> np.ndarray:
    """Where the canvas of a text starts that is known up to its last few tokens."""
    if d.attention == "full":
        return np.zeros_like(lengths)
    return lengths - d.block if d.attention == "causal-prefix" else (lengths - 1) // d.block * d.block


def masked(d: Diffusion, lengths: np.ndarray) -> np.ndarray:
    """The texts with masks in their canvas: every other token, or all but the first after a causal prefix."""
    at, start = np.arange(T), prefixes(d, lengths)[:, None]
    hidden = at > start if d.attention == "causal-prefix" else (at >= start) & (at % 2 == 1)
    return np.where(hidden & (at < lengths[:, None]), d.mask, TEXT)


def window(d: Diffusion, tokens: np.ndarray, start: np.ndarray, prefix: np.ndarray, live: np.ndarray) -> Window:
    tokens, start, live = (jnp.asarray(x, dtype) for x, dtype in ((tokens, "int32"), (start, "int32"), (live, bool)))
    made = bidirectional(tokens, start, live)
    at, begin = made.positions, jnp.asarray(prefix)[:, None, None]
    query, key, block = at[:, :, None], at[:, None, :], d.block or 1
    mask = {"full": made.mask, "block-causal": key // block <= query // block,
            "causal-prefix": (key <= query) | ((query >= begin) & (key >= begin))}[d.attention]
    return made.replace(mask=jnp.broadcast_to(mask, (len(tokens), T, T)))       # one shape, one program


def reference(model: Any, d: Diffusion, rows: np.ndarray, lengths: np.ndarray, prefix: np.ndarray) -> np.ndarray:
    """Logits of the rows, padded at their left as the published samplers do."""
    pad = T - lengths
    left = np.stack([np.roll(row, n) for row, n in zip(rows, pad, strict=True)])
    at = np.arange(T) - pad[:, None]
    query, key, start = at[:, :, None], at[:, None, :], prefix[:, None, None]
    seen = {"full": key >= 0, "block-causal": key // (d.block or 1) <= query // (d.block or 1),
            "causal-prefix": (key <= query) | ((query >= start) & (key >= start))}[d.attention]
    seen = torch.tensor((seen & (key >= 0)) | np.eye(T, dtype=bool))[:, None]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(left, dtype=torch.long), use_cache=False,
                       position_ids=torch.tensor(np.maximum(at, 0)),
                       attention_mask=torch.where(seen, 0.0, torch.finfo(torch.float32).min)).logits
    return np.stack([np.roll(row, -n, 0) for row, n in zip(logits.numpy(), pad, strict=True)])


@pytest.mark.wide(but=(
    "dream-whole", "sdlm-whole", "dream-ragged", "sdar-ragged", "fast-dllm-ragged", "sdlm-ragged", "llada-ragged"))
@pytest.mark.parametrize("lengths", [np.array([T, T]), LENGTHS], ids=["whole", "ragged"])
def test_logits_equal_transformers_under_the_models_attention(case: Any, lengths: np.ndarray) -> None:
    model, lm = case
    d = lm.diffusion
    rows, live, prefix = masked(d, lengths), np.arange(T) < lengths[:, None], prefixes(d, lengths)
    expected = reference(model, d, rows, lengths, prefix)
    cache, zero = lm.model.init_cache(2, 32), np.zeros(2, np.int32)
    logits, cache = step(lm.model, lm.params, window(d, rows, zero, prefix, live), cache, jnp.asarray(prefix))
    np.testing.assert_allclose(np.asarray(logits)[live], expected[live], atol=1e-4)

    # the canvas against the cache of what stands before it; with full attention that is nothing
    late = np.stack([np.roll(row, -n) for row, n in zip(rows, prefix, strict=True)])
    canvas = np.arange(T) < (lengths - prefix)[:, None]
    assert cache.length.tolist() == prefix.tolist()
    logits, _ = step(lm.model, lm.params, window(d, late, prefix, prefix, canvas), cache, jnp.asarray(zero))
    for b in range(2):
        np.testing.assert_allclose(logits[b, :lengths[b] - prefix[b]], expected[b, prefix[b]:lengths[b]], atol=1e-4)


@pytest.mark.wide
@pytest.mark.parametrize("name", ["llada-moe", "llada2"])
def test_logits_of_mixtures_are_those_of_the_released_code(name: str, tmp_path: Path) -> None:
    want = json.loads((Path(__file__).parent / "llada_mixtures.json").read_text())[name]
    lm, ids = dx.load(write(name, tmp_path)), np.array([want["ids"]], np.int32)
    live, zero = np.ones((1, ids.shape[1]), bool), np.zeros(1, np.int32)
    cache = lm.model.init_cache(1, 0)
    found = step(lm.model, lm.params, window(lm.diffusion, ids, zero, zero, live), cache, jnp.asarray(zero))[0][0]
    np.testing.assert_allclose(found[-1], want["last"], atol=1e-4)
    np.testing.assert_allclose(np.abs(found).sum(-1), want["sums"], atol=2e-3)
    assert found.argmax(-1).tolist() == want["best"]


@pytest.mark.wide
@pytest.mark.parametrize("name", often(["llada2"], ["llada-moe", "llada2"]))
def test_mixtures_fill_gaps_and_are_watched(name: str, tmp_path: Path) -> None:
    saved(name, tmp_path)
    lm = dx.load(tmp_path)
    gap = dx.infill(lm, [[5, 6, 7], 6, [8, 9]], eos_token_id=None)
    assert MASK not in gap.row(0).tolist() and gap.lengths[0] == 8
    plain = dx.generate(lm, TEXT[0, :5].tolist(), max_new_tokens=16, eos_token_id=None)
    assert lm.diffusion.block in (None, 8)
    last = list(dx.watch(lm, TEXT[0, :5].tolist(), max_new_tokens=16, eos_token_id=None))[-1]
    assert last.tokens.tolist()[:16] == plain.row(0).tolist()


@pytest.mark.wide(but=("dream",))
@pytest.mark.parametrize("name", ["llada", "dream", "llada-moe"])
def test_sampling_equals_the_published_loop_on_transformers(name: str, tmp_path: Path) -> None:
    """LLaDA's rule in one block, one token a step; Dream's logits are moved by one place."""
    model, lm = saved(name, tmp_path), dx.load(tmp_path)
    prompt, new = TEXT[0, :5].tolist(), 32
    x = torch.tensor([prompt + [MASK] * new])
    for _ in range(new):
        with torch.no_grad():
            logits = model(input_ids=x, attention_mask=torch.zeros(1, 1, x.shape[1], x.shape[1])).logits[0]
        if name == "dream":
            logits = torch.cat([logits[:1], logits[:-1]])
        logits[:, MASK] = -torch.inf
        confidence, best = logits.softmax(-1).max(-1)
        confidence[x[0] != MASK] = -1
        x[0, confidence.argmax()] = best[confidence.argmax()]
    adapter = Adapter(mask=lm.diffusion.mask, shift=lm.diffusion.shift)
    out = dx.generate(lm, prompt, max_new_tokens=new, algorithm=MaskedDiffusion(adapter), eos_token_id=None)
    assert out.tokens[0].tolist() == x[0, 5:].tolist()


@pytest.mark.parametrize("name", CASES)
def test_saved_models_hold_the_tensors_that_were_loaded(name: str, tmp_path: Path) -> None:
    saved(name, tmp_path / "in")
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    lm = dx.load(tmp_path / "in")
    save_model(tmp_path / "out", lm.model, lm.params, config)
    ours, theirs = (load_file(tmp_path / x / "model.safetensors") for x in ("out", "in"))
    assert ours.keys() == theirs.keys()
    for tensor, value in theirs.items():
        np.testing.assert_array_equal(ours[tensor], value)
    assert dx.load(tmp_path / "out").diffusion == lm.diffusion


@pytest.mark.parametrize(("changes", "message"), [
    ({"model.transformer.blocks.1.ff_proj.weight": None}, r"lacks tensor model\.transformer\.blocks\.1\.ff_proj\."),
    ({"model.transformer.ff_out.weight": np.ones((97, 32), np.float32)},
     r"transformer\.ff_out\.weight has shape \(97, 32\), the configuration requires \(112, 32\)"),
    ({"model.transformer.wpe.weight": np.ones((64, 32), np.float32)}, r"holds tensor model\.transformer\.wpe\.weight"),
])
def test_a_wrong_tensor_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    saved("llada", tmp_path)
    tensors = {**load_file(tmp_path / "model.safetensors"), **changes}
    save_file({k: v for k, v in tensors.items() if v is not None}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        dx.load(tmp_path)


@pytest.mark.parametrize(("name", "changes", "message"), [
    ("llada", {"alibi": True, "rope": False}, "alibi: got True, supported is False"),
    ("llada", {"rope": False}, "rope: got False, supported is True"),
    ("llada", {"layer_norm_type": "default"}, "layer_norm_type: got 'default', supported is 'rms'"),
    ("llada", {"block_type": None}, "block_type: got 'sequential', supported is 'llama'"),
    ("llada", {"include_bias": True}, "include_bias: got True"),
    ("llada", {"activation_type": "swiglu"}, "activation_type: got 'swiglu'"),
    ("llada", {"mask_token_id": 126336}, "mask token: got 126336, takes an id below the vocabulary size, 97"),
    ("dream", {"use_sliding_window": True, "sliding_window": 5}, "use_sliding_window: got True"),
    ("sdar", {"use_sliding_window": True, "sliding_window": 5}, "use_sliding_window: got True"),
    ("sdar", {"block_size": 0}, "block: got 0, takes 1 or more with block-causal attention"),
    ("sdlm", {"use_sliding_window": True, "sliding_window": 5}, "use_sliding_window: got True"),
    ("llada-moe", {"moe_layer_freq": [1]}, r"moe_layer_freq: got \[1\], takes a list with an entry for each"),
    ("llada-moe", {"moe_router_enable_expert_bias": True}, "moe_router_enable_expert_bias: got True, supported is F"),
    ("llada-moe", {"clip_qkv": 7.0}, "clip_qkv: got 7.0, which a llada model does not have here"),
    ("llada2", {"norm_head": True}, "norm_head: got True, supported is False"),
    ("llada2", {"topk_group": 8}, "n_group, num_expert_group or topk_group: groups: got 4 with"),
    ("dream", {"diffusion": {"attention": "sparse"}}, "attention: got 'sparse', takes full, block-causal"),
    ("dream", {"diffusion": {"window": 4}}, r"diffusion: got {'window': 4} .*window"),
])
def test_wrong_configurations_are_refused_by_name(
        name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    saved(name, tmp_path, **changes)
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{message}"):
        dx.load(tmp_path)


@pytest.mark.parametrize(("config", "expected"), [
    ({"model_type": "llada", "vocab_size": 126464}, Diffusion(126336)),
    ({"model_type": "llada", "vocab_size": 126464, "mask_token_id": 5}, Diffusion(5)),
    ({"model_type": "llada", "vocab_size": 157184, "num_experts": 64}, Diffusion(156895)),
    ({"model_type": "llada2_moe", "vocab_size": 157184}, Diffusion(156895, attention="block-causal", block=32)),
    ({"model_type": "Dream", "vocab_size": 152064}, Diffusion(151666, shift=True)),
    ({"model_type": "sdar", "vocab_size": 151936}, Diffusion(151669, attention="block-causal", block=4)),
    ({"model_type": "Fast_dLLM_Qwen", "vocab_size": 151936, "bd_size": 16},
     Diffusion(151665, shift=True, attention="block-causal", block=16)),
    ({"model_type": "qwen2", "vocab_size": 151936, "text_mask_token_id": 151665, "block_size": 8},
     Diffusion(151665, shift=True, attention="causal-prefix", block=8)),
    ({"model_type": "qwen2", "vocab_size": 151936, "text_mask_token_id": 151665, "causal_attn": True},
     Diffusion(151665, shift=True, attention="causal", block=4)),
    ({"model_type": "qwen2", "vocab_size": 151936}, None),
])
def test_missing_entries_of_config_json_have_the_published_defaults(
        config: dict[str, Any], expected: Diffusion | None) -> None:
    assert read_diffusion(config) == expected


def test_lladas_scales_are_factors_of_the_decoder() -> None:
    plain = CASES["llada"][0]
    scaled = read_config({**plain, "input_emb_norm": True, "scale_logits": True, "n_kv_heads": None,
                          "mlp_hidden_size": None})
    assert scaled == dataclasses.replace(read_config(plain), embed_scale=32 ** 0.5, logit_scale=32 ** -0.5, kv_heads=4,
                                         mlp=128)


def test_an_autoregressive_model_fills_no_masks() -> None:
    assert dx.load("pycode").diffusion is None
