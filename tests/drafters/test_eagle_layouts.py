"""EAGLE-3 in the layouts of its authors, SpecForge and NVIDIA: the same weights compute the same logits as in that of
speculators, which `test_published` holds against its code."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from decodax.io.drafters import load_drafter
from decodax.io.drafters.eagle import read_eagle3
from decodax.io.drafters.tensors import Tensors
from decodax.io.files import CheckpointError
from decodax.train.drafting.unrolled import unrolled
from tests.drafters import given
from tests.drafters.test_published import CASES, REFERENCE, Table, eagle3

V, FEW = REFERENCE["vocabulary"], 10
IDS = np.arange(FEW) * 2 + 1
SHAPE = dict(hidden_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=24,
             num_hidden_layers=1, vocab_size=V, max_position_embeddings=64, rms_norm_eps=1e-6, hidden_act="silu",
             attention_bias=False, mlp_bias=False, rope_theta=10000.0, rope_scaling=None, model_type="llama",
             tie_word_embeddings=False)
AUTHORS = SHAPE | dict(architectures=["LlamaForCausalLM"], draft_vocab_size=FEW, bos_token_id=1, eos_token_id=2,
                       pad_token_id=0, initializer_range=0.02, pretraining_tp=1, torch_dtype="float16", use_cache=True)
"""The `config.json` that the authors publish: no entry names layers. Their files hold no embeddings."""
SPECFORGE = SHAPE | dict(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=FEW, sliding_window=None,
                         use_sliding_window=False, max_window_layers=48, eagle_config=dict(
                             eagle_aux_hidden_state_layer_ids=[0, 1, 3], use_aux_hidden_state=True))
NVIDIA = SHAPE | dict(rope_theta=None, rope_scaling=dict(rope_type="default", rope_theta=10000.0),
                      architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=FEW, pretraining_tp=1,
                      eagle_config=dict(
                          eagle_aux_hidden_state_layer_ids=[0, 1, 3], use_aux_hidden_state=True,
                          use_input_layernorm_in_first_layer=True, use_last_layernorm=True, use_mtp_layernorm=False,
                          next_layer_regular=True, parallel_draft_step=1, parallel_draft_heads_num_layers=1))
"""The `config.json` that `hf_spec_export.py` of NVIDIA/Model-Optimizer 0371364 writes."""


def weights(name="eagle3 of a smaller vocabulary", midlayer=True, embeddings=True):
    """The tensors of a case, the layer under the authors' name or that of others."""
    held = given.tensors(CASES[name]["shapes"])
    if not embeddings:
        held.pop("embed_tokens.weight")
    return {key.replace("layers.0.", "midlayer.") if midlayer else key: x for key, x in held.items()}


MAPS = {"d2t": IDS - np.arange(FEW), "t2d": np.isin(np.arange(V), IDS)}


