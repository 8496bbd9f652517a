"""DiffusionGemma: its logits, and texts of the sampler, against transformers with the same random tokens."""

import itertools
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from transformers.models.diffusion_gemma import generation_diffusion_gemma as theirs

import decodax as dx
from decodax.core import keys
from decodax.core.keys import Purpose
from decodax.core.types import CanvasNodes
from decodax.core.window import bidirectional, causal
from decodax.models.diffusion import Diffusion, read_diffusion
from decodax.models.families import read_config

VOCABULARY, CANVAS = 97, 8
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "global_head_dim": 16, "num_global_key_value_heads": 1,
    "max_position_embeddings": 64, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "final_logit_softcapping": 8.0}
VISION = {"model_type": "gemma4_vision", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
          "num_attention_heads": 2, "head_dim": 8, "num_key_value_heads": 2, "patch_size": 4}
PROMPTS = [[5, 9, 3], [11, 4, 60, 8, 71, 90, 33, 12, 6], [44, 45, 46, 47, 48, 49]]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as transformers writes it, in which every kind of weight has an effect."""
    torch.manual_seed(0)
    entries = transformers.DiffusionGemmaConfig(text_config=TEXT, vision_config=VISION, canvas_length=CANVAS)
    model = transformers.DiffusionGemmaForBlockDiffusion(entries)
    for name, x in itertools.chain(model.named_parameters(), model.named_buffers()):
        if "layer_scalar" in name:
            x.data.uniform_(0.5, 1.5)
        elif isinstance(x, torch.nn.Parameter):
            x.data.normal_(*(0, 0.4 if "embed_tokens" in name else 0.15) if x.ndim > 1 else (1, 0.2))
    path = tmp_path_factory.mktemp("diffusion-gemma")
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def lm(home: Path) -> Any:
    with pytest.warns(UserWarning, match="skips 16 tensors of images or sound"):
        return dx.load(home)


@pytest.fixture(scope="module")
def reference(home: Path) -> Any:
    return transformers.DiffusionGemmaForBlockDiffusion.from_pretrained(home, experts_implementation="eager").eval()


def noise(row: int, start: int, step: int | None) -> np.ndarray:
    """Returns the random tokens of a row's canvas, `i64[CANVAS]`, first or after a step."""
    key = keys.row_keys(jnp.zeros(1, jnp.uint32), jnp.full(1, row, jnp.uint32), jnp.zeros(1, jnp.uint32))
    place = jnp.arange(start, start + CANVAS, dtype=jnp.int32)[None]
    u = keys.uniforms(key, place, Purpose.NOISE, None if step is None else jnp.full(1, step, jnp.int32))
    return np.minimum((np.asarray(u)[0, :, 0] * VOCABULARY).astype(np.int64), VOCABULARY - 1)


def generated(reference: Any, prompt: list[int], row: int, monkeypatch: Any, **options: Any) -> tuple[list[int], int]:
    """Returns a text of transformers' own loop, with the likeliest candidates and decodax's random tokens, and the
    number of its denoising steps."""
    steps, canvases = [0], [0]

    def canvas(self: Any, batch_size: int, device: Any) -> torch.Tensor:
        start = len(prompt) + CANVAS * (canvases[0] - 1)
        return torch.from_numpy(noise(row, start, steps[0] or None))[None]

    def begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        start = len(prompt) + CANVAS * canvases[0]
        canvases[0] += 1
        found = prepare(self, *args, **kwargs)
        return (torch.from_numpy(noise(row, start, None))[None], *found[1:])

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        steps[0] += 1
        return denoise(self, *args, **kwargs)

    kind = theirs.DiffusionGemmaGenerationMixin
    prepare, denoise = kind._prepare_denoiser_inputs, kind._denoising_step
    with monkeypatch.context() as patched:
        patched.setattr(kind, "_prepare_denoiser_inputs", begin)
        patched.setattr(kind, "_denoising_step", step)
        patched.setattr(theirs.EntropyBoundSampler, "initialize_canvas", canvas)
        patched.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: None)
        patched.setattr(torch, "multinomial", lambda p, num_samples: p.argmax(-1, keepdim=True))
        out = reference.generate(torch.tensor([prompt]), **options)
    return out.sequences[0, len(prompt):].tolist(), steps[0]


