"""GLM-5.3 Flash beyond what every family has to do: files of either kind, caches, and options that do not fit."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from safetensors.numpy import load_file, save_file

import decodax as dx
from decodax.io.load import LM
from decodax.models import Transformer
from decodax.models.blocks.options import Layer, OutputGate
from decodax.models.compressed.options import Pooling
from decodax.models.families import read_config
from decodax.models.latent.shape import Indexer, Latent
from decodax.models.recurrent.options import GatedDelta, Ssd
from decodax.models.residual.hyper_connections import HyperEnds
from decodax.models.residual.options import HyperConnections
from tests.models.families.tiny_seeing import GLM5_NEXT
from tests.models.tiny import CASES, COMMON, saved

CONFIG = {"model_type": "glm5_next_text", **COMMON, **GLM5_NEXT}
PROMPTS = [[5, 6, 7, 5, 6, 7, 5], [9], [3, 4, 3, 4, 3, 4, 3, 4, 3, 4, 3, 4]]
INDEXER = Indexer(2, 8, 6)
LATENT = Latent(8, 4, 8, indexer=INDEXER)


def test_defaults_are_those_of_transformers() -> None:
    theirs = transformers.AutoConfig.for_model("glm5_next").to_dict()
    found = read_config(theirs)
    assert found == read_config({"model_type": "glm5_next_text"}) == read_config({"model_type": "glm5_next"})
    assert found.attending == tuple(range(3, 45, 4))
    flat = {key: value for key, value in CONFIG.items() if key != "model_type"}
    whole = {"model_type": "glm5_next", "vision_config": {}, "tie_word_embeddings": False}
    assert read_config({**whole, **flat}) == read_config({**whole, "text_config": flat}) == read_config(CONFIG)


def test_layers_that_predict_further_tokens_are_skipped(tmp_path: Path) -> None:
    saved("glm5-next", tmp_path)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    more = {"model.language_model.layers.5.eh_proj.weight": np.zeros((32, 64), np.float32),
            "model.language_model.layers.5.shared_head.norm.weight": np.zeros(32, np.float32)}
    save_file({**load_file(file), **more}, file)
    entries = json.loads(config.read_text())
    entries["text_config"]["num_nextn_predict_layers"] = 1
    config.write_text(json.dumps(entries))
    with pytest.warns(UserWarning, match="skips 2 tensors of layers that predict further tokens"):
        dx.load(tmp_path)


@pytest.mark.wide
@pytest.mark.parametrize("name", ["glm5-next", "qwen4"])
def test_pages_give_the_tokens_of_the_default_cache_and_others_are_refused(name: str, tmp_path: Path) -> None:
    saved(name, tmp_path)
    lm = dx.load(tmp_path)
    options: dict[str, Any] = dict(max_new_tokens=9, eos_token_id=[])
    plain = dx.generate(lm, PROMPTS, **options).tokens
    assert dx.generate(lm, PROMPTS, cache="paged:page=4,pages=64", **options).tokens.tolist() == plain.tolist()
    with pytest.raises(ValueError, match="chooses some of them, which takes the default cache or paged"):
        dx.generate(lm, PROMPTS, cache="snapkv:budget=64", **options)


def test_streams_are_joined_by_their_mean() -> None:
    c = dataclasses.replace(read_config(CONFIG), streams=HyperConnections(3, joined="mean"))
    ends = HyperEnds(c, nnx.Rngs(0))
    streams = jax.random.normal(jax.random.key(0), (2, 3, 3, 32))
    np.testing.assert_allclose(ends.join(streams), streams.mean(2), atol=1e-6)
    assert not jax.tree.leaves(nnx.state(ends))


@pytest.mark.wide
def test_sinks_and_gates_of_channels_go_with_chosen_groups() -> None:
    """Sinks with low scores change nothing, others the logits, and chunks and drafts give the tokens of one forward."""
    plain = read_config({**CONFIG, "num_hidden_layers": 3, "layer_types": CONFIG["layer_types"][:3]})
    gated, sunk = (dataclasses.replace(plain, layers=tuple(
        x if x.latent is None else dataclasses.replace(x, output_gate=OutputGate("channels"), sinks=sinks)
        for x in plain.layers)) for sinks in (False, True))
    model, tokens = Transformer(sunk), jax.random.randint(jax.random.key(1), (1, 20), 3, 97)
    params = jax.tree.map(lambda x: 6 * x if x.ndim > 1 else x, model.init_params(jax.random.key(0)))

    def with_sinks(score: float | None) -> Any:
        make = lambda part: {key: jnp.full_like(x, score) if key == "sinks" else x for key, x in part.items()
                             if key != "sinks" or score is not None}
        return {**params, "layers": {i: {**x, "attn": make(x["attn"])} for i, x in params["layers"].items()}}

    want = Transformer(gated).forward(with_sinks(None), tokens)
    np.testing.assert_allclose(model.forward(with_sinks(-1e4), tokens), want, atol=1e-5)
    assert np.abs(model.forward(with_sinks(2.0), tokens) - want).max() > 1e-2
    lm = LM(model=model, params=with_sinks(2.0), vocab_size=97)
    run = lambda **options: dx.generate(lm, PROMPTS, max_new_tokens=9, eos_token_id=[], **options).tokens.tolist()
    made = run()
    assert run(chunk=5) == made and run(algorithm="prompt-lookup:length=3") == made
    text = jnp.asarray([PROMPTS[0] + made[0]])
    assert model.forward(lm.params, text)[0, len(PROMPTS[0]) - 1:-1].argmax(-1).tolist() == made[0]


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Layer(latent=LATENT, recurrent=Pooling(4, 8), beside=True), "a top that is a multiple"),
    (lambda: Layer(latent=LATENT, recurrent=Pooling(3, 7), beside=True), "as wide as the pooled keys"),
    (lambda: Layer(latent=LATENT, recurrent=Pooling(3, 8, True), beside=True), "no overlap"),
    (lambda: Layer(latent=dataclasses.replace(LATENT, indexer=dataclasses.replace(INDEXER, shared=True)),
                   recurrent=Pooling(3, 8), beside=True), "one that is not shared"),
    (lambda: Layer(latent=LATENT, recurrent=Pooling(3, 8)), "recurrent: got a Pooling, takes beside"),
    (lambda: Layer(latent=LATENT, recurrent=GatedDelta(2, 2, 4, 4), beside=True), "latent: takes a rope"),
    (lambda: Layer(recurrent=Pooling(3, 8), beside=True), "recurrent: got a Pooling, takes beside"),
    (lambda: dataclasses.replace(read_config(CONFIG), layers=(
        Layer(recurrent=Ssd(2, 4)), Layer(latent=LATENT, recurrent=Pooling(3, 8), beside=True))),
     "got blocks of several kinds"),
])
def test_options_that_do_not_fit_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.wide
def test_long_texts_with_groups_of_the_released_size_equal_transformers(monkeypatch: pytest.MonkeyPatch,
                                                                        tmp_path: Path) -> None:
    """Chunks that end within groups and at their ends, and queries that attend to a part of the text."""
    options = {**GLM5_NEXT, "index_kpool": 16, "index_topk": 64, "max_position_embeddings": 512}
    monkeypatch.setitem(CASES, "long", ("glm5_next_text", options, None))
    reference = saved("long", tmp_path)
    lm, tokens = dx.load(tmp_path), np.random.default_rng(0).integers(3, 97, (1, 200)).astype(np.int32)
    with torch.no_grad():
        want = reference(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    np.testing.assert_allclose(jax.jit(lm.model.forward)(lm.params, jnp.asarray(tokens)), want, atol=1e-4)
    made = dx.generate(lm, [tokens[0, :187].tolist()], max_new_tokens=13, eos_token_id=[], chunk=50).tokens
    reference.generation_config.eos_token_id = None
    ids = torch.tensor(tokens[:, :187], dtype=torch.long)
    theirs = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=13, do_sample=False,
                                pad_token_id=0)
    assert made[0].tolist() == theirs[0, 187:].tolist()