def pickled(path, config, tensors):
    """A directory with a file of PyTorch."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    torch.save({name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in tensors.items()},
               path / "pytorch_model.bin")
    return path


def written(path, config, tensors):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path


def logits(drafter, embeddings=None):
    """The logits after each pair of a text and the tokens drafted after it."""
    features, ids = given.inputs(REFERENCE["positions"], REFERENCE["features"], V)
    found = unrolled(Table(), drafter.head, drafter.params, embeddings, jnp.asarray(np.pad(ids, ((0, 0), (1, 0)))),
                     jnp.pad(features, ((0, 0), (0, 1), (0, 0))), REFERENCE["steps"])
    return [np.asarray(each[0]) for each in found]


def assert_equal(found, wanted, embeddings=None):
    for got, other in zip(logits(found, embeddings), logits(wanted), strict=True):
        np.testing.assert_allclose(got, other, atol=1e-6)


@pytest.fixture(scope="module")
def wanted(tmp_path_factory):
    return load_drafter(eagle3(tmp_path_factory.mktemp("speculators"), "eagle3 of a smaller vocabulary"))


@pytest.mark.wide
def test_the_authors_files_compute_what_speculators_does(wanted, tmp_path):
    held = weights(embeddings=False) | MAPS
    path = pickled(tmp_path / "a", AUTHORS, held)
    with pytest.raises(CheckpointError, match="names no layers of the target; takes load_drafter"):
        load_drafter(path)
    (path / "config.json").write_text(json.dumps(AUTHORS | dict(eagle_aux_hidden_state_layer_ids=[1, 2, 4])))
    found = load_drafter(path, layer_ids="inputs")
    assert found.system == "eagle-3" and found.head.taps == (0, 1, 3) and not found.head.own_table
    np.testing.assert_array_equal(found.ids, wanted.ids)
    assert_equal(found, wanted, jnp.asarray(given.tensor("embed_tokens.weight", (V, 16))))
    # without an entry, the inputs of the layers 2, depth / 2 and depth - 3
    assert read_eagle3(Tensors(held, AUTHORS), "float32", depth=8)[0].taps == (1, 3, 4)
    safe = load_drafter(written(tmp_path / "b", AUTHORS | dict(eagle_aux_hidden_state_layer_ids=[1, 2, 4]), held),
                        layer_ids="inputs")
    assert safe.head == found.head


@pytest.mark.wide
def test_specforges_files_compute_what_speculators_does(wanted, tmp_path):
    found = load_drafter(written(tmp_path / "a", SPECFORGE, weights() | MAPS))
    assert found.head == wanted.head
    assert_equal(found, wanted)
    np.testing.assert_array_equal(found.ids, wanted.ids)


@pytest.mark.wide
def test_specforges_files_of_eagle_31_say_what_is_fed_back(tmp_path):
    config = SPECFORGE | dict(draft_vocab_size=V, fc_norm=True, norm_output=True)
    path = written(tmp_path / "a", config, weights("eagle3.1"))
    with pytest.raises(CheckpointError, match="norm_output is true, which producers mean differently"):
        load_drafter(path)
    (tmp_path / "b").mkdir()
    other = load_drafter(eagle3(tmp_path / "b", "eagle3.1"))
    assert_equal(load_drafter(path, feeds_back="after norm"), other)
    lacking = {name: x for name, x in weights("eagle3.1").items() if "fc_norm" not in name}
    with pytest.raises(CheckpointError, match=r"fc_norm: got True, and lacks tensor fc_norm\.0\.weight"):
        load_drafter(written(tmp_path / "c", config, lacking), feeds_back="after norm")


@pytest.mark.wide
def test_nvidias_files_compute_what_speculators_does(wanted, tmp_path):
    """Its draft vocabulary is in the order of frequency, and there is no `t2d`."""
    order = np.random.default_rng(0).permutation(FEW)
    held = weights(midlayer=False, embeddings=False)
    held |= {"lm_head.weight": held["lm_head.weight"][order], "d2t": IDS[order] - np.arange(FEW)}
    found = load_drafter(written(tmp_path / "a", NVIDIA, held))
    assert found.head.taps == (0, 1, 3) and not found.head.own_table
    np.testing.assert_array_equal(found.ids, IDS[order])
    embeddings = jnp.asarray(given.tensor("embed_tokens.weight", (V, 16)))
    for got, other in zip(logits(found, embeddings), logits(wanted), strict=True):
        np.testing.assert_allclose(got, other[..., order], atol=1e-6)
    for value, message in ((np.full(FEW, 3) - np.arange(FEW), "d2t does not name 10 different tokens of 24"),
                           (np.arange(FEW) + 10, "d2t does not name 10 different tokens of 24")):
        with pytest.raises(CheckpointError, match=message):
            load_drafter(written(tmp_path / f"b{value[0]}", NVIDIA, held | {"d2t": value}))


@pytest.mark.parametrize(("changes", "message"), [
    (dict(use_aux_hidden_state=False), "eagle_config: use_aux_hidden_state: got False, a head of EAGLE-3 has True"),
    (dict(use_mtp_layernorm=True), "eagle_config: use_mtp_layernorm: got True, a head of EAGLE-3 has False"),
    (dict(parallel_draft_step=4), "eagle_config: parallel_draft_step: got 4, a head of EAGLE-3 has 1"),
    (dict(use_last_layernorm=False), "eagle_config: use_last_layernorm: got False, a head of EAGLE-3 has True"),
    (dict(other=2), "eagle_config: other: got 2, a head of EAGLE-3 has no such entry")])
def test_entries_that_change_the_network_are_refused(changes, message, tmp_path):
    path = written(tmp_path / "a", NVIDIA | dict(eagle_config=NVIDIA["eagle_config"] | changes),
                   weights(midlayer=False) | MAPS)
    with pytest.raises(CheckpointError, match=message):
        load_drafter(path)


def test_windows_without_a_length_or_layers_are_refused(tmp_path):
    held = weights() | MAPS
    for i, (more, message) in enumerate((
            (dict(layer_types=["sliding_attention"]), "takes sliding_window, the number of tokens"),
            (dict(use_sliding_window=True, sliding_window=8), "takes layer_types, which say of which layers"),
            (dict(use_sliding_window=None, sliding_window=8), "sliding_window: got 8, takes layer_types"))):
        with pytest.raises(CheckpointError, match=message):
            load_drafter(written(tmp_path / str(i), SPECFORGE | more, held))
