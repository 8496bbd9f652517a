"""Hunyuan Hy4: layouts of files, positions of images with ends of lines, sinks of latents, and what is refused. Logits,
drafts and trees of small cases are in `test_families`, shares of the residual streams in `test_hyper_connections`."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

import decodax as dx
from decodax.core.window import causal
from decodax.models import Transformer
from decodax.models.blocks.options import OutputGate
from decodax.models.families import read_config
from decodax.models.images import _places, _Sight
from tests.models.families.tiny_seeing import HY4_EYE
from tests.models.tiny import COMMON, HY4, saved

CONFIG: dict[str, Any] = {"model_type": "hy_v4", **COMMON, **HY4}

LAYOUTS: dict[str, dict[str, str]] = {
    # what transformers 5.24 saves gives MLPs the name of attention's gates, and puts `hc_pre` elsewhere
    "gates of attention alone": {r"mlp\.(shared_experts\.)?linear_gate": r"mlp.\1gate_proj"},
    "prefixes inside": {r"hc_pre\.(hc_\w+_layer)\.": r"\1.hc_pre.", r"hc_pre\.hc_head\.": "hc_head.hc_pre."},
    "no prefixes": {r"hc_pre\.": "", r"mlp\.linear_gate": "mlp.gate_proj",
                    r"shared_experts\.linear_gate": "shared_experts.gate_proj"},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hy4")
    saved("hy4", root)
    return root


@pytest.mark.wide(but=("prefixes inside",))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_that_transformers_loads_are_the_same(layout: str, home: Path, tmp_path: Path) -> None:
    def renamed(name: str) -> str:
        for pattern, new in LAYOUTS[layout].items():
            name = re.sub(pattern, new, name)
        return name

    tensors = load_file(home / "model.safetensors")
    found = {renamed(name): x for name, x in tensors.items()}
    assert found.keys() != tensors.keys()
    more = {"model.mtp_layers.0.eh_proj.weight": np.zeros((32, 64), np.float32)}
    save_file(found | more, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((home / "config.json").read_text())
    theirs, same = (transformers.AutoModelForCausalLM.from_pretrained(root).state_dict() for root in (tmp_path, home))
    for name, x in same.items():
        torch.testing.assert_close(theirs[name], x, rtol=0, atol=0)
    with pytest.warns(UserWarning, match="skips 1 tensors of layers that predict further tokens, such as model.mtp_la"):
        lm = dx.load(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, lm.params, dx.load(home).params)


@pytest.mark.parametrize("kind", ["hy_v4", "hy_v4_vl_text"])
def test_missing_entries_have_the_values_of_transformers(kind: str) -> None:
    theirs = transformers.AutoConfig.for_model(kind).to_dict()
    rope = {key: value for key, value in theirs["rope_parameters"].items() if key != "mrope_section"}
    found = read_config({"model_type": kind})
    assert found == read_config({**theirs, "rope_parameters": rope})
    assert [layer.latent.indexer.shared for layer in found.layers[:6]] == [False, False, True, True, True, False]
    if kind == "hy_v4_vl_text":
        assert found == read_config({"model_type": "hy_v4_vl", "text_config": {}, "vision_config": {}})
        assert found == read_config(json.loads(json.dumps(
            {"model_type": "hy_v4_vl", "text_config": theirs, "vision_config": {}})))


@pytest.mark.parametrize(("entries", "message"), [
    ({"hidden_act": "gelu"}, "hidden_act: got 'gelu', supported is 'silu'"),
    ({"swiglu_limit": 0}, "swiglu_limit: got 0, takes a number above 0"),
    ({"q_lora_rank": None}, "q_lora_rank: got None, takes the width of the latent of queries"),
    ({"layer_types": ["full_attention"] * 3}, "layer_types: got .*, takes 'indexed_attention' for every layer"),
    ({"indexer_types": ["shared", "full", "full"]}, "indexer_types, index_topk_pattern: got .* 'full' for the first"),
    ({"index_head_dim": 6}, "index_head_dim: got 6, takes at least qk_rope_head_dim = 8"),
    ({"mlp_layer_types": ["dense"]}, "mlp_layer_types: got 1 entries for num_hidden_layers = 3"),
    ({"hc_mult": 0}, "hc_mult: got 0, takes a whole number from 1"),
    ({"hc_magnitude": "2"}, "hc_magnitude: got '2', takes a number"),
    ({"scoring_func": "softmax"}, "scoring_func: got 'softmax', supported is 'sigmoid'"),
    ({"mlp_bias": True}, "mlp_bias: got True, supported is False"),
])
def test_other_entries_are_refused(entries: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_config({**CONFIG, **entries})


def test_rows_and_frames_of_images_have_the_positions_of_transformers() -> None:
    """The prompt has an image of one frame, and after it an image of two frames."""
    whole = transformers.AutoConfig.for_model("hy_v4_vl", text_config={
        **COMMON, **HY4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
        vision_config=HY4_EYE)
    model = transformers.AutoModelForImageTextToText.from_config(whole).model
    grids, sizes = [(1, 4, 6), (2, 8, 4)], [2 * 4, 2 * 4 * 3]
    seen, parts = [0] * 3, []
    for size in sizes:
        parts.append(np.arange(len(seen), len(seen) + size))
        seen += [1] * size + [0] * 2
    kinds = torch.tensor([seen])
    want, more = model.get_rope_index(torch.zeros_like(kinds), kinds, image_grid_thw=torch.tensor(grids))
    found, offset = _places(len(seen), 64, parts, grids, _Sight(96, (0, 1, 2, 0), 2, 0, False, True), 0)
    np.testing.assert_array_equal(found[:len(seen)], want[:, 0].T.numpy())
    assert offset == int(more)
    with pytest.raises(ValueError, match=r"grids: got \(1, 4, 6\) patches for an image of 6 tokens in prompt 0, takes 4"
                                         " for each token but the last of a row"):
        _places(9, 16, [np.arange(6)], grids[:1], _Sight(96, (0, 1, 2, 0), 2, 0, False, True), 0)


@pytest.mark.wide
def test_sinks_and_gates_of_channels_take_latents_without_an_indexer() -> None:
    """In prompts, which are expanded, in windows, which are not, and without a cache."""
    found = read_config({**CONFIG, "vocab_size": 61})
    gates = OutputGate("channels"), OutputGate("heads"), None
    layers = tuple(dataclasses.replace(layer, latent=dataclasses.replace(layer.latent, indexer=None), output_gate=gate)
                   for layer, gate in zip(found.layers, gates, strict=True))
    model, draw = Transformer(dataclasses.replace(found, layers=layers)), np.random.default_rng(0)
    params = jax.tree.map(lambda x: jnp.asarray(draw.normal(x.ndim == 1, 0.2, x.shape), jnp.float32),
                          model.abstract_params())
    tokens, start = draw.integers(0, 61, (2, 12)), jnp.zeros(2, jnp.int32)
    full = model.forward(params, tokens)

    @jax.jit(static_argnums=2)
    def read(window: Any, cache: Any, is_prefill: bool) -> Any:
        out = model.apply(params, window.replace(is_prefill=is_prefill), cache)
        return out.logits(), cache.commit(out.entries, window.positions + 0 * out.logits().argmax(-1))

    for expanded in (True, False):
        first, after = read(causal(tokens[:, :6], start), model.init_cache(2, 16), expanded)
        second, _ = read(causal(tokens[:, 6:], start + 6), after, expanded)
        np.testing.assert_allclose(jnp.concatenate([first, second], 1), full, atol=2e-5)
    bare = jax.tree_util.tree_map_with_path(
        lambda path, x: x * 0 - 99 if jax.tree_util.keystr(path).endswith("['sinks']") else x, params)
    assert float(jnp.abs(model.forward(bare, tokens) - full).max()) > 0.1