@pytest.mark.parametrize("seed", [0, 1])
def test_logits_of_a_canvas(lm: Any, reference: Any, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    tokens = lambda width: torch.randint(3, VOCABULARY, (2, width), generator=draw)
    text, canvas, last = tokens(9), tokens(CANVAS), torch.randn(2, CANVAS, VOCABULARY, generator=draw)
    held = transformers.DynamicCache(config=reference.config.get_text_config(decoder=True))
    with torch.no_grad():
        expected = [reference(input_ids=text, decoder_input_ids=canvas, cache=held).logits,
                    reference(decoder_input_ids=canvas, cache=held, self_conditioning_logits=last).logits]
    ours = lambda x: jnp.asarray(x.numpy())
    cache = lm.model.init_cache(2, 32)
    window = causal(ours(text), jnp.zeros(2, jnp.int32))
    cache = cache.commit(lm.model.apply(lm.params, window, cache).entries, window.positions)
    start = jnp.full(2, 9, jnp.int32)
    hint = CanvasNodes(inside=jnp.ones((2, CANVAS), bool), start=start, expected=jnp.zeros((2, CANVAS, 32)))
    window = bidirectional(ours(canvas), start).replace(hints=(hint,))
    out = lm.model.apply(lm.params, window, cache)
    np.testing.assert_allclose(out.logits(), expected[0], atol=1e-4)
    hint = hint.replace(expected=out.expect(jnp.exp(ours(last.log_softmax(-1)))))
    np.testing.assert_allclose(lm.model.apply(lm.params, window.replace(hints=(hint,)), cache).logits(), expected[1],
                               atol=1e-4)


@pytest.mark.wide
@pytest.mark.parametrize("settings", [
    {"steps": 8, "confidence_threshold": 2.5, "stability_threshold": 2, "temperatures": (1.0, 0.2)},
    {"steps": 7, "confidence_threshold": 2.0, "stability_threshold": 0, "entropy_bound": 1.0},
    {"steps": 10, "confidence_threshold": 1.5, "entropy_bound": 3.0, "temperatures": (0.5, 0.2)}],
    ids=["long", "confident", "early"])
def test_a_batch_has_the_texts_of_transformers(lm: Any, reference: Any, monkeypatch: Any, settings: dict[str, Any]
                                               ) -> None:
    first, last = settings.get("temperatures", (0.8, 0.4))
    options = {"max_new_tokens": 24, "eos_token_id": None, "max_denoising_steps": settings["steps"],
               "confidence_threshold": settings["confidence_threshold"], "t_max": first, "t_min": last,
               "stability_threshold": settings.get("stability_threshold", 1),
               "sampler_config": theirs.EntropyBoundSamplerConfig(settings.get("entropy_bound", 0.1))}
    expected = [generated(reference, p, i, monkeypatch, **options) for i, p in enumerate(PROMPTS)]
    out = dx.generate(lm, PROMPTS, algorithm=dx.algorithms.diffusion_gemma(**settings), max_new_tokens=24,
                      temperature=0.0, eos_token_id=None)
    assert [row.tolist() for row in out.tokens] == [tokens for tokens, _ in expected]
    # A forward for the entries of each canvas beside the steps.
    assert out.stats.rounds.tolist() == [steps + 3 for _, steps in expected]


@pytest.mark.wide
def test_rows_alone_bans_and_log_probabilities(lm: Any) -> None:
    method = dx.algorithms.diffusion_gemma(steps=4, entropy_bound=2.0)
    say = lambda prompts, **more: dx.generate(lm, prompts, algorithm=method, max_new_tokens=12, seed=3, logprobs=2,
                                              eos_token_id=None, **more)
    whole = say(PROMPTS[:2], temperature=1.0)
    alone = say(PROMPTS[1:2], temperature=1.0, request_ids=[1])
    np.testing.assert_array_equal(whole.tokens[1], alone.tokens[0])
    assert np.isfinite(whole.logprobs.raw).all() and (whole.logprobs.raw <= 0).all()
    # Without a method, a model without a mask token has this sampler.
    assert dx.generate(lm, PROMPTS[:1], max_new_tokens=4).tokens[0].size <= 4
    banned = list(range(3, 60))
    for row in say(PROMPTS[:2], temperature=1.0, suppress_tokens=banned).tokens:
        assert not set(row.tolist()) & set(banned)


@pytest.mark.parametrize(("entries", "message"), [
    ({"attention_k_eq_v": False}, "attention_k_eq_v: got False, a diffusion_gemma_text model has True"),
    ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention: got 'all', a decoder takes 'vision'"),
])
def test_other_entries_are_refused(entries: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_config({"model_type": "diffusion_gemma_text", **TEXT, **entries})


def test_defaults_are_those_of_transformers() -> None:
    entries = transformers.AutoConfig.for_model("diffusion_gemma").to_dict()
    entries["text_config"] |= {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 24}
    short = {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 24}
    assert read_config({"model_type": "diffusion_gemma", "text_config": short}) == read_config(entries)
    assert read_diffusion({"model_type": "diffusion_gemma", "text_config": short}) == Diffusion(
        None, attention="causal-prefix", block=256, conditioning=2304)


def test_what_needs_a_mask_token_is_refused(lm: Any) -> None:
    with pytest.raises(ValueError, match="mask: got None, takes the id of the mask token"):
        dx.generate(lm, PROMPTS[:1], algorithm="llada", max_new_tokens=4)
    with pytest.raises(ValueError, match="no mask token"):
        dx.infill(lm, [[5, 6], 4, [7]])
