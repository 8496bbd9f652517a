"""Dual chunk attention, against the authors' code and with everything that decodes."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.algorithms.speculative import Rejection, Speculative, drafts
from decodax.io.load import LM
from decodax.io.saving import save_model
from decodax.models import Chunks, Rope, Transformer, dual_chunk, llama
from decodax.models.dual_chunk import with_dual_chunk
from decodax.models.families import read_config
from decodax.models.names import flatten
from decodax.pallas_kernels.window_attention import FixedBias, quantized, window_attention
from tests.conformance.checkpoints import CHECKPOINTS, digest, weights, write
from tests.matrix import often

FOUND = json.loads((Path(__file__).parent / "dual_chunk.json").read_text())["cases"]
BASE = llama(vocab=16, width=16, layers=2, heads=4, kv_heads=2, mlp=24, context=64)
PROMPTS = [np.random.default_rng(i).integers(0, 16, n).tolist() for i, n in enumerate((41, 26, 5))]


@functools.cache
def lm(chunked: bool = True) -> LM:
    model = Transformer(BASE)
    params = jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, model.init_params(jax.random.key(3)))
    whole = LM(model=model, params=params, vocab_size=16)
    return with_dual_chunk(whole, 12, 4) if chunked else whole


@pytest.mark.wide
@pytest.mark.parametrize("case", often([0], range(len(FOUND))))
def test_tokens_are_the_authors(case: int, tmp_path: Path) -> None:
    x = FOUND[case]
    assert digest(x["model"]) == x["digest"], "the checkpoint is not the one the case was made with"
    own = dataclasses.replace(with_dual_chunk(dx.load(write(x["model"], tmp_path)), x["size"], x["local"]),
                              generation_config={})
    logits = own.model.forward(own.params, jnp.asarray([x["prompt"]]))[0]
    np.testing.assert_allclose(jax.nn.logsumexp(logits, -1), x["logsumexp"], atol=2e-3)
    # beside a shorter prompt, whose chunks end elsewhere
    out = dx.generate(own, [x["prompt"], x["prompt"][:7]], max_new_tokens=len(x["tokens"]), eos_token_id=[])
    assert out.row(0).tolist() == x["tokens"]


@pytest.mark.wide(but=("qwen3",))
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_a_released_configuration_is_read(kind: str, tmp_path: Path) -> None:
    """The entry of Qwen2.5-1M and Qwen3-2507. The released names of weights are those of the family."""
    entry = {"chunk_size": 12, "local_size": 4, "original_max_position_embeddings": 256}
    config = {**CHECKPOINTS["dream-causal"].config, "model_type": kind, "head_dim": 8}
    own = read_config({**config, "dual_chunk_attention_config": entry})
    assert {layer.rope.chunks for layer in own.layers if layer.rope} == {Chunks(12, 4, 256)}
    if kind == "qwen2":
        shapes_, found = Transformer(own).abstract_params(), weights("dream-causal")
        tree = jax.tree.unflatten(jax.tree.structure(shapes_), [found[path] for path in flatten(shapes_)])
        save_model(tmp_path / "1m", Transformer(own), tree, config={**config, "dual_chunk_attention_config": entry})
        case = next(x for x in FOUND if x["model"] == "dream-causal")
        lm = dataclasses.replace(dx.load(tmp_path / "1m"), generation_config={})
        out = dx.generate(lm, [case["prompt"]], max_new_tokens=len(case["tokens"]), eos_token_id=[])
        assert out.row(0).tolist() == case["tokens"]


def test_a_text_within_one_chunk_is_read_as_without_chunks() -> None:
    tokens = jnp.asarray([PROMPTS[0]])
    plain, chunked = (each.model.forward(each.params, tokens)[0] for each in (lm(False), lm()))
    assert (plain[:8] == chunked[:8]).all()
    # distances below `local` are true across the border, where all that is before lies nearer than that
    np.testing.assert_allclose(plain[8:13], chunked[8:13], atol=1e-4)
    assert (jnp.abs(plain[13:] - chunked[13:]).max(-1) > 1e-2).all()


@pytest.mark.wide
def test_rejection_beams_samples_and_streams() -> None:
    dx.generate(lm(), PROMPTS, max_new_tokens=20, temperature=1.0, algorithm=Speculative(
        drafts.DraftModel(lm()), Rejection()))
    found = dx.generate(lm(), PROMPTS, max_new_tokens=20, algorithm=dx.algorithms.beam_search(3), eos_token_id=[])
    alone = [dx.generate(lm(), [p], max_new_tokens=20, algorithm=dx.algorithms.beam_search(3),
                         eos_token_id=[]) for p in PROMPTS]
    assert found.tokens.tolist() == [one.tokens[0].tolist() for one in alone]
    some = dx.generate(lm(), PROMPTS[:1], max_new_tokens=20, temperature=1.0, num_samples=3, seed=2)
    assert some.tokens[2].tolist() == dx.generate(lm(), PROMPTS[:1], max_new_tokens=20, temperature=1.0, num_samples=3,
                                                  seed=2, cache="paged").tokens[2].tolist()


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["paged:page=4", "knorm:budget=64", "sink-window:budget=64", "lagkv:budget=64"])
def test_caches_that_keep_all_change_nothing(kind: str) -> None:
    one = lambda cache: dx.generate(lm(), PROMPTS, max_new_tokens=20, cache=cache, eos_token_id=[])
    plain, kept = one(None), one(kind)
    assert plain.tokens.tolist() == kept.tokens.tolist()


@pytest.mark.parametrize(("kind", "message"), [
    ("freqkv", "freqkv takes a model without biases"), ("streaming-llm", "streaming-llm takes a model without biases"),
    ("snapkv:budget=40", "snapkv takes a model without biases")])
def test_a_cache_that_cannot_serve_says_so(kind: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^cache: {message} of its attention scores, which layer 0"):
        dx.generate(lm(), PROMPTS, max_new_tokens=20, cache=kind)


@pytest.mark.wide
def test_the_factor_is_that_of_the_length() -> None:
    """vLLM multiplies queries and keys by `0.1 ln(length / trained) + 1`."""
    rope = Rope(8, chunks=Chunks(12, 4, trained=32))
    for context, factor in ((None, 1.0), (32, 1.0), (96, 0.1 * np.log(3) + 1)):
        cos, sin = rope.table(jnp.arange(40)[None], context)
        np.testing.assert_allclose(cos ** 2 + sin ** 2, factor ** 2, rtol=1e-6)
    config = dataclasses.replace(BASE, layers=(dataclasses.replace(BASE.layers[0], rope=dataclasses.replace(
        BASE.layers[0].rope, chunks=Chunks(12, 4, trained=32))),) * 2)
    short, long = (dataclasses.replace(lm(), model=Transformer(config, context=context)) for context in (None, 80))
    with pytest.raises(ValueError, match=r"prompts\[\d\]: the prompt's tokens are 41, the model has 32 positions"):
        dx.generate(short, PROMPTS, max_new_tokens=24)
    assert dx.generate(long, PROMPTS, max_new_tokens=24).lengths.max() == 24


@pytest.mark.wide
def test_no_length_is_beyond_its_training(recwarn: pytest.WarningsRecorder) -> None:
    dx.generate(lm(), PROMPTS, max_new_tokens=40, eos_token_id=[])
    assert not [w for w in recwarn if "was made for" in str(w.message)]


def test_bad_arguments_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^chunks: got a size of 4 and a local size of 4"):
        with_dual_chunk(lm(False), 4, 4)
    with pytest.raises(ValueError, match=r"^chunks: dual chunk attention cannot be combined with a sliding window"):
        dual_chunk(dataclasses.replace(BASE, layers=tuple(dataclasses.replace(x, sliding=5) for x in BASE.layers)))
    with pytest.raises(ValueError, match=r"^config: takes at least one layer with a rotary embedding"):
        dual_chunk(dataclasses.replace(BASE, layers=tuple(dataclasses.replace(x, rope=None) for x in BASE.layers)))
    with pytest.raises(ValueError, match=r"^model: got a Transformer that fills masks"):
        with_dual_chunk(dx.load("tasks-diffusion"))
    with pytest.raises(ValueError, match=r"^dual_chunk_attention_config: got one, takes none for a masked-diff"):
        read_config({**CHECKPOINTS["sdar"].config, "dual_chunk_attention_config": {"chunk_size": 12}})
    with pytest.raises(ValueError, match=r"^dual_chunk_attention_config.chunk_size: got 'x', takes a whole number"):
        read_config({**CHECKPOINTS["dream-causal"].config, "dual_chunk_attention_config": {"chunk_size": "x"}})
    with pytest.raises(ValueError, match=r"^config: a model with dual chunk attention is not a Llama"):
        save_model("nowhere", lm().model, lm().params)


@dataclasses.dataclass(frozen=True)
class Doubled(FixedBias):
    """Adds each score once more."""

    scale: float

    def __call__(self, q: jax.Array, positions: jax.Array) -> Any:
        def added(k: jax.Array, where: jax.Array) -> jax.Array:
            B, H, W, d = q.shape
            s = jnp.einsum("bgqd,bgkd->bgqk", q.reshape(B, k.shape[1], -1, d), k.astype(q.dtype))
            return s.reshape(B, H, W, -1) * self.scale

        return added


@pytest.mark.wide
def test_a_bias_sees_the_keys_that_scores_are_of() -> None:
    """In a cache of integers too, where a key is its codes times its scale."""
    draw = lambda *shape, seed: jax.random.normal(jax.random.key(seed), shape)
    q, k, v, cache = (draw(2, 3, 4, 8, seed=0), draw(2, 3, 2, 8, seed=1), draw(2, 3, 2, 8, seed=2),
                      draw(2, 2, 128, 16, seed=3))
    codes, scales = quantized(cache, 8)
    mask, at, length = jnp.tril(jnp.ones((1, 3, 3), bool)), jnp.array([[90, 91, 92], [7, 8, 9]]), jnp.array([90, 7])
    for held, more in ((cache, {}), (codes, {"scales": scales})):
        twice = window_attention(q, k, v, mask, at, held, length, scale=0.6, **more)
        added = window_attention(q, k, v, mask, at, held, length, scale=0.3, bias=Doubled(0.3), **more)
        np.testing.assert_allclose(added, twice, atol=1e-5)
